"""The renewals of held leases, each lease by itself: a request that stalls delays no other lease.

Rule 1: at most one renewal of a lease is under way, and the next is begun a second after a failure. Rule 2: a lease
that no write confirmed for `lease_seconds` is dropped, because others may own it by then; while a renewal
is under way it is dropped a third later, since nearly all of those end well.

`SlowPeers` logs which other workers renew too slowly for our `lease_seconds`: they are set to other seconds than we
are. `first_watch`, `renew_pause` and `news`: a worker's part in bulletins (C4), whether it reads them, and which of its
leases carries its own.
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
from leasehold.balancer.counting import patience_with, slow_owners
from leasehold.balancer.lookout import OUTAGE_SECONDS, bulletin_row, heartbeat, heartbeat_seconds, scaled
from leasehold.balancer.model import Lease, Me
from leasehold.balancer.plan import renewals
from leasehold.balancer.rules.shares import donation_order
from leasehold.balancer.watch import Watch
from leasehold.errors import StoreError
from leasehold.stores.printable import escaped
from leasehold.stores.protocol import Capabilities
from leasehold.stores.writes import merged

log = escaped(logging.getLogger("leasehold.renewing"))

RETRY_SECONDS = 1.0
BEHIND_NEWS_SECONDS = 0.05


T = TypeVar("T")


class BackgroundMap(Protocol):
    """Begins to apply a function to each item, and may return before that is done; `map` is one."""

    def __call__(self, function: Callable[[T], object], items: Iterable[T], /) -> Iterable[object]:
        """Iterate the result to run the calls, since `map` is lazy; ignore the values."""


def _aged(holding: Holding, now: float) -> Lease:
    lease = holding.lease
    return lease.watched(max(0.0, now - holding.confirmed), lease.held, lease.next_owner_idle)


class Renewing:
    """The renewals of one worker.

    Each lease is looked at when it may be due, and not at each call: a heap has whose turn is next. A call with
    nothing due costs the same however many are held. What a checkpoint renewed is found to be early, and waits on.

    release  called with each lease that is to be handed over once the running batch is done
    clock    measures how long a renewal takes
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
        """Renew the leases that are due, hand over those asked for, and drop those that others may have taken.

        The answer is those looked at: each is after so many seconds, for it may have been asked for meanwhile.
        """
        self._pause, self._tells = pause, bool(look.notes)
        if held is not self._held:
            # Only what has come gets a place in the heap; what is gone is met there, and left out.
            known = frozenset(held)
            for one in known - self._known:
                # In this very call: an heir may have named itself before the lease was ours.
                self._wake(-math.inf, one, -math.inf)
            self._held, self._known = held, known
            key = None if (row := bulletin_row([one.lease for one in held], me.worker)) is None else row.key
            self._row = next((one for one in held if one.key == key), None)
        seen: list[Holding] = []
        while self._wakes and self._wakes[0][0] <= now:
            one = heappop(self._wakes)[2]
            if one in self._known:
                seen.append(one)
        seen.sort(key=lambda one: one.key)
        resting = tuple(one for one in seen if not self._waits(one, now))
        wanted: dict[str, tuple[Holding, Renew | None]] = {one.key: (one, None) for one in resting if one.releasing}
        due = self._due_renewals(resting, now, me, look)
        wanted |= {holding.key: (holding, action) for holding, action in due}
        for one in seen:
            # Where a renewal is under way none is wanted, and the lease must be dropped all the same (rule 2).
            if one.key not in wanted and now > self._drop_at(one):
                self._drop(one)
        # Before any begins: the next call may come while they are under way (rule 1).
        self._begun.update(holding for holding, _ in wanted.values())
        try:
            list(each(lambda each_of: self._tend(*each_of, look), wanted.values()))
        finally:
            for one in seen:
                # Also where `each` has failed: a lease without a place in the heap would never be renewed again.
                self._wake(min(self._due(one, now), now + pause), one, now + pause)
        return seen

    def _due_renewals(self, held: Collection[Holding], now: float, me: Me, look: Look) -> list[tuple[Holding, Renew]]:
        """The leases of these to renew now; the row with the bulletin more often, while this worker writes one."""
        config, by_key = self._config, {holding.key: holding for holding in held}
        old = [_aged(holding, now) for holding in held if now - holding.confirmed >= config.renew_seconds]
        due = [*renewals(old, me, config)] if old else []
        # Checkpoints carry no notes: a lease that they alone renew would never say how far behind it is.
        due += [Renew(holding.lease, config.rules.renewal_rule) for holding in held if holding.progress.untold(now)]
        if look.notes:
            # C4: checkpoints carry no notes, and a lease that they alone renew would carry no bulletin.
            unsaid = [holding for holding in held if now - holding.renewed >= config.renew_seconds]
            row = self._row
            beats = () if row is None or row.key not in by_key else heartbeat([_aged(row, now)], me, config)
            due += [*beats, *(Renew(holding.lease, "C4") for holding in unsaid)]
        if due and any(holding.grouped for holding in held):
            # One write renews all of them, and they come due together from then on.
            by_key = {one.key: one for one in self._held if not self._waits(one, now)}
            due = [*(Renew(holding.lease, config.rules.renewal_rule) for holding in by_key.values()), *due]
        wanted = {action.lease.key: action for action in due}
        return [(by_key[key], action) for key, action in wanted.items()]

    @property
    def side_by_side(self) -> int:
        """The number of renewals that must run at a time to be in time at the store's speed, twice over for stalls."""
        return math.ceil(2 * len(self._held) * self._took / self._config.renew_seconds)

    def due(self, now: float) -> float:
        """The time of the next call."""
        while self._wakes:
            wake, _, one, latest = self._wakes[0]
            # What stands first may be out of date: a checkpoint has renewed it since, or it is held no more.
            gone = one not in self._known
            if not gone and (self._waits(one, now) or min(self._due(one, now), latest) <= wake):
                return wake
            heappop(self._wakes)
            if not gone:
                self._wake(min(self._due(one, now), latest), one, latest)
        return math.inf

    def _wake(self, at: float, one: Holding, latest: float) -> None:
        self._number += 1
        heappush(self._wakes, (at, self._number, one, latest))

    def renew(self, holding: Holding, action: Renew, look: Look, *, patient: bool = True) -> None:
        """Renew this one now; not `patient` where peers wait for its notes."""
        began = self._clock()
        try:
            holding.renew(merged(action.notes, look.notes), patient=patient)
        except StoreError as fault:
            log.warning("lease %s could not be renewed: %s", holding.key, fault)
        # A mean over the last few, in which one that stalls counts for little, and all of them soon.
        took = min(self._clock() - began, 4 * self._took + 0.02)
        self._took += (took - self._took) / 8

    def _waits(self, holding: Holding, now: float) -> bool:
        # Tried within this second and not confirmed: a store that is overloaded is not asked again at once.
        failed = holding.renewed > max(now - RETRY_SECONDS, holding.confirmed)
        return failed or holding in self._begun

    def _due(self, holding: Holding, now: float) -> float:
        if self._waits(holding, now):
            return min(now + RETRY_SECONDS, self._drop_at(holding))
        # C4: a lookout renews the row with the bulletin more often; a moment later than it might, since the news of a
        # look that is due at the same time renews it, too.
        beat = self._pause + BEHIND_NEWS_SECONDS if self._tells and holding is self._row else math.inf
        return holding.confirmed + min(self._config.renew_seconds, beat)

    def _drop_at(self, holding: Holding) -> float:
        return holding.confirmed + self._config.lease_seconds * (4 / 3 if holding in self._begun else 1)

    def _tend(self, holding: Holding, action: Renew | None, look: Look) -> None:
        try:
            if action is not None:
                self.renew(holding, action, look)
            # The renewal failed or came too late: by our own clock others may have claimed the lease.
            if holding.expired:
                self._drop(holding)
            elif holding.releasing and not holding.lost.is_set():
                self._release(holding)
        finally:
            # Whatever happened, or it would count as under way for ever, and never be renewed again.
            self._begun.discard(holding)

    def _drop(self, holding: Holding) -> None:
        # Another worker may own the lease by now, so no more of its records may be handled here.
        holding.drop(f"dropped, not confirmed for {self._config.lease_seconds:g} s: others may have it")


