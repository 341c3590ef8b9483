"""Looks after the handler of one lease while it is at work, and finds it over, slow, or to be given up.

Rule: a look never waits. What it finds is one of a closed union, and the lease's reading acts on it.
"""

import logging
from collections.abc import Callable
from functools import partial

from attrs import frozen

from leasehold.adapters.reading.handlers.handling import Handling
from leasehold.adapters.reading.handlers.handovers import Call, Handover, Handovers
from leasehold.adapters.worker.holding import Holding
from leasehold.stores.printable import escaped

log = escaped(logging.getLogger("leasehold.reading"))


@frozen
class Later:
    """The call is at work; look again at `due`, or when called."""

    due: float


@frozen
class CallEnded:
    """The call has ended, with a fault or without."""

    fault: Exception | None


@frozen
class LeaseLost:
    """The lease is lost, and its handler has not begun or is not waited for any longer."""


@frozen
class GivenUp:
    """The lease must go to another worker, for this reason."""

    why: str


Found = Later | CallEnded | LeaseLost | GivenUp


class LostBefore(Exception):
    """The lease was lost while its batch waited for a thread: it is not handed over."""


class ExpiredBefore(Exception):
    """The lease expired while its batch waited for a thread: not handed over until a renewal tells who owns it."""


class HandlerWatch:
    """The calls of one lease's handler, one at a time."""

    def __init__(self, handovers: Handovers, handling: Handling, holding: Holding, clock: Callable[[], float]) -> None:
        self._handovers, self._handling, self._holding, self._clock = handovers, handling, holding, clock
        self._handover: Handover | None = None

    @property
    def at_work(self) -> bool:
        """Whether a call is waited for."""
        return self._handover is not None

    def begin(self, call: Call, now: float) -> Found:
        """Begin the call, unless the lease is lost or has expired by the time a thread is free."""

        def while_held() -> object:
            if self._holding.lost.is_set():
                raise LostBefore
            if self._holding.expired:
                raise ExpiredBefore
            return call()

        begun = self._handovers.begin(self._holding.key, while_held, self._clock)
        if isinstance(begun, str):
            return GivenUp(begun)
        self._handover = begun
        return self._look(begun, now)

    def look(self, now: float) -> Found:
        """Look after the call; `LeaseLost` where none is at work."""
        return self._look(self._handover, now) if self._handover else LeaseLost()

    def _look(self, handover: Handover, now: float) -> Found:
        if handover.over:
            self._handover = None
            return _ended(handover.fault, now)
        if handover.begun is None:
            return self._not_begun(handover, now)
        seconds, slow, most = now - handover.begun, self._handling.slow_seconds, self._handling.handler_seconds
        if seconds >= max(slow, 2 * handover.said):
            self._say_slow(handover, seconds)
        if seconds >= most or (seconds >= slow and self._holding.lost.is_set()):
            return self._give_up(handover, seconds)
        return Later(handover.begun + min(max(slow, 2 * handover.said), most))

    def _not_begun(self, handover: Handover, now: float) -> Found:
        if not (self._handovers.stuck and self._handovers.withdraw(handover)):
            return Later(now + min(self._handling.slow_seconds, self._handling.handler_seconds))
        self._handover = None
        return GivenUp("no thread is free to hand its records over: as many as there may be hang in handlers")

    def _say_slow(self, handover: Handover, seconds: float) -> None:
        handover.said = seconds
        log.warning("shard %s: its handler has been at work on one batch for %.1f s", self._holding.key, seconds)
        self._handovers.replace(handover)
        self._handovers.tell("slow", partial(self._handling.slow, self._holding, seconds))

    def _give_up(self, handover: Handover, seconds: float) -> Found:
        self._handover = None
        self._handovers.give_up(handover)
        if self._holding.lost.is_set():
            return LeaseLost()
        limit = self._handling.handler_seconds
        return GivenUp(f"its handler has been at work for {seconds:.1f} s, and {limit:g} s is the limit")


def _ended(fault: Exception | None, now: float) -> Found:
    match fault:
        case LostBefore():
            return LeaseLost()
        case ExpiredBefore():
            return Later(now)
        case _:
            return CallEnded(fault)
