"""Renews held leases with a separate call for each lease, so that a slow request does not delay other leases.

1. At most one renewal of a lease is in progress. After a failure the next one begins a second later.
2. A lease that no write has confirmed for `lease_seconds` is dropped, because another worker may own it by then. If a
   renewal is in progress at that moment, the lease is dropped only after another third of `lease_seconds`, because
   nearly all renewals succeed.

`SlowPeers` logs which other workers renew too slowly for our `lease_seconds`, which means that their setting differs
from ours. `first_watch`, `renew_pause` and `bulletin_renewals` let a worker read and write bulletins (C4). They
determine whether the worker reads bulletins, how often it wakes up for them, and which of its leases carries its own
bulletin.
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
from leasehold.balancer.lookout import OUTAGE_SECONDS, bulletin_row, heartbeat, heartbeat_seconds, scaled
from leasehold.balancer.model import Lease, Me
from leasehold.balancer.plan import renewals
from leasehold.balancer.rules.shares import donation_order
from leasehold.balancer.watch import Watch
from leasehold.errors import StoreError
from leasehold.stores.printable import escaped
from leasehold.stores.protocol import Capabilities
from leasehold.stores.writes import merge_annotations

log = escaped(logging.getLogger("leasehold.renewing"))

RETRY_SECONDS = 1.0
BEHIND_NEWS_SECONDS = 0.05


T = TypeVar("T")


class BackgroundMap(Protocol):
    """Applies a function to each item, and may return before all calls have ended. `map` is an example."""

    def __call__(self, function: Callable[[T], object], items: Iterable[T], /) -> Iterable[object]:
        """Iterate over the result to run the calls, because `map` is lazy. The values are ignored."""


def _with_age(holding: Holding, now: float) -> Lease:
    lease = holding.lease
    return lease.watched(max(0.0, now - holding.confirmed), lease.held, lease.next_owner_idle)


class Renewing:
    """The renewals of one worker.

    Each lease is checked when it may be due, not at each call. A heap orders the leases by that time, so a call with
    nothing due costs the same however many leases are held. If a checkpoint has renewed a lease in the meantime, the
    lease is not due and is put back into the heap.

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
        self._begun: set[Holding] = set()
        self._held: Collection[Holding] = ()
        self._known_holdings: frozenset[Holding] = frozenset()
        self._wake_queue: list[tuple[float, int, Holding, float]] = []
        self._number = 0
        self._bulletin_holding: Holding | None = None
        self._pause, self._writes_bulletin = math.inf, False

    def begin(
        self, held: Collection[Holding], now: float, me: Me, look: Look, each: BackgroundMap, *, pause: float = math.inf
    ) -> list[Holding]:
        """Renew the leases that are due, hand off the requested ones, and drop leases that others may have taken.

        Args:
            held: The leases held now. The collection must be the same object until a lease is added or removed.
            now: The time by the worker's clock.
            me: This worker and what it knows.
            look: The present look, with the annotations to write.
            each: Applies a function to each item.
            pause: The longest time between two checks of a lease.

        Returns:
            The leases that were checked. Each is checked at least every `pause` seconds, because it may have been
            requested meanwhile.
        """
        self._pause, self._writes_bulletin = pause, bool(look.annotations)
        if held is not self._held:
            # Only new leases are added to the heap. Leases that are no longer held are skipped when they are due.
            held_now = frozenset(held)
            for holding in held_now - self._known_holdings:
                # Check the new lease in this call, because a next owner may have registered before this worker took it.
                self._wake(-math.inf, holding, -math.inf)
            self._held, self._known_holdings = held, held_now
            key = None if (row := bulletin_row([holding.lease for holding in held], me.worker)) is None else row.key
            self._bulletin_holding = next((holding for holding in held if holding.key == key), None)
        checked: list[Holding] = []
        while self._wake_queue and self._wake_queue[0][0] <= now:
            holding = heappop(self._wake_queue)[2]
            if holding in self._known_holdings:
                checked.append(holding)
        checked.sort(key=lambda candidate: candidate.key)
        ready = tuple(holding for holding in checked if not self._must_wait(holding, now))
        wanted: dict[str, tuple[Holding, Renew | None]] = {
            holding.key: (holding, None) for holding in ready if holding.releasing
        }
        due = self._due_renewals(ready, now, me, look)
        wanted |= {holding.key: (holding, action) for holding, action in due}
        for holding in checked:
            # If a renewal is in progress, no other one is needed, but the lease must still be dropped in time (rule 2).
            if holding.key not in wanted and now > self._drop_at(holding):
                self._drop(holding)
        # Mark the renewals as begun before the first one starts, because the next call may come while they are in
        # progress (rule 1).
        self._begun.update(holding for holding, _ in wanted.values())
        try:
            list(each(lambda item: self._renew_or_release(*item, look), wanted.values()))
        finally:
            for holding in checked:
                # Put the leases back into the heap even if `each` has raised. A lease that is missing from the heap is
                # never renewed again.
                self._wake(min(self._due(holding, now), now + pause), holding, now + pause)
        return checked

    def _due_renewals(self, held: Collection[Holding], now: float, me: Me, look: Look) -> list[tuple[Holding, Renew]]:
        """Return which of these leases to renew now.

        If this worker writes a bulletin, the row with the bulletin is renewed more often than the others.
        """
        config, by_key = self._config, {holding.key: holding for holding in held}
        old = [_with_age(holding, now) for holding in held if now - holding.confirmed >= config.renew_seconds]
        due = [*renewals(old, me, config)] if old else []
        # Checkpoints write no annotations, so the row of a lease that is renewed only by checkpoints would never
        # contain its lag.
        due += [
            Renew(holding.lease, config.rules.renewal_rule) for holding in held if holding.progress.annotation_due(now)
        ]
        if look.annotations:
            # C4: in the same way, the row of a lease that is renewed only by checkpoints would contain no bulletin.
            without_bulletin = [holding for holding in held if now - holding.renewed >= config.renew_seconds]
            row = self._bulletin_holding
            heartbeats = () if row is None or row.key not in by_key else heartbeat([_with_age(row, now)], me, config)
            due += [*heartbeats, *(Renew(holding.lease, "C4") for holding in without_bulletin)]
        if due and any(holding.grouped for holding in held):
            # If the store groups writes, one write renews all leases, and from then on they are due at the same time.
            by_key = {candidate.key: candidate for candidate in self._held if not self._must_wait(candidate, now)}
            due = [*(Renew(holding.lease, config.rules.renewal_rule) for holding in by_key.values()), *due]
        due_by_key = {action.lease.key: action for action in due}
        return [(by_key[key], action) for key, action in due_by_key.items()]

    @property
    def parallel_renewals(self) -> int:
        """Twice the number of renewals that must run in parallel at the store's latency. Some requests may stall."""
        return math.ceil(2 * len(self._held) * self._average_seconds / self._config.renew_seconds)

    def due(self, now: float) -> float:
        """Return the time of the next call."""
        while self._wake_queue:
            wake, _, holding, latest = self._wake_queue[0]
            # The first entry may be out of date. A checkpoint may have renewed the lease, or the lease may no longer be
            # held.
            is_held = holding in self._known_holdings
            if is_held and (self._must_wait(holding, now) or min(self._due(holding, now), latest) <= wake):
                return wake
            heappop(self._wake_queue)
            if is_held:
                self._wake(min(self._due(holding, now), latest), holding, latest)
        return math.inf

    def _wake(self, time: float, holding: Holding, latest: float) -> None:
        self._number += 1
        heappush(self._wake_queue, (time, self._number, holding, latest))

    def renew(self, holding: Holding, action: Renew, look: Look, *, patient: bool = True) -> None:
        """Renew this lease now. Pass `patient=False` if other workers wait for the annotations."""
        began = self._clock()
        try:
            holding.renew(merge_annotations(action.annotations, look.annotations), patient=patient)
        except StoreError as fault:
            log.warning("lease %s could not be renewed: %s", holding.key, fault)
        # Use a moving average. A single slow request changes it little, while several of them raise it quickly.
        seconds_taken = min(self._clock() - began, 4 * self._average_seconds + 0.02)
        self._average_seconds += (seconds_taken - self._average_seconds) / 8

    def _must_wait(self, holding: Holding, now: float) -> bool:
        # If the last try failed, wait a second before the next one, so as not to add to an overload of the store.
        recently_failed = holding.renewed > max(now - RETRY_SECONDS, holding.confirmed)
        return recently_failed or holding in self._begun

    def _due(self, holding: Holding, now: float) -> float:
        if self._must_wait(holding, now):
            return min(now + RETRY_SECONDS, self._drop_at(holding))
        # C4: a lookout renews the row with the bulletin more often. It waits slightly longer than the pause, because a
        # look that is due at the same time also renews that row.
        beat = (
            self._pause + BEHIND_NEWS_SECONDS
            if self._writes_bulletin and holding is self._bulletin_holding
            else math.inf
        )
        return holding.confirmed + min(self._config.renew_seconds, beat)

    def _drop_at(self, holding: Holding) -> float:
        return holding.confirmed + self._config.lease_seconds * (4 / 3 if holding in self._begun else 1)

    def _renew_or_release(self, holding: Holding, action: Renew | None, look: Look) -> None:
        try:
            if action is not None:
                self.renew(holding, action, look)
            # If the renewal failed or was late, other workers may have claimed the lease by our own clock.
            if holding.expired:
                self._drop(holding)
            elif holding.releasing and not holding.lost.is_set():
                self._release(holding)
        finally:
            # Remove the mark even after an exception. Otherwise the renewal would count as in progress forever and
            # never be repeated.
            self._begun.discard(holding)

    def _drop(self, holding: Holding) -> None:
        # Stop handling records of this shard, because another worker may already own the lease.
        holding.drop(f"dropped, not confirmed for {self._config.lease_seconds:g} s: others may have it")


