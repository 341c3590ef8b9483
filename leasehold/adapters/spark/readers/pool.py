"""The planner's side of readers: they connect here, shards are shared out among them, and tasks get their rows.

1. A query starts its readers (`QueryReaders`), and each connects and says Hello (`ReaderPool.serve`). Nobody becomes a
   reader without the query's token, which is compared in constant time.
2. The worker opens a shard: the reader that has the fewest is asked to read it (`ReaderPool.open`). When a reader
   comes, others give it their surplus; when one goes, or is not heard of, its shards go to the others at once.
3. What a reader reports comes in as a batch whose rows are numbers (`FarReader.read`, `FarRows`): how many there are,
   how large, and where they end. They wait in a `FarBuffer`, as rows of another source do.
4. A batch is planned: each reader is told to keep its part, and tasks are told where to fetch it
   (`FarTransport.partitions`).
5. A task that cannot have its rows from a reader asks the planner, which reads exactly their ranges again. A range that
   cannot be had again whole fails its task, and with it the query: Spark repeats the batch when it is started again,
   and then its rules hold for what is left out (`replay`).
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
"""Between two looks at a shard of which nothing is reported; a report wakes it at once."""


class FarReader:
    """A shard as a reader reads it ahead: brings what was reported, and never waits.

    number  of this opening: a later one of the same shard has another
    gone    whether the rows that were reported and not planned are nobody's any more
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
        """Take what the reader reports. Raises ValueError if it does not follow what was reported before."""
        with self._lock:
            begins, first = self._reported_to, self._count
            for piece in report.pieces:
                before, after = self._reported_to.order, piece.ends.order
                if after < before or (piece.rows and after == before):
                    # Taken all the same, it would leave a gap in the shard, or have rows twice.
                    raise ValueError(f"{piece.ends.sequence} was reported behind {self._reported_to.sequence}")
                self._reported_to = piece.ends
            self._count += len(report.pieces)
            # Nothing of a report that was refused is kept: its reader is taken for gone, and its shards are read again.
            self._reports.append((FarRows(self, begins, first, report.pieces), report))

    def fail(self, text: str) -> None:
        """Note that the shard cannot be read, after all that was reported."""
        self._fault = text

    def read(self) -> Batch:
        """Everything reported since the last call. Raises SourceUnavailable if the reader is gone, and SourceError."""
        # What is left of its reports is of rows that nobody can send.
        if self.gone:
            raise SourceUnavailable("the process that read it is gone, or reads it no more")
        with self._lock:
            # All at once: a planner that was busy for a while has one position to move, not hundreds.
            new, self._reports = self._reports, deque()
        if not new:
            # Only after all that was reported before: those rows can be planned.
            if self._fault is not None:
                raise SourceError(self._fault)
            return Batch((), None, None, POLL_SECONDS, fault="the process that reads it has told of no answer")
        (first, _), (_, last) = new[0], new[-1]
        rows = FarRows(self, first.begins, first.first, tuple(piece for each, _ in new for piece in each.pieces))
        return ArrowBatch(
            records=(),
            read_to=rows.pieces[-1].ends if rows.pieces else None,
            behind_seconds=last.behind,
            wait_seconds=POLL_SECONDS,
            ended=last.ended,
            children=last.children,
            size=sum(report.size for _, report in new),
            rows=rows,
            token=self._reported_to.token,
        )

    def close(self) -> None:
        """Have it read no more."""
        self.gone = True
        self._closed(self)


@frozen
class FarRows:
    """Pieces of a shard, one behind another, which its reader has.

    begins  the position that they lie behind
    first   how many pieces were reported before them
    """

    opening: FarReader = field(repr=False, eq=False)
    begins: Position
    first: int
    pieces: tuple[Piece, ...]

    @property
    def num_rows(self) -> int:
        """How many rows."""
        return sum(piece.rows for piece in self.pieces)

    @property
    def through(self) -> int:
        """How many pieces of this opening lie up to their end."""
        return self.first + len(self.pieces)

    @property
    def range(self) -> Range:
        """The range of the shard that they are, to be read again from the source."""
        return Range(self.begins, self.pieces[-1].ends, self.opening.lease.epoch)


