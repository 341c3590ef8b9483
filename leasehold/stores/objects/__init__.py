"""Stores of leases in small objects under ETags: one protocol of requests, two layouts, one `EtagStore` over both.

A lease is two or three objects. No service writes two of them in one step, so the order of the writes decides what
a crash leaves and what a competitor can see. Each object carries what the others need not know:

    ownership   owner, counter, heir, weight; its ETag is the lease's version, so each renewal moves the version
    checkpoint  where the next owner starts, and what never changes: stream, shard, parents, hash range
    notes       ours, in the generic layout only; the Azure SDKs' layout keeps them on the ownership, so that there
                a note moves the version

A request (H2), or its withdrawal, changes the ownership without being a sign of its owner's life. It writes the ETag
that the owner last saw into the ownership, and readers take that for the version. The owner's next conditional write
is therefore refused by the service although its condition holds; `EtagStore` reads the ownership and writes again.

The orders, and what a crash between two writes leaves
------------------------------------------------------
create            checkpoint, then the ownership if there is a counter to carry, or notes that the layout keeps there.
                  The checkpoint is written only if its name is free, so of many creators one wins. A crash
                  leaves a lease that nobody owns, without that counter or those notes.
claim, steal,     the ownership alone, under its ETag; then the checkpoint is read for the answer. A crash before that
take back         reading leaves a lease with an owner, which expires like any other.
renewal, release, the ownership alone: one write, and nothing between.
request
checkpoint        ownership, then checkpoint. A crash leaves the lease renewed and the old checkpoint: the
                  records in between are handled again.
shard's end       checkpoint, then ownership. A crash leaves an ended lease with an owner: nothing is left to read,
                  and a deletion of an ended lease does not ask for the owner.
gift              checkpoint, if it moves, then ownership. A crash leaves the giver as owner: it gives again, or
                  expires, and the next owner starts where it stopped. In the reverse order an heir could start
                  before the giver's last checkpoint.
late checkpoint   checkpoint alone: the owner and the version are untouched.
note              the notes object alone, or the ownership where the layout has none.
reset             ownership, then checkpoint, then the ownership is read again. A crash leaves the old checkpoint on a
                  lease that nobody owns; the reset is then repeated. A claim between the two writes is seen by
                  the last reading, and the reset is answered Lost.
delete            ownership, checkpoint, notes, each under its ETag; the first refusal ends the pass. A crash leaves a
                  lease that nobody owns, or only notes, which are no lease.

A claim may be written while a deletion is between its objects. In the generic layout the claimant then finds no
checkpoint, removes the ownership that it has just written, and answers Lost. In the Azure SDKs' layout an
ownership alone is a lease, which starts where the layout says.

Why nothing is skipped
----------------------
1. A checkpoint object is written under its own ETag. If another writer was first, the write is repeated only while
   the stored position is not past the new one, and never over SHARD_END. Only a reset may move it back, and
   only while nobody owns the lease.
2. A worker that lost its lease is stopped at the ownership, by a conditional write or by a reading just before,
   and writes no checkpoint. A theft in between lets that checkpoint through. It moves forward over records that the
   former owner has handled, so the thief, which has read the older one, repeats records and skips none. The
   thief's own checkpoints are refused until they reach the stored one.
3. A new owner reads the checkpoint after its ownership is written. Whatever the former owner wrote under
   its own ownership is in it, except for the write of point 2.

A reply that is lost raises `OutcomeUnknown`, and no second request is sent, since the first may have been carried
out and would refuse the second. The next write under the old version is refused, and its answer shows the truth.
"""
