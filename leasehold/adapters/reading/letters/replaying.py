"""Hands dead letters over again, one after the other in the order of their records.

Rule 1: a letter is removed only after its handler is done with it, so that whoever is killed loses none. Rule 2: a
letter whose handler fails again stays as it is, and the next one follows; so does one that cannot be read.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from threading import Event
from typing import Self

from attrs import Factory, evolve, frozen

from leasehold.adapters.reading.handlers.answers import fault_of
from leasehold.adapters.reading.handlers.handling import Delivery, Handler
from leasehold.adapters.reading.letters.boxes import LetterFolder
from leasehold.adapters.reading.letters.letter import BadLetter, Letter, LetterError, letter_of, place_of
from leasehold.balancer.model import Lease, Position
from leasehold.stores.printable import said

Deliver = Callable[[Letter], Exception | None]
"""Hands a letter's record over; answers its fault, None if it is done. Raises LetterError where none can be."""

Tell = Callable[[str, str], None]
"""Called with the name of a letter that stays, and why."""


@frozen
class ReplayVerdict:
    """The outcome of a replay: the number of letters of each kind.

    done    handed over and removed
    failed  handed over, and failed again: they stay
    strange neither letters nor to be read: they stay, and were not handed over
    """

    done: int = 0
    failed: int = 0
    strange: int = 0


def replay(letters: LetterFolder, deliver: Deliver, tell: Tell) -> ReplayVerdict:
    """Hand all letters over, and tell of each that stays.

    Raises LetterError where they cannot be listed, one cannot be removed, or `deliver` raises it; those handed over by
    then are removed.
    """
    names = letters.names()
    places = sorted(place for place in map(place_of, names) if place is not None)
    verdict = ReplayVerdict()
    for name in sorted(set(names) - {place[-1] for place in places}):
        verdict = evolve(verdict, strange=verdict.strange + 1)
        tell(name, "it is named as no letter is")
    for *_, name in places:
        verdict = _handed(letters, name, deliver, tell, verdict)
    return verdict


def _handed(letters: LetterFolder, name: str, deliver: Deliver, tell: Tell, verdict: ReplayVerdict) -> ReplayVerdict:
    try:
        line = letters.get(name)
        if line is None:  # somebody else has removed it meanwhile
            return verdict
        letter = letter_of(line)
    except (BadLetter, LetterError) as bad:
        tell(name, f"it is no letter: {bad}" if isinstance(bad, BadLetter) else str(bad))
        return evolve(verdict, strange=verdict.strange + 1)
    if (fault := deliver(letter)) is not None:
        tell(name, said(fault))
        return evolve(verdict, failed=verdict.failed + 1)
    letters.remove(name)
    return evolve(verdict, done=verdict.done + 1)


class HandlerCalls:
    """Calls a handler with the record of a letter, and waits for it; all that it awaits is on one event loop."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._loop = asyncio.Runner()

    def deliver(self, letter: Letter) -> Exception | None:
        """Call the handler. Raises SystemExit and KeyboardInterrupt if the handler does."""
        record = letter.record
        delivery = Delivery((record,), record.position, None, LetterHolding.of(letter), None, letter.attempts + 1)
        try:
            answer: object = self._handler(delivery)
            if inspect.isawaitable(answer):
                answer = self._loop.run(_awaited(answer))
            return fault_of(answer)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  whatever it is, the letter stays
            return error if isinstance(error, Exception) else RuntimeError(said(error))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        """End the event loop."""
        self._loop.close()


async def _awaited(answer: Awaitable[object]) -> object:
    return await answer


@frozen
class LetterHolding:
    """The lease that a letter's record came by, for its handler: nobody holds it now, so nothing is lost."""

    lease: Lease
    worker: str
    fence: int | None = None
    lost: Event = Factory(Event)

    @classmethod
    def of(cls, letter: Letter) -> Self:
        """The lease by its names."""
        return cls(Lease(letter.lease, stream=letter.stream, shard=letter.shard), letter.worker)

    @property
    def key(self) -> str:
        """The key of the lease."""
        return self.lease.key

    def checkpoint(self, position: Position) -> bool:  # noqa: ARG002  the letter is removed when its handler is done
        """Nothing is written: there is one record, and its letter goes when it is done."""
        return True
