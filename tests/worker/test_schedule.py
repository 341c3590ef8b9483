"""Tests that a schedule calls steps when they are due, and never two of one key at once. All times are virtual."""

import math
import random
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from attrs import define, field
from hypothesis import given
from hypothesis import strategies as st

from leasehold.adapters.consumer.schedule import FAULT_SECONDS, STEP_FAULT_WAITS, Schedule, ScheduledStep
from leasehold_lab.simulator.world.tasks import TaskScheduler, VirtualTime


@define
class Process:
    """A process that is never paused. It records unexpected exceptions."""

    faults: list[tuple[str, str]] = field(factory=list)

    def wait_while_paused(self) -> None:
        """Return immediately, because this process is never paused."""

    def idle(self) -> None:
        """Do nothing, because no pause is ever due."""

    def task_starts(self, name: str) -> None:
        """Accept any name."""

    def log_unexpected(self, task_name: str, fault: BaseException) -> None:
        self.faults.append((task_name, repr(fault)))


class Time(VirtualTime):
    """Virtual time with faults: the next `broken` reads of the clock fail, and at most `max_tasks` tasks can start."""

    broken = 0
    max_tasks = 99

    def start(self, name: str, work: Callable[[], None], failed: Callable[[BaseException], None]) -> None:
        """Start a task, or raise an error if `max_tasks` have started."""
        if len(self.named) >= self.max_tasks:
            raise RuntimeError("can't start new thread")
        super().start(name, work, failed)

    def clock(self) -> float:
        if self.broken:
            self.broken -= 1
            raise OSError("no clock")
        return super().clock()


@define
class ScheduleHarness:
    """Wraps a schedule with `task_limit` tasks, and records the time and the key of each call of a step."""

    task_limit: int = 2
    tasks: TaskScheduler = field(factory=TaskScheduler)
    process: Process = field(factory=Process)
    calls: list[tuple[float, str]] = field(factory=list)
    failed: list[str] = field(factory=list)
    time: Time = field(init=False)
    schedule: Schedule = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.time = Time(self.tasks, self.process, 0.0, 1.0, random.Random(0), "p-1")  # noqa: S311  a seed is the point
        self.schedule = Schedule(
            self.time, self.task_limit, "leasehold-read", lambda fault: self.failed.append(repr(fault))
        )
        self.schedule.start()

    def step(self, name: str, *times: float, step_seconds: float = 0.0) -> Callable[[float], float]:
        """Return a step whose calls return these due times in order, then infinity. Each call takes `step_seconds`."""
        remaining_times = iter(times)

        def step(now: float) -> float:
            self.calls.append((round(now, 3), name))
            if step_seconds:
                self.tasks.sleep(step_seconds)
            return next(remaining_times, math.inf)

        return step

    def step_with_gaps(self, name: str, gaps: list[int]) -> Callable[[float], float]:
        """Return a step that is due again after each of these pauses in turn, and then ends."""
        remaining_gaps = iter(gaps)

        def step(now: float) -> float:
            self.calls.append((round(now, 3), name))
            return round(now, 3) + next(remaining_gaps, math.inf)

        return step

    def call_at(self, call_time: float, call: Callable[[], object]) -> list[tuple[object, float]]:
        """Call the function at this time. Return a list that will contain its result and the time when it returned."""
        results: list[tuple[object, float]] = []
        self.tasks.start(lambda: results.append((call(), round(self.tasks.now, 3))), start_time=call_time)
        return results


@pytest.fixture
def calendar() -> Iterator[ScheduleHarness]:
    """Return a harness with two tasks, which end with the test."""
    new_harness = ScheduleHarness()
    yield new_harness
    new_harness.tasks.close()


def test_steps_are_called_when_due(calendar: ScheduleHarness) -> None:
    calendar.schedule.add("a", calendar.step("a", 3.0, 9.0))
    calendar.schedule.add("b", calendar.step("b", 5.0))
    calendar.tasks.run(20.0)
    assert calendar.calls == [(0.0, "a"), (0.0, "b"), (3.0, "a"), (5.0, "b"), (9.0, "a")]
    assert (calendar.failed, calendar.process.faults) == ([], [])


