"""A batch of a stream, without leases: its shards are cut into parts, and each task of Spark's reads one part alone.

The options say where the batch begins and ends (`Bounds`), the driver plans its parts (`planned`), and an executor
opens the stream with credentials of its own and reads one of them (`PartReading`).

Rule 1: parts are cut at positions, found once, and not at times: whatever the times of arrival are, each record lies in
exactly one part of its shard. A time is only asked where to cut, and parts take about the same time.
Rule 2: a cut that is not found quickly is left out; the part before it is larger then.
Rule 3: the shards are listed once the end of the slice has passed, so that none that a reshard makes later has records
of it. A parent and its children all take part: each record is in one of them.
Rule 4: a slice up to the present ends with the last number where the source has one, else with a time.
"""

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import zip_longest
from typing import Any, Protocol

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
from attrs import frozen
from pyspark.sql.datasource import DataSourceReader, InputPartition

from leasehold.adapters.consumer.cursor import Cursor, ShardPull
from leasehold.adapters.consumer.slices import Slice
from leasehold.adapters.sources.call_patience import Backoff
from leasehold.adapters.sources.protocol import SETTLE_SECONDS, Batch, Settled, Sliceable, Source
from leasehold.adapters.spark.feed import read_through
from leasehold.adapters.spark.lease_loop import STUCK_SECONDS
from leasehold.adapters.spark.options import Given
from leasehold.adapters.spark.rows import Columns
from leasehold.balancer.model import LATEST, SHARD_END, TRIM_HORIZON, HashRange, Lease, Position, Shard, at_timestamp
from leasehold.errors import SourceUnavailable
from leasehold.stores.printable import escaped

log = escaped(logging.getLogger("leasehold.spark"))

PARTS_MOST = 4
"""Parts of one shard: their readers share five requests and 2 MB a second (Kinesis), or are five (Event Hubs)."""
EVER_MS = 2**53
THREADS = 16
PROBE_SECONDS, LOOK_SECONDS, AHEAD_SECONDS = 20.0, 0.2, 10.0
FAULT_SECONDS = 0.4, 10.0


@frozen
class Bounds:
    """The bounds of what is read, both None where nobody says.

    since   the oldest record, LATEST, or a time
    until   LATEST, which is the present end, or a time
    tasks   how many tasks a batch should have at least; 0: as many as there are cores
    source  what the names of the source's options begin with
    """

    since: Position | None
    until: Position | None
    tasks: int
    source: str

    def __attrs_post_init__(self) -> None:
        """Raises ValueError, naming the option."""
        if self.until is None:
            return
        if self.since == LATEST:
            raise ValueError(self._no_beginning)
        begins_ms = self.begins.sub if self.begins.sequence == "AT_TIMESTAMP" else -1  # the oldest record is before all
        if self.until != LATEST and self.until.sub <= begins_ms:
            raise ValueError(
                f"option {self.source}.endingPosition: it is not later than {self.source}.startingPosition"
            )

    @property
    def begins(self) -> Position:
        """Where a batch begins. Raises ValueError if that is the present end."""
        if self.since == LATEST:
            raise ValueError(self._no_beginning)
        return self.since or TRIM_HORIZON

    def initial(self) -> dict[str, Any]:
        """Where a query's shards without a lease begin, as a configuration has it."""
        first = self.since or (LATEST if self.until is None else TRIM_HORIZON)
        named = {"initial_position": first.sequence}
        return named | ({"timestamp_ms": first.sub} if first.sequence == "AT_TIMESTAMP" else {})

    def of_query(self) -> Slice | None:
        """The slice that a query reads under leases before it ends; None if it does not end. Raises ValueError."""
        if self.until == LATEST:
            raise ValueError(
                f"option {self.source}.endingPosition: a query wants a time, since LATEST is another one for each "
                "worker; without it, trigger(availableNow=True) ends with what is there"
            )
        return None if self.until is None else Slice(self.begins, self.until.sub)

    @property
    def _no_beginning(self) -> str:
        return (
            f"option {self.source}.startingPosition: what ends by itself begins with the oldest record or at a time, "
            "not at LATEST"
        )


def bounds_of(given: Given, source: str, since: Mapping[str, Any] | None, until: Mapping[str, Any] | None) -> Bounds:
    """The bounds that options say, positions as a configuration has them. Raises ValueError, naming the option."""
    return Bounds(_position(since), _position(until), given.number("minPartitions", 0) or 0, source)


