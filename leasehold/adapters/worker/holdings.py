"""The leases that this process holds, and the adoption of those that the table already says are its own.

A lease is added after a write that made it ours, and removed when its holding is lost. A row may name this worker
as its owner and yet be held by nobody: after a gift, a restart, or a write whose reply was lost. Such a lease is
adopted by a claim under the version as seen. A reading alone is not enough: the giver could take the lease back
at the same moment, and two workers would read it.

The worker's id outlives its process, so a row of ours may belong to another process with the same id. Each taking
writes the process on the row. If a row that another process signed is renewed while we look, that process
lives, and this one must stop (`check_identity`).

`Cooldown`: the leases that this worker leaves to others for a while, because it could not read them.
"""

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from threading import Lock

from leasehold.adapters.worker.holding import Holding
from leasehold.adapters.worker.notes import Identity
from leasehold.balancer.actions import Action, Claim, RequestHandoff, Steal
from leasehold.balancer.contradictions import INCARNATION
from leasehold.balancer.model import Lease, Version
from leasehold.errors import StoreError, WorkerError
from leasehold.stores.printable import escaped
from leasehold.stores.protocol import Done, Store
from leasehold.stores.writes import ClaimLease

log = escaped(logging.getLogger("leasehold.holdings"))


class Holdings:
    """The leases held now, each written to through its own `Holding`.

    began  called for each lease that becomes ours
    gave   called with each lease given to its heir, as stored, and the time
    gone   called for each lease that is lost, given or released
    rest_seconds
           how long to take nothing after takings that were not answered: longer than a lease and two looks
    remade called with what became of a row that was deleted under us
    """

    def __init__(
        self,
        store: Store,
        identity: Identity,
        *,
        clock: Callable[[], float],
        lease_seconds: float,
        rest_seconds: float = 0.0,
        began: Callable[[Holding], None],
        gave: Callable[[Lease, float], None],
        gone: Callable[[Holding], None],
        remade: Callable[[str], None] = lambda _what: None,
        lock: Callable[[], AbstractContextManager[object]] = Lock,
    ) -> None:
        self._store, self._identity = store, identity
        self._clock, self._lease_seconds, self._rest_seconds = clock, lease_seconds, rest_seconds
        self._began, self._gave, self._gone, self._lock_of_one = began, gave, gone, lock
        self._remade = remade
        self._held: dict[str, Holding] = {}
        self._sorted: tuple[Holding, ...] | None = ()
        self._lock = Lock()
        self._duplicate_process = False
        self._ever: set[str] = set()
        self._unconfirmed: dict[str, Lease] = {}
        self._unanswered_at, self._in_doubt, self._rests_until = -math.inf, False, -math.inf
        self._replaced: dict[str, Version] = {}
        self.released: dict[str, Lease] = {}
        """Every lease held once and not now, as last written here."""
        self.dropped: set[str] = set()
        """The released leases that no other worker took: no write confirmed them in time."""

    @property
    def all(self) -> tuple[Holding, ...]:
        """The holdings, sorted by key; the same tuple until one comes or goes."""
        with self._lock:
            if self._sorted is None:
                # The renewals take the same tuple as a sign that nothing came or went, and then compare nothing.
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

    @property
    def rests(self) -> bool:
        """Whether to take nothing for now, because takings are not answered.

        They may arrive all the same. Repeated soon, each would make the lease look alive, and no worker would read it;
        after a pause longer than its lease and two looks, another worker has it.
        """
        return self._clock() < self._rests_until

    def mark_unconfirmed(self, lease: Lease) -> None:
        """Remember a lease that an unanswered write may have made ours: the next turn claims it again (H4)."""
        with self._lock:
            self._unconfirmed[lease.key] = lease

    def not_answered(self, lease: Lease, begun: float, *, claimed: bool) -> None:
        """Remember that a write which takes this lease was not answered.

        Args:
            lease: The lease as it was seen.
            begun: When the write began.
            claimed: Whether it was a claim, which is repeated.
        """
        if claimed:
            self.mark_unconfirmed(lease)
        with self._lock:
            if self._in_doubt and begun > self._unanswered_at:  # a second try, and not another write beside the first
                self._rests_until = self._clock() + self._rest_seconds
            self._in_doubt, self._unanswered_at = True, self._clock()

    def answered(self) -> None:
        """Go on taking: a write that takes a lease was answered."""
        self._in_doubt, self._rests_until = False, -math.inf

    def allowed(self, actions: Sequence[Action]) -> tuple[Action, ...]:
        """Return the actions, without those that would take a lease while this worker rests."""
        rests = self.rests
        return tuple(one for one in actions if not (rests and isinstance(one, Claim | Steal | RequestHandoff)))

    def looked(self, leases: Iterable[Lease]) -> None:
        """Go on taking if these leases, as read now, show that an unanswered claim did not arrive."""
        with self._lock:
            lost = [each for each in leases if each.key in self._unconfirmed and not self._ours(each)]
            for each in lost:
                del self._unconfirmed[each.key]
        if lost:
            self.answered()

    def doubted(self, read: Iterable[Lease], missing: Iterable[str] = ()) -> tuple[Holding, ...]:
        """The holdings that a new reading shows with another owner, or without a row (C9)."""
        foreign = [lease.key for lease in read if lease.owner != self._identity.worker]
        with self._lock:
            return tuple(self._held[key] for key in (*foreign, *missing) if key in self._held)

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
        begun = self._clock()
        try:
            stored = self._adopt_as(seen)
            if stored is None or not self._ours(stored):
                return stored
            # The listing may have been stale. A version that moves after a consistent reading has a living writer.
            again = self._adopt_as(stored)
            alive = again is not None and self._ours(again) and self._identity.predecessor(again) is not None
            self._duplicate_process = self._duplicate_process or alive
        except StoreError as fault:
            self.not_answered(seen, begun, claimed=True)
            log.warning("lease %s is ours and could not be taken up: %s", seen.key, fault)
        return None

    def _ours(self, lease: Lease) -> bool:
        return lease.owner == self._identity.worker and not lease.ended

    def _adopt_as(self, lease: Lease) -> Lease | None:
        """Claim the lease as seen; None once it is held, or gone, else the lease as stored."""
        begun = self._clock()
        # A reading in place of the claim would not do: the giver of a lease and its heir could both own it.
        outcome = self._store.write(ClaimLease(lease, self._identity.worker, self._identity.notes_on(lease)))
        self.answered()
        if isinstance(outcome, Done):
            self.hold(outcome.lease, begun, self._identity.predecessor(lease))
            return None
        return outcome.lease

    def _let_go(self, holding: Holding) -> None:
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
        # Last, as a handler of the log may be slow. Gifts and thefts are normal; a lease that expired here points to a
        # store that did not answer.
        log.log(logging.WARNING if holding.expired else logging.INFO, "lease %s: %s", holding.key, holding.why)


class Cooldown:
    """Keys of leases, each with the time until which this worker does not take it, and of which stream it was.

    In a stream that was created again under its name (L14) another lease of that key may be read well.
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
