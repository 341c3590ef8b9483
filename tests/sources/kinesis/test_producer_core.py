"""The producer keeps its guarantees through any sequence of splits, merges, rejections and lost responses."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import chain
from math import inf
from typing import Any

import pytest
from attrs import define, field
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stream_model import Stream

from leasehold.adapters.sources.kinesis.hash_keys import hash_partition_key
from leasehold.adapters.sources.kinesis.producer.core import (
    Entry,
    ProducerCore,
    RecordsDelivered,
    RecordsUnsendable,
    Result,
    Settings,
    ShardMap,
    ShardQueue,
    TokenBucket,
    Unit,
    UnitFailed,
    UnitOutcome,
    UnitRejected,
    UnitRetryable,
    UnitUnknown,
    UnitWritten,
    build_shard_map,
)
from leasehold.balancer.model import HASH_KEYS, HashRange, Shard

KEYS = [f"key-{place}" for place in range(12)]
FAULTS = ("none", "none", "none", "throttled", "lost", "lost but written", "lost and written late")
STEPS = st.one_of(
    st.tuples(st.just("burst"), st.lists(st.integers(0, len(KEYS) - 1), min_size=1, max_size=8)),
    st.tuples(st.just("send"), st.sampled_from([0.01, 0.2, 2.0])),
    st.tuples(
        st.just("answer"), st.tuples(st.integers(0, 5), st.lists(st.sampled_from(FAULTS), min_size=4, max_size=4))
    ),
    st.tuples(st.just("split"), st.integers(0, 7)),
    st.tuples(st.just("merge"), st.integers(0, 7)),
    st.tuples(st.just("map"), st.sampled_from([True, True, False])),
    st.tuples(st.just("land"), st.just(0)),
)
ROUNDS = st.tuples(STEPS, STEPS, STEPS, STEPS, STEPS, STEPS, STEPS, STEPS)


def listing_of(stream: Stream) -> ShardMap:
    shard_map = build_shard_map(stream.shards)
    assert shard_map is not None
    return shard_map


@define
class World:
    """A producer, its stream, and the requests that are in flight between them."""

    least: int
    stream: Stream = field(factory=Stream)
    now: float = 0.0
    sent: list[tuple[str, bytes]] = field(factory=list)
    under_way: list[tuple[Unit, ...]] = field(factory=list)
    late_units: list[Unit] = field(factory=list)
    results: list[Result] = field(factory=list)
    lost: set[int] = field(factory=set)
    listing: ShardMap = field(init=False)
    core: ProducerCore = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.listing = listing_of(self.stream)
        self.core = ProducerCore(self.listing, Settings(min_bytes=self.least))

    def put(self, key: int) -> None:
        """Enqueue a record with this key."""
        serial_number = len(self.sent)
        self.sent.append((KEYS[key], b"%d" % serial_number))
        self.core.enqueue_record(
            Entry(serial_number, b"%d" % serial_number, KEYS[key], hash_partition_key(KEYS[key]), None, self.now, inf)
        )

    def burst(self, keys: list[int]) -> None:
        for key in keys:
            self.put(key)

    def send(self, seconds: float) -> None:
        """Advance the clock, and send a request if one is due."""
        self.now += seconds
        if units := self.core.start_request(self.now):
            shards = [unit.shard for units in (*self.under_way, units) for unit in units]
            assert len(shards) == len(set(shards)), "two units of one shard under way"
            self.under_way.append(units)

    def answer(self, request_and_faults: tuple[int, list[str]]) -> None:
        """Respond to one of the pending requests, or lose the response."""
        if self.under_way:
            request_index, faults = request_and_faults
            for unit_index, unit in enumerate(self.under_way.pop(request_index % len(self.under_way))):
                self.results += self.core.process_outcome(unit, self._outcome(unit, faults[unit_index % 4]), self.now)

    def _outcome(self, unit: Unit, fault: str) -> UnitOutcome:
        if fault == "none":
            return self.stream.write(unit)
        if fault == "throttled":
            return UnitRetryable("ProvisionedThroughputExceededException")
        self.lost |= {entry.serial_number for entry in unit.entries}
        if fault == "lost but written":
            self.stream.write(unit)
        if fault == "lost and written late":
            self.late_units.append(unit)
        return UnitUnknown("ReadTimeoutError")

    def land(self, _: object = None) -> None:
        """Store a unit late, after its response was lost."""
        if self.late_units:
            self.stream.write(self.late_units.pop(0))

    def map(self, fresh: bool) -> None:
        """Pass a listing of the shards to the producer. If not `fresh`, it is the previous listing."""
        self.listing = listing_of(self.stream) if fresh else self.listing
        self.results += self.core.update_map(self.listing, self.now)

    def finish(self) -> None:
        """Stop injecting faults, and let the producer send all records."""
        self.core.flushing = True
        for _ in range(400):
            self.send(1.0)
            while self.under_way:
                self.answer((0, ["none"] * 4))
            if self.core.list_shards_at() <= self.now:
                self.map(fresh=True)
            self.land()

    def do(self, step: tuple[str, Any]) -> None:
        name, argument = step
        getattr(self.stream if name in {"split", "merge"} else self, name)(argument)


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(ROUNDS, min_size=1, max_size=8), st.sampled_from([60, 25 << 10]))
def test_order_holds_and_only_timed_out_records_are_repeated(
    rounds: list[tuple[tuple[str, Any], ...]], least: int
) -> None:
    world = World(least)
    for step in chain.from_iterable(rounds):
        world.do(step)
    world.finish()
    records = list(world.stream.read())
    key_of_data: dict[bytes, str] = {}
    for *_, key, data in records:
        key_of_data.setdefault(data, key)
    for key in KEYS:
        sent_data = [data for key_sent, data in world.sent if key_sent == key]
        assert [data for data, key_sent in key_of_data.items() if key_sent == key] == sent_data
    repeated_numbers = {int(data) for data, copies in Counter(data for *_, data in records).items() if copies > 1}
    assert repeated_numbers <= world.lost
    results = [
        (result.shard, result.sequence_number, sub, entry.partition_key, entry.data)
        for result in world.results
        if isinstance(result, RecordsDelivered)
        for sub, entry in enumerate(result.entries)
    ]
    assert sorted(int(data) for *_, data in results) == list(range(len(world.sent)))
    assert set(results) <= set(records)


def new_core(**settings_: Any) -> ProducerCore:  # noqa: ANN401  any setting
    """Return the core of a producer for a stream with one shard."""
    return ProducerCore(listing_of(Stream()), Settings(**settings_))


def new_entry(serial_number: int, now: float = 0.0, size: int = 100, expires: float = inf) -> Entry:
    """Return an entry for a record that was put at the time `now`."""
    return Entry(serial_number, bytes(size), "k", hash_partition_key("k"), None, now, expires)


def test_record_lingers_no_longer_than_allowed() -> None:
    """A record waits for others in order to be aggregated, but no longer than the linger time."""
    core = new_core(linger_seconds=0.1)
    core.enqueue_record(new_entry(0))
    assert (core.start_request(0.09), core.next_due_at()) == ((), 0.1)
    core.enqueue_record(new_entry(1, now=0.05))
    assert [len(unit.entries) for unit in core.start_request(0.1)] == [2]


def test_full_aggregate_is_sent_at_once() -> None:
    core = new_core(linger_seconds=60.0, min_bytes=1000)
    results = [core.enqueue_record(new_entry(serial_number)) for serial_number in range(12)]
    assert results == [True, *[False] * 8, True, False, False]
    assert len(core.start_request(0.0)) == 1


def test_aggregates_grow_with_the_round_trip() -> None:
    """A shard has only one request at a time, so a longer round trip needs larger aggregates for the same rate."""
    core = new_core(min_bytes=1000, linger_seconds=0.0)
    sizes = []
    for now in (0.0, 10.0):
        for serial_number in range(2000):
            core.enqueue_record(new_entry(serial_number, now=now - 3.0))  # the wait before the request does not count
        [unit] = core.start_request(now)
        sizes.append(unit.size)
        core.process_outcome(unit, UnitWritten("s0", "1"), now + 0.05)
    assert sizes[0] <= 1000
    assert 50_000 < sizes[1] <= 0.05 * (1 << 20)


def test_rate_limit_of_a_shard_is_respected() -> None:
    """Requests above the rate limit would be rejected, and would slow down other writers, too."""
    core = new_core(linger_seconds=0.0, record_bytes=10 << 20)
    for serial_number in range(2):
        core.enqueue_record(new_entry(serial_number, size=3 << 20))
    [unit] = core.start_request(0.0)
    core.process_outcome(unit, UnitWritten("s0", "1"), 0.1)
    assert core.start_request(1.9) == ()
    assert core.next_due_at() == 2.0 + (unit.size - (3 << 20)) / (1 << 20)
    assert len(core.start_request(core.next_due_at())) == 1


def test_shard_that_waited_longest_is_served_first() -> None:
    """Every shard is served, even if other shards are due again within one round trip."""
    count, last_hash_key = 1_200, HASH_KEYS[1]
    step = (last_hash_key + 1) // count
    shards = [
        Shard(f"s{index}", hash_range=(index * step, last_hash_key if index == count - 1 else (index + 1) * step - 1))
        for index in range(count)
    ]
    shard_map = build_shard_map(shards)
    assert shard_map is not None
    core, served = ProducerCore(shard_map, Settings(linger_seconds=0.0)), Counter[str]()
    for turn in range(6):
        now = 10.0 * turn
        for index in range(count):
            core.enqueue_record(Entry(turn * count + index, bytes(100), "k", index * step, None, now, inf))
        units = core.start_request(now)
        served.update(unit.shard for unit in units)
        for unit in units:
            core.process_outcome(unit, UnitWritten(unit.shard, str(turn)), now + 0.05)
    assert (len(served), min(served.values())) == (count, 2)


@pytest.mark.parametrize(("outcome", "unknown"), [(UnitRetryable("x"), False), (UnitUnknown("x"), True)])
def test_late_records_time_out_only_before_they_are_sent(outcome: UnitOutcome, unknown: bool) -> None:
    core = new_core(on_late="fail", linger_seconds=0.0)
    early_entry, late_entry = new_entry(0, expires=5.0), new_entry(1, expires=50.0)
    core.enqueue_record(early_entry)
    core.enqueue_record(late_entry)
    [unit] = core.start_request(0.0)
    assert core.give_up_late_records(9.0) == ()
    core.process_outcome(unit, outcome, 9.0)
    [timed_out] = core.give_up_late_records(9.0)
    assert (timed_out.entries, timed_out.unknown, core.give_up_late_records(9.0)) == ((early_entry,), unknown, ())
    assert [unit.entries for unit in core.start_request(20.0)] == [(late_entry,)]


def test_late_records_keep_their_place_if_the_caller_blocks() -> None:
    core = new_core(linger_seconds=0.0)
    core.enqueue_record(new_entry(0, expires=5.0))
    assert core.give_up_late_records(9.0) == ()
    assert len(core.start_request(9.0)) == 1


@pytest.mark.parametrize(
    "shards",
    [
        [],
        [Shard("a", hash_range=(0, 5))],
        [Shard("a", hash_range=(0, 5)), Shard("b", hash_range=(7, HASH_KEYS[1]))],
        [Shard("a", hash_range=HASH_KEYS, open=False)],
    ],
)
def test_listing_with_a_gap_is_rejected(shards: list[Shard]) -> None:
    """With a gap in the listing, the producer would assign records to a shard that does not accept them."""
    assert build_shard_map(shards) is None


def test_splitting_shard_is_replaced_by_its_children() -> None:
    """The shard map never contains two shards for the same keys, so that aggregates are not misplaced."""
    halves = (0, 2**127 - 1), (2**127, HASH_KEYS[1])
    children = [
        Shard(name, parents=("p",), hash_range=hash_range) for name, hash_range in zip("ab", halves, strict=True)
    ]
    shard_map = build_shard_map([Shard("p", hash_range=HASH_KEYS), *children])
    assert shard_map is not None
    assert [shard_map.find_shard(key) for key in (0, 2**127 - 1, 2**127, HASH_KEYS[1])] == ["a", "a", "b", "b"]


def test_idle_bucket_fills_to_one_second() -> None:
    """After a pause, a producer sends at most one second's worth at once, because the shard rejects the rest."""
    bucket = TokenBucket(1.0)
    bucket.take_bytes(0, 1000.0)
    assert (bucket.bytes, bucket.records, bucket.refilled_at) == (1 << 20, 999, 0.0)


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_bucket_refills_at_its_share_of_the_shards_rate(share: float) -> None:
    bytes_bucket, records_bucket = TokenBucket(share), TokenBucket(share)
    bytes_bucket.take_bytes(2 << 20, 0.0)
    for _ in range(2000):
        records_bucket.take_bytes(0, 0.0)
    for bucket in (bytes_bucket, records_bucket):
        assert bucket.refilled_at == 1.0 / share
        bucket.take_bytes(0, 1.0 / share)
        assert min(bucket.bytes, bucket.records + 1) == 0.0
    bytes_bucket.take_bytes(0, 0.5)  # An earlier time does not change what was refilled.
    assert (bytes_bucket.bytes, bytes_bucket.updated_at) == (0.0, 1.0 / share)


