"""Replays dead letters, one after another, from a folder or bucket (`replay`) or from a stream (`replay_stream`).

Dead letters in a folder or bucket are replayed in the order of their records:

- A dead letter is removed only after its handler is done with it, so none is lost if the process is killed.
- If the handler fails again, or the dead letter cannot be read, the dead letter is kept, and the next one is replayed.

Dead letters in a stream are replayed by a worker with its own leases:

1. The checkpoint moves past a dead letter only after its handler is done with it, or after it was put back into the
   stream.
2. If the handler fails again, the dead letter is put back at the end of the stream, with an increased number of
   attempts. A record that is not a dead letter is skipped.
3. The replay of a shard ends at the shard's tip, or before the first dead letter that this replay has put back. This
   way, no dead letter is replayed twice.
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
    sort_key_of,
    with_failed_attempt,
)
from leasehold.adapters.consumer.dead_letters.sinks import DeadLetterSink, ListedDeadLetters
from leasehold.adapters.consumer.handling import Delivery, Handler, Handling, fault_in_result
from leasehold.adapters.consumer.runner import Runner
from leasehold.adapters.consumer.slices import LOOK_SECONDS, is_read, run_until
from leasehold.adapters.sources.protocol import Batch, ForwardingSource, Reader, Record, Source
from leasehold.adapters.worker.progress import progress_of
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.model import Lease, Position
from leasehold.errors import DeadLetterError
from leasehold.stores.printable import error_summary

CallHandler = Callable[[DeadLetterEntry], Exception | None]
"""Calls the handler with the record of a dead letter. Returns the handler's error, or None if it succeeded.

Raises DeadLetterError if the replay must stop, because no other record can be replayed either.
"""

KeptCallback = Callable[[str, str], None]
"""A callback for each dead letter that is not removed. It receives the dead letter's name and the reason."""


@frozen
class ReplayVerdict:
    """The outcome of a replay. Each attribute is a number of dead letters.

    Attributes:
        done: Dead letters that were handled and removed.
        failed: Dead letters that failed again and were kept.
        strange: Entries that could not be read or are not dead letters, and were kept.
    """

    done: int = 0
    failed: int = 0
    strange: int = 0


def replay(dead_letters: ListedDeadLetters, deliver: CallHandler, report_kept: KeptCallback) -> ReplayVerdict:
    """Replay all dead letters.

    Args:
        dead_letters: Where the dead letters are stored.
        deliver: Calls the handler with a dead letter's record.
        report_kept: Called with each dead letter that is kept, and the reason.

    Raises:
        DeadLetterError: The dead letters cannot be listed, one cannot be removed, or `deliver` raised it. The dead
            letters that were handled before have been removed.
    """
    names = dead_letters.names()
    sort_keys = sorted(sort_key for sort_key in map(sort_key_of, names) if sort_key is not None)
    verdict = ReplayVerdict()
    for name in sorted(set(names) - {sort_key[-1] for sort_key in sort_keys}):
        verdict = evolve(verdict, strange=verdict.strange + 1)
        # Keep entries with other names, because they may not be ours.
        report_kept(name, "its name is not that of a dead letter")
    for *_, name in sort_keys:
        try:
            line = dead_letters.get(name)
            if line is None:  # removed by another process meanwhile
                continue
            dead_letter = dead_letter_from(line)
        except (BadDeadLetter, DeadLetterError) as error:
            report_kept(name, f"it is not a dead letter: {error}" if isinstance(error, BadDeadLetter) else str(error))
            verdict = evolve(verdict, strange=verdict.strange + 1)
            continue
        if (fault := deliver(dead_letter)) is not None:
            report_kept(name, error_summary(fault))
            verdict = evolve(verdict, failed=verdict.failed + 1)
            continue
        # Remove the dead letter only after it was handled. A process that is killed in between then causes a repetition
        # but no loss.
        dead_letters.remove(name)
        verdict = evolve(verdict, done=verdict.done + 1)
    return verdict


class HandlerCaller:
    """Calls a handler with the record of a dead letter and waits for it. All calls are awaited on one event loop."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._loop = asyncio.Runner()

    def deliver(self, dead_letter: DeadLetterEntry) -> Exception | None:
        """Call the handler. Return its error, or None if it succeeded. SystemExit and KeyboardInterrupt propagate."""
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
            result: object = self._handler(delivery)
            if inspect.isawaitable(result):
                awaitable = result

                async def await_result() -> object:  # asyncio.Runner accepts only coroutines
                    return await awaitable

                result = self._loop.run(await_result())
            return fault_in_result(result)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  the dead letter is kept anyway
            return error if isinstance(error, Exception) else RuntimeError(error_summary(error))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        """End the event loop."""
        self._loop.close()


@frozen
class DeadLetterHolding:
    """Takes the place of the lease when the handler is called with a dead letter's record. It is never lost."""

    lease: Lease
    worker: str
    fencing_number: int | None = None
    lost: Event = Factory(Event)

    @classmethod
    def of(cls, dead_letter: DeadLetterEntry) -> Self:
        """Return a lease with the key, stream and shard that the dead letter contains."""
        return cls(Lease(dead_letter.lease, stream=dead_letter.stream, shard=dead_letter.shard), dead_letter.worker)

    @property
    def key(self) -> str:
        """The key of the lease."""
        return self.lease.key

    @property
    def stream(self) -> str:
        """The stream's name, as the dead letter contains it."""
        return self.lease.stream

    def checkpoint(self, position: Position) -> bool:  # noqa: ARG002  there is only one record
        """Write nothing, because the dead letter is removed when its handler is done."""
        return True


OVER_PAUSE_SECONDS = 1.0
"""The pause between two reads of a shard whose replay is over. Reading continues, so that the lease row still shows
that the replay is over."""

