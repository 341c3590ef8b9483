"""Calls a worker's handlers in threads or on an event loop, and reports how each call ended.

To dispatch a batch, a lease reader calls `Dispatcher.begin`. The executor then runs `Dispatcher._run_call` in one of
its threads, which calls the handler. If the handler returns an awaitable, it is awaited on the worker's one event loop.
When the call ends, `Dispatcher._finish_call` stores the outcome and wakes the lease reader, which gets the outcome from
`Dispatcher.check`.

1. A lease has at most one call at a time. A call that was given up counts until it ends. So in this process, two
   handlers never run for one shard at the same time.
2. Whatever a call raises or returns, its outcome is stored and the lease reader is woken.
3. `check` never waits. It returns a `CallState`, on which the lease reader acts.
4. If one of the user's callbacks raises an exception (`notify`), the reader continues. Only the first exception of each
   callback is logged.
"""

import inspect
import logging
from collections.abc import Callable
from functools import partial
from threading import Lock

from attrs import define, frozen

from leasehold.adapters.consumer.executors import EventLoop, HandlerExecutor, InlineExecutor, Work
from leasehold.adapters.consumer.handling import Ending, Handling, Unhandled, Withdrawn, as_exception, fault_in_result
from leasehold.adapters.processes import Origin
from leasehold.adapters.worker.holding import Holding
from leasehold.stores.printable import error_summary, make_safe_logger

log = make_safe_logger(logging.getLogger("leasehold.handling"))
handler_log = make_safe_logger(logging.getLogger("leasehold.reading"))

Call = Callable[[], object]


@frozen
class Running:
    """The call waits for a thread or is running. Check it again at the time `due`, or when the reader is woken."""

    due: float


@frozen
class CallEnded:
    """The call has ended. `fault` is None if it succeeded."""

    fault: Exception | None


@frozen
class NotBegun:
    """The lease had expired when a thread became free, so the handler was not called.

    Only a renewal shows who owns the lease now.
    """


@frozen
class LeaseLost:
    """The lease is lost. The handler was not called, or the lease reader no longer waits for it."""


@frozen
class GivenUp:
    """This worker cannot handle the records, for the given reason, so it must release the lease."""

    reason: str


CallState = Running | CallEnded | NotBegun | LeaseLost | GivenUp


@define(eq=False)
class HandlerCall:
    """One call of a handler for a held lease.

    Attributes:
        holding: The held lease.
        handling: The handler and its policy.
        clock: The worker's clock.
        call: Calls the handler.
        is_final: Whether the call must be made even if the lease is to be released.
        began_at: When the call began, by the worker's clock; None while it waits for a thread.
        warned_seconds: The running time of the call when it was last logged as slow; 0 before that.
        given_up: Whether the lease reader no longer waits for the call.
        outcome: How the call ended; None until then.
        work: The function that the executor runs, which also identifies the call.
        cancel: Cancels the call if it is being awaited.
    """

    holding: Holding
    handling: Handling
    clock: Callable[[], float]
    call: Call
    is_final: bool = False
    began_at: float | None = None
    warned_seconds: float = 0.0
    given_up: bool = False
    outcome: CallState | None = None
    work: Work = lambda: None
    cancel: Callable[[], None] = lambda: None


