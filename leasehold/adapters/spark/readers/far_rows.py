"""The rows that readers have, as the planner knows them: how many, how large, and where they end."""

from collections import deque
from collections.abc import Callable
from threading import Lock

from attrs import field, frozen

from leasehold.adapters.sources.passing import PassingSource
from leasehold.adapters.sources.protocol import Batch, Source, SourceError, SourceUnavailable
from leasehold.adapters.spark.chunks import ANY_SIZE, ArrowBatch, Chunk, Columns
from leasehold.adapters.spark.offsets import Range
from leasehold.adapters.spark.readers.messages import Piece, ShardReport
from leasehold.balancer.model import Lease, Position

POLL_SECONDS = 1.0
"""How often a shard is looked at of which nothing is reported; a report wakes it at once."""


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
                    raise ValueError(f"{piece.ends.sequence} was reported behind {self._reported_to.sequence}")
                self._reported_to = piece.ends
            self._count += len(report.pieces)
            self._reports.append((FarRows(self, begins, first, report.pieces), report))

    def fail(self, text: str) -> None:
        """Note that the shard cannot be read, after all that was reported."""
        self._fault = text

    def read(self) -> Batch:
        """Everything reported since the last call. Raises SourceUnavailable if the reader is gone, and SourceError."""
        if self.gone:
            raise SourceUnavailable("the process that read it is gone, or reads it no more")
        with self._lock:
            new, self._reports = self._reports, deque()
        if not new:
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
        )

    def close(self) -> None:
        """Have it read no more."""
        self.gone = True
        self._closed(self)


@frozen
class FarRows:
    """Some pieces of a shard, one behind another, which its reader has.

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


class FarBuffer:
    """The pieces of one shard that were reported and not planned. Not safe for threads by itself."""

    def __init__(self, _columns: Columns) -> None:
        self._rows: deque[FarRows] = deque()  # one piece each
        self.count = self.bytes = 0

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


class FarSource(PassingSource):
    """A stream whose shards are opened by readers, and which is asked all else from here."""

    def __init__(self, source: Source, opened: Callable[[Lease, Position], FarReader]) -> None:
        super().__init__(source)
        self._opened = opened

    def open(self, lease: Lease, start: Position) -> FarReader:
        """Have a reader read it."""
        return self._opened(lease, start)
