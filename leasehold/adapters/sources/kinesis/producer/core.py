"""Decides which records a producer sends next, without reading a clock, starting threads or doing I/O.

The inputs of `ProducerCore` are records, responses, listings of shards and the time. Its outputs are requests and the
results of records. A record waits in the queue of the shard for its hash key (`ShardMap`). It is sent in an aggregate
(`Unit`) at the rate that the shard accepts (`TokenBucket`). The record's result is set once the unit is known to be on
the right shard.

Rule 1: At most one unit per shard is in a request at any time. A rejected unit is sent again before newer records.

Rule 2: If a unit was written to a shard other than the intended one, it counts as written only if all its records
belong to that shard. If some do not, the KCL would drop the whole unit. All its records are then sent again, in order,
to the shards in the new map.

Rule 3: If a shard closes while one of its units is in a request, nothing is sent to its children until that request is
complete.

Together, these rules keep the records of each partition key in order. Only the records of a unit that timed out may be
delivered twice.
"""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable
from heapq import merge
from itertools import islice
from math import inf
from typing import Literal, assert_never

from attrs import define, field, frozen

from leasehold.adapters.sources.kinesis.aggregation.encode import Aggregate, max_framing_bytes
from leasehold.balancer.model import HASH_KEYS, HashRange, Shard

REQUEST_RECORDS = 500
REQUEST_BYTES = 10 << 20
SHARD_BYTES_PER_SECOND = 1 << 20
SHARD_RECORDS_PER_SECOND = 1000


_MIN_BACKOFF, _MAX_BACKOFF = 0.05, 1.0


@frozen
class ShardMap:
    """The open shards in the order of their hash ranges, which have no gaps.

    Attributes:
        ids: The ids of the open shards.
        last_keys: The last hash key of each open shard, in ascending order.
        ranges: The hash range of every listed shard by id, including closed shards.
    """

    ids: tuple[str, ...]
    last_keys: tuple[int, ...]
    ranges: dict[str, HashRange] = field(eq=False)

    def find_shard(self, hash_key: int) -> str:
        """Return the shard for this hash key."""
        return self.ids[bisect_left(self.last_keys, hash_key)]


def build_shard_map(shards: Iterable[Shard]) -> ShardMap | None:
    """Return the map of a complete listing, or None if the open shards do not cover the hash key space.

    During a split or a merge a listing may be incomplete. The caller should then list the shards again later.
    """
    listed_shards = tuple(shards)
    # While a shard is being split, the listing may contain both the shard, still open, and its children.
    parent_ids = {parent for shard in listed_shards for parent in shard.parents}
    hash_ranges = {shard.id: shard.hash_range for shard in listed_shards if shard.hash_range is not None}
    open_shards = sorted(
        (hash_ranges[shard.id], shard.id) for shard in listed_shards if shard.open and shard.id not in parent_ids
    )
    first_keys = [first_key for (first_key, _), _ in open_shards]
    last_keys = [last_key for (_, last_key), _ in open_shards]
    if [HASH_KEYS[0], *(last_key + 1 for last_key in last_keys)] != [*first_keys, HASH_KEYS[1] + 1]:
        return None
    return ShardMap(tuple(shard for _, shard in open_shards), tuple(last_keys), hash_ranges)


@frozen
class Settings:
    """The settings of a producer.

    Attributes:
        record_bytes: The largest Kinesis record that the stream accepts.
        min_bytes: The minimum size of aggregates, if enough records arrive in time. One PUT payload unit is 25 KiB.
        linger_seconds: How long a record may wait for other records to fill its aggregate.
        share: The share of each shard's limits (1 MiB and 1,000 records per second) that the producer uses. Above 1,
            only throttling limits the producer.
        time_to_live_seconds: The time after which a record that is not written yet counts as late.
        epoch: If not None, each record is marked with this number and a counter (see `records.Mark`).
        on_late: With "fail", a late record fails, and newer ones are sent. With "block", it keeps its place in the
            queue until it is written.
    """

    record_bytes: int = 1 << 20
    min_bytes: int = 25 << 10
    linger_seconds: float = 0.1
    share: float = 1.0
    time_to_live_seconds: float = 30.0
    on_late: Literal["fail", "block"] = "block"
    epoch: int | None = None


