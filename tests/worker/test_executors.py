"""How many threads call handlers, in which order, and how slow threads are replaced. Tests run the threads."""

import weakref
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from threading import Barrier, Condition, Semaphore, Thread, current_thread

import pytest
from attrs import define, field
from waiters import WAIT

from leasehold.adapters.consumer.executors import InlineExecutor, ThreadExecutor, Work


@define
class ManualThreads:
    """Simulated threads that a test runs one after another, each until it has no more work.

    If `refuses` is set, starting a thread fails.
    """

    waiting: list[Callable[[], None]] = field(factory=list)
    names: list[str] = field(factory=list)
    finished: list[str] = field(factory=list)
    refuses: bool = False

    def __call__(self, *, target: Callable[[], None], name: str, daemon: bool) -> "ManualThreads":
        """Return this object in place of the new thread."""
        assert daemon, "it would keep the process while a handler hangs"
        if not self.refuses:
            self.waiting.append(target)
            self.names.append(name)
        return self

    def start(self) -> None:
        """Start the latest thread, which waits until the test runs it."""
        if self.refuses:
            raise RuntimeError("can't start new thread")

    def work(self, name: str, during: Callable[[], object] = lambda: None) -> Work:
        """Return work that calls `during`, and then records its name in `finished`."""

        def work_and_record() -> None:
            during()
            self.finished.append(name)

        return work_and_record

    def run(self) -> None:
        """Run the thread that was started first to its end."""
        thread = Thread(target=self.waiting.pop(0), daemon=True)
        thread.start()
        thread.join(WAIT)
        assert not thread.is_alive()


@pytest.fixture
def manual_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[ManualThreads]:
    """Replace the system's threads with simulated threads, and return these."""
    simulated_threads = ManualThreads()
    monkeypatch.setattr("leasehold.adapters.threads.Thread", simulated_threads)
    yield simulated_threads
    assert simulated_threads.waiting == []


def test_batches_start_in_arrival_order_up_to_the_thread_limit(manual_threads: ManualThreads) -> None:
    executor = ThreadExecutor(2)
    for name in "abc":
        executor.start(manual_threads.work(name))
    executor.start(manual_threads.work("d", executor.close))
    assert manual_threads.names == ["leasehold-handle-0", "leasehold-handle-1"]
    manual_threads.run()
    assert manual_threads.finished == ["a", "b", "c", "d"]
    manual_threads.run()
    assert manual_threads.finished == ["a", "b", "c", "d"]


def test_closed_executor_starts_no_work(manual_threads: ManualThreads) -> None:
    executor = ThreadExecutor(1)
    executor.start(manual_threads.work("a"))
    executor.close()
    manual_threads.run()
    assert manual_threads.finished == []


def test_slow_thread_is_replaced_until_it_returns(manual_threads: ManualThreads) -> None:
    executor = ThreadExecutor(1, total_limit=3)
    waiting_work = manual_threads.work("b", executor.close)

    def replaced() -> None:
        assert len(manual_threads.waiting) == 0
        executor.replace_slow_thread(slow_work)
        assert len(manual_threads.waiting) == 1
        assert not executor.stuck

    slow_work = manual_threads.work("a", replaced)
    executor.start(slow_work)
    executor.start(waiting_work)
    manual_threads.run()
    assert manual_threads.finished == ["a"], "the slow one ends, for another is in its place"
    manual_threads.run()
    assert manual_threads.finished == ["a", "b"]


def test_slow_thread_continues_if_it_could_not_be_replaced(manual_threads: ManualThreads) -> None:
    executor = ThreadExecutor(1, total_limit=1)
    slow_work = manual_threads.work("a", lambda: executor.replace_slow_thread(slow_work))
    executor.start(slow_work)
    executor.start(manual_threads.work("b", executor.close))
    manual_threads.run()
    assert (manual_threads.finished, executor.stuck) == (["a", "b"], False)