def test_queue_knows_its_size_after_every_change() -> None:
    queue = ShardQueue("s0", HASH_KEYS, TokenBucket(1.0))
    entries = [new_entry(serial_number, size=100 + serial_number) for serial_number in range(6)]
    steps: list[Callable[[], object]] = [
        *(partial(queue.append_newest, entry) for entry in entries[2:]),
        queue.remove_oldest,
        lambda: queue.pack_unit(230),
        lambda: queue.put_back(entries[:2]),
    ]
    for step in steps:
        step()
        assert queue.queued_bytes == sum(entry.size for entry in queue.queue)
    assert 0 < queue.queued_bytes < sum(entry.size for entry in entries)


def deliver_next(core: ProducerCore, now: float) -> tuple[int, ...]:
    """Send the next unit, which is written, and return the serial numbers of its records."""
    [unit] = core.start_request(now)
    core.process_outcome(unit, UnitWritten(unit.shard, "1"), now)
    return tuple(entry.serial_number for entry in unit.entries)


def test_records_are_aggregated_again_after_a_rejected_unit() -> None:
    """Only the records of the rejected unit are sent one by one."""
    core = new_core(linger_seconds=0.0)
    for serial_number in range(3):
        core.enqueue_record(new_entry(serial_number))
    [unit] = core.start_request(0.0)
    core.process_outcome(unit, UnitRejected(ValueError("no")), 0.0)
    for serial_number in (3, 4):
        core.enqueue_record(new_entry(serial_number))
    assert [deliver_next(core, now) for now in (1.0, 2.0, 3.0, 4.0)] == [(0,), (1,), (2,), (3, 4)]