@define(eq=False)  # the class is not frozen, because creating a frozen entry takes four times as long
class Entry:
    """A user record that is queued for its shard or contained in a request to it.

    Attributes:
        serial_number: The record's number among all records of this producer.
        data: The payload.
        partition_key: The partition key.
        hash_key: The hash key, which determines the shard.
        explicit_hash_key: The explicit hash key, if the caller passed one.
        arrived: When `put` was called, by the producer's clock.
        expires: When the record becomes late, by the producer's clock.
        context: For a record of a Spark sink, its tag without row and span (`sources/deduplication.py`); else empty.
        row: For a record of a Spark sink, the row number of its tag.
    """

    serial_number: int
    data: bytes
    partition_key: str
    hash_key: int
    explicit_hash_key: str | None
    arrived: float
    expires: float
    context: bytes = field(default=b"", kw_only=True)
    row: int = field(default=0, kw_only=True)

    @property
    def size(self) -> int:
        """The approximate number of bytes that the record adds to a queue."""
        return len(self.data) + len(self.partition_key)

    @property
    def single_record_size(self) -> int:
        """The maximum size that Kinesis counts for a Kinesis record with only this user record."""
        return (
            len(self.data) + len(self.partition_key.encode()) + (max_framing_bytes(self.context) if self.context else 0)
        )


@frozen(eq=False)
class Unit:
    """A Kinesis record with one or more user records. The service accepts or rejects it as a whole.

    Attributes:
        shard: The shard for which the unit is meant.
        entries: The user records in order.
        data: The data of the Kinesis record.
        partition_key: The partition key of the Kinesis record.
        hash_key: The hash key of the first user record, which determines the shard.
    """

    shard: str
    entries: tuple[Entry, ...]
    data: bytes
    partition_key: str
    hash_key: int

    @property
    def size(self) -> int:
        """The size in bytes, as Kinesis counts it."""
        return len(self.data) + len(self.partition_key.encode())


@define
class TokenBucket:
    """A token bucket of bytes and records.

    A Kinesis record may take more than the bucket contains, and then the next record waits until the bucket is positive
    again.

    Attributes:
        share: The share of the shard's rate; 1.0 for all of it.
        updated_at: When the bucket was last updated.
        bytes: The bytes that may be written.
        records: The Kinesis records that may be written.
    """

    share: float
    updated_at: float = 0.0
    bytes: float = field(default=float(SHARD_BYTES_PER_SECOND))
    records: float = field(default=float(SHARD_RECORDS_PER_SECOND))

    def take_bytes(self, size: int, now: float) -> None:
        """Subtract a Kinesis record of this size."""
        elapsed_seconds = max(0.0, now - self.updated_at) * self.share
        self.updated_at = max(self.updated_at, now)
        self.bytes = min(SHARD_BYTES_PER_SECOND, self.bytes + elapsed_seconds * SHARD_BYTES_PER_SECOND) - size
        self.records = min(SHARD_RECORDS_PER_SECOND, self.records + elapsed_seconds * SHARD_RECORDS_PER_SECOND) - 1

    @property
    def refilled_at(self) -> float:
        """The time at which the bucket is no longer overdrawn."""
        deficit_seconds = max(-self.bytes / SHARD_BYTES_PER_SECOND, -self.records / SHARD_RECORDS_PER_SECOND, 0.0)
        return self.updated_at + deficit_seconds / self.share if deficit_seconds else 0.0


