"""Tests of a runner with real threads. It handles one batch per shard at a time, and releases all leases at the end."""

import math
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Lock, current_thread
from threading import enumerate as enumerate_threads
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest
from running import WAIT, run_to_its_end, running
from virtual_fleet import FaultySource, FaultyStore, RecordingConsumer, stream_with_five_records
from waiters import until

from leasehold.adapters.consumer.handling import Delivery, Handling
from leasehold.adapters.consumer.runner import Runner, stopping_on_signals
from leasehold.adapters.consumer.schedule import Schedule
from leasehold.adapters.sources.protocol import Batch
from leasehold.adapters.threads import ThreadScheduler
from leasehold.adapters.worker.handoffs import ParallelMap
from leasehold.adapters.worker.holding import Holding
from leasehold.adapters.worker.renewing import BackgroundMap
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.config import Config
from leasehold.balancer.model import Position, Shard
from leasehold.balancer.rules.kcl import Kcl
from leasehold.errors import SourceError, WorkerError
from leasehold.stores.protocol import Done
from leasehold.stores.writes import StealLease
from leasehold_lab.simulator.world.world import ListSource, ShardRecords


def _raised(fault: BaseException) -> NoReturn:
    raise fault


def run(runner: Runner) -> None:
    """Run until a signal stops the runner, as `leasehold.run` does."""
    with stopping_on_signals(runner):
        runner.run()


@pytest.fixture
def schedule() -> Iterator[Schedule]:
    """Return a schedule with four threads, which is closed after the test."""
    thread_schedule = Schedule(ThreadScheduler(time.monotonic), 4, "steps", _raised)
    thread_schedule.start()
    yield thread_schedule
    thread_schedule.close(time.monotonic() + WAIT)


def worker_at_oldest_records(store: FaultyStore, source: ListSource) -> Worker:
    """Return a worker that starts reading each shard at its oldest record."""
    config = Config(lease_seconds=10.0, initial_position=Position("TRIM_HORIZON"))
    return Worker(store=store, source=source, me="a-1", config=config)


def test_steps_of_a_shard_never_overlap(schedule: Schedule) -> None:
    running_lock, overlapping_calls, calls = Lock(), [], []

    def step(now: float) -> float:
        if not running_lock.acquire(blocking=False):
            overlapping_calls.append(now)
            return now
        calls.append(now)
        schedule.wake("s")  # The step is woken while it runs.
        running_lock.release()
        return float("inf") if len(calls) == 200 else now

    schedule.add("s", step)
    assert schedule.drain(time.monotonic() + WAIT)
    assert (len(calls), overlapping_calls) == (200, [])


def test_stop_finishes_the_running_batch_checkpoints_and_releases() -> None:
    store, handler_started, may_finish = FaultyStore(), Event(), Event()

    def handle(_delivery: Delivery) -> None:
        handler_started.set()
        assert may_finish.wait(WAIT)

    runner = Runner(worker_at_oldest_records(store, stream_with_five_records()), handle)
    with running(runner):
        assert handler_started.wait(WAIT)
        runner.stop()
        may_finish.set()
    leases = store.list().leases
    assert [lease.owner for lease in leases] == [None] * 4
    checkpoints = [lease.checkpoint for lease in leases if lease.checkpoint.numbered]
    assert checkpoints != []
    assert set(checkpoints) == {Position("104")}


