"""Renews the held leases. Each renewal is a separate call, so that a slow request does not delay the other renewals.

1. At most one renewal of a lease is in progress at a time. After a failed renewal, the next one begins a second later.
2. A lease that no write has confirmed for `lease_seconds` is dropped, because another worker may own it by then. If a
   renewal is in progress at that moment, the lease is dropped only after another third of `lease_seconds`, because the
   renewal will most likely succeed. Meanwhile, the lease counts as expired (`Holding.expired`), so its records are not
   delivered.

`SlowPeers` logs which other workers renew too slowly for our `lease_seconds`, which means that their setting differs
from ours. The other functions concern bulletins (C4). `first_watch` determines whether a worker reads bulletins,
`renew_pause_seconds` determines how often a worker must wake up to write one, and `bulletin_renewals` determines on
which row it is written.
"""

import logging
import math
from collections.abc import Callable, Collection, Iterable
from heapq import heappop, heappush
from typing import Protocol, TypeVar

from leasehold.adapters.threads import read_boot_clock
from leasehold.adapters.worker.holding import Holding
from leasehold.balancer.actions import Look, Renew
from leasehold.balancer.bulletin import BulletinTracker, bulletin_of
from leasehold.balancer.config import Config
from leasehold.balancer.counting import expires_above_gap, slow_owners
from leasehold.balancer.lookout import (
    OUTAGE_SECONDS,
    bulletin_row,
    bulletin_row_renewals,
    heartbeat_seconds,
    scale_to_lease_seconds,
)
from leasehold.balancer.model import Lease, Me
from leasehold.balancer.plan import renewals
from leasehold.balancer.rules.shares import donation_order
from leasehold.balancer.watch import Watch
from leasehold.errors import StoreError
from leasehold.stores.printable import make_safe_logger
from leasehold.stores.protocol import Capabilities
from leasehold.stores.writes import merge_annotations

log = make_safe_logger(logging.getLogger("leasehold.renewing"))

RETRY_SECONDS = 1.0
HEARTBEAT_DELAY_SECONDS = 0.05


T = TypeVar("T")


class BackgroundMap(Protocol):
    """Applies a function to each item, as `map` does, but may return before all calls have ended."""

    def __call__(self, function: Callable[[T], object], items: Iterable[T], /) -> Iterable[object]:
        """Apply the function.

        Callers must iterate over the result, because `map` is lazy, but must ignore its values.
        """


def _with_idle_time(holding: Holding, now: float) -> Lease:
    lease = holding.lease
    return lease.watched(max(0.0, now - holding.confirmed_at), lease.held, lease.next_owner_idle)


