"""The planner's side of the readers: they connect here, get shards to read, and serve their rows to tasks.

1. A query starts its readers (`QueryReaders`). Each connects and sends Hello (`ReaderPool.serve`). Only a process with
   the query's token, which is compared in constant time, becomes a reader.
2. When the worker opens a shard, the reader with the fewest shards reads it (`ReaderPool.open`). When a reader joins,
   the others give it their surplus. When one goes or falls silent, its shards go to the others at once.
3. A reader's report arrives as a batch whose rows are only numbers (`FarReader.read`, `FarRows`): how many rows there
   are, how large they are, and where they end. They wait in a `FarBuffer`, as rows of another source do.
4. When a batch is planned, each reader gets a message to keep its part, and tasks learn where to fetch it
   (`FarTransport.partitions`).
5. A task that cannot get its rows from a reader asks the planner, which reads exactly their ranges again. If not all of
   a range can be read again, the task fails, and with it the query. Spark repeats the batch when the query is started
   again, and then the rules of `replay` decide what is left out.
"""

import logging
import socket
import sys
from collections import deque
from collections.abc import Callable, Sequence
from hmac import compare_digest
from itertools import count
from os import cpu_count
from secrets import token_bytes
from socketserver import BaseRequestHandler
from threading import Condition, Lock

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
from attrs import field, frozen

from leasehold.adapters.sources.protocol import Batch, PassingSource, Source
from leasehold.adapters.spark.feed import ANY_SIZE, AheadBuffer, RowBuffer
from leasehold.adapters.spark.fetching import (
    REQUEST_SECONDS,
    TOKEN_BYTES,
    FetchedRows,
    ReaderRows,
    Rows,
    TaskServer,
    Transport,
    listening,
    received,
)
from leasehold.adapters.spark.lease_loop import Waiting
from leasehold.adapters.spark.offsets import Offset, Range
from leasehold.adapters.spark.options import MIB, READERS_MOST, Address, LeaseOptions
from leasehold.adapters.spark.readers.jobs import ExecutorReaders, ReaderChildren
from leasehold.adapters.spark.readers.messages import (
    Alive,
    BatchKept,
    Close,
    Discard,
    FromPlanner,
    Hello,
    Keep,
    Open,
    Piece,
    ShardFailure,
    ShardReport,
    from_reader,
    line_of,
    lines,
)
from leasehold.adapters.spark.readers.reader import ReaderSpec
from leasehold.adapters.spark.replay import Place, replayed
from leasehold.adapters.spark.rows import ArrowBatch, Chunk, Columns, SourceSpec
from leasehold.adapters.threads import spawn
from leasehold.balancer.model import Lease, Position
from leasehold.errors import SourceError, SourceUnavailable
from leasehold.stores.printable import escaped, said

log = escaped(logging.getLogger("leasehold.spark"))

POLL_SECONDS = 1.0
"""The time between two looks at a shard without reports. A report wakes it at once."""


