"""The reader's side of one shard: reads it ahead in pieces, which wait until the planner puts them into a batch.

Rule 1: what is reported is here, and follows what was reported before without a gap.
Rule 2: what waits is bounded: a shard has its part of the reader's room, and is not read while that is full.
Rule 3: a fault says nothing about the records: the next reader of the source is opened behind what is here
(`reading/cursor.py`, whose consumer is the planner: what was reported to it is delivered).
"""

import logging
import math
from collections import deque
from collections.abc import Callable
from threading import Lock

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
from attrs import frozen

from leasehold.adapters.reading.cursor import Cursor, ShardPull
from leasehold.adapters.sources.backoff import Backoff
from leasehold.adapters.sources.protocol import Batch, Source, SourceError, SourceUnavailable
from leasehold.adapters.spark.chunks import ANY_SIZE, Chunk, Columns, RowBuffer, SourceSpec, chunk_of
from leasehold.adapters.spark.options import Address
from leasehold.adapters.spark.readers.messages import FromReader, Open, Piece, ShardFailure, ShardReport
from leasehold.stores.printable import escaped

log = escaped(logging.getLogger("leasehold.spark"))

ROOM_SECONDS = 1.0
FAULT_SECONDS = 0.2, 10.0


@frozen
class ReaderSpec:
    """The instructions that a reader is given as it starts; nothing in them is secret but the token.

    planner     where the planner listens for readers
    token       of the query
    address     where tasks fetch this reader's rows; its host is "" for the address by which it reaches the planner
    stock       what is read
    rows, bytes most that is read ahead, all shards of this reader together
    piece_rows, piece_bytes
                most of a piece
    folder      where rows of batches wait for which there is no room in memory
    """

    planner: tuple[str, int]
    token: bytes
    address: Address
    stock: SourceSpec
    rows: int
    bytes: int
    piece_rows: int
    piece_bytes: int
    folder: str


def pieces_of(columns: Columns, chunk: Chunk, rows: int, size: int) -> list[tuple[Chunk, int]]:
    """A chunk cut into pieces of at most so many rows and bytes, each with its size; a larger row stands alone."""
    buffer, found = RowBuffer(columns), list[tuple[Chunk, int]]()
    buffer.put(chunk)
    while buffer:
        before = buffer.bytes
        if (piece := buffer.take(rows, size) or buffer.take(1, ANY_SIZE)) is not None:
            found.append((piece, before - buffer.bytes))
    return found


class ShardShelf:
    """Reads one shard ahead of the planner.

    asked   which shard, and from where on
    source  opens its readers
    spec    how far is read ahead
    say     tells the planner
    shards  how many shards share the room
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
        """The rows up to this piece, counted from the first ever; None if they are not all here."""
        with self._lock:
            wanted = count - self._gone_through
            if self.closed or not 0 <= wanted <= len(self._pieces):
                return None
            taken = [self._pieces.popleft() for _ in range(wanted)]
            self._gone_through = count
            self._rows -= sum(chunk.count for chunk, _ in taken)
            self._bytes -= sum(size for _, size in taken)
        return [chunk.rows for chunk, _ in taken if chunk.count]

    def close(self) -> None:
        """Read no more, and let go of what waits; the next step is the last."""
        with self._lock:
            self.closed = True
            self._pieces.clear()

    def step(self, now: float) -> float:
        """Read at most once, and return when to call again: never (infinity) once it is over."""
        if self.closed:
            return self._end()
        if self._full:
            return now + ROOM_SECONDS
        try:
            batch = self._read()
        except SourceUnavailable as fault:
            wait = self._faults.next()
            log.warning("shard %s: trying again in %.1f s: %s", self._asked.lease.key, wait, fault)
            return now + wait
        except SourceError as fault:
            self._say(ShardFailure(self._asked.opening, str(fault)))
            return self._end()
        self._faults.reset()
        if batch.ended:
            return self._end()
        return now + max(self._spec.stock.interval_seconds, batch.wait_seconds)

    @property
    def _full(self) -> bool:
        shards = max(1, self._shards())
        rows, size = max(1, self._spec.rows // shards), max(1, self._spec.bytes // shards)
        return self._rows >= rows or self._bytes >= size

    def _read(self) -> Batch:
        def keep(batch: Batch) -> None:
            columns, spec = self._spec.stock.columns, self._spec
            chunk = chunk_of(columns, self._asked.lease, batch)
            if chunk is None and batch.behind_seconds is None:
                return
            pieces = [] if chunk is None else pieces_of(columns, chunk, spec.piece_rows, spec.piece_bytes)
            told = tuple(Piece(piece.count, size, piece.ends) for piece, size in pieces)
            more = (batch.behind_seconds, batch.size, batch.ended, batch.children)
            with self._lock:  # else the planner may ask for what it was told of, and it is not here yet
                # Before it counts: the planner names pieces by their number, and knows those that it was told of.
                self._say(ShardReport(self._asked.opening, told, *more))
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