def test_steps_run_concurrently_up_to_the_number_of_tasks(calendar: ScheduleHarness) -> None:
    for name in "abc":
        calendar.schedule.add(name, calendar.step(name, step_seconds=4.0))
    calendar.tasks.run(20.0)
    assert calendar.calls == [(0.0, "a"), (0.0, "b"), (4.0, "c")]


def test_woken_step_is_called_at_once_and_its_former_time_is_void(calendar: ScheduleHarness) -> None:
    calendar.schedule.add("a", calendar.step("a", 9.0, 12.0))
    calendar.call_at(2.0, lambda: calendar.schedule.wake("a"))
    calendar.tasks.run(30.0)
    assert calendar.calls == [(0.0, "a"), (2.0, "a"), (12.0, "a")]


def test_step_woken_while_it_runs_is_called_once_more(calendar: ScheduleHarness) -> None:
    calendar.schedule.add("a", calendar.step("a", 90.0, 95.0, step_seconds=4.0))
    calendar.call_at(1.0, lambda: calendar.schedule.wake("a"))
    calendar.call_at(2.0, lambda: calendar.schedule.wake("a"))
    calendar.tasks.run(120.0)
    assert calendar.calls == [(0.0, "a"), (4.0, "a"), (95.0, "a")]


def test_waking_an_absent_key_does_nothing(calendar: ScheduleHarness) -> None:
    calendar.schedule.wake("a")
    calendar.tasks.run(1.0)
    calendar.schedule.add("a", calendar.step("a", 5.0))
    calendar.tasks.run(20.0)
    assert calendar.calls == [(1.0, "a"), (5.0, "a")]


def test_successor_begins_when_its_predecessor_is_over(calendar: ScheduleHarness) -> None:
    """If a lease is lost and taken again, only one handler runs at a time.

    The old step is woken, so that it ends soon.
    """
    calendar.schedule.add("a", calendar.step("old", 60.0, 3.0, step_seconds=1.0))
    calendar.call_at(2.0, lambda: calendar.schedule.add("a", calendar.step("new", 8.0)))
    calendar.tasks.run(90.0)
    assert calendar.calls == [(0.0, "old"), (2.0, "old"), (3.0, "old"), (4.0, "new"), (8.0, "new")]


def test_only_the_last_of_several_successors_begins(calendar: ScheduleHarness) -> None:
    calendar.schedule.add("a", calendar.step("old", step_seconds=4.0))
    calendar.call_at(1.0, lambda: calendar.schedule.add("a", calendar.step("lost")))
    calendar.call_at(2.0, lambda: calendar.schedule.add("a", calendar.step("new")))
    calendar.tasks.run(90.0)
    assert calendar.calls == [(0.0, "old"), (4.0, "new")]


def test_step_that_raises_is_logged_and_called_again(calendar: ScheduleHarness) -> None:
    def step_that_fails_once(_now: float) -> float:
        calendar.calls.append((calendar.time.clock(), "a"))
        if len(calendar.calls) == 1:
            raise MemoryError("too much")
        return math.inf

    calendar.schedule.add("a", step_that_fails_once)
    calendar.tasks.run(20.0)
    assert [(round(call_time, 3), name) for call_time, name in calendar.calls] == [
        (0.0, "a"),
        (STEP_FAULT_WAITS[0], "a"),
    ]
    assert calendar.process.faults == [("a", "MemoryError('too much')")]


def test_drain_waits_for_all_steps_up_to_its_deadline(calendar: ScheduleHarness) -> None:
    calendar.schedule.add("a", calendar.step("a", 6.0))
    calendar.schedule.add("b", calendar.step("b", 3.0))
    result_of_limited_drain = calendar.call_at(1.0, lambda: calendar.schedule.drain(4.0))
    result_of_drain = calendar.call_at(1.0, calendar.schedule.drain)
    calendar.tasks.run(20.0)
    assert result_of_limited_drain == [(False, 4.0)]
    assert result_of_drain == [(True, 6.0)]
    result_of_idle_drain = calendar.call_at(21.0, calendar.schedule.drain)
    calendar.tasks.run(30.0)
    assert result_of_idle_drain == [(True, 21.0)]