class Renewing:
    """Makes the renewals of one worker.

    A lease is checked only when its renewal may be due. A heap orders the leases by the times of their next checks, so
    if no lease is due, the cost of a call does not depend on the number of held leases. If a checkpoint has renewed a
    lease in the meantime, the lease is not due and is put back into the heap.

    Args:
        config: The configuration of the rules.
        release: Called with each lease that must be handed off once its running batch is done.
        clock: Measures how long a renewal takes.
    """

    def __init__(
        self, config: Config, release: Callable[[Holding], None], clock: Callable[[], float] = read_boot_clock
    ) -> None:
        self._config, self._release, self._clock = config, release, clock
        self._average_seconds = 0.0
        self._renewals_in_progress: set[Holding] = set()
        self._held: Collection[Holding] = ()
        self._known_holdings: frozenset[Holding] = frozenset()
        self._check_queue: list[tuple[float, int, Holding, float]] = []
        self._entry_number = 0
        self._bulletin_holding: Holding | None = None
        self._pause, self._writes_bulletin = math.inf, False

    def begin(
        self,
        holdings: Collection[Holding],
        now: float,
        me: Me,
        look: Look,
        background_map: BackgroundMap,
        *,
        pause: float = math.inf,
    ) -> list[Holding]:
        """Renew the leases that are due, hand off requested leases, and drop leases that other workers may have taken.

        Args:
            holdings: The leases that are held now. The same object must be passed until a lease is added or removed.
            now: The time by the worker's clock.
            me: This worker and what it knows.
            look: The present look, with the annotations to write.
            background_map: Applies a function to each item.
            pause: The maximum time between two checks of a lease. If workers read bulletins, it is the heartbeat
                interval (`renew_pause_seconds`).

        Returns:
            The leases that were checked. Each lease is checked at least every `pause` seconds, because another worker
            may have requested it since the last check.
        """
        self._pause, self._writes_bulletin = pause, bool(look.annotations)
        if holdings is not self._held:
            # Add only new leases to the heap. Leases that are no longer held are skipped when they are due.
            held_now = frozenset(holdings)
            for holding in held_now - self._known_holdings:
                # Check the new lease in this call, because a next owner may have registered before this worker took it.
                self._schedule_check(-math.inf, holding, -math.inf)
            self._held, self._known_holdings = holdings, held_now
            bulletin_key = (
                None if (row := bulletin_row([holding.lease for holding in holdings], me.worker)) is None else row.key
            )
            self._bulletin_holding = next((holding for holding in holdings if holding.key == bulletin_key), None)
        checked_holdings: list[Holding] = []
        while self._check_queue and self._check_queue[0][0] <= now:
            holding = heappop(self._check_queue)[2]
            if holding in self._known_holdings:
                checked_holdings.append(holding)
        checked_holdings.sort(key=lambda candidate: candidate.key)
        ready_holdings = tuple(holding for holding in checked_holdings if not self._must_wait(holding, now))
        actions_by_key: dict[str, tuple[Holding, Renew | None]] = {
            holding.key: (holding, None) for holding in ready_holdings if holding.releasing
        }
        due_renewals = self._due_renewals(ready_holdings, now, me, look)
        actions_by_key |= {holding.key: (holding, action) for holding, action in due_renewals}
        for holding in checked_holdings:
            # If a renewal of the lease is in progress, no other one is needed, but the lease must still be dropped in
            # time (rule 2).
            if holding.key not in actions_by_key and now > self._drop_at(holding):
                self._drop(holding)
        # Mark the renewals as begun before the first one starts, because `begin` may be called again while they are in
        # progress (rule 1).
        self._renewals_in_progress.update(holding for holding, _ in actions_by_key.values())
        try:
            list(background_map(lambda item: self._renew_or_release(*item, look), actions_by_key.values()))
        finally:
            for holding in checked_holdings:
                # Put the leases back into the heap even if `background_map` has raised. A lease that is missing from
                # the heap is never renewed again.
                self._schedule_check(min(self._check_due(holding, now), now + pause), holding, now + pause)
        return checked_holdings

    def _due_renewals(
        self, holdings: Collection[Holding], now: float, me: Me, look: Look
    ) -> list[tuple[Holding, Renew]]:
        """Return the leases to renew now, each with the action that requires the renewal.

        If this worker writes a bulletin, the row with the bulletin is renewed more often than the others.
        """
        config, holdings_by_key = self._config, {holding.key: holding for holding in holdings}
        old_leases = [
            _with_idle_time(holding, now) for holding in holdings if now - holding.confirmed_at >= config.renew_seconds
        ]
        due_actions = [*renewals(old_leases, me, config)] if old_leases else []
        # Checkpoints renew a lease but write no annotations. Therefore, leases that only checkpoints renew are also
        # renewed here, so that their rows contain their lag and, below, the bulletin.
        due_actions += [
            Renew(holding.lease, config.rules.renewal_rule)
            for holding in holdings
            if holding.progress.annotation_due(now)
        ]
        if look.annotations:
            # C4: select the leases that only checkpoints have renewed recently.
            renewed_only_by_checkpoints = [
                holding for holding in holdings if now - holding.renewal_tried_at >= config.renew_seconds
            ]
            bulletin_holding = self._bulletin_holding
            heartbeats = (
                ()
                if bulletin_holding is None or bulletin_holding.key not in holdings_by_key
                else bulletin_row_renewals([_with_idle_time(bulletin_holding, now)], me, config)
            )
            due_actions += [*heartbeats, *(Renew(holding.lease, "C4") for holding in renewed_only_by_checkpoints)]
        if due_actions and any(holding.groups_writes for holding in holdings):
            # If the store groups writes, one write renews all leases, so renew all of them as soon as one is due.
            holdings_by_key = {
                candidate.key: candidate for candidate in self._held if not self._must_wait(candidate, now)
            }
            due_actions = [
                *(Renew(holding.lease, config.rules.renewal_rule) for holding in holdings_by_key.values()),
                *due_actions,
            ]
        due_by_key = {action.lease.key: action for action in due_actions}
        return [(holdings_by_key[key], action) for key, action in due_by_key.items()]

    @property
    def parallel_renewals(self) -> int:
        """The number of renewals that should be able to run in parallel.

        The number is twice as high as needed, because requests may stall.
        """
        return math.ceil(2 * len(self._held) * self._average_seconds / self._config.renew_seconds)

    def due(self, now: float) -> float:
        """Return the time at which `begin` must be called next."""
        while self._check_queue:
            check_at, _, holding, check_by = self._check_queue[0]
            # The first entry of the heap may be out of date, because a checkpoint has renewed the lease, or the lease
            # is no longer held.
            is_held = holding in self._known_holdings
            if is_held and (self._must_wait(holding, now) or min(self._check_due(holding, now), check_by) <= check_at):
                return check_at
            heappop(self._check_queue)
            if is_held:
                self._schedule_check(min(self._check_due(holding, now), check_by), holding, check_by)
        return math.inf

    def _schedule_check(self, check_at: float, holding: Holding, check_by: float) -> None:
        self._entry_number += 1
        heappush(self._check_queue, (check_at, self._entry_number, holding, check_by))

    def renew(self, holding: Holding, action: Renew, look: Look, *, patient: bool = True) -> None:
        """Renew this lease now. Pass `patient=False` if other workers wait for the annotations."""
        renewal_began = self._clock()
        try:
            holding.renew(merge_annotations(action.annotations, look.annotations), patient=patient)
        except StoreError as fault:
            log.warning("lease %s could not be renewed: %s", holding.key, fault)
        # Use a moving average of limited values. The limit keeps a single slow request from changing it much, while
        # several of them raise it quickly.
        seconds_taken = min(self._clock() - renewal_began, 4 * self._average_seconds + 0.02)
        self._average_seconds += (seconds_taken - self._average_seconds) / 8

    def _must_wait(self, holding: Holding, now: float) -> bool:
        # If the last attempt failed, wait a second before the next one, so that this worker does not add to an overload
        # of the store.
        recently_failed = holding.renewal_tried_at > max(now - RETRY_SECONDS, holding.confirmed_at)
        return recently_failed or holding in self._renewals_in_progress

    def _check_due(self, holding: Holding, now: float) -> float:
        if self._must_wait(holding, now):
            return min(now + RETRY_SECONDS, self._drop_at(holding))
        # C4: the lookout renews the row with the bulletin more often than the others. The interval is slightly longer
        #     than the heartbeat interval (`_pause`), because a look that is due at the same time renews the row first.
        heartbeat_interval = (
            self._pause + HEARTBEAT_DELAY_SECONDS
            if self._writes_bulletin and holding is self._bulletin_holding
            else math.inf
        )
        return holding.confirmed_at + min(self._config.renew_seconds, heartbeat_interval)

    def _drop_at(self, holding: Holding) -> float:
        return holding.confirmed_at + self._config.lease_seconds * (
            4 / 3 if holding in self._renewals_in_progress else 1
        )

    def _renew_or_release(self, holding: Holding, action: Renew | None, look: Look) -> None:
        try:
            if action is not None:
                self.renew(holding, action, look)
            # If the renewal failed or was late, the lease may have expired by our own clock, and other workers may have
            # claimed it.
            if holding.expired:
                self._drop(holding)
            elif holding.releasing and not holding.lost.is_set():
                self._release(holding)
        finally:
            # Remove the mark even after an exception. Otherwise, the renewal would count as in progress forever, and
            # the lease would never be renewed again.
            self._renewals_in_progress.discard(holding)

    def _drop(self, holding: Holding) -> None:
        # Stop handling records of this shard, because another worker may already own the lease.
        holding.drop(f"dropped, not confirmed for {self._config.lease_seconds:g} s: others may have it")


