"""Calls of handlers, from start to end, and calls of observers."""

import asyncio
import gc
import inspect
import logging
import subprocess
import sys
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


class TaskEnded(BaseException):
    """Raised to end a task of the scheduler, as when a simulated process is killed."""


@define
class DispatcherHarness:
    """A dispatcher that records the readers it woke and the reasons it gave for ending the worker."""

    executor: InlineExecutor | ThreadExecutor = field(factory=InlineExecutor)
    woken_keys: list[str] = field(factory=list)
    reasons: list[BaseException] = field(factory=list)
    over: Event = field(factory=Event)
    harness: ReaderHarness = field(factory=ReaderHarness)
    dispatcher: Dispatcher = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.dispatcher = Dispatcher(self.executor, wake=self._wake, end_worker=self.reasons.append, fatal=(TaskEnded,))

    def _wake(self, key: str) -> None:
        self.woken_keys.append(key)
        self.over.set()

    def begin(self, call: Callable[[], object]) -> HandlerCall:
        handler_call = HandlerCall(self.harness.holding, Handling(lambda _batch: None), lambda: 42.0, call)
        assert self.dispatcher.begin(handler_call) is None
        return handler_call


def fault_of_finished_call(handler_call: HandlerCall) -> Exception | None:
    """Return the fault of a finished call, or None if it succeeded."""
    assert isinstance(handler_call.outcome, CallEnded)
    return handler_call.outcome.fault


def raising(fault: BaseException) -> Callable[[], object]:
    """Return a handler or observer that raises this exception."""

    def call() -> object:
        raise fault

    return call


# Handlers


def test_call_that_returns_wakes_its_reader() -> None:
    harness = DispatcherHarness()
    handler_call = harness.begin(lambda: None)
    assert (handler_call.began_at, handler_call.outcome, harness.woken_keys) == (42.0, CallEnded(None), ["s-0"])


@pytest.mark.parametrize("ending", [SystemExit(3), KeyboardInterrupt()])
def test_call_that_ends_the_process_ends_the_worker(ending: BaseException) -> None:
    harness = DispatcherHarness()
    handler_call = harness.begin(raising(ending))
    assert harness.reasons == [ending]
    fault = fault_of_finished_call(handler_call)
    assert fault is not None
    assert fault.__cause__ is ending


def test_reader_is_woken_even_if_the_worker_cannot_be_ended() -> None:
    harness = DispatcherHarness()

    def fail(_reason: BaseException) -> None:
        raise OSError("no thread")

    harness.dispatcher = Dispatcher(wake=harness.woken_keys.append, end_worker=fail)
    with pytest.raises(OSError, match="no thread"):
        harness.begin(raising(SystemExit(3)))
    assert harness.woken_keys == ["s-0"]


def test_returned_value_or_exception_fails_the_call() -> None:
    """A batch is done only if its handler returned None."""
    harness, fault = DispatcherHarness(), ValueError("poison")
    assert fault_of_finished_call(harness.begin(raising(fault))) is fault
    assert isinstance(fault_of_finished_call(harness.begin(lambda: 3)), Unhandled)
    assert isinstance(fault_of_finished_call(harness.begin(raising(GeneratorExit()))), Unhandled)
    assert harness.reasons == []


def test_task_ending_exception_is_not_a_handler_failure() -> None:
    """If a simulated process is killed, this does not count as a failure of its handler."""
    harness = DispatcherHarness()
    with pytest.raises(TaskEnded):
        harness.begin(raising(TaskEnded()))
    assert harness.woken_keys == []


async def _waits(call_began: Event) -> None:
    call_began.set()


async def _raises() -> None:
    raise ValueError("later")


def test_awaitable_is_over_once_it_was_awaited() -> None:
    harness, was_awaited = DispatcherHarness(), Event()
    handler_call = harness.begin(lambda: _waits(was_awaited))
    assert harness.over.wait(WAIT)
    assert (was_awaited.is_set(), handler_call.outcome, harness.woken_keys) == (True, CallEnded(None), ["s-0"])
    harness.over.clear()
    handler_call = harness.begin(_raises)
    assert harness.over.wait(WAIT)
    assert isinstance(fault_of_finished_call(handler_call), ValueError)
    harness.dispatcher.close()