class Dispatcher:
    """Calls the handlers of one worker.

    Args:
        executor: Where to call the handlers; by default immediately, in the caller's thread.
        wake: Called with a lease's key when its call has ended.
        end_worker: Called with the reason if the worker must end.
        fatal: The exceptions with which the worker's scheduler ends its tasks. They propagate, and are never treated as
            failures of a handler.
    """

    def __init__(
        self,
        executor: HandlerExecutor | None = None,
        *,
        wake: Callable[[str], None] = lambda _key: None,
        end_worker: Callable[[BaseException], None] = lambda _reason: None,
        fatal: tuple[type[BaseException], ...] = (),
    ) -> None:
        self._executor: HandlerExecutor = executor or InlineExecutor()
        self._wake, self._end_worker, self._fatal = wake, end_worker, fatal
        self._loop = EventLoop(self.end_worker)
        self._origin = Origin()
        self._lock = Lock()
        self._running: dict[str, HandlerCall] = {}
        self._logged_callbacks: set[str] = set()

    def begin(self, handler_call: HandlerCall) -> GivenUp | None:
        """Queue this call for a free thread, and return None. If that is not possible, return the reason."""
        handler_call.work, key = partial(self._run_call, handler_call), handler_call.holding.key
        with self._lock:
            # A call that was given up stays in `_running` until it ends, because its thread cannot be stopped. A second
            # handler would process the shard's records out of order (rule 1).
            if key in self._running:
                return GivenUp("a handler that was given up is still running")
            self._running[key] = handler_call
        try:
            self._executor.start(handler_call.work)
        except RuntimeError as error:
            # A worker that has no thread for its handlers must not keep its leases.
            del self._running[key]
            self.end_worker(error)
            return GivenUp(f"no thread could be started: {error}")
        return None

    def _run_call(self, handler_call: HandlerCall) -> None:
        holding = handler_call.holding
        handler_call.began_at = handler_call.clock()
        # If the batch has waited long for this thread, another worker may own the lease by now.
        if holding.lost.is_set():
            self._finish_call(handler_call, LeaseLost())
            return
        if holding.expired:
            self._finish_call(handler_call, NotBegun())
            return
        try:
            result = handler_call.call()
            if inspect.isawaitable(result):
                handler_call.cancel = self._loop.spawn(
                    result, lambda fault: self._finish_call(handler_call, CallEnded(fault))
                )
                if handler_call.given_up:  # the call was given up before `cancel` was set
                    handler_call.cancel()
                return
            fault = None if result is None else fault_in_result(result)
        except self._fatal:
            raise  # the scheduler is ending this task
        except BaseException as error:  # noqa: BLE001  any other exception fails the batch
            self._finish_call(handler_call, CallEnded(as_exception(error)))
        else:
            self._finish_call(handler_call, CallEnded(fault))

    def _finish_call(self, handler_call: HandlerCall, outcome: CallState) -> None:
        fault = outcome.fault if isinstance(outcome, CallEnded) else None
        self._origin.end_forked_copy(_original_error(fault))
        key = handler_call.holding.key
        # Remove the call before waking the lease reader. Otherwise, its next batch would be rejected.
        del self._running[key]
        # Break the reference cycle so that the batch is freed now, not at the next garbage collection.
        handler_call.call = handler_call.work = lambda: None
        handler_call.outcome = outcome
        try:
            if isinstance(fault, Ending):
                self.end_worker(fault.__cause__ or fault)
        finally:
            self._wake(key)
        if handler_call.given_up:
            log.warning("shard %s: the handler that was given up has ended: %s", key, fault or "it returned")

    def check(self, handler_call: HandlerCall, now: float) -> CallState:
        """Give up the call if it has taken too long. Return the call's state, which is final unless it is `Running`."""
        # Check the outcome first, so that a handler that has finished is not given up for being slow.
        if handler_call.outcome is not None:
            return handler_call.outcome
        holding, handling = handler_call.holding, handler_call.handling
        slow_seconds, limit_seconds = handling.slow_seconds, handling.handler_seconds
        if handler_call.began_at is None:
            # The executor may begin the call late or never. For example, a program that iterates over batches may take
            # the next batch at any time.
            is_lost = holding.lost.is_set()
            if (is_lost or (holding.releasing and not handler_call.is_final)) and self._withdraw(handler_call):
                return LeaseLost() if is_lost else CallEnded(Withdrawn("its lease is wanted, and no handler has begun"))
            # If all threads hang, perhaps none will ever become free. Another worker may have a free thread.
            if self._executor.stuck and self._withdraw(handler_call):
                return GivenUp("no thread is free for its records: all threads hang in handlers")
            return Running(now + min(slow_seconds, limit_seconds))
        running_seconds = now - handler_call.began_at
        # Log a slow handler each time its duration has doubled. A single line could be overlooked, and one line per
        # check would fill the log.
        if running_seconds >= max(slow_seconds, 2 * handler_call.warned_seconds):
            handler_call.warned_seconds = running_seconds
            self._executor.replace_slow_thread(handler_call.work)  # other calls may be waiting for a thread
            handler_log.warning(
                "shard %s: its handler has been at work on one batch for %.1f s", holding.key, running_seconds
            )
            self.notify("slow", handling.slow, holding, running_seconds)
        # If the lease is lost, wait for the call for up to `slow_seconds`, because its checkpoint may still be written
        # (`late_checkpoints`), and because this worker cannot read the shard again until the call has ended.
        is_lost = holding.lost.is_set()
        if running_seconds >= limit_seconds or (running_seconds >= slow_seconds and is_lost):
            # Stop waiting for the call. An awaited call is cancelled; a call in a thread cannot be cancelled, and keeps
            # running.
            handler_call.given_up = True
            handler_call.cancel()
            if is_lost:
                return LeaseLost()
            return GivenUp(
                f"its handler has been at work for {running_seconds:.1f} s, and {limit_seconds:g} s is the limit"
            )
        return Running(handler_call.began_at + min(max(slow_seconds, 2 * handler_call.warned_seconds), limit_seconds))

    def _withdraw(self, handler_call: HandlerCall) -> bool:
        is_withdrawn = self._executor.withdraw(handler_call.work)
        if is_withdrawn:
            del self._running[handler_call.holding.key]
        return is_withdrawn

    def notify(self, name: str, callback: Callable[..., object], *arguments: object) -> None:
        """Call one of the user's callbacks. If it raises exceptions, log only the first one."""
        fault: Exception | None = None
        try:
            result = callback(*arguments)
            if inspect.isawaitable(result):
                fault = fault_in_result(result)
        except self._fatal:
            raise
        except BaseException as error:  # noqa: BLE001  the reader continues after any exception
            fault = as_exception(error)
        self._origin.end_forked_copy(_original_error(fault))
        if isinstance(fault, Ending):
            self.end_worker(fault.__cause__ or fault)
        elif fault is not None and name not in self._logged_callbacks:
            self._logged_callbacks.add(name)
            log.error("the %s failed; this is said once, and reading goes on: %s", name, fault, exc_info=fault)

    def end_worker(self, reason: BaseException) -> None:
        """Drain and end the worker for the given reason."""
        self._end_worker(reason)
        if "end" not in self._logged_callbacks:
            self._logged_callbacks.add("end")
            log.error("the worker ends: %s", error_summary(reason))

    def close(self) -> None:
        """End the event loop and the idle threads, without waiting for calls that hang."""
        self._executor.close()
        self._loop.close()


def _original_error(fault: Exception | None) -> BaseException | None:
    """Return the exception that the user's function raised, which `fault` may wrap."""
    return fault.__cause__ or fault if isinstance(fault, Unhandled) else fault