def core_with_shards(count: int, **settings_: Any) -> tuple[ProducerCore, list[int]]:  # noqa: ANN401  any setting
    """Return a core for a stream with this many shards, and the first hash key of each shard."""
    stream = Stream()
    while len(stream.open) < count:
        stream.split(0)
    first_keys = [(shard.hash_range or HASH_KEYS)[0] for shard in stream.open]
    return ProducerCore(listing_of(stream), Settings(linger_seconds=0.0, **settings_)), first_keys


def entry_for(hash_key: int, serial_number: int = 0, size: int = 100) -> Entry:
    return Entry(serial_number, bytes(size), "k", hash_key, str(hash_key), 0.0, inf)


def test_request_is_never_larger_than_the_service_accepts() -> None:
    core, first_keys = core_with_shards(16)
    for serial_number, hash_key in enumerate(first_keys):
        core.enqueue_record(entry_for(hash_key, serial_number, size=1_000_000))
    requests = [core.start_request(0.0) for _ in range(3)]
    assert [len(units) for units in requests] == [10, 6, 0]
    assert all(sum(unit.size for unit in units) <= 10 << 20 for units in requests)


def test_aggregate_is_never_larger_than_the_stream_accepts() -> None:
    core = new_core(linger_seconds=0.0, record_bytes=100_000)
    for now in (0.0, 100.0):
        for serial_number in range(2000):
            core.enqueue_record(new_entry(serial_number, now=now))
        [unit] = core.start_request(now)
        core.process_outcome(unit, UnitWritten("s0", "1"), now + 60.0)
    assert 90_000 < unit.size <= 100_000