class FarReader:
    """A shard that a reader reads ahead. It returns what was reported, and never waits.

    Attributes:
        number: The number of this opening; a later opening of the same shard has another.
        gone: Whether rows that were reported and not planned are lost, because the reader is gone or has closed it.
    """

    def __init__(self, number: int, lease: Lease, start: Position, closed: Callable[["FarReader"], None]) -> None:
        self.number, self.lease, self.start = number, lease, start
        self.gone = False
        self._closed = closed
        self._reported_to, self._count = start, 0
        self._reports: deque[tuple[FarRows, ShardReport]] = deque()
        self._fault: str | None = None
        self._lock = Lock()

    def report(self, report: ShardReport) -> None:
        """Add a report of the reader. Raises ValueError if it does not follow the previous report."""
        with self._lock:
            begins, first = self._reported_to, self._count
            for piece in report.pieces:
                before, after = self._reported_to.order, piece.ends.order
                if after < before or (piece.rows and after == before):
                    # If it were accepted, the shard would have a gap, or rows twice.
                    raise ValueError(f"{piece.ends.sequence} was reported behind {self._reported_to.sequence}")
                self._reported_to = piece.ends
            self._count += len(report.pieces)
            # Keep nothing of a rejected report: its reader counts as gone, and its shards are read again.
            self._reports.append((FarRows(self, begins, first, report.pieces), report))

    def fail(self, text: str) -> None:
        """Note that the shard cannot be read, once all earlier reports are taken."""
        self._fault = text

    def read(self) -> Batch:
        """Return everything reported since the last call. Raises SourceError, or SourceUnavailable if it is gone."""
        # The reports that remain are of rows that no process can send any more.
        if self.gone:
            raise SourceUnavailable("the process that read it is gone, or reads it no more")
        with self._lock:
            # Take all reports at once, so that a planner that was busy moves one position, not hundreds.
            reports, self._reports = self._reports, deque()
        if not reports:
            # Raise it only after the earlier reports, whose rows can be planned.
            if self._fault is not None:
                raise SourceError(self._fault)
            return Batch((), None, None, POLL_SECONDS, fault="the process that reads it has told of no answer")
        (first, _), (_, last) = reports[0], reports[-1]
        rows = FarRows(self, first.begins, first.first, tuple(piece for part, _ in reports for piece in part.pieces))
        return ArrowBatch(
            records=(),
            read_to=rows.pieces[-1].ends if rows.pieces else None,
            behind_seconds=last.behind,
            wait_seconds=POLL_SECONDS,
            ended=last.ended,
            children=last.children,
            size=sum(report.size for _, report in reports),
            rows=rows,
            token=self._reported_to.token,
        )

    def close(self) -> None:
        """Have the reader close the shard."""
        self.gone = True
        self._closed(self)


@frozen
class FarRows:
    """Consecutive pieces of a shard that its reader has.

    Attributes:
        opening: The opening of the shard.
        begins: The position after which they begin.
        first: How many pieces were reported before them.
        pieces: The pieces.
    """

    opening: FarReader = field(repr=False, eq=False)
    begins: Position
    first: int
    pieces: tuple[Piece, ...]

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return sum(piece.rows for piece in self.pieces)

    @property
    def through(self) -> int:
        """How many pieces of this opening there are up to and including these."""
        return self.first + len(self.pieces)

    @property
    def range(self) -> Range:
        """The range of the shard that they cover, for reading it again from the source."""
        return Range(self.begins, self.pieces[-1].ends, self.opening.lease.epoch)


class FarBuffer(AheadBuffer):
    """A buffer for the pieces of one shard that were reported and not planned. A reader has their rows."""

    def __init__(self, _columns: Columns) -> None:
        super().__init__()
        self._rows: deque[FarRows] = deque()  # one piece each

    def __bool__(self) -> bool:
        return bool(self._rows)

    @property
    def gone(self) -> bool:
        """Whether their reader is gone, or has closed the shard."""
        return any(rows.opening.gone for rows in self._rows)

    def put(self, chunk: Chunk) -> None:
        """Append the pieces that were reported next."""
        rows: FarRows = chunk.rows
        begins = rows.begins
        for index, piece in enumerate(rows.pieces, rows.first):
            self._rows.append(FarRows(rows.opening, begins, index, (piece,)))
            begins = piece.ends
            self.count += piece.rows
            self.bytes += piece.bytes

    def take(self, count: int, most_bytes: int) -> Chunk | None:
        """Remove and return the first pieces within both limits, or None if none fits. A piece is never cut."""
        taken = list[FarRows]()
        while self._rows:
            first = self._rows[0]
            (piece,) = first.pieces
            # Only the reader has the rows and could cut a piece. Here only their counts are known, so with ANY_SIZE
            # the first piece must pass by itself: it may be a row larger than any limit.
            alone = most_bytes == ANY_SIZE and not taken
            if not alone and (piece.rows > count or piece.bytes > most_bytes):
                break
            count, most_bytes = count - piece.rows, min(most_bytes - piece.bytes, ANY_SIZE - 1)
            taken.append(self._rows.popleft())
            self.count -= piece.rows
            self.bytes -= piece.bytes
        if not taken:
            return None
        pieces = tuple(piece for rows in taken for piece in rows.pieces)
        rows = FarRows(taken[0].opening, taken[0].begins, taken[0].first, pieces)
        return Chunk(rows, pieces[-1].ends)


SILENT_SECONDS = 10.0
"""A reader that is silent this long counts as gone, because it sends something every second."""


