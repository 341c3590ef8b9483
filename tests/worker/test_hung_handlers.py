"""Handlers that do not return are logged, and do not block other shards.

After a time limit, their leases are released.
"""

from collections.abc import Iterator
from threading import Event
from typing import NoReturn

import pytest
from attrs import define, field
from handler_threads import ProcessedRecords, joined
from metric_points import exported_values
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from reader_harness import ReaderHarness, data
from running import run_to_its_end, running
from virtual_fleet import FaultyStore, four_shards
from waiters import WAIT, until

from leasehold.adapters.consumer.dispatcher import Dispatcher
from leasehold.adapters.consumer.executors import ThreadExecutor
from leasehold.adapters.consumer.handler_consumer import handler_reader
from leasehold.adapters.consumer.handling import Delivery, Handling
from leasehold.adapters.consumer.lease_reader import LeaseReader
from leasehold.adapters.consumer.runner import Runner
from leasehold.balancer.model import TRIM_HORIZON, Position
from leasehold.errors import WorkerError
from leasehold.stores.writes import ClaimLease, StealLease
from leasehold_lab.simulator.world.world import ListSource, ShardRecords, create_even_shards, create_records


@define
class HungHandler:
    """A worker with one shard, whose handler blocks in a thread until the test lets the handler return.

    Only the test moves the clock.
    """

    policy: dict[str, object] = field(factory=dict)
    threads: ThreadExecutor = field(factory=lambda: ThreadExecutor(1))
    harness: ReaderHarness = field(factory=ReaderHarness)
    began: Event = field(factory=Event)
    finish: Event = field(factory=Event)
    ended: Event = field(factory=Event)
    deliveries: list[Delivery] = field(factory=list)
    slow: list[float] = field(factory=list)
    dispatcher: Dispatcher = field(init=False)
    reading: LeaseReader = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.harness.on_batch = self.hang
        self.dispatcher = Dispatcher(self.threads, wake=lambda _key: self.ended.set())
        self.reading = self.read()

    def read(self) -> LeaseReader:
        """Return a reader of the currently held lease."""
        handling = Handling(
            self.harness.handle,
            slow=lambda _holding, seconds: self.slow.append(seconds),
            observer=lambda happening, _holding: self.harness.happenings.append(happening),
            **self.policy,  # type: ignore[arg-type]
        )
        return handler_reader(
            self.harness.worker, self.harness.consumer.begun[-1], handling, dispatcher=self.dispatcher
        )

    def hang(self, delivery: Delivery) -> None:
        """Block until the test sets `finish`."""
        self.deliveries.append(delivery)
        self.began.set()
        assert self.finish.wait(WAIT)

    def start_handler(self) -> None:
        """Open the shard, read a batch, and wait until the handler has begun."""
        self.harness.steps(self.reading, 2)
        assert self.began.wait(WAIT)

    def later(self, seconds: float) -> float:
        """Step the reader this many seconds later, and return the seconds until its next step."""
        self.harness.clock.now += seconds
        return self.reading.step(self.harness.clock.now) - self.harness.clock.now

    def finish_handler(self) -> None:
        """Let the handler return, and wait until the reader is woken."""
        self.finish.set()
        assert self.ended.wait(WAIT)


@pytest.fixture
def hung() -> Iterator[HungHandler]:
    """Returns a handler that counts as slow after 10 s, without a limit."""
    hung_handler = HungHandler({"slow_seconds": 10.0})
    yield hung_handler
    hung_handler.finish_handler()  # Otherwise, its last log messages might appear in a later test.


@pytest.fixture
def limited() -> Iterator[HungHandler]:
    """Returns a handler that counts as slow after 10 s and is abandoned after 30 s."""
    hung_handler = HungHandler({"slow_seconds": 10.0, "handler_seconds": 30.0})
    yield hung_handler
    hung_handler.finish_handler()


