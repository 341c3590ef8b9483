"""Reads a stream in a Spark batch, without leases. Each shard is cut into parts, and each task reads one part.

The options set the bounds of the batch (`ReadBounds`), and the driver plans its parts (`plan_parts`). Each executor
opens the stream with its own credentials and reads one part (`PartReader`).

Rule 1: parts are cut at positions that were looked up once, not at times. Therefore, each record is in exactly one part
of its shard, whatever its arrival time. Times are used only to find positions that divide the work about equally.
Rule 2: if the position of a cut is not found quickly, the cut is left out, and the parts on its two sides become one.
Rule 3: the shards are listed once the end of the slice has passed. Shards that are created later therefore have no
records in the slice. A parent shard and its children are all read, because each record is in only one of them.
Rule 4: a slice without an end time ends at the shard's last sequence number. If the source cannot look up that number,
the slice ends at the present time.
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

from leasehold.adapters.consumer.cursor import Cursor, ShardReader
from leasehold.adapters.consumer.slices import Slice
from leasehold.adapters.sources.call_timeouts import Backoff
from leasehold.adapters.sources.protocol import SETTLE_SECONDS, Batch, SettledShard, SliceableSource, Source
from leasehold.adapters.spark.lease_loop import STALL_SECONDS
from leasehold.adapters.spark.options import OptionReader
from leasehold.adapters.spark.range_reader import read_range
from leasehold.adapters.spark.rows import SourceColumns
from leasehold.balancer.model import LATEST, SHARD_END, TRIM_HORIZON, HashRange, Lease, Position, Shard, at_timestamp
from leasehold.errors import SourceUnavailable
from leasehold.stores.printable import make_safe_logger

log = make_safe_logger(logging.getLogger("leasehold.spark"))

PARTS_PER_SHARD_MAX = 4
"""The maximum number of parts of one shard. The number is small because a Kinesis shard allows only five requests and 2
MB per second, and Event Hubs only five readers per partition."""
FOREVER_MS = 2**53
PLANNING_THREADS = 16
LOOKUP_SECONDS_MAX, END_POLL_SECONDS, CLOCK_SKEW_SECONDS = 20.0, 0.2, 10.0
BACKOFF_SECONDS = 0.4, 10.0


@frozen
class ReadBounds:
    """The bounds of the records to read. A position is None if no option sets it.

    Attributes:
        since: TRIM_HORIZON (the oldest record), LATEST, or a time.
        until: LATEST (the present end), or a time.
        tasks: The minimum number of tasks in a batch; 0 for one task per core.
        source: The prefix of the source's option names.
    """

    since: Position | None
    until: Position | None
    tasks: int
    source: str

    def __attrs_post_init__(self) -> None:
        """Check the bounds. Raises ValueError, naming the option."""
        if self.until is None:
            return
        if self.since == LATEST:
            raise ValueError(self._start_error_text)
        begins_ms = self.begins.sub if self.begins.sequence == "AT_TIMESTAMP" else -1  # TRIM_HORIZON is before any time
        if self.until != LATEST and self.until.sub <= begins_ms:
            raise ValueError(
                f"option {self.source}.endingPosition: it is not later than {self.source}.startingPosition"
            )

    @property
    def begins(self) -> Position:
        """The position at which a batch begins. Raises ValueError for LATEST, because a batch reads stored records."""
        if self.since == LATEST:
            raise ValueError(self._start_error_text)
        return self.since or TRIM_HORIZON

    def find_initial_position(self) -> dict[str, Any]:
        """Return the start position of shards without a lease, as fields of a configuration."""
        start_position = self.since or (LATEST if self.until is None else TRIM_HORIZON)
        position_fields = {"initial_position": start_position.sequence}
        return position_fields | (
            {"timestamp_ms": start_position.sub} if start_position.sequence == "AT_TIMESTAMP" else {}
        )

    def make_query_slice(self) -> Slice | None:
        """Return the slice that the query reads before it ends, or None if no option sets an end.

        Raises ValueError if the end is LATEST.
        """
        if self.until == LATEST:
            raise ValueError(
                f"option {self.source}.endingPosition: a query needs a time here, because LATEST differs between its "
                "workers; to read what exists now, leave it out and use trigger(availableNow=True)"
            )
        return None if self.until is None else Slice(self.begins, self.until.sub)

    @property
    def _start_error_text(self) -> str:
        return (
            f"option {self.source}.startingPosition: a batch, or a query with an ending position, must begin at the "
            "oldest record or at a time, not at LATEST"
        )


def parse_bounds(
    opts: OptionReader, source: str, since: Mapping[str, Any] | None, until: Mapping[str, Any] | None
) -> ReadBounds:
    """Return the bounds that the options set. Raises ValueError, naming the option.

    Args:
        opts: All options.
        source: The prefix of the source's option names.
        since: The position at which to begin, as fields of a configuration, or None.
        until: The position at which to end, as fields of a configuration, or None.
    """
    return ReadBounds(
        _parse_position(since), _parse_position(until), opts.read_optional_number("minPartitions") or 0, source
    )


def _parse_position(position_fields: Mapping[str, Any] | None) -> Position | None:
    if position_fields is None:
        return None
    position_name = position_fields["initial_position"]
    return at_timestamp(position_fields["timestamp_ms"]) if position_name == "AT_TIMESTAMP" else Position(position_name)


class BoundedSource(Source, SliceableSource, Protocol):
    """A source that can find out whether a shard has been read up to a time."""


class StreamLocation(Protocol):
    """A stream that the driver or an executor can open with its own credentials. It contains no secret."""

    @property
    def columns(self) -> SourceColumns:
        """The columns of a row that is made from a record."""
        ...

    @property
    def pause_seconds(self) -> float:
        """The time between two reads of a shard by the same reader, in seconds, if the shard has no other readers."""
        ...

    def open(self) -> Source:
        """Open the stream for reading. Raises SourceError, ValueError."""
        ...

    def open_for_lookup(self) -> BoundedSource:
        """Open the stream for looking up single records. Raises SourceError, ValueError."""
        ...


@frozen
class ShardPart(InputPartition):
    """A part of a shard, for one task: the records after `begins`, up to and including `ends`.

    Attributes:
        time_slice: The slice of the batch. Records that arrived outside this slice are left out.
        shard: The shard.
        hash_range: The shard's hash range.
        begins: The position after which the part begins.
        ends: The position at which the part ends; None for the end of the slice.
        pause_seconds: The time between two reads of this part.
    """

    time_slice: Slice
    shard: str
    hash_range: HashRange | None
    begins: Position
    ends: Position | None
    pause_seconds: float


def split_range(
    begin_position: Position, cut_positions: Iterable[Position], end_position: Position | None
) -> list[tuple[Position, Position | None]]:
    """Return parts that cover `begin_position` to `end_position` without a gap (rule 1).

    The parts are cut after each position in `cut_positions`.
    """
    # If `end_position` is None, the slice ends at a time, and every cut lies before that time. In that case, use an
    # order that is larger than the order of any position.
    end_order = (2, 0, 0) if end_position is None else end_position.order
    cuts_by_order = {
        cut_position.order: cut_position
        for cut_position in cut_positions
        if begin_position.order < cut_position.order < end_order
    }
    inner_cuts = [cuts_by_order[order] for order in sorted(cuts_by_order)]
    return list(zip([begin_position, *inner_cuts], [*inner_cuts, end_position], strict=True))


def split_times(since_ms: int, until_ms: int, parts: int) -> list[int]:
    """Return the times at which to cut this interval into `parts` equal parts."""
    return [since_ms + (until_ms - since_ms) * part // parts for part in range(1, parts)]


def plan_parts(location: StreamLocation, bounds: ReadBounds, tasks: int) -> list[ShardPart]:
    """Plan at least `tasks` parts if the shards allow it.

    The result begins with the first part of every shard, followed by all second parts, and so on.

    Raises SourceError, ValueError.
    """
    begin_position = bounds.begins  # the property may raise, so read it before the stream is opened
    with closing(location.open_for_lookup()) as source:
        # List the shards first, because the end of the batch is looked up in one of them.
        if not (shards := source.shards()):
            return []
        if (until_ms := _wait_for_end_ms(source, _make_lease(shards[0]), bounds)) <= begin_position.sub:
            return []  # the batch begins in the future, so it is empty
        shards = source.shards()  # rule 3: list the shards again after the end of the slice
        planner = _ShardPlanner(
            location, source, Slice(begin_position, until_ms), min(PARTS_PER_SHARD_MAX, -(-tasks // len(shards)))
        )
        # Use threads, because planning a shard takes several requests, and a large stream has hundreds of shards.
        with ThreadPoolExecutor(PLANNING_THREADS, thread_name_prefix="leasehold-plan") as pool:
            parts_by_turn = zip_longest(*pool.map(planner.plan_parts_of_shard, shards))
        # Spark starts the tasks in this order. If there are few cores, every shard's first part is started before the
        # second part of any shard.
        return [part for parts_of_turn in parts_by_turn for part in parts_of_turn if part is not None]


def _wait_for_end_ms(source: BoundedSource, lease: Lease, bounds: ReadBounds) -> int:
    """Wait until the slice has ended. Return its end in milliseconds, or `FOREVER_MS` for the shard's last record."""
    # A task that runs again must read the same rows, so determine the end of the batch once, as a fixed time or
    # sequence number.
    if bounds.until is not None and bounds.until != LATEST:
        until_ms = bounds.until.sub
    elif _find_last_record(source, lease).last is not None:
        return FOREVER_MS
    else:
        # The service truncates arrival times to the second, so add a second to include the records that have just been
        # written.
        until_ms = source.latest(lease).sub + 1000
    deadline = time.monotonic() + CLOCK_SKEW_SECONDS  # tolerate a difference between our clock and the service's
    while source.settled(lease, until_ms / 1000 - SETTLE_SECONDS) is None:
        if time.monotonic() > deadline:
            option_name = f"option {bounds.source}.endingPosition"
            raise ValueError(
                f"{option_name}: it lies in the future; use readStream to read records that do not exist yet"
            )
        time.sleep(END_POLL_SECONDS)
    return until_ms


