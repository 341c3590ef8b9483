"""Calls of a worker's handlers under way: begun, waited for without holding a reader's thread, or given up.

Rule 1: one call of a lease at a time, a call that was given up included: no shard has two handlers at work here.
Rule 2: whatever a call raises or returns, it ends with a fault or none, and the lease's reading is called again.
Rule 3: an onlooker of a user cannot break reading or leaving; its faults are logged once.
"""

import inspect
import logging
from collections.abc import Callable
from functools import partial
from threading import Lock

from leasehold.adapters.reading.handlers.answers import Ending, fault_from, fault_of
from leasehold.adapters.reading.handlers.event_loop import EventLoop
from leasehold.adapters.reading.handlers.executors import HandlerExecutor, InlineExecutor, Work
from leasehold.stores.printable import escaped, said

log = escaped(logging.getLogger("leasehold.handling"))

Call = Callable[[], object]


class Handover:
    """A call, from when it is asked for until it has ended.

    begun  when it began, by the worker's clock; None while it waits for a thread
    over   whether it has ended, with `fault` or without
    said   how long it had been at work when that was last said
    """

    def __init__(self, key: str, call: Call, clock: Callable[[], float]) -> None:
        self.key, self.call, self.clock = key, call, clock
        self.begun: float | None = None
        self.said = 0.0
        self.over = self.given_up = False
        self.fault: Exception | None = None
        self.work: Work = lambda: None
        self.cancel: Callable[[], None] = lambda: None


class Handovers:
    """All calls of one worker's handlers.

    crew   where they are called; at once and in the caller's thread, if left out
    again  called with a lease's key when a call of it has ended
    end    called with the reason why the worker must end
    fatal  what ends a task of the worker's scheduler, and is never taken for a call's fault
    """

    def __init__(
        self,
        crew: HandlerExecutor | None = None,
        *,
        again: Callable[[str], None] = lambda _key: None,
        end: Callable[[BaseException], None] = lambda _reason: None,
        fatal: tuple[type[BaseException], ...] = (),
    ) -> None:
        self._crew: HandlerExecutor = crew or InlineExecutor()
        self._again, self._end, self._fatal = again, end, fatal
        self._loop = EventLoop(self.end)
        self._lock = Lock()
        self._at_work: dict[str, Handover] = {}
        self._said: set[str] = set()

    @property
    def stuck(self) -> bool:
        """Whether no call can begin, since all threads there may be are slow."""
        return self._crew.stuck

    def begin(self, key: str, call: Call, clock: Callable[[], float]) -> Handover | str:
        """Call this; or why it cannot be called."""
        handover = Handover(key, call, clock)
        handover.work = partial(self._work, handover)
        with self._lock:
            if key in self._at_work:
                return "a handler that was given up is still at work on it"
            self._at_work[key] = handover
        try:
            self._crew.start(handover.work)
        except RuntimeError as error:
            self._forget(handover)
            self.end(error)
            return f"no thread could be started: {error}"
        return handover

    def replace(self, handover: Handover) -> None:
        """Give another thread to the calls that wait for the thread of this slow one."""
        self._crew.replace(handover.work)

    def withdraw(self, handover: Handover) -> bool:
        """Do not call it after all; False if it has begun."""
        withdrawn = self._crew.withdraw(handover.work)
        if withdrawn:
            self._forget(handover)
        return withdrawn

    def give_up(self, handover: Handover) -> None:
        """Wait for the call no longer. An awaited call is cancelled; a thread cannot be."""
        handover.given_up = True
        handover.cancel()

    def tell(self, whom: str, call: Call) -> None:
        """Call an onlooker; its faults are logged once."""
        fault: Exception | None = None
        try:
            answer = call()
            if inspect.isawaitable(answer):
                fault = fault_of(answer)
        except self._fatal:
            raise
        except BaseException as error:  # noqa: BLE001  reading goes on, whatever it is
            fault = fault_from(error)
        if isinstance(fault, Ending):
            self.end(fault.__cause__ or fault)
        elif fault is not None and whom not in self._said:
            self._said.add(whom)
            log.error("the %s failed; this is said once, and reading goes on: %s", whom, fault, exc_info=fault)

    def end(self, reason: BaseException) -> None:
        """Have the worker end in good order, saying why."""
        if "end" not in self._said:
            self._said.add("end")
            log.error("the worker ends: %s", said(reason))
        self._end(reason)

    def close(self) -> None:
        """End the event loop and idle threads; nothing is waited for that hangs."""
        self._crew.close()
        self._loop.close()

    def _work(self, handover: Handover) -> None:
        handover.begun = handover.clock()
        try:
            answer = handover.call()
            if inspect.isawaitable(answer):
                handover.cancel = self._loop.spawn(answer, partial(self._over, handover))
                if handover.given_up:  # before there was anything to cancel
                    handover.cancel()
                return
            fault: Exception | None = fault_of(answer)
        except self._fatal:
            raise
        except BaseException as error:  # noqa: BLE001  whatever is raised, it is the batch that failed
            fault = fault_from(error)
        self._over(handover, fault)

    def _over(self, handover: Handover, fault: Exception | None) -> None:
        if isinstance(fault, Ending):
            self.end(fault.__cause__ or fault)
        self._forget(handover)
        handover.fault = fault
        # They hold the batch, and each other: it would stay until the next collection of garbage.
        handover.call = handover.work = _nothing
        handover.over = True
        if handover.given_up:
            log.warning("shard %s: the handler that was given up has ended: %s", handover.key, fault or "it returned")
        self._again(handover.key)

    def _forget(self, handover: Handover) -> None:
        with self._lock:
            del self._at_work[handover.key]


def _nothing() -> None:
    """The call that is over."""