@define(eq=False)
class ShardQueue:
    """The queued records of a shard, oldest first, and the unit in the current request, if any.

    Attributes:
        shard: The id of the shard.
        hash_range: The hash range of the shard.
        bucket: Limits the rate of writes.
        queue: The waiting records.
        queued_bytes: The size of the waiting records.
        unit: The unit that was sent, or that must be sent again before anything else.
        sent_at: When the unit was sent; None while it waits to be sent.
        written_to: The shard and sequence number under which the unit was written. Set while the shard map is too old
            to show whether that was the right shard.
        not_before: Nothing is sent before this time.
        faults: The number of consecutive failed attempts.
        singles_left: How many of the oldest records must be sent one by one, to find the one that cannot be sent.
    """

    shard: str
    hash_range: HashRange
    bucket: TokenBucket
    queue: deque[Entry] = field(factory=deque)
    queued_bytes: int = 0
    unit: Unit | None = None
    sent_at: float | None = None
    written_to: tuple[str, str] | None = None
    not_before: float = 0.0
    faults: int = 0
    singles_left: int = 0

    @property
    def oldest_arrival(self) -> float:
        """When the oldest record arrived. The queue must not be empty."""
        return (self.unit.entries if self.unit else self.queue)[0].arrived

    def append_newest(self, entry: Entry) -> None:
        """Add the newest record."""
        self.queue.append(entry)
        self.queued_bytes += len(entry.data) + len(entry.partition_key)  # the same as `entry.size`, but faster

    def put_back(self, entries: Iterable[Entry]) -> None:
        """Insert records into the queue in order of age, because a merged shard gets its records from two queues."""
        self.queue = deque(merge(entries, self.queue, key=lambda entry: entry.serial_number))
        self.queued_bytes = sum(entry.size for entry in self.queue)

    def remove_oldest(self) -> Entry:
        """Remove and return the oldest record."""
        entry = self.queue.popleft()
        self.queued_bytes -= entry.size
        return entry

    def pack_unit(self, size: int) -> Unit:
        """Create a unit of at most `size` bytes from the oldest records. A record that is larger is sent alone.

        If the encoder raises, the queue does not change, except for `singles_left`.
        """
        entries: list[Entry] = []
        try:
            aggregate = Aggregate(max(size, self.queue[0].single_record_size), *self.hash_range)
            for entry in islice(self.queue, 1) if self.singles_left else self.queue:
                if not aggregate.add(
                    entry.data, entry.partition_key, entry.explicit_hash_key, entry.context, entry.row
                ):
                    break
                entries.append(entry)
            unit = Unit(self.shard, tuple(entries), aggregate.encode(), aggregate.partition_key, entries[0].hash_key)
        except Exception:
            self.singles_left = self.singles_left or len(entries) + 1
            raise
        for _ in entries:
            self.queue.popleft()
        # Compute the sizes as `append_newest` does, because that is faster than `entry.size`.
        self.queued_bytes -= sum([len(entry.data) + len(entry.partition_key) for entry in entries])
        self.singles_left = max(0, self.singles_left - 1)
        return unit


@frozen
class UnitWritten:
    """A unit was written."""

    shard: str
    sequence_number: str


@frozen
class UnitRetryable:
    """A unit was not written, and may be sent again."""

    code: str


@frozen
class UnitUnknown:
    """There was no response to the request with this unit, so the unit may have been written."""

    code: str


@frozen(eq=False)
class UnitRejected:
    """A unit was permanently rejected. Possibly only some of its records are invalid."""

    error: Exception


@frozen(eq=False)
class UnitFailed:
    """The client raised an unexpected error, so the unit may have been written."""

    error: BaseException


UnitOutcome = UnitWritten | UnitRetryable | UnitUnknown | UnitRejected | UnitFailed


@frozen(eq=False)
class RecordsDelivered:
    """The records are in the stream. The index of a record in `entries` is its sub-sequence number."""

    entries: tuple[Entry, ...]
    shard: str
    sequence_number: str


@frozen(eq=False)
class RecordsLate:
    """The records expired before they were known to be written.

    If `unknown` is true, they may be in the stream anyway.
    """

    entries: tuple[Entry, ...]
    unknown: bool


@frozen(eq=False)
class RecordsUnsendable:
    """The records cannot be sent because of `error`. If `unknown` is true, they may be in the stream nevertheless."""

    entries: tuple[Entry, ...]
    error: BaseException
    unknown: bool


Result = RecordsDelivered | RecordsLate | RecordsUnsendable


