"""Carries out what the state of a held lease's reader orders, as far as all kinds of readers do the same.

`LeaseReader` extends it for handlers, and Spark's `ShardPrefetcher` for rows that are read ahead. Each of them adds the
consumer's side:

    _order             tell the state what the consumer has done, and ask it what to do next
    _start_at          begin at a position
    _read              read once, and keep what comes
    _offer             give the consumer the rows that it lacks
    _request_final     ask the consumer for its final checkpoint
    _store             write a checkpoint
    _idle_until        say when to look again if there is nothing to do
    _leave             end, because the lease is lost, the shard has ended or the lease was released

A fault of a step is handled here, once: wait and try again, or let the lease go.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import assert_never

from leasehold.adapters.consumer.cursor import (
    AwaitEvent,
    DeliverRows,
    EndShard,
    LeaveShard,
    OpenReader,
    ReadBatch,
    ReleaseAt,
    ShardPull,
    StoreCheckpoint,
)
from leasehold.adapters.consumer.handling import Happening
from leasehold.adapters.consumer.lifecycle import ReadingStart, ReadingWorker, end
from leasehold.adapters.consumer.reader_state import (
    BeginReading,
    ConsumerKind,
    ReaderOrder,
    ReaderState,
    RequestFinalCheckpoint,
)
from leasehold.adapters.worker.holding import Holding
from leasehold.balancer.lineage import readable
from leasehold.balancer.model import Lease, Position
from leasehold.errors import SourceError, SourceUnavailable, StoreError
from leasehold.stores.printable import escaped

log = escaped(logging.getLogger("leasehold.reading"))


LEFT_SECONDS = 0.2
"""How often to check whether the worker has released a lease without its reader (D6)."""


class ReaderDriver(ABC):
    """Drives the reading of one held lease.

    Args:
        worker: The worker that holds the lease.
        holding: The held lease.
        kind: How the consumer acknowledges records.
        cooldown_seconds: How long this worker does not take the lease again after it could not be read here.
    """

    def __init__(self, worker: ReadingWorker, holding: Holding, kind: ConsumerKind, cooldown_seconds: float) -> None:
        self.holding, self._worker, self._cooldown_seconds = holding, worker, cooldown_seconds
        self._state = ReaderState(holding.lease.checkpoint, worker.uniform, kind)
        self._cursor = self._state.cursor
        # Open with the epoch of this claim, so that the previous owner is disconnected (Event Hubs).
        self._pull = ShardPull(self._cursor, lambda at: worker.source.open(holding.claimed, at))
        self._start = ReadingStart(holding, worker.source, worker.config)

    def step(self, now: float) -> float:
        """Do one bounded piece of work; return when to call again, or infinity once nothing is left to do."""
        try:
            due = self._go_on(now)
        except (StoreError, SourceUnavailable) as fault:
            return self._waits(fault, now, self._state.failed(now), "trying again")
        except SourceError as fault:
            due_again = self._state.rejected(fault, now)
            if due_again is not None:
                return self._waits(fault, now, due_again, "rejected, trying again")
            self.holding.progress.failed(str(fault), now)
            # Retrying won't help here, but another worker may have the permission or the network route we lack.
            return self._stop(now, f"it cannot be read: {fault}")
        self._state.step_done()
        return due

    def _go_on(self, now: float) -> float:
        """Do what the state orders; return when to call again."""
        holding, worker = self.holding, self._worker
        if holding.progress.left and not holding.lost.is_set():
            return now + LEFT_SECONDS
        match self._order(now):
            case BeginReading():
                return self._begin(now)
            case OpenReader() | ReadBatch():
                return self._read(now)
            case DeliverRows():
                return self._offer(now)
            case AwaitEvent():
                return self._idle_until(now)
            case RequestFinalCheckpoint(ended):
                return self._request_final(now, ended=ended)
            case StoreCheckpoint(to):
                return self._go_on(now) if self._store(to, now) else self._leave("lease-lost")
            case ReleaseAt(at):
                # If the next owner withdrew its request, the lease stays here and reading goes on immediately.
                return self._leave("stopped") if holding.release(at) else now
            case EndShard(children):
                if not end(holding, children, worker, self._cursor.acknowledged.token):
                    return self._leave("lease-lost")
                worker.hurry()  # the children have leases now, which may have no owner yet
                return self._leave("shard-ended")
            case LeaveShard():
                return self._leave("lease-lost")
            case _ as never:
                assert_never(never)

    def _begin(self, now: float) -> float:
        """Once the parents are done, begin at the consumer's or the lease's position."""
        lease = self.holding.lease
        parents = self._worker.parents(lease)
        # L12: a key's earlier records are in the parent, so reading the child alongside it would break their order.
        if not readable(lease, parents):
            self.holding.progress.excused("its parents are not done", now)
            return now + self._state.parents_pending()
        self.holding.progress.asking(now)
        start = self._find_start(parents)
        if start is None:
            return self._leave("lease-lost")
        self._start_at(start, now)
        self.holding.progress.called_back()
        return now

    def _find_start(self, parents: Mapping[str, Lease]) -> Position | None:
        """Return where to begin, or None if the lease was lost meanwhile."""
        return self._start.find(parents)

    # The consumer's side

    @abstractmethod
    def _order(self, now: float) -> ReaderOrder: ...

    @abstractmethod
    def _start_at(self, start: Position, now: float) -> None: ...

    @abstractmethod
    def _read(self, now: float) -> float: ...

    @abstractmethod
    def _offer(self, now: float) -> float: ...

    @abstractmethod
    def _request_final(self, now: float, *, ended: bool) -> float: ...

    @abstractmethod
    def _store(self, position: Position, now: float) -> bool: ...

    @abstractmethod
    def _idle_until(self, now: float) -> float: ...

    @abstractmethod
    def _leave(self, happening: Happening) -> float: ...

    # Faults

    def _waits(self, fault: Exception, now: float, due: float, what: str) -> float:
        self.holding.progress.failed(str(fault), now)
        log.warning("shard %s: %s in %.1f s: %s", self.holding.key, what, due - now, fault)
        return due

    def _stop(self, now: float, why: str) -> float:
        # Leave the lease to other workers for a while: the fault may be in this worker's connections or disk.
        seconds = self._cooldown_seconds
        # Must come before the release, otherwise the worker's next turn might take the lease right back.
        self._worker.exclude(self.holding.key, seconds)
        self._worker.hurry()
        due = self._release(now)
        log.error("shard %s stops here: %s; released, not taken again for %g s", self.holding.key, why, seconds)
        return due

    def _release(self, now: float) -> float:
        self.holding.ask_release()
        return now
