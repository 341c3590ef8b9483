"""Reads one held lease, step by step, and hands its records over: never two batches at a time.

Rule 1: a step reads at most once and holds at most one batch, so a slow handler slows its own shard
and memory does not grow. Rule 2: nothing here sleeps; a step says when it wishes to be called next,
or never (infinity) once nothing is left to do. Rule 3: before every effect the lease must still be held.
"""

import logging
import math
from collections.abc import Callable
from typing import Protocol

from adapters.backoff import Backoff
from adapters.handling import Delivery, Handling, Happening
from adapters.holding import Holding
from adapters.shard_end import end
from adapters.source import Batch, Reader, Source, SourceError, SourceUnavailable
from adapters.start import start_of
from balancer.ancestry import readable
from balancer.config import Config
from balancer.model import Position, Shard
from stores.protocol import Store, StoreError

log = logging.getLogger("leasehold.reading")

PARENT_SECONDS, PARENT_SECONDS_MOST = 1.0, 5.0
FAULT_SECONDS, FAULT_SECONDS_MOST = 0.2, 10.0


class Member(Protocol):
    """The worker, as far as a reading needs it."""

    store: Store
    source: Source
    config: Config
    clock: Callable[[], float]
    uniform: Callable[[float, float], float]

    def hurry(self) -> None:
        """Look at leases and shards at the next opportunity."""
        ...

    def bench(self, key: str, seconds: float) -> None:
        """Do not take this lease for so long."""
        ...


