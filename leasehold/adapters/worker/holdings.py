"""The leases that this process holds, and the adoption of those that the table already says are its own.

A lease is added after a write that made it ours, and removed when its holding is lost. A row may name this worker
as its owner and yet be held by nobody: after a gift, a restart, or a write whose reply was lost. Such a lease is
adopted by a claim under the version as seen. A reading alone is not enough: the giver could take the lease back
at the same moment, and two workers would read it.

The worker's id outlives its process, so a row of ours may belong to another process with the same id. Each taking
writes the process on the row. If a row that another process signed is renewed while we look, that process
lives, and this one must stop (`check_identity`).

`Handoffs`: planned moves between living workers, beyond what one write does: open requests, and gifts.

The taker names itself heir and reads that lease alone until it owns it (`Look.keys`). The owner gives the lease
at the end of its running batch (H3), by `Holding.release`. The heir begins to read only after a claim of its own.
A gift that its heir has not claimed in time is taken back here, or nobody would read the lease until it expires.

`Renewing`: the renewals of held leases, each lease by itself: a request that stalls delays no other lease.

Rule 1: at most one renewal of a lease is under way, and the next is begun a second after a failure. Rule 2: a lease
that no write confirmed for `lease_seconds` is dropped, because others may own it by then; while a renewal
is under way it is dropped a third later, since nearly all of those end well.

`SlowPeers` logs which other workers renew too slowly for our `lease_seconds`: they are set to other seconds than we
are. `Bench`: the leases that this worker leaves to others for a while, because it could not read them. `first_watch`,
`renew_pause` and `news`: its part in bulletins (C4), whether it reads them, and which of its leases carries its own.
"""

import logging
import math
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from heapq import heappop, heappush
from threading import Lock
from typing import Protocol, TypeVar

from leasehold.adapters.threads import seconds
from leasehold.adapters.worker.holding import Holding, Identity
from leasehold.balancer.actions import Action, Claim, Look, Renew, RequestHandoff, Steal
from leasehold.balancer.config import Config
from leasehold.balancer.counting import patience_with, slow_owners
from leasehold.balancer.handoff import asked_again
from leasehold.balancer.lookout import (
    OUTAGE_SECONDS,
    BulletinTracker,
    bulletin_of,
    bulletin_row,
    heartbeat,
    heartbeat_seconds,
    scaled,
)
from leasehold.balancer.model import Lease, Me, Version
from leasehold.balancer.plan import renewals
from leasehold.balancer.rules.shares import donation_order
from leasehold.balancer.shards.contradictions import INCARNATION
from leasehold.balancer.watch import Watch
from leasehold.stores.printable import escaped
from leasehold.stores.protocol import Done, Promises, Store, StoreError
from leasehold.stores.writes import ClaimLease, TakeBackLease, WithdrawRequest, merged

log = escaped(logging.getLogger("leasehold.holdings"))


class WorkerError(Exception):
    """The worker must not go on; the message says what is wrong, and what to do about it."""