class FarBuffer(AheadBuffer):
    """A buffer of the pieces of one shard that were reported and not planned: a reader has their rows."""

    def __init__(self, _columns: Columns) -> None:
        super().__init__()
        self._rows: deque[FarRows] = deque()  # one piece each

    def __bool__(self) -> bool:
        return bool(self._rows)

    @property
    def gone(self) -> bool:
        """Whether their reader is gone, or reads the shard no more."""
        return any(rows.opening.gone for rows in self._rows)

    def put(self, chunk: Chunk) -> None:
        """Add what was reported next."""
        rows: FarRows = chunk.rows
        begins = rows.begins
        for place, piece in enumerate(rows.pieces, rows.first):
            self._rows.append(FarRows(rows.opening, begins, place, (piece,)))
            begins = piece.ends
            self.count += piece.rows
            self.bytes += piece.bytes

    def take(self, count: int, most_bytes: int) -> Chunk | None:
        """The first pieces, at most so many rows and so large; None if not one fits: a piece is never cut."""
        taken = list[FarRows]()
        while self._rows:
            first = self._rows[0]
            (piece,) = first.pieces
            # Pieces are cut by the reader alone, which has the rows; here only their counts are known.
            # Asked for whatever comes first: a row larger than any limit must pass, by itself.
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
"""A reader of which nothing is heard for so long is taken for gone; it says something every second."""


class ReaderConnection:
    """A reader as the planner knows it, from its Hello until its connection ends.

    openings  the shards that it reads, by number of the opening
    rows      where its rows are fetched

    Raises ValueError for a connection that does not begin with a Hello.
    """

    def __init__(self, connection: socket.socket, woken: Callable[[str], None]) -> None:
        self._connection, self._woken = connection, woken
        # It says something every second: a machine that vanished closes no connection.
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
        """Take what it says until the connection ends. Raises OSError, and ValueError for what no reader says."""
        for line in self._lines:
            match from_reader(line):
                case ShardReport(opening=number) | ShardFailure(opening=number) as message:
                    # One that was closed in the meantime is nobody's any more: what comes late counts for nothing.
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
        """Tell it; where that cannot be done it is gone, and `serve` ends."""
        try:
            # Several shards are opened and closed by threads of their own, and lines must not mix.
            with self._writing:
                self._connection.sendall(line_of(message))
        except OSError as fault:
            self.end()
            log.warning("a reader does not hear: %s", fault)

    def wait_kept(self, number: int, seconds: float) -> None:
        """Wait until the reader keeps its rows of this batch, or is gone, or for so long."""
        with self._heard:
            # Numbers only grow, so a later one stands for those before it, too.
            self._heard.wait_for(lambda: self._kept >= number or self.over, seconds)

    def end(self) -> None:
        """Have the connection end, and with it the reader."""
        try:
            # Not closed here: another thread reads from it, and ends by this.
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            log.debug("the connection was closed before")

    def lost(self) -> None:
        """Note that it is gone: what it has read ahead is read elsewhere."""
        with self._heard:
            self.over = True
            self._heard.notify_all()
        openings, self.openings = list(self.openings.values()), {}
        for opening in openings:
            # Before its shard is woken, which then opens it again with another reader.
            opening.gone = True
            self._woken(opening.lease.key)
        self._stream.close()


FIRST_SECONDS, NEXT_SECONDS = 60.0, 1.0
"""How long is waited for a reader at first, and once there were some."""