def test_hung_handlers_do_not_starve_healthy_shards() -> None:
    shard_ids = tuple(f"s-{n:02}" for n in range(40))
    store, processed_records, finish, hanging_shards = FaultyStore(), ProcessedRecords(30), Event(), set(shard_ids[:30])

    def handle(delivery: Delivery) -> None:
        if delivery.shard in hanging_shards:
            assert finish.wait(WAIT)
        else:
            processed_records.add(delivery)

    shard_logs = {name: ShardRecords(create_records(3), size=1) for name in shard_ids}
    handling = Handling(handle, slow_seconds=0.05)
    with running(Runner(joined(store, ListSource(create_even_shards(shard_ids), shard_logs)), handling)):
        assert processed_records.all.wait(WAIT)
        finish.set()
    assert processed_records.by_shard == {name: data(3) for name in shard_ids[30:]}


def test_slow_handler_is_logged_at_each_doubling(hung: HungHandler, caplog: pytest.LogCaptureFixture) -> None:
    hung.start_handler()
    assert [hung.later(seconds) for seconds in (4, 6, 5, 5, 20, 1)] == [6, 10, 5, 20, 40, 39]
    assert hung.slow == [10, 20, 40]
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [f"shard s-0: its handler has been at work on one batch for {n}.0 s" for n in (10, 20, 40)]
    hung.finish_handler()
    hung.later(0)
    assert hung.harness.store.row("s-0").checkpoint == Position("104")


def test_slow_handlers_are_counted() -> None:
    metric_reader, handler_began, slow_reported = InMemoryMetricReader(), Event(), Event()
    finish = Event()

    def handle(_delivery: Delivery) -> None:
        handler_began.set()
        assert finish.wait(WAIT)

    handling = Handling(handle, slow_seconds=0.01, slow=lambda _holding, _seconds: slow_reported.set())
    source = ListSource(four_shards()[:1], {"s-0": ShardRecords(create_records(5))})
    meter = MeterProvider([metric_reader]).get_meter("test")
    with running(Runner(joined(FaultyStore(), source), handling, meter=meter)):
        assert slow_reported.wait(WAIT)
        finish.set()
    assert exported_values(metric_reader)["slow_handlers", "s-0"] >= 1


def test_handler_over_the_limit_costs_its_lease(limited: HungHandler, caplog: pytest.LogCaptureFixture) -> None:
    limited.start_handler()
    assert limited.later(29.5) == 0.5
    limited.later(0.5)
    assert limited.later(0) == float("inf")
    assert (limited.harness.store.row("s-0").owner, limited.harness.happenings) == (None, ["initialize", "stopped"])
    reason = "its handler has been at work for 30.0 s, and 30 s is the limit"
    assert f"shard s-0 stops here: {reason}; released, not taken again for 60 s" in caplog.text
    limited.harness.worker.turn(limited.harness.clock.now)
    assert limited.harness.worker.holdings == ()


def test_handler_that_returns_late_finds_its_lease_lost(limited: HungHandler) -> None:
    limited.start_handler()
    limited.later(30)
    limited.later(0)
    store = limited.harness.store
    store.write(ClaimLease(store.row("s-0"), "b-1", (("process", "p-2/b-1"),)))
    row_of_next_owner = store.row("s-0")
    (delivery,) = limited.deliveries
    assert (delivery.lost, delivery.checkpoint(), delivery.checkpoint(delivery.records[0])) == (True, False, False)
    limited.finish_handler()
    assert store.row("s-0") == row_of_next_owner


