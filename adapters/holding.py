"""One held lease, as this process last wrote it: every write of a held lease goes through here.

Rule 1: the writes of one lease are serialised, and use the version last written, not the one listed.
Rule 2: a write that was never answered may have happened; then the next one is refused, and the lease
as it really is, which comes with the refusal, settles whose it is.
Rule 3: what is lost stays lost; whoever works on the lease watches `lost` and stops.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from threading import Event, Lock

from attrs import evolve

from adapters.identity import Identity
from adapters.throughput import Throughput
from balancer.model import Lease, Notes, Position
from stores.protocol import Done, Outcome, OutcomeUnknown, Store

ATTEMPTS = 3
MEASURE_SECONDS = 60.0
"""Of reading, each folded with weight 0.5: as often as KCL 3.x moves leases for the sake of load.

What KCL 3.x folds, a third of lease_seconds, tells bursts apart and not shards: fleets never came to rest.
"""


class Holding:
    """A lease this worker owns until `lost` is set.

    store          where the lease lives
    lease          as the write that made it ours answered; reading starts at its checkpoint
    identity       the worker, and its running process
    clock          monotonic seconds
    begun          when the write that made it ours began
    lease_seconds  how long others wait before they take a lease that stands still
    replaced       the process of this worker whose note this one wrote over when it re-adopted the lease
    noticed        called once the lease is lost, given or released
    lock           makes what serialises its writes
    """

    def __init__(
        self,
        store: Store,
        lease: Lease,
        *,
        identity: Identity,
        clock: Callable[[], float],
        begun: float,
        lease_seconds: float,
        replaced: str | None = None,
        noticed: Callable[["Holding"], None] = lambda _holding: None,
        lock: Callable[[], AbstractContextManager[object]] = Lock,
    ) -> None:
        self.key = lease.key
        self.epoch = lease.epoch
        self.lost = Event()
        self.why = ""
        self.twin = False
        self.confirmed = self.renewed = begun
        self.given: Lease | None = None
        self.throughput = Throughput(MEASURE_SECONDS, lease.weight)
        self._store, self._lease, self._identity, self._me = store, lease, identity, identity.worker
        self._clock, self._lease_seconds = clock, lease_seconds
        self._replaced, self._noticed = replaced, noticed
        self._lock, self._losing = lock(), Lock()
        self._release_asked = self._ended = False
        self._giving_to: str | None = None

    @property
    def lease(self) -> Lease:
        """The lease as last written or read."""
        return self._lease

    @property
    def parting(self) -> bool:
        """Whether the owner should finish the running batch and then `part`."""
        named = self._heir is not None and (self._lease.yields or self._lease.leaving)
        return self._release_asked or named

    @property
    def _heir(self) -> str | None:
        return None if self._lease.heir == self._me else self._lease.heir

    @property
    def expired(self) -> bool:
        """Whether others may have taken it by now, as far as our own clock can tell."""
        return self._clock() - self.confirmed > self._lease_seconds

    def ask_release(self) -> None:
        """Have whoever works on it finish the running batch and release it."""
        self._release_asked = True

    def asked(self, listed: Lease) -> None:
        """A reading shows the heir that our own last write did not show yet; a later write of ours knows better."""
        with self._lock:
            if listed.version == self._lease.version:
                self._lease = evolve(self._lease, heir=listed.heir, leaving=listed.leaving)

    def renew(self, notes: Notes = ()) -> bool:
        """Say that its owner lives; False if it is lost. Raises OutcomeUnknown."""
        self.renewed = self._clock()
        return self._write(lambda lease: self._store.renew(self._weighed(lease), self._signed(lease, notes)))

    def checkpoint(
        self,
        position: Position,
        *,
        children: tuple[str, ...] = (),
        keep_owner: bool = False,
        unless_parting: bool = False,
    ) -> bool:
        """Move the checkpoint forward; False if the lease is lost, and with it the right to say so.

        A position that is already behind the checkpoint changes nothing. SHARD_END drops the owner
        unless `keep_owner`. With `unless_parting` nothing more is written once the owner should `part`,
        which stores the position too. Raises OutcomeUnknown; the next call finds out what happened.
        """

        def write(lease: Lease) -> Outcome:
            if position.order <= lease.checkpoint.order or (unless_parting and self.parting):
                return Done(lease)
            return self._store.checkpoint(self._weighed(lease), position, children=children, keep_owner=keep_owner)

        return self._write(write, ended=position.ended and not keep_owner)

    def checkpoint_late(self, position: Position) -> bool:
        """After a theft: move the checkpoint forward without touching owner or counter."""
        return isinstance(self._store.checkpoint_late(self._lease, position), Done)

    def annotate(self, name: str, value: str) -> bool:
        """Set one of our attributes; False if the lease is lost. Raises OutcomeUnknown."""
        return self._write(lambda lease: self._store.annotate(lease, name, value))

    def part(self, position: Position | None = None) -> bool:
        """Give the lease to its heir, or release it, with everything up to `position` processed.

        False if it stays ours: the heir took its request back. Raises OutcomeUnknown.
        """
        if self._heir is None and position is not None:
            self.checkpoint(position)  # a gift carries its position in the same write
        with self._lock:
            if not self.lost.is_set() and self.parting:
                self._part(position or self._lease.checkpoint)
            return self.lost.is_set()

    def drop(self, why: str) -> None:
        """Stop believing in it, without a word to the store, and without waiting for a write that is under way."""
        self._lose(why)

    def _part(self, position: Position) -> None:
        heir = self._heir
        # What is given by KCL 3.x's own fields is found at its new owner's next poll: too late to be taken back here.
        self._giving_to = None if self._lease.leaving else heir
        if heir is not None:
            outcome = self._attempt(lambda lease: self._store.give(lease, max(position, lease.checkpoint, key=_order)))
        else:
            outcome = self._attempt(lambda lease: self._store.release(lease, self._me))
        if not isinstance(outcome, Done):
            self._settle(outcome.lease)
            return
        self.given = outcome.lease if self._giving_to else None
        self._lose(f"given to {heir}" if heir else "released")

    def _write(self, write: Callable[[Lease], Outcome], *, ended: bool = False) -> bool:
        with self._lock:
            for _ in range(ATTEMPTS):
                if self.lost.is_set():
                    return ended and self._ended
                outcome = self._attempt(write)
                if isinstance(outcome, Done):
                    if ended:
                        self._lose("ended")
                    return True
                self._settle(outcome.lease)
            if not self.lost.is_set():
                raise OutcomeUnknown(f"lease {self.key}: {ATTEMPTS} writes were refused although we own it")
            return ended and self._ended

    def _attempt(self, write: Callable[[Lease], Outcome]) -> Outcome:
        begun = self._clock()
        outcome = write(self._lease)
        if isinstance(outcome, Done):
            # A note that leaves the version alone is no sign of life to others.
            if outcome.lease.version != self._lease.version:
                self.confirmed = begun
            self._lease = outcome.lease
        return outcome

    def _settle(self, stored: Lease | None) -> None:
        """What a refusal, which brings the lease as it is, makes of one that we held to be ours."""
        if stored is None:
            self._lose("its row is gone")
        elif stored.owner != self._me:
            # The reply to our own gift may have been lost: it can be taken back until the heir has signed.
            ours_to_give = stored.owner is not None and stored.owner == self._giving_to
            self.given = stored if ours_to_give and self._identity.signed(stored) else None
            self._ended = stored.ended
            self._lose("ended" if stored.ended else f"now owned by {stored.owner}")
        elif self._identity.predecessor(stored) is None:
            # Ours: the reply to one of our writes was lost, or an heir was named in between.
            self._lease = stored
        else:
            self._dispute(stored)

    def _dispute(self, stored: Lease) -> None:
        """Another process writes under our name. The elder stays: it says so by writing again.

        The younger one sees the process it replaced come back to life, and leaves.
        """
        if self._identity.predecessor(stored) == self._replaced:
            self.twin = True
            self._lose("another living process uses this worker id")
        elif self.expired:
            self._lose("re-adopted by another process of this worker id")
        else:
            self._lease = stored
            self._attempt(lambda lease: self._store.renew(lease, self._signed(lease, ())))

    def _weighed(self, lease: Lease) -> Lease:
        return evolve(lease, weight=self.throughput.average(self._clock()))

    def _signed(self, lease: Lease, notes: Notes) -> Notes:
        more = () if self._identity.signed(lease) else self._identity.notes
        return tuple(sorted({**dict(notes), **dict(more)}.items()))

    def _lose(self, why: str) -> None:
        with self._losing:
            first = not self.lost.is_set()
            if first:
                self.why = why
                self.lost.set()
        if first:
            self._noticed(self)


def _order(position: Position) -> tuple[int, int, int]:
    return position.order
