"""Tests of the threads and queues that a worker uses outside simulations."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from leasehold.adapters.consumer.schedule import Schedule
from leasehold.adapters.threads import ThreadQueue, ThreadScheduler, read_boot_clock, spawn


@contextmanager
def signals_go_to_another_thread() -> Iterator[None]:
    """Make the system deliver SIGUSR1 to a thread other than the main thread."""
    may_end = threading.Event()
    other_thread = threading.Thread(target=may_end.wait)
    other_thread.start()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
        may_end.set()
        other_thread.join()


def test_signal_received_by_another_thread_wakes_the_main_thread() -> None:
    queue = ThreadQueue(read_boot_clock)
    original_handler = signal.signal(signal.SIGUSR1, lambda _number, _frame: queue.put("signal"))
    timeout_timer = threading.Timer(20, queue.put, ["nothing"])
    timeout_timer.start()
    try:
        with signals_go_to_another_thread():
            threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGUSR1]).start()
            assert queue.get() == "signal"
    finally:
        timeout_timer.cancel()
        signal.signal(signal.SIGUSR1, original_handler)


def test_queue_waits_until_the_given_time() -> None:
    queue = ThreadQueue(read_boot_clock)
    assert queue.get(read_boot_clock() + 0.05) is None
    assert queue.get(-1.0) is None
    queue.put("item")
    assert queue.get(read_boot_clock() - 1) == "item"


def test_map_raises_the_first_error_once_all_calls_have_ended() -> None:
    finished: list[int] = []

    def work(item: int) -> int:
        if item == 1:
            raise ValueError("refused")
        finished.append(item)
        return item

    schedule = Schedule(ThreadScheduler(read_boot_clock), 2, "test", lambda _fault: None)
    with pytest.raises(ValueError, match=r"^refused$"):
        schedule.map(work, range(4))
    assert sorted(finished) == [0, 2, 3]


class Counted(ThreadScheduler):
    """A scheduler that records the name of each thread that it starts, and queues the name when the thread ends."""

    def __init__(self) -> None:
        super().__init__(read_boot_clock)
        self.names, self.ended = list[str](), self.queue()

    def start(self, name: str, work: Callable[[], None], failed: Callable[[BaseException], None]) -> None:
        """Start a thread, and put the name into the queue `ended` when the thread ends."""
        self.names.append(name)

        def work_and_record_end() -> None:
            work()
            self.ended.put(name)

        super().start(name, work_and_record_end, failed)


def test_idle_tasks_end_after_a_burst_of_work() -> None:
    scheduler = Counted()
    schedule = Schedule(scheduler, 6, "test", lambda _fault: None, max_idle=2)
    for burst in (1, 2):
        barrier = threading.Barrier(6)
        assert sorted(schedule.map(barrier.wait, [20] * 6)) == [*range(6)]
        deadline = read_boot_clock() + 20
        assert [scheduler.ended.get(deadline) for _ in range(4)] == ["test"] * 4
        assert len(scheduler.names) == 2 + 4 * burst
    assert schedule.close(read_boot_clock() + 20)
    assert [scheduler.ended.get(read_boot_clock() + 20) for _ in range(2)] == ["test"] * 2


def test_schedule_grows_and_shrinks_to_its_task_limit() -> None:
    scheduler = Counted()
    schedule = Schedule(scheduler, 1, "test", lambda _fault: None)
    schedule.resize(4)
    barrier = threading.Barrier(4)
    assert sorted(schedule.map(barrier.wait, [20] * 4)) == [*range(4)]
    schedule.resize(1)
    assert len(schedule.map(abs, range(4))) == 4
    assert [scheduler.ended.get(read_boot_clock() + 20) for _ in range(3)] == ["test"] * 3
    assert schedule.close(read_boot_clock() + 20)


def test_wait_continues_after_a_signal_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leasehold.adapters.threads.SIGNAL_SECONDS", 0.01)
    queue = ThreadQueue(read_boot_clock)
    deadline = read_boot_clock() + 0.05
    assert queue.get(deadline) is None
    assert read_boot_clock() >= deadline
    threading.Timer(0.05, queue.put, ["item"]).start()
    assert queue.get() == "item"


def test_thread_that_memory_does_not_suffice_for_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers expect a RuntimeError if no thread can start, whatever the reason."""

    def fail(_thread: threading.Thread) -> None:
        raise MemoryError

    monkeypatch.setattr(threading.Thread, "start", fail)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        spawn("leasehold-x", lambda: None, lambda _fault: None)


def test_other_threads_wait_for_an_item_without_a_limit() -> None:
    queue, items = ThreadQueue(read_boot_clock), ThreadQueue(read_boot_clock)
    thread = spawn("leasehold-x", lambda: items.put(queue.get()), items.put)
    queue.put("item")
    assert items.get(read_boot_clock() + 20) == "item"
    thread.join(20)


def test_schedulers_of_two_processes_have_different_ids() -> None:
    ids = {ThreadScheduler().process_id for _ in range(2)}
    assert (len(ids), "" in ids, ThreadScheduler(process_id="p-1").process_id) == (2, False, "p-1")


def test_queue_without_an_item_at_its_deadline_returns_at_once() -> None:
    """The clock may not have moved since the caller computed the deadline."""
    assert ThreadQueue(lambda: 5.0).get(5.0) is None
