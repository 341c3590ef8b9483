"""Calls a worker's handlers in threads or on an event loop, and reports how each call ended.

How a batch is dispatched: its lease reader calls `Dispatcher.begin`. The executor runs `Dispatcher._work` in one of its
threads, which calls the handler. If the handler returns an awaitable, it is awaited on the worker's one event loop. At
the end `Dispatcher._ended` stores the fault, or None, and wakes the lease reader, which gets it from `Dispatcher.look`.

1. A lease has at most one call at a time, including a call that was given up. No shard ever has two handlers running
   in this process.
2. Whatever a call raises or returns, it ends with a fault or without one, and the lease reader is woken.
3. `look` never waits. It returns one of a closed union, and the lease reader acts on it.
4. A user's callback (`notify`) cannot break reading or leaving. Its faults are logged once.
"""

import inspect
import logging
from collections.abc import Callable
from functools import partial
from threading import Lock

from attrs import define, frozen

from leasehold.adapters.consumer.executors import EventLoop, HandlerExecutor, InlineExecutor, Work
from leasehold.adapters.consumer.handling import Ending, Handling, Unhandled, Withdrawn, fault_from, fault_of
from leasehold.adapters.processes import Origin
from leasehold.adapters.worker.holding import Holding
from leasehold.stores.printable import escaped, said

log = escaped(logging.getLogger("leasehold.handling"))
handler_log = escaped(logging.getLogger("leasehold.reading"))

Call = Callable[[], object]


@frozen
class AtWork:
    """The call waits for a thread or is running. Look again at `due`, or when woken."""

    due: float


@frozen
class CallEnded:
    """The call has ended, with a fault or without one."""

    fault: Exception | None


@frozen
class NotBegun:
    """The lease had expired by the time a thread was free. No handler was called; a renewal will show who owns it."""


@frozen
class LeaseLost:
    """The lease is lost, and its handler has not begun or is no longer waited for."""


@frozen
class GivenUp:
    """The lease must go to another worker, for this reason."""

    why: str


Found = AtWork | CallEnded | NotBegun | LeaseLost | GivenUp


@define(eq=False)
class Handover:
    """A call for one held lease, from when it is requested until it has ended.

    Attributes:
        holding: The held lease.
        handling: The handler and its policy.
        clock: The worker's clock.
        call: Calls the handler.
        last: Whether the call is to be made even if the lease is to be released.
        begun: When the call began, by the worker's clock; None while it waits for a thread.
        said: For how long it had been running when that was last logged.
        given_up: Whether it is no longer waited for.
        found: How it ended; None until then.
        work: What the executor runs, by which it also identifies the call.
        cancel: Cancels the call if it is being awaited.
    """

    holding: Holding
    handling: Handling
    clock: Callable[[], float]
    call: Call
    last: bool = False
    begun: float | None = None
    said: float = 0.0
    given_up: bool = False
    found: Found | None = None
    work: Work = lambda: None
    cancel: Callable[[], None] = lambda: None