def test_only_running_work_counts_as_slow(manual_threads: ManualThreads) -> None:
    executor = ThreadExecutor(1, total_limit=1)
    waiting_work = manual_threads.work("b", executor.close)
    finished_work = manual_threads.work("a")
    executor.start(finished_work)
    executor.start(waiting_work)
    executor.replace_slow_thread(waiting_work)
    executor.replace_slow_thread(manual_threads.work("never"))
    assert not executor.stuck
    manual_threads.run()
    executor.replace_slow_thread(finished_work)
    assert not executor.stuck


def test_work_that_ends_its_thread_is_no_longer_running(manual_threads: ManualThreads) -> None:
    errors: list[BaseException] = []
    executor = ThreadExecutor(1, total_limit=1, on_failure=errors.append)

    def raise_system_exit() -> None:
        executor.replace_slow_thread(ending_work)
        assert executor.stuck
        raise SystemExit

    ending_work = manual_threads.work("a", raise_system_exit)
    executor.start(ending_work)
    manual_threads.run()
    assert ([*map(type, errors)], executor.stuck) == ([SystemExit], False)
    executor.replace_slow_thread(ending_work)
    assert not executor.stuck
    executor.start(manual_threads.work("b", executor.close))
    manual_threads.run()
    assert manual_threads.finished == ["b"]


@pytest.mark.parametrize(("usual", "max_threads"), [(1, 2), (3, 1)])
def test_executor_is_stuck_once_the_maximum_of_threads_is_slow(
    manual_threads: ManualThreads, usual: int, max_threads: int
) -> None:
    executor = ThreadExecutor(usual, max_threads)
    thread_limit, stuck_states = max(usual, max_threads), list[bool]()

    def slow_work(number: int) -> Callable[[], None]:
        def run_slowly() -> None:
            executor.replace_slow_thread(works[number])
            stuck_states.append(executor.stuck)
            if manual_threads.waiting:
                manual_threads.run()

        return run_slowly

    works = [manual_threads.work(str(number), slow_work(number)) for number in range(thread_limit)]
    for work in works:
        executor.start(work)
    for name in ("x", "y"):
        executor.start(manual_threads.work(name, executor.close))
    assert len(manual_threads.waiting) == usual
    manual_threads.run()
    assert stuck_states == [False] * (thread_limit - 1) + [True]
    assert len(manual_threads.names) == thread_limit
    while manual_threads.waiting:
        manual_threads.run()
    assert not executor.stuck


def test_replacement_thread_continues_while_the_slow_thread_runs(manual_threads: ManualThreads) -> None:
    executor = ThreadExecutor(1, total_limit=3)

    def hung() -> None:
        executor.replace_slow_thread(slow_work)
        manual_threads.run()

    slow_work = manual_threads.work("a", hung)
    for work in (slow_work, manual_threads.work("b"), manual_threads.work("c", executor.close)):
        executor.start(work)
    manual_threads.run()
    assert manual_threads.finished == ["b", "c", "a"]


def test_each_slow_thread_is_replaced(manual_threads: ManualThreads) -> None:
    executor = ThreadExecutor(1, total_limit=2)
    first_work = manual_threads.work("a", lambda: executor.replace_slow_thread(first_work))
    second_work = manual_threads.work("b", lambda: executor.replace_slow_thread(second_work))
    for work in (first_work, second_work, manual_threads.work("c", executor.close)):
        executor.start(work)
    for _ in range(3):
        manual_threads.run()
    assert (manual_threads.finished, len(manual_threads.names)) == (["a", "b", "c"], 3)


def test_returned_thread_counts_until_it_ends(manual_threads: ManualThreads) -> None:
    executor = ThreadExecutor(1)
    last_work = manual_threads.work("c", executor.close)
    executor.start(manual_threads.work("a"))
    executor.start(manual_threads.work("b", lambda: executor.start(last_work)))
    manual_threads.run()
    assert (manual_threads.finished, len(manual_threads.names)) == (["a", "b", "c"], 1)