def test_worker_can_be_stopped_before_its_first_look(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FaultyStore()
    runner = Runner(worker_at_oldest_records(store, stream_with_five_records()), lambda _delivery: None)
    monkeypatch.setattr("leasehold.adapters.consumer.runner.start_seconds", lambda *_: 1e6)
    with running(runner):
        runner.stop()
    assert store.list().leases == ()


def test_renewals_continue_while_a_handler_is_slow() -> None:
    store, handler_started, may_finish = FaultyStore(), Event(), Event()
    config = Config(lease_seconds=10.0, renew_seconds=0.1, initial_position=Position("TRIM_HORIZON"))

    def handle(_delivery: Delivery) -> None:
        handler_started.set()
        assert may_finish.wait(2 * WAIT)

    runner = Runner(Worker(store=store, source=stream_with_five_records(), me="a-1", config=config), handle)
    with running(runner):
        assert handler_started.wait(WAIT)
        epochs_before = {lease.key: lease.epoch for lease in store.list().leases}
        deadline = time.monotonic() + WAIT
        while any(lease.epoch < epochs_before[lease.key] + 5 for lease in store.list().leases):
            assert time.monotonic() < deadline, f"{store.list().leases} since {epochs_before}"
            time.sleep(0.02)
        may_finish.set()


def test_lost_lease_is_reported_while_its_shard_waits_for_a_read() -> None:
    store, was_read, lease_lost = FaultyStore(), Event(), Event()
    # Leases last an hour, so that the worker does not take the lost lease again. That would also wake the reader.
    config = Config(rules=Kcl(), lease_seconds=3600.0, renew_seconds=0.1, initial_position=Position("TRIM_HORIZON"))
    source = ListSource([Shard("s-0")], {"s-0": ShardRecords(wait_seconds=1e6)})
    worker = Worker(store=store, source=source, me="a-1", config=config)

    def observe(event: str, _holding: Holding) -> None:
        if event == "lease-lost":
            lease_lost.set()

    handling = Handling(lambda _delivery: None, observer=observe, measure=lambda _holding, _batch: was_read.set())
    with running(Runner(worker, handling)):
        assert was_read.wait(WAIT)
        while not isinstance(store.write(StealLease(store.row("s-0"), "b-1")), Done):
            pass  # A renewal changed the version first, so try again.
        assert lease_lost.wait(WAIT)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_signal_drains_and_restores_the_signal_handlers(name: str) -> None:
    ending_signal = signal.Signals[name]
    original_sighup_handler = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup, SIGHUP is ignored
    original_handler = signal.getsignal(ending_signal)
    store, signal_sent = FaultyStore(), Lock()
    events: list[str] = []

    def handle(_delivery: Delivery) -> None:
        if signal_sent.acquire(blocking=False):
            os.kill(os.getpid(), ending_signal)

    try:
        run(
            Runner(
                worker_at_oldest_records(store, stream_with_five_records()),
                Handling(handle, observer=lambda event, _: events.append(event)),
            )
        )
        assert signal.getsignal(ending_signal) is original_handler
    finally:
        signal.signal(signal.SIGHUP, original_sighup_handler)
    assert [lease.owner for lease in store.list().leases] == [None] * 4
    assert events.count("initialize") == events.count("stopped") > 0


def test_second_signal_of_any_kind_ends_the_process() -> None:
    """A drain that hangs after SIGTERM can still be ended with Ctrl-C."""
    original_handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    stops: list[str] = []
    with stopping_on_signals(cast("Runner", SimpleNamespace(stop=lambda: stops.append("stopped")))):
        os.kill(os.getpid(), signal.SIGTERM)
        handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    assert (stops, handlers) == (["stopped"], [signal.SIG_DFL] * 2)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == original_handlers


def test_signals_are_left_alone_outside_the_main_thread() -> None:
    """In other threads, no signal handlers are installed, because Python allows that only in the main thread."""
    original_handler, handlers_seen = signal.getsignal(signal.SIGTERM), list[Any]()

    def work() -> None:
        with stopping_on_signals(cast("Runner", None)):
            handlers_seen.append(signal.getsignal(signal.SIGTERM))

    with ThreadPoolExecutor(1) as other_thread:
        other_thread.submit(work).result(WAIT)
    assert handlers_seen == [original_handler]


def test_worker_under_nohup_survives_a_closed_terminal() -> None:
    original_handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    handled_leases: list[str] = []

    def handle(delivery: Delivery) -> None:
        handled_leases.append(delivery.lease)
        if len(handled_leases) in {1, 4}:
            os.kill(os.getpid(), signal.SIGHUP if len(handled_leases) == 1 else signal.SIGTERM)

    try:
        run(Runner(worker_at_oldest_records(FaultyStore(), stream_with_five_records()), Handling(handle)))
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, original_handler)
    assert sorted(set(handled_leases)) == ["s-0", "s-1", "s-2", "s-3"]