def test_drain_waits_for_a_pending_successor(calendar: ScheduleHarness) -> None:
    calendar.schedule.add("a", calendar.step("old", step_seconds=4.0))
    calendar.call_at(1.0, lambda: calendar.schedule.add("a", calendar.step("new", 9.0)))
    drain_result = calendar.call_at(2.0, calendar.schedule.drain)
    calendar.tasks.run(20.0)
    assert drain_result == [(True, 9.0)]


def test_closed_schedule_starts_nothing_and_waits_for_running_steps(calendar: ScheduleHarness) -> None:
    calendar.schedule.add("a", calendar.step("a", step_seconds=4.0))
    calendar.schedule.add("b", calendar.step("b", 3.0))
    close_result = calendar.call_at(1.0, lambda: calendar.schedule.close(2.0))
    calendar.tasks.run(20.0)
    assert calendar.calls == [(0.0, "a"), (0.0, "b")]
    assert close_result == [(False, 2.0)]
    assert calendar.failed == []


def test_close_ends_with_the_last_running_step(calendar: ScheduleHarness) -> None:
    calendar.schedule.add("a", calendar.step("a", step_seconds=4.0))
    close_result = calendar.call_at(1.0, lambda: calendar.schedule.close(60.0))
    calendar.tasks.run(90.0)
    assert close_result == [(True, 4.0)]


def test_schedule_reports_its_own_error_and_continues(calendar: ScheduleHarness) -> None:
    calendar.schedule.add("a", calendar.step("a", 2.0))
    calendar.tasks.run(1.0)

    def break_clock() -> None:
        calendar.schedule.wake("a")
        calendar.time.broken = 1

    calendar.call_at(1.0, break_clock)
    calendar.tasks.run(30.0)
    assert calendar.failed == ["OSError('no clock')"]
    assert calendar.calls == [(0.0, "a"), (1.0 + FAULT_SECONDS, "a")]


