"""A reader: connects to the planner, reads the shards that the planner assigns, and sends tasks their rows.

A reader lives as long as its connection to the planner. When that ends, for whatever reason, so does the reader. It
sends something every second, so that the planner can tell it from one that hangs.

Each shard is read ahead in pieces, which wait until the planner puts them into a batch (`ShardReadAhead`).

Rule 1: everything reported is kept here, and each report follows the previous one without a gap.
Rule 2: buffered rows are bounded. Each shard has its share of the reader's room, and is not read while that is full.
Rule 3: a fault says nothing about the records. The next reader of the source is opened after what is here
(`consumer/cursor.py`, where the planner is the consumer, so whatever was reported to it is delivered).
"""

import logging
import math
import socket
from collections import deque
from collections.abc import Callable
from contextlib import closing
from threading import Event, Lock
from typing import assert_never

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
from attrs import frozen

from leasehold.adapters.consumer.cursor import Cursor, ShardPull
from leasehold.adapters.consumer.schedule import Schedule
from leasehold.adapters.json_form import BadJsonField
from leasehold.adapters.sources.call_patience import Backoff
from leasehold.adapters.sources.protocol import Batch, Source
from leasehold.adapters.spark.feed import ANY_SIZE, RowBuffer
from leasehold.adapters.spark.fetching import RowServer
from leasehold.adapters.spark.options import Address
from leasehold.adapters.spark.readers.messages import (
    Alive,
    BatchKept,
    Close,
    Discard,
    FromPlanner,
    FromReader,
    Hello,
    Keep,
    Open,
    Piece,
    ShardFailure,
    ShardReport,
    from_planner,
    line_of,
    lines,
)
from leasehold.adapters.spark.rows import Chunk, Columns, SourceSpec, chunk_of
from leasehold.adapters.threads import ThreadScheduler, seconds, spawn
from leasehold.errors import SourceError, SourceUnavailable
from leasehold.stores.printable import escaped

log = escaped(logging.getLogger("leasehold.spark"))

ROOM_SECONDS = 1.0
FAULT_SECONDS = 0.2, 10.0


@frozen
class ReaderSpec:
    """The instructions that a reader gets at its start. Only the token is secret.

    Attributes:
        planner: Where the planner listens for readers.
        token: The token of the query.
        address: Where tasks fetch this reader's rows. A host of "" stands for the address that reaches the planner.
        source_spec: What is read.
        rows: The most rows to read ahead, over all shards of this reader.
        bytes: The most bytes to read ahead, over all shards of this reader.
        piece_rows: The most rows in a piece.
        piece_bytes: The most bytes in a piece.
        folder: Where to keep rows of batches that do not fit into memory.
    """

    planner: tuple[str, int]
    token: bytes
    address: Address
    source_spec: SourceSpec
    rows: int
    bytes: int
    piece_rows: int
    piece_bytes: int
    folder: str


def pieces_of(columns: Columns, chunk: Chunk, rows: int, size: int) -> list[tuple[Chunk, int]]:
    """Cut a chunk into pieces within both limits, each with its size. A row that is larger gets its own piece."""
    buffer, pieces = RowBuffer(columns), list[tuple[Chunk, int]]()
    buffer.put(chunk)
    while buffer:
        before = buffer.bytes
        if (piece := buffer.take(rows, size) or buffer.take(1, ANY_SIZE)) is not None:
            pieces.append((piece, before - buffer.bytes))
    return pieces


