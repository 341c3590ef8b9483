"""Hands the letters of a stream over again, under leases of the replay's own.

Rule 1: a letter is behind the checkpoint only after its handler is done with it, or after the stream has acknowledged
it anew. Rule 2: a letter that fails again is put back at the end of the stream, with the attempt counted; what is no
letter is passed. Rule 3: a shard is over at its tip, or in front of the first letter that this replay has put back:
no letter is handed over twice in one replay.
"""

import time
from threading import Lock

from attrs import evolve

from leasehold.adapters.reading.handlers.handling import Delivery, Handling
from leasehold.adapters.reading.letters.boxes import LetterBox
from leasehold.adapters.reading.letters.letter import BadLetter, LetterError, letter_of, reburied
from leasehold.adapters.reading.letters.replaying import Deliver, ReplayVerdict, Tell
from leasehold.adapters.reading.runner import Runner
from leasehold.adapters.reading.slices.running import LOOK_SECONDS, is_read, run_until
from leasehold.adapters.sources.passing import PassingSource
from leasehold.adapters.sources.protocol import Batch, Reader, Record, Source
from leasehold.adapters.worker.reach import reach_of
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.model import Lease, Position

OVER_SECONDS = 1.0
"""Between two readings of a shard that is over: its row goes on telling that it is."""

UNKNOWN_SECONDS = 0.001
"""How far behind a reading with records counts as at least: more may have arrived behind them."""


def replay_stream(
    worker: Worker, letters: LetterBox, deliver: Deliver, tell: Tell, *, look_seconds: float = LOOK_SECONDS
) -> ReplayVerdict:
    """Hand over all letters that lie between the checkpoints and the end of the stream.

    worker   its source is a `LetterSource` for its id
    letters  takes those that fail again
    Raises LetterError where a letter could neither be handed over nor put back, or a signal ended it before; SystemExit
    and KeyboardInterrupt if the handler does; and what `run` raises.
    """
    began, calls = time.time(), _LetterCalls(worker.me, letters, deliver, tell)
    runner = Runner(worker, Handling(calls.handle))
    try:
        finished = run_until(runner, lambda: is_read(worker, lambda row: _over(row, began)), look_seconds=look_seconds)
    except SystemExit:
        if calls.broken is None:
            raise
        raise calls.broken from None
    if not finished:
        raise LetterError("it was told to end before all letters were handed over; start it again to go on")
    return calls.verdict


def _over(lease: Lease, began: float) -> bool:
    """Whether the shard is ended, or its owner has told since we began that nothing is left to hand over."""
    told = reach_of(lease)
    fresh = told is not None and told.owner == lease.owner and told.end and (told.read or 0.0) >= began
    return lease.ended or fresh


class _LetterCalls:
    """Hands over the letters of batches, one at a time whatever the shard, and counts what became of them."""

    def __init__(self, me: str, letters: LetterBox, deliver: Deliver, tell: Tell) -> None:
        self._me, self._letters, self._deliver, self._tell = me, letters, deliver, tell
        self._lock = Lock()
        self.verdict = ReplayVerdict()
        self.broken: LetterError | None = None

    def handle(self, batch: Delivery) -> None:
        """Hand over each of them, and checkpoint behind it."""
        for record in batch.records:
            with self._lock:
                verdict = self._handed(record)
                if not batch.checkpoint(record):  # whoever has the lease now counts it
                    return
                self.verdict = verdict

    def _handed(self, record: Record) -> ReplayVerdict:
        name, verdict = f"the letter at {record.sequence_number}", self.verdict
        try:
            letter = letter_of(record.data)
            if (fault := self._deliver(letter)) is None:
                return evolve(verdict, done=verdict.done + 1)
            self._letters.put(reburied(letter, fault, worker=self._me, now=time.time()))
        except BadLetter as bad:
            self._tell(name, f"it is no letter: {bad}")
            return evolve(verdict, strange=verdict.strange + 1)
        except LetterError as broken:
            self.broken = broken
            raise SystemExit(1) from broken  # the worker ends in good order
        self._tell(name, f"{type(fault).__name__}: {fault}")
        return evolve(verdict, failed=verdict.failed + 1)


class LetterSource(PassingSource):
    """A stream of letters whose shards are over in front of the first letter that worker `me` has put back."""

    def __init__(self, source: Source, me: str) -> None:
        super().__init__(source)
        self._me = me

    def open(self, lease: Lease, start: Position) -> "LetterReader":
        """A reader that starts just after `start`."""
        return LetterReader(super().open(lease, start), self._me)


class LetterReader:
    """Reads one shard up to the first letter that worker `me` has put back."""

    def __init__(self, reader: Reader, me: str) -> None:
        self._reader, self._me, self._over = reader, me, False

    def read(self) -> Batch:
        """Read once, unless it is over. Raises what the reader of the stream raises."""
        if self._over:
            return Batch((), None, 0.0, OVER_SECONDS)
        batch = self._reader.read()
        mine = next((at for at, record in enumerate(batch.records) if self._mine(record)), None)
        if mine is None:  # only a reading that brings nothing shows that nothing is left
            return evolve(batch, behind_seconds=batch.behind_seconds or UNKNOWN_SECONDS) if batch.records else batch
        self._over, kept = True, batch.records[:mine]
        read_to = kept[-1].position if kept else None
        return evolve(batch, records=kept, read_to=read_to, behind_seconds=0.0, ended=False, in_columns=None)

    def close(self) -> None:
        """Close the reader."""
        self._reader.close()

    def _mine(self, record: Record) -> bool:
        try:
            return letter_of(record.data).worker == self._me
        except BadLetter:
            return False
