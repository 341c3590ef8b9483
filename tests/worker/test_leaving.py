"""Tests that a worker that cannot continue ends in time with a reason, and releases the leases that it cannot read."""

import math
import threading
from collections.abc import Callable, Iterator
from threading import Event, Thread
from typing import Any, NoReturn, cast

import pytest
from attrs import define, field
from handler_threads import joined
from virtual_fleet import FaultyStore, stream_with_five_records
from waiters import WAIT

from leasehold.adapters.consumer.executors import InlineExecutor
from leasehold.adapters.consumer.handling import Delivery, Handling
from leasehold.adapters.consumer.lease_readers import LeaseReaders
from leasehold.adapters.consumer.runner import Runner
from leasehold.adapters.consumer.schedule import Schedule, ScheduledStep, ScheduleTask
from leasehold.adapters.worker.holding import Holding
from leasehold.balancer.model import Shard
from leasehold.errors import OutcomeUnknown, StoreError, WorkerError
from leasehold.stores.protocol import Capabilities
from leasehold_lab.simulator.world.world import ListSource


def accept_records(_delivery: Delivery) -> None:
    """A handler that does nothing, so all records count as handled."""


STARTED_RUNS: list["Ran"] = []


@pytest.fixture(autouse=True)
def _all_end() -> Iterator[None]:
    """End the runs that a failed test has left running."""
    yield
    while STARTED_RUNS:
        started_run = STARTED_RUNS.pop()
        started_run.runner.stop()
        started_run.thread.join(WAIT)


@define
class Ran:
    """A runner in a separate thread, and the error with which its run ended."""

    runner: Runner
    faults: list[BaseException] = field(factory=list)
    thread: Thread = field(init=False)

    def __attrs_post_init__(self) -> None:
        STARTED_RUNS.append(self)
        self.thread = Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.runner.run()
        except BaseException as fault:  # noqa: BLE001  the test checks it
            self.faults.append(fault)

    def ended(self) -> bool:
        self.thread.join(WAIT)
        return not self.thread.is_alive()