def test_abandoned_awaitable_is_cancelled() -> None:
    harness, handler_began = DispatcherHarness(), Event()

    async def hangs() -> None:
        handler_began.set()
        await asyncio.sleep(3600)

    handler_call = harness.begin(hangs)
    assert handler_began.wait(WAIT)
    # The dispatcher's check does this if a call exceeds the limit.
    handler_call.given_up = True
    handler_call.cancel()
    assert harness.over.wait(WAIT)
    assert isinstance(fault_of_finished_call(handler_call), Unhandled)
    harness.dispatcher.close()


def test_end_of_an_abandoned_handler_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """The log tells users when the shard can be read again, and how the call ended."""
    harness = DispatcherHarness()
    abandoned_calls: list[HandlerCall] = []

    def mark_as_given_up() -> None:
        abandoned_calls[0].given_up = True

    class CallRecordingExecutor(InlineExecutor):
        """An executor that passes the call to the test before the call begins."""

        def start(self, work: Work) -> None:
            (handler_call,) = harness.dispatcher._running.values()  # noqa: SLF001  the test needs the new call
            abandoned_calls.append(handler_call)
            work()

    harness.executor = harness.dispatcher._executor = CallRecordingExecutor()  # noqa: SLF001  the only replaced part
    with caplog.at_level(logging.WARNING):
        harness.begin(mark_as_given_up)
    assert "shard s-0: the handler that was given up has ended: it returned" in caplog.text


def test_finished_call_frees_its_batch() -> None:
    class Batch:
        """A stand-in for a large batch."""

    def handles(_batch: Batch) -> None:
        pass

    harness, batch = DispatcherHarness(), Batch()
    batch_reference = weakref.ref(batch)
    gc.disable()
    try:
        handler_call = harness.begin(partial(handles, batch))
        del batch
        assert batch_reference() is None
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
    """Ctrl-C in an observer ends the worker. It is logged once, and not for each remaining shard."""
    harness, first_reason, second_reason = DispatcherHarness(), KeyboardInterrupt("one"), SystemExit("two")
    harness.dispatcher.notify("observer", raising(first_reason))
    harness.dispatcher.notify("observer", raising(second_reason))
    assert harness.reasons == [first_reason, second_reason]
    assert [record.getMessage() for record in caplog.records] == ["the worker ends: KeyboardInterrupt: one"]


def test_task_ending_exception_is_not_an_observer_failure() -> None:
    with pytest.raises(TaskEnded):
        DispatcherHarness().dispatcher.notify("observer", raising(TaskEnded()))


FORKING_OBSERVER = """
import os
from leasehold.adapters.consumer.dispatcher import Dispatcher

parent = os.getpid()

def observer():
    if os.fork():
        print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)

Dispatcher().notify("observer", observer)
os._exit(0 if os.getpid() == parent else 9)
"""


def test_child_forked_by_an_observer_ends_when_it_returns() -> None:
    """The child has none of the worker's other threads, so it does not go on as a copy of the worker."""
    result = subprocess.run([sys.executable, "-c", FORKING_OBSERVER], capture_output=True, text=True, check=True)
    assert result.stdout == "0\n"


def test_handler_task_that_ends_the_process_ends_the_worker() -> None:
    harness, worker_ended = DispatcherHarness(), Event()

    def record_reason(reason: BaseException) -> None:
        harness.reasons.append(reason)
        worker_ended.set()

    harness.dispatcher = Dispatcher(end_worker=record_reason)

    async def raise_system_exit() -> None:
        raise SystemExit(3)

    tasks: list[asyncio.Task[None]] = []

    async def call() -> None:
        tasks.append(asyncio.create_task(raise_system_exit()))
        await asyncio.wait(tasks)

    harness.begin(call)
    assert worker_ended.wait(WAIT)
    harness.dispatcher.close()
    assert harness.reasons == [tasks[0].exception()]


