"""One call of a handler from start to end, and calls of observers."""

import asyncio
import gc
import inspect
import logging
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from queue import SimpleQueue
from threading import Event, Thread, current_thread

import pytest
from attrs import define, field
from reader_harness import ReaderHarness
from waiters import WAIT

from leasehold.adapters.consumer.dispatcher import CallEnded, Dispatcher, HandlerCall
from leasehold.adapters.consumer.executors import EventLoop, InlineExecutor, ThreadExecutor, Work
from leasehold.adapters.consumer.handling import Handling, NotAwaited, Unhandled


class Fatal(BaseException):
    """Ends a task of the scheduler."""


@define
class DispatcherHarness:
    """The calls of one worker, and what it was notified of."""

    executor: InlineExecutor | ThreadExecutor = field(factory=InlineExecutor)
    woken_keys: list[str] = field(factory=list)
    reasons: list[BaseException] = field(factory=list)
    over: Event = field(factory=Event)
    harness: ReaderHarness = field(factory=ReaderHarness)
    dispatcher: Dispatcher = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.dispatcher = Dispatcher(self.executor, wake=self._wake, end=self.reasons.append, fatal=(Fatal,))

    def _wake(self, key: str) -> None:
        self.woken_keys.append(key)
        self.over.set()

    def begin(self, call: Callable[[], object]) -> HandlerCall:
        handler_call = HandlerCall(self.harness.holding, Handling(lambda _batch: None), lambda: 42.0, call)
        assert self.dispatcher.begin(handler_call) is None
        return handler_call


def fault_in(handler_call: HandlerCall) -> Exception | None:
    """Return the fault of a call that is over."""
    assert isinstance(handler_call.outcome, CallEnded)
    return handler_call.outcome.fault


def raising(fault: BaseException) -> Callable[[], object]:
    """Return a user function that raises this."""

    def call() -> object:
        raise fault

    return call


# Handlers


def test_call_that_returns_wakes_its_reader() -> None:
    harness = DispatcherHarness()
    done = harness.begin(lambda: None)
    assert (done.begun, done.outcome, harness.woken_keys) == (42.0, CallEnded(None), ["s-0"])


@pytest.mark.parametrize("ending", [SystemExit(3), KeyboardInterrupt()])
def test_call_that_ends_the_process_ends_the_worker(ending: BaseException) -> None:
    harness = DispatcherHarness()
    done = harness.begin(raising(ending))
    assert harness.reasons == [ending]
    fault = fault_in(done)
    assert fault is not None
    assert fault.__cause__ is ending


def test_returned_value_or_exception_fails_the_call() -> None:
    """A batch is done only if its handler returned None."""
    harness, fault = DispatcherHarness(), ValueError("poison")
    assert fault_in(harness.begin(raising(fault))) is fault
    assert isinstance(fault_in(harness.begin(lambda: 3)), Unhandled)
    assert isinstance(fault_in(harness.begin(raising(GeneratorExit()))), Unhandled)
    assert harness.reasons == []


def test_task_ending_exception_is_not_a_handler_failure() -> None:
    """A simulated process that is killed has not failed its handler."""
    harness = DispatcherHarness()
    with pytest.raises(Fatal):
        harness.begin(raising(Fatal()))
    assert harness.woken_keys == []


async def _waits(done: Event) -> None:
    done.set()


async def _raises() -> None:
    raise ValueError("later")


def test_awaitable_is_over_once_it_was_awaited() -> None:
    harness, done = DispatcherHarness(), Event()
    handler_call = harness.begin(lambda: _waits(done))
    assert harness.over.wait(WAIT)
    assert (done.is_set(), handler_call.outcome, harness.woken_keys) == (True, CallEnded(None), ["s-0"])
    harness.over.clear()
    handler_call = harness.begin(_raises)
    assert harness.over.wait(WAIT)
    assert isinstance(fault_in(handler_call), ValueError)
    harness.dispatcher.close()