def test_shard_never_has_two_handlers_in_one_worker(limited: HungHandler, caplog: pytest.LogCaptureFixture) -> None:
    limited.start_handler()
    limited.later(30)
    limited.later(0)
    harness = limited.harness
    harness.clock.now += 61
    harness.worker.turn(harness.clock.now)
    limited.reading = limited.read()
    harness.steps(limited.reading, 3)
    assert "shard s-0 stops here: a handler that was given up is still running; released" in caplog.text
    assert (harness.dispatched, harness.store.row("s-0").owner) == ([data(5)], None)
    limited.finish_handler()
    # The thread of the handler logs this message after it has woken the reader.
    until(lambda: "shard s-0: the handler that was given up has ended: it returned" in caplog.text)
    harness.clock.now += 61
    harness.worker.turn(harness.clock.now)
    limited.ended.clear()
    limited.reading = limited.read()
    harness.steps(limited.reading, 2)
    assert limited.ended.wait(WAIT)
    limited.later(0)
    assert (harness.dispatched, harness.store.row("s-0").checkpoint) == ([data(5)] * 2, Position("104"))


def test_end_of_a_handler_after_a_steal_is_logged() -> None:
    hung_handler = HungHandler({"late_checkpoints": True})
    hung_handler.start_handler()
    store = hung_handler.harness.store
    store.write(StealLease(store.row("s-0"), "b-1", (("process", "p-2/b-1"),)))
    hung_handler.harness.holding.drop("stolen")
    hung_handler.finish_handler()
    assert hung_handler.later(0) == float("inf")
    row = store.row("s-0")
    assert (row.owner, row.checkpoint) == ("b-1", Position("104"))


@pytest.mark.parametrize("wanted", ["lost", "released"])
def test_waiting_batch_is_withdrawn_when_its_lease_is_wanted(wanted: str) -> None:
    """If a lease is lost or must be released, a batch whose handler has not begun is withdrawn."""
    running_handler = HungHandler()
    running_handler.start_handler()
    waiting_handler = HungHandler(threads=running_handler.threads)
    waiting_handler.harness.steps(waiting_handler.reading, 2)
    if wanted == "lost":
        waiting_handler.harness.holding.drop("stolen")
    else:
        waiting_handler.harness.holding.ask_release()
    assert [waiting_handler.later(0) for _ in range(3)][-1] == float("inf")
    row = waiting_handler.harness.store.row("s-0")
    assert (waiting_handler.harness.dispatched, row.checkpoint) == ([], TRIM_HORIZON)
    assert (row.owner is None) == (wanted == "released")
    running_handler.finish_handler()


def test_abandoned_handler_does_not_keep_the_worker() -> None:
    store, may_finish, shard_stopped = FaultyStore(), Event(), Event()

    def hang(_delivery: Delivery) -> None:
        assert may_finish.wait(WAIT)

    handling = Handling(
        hang,
        handler_seconds=0.05,
        observer=lambda happening, _holding: shard_stopped.set() if happening == "stopped" else None,
    )
    with running(
        Runner(joined(store, ListSource(four_shards()[:1], {"s-0": ShardRecords(create_records(5))})), handling)
    ):
        assert shard_stopped.wait(WAIT)
    may_finish.set()
    assert (store.row("s-0").owner, store.row("s-0").checkpoint) == (None, TRIM_HORIZON)


def test_thread_that_cannot_start_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FaultyStore()
    runner = Runner(
        joined(store, ListSource(four_shards(), {"s-0": ShardRecords(create_records(5))})), lambda _delivery: None
    )

    def refuse_thread(*_of_what: object) -> NoReturn:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("leasehold.adapters.consumer.executors.spawn", refuse_thread)
    with pytest.raises(WorkerError, match="can't start new thread"):
        run_to_its_end(runner)
    assert [lease.owner for lease in store.list().leases] == [None] * 4


def test_reader_is_called_when_it_asked_even_if_a_handler_is_slow() -> None:
    hung_handler = HungHandler()
    hung_handler.harness.shard_log.wait_seconds = 5.0
    start_time = hung_handler.harness.clock.now
    hung_handler.start_handler()
    hung_handler.harness.clock.now += 2
    hung_handler.finish_handler()
    assert hung_handler.reading.step(hung_handler.harness.clock.now) == start_time + 5.0
