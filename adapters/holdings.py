"""All leases this process holds, and how it comes by those the table already says are its own."""

import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from threading import Lock

from adapters.holding import Holding
from adapters.identity import Identity
from balancer.model import Lease, Version
from stores.protocol import Done, Store, StoreError

log = logging.getLogger("leasehold.holdings")


class WorkerError(Exception):
    """This worker must not go on: what is wrong, and what to do about it."""


class Holdings:
    """The leases held now, each written to through its own `Holding`.

    began  called for each lease that becomes ours
    gave   called with each lease given to its heir, as stored, and the time
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
        lock: Callable[[], AbstractContextManager[object]] = Lock,
    ) -> None:
        self._store, self._identity = store, identity
        self._clock, self._lease_seconds = clock, lease_seconds
        self._began, self._gave, self._lock_of_one = began, gave, lock
        self._held: dict[str, Holding] = {}
        self._lock = Lock()
        self._twin = False
        self._ever: set[str] = set()
        self._loose: dict[str, Lease] = {}
        self._ousted: dict[str, Version] = {}

    @property
    def all(self) -> tuple[Holding, ...]:
        """What is held now, by key."""
        with self._lock:
            return tuple(holding for _, holding in sorted(self._held.items()))

    def get(self, key: str) -> Holding | None:
        """The holding of this lease, if it is held."""
        with self._lock:
            return self._held.get(key)

    def check_identity(self) -> None:
        """Raises WorkerError if another living process was seen to use this worker's id.

        Then nothing is held any more, nor released: a release in our common name would be the other's loss.
        """
        if self._twin:
            for holding in self.all:
                holding.drop("another living process uses this worker id")
            raise WorkerError(
                f"worker id {self._identity.worker!r} is used by another living process: "
                "stop one of the two, or give each worker its own id"
            )

    def hold(self, lease: Lease, begun: float, replaced: str | None = None) -> None:
        """A write that began then has made this lease ours."""
        holding = Holding(
            self._store,
            lease,
            identity=self._identity,
            clock=self._clock,
            begun=begun,
            lease_seconds=self._lease_seconds,
            replaced=replaced,
            noticed=self._let_go,
            lock=self._lock_of_one,
        )
        with self._lock:
            self._held[lease.key] = holding
            self._ever.add(lease.key)
        if not lease.ended:
            self._began(holding)

    def strays(self, leases: Iterable[Lease], *, ended: bool) -> tuple[Lease, ...]:
        """What a reading says is ours and we do not hold; finished ones only if asked for."""
        with self._lock:
            held = frozenset(self._held)
        mine = (lease for lease in leases if lease.owner == self._identity.worker and lease.key not in held)
        return tuple(lease for lease in mine if (ended or not lease.ended) and not self._has_successor(lease))

    @property
    def loose(self) -> tuple[Lease, ...]:
        """What may have become ours by a write that was not answered: nobody reads it until it is taken up."""
        with self._lock:
            return tuple(lease for key, lease in self._loose.items() if key not in self._held)

    def doubt(self, lease: Lease) -> None:
        """A write that takes it was not answered: the next turn asks again, or finds it ours (H4)."""
        with self._lock:
            self._loose[lease.key] = lease

    def doubted(self, read: Iterable[Lease], still: Iterable[str] = ()) -> tuple[Holding, ...]:
        """What we hold although a reading just made says it is another's, or that it stands still (C9)."""
        foreign = [lease.key for lease in read if lease.owner != self._identity.worker]
        with self._lock:
            return tuple(self._held[key] for key in (*foreign, *still) if key in self._held)

    def settle(self, doubted: Holding) -> None:
        """A renewal tells whose it is: a thief that asked nobody is noticed before the next renewal is due."""
        try:
            doubted.renew()
        except StoreError as fault:
            log.warning("lease %s may be lost: %s", doubted.key, fault)

    def _has_successor(self, lease: Lease) -> bool:
        """Whether another process of our id took up what we let expire: asleep for long, we have been replaced."""
        replaced = lease.key in self._ever and self._identity.predecessor(lease) is not None
        if not replaced or lease.idle > self._lease_seconds:
            return False
        before = self._ousted.setdefault(lease.key, lease.version)
        self._twin = self._twin or before != lease.version
        return True

    def adopt(self, seen: Lease) -> Lease | None:
        """Take up a stray: a lease given to us, or held before a restart, expired or not, without a move.

        Answers the lease as it is, where it is another's by now.
        """
        with self._lock:
            self._loose.pop(seen.key, None)
        try:
            stored = self._adopt_as(seen)
            if stored is None or not self._ours(stored):
                return stored
            # The listing may have been stale; what moves between a consistent reading and our write lives.
            again = self._adopt_as(stored)
            alive = again is not None and self._ours(again) and self._identity.predecessor(again) is not None
            self._twin = self._twin or alive
        except StoreError as fault:
            log.warning("lease %s is ours and could not be taken up: %s", seen.key, fault)
            self.doubt(seen)
        return None

    def _ours(self, lease: Lease) -> bool:
        return lease.owner == self._identity.worker and not lease.ended

    def _adopt_as(self, lease: Lease) -> Lease | None:
        """None once it is held, or gone; else the lease as it really is.

        A write, not a mere reading: otherwise the giver of a lease and its heir could both own it.
        """
        begun = self._clock()
        outcome = self._store.claim(lease, self._identity.worker, self._identity.notes)
        if isinstance(outcome, Done):
            self.hold(outcome.lease, begun, self._identity.predecessor(lease))
            return None
        return outcome.lease

    def _let_go(self, holding: Holding) -> None:
        # Given and stolen are daily business; that nothing answered for so long is for somebody to look into.
        log.log(logging.WARNING if holding.expired else logging.INFO, "lease %s: %s", holding.key, holding.why)
        self._twin = self._twin or holding.twin
        with self._lock:
            if self._held.get(holding.key) is holding:
                del self._held[holding.key]
        if holding.given is not None:
            self._gave(holding.given, self._clock())