class ReaderConnection:
    """A reader as the planner sees it, from its Hello until its connection ends.

    Raises ValueError for a connection that does not begin with a Hello.

    Attributes:
        openings: The shards that it reads, by the number of the opening.
        rows: Its Hello, with the address of its rows.
        over: Whether it is gone.
    """

    def __init__(self, connection: socket.socket, woken: Callable[[str], None]) -> None:
        self._connection, self._woken = connection, woken
        # A machine that vanished closes no connection, but a reader that lives sends something every second.
        connection.settimeout(SILENT_SECONDS)
        self._stream = connection.makefile("rb")
        self._lines = lines(self._stream)
        self.openings: dict[int, FarReader] = {}
        self.over = False
        self._kept = -1
        self._heard, self._writing = Condition(), Lock()
        hello = from_reader(next(self._lines, b""))
        if not isinstance(hello, Hello):
            raise ValueError(f"a reader began with {type(hello).__name__}")  # noqa: TRY004  it is no argument
        self.rows = hello

    def serve(self) -> None:
        """Handle its messages until the connection ends. Raises OSError, or ValueError for an invalid message."""
        for line in self._lines:
            match from_reader(line):
                case ShardReport(opening=number) | ShardFailure(opening=number) as message:
                    # Ignore a late message about an opening that was closed in the meantime.
                    if (opening := self.openings.get(number)) is not None:
                        if isinstance(message, ShardReport):
                            opening.report(message)
                        else:
                            opening.fail(message.text)
                        self._woken(opening.lease.key)
                case BatchKept(number):
                    with self._heard:
                        self._kept = number
                        self._heard.notify_all()
                case Alive():
                    pass
                case Hello():
                    raise ValueError("a reader said Hello twice")

    def send(self, message: FromPlanner) -> None:
        """Send a message. If that fails, the reader counts as gone and `serve` ends."""
        try:
            # Several threads open and close shards, and their lines must not mix.
            with self._writing:
                self._connection.sendall(line_of(message))
        except OSError as fault:
            self.end()
            log.warning("a reader does not hear: %s", fault)

    def wait_kept(self, number: int, seconds: float) -> None:
        """Wait until the reader has kept its rows of this batch, or is gone, at most `seconds`."""
        with self._heard:
            # Numbers only grow, so a later one acknowledges the earlier ones too.
            self._heard.wait_for(lambda: self._kept >= number or self.over, seconds)

    def end(self) -> None:
        """End the connection, which ends the reader."""
        try:
            # Do not close it here: another thread reads from it, and ends because of this shutdown.
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            log.debug("the connection was closed before")

    def lost(self) -> None:
        """Note that the reader is gone, so that others read again what it read ahead."""
        with self._heard:
            self.over = True
            self._heard.notify_all()
        openings, self.openings = list(self.openings.values()), {}
        for opening in openings:
            # Set this before waking the shard, which then opens again with another reader.
            opening.gone = True
            self._woken(opening.lease.key)
        self._stream.close()


FIRST_SECONDS, NEXT_SECONDS = 60.0, 1.0
"""How long to wait for the first reader, and for a reader once there has been one."""


