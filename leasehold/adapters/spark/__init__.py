"""Spark streaming sources that share the shards of a stream with the other users of a lease table.

A query is one worker of a group. Its lease loop (`lease_loop`) runs in Spark's source-runner process on the driver,
next to the reader that Spark calls there (`leased_source`). The reader's run (`query_run`) plans and commits batches.
Executors only fetch rows (`fetching`).

Three records say how far a shard is done. No two of them can be written atomically:

    checkpointLocation   Spark's: the offset of each batch, written when the batch is planned, and which are committed
    the sink             the user's: it has all of a batch or none of it, and may skip a batch whose number it knows
    the lease            ours: the checkpoint, after which the next owner starts, in this query or in another worker

An offset contains the exact range of each shard in the batch, so a batch can be planned again from the offset alone.

The order of events in a batch
------------------------------
1. Each held shard is read ahead into a bounded buffer (`prefetcher`), by the rules of any other worker: parents first,
   LATEST pinned before the first read.
2. `latestOffset` takes rows out of the buffers. Each range ends at the position of its last row, and the next range of
   that shard begins there. The same `start` always gets the same end.
3. Spark writes the end offset to its checkpointLocation and calls `partitions` for the rows.
4. The sink takes the batch. Spark records that the batch is committed.
5. Spark calls `commit` when it plans the next batch, not before. If no rows arrive, an offset without rows is planned
   (a flush), so that the last batch is committed too.
6. The prefetcher writes the checkpoint of each shard, or SHARD_END after creating the children's leases (L3), if the
   lease is still ours.
7. A lease that another worker requested is handed off after step 6, so that nothing is processed twice.

What a crash or a stolen lease leaves
-------------------------------------
- Before step 3, nothing of the batch is known. Each shard is read again from its checkpoint.
- Between 3 and 4, Spark repeats the batch in the next run. `replay` reads exactly the ranges of the offset before the
  query joins the group. If a range can no longer be read, all of it is left out, because a sink that skips a known
  batch would lose rows that only the repetition contained. If any number of readers may read a shard, the missing
  range is noted on its lease. Reading continues where the range began.
- Between 4 and 6, the next run of the query knows the ends from the offset and begins after them (`resume_position`).
  Another worker knows only the checkpoint, and processes the batch again. The checkpoint of an earlier run is written
  only once this run has read the shard, because the checkpointLocation may belong to another stream.
- If a lease is lost, its rows in batches that are already planned stay there, and the sink gets them. Its checkpoint is
  no longer written. The new owner starts after the old checkpoint and processes these rows again.
- A lease is handed off before step 6 only when the query ends, because it does not wait for Spark then.

Why nothing is skipped
----------------------
1. A checkpoint is written only for a range whose batch Spark has committed, or whose rows this run has seen to be in
   the sink. Rows that were merely read ahead move nothing.
2. A shard that is taken again begins at the latest of three positions up to which the sink has everything: the lease's
   checkpoint, the beginning of the last range, and the end of that range if the sink is known to have it. Within a run
   it begins after the rows that this run has planned, because this run delivers them or fails.
3. The ranges of a shard follow one another without a gap. Each begins where the last ended, also across a flush, and a
   shard leaves the offset only when its lease records how far it is done.
4. If a partition allows one reader at a time (Event Hubs), a repetition may have been silently rejected. So no run
   assumes that its predecessor's last batch was delivered in full. It continues where that batch began.
5. A fault of the source or the table says nothing about records. Reading waits, and in the end the query fails so that
   Spark repeats the batch. It never continues without them.
"""

from leasehold.adapters.spark.registration import register as register
