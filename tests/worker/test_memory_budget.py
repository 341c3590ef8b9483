"""One memory bound for the batches of all shards: which readers wait or are admitted, and which batches are dropped."""

import heapq
from random import Random

from attrs import define, field
from hypothesis import given
from hypothesis import strategies as st
from reader_harness import ReaderHarness, data
from virtual_fleet import FaultyStore, ManualExecutor, RecordingConsumer
from waiters import Clock

from leasehold.adapters.consumer.dispatcher import Dispatcher
from leasehold.adapters.consumer.handler_consumer import handler_reader
from leasehold.adapters.consumer.handling import Delivery, Handling
from leasehold.adapters.consumer.memory import MIN_BYTES, MemoryBudget, MemoryShare
from leasehold.adapters.sources.protocol import Batch, Reader, Record
from leasehold.adapters.threads import ThreadScheduler
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.config import Config
from leasehold.balancer.model import LATEST, TRIM_HORIZON, Lease, Position
from leasehold_lab.simulator.world.world import ListSource, ShardRecords, create_even_shards, create_records

LIMIT = 5 * MIN_BYTES


def share_with_expected_bytes(budget: MemoryBudget, key: str, size: int) -> MemoryShare:
    """Return the share of a reader that requests this many bytes."""
    share = budget.share(key)
    share.expected_bytes = size
    return share


def batch(size: int) -> Batch:
    """Return a batch of this many bytes."""
    return Batch((), None, None, 0.0, size=size)


@define
class LeaseReaders:
    """Simulated readers that request memory, use it in full or in part, wait for another attempt, and finish."""

    draw: Random
    woken: set[str] = field(factory=set)
    asking: list[MemoryShare] = field(factory=list)
    holding: dict[MemoryShare, int] = field(factory=dict)
    budget: MemoryBudget = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.budget = MemoryBudget(LIMIT, self.woken.add)

    def ask(self, number: int) -> None:
        share = share_with_expected_bytes(self.budget, f"s-{number}", self.draw.randint(1, 2 * LIMIT))
        if share.request():
            self.read(share)
        else:
            self.asking.append(share)

    def ask_again(self, _number: int) -> None:
        """Repeat the request of a waiting reader.

        If the request is now granted, the reader was notified before or is the first in the queue.
        """
        for share in self.draw.sample(self.asking, min(1, len(self.asking))):
            was_woken = share.key in self.woken
            if share.request():
                assert was_woken or share is self.asking[0]
                self.asking.remove(share)
                self.read(share)

    def read(self, share: MemoryShare) -> None:
        assert self.budget.used_bytes <= LIMIT or len(self.budget.granted_bytes) == 1, "beyond the bound, and not alone"
        self.holding[share] = self.draw.randint(0, share.expected_bytes)
        share.hold(batch(self.holding[share]))

    def wait(self, _number: int) -> None:
        for share in self.draw.sample([*self.holding], min(1, len(self.holding))):
            share.allow_drop(self.draw.random())

    def attempt(self, _number: int) -> None:
        """Begin the next attempt of a reader, which either still has its batch or learns that it was dropped."""
        for share in self.draw.sample([*self.holding], min(1, len(self.holding))):
            was_dropped = share.protect() is None
            assert was_dropped is (share not in self.budget.granted_bytes) is share.dropped
            share.dropped = False
            if was_dropped:
                del self.holding[share]

    def finish(self, _number: int) -> None:
        """Free the memory of a reader, as happens when its handler returns or its lease is lost."""
        for share in self.draw.sample([*self.holding], min(1, len(self.holding))):
            del self.holding[share]
            share.clear()

    @property
    def sizes(self) -> int:
        """The number of bytes that the budget should count as used."""
        expected_sizes = {share: share.expected_bytes for share in self.asking}
        return sum(
            size for share, size in (self.holding | expected_sizes).items() if share in self.budget.granted_bytes
        )

    def over(self) -> None:
        """Free the memory of all readers that have a batch. Every waiting reader must then be admitted."""
        for share in self.holding:
            share.clear()
        for share in self.asking:
            assert share.request(), "all others are gone, or were let in before"
            share.clear()
        assert self.budget.used_bytes == 0