# The event loop


@define
class EndlessAwaitable:
    """Awaits an event that never occurs, and records the awaiting thread and the result of the cancelled call."""

    thread: SimpleQueue[Thread] = field(factory=SimpleQueue)
    over: SimpleQueue[Exception | None] = field(factory=SimpleQueue)
    loop: EventLoop = field(factory=lambda: EventLoop(lambda _reason: None))

    async def wait(self) -> None:
        self.thread.put(current_thread())
        await asyncio.Event().wait()

    def begin(self) -> tuple[Thread, Callable[[], None]]:
        """Start the call, and return the thread that awaits it and a function that cancels it."""
        cancel = self.loop.spawn(self.wait(), self.over.put)
        return self.thread.get(timeout=WAIT), cancel


def test_cancelled_call_is_over_with_an_error() -> None:
    endless_call = EndlessAwaitable()
    _, cancel = endless_call.begin()
    cancel()
    assert isinstance(endless_call.over.get(timeout=WAIT), Unhandled)
    endless_call.loop.close()


def test_closed_event_loop_cancels_its_calls_and_ends_its_thread() -> None:
    endless_call = EndlessAwaitable()
    endless_call.loop.close()  # the loop has not begun
    thread, cancel = endless_call.begin()
    assert (thread.name, thread.daemon) == ("leasehold-loop", True)
    assert endless_call.begin()[0] is thread
    endless_call.loop.close()
    assert all(isinstance(endless_call.over.get(timeout=WAIT), Unhandled) for _ in range(2))
    thread.join(WAIT)
    assert not thread.is_alive()
    endless_call.loop.close()
    cancel()


def test_call_abandoned_before_it_returns_is_cancelled_afterwards() -> None:
    harness = DispatcherHarness()

    class Endless:
        """An awaitable that ends only when it is cancelled."""

        def __await__(self) -> Iterator[None]:
            while True:
                yield

    def call() -> object:
        handler_call.given_up = True
        return Endless()

    handler_call = HandlerCall(harness.harness.holding, Handling(lambda _batch: None), lambda: 42.0, call)
    assert harness.dispatcher.begin(handler_call) is None
    assert harness.over.wait(WAIT)
    assert isinstance(fault_of_finished_call(handler_call), Unhandled)
    harness.dispatcher.close()


def test_coroutine_that_no_loop_awaits_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse_thread(*_args: object) -> Thread:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("leasehold.adapters.consumer.executors.spawn", refuse_thread)
    endless_call = EndlessAwaitable()
    coroutine = endless_call.wait()
    with pytest.raises(NotAwaited, match=r"^there is no event loop to await it: RuntimeError: can't start new thread$"):
        endless_call.loop.spawn(coroutine, endless_call.over.put)
    assert inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED


def test_event_loop_that_failed_to_start_is_started_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = [OSError("too many open files")]

    def loop() -> asyncio.AbstractEventLoop:
        if faults:
            raise faults.pop()
        return asyncio.new_event_loop()

    monkeypatch.setattr("leasehold.adapters.consumer.executors.new_event_loop", loop)
    endless_call = EndlessAwaitable()
    with pytest.raises(NotAwaited, match=r"^there is no event loop to await it: OSError: too many open files$"):
        endless_call.loop.spawn(endless_call.wait(), endless_call.over.put)
    assert endless_call.begin()[0].name == "leasehold-loop"
    endless_call.loop.close()


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
    endless_call, release, block_results = EndlessAwaitable(), Event(), list[bool]()

    async def block() -> None:
        endless_call.thread.put(current_thread())
        block_results.append(release.wait(WAIT))

    endless_call.loop.spawn(block(), endless_call.over.put)
    thread = endless_call.thread.get(timeout=WAIT)
    endless_call.loop.close()
    assert block_results == []
    release.set()
    thread.join(WAIT)
    assert (block_results, thread.is_alive()) == ([True], False)
