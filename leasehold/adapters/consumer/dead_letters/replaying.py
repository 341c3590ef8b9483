"""Hands dead letters over again, one after the other in the order of their records.

Rule 1: a letter is removed only after its handler is done with it, so that a killed process loses none. Rule 2: a
letter whose handler fails again stays as it is, and the next one follows; so does one that cannot be read.

Hands the letters of a stream over again, under leases of the replay's own.

Rule 1: a letter is behind the checkpoint only after its handler is done with it, or after the stream has acknowledged
it anew. Rule 2: a letter that fails again is put back at the end of the stream, with the attempt counted; what is no
letter is passed. Rule 3: a shard is over at its tip, or in front of the first letter that this replay has put back:
no letter is handed over twice in one replay.
"""

import asyncio
import inspect
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Lock
from typing import Self

from attrs import Factory, evolve, frozen

from leasehold.adapters.consumer.dead_letters.dead_letter import (
    BadDeadLetter,
    DeadLetterEntry,
    dead_letter_from,
    failed_again,
    place_of,
)
from leasehold.adapters.consumer.dead_letters.sinks import DeadLetterSink, ListedDeadLetters
from leasehold.adapters.consumer.handling import Delivery, Handler, Handling, fault_of
from leasehold.adapters.consumer.runner import Runner
from leasehold.adapters.consumer.slices import LOOK_SECONDS, is_read, run_until
from leasehold.adapters.sources.protocol import Batch, PassingSource, Reader, Record, Source
from leasehold.adapters.worker.progress import progress_of
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.model import Lease, Position
from leasehold.errors import DeadLetterError
from leasehold.stores.printable import said

Deliver = Callable[[DeadLetterEntry], Exception | None]
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


def replay(dead_letters: ListedDeadLetters, deliver: Deliver, tell: Tell) -> ReplayVerdict:
    """Hand all letters over, and tell of each that stays.

    Raises LetterError where they cannot be listed, one cannot be removed, or `deliver` raises it; those handed over by
    then are removed.
    """
    names = dead_letters.names()
    places = sorted(place for place in map(place_of, names) if place is not None)
    verdict = ReplayVerdict()
    for name in sorted(set(names) - {place[-1] for place in places}):
        verdict = evolve(verdict, strange=verdict.strange + 1)
        # Left alone: anybody may keep other files in that folder, and nothing of theirs is touched.
        tell(name, "it is named as no letter is")
    for *_, name in places:
        try:
            line = dead_letters.get(name)
            if line is None:  # somebody else has removed it meanwhile
                continue
            dead_letter = dead_letter_from(line)
        except (BadDeadLetter, DeadLetterError) as bad:
            tell(name, f"it is no letter: {bad}" if isinstance(bad, BadDeadLetter) else str(bad))
            verdict = evolve(verdict, strange=verdict.strange + 1)
            continue
        if (fault := deliver(dead_letter)) is not None:
            tell(name, said(fault))
            verdict = evolve(verdict, failed=verdict.failed + 1)
            continue
        # Only now (rule 1): killed before this line, the letter is there and is handed over once more.
        dead_letters.remove(name)
        verdict = evolve(verdict, done=verdict.done + 1)
    return verdict


class HandlerCalls:
    """Calls a handler with the record of a letter, and waits for it; all that it awaits is on one event loop."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._loop = asyncio.Runner()

    def deliver(self, dead_letter: DeadLetterEntry) -> Exception | None:
        """Call the handler. Raises SystemExit and KeyboardInterrupt if the handler does."""
        record = dead_letter.record
        delivery = Delivery(
            (record,),
            record.position,
            None,
            DeadLetterHolding.of(dead_letter),
            None,
            dead_letter.attempts + dead_letter.alone + 1,
        )
        try:
            answer: object = self._handler(delivery)
            if inspect.isawaitable(answer):
                awaitable = answer

                async def awaited() -> object:  # a runner takes coroutines alone
                    return await awaitable

                answer = self._loop.run(awaited())
            return fault_of(answer)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  whatever it is, the letter stays
            return error if isinstance(error, Exception) else RuntimeError(said(error))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        """End the event loop."""
        self._loop.close()


@frozen
class DeadLetterHolding:
    """The lease that a letter's record came by, for its handler: nobody holds it now, so nothing is lost."""

    lease: Lease
    worker: str
    fence: int | None = None
    lost: Event = Factory(Event)

    @classmethod
    def of(cls, dead_letter: DeadLetterEntry) -> Self:
        """The lease by its names."""
        return cls(Lease(dead_letter.lease, stream=dead_letter.stream, shard=dead_letter.shard), dead_letter.worker)

    @property
    def key(self) -> str:
        """The key of the lease."""
        return self.lease.key

    @property
    def stream(self) -> str:
        """The stream's name, as the letter has it."""
        return self.lease.stream

    def checkpoint(self, position: Position) -> bool:  # noqa: ARG002  the letter is removed when its handler is done
        """Nothing is written: there is one record, and its letter goes when it is done."""
        return True


