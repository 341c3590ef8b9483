"""Reads the shards of held leases, and calls the step of each lease's reader when it is due.

Every held lease has one `LeaseReader`. The runner calls its `step` whenever it is due. A step does one bounded piece of
work, never waits for a handler, and returns when to call it next. A thousand leases therefore need only a bounded
number of threads, and two steps of one reader never run at the same time.

The order of events in the life of a lease reader
-------------------------------------------------
1. Wait for the parents. A child shard is opened only when its parents are finished (L12), otherwise records of one
   partition key would be handled out of order.
2. Store the start. If the lease starts at LATEST, the current position or time is stored before the first read.
   Otherwise, a crash before the first checkpoint would skip the records that arrive until the next owner starts.
3. Open a reader of the source just after the checkpoint, or after the last position that this worker has handled, if
   that is later.
4. Request memory from the memory budget, then read once. The batch stays in memory until it is done. A lease reader
   that waits for memory holds none, so two lease readers cannot wait for each other.
5. Dispatch the batch, provided that the lease is neither lost nor expired. This is checked three times: at the start of
   the step, again after the read (which may have taken long), and in the handler's thread just before the call (because
   the batch may have waited for that thread).
6. While the handler runs, a step only checks whether it has ended. No second batch of the shard is read or dispatched.
7. When the handler ends with None, the batch is done. The handled position then moves to the end of the batch, and the
   memory is freed.
8. Write the checkpoint, at most once per `checkpoint_seconds`. If the lease is about to be handed off, the position is
   written together with the hand-off instead.
9. If the handler fails, dispatch the same batch again after a wait, without the records that the handler has
   checkpointed by itself. After the last attempt the lease is released. If there is a dead letter, the batch is instead
   dispatched in halves, in order, and records that fail on their own go to the dead letter. Each half that is handled
   and each dead-lettered record counts as handled immediately, so the lease can be released between two of them.
10. When the last batch of a shard is done, create the children's leases, then write SHARD_END (L3). After a crash
    between the two, the end of the shard is read again, and the children's leases exist already.
11. Release the lease. A lease is handed off or released only between two batches, and the handled position is written
    at the same time. If a lease is lost, no checkpoint is written unless late checkpoints are enabled.

What happens after a fault
--------------------------
- If the store or the source does not respond, the next step runs after a wait that grows with each failure. The handled
  position is kept in memory, so a later checkpoint makes up for one that failed.
- If a read fails unexpectedly, the source's reader may have skipped records that it did not return. The reader is
  closed, and another one is opened just after the last batch that was read completely.
- If other lease readers need the memory of a batch that waits for its next attempt, the batch is dropped. It is read
  again by a reader that is opened after the handled position.
- If a handler hangs, its lease is released after `handler_seconds`. The call may still be running, so no other call for
  this lease begins in this process. Another worker may handle the same records at the same time. The two workers have
  different fencing numbers.
- If a step raises an unexpected exception, it is repeated a few times. Then the lease is released (`LeaseReaders`),
  because otherwise its shard would not be read, and no one would notice.
- If the lease is lost while a handler runs, the handler continues. This worker no longer checkpoints its records as the
  owner, and the next owner handles them again.

Why nothing is skipped
----------------------
The handled position advances only over batches whose handler or dead letter ended with None. These batches follow one
another without gaps, beginning at the position at which the reader was opened. Every checkpoint is such a position, or
one that the handler checkpointed by itself within its batch. Every reader is opened at a stored position, or after
batches that are handled or still in memory. A record is therefore skipped only if a handler has checkpointed it. A
record after the last checkpoint may be handled twice.
"""