class ReaderPool:
    """The readers that are connected. Raises OSError if it cannot listen.

    Args:
        address: Where to listen.
        woken: Called with the key of each shard that has news.

    Attributes:
        absent: Why there is no reader, as far as is known.
        token: What a reader must send first.
    """

    def __init__(self, address: Address, woken: Callable[[str], None]) -> None:
        self._woken = woken
        self.absent = "no process that reads is connected"
        self._connected: list[ReaderConnection] = []
        self._changed = Condition()
        self._numbers = count(1)
        self._patience = FIRST_SECONDS
        self._unread: set[str] = set()
        self._closed = False
        self.token = token_bytes(TOKEN_BYTES)
        self._server = listening(address, lambda family, place: _Listening(family, place, self))
        spawn("leasehold-readers", lambda: self._server.serve_forever(0.1), self._failed)

    def _failed(self, fault: BaseException) -> None:
        """Keep the reason for callers that need a reader, and let no more readers connect."""
        self.absent = f"no reader can connect any more: {said(fault)}"
        self._server.server_close()

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self._server.server_address[1])

    def open(self, lease: Lease, start: Position) -> FarReader:
        """Have the reader with the fewest shards read this one. Raises SourceUnavailable if there is no reader."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._connected, self._patience)
            if not self._connected:
                # Let the next reader wake the shard, so that it need not sit out a wait that grows with each fault.
                self._unread.add(lease.key)
                raise SourceUnavailable(self.absent)
            # Processes start slowly, but once there was a reader, a shard can wait as after any other fault.
            self._patience = NEXT_SECONDS
            reader = min(self._connected, key=lambda each: len(each.openings))
            opening = FarReader(next(self._numbers), lease, start, self._close_opening)
            reader.openings[opening.number] = opening
        # Send outside the lock, otherwise a reader that accepts no bytes would block all others.
        reader.send(Open(opening.number, lease, start))
        return opening

    def reader_of(self, opening: FarReader) -> ReaderConnection | None:
        """Return the reader that has the rows of this opening, or None if it is gone or has closed it."""
        with self._changed:
            return next((reader for reader in self._connected if opening.number in reader.openings), None)

    @property
    def connected(self) -> tuple[ReaderConnection, ...]:
        """The readers that are connected now."""
        with self._changed:
            return tuple(self._connected)

    def stop(self) -> None:
        """Accept no more readers, and end all waits for one."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """Disconnect all readers and stop listening."""
        self.stop()
        self._server.shutdown()
        self._server.server_close()
        for reader in self.connected:
            reader.end()

    def serve(self, connection: socket.socket, peer: object) -> None:
        """Serve a reader until it goes. Raises OSError and ValueError."""
        connection.settimeout(REQUEST_SECONDS)
        # A process that passes this check is sent leases, and its rows are trusted.
        if not compare_digest(received(connection, TOKEN_BYTES), self.token):
            log.warning("%s wanted to read for this query without its token", peer)
            return
        reader = ReaderConnection(connection, self._woken)
        try:
            with self._changed:
                if self._closed:
                    raise ConnectionError("the query has ended")
                self._connected.append(reader)
                # A late reader would otherwise be idle until shards happen to move, so each of the others gives up
                # what exceeds its share.
                even = -(-sum(len(connected.openings) for connected in self._connected) // len(self._connected))
                moved = [
                    opening for connected in self._connected for opening in list(connected.openings.values())[even:]
                ]
                unread, self._unread = self._unread, set()
                self._changed.notify_all()
            log.info("reader %s has come: %d now", peer, len(self.connected))
            # Close them outside the lock, because each sends a message. The next step of each shard opens it again.
            for opening in moved:
                opening.close()
            for key in {*unread, *(opening.lease.key for opening in moved)}:
                self._woken(key)
            reader.serve()
        finally:
            with self._changed:
                self._connected = [connected for connected in self._connected if connected is not reader]
                closed = self._closed
            shards = len(reader.openings)
            # Whatever ended it, others read again what it read ahead and no batch has.
            reader.lost()
            if not closed:
                log.warning("reader %s is gone: its %d shards are read by others", peer, shards)

    def _close_opening(self, opening: FarReader) -> None:
        with self._changed:
            # Forget it before sending, so that a report under way is ignored.
            reader = next((each for each in self._connected if each.openings.pop(opening.number, None)), None)
        if reader is not None:
            reader.send(Close(opening.number))


class _Listening(TaskServer):
    def __init__(self, family: int, place: tuple[str, int], pool: ReaderPool) -> None:
        self.pool = pool
        super().__init__(family, place, _Admission)

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002  the base's names
        fault = sys.exc_info()[1]
        level = logging.DEBUG if isinstance(fault, ConnectionError) else logging.WARNING
        log.log(level, "reader %s: %s", client_address, fault)


class _Admission(BaseRequestHandler):
    server: _Listening
    request: socket.socket

    def handle(self) -> None:
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.server.pool.serve(self.request, self.client_address)


KEPT_SECONDS = 10.0
"""How long a reader may take to keep a batch. After that, tasks are sent to it anyway."""


class FarTransport:
    """Makes the tasks of batches whose rows readers have. Rows in this process use the ordinary transport.

    Args:
        pool: The readers.
        here: Carries the rows that the planner has read itself.
        place: Where ranges are read again.
        lease_seconds: How long a lease lasts.
    """

    def __init__(self, pool: ReaderPool, here: Transport, place: Place, lease_seconds: float) -> None:
        self._pool, self._here, self._place, self._seconds = pool, here, place, lease_seconds
        self._planned: dict[tuple[int, int], tuple[FarRows, ...]] = {}
        here.again = self._again

    def partitions(self, number: int, tasks: Sequence[Sequence[pa.RecordBatch | FarRows]]) -> Sequence[Rows]:
        """Make a partition for each task of this batch."""
        if not tasks or not isinstance(tasks[0][0], FarRows):
            return self._here.partitions(number, tasks)
        shares: list[dict[ReaderConnection | None, list[FarRows]]] = []  # by task; None: rows whose reader is gone
        parts: dict[ReaderConnection, list[tuple[int, tuple[tuple[int, int], ...]]]] = {}
        for task, rows in enumerate(tasks):
            share: dict[ReaderConnection | None, list[FarRows]] = {}
            for each in rows:
                share.setdefault(self._pool.reader_of(each.opening), []).append(each)
            shares.append(share)
            for reader, part in share.items():
                if reader is not None:
                    pieces = tuple((each.opening.number, each.through) for each in part)
                    parts.setdefault(reader, []).append((task, pieces))
        for reader, kept_pieces in parts.items():
            # Send to all before waiting for any, so that a slow reader does not delay the rest.
            reader.send(Keep(number, tuple(kept_pieces)))
        for reader in parts:  # wait, because tasks may connect at any time from now on
            reader.wait_kept(number, KEPT_SECONDS)
        partitions = list[Rows]()
        for task, share in enumerate(shares):
            # Keep the order in which readers send rows, because rows that are read again must come in the same order.
            # Keep them until Spark is done with the batch, because a task may be repeated hours later.
            planned = self._planned[number, task] = tuple(each for part in share.values() for each in part)
            addresses = [reader.rows for reader in share if reader is not None]
            fetched = tuple(FetchedRows(each.host, each.port, each.token, number, task) for each in addresses)
            rows_in_all = sum(each.num_rows for each in planned)
            fallback = self._here.promised(number, task)
            partitions.append(ReaderRows(fetched if len(addresses) == len(share) else (), rows_in_all, fallback))
        return partitions

    def discard(self, number: int) -> None:
        """Drop the rows of this batch."""
        self._here.discard(number)
        for reader in self._pool.connected:
            reader.send(Discard(number))
        for key in [key for key in self._planned if key[0] == number]:
            del self._planned[key]

    def close(self) -> None:
        """Close the port, and drop all rows."""
        self._here.close()

    def _again(self, number: int, place: int) -> Sequence[pa.RecordBatch]:
        """Read the rows of a task again from the source, in the same order; none if the batch is done.

        Raises ValueError if not all of them can be read any more.
        """
        planned = self._planned.get((number, place), ())
        if not planned:
            return []
        log.warning("batch %d: reading %d ranges again, whose reader is gone", number, len(planned))
        offset = Offset(number, tuple((part.opening.lease.key, part.range) for part in planned))
        reread = replayed(offset, self._place, Waiting(self._seconds, doing=f"batch {number}, whose reader is gone"))
        for part in planned:
            key = part.opening.lease.key
            # Different rows under the same plan would be committed as those that were planned, so fail the task.
            if (rows := reread.get(key)) is None or rows.num_rows != part.num_rows:
                count = "none" if rows is None else rows.num_rows
                raise ValueError(f"shard {key}: of {part.num_rows} rows that were planned {count} can be read again")
        # Keep the order in which readers would have sent them: a task may already have the first rows.
        return [reread[part.opening.lease.key] for part in planned]


MEND = "add executors, or lower lease.readers"
LOOPBACK = "127.0.0.1"
PIECES = 64
"""The least number of pieces in a batch at its limit, so that its shards get even shares."""
PIECE_ROWS, PIECE_BYTES = 10_000, MIB


class ReadHere:
    """Reads shards in the planner's own process, without readers."""

    buffer = RowBuffer

    def __init__(self, source: Source, transport: Transport) -> None:
        self.source, self.transport = source, transport

    def begin(self, woken: Callable[[str], None]) -> None:
        """Do nothing, because this process reads."""

    def stop(self) -> None:
        """Do nothing, because there are no readers."""

    def close(self) -> None:
        """Drop all rows."""
        self.transport.close()


