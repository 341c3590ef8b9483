"""Makes all writes of a held lease, and tracks the lease as this process last wrote it.

- The writes of one lease are serialized. They use the version that was last written, not the one in a listing.
- A write without a response may have been applied. If it was applied, the next write is rejected. The rejection
  contains the stored lease, which shows who owns it.
- A lost lease stays lost. Its reader watches `lost` and stops.

A holding begins when a write that claims, steals or takes back the lease returns Done. It ends when `lost` is set. In
between:

1. Expiry. `confirmed_at` is the time just before the last write that changed the version. Other workers wait for
   `lease_seconds` from the moment at which the store applied that write, or from a later moment. Therefore, while
   `expired` is false, no worker with the same setting considers the lease expired and claims it. A worker that steals
   the lease does not wait. In this case, a rejected write or a listing shows who the new owner is.
2. Renewals and checkpoints run in different threads. The lock serializes them, and each uses the version that the
   previous write stored. Without the lock, one of our own writes could cause another to be rejected.
3. A write without a response leaves `_lease` unchanged. If the store applied the write, the version has changed, and
   the next write is rejected. If the stored lease is still ours, the rejected write is repeated with the stored
   version. A checkpoint that is already stored needs no further write.
4. A checkpoint only moves forward. The store rejects a checkpoint after another worker has taken the lease, so a former
   owner cannot overwrite its successor's progress. Not every store checks the owner in the same step, so an expired
   lease is renewed before its checkpoint is written. After a steal, `checkpoint_late` may still store the position up
   to which records were handled. This write also moves the checkpoint only forward, and does not change the owner or
   the version.
5. A hand-off waits for the end of the running batch. The write that gives the lease away stores the position and the
   new owner in one call of the store. A release is written after the checkpoint. If the process crashes before the last
   of these writes, the lease is still ours. It expires, and the next owner starts at the stored checkpoint.
6. If the response to the write that gives the lease away is lost, the next write is rejected, and the rejection shows
   that the next owner has the lease. `given_lease` keeps the lease until the next owner claims it.
7. `drop` uses a separate lock, because a store that does not respond must not delay the moment when reading stops.
8. If the row of an owned lease is deleted, alone or with the whole table, the owner recreates it, because no other
   worker knows its position. The new row, which the owner then claims, has the checkpoint that was last written and a
   much higher counter. Once the lease has expired, other workers may have finished the shard and deleted the row (L8).
   In this case, the owner does not recreate the row, and the worker uses the leases of the shard's descendants to
   decide whether to do so (L13). If another worker has created a row in the meantime, as in a new group, the counter of
   that row is below ours. We take over such a row unless its checkpoint is after ours.

`why` describes how a holding has ended. Either the lease was given to its next owner, released or finished (SHARD_END),
or its row was deleted, or another worker or a second process with our id has taken it, or this process dropped it
because, according to its own clock, another worker may own it.

Example: the lease has version 17, and its checkpoint is 100. A checkpoint at 140 is sent and gets no response. If the
store applied this write, the next renewal, with version 17, is rejected, and the rejection contains the stored lease,
which has version 18, our id as owner, and the checkpoint 140. The renewal is then repeated with version 18. If the
store did not apply the write, the renewal succeeds, and the next checkpoint makes up for the lost one. If another
worker has claimed the lease, the rejection names that worker, and this process dispatches no more records of the shard.

No record is skipped, because a caller checkpoints only the records that its handler has finished, every owner starts at
the stored checkpoint, and no write of a worker moves the checkpoint back. Records that were handled after the last
checkpoint are handled twice.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from threading import Event, Lock

from attrs import evolve

from leasehold.adapters.processes import Origin
from leasehold.adapters.worker.annotations import Identity
from leasehold.adapters.worker.progress import ProgressMeter, Throughput
from leasehold.balancer.lineage import UNSEEN_EPOCHS_MAX
from leasehold.balancer.model import Annotations, Lease, Position
from leasehold.errors import OutcomeUnknown, StoreError
from leasehold.stores import writes
from leasehold.stores.printable import make_safe_logger
from leasehold.stores.protocol import Done, Outcome, Store

log = make_safe_logger(logging.getLogger("leasehold.holding"))

WRITE_ATTEMPTS = 3
MEASURE_SECONDS = 60.0
"""The seconds between two updates of a lease's average throughput. KCL 3.x balances loads at the same interval.