@given(draw=st.randoms(use_true_random=False))
def test_memory_stays_within_the_bound_and_every_reader_gets_its_turn(draw: Random) -> None:
    readers = LeaseReaders(draw)
    actions = [readers.ask, readers.ask, readers.ask_again, readers.wait, readers.attempt, readers.finish]
    for number in range(60):
        draw.choice(actions)(number)
        assert readers.budget.used_bytes == readers.sizes
    readers.over()


def test_batch_larger_than_the_bound_is_admitted_alone() -> None:
    woken_readers: list[str] = []
    budget = MemoryBudget(LIMIT, woken_readers.append)
    small_share, large_share, later_share = (
        share_with_expected_bytes(budget, key, size) for key, size in (("a", 1), ("b", 2 * LIMIT), ("c", 1))
    )
    assert [share.request() for share in (small_share, large_share, later_share)] == [True, False, False], (
        "in the order in which they ask"
    )
    small_share.clear()
    assert (woken_readers, large_share.request(), later_share.request()) == (["b"], True, False)
    large_share.clear()
    assert (woken_readers, later_share.request()) == (["b", "c"], True)


def test_batch_that_would_wait_longest_is_dropped_first() -> None:
    """The shard whose next attempt is due first keeps its batch."""
    budget = MemoryBudget(LIMIT)
    share_due_soon, share_due_late, other_share = (
        share_with_expected_bytes(budget, key, 2 * MIN_BYTES) for key in "abc"
    )
    for share, due_time in ((share_due_soon, 1.0), (share_due_late, 9.0)):
        assert share.request()
        share.hold(batch(2 * MIN_BYTES))
        share.allow_drop(due_time)
    assert other_share.request()
    assert (share_due_soon.protect(), share_due_late.protect()) == (batch(2 * MIN_BYTES), None)
    assert (share_due_soon.dropped, share_due_late.dropped) == (False, True)


def test_batch_that_is_in_use_again_is_not_dropped() -> None:
    budget = MemoryBudget(LIMIT)
    share, other_share = (share_with_expected_bytes(budget, key, LIMIT) for key in "ab")
    assert share.request()
    share.hold(batch(LIMIT))
    share.allow_drop(1.0)
    share.protect()
    assert not other_share.request()
    assert (share.batch, share.dropped) == (batch(LIMIT), False)


def test_smaller_batch_than_requested_admits_waiting_readers() -> None:
    woken_readers: list[str] = []
    budget = MemoryBudget(LIMIT, woken_readers.append)
    share, other_share = (share_with_expected_bytes(budget, key, LIMIT) for key in "ab")
    assert [requesting_share.request() for requesting_share in (share, other_share)] == [True, False]
    share.hold(batch(0))
    assert (woken_readers, budget.used_bytes) == (["b"], LIMIT)


def test_reader_that_leaves_the_queue_is_not_admitted_later() -> None:
    woken_readers: list[str] = []
    budget = MemoryBudget(LIMIT, woken_readers.append)
    share, other_share = (share_with_expected_bytes(budget, key, LIMIT) for key in "ab")
    assert [requesting_share.request() for requesting_share in (share, other_share)] == [True, False]
    other_share.clear()
    share.clear()
    assert (woken_readers, budget.used_bytes) == ([], 0)