def refuse_threads_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Make the start of threads whose names begin with `name` fail."""
    original_start = Thread.start

    def refuse(thread: Thread) -> None:
        if thread.name.startswith(name):
            raise RuntimeError("can't start new thread")
        original_start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)


@pytest.mark.parametrize("name", ["leasehold-read", "leasehold-act", "leasehold-turn", "leasehold-renew"])
def test_thread_that_cannot_start_ends_the_run(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    store = FaultyStore()
    runner = Runner(joined(store, stream_with_five_records()), accept_records)
    refuse_threads_named(monkeypatch, name)
    started_run = Ran(runner)
    assert started_run.ended()
    assert [type(fault) for fault in started_run.faults] == [WorkerError]
    assert "can't start new thread" in str(started_run.faults[0])
    assert {lease.owner for lease in store.list().leases} <= {None}


def test_worker_that_cannot_start_threads_withdraws_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, close_calls = joined(FaultyStore(), stream_with_five_records()), list[bool]()
    original_close = worker.close

    def record_and_close() -> None:
        close_calls.append(True)
        original_close()

    refuse_threads_named(monkeypatch, "leasehold-close")
    monkeypatch.setattr(worker, "close", record_and_close)
    started_run = Ran(Runner(worker, accept_records))
    started_run.runner.stop()
    assert started_run.ended()
    assert (close_calls, started_run.faults) == ([True], [])


def test_turn_that_raises_system_exit_ends_the_run() -> None:
    store = FaultyStore()
    store.fault = SystemExit(3)
    started_run = Ran(Runner(joined(store, stream_with_five_records()), accept_records))
    assert started_run.ended()
    assert "SystemExit: 3" in str(started_run.faults[0])


def test_failing_schedule_dispatcher_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    store, batch_handled, has_failed = FaultyStore(), Event(), Event()
    runner = Runner(joined(store, stream_with_five_records()), lambda _delivery: batch_handled.set())
    schedule = runner._lease_readers.schedule  # noqa: SLF001  nothing public makes it fail
    original_wait = schedule._wait_for_step  # noqa: SLF001  likewise

    def fail_once(task: ScheduleTask) -> ScheduledStep | None:
        if batch_handled.is_set() and not has_failed.is_set():
            has_failed.set()
            raise MemoryError
        return original_wait(task)

    monkeypatch.setattr("leasehold.adapters.consumer.schedule.FAULT_SECONDS", 0.0)
    monkeypatch.setattr(schedule, "_wait_for_step", fail_once)
    started_run = Ran(runner)
    assert started_run.ended()
    assert "MemoryError" in str(started_run.faults[0])
    assert {lease.owner for lease in store.list().leases} == {None}


def raising(fault: BaseException) -> Callable[..., NoReturn]:
    """Return a callable that raises this exception."""

    def call(*_args: object) -> NoReturn:
        raise fault

    return call


def test_hung_handler_does_not_keep_a_worker_from_ending(caplog: pytest.LogCaptureFixture) -> None:
    """Ctrl-C and SIGTERM end the worker although the handler hangs."""
    store, handler_began, finish = FaultyStore(), Event(), Event()
    threads_before = set(threading.enumerate())

    def hang(delivery: Delivery) -> None:
        if delivery.shard == "s-0":
            handler_began.set()
            finish.wait(WAIT)

    runner = Runner(joined(store, stream_with_five_records()), hang, drain_seconds=0.5)
    started_run = Ran(runner)
    assert handler_began.wait(WAIT)
    (hung_holding,) = (holding for holding in runner.worker.holdings if holding.key == "s-0")
    runner.stop()
    assert started_run.ended()
    assert started_run.faults == []
    owners = {lease.key: lease.owner for lease in store.list().leases}
    assert owners == {"s-0": "a-1", "s-1": None, "s-2": None, "s-3": None}
    assert "not released within 0.5 s, left to expire: s-0" in caplog.text
    assert (hung_holding.why, "everything is released" in caplog.text) == ("left to expire", False)
    row_before = store.row("s-0")
    handler_threads = [thread for thread in threading.enumerate() if thread.name.startswith("leasehold-handle")]
    handler_threads = [thread for thread in handler_threads if thread not in threads_before]
    finish.set()
    for thread in handler_threads:  # Wait until the handler has returned.
        thread.join(WAIT)
        assert not thread.is_alive()
    assert store.row("s-0") == row_before, "nothing is written of a lease that others may have by then"


class Step:
    """A step that raises an error the next `fails` times."""

    def __init__(self) -> None:
        self.fails, self.steps = 0, 0

    def __call__(self, now: float) -> float:
        """Raise an error, or return a due time one second from now."""
        self.steps += 1
        if self.fails:
            self.fails -= 1
            raise ValueError
        return now + 1.0


class Leaving:
    """A fake holding whose `release` returns or raises the next of `answers`.

    It also replaces the worker, the scheduler and the scheduler's queues for the lease reader.
    """

    fatal = ()

    def __init__(self) -> None:
        self.key, self.lost, self.releasing = "s-0", Event(), False
        self.answers: list[bool | StoreError] = []
        self.excluded: list[tuple[str, float]] = []
        self.faults: list[str] = []
        self.scheduler = self

    def queue(self) -> "Leaving":
        return self

    def start(self, *_task: object) -> None:
        """Start nothing, because the test runs the step itself."""

    def clock(self) -> float:
        return 1000.0

    def log_unexpected(self, task_name: str, _fault: BaseException) -> None:
        self.faults.append(task_name)

    def exclude(self, key: str, seconds: float) -> None:
        self.excluded.append((key, seconds))

    def ask_release(self) -> None:
        self.releasing = True

    def release(self) -> bool:
        outcome = self.answers.pop(0)
        if isinstance(outcome, StoreError):
            raise outcome
        return outcome


@define
class GuardedStep:
    """The step of a fake holding, on a real schedule whose tasks never start. Each call of `run` runs the step once."""

    work: Step = field(factory=Step)
    held: Leaving = field(factory=Leaving)
    wants_leases: bool = True
    scheduled: ScheduledStep = field(init=False)
    schedule: Schedule = field(init=False)

    def __attrs_post_init__(self) -> None:
        worker: Any = self.held
        lease_readers = LeaseReaders(
            worker,
            Handling(accept_records),
            readers=1,
            memory_bytes=1,
            make_step=lambda *_args: self.work,
            executor=None,
            wall=None,
            on_failure=lambda _fault: None,
            end_worker=lambda _reason: None,
        )
        lease_readers.wants_leases = self.wants_leases
        self.schedule = lease_readers.schedule
        lease_readers.begin(cast("Holding", self.held))
        self.scheduled = self.schedule._steps["s-0"]  # noqa: SLF001  as a task would

    def run(self) -> float:
        """Run the step once, and return the time of its next call."""
        self.schedule._run(self.scheduled)  # noqa: SLF001  as a task would
        return self.scheduled.due


def test_step_that_raises_four_times_in_a_row_releases_its_lease(caplog: pytest.LogCaptureFixture) -> None:
    """A step that raises is called again. A successful call resets the count of failures."""
    guarded_step = GuardedStep()
    guarded_step.held.answers = [OutcomeUnknown("no answer"), False, True]
    assert guarded_step.run() == 1001.0
    guarded_step.work.fails = 2
    assert [guarded_step.run(), guarded_step.run(), guarded_step.run()] == [1001.0, 1003.0, 1001.0]
    guarded_step.work.fails = 4
    assert [guarded_step.run(), guarded_step.run(), guarded_step.run()] == [1001.0, 1003.0, 1006.0]
    assert (guarded_step.held.excluded, guarded_step.held.releasing) == ([], False)
    assert [guarded_step.run(), guarded_step.run(), guarded_step.run(), guarded_step.run()] == [
        1000.0,
        1001.0,
        1001.0,
        math.inf,
    ]
    assert guarded_step.work.steps == 8, "what is let go is not read again"
    assert guarded_step.held.excluded == [("s-0", 60.0)] * 3
    assert guarded_step.held.faults == ["s-0"] * 6
    assert caplog.messages == [
        "lease s-0 cannot be read here and is not released yet: no answer",
        "lease s-0 cannot be read here and is released",
        "lease s-0 cannot be read here and is released",
    ]


@pytest.mark.parametrize("releasing", [True, False])
def test_step_that_raises_while_its_lease_is_leaving_is_not_retried(*, releasing: bool) -> None:
    guarded_step = GuardedStep()
    guarded_step.work.fails, guarded_step.held.releasing, guarded_step.held.answers = 1, releasing, [True]
    if not releasing:
        guarded_step.held.lost.set()
    assert [guarded_step.run(), guarded_step.run()] == [1000.0, math.inf]
    assert guarded_step.held.excluded == ([("s-0", 60.0)] if releasing else [])


def test_requests_are_withdrawn_although_a_turn_waits_for_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    source, listing_began, finish, is_closed = stream_with_five_records(), Event(), Event(), Event()
    original_shards = ListSource.shards

    def hang(list_source: ListSource) -> tuple[Shard, ...]:
        listing_began.set()
        finish.wait(WAIT)
        return original_shards(list_source)

    monkeypatch.setattr(ListSource, "shards", hang)
    monkeypatch.setattr("leasehold.adapters.consumer.runner.CALL_SECONDS", 0.05)
    worker = joined(FaultyStore(), source)
    monkeypatch.setattr(worker, "close", is_closed.set)
    started_run = Ran(Runner(worker, accept_records, drain_seconds=0.5))
    assert listing_began.wait(WAIT)
    started_run.runner.stop()
    assert started_run.ended()
    finish.set()
    assert is_closed.is_set()


@pytest.mark.parametrize("wants_leases", [True, False])
def test_lease_that_is_taken_while_the_worker_drains_is_released(*, wants_leases: bool) -> None:
    guarded_step = GuardedStep(wants_leases=wants_leases)
    assert guarded_step.held.releasing is not wants_leases
    guarded_step.run()
    assert guarded_step.work.steps == 1, "the step of its reader releases it"


@pytest.mark.parametrize(("most_calls", "limits"), [(None, [7]), (3, [3, 3])])
def test_most_calls_limits_all_threads_that_call_handlers(
    most_calls: int | None, limits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `most_calls`, the threads of slow handlers count, too."""
    thread_limits = list[list[int]]()

    def make_executor(*arguments: object, **_options: object) -> Any:  # noqa: ANN401  an executor
        thread_limits.append([number for number in arguments if isinstance(number, int)])
        return InlineExecutor()

    monkeypatch.setattr("leasehold.adapters.consumer.lease_readers.ThreadExecutor", make_executor)
    worker: Any = Leaving()
    LeaseReaders(
        worker,
        Handling(accept_records, most_calls=most_calls),
        readers=7,
        memory_bytes=1,
        make_step=None,
        executor=None,
        wall=None,
        on_failure=lambda _fault: None,
        end_worker=lambda _reason: None,
    )
    assert thread_limits == [limits]


@pytest.mark.parametrize("free", [True, False])
def test_row_of_a_lease_has_annotations_only_where_they_are_free(*, free: bool) -> None:
    """In other stores, each annotation is a write of its own, which looks like a renewal."""
    store = FaultyStore(Capabilities(free_annotations=free))
    worker = joined(store, stream_with_five_records())
    while not worker.holdings:
        worker.turn(worker.clock())
    holding = worker.holdings[0]
    enabled = list[object]()
    holding.progress.enable_annotations = lambda *_host_and_clock: enabled.append(True)  # type: ignore[method-assign]  # The test counts the calls.
    lease_readers = LeaseReaders(
        worker,
        Handling(accept_records),
        readers=1,
        memory_bytes=1,
        make_step=lambda *_args: Step(),
        executor=None,
        wall=lambda: 0.0,
        on_failure=lambda _fault: None,
        end_worker=lambda _reason: None,
    )
    lease_readers.begin(holding)
    assert enabled == [True] * free
    lease_readers.schedule.close(-math.inf)