def test_step_that_could_not_start_starts_later(calendar: ScheduleHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    faults, original_run = [MemoryError("too much")], Schedule._run  # noqa: SLF001  nothing public makes it fail

    def refuse_once(schedule: Schedule, step: ScheduledStep) -> None:
        if faults:
            raise faults.pop()
        original_run(schedule, step)

    monkeypatch.setattr(Schedule, "_run", refuse_once)
    calendar.schedule.add("a", calendar.step("a"))
    drain_result = calendar.call_at(1.0, calendar.schedule.drain)
    calendar.tasks.run(90.0)
    assert calendar.failed == ["MemoryError('too much')"]
    assert (calendar.calls, drain_result) == ([(FAULT_SECONDS, "a")], [(True, FAULT_SECONDS)])


def test_worker_is_notified_if_no_task_can_start(calendar: ScheduleHarness) -> None:
    """The step is still called, by the one task that could be started."""
    calendar.time.max_tasks = 1
    calendar.schedule.add("a", calendar.step("a", 2.0))
    calendar.tasks.run(20.0)
    assert set(calendar.failed) == {"""RuntimeError("can't start new thread")"""}
    assert calendar.calls == [(0.0, "a"), (2.0, "a")]


def test_threads_are_named_by_purpose(calendar: ScheduleHarness) -> None:
    calendar.schedule.add("a", calendar.step("a"))
    calendar.tasks.run(1.0)
    assert set(calendar.time.named) == {"leasehold-read"}


def test_drain_ignores_keys_that_were_over_before(calendar: ScheduleHarness) -> None:
    calendar.schedule.add("a", calendar.step("a"))
    calendar.tasks.run(1.0)
    calendar.schedule.add("b", calendar.step("b", 6.0))
    drain_result = calendar.call_at(2.0, lambda: calendar.schedule.drain(20.0))
    calendar.tasks.run(30.0)
    assert drain_result == [(True, 6.0)]


def test_abandoned_step_counts_again_once_it_has_returned(calendar: ScheduleHarness) -> None:
    """A drain waits for the next call of a step whose abandoned call has returned."""
    calendar.schedule.add("a", calendar.step("a", 6.0, step_seconds=4.0))
    calendar.call_at(1.0, lambda: calendar.schedule.abandon("a"))
    drain_result = calendar.call_at(5.0, calendar.schedule.drain)
    calendar.tasks.run(30.0)
    assert (calendar.calls, drain_result) == ([(0.0, "a"), (6.0, "a")], [(True, 10.0)])


def test_task_limit_is_restored_when_abandoned_calls_return(calendar: ScheduleHarness) -> None:
    calendar.schedule.add("a", calendar.step("a", 5.0, 6.0, 7.0, step_seconds=0.5))
    calendar.call_at(0.1, lambda: calendar.schedule.abandon("a"))
    calendar.tasks.run(10.0)
    calendar.calls.clear()
    for name in "bcd":
        calendar.schedule.add(name, calendar.step(name, step_seconds=4.0))
    calendar.tasks.run(30.0)
    assert calendar.calls == [(10.0, "b"), (10.0, "c"), (14.0, "d")]


def test_steps_are_called_when_due_with_fewer_tasks_than_steps(calendar: ScheduleHarness) -> None:
    for name, due in {"a": 9.0, "b": 3.0, "c": 7.0, "d": 5.0}.items():
        calendar.schedule.add(name, calendar.step(name, due))
    calendar.tasks.run(20.0)
    assert calendar.calls[4:] == [(3.0, "b"), (5.0, "d"), (7.0, "c"), (9.0, "a")]


def test_woken_step_takes_the_task_of_the_step_that_is_due_last(calendar: ScheduleHarness) -> None:
    for name, due_time in {"a": 4.0, "b": 9.0, "c": 12.0}.items():
        calendar.schedule.add(name, calendar.step(name, due_time))
    calendar.schedule.add("d", calendar.step("d", 12.0, step_seconds=2.0))
    calendar.call_at(3.5, lambda: calendar.schedule.wake("d"))
    calendar.tasks.run(20.0)
    calls_by_step = {
        name: [call_time for call_time, called_step in calendar.calls if called_step == name] for name in "abcd"
    }
    assert calls_by_step == {"a": [0.0, 4.0], "b": [0.0, 9.0], "c": [0.0, 12.0], "d": [0.0, 3.5]}


@given(
    intervals=st.lists(st.lists(st.integers(1, 9), max_size=5), min_size=1, max_size=6),
    wakes=st.dictionaries(st.integers(0, 30), st.integers(0, 5), max_size=8),
    task_limit=st.integers(1, 3),
)
def test_short_steps_are_called_exactly_when_due_or_woken(
    intervals: list[list[int]], wakes: dict[int, int], task_limit: int
) -> None:
    """If calls take no time, each step is called exactly when it is due or woken, however few tasks there are."""
    new_harness = ScheduleHarness(task_limit=task_limit)
    wake_times = {number + 0.5: str(key) for number, key in wakes.items()}
    for key, gaps in enumerate(intervals):
        new_harness.schedule.add(str(key), new_harness.step_with_gaps(str(key), gaps))
    for wake_time, woken_key in wake_times.items():
        new_harness.call_at(wake_time, partial(new_harness.schedule.wake, woken_key))
    new_harness.tasks.run(100.0)
    new_harness.tasks.close()
    expected_calls = list[tuple[float, str]]()
    for key, gaps in enumerate(intervals):
        due_time, gaps_left = 0.0, [*gaps]
        while due_time < math.inf:
            expected_calls.append((due_time, str(key)))
            next_due = due_time + gaps_left.pop(0) if gaps_left else math.inf
            # A step that has returned infinity has ended, so it cannot be woken.
            next_wakes = [
                wake_time
                for wake_time, woken_step in wake_times.items()
                if woken_step == str(key) and due_time < wake_time < next_due
            ]
            due_time = math.inf if next_due == math.inf else min([next_due, *next_wakes])
    assert sorted(new_harness.calls) == sorted(expected_calls)
    assert new_harness.failed == []


def test_work_submitted_to_a_closed_schedule_is_done_by_the_caller(calendar: ScheduleHarness) -> None:
    work_times = list[float]()
    calendar.call_at(1.0, calendar.schedule.close)
    calendar.call_at(2.0, lambda: calendar.schedule.submit(lambda: work_times.append(round(calendar.tasks.now, 3))))
    calendar.tasks.run(20.0)
    assert work_times == [2.0]


def test_work_is_done_once_even_if_the_schedule_is_closed_meanwhile(calendar: ScheduleHarness) -> None:
    work_times = list[float]()

    def work() -> None:
        work_times.append(round(calendar.tasks.now, 3))
        calendar.tasks.sleep(5.0)

    calendar.call_at(1.0, lambda: calendar.schedule.submit(work))
    close_result = calendar.call_at(2.0, calendar.schedule.close)
    calendar.tasks.run(20.0)
    assert (work_times, close_result) == ([1.0], [(True, 6.0)])


def test_surplus_tasks_end_and_leave_their_steps_to_the_others(calendar: ScheduleHarness) -> None:
    calendar.schedule.add("a", calendar.step("a", 5.0, 20.0, step_seconds=1.0))
    calendar.schedule.add("b", calendar.step("b", 8.0, 9.0, step_seconds=1.0))
    calendar.call_at(0.5, lambda: calendar.schedule.resize(1))
    calendar.tasks.run(30.0)
    assert calendar.calls == [(0.0, "a"), (0.0, "b"), (5.0, "a"), (8.0, "b"), (9.0, "b"), (20.0, "a")]


def test_fewer_steps_run_concurrently_after_the_limit_was_lowered(calendar: ScheduleHarness) -> None:
    for name, due in {"a": 5.0, "b": 5.5}.items():
        calendar.schedule.add(name, calendar.step(name, due, step_seconds=2.0))
    calendar.call_at(0.5, lambda: calendar.schedule.resize(1))
    calendar.tasks.run(30.0)
    assert calendar.calls == [(0.0, "a"), (0.0, "b"), (5.0, "a"), (7.0, "b")]


def test_woken_step_is_called_after_steps_that_were_due_before() -> None:
    harness = ScheduleHarness(task_limit=1)
    harness.schedule.add("late", harness.step("late", 5.0))
    harness.schedule.add("woken", harness.step("woken", 90.0))
    harness.schedule.add("busy", harness.step("busy", 4.0, step_seconds=3.0))
    harness.call_at(6.0, lambda: harness.schedule.wake("woken"))
    harness.tasks.run(30.0)
    harness.tasks.close()
    assert harness.calls[3:] == [(4.0, "busy"), (7.0, "late"), (7.0, "woken")]


def test_step_that_is_always_woken_does_not_starve_the_others() -> None:
    harness = ScheduleHarness(task_limit=1)
    busy_step = harness.step("busy", *[90.0] * 30, step_seconds=1.0)

    def wake_and_step(now: float) -> float:
        harness.schedule.wake("busy")
        return busy_step(now)

    harness.schedule.add("busy", wake_and_step)
    harness.schedule.add("quiet", harness.step("quiet", 5.0, 10.0, 15.0))
    harness.tasks.run(20.0)
    harness.tasks.close()
    quiet_times = [when for when, name in harness.calls if name == "quiet"]
    assert quiet_times == [1.0, 5.0, 10.0, 15.0]


def test_submitted_work_is_done_before_a_closed_schedule_ends(calendar: ScheduleHarness) -> None:
    """A caller of `map` may wait for the work."""

    def sleep(seconds: float) -> float:
        calendar.tasks.sleep(seconds)
        return seconds

    map_result = calendar.call_at(1.0, lambda: calendar.schedule.map(sleep, [3.0] * 5))
    close_result = calendar.call_at(2.0, calendar.schedule.close)
    calendar.tasks.run(20.0)
    assert map_result == [([3.0] * 5, 10.0)]
    assert close_result == [(True, 10.0)]


def test_woken_step_uses_an_idle_task_if_no_other_can_start(calendar: ScheduleHarness) -> None:
    calendar.time.max_tasks = 1
    calendar.schedule.add("a", calendar.step("a", 50.0))
    calendar.schedule.add("b", calendar.step("b", 60.0))
    calendar.call_at(10.0, lambda: calendar.schedule.wake("b"))
    calendar.tasks.run(70.0)
    assert calendar.calls == [(0.0, "a"), (0.0, "b"), (10.0, "b"), (50.0, "a")]


def test_submitted_work_is_done_by_the_caller_if_no_task_can_start(calendar: ScheduleHarness) -> None:
    calendar.time.max_tasks = 1  # the task of `calendar.schedule`
    schedule = Schedule(calendar.time, 2, "leasehold-read", lambda fault: calendar.failed.append(repr(fault)))
    map_result = calendar.call_at(1.0, lambda: schedule.map(abs, [-1, -2]))
    calendar.tasks.run(20.0)
    assert map_result == [([1, 2], 1.0)]
    assert set(calendar.failed) == {"""RuntimeError("can't start new thread")"""}


def test_step_is_called_when_due_after_its_abandoned_call_has_returned(calendar: ScheduleHarness) -> None:
    """The task of the abandoned call ends, and another task that waits for a later step takes the step."""
    waits = iter([10.0])

    def step(now: float) -> float:
        calendar.calls.append((round(now, 3), "a"))
        calendar.tasks.sleep(next(waits, 0.0))
        return 15.0 if now < 15.0 else math.inf

    calendar.schedule.add("a", step)
    for name, due in {"b": 50.0, "c": 60.0}.items():
        calendar.schedule.add(name, calendar.step(name, due))
    calendar.call_at(1.0, lambda: calendar.schedule.abandon("a"))
    calendar.tasks.run(90.0)
    assert calendar.calls == [(0.0, "a"), (0.0, "b"), (0.0, "c"), (15.0, "a"), (50.0, "b"), (60.0, "c")]


def test_step_abandoned_twice_allows_one_more_task(calendar: ScheduleHarness) -> None:
    calendar.schedule.add("a", calendar.step("a", step_seconds=20.0))
    for abandoned_at in (1.0, 2.0):
        calendar.call_at(abandoned_at, lambda: calendar.schedule.abandon("a"))
    for name in "bcd":
        calendar.call_at(3.0, partial(calendar.schedule.add, name, calendar.step(name, step_seconds=4.0)))
    calendar.tasks.run(30.0)
    assert calendar.calls == [(0.0, "a"), (3.0, "b"), (3.0, "c"), (7.0, "d")]


def test_abandoning_the_last_call_ends_a_drain_and_a_close(calendar: ScheduleHarness) -> None:
    """A call that does not return delays neither a drain that has begun nor a later close."""
    calendar.schedule.add("a", calendar.step("a", step_seconds=20.0))
    drain_result = calendar.call_at(1.0, lambda: calendar.schedule.drain(15.0))
    calendar.call_at(2.0, lambda: calendar.schedule.abandon("a"))
    close_result = calendar.call_at(3.0, lambda: calendar.schedule.close(15.0))
    calendar.tasks.run(30.0)
    assert (drain_result, close_result) == ([(True, 2.0)], [(False, 3.0)])


def test_step_of_a_surplus_task_is_called_by_another(calendar: ScheduleHarness) -> None:
    """A task that ends because the limit was lowered leaves the step that it waits for to the remaining task."""
    for name, due in {"a": 50.0, "b": 60.0}.items():
        calendar.schedule.add(name, calendar.step(name, due, due + 20.0))
    calendar.call_at(1.0, lambda: calendar.schedule.resize(1))
    for woken_at, key in ((2.0, "a"), (3.0, "b")):
        calendar.call_at(woken_at, partial(calendar.schedule.wake, key))
    calendar.tasks.run(90.0)
    assert calendar.calls[2:] == [(2.0, "a"), (3.0, "b"), (70.0, "a"), (80.0, "b")]


def test_close_ends_if_the_last_task_cannot_start(calendar: ScheduleHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """The work that the task should have done is done by its caller."""

    def fail_slowly(*_arguments: object) -> None:
        calendar.tasks.sleep(2.0)
        raise RuntimeError("can't start new thread")

    schedule, done = Schedule(calendar.time, 1, "leasehold-act", lambda _fault: None), list[float]()
    monkeypatch.setattr(calendar.time, "start", fail_slowly)
    calendar.call_at(1.0, lambda: schedule.submit(lambda: done.append(round(calendar.tasks.now, 3))))
    close_result = calendar.call_at(2.0, schedule.close)
    calendar.tasks.run(20.0)
    assert (done, close_result) == ([3.0], [(True, 3.0)])
