"""Renews held leases, each lease on its own, so that a request that stalls delays no other lease.

1. At most one renewal of a lease is in progress. After a failure the next one begins a second later.
2. A lease that no write has confirmed for `lease_seconds` is dropped, because another worker may own it by then. While
   a renewal is in progress, the lease is dropped a third of that time later, because nearly all renewals succeed.

`SlowPeers` logs which other workers renew too slowly for our `lease_seconds`, which means that their setting differs
from ours. `first_watch`, `renew_pause` and `news` are a worker's part in bulletins (C4): whether it reads them, how
often it wakes for them, and which of its leases carries its own.
"""

import logging
import math
from collections.abc import Callable, Collection, Iterable
from heapq import heappop, heappush
from typing import Protocol, TypeVar

from leasehold.adapters.threads import seconds
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
    """Begins to apply a function to each item, and may return before that is done. `map` is an example."""

    def __call__(self, function: Callable[[T], object], items: Iterable[T], /) -> Iterable[object]:
        """Iterate over the result to run the calls, because `map` is lazy; ignore the values."""


def _aged(holding: Holding, now: float) -> Lease:
    lease = holding.lease
    return lease.watched(max(0.0, now - holding.confirmed), lease.held, lease.next_owner_idle)


class Renewing:
    """The renewals of one worker.

    Each lease is checked when it may be due, not at each call. A heap orders the leases by that time, so a call with
    nothing due costs the same however many leases are held. A lease that a checkpoint has renewed meanwhile turns out
    to be early and goes back into the heap.

    Args:
        config: The configuration of the rules.
        release: Called with each lease that is to be handed off once the running batch is done.
        clock: Measures how long a renewal takes.
    """

    def __init__(
        self, config: Config, release: Callable[[Holding], None], clock: Callable[[], float] = seconds
    ) -> None:
        self._config, self._release, self._clock = config, release, clock
        self._took = 0.0
        self._begun: set[Holding] = set()
        self._held: Collection[Holding] = ()
        self._known: frozenset[Holding] = frozenset()
        self._wakes: list[tuple[float, int, Holding, float]] = []
        self._number = 0
        self._row: Holding | None = None
        self._pause, self._tells = math.inf, False

    def begin(
        self, held: Collection[Holding], now: float, me: Me, look: Look, each: BackgroundMap, *, pause: float = math.inf
    ) -> list[Holding]:
        """Renew the leases that are due, hand off requested ones, and drop those that other workers may have taken.

        Args:
            held: The leases held now; the same object until one is added or removed.
            now: The time by the worker's clock.
            me: This worker and what it knows.
            look: The present look, with the annotations to write.
            each: Applies a function to each item.
            pause: The longest time between two checks of a lease.

        Returns:
            The leases that were checked. Each is checked at least every `pause` seconds, because it may have been
            requested meanwhile.
        """
        self._pause, self._tells = pause, bool(look.annotations)
        if held is not self._held:
            # Only new leases are added to the heap. Those that are gone are skipped when they come up.
            current = frozenset(held)
            for holding in current - self._known:
                # Check it in this call: a next owner may have registered before the lease became ours.
                self._wake(-math.inf, holding, -math.inf)
            self._held, self._known = held, current
            key = None if (row := bulletin_row([holding.lease for holding in held], me.worker)) is None else row.key
            self._row = next((holding for holding in held if holding.key == key), None)
        seen: list[Holding] = []
        while self._wakes and self._wakes[0][0] <= now:
            holding = heappop(self._wakes)[2]
            if holding in self._known:
                seen.append(holding)
        seen.sort(key=lambda one: one.key)
        resting = tuple(holding for holding in seen if not self._waits(holding, now))
        wanted: dict[str, tuple[Holding, Renew | None]] = {
            holding.key: (holding, None) for holding in resting if holding.releasing
        }
        due = self._due_renewals(resting, now, me, look)
        wanted |= {holding.key: (holding, action) for holding, action in due}
        for holding in seen:
            # A lease whose renewal is in progress needs no other one, but must still be dropped in time (rule 2).
            if holding.key not in wanted and now > self._drop_at(holding):
                self._drop(holding)
        # Must come before any of them begins: the next call may come while they are in progress (rule 1).
        self._begun.update(holding for holding, _ in wanted.values())
        try:
            list(each(lambda each_of: self._tend(*each_of, look), wanted.values()))
        finally:
            for holding in seen:
                # Even if `each` has raised: a lease that is missing from the heap would never be renewed again.
                self._wake(min(self._due(holding, now), now + pause), holding, now + pause)
        return seen

    def _due_renewals(self, held: Collection[Holding], now: float, me: Me, look: Look) -> list[tuple[Holding, Renew]]:
        """Return which of these leases to renew now.

        While this worker writes a bulletin, its row is renewed more often.
        """
        config, by_key = self._config, {holding.key: holding for holding in held}
        old = [_aged(holding, now) for holding in held if now - holding.confirmed >= config.renew_seconds]
        due = [*renewals(old, me, config)] if old else []
        # Checkpoints write no annotations, so a lease that only they renew would never contain how far behind it is.
        due += [Renew(holding.lease, config.rules.renewal_rule) for holding in held if holding.progress.untold(now)]
        if look.annotations:
            # C4: likewise, a lease that only checkpoints renew would contain no bulletin.
            unsaid = [holding for holding in held if now - holding.renewed >= config.renew_seconds]
            row = self._row
            beats = () if row is None or row.key not in by_key else heartbeat([_aged(row, now)], me, config)
            due += [*beats, *(Renew(holding.lease, "C4") for holding in unsaid)]
        if due and any(holding.grouped for holding in held):
            # One write renews all of them, and from then on they come due together.
            by_key = {candidate.key: candidate for candidate in self._held if not self._waits(candidate, now)}
            due = [*(Renew(holding.lease, config.rules.renewal_rule) for holding in by_key.values()), *due]
        wanted = {action.lease.key: action for action in due}
        return [(by_key[key], action) for key, action in wanted.items()]

    @property
    def side_by_side(self) -> int:
        """How many renewals must run at the same time to be in time at the store's latency, doubled for stalls."""
        return math.ceil(2 * len(self._held) * self._took / self._config.renew_seconds)

    def due(self, now: float) -> float:
        """Return the time of the next call."""
        while self._wakes:
            wake, _, holding, latest = self._wakes[0]
            # The first entry may be out of date: a checkpoint has renewed the lease, or it is no longer held.
            gone = holding not in self._known
            if not gone and (self._waits(holding, now) or min(self._due(holding, now), latest) <= wake):
                return wake
            heappop(self._wakes)
            if not gone:
                self._wake(min(self._due(holding, now), latest), holding, latest)
        return math.inf

    def _wake(self, at: float, one: Holding, latest: float) -> None:
        self._number += 1
        heappush(self._wakes, (at, self._number, one, latest))

    def renew(self, holding: Holding, action: Renew, look: Look, *, patient: bool = True) -> None:
        """Renew this lease now; not `patient` if other workers wait for its annotations."""
        began = self._clock()
        try:
            holding.renew(merge_annotations(action.annotations, look.annotations), patient=patient)
        except StoreError as fault:
            log.warning("lease %s could not be renewed: %s", holding.key, fault)
        # A moving average, in which a single stall counts for little, but several soon count fully.
        took = min(self._clock() - began, 4 * self._took + 0.02)
        self._took += (took - self._took) / 8

    def _waits(self, holding: Holding, now: float) -> bool:
        # If the last try failed, wait a second before the next one, so as not to add to an overload of the store.
        failed = holding.renewed > max(now - RETRY_SECONDS, holding.confirmed)
        return failed or holding in self._begun

    def _due(self, holding: Holding, now: float) -> float:
        if self._waits(holding, now):
            return min(now + RETRY_SECONDS, self._drop_at(holding))
        # C4: a lookout renews the row with the bulletin more often. It waits slightly longer than the pause, because a
        # look that is due at the same time also renews that row.
        beat = self._pause + BEHIND_NEWS_SECONDS if self._tells and holding is self._row else math.inf
        return holding.confirmed + min(self._config.renew_seconds, beat)

    def _drop_at(self, holding: Holding) -> float:
        return holding.confirmed + self._config.lease_seconds * (4 / 3 if holding in self._begun else 1)

    def _tend(self, holding: Holding, action: Renew | None, look: Look) -> None:
        try:
            if action is not None:
                self.renew(holding, action, look)
            # The renewal failed or was late, so by our own clock other workers may have claimed the lease.
            if holding.expired:
                self._drop(holding)
            elif holding.releasing and not holding.lost.is_set():
                self._release(holding)
        finally:
            # Even after an exception, or the renewal would count as in progress forever, and never be repeated.
            self._begun.discard(holding)

    def _drop(self, holding: Holding) -> None:
        # Another worker may own the lease by now, so no more of its records may be handled here.
        holding.drop(f"dropped, not confirmed for {self._config.lease_seconds:g} s: others may have it")