def test_share_limits_the_size_of_aggregates() -> None:
    sizes = []
    for share in (1.0, 0.5):
        core = new_core(linger_seconds=0.0, min_bytes=1000, share=share)
        for now in (0.0, 100.0):
            for serial_number in range(2000):
                core.enqueue_record(new_entry(serial_number, now=now))
            [unit] = core.start_request(now)
            core.process_outcome(unit, UnitWritten("s0", "1"), now + 0.05)
        sizes.append(unit.size)
    assert sizes[1] <= 0.5 * 0.05 * (1 << 20) < sizes[0]


@pytest.mark.parametrize("outcome", [UnitRetryable("x"), UnitUnknown("x")])
def test_failed_unit_is_sent_again_after_a_pause_that_grows_until_a_success(outcome: UnitOutcome) -> None:
    core, now, pauses = new_core(linger_seconds=0.0), 0.0, list[float]()
    core.enqueue_record(new_entry(0))
    for _ in range(2):
        for _ in range(7):
            [unit] = core.start_request(now)
            core.process_outcome(unit, outcome, now)
            pauses.append(round(core.next_due_at() - now, 6))
            assert core.start_request(now + 0.9 * pauses[-1]) == ()
            now = core.next_due_at()
        deliver_next(core, now)
        core.enqueue_record(new_entry(1, now=now))
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0] * 2