class Dispatcher:
    """Makes all calls of one worker's handlers.

    Args:
        executor: Where to call the handlers; by default immediately, in the caller's thread.
        again: Called with a lease's key when its call has ended.
        end: Called with the reason if the worker must end.
        fatal: The exceptions that end a task of the worker's scheduler. They always propagate and never count as a
            fault of a call.
    """

    def __init__(
        self,
        executor: HandlerExecutor | None = None,
        *,
        again: Callable[[str], None] = lambda _key: None,
        end: Callable[[BaseException], None] = lambda _reason: None,
        fatal: tuple[type[BaseException], ...] = (),
    ) -> None:
        self._executor: HandlerExecutor = executor or InlineExecutor()
        self._again, self._end, self._fatal = again, end, fatal
        self._loop = EventLoop(self.end)
        self._origin = Origin()
        self._lock = Lock()
        self._at_work: dict[str, Handover] = {}
        self._logged: set[str] = set()

    def begin(self, handover: Handover) -> GivenUp | None:
        """Make this call once a thread is free; return None, or the reason why it cannot be made."""
        handover.work, key = partial(self._work, handover), handover.holding.key
        with self._lock:
            # A call that was given up keeps its key until it ends: its thread cannot be stopped, and two handlers
            # running on one shard would handle it out of order (rule 1).
            if key in self._at_work:
                return GivenUp("a handler that was given up is still at work on it")
            self._at_work[key] = handover
        try:
            self._executor.start(handover.work)
        except RuntimeError as error:
            # A worker without a thread for its handlers must not keep holding leases that it cannot read.
            del self._at_work[key]
            self.end(error)
            return GivenUp(f"no thread could be started: {error}")
        return None

    def _work(self, handover: Handover) -> None:
        holding = handover.holding
        handover.begun = handover.clock()
        # The batch may have waited so long for this thread that another worker owns the lease, or might own it.
        if holding.lost.is_set():
            self._ended(handover, LeaseLost())
            return
        if holding.expired:
            self._ended(handover, NotBegun())
            return
        try:
            result = handover.call()
            if inspect.isawaitable(result):
                handover.cancel = self._loop.spawn(result, lambda fault: self._ended(handover, CallEnded(fault)))
                if handover.given_up:  # while `cancel` was not set yet
                    handover.cancel()
                return
            fault = None if result is None else fault_of(result)
        except self._fatal:
            raise  # the scheduler is ending this task
        except BaseException as error:  # noqa: BLE001  any other exception means that the batch failed
            self._ended(handover, CallEnded(fault_from(error)))
        else:
            self._ended(handover, CallEnded(fault))

    def _ended(self, handover: Handover, found: Found) -> None:
        fault = found.fault if isinstance(found, CallEnded) else None
        self._origin.end_copy(_raised(fault))
        key = handover.holding.key
        # Must come before the lease reader is woken, otherwise its next batch would be rejected.
        del self._at_work[key]
        # Break the reference cycle so that the batch is freed now, not at the next garbage collection.
        handover.call = handover.work = lambda: None
        handover.found = found
        try:
            if isinstance(fault, Ending):
                self.end(fault.__cause__ or fault)
        finally:
            self._again(key)
        if handover.given_up:
            log.warning("shard %s: the handler that was given up has ended: %s", key, fault or "it returned")

    def look(self, handover: Handover, now: float) -> Found:
        """Return the state of the call, after giving it up if it took too long. Only `AtWork` is looked at again."""
        # Must be checked first: a handler that has finished is not given up for having been slow.
        if handover.found is not None:
            return handover.found
        holding, handling = handover.holding, handover.handling
        slow, limit = handling.slow_seconds, handling.handler_seconds
        if handover.begun is None:
            # The executor may begin the call late or never: an iterating consumer asks for a batch when it likes.
            lost = holding.lost.is_set()
            if (lost or (holding.releasing and not handover.last)) and self._withdrawn(handover):
                return LeaseLost() if lost else CallEnded(Withdrawn("its lease is wanted, and no handler has begun"))
            # If no thread will become free here, another worker may have one.
            if self._executor.stuck and self._withdrawn(handover):
                return GivenUp("no thread is free to hand its records over: as many as there may be hang in handlers")
            return AtWork(now + min(slow, limit))
        seconds = now - handover.begun
        # Logged each time the duration has doubled: once would be overlooked, and every look would fill the log.
        if seconds >= max(slow, 2 * handover.said):
            handover.said = seconds
            self._executor.replace(handover.work)  # other calls wait for its thread
            handler_log.warning("shard %s: its handler has been at work on one batch for %.1f s", holding.key, seconds)
            self.notify("slow", handling.slow, holding, seconds)
        # If the lease is lost, wait a while for the call to end: the checkpoint may still move (`late_checkpoints`),
        # and this worker can read the lease again only after the call has ended.
        lost = holding.lost.is_set()
        if seconds >= limit or (seconds >= slow and lost):
            # Stop waiting. An awaited call is cancelled; a thread cannot be.
            handover.given_up = True
            handover.cancel()
            if lost:
                return LeaseLost()
            return GivenUp(f"its handler has been at work for {seconds:.1f} s, and {limit:g} s is the limit")
        return AtWork(handover.begun + min(max(slow, 2 * handover.said), limit))

    def _withdrawn(self, handover: Handover) -> bool:
        withdrawn = self._executor.withdraw(handover.work)
        if withdrawn:
            del self._at_work[handover.holding.key]
        return withdrawn

    def notify(self, whom: str, onlooker: Callable[..., object], *told: object) -> None:
        """Call a user's callback; log its faults once."""
        fault: Exception | None = None
        try:
            result = onlooker(*told)
            if inspect.isawaitable(result):
                fault = fault_of(result)
        except self._fatal:
            raise
        except BaseException as error:  # noqa: BLE001  reading goes on after any exception
            fault = fault_from(error)
        self._origin.end_copy(_raised(fault))
        if isinstance(fault, Ending):
            self.end(fault.__cause__ or fault)
        elif fault is not None and whom not in self._logged:
            self._logged.add(whom)
            log.error("the %s failed; this is said once, and reading goes on: %s", whom, fault, exc_info=fault)

    def end(self, reason: BaseException) -> None:
        """Have the worker drain and end, for this reason."""
        self._end(reason)
        if "end" not in self._logged:
            self._logged.add("end")
            log.error("the worker ends: %s", said(reason))

    def close(self) -> None:
        """End the event loop and the idle threads, without waiting for calls that hang."""
        self._executor.close()
        self._loop.close()


def _raised(fault: Exception | None) -> BaseException | None:
    """Return the exception that the user's function raised, which `fault` may wrap."""
    return fault.__cause__ or fault if isinstance(fault, Unhandled) else fault
