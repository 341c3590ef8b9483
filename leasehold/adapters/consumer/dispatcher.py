"""Calls of a worker's handlers: begun in threads or on an event loop, looked after without waiting, ended or given up.

The way of one batch: its reader asks `Dispatcher.begin`. The executor has `Dispatcher._work` call the handler in one of
its threads. If the handler returns an awaitable, it is awaited on the worker's one event loop. At the end
`Dispatcher._ended` keeps the fault, or None, and schedules the reader, which finds it by `Dispatcher.look`.

Rule 1: one call of a lease at a time, a call that was given up included: no shard has two handlers at work here.
Rule 2: whatever a call raises or returns, it ends with a fault or none, and the lease's reading is called again.
Rule 3: a look never waits. What it finds is one of a closed union, and the lease's reading acts on it.
Rule 4: an onlooker of a user cannot break reading or leaving; its faults are logged once.
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
    """The call waits for a thread, or is at work; look again at `due`, or when called."""

    due: float


@frozen
class CallEnded:
    """The call has ended, with a fault or without."""

    fault: Exception | None


@frozen
class NotBegun:
    """The lease had expired by the time a thread was free: nothing was handed over, and a renewal shows who owns it."""


@frozen
class LeaseLost:
    """The lease is lost, and its handler has not begun or is not waited for any longer."""


@frozen
class GivenUp:
    """The lease must go to another worker, for this reason."""

    why: str


Found = AtWork | CallEnded | NotBegun | LeaseLost | GivenUp


@define(eq=False)
class Handover:
    """A call for one held lease, from when it is asked for until it has ended.

    last      whether it is to be made also where the lease is wanted elsewhere
    begun     when it began, by the worker's clock; None while it waits for a thread
    said      how long it had been at work when that was last said
    found     how it ended; None before
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
    """All calls of one worker's handlers.

    executor  where they are called; at once and in the caller's thread, if left out
    again     called with a lease's key when a call of it has ended
    end       called with the reason why the worker must end
    fatal     what ends a task of the worker's scheduler, and is never taken for a call's fault
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
        """Make this call when there is a thread; or why it cannot be made."""
        handover.work, key = partial(self._work, handover), handover.holding.key
        with self._lock:
            # A call that was given up keeps its key until it ends: its thread cannot be stopped, and two handlers at
            # work on one shard would handle it out of order (rule 1).
            if key in self._at_work:
                return GivenUp("a handler that was given up is still at work on it")
            self._at_work[key] = handover
        try:
            self._executor.start(handover.work)
        except RuntimeError as error:
            # A worker without a thread for its handlers reads nothing, and must not go on holding leases.
            del self._at_work[key]
            self.end(error)
            return GivenUp(f"no thread could be started: {error}")
        return None

    def _work(self, handover: Handover) -> None:
        holding = handover.holding
        handover.begun = handover.clock()
        # The batch may have waited for this thread for so long that another worker owns the lease, or may own it.
        if holding.lost.is_set():
            self._ended(handover, LeaseLost())
            return
        if holding.expired:
            self._ended(handover, NotBegun())
            return
        try:
            answer = handover.call()
            if inspect.isawaitable(answer):
                handover.cancel = self._loop.spawn(answer, lambda fault: self._ended(handover, CallEnded(fault)))
                if handover.given_up:  # before there was anything to cancel
                    handover.cancel()
                return
            fault = None if answer is None else fault_of(answer)
        except self._fatal:
            raise  # the task itself ends, and with it all that is here
        except BaseException as error:  # noqa: BLE001  whatever is raised, it is the batch that failed
            self._ended(handover, CallEnded(fault_from(error)))
        else:
            self._ended(handover, CallEnded(fault))

    def _ended(self, handover: Handover, found: Found) -> None:
        fault = found.fault if isinstance(found, CallEnded) else None
        self._origin.end_copy(_raised(fault))
        key = handover.holding.key
        # The key is free before the reading is called again, or its next batch would be refused.
        del self._at_work[key]
        # The call and the work hold the batch, and each other: it would stay until the next collection of garbage.
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
        """Look after the call; anything but `AtWork` is found once, and nobody looks again."""
        # Its end counts before anything else: a handler that has finished is not given up for having been slow.
        if handover.found is not None:
            return handover.found
        holding, handling = handover.holding, handover.handling
        slow, most = handling.slow_seconds, handling.handler_seconds
        if handover.begun is None:
            # Whoever calls handlers may come to it late, or never: a consumer that iterates asks when it likes.
            lost = holding.lost.is_set()
            if (lost or (holding.releasing and not handover.last)) and self._withdrawn(handover):
                return LeaseLost() if lost else CallEnded(Withdrawn("its lease is wanted, and no handler has begun"))
            # Another worker may have threads: a batch that waits for a thread that never comes is read by nobody.
            if self._executor.stuck and self._withdrawn(handover):
                return GivenUp("no thread is free to hand its records over: as many as there may be hang in handlers")
            return AtWork(now + min(slow, most))
        seconds = now - handover.begun
        # Each time it has doubled: once would be overlooked, and every look would fill the log.
        if seconds >= max(slow, 2 * handover.said):
            handover.said = seconds
            self._executor.replace(handover.work)  # others wait for its thread
            handler_log.warning("shard %s: its handler has been at work on one batch for %.1f s", holding.key, seconds)
            self.notify("slow", handling.slow, holding, seconds)
        # Of a lost lease the end is waited for a while: it may still move the checkpoint (`late_checkpoints`), and the
        # next holding of this lease can begin only behind it.
        lost = holding.lost.is_set()
        if seconds >= most or (seconds >= slow and lost):
            # It is waited for no longer. An awaited call is cancelled; a thread cannot be.
            handover.given_up = True
            handover.cancel()
            if lost:
                return LeaseLost()
            return GivenUp(f"its handler has been at work for {seconds:.1f} s, and {most:g} s is the limit")
        return AtWork(handover.begun + min(max(slow, 2 * handover.said), most))

    def _withdrawn(self, handover: Handover) -> bool:
        withdrawn = self._executor.withdraw(handover.work)
        if withdrawn:
            del self._at_work[handover.holding.key]
        return withdrawn

    def notify(self, whom: str, onlooker: Callable[..., object], *told: object) -> None:
        """Call an onlooker; its faults are logged once."""
        fault: Exception | None = None
        try:
            answer = onlooker(*told)
            if inspect.isawaitable(answer):
                fault = fault_of(answer)
        except self._fatal:
            raise
        except BaseException as error:  # noqa: BLE001  reading goes on, whatever it is
            fault = fault_from(error)
        self._origin.end_copy(_raised(fault))
        if isinstance(fault, Ending):
            self.end(fault.__cause__ or fault)
        elif fault is not None and whom not in self._logged:
            self._logged.add(whom)
            log.error("the %s failed; this is said once, and reading goes on: %s", whom, fault, exc_info=fault)

    def end(self, reason: BaseException) -> None:
        """Have the worker end in good order, saying why."""
        self._end(reason)
        if "end" not in self._logged:
            self._logged.add("end")
            log.error("the worker ends: %s", said(reason))

    def close(self) -> None:
        """End the event loop and idle threads; nothing is waited for that hangs."""
        self._executor.close()
        self._loop.close()


def _raised(fault: Exception | None) -> BaseException | None:
    """Return what the user's function raised, which `fault` may wrap."""
    return fault.__cause__ or fault if isinstance(fault, Unhandled) else fault