def test_abandoned_awaitable_is_cancelled() -> None:
    harness, begun = DispatcherHarness(), Event()

    async def hangs() -> None:
        begun.set()
        await asyncio.sleep(3600)

    handler_call = harness.begin(hangs)
    assert begun.wait(WAIT)
    # As a check does beyond the limit.
    handler_call.given_up = True
    handler_call.cancel()
    assert harness.over.wait(WAIT)
    assert isinstance(fault_in(handler_call), Unhandled)
    harness.dispatcher.close()


def test_end_of_an_abandoned_handler_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """Waiters for that key learn when it is free and how the call ended."""
    harness = DispatcherHarness()
    late: list[HandlerCall] = []

    def gives_up() -> None:
        late[0].given_up = True

    class Waiting(InlineExecutor):
        """Lets the test see the call before it begins."""

        def start(self, work: Work) -> None:
            (handler_call,) = harness.dispatcher._running.values()  # noqa: SLF001  before the call begins
            late.append(handler_call)
            work()

    harness.executor = harness.dispatcher._executor = Waiting()  # noqa: SLF001  the only replaced part
    with caplog.at_level(logging.WARNING):
        harness.begin(gives_up)
    assert "shard s-0: the handler that was given up has ended: it returned" in caplog.text


def test_finished_call_frees_its_batch() -> None:
    class Batch:
        """A large object."""

    def handles(_batch: Batch) -> None:
        pass

    harness, batch = DispatcherHarness(), Batch()
    gone = weakref.ref(batch)
    gc.disable()
    try:
        handler_call = harness.begin(partial(handles, batch))
        del batch
        assert gone() is None
    finally:
        gc.enable()
    assert handler_call.outcome == CallEnded(None)


# Observers


def test_failing_observer_is_logged_once_by_name(caplog: pytest.LogCaptureFixture) -> None:
    harness = DispatcherHarness()
    for _ in range(2):
        harness.dispatcher.notify("measure", raising(ValueError("no such metric")))
        harness.dispatcher.notify("observer", lambda: 3)  # its return value is ignored
        harness.dispatcher.notify("slow", _raises)  # an async observer would not be awaited
    messages = [record.getMessage() for record in caplog.records]
    assert [line.split(";")[0] for line in messages] == ["the measure failed", "the slow failed"]
    assert "no such metric" in messages[0]
    assert harness.reasons == []


