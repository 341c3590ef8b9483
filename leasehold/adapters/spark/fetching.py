"""Sends planned rows to Spark's tasks.

Tasks either fetch their rows over TCP from the process that planned the batch, or contain the rows themselves (embedded
rows).

`RowTransport` makes a partition for each task, and `read_task_rows` returns the rows of a partition on an executor.

Rule 1: every request must carry the query's token, which is compared in constant time. The token keeps out other
clients that can reach the port. It does not encrypt: anyone who can read the network can read the rows. The same is
true of embedded rows.
Rule 2: rows take up a bounded part of the process's memory. All other rows are kept in unnamed temporary files, which
disappear when the process ends, even if it is killed.
Rule 3: until a batch is discarded, every request for its rows returns the same rows.
Rule 4: if a task does not receive all its rows, it fails, so that Spark runs it again. A final byte marks the end of
the rows.
"""

import logging
import mmap
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from hmac import compare_digest
from secrets import token_bytes
from socketserver import BaseRequestHandler, ThreadingTCPServer
from struct import Struct
from typing import IO

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
from attrs import field, frozen
from pyspark.sql.datasource import InputPartition

from leasehold.adapters.spark.options import Address
from leasehold.adapters.threads import spawn
from leasehold.stores.printable import error_summary, limited_error_text, make_safe_logger, printable

log = make_safe_logger(logging.getLogger("leasehold.spark"))

TOKEN_BYTES = 32
REQUEST_FORMAT = Struct(f">{TOKEN_BYTES}sQQ")
"""The format of a request: the query's token, the batch's number and the task's index in the batch."""
FOUND_BYTE, NOT_FOUND_BYTE, COMPLETE_BYTE = b"H", b"G", b"A"
"""The status bytes of a response. FOUND precedes the rows, COMPLETE follows them, and NOT_FOUND means that the rows
were discarded."""
REQUEST_SECONDS = 10.0
"""How long a peer may take to send its request, in seconds."""
NETWORK_SECONDS = 120.0
"""How long a task waits for the next bytes, in seconds. This is also Spark's own default (`spark.network.timeout`)."""
PORT_ATTEMPTS = 16
"""How many ports to try, starting with the configured one. Each query of a driver needs its own port."""
SLICE_BYTES = 4 << 20
"""The approximate size of one Arrow batch."""


@frozen
class FetchedRows(InputPartition):
    """A reference to the rows of one task of a batch. The task fetches these rows from the driver."""

    host: str
    port: int
    token: bytes = field(repr=False)
    number: int
    task: int


@frozen
class EmbeddedRows(InputPartition):
    """The rows of one task of a batch. The rows are embedded in the task."""

    data: bytes

    def __repr__(self) -> str:
        return f"EmbeddedRows({len(self.data)} bytes)"


Rows = FetchedRows | EmbeddedRows


class RowServer:
    """Keeps rows and sends them to tasks until it is closed. Raises OSError if no port is free.

    Args:
        address: The address to listen on, and the host name that tasks use.
        memory_limit: The approximate number of bytes of rows to keep in memory.
        folder: The folder for the files with all other rows; "" for the system's default.
    """

    def __init__(self, address: Address, memory_limit: int, folder: str) -> None:
        self._address, self._memory_limit, self._folder = address, memory_limit, folder
        self._server = _listen_on_free_port(address)
        spawn("leasehold-rows", lambda: self._server.serve_forever(0.1), self._on_failure)
        log.info("tasks fetch rows from %s, port %d", address.host, self.port)

    def _on_failure(self, fault: BaseException) -> None:
        """Close the port, so that tasks fail immediately instead of waiting for rows that will never arrive."""
        log.error(
            "the row server has failed, so tasks cannot fetch rows any more: %s", error_summary(fault), exc_info=fault
        )
        self._server.server_close()

    @property
    def port(self) -> int:
        """The port that the server listens on."""
        return int(self._server.server_address[1])

    @property
    def token(self) -> bytes:
        """The token that tasks must send."""
        return self._server.token

    def keep_rows(self, batch_number: int, task_index: int, batches: Sequence[pa.RecordBatch]) -> FetchedRows:
        """Store the rows for one Spark task, and return the reference with which the task fetches them."""
        task_rows = TaskRows.from_batches(batches)
        if self.memory_bytes + task_rows.memory > self._memory_limit:
            # The batch is already planned, so we cannot wait until memory becomes free. Move the rows to a file
            # instead.
            task_rows = task_rows.move_to_disk(self._folder)
        self._server.task_rows[batch_number, task_index] = task_rows
        return FetchedRows(self._address.host, self.port, self.token, batch_number, task_index)

    @property
    def memory_bytes(self) -> int:
        """The number of bytes that rows take up in memory."""
        return sum(task_rows.memory for task_rows in self._server.task_rows.values())

    def discard_batch(self, batch_number: int) -> None:
        """Drop the rows of this batch. Transfers that are in progress are still completed."""
        for key in [key for key in self._server.task_rows if key[0] == batch_number]:
            del self._server.task_rows[key]

    def close(self) -> None:
        """Stop listening, and drop all rows."""
        self._server.shutdown()
        self._server.server_close()
        self._server.task_rows.clear()


