"""Stores leases in small objects with ETags.

There is an implementation of `Objects` for each service. `EtagStore` works with both layouts.

A lease consists of two or three objects. No service can write two objects in one step, so the order of the writes
determines the state after a crash, and the states that other workers can see. The objects are:

    ownership   The owner, the counter, the next owner and the weight. Its ETag is the version of the lease, so each
                renewal changes the version.
    checkpoint  The position where the next owner starts, and the fields that never change (stream, shard, parents and
                hash range).
    notes       Our annotations. Only the generic layout has this object. The Azure SDKs' layout stores annotations in
                the ownership, so an annotation changes the version there.

When a worker requests a lease (H2) or withdraws its request, it writes the ownership object, whose ETag changes
although the owner has not renewed the lease. Therefore, the requesting worker stores the previous ETag in the ownership
object, and readers use the stored ETag as the version. The service rejects the owner's next write because of the new
ETag. `EtagStore` then reads the ownership object, finds that the version is unchanged, and writes again.

The order of writes, and the state after a crash between two of them
--------------------------------------------------------------------
create            The checkpoint, then the ownership if there is a counter to copy or the layout stores annotations
                  there. The checkpoint is written only if its name is free, so only one of several creators succeeds. A
                  crash leaves a lease without an owner, and without that counter or those annotations.
claim, steal,     The ownership alone, if its ETag has not changed. Then the checkpoint is read for the result. A crash
take back         before that read leaves a lease with an owner, which expires like any other.
renewal, release, The ownership alone, in one write.
request
checkpoint        The ownership, then the checkpoint. A crash leaves the lease renewed with the old checkpoint, so the
                  records in between are processed again.
shard end         The checkpoint, then the ownership. A crash leaves an ended lease with an owner. Nothing is left to
                  read, and an ended lease can be deleted even if it has an owner.
gift              The checkpoint if it moves, then the ownership. A crash leaves the giver as the owner. It gives the
                  lease again or expires, and the next owner starts where the giver stopped. In the reverse order, the
                  next owner could start before the giver's last checkpoint.
late checkpoint   The checkpoint alone. Owner and version do not change.
annotation        The notes object alone, or the ownership if the layout has no notes object.
reset             The ownership, then the checkpoint. Then the ownership is read again. A crash leaves the old
                  checkpoint on a lease without an owner, and the reset is repeated. If another worker claims the lease
                  between the two writes, the last read shows it and the result is `Lost`.
delete            The ownership, the checkpoint and the notes, each if its ETag has not changed. The first rejection
                  ends the pass. A crash leaves a lease without an owner, or only notes, which are not a lease.

A claim may be written while a deletion is in progress. In the generic layout, the worker that claims the lease then
finds no checkpoint, removes the ownership object that it has just written, and gets the result `Lost`. In the Azure
SDKs' layout, an ownership alone is a lease, which starts at the position that the layout specifies.

Why nothing is skipped
----------------------
1. Each write of a checkpoint object is conditional on the object's own ETag. If another write came first, the write is
   repeated only while the stored position is not past the new one, and never if the stored position is SHARD_END. Only
   a reset may move the checkpoint back, and only while the lease has no owner.
2. A worker that has lost its lease does not write a checkpoint, because a conditional write or a read of the ownership
   object comes first, and shows the loss. If the lease is stolen after that step, the checkpoint is still written. It
   moves forward only past records that the former owner has processed. The new owner may have read the older
   checkpoint, so it repeats records but skips none. The new owner's checkpoints are rejected until they reach the
   stored one.
3. A new owner reads the checkpoint after writing its ownership object. Therefore, it sees every checkpoint that the
   former owner wrote while it owned the lease, except for the late one in point 2.

If a response is lost, `OutcomeUnknown` is raised and no second request is sent, because the first one may have been
carried out and would make the second fail. If it was carried out, the next write with the old version is rejected, and
the result of that write contains the lease as it is stored.
"""