class ReaderPool:
    """The readers that are connected, from its making until it is closed. Raises OSError without a port.

    address  where to listen
    woken    told of each shard of which there is news
    absent   why there is no reader, as far as is known
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
        """Keep the reason for callers that ask for a reader, and let no more readers connect."""
        self.absent = f"no reader can connect any more: {said(fault)}"
        self._server.server_close()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.server_address[1])

    def open(self, lease: Lease, start: Position) -> FarReader:
        """Have the shard read by the reader that has the fewest. Raises SourceUnavailable if there is none."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._connected, self._patience)
            if not self._connected:
                # Woken by the next reader that comes, not at the end of a wait that grows with each fault.
                self._unread.add(lease.key)
                raise SourceUnavailable(self.absent)
            # Processes take long to start; once there was one, a shard can wait as for any other fault.
            self._patience = NEXT_SECONDS
            reader = min(self._connected, key=lambda each: len(each.openings))
            opening = FarReader(next(self._numbers), lease, start, self._close_opening)
            reader.openings[opening.number] = opening
        # Outside the lock: a reader that does not take its bytes would hold up all others.
        reader.send(Open(opening.number, lease, start))
        return opening

    def reader_of(self, opening: FarReader) -> ReaderConnection | None:
        """The reader that has the rows of this opening; None if it is gone, or has closed it."""
        with self._changed:
            return next((each for each in self._connected if opening.number in each.openings), None)

    @property
    def connected(self) -> tuple[ReaderConnection, ...]:
        """The readers that are there now."""
        with self._changed:
            return tuple(self._connected)

    def stop(self) -> None:
        """Take no more readers in, and have nobody wait for one."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """Have all readers end, and listen no more."""
        self.stop()
        self._server.shutdown()
        self._server.server_close()
        for reader in self.connected:
            reader.end()

    def serve(self, connection: socket.socket, peer: object) -> None:
        """Take a reader in until it goes. Raises OSError and ValueError."""
        connection.settimeout(REQUEST_SECONDS)
        # Whoever passes is sent leases, and its rows are taken for the stream's.
        if not compare_digest(received(connection, TOKEN_BYTES), self.token):
            log.warning("%s wanted to read for this query without its token", peer)
            return
        reader = ReaderConnection(connection, self._woken)
        try:
            with self._changed:
                if self._closed:
                    raise ConnectionError("the query has ended")
                self._connected.append(reader)
                # A reader that comes late would idle until shards move by themselves: each of the others gives what is
                # above its share.
                even = -(-sum(len(each.openings) for each in self._connected) // len(self._connected))
                moved = [opening for each in self._connected for opening in list(each.openings.values())[even:]]
                unread, self._unread = self._unread, set()
                self._changed.notify_all()
            log.info("reader %s has come: %d now", peer, len(self.connected))
            # Outside the lock: each is told its reader over the network. Its shard is opened again by the next step.
            for opening in moved:
                opening.close()
            for key in {*unread, *(opening.lease.key for opening in moved)}:
                self._woken(key)
            reader.serve()
        finally:
            with self._changed:
                self._connected = [each for each in self._connected if each is not reader]
                closed = self._closed
            shards = len(reader.openings)
            # Whatever ended it: what it read ahead and no batch has is read again by others.
            reader.lost()
            if not closed:
                log.warning("reader %s is gone: its %d shards are read by others", peer, shards)

    def _close_opening(self, opening: FarReader) -> None:
        with self._changed:
            # Forgotten before it is told: a report that is under way is then nobody's.
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
"""How long a reader may take to say that it keeps a batch; then its tasks are sent there all the same."""


class FarTransport:
    """Makes tasks of batches whose rows readers have; rows that are here go by the transport from here.

    pool   the readers
    here   carries what the planner has read itself
    place  where ranges are read again
    """

    def __init__(self, pool: ReaderPool, here: Transport, place: Place, lease_seconds: float) -> None:
        self._pool, self._here, self._place, self._seconds = pool, here, place, lease_seconds
        self._planned: dict[tuple[int, int], tuple[FarRows, ...]] = {}
        here.again = self._again

    def partitions(self, number: int, tasks: Sequence[Sequence[pa.RecordBatch | FarRows]]) -> Sequence[Rows]:
        """Make a partition for each task of this batch."""
        if not tasks or not isinstance(tasks[0][0], FarRows):
            return self._here.partitions(number, tasks)
        shares: list[dict[ReaderConnection | None, list[FarRows]]] = []  # None: those whose reader is gone
        parts: dict[ReaderConnection, list[tuple[int, tuple[tuple[int, int], ...]]]] = {}
        for place, rows in enumerate(tasks):
            share: dict[ReaderConnection | None, list[FarRows]] = {}
            for each in rows:
                share.setdefault(self._pool.reader_of(each.opening), []).append(each)
            shares.append(share)
            for reader, mine in share.items():
                if reader is not None:
                    pieces = tuple((each.opening.number, each.through) for each in mine)
                    parts.setdefault(reader, []).append((place, pieces))
        for reader, told in parts.items():
            # All are told before any is waited for, so that a slow one does not delay the rest.
            reader.send(Keep(number, tuple(told)))
        for reader in parts:  # tasks may come at any time
            reader.wait_kept(number, KEPT_SECONDS)
        made = list[Rows]()
        for place, share in enumerate(shares):
            # In the order in which readers send them: what is read again must come in the same.
            # Kept until Spark is done with the batch, for a task may come again hours later.
            planned = self._planned[number, place] = tuple(each for mine in share.values() for each in mine)
            there = [reader.rows for reader in share if reader is not None]
            fetched = tuple(FetchedRows(each.host, each.port, each.token, number, place) for each in there)
            rows_in_all = sum(each.num_rows for each in planned)
            again = self._here.promised(number, place)
            made.append(ReaderRows(fetched if len(there) == len(share) else (), rows_in_all, again))
        return made

    def discard(self, number: int) -> None:
        """The rows of this batch are read no more."""
        self._here.discard(number)
        for reader in self._pool.connected:
            reader.send(Discard(number))
        for key in [key for key in self._planned if key[0] == number]:
            del self._planned[key]

    def close(self) -> None:
        """Close the port, and let all rows go."""
        self._here.close()

    def _again(self, number: int, place: int) -> Sequence[pa.RecordBatch]:
        """The rows of a task read again from the source, in the same order; none of a batch that is done.

        Raises ValueError if they are not all to be had any more.
        """
        planned = self._planned.get((number, place), ())
        if not planned:
            return []
        log.warning("batch %d: reading %d ranges again, whose reader is gone", number, len(planned))
        offset = Offset(number, tuple((each.opening.lease.key, each.range) for each in planned))
        found = replayed(offset, self._place, Waiting(self._seconds, doing=f"batch {number}, whose reader is gone"))
        for each in planned:
            key = each.opening.lease.key
            # Other rows under the same plan would be committed as those that were planned: better the task fails.
            if (rows := found.get(key)) is None or rows.num_rows != each.num_rows:
                had = "none" if rows is None else rows.num_rows
                raise ValueError(f"shard {key}: of {each.num_rows} rows that were planned {had} can be read again")
        # In the order in which readers would have sent them: a task may have the first ones already.
        return [found[each.opening.lease.key] for each in planned]


MEND = "add executors, or lower lease.readers"
LOOPBACK = "127.0.0.1"
PIECES = 64
"""A batch at its limit has at least so many pieces, so that shards have even parts of it."""
PIECE_ROWS, PIECE_BYTES = 10_000, MIB


class ReadHere:
    """The way without readers."""

    buffer = RowBuffer

    def __init__(self, source: Source, transport: Transport) -> None:
        self.source, self.transport = source, transport

    def begin(self, woken: Callable[[str], None]) -> None:
        """Start nothing: this process reads."""

    def stop(self) -> None:
        """Stop nothing: there are no readers."""

    def close(self) -> None:
        """Let all rows go."""
        self.transport.close()


class FarSource(PassingSource):
    """A stream whose shards are opened by readers, and which is asked all else from here."""

    def __init__(self, source: Source, pool: ReaderPool) -> None:
        super().__init__(source)
        self._pool = pool

    def open(self, lease: Lease, start: Position) -> FarReader:
        """Have a reader read it. Raises SourceUnavailable if none is connected."""
        return self._pool.open(lease, start)


class QueryReaders:
    """The readers of one query: on the planner's machine, or on executors where the session's program starts them."""

    buffer = FarBuffer

    def __init__(
        self, source_spec: SourceSpec, options: LeaseOptions, address: Address, place: Place, here: Transport
    ) -> None:
        self._source_spec, self._options, self._address = source_spec, options, address
        # Readers on other machines connect where tasks do; children of this process need no network.
        listens = address if options.reader_jobs else Address(LOOPBACK, LOOPBACK)
        self.pool = ReaderPool(listens, self._news)
        self._woken: Callable[[str], None] | None = None
        self._readers: ReaderChildren | ExecutorReaders | None = None
        self.source = FarSource(place.source, self.pool)
        self.transport = FarTransport(self.pool, here, place, options.config.lease_seconds)

    def begin(self, woken: Callable[[str], None]) -> None:
        """Start them; they connect by themselves. Raises ValueError if they cannot be asked for.

        `woken` is told of each shard of which there is news.
        """
        self._woken = woken
        if not self._options.reader_jobs:
            # One core is left for the planner, which all readers report to.
            number = self._number((cpu_count() or 1) - 1)
            self._readers = children = ReaderChildren(number, self._spec(number, LOOPBACK, self._address))
            children.begin()
            return
        self._readers = readers = ExecutorReaders(self._options.reader_jobs)
        # One slot is left for the batch itself: with readers in all of them no batch would ever begin.
        number = self._number(min(readers.executors, readers.slots - 1))
        if number >= readers.slots:
            log.warning("%d readers leave none of %d task slots for batches: %s", number, readers.slots, MEND)
        self.pool.absent = f"no reader has come; where no slot is free, {MEND}"
        # Tasks reach such a reader by the address by which it reaches the planner.
        spec = self._spec(number, self._address.host, Address("", "", self._address.port))

        def told(text: str) -> None:
            self.pool.absent = f"no reader is connected: {text}"
            log.warning("%s", text)

        readers.begin(number, spec, told)
        log.info("%d readers start on %d executors", number, readers.executors)

    def stop(self) -> None:
        """Have nobody wait for a reader any more."""
        self.pool.stop()

    def close(self) -> None:
        """End them all, and let all rows go."""
        self.transport.close()
        self.pool.stop()
        if self._readers is not None:
            self._readers.close()
        self.pool.close()

    def _news(self, key: str) -> None:
        if self._woken is not None:
            self._woken(key)

    def _number(self, room: int) -> int:
        asked = self._options.readers
        return max(1, min(room, READERS_MOST)) if asked is None else asked

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
    """Choose by the options who reads the shards of a query: the process that plans its batches, or readers.

    Either has a `source` that opens shards for the worker, a `buffer` in which what was read of one waits to be
    planned, and a `transport` that has planned rows reach tasks.
    """
    here = Transport(options.fetch, options.buffer_bytes // 2, options.spool_folder)
    if options.readers == 0 or options.fetch is None:
        return ReadHere(source, here)
    return QueryReaders(source_spec, options, options.fetch, place, here)
