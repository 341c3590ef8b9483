"""Keeps what one worker knows about the lease table: the rows, and changes that the rows do not show.

1. `Watch` keeps the rows, and how long each row has been unchanged. This module adds the time of the last read, and
   tracks two kinds of changes: leases that this worker dropped although their rows still name it as owner, and leases
   that other workers finished while this process was paused.
2. After a failed read, the caller must read the table again before it plans.
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
        watch: The rows that were read, and how long each row has been unchanged.
    """

    def __init__(self, store: Store, config: Config, clock: Callable[[], float]) -> None:
        self._store, self._config, self._clock = store, config, clock
        self.watch = first_watch(config, store.capabilities)
        self._last_read_at, self._listing_began_at = -math.inf, math.inf
        self._has_dropped_rows = Event()
        self._finished_since_by_key: dict[str, float] = {}
        self._last_running_at, self._keys_before_pause = math.inf, frozenset[str]()

    # Reading

    @property
    def needs_listing(self) -> bool:
        """Whether the whole table must be read (C17).

        A full read is needed after this worker has dropped a lease whose row still names the worker as owner.
        """
        return self._has_dropped_rows.is_set()

    def note_lease_dropped(self) -> None:
        """Note that this worker dropped a lease without a write, so the row still names this worker as owner."""
        self._has_dropped_rows.set()

    def read(self, keys: tuple[str, ...] | None, *, stale_ok: bool) -> Listing:
        """Read the rows of these keys, or the whole table if `keys` is None. Raises StoreError."""
        read_began, had_dropped_rows = self._clock(), keys is None and self._has_dropped_rows.is_set()
        if had_dropped_rows:
            # Clear the event before the read, so that a lease dropped during the read leads to another full read.
            self._has_dropped_rows.clear()
        self._last_read_at, self._listing_began_at = read_began, read_began if keys is None else math.inf
        try:
            if keys is None:
                listing = self._store.list()
                reject_moved(listing)  # a store that knows both tables of a swap hides moved rows
            else:
                listing = Listing(self._store.get(keys, stale_ok=stale_ok))
        except StoreError:
            self.watch = self.watch.unanswered(read_began)
            if had_dropped_rows:
                # The read failed, so a full read is still needed.
                self._has_dropped_rows.set()
            raise
        finally:
            self._listing_began_at = math.inf
        return listing

    def listing_seconds(self, now: float) -> float:
        """Return for how many seconds a read of the whole table has been in progress, or 0 if there is no such read."""
        return max(0.0, now - self._listing_began_at)

    def remember_rows(
        self,
        rows: Iterable[Lease],
        began: float,
        keys: Collection[str] | None,
        reports: Reports = NO_REPORTS,
    ) -> Sequence[Lease]:
        """Remember these rows. Return all known leases, each with the time for which it has been unchanged.

        Args:
            rows: The rows, as read or as returned by writes.
            began: The time at which the read, or the first of the writes, began.
            keys: The keys that were read; None if the whole table was read.
            reports: The reports of KCL 3.x workers, which were read together with the rows.
        """
        read_ended = self._clock()
        self.watch, leases = self.watch.look(rows, began, read_ended, keys, reports)
        if keys is None:
            previously_finished_since = self._finished_since_by_key
            self._finished_since_by_key = {
                lease.key: previously_finished_since.get(lease.key, read_ended) for lease in leases if lease.ended
            }
        return leases

    def remember_released(self, released_leases: Mapping[str, Lease], shards: tuple[Shard, ...] | None) -> None:
        """Remember the leases that this worker has released. If their rows are deleted, they can be recreated (L13)."""
        self.watch = self.watch.recalling(released_leases, shards)

    def is_outdated(self, now: float) -> bool:
        """Return whether the last read is too old to create leases.

        Other workers may have finished shards since the last read.
        """
        return self._is_old(self._last_read_at, now)

    def finished_long_ago(self, now: float) -> frozenset[str]:
        """Return the keys of the leases that have been finished for so long that they may be deleted."""
        return frozenset(key for key in self._finished_since_by_key if self.was_finished_long_ago(key, now))

    def was_finished_long_ago(self, key: str, now: float) -> bool:
        """Return whether a lease has been finished for so long that it may be deleted.

        If the row were deleted too soon, another worker could still rely on a read of the table from before the row
        existed. That worker could create the lease again, and the shard would be read twice with the same fencing
        numbers. After `lease_seconds`, such a read is outdated (`is_outdated`), and the worker must read the table
        again before it creates leases.
        """
        return self._is_old(self._finished_since_by_key.get(key, math.inf), now)

    def _is_old(self, time: float, now: float) -> bool:
        return now - time > self._config.lease_seconds

    # Pauses of this process

    def note_running(self, now: float) -> None:
        """Note that this process is running.

        After a pause, note which leases other workers may have finished meanwhile.
        """
        if now - self._last_running_at > self._config.lease_seconds:
            self._keys_before_pause = frozenset(self.watch.sightings) | {lease.key for lease in self.watch.history.gone}
        self._last_running_at = now

    def history(self, leases: Sequence[Lease], shards: Collection[Shard]) -> History:
        """Return the history.

        In the result, leases that others finished while this process was paused are marked as finished (L13).

        If a lease was last seen before the pause and has no row now, it may have been finished and deleted during the
        pause. A finished lease is deleted only after its children were started (L8). Therefore, if a descendant of its
        shard has a lease, the shard was finished, even if the descendant's lease has been reset since.
        """
        history = self.watch.history
        if not self._keys_before_pause:
            return history
        if not history.full_still:
            self._keys_before_pause &= {lease.key for lease in history.gone}
        finished_keys = {
            key for family in families(shards, leases) for key in family.shards.keys() - family.find_unread_shards({})
        }
        finished_keys &= self._keys_before_pause
        gone_leases = (
            evolve(lease, checkpoint=SHARD_END) if lease.key in finished_keys else lease for lease in history.gone
        )
        return evolve(history, gone=tuple(gone_leases))