@define
class ManyReaders:
    """Many readers of one worker. Each is stepped when it is due by a simulated clock."""

    shards: int
    budget: MemoryBudget
    failing: frozenset[str]
    clock: Clock = field(factory=Clock)
    done: dict[str, list[str]] = field(factory=dict)
    dispatched: dict[str, int] = field(factory=dict)
    max_used: int = 0

    def handle(self, delivery: Delivery) -> None:
        """Record the batch, and fail if its shard is one of the failing ones."""
        self.dispatched[delivery.shard] = self.dispatched.get(delivery.shard, 0) + 1
        self.max_used = max(self.max_used, self.budget.used_bytes)
        if delivery.shard in self.failing:
            raise OSError("no answer")
        self.done.setdefault(delivery.shard, []).extend(record.sequence_number for record in delivery.records)

    def run(self, seconds: float, **policy: float) -> Worker:
        """Run all readers for this many seconds, and return their worker."""
        shard_ids = tuple(f"s-{reader_index:03}" for reader_index in range(self.shards))
        records = [Record(bytes(MIN_BYTES), str(reader_index)) for reader_index in range(3)]
        source = ListSource(
            create_even_shards(shard_ids), {name: ShardRecords(list(records), size=1) for name in shard_ids}
        )
        config, consumer = Config(lease_seconds=600.0, initial_position=TRIM_HORIZON), RecordingConsumer()
        worker = Worker(
            store=FaultyStore(),
            source=source,
            me="a",
            config=config,
            consumer=consumer,
            scheduler=ThreadScheduler(self.clock),
        )
        next_turn = self.clock.now
        while len(worker.holdings) < self.shards:
            self.clock.now = next_turn
            next_turn = worker.turn(next_turn)
        handling = Handling(self.handle, attempts=1000, **policy)  # type: ignore[arg-type]  # Each value is a duration.
        readers = [handler_reader(worker, holding, handling, self.budget) for holding in consumer.begun]
        step_queue = [(self.clock.now, reader_index) for reader_index in range(len(readers))]
        end_time = self.clock.now + seconds
        while step_queue[0][0] <= end_time:
            step_time, reader_index = heapq.heappop(step_queue)
            self.clock.now = max(self.clock.now, step_time)
            heapq.heappush(step_queue, (readers[reader_index].step(self.clock.now), reader_index))
        return worker


@define
class StreamWithEmptyFirstRead(ListSource):
    """A stream whose readers return an empty batch first, as a Kinesis iterator may do."""

    def open(self, lease: Lease, start: Position) -> Reader:
        """Return a reader whose first batch is empty."""
        return ReaderWithEmptyFirstRead(super().open(lease, start))


@define
class ReaderWithEmptyFirstRead:
    """A reader whose first batch is empty."""

    reader: Reader
    was_read: bool = False

    def read(self) -> Batch:
        """Return an empty batch the first time, and the records later."""
        was_read, self.was_read = self.was_read, True
        return self.reader.read() if was_read else batch(0)

    def close(self) -> None:
        self.reader.close()


def test_dropped_batch_keeps_its_remaining_attempts() -> None:
    def raise_os_error(_delivery: Delivery) -> None:
        raise OSError("for good")

    harness = ReaderHarness(source=StreamWithEmptyFirstRead(), on_batch=raise_os_error)
    budget, handling = MemoryBudget(1), Handling(harness.handle, attempts=3)
    reader, other_share = handler_reader(harness.worker, harness.holding, handling, budget), budget.share("other")
    while not harness.holding.lost.is_set() and len(harness.dispatched) <= 3:
        harness.steps(reader, 1)
        assert other_share.request(), "nothing is held but what may be forgotten"
        other_share.clear()
        harness.worker.renew(harness.clock.now)
    assert harness.dispatched == [data(5)] * 3
    assert len(harness.source.opened) == 3