class Reading:
    """One held lease being read."""

    def __init__(self, member: Member, holding: Holding, handling: Handling) -> None:
        self.holding = holding
        self._member, self._handling = member, handling
        self._reader: Reader | None = None
        self._batch: Batch | None = None
        self._children: tuple[Shard, ...] | None = None
        self._handled: Position | None = None
        self._checkpoint_due = 0.0
        self._parents_wait = PARENT_SECONDS
        self._attempts = Backoff(handling.least_wait_seconds, handling.most_wait_seconds, member.uniform)
        self._faults = Backoff(FAULT_SECONDS, FAULT_SECONDS_MOST, member.uniform)

    def step(self, now: float) -> float:
        """One bounded piece of work; when to call again: never (infinity) once it is over."""
        try:
            due = self._step(now)
        except (StoreError, SourceUnavailable) as fault:
            wait = self._faults.next()
            log.warning("shard %s: trying again in %.1f s: %s", self.holding.key, wait, fault)
            return now + wait
        except SourceError as fault:
            return self._stop(now, f"it cannot be read: {fault}")
        self._faults.reset()
        return due

    def _step(self, now: float) -> float:
        if self.holding.lost.is_set():
            return self._leave("lease-lost")
        if self.holding.parting:
            return self._part(now)
        if self._batch is not None:
            return self._handle(self._batch, now)
        if self._children is not None:
            return self._finish()
        if self._reader is None:
            return self._open(now)
        return self._read(self._reader, now)

    # Beginning

    def _open(self, now: float) -> float:
        lease, member = self.holding.lease, self._member
        parents = {parent.key: parent for parent in member.store.get(lease.parents)} if lease.parents else {}
        if not readable(lease, parents):  # L12
            wait, self._parents_wait = self._parents_wait, min(2 * self._parents_wait, PARENT_SECONDS_MOST)
            return now + wait
        start = start_of(self.holding, member.source, member.config)
        if start is None:
            return self._leave("lease-lost")
        self._reader = member.source.open(lease, start)
        self._handling.observer("initialize", self.holding)
        return now

    # Going on

    def _read(self, reader: Reader, now: float) -> float:
        batch = reader.read()
        self.holding.throughput.add(batch.size, now)
        self._handling.measure(self.holding, batch)
        if batch.ended:
            self._children = batch.children
        if batch.records:
            self._batch = batch
            return self._handle(batch, now)
        return self._done(batch, now)

    def _handle(self, batch: Batch, now: float) -> float:
        if self.holding.lost.is_set():
            return self._leave("lease-lost")
        delivery = self._delivery(batch)
        try:
            if delivery.records:
                self._handling.handler(delivery)
        except Exception as error:  # noqa: BLE001  whatever a handler raises, its records are not done
            return self._failed(delivery, batch, error, now)
        return self._done(batch, now)

    def _delivery(self, batch: Batch) -> Delivery:
        rest = batch.records
        if self._attempts.faults:
            # What the handler checkpointed before it raised is not handed over again.
            done = self.holding.lease.checkpoint.order
            rest = tuple(record for record in rest if record.position.order > done)
        return Delivery(rest, batch.read_to or batch.records[-1].position, batch.behind_seconds, self.holding)

    def _done(self, batch: Batch, now: float) -> float:
        self._batch = None
        self._attempts.reset()
        self._handled = _end_of(batch) or self._handled
        if self.holding.lost.is_set():
            return self._leave("lease-lost")
        if self._handled is not None and now >= self._checkpoint_due:
            self._checkpoint_due = now + self._handling.checkpoint_seconds
            # An heir that waits is given the lease with its position in the same write.
            if not self.holding.checkpoint(self._handled, unless_parting=True):
                return self._leave("lease-lost")
        return now if batch.ended or self.holding.parting else now + batch.wait_seconds

    def _failed(self, delivery: Delivery, batch: Batch, error: Exception, now: float) -> float:
        wait = self._attempts.next()
        first, last = delivery.records[0].sequence_number, delivery.records[-1].sequence_number
        where = f"records {first} to {last}, attempt {self._attempts.faults} of {self._handling.attempts}"
        log.warning("shard %s: the handler raised on %s", self.holding.key, where, exc_info=error)
        if self._attempts.faults < self._handling.attempts:
            return self._member.clock() + wait
        if self._handling.dead_letter is None:
            return self._stop(now, f"its handler raised {type(error).__name__} on {where}")
        return self._bury(delivery, batch, error, now)

    def _bury(self, delivery: Delivery, batch: Batch, error: Exception, now: float) -> float:
        dead_letter = self._handling.dead_letter
        try:
            if dead_letter is not None:
                dead_letter(delivery, error)
        except Exception as second:  # noqa: BLE001  nobody took the records, so they are not skipped
            return self._stop(now, f"neither its handler nor the dead letter took a batch: {second!r}")
        log.warning("shard %s: %d records went to the dead letter", self.holding.key, len(delivery.records))
        return self._done(batch, now)

    # Ending

    def _finish(self) -> float:
        member = self._member
        if not end(self.holding, self._children or (), member.store, member.source, member.config):
            return self._leave("lease-lost")
        member.hurry()
        return self._leave("shard-ended")

    def _part(self, now: float) -> float:
        return self._leave("stopped") if self.holding.part(self._handled) else now

    def _stop(self, now: float, why: str) -> float:
        seconds = self._handling.bench_seconds
        log.error("shard %s stops here: %s; released, not taken again for %g s", self.holding.key, why, seconds)
        self._batch = None
        self._member.bench(self.holding.key, seconds)
        self.holding.ask_release()
        self._member.hurry()
        return now

    def _leave(self, happening: Happening) -> float:
        if happening == "lease-lost" and self._handling.late_checkpoints and self._handled is not None:
            self._checkpoint_late(self._handled)
        if self._reader is not None:
            self._reader.close()
        self._handling.observer(happening, self.holding)
        return math.inf

    def _checkpoint_late(self, position: Position) -> None:
        try:
            self.holding.checkpoint_late(position)
        except StoreError as fault:
            log.warning("shard %s: what was done after the theft will be done again: %s", self.holding.key, fault)


def _end_of(batch: Batch) -> Position | None:
    return batch.records[-1].position if batch.read_to is None and batch.records else batch.read_to