class SlowPeers:
    """Logs each slow worker once."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def observe(self, me: Me, config: Config) -> None:
        """Log the workers whose measured gaps are too long; `plan` waits longer for them by the same figures."""
        for owner, gap in slow_owners(me, config):
            # Once: it would be said at every full reading, for as long as that worker runs.
            if owner not in self._said:
                self._said.add(owner)
                log.warning(
                    "worker %s let %.1f s pass between two renewals, too long for our lease_seconds of %g; it counts "
                    "as dead after %.1f s only. Give all workers of the group the same: --lease-seconds here, "
                    "failoverTimeMillis in the KCL, partition_ownership_expiration_interval in azure-eventhub",
                    owner,
                    gap,
                    config.lease_seconds,
                    patience_with(gap, config),
                )


def first_watch(config: Config, capabilities: Capabilities) -> Watch:
    """Start the watch; where a note moves the version, without bulletins: each would look like a renewal (C14)."""
    # Only where a note leaves the version alone: else each bulletin would look like a renewal to the others.
    hears = config.rules.keeps_lookout and capabilities.free_notes
    return Watch(bulletins=BulletinTracker() if hears else None, silence_seconds=scaled(OUTAGE_SECONDS, config))


def renew_pause(watch: Watch, config: Config) -> float:
    """The longest wait between two calls: any worker may become the lookout, so it wakes at heartbeat intervals."""
    return config.renew_seconds if watch.bulletins is None else heartbeat_seconds(config)


def news(held: Iterable[Holding], me: str) -> list[tuple[Holding, Renew]]:
    """The row with the bulletin, to be written at once: the lookout's news should not wait for the next heartbeat.

    Where that row is another than before, for the lookout has just claimed it, the former one says it, too: readers
    know of no other yet, and in layout `sessions` it does not even fall silent.
    """
    by_key = {holding.key: holding for holding in held}
    leases = [holding.lease for holding in by_key.values()]
    row = bulletin_row(leases, me)
    if row is None:
        return []
    before = max(leases, key=lambda lease: (bulletin_of(lease), donation_order(lease)))
    return [(by_key[key], Renew(by_key[key].lease, "C4")) for key in dict.fromkeys((row.key, before.key))]