class Holdings:
    """The leases held now, each written to through its own `Holding`.

    began  called for each lease that becomes ours
    gave   called with each lease given to its heir, as stored, and the time
    gone   called for each lease that is lost, given or released
    remade called with what became of a row that was deleted under us
    """

    def __init__(
        self,
        store: Store,
        identity: Identity,
        *,
        clock: Callable[[], float],
        lease_seconds: float,
        began: Callable[[Holding], None],
        gave: Callable[[Lease, float], None],
        gone: Callable[[Holding], None],
        remade: Callable[[str], None] = lambda _what: None,
        lock: Callable[[], AbstractContextManager[object]] = Lock,
    ) -> None:
        self._store, self._identity = store, identity
        self._clock, self._lease_seconds = clock, lease_seconds
        self._began, self._gave, self._gone, self._lock_of_one = began, gave, gone, lock
        self._remade = remade
        self._held: dict[str, Holding] = {}
        self._sorted: tuple[Holding, ...] | None = ()
        self._lock = Lock()
        self._duplicate_process = False
        self._ever: set[str] = set()
        self._unconfirmed: dict[str, Lease] = {}
        self._replaced: dict[str, Version] = {}
        self.released: dict[str, Lease] = {}
        """Every lease held once and not now, as last written here."""
        self.dropped: set[str] = set()
        """Those of them that nobody took from us: they could not be confirmed in time."""

    @property
    def all(self) -> tuple[Holding, ...]:
        """The holdings, sorted by key; the same tuple until one comes or goes."""
        with self._lock:
            if self._sorted is None:
                # `Renewing` takes the same tuple as a sign that nothing came or went, and then compares nothing.
                self._sorted = tuple(holding for _, holding in sorted(self._held.items()))
            return self._sorted

    def get(self, key: str) -> Holding | None:
        """The holding of this lease, if it is held."""
        with self._lock:
            return self._held.get(key)

    def check_identity(self) -> None:
        """Raises WorkerError if another living process was seen to use this worker's id.

        Then nothing is held any more, nor released: a release in our common name would be the other's loss.
        """
        if self._duplicate_process:
            for holding in self.all:
                holding.drop("another living process uses this worker id")
            raise WorkerError(
                f"worker id {self._identity.worker!r} is used by another living process: "
                "stop one of the two, or give each worker its own id"
            )

    def hold(self, lease: Lease, begun: float, replaced: str | None = None) -> None:
        """Hold this lease, which a write begun at `begun` has made ours."""
        holding = Holding(
            self._store,
            lease,
            identity=self._identity,
            clock=self._clock,
            begun=begun,
            lease_seconds=self._lease_seconds,
            replaced=replaced,
            noticed=self._let_go,
            remade=self._remade,
            lock=self._lock_of_one,
        )
        with self._lock:
            self._held[lease.key], self._sorted = holding, None
            self._ever.add(lease.key)
            self.dropped.discard(lease.key)
        # KCL 2.x holds finished leases, too, and there is nothing to read in them.
        if not lease.ended:
            self._began(holding)

    def unheld(self, leases: Iterable[Lease], *, ended: bool) -> tuple[Lease, ...]:
        """The leases that name this worker as owner and are not held; finished ones only if `ended`."""
        ours = [lease for lease in leases if lease.owner == self._identity.worker]
        with self._lock:
            mine = [lease for lease in ours if lease.key not in self._held]
        return tuple(lease for lease in mine if (ended or not lease.ended) and not self._has_successor(lease))

    @property
    def unconfirmed(self) -> tuple[Lease, ...]:
        """The leases that an unanswered write may have made ours: nobody reads them until they are adopted."""
        with self._lock:
            return tuple(lease for key, lease in self._unconfirmed.items() if key not in self._held)

    def mark_unconfirmed(self, lease: Lease) -> None:
        """Remember a lease whose claim was not answered: the next turn claims it again, or finds it ours (H4)."""
        with self._lock:
            self._unconfirmed[lease.key] = lease

    def doubted(self, read: Iterable[Lease], missing: Iterable[str] = ()) -> tuple[Holding, ...]:
        """The holdings that a new reading shows with another owner, or without a row (C9)."""
        foreign = [lease.key for lease in read if lease.owner != self._identity.worker]
        with self._lock:
            return tuple(self._held[key] for key in (*foreign, *missing) if key in self._held)

    def reconfirm(self, doubted: Holding) -> None:
        """Renew a doubted lease now: the answer tells who owns it, before the next renewal is due."""
        try:
            doubted.renew()
        except StoreError as fault:
            log.warning("lease %s may be lost: %s", doubted.key, fault)

    def _has_successor(self, lease: Lease) -> bool:
        """Whether another process with our id re-adopted the lease."""
        # A process before us signed rows of ours as well: only what we held ourselves can have been taken over by
        # another.
        replaced = lease.key in self._ever and self._identity.predecessor(lease) is not None
        # If we slept past expiry, that process may own it; but where nobody has renewed it for so long, it is gone, and
        # the lease is ours to adopt.
        if not replaced or lease.idle > self._lease_seconds:
            return False
        # The first version seen may be the last that process wrote; a second one shows that it lives.
        before = self._replaced.setdefault(lease.key, lease.version)
        self._duplicate_process = self._duplicate_process or before != lease.version
        return True

    def readopt(self, seen: Lease) -> Lease | None:
        """Claim a lease whose row names us as owner: given to us, or held before a restart, expired or not.

        Returns the stored lease if another worker owns it by now.
        """
        with self._lock:
            # Before the claim, which decides anew: the answer ends the doubt, and a fault below notes it again.
            self._unconfirmed.pop(seen.key, None)
        try:
            stored = self._adopt_as(seen)
            if stored is None or not self._ours(stored):
                return stored
            # The listing may have been stale. A version that moves after a consistent reading has a living writer.
            again = self._adopt_as(stored)
            alive = again is not None and self._ours(again) and self._identity.predecessor(again) is not None
            self._duplicate_process = self._duplicate_process or alive
        except StoreError as fault:
            log.warning("lease %s is ours and could not be taken up: %s", seen.key, fault)
            self.mark_unconfirmed(seen)
        return None

    def _ours(self, lease: Lease) -> bool:
        return lease.owner == self._identity.worker and not lease.ended

    def _adopt_as(self, lease: Lease) -> Lease | None:
        """Claim the lease as seen; None once it is held, or gone, else the lease as stored."""
        begun = self._clock()
        # A reading in place of the claim would not do: the giver of a lease and its heir could both own it.
        outcome = self._store.write(ClaimLease(lease, self._identity.worker, self._identity.notes_on(lease)))
        if isinstance(outcome, Done):
            self.hold(outcome.lease, begun, self._identity.predecessor(lease))
            return None
        return outcome.lease

    def _let_go(self, holding: Holding) -> None:
        # Gifts and thefts are normal; a lease that expired here points to a store that did not answer.
        log.log(logging.WARNING if holding.expired else logging.INFO, "lease %s: %s", holding.key, holding.why)
        self._duplicate_process = self._duplicate_process or holding.duplicate_process
        with self._lock:
            # A lease that was lost and then claimed again is another holding by now.
            if self._held.get(holding.key) is holding:
                del self._held[holding.key]
                self._sorted = None
                self.released[holding.key] = holding.lease
                if holding.expired:
                    self.dropped.add(holding.key)
        if holding.given is not None:
            self._gave(holding.given, self._clock())
        self._gone(holding)


