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
class Hands:
    """Threads that the test runs itself, each until it has no more to do.

    `refuses` makes the system start no further thread.
    """

    waiting: list[Callable[[], None]] = field(factory=list)
    names: list[str] = field(factory=list)
    done: list[str] = field(factory=list)
    refuses: bool = False

    def __call__(self, *, target: Callable[[], None], name: str, daemon: bool) -> "Hands":
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
            self.done.append(name)

        return do

    def run(self) -> None:
        """Run the thread that was started first to its end."""
        thread = Thread(target=self.waiting.pop(0), daemon=True)
        thread.start()
        thread.join(WAIT)
        assert not thread.is_alive()


@pytest.fixture
def hands(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hands]:
    """Return the test's threads, which replace those of the system."""
    made = Hands()
    monkeypatch.setattr("leasehold.adapters.threads.Thread", made)
    yield made
    assert made.waiting == []


def test_batches_start_in_arrival_order_up_to_the_thread_limit(hands: Hands) -> None:
    executor = ThreadExecutor(2)
    for name in "abc":
        executor.start(hands.work(name))
    executor.start(hands.work("d", executor.close))
    assert hands.names == ["leasehold-handle-0", "leasehold-handle-1"]
    hands.run()
    assert hands.done == ["a", "b", "c", "d"]
    hands.run()
    assert hands.done == ["a", "b", "c", "d"]


def test_closed_executor_starts_no_work(hands: Hands) -> None:
    executor = ThreadExecutor(1)
    executor.start(hands.work("a"))
    executor.close()
    hands.run()
    assert hands.done == []


def test_slow_thread_is_replaced_until_it_returns(hands: Hands) -> None:
    executor = ThreadExecutor(1, most=3)
    other = hands.work("b", executor.close)

    def replaced() -> None:
        assert len(hands.waiting) == 0
        executor.replace(slow)
        assert len(hands.waiting) == 1
        assert not executor.stuck

    slow = hands.work("a", replaced)
    executor.start(slow)
    executor.start(other)
    hands.run()
    assert hands.done == ["a"], "the slow one ends, for another is in its place"
    hands.run()
    assert hands.done == ["a", "b"]


def test_slow_thread_continues_if_it_could_not_be_replaced(hands: Hands) -> None:
    executor = ThreadExecutor(1, most=1)
    slow = hands.work("a", lambda: executor.replace(slow))
    executor.start(slow)
    executor.start(hands.work("b", executor.close))
    hands.run()
    assert (hands.done, executor.stuck) == (["a", "b"], False)


def test_only_running_work_counts_as_slow(hands: Hands) -> None:
    executor = ThreadExecutor(1, most=1)
    waiting = hands.work("b", executor.close)
    over = hands.work("a")
    executor.start(over)
    executor.start(waiting)
    executor.replace(waiting)
    executor.replace(hands.work("never"))
    assert not executor.stuck
    hands.run()
    executor.replace(over)
    assert not executor.stuck


def test_work_that_ends_its_thread_is_no_longer_running(hands: Hands) -> None:
    errors: list[BaseException] = []
    executor = ThreadExecutor(1, most=1, failed=errors.append)

    def end() -> None:
        executor.replace(ends)
        assert executor.stuck
        raise SystemExit

    ends = hands.work("a", end)
    executor.start(ends)
    hands.run()
    assert ([*map(type, errors)], executor.stuck) == ([SystemExit], False)
    executor.replace(ends)
    assert not executor.stuck
    executor.start(hands.work("b", executor.close))
    hands.run()
    assert hands.done == ["b"]


@pytest.mark.parametrize(("usual", "most"), [(1, 2), (3, 1)])
def test_executor_is_stuck_once_the_maximum_of_threads_is_slow(hands: Hands, usual: int, most: int) -> None:
    executor = ThreadExecutor(usual, most)
    bound, stuck = max(usual, most), list[bool]()

    def nested(number: int) -> Callable[[], None]:
        def slow() -> None:
            executor.replace(works[number])
            stuck.append(executor.stuck)
            if hands.waiting:
                hands.run()

        return slow

    works = [hands.work(str(number), nested(number)) for number in range(bound)]
    for one in works:
        executor.start(one)
    for name in ("x", "y"):
        executor.start(hands.work(name, executor.close))
    assert len(hands.waiting) == usual
    hands.run()
    assert stuck == [False] * (bound - 1) + [True]
    assert len(hands.names) == bound
    while hands.waiting:
        hands.run()
    assert not executor.stuck