KCL 3.x updates its average more often, three times per `lease_seconds`. With such a short interval, the average would
follow bursts, and our workers would never stop moving leases.
"""


class Holding:
    """A lease that this worker owns until `lost` is set.

    Args:
        store: The store that contains the lease.
        lease: The lease as returned by the write that took it. Reading starts at its checkpoint.
        identity: The worker and its running process.
        clock: A monotonic clock, in seconds.
        write_began: The time at which the write that took the lease began.
        lease_seconds: The time after which other workers take a lease that is not renewed.
        replaced_process: The id of an earlier process of this worker, if the row named that process when this one
            re-adopted the lease.
        on_lost: Called once, when the lease is lost, given away or released.
        on_row_recreated: Called with a description if the lease's row was found to be deleted.
        lock: Creates the lock that serializes the writes.

    Attributes:
        contradiction: A description of the contradiction, if the table was found to contain an earlier position than
            this owner had stored (L14); otherwise "".
        fencing_number: The fencing number that is passed to handlers. It never decreases while the lease exists. If the
            layout of the table cannot guarantee this, the fencing number is None.
        given_lease: The lease as it was given to its next owner. It is None if the lease was not given away, or if it
            can no longer be taken back.
        why: A description of how the holding ended.
    """

    def __init__(
        self,
        store: Store,
        lease: Lease,
        *,
        identity: Identity,
        clock: Callable[[], float],
        write_began: float,
        lease_seconds: float,
        replaced_process: str | None = None,
        on_lost: Callable[["Holding"], None] = lambda _holding: None,
        on_row_recreated: Callable[[str], None] = lambda _what: None,
        lock: Callable[[], AbstractContextManager[object]] = Lock,
    ) -> None:
        self.key, self.worker, self.stream = lease.key, identity.worker, lease.stream or identity.stream
        self.epoch = lease.epoch
        self.fencing_number = lease.epoch if store.capabilities.counts_owners else None
        self.groups_writes = store.capabilities.groups_writes
        self.lost = Event()
        self.why = ""
        self.contradiction = ""
        self.duplicate_process = False
        # `confirmed_at` starts as the time before the write that took the lease, because other workers may count the
        # lease's age from any moment between that time and the response.
        self.confirmed_at = self.renewal_tried_at = write_began
        self.given_lease: Lease | None = None
        self.throughput = Throughput(MEASURE_SECONDS, lease.weight)
        self.progress = ProgressMeter(lease, identity.worker, write_began, lease_seconds)
        self._store, self._lease, self._identity, self._me = store, lease, identity, identity.worker
        self._clock, self._lease_seconds = clock, lease_seconds
        self._creating_process = Origin()
        self._replaced_process, self._on_lost, self._on_row_recreated = replaced_process, on_lost, on_row_recreated
        # The second lock is needed because reading must stop immediately, even while a write that waits for its
        # response holds the first lock (7).
        self._lock, self._lost_lock = lock(), Lock()
        self._release_requested = self._ended = False
        self.released = False
        self._release_to: str | None = None
        self._giving_to: str | None = None

    @property
    def lease(self) -> Lease:
        """The lease as last written or read."""
        return self._lease

    @property
    def lease_as_taken(self) -> Lease:
        """The lease with the epoch under which it was taken. This epoch stays the same while we own the lease."""
        return evolve(self._lease, epoch=self.epoch)

    @property
    def releasing(self) -> bool:
        """Whether the owner should finish the running batch and then call `release`."""
        lease = self._lease
        handoff_requested = (
            lease.next_owner is not None and lease.next_owner != self._me and (lease.yields or lease.leaving)
        )
        return self._release_requested or handoff_requested

    @property
    def _next_owner(self) -> str | None:
        return None if self._lease.next_owner == self._me else self._lease.next_owner

    @property
    def expired(self) -> bool:
        """Whether other workers may have claimed the lease by now, according to our own clock."""
        return self._has_expired()

    def _has_expired(self) -> bool:
        # Use a method, because type checkers assume that the value of a property does not change between two uses.
        return self._clock() - self.confirmed_at > self._lease_seconds

    def ask_release(self, next_owner: str | None = None) -> None:
        """Ask the reader to finish the running batch.

        After the batch, the reader releases the lease, or gives it to the worker `next_owner` (M14).
        """
        # Set `_release_to` first, because the reader may check `_release_requested` between these two lines.
        self._release_to = next_owner
        self._release_requested = True

    def note_next_owner(self, listed_lease: Lease) -> None:
        """Use the next owner of a row that was read, unless this worker has written the lease since then."""
        with self._lock:
            # An older version of the row may contain a next owner that has since withdrawn its request.
            if listed_lease.version == self._lease.version:
                self._lease = evolve(self._lease, next_owner=listed_lease.next_owner, leaving=listed_lease.leaving)

    def renew(self, annotations: Annotations = (), *, patient: bool = True) -> bool:
        """Renew the lease, without any delay if `patient` is false.

        Return False if the lease is lost. Raises OutcomeUnknown.
        """
        # Set `renewal_tried_at` even if the write fails, because `Renewing` measures the pause before its next attempt
        # from this time.
        self.renewal_tried_at = self._clock()
        return self._write(
            lambda lease: writes.RenewLease(
                self._with_weight(lease), self._annotations_to_write(lease, annotations), patient=patient
            )
        )

    def renew_to_find_owner(self) -> None:
        """Renew the lease now to find out who owns it, because a read has shown another owner or no row (C9)."""
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
        progress_recorded: bool = False,
    ) -> bool:
        """Move the checkpoint forward.

        A position at or before the checkpoint changes nothing. An expired lease is renewed first. If the renewal is
        rejected, the rejection shows which worker owns the lease.

        Args:
            position: The position up to which everything is processed.
            children: The keys of the child shards' leases, which are stored together with SHARD_END.
            keep_owner: Whether SHARD_END keeps the owner.
            unless_releasing: Whether to write nothing if the owner should `release` the lease. In this case, the
                release stores the position.
            progress_recorded: Whether the caller already recorded the progress in `progress` when the records were
                processed.

        Returns:
            False if the checkpoint was not written because the lease is lost, and True otherwise.

        Raises:
            OutcomeUnknown: The store did not respond. The next write determines whether this one was applied.
            WorkerError: The method was called in a forked child process.
        """
        self._renew_if_expired()

        # Build the write while the lock is held, from the lease as the previous write left it. Otherwise, a position
        # that is already stored could be written again.
        def make_write(lease: Lease) -> writes.Write | None:
            if position.order <= lease.checkpoint.order or (unless_releasing and self.releasing):
                return None
            # Record the progress even if the write fails, because the handler has finished with these records. A lease
            # reader records its progress itself, because it may store the position much later, after a read without a
            # response.
            if not (unless_releasing or progress_recorded):
                self.progress.part_done(self._clock())
            lease_with_weight = self._with_weight(lease)
            may_wait = (
                unless_releasing  # the lease reader's own checkpoints may wait, because no handler waits for them
            )
            return writes.CheckpointLease(
                lease_with_weight, position, children=children, keep_owner=keep_owner, patient=may_wait
            )

        return self._write(make_write, ends_shard=position.ended and not keep_owner)

    def checkpoint_late(self, position: Position) -> bool:
        """Move the checkpoint forward after the lease was stolen, without changing its owner or counter."""
        # Do not use `_write` here, because it writes nothing once the lease is lost.
        return isinstance(self._store.write(writes.CheckpointLate(self._lease, position)), Done)

    def annotate(self, name: str, value: str) -> bool:
        """Write an annotation on the row. Return False if the lease is lost. Raises OutcomeUnknown."""
        return self._write(lambda lease: writes.AnnotateLease(lease, name, value))

    def release(self, position: Position | None = None) -> bool:
        """Checkpoint at `position`, and give the lease to its next owner, or release it if there is none.

        Returns whether the lease is no longer ours. It stays ours if the next owner has withdrawn its request. Raises
        OutcomeUnknown.
        """
        self._renew_if_expired()
        if self._next_owner is None and position is not None:
            self.checkpoint(position, progress_recorded=True)  # `GiveLease` stores the position in the same write
        with self._lock:
            # Check again while holding the lock, because the next owner may have withdrawn its request during the
            # checkpoint.
            if not self.lost.is_set() and self.releasing:
                self._release(position or self._lease.checkpoint)
            return self.lost.is_set()

    def confirm_ownership(self) -> bool:
        """Renew the lease if it has expired. Return whether the lease is still ours. Raises OutcomeUnknown."""
        self._renew_if_expired()
        return not self.lost.is_set()

    def drop(self, reason: str) -> None:
        """Give up the lease locally, without writing and without waiting for a write in progress."""
        self._lose(reason)

    def _renew_if_expired(self) -> None:
        # Not every store checks the owner when a checkpoint is written, but every store does when a lease is renewed.
        if self.expired and not self.lost.is_set():
            self.renew()

    def _release(self, position: Position) -> None:
        next_owner = self._next_owner
        # Never take a lease back from a KCL 3.x worker. Such a worker polls too seldom to claim a lease within the two
        # seconds that we would wait.
        self._giving_to = None if self._lease.leaving else next_owner
        if next_owner is not None:
            outcome = self._try_write(
                lambda lease: writes.GiveLease(
                    lease, max(position, lease.checkpoint, key=lambda candidate: candidate.order)
                )
            )
        else:
            if self.progress.aside and self.progress.annotations(self._clock()):
                # Renew the lease before it is released, because a release writes no annotations. The renewal writes the
                # fault, and the time until which the lease is left to other workers.
                renewal_outcome = self._try_write(
                    lambda lease: writes.RenewLease(lease, self._annotations_to_write(lease, ()))
                )
                if not isinstance(renewal_outcome, Done):
                    self._handle_rejection(renewal_outcome.lease)
                    return
            outcome = self._try_write(lambda lease: writes.ReleaseLease(lease, self._me, self._release_to))
        if not isinstance(outcome, Done):
            self._handle_rejection(outcome.lease)
            return
        # Keep the lease, so that it can be taken back if its next owner never claims it. Otherwise, no worker would
        # read the shard until the lease expires.
        self.given_lease = outcome.lease if self._giving_to else None
        self.released = True
        recipient = next_owner or self._release_to
        self._lose(f"given to {recipient}" if recipient else "released")

    def _write(self, make_write: Callable[[Lease], writes.Write | None], *, ends_shard: bool = False) -> bool:
        self._creating_process.check_same_process()
        with self._lock:
            # Retry a few times, because a lost response causes one rejection, and a next owner that registers in the
            # meantime causes another.
            for _ in range(WRITE_ATTEMPTS):
                if self.lost.is_set():
                    return ends_shard and self._ended
                outcome = self._try_write(make_write)
                if isinstance(outcome, Done):
                    if ends_shard:
                        self._lose("ended")
                    return True
                self._handle_rejection(outcome.lease)
            if not self.lost.is_set():
                raise OutcomeUnknown(f"lease {self.key}: {WRITE_ATTEMPTS} writes were rejected although we own it")
            return ends_shard and self._ended

    def _try_write(self, make_write: Callable[[Lease], writes.Write | None]) -> Outcome:
        write_began, write = self._clock(), make_write(self._lease)
        if write is None:
            # No write is needed, because the position is already stored, or the hand-off will store it.
            return Done(self._lease)
        outcome = self._store.write(write)
        if isinstance(outcome, Done):
            # Other workers recognize a renewal only by a new version.
            if outcome.lease.version != self._lease.version:
                self.confirmed_at = write_began
            self._lease = outcome.lease
        return outcome

    def _handle_rejection(self, stored_lease: Lease | None) -> None:
        """Determine whether the lease is still ours, given the stored lease that a rejected write returned."""
        # The counter of a row grows with each owner. If the stored counter is lower than ours, the row was deleted and
        # recreated.
        if not self._lease.ended and (
            stored_lease is None or (self.fencing_number is not None and stored_lease.epoch < self._lease.epoch)
        ):
            stored_lease = self._restore_row(stored_lease)
        if stored_lease is None:
            self._lose("its row is gone")
        elif stored_lease.owner != self._me:
            # The write that gave the lease away may have been applied although its response was lost. In this case, we
            # can take the lease back until its next owner has claimed it.
            may_take_back = stored_lease.owner is not None and stored_lease.owner == self._giving_to
            self.given_lease = (
                stored_lease if may_take_back and self._identity.was_last_taken_here(stored_lease) else None
            )
            self._ended = stored_lease.ended
            self._lose("ended" if stored_lease.ended else f"now owned by {stored_lease.owner}")
        elif self._identity.earlier_process(stored_lease) is None:
            # The lease is still ours. The write was rejected because the response to an earlier write was lost, or
            # because a next owner registered in between.
            lease_before, self._lease = self._lease, stored_lease
            if stored_lease.checkpoint.order < lease_before.checkpoint.order and not self.contradiction:
                table_position, own_position = stored_lease.checkpoint.sequence, lease_before.checkpoint.sequence
                self.contradiction = (
                    f"lease {self.key} is at {table_position} in the table, and its owner had stored {own_position}: "
                    "was the table set back? The next checkpoint moves it forward again; check the rows of shards "
                    "that no worker reads"
                )
                log.error("%s", self.contradiction)
        elif self._identity.earlier_process(stored_lease) == self._replaced_process:
            # The earlier process still writes under this worker's id, so it keeps the lease, and this process gives the
            # lease up.
            self.duplicate_process = True
            self._lose("another living process uses this worker id")
        elif self.expired:
            self._lose("re-adopted by another process of this worker id")
        else:
            self._lease = stored_lease
            self._try_write(lambda lease: writes.RenewLease(lease, self._annotations_to_write(lease, ())))

    def _restore_row(self, stored_lease: Lease | None) -> Lease | None:
        """Recreate the row, or take over the row that has replaced it. Return the stored lease, if there is one.

        Afterwards, the lease is ours, with three exceptions: the lease has expired, the new row has a later checkpoint,
        or another worker has taken the lease in the meantime.
        """
        own_lease = self._lease
        if stored_lease is None:
            if self.expired:
                return None  # others may have finished the shard, so first check its descendants' leases
            # Add a margin to the counter, because other workers may have taken the lease since we last read it, with
            # counters that we never saw.
            creation = self._store.write(
                writes.CreateLease(evolve(own_lease, epoch=own_lease.epoch + UNSEEN_EPOCHS_MAX))
            )
            stored_lease = creation.lease
            if isinstance(creation, Done):
                if self._has_expired():  # this process was paused during the write
                    self._store.write(writes.DeleteLease(creation.lease))
                    return None
                self._on_row_recreated(f"{self.key} at {own_lease.checkpoint.sequence}")
        # If the lease has expired, do not claim it, because another worker may have claimed the recreated row.
        if stored_lease is None or self.expired:
            return stored_lease
        if stored_lease.checkpoint.order > own_lease.checkpoint.order:
            gap_description = (
                f"{own_lease.checkpoint.sequence}, where this worker was, and {stored_lease.checkpoint.sequence}"
            )
            self._on_row_recreated(f"{self.key}, by another worker: records between {gap_description}, may be unread")
            return stored_lease
        if stored_lease.checkpoint.order < own_lease.checkpoint.order:
            # Write the checkpoint before the claim, so that the next owner starts at our position even if this process
            # ends between the two writes.
            self._store.write(writes.CheckpointLate(stored_lease, own_lease.checkpoint))
        claim_began, write_type = self._clock(), writes.StealLease if stored_lease.owner else writes.ClaimLease
        outcome = self._store.write(write_type(stored_lease, self._me, self._identity.annotations_on(stored_lease)))
        if isinstance(outcome, Done):
            self.confirmed_at = claim_began
        return outcome.lease

    def _with_weight(self, lease: Lease) -> Lease:
        weight = self.throughput.average(self._clock())
        return lease if weight == lease.weight else evolve(lease, weight=weight)

    def _annotations_to_write(self, lease: Lease, annotations: Annotations) -> Annotations:
        missing_annotations = self._identity.missing_annotations(lease)
        return tuple(
            sorted(
                {
                    **dict(annotations),
                    **dict(self.progress.annotations(self._clock())),
                    **dict(missing_annotations),
                }.items()
            )
        )

    def _lose(self, reason: str) -> None:
        with self._lost_lock:
            newly_lost = not self.lost.is_set()
            if newly_lost:
                self.why = reason
                self.lost.set()
        if newly_lost:
            # Call the callback without holding the lock, because the callback may call `drop`, which takes the same
            # lock.
            self._on_lost(self)
