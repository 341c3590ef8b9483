"""Threads that keep appointments: one batch of a shard at a time, and an end that leaves nothing owned."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from threading import Event, Lock, Thread

import pytest
from virtual_fleet import FaultyStore, four_shards

from adapters.appointments import Appointments
from adapters.handling import Delivery, Handling
from adapters.holding import Holding
from adapters.runner import Runner, run
from adapters.simulator.stream import ListSource, Shelf, records
from adapters.source import Batch, SourceError
from adapters.worker import Worker
from balancer.config import Config
from balancer.model import Position, Shard

WAIT = 30.0


@pytest.fixture
def appointments() -> Iterator[Appointments]:
    """A pool of four threads."""
    kept = Appointments(4, time.monotonic)
    yield kept
    kept.close()


def joined(store: FaultyStore, source: ListSource) -> Worker:
    """A worker that starts at the beginning."""
    config = Config(lease_seconds=10.0, initial_position=Position("TRIM_HORIZON"))
    return Worker(store=store, source=source, me="a-1", config=config)


def stream(count: int = 5) -> ListSource:
    """Four shards of some records."""
    return ListSource(four_shards(), {f"s-{n}": Shelf(records(count)) for n in range(4)})


def test_no_step_runs_beside_itself(appointments: Appointments) -> None:
    """Without it one shard's batches could be handled side by side."""
    busy, beside, calls = Lock(), [], []

    def step(now: float) -> float:
        if not busy.acquire(blocking=False):
            beside.append(now)
            return now
        calls.append(now)
        appointments.hurry("s")  # asked for while it runs
        busy.release()
        return float("inf") if len(calls) == 200 else now

    appointments.add("s", step)
    assert appointments.drain(WAIT)
    assert (len(calls), beside) == (200, [])


def test_a_successor_waits_for_its_predecessor(appointments: Appointments) -> None:
    """Without it a lease lost and won again would have two handlers at work on its shard."""
    running, finish, order = Event(), Event(), []

    def first(_now: float) -> float:
        running.set()
        assert finish.wait(WAIT)
        order.append("first")
        return float("inf")

    def second(_now: float) -> float:
        order.append("second")
        return float("inf")

    appointments.add("s", first)
    assert running.wait(WAIT)
    appointments.add("s", second)
    finish.set()
    assert appointments.drain(WAIT)
    assert order == ["first", "second"]


def test_a_thousand_shards_need_few_threads(appointments: Appointments) -> None:
    """Without it a big worker would need a thread for each shard, or starve some."""
    lock, counts = Lock(), dict.fromkeys(range(1000), 0)

    def stepping(number: int) -> Callable[[float], float]:
        def step(now: float) -> float:
            with lock:
                counts[number] += 1
            return now + 0.001 if counts[number] < 3 else float("inf")

        return step

    for number in counts:
        appointments.add(f"s-{number}", stepping(number))
    assert appointments.drain(WAIT)
    assert set(counts.values()) == {3}


def test_a_step_that_raises_is_called_again(appointments: Appointments, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it one unforeseen fault would leave a held shard unread for ever."""
    monkeypatch.setattr("adapters.appointments.FAULT_SECONDS", 0.0)
    calls: list[float] = []

    def step(now: float) -> float:
        calls.append(now)
        if len(calls) == 1:
            raise RuntimeError("unforeseen")
        return float("inf")

    appointments.add("s", step)
    assert appointments.drain(WAIT)
    assert len(calls) == 2


def test_stopping_finishes_the_running_batch_checkpoints_and_releases() -> None:
    """Without it every deployment would repeat a batch and wait for expiry."""
    store, started, finish = FaultyStore(), Event(), Event()

    def handle(_delivery: Delivery) -> None:
        started.set()
        assert finish.wait(WAIT)

    runner = Runner(joined(store, stream()), handle)
    thread = Thread(target=runner.run)
    thread.start()
    assert started.wait(WAIT)
    runner.stop()
    finish.set()
    thread.join(WAIT)
    assert not thread.is_alive()
    leases = store.list().leases
    assert [lease.owner for lease in leases] == [None] * 4
    done = [lease.checkpoint for lease in leases if lease.checkpoint.numbered]
    assert done != []
    assert set(done) == {Position("104")}


def test_a_worker_that_waits_for_its_first_look_can_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """C15: whoever starts by mistake need not wait until it has begun."""
    store = FaultyStore()
    runner = Runner(joined(store, stream()), lambda _delivery: None)
    monkeypatch.setattr("adapters.runner.start_seconds", lambda *_: 1e6)
    running = Thread(target=runner.run)
    running.start()
    runner.stop()
    running.join(WAIT)
    assert not running.is_alive()
    assert store.list().leases == ()


def test_renewals_go_on_while_a_handler_is_slow() -> None:
    """Without it a batch that takes longer than a lease would be handled by two workers, each time."""
    store, started, finish = FaultyStore(), Event(), Event()
    config = Config(lease_seconds=10.0, renew_seconds=0.1, initial_position=Position("TRIM_HORIZON"))

    def handle(_delivery: Delivery) -> None:
        started.set()
        assert finish.wait(2 * WAIT)

    runner = Runner(Worker(store=store, source=stream(), me="a-1", config=config), handle)
    thread = Thread(target=runner.run)
    thread.start()
    assert started.wait(WAIT)
    before = {lease.key: lease.epoch for lease in store.list().leases}
    deadline = time.monotonic() + WAIT
    while any(lease.epoch < before[lease.key] + 5 for lease in store.list().leases):
        assert time.monotonic() < deadline, f"{store.list().leases} since {before}"
        time.sleep(0.02)
    finish.set()
    runner.stop()
    thread.join(WAIT)
    assert not thread.is_alive()


def test_a_signal_drains_and_gives_the_handlers_back() -> None:
    """Without it a container that is told to stop would be killed with its leases owned."""
    before = signal.getsignal(signal.SIGTERM)
    store, seen = FaultyStore(), Lock()
    happened: list[str] = []

    def handle(_delivery: Delivery) -> None:
        if seen.acquire(blocking=False):
            os.kill(os.getpid(), signal.SIGTERM)

    run(joined(store, stream()), Handling(handle, observer=lambda what, _holding: happened.append(what)))
    assert [lease.owner for lease in store.list().leases] == [None] * 4
    assert signal.getsignal(signal.SIGTERM) is before
    assert happened.count("initialize") == happened.count("stopped") > 0


def test_a_measure_of_the_users_own_is_told_beside_the_metrics() -> None:
    """Without it what a program counts for itself would be silent wherever OpenTelemetry is installed."""
    measured: list[int] = []
    seen = Event()

    def measure(_holding: Holding, batch: Batch) -> None:
        measured.append(len(batch.records))
        if sum(measured) == 20:
            seen.set()

    runner = Runner(joined(FaultyStore(), stream()), Handling(lambda _delivery: None, measure=measure))
    thread = Thread(target=runner.run)
    thread.start()
    assert seen.wait(WAIT)
    runner.stop()
    thread.join(WAIT)
    assert not thread.is_alive()


def test_a_stream_that_does_not_exist_ends_the_run_with_its_reason() -> None:
    """Without it a misspelt stream would look like an empty one."""

    class Missing(ListSource):
        def shards(self) -> tuple[Shard, ...]:
            raise SourceError("stream 'orders': it does not exist")

    with pytest.raises(SourceError, match="it does not exist"):
        run(joined(FaultyStore(), Missing()), lambda _delivery: None)
