"""How many threads call handlers, in which order, and what happens to slow ones, one step at a time."""

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
    """Threads that the test runs itself, each until it has no more to do.

    `refuses` makes the system start no further thread.
    """

    waiting: list[Callable[[], None]] = field(factory=list)
    names: list[str] = field(factory=list)
    finished: list[str] = field(factory=list)
    refuses: bool = False

    def __call__(self, *, target: Callable[[], None], name: str, daemon: bool) -> "ManualThreads":
        """Return a thread to be started."""
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
        """Return work that is notified when it is done."""

        def do() -> None:
            during()
            self.finished.append(name)

        return do

    def run(self) -> None:
        """Run the thread that was started first to its end."""
        thread = Thread(target=self.waiting.pop(0), daemon=True)
        thread.start()
        thread.join(WAIT)
        assert not thread.is_alive()


@pytest.fixture
def manual_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[ManualThreads]:
    """Return the test's threads, which replace those of the system."""
    new_threads = ManualThreads()
    monkeypatch.setattr("leasehold.adapters.threads.Thread", new_threads)
    yield new_threads
    assert new_threads.waiting == []


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
    executor = ThreadExecutor(1, most=3)
    other = manual_threads.work("b", executor.close)

    def replaced() -> None:
        assert len(manual_threads.waiting) == 0
        executor.replace(slow)
        assert len(manual_threads.waiting) == 1
        assert not executor.stuck

    slow = manual_threads.work("a", replaced)
    executor.start(slow)
    executor.start(other)
    manual_threads.run()
    assert manual_threads.finished == ["a"], "the slow one ends, for another is in its place"
    manual_threads.run()
    assert manual_threads.finished == ["a", "b"]


def test_slow_thread_continues_if_it_could_not_be_replaced(manual_threads: ManualThreads) -> None:
    executor = ThreadExecutor(1, most=1)
    slow = manual_threads.work("a", lambda: executor.replace(slow))
    executor.start(slow)
    executor.start(manual_threads.work("b", executor.close))
    manual_threads.run()
    assert (manual_threads.finished, executor.stuck) == (["a", "b"], False)


def test_only_running_work_counts_as_slow(manual_threads: ManualThreads) -> None:
    executor = ThreadExecutor(1, most=1)
    waiting = manual_threads.work("b", executor.close)
    over = manual_threads.work("a")
    executor.start(over)
    executor.start(waiting)
    executor.replace(waiting)
    executor.replace(manual_threads.work("never"))
    assert not executor.stuck
    manual_threads.run()
    executor.replace(over)
    assert not executor.stuck


def test_work_that_ends_its_thread_is_no_longer_running(manual_threads: ManualThreads) -> None:
    errors: list[BaseException] = []
    executor = ThreadExecutor(1, most=1, failed=errors.append)

    def end() -> None:
        executor.replace(ends)
        assert executor.stuck
        raise SystemExit

    ends = manual_threads.work("a", end)
    executor.start(ends)
    manual_threads.run()
    assert ([*map(type, errors)], executor.stuck) == ([SystemExit], False)
    executor.replace(ends)
    assert not executor.stuck
    executor.start(manual_threads.work("b", executor.close))
    manual_threads.run()
    assert manual_threads.finished == ["b"]


@pytest.mark.parametrize(("usual", "max_threads"), [(1, 2), (3, 1)])
def test_executor_is_stuck_once_the_maximum_of_threads_is_slow(
    manual_threads: ManualThreads, usual: int, max_threads: int
) -> None:
    executor = ThreadExecutor(usual, max_threads)
    bound, stuck = max(usual, max_threads), list[bool]()

    def nested(number: int) -> Callable[[], None]:
        def slow() -> None:
            executor.replace(works[number])
            stuck.append(executor.stuck)
            if manual_threads.waiting:
                manual_threads.run()

        return slow

    works = [manual_threads.work(str(number), nested(number)) for number in range(bound)]
    for item in works:
        executor.start(item)
    for name in ("x", "y"):
        executor.start(manual_threads.work(name, executor.close))
    assert len(manual_threads.waiting) == usual
    manual_threads.run()
    assert stuck == [False] * (bound - 1) + [True]
    assert len(manual_threads.names) == bound
    while manual_threads.waiting:
        manual_threads.run()
    assert not executor.stuck


def test_replacement_thread_continues_while_the_slow_thread_runs(manual_threads: ManualThreads) -> None:
    executor = ThreadExecutor(1, most=3)

    def hung() -> None:
        executor.replace(slow)
        manual_threads.run()

    slow = manual_threads.work("a", hung)
    for work in (slow, manual_threads.work("b"), manual_threads.work("c", executor.close)):
        executor.start(work)
    manual_threads.run()
    assert manual_threads.finished == ["b", "c", "a"]


