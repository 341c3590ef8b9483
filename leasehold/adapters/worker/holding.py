"""A held lease, as this process last wrote it: every write of a held lease goes through here.

Rule 1: the writes of one lease are serialised, and use the version last written, not the one listed.
Rule 2: an unanswered write may have been applied; then the next write is refused, and the stored lease,
which comes with the refusal, tells who owns it. Rule 3: a lost lease stays lost; its reader watches `lost` and stops.

A holding begins when a claim, a theft or a take-back is answered Done, and ends with `lost`. In between:

1. Time. `confirmed` is the clock before the last write that moved the version. Other workers wait for
   `lease_seconds` from when the store applied that write, or later, so while `expired` is false no worker with
   the same setting may claim the lease as dead. A thief does not wait: a refused write or a listing shows it.
2. Renewals and checkpoints run in different threads. The lock puts them in one order, and each uses the version
   that the write before it stored. Without the lock two of our own writes would refuse each other.
3. An unanswered write leaves `_lease` as it was. If the store applied it, the version has moved and the next
   write is refused. If the stored lease is still ours, the write is made again on it; a checkpoint that is
   already stored is then no write at all.
4. A checkpoint moves forward only. The store refuses it after another worker took the lease, so that a former
   owner cannot write into its successor's work. Not every store checks the owner in the same step, so an
   expired lease is renewed before its checkpoint. After a theft `checkpoint_late` may still store what was
   handled: that too moves forward only, and leaves owner and version alone.
5. A hand-over waits for the end of the running batch. A gift stores the position and the new owner by one call
   of the store; a release is written after the checkpoint. A crash before the last write leaves the lease with
   us; it expires, and the next owner starts at the stored checkpoint.
6. If the reply to a gift is lost, the refusal of the next write names the heir; `given` keeps it until it claims.
7. `drop` takes a lock of its own: a store that does not answer must not delay the moment when reading stops.
8. A row that was deleted under its owner, with the whole table or alone, is made anew by that owner, for nobody else
   knows how far it was: only where there is no row, at the checkpoint last written and far above its counter, and then
   claimed. Once the lease has expired, others may have finished the shard and deleted the row (L8), so the owner makes
   none, and the worker decides by the leases of the shard's descendants (L13). A row that another made meanwhile, as
   for a new group, has a counter that ours has passed: it is taken over unless its checkpoint is further.
It ends, and `why` says how: given to its heir, released, finished (SHARD_END), taken by another worker or by a
second process under our own id, or dropped, since by our own clock others may have it.
Example: the lease is at version 17, its checkpoint at 100. A checkpoint at 140 is sent, and no answer comes. If the
store applied it, the next renewal, under 17, is refused and brings the stored lease: version 18, ours, at 140; the
renewal is made again under 18. If not, the renewal is done, and the next checkpoint says what this one should have
said. If another worker has claimed the lease, the refusal names it, and nothing more is handed over here.

Nothing is skipped: a caller checkpoints only what its handler has finished, every owner starts at the stored
checkpoint, and no write of a worker moves it back. What was handled after the last checkpoint is handled twice.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from threading import Event, Lock

from attrs import evolve

from leasehold.adapters.processes import Origin
from leasehold.adapters.worker.notes import Identity
from leasehold.adapters.worker.progress import ProgressMeter, Throughput
from leasehold.balancer.lineage import EPOCHS_UNSEEN
from leasehold.balancer.model import Lease, Notes, Position
from leasehold.errors import OutcomeUnknown, StoreError
from leasehold.stores import writes
from leasehold.stores.printable import escaped
from leasehold.stores.protocol import Done, Outcome, Store

log = escaped(logging.getLogger("leasehold.holding"))

ATTEMPTS = 3
MEASURE_SECONDS = 60.0
"""Seconds of reading that each step of the average covers: KCL 3.x balances the load as often.