def test_user_measure_is_called_besides_the_metrics() -> None:
    record_counts: list[int] = []
    all_measured = Event()

    def measure(_holding: Holding, batch: Batch) -> None:
        record_counts.append(len(batch.records))
        if sum(record_counts) == 20:
            all_measured.set()

    runner = Runner(
        worker_at_oldest_records(FaultyStore(), stream_with_five_records()),
        Handling(lambda _delivery: None, measure=measure),
    )
    with running(runner):
        assert all_measured.wait(WAIT)


def test_missing_stream_ends_the_run_with_its_reason() -> None:
    missing_stream = FaultySource(faults=[SourceError("stream 'orders': it does not exist")])
    with pytest.raises(SourceError, match="it does not exist"):
        run(Runner(worker_at_oldest_records(FaultyStore(), missing_stream), lambda _delivery: None))


class Counted(Worker):
    """A worker that records its turns and renewals, and the names of the threads in which they run.

    `failing` contains how many of the next turns and renewals raise an error.
    """

    failing: Counter[str]
    calls: list[tuple[str, str]]

    def turn(self, now: float, each: ParallelMap = map) -> float:
        """Record the turn, and take free leases or raise an error."""
        self._begin("turn", "no turn")
        return super().turn(now, each=each)

    def renew(self, now: float, each: BackgroundMap = map) -> float:
        """Record the renewal, and renew the held leases or raise an error."""
        self._begin("renew", "no renewal")
        return super().renew(now, each=each)

    def _begin(self, event: str, fault: str) -> None:
        self.calls.append((event, current_thread().name))
        if self.failing[event]:
            self.failing[event] -= 1
            raise RuntimeError(fault)


def recording_worker(monkeypatch: pytest.MonkeyPatch, lease_seconds: float = 3.0) -> Counted:
    """Return a recording worker that starts immediately and retries after short waits."""
    monkeypatch.setattr("leasehold.adapters.consumer.runner.start_seconds", lambda *_: 0.0)
    monkeypatch.setattr("leasehold.adapters.consumer.runner.RETRY_SECONDS", 0.25)
    config = Config(lease_seconds=lease_seconds, initial_position=Position("TRIM_HORIZON"))
    worker = Counted(store=FaultyStore(), source=stream_with_five_records(), me="a-1", config=config)
    worker.calls, worker.failing = [], Counter()
    return worker