def test_observer_that_ends_the_process_ends_the_worker_and_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Ctrl-C in an observer ends the worker, and is logged once rather than for each remaining shard."""
    harness, first, second = DispatcherHarness(), KeyboardInterrupt("one"), SystemExit("two")
    harness.dispatcher.notify("observer", raising(first))
    harness.dispatcher.notify("observer", raising(second))
    assert harness.reasons == [first, second]
    assert [record.getMessage() for record in caplog.records] == ["the worker ends: KeyboardInterrupt: one"]


def test_task_ending_exception_is_not_an_observer_failure() -> None:
    with pytest.raises(Fatal):
        DispatcherHarness().dispatcher.notify("observer", raising(Fatal()))


def test_handler_task_that_ends_the_process_ends_the_worker() -> None:
    harness, ended = DispatcherHarness(), Event()

    def end(reason: BaseException) -> None:
        harness.reasons.append(reason)
        ended.set()

    harness.dispatcher = Dispatcher(end=end)

    async def leave() -> None:
        raise SystemExit(3)

    tasks: list[asyncio.Task[None]] = []

    async def call() -> None:
        tasks.append(asyncio.create_task(leave()))
        await asyncio.wait(tasks)

    harness.begin(call)
    assert ended.wait(WAIT)
    harness.dispatcher.close()
    assert harness.reasons == [tasks[0].exception()]


# The event loop


@define
class Awaited:
    """An awaitable that ends only when it is cancelled, the thread that awaits it, and its result."""

    thread: SimpleQueue[Thread] = field(factory=SimpleQueue)
    over: SimpleQueue[Exception | None] = field(factory=SimpleQueue)
    loop: EventLoop = field(factory=lambda: EventLoop(lambda _reason: None))

    async def wait(self) -> None:
        self.thread.put(current_thread())
        await asyncio.Event().wait()

    def begin(self) -> tuple[Thread, Callable[[], None]]:
        """Return the thread that awaits it and the function that cancels it."""
        cancel = self.loop.spawn(self.wait(), self.over.put)
        return self.thread.get(timeout=WAIT), cancel


def test_cancelled_call_is_over_with_an_error() -> None:
    awaited = Awaited()
    _, cancel = awaited.begin()
    cancel()
    assert isinstance(awaited.over.get(timeout=WAIT), Unhandled)
    awaited.loop.close()


def test_closed_event_loop_cancels_its_calls_and_ends_its_thread() -> None:
    awaited = Awaited()
    awaited.loop.close()  # the loop has not begun
    thread, cancel = awaited.begin()
    assert (thread.name, thread.daemon) == ("leasehold-loop", True)
    assert awaited.begin()[0] is thread
    awaited.loop.close()
    assert all(isinstance(awaited.over.get(timeout=WAIT), Unhandled) for _ in range(2))
    thread.join(WAIT)
    assert not thread.is_alive()
    awaited.loop.close()
    cancel()


def test_call_abandoned_before_it_returns_is_cancelled_afterwards() -> None:
    harness = DispatcherHarness()

    class Endless:
        """Never ends by itself."""

        def __await__(self) -> Iterator[None]:
            while True:
                yield

    def call() -> object:
        handler_call.given_up = True
        return Endless()

    handler_call = HandlerCall(harness.harness.holding, Handling(lambda _batch: None), lambda: 42.0, call)
    assert harness.dispatcher.begin(handler_call) is None
    assert harness.over.wait(WAIT)
    assert isinstance(fault_in(handler_call), Unhandled)
    harness.dispatcher.close()


def test_coroutine_that_no_loop_awaits_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_args: object) -> Thread:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("leasehold.adapters.consumer.executors.spawn", refused)
    awaited = Awaited()
    unawaited = awaited.wait()
    with pytest.raises(NotAwaited, match=r"^there is no event loop to await it: RuntimeError: can't start new thread$"):
        awaited.loop.spawn(unawaited, awaited.over.put)
    assert inspect.getcoroutinestate(unawaited) == inspect.CORO_CLOSED


def test_event_loop_that_failed_to_start_is_started_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = [OSError("too many open files")]

    def loop() -> asyncio.AbstractEventLoop:
        if faults:
            raise faults.pop()
        return asyncio.new_event_loop()

    monkeypatch.setattr("leasehold.adapters.consumer.executors.new_event_loop", loop)
    awaited = Awaited()
    with pytest.raises(NotAwaited, match=r"^there is no event loop to await it: OSError: too many open files$"):
        awaited.loop.spawn(awaited.wait(), awaited.over.put)
    assert awaited.begin()[0].name == "leasehold-loop"
    awaited.loop.close()


def test_closed_dispatcher_leaves_no_thread() -> None:
    harness, threads = DispatcherHarness(ThreadExecutor(1)), SimpleQueue[Thread]()

    async def handle() -> None:
        threads.put(current_thread())

    def call() -> object:
        threads.put(current_thread())
        return handle()

    harness.begin(call)
    assert harness.over.wait(WAIT)
    harness.dispatcher.close()
    for name in ("leasehold-handle-0", "leasehold-loop"):
        thread = threads.get(timeout=WAIT)
        thread.join(WAIT)
        assert (thread.name, thread.is_alive()) == (name, False)


def test_function_that_blocks_the_event_loop_does_not_keep_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leasehold.adapters.consumer.executors.CLOSE_SECONDS", 0.01)
    awaited, release, ended = Awaited(), Event(), list[bool]()

    async def block() -> None:
        awaited.thread.put(current_thread())
        ended.append(release.wait(WAIT))

    awaited.loop.spawn(block(), awaited.over.put)
    thread = awaited.thread.get(timeout=WAIT)
    awaited.loop.close()
    assert ended == []
    release.set()
    thread.join(WAIT)
    assert (ended, thread.is_alive()) == ([True], False)
