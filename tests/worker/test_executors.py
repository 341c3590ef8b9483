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


def test_as_many_threads_as_usual_begin_what_came_first(hands: Hands) -> None:
    """No more handlers run at once than the user asked for, and batches start in order of arrival."""
    executor = ThreadExecutor(2)
    for name in "abc":
        executor.start(hands.work(name))
    executor.start(hands.work("d", executor.close))
    assert hands.names == ["leasehold-handle-0", "leasehold-handle-1"]
    hands.run()
    assert hands.done == ["a", "b", "c", "d"]
    hands.run()
    assert hands.done == ["a", "b", "c", "d"]


def test_a_closed_crew_begins_nothing_more(hands: Hands) -> None:
    """A worker that ends does not dispatch batches whose leases are released."""
    executor = ThreadExecutor(1)
    executor.start(hands.work("a"))
    executor.close()
    hands.run()
    assert hands.done == []


def test_another_thread_stands_in_for_a_slow_one_until_that_returns(hands: Hands) -> None:
    """One hung handler does not stop all shards, and slow batches do not leave extra threads behind."""
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


def test_a_slow_thread_goes_on_where_nobody_stands_in(hands: Hands) -> None:
    """If no replacement can be started, the slow thread takes the next batch when it returns."""
    executor = ThreadExecutor(1, most=1)
    slow = hands.work("a", lambda: executor.replace(slow))
    executor.start(slow)
    executor.start(hands.work("b", executor.close))
    hands.run()
    assert (hands.done, executor.stuck) == (["a", "b"], False)


def test_only_what_is_at_work_can_be_slow(hands: Hands) -> None:
    """Work that is over or has not begun does not count toward the limit of hanging threads."""
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


def test_work_that_ends_its_thread_is_at_work_no_longer(hands: Hands) -> None:
    """The ended thread does not count toward the limit of hanging threads, and its batch is freed."""
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
def test_there_is_a_most_and_a_crew_of_slow_threads_alone_is_stuck(hands: Hands, usual: int, most: int) -> None:
    """The number of threads has an upper limit. Once all of them are slow, the executor reports that it is stuck."""
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


def test_a_stand_in_goes_on_while_the_slow_thread_is_at_work(hands: Hands) -> None:
    executor = ThreadExecutor(1, most=3)

    def hung() -> None:
        executor.replace(slow)
        hands.run()

    slow = hands.work("a", hung)
    for work in (slow, hands.work("b"), hands.work("c", executor.close)):
        executor.start(work)
    hands.run()
    assert hands.done == ["b", "c", "a"]


def test_each_slow_thread_is_replaced_as_the_first_was(hands: Hands) -> None:
    """The executor neither shrinks nor stalls at the second batch that hangs, after a slow thread has ended."""
    executor = ThreadExecutor(1, most=2)
    first = hands.work("a", lambda: executor.replace(first))
    second = hands.work("b", lambda: executor.replace(second))
    for work in (first, second, hands.work("c", executor.close)):
        executor.start(work)
    for _ in range(3):
        hands.run()
    assert (hands.done, len(hands.names)) == (["a", "b", "c"], 3)


def test_a_thread_that_has_returned_counts_until_it_ends(hands: Hands) -> None:
    executor = ThreadExecutor(1)
    last = hands.work("c", executor.close)
    executor.start(hands.work("a"))
    executor.start(hands.work("b", lambda: executor.start(last)))
    hands.run()
    assert (hands.done, len(hands.names)) == (["a", "b", "c"], 1)


def test_waiting_work_can_be_taken_back_and_begun_work_cannot(hands: Hands) -> None:
    """A batch whose lease is lost is not dispatched, unless it has already begun."""
    executor = ThreadExecutor(1)
    first = hands.work("a", lambda: withdrawn.append(executor.withdraw(first)))
    second, last = hands.work("b"), hands.work("c", executor.close)
    withdrawn = list[bool]()
    for one in (first, second, last):
        executor.start(one)
    withdrawn.append(executor.withdraw(second))
    hands.run()
    assert (withdrawn, hands.done) == ([True, False], ["a", "c"])


def test_without_a_first_thread_nothing_waits_and_with_one_it_does_all(hands: Hands) -> None:
    """If no thread can be started, the batch is rejected rather than queued.

    With one thread, everything waits for it.
    """
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


def test_one_thread_takes_one_batch_after_the_other_and_ends_with_its_crew() -> None:
    """A waiting thread is notified of the next batch and of the close."""
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


def test_threads_that_wait_take_what_comes_before_another_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The executor never has more threads than there were batches at the same time."""
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


def test_a_thread_that_waits_keeps_nothing_of_its_last_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of megabytes is freed when it is done, not when the thread gets the next one."""
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


def test_a_call_in_line_is_over_when_it_was_started() -> None:
    """Tests that run steps one by one see what a handler did."""
    executor, done = InlineExecutor(), list[str]()
    executor.start(lambda: done.append("a"))
    assert (done, executor.stuck, executor.withdraw(done.clear)) == (["a"], False, False)