def _position(told: Mapping[str, Any] | None) -> Position | None:
    if told is None:
        return None
    name = told["initial_position"]
    return at_timestamp(told["timestamp_ms"]) if name == "AT_TIMESTAMP" else Position(name)


class BoundedSource(Source, Sliceable, Protocol):
    """A source that can tell when a shard has been read up to a time."""


class StreamPlace(Protocol):
    """A stream that anybody can open, the driver or an executor, with credentials of their own: it holds no secret."""

    @property
    def columns(self) -> Columns:
        """The columns that its records become."""
        ...

    @property
    def pause_seconds(self) -> float:
        """Between two readings of a shard, if it has one reader."""
        ...

    def open(self) -> Source:
        """The stream, for reading. Raises SourceError, ValueError."""
        ...

    def probe(self) -> BoundedSource:
        """The stream, for looking at single records. Raises SourceError, ValueError."""
        ...


@frozen
class ShardPart(InputPartition):
    """A part of a shard, for one task: what lies behind `begins`, up to and including `ends`.

    cut            the slice: what arrived at other times is left out
    ends           None: where the slice ends
    pause_seconds  between two readings
    """

    cut: Slice
    shard: str
    hash_range: HashRange | None
    begins: Position
    ends: Position | None
    pause_seconds: float


def between(
    begins: Position, marks: Iterable[Position], ends: Position | None
) -> list[tuple[Position, Position | None]]:
    """Parts that follow one another without a gap from `begins` to `ends`, cut behind each mark in between (rule 1)."""
    # Behind every number: where a time ends the part, no mark lies beyond it.
    most = (2, 0, 0) if ends is None else ends.order
    found = {mark.order: mark for mark in marks if begins.order < mark.order < most}
    inner = [found[order] for order in sorted(found)]
    return list(zip([begins, *inner], [*inner, ends], strict=True))


