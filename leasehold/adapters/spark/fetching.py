"""How planned rows reach Spark's tasks: tasks fetch them over TCP from the process that has them, or carry them.

`Transport` makes a partition of each task's rows; an executor gets them by `read`. Where readers have the rows
(`readers`), a task fetches from each of them, and from the planner what one that is gone has not sent.

Rule 1: nobody gets a row without the query's token, which is compared in constant time. It keeps out who may reach
the port and is no task of this query; it hides nothing from who may read the network, as rows within tasks do not.
Rule 2: what is kept takes a bounded part of the process's memory; more is in files without a name, which are gone
when the process is, however it ends.
Rule 3: the same rows are sent however often they are asked for, until their batch is discarded.
Rule 4: a task that has not received everything fails, so that Spark runs it again: the last byte says that it is all.
"""

import logging
import mmap
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from hmac import compare_digest
from secrets import token_bytes
from socketserver import BaseRequestHandler, ThreadingTCPServer
from struct import Struct
from typing import IO, TypeVar

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
from attrs import field, frozen
from pyspark.sql.datasource import InputPartition

from leasehold.adapters.spark.options import Address
from leasehold.adapters.threads import spawn
from leasehold.stores.printable import SAID_MOST, escaped, printable, said, text_of

log = escaped(logging.getLogger("leasehold.spark"))

TOKEN_BYTES = 32
REQUEST = Struct(f">{TOKEN_BYTES}sQQ")
"""The token, the batch's number and the task's place in it."""
HERE, GONE, FAILED, ALL = b"H", b"G", b"F", b"A"
"""Before the rows: whether there are any, or why they cannot be read again; behind them: that they are all."""
REQUEST_SECONDS = 10.0
"""How long a peer may take to say what it wants."""
AGAIN_SECONDS = 600.0
"""How long a task waits for rows that are read again from the source."""
FAULT_BYTES = 4 * SAID_MOST
"""Most of the text of a fault that is read; a character takes four bytes at most."""
NETWORK_SECONDS = 120.0
"""How long a task waits for the next bytes: as long as Spark itself does (`spark.network.timeout`)."""
PORTS = 16
"""How many ports are tried from a given one on: each query of a driver needs one."""
SLICE_BYTES = 4 << 20
"""About this much is one batch of Arrow."""


@frozen
class FetchedRows(InputPartition):
    """Rows that a task fetches: of one place of a batch."""

    host: str
    port: int
    token: bytes = field(repr=False)
    number: int
    place: int


@frozen
class EmbeddedRows(InputPartition):
    """Rows that travel with their task."""

    data: bytes

    def __repr__(self) -> str:
        return f"EmbeddedRows({len(self.data)} bytes)"


@frozen
class ReaderRows(InputPartition):
    """Rows that readers have.

    parts  what of them is fetched from each reader, in order; nothing where one is gone already
    count  how many rows there are in all
    again  where they are had, in the same order, once a reader is gone
    """

    parts: tuple[FetchedRows, ...]
    count: int
    again: FetchedRows


Rows = FetchedRows | EmbeddedRows | ReaderRows

Server = TypeVar("Server", bound="TaskServer")
Again = Callable[[int, int], Sequence[pa.RecordBatch]]
"""Has the rows of one place of a batch that are not kept; none of a batch that is done."""


def nothing(_number: int, _place: int) -> Sequence[pa.RecordBatch]:
    """Rows that are not kept are gone."""
    return ()