def test_failing_renewals_end_the_run_before_the_leases_expire(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker = recording_worker(monkeypatch)
    worker.failing["renew"] = 100
    with pytest.raises(WorkerError, match=r"^the worker cannot continue: RuntimeError: no renewal$"):
        run_to_its_end(Runner(worker, lambda _delivery: None))
    renewals = [name for event, name in worker.calls if event == "renew"]
    assert len(renewals) >= 7, "after half of the lease's time"
    assert set(renewals) == {"leasehold-renew"}
    end_records = [record for record in caplog.records if record.getMessage() == "the worker ends: unexpected fault"]
    assert [str(record.exc_info[1]) for record in end_records if record.exc_info] == ["no renewal"]


def test_renewals_that_fail_now_and_then_do_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only consecutive failures end the run, because each success has renewed the leases."""
    worker = recording_worker(monkeypatch)
    runner = Runner(worker, lambda _delivery: None)
    for _ in range(10):
        worker.failing["renew"] = 1
        for _ in range(2):
            runner._renew(time.monotonic())  # noqa: SLF001  as its task does
    runner.stop()
    runner.run()  # it would raise the error that ended the run


def test_failed_turn_is_retried_and_a_good_run_logs_no_problem(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker, thread_names, shards, all_handled = recording_worker(monkeypatch, 3600.0), set[str](), set[str](), Event()
    worker.failing["turn"] = 1

    def handle(delivery: Delivery) -> None:
        thread_names.add(current_thread().name.rpartition("-")[0])
        shards.add(delivery.shard)
        if len(shards) == 4:
            all_handled.set()

    with running(Runner(worker, handle, memory_bytes=1)):  # Only one batch fits into memory; other readers wait.
        assert all_handled.wait(WAIT)
    assert thread_names == {"leasehold-handle"}, "a slow handler would hold up the reading of other shards"
    assert {name for event, name in worker.calls if event == "turn"} == {"leasehold-turn"}
    messages = [record.getMessage() for record in caplog.records if record.name == "leasehold.runner"]
    assert messages == ["trying again in 0.25 s: unexpected fault"]


def test_reader_is_called_once_memory_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    woken_keys = list[str]()
    monkeypatch.setattr(Schedule, "wake", lambda _self, key: woken_keys.append(key))
    runner = Runner(
        worker_at_oldest_records(FaultyStore(), stream_with_five_records()), lambda _delivery: None, memory_bytes=1
    )
    budget = runner._lease_readers.memory  # noqa: SLF001  no reader is needed
    first_share, second_share = budget.share("first"), budget.share("second")
    assert [first_share.request(), second_share.request()] == [True, False]
    first_share.clear()
    assert woken_keys == ["second"]


def test_turn_woken_at_the_end_of_a_run_sees_that_the_run_is_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(worker_at_oldest_records(FaultyStore(), stream_with_five_records()), lambda _delivery: None)
    lease_readers, was_ending = runner._lease_readers, dict[str, bool]()  # noqa: SLF001

    def record_state_when_woken(name: str, target: object, method: str, is_ending: Callable[[], bool]) -> None:
        wake = getattr(target, method)

        def woken(*arguments: object) -> None:
            was_ending[name] = is_ending()
            wake(*arguments)

        monkeypatch.setattr(target, method, woken)

    record_state_when_woken("turn", runner._turn_schedule, "wake", lambda: not lease_readers.wants_leases)  # noqa: SLF001
    runner.stop()
    runner.run()
    assert was_ending == {"turn": True}


@pytest.fixture
def holding_all() -> Iterator[Runner]:
    """Return a runner that is not running yet. Its worker holds all leases."""
    worker = worker_at_oldest_records(FaultyStore(), stream_with_five_records())
    while len(worker.holdings) < 4:
        worker.turn(time.monotonic())
    runner = Runner(worker, lambda _delivery: None)
    yield runner
    runner.stop()
    runner.run()


def test_release_request_is_set_before_its_reader_is_woken(
    holding_all: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A woken reader checks immediately whether its lease is to be released."""
    lease_readers, releasing_when_woken = holding_all._lease_readers, list[bool]()  # noqa: SLF001
    holdings_by_key, original_wake = (
        {holding.key: holding for holding in holding_all.worker.holdings},
        lease_readers.schedule.wake,
    )

    def record_and_wake(key: str) -> None:
        releasing_when_woken.append(holdings_by_key[key].releasing)
        original_wake(key)

    monkeypatch.setattr(lease_readers.schedule, "wake", record_and_wake)
    lease_readers.release_all()
    assert releasing_when_woken[:4] == [True] * 4


def test_drain_releases_held_leases_while_a_turn_is_still_running(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, batch_handled, turn_is_slow, turn_may_finish = recording_worker(monkeypatch), Event(), Event(), Event()
    runner = Runner(worker, lambda _delivery: batch_handled.set(), drain_seconds=4 * WAIT)
    original_turn = worker.turn

    def slow_turn(now: float, each: ParallelMap = map) -> float:
        if batch_handled.is_set():
            turn_is_slow.set()
            assert turn_may_finish.wait(WAIT)
        return original_turn(now, each=each)

    monkeypatch.setattr(worker, "turn", slow_turn)
    with running(runner):
        assert batch_handled.wait(WAIT)
        worker.wake_runner()
        assert turn_is_slow.wait(WAIT)
        runner.stop()
        until(lambda: all(lease.owner is None for lease in worker.store.list().leases), "all is released", seconds=10.0)
        turn_may_finish.set()


def test_run_ends_with_its_first_reason(caplog: pytest.LogCaptureFixture) -> None:
    """The first fault is reported, because later faults often follow from it."""
    runner = Runner(worker_at_oldest_records(FaultyStore(), stream_with_five_records()), lambda _delivery: None)
    for fault in (OSError("first"), OSError("second")):
        runner._fail(fault)  # noqa: SLF001  as if two tasks failed
    with pytest.raises(WorkerError, match=r"^the worker cannot continue: OSError: first$"):
        run_to_its_end(runner)
    errors = [str(record.exc_info[1]) for record in caplog.records if record.exc_info]
    assert errors == ["first"]


def test_overloaded_worker_warns_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    runner = Runner(worker_at_oldest_records(FaultyStore(), stream_with_five_records()), lambda _delivery: None)
    monkeypatch.setattr(Worker, "renewers", 1000)
    for _ in range(2):
        runner._renew(time.monotonic())  # noqa: SLF001  as its task does
    runner.stop()
    runner.run()
    (message,) = (record.getMessage() for record in caplog.records if record.name == "leasehold.runner")
    assert message.startswith("0 leases are held, and 60 renewals at a time are too few to renew each in 5.3 s")


def test_worker_with_its_own_consumer_is_rejected() -> None:
    worker = worker_at_oldest_records(FaultyStore(), stream_with_five_records())
    worker.consumer = RecordingConsumer()
    with pytest.raises(ValueError, match=r"^worker: it has a consumer of its own$"):
        Runner(worker, lambda _delivery: None)


def test_a_run_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads_before, batch_handled = {*enumerate_threads()}, Event()
    runner = Runner(recording_worker(monkeypatch, 3600.0), lambda _delivery: batch_handled.set())
    with running(runner):
        assert batch_handled.wait(WAIT)
    until(lambda: {*enumerate_threads()} <= threads_before, "all threads have ended", seconds=10.0)


def test_step_that_raises_as_its_lease_is_lost_logs_nothing(
    holding_all: Runner, caplog: pytest.LogCaptureFixture
) -> None:
    holding = holding_all.worker.holdings[0]
    holding.drop("stolen")
    replacement_step = holding_all._lease_readers._releasing_step_for(holding, 1)  # noqa: SLF001  called in place of a step that raised
    assert replacement_step is not None
    assert replacement_step(0.0) == math.inf
    assert "cannot be read here" not in caplog.text


def test_stop_waits_no_longer_for_a_request_than_for_everything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit `drain_seconds` also applies if it is shorter than the time for which requests are waited for."""
    monkeypatch.setattr("leasehold.adapters.consumer.runner.start_seconds", lambda *_: 0.0)
    monkeypatch.setattr("leasehold.adapters.consumer.runner.CALL_SECONDS", 4 * WAIT)
    read_began, may_return, source = Event(), Event(), stream_with_five_records()

    def read_slowly(_batch: Batch) -> None:
        read_began.set()
        may_return.wait(4 * WAIT)

    slow_source = FaultySource(source.listed, source.shard_logs, on_read=read_slowly)
    try:
        with running(Runner(worker_at_oldest_records(FaultyStore(), slow_source), print, drain_seconds=0.1)):
            assert read_began.wait(WAIT)
    finally:
        may_return.set()