def _make_lease(shard: Shard) -> Lease:
    return Lease(shard.id, hash_range=shard.hash_range)


def _find_last_record(source: BoundedSource, lease: Lease) -> SettledShard:
    """Return the position of the shard's last record, if the source can look it up."""
    return source.settled(lease, 0.0) or SettledShard()


class _ShardPlanner:
    """Cuts the shards of one slice into parts."""

    def __init__(self, location: StreamLocation, source: BoundedSource, time_slice: Slice, parts: int) -> None:
        self._location, self._source, self._time_slice, self._parts_per_shard = location, source, time_slice, parts

    def plan_parts_of_shard(self, shard: Shard) -> list[ShardPart]:
        """Return the parts of one shard, or none if the shard has no records in the slice."""
        lease, time_slice, end_position = _make_lease(shard), self._time_slice, None
        last_record = SettledShard()
        if self._parts_per_shard > 1 or time_slice.until_ms == FOREVER_MS:
            last_record = _find_last_record(self._source, lease)
        # Don't make a task for a shard without records, because the task would wait at the tip until the lag is
        # reported as 0.
        if last_record.last == TRIM_HORIZON or (
            last_record.arrived is not None and last_record.arrived * 1000 < time_slice.begin.sub
        ):
            return []
        if time_slice.until_ms == FOREVER_MS:
            end_position = last_record.last
        newest_ms = (
            time_slice.until_ms
            if last_record.arrived is None
            else min(time_slice.until_ms, int(last_record.arrived * 1000))
        )
        cut_positions = list[Position]()
        if self._parts_per_shard > 1 and (first_record := self._find_first_record(lease, time_slice.begin)) is not None:
            # Cut only the time after the first record. Otherwise, most tasks would be empty if no records arrived for a
            # long time at the beginning of the slice.
            cut_times = split_times(max(first_record[1], time_slice.since_ms), newest_ms, self._parts_per_shard)
            first_records = (self._find_first_record(lease, at_timestamp(time_ms)) for time_ms in cut_times)
            cut_positions = [record[0] for record in first_records if record is not None]
        part_ranges = split_range(time_slice.begin, cut_positions, end_position)
        # Tasks read the parts of a shard at the same time and share the service's limit on requests for the shard.
        pause_seconds = self._location.pause_seconds * len(part_ranges)
        return [
            ShardPart(time_slice, shard.id, shard.hash_range, part_begin, part_end, pause_seconds)
            for part_begin, part_end in part_ranges
        ]

    def _find_first_record(self, lease: Lease, start: Position) -> tuple[Position, int] | None:
        """Return the position and arrival time (ms) of the first record after `start`, or None (rule 2)."""
        deadline = time.monotonic() + LOOKUP_SECONDS_MAX
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
            pass  # rule 2: if the source is unavailable, leave this cut out
        return None