UNKNOWN_LAG_SECONDS = 0.001
"""The lag to report if a read returned records but no lag. It is not 0, because more records may have arrived after
them."""


def replay_stream(
    worker: Worker,
    dead_letters: DeadLetterSink,
    deliver: CallHandler,
    report_kept: KeptCallback,
    *,
    look_seconds: float = LOOK_SECONDS,
) -> ReplayVerdict:
    """Replay all dead letters between the checkpoints and the end of the stream.

    Args:
        worker: A worker whose source is a `DeadLetterSource` for its id.
        dead_letters: Stores the dead letters that fail again.
        deliver: Calls the handler with a dead letter's record.
        report_kept: Called with each dead letter that is kept, and the reason.
        look_seconds: How many seconds to wait between two checks of whether the whole stream has been replayed.

    Raises:
        DeadLetterError: A dead letter could neither be handled nor put back, or a signal ended the replay early.
        SystemExit: Passed through from the handler.
        KeyboardInterrupt: Passed through from the handler.
        WorkerError: The worker cannot continue.
        StoreError: The lease table cannot be used.
        SourceError: The stream cannot be used.
    """
    began_at, replayer = time.time(), _StreamReplayer(worker.me, dead_letters, deliver, report_kept)
    runner = Runner(worker, Handling(replayer.handle))
    try:
        is_finished = run_until(
            runner, lambda: is_read(worker, lambda row: _is_over(row, began_at)), look_seconds=look_seconds
        )
    except SystemExit:
        if replayer.fatal_error is None:
            raise
        raise replayer.fatal_error from None
    if not is_finished:
        raise DeadLetterError("it was stopped before all dead letters were replayed; start it again to continue")
    return replayer.verdict


def _is_over(lease: Lease, began_at: float) -> bool:
    """Return whether the shard has ended, or its owner has reported since `began_at` that nothing is left to replay."""
    progress = progress_of(lease)
    is_reported_over = (
        progress is not None and progress.owner == lease.owner and progress.end and (progress.read or 0.0) >= began_at
    )
    return lease.ended or is_reported_over


class _StreamReplayer:
    """Replays the dead letters of all shards, one dead letter at a time, and counts the outcomes."""

    def __init__(self, me: str, dead_letters: DeadLetterSink, deliver: CallHandler, report_kept: KeptCallback) -> None:
        self._me, self._dead_letters, self._deliver, self._report_kept = me, dead_letters, deliver, report_kept
        self._lock = Lock()
        self.verdict = ReplayVerdict()
        self.fatal_error: DeadLetterError | None = None

    def handle(self, batch: Delivery) -> None:
        """Replay the dead letters of the batch, and write a checkpoint after each one."""
        for record in batch.records:
            with self._lock:
                verdict = self._replay(record)
                # Count the dead letter only after the checkpoint is stored. Otherwise, it would be counted twice if
                # another owner replayed it again.
                if not batch.checkpoint(record):  # the lease is lost, so the new owner counts it
                    return
                self.verdict = verdict

    def _replay(self, record: Record) -> ReplayVerdict:
        name, verdict = f"the dead letter at {record.sequence_number}", self.verdict
        try:
            dead_letter = dead_letter_from(record.data)
            if (fault := self._deliver(dead_letter)) is None:
                return evolve(verdict, done=verdict.done + 1)
            # Put the dead letter back before the checkpoint moves past it. Otherwise, a crash could lose it (rule 2).
            self._dead_letters.put(with_failed_attempt(dead_letter, fault, worker=self._me, now=time.time()))
        except BadDeadLetter as error:
            self._report_kept(name, f"it is not a dead letter: {error}")
            return evolve(verdict, strange=verdict.strange + 1)
        except DeadLetterError as dead_letter_error:
            self.fatal_error = dead_letter_error
            raise SystemExit(1) from dead_letter_error  # the worker drains and ends
        self._report_kept(name, f"{type(fault).__name__}: {fault}")
        return evolve(verdict, failed=verdict.failed + 1)


class DeadLetterSource(ForwardingSource):
    """Reads a stream of dead letters. Each shard ends before the first dead letter that worker `me` has put back."""

    def __init__(self, source: Source, me: str) -> None:
        super().__init__(source)
        self._me = me

    def open(self, lease: Lease, start: Position) -> "DeadLetterReader":
        """Open a reader that starts just after `start`."""
        return DeadLetterReader(super().open(lease, start), self._me)


class DeadLetterReader:
    """Reads one shard up to the first dead letter that worker `me` has put back."""

    def __init__(self, reader: Reader, me: str) -> None:
        self._reader, self._me, self._is_over_now = reader, me, False

    def read(self) -> Batch:
        """Read once, or return an empty batch if the replay is over. Exceptions of the stream's reader propagate."""
        if self._is_over_now:
            return Batch((), None, 0.0, OVER_PAUSE_SECONDS)
        batch = self._reader.read()
        first_own_index: int | None = None
        for index, record in enumerate(batch.records):
            with suppress(BadDeadLetter):
                if dead_letter_from(record.data).worker == self._me:
                    first_own_index = index
                    break
        if first_own_index is None:  # more records may follow, so the lag must not be 0
            return evolve(batch, behind_seconds=batch.behind_seconds or UNKNOWN_LAG_SECONDS) if batch.records else batch
        # All further dead letters have already failed in this replay, and would be put back again and again (rule 3).
        self._is_over_now, records = True, batch.records[:first_own_index]
        read_to = records[-1].position if records else None
        return evolve(batch, records=records, read_to=read_to, behind_seconds=0.0, ended=False, in_columns=None)

    def close(self) -> None:
        """Close the reader."""
        self._reader.close()