@frozen
class TaskRows:
    """The rows of one task, in small batches.

    The batches are small so that neither the task nor Spark has to hold all rows in memory at once.

    Attributes:
        batches: The rows.
        memory: The number of bytes that the rows take up in this process's memory.
    """

    batches: tuple[pa.RecordBatch, ...]
    memory: int

    @classmethod
    def from_batches(cls, batches: Sequence[pa.RecordBatch]) -> "TaskRows":
        """Return an instance that keeps these rows in memory, divided into small batches."""
        slices = list[pa.RecordBatch]()
        for batch in batches:
            # Slices share the memory of their batch, so slicing copies nothing.
            rows_per_slice = max(1, batch.num_rows * SLICE_BYTES // max(1, batch.nbytes))
            slices += [batch.slice(first_row, rows_per_slice) for first_row in range(0, batch.num_rows, rows_per_slice)]
        return cls(tuple(slices), sum(row_slice.nbytes for row_slice in slices))

    def move_to_disk(self, folder: str) -> "TaskRows":
        """Return the same rows, moved into an unnamed temporary file."""
        with tempfile.TemporaryFile(dir=folder or None) as file:
            self.write(file)
            file.flush()
            # The mapping outlives the file's name and handle, so no file stays on the disk if this process crashes.
            mapped_file = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return TaskRows(tuple(pa.ipc.open_stream(pa.py_buffer(mapped_file))), 0)

    def write(self, file: IO[bytes]) -> None:
        """Write the rows as an Arrow stream."""
        with pa.ipc.new_stream(pa.PythonFile(file, mode="w"), self.batches[0].schema) as writer:
            for batch in self.batches:
                writer.write_batch(batch)


class _RowTcpServer(ThreadingTCPServer):
    """Listens for requests from the tasks of a query, at an IPv4 or IPv6 address."""

    daemon_threads = True  # a slow peer must not prevent the process from ending
    request_queue_size = 128
    allow_reuse_address = True

    def __init__(self, family: int, address: tuple[str, int]) -> None:
        self.address_family = family
        # The executors' network is rarely private, so rows are sent only to clients that have this query's token.
        self.token = token_bytes(TOKEN_BYTES)
        self.task_rows: dict[tuple[int, int], TaskRows] = {}
        super().__init__(address, _RowRequestHandler)

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002  the base's names
        fault = sys.exc_info()[1] or OSError()
        level = logging.DEBUG if isinstance(fault, OSError) else logging.ERROR  # a task may disconnect at any time
        log.log(level, "rows were not sent to %s: %s", client_address, error_summary(fault))


class _RowRequestHandler(BaseRequestHandler):
    server: _RowTcpServer
    request: socket.socket

    def handle(self) -> None:
        # A peer that sends nothing, such as a port scan, must not hold a thread forever.
        self.request.settimeout(REQUEST_SECONDS)
        token, batch_number, task_index = REQUEST_FORMAT.unpack(receive_exactly(self.request, REQUEST_FORMAT.size))
        # Compare in constant time, so that timing does not reveal how much of a guess was right.
        if not compare_digest(token, self.server.token):
            log.warning("%s requested rows without this query's token: the request was rejected", self.client_address)
            return
        task_rows = self.server.task_rows.get((batch_number, task_index))
        # A task's sink may block for any length of time, so set no timeout. TCP keepalive detects that the peer is
        # gone.
        self.request.settimeout(None)
        self.request.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        with self.request.makefile("wb") as stream:
            stream.write(NOT_FOUND_BYTE if task_rows is None else FOUND_BYTE)
            if task_rows is not None:
                task_rows.write(stream)
                stream.write(COMPLETE_BYTE)


def _listen_on_free_port(address: Address) -> _RowTcpServer:
    """Return a server that listens on the first free port. Raises OSError, naming the options to set."""
    # Each query of a driver needs a port of its own, and firewall rules usually allow a range of ports.
    candidate_ports = range(address.port, address.port + PORT_ATTEMPTS) if address.port else (0,)
    last_error = OSError()
    for port in candidate_ports:
        try:
            family, *_, sockaddr = socket.getaddrinfo(address.bind, port, type=socket.SOCK_STREAM)[0]
            return _RowTcpServer(family, (str(sockaddr[0]), int(sockaddr[1])))
        except OSError as error:
            last_error = error
    raise OSError(
        f"tasks cannot fetch rows, because no port could be opened ({printable(limited_error_text(last_error))}): set "
        "lease.fetchPort to another, or lease.transport to embedded"
    ) from last_error


class RowTransport:
    """Makes the tasks of batches, and drops their rows once Spark no longer needs them.

    Args:
        address: The address from which tasks fetch rows, or None to embed rows in tasks.
        memory_limit: The maximum number of bytes of rows to keep in memory until tasks fetch them.
        folder: The folder for the files with all other rows; "" for the system's default.
    """

    def __init__(self, address: Address | None, memory_limit: int = 0, folder: str = "") -> None:
        self._address, self._memory, self._folder = address, memory_limit, folder
        self._server: RowServer | None = None

    def make_partitions(self, batch_number: int, tasks: Sequence[Sequence[pa.RecordBatch]]) -> Sequence[Rows]:
        """Return a partition for each task of this batch."""
        if self._address is None:
            embedded_partitions = list[Rows]()
            for batches in tasks:
                output_buffer = pa.BufferOutputStream()
                with pa.ipc.new_stream(output_buffer, batches[0].schema) as writer:
                    for batch in batches:
                        writer.write_batch(batch)
                embedded_partitions.append(EmbeddedRows(output_buffer.getvalue().to_pybytes()))
            return embedded_partitions
        if self._server is None and tasks:
            # Open the port only when there are rows, because a query without rows needs no port.
            self._server = RowServer(self._address, self._memory, self._folder)
        server = self._server
        return (
            []
            if server is None
            else [server.keep_rows(batch_number, task_index, batches) for task_index, batches in enumerate(tasks)]
        )

    def discard_batch(self, batch_number: int) -> None:
        """Drop the rows of this batch."""
        if self._server is not None:
            self._server.discard_batch(batch_number)

    def close(self) -> None:
        """Close the port, and drop all rows."""
        if self._server is not None:
            self._server.close()


def spread_over_tasks(rows: Mapping[str, pa.RecordBatch], tasks: int) -> list[list[pa.RecordBatch]]:
    """Distribute shards over at most `tasks` tasks.

    The largest shard is assigned first. Each shard is assigned to the task that has the fewest rows so far.

    The same rows are always distributed the same way, because a sink may identify a row by its position in a task.
    """
    keys_by_size = sorted((-batch.num_rows, key) for key, batch in rows.items() if batch.num_rows)
    # Sort by size and then by key, so that each row has the same position in its task if the batch is repeated.
    batches_by_size = [rows[key] for _, key in keys_by_size]
    task_batches: list[list[pa.RecordBatch]] = [[] for _ in range(min(tasks, len(batches_by_size)))]
    for batch in batches_by_size:
        min(task_batches, key=lambda task: sum(batch.num_rows for batch in task)).append(batch)
    # `RowBuffer` returns several large batches as a `pyarrow.Table`, which concatenates them without copying.
    batches_by_task = [
        [batch.to_batches() if isinstance(batch, pa.Table) else [batch] for batch in task] for task in task_batches
    ]
    return [[record_batch for record_batches in task for record_batch in record_batches] for task in batches_by_task]


# The following functions run on an executor


def read_task_rows(rows: Rows) -> Iterator[pa.RecordBatch]:
    """Yield the rows of one task. Raises RuntimeError if they cannot be fetched."""
    match rows:
        case FetchedRows():
            yield from fetch_rows(rows)
        case EmbeddedRows(data):
            yield from pa.ipc.open_stream(data)


def fetch_rows(rows: FetchedRows) -> Iterator[pa.RecordBatch]:
    """Fetch the rows of one task and yield them.

    Raises RuntimeError, which names the options to set, if the rows cannot be fetched.
    """
    try:
        with socket.create_connection((rows.host, rows.port), NETWORK_SECONDS) as connection:
            connection.sendall(REQUEST_FORMAT.pack(rows.token, rows.number, rows.task))
            status_byte = receive_exactly(connection, 1)
            if status_byte == NOT_FOUND_BYTE:
                raise RuntimeError(f"batch {rows.number} is done: its rows are not kept any more")
            with connection.makefile("rb") as stream:
                yield from pa.ipc.open_stream(pa.PythonFile(stream, mode="r"))
                if stream.read(1) != COMPLETE_BYTE:  # if the connection ends between two batches, Arrow raises no error
                    raise ConnectionError("the driver closed the connection before it had sent all rows")
    except (OSError, pa.ArrowInvalid) as fault:
        remedy = (
            "let executors connect there, as they do to Spark's own ports, and set lease.fetchPort if only some ports "
            "are open; or set lease.transport to embedded"
        )
        if isinstance(fault, ConnectionError | pa.ArrowInvalid):  # a firewall would cause a timeout instead
            remedy = (
                "the process that had them is gone, perhaps killed for lack of memory: the system's log names the "
                f"processes that the OOM killer has ended. If it is alive, executors cannot reach its port: {remedy}"
            )
        reason = printable(limited_error_text(fault))
        raise RuntimeError(
            f"rows cannot be fetched from the driver at {rows.host}, port {rows.port} ({reason}): {remedy}"
        ) from fault


def receive_exactly(connection: socket.socket, size: int) -> bytes:
    """Read exactly `size` bytes. Raises ConnectionError if the peer closes first."""
    received_bytes = b""
    while len(received_bytes) < size:
        # One call may return fewer bytes than were requested.
        chunk = connection.recv(size - len(received_bytes))
        if not chunk:
            raise ConnectionError("the other side closed the connection without a response")
        received_bytes += chunk
    return received_bytes