KCL 3.x itself averages over a third of lease_seconds, which measures bursts: fleets never stopped moving leases.
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
    remade         called with what became of a row that was gone
    lock           makes what serialises its writes

    `contradiction` is a sentence once the table has shown less than this owner had stored (L14).
    `fence` is the number that handlers are given: it never falls while the lease exists, and is None where the
    layout cannot promise that.
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
        remade: Callable[[str], None] = lambda _what: None,
        lock: Callable[[], AbstractContextManager[object]] = Lock,
    ) -> None:
        self.key, self.worker, self.stream = lease.key, identity.worker, lease.stream or identity.stream
        self.epoch = lease.epoch
        self.fence = lease.epoch if store.capabilities.counts_owners else None
        self.grouped = store.capabilities.groups_writes
        self.lost = Event()
        self.why = ""
        self.contradiction = ""
        self.duplicate_process = False
        # The clock before that write, not after its answer: others may count from any moment in between.
        self.confirmed = self.renewed = begun
        self.given: Lease | None = None
        self.throughput = Throughput(MEASURE_SECONDS, lease.weight)
        self.progress = ProgressMeter(lease, identity.worker, begun, lease_seconds)
        self._store, self._lease, self._identity, self._me = store, lease, identity, identity.worker
        self._clock, self._lease_seconds = clock, lease_seconds
        self._origin = Origin()
        self._replaced, self._noticed, self._remade = replaced, noticed, remade
        # Two locks: reading must stop at once, also while a write that no store answers holds the first (7).
        self._lock, self._losing = lock(), Lock()
        self._release_asked = self._ended = False
        self._release_to: str | None = None
        self._giving_to: str | None = None

    @property
    def lease(self) -> Lease:
        """The lease as last written or read."""
        return self._lease

    @property
    def claimed(self) -> Lease:
        """The lease under the counter it was taken with, which stays the same while we own it."""
        return evolve(self._lease, epoch=self.epoch)

    @property
    def releasing(self) -> bool:
        """Whether the owner should finish the running batch and then `release`."""
        lease = self._lease
        named = lease.next_owner is not None and lease.next_owner != self._me and (lease.yields or lease.leaving)
        return self._release_asked or named

    @property
    def _next_owner(self) -> str | None:
        return None if self._lease.next_owner == self._me else self._lease.next_owner

    @property
    def expired(self) -> bool:
        """Whether other workers may have claimed the lease by now, by our own clock."""
        return self._has_expired()

    def _has_expired(self) -> bool:
        # A method, since a type checker takes a property that was just False for False a line later.
        return self._clock() - self.confirmed > self._lease_seconds

    def ask_release(self, to: str | None = None) -> None:
        """Ask the reader to finish the running batch and then release the lease, or make a stranger its owner (M14)."""
        # The heir first: the reader may look between these two lines.
        self._release_to = to
        self._release_asked = True

    def asked(self, listed: Lease) -> None:
        """Note the heir that a reading shows, unless we wrote the lease after that reading."""
        with self._lock:
            # An older reading may show an heir that has taken its request back since.
            if listed.version == self._lease.version:
                self._lease = evolve(self._lease, next_owner=listed.next_owner, leaving=listed.leaving)

    def renew(self, notes: Notes = (), *, patient: bool = True) -> bool:
        """Renew the lease, at once unless `patient`; False if it is lost. Raises OutcomeUnknown."""
        # Whatever becomes of it: from here `Renewing` counts the second until it tries again.
        self.renewed = self._clock()
        return self._write(
            lambda lease: writes.RenewLease(self._weighed(lease), self._signed(lease, notes), patient=patient)
        )

    def reconfirm(self) -> None:
        """Renew now, since a reading shows another owner or no row (C9): the answer shows who owns the lease."""
        try:
            self.renew()
        except StoreError as fault:
            log.warning("lease %s may be lost: %s", self.key, fault)

    def checkpoint(
        self,
        position: Position,
        *,
        children: tuple[str, ...] = (),
        keep_owner: bool = False,
        unless_releasing: bool = False,
    ) -> bool:
        """Move the checkpoint forward; False if the lease is lost, and the checkpoint therefore not written.

        A position at or before the checkpoint changes nothing. SHARD_END drops the owner unless `keep_owner`.
        With `unless_releasing` nothing more is written once the owner should `release`, which stores the position too.
        An expired lease is renewed first, and a refusal tells who owns it.
        Raises OutcomeUnknown; the next call finds out what happened. Raises WorkerError in a forked child.
        """
        self._confirm()

        # Decided under the lock, on the lease as the write before left it: a position that is stored is not written
        # again.
        def moved(lease: Lease) -> writes.Write | None:
            if position.order <= lease.checkpoint.order or (unless_releasing and self.releasing):
                return None
            # Whatever becomes of the write: the handler has finished with these records.
            self.progress.progressed(self._clock())
            weighed = self._weighed(lease)
            patient = unless_releasing  # nobody waits for it
            return writes.CheckpointLease(weighed, position, children=children, keep_owner=keep_owner, patient=patient)

        return self._write(moved, ended=position.ended and not keep_owner)

    def checkpoint_late(self, position: Position) -> bool:
        """After a theft: move the checkpoint forward without touching owner or counter."""
        # Past `_write`, which writes nothing more once the lease is lost.
        return isinstance(self._store.write(writes.CheckpointLate(self._lease, position)), Done)

    def annotate(self, name: str, value: str) -> bool:
        """Set one of our attributes; False if the lease is lost. Raises OutcomeUnknown."""
        return self._write(lambda lease: writes.AnnotateLease(lease, name, value))

    def release(self, position: Position | None = None) -> bool:
        """Give the lease to its heir, or release it, with everything up to `position` processed.

        False if it stays ours: the heir took its request back. Raises OutcomeUnknown.
        """
        self._confirm()
        if self._next_owner is None and position is not None:
            self.checkpoint(position)  # a gift carries its position in the same write
        with self._lock:
            # Asked once more under the lock: the heir may have taken its request back while the checkpoint was written.
            if not self.lost.is_set() and self.releasing:
                self._release(position or self._lease.checkpoint)
            return self.lost.is_set()

    def confirm(self) -> bool:
        """Renew the lease if it has expired; False if it is lost. Raises OutcomeUnknown."""
        self._confirm()
        return not self.lost.is_set()

    def drop(self, why: str) -> None:
        """Give up the lease locally: write nothing, and wait for no write that is under way."""
        self._lose(why)

    def _confirm(self) -> None:
        # Not every store checks the owner when a checkpoint is written; each does when a lease is renewed.
        if self.expired and not self.lost.is_set():
            self.renew()

    def _release(self, position: Position) -> None:
        next_owner = self._next_owner
        # Nothing is taken back from a KCL 3.x heir: it polls less often than the two seconds after which we would.
        self._giving_to = None if self._lease.leaving else next_owner
        if next_owner is not None:
            outcome = self._attempt(
                lambda lease: writes.GiveLease(lease, max(position, lease.checkpoint, key=lambda place: place.order))
            )
        else:
            if self.progress.aside and self.progress.notes(self._clock()):
                # Renewed first, as a release carries no notes: the row names the fault, and until when it is put aside.
                renewed = self._attempt(lambda lease: writes.RenewLease(lease, self._signed(lease, ())))
                if not isinstance(renewed, Done):
                    self._settle(renewed.lease)
                    return
            outcome = self._attempt(lambda lease: writes.ReleaseLease(lease, self._me, self._release_to))
        if not isinstance(outcome, Done):
            self._settle(outcome.lease)
            return
        # Kept, to be taken back if the heir never claims it: nobody would read it until it expires.
        self.given = outcome.lease if self._giving_to else None
        taker = next_owner or self._release_to
        self._lose(f"given to {taker}" if taker else "released")

    def _write(self, make: Callable[[Lease], writes.Write | None], *, ended: bool = False) -> bool:
        self._origin.check()
        with self._lock:
            # A lost reply costs one refusal, an heir that names itself in between another: a few tries pass them all.
            for _ in range(ATTEMPTS):
                if self.lost.is_set():
                    return ended and self._ended
                outcome = self._attempt(make)
                if isinstance(outcome, Done):
                    if ended:
                        self._lose("ended")
                    return True
                self._settle(outcome.lease)
            if not self.lost.is_set():
                raise OutcomeUnknown(f"lease {self.key}: {ATTEMPTS} writes were refused although we own it")
            return ended and self._ended

    def _attempt(self, make: Callable[[Lease], writes.Write | None]) -> Outcome:
        begun, write = self._clock(), make(self._lease)
        if write is None:
            # Nothing to write: it is stored already, or the lease is to go, and the hand-over carries the position.
            return Done(self._lease)
        outcome = self._store.write(write)
        if isinstance(outcome, Done):
            # To other workers only a new version is a renewal.
            if outcome.lease.version != self._lease.version:
                self.confirmed = begun
            self._lease = outcome.lease
        return outcome

    def _settle(self, stored: Lease | None) -> None:
        """Decide by the stored lease, which came with a refusal, whether the lease is still ours."""
        # With each owner the counter of one row grows: one behind ours is of a row that was deleted and created again.
        if not self._lease.ended and (stored is None or (self.fence is not None and stored.epoch < self._lease.epoch)):
            stored = self._restored(stored)
        if stored is None:
            self._lose("its row is gone")
        elif stored.owner != self._me:
            # The reply to our own gift may have been lost: the gift can be taken back until the heir has claimed it.
            ours_to_give = stored.owner is not None and stored.owner == self._giving_to
            self.given = stored if ours_to_give and self._identity.signed(stored) else None
            self._ended = stored.ended
            self._lose("ended" if stored.ended else f"now owned by {stored.owner}")
        elif self._identity.predecessor(stored) is None:
            # Ours: the reply to one of our writes was lost, or an heir was named in between.
            before, self._lease = self._lease, stored
            if stored.checkpoint.order < before.checkpoint.order and not self.contradiction:
                back, ours = stored.checkpoint.sequence, before.checkpoint.sequence
                self.contradiction = (
                    f"lease {self.key} is at {back} in the table, and its owner had stored {ours}: was the table set "
                    "back? The next checkpoint moves it forward again; look at the rows of shards that nobody reads"
                )
                log.error("%s", self.contradiction)
        elif self._identity.predecessor(stored) == self._replaced:
            # Another process writes under this worker's id. The elder keeps the lease: it writes again, the younger
            # then sees the process that it replaced write, and gives up.
            self.duplicate_process = True
            self._lose("another living process uses this worker id")
        elif self.expired:
            self._lose("re-adopted by another process of this worker id")
        else:
            self._lease = stored
            self._attempt(lambda lease: writes.RenewLease(lease, self._signed(lease, ())))

    def _restored(self, stored: Lease | None) -> Lease | None:
        """The row as it is once what we remember is in it; ours, unless the lease expired or another knows more."""
        ours = self._lease
        if stored is None:
            if self.expired:
                return None  # others may have finished the shard: the worker decides by the leases of its descendants
            # Another may have taken the lease since we last heard of it, under numbers that we never saw.
            made = self._store.write(writes.CreateLease(evolve(ours, epoch=ours.epoch + EPOCHS_UNSEEN)))
            stored = made.lease
            if isinstance(made, Done):
                if self._has_expired():  # this process stood still in between
                    self._store.write(writes.DeleteLease(made.lease))
                    return None
                self._remade(f"{self.key} at {ours.checkpoint.sequence}")
        # Others may have claimed it by now: it is not claimed back, but the row is there for them.
        if stored is None or self.expired:
            return stored
        if stored.checkpoint.order > ours.checkpoint.order:
            between = f"{ours.checkpoint.sequence}, where this worker was, and {stored.checkpoint.sequence}"
            self._remade(f"{self.key}, by another: what is between {between}, may be unread")
            return stored
        if stored.checkpoint.order < ours.checkpoint.order:
            # Before the claim: if this process ends in between, the next owner begins where it was all the same.
            self._store.write(writes.CheckpointLate(stored, ours.checkpoint))
        begun, take = self._clock(), writes.StealLease if stored.owner else writes.ClaimLease
        outcome = self._store.write(take(stored, self._me, self._identity.notes_on(stored)))
        if isinstance(outcome, Done):
            self.confirmed = begun
        return outcome.lease

    def _weighed(self, lease: Lease) -> Lease:
        weight = self.throughput.average(self._clock())
        return lease if weight == lease.weight else evolve(lease, weight=weight)

    def _signed(self, lease: Lease, notes: Notes) -> Notes:
        more = self._identity.lacking(lease)
        return tuple(sorted({**dict(notes), **dict(self.progress.notes(self._clock())), **dict(more)}.items()))

    def _lose(self, why: str) -> None:
        with self._losing:
            first = not self.lost.is_set()
            if first:
                self.why = why
                self.lost.set()
        if first:
            # Outside the lock: whoever hears of it may call `drop`, which takes that lock.
            self._noticed(self)