@pytest.mark.parametrize(
    ("outcomes", "unknown"),
    [
        ([UnitFailed(KeyError("x"))], True),
        ([UnitRejected(KeyError("x"))], False),
        ([UnitUnknown("x"), UnitRejected(KeyError("x"))], True),
        ([UnitRetryable("x"), UnitRejected(KeyError("x"))], False),
    ],
)
def test_failed_record_may_be_in_the_stream_if_any_attempt_was_unknown(
    outcomes: list[UnitOutcome], unknown: bool
) -> None:
    core, results = new_core(linger_seconds=0.0), list[Result]()
    core.enqueue_record(new_entry(0))
    for now, outcome in enumerate(outcomes):
        [unit] = core.start_request(float(now))
        results += core.process_outcome(unit, outcome, float(now))
    [result] = results
    assert isinstance(result, RecordsUnsendable)
    assert result.unknown == unknown


def test_core_keeps_nothing_of_delivered_failed_and_late_records() -> None:
    """A producer runs for months, so its records of lost responses must not accumulate."""
    core = new_core(linger_seconds=0.0, on_late="fail")
    last_outcomes: list[UnitOutcome] = [UnitWritten("s0", "1"), UnitRejected(KeyError("x"))]
    for serial_number, last_outcome in enumerate(last_outcomes):
        core.enqueue_record(new_entry(serial_number))
        for outcome in (UnitUnknown("x"), last_outcome):
            now = max(core.next_due_at(), 0.0)
            [unit] = core.start_request(now)
            core.process_outcome(unit, outcome, now)
    core.enqueue_record(new_entry(2, expires=5.0))
    [unit] = core.start_request(4.0)
    core.process_outcome(unit, UnitUnknown("x"), 4.0)
    [late_result] = core.give_up_late_records(9.0)
    assert late_result.unknown
    assert (core._unknown_serial_numbers, core.is_empty) == (set(), True)  # noqa: SLF001  not visible elsewhere


def test_record_that_was_written_is_never_late() -> None:
    """While the shard map is too old to show whether the shard was the right one, the records wait for a listing."""
    stream = Stream()
    core = ProducerCore(listing_of(stream), Settings(linger_seconds=0.0, on_late="fail"))
    for serial_number in range(2):
        core.enqueue_record(new_entry(serial_number, expires=5.0))
    [unit] = core.start_request(0.0)
    stream.split(0)
    assert core.process_outcome(unit, stream.write(unit), 1.0) == ()
    assert core.give_up_late_records(9.0) == ()
    [result] = core.update_map(listing_of(stream), 9.0)
    assert isinstance(result, RecordsDelivered)
    assert result.entries == unit.entries
    assert core.metrics.counters_by_kpl_name()["UserRecordsPending"] == 0


def test_listing_is_immediate_again_after_a_good_one() -> None:
    stream = Stream()
    core = ProducerCore(listing_of(stream), Settings(linger_seconds=0.0))
    for _ in range(5):
        core.update_map(None, 0.0)
    assert core.list_shards_at() == 0.8
    core.update_map(listing_of(stream), 1.0)
    assert core.list_shards_at() == inf
    core.enqueue_record(new_entry(0))
    [unit] = core.start_request(2.0)
    stream.split(0)
    core.process_outcome(unit, stream.write(unit), 2.0)
    assert core.list_shards_at() == 2.0


def test_records_of_closed_shards_are_given_up_with_the_others() -> None:
    """If a producer stops, each record that was not written is counted once, wherever it waits."""
    stream = Stream()
    core = ProducerCore(listing_of(stream), Settings(linger_seconds=0.0))
    core.enqueue_record(new_entry(0))
    core.start_request(0.0)
    core.enqueue_record(new_entry(1))
    stream.split(0)
    core.update_map(listing_of(stream), 1.0)
    given_up = [entry.serial_number for result in core.give_up_all_records() for entry in result.entries]
    assert (sorted(given_up), core.is_empty) == ([0, 1], True)


