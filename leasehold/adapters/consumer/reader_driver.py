"""Carries out what the state of a held lease's reader orders, as far as all kinds of readers do the same.

`LeaseReader` drives it for handlers, and Spark's `ShardPrefetcher` for rows that are read ahead. Each adds in `_go_on`
what its consumer needs. A fault of a step is handled here, once: wait and try again, or let the lease go.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping

from leasehold.adapters.consumer.cursor import ShardPull
from leasehold.adapters.consumer.lifecycle import ReadingStart, ReadingWorker
from leasehold.adapters.consumer.reader_state import Acknowledging, ReaderState
from leasehold.adapters.worker.holding import Holding
from leasehold.balancer.lineage import readable
from leasehold.balancer.model import Lease
from leasehold.errors import SourceError, SourceUnavailable, StoreError
from leasehold.stores.printable import escaped

log = escaped(logging.getLogger("leasehold.reading"))


class ReaderDriver(ABC):
    """Drives the reading of one held lease.

    Args:
        worker: The worker that holds the lease.
        holding: The held lease.
        acknowledging: How the consumer acknowledges records.
        cooldown_seconds: How long this worker does not take the lease again after it could not be read here.
    """

    def __init__(
        self, worker: ReadingWorker, holding: Holding, acknowledging: Acknowledging, cooldown_seconds: float
    ) -> None:
        self.holding, self._worker, self._cooldown_seconds = holding, worker, cooldown_seconds
        self._state = ReaderState(holding.lease.checkpoint, worker.uniform, acknowledging)
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

    @abstractmethod
    def _go_on(self, now: float) -> float:
        """Do what the state orders; return when to call again."""

    def _waits(self, fault: Exception, now: float, due: float, what: str) -> float:
        self.holding.progress.failed(str(fault), now)
        log.warning("shard %s: %s in %.1f s: %s", self.holding.key, what, due - now, fault)
        return due

    def _parents(self, now: float) -> Mapping[str, Lease] | float:
        """Return the leases of the parents if the shard may be read, otherwise when to ask again."""
        lease = self.holding.lease
        parents = self._worker.parents(lease)
        # L12: a key's earlier records are in the parent, so reading the child alongside it would break their order.
        if readable(lease, parents):
            return parents
        self.holding.progress.excused("its parents are not done", now)
        return now + self._state.parents_pending()

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