def test_batch_dropped_before_the_first_checkpoint_is_read_from_the_pinned_position() -> None:
    """LATEST in the row would mean the current end of the shard, so reading starts at the pinned position."""

    def fails_once(_delivery: Delivery) -> None:
        if len(harness.dispatched) == 1:
            raise OSError("not now")

    harness = ReaderHarness(ShardRecords(create_records(2)), lease=Lease("s-0", checkpoint=LATEST), on_batch=fails_once)
    budget = MemoryBudget(1)
    reader, other_share = harness.reading(budget), budget.share("other")
    harness.steps(reader, 1)
    harness.shard_log.records += create_records(3, 2)
    harness.steps(reader, 1)
    assert other_share.request(), "the batch that failed is forgotten"
    other_share.clear()
    harness.steps(reader, 4)
    assert harness.dispatched == [data(3, 2), data(3, 2)]


def test_many_failing_shards_stay_within_the_bound_and_starve_no_other() -> None:
    failing_shards = frozenset(f"s-{number:03}" for number in range(190))
    many_readers = ManyReaders(200, MemoryBudget(50 * MIN_BYTES), failing_shards)
    worker = many_readers.run(120.0, least_wait_seconds=5.0, most_wait_seconds=60.0)
    assert len(worker.holdings) == 200
    assert many_readers.done == {f"s-{number:03}": ["0", "1", "2"] for number in range(190, 200)}
    assert many_readers.max_used <= 50 * MIN_BYTES
    assert min(many_readers.dispatched[name] for name in failing_shards) >= 2, "they are tried again, too"
    rows = {lease.key: lease.checkpoint for lease in worker.store.list().leases}
    assert {rows[name] for name in failing_shards} == {TRIM_HORIZON}
    assert {rows[name] for name in many_readers.done} == {Position("2")}


def test_reader_that_has_a_batch_gets_more_memory_only_if_no_other_waits() -> None:
    budget = MemoryBudget(LIMIT)
    share, waiting_share = (share_with_expected_bytes(budget, key, MIN_BYTES) for key in "ab")
    assert (share.request(), share.request_more()) == (True, True)
    share.hold(batch(MIN_BYTES))
    waiting_share.expected_bytes = LIMIT
    assert not waiting_share.request()
    assert not share.request_more()
    waiting_share.clear()
    share.expected_bytes = LIMIT - MIN_BYTES
    assert (share.request_more(), budget.used_bytes, share.request_more()) == (True, LIMIT, False)


def test_cleared_batch_is_not_dropped_later() -> None:
    budget = MemoryBudget(LIMIT)
    share, other_share = (share_with_expected_bytes(budget, key, LIMIT) for key in "ab")
    for _ in range(2):
        assert share.request()
        share.hold(batch(LIMIT))
        share.allow_drop(1.0)
        share.clear()
        assert (share.dropped, budget.droppable, budget.used_bytes) == (False, {}, 0)
    assert share.request()
    assert not other_share.request(), "the memory of a read that has not ended cannot be taken away"
    assert not share.dropped


def test_next_request_covers_the_last_batches() -> None:
    """Parsing needs several times the payload. After a large batch, the request falls by at most half each time."""
    share = MemoryBudget().share("a")
    requested = list[int]()
    for size in (10 * MIN_BYTES, 0, 0, 0, 0, 0, 0, 0):
        share.hold(batch(size))
        requested.append(share.expected_bytes // MIN_BYTES)
    first = 4 * 10 * 2**20 // 2 // MIN_BYTES
    assert requested == [first >> halvings for halvings in range(8)]
    share.expected_bytes = 0
    share.hold(batch(10 * MIN_BYTES))
    assert share.expected_bytes == 40 * MIN_BYTES


def test_batch_that_a_handler_has_is_not_dropped() -> None:
    harness, budget, executor = ReaderHarness(), MemoryBudget(1), ManualExecutor()
    reader, other_share = harness.reading(budget, Dispatcher(executor)), budget.share("other")
    harness.steps(reader, 2)
    for _ in range(2):
        assert not other_share.request()
        reader.step(harness.clock.now)
    executor.waiting.pop()()
    harness.steps(reader, 1)
    assert (harness.dispatched, other_share.request()) == ([data(5)], True)