class RowServer:
    """Keeps rows for tasks and sends them, from its making until it is closed. Raises OSError without a port.

    most    bytes that are kept in memory, about
    folder  where the files for more are; "" for the system's own place
    again   has rows that were promised, and are not kept
    """

    def __init__(self, address: Address, most: int, folder: str, again: Again = nothing) -> None:
        self._address, self._most, self._folder = address, most, folder
        self._server = listening(address, lambda family, place: _RowSending(family, place, again))
        spawn("leasehold-rows", lambda: self._server.serve_forever(0.1), self._failed)
        log.info("tasks fetch rows from %s, port %d", address.host, self.port)

    def _failed(self, fault: BaseException) -> None:
        """Close the port, so that tasks fail at once and do not wait for rows that nobody sends."""
        log.error("rows are sent to tasks no more: %s", said(fault), exc_info=fault)
        self._server.server_close()

    @property
    def port(self) -> int:
        """The port that was free."""
        return int(self._server.server_address[1])

    @property
    def token(self) -> bytes:
        """The token that tasks must show."""
        return self._server.token

    def keep(self, number: int, place: int, batches: Sequence[pa.RecordBatch]) -> FetchedRows:
        """Keep the rows of one task of a batch, and tell how to fetch them."""
        kept = Kept.of(batches)
        if self.in_memory + kept.memory > self._most:
            # The batch is planned already: it cannot wait for memory as a reading does.
            kept = kept.on_disk(self._folder)
        self._server.kept[number, place] = kept
        return self.promised(number, place)

    def promised(self, number: int, place: int) -> FetchedRows:
        """How a task fetches this place of a batch."""
        return FetchedRows(self._address.host, self.port, self._server.token, number, place)

    @property
    def in_memory(self) -> int:
        """How many bytes the rows take that are not in files."""
        return sum(kept.memory for kept in self._server.kept.values())

    def discard(self, number: int) -> None:
        """Let the rows of this batch go; what is being sent is sent to its end."""
        for key in [key for key in self._server.kept if key[0] == number]:
            del self._server.kept[key]

    def close(self) -> None:
        """Listen no more, and let all rows go."""
        self._server.shutdown()
        self._server.server_close()
        self._server.kept.clear()