def test_every_received_record_is_pending_until_it_has_a_result() -> None:
    core = new_core(linger_seconds=0.0, on_late="fail")
    for serial_number in range(3):
        core.enqueue_record(new_entry(serial_number, expires=5.0 if serial_number == 2 else inf))
        if serial_number < 2:
            outcome: UnitOutcome = UnitWritten("s0", "1") if serial_number else UnitFailed(KeyError("x"))
            core.process_outcome(core.start_request(0.0)[0], outcome, 0.0)
    counters = core.metrics.counters_by_kpl_name()
    assert (counters["UserRecordsReceived"], counters["UserRecordsPending"]) == (3, 1)
    core.give_up_late_records(9.0)
    counters = core.metrics.counters_by_kpl_name()
    names = ("UserRecordsPut", "UserRecordExpired", "UserRecordsFailed", "UserRecordsPending")
    assert [counters[name] for name in names] == [1, 1, 1, 0]


@pytest.mark.parametrize("hash_range", [(0, 9), (10, HASH_KEYS[1])])
def test_unit_whose_records_fill_a_child_is_not_sent_again(hash_range: HashRange) -> None:
    """The first and the last hash key of a shard belong to it."""
    core = new_core(linger_seconds=0.0)
    for serial_number, hash_key in enumerate(hash_range):
        core.enqueue_record(Entry(serial_number, b"x", "k", hash_key, None, 0.0, inf))
    [unit] = core.start_request(0.0)
    assert core.process_outcome(unit, UnitWritten("s-child", "1"), 1.0) == ()
    other_range = (10, HASH_KEYS[1]) if hash_range == (0, 9) else (0, 9)
    shard_map = build_shard_map([Shard("s-child", hash_range=hash_range), Shard("s-other", hash_range=other_range)])
    [result] = core.update_map(shard_map, 1.0)
    assert isinstance(result, RecordsDelivered)
    assert (result.entries, result.shard, core.is_empty) == (unit.entries, "s-child", True)


def test_shards_are_listed_until_the_shard_of_a_written_unit_is_known() -> None:
    """The shard may have been split twice, so a new listing may contain neither the old shard nor that of the unit."""
    core = new_core(linger_seconds=0.0)
    for serial_number in range(2):
        core.enqueue_record(Entry(serial_number, b"x", "k", serial_number, None, 0.0, inf))
    [unit] = core.start_request(0.0)
    core.process_outcome(unit, UnitWritten("s-grandchild", "1"), 1.0)
    other_child, last_child = Shard("s-2", hash_range=(20, HASH_KEYS[1])), Shard("s-3", hash_range=(10, 19))
    assert core.update_map(build_shard_map([Shard("s-1", hash_range=(0, 19)), other_child]), 1.0) == ()
    assert 1.0 <= core.list_shards_at() < 2.0
    grandchild = Shard("s-grandchild", hash_range=(0, 9))
    [result] = core.update_map(build_shard_map([grandchild, last_child, other_child]), 2.0)
    assert isinstance(result, RecordsDelivered)
    assert (core.is_empty, core.list_shards_at()) == (True, inf)


def test_oldest_record_of_a_merged_shard_is_the_first_to_be_late() -> None:
    """A merged shard gets its records from two queues, and they wait in order of age."""
    shard_map = build_shard_map([Shard("s-0", hash_range=(0, 9)), Shard("s-1", hash_range=(10, HASH_KEYS[1]))])
    assert shard_map is not None
    core = ProducerCore(shard_map, Settings(on_late="fail"))
    entries = [
        Entry(serial_number, b"x", "k", hash_key, None, 0.0, expires)
        for serial_number, (hash_key, expires) in enumerate([(0, 5.0), (10, 50.0), (0, 50.0)])
    ]
    for entry in entries:
        core.enqueue_record(entry)
    core.update_map(build_shard_map([Shard("s-2", hash_range=HASH_KEYS)]), 1.0)
    [late_result] = core.give_up_late_records(9.0)
    [unit] = core.start_request(9.0)
    assert (late_result.entries, unit.entries) == ((entries[0],), (entries[1], entries[2]))