def moments(since_ms: int, until_ms: int, parts: int) -> list[int]:
    """The times that cut this one into equal parts."""
    return [since_ms + (until_ms - since_ms) * each // parts for each in range(1, parts)]


def planned(place: StreamPlace, bounds: Bounds, tasks: int) -> list[ShardPart]:
    """At least so many parts, where the shards allow it: the first ones of all shards before their second ones.

    Raises SourceError, ValueError.
    """
    begins = bounds.begins  # refused before anything is opened
    with closing(place.probe()) as source:
        # Listed once before, for any shard of it tells the service's own time.
        if not (listed := source.shards()):
            return []
        if (until := _end(source, _lease(listed[0]), bounds)) <= begins.sub:
            return []  # it is to begin later than now
        listed = source.shards()  # rule 3
        plan = _ShardPlanner(place, source, Slice(begins, until), min(PARTS_MOST, -(-tasks // len(listed))))
        # Each shard is asked for several records, and a large stream has hundreds of shards.
        with ThreadPoolExecutor(THREADS, thread_name_prefix="leasehold-plan") as pool:
            rows = zip_longest(*pool.map(plan.parts, listed))
        # Tasks start in this order: with few cores all shards are begun before any is read by two.
        return [part for row in rows for part in row if part is not None]


def _end(source: BoundedSource, lease: Lease, bounds: Bounds) -> int:
    """When the slice ends, once that has passed."""
    # A batch must be the same however often its tasks run, so its end is one fixed time, or one number.
    if bounds.until is not None and bounds.until != LATEST:
        until = bounds.until.sub
    elif _told(source, lease).last is not None:
        return EVER_MS
    else:
        until = source.latest(lease).sub + 1000  # the service tells its time in seconds: what was put just now is in it
    deadline = time.monotonic() + AHEAD_SECONDS  # clocks differ
    while source.settled(lease, until / 1000 - SETTLE_SECONDS) is None:
        if time.monotonic() > deadline:
            name = f"option {bounds.source}.endingPosition"
            raise ValueError(f"{name}: it lies in the future, and a batch reads what is there; stream to read on")
        time.sleep(LOOK_SECONDS)
    return until


def _lease(shard: Shard) -> Lease:
    return Lease(shard.id, hash_range=shard.hash_range)


def _told(source: BoundedSource, lease: Lease) -> Settled:
    """The last record that is there, where the source tells."""
    return source.settled(lease, 0.0) or Settled()


class _ShardPlanner:
    """Cuts the shards of one slice."""

    def __init__(self, place: StreamPlace, source: BoundedSource, cut: Slice, parts: int) -> None:
        self._place, self._source, self._cut, self._parts = place, source, cut, parts

    def parts(self, shard: Shard) -> list[ShardPart]:
        """The parts of one shard; none if it has no records in the slice."""
        lease, cut, ends = _lease(shard), self._cut, None
        told = Settled()
        if self._parts > 1 or cut.until_ms == EVER_MS:
            told = _told(self._source, lease)
        # A task for nothing would open the shard, and wait at its tip until the service says that it is empty.
        if told.last == TRIM_HORIZON or (told.arrived is not None and told.arrived * 1000 < cut.begin.sub):
            return []
        if cut.until_ms == EVER_MS:
            ends = told.last
        newest = cut.until_ms if told.arrived is None else min(cut.until_ms, int(told.arrived * 1000))
        marks = list[Position]()
        if self._parts > 1 and (first := self._first(lease, cut.begin)) is not None:
            # From the first record that is there: equal parts of a time without records would leave most tasks empty.
            times = moments(max(first[1], cut.since_ms), newest, self._parts)
            firsts = (self._first(lease, at_timestamp(each)) for each in times)
            marks = [mark[0] for mark in firsts if mark is not None]
        found = between(cut.begin, marks, ends)
        # Tasks read the parts of a shard at the same time, and share what the service allows its readers.
        pause = self._place.pause_seconds * len(found)
        return [ShardPart(cut, shard.id, shard.hash_range, begins, until, pause) for begins, until in found]

    def _first(self, lease: Lease, start: Position) -> tuple[Position, int] | None:
        """The first position behind this start, and when its record arrived (rule 2)."""
        deadline = time.monotonic() + PROBE_SECONDS
        try:
            with closing(self._source.open(lease, start)) as reader:
                while time.monotonic() < deadline:
                    batch = reader.read()
                    if batch.records:
                        return batch.records[0].position, round((batch.records[0].arrived or 0.0) * 1000)
                    if batch.ended or batch.behind_seconds == 0:
                        break
                    time.sleep(batch.wait_seconds)
        except SourceUnavailable:
            pass  # rule 2: reading will have to wait for it, planning need not
        return None


class SlicedReader(DataSourceReader):
    """The reader of one batch, by Spark's interface."""

    def __init__(self, place: StreamPlace, bounds: Bounds, cores: int) -> None:
        self._place, self._bounds, self._tasks = place, bounds, bounds.tasks or cores

    def partitions(self) -> list[InputPartition]:
        """Plan the tasks, on the driver."""
        return [*planned(self._place, self._bounds, self._tasks)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task, on an executor; the same ones however often it is run."""
        if isinstance(partition, ShardPart):  # Spark makes one of its own where there are none
            with closing(self._place.open()) as source:
                yield from PartReading(source, self._place.columns, partition).rows()


class PartReading:
    """Reads one part once."""

    def __init__(self, source: Source, columns: Columns, part: ShardPart) -> None:
        self._columns, self._part = columns, part
        # A part that ends with a number needs no time to end at, so no odd time can end it early.
        source = part.cut.source(source) if part.ends is None else source
        self._lease = Lease(part.shard, hash_range=part.hash_range)
        self._cursor = Cursor(part.begins, until=part.ends or SHARD_END)
        self._pull = ShardPull(self._cursor, lambda start: source.open(self._lease, start))
        self._faults = Backoff(*FAULT_SECONDS)
        self._heard = time.monotonic()

    def rows(self) -> Iterator[pa.RecordBatch]:
        """All of them. Raises TimeoutError if nothing comes for too long; SourceError."""
        began = time.monotonic()
        with closing(read_through(self._pull, self._columns, self._lease, within=self._part.cut.within)) as answers:
            for answer, parts in answers:
                if isinstance(answer, SourceUnavailable):
                    log.warning("shard %s: trying again: %s", self._part.shard, answer)
                yield from (rows for rows in parts if rows.num_rows)
                if not self._cursor.over:
                    time.sleep(self._pause(answer, began))
                began = time.monotonic()

    def _pause(self, answer: Batch | SourceUnavailable, began: float) -> float:
        now = time.monotonic()
        # At the tip there is nothing to hear, and what is to come is there at once.
        # An answer that is behind the tip is one, though it brought nothing: shards have empty stretches.
        if isinstance(answer, Batch) and (answer.end is not None or answer.behind_seconds):
            self._heard = now
        elif now - self._heard > STUCK_SECONDS:
            raise TimeoutError(
                f"shard {self._part.shard}: nothing came of it for {STUCK_SECONDS:g} s; the task's log may say why it "
                "cannot be read"
            )
        if isinstance(answer, SourceUnavailable):
            return self._faults.next()
        self._faults.reset()
        return max(answer.wait_seconds, began + self._part.pause_seconds - now)