class FarSource(PassingSource):
    """A stream whose shards are opened by readers. All other calls go to the source in this process."""

    def __init__(self, source: Source, pool: ReaderPool) -> None:
        super().__init__(source)
        self._pool = pool

    def open(self, lease: Lease, start: Position) -> FarReader:
        """Have a reader read the shard. Raises SourceUnavailable if none is connected."""
        return self._pool.open(lease, start)


class QueryReaders:
    """The readers of one query, on the planner's machine or, if the session's program starts them, on executors."""

    buffer = FarBuffer

    def __init__(
        self, source_spec: SourceSpec, options: LeaseOptions, address: Address, place: Place, here: Transport
    ) -> None:
        self._source_spec, self._options, self._address = source_spec, options, address
        # Readers on other machines connect to the address that tasks use. Children of this process need no network.
        listens = address if options.reader_jobs else Address(LOOPBACK, LOOPBACK)
        self.pool = ReaderPool(listens, self._news)
        self._woken: Callable[[str], None] | None = None
        self._readers: ReaderChildren | ExecutorReaders | None = None
        self.source = FarSource(place.source, self.pool)
        self.transport = FarTransport(self.pool, here, place, options.config.lease_seconds)

    def begin(self, woken: Callable[[str], None]) -> None:
        """Start the readers, which then connect. Raises ValueError if they cannot be started.

        Args:
            woken: Called with the key of each shard that has news.
        """
        self._woken = woken
        if not self._options.reader_jobs:
            # Leave one core to the planner, which all readers report to.
            number = self._number((cpu_count() or 1) - 1)
            self._readers = children = ReaderChildren(number, self._spec(number, LOOPBACK, self._address))
            children.begin()
            return
        self._readers = readers = ExecutorReaders(self._options.reader_jobs)
        # Leave one slot to the batch: if readers filled all of them, no batch would ever begin.
        number = self._number(min(readers.executors, readers.slots - 1))
        if number >= readers.slots:
            log.warning("%d readers leave none of %d task slots for batches: %s", number, readers.slots, MEND)
        self.pool.absent = f"no reader has come; where no slot is free, {MEND}"
        # Tasks reach such a reader at the address from which it connects to the planner.
        spec = self._spec(number, self._address.host, Address("", "", self._address.port))

        def told(text: str) -> None:
            self.pool.absent = f"no reader is connected: {text}"
            log.warning("%s", text)

        readers.begin(number, spec, told)
        log.info("%d readers start on %d executors", number, readers.executors)

    def stop(self) -> None:
        """End all waits for a reader."""
        self.pool.stop()

    def close(self) -> None:
        """End the readers, and drop all rows."""
        self.transport.close()
        self.pool.stop()
        if self._readers is not None:
            self._readers.close()
        self.pool.close()

    def _news(self, key: str) -> None:
        if self._woken is not None:
            self._woken(key)

    def _number(self, room: int) -> int:
        requested = self._options.readers
        return max(1, min(room, READERS_MOST)) if requested is None else requested

    def _spec(self, number: int, planner: str, rows: Address) -> ReaderSpec:
        source_spec, options = self._source_spec, self._options
        return ReaderSpec(
            planner=(planner, self.pool.port),
            token=self.pool.token,
            address=rows,
            source_spec=source_spec,
            rows=options.buffer_rows // number,
            bytes=options.buffer_bytes // number,
            piece_rows=max(1, min(PIECE_ROWS, options.trigger_rows // PIECES, source_spec.shard_rows // PIECES)),
            piece_bytes=max(1, min(PIECE_BYTES, options.trigger_bytes // PIECES)),
            folder=options.spool_folder,
        )


def way_of(source_spec: SourceSpec, options: LeaseOptions, source: Source, place: Place) -> ReadHere | QueryReaders:
    """Choose by the options who reads the shards of a query: this process, which plans its batches, or readers.

    Either choice has a `source` that opens shards for the worker, a `buffer` for what was read and not planned, and a
    `transport` that brings planned rows to tasks.
    """
    here = Transport(options.fetch, options.buffer_bytes // 2, options.spool_folder)
    if options.readers == 0 or options.fetch is None:
        return ReadHere(source, here)
    return QueryReaders(source_spec, options, options.fetch, place, here)