class SlowPeers:
    """Logs which workers renew too slowly. Each worker is logged only once."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def observe(self, me: Me, config: Config) -> None:
        """Log the workers whose renewals are too far apart. `plan` waits longer before it considers them dead."""
        for owner, gap in slow_owners(me, config):
            # Log each worker only once. Otherwise, the same worker would be logged at every full read.
            if owner not in self._logged:
                self._logged.add(owner)
                log.warning(
                    "worker %s let %.1f s pass between two renewals, too long for our lease_seconds of %g; it counts "
                    "as dead after %.1f s only. Give all workers of the group the same: --lease-seconds here, "
                    "failoverTimeMillis in the KCL, partition_ownership_expiration_interval in azure-eventhub",
                    owner,
                    gap,
                    config.lease_seconds,
                    expires_above_gap(gap, config),
                )


def first_watch(config: Config, capabilities: Capabilities) -> Watch:
    """Return the initial `Watch`. It has bulletins if the rules have a lookout and annotations are free (C14)."""
    # In a store without free annotations, writing a bulletin changes the version of its row, and other workers would
    # mistake it for a renewal.
    reads_bulletins = config.rules.keeps_lookout and capabilities.free_annotations
    return Watch(
        bulletins=BulletinTracker() if reads_bulletins else None,
        silence_seconds=scale_to_lease_seconds(OUTAGE_SECONDS, config),
    )


def renew_pause_seconds(watch: Watch, config: Config) -> float:
    """Return the longest pause between two calls of `Renewing.begin`.

    If workers read bulletins, the pause is the heartbeat interval, because any worker may become the lookout, which
    must write its bulletin at each heartbeat.
    """
    return config.renew_seconds if watch.bulletins is None else heartbeat_seconds(config)


def bulletin_renewals(holdings: Iterable[Holding], me: str) -> list[tuple[Holding, Renew]]:
    """Return the renewals that write the lookout's new bulletin, which must not wait for the next heartbeat.

    Usually, the result contains one renewal. If the bulletin moves to the row of a lease that the lookout has just
    claimed, the renewal of the former row is returned, too, because other workers still read that row. In the layout
    `sessions`, one write renews all rows, so the former row continues to change, and other workers would not notice
    that the bulletin has moved.
    """
    holdings_by_key = {holding.key: holding for holding in holdings}
    leases = [holding.lease for holding in holdings_by_key.values()]
    bulletin_lease = bulletin_row(leases, me)
    if bulletin_lease is None:
        return []
    # The row with the latest bulletin is the one on which it was last written. It may still be the same row.
    last_written_lease = max(leases, key=lambda lease: (bulletin_of(lease), donation_order(lease)))
    return [
        (holdings_by_key[key], Renew(holdings_by_key[key].lease, "C4"))
        for key in dict.fromkeys((bulletin_lease.key, last_written_lease.key))
    ]