handoffs_log = escaped(logging.getLogger("leasehold.handoff"))

HANDOFF_RETRY_SECONDS = 0.25
ACCEPT_SECONDS = 2.0

T = TypeVar("T")
R = TypeVar("R")


class ParallelMap(Protocol):
    """Applies a function to each item: `map`, or a pool's, so that writes need not queue."""

    def __call__(self, function: Callable[[T], R], items: Iterable[T], /) -> Iterable[R]:
        """Return the answers, in the order of the items."""


class Handoffs:
    """The open requests of one worker, and the leases that it gave away a moment ago.

    hold   called with each lease that a write made ours, and when that write began
    doubt  called with each lease that turned out to be ours although no write was answered so
    """

    def __init__(
        self,
        store: Store,
        me: str,
        *,
        clock: Callable[[], float],
        lease_seconds: float,
        hold: Callable[[Lease, float], None],
        doubt: Callable[[Lease], None],
    ) -> None:
        self._store, self._me, self._clock, self._hold, self._doubt = store, me, clock, hold, doubt
        # Early enough to claim it back and renew it before others take it for a dead worker's.
        self._accept_seconds = min(ACCEPT_SECONDS, lease_seconds / 3)
        self._asked: dict[str, Lease] = {}
        self._given: dict[str, tuple[Lease, float]] = {}
        self._lock = Lock()

    def asked(self, lease: Lease) -> None:
        """Remember that this worker has requested this lease."""
        with self._lock:
            self._asked[lease.key] = lease

    def settled(self, key: str) -> None:
        """Forget the request for this lease: it is ours now."""
        with self._lock:
            self._asked.pop(key, None)

    def again(self, found: Iterable[Lease]) -> tuple[RequestHandoff, ...]:
        """The requests to make once more, for leases as they are now (H4)."""
        with self._lock:
            pairs = [(self._asked[lease.key], lease) for lease in found if lease.key in self._asked]
        requests = (asked_again(asked, lease) for asked, lease in pairs)
        return tuple(request for request in requests if request is not None)

    def gave(self, lease: Lease, now: float) -> None:
        """Remember a lease given away, as stored now: the heir should claim it soon."""
        with self._lock:
            self._given[lease.key] = (lease, now + self._accept_seconds)

    def check_timeouts(self, now: float, each: ParallelMap = map) -> float:
        """Take back the gifts that no heir has claimed in time; return when to call again."""
        with self._lock:
            late = tuple(lease for lease, due in self._given.values() if due <= now)
        list(each(self._take_back, late))
        with self._lock:
            # What could not be taken back stays overdue, and must not have the caller come again without a pause.
            return min((max(due, now + HANDOFF_RETRY_SECONDS) for _, due in self._given.values()), default=math.inf)

    def withdraw(self) -> None:
        """Take back every request, because this worker leaves."""
        with self._lock:
            asked, self._asked = tuple(self._asked.values()), {}
        for lease in asked:
            try:
                # Else its owner would hand it to a worker that has left, and it would lie unread until it is taken
                # back.
                self._store.write(WithdrawRequest(lease, self._me))
            except StoreError as fault:
                handoffs_log.warning(
                    "lease %s: the request for it stands until its owner overrules it: %s", lease.key, fault
                )

    def _take_back(self, lease: Lease) -> None:
        begun = self._clock()
        try:
            outcome = self._store.write(TakeBackLease(lease, self._me))
        except StoreError as fault:
            handoffs_log.warning(
                "lease %s: nobody accepted it, and it could not be taken back yet: %s", lease.key, fault
            )
            return
        with self._lock:
            # Only after an answer: a gift of which nobody knows is tried again.
            self._given.pop(lease.key, None)
        if isinstance(outcome, Done):
            handoffs_log.info("lease %s: %s did not accept it; taken back", lease.key, lease.owner)
            self._hold(outcome.lease, begun)
        elif outcome.lease is not None and outcome.lease.owner == self._me:
            self._doubt(outcome.lease)  # an earlier try was applied and its reply lost


