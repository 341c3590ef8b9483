"""Law of conservation: once every batch is handled or dropped, no memory, call or reader is still in use.

The state machine has readers that share a memory budget, an executor and an event loop. In any order, it reads and
dispatches batches, lets calls fail, and loses or releases leases.
"""

import asyncio
import math
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from virtual_fleet import FaultySource, FaultyStore, ManualExecutor, RecordingConsumer, four_shards
from waiters import Clock

from leasehold.adapters.consumer.dispatcher import Dispatcher
from leasehold.adapters.consumer.handler_consumer import HandlerConsumer, handler_reader
from leasehold.adapters.consumer.handling import Delivery, Handling
from leasehold.adapters.consumer.memory import RECORD_BYTES, MemoryBudget
from leasehold.adapters.sources.protocol import Batch
from leasehold.adapters.threads import ThreadScheduler
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.config import Config
from leasehold.balancer.model import TRIM_HORIZON, Lease
from leasehold.errors import SourceUnavailable
from leasehold.stores.writes import CreateLease
from leasehold_lab.simulator.world.world import ShardRecords, create_records

SHARDS = 4
MAX_STEPS = 400
PLACES = st.integers(0, SHARDS - 1)

pytestmark = pytest.mark.slow


class Conservation(RuleBasedStateMachine):
    """The memory and threads that a worker uses for its readers, and all events that may affect them."""

    @initialize(size=st.integers(1, 4), letters=st.booleans(), asynchronous=st.booleans(), narrow=st.booleans())
    def begin(self, size: int, *, letters: bool, asynchronous: bool, narrow: bool) -> None:
        """Start with four held shards of twelve records each."""
        self.clock, self.store, self.executor, consumer = Clock(), FaultyStore(), ManualExecutor(), RecordingConsumer()
        self.source = FaultySource(
            four_shards(), {f"s-{n}": ShardRecords(create_records(12), size=size) for n in range(4)}
        )
        self.source.on_read, self.raises = self._raise, list[Exception]()
        for shard in four_shards():
            self.store.write(CreateLease(Lease(shard.id, hash_range=shard.hash_range)))
        self.worker = Worker(
            store=self.store,
            source=self.source,
            me="a-1",
            config=Config(initial_position=TRIM_HORIZON, lease_seconds=1e6),
            consumer=consumer,
            scheduler=ThreadScheduler(self.clock, process_id="p-1"),
        )
        for _ in range(10):
            self.clock.now = max(self.clock.now, self.worker.turn(self.clock.now))
            if len(consumer.begun) == SHARDS:
                break
        assert len(consumer.begun) == SHARDS
        self.ended: list[BaseException] = []
        self.dispatcher = Dispatcher(self.executor, end_worker=self.ended.append)
        # A narrow budget is so small that batches displace each other.
        self.budget = MemoryBudget((size + 1) * RECORD_BYTES if narrow else math.inf)
        self.outcomes: list[str] = []
        self.handled: dict[str, list[str]] = {}
        handling = Handling(
            self.later if asynchronous else self.handle,
            attempts=2,
            cooldown_seconds=0.0,
            checkpoint_seconds=0.0,
            least_wait_seconds=1.0,
            slow_seconds=5.0,
            handler_seconds=20.0,
            dead_letter=self.dead_letter if letters else None,
        )
        self.holdings = consumer.begun
        self.readings = [
            handler_reader(self.worker, holding, handling, self.budget, self.dispatcher) for holding in self.holdings
        ]
        self.due_times = [self.clock.now] * SHARDS

    # Handler behavior

    def handle(self, delivery: Delivery) -> None:
        """End the call as `next_call` has set, or handle all records."""
        outcome = self.outcomes.pop() if self.outcomes else "done"
        if outcome == "raises":
            raise ValueError(outcome)
        if outcome == "answers":
            return outcome  # type: ignore[return-value]  # a user's function may return anything
        self.handled.setdefault(delivery.shard, []).extend(record.sequence_number for record in delivery.records)
        return None

    async def later(self, delivery: Delivery) -> None:
        await asyncio.sleep(0)
        return self.handle(delivery)

    def dead_letter(self, _delivery: Delivery, _error: Exception) -> None:
        """Accept every record."""

    # Rules

    @rule(index=PLACES, times=st.integers(1, 3))
    def step(self, index: int, times: int) -> None:
        """Call a reader, whether it is due or not."""
        for _ in range(times):
            if self.due_times[index] < math.inf:
                self.step_at(index)

    @rule(times=st.integers(1, 4))
    def flow(self, times: int) -> None:
        """Let all readers and calls run for a while, without faults."""
        for _ in range(times):
            for index in range(SHARDS):
                self.step(index, 1)
            while self.executor.waiting:
                self._work(0)
            self.clock.now += 0.5

    @rule(seconds=st.sampled_from([0.1, 1.0, 6.0, 30.0]))
    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(outcome=st.sampled_from(["raises", "answers", "done"]))
    def next_call(self, outcome: str) -> None:
        """Let the handler's next call end with this outcome."""
        self.outcomes.append(outcome)

    def _raise(self, _batch: Batch) -> None:
        if self.raises:
            raise self.raises.pop()

    @rule(last=st.booleans())
    def work(self, *, last: bool) -> None:
        """Let a thread run the first or the last waiting call."""
        if self.executor.waiting:
            self._work(-1 if last else 0)

    @rule(fault=st.sampled_from([SourceUnavailable("slow down"), MemoryError(), ValueError("odd")]))
    def fault_of_source(self, fault: Exception) -> None:
        """Let the next read raise this error after it has advanced."""
        self.raises.append(fault)

    @rule(index=PLACES)
    def steal(self, index: int) -> None:
        self.holdings[index].drop("stolen")

    @rule(index=PLACES)
    def release(self, index: int) -> None:
        """Request the release of the lease."""
        self.holdings[index].ask_release()

    @rule(down=st.booleans())
    def store_is(self, *, down: bool) -> None:
        """Set whether the table responds."""
        self.store.down = down

    @rule(stuck=st.booleans(), refuses=st.booleans())
    def threads_are(self, *, stuck: bool, refuses: bool) -> None:
        """Set whether all threads hang, and whether the system refuses further threads."""
        self.executor.stuck, self.executor.refuses = stuck, refuses

    def step_at(self, index: int) -> None:
        """Step a reader, and handle its errors as the schedule does."""
        try:
            self.due_times[index] = self.readings[index].step(self.clock.now)
        except (MemoryError, ValueError):
            self.due_times[index] = self.clock.now

    def _work(self, index: int) -> None:
        work = self.executor.waiting.pop(index)
        running_calls = dict(self.dispatcher._running)  # noqa: SLF001  the test waits for these calls
        work()
        for call in running_calls.values():
            self._wait(call)

    def _wait(self, call: Any) -> None:  # noqa: ANN401  a private class of the dispatcher
        """Wait until the event loop has finished the call, if it has begun."""
        while call.begun is not None and call.outcome is None:
            pass

    # Invariants

    @invariant()
    def budget_counts_held_batches(self) -> None:
        """The budget counts exactly the memory of its shares."""
        if hasattr(self, "budget"):
            budget = self.budget
            assert budget.used_bytes == sum(budget.granted_bytes.values())
            assert set(budget.droppable) <= set(budget.granted_bytes)
            assert not set(budget.requested_bytes) & set(budget.granted_bytes)

    @invariant()
    def checkpoints_cover_only_handled_records(self) -> None:
        """The first law holds throughout: no checkpoint covers a record that was not handled."""
        if hasattr(self, "budget"):
            for row in [self.store.row(f"s-{number}") for number in range(SHARDS)]:
                handled_numbers = self.handled.get(row.key, [])
                if row.checkpoint.numbered and not self.letters:
                    checkpointed_numbers = [str(number) for number in range(100, int(row.checkpoint.sequence) + 1)]
                    assert set(checkpointed_numbers) <= set(handled_numbers)

    @property
    def letters(self) -> bool:
        """Whether records may be dead-lettered."""
        consumer = self.readings[0].consumer
        assert isinstance(consumer, HandlerConsumer)
        return consumer._handling.dead_letter is not None  # noqa: SLF001  there is no public access to it

    def teardown(self) -> None:
        """Release all leases in their current state, and check that no calls, batches or readers remain."""
        if not hasattr(self, "budget"):
            return
        self.store.down = self.executor.stuck = self.executor.refuses = False
        self.raises.clear()
        self.outcomes.clear()
        for holding in self.holdings:
            holding.ask_release()
        for _ in range(MAX_STEPS):
            while self.executor.waiting:
                self._work(0)
            self.clock.now += 1.0
            unfinished_indexes = [index for index in range(SHARDS) if self.due_times[index] < math.inf]
            for index in unfinished_indexes:
                self.step_at(index)
            if not unfinished_indexes:
                break
        self.dispatcher.close()
        remaining = (
            self.dispatcher._running,  # noqa: SLF001
            self.executor.waiting,
            self.budget.granted_bytes,
            self.budget.requested_bytes,
            self.budget.droppable,
        )
        assert [list(collection) for collection in remaining] == [[]] * 5
        assert (self.budget.used_bytes, [reader for reader in self.source.readers if not reader.closed]) == (0, [])
        assert {row.owner for row in self.store.list().leases} == {None} or any(h.lost.is_set() for h in self.holdings)
        assert [due_time for due_time in self.due_times if due_time < math.inf] == []


Conservation.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestConservation = Conservation.TestCase
