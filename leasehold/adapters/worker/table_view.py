"""Keeps what one worker has read of its lease table, and tracks what may have changed unnoticed since.

1. `Watch` keeps the rows and for how long each has been unchanged. This module adds when they were read, and two kinds
   of changes that a read does not show: leases that were dropped here while their rows still name this worker, and
   leases that others have finished while this process was paused.
2. A failed read changes only the record of outages, and must be repeated.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from threading import Event

from attrs import evolve

from leasehold.adapters.worker.renewing import first_watch
from leasehold.balancer.config import Config
from leasehold.balancer.family import families
from leasehold.balancer.model import SHARD_END, History, Lease, Shard
from leasehold.balancer.watch import NO_REPORTS, Reports
from leasehold.errors import StoreError
from leasehold.stores.protocol import Listing, Store
from leasehold.stores.swap import reject_moved


class TableView:
    """The lease table as one worker knows it.

    Args:
        store: The lease table.
        config: The configuration of the worker.
        clock: The worker's clock.

    Attributes:
        watch: The rows that were read, and for how long each has been unchanged.
    """

    def __init__(self, store: Store, config: Config, clock: Callable[[], float]) -> None:
        self._store, self._config, self._clock = store, config, clock
        self.watch = first_watch(config, store.capabilities)
        self._read_at, self._listing_since = -math.inf, math.inf
        self._has_dropped_rows = Event()
        self._finished_since: dict[str, float] = {}
        self._awake_at, self._keys_before_pause = math.inf, frozenset[str]()

    # Reading

    @property
    def needs_listing(self) -> bool:
        """Whether the whole table must be read, because a lease was dropped whose row still names this worker (C17)."""
        return self._has_dropped_rows.is_set()

    def lease_dropped(self) -> None:
        """Note that a lease was dropped without a write."""
        self._has_dropped_rows.set()

    def read(self, keys: tuple[str, ...] | None, *, stale_ok: bool) -> Listing:
        """Read these rows, or the whole table. Raises StoreError."""
        began, had_dropped_rows = self._clock(), keys is None and self._has_dropped_rows.is_set()
        if had_dropped_rows:
            # Reset the event before the read. A lease that is dropped during the read then requests another full read.
            self._has_dropped_rows.clear()
        self._read_at, self._listing_since = began, began if keys is None else math.inf
        try:
            if keys is None:
                listing = self._store.list()
                reject_moved(listing)  # a store that knows both tables of a swap hides moved rows
            else:
                listing = Listing(self._store.get(keys, stale_ok=stale_ok))
        except StoreError:
            self.watch = self.watch.unanswered(began)
            if had_dropped_rows:
                # There was no response, so a full read is still needed.
                self._has_dropped_rows.set()
            raise
        finally:
            self._listing_since = math.inf
        return listing

    def listing_seconds(self, now: float) -> float:
        """Return for how long the table has been read, or 0 if it is not being read now."""
        return max(0.0, now - self._listing_since)

    def look(
        self,
        rows: Iterable[Lease],
        began: float,
        keys: Collection[str] | None,
        reports: Reports = NO_REPORTS,
    ) -> Sequence[Lease]:
        """Keep these rows. Return every lease, with the time for which it has been unchanged.

        Args:
            rows: The rows, as read or as returned by writes.
            began: When the read or the write began.
            keys: The keys that were read; None: the whole table.
            reports: The reports of KCL 3.x workers that were read with the rows.
        """
        ended = self._clock()
        self.watch, leases = self.watch.look(rows, began, ended, keys, reports)
        if keys is None:
            known = self._finished_since
            self._finished_since = {lease.key: known.get(lease.key, ended) for lease in leases if lease.ended}
        return leases

    def recall(self, released: Mapping[str, Lease], shards: tuple[Shard, ...] | None) -> None:
        """Remember the leases that this worker has released, in case their rows are deleted (L13)."""
        self.watch = self.watch.recalling(released, shards)

    def outdated(self, now: float) -> bool:
        """Return whether the last read is too old for creating leases, because others may have finished them since."""
        return self._is_old(self._read_at, now)

    def _is_old(self, time: float, now: float) -> bool:
        return now - time > self._config.lease_seconds

    def finished_long_ago(self, now: float) -> frozenset[str]:
        """Return the keys of the leases that were already finished `lease_seconds` ago, so that they may be deleted.

        A worker that read the table before such a row existed is `outdated` by now. If the row were deleted earlier,
        that worker could create it again, and its shard would be read twice under the same fencing numbers.
        """
        return frozenset(key for key, since in self._finished_since.items() if self._is_old(since, now))

    # Pauses of this process

    def awake(self, now: float) -> None:
        """Note that this process is running. After a long pause, note which leases others may have finished."""
        if now - self._awake_at > self._config.lease_seconds:
            self._keys_before_pause = frozenset(self.watch.sightings) | {lease.key for lease in self.watch.history.gone}
        self._awake_at = now

    def history(self, leases: Sequence[Lease], shards: Collection[Shard]) -> History:
        """Return the history, with leases marked finished that other workers finished while this process paused (L13).

        A lease without a row that was last seen before the pause may have been finished and deleted meanwhile. A
        finished lease is deleted only after its children were started (L8). Therefore, if a descendant has a lease, the
        shard was finished. This is true even if the descendant's lease was reset since.
        """
        history = self.watch.history
        if not self._keys_before_pause:
            return history
        if not history.full_still:
            self._keys_before_pause &= {lease.key for lease in history.gone}
        finished_keys = {key for family in families(shards, leases) for key in family.shards.keys() - family.unread({})}
        finished_keys &= self._keys_before_pause
        gone_leases = (
            evolve(lease, checkpoint=SHARD_END) if lease.key in finished_keys else lease for lease in history.gone
        )
        return evolve(history, gone=tuple(gone_leases))