def test_replacement_thread_continues_while_the_slow_thread_runs(hands: Hands) -> None:
    executor = ThreadExecutor(1, most=3)

    def hung() -> None:
        executor.replace(slow)
        hands.run()

    slow = hands.work("a", hung)
    for work in (slow, hands.work("b"), hands.work("c", executor.close)):
        executor.start(work)
    hands.run()
    assert hands.done == ["b", "c", "a"]


def test_each_slow_thread_is_replaced(hands: Hands) -> None:
    executor = ThreadExecutor(1, most=2)
    first = hands.work("a", lambda: executor.replace(first))
    second = hands.work("b", lambda: executor.replace(second))
    for work in (first, second, hands.work("c", executor.close)):
        executor.start(work)
    for _ in range(3):
        hands.run()
    assert (hands.done, len(hands.names)) == (["a", "b", "c"], 3)


def test_returned_thread_counts_until_it_ends(hands: Hands) -> None:
    executor = ThreadExecutor(1)
    last = hands.work("c", executor.close)
    executor.start(hands.work("a"))
    executor.start(hands.work("b", lambda: executor.start(last)))
    hands.run()
    assert (hands.done, len(hands.names)) == (["a", "b", "c"], 1)


def test_waiting_work_can_be_withdrawn_and_started_work_cannot(hands: Hands) -> None:
    executor = ThreadExecutor(1)
    first = hands.work("a", lambda: withdrawn.append(executor.withdraw(first)))
    second, last = hands.work("b"), hands.work("c", executor.close)
    withdrawn = list[bool]()
    for one in (first, second, last):
        executor.start(one)
    withdrawn.append(executor.withdraw(second))
    hands.run()
    assert (withdrawn, hands.done) == ([True, False], ["a", "c"])


def test_work_is_rejected_if_no_thread_can_start(hands: Hands) -> None:
    """With one thread running, all other work waits for it."""
    executor = ThreadExecutor(2)
    hands.refuses = True
    with pytest.raises(RuntimeError, match="can't start new thread"):
        executor.start(hands.work("a"))
    hands.refuses = False
    slow = hands.work("b", lambda: executor.replace(slow))
    executor.start(slow)
    hands.refuses = True
    executor.start(hands.work("c"))
    executor.start(hands.work("d", executor.close))
    hands.run()
    assert hands.done == ["b", "c", "d"]


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
    waits, started, both = Semaphore(0), list[Thread](), Barrier(2)

    class Told(Condition):
        def wait(self, timeout: float | None = None) -> bool:
            waits.release()
            return super().wait(timeout)

    class Counted(Thread):
        def start(self) -> None:
            started.append(self)
            super().start()

    def meet() -> None:
        both.wait(WAIT)

    monkeypatch.setattr("leasehold.adapters.consumer.executors.Condition", Told)
    monkeypatch.setattr("leasehold.adapters.threads.Thread", Counted)
    executor = ThreadExecutor(3)
    for _ in range(2):
        for _ in range(2):
            executor.start(meet)
        assert [waits.acquire(timeout=WAIT) for _ in range(2)] == [True, True]
    executor.close()
    assert len(started) == 2


def test_idle_thread_does_not_keep_its_last_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = Semaphore(0)

    class Told(Condition):
        def wait(self, timeout: float | None = None) -> bool:
            waits.release()
            return super().wait(timeout)

    class Batch:
        """A large object."""

        def handle(self) -> None:
            """Handle it."""

    monkeypatch.setattr("leasehold.adapters.consumer.executors.Condition", Told)
    executor, batch = ThreadExecutor(1), Batch()
    gone = weakref.ref(batch)
    executor.start(batch.handle)
    del batch
    assert waits.acquire(timeout=WAIT)
    assert gone() is None
    executor.close()


def test_inline_call_is_over_once_started() -> None:
    executor, done = InlineExecutor(), list[str]()
    executor.start(lambda: done.append("a"))
    assert (done, executor.stuck, executor.withdraw(done.clear)) == (["a"], False, False)