class ShardReadAhead:
    """Reads one shard ahead of the planner.

    Args:
        asked: The shard to read and the position to start from.
        source: Opens its readers.
        spec: How far to read ahead.
        say: Sends a message to the planner.
        shards: Returns how many shards share the room.
    """

    def __init__(
        self,
        asked: Open,
        source: Source,
        spec: ReaderSpec,
        say: Callable[[FromReader], None],
        shards: Callable[[], int],
    ) -> None:
        self._asked, self._spec, self._say, self._shards = asked, spec, say, shards
        self._pull = ShardPull(Cursor(asked.start), lambda start: source.open(asked.lease, start))
        self._pieces: deque[tuple[Chunk, int]] = deque()
        self._gone_through = self._rows = self._bytes = 0
        self._lock = Lock()
        self._faults = Backoff(*FAULT_SECONDS)
        self.closed = False

    def take(self, count: int) -> list[pa.RecordBatch] | None:
        """Remove and return the rows of the pieces up to number `count`. Return None if they are not all here."""
        with self._lock:
            # Number pieces from the first one ever: planner and reader count the same pieces, because the connection
            # between them loses no message.
            missing = count - self._gone_through
            if self.closed or not 0 <= missing <= len(self._pieces):
                return None
            pieces = [self._pieces.popleft() for _ in range(missing)]
            self._gone_through = count
            self._rows -= sum(chunk.count for chunk, _ in pieces)
            self._bytes -= sum(size for _, size in pieces)
        return [chunk.rows for chunk, _ in pieces if chunk.count]

    def close(self) -> None:
        """Stop reading and drop the pieces that wait. The next step is the last."""
        with self._lock:
            self.closed = True
            # Another reader has the shard now, or the planner reads again what was not planned.
            self._pieces.clear()

    def step(self, now: float) -> float:
        """Read at most once, and return when to call again: infinity once the shard is done or closed."""
        if self.closed:
            return self._end()
        spec, shards = self._spec, max(1, self._shards())
        # Each shard has room for something, however many there are.
        if self._rows >= max(1, spec.rows // shards) or self._bytes >= max(1, spec.bytes // shards):
            return now + ROOM_SECONDS
        try:
            batch = self._read()
        except SourceUnavailable as fault:
            wait = self._faults.next()
            log.warning("shard %s: trying again in %.1f s: %s", self._asked.lease.key, wait, fault)
            return now + wait
        except SourceError as fault:
            # Report it to the planner, because only the planner can release the lease.
            self._say(ShardFailure(self._asked.opening, str(fault)))
            return self._end()
        self._faults.reset()
        if batch.ended:
            return self._end()
        return now + max(self._spec.source_spec.interval_seconds, batch.wait_seconds)

    def _read(self) -> Batch:
        def keep(batch: Batch) -> None:
            columns, spec = self._spec.source_spec.columns, self._spec
            chunk = chunk_of(columns, self._asked.lease, batch)
            # Do not report a read without a response, because it would look like news of the shard.
            if chunk is None and batch.behind_seconds is None:
                return
            pieces = [] if chunk is None else pieces_of(columns, chunk, spec.piece_rows, spec.piece_bytes)
            reported = tuple(Piece(piece.count, size, piece.ends) for piece, size in pieces)
            details = (batch.behind_seconds, batch.size, batch.ended, batch.children)
            with self._lock:  # otherwise the planner could ask for pieces that are not here yet
                # Report them before they count: the planner names pieces by number, and knows only what was reported.
                self._say(ShardReport(self._asked.opening, reported, *details))
                if chunk is not None and not self.closed:
                    self._pieces.extend(pieces)
                    self._rows += chunk.count
                    self._bytes += sum(size for _, size in pieces)
            if chunk is not None:
                self._pull.cursor.batch_read(chunk.ends)

        return self._pull.read(keep)

    def _end(self) -> float:
        self._pull.close()
        return math.inf


CONNECT_SECONDS = 30.0
ALIVE_SECONDS = 1.0
END_SECONDS = 5.0
"""How long reads under way may take to end once the planner is gone."""
THREADS = 16


class ShardReader:
    """A reader of some shards of a query, from `run` until the planner is gone."""

    def __init__(self, spec: ReaderSpec) -> None:
        self._spec = spec
        self._read_aheads: dict[int, ShardReadAhead] = {}
        self._over, self._writing = Event(), Lock()

    def run(self) -> None:
        """Serve the planner until it goes away. Raises OSError if it cannot be reached."""
        spec = self._spec
        with (
            closing(
                spec.source_spec.open()
            ) as self._source,  # first, because opening may take a while, and nothing could be sent meanwhile
            socket.create_connection(spec.planner, CONNECT_SECONDS) as self._connection,
        ):
            # The planner may send nothing for hours. If it is gone, the connection ends.
            self._connection.settimeout(None)
            # A report is small and a batch may be waiting for it, so do not delay it.
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            address = spec.address
            if not address.host:
                host = self._connection.getsockname()[0]
                address = Address(host, host, address.port)
            with closing(RowServer(address, spec.bytes // 2, spec.folder)) as self._rows:
                # Send the token first. Without it the planner would send nothing, and close the connection.
                self._connection.sendall(spec.token)
                self._say(Hello(address.host, self._rows.port, self._rows.token))
                try:
                    self._serve()
                finally:
                    self._over.set()

    def _serve(self) -> None:
        # Run one step of a shard at a time, each when the previous one requested it.
        self._steps = Schedule(THREADS, ThreadScheduler(seconds), self._fail)

        def beat() -> None:
            # A planner that receives nothing for ten seconds considers this reader gone, however idle its shards are.
            while not self._over.wait(ALIVE_SECONDS):
                self._say(Alive())

        spawn("leasehold-alive", beat, self._fail)
        try:
            with self._connection.makefile("rb") as stream:
                for line in lines(stream):
                    self._obey(from_planner(line))
        except (OSError, BadJsonField) as fault:
            log.warning("the planner is gone: %s", fault)
        finally:
            for opening, ahead in self._read_aheads.items():
                ahead.close()
                self._steps.wake(str(opening))
            until = seconds() + END_SECONDS
            self._steps.drain(until)  # the last step of each shard closes what it has open
            self._steps.close(until)

    def _obey(self, message: FromPlanner) -> None:
        match message:
            case Open():
                ahead = ShardReadAhead(message, self._source, self._spec, self._say, lambda: len(self._read_aheads))
                self._read_aheads[message.opening] = ahead
                self._steps.add(str(message.opening), ahead.step)
            case Close(opening):
                if (closed := self._read_aheads.pop(opening, None)) is not None:
                    # Wake the step, which closes the connection: the next reader of this shard may be waiting for it.
                    closed.close()
                    self._steps.wake(str(opening))
            case Keep():
                self._keep(message)
                # Send this after everything is kept, because tasks may come from then on.
                self._say(BatchKept(message.number))
            case Discard(number):
                self._rows.discard(number)
            case _:
                assert_never(message)

    def _keep(self, message: Keep) -> None:
        for task, openings in message.parts:
            taken = [
                (opening, None if (ahead := self._read_aheads.get(opening)) is None else ahead.take(count))
                for opening, count in openings
            ]
            complete = [rows for _, rows in taken if rows is not None]
            if len(complete) == len(taken) and any(complete):  # otherwise tasks ask the planner
                try:
                    self._rows.keep(message.number, task, [batch for rows in complete for batch in rows])
                except OSError as fault:  # keep reading: the disk may just be full
                    log.warning(
                        "batch %d: rows cannot be kept here, so tasks ask the planner: %s", message.number, fault
                    )
            for opening, _ in taken:
                self._steps.wake(str(opening))  # there is room again

    def _say(self, message: FromReader) -> None:
        try:
            with self._writing:  # several shards may report at once
                self._connection.sendall(line_of(message))
        except OSError as fault:
            first = not self._over.is_set()  # otherwise it is already known that the planner is gone
            self._fail(fault)
            if first:
                log.warning("the planner does not hear: %s", fault)

    def _fail(self, _fault: BaseException) -> None:
        """End the reader. Others will read its shards."""
        self._over.set()
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            log.debug("the connection was closed before")