class SlowPeers:
    """Logs each slow worker once."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def observe(self, me: Me, config: Config) -> None:
        """Log the workers whose measured gaps are too long. `plan` waits longer for them, by the same figures."""
        for owner, gap in slow_owners(me, config):
            # Only once, or every full read would log it for as long as that worker runs.
            if owner not in self._said:
                self._said.add(owner)
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
    # If an annotation moves the version, other workers would take each bulletin for a renewal.
    hears = config.rules.keeps_lookout and capabilities.free_annotations
    return Watch(bulletins=BulletinTracker() if hears else None, silence_seconds=scaled(OUTAGE_SECONDS, config))


def renew_pause(watch: Watch, config: Config) -> float:
    """Return the longest wait between two calls: the heartbeat interval.

    Any worker may become the lookout, which reads the table for the group, and must then act within that time.
    """
    return config.renew_seconds if watch.bulletins is None else heartbeat_seconds(config)


def news(held: Iterable[Holding], me: str) -> list[tuple[Holding, Renew]]:
    """Return the row with the bulletin, to be written now: the lookout's news must not wait for the next heartbeat.

    If the lookout has just claimed a lease whose row takes over the bulletin, the former row is returned, too. Readers
    do not know about the new one yet, and in the layout `sessions` the former one does not even fall silent.
    """
    by_key = {holding.key: holding for holding in held}
    leases = [holding.lease for holding in by_key.values()]
    row = bulletin_row(leases, me)
    if row is None:
        return []
    before = max(leases, key=lambda lease: (bulletin_of(lease), donation_order(lease)))
    return [(by_key[key], Renew(by_key[key].lease, "C4")) for key in dict.fromkeys((row.key, before.key))]
