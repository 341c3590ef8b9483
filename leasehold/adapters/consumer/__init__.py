"""The reading of held leases: open, read, hand over, checkpoint, leave; and the runner that calls each step in time.

Every held lease has one `Reading`. The runner calls its `step` whenever it is due; a step does one bounded piece of
work, never waits for a handler, and returns when to be called next. So a thousand leases need a bounded number of
threads, and the steps of one reading never run side by side.

The order of events in the life of a reading
--------------------------------------------
1. Wait for the parents. A child shard is opened only when its parents are finished (L12), or records of one
   partition key would be handled out of order.
2. Pin the start. LATEST is written down as a position or a time before the first read. Otherwise a crash before the
   first checkpoint would skip what arrives until the next owner starts.
3. Open a reader behind the checkpoint, or behind what this reading has handled since, if that is further.
4. Ask the memory budget, then read once. The batch is held in memory until it is done. A reading for which there is
   no budget holds nothing, so that no two readings wait for each other.
5. Hand the batch over. The lease must be neither lost nor expired: this is checked at the start of the step, after
   the read, which may have taken long, and in the handler's thread just before the call, because the batch may
   have waited for that thread.
6. While the handler is at work, a step only looks after it. No second batch of the shard is read or handed over.
7. The handler has ended with None: the batch is done. Only now its end counts as handled and its memory is given back.
8. The checkpoint is written, at most once in `checkpoint_seconds`. If the lease is to be handed over, the
   position is not written here but with the hand-over.
9. The handler has failed: the same batch is handed over again after a wait, without the records that the
   handler has checkpointed itself. After the last attempt the lease is released; or, where there is a dead letter, the
   batch is handed over in halves, in order, and the dead letter takes the records that fail alone. Each half that is
   handled, and each record that it takes, counts as handled at once, so that the lease can go between two of them.
10. The last batch of a shard is done: the children's leases are created, then SHARD_END is written (L3). A crash
    between the two leaves a shard that is read to its end once more, and children that exist already.
11. Leave. A lease that is to be handed over is given or released together with the position of what is handled, and
    only between two batches. A lost lease is left without a checkpoint, unless late checkpoints are wanted.

What a fault leaves
-------------------
- The store or the source does not answer: the next step goes on after a growing wait. The handled position is
  kept, so that a later checkpoint makes up for one that failed.
- A read fails in an unforeseen way: the reader may be past records that it did not deliver. It is closed, and opened
  anew behind what is handled.
- Other readings need the memory of a batch that waits for its next attempt: the batch is forgotten, and read again by
  a reader that is opened behind what is handled.
- A handler hangs: beyond `handler_seconds` its lease is released. Its call may still be at work, so no other call
  for this lease begins in this process. Another worker may handle the same records at the same time; the fencing
  number tells the two apart.
- A step raises what nobody foresaw: it is repeated a few times, then the lease is released (`guarding`), since a
  lease that is held and not read would stand still unnoticed.
- The lease is lost while a handler is at work: the handler runs on, its records are not checkpointed as the owner,
  and the next owner handles them again.

Why nothing is skipped
----------------------
The handled position moves only over batches whose handler, or dead letter, ended with None, and these follow one
another without a gap from where the reader was opened. Every position that is written is such a position, or one
that the handler checkpointed itself within its batch. Every reader is opened at a written or handled position. So
a record is skipped only if a handler said that it is done; a record after the last checkpoint may be handled twice.
"""