def test_only_shards_that_overlap_a_closed_shard_wait_for_its_request() -> None:
    """A record must not overtake one of the same key, but the neighbors of the closed shard are not affected."""
    neighbors = Shard("s-0", hash_range=(0, 9)), Shard("s-2", hash_range=(20, HASH_KEYS[1]))
    shard_map = build_shard_map([*neighbors, Shard("s-1", hash_range=(10, 19))])
    assert shard_map is not None
    core = ProducerCore(shard_map, Settings(linger_seconds=0.0))
    core.enqueue_record(Entry(0, b"x", "k", 15, None, 0.0, inf))
    [unit] = core.start_request(0.0)
    core.update_map(
        build_shard_map([*neighbors, Shard("s-3", hash_range=(10, 10)), Shard("s-4", hash_range=(11, 19))]), 1.0
    )
    for serial_number, hash_key in enumerate((9, 10, 19, 20), 1):
        core.enqueue_record(Entry(serial_number, b"x", "k", hash_key, None, 1.0, inf))
    assert {unit.shard for unit in core.start_request(1.0)} == {"s-0", "s-2"}
    core.process_outcome(unit, UnitWritten("s-4", "1"), 2.0)
    assert {unit.shard for unit in core.start_request(2.0)} == {"s-3", "s-4"}


@pytest.mark.parametrize(("count", "shard"), [(1, "s-child"), (2, "s0")])
def test_unit_that_cannot_be_misplaced_needs_no_listing(count: int, shard: str) -> None:
    """The service chose the shard of a single record, and aggregates are created for the shard in the request."""
    core = new_core(linger_seconds=0.0)
    for serial_number in range(count):
        core.enqueue_record(new_entry(serial_number))
    [unit] = core.start_request(0.0)
    if count == 2:
        core.update_map(build_shard_map([Shard("s-child", hash_range=HASH_KEYS)]), 1.0)
    [result] = core.process_outcome(unit, UnitWritten(shard, "1"), 2.0)
    assert isinstance(result, RecordsDelivered)
    assert (result.entries, result.shard, core.is_empty) == (unit.entries, shard, True)


def test_unit_on_the_shard_of_others_is_sent_again_even_if_its_own_is_open() -> None:
    shard_map = build_shard_map([Shard("s-0", hash_range=(0, 9)), Shard("s-1", hash_range=(10, HASH_KEYS[1]))])
    assert shard_map is not None
    core = ProducerCore(shard_map, Settings(linger_seconds=0.0))
    for serial_number in range(2):
        core.enqueue_record(Entry(serial_number, b"x", "k", serial_number, None, 0.0, inf))
    [unit] = core.start_request(0.0)
    assert core.process_outcome(unit, UnitWritten("s-1", "1"), 1.0) == ()
    assert core.update_map(shard_map, 1.0) == ()
    assert 1.0 < core.list_shards_at() < 2.0
    assert core.next_due_at() < 2.0
    assert core.start_request(2.0) == (unit,)


def test_waiting_records_of_a_split_shard_go_to_its_children() -> None:
    core = new_core(linger_seconds=60.0)
    hash_keys = 0, 19, 10, 9
    for serial_number, hash_key in enumerate(hash_keys):
        core.enqueue_record(Entry(serial_number, b"x", "k", hash_key, None, 0.0, inf))
    children = Shard("s-1", hash_range=(0, 9)), Shard("s-2", hash_range=(10, HASH_KEYS[1]))
    core.update_map(build_shard_map(children), 1.0)
    units = core.start_request(60.0)
    assert {unit.shard: [entry.hash_key for entry in unit.entries] for unit in units} == {
        "s-1": [0, 9],
        "s-2": [19, 10],
    }
    assert core.next_due_at() == inf


def test_late_records_do_not_end_the_linger_time_of_others() -> None:
    core = new_core(on_late="fail", linger_seconds=60.0, min_bytes=1000)
    core.enqueue_record(new_entry(0, size=800, expires=5.0))
    assert len(core.give_up_late_records(9.0)) == 1
    core.enqueue_record(new_entry(1, now=9.0, size=800))
    assert (core.next_due_at(), core.start_request(9.0)) == (69.0, ())


def test_times_in_the_metrics_are_means() -> None:
    core = new_core(linger_seconds=0.0)
    for serial_number, arrived in enumerate((0.0, 1.0)):
        core.enqueue_record(new_entry(serial_number, now=arrived))
    [unit] = core.start_request(2.0)
    core.process_outcome(unit, UnitWritten("s0", "1"), 5.0)
    counters = core.metrics.counters_by_kpl_name()
    assert (counters["BufferingTime"], counters["UserRecordsPerKinesisRecord"]) == (1500.0, 2.0)