class SlicedReader(DataSourceReader):
    """The reader of one batch. It implements Spark's interface."""

    def __init__(self, location: StreamLocation, bounds: ReadBounds, cores: int) -> None:
        self._location, self._bounds, self._tasks = location, bounds, bounds.tasks or cores

    def partitions(self) -> list[InputPartition]:
        """Plan the tasks. Spark calls this on the driver."""
        return [*plan_parts(self._location, self._bounds, self._tasks)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one task. Spark calls this on an executor. A task that runs again yields the same rows."""
        if isinstance(partition, ShardPart):  # if there are no parts, Spark passes a default partition
            with closing(self._location.open()) as source:
                yield from PartReader(source, self._location.columns, partition).read_rows()


class PartReader:
    """Reads one part of a shard, once."""

    def __init__(self, source: Source, columns: SourceColumns, part: ShardPart) -> None:
        self._columns, self._part = columns, part
        # A part that ends at a sequence number must not end at a time too, because arrival times that are out of order
        # could end it early.
        source = part.time_slice.source(source) if part.ends is None else source
        self._lease = Lease(part.shard, hash_range=part.hash_range)
        self._cursor = Cursor(part.begins, until=part.ends or SHARD_END)
        self._shard_reader = ShardReader(self._cursor, lambda start: source.open(self._lease, start))
        self._backoff = Backoff(*BACKOFF_SECONDS)
        self._last_progress_at = time.monotonic()

    def read_rows(self) -> Iterator[pa.RecordBatch]:
        """Yield all rows. Raises SourceError, or TimeoutError if there is no progress for `STALL_SECONDS`."""
        read_started = time.monotonic()
        with closing(
            read_range(self._shard_reader, self._columns, self._lease, select_in_range=self._part.time_slice.cut_batch)
        ) as responses:
            for response, batches in responses:
                if isinstance(response, SourceUnavailable):
                    log.warning("shard %s: trying again: %s", self._part.shard, response)
                yield from (rows for rows in batches if rows.num_rows)
                if not self._cursor.is_fully_read:
                    time.sleep(self._find_next_pause(response, read_started))
                read_started = time.monotonic()

    def _find_next_pause(self, response: Batch | SourceUnavailable, read_started: float) -> float:
        now = time.monotonic()
        # An empty response before the tip counts as progress, because a shard may have long stretches without records.
        # An error, or an empty response at the tip, does not.
        if isinstance(response, Batch) and (response.end is not None or response.behind_seconds):
            self._last_progress_at = now
        elif now - self._last_progress_at > STALL_SECONDS:
            raise TimeoutError(
                f"shard {self._part.shard}: reading it made no progress for {STALL_SECONDS:g} s; the task's log may "
                "contain the reason"
            )
        if isinstance(response, SourceUnavailable):
            return self._backoff.next()
        self._backoff.reset()
        return max(response.wait_seconds, read_started + self._part.pause_seconds - now)