@define
class ProducerMetrics:
    """The counters of a producer. `counters_by_kpl_name` explains their meaning.

    `buffered_seconds` is a sum over user records, and `request_seconds` is a sum over requests.
    """

    received: int = 0
    put: int = 0
    put_bytes: int = 0
    units_put: int = 0
    units_put_bytes: int = 0
    units_sent: int = 0
    requests: int = 0
    request_seconds: float = 0.0
    buffered_seconds: float = 0.0
    retries: int = 0
    late: int = 0
    failed: int = 0
    unknown: int = 0
    misplaced: int = 0
    errors: Counter[str] = field(factory=Counter)

    def count_sent_request(self, units: Iterable[Unit], now: float) -> None:
        """Count a request that was sent."""
        self.requests += 1
        for unit in units:
            self.units_sent += 1
            self.buffered_seconds += sum(now - entry.arrived for entry in unit.entries)

    def count_delivered_unit(self, unit: Unit) -> None:
        """Count a unit that is on the right shard."""
        self.put += len(unit.entries)
        self.put_bytes += sum(len(entry.data) for entry in unit.entries)
        self.units_put += 1
        self.units_put_bytes += len(unit.data)

    def count_retried_unit(self, unit: Unit, code: str) -> None:
        """Count a unit that must be sent again."""
        self.errors[code] += 1
        self.retries += len(unit.entries)

    def counters_by_kpl_name(self) -> dict[str, float | dict[str, int]]:
        """Return the counters by the KPL's names. Times are means in milliseconds.

        The KPL does not have the last three counters:

        - `UserRecordsOutcomeUnknown`: user records of requests without a response. Only these can be in the stream
          twice.
        - `KinesisRecordsMisplaced`: Kinesis records that were sent again because they were written to a wrong shard.
        - `UserRecordsFailed`: user records that cannot be sent.
        """
        return {
            "UserRecordsReceived": self.received,
            "UserRecordsPending": self.received - self.put - self.late - self.failed,
            "UserRecordsPut": self.put,
            "UserRecordsDataPut": self.put_bytes,
            "KinesisRecordsPut": self.units_put,
            "KinesisRecordsDataPut": self.units_put_bytes,
            "ErrorsByCode": dict(self.errors),
            "AllErrors": self.errors.total(),
            "RetriesPerRecord": _mean_or_zero(self.retries, self.put),
            "BufferingTime": 1000 * _mean_or_zero(self.buffered_seconds, self.put),
            "RequestTime": 1000 * _mean_or_zero(self.request_seconds, self.requests),
            "UserRecordsPerKinesisRecord": _mean_or_zero(self.put, self.units_put),
            "KinesisRecordsPerPutRecordsRequest": _mean_or_zero(self.units_sent, self.requests),
            "UserRecordExpired": self.late,
            "UserRecordsOutcomeUnknown": self.unknown,
            "KinesisRecordsMisplaced": self.misplaced,
            "UserRecordsFailed": self.failed,
        }


def _mean_or_zero(total: float, count: int) -> float:
    return total / count if count else 0.0