@frozen
class Kept:
    """The rows of one task, in small batches: a task, and Spark behind it, has a few of them in memory.

    memory  how many bytes of this process they take
    """

    batches: tuple[pa.RecordBatch, ...]
    memory: int

    @classmethod
    def of(cls, batches: Sequence[pa.RecordBatch]) -> "Kept":
        """Keep rows as they are."""
        parts = list[pa.RecordBatch]()
        for batch in batches:
            # Slices share the memory of their batch, so that cutting costs nothing and sending needs little at a time.
            rows = max(1, batch.num_rows * SLICE_BYTES // max(1, batch.nbytes))
            parts += [batch.slice(first, rows) for first in range(0, batch.num_rows, rows)]
        return cls(tuple(parts), sum(part.nbytes for part in parts))

    def on_disk(self, folder: str) -> "Kept":
        """Move the rows into a file without a name, from which they are sent."""
        with tempfile.TemporaryFile(dir=folder or None) as file:
            self.write(file)
            file.flush()
            # The mapping outlives the file's name and handle: nothing is left on the disk, however this process ends.
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return Kept(tuple(pa.ipc.open_stream(pa.py_buffer(mapped))), 0)

    def write(self, file: IO[bytes]) -> None:
        """Write the rows as a stream of Arrow."""
        with pa.ipc.new_stream(pa.PythonFile(file, mode="w"), self.batches[0].schema) as writer:
            for batch in self.batches:
                writer.write_batch(batch)


class TaskServer(ThreadingTCPServer):
    """Listens in a query's process for tasks or readers of its own, at a place of either family of addresses."""

    daemon_threads = True  # a peer that takes its time keeps no process from ending
    request_queue_size = 128
    allow_reuse_address = True

    def __init__(self, family: int, place: tuple[str, int], handler: type[BaseRequestHandler]) -> None:
        self.address_family = family
        super().__init__(place, handler)


class _RowSending(TaskServer):
    def __init__(self, family: int, place: tuple[str, int], again: Again) -> None:
        self.again = again
        # Executors' networks are seldom private: rows are sent to who shows what the query's own tasks were given.
        self.token = token_bytes(TOKEN_BYTES)
        self.kept: dict[tuple[int, int], Kept] = {}
        super().__init__(family, place, _Sending)

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002  the base's names
        fault = sys.exc_info()[1] or OSError()
        level = logging.DEBUG if isinstance(fault, OSError) else logging.ERROR  # tasks may go, as all peers
        log.log(level, "rows were not sent to %s: %s", client_address, said(fault))


class _Sending(BaseRequestHandler):
    server: _RowSending
    request: socket.socket

    def handle(self) -> None:
        # A peer that says nothing, as a scan of ports, must not hold a thread for ever.
        self.request.settimeout(REQUEST_SECONDS)
        token, number, place = REQUEST.unpack(received(self.request, REQUEST.size))
        # In constant time: how long a refusal takes must not tell how much of a guess was right.
        if not compare_digest(token, self.server.token):
            log.warning("%s asked for rows without this query's token, and got none", self.client_address)
            return
        rows = self.server.kept.get((number, place))
        # A reader that was to send them is gone: they are read once more from the source.
        try:
            if rows is None and (again := self.server.again(number, place)):
                rows = Kept.of(again)
        except Exception as fault:  # noqa: BLE001  whatever it is, it ends the task, which alone tells a user
            self.request.sendall(FAILED + said(fault).encode())
            log.error("batch %d: %s", number, said(fault))  # noqa: TRY400  the source says it in one sentence
            return
        # A task's sink may block for as long as it likes; a peer that is gone is noticed.
        self.request.settimeout(None)
        self.request.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        with self.request.makefile("wb") as stream:
            stream.write(GONE if rows is None else HERE)
            if rows is not None:
                rows.write(stream)
                stream.write(ALL)


def listening(address: Address, made: Callable[[int, tuple[str, int]], Server]) -> Server:
    """A server at the first port that can be had. Raises OSError, and says what to set."""
    # Each query of a driver needs one of its own, and a firewall opens a range.
    ports = range(address.port, address.port + PORTS) if address.port else (0,)
    fault = OSError()
    for port in ports:
        try:
            family, *_, place = socket.getaddrinfo(address.bind, port, type=socket.SOCK_STREAM)[0]
            return made(family, (str(place[0]), int(place[1])))
        except OSError as found:
            fault = found
    raise OSError(
        f"no port could be had for tasks to fetch rows from ({printable(text_of(fault))}): give lease.fetchPort "
        "another, or set lease.transport to embedded"
    ) from fault


class Transport:
    """Makes tasks of batches, and lets them go once Spark is done with them.

    address  where tasks fetch rows; None: rows are embedded
    memory   bytes of rows to be fetched that wait in memory
    folder   where more of them wait; "" for the system's own place

    `again` has the rows of a task that are not kept; set it before the first partition is made.
    """

    def __init__(self, address: Address | None, memory: int = 0, folder: str = "") -> None:
        self._address, self._memory, self._folder = address, memory, folder
        self._server: RowServer | None = None
        self.again: Again = nothing

    def partitions(self, number: int, tasks: Sequence[Sequence[pa.RecordBatch]]) -> Sequence[Rows]:
        """Make a partition for each task of this batch. The first that is to be fetched opens the port."""
        if self._address is None:
            embedded = list[Rows]()
            for batches in tasks:
                sink = pa.BufferOutputStream()
                with pa.ipc.new_stream(sink, batches[0].schema) as writer:
                    for batch in batches:
                        writer.write_batch(batch)
                embedded.append(EmbeddedRows(sink.getvalue().to_pybytes()))
            return embedded
        return [self._opened(self._address).keep(number, *each) for each in enumerate(tasks)]

    def promised(self, number: int, place: int) -> FetchedRows:
        """Where a task fetches rows that are not kept here, but had by `again` when it asks. It opens the port."""
        if self._address is None:
            raise ValueError("rows that are embedded cannot be promised")
        return self._opened(self._address).promised(number, place)

    def _opened(self, address: Address) -> RowServer:
        if self._server is None:
            # Only with the first rows: a query without rows opens no port.
            self._server = RowServer(address, self._memory, self._folder, self.again)
        return self._server

    def discard(self, number: int) -> None:
        """The rows of this batch are read no more."""
        if self._server is not None:
            self._server.discard(number)

    def close(self) -> None:
        """Close the port, and let all rows go."""
        if self._server is not None:
            self._server.close()


def spread(rows: Mapping[str, pa.RecordBatch], tasks: int) -> list[list[pa.RecordBatch]]:
    """Shards over so many tasks: the largest first, each to the task that has least so far.

    The same rows are spread in the same way, in whatever order they come: a sink may know a row by its place in a task.
    """
    sized = sorted((-batch.num_rows, key) for key, batch in rows.items() if batch.num_rows)
    # By size and then by key, whatever order they came in: a repeated batch must have each row at its old place.
    batches = [rows[key] for _, key in sized]
    found: list[list[pa.RecordBatch]] = [[] for _ in range(min(tasks, len(batches)))]
    for batch in batches:
        min(found, key=lambda task: sum(each.num_rows for each in task)).append(batch)
    # What waited in several large batches is a table by now: it was joined without copying.
    batches_of = [[each.to_batches() if isinstance(each, pa.Table) else [each] for each in task] for task in found]
    return [[part for parts in task for part in parts] for task in batches_of]


# On an executor


def read(rows: Rows) -> Iterator[pa.RecordBatch]:
    """The rows of one task. Raises RuntimeError if they cannot be fetched."""
    match rows:
        case FetchedRows():
            yield from fetched(rows)
        case ReaderRows():
            yield from _from_readers(rows)
        case EmbeddedRows(data):
            yield from pa.ipc.open_stream(data)


def _from_readers(rows: ReaderRows) -> Iterator[pa.RecordBatch]:
    """From the readers, and where one fails, all that it has not sent from the planner: the same rows, in order."""
    seen = 0
    try:
        for part in rows.parts:
            for batch in fetched(part):
                yield batch
                seen += batch.num_rows
    except RuntimeError as fault:
        log.warning("a reader is gone, asking the planner: %s", fault)
    left = seen  # the planner sends all of them again: so many were handed on before
    if seen < rows.count:
        # Longer than for the network: what it sends is being read again meanwhile.
        for batch in fetched(rows.again, AGAIN_SECONDS):
            if left < batch.num_rows:
                yield batch.slice(left)
                seen += batch.num_rows - left
            left -= min(left, batch.num_rows)
    # Fewer rows, committed by Spark, would be skipped for good: the task must fail.
    if seen != rows.count:
        raise RuntimeError(f"{seen} rows came of {rows.count} that were planned")


def fetched(rows: FetchedRows, seconds: float = NETWORK_SECONDS) -> Iterator[pa.RecordBatch]:
    """The rows of one task. Raises RuntimeError if they cannot be had, or none come for so long; says what to set."""
    try:
        with socket.create_connection((rows.host, rows.port), NETWORK_SECONDS) as connection:
            connection.settimeout(seconds)
            connection.sendall(REQUEST.pack(rows.token, rows.number, rows.place))
            answer = received(connection, 1)
            if answer == GONE:
                raise RuntimeError(f"batch {rows.number} is done: its rows are not kept any more")
            with connection.makefile("rb") as stream:
                if answer == FAILED:
                    told = printable(stream.read(FAULT_BYTES).decode(errors="replace"))
                    raise RuntimeError(f"batch {rows.number}: rows that a lost reader had cannot be read again: {told}")
                yield from pa.ipc.open_stream(pa.PythonFile(stream, mode="r"))
                if stream.read(1) != ALL:  # Arrow takes an end between two batches for the end of all
                    raise ConnectionError("the driver went away before it had sent all rows")
    except (OSError, pa.ArrowInvalid) as fault:
        mend = (
            "let executors connect there, as they do to Spark's own ports, with lease.fetchPort where only some are "
            "open; or set lease.transport to embedded"
        )
        if isinstance(fault, ConnectionError | pa.ArrowInvalid):  # what a firewall holds back times out
            mend = (
                "the process that had them is gone, killed perhaps for its memory: the system's log names what the OOM "
                f"killer has ended. If it lives, its port is refused to executors: {mend}"
            )
        told = printable(text_of(fault))
        raise RuntimeError(
            f"rows cannot be fetched from the driver at {rows.host}, port {rows.port} ({told}): {mend}"
        ) from fault


def received(connection: socket.socket, size: int) -> bytes:
    """Read exactly so many bytes. Raises ConnectionError if the other side closes before."""
    found = b""
    while len(found) < size:
        # One call may bring less than was asked for.
        more = connection.recv(size - len(found))
        if not more:
            raise ConnectionError("the other side has closed the connection without an answer")
        found += more
    return found