class SlowPeers:
    """Logs each worker that renews too slowly, once."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def observe(self, me: Me, config: Config) -> None:
        """Log the workers whose renewal gaps are too long, and for which `plan` therefore waits longer."""
        for owner, gap in slow_owners(me, config):
            # Log each worker only once. Otherwise it would be logged again at every full read.
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
    """Start the watch of the table, with bulletins if the rules have a lookout and annotations are free (C14)."""
    # If an annotation changes the version (`free_annotations` is false), other workers would mistake each bulletin for
    # a renewal.
    reads_bulletins = config.rules.keeps_lookout and capabilities.free_annotations
    return Watch(
        bulletins=BulletinTracker() if reads_bulletins else None, silence_seconds=scaled(OUTAGE_SECONDS, config)
    )


def renew_pause(watch: Watch, config: Config) -> float:
    """Return the longest wait between two calls, which is the heartbeat interval.

    Any worker may become the lookout, and the lookout must write its bulletin this often.
    """
    return config.renew_seconds if watch.bulletins is None else heartbeat_seconds(config)


def bulletin_renewals(held: Iterable[Holding], me: str) -> list[tuple[Holding, Renew]]:
    """Return the renewal that writes the lookout's new bulletin, which must not wait for the next heartbeat.

    If the lookout has just claimed a lease whose row takes over the bulletin, the renewal of the former row is
    returned, too. Other workers still read the former row. In the layout `sessions`, the former row even continues to
    change, so other workers cannot notice that the bulletin has moved.
    """
    by_key = {holding.key: holding for holding in held}
    leases = [holding.lease for holding in by_key.values()]
    row = bulletin_row(leases, me)
    if row is None:
        return []
    former_row = max(leases, key=lambda lease: (bulletin_of(lease), donation_order(lease)))
    return [(by_key[key], Renew(by_key[key].lease, "C4")) for key in dict.fromkeys((row.key, former_row.key))]