@define(eq=False)
class ProducerCore:
    """The state of a producer.

    Attributes:
        shards: The newest shard map.
        settings: The producer's settings.
        metrics: The producer's counters.
        flushing: Whether records are sent without waiting for more.
    """

    shards: ShardMap
    settings: Settings
    metrics: ProducerMetrics = field(factory=ProducerMetrics)
    flushing: bool = False
    _target_bytes: int = field(init=False)
    _shard_queues: dict[str, ShardQueue] = field(factory=dict)
    _closing_queues: list[ShardQueue] = field(factory=list)  # queues of closed shards with a unit in a request
    _round_trip_seconds: float = 0.0
    _next_listing_at: float = inf
    _map_fault_count: int = 0
    _unknown_serial_numbers: set[int] = field(factory=set)  # those of records that may already be in the stream
    _unsendable: list[RecordsUnsendable] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        self._adapt_aggregate_size()

    @property
    def is_empty(self) -> bool:
        """Whether no record is waiting to be sent or part of a request."""
        queues = (*self._shard_queues.values(), *self._closing_queues)
        return not any(shard_queue.queue or shard_queue.unit for shard_queue in queues)

    def enqueue_record(self, entry: Entry) -> bool:
        """Queue a record. Return whether `next_due_at` may have become earlier."""
        shard_queue = self._find_or_add_shard_queue(self.shards.find_shard(entry.hash_key))
        bytes_queued_before = shard_queue.queued_bytes
        shard_queue.append_newest(entry)
        self.metrics.received += 1
        return not bytes_queued_before or bytes_queued_before < self._target_bytes <= shard_queue.queued_bytes

    def next_due_at(self) -> float:
        """Return the earliest time at which `start_request` may have something to send."""
        return min(map(self._shard_queue_due_at, self._shard_queues.values()), default=inf)

    def list_shards_at(self) -> float:
        """Return the time at which the shards should be listed again."""
        return self._next_listing_at

    def start_request(self, now: float) -> tuple[Unit, ...]:
        """Return the units to send now in one request, if any. Pass each of them to `process_outcome` later."""
        units: list[Unit] = []
        remaining_bytes = REQUEST_BYTES
        due_queues = [queue for queue in self._shard_queues.values() if self._shard_queue_due_at(queue) <= now]
        # Start with the oldest records. Otherwise, if more shards are due than fit into a request, some might never be
        # sent.
        for shard_queue in sorted(due_queues, key=lambda queue: queue.oldest_arrival):
            if len(units) == REQUEST_RECORDS:
                break
            unit = shard_queue.unit = shard_queue.unit or self._pack_oldest(shard_queue)
            if unit is not None and unit.size <= remaining_bytes:
                remaining_bytes -= unit.size
                shard_queue.sent_at = now
                shard_queue.bucket.take_bytes(unit.size, now)
                units.append(unit)
        if units:
            self.metrics.count_sent_request(units, now)
        return tuple(units)

    def process_outcome(self, unit: Unit, outcome: UnitOutcome, now: float) -> tuple[Result, ...]:
        """Process the outcome of a unit that was sent, and return the results of its records."""
        candidate_queues = (*self._closing_queues, *filter(None, [self._shard_queues.get(unit.shard)]))
        shard_queue = next((queue for queue in candidate_queues if queue.unit is unit), None)
        if shard_queue is None:  # the unit's records were given up in the meantime
            return ()
        match outcome:
            case UnitWritten(shard, sequence_number):
                round_trip_seconds = now - shard_queue.sent_at if shard_queue.sent_at is not None else 0.0
                self._round_trip_seconds = (
                    0.8 * self._round_trip_seconds + 0.2 * round_trip_seconds
                    if self._round_trip_seconds
                    else round_trip_seconds
                )
                self._adapt_aggregate_size()
                shard_queue.sent_at, shard_queue.written_to = None, (shard, sequence_number)
                if shard != unit.shard:
                    self._schedule_listing(now)
                # A unit of one record is always on the right shard, because the service chooses the shard by the
                # record's hash key. If our map disagrees, it is outdated.
                is_on_right_shard = (
                    shard == unit.shard or len(unit.entries) == 1 or self._is_on_right_shard(shard_queue)
                )
                return self._finish_delivered(shard_queue) if is_on_right_shard else ()
            case UnitRetryable(code):
                self.metrics.count_retried_unit(unit, code)
            case UnitUnknown(code):
                self._unknown_serial_numbers.update(entry.serial_number for entry in unit.entries)
                self.metrics.count_retried_unit(unit, code)
                self.metrics.unknown += len(unit.entries)
            case UnitFailed(error):
                self._unknown_serial_numbers.update(entry.serial_number for entry in unit.entries)
                self._remove_unit(shard_queue)
                return (self._give_up_entries(unit.entries, error),)
            case UnitRejected(error):
                self.metrics.count_retried_unit(unit, type(error).__name__)
                if len(unit.entries) == 1:
                    self._remove_unit(shard_queue)
                    return (self._give_up_entries(unit.entries, error),)
                shard_queue.unit, shard_queue.singles_left = None, len(unit.entries)
                shard_queue.put_back(unit.entries)
            case _:
                assert_never(outcome)
        self._schedule_retry(shard_queue, now)
        return ()

    def update_map(self, shards: ShardMap | None, now: float) -> tuple[Result, ...]:
        """Process the shard map from a new listing. `shards` is None if the listing failed or is incomplete."""
        if shards is None:
            self._map_fault_count += 1
            self._next_listing_at = now + _backoff_seconds(self._map_fault_count)
            return ()
        self.shards, self._next_listing_at = shards, inf
        for shard_queue in [queue for queue in self._shard_queues.values() if queue.shard not in shards.ids]:
            # Move the waiting records of a closed shard to other queues. They are sent only after the request with the
            # closed shard's unit has finished (rule 3).
            del self._shard_queues[shard_queue.shard]
            if shard_queue.sent_at is not None or shard_queue.written_to is not None:
                self._closing_queues.append(shard_queue)
                waiting_entries, shard_queue.queue, shard_queue.queued_bytes = shard_queue.queue, deque(), 0
                self._enqueue_by_shard(waiting_entries)
            else:
                self._requeue_by_shard(shard_queue)
        results: list[Result] = []
        for shard_queue in [
            queue for queue in (*self._shard_queues.values(), *self._closing_queues) if queue.written_to is not None
        ]:
            if self._is_on_right_shard(shard_queue):
                results += self._finish_delivered(shard_queue)
                continue
            self._map_fault_count += 1
            is_misplaced = shard_queue.written_to is not None and shard_queue.written_to[0] in shards.ranges
            if is_misplaced:
                self.metrics.misplaced += 1
                shard_queue.written_to = None
                self._schedule_retry(shard_queue, now)
            if not is_misplaced or shard_queue.shard in shards.ids:  # the listing is older than the write
                self._schedule_listing(now)
        if self._next_listing_at == inf:  # otherwise another listing is due
            self._map_fault_count = 0
        return tuple(results)

    def give_up_late_records(self, now: float) -> tuple[RecordsLate, ...]:
        """Give up the records that are late and not part of a request."""
        if self.settings.on_late == "block":
            return ()
        results: list[RecordsLate] = []
        for shard_queue in self._shard_queues.values():
            unit = shard_queue.unit
            is_waiting = shard_queue.sent_at is None and shard_queue.written_to is None
            if unit is not None and is_waiting and unit.entries[0].expires <= now:
                shard_queue.unit = None
                shard_queue.put_back(unit.entries)
            late_entries: list[Entry] = []
            while shard_queue.unit is None and shard_queue.queue and shard_queue.queue[0].expires <= now:
                late_entries.append(shard_queue.remove_oldest())
            if late_entries:
                self.metrics.late += len(late_entries)
                is_outcome_unknown = self._forget_entries(late_entries)
                results.append(RecordsLate(tuple(late_entries), unknown=is_outcome_unknown))
        return tuple(results)

    def take_unsendable_records(self) -> tuple[RecordsUnsendable, ...]:
        """Return the records that `start_request` could not pack into units since the last call."""
        unsendable_records, self._unsendable = self._unsendable, []
        return tuple(unsendable_records)

    def give_up_all_records(self) -> tuple[RecordsLate, ...]:
        """Give up all records, including those in requests without a response."""
        shard_queues = [*self._shard_queues.values(), *self._closing_queues]
        self._shard_queues, self._closing_queues = {}, []
        late_results = [
            RecordsLate((*(shard_queue.unit.entries if shard_queue.unit else ()), *shard_queue.queue), unknown=True)
            for shard_queue in shard_queues
        ]
        return tuple(late_result for late_result in late_results if late_result.entries)

    def _find_or_add_shard_queue(self, shard: str) -> ShardQueue:
        shard_queue = self._shard_queues.get(shard)
        if shard_queue is None:
            shard_queue = ShardQueue(shard, self.shards.ranges[shard], TokenBucket(self.settings.share))
            self._shard_queues[shard] = shard_queue
        return shard_queue

    def _adapt_aggregate_size(self) -> None:
        """Set the target size of aggregates to the number of bytes that a shard accepts during one round trip."""
        bytes_in_flight = int(SHARD_BYTES_PER_SECOND * self.settings.share * self._round_trip_seconds)
        self._target_bytes = min(max(bytes_in_flight, self.settings.min_bytes), self.settings.record_bytes)

    def _shard_queue_due_at(self, shard_queue: ShardQueue) -> float:
        if (
            shard_queue.sent_at is not None
            or shard_queue.written_to is not None
            or not (shard_queue.unit or shard_queue.queue)
        ):
            return inf
        first_key, last_key = shard_queue.hash_range
        if any(
            closing_queue.hash_range[0] <= last_key and first_key <= closing_queue.hash_range[1]
            for closing_queue in self._closing_queues
        ):  # rule 3
            return inf
        earliest_at = max(shard_queue.not_before, shard_queue.bucket.refilled_at)
        if shard_queue.unit or self.flushing or shard_queue.queued_bytes >= self._target_bytes:
            return earliest_at
        return max(earliest_at, shard_queue.queue[0].arrived + self.settings.linger_seconds)

    def _schedule_listing(self, now: float) -> None:
        self._next_listing_at = min(
            self._next_listing_at, now + (_backoff_seconds(self._map_fault_count) if self._map_fault_count else 0.0)
        )

    def _finish_delivered(self, shard_queue: ShardQueue) -> tuple[RecordsDelivered, ...]:
        unit, written_to = shard_queue.unit, shard_queue.written_to
        if unit is None or written_to is None:
            return ()
        self._remove_unit(shard_queue)
        if self._unknown_serial_numbers:
            self._unknown_serial_numbers.difference_update(entry.serial_number for entry in unit.entries)
        self.metrics.count_delivered_unit(unit)
        return (RecordsDelivered(unit.entries, *written_to),)

    def _remove_unit(self, shard_queue: ShardQueue) -> None:
        """Remove the queue's current unit, because its records have their results."""
        shard_queue.unit = shard_queue.written_to = shard_queue.sent_at = None
        shard_queue.faults, shard_queue.not_before = 0, 0.0
        self._closing_queues = [
            closing_queue for closing_queue in self._closing_queues if closing_queue is not shard_queue
        ]

    def _pack_oldest(self, shard_queue: ShardQueue) -> Unit | None:
        """Create a unit from the oldest records. Give up each record that the encoder rejects."""
        while shard_queue.queue:
            is_single = shard_queue.singles_left > 0
            try:
                return shard_queue.pack_unit(self._target_bytes)
            except Exception as error:  # noqa: BLE001  the other records must still be sent
                if is_single:
                    shard_queue.singles_left -= 1
                    self._unsendable.append(self._give_up_entries((shard_queue.remove_oldest(),), error))
        return None

    def _give_up_entries(self, entries: tuple[Entry, ...], error: BaseException) -> RecordsUnsendable:
        self.metrics.failed += len(entries)
        return RecordsUnsendable(entries, error, self._forget_entries(entries))

    def _forget_entries(self, entries: Iterable[Entry]) -> bool:
        """Forget records that are given up. Return whether any of them may already be in the stream."""
        serial_numbers = {entry.serial_number for entry in entries}
        is_outcome_unknown = not serial_numbers.isdisjoint(self._unknown_serial_numbers)
        self._unknown_serial_numbers -= serial_numbers
        return is_outcome_unknown

    def _is_on_right_shard(self, shard_queue: ShardQueue) -> bool:
        """Return whether all records of the unit belong to the shard to which it was written (rule 2)."""
        if (
            shard_queue.unit is None
            or shard_queue.written_to is None
            or shard_queue.written_to[0] not in self.shards.ranges
        ):
            return False
        first_key, last_key = self.shards.ranges[shard_queue.written_to[0]]
        return all(first_key <= entry.hash_key <= last_key for entry in shard_queue.unit.entries)

    def _schedule_retry(self, shard_queue: ShardQueue, now: float) -> None:
        """Schedule a unit to be sent again, unchanged if its shard is still open (rule 1)."""
        shard_queue.sent_at = None
        shard_queue.faults += 1
        shard_queue.not_before = now + _backoff_seconds(shard_queue.faults)
        if shard_queue.shard not in self.shards.ids:
            self._closing_queues = [
                closing_queue for closing_queue in self._closing_queues if closing_queue is not shard_queue
            ]
            self._requeue_by_shard(shard_queue)

    def _requeue_by_shard(self, shard_queue: ShardQueue) -> None:
        entries = (*(shard_queue.unit.entries if shard_queue.unit else ()), *shard_queue.queue)
        shard_queue.unit, shard_queue.queue, shard_queue.queued_bytes = None, deque(), 0
        self._enqueue_by_shard(entries)

    def _enqueue_by_shard(self, entries: Iterable[Entry]) -> None:
        entries_by_shard: dict[str, list[Entry]] = {}
        for entry in entries:
            entries_by_shard.setdefault(self.shards.find_shard(entry.hash_key), []).append(entry)
        for shard, shard_entries in entries_by_shard.items():
            self._find_or_add_shard_queue(shard).put_back(shard_entries)


def _backoff_seconds(faults: int) -> float:
    return min(_MAX_BACKOFF, _MIN_BACKOFF * float(1 << min(faults - 1, 10)))