def test_each_slow_thread_is_replaced(manual_threads: ManualThreads) -> None:
    executor = ThreadExecutor(1, most=2)
    first = manual_threads.work("a", lambda: executor.replace(first))
    second = manual_threads.work("b", lambda: executor.replace(second))
    for work in (first, second, manual_threads.work("c", executor.close)):
        executor.start(work)
    for _ in range(3):
        manual_threads.run()
    assert (manual_threads.finished, len(manual_threads.names)) == (["a", "b", "c"], 3)


def test_returned_thread_counts_until_it_ends(manual_threads: ManualThreads) -> None:
    executor = ThreadExecutor(1)
    last = manual_threads.work("c", executor.close)
    executor.start(manual_threads.work("a"))
    executor.start(manual_threads.work("b", lambda: executor.start(last)))
    manual_threads.run()
    assert (manual_threads.finished, len(manual_threads.names)) == (["a", "b", "c"], 1)


def test_waiting_work_can_be_withdrawn_and_started_work_cannot(manual_threads: ManualThreads) -> None:
    executor = ThreadExecutor(1)
    first = manual_threads.work("a", lambda: withdrawn.append(executor.withdraw(first)))
    second, last = manual_threads.work("b"), manual_threads.work("c", executor.close)
    withdrawn = list[bool]()
    for item in (first, second, last):
        executor.start(item)
    withdrawn.append(executor.withdraw(second))
    manual_threads.run()
    assert (withdrawn, manual_threads.finished) == ([True, False], ["a", "c"])


def test_work_is_rejected_if_no_thread_can_start(manual_threads: ManualThreads) -> None:
    """With one thread running, all other work waits for it."""
    executor = ThreadExecutor(2)
    manual_threads.refuses = True
    with pytest.raises(RuntimeError, match="can't start new thread"):
        executor.start(manual_threads.work("a"))
    manual_threads.refuses = False
    slow = manual_threads.work("b", lambda: executor.replace(slow))
    executor.start(slow)
    manual_threads.refuses = True
    executor.start(manual_threads.work("c"))
    executor.start(manual_threads.work("d", executor.close))
    manual_threads.run()
    assert manual_threads.finished == ["b", "c", "d"]


def test_single_thread_runs_batches_in_order_and_ends_on_close() -> None:
    executor, threads, done = ThreadExecutor(1), set[Thread](), SimpleQueue[None]()

    def work() -> None:
        threads.add(current_thread())
        done.put(None)

    for _ in range(100):
        executor.start(work)
        done.get(timeout=WAIT)
    executor.close()
    (thread,) = threads
    thread.join(WAIT)
    assert (thread.is_alive(), thread.daemon) == (False, True)


def test_waiting_threads_take_work_before_another_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, started, barrier = Semaphore(0), list[Thread](), Barrier(2)

    class SignalingCondition(Condition):
        def wait(self, timeout: float | None = None) -> bool:
            waits.release()
            return super().wait(timeout)

    class Counted(Thread):
        def start(self) -> None:
            started.append(self)
            super().start()

    def wait_for_both() -> None:
        barrier.wait(WAIT)

    monkeypatch.setattr("leasehold.adapters.consumer.executors.Condition", SignalingCondition)
    monkeypatch.setattr("leasehold.adapters.threads.Thread", Counted)
    executor = ThreadExecutor(3)
    for _ in range(2):
        for _ in range(2):
            executor.start(wait_for_both)
        assert [waits.acquire(timeout=WAIT) for _ in range(2)] == [True, True]
    executor.close()
    assert len(started) == 2


def test_idle_thread_does_not_keep_its_last_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = Semaphore(0)

    class SignalingCondition(Condition):
        def wait(self, timeout: float | None = None) -> bool:
            waits.release()
            return super().wait(timeout)

    class Batch:
        """A large object."""

        def handle(self) -> None:
            """Handle it."""

    monkeypatch.setattr("leasehold.adapters.consumer.executors.Condition", SignalingCondition)
    executor, batch = ThreadExecutor(1), Batch()
    batch_reference = weakref.ref(batch)
    executor.start(batch.handle)
    del batch
    assert waits.acquire(timeout=WAIT)
    assert batch_reference() is None
    executor.close()


def test_inline_call_is_over_once_started() -> None:
    executor, done = InlineExecutor(), list[str]()
    executor.start(lambda: done.append("a"))
    assert (done, executor.stuck, executor.withdraw(done.clear)) == (["a"], False, False)