def test_waiting_work_can_be_withdrawn_and_started_work_cannot(manual_threads: ManualThreads) -> None:
    executor = ThreadExecutor(1)
    first_work = manual_threads.work("a", lambda: withdrawn.append(executor.withdraw(first_work)))
    second_work, last_work = manual_threads.work("b"), manual_threads.work("c", executor.close)
    withdrawn = list[bool]()
    for work in (first_work, second_work, last_work):
        executor.start(work)
    withdrawn.append(executor.withdraw(second_work))
    manual_threads.run()
    withdrawn += [executor.withdraw(work) for work in (first_work, second_work)]
    assert (withdrawn, manual_threads.finished) == ([True, False, False, False], ["a", "c"])


def test_work_is_rejected_if_no_thread_can_start(manual_threads: ManualThreads) -> None:
    """If no further thread can start while one is running, that thread does all the work."""
    executor = ThreadExecutor(2)
    manual_threads.refuses = True
    with pytest.raises(RuntimeError, match="can't start new thread"):
        executor.start(manual_threads.work("a"))
    manual_threads.refuses = False
    slow_work = manual_threads.work("b", lambda: executor.replace_slow_thread(slow_work))
    executor.start(slow_work)
    manual_threads.refuses = True
    executor.start(manual_threads.work("c"))
    executor.start(manual_threads.work("d", executor.close))
    manual_threads.run()
    assert manual_threads.finished == ["b", "c", "d"]


def test_single_thread_runs_batches_in_order_and_ends_on_close() -> None:
    executor, threads, finished_calls = ThreadExecutor(1), set[Thread](), SimpleQueue[None]()

    def work() -> None:
        threads.add(current_thread())
        finished_calls.put(None)

    for _ in range(100):
        executor.start(work)
        finished_calls.get(timeout=WAIT)
    executor.close()
    (thread,) = threads
    thread.join(WAIT)
    assert (thread.is_alive(), thread.daemon) == (False, True)


def test_waiting_threads_take_work_before_another_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_counter, started_threads, barrier = Semaphore(0), list[Thread](), Barrier(2)

    class SignalingCondition(Condition):
        def wait(self, timeout: float | None = None) -> bool:
            wait_counter.release()
            return super().wait(timeout)

    class CountedThread(Thread):
        def start(self) -> None:
            started_threads.append(self)
            super().start()

    def wait_for_both() -> None:
        barrier.wait(WAIT)

    monkeypatch.setattr("leasehold.adapters.consumer.executors.Condition", SignalingCondition)
    monkeypatch.setattr("leasehold.adapters.threads.Thread", CountedThread)
    executor = ThreadExecutor(3)
    for _ in range(2):
        for _ in range(2):
            executor.start(wait_for_both)
        assert [wait_counter.acquire(timeout=WAIT) for _ in range(2)] == [True, True]
    executor.close()
    assert len(started_threads) == 2


def test_idle_thread_does_not_keep_its_last_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_counter = Semaphore(0)

    class SignalingCondition(Condition):
        def wait(self, timeout: float | None = None) -> bool:
            wait_counter.release()
            return super().wait(timeout)

    class Batch:
        """A stand-in for a large batch."""

        def handle(self) -> None:
            """Handle the batch."""

    monkeypatch.setattr("leasehold.adapters.consumer.executors.Condition", SignalingCondition)
    executor, batch = ThreadExecutor(1), Batch()
    batch_reference = weakref.ref(batch)
    executor.start(batch.handle)
    del batch
    assert wait_counter.acquire(timeout=WAIT)
    assert batch_reference() is None
    executor.close()


def test_inline_call_is_over_once_started() -> None:
    executor, finished_calls = InlineExecutor(), list[str]()
    executor.start(lambda: finished_calls.append("a"))
    assert (finished_calls, executor.stuck, executor.withdraw(finished_calls.clear)) == (["a"], False, False)
