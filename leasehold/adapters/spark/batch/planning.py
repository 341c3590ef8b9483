"""Plans the tasks that read a slice of a stream: the shards, each cut into parts of about the same time.

Rule 1: parts are cut at positions, found once, and not at times: whatever the times of arrival are, each record lies in
exactly one part of its shard. A time is only asked where to cut.
Rule 2: a cut that is not found quickly is left out; the part before it is larger then.
Rule 3: the shards are listed once the end of the slice has passed, so that none that a reshard makes later has records
of it. A parent and its children all take part: each record is in one of them.
Rule 4: a slice up to the present ends with the last number where the source has one, else with a time.
"""

import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import zip_longest

from attrs import frozen
from pyspark.sql.datasource import InputPartition

from leasehold.adapters.reading.slices.slice import Slice
from leasehold.adapters.sources.protocol import SETTLE_SECONDS, Settled, SourceUnavailable
from leasehold.adapters.spark.batch.bounds import BoundedSource, Bounds, StreamPlace
from leasehold.balancer.model import LATEST, TRIM_HORIZON, HashRange, Lease, Position, Shard, at_timestamp

PARTS_MOST = 4
"""Of one shard: its readers share five requests and two megabytes a second (Kinesis), or are five (Event Hubs)."""
EVER_MS = 2**53
THREADS = 16
PROBE_SECONDS, LOOK_SECONDS, AHEAD_SECONDS = 20.0, 0.2, 10.0


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
        if not (listed := source.shards()):
            return []
        if (until := _end(source, _lease(listed[0]), bounds)) <= begins.sub:
            return []  # it is to begin later than now
        listed = source.shards()  # rule 3
        plan = _ShardPlanner(place, source, Slice(begins, until), min(PARTS_MOST, -(-tasks // len(listed))))
        with ThreadPoolExecutor(THREADS, thread_name_prefix="leasehold-plan") as pool:
            rows = zip_longest(*pool.map(plan.parts, listed))
        return [part for row in rows for part in row if part is not None]


def _end(source: BoundedSource, lease: Lease, bounds: Bounds) -> int:
    """When the slice ends, once that has passed."""
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
        """Of one shard; none if it has nothing."""
        lease, cut, ends = _lease(shard), self._cut, None
        told = Settled()
        if self._parts > 1 or cut.until_ms == EVER_MS:
            told = _told(self._source, lease)
        if told.last == TRIM_HORIZON or (told.arrived is not None and told.arrived * 1000 < cut.begin.sub):
            return []
        if cut.until_ms == EVER_MS:
            ends = told.last
        newest = cut.until_ms if told.arrived is None else min(cut.until_ms, int(told.arrived * 1000))
        found = between(cut.begin, self._marks(lease, newest) if self._parts > 1 else [], ends)
        pause = self._place.pause_seconds * len(found)
        return [ShardPart(cut, shard.id, shard.hash_range, begins, until, pause) for begins, until in found]

    def _marks(self, lease: Lease, newest: int) -> list[Position]:
        if (first := self._first(lease, self._cut.begin)) is None:
            return []
        times = moments(max(first[1], self._cut.since_ms), newest, self._parts)
        found = (self._first(lease, at_timestamp(each)) for each in times)
        return [mark[0] for mark in found if mark is not None]

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
            pass
        return None