class Bench:
    """Keys of leases, each with the time until which this worker does not take it, and of which stream it was.

    Of a stream that was made anew under its name (L14) another lease of that key may be read well.
    """

    def __init__(self) -> None:
        self._until: dict[str, tuple[float, str | None]] = {}

    def put(self, key: str, until: float, incarnation: str | None = None) -> None:
        """Do not take this lease before then, while its row names this incarnation, if one is given."""
        self._until[key] = until, incarnation

    def without(self, actions: tuple[Action, ...], now: float) -> tuple[Action, ...]:
        """The actions but those that would take such a lease.

        They must not count as planned: the lease is open to others, and the bulletin of a lookout calls them for it.
        """
        kept = list[Action]()
        for action in actions:
            until, incarnation = self._until.get(action.lease.key, (now, None))
            # A row of another incarnation of the stream is of other records: nobody has failed to read those.
            same = incarnation in {None, action.lease.note(INCARNATION)}
            if not (isinstance(action, Claim | Steal | RequestHandoff) and same and until > now):
                kept.append(action)
        return tuple(kept)


def first_watch(config: Config, promises: Promises) -> Watch:
    """Start the watch; where a note moves the version, without bulletins: each would look like a renewal (C14)."""
    # Only where a note leaves the version alone: else each bulletin would look like a renewal to the others.
    hears = config.rules.keeps_lookout and promises.free_notes
    return Watch(bulletins=BulletinTracker() if hears else None, silence_seconds=scaled(OUTAGE_SECONDS, config))


def _aged(holding: Holding, now: float) -> Lease:
    lease = holding.lease
    return lease.watched(max(0.0, now - holding.confirmed), lease.held, lease.heir_idle)


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


renewals_log = escaped(logging.getLogger("leasehold.renewing"))

RETRY_SECONDS = 1.0
BEHIND_NEWS_SECONDS = 0.05


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
                renewals_log.warning(
                    "worker %s let %.1f s pass between two renewals, too long for our lease_seconds of %g; it counts "
                    "as dead after %.1f s only. Give all workers of the group the same: --lease-seconds here, "
                    "failoverTimeMillis in the KCL, partition_ownership_expiration_interval in azure-eventhub",
                    owner,
                    gap,
                    config.lease_seconds,
                    patience_with(gap, config),
                )


class BackgroundMap(Protocol):
    """Begins to apply a function to each item, and may return before that is done; `map` is one."""

    def __call__(self, function: Callable[[T], object], items: Iterable[T], /) -> Iterable[object]:
        """Iterate the result to run the calls, since `map` is lazy; ignore the values."""


class Renewing:
    """The renewals of one worker.

    Each lease is looked at when it may be due, and not at each call: a heap tells whose turn is next. A call with
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
        due += [Renew(holding.lease, config.rules.renewal_rule) for holding in held if holding.reach.untold(now)]
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
        """How many renewals must go on at a time to renew all in time as the store answers, twice over for stalls."""
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
            renewals_log.warning("lease %s could not be renewed: %s", holding.key, fault)
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