OVER_SECONDS = 1.0
"""Between two readings of a shard that is over: its row goes on telling that it is."""

UNKNOWN_SECONDS = 0.001
"""The least lag of a reading with records: more may have arrived behind them."""


def replay_stream(
    worker: Worker, dead_letters: DeadLetterSink, deliver: Deliver, tell: Tell, *, look_seconds: float = LOOK_SECONDS
) -> ReplayVerdict:
    """Hand over all letters that lie between the checkpoints and the end of the stream.

    worker   its source is a `DeadLetterSource` for its id
    letters  takes those that fail again
    Raises LetterError where a letter could neither be handed over nor put back, or a signal ended it before; SystemExit
    and KeyboardInterrupt if the handler does; and what `run` raises.
    """
    began, calls = time.time(), _DeadLetterCalls(worker.me, dead_letters, deliver, tell)
    runner = Runner(worker, Handling(calls.handle))
    try:
        finished = run_until(runner, lambda: is_read(worker, lambda row: _over(row, began)), look_seconds=look_seconds)
    except SystemExit:
        if calls.broken is None:
            raise
        raise calls.broken from None
    if not finished:
        raise DeadLetterError("it was told to end before all letters were handed over; start it again to go on")
    return calls.verdict


def _over(lease: Lease, began: float) -> bool:
    """Whether the shard is ended, or its owner has told since we began that nothing is left to hand over."""
    told = progress_of(lease)
    fresh = told is not None and told.owner == lease.owner and told.end and (told.read or 0.0) >= began
    return lease.ended or fresh


class _DeadLetterCalls:
    """Hands over the letters of batches, one at a time whatever the shard, and counts what became of them."""

    def __init__(self, me: str, dead_letters: DeadLetterSink, deliver: Deliver, tell: Tell) -> None:
        self._me, self._letters, self._deliver, self._tell = me, dead_letters, deliver, tell
        self._lock = Lock()
        self.verdict = ReplayVerdict()
        self.broken: DeadLetterError | None = None

    def handle(self, batch: Delivery) -> None:
        """Hand over each of them, and checkpoint behind it."""
        for record in batch.records:
            with self._lock:
                verdict = self._handed(record)
                # Counted once the checkpoint is stored: what another owner hands over again would be counted twice.
                if not batch.checkpoint(record):  # whoever has the lease now counts it
                    return
                self.verdict = verdict

    def _handed(self, record: Record) -> ReplayVerdict:
        name, verdict = f"the letter at {record.sequence_number}", self.verdict
        try:
            dead_letter = dead_letter_from(record.data)
            if (fault := self._deliver(dead_letter)) is None:
                return evolve(verdict, done=verdict.done + 1)
            # Before the checkpoint that follows: a letter that is in neither place would be lost (rule 2).
            self._letters.put(failed_again(dead_letter, fault, worker=self._me, now=time.time()))
        except BadDeadLetter as bad:
            self._tell(name, f"it is no letter: {bad}")
            return evolve(verdict, strange=verdict.strange + 1)
        except DeadLetterError as broken:
            self.broken = broken
            raise SystemExit(1) from broken  # the worker ends in good order
        self._tell(name, f"{type(fault).__name__}: {fault}")
        return evolve(verdict, failed=verdict.failed + 1)


class DeadLetterSource(PassingSource):
    """A stream of letters whose shards are over in front of the first letter that worker `me` has put back."""

    def __init__(self, source: Source, me: str) -> None:
        super().__init__(source)
        self._me = me

    def open(self, lease: Lease, start: Position) -> "DeadLetterReader":
        """A reader that starts just after `start`."""
        return DeadLetterReader(super().open(lease, start), self._me)


class DeadLetterReader:
    """Reads one shard up to the first letter that worker `me` has put back."""

    def __init__(self, reader: Reader, me: str) -> None:
        self._reader, self._me, self._over = reader, me, False

    def read(self) -> Batch:
        """Read once, unless it is over. Raises what the reader of the stream raises."""
        if self._over:
            return Batch((), None, 0.0, OVER_SECONDS)
        batch = self._reader.read()
        mine: int | None = None
        for place, record in enumerate(batch.records):
            with suppress(BadDeadLetter):
                if dead_letter_from(record.data).worker == self._me:
                    mine = place
                    break
        if mine is None:  # only a reading that brings nothing shows that nothing is left
            return evolve(batch, behind_seconds=batch.behind_seconds or UNKNOWN_SECONDS) if batch.records else batch
        # Behind it lie only letters that failed in this very replay: read on, it would never end (rule 3).
        self._over, kept = True, batch.records[:mine]
        read_to = kept[-1].position if kept else None
        return evolve(batch, records=kept, read_to=read_to, behind_seconds=0.0, ended=False, in_columns=None)

    def close(self) -> None:
        """Close the reader."""
        self._reader.close()
