"""Spark streaming sources that share the shards of a stream with the other users of a lease table.

A query is one worker of a group. Its lease loop (`lease_loop`) runs in Spark's source-runner process on the driver,
next to the reader that Spark calls there (`leased_source`). The reader's run (`query_run`) plans and commits batches.
Executors only fetch rows (`fetching`).

The progress of a shard is recorded in three places, and no two of them can be updated atomically:

    checkpointLocation   written by Spark: the offset of each planned batch, and which batches are committed
    the sink             written by the user's sink, which has all of a batch or none of it, and may skip a batch number
                         that it has seen
    the lease            written by us: the checkpoint, after which the next owner starts

An offset contains the exact range of each shard in the batch, so a batch can be planned again from the offset alone.

The order of events in a batch
------------------------------
1. Each held shard is read ahead into a bounded buffer (`prefetcher`). As in any other worker, parent shards are read
   before their children, and LATEST is replaced by a fixed position before the first read.
2. `latestOffset` takes rows out of the buffers. Each range ends at the position of its last row, and the next range of
   that shard begins there. For the same `start`, it always returns the same end.
3. Spark writes the end offset to its checkpointLocation and calls `partitions` for the rows.
4. The sink writes the batch, and Spark records that the batch is committed.
5. Spark calls `commit` only when it plans the next batch. If no rows arrive, we plan an offset without rows (a flush),
   so that the last batch is committed too.
6. If the lease is still ours, the prefetcher writes the shard's checkpoint. At the end of a shard, it first creates the
   leases of the child shards and then writes SHARD_END (L3).
7. A lease that another worker has requested is handed off after step 6, so that no record is processed twice.

What happens after a crash or a stolen lease
--------------------------------------------
- After a crash before step 3, no trace of the batch is left, so each shard is read again from its checkpoint.
- After a crash between steps 3 and 4, Spark repeats the batch in the next run. `replay` reads exactly the ranges of the
  offset before the query joins the group. If part of a range can no longer be read, the whole range is left out,
  because a sink that skips batches it has already seen would lose any rows that only the repeated batch contained. If
  the shard allows any number of readers, the missing range is recorded on its lease. Reading continues where the range
  began.
- After a crash between steps 4 and 6, the next run of the query reads the ends from the offset and begins after them
  (`find_resume_position`). Another worker has only the checkpoint, and processes the batch again. A position from an
  earlier run is written as a checkpoint only after this run has read the shard, because the checkpointLocation may
  belong to another stream.
- If a lease is lost, its rows stay in the batches that are already planned, and the sink gets them. We no longer write
  its checkpoint. The new owner starts after the old checkpoint and processes these rows again.
- A lease is handed off before step 6 only when the query ends, because the query does not wait for Spark then.

Why nothing is skipped
----------------------
1. A checkpoint is written only for a range whose batch Spark has committed, or whose rows are in the sink as far as
   this run knows. Rows that were merely read ahead do not move the checkpoint.
2. If a lease is acquired again, its shard is read from the latest of three positions: the lease's checkpoint, the
   beginning of the last range, and the end of that range if it was delivered. The sink has every record up to each of
   these positions. Within a run, the shard is read from after the rows that this run has planned, because this run
   either delivers them or fails.
3. The ranges of a shard follow one another without a gap. Each range begins where the last one ended, even if a flush
   lies between them. A shard is dropped from the offset only when its lease contains the position up to which the shard
   is done.
4. If a partition allows only one reader at a time (Event Hubs), a repeated read may have been silently rejected.
   Therefore, no run assumes that the last batch of the previous run was delivered in full. Each run continues where
   that batch began.
5. An error of the source or the table is no evidence that records are missing. Reading waits, and if the error lasts,
   the query fails so that Spark repeats the batch. The query never continues without the records.
"""

from leasehold.adapters.spark.registration import register as register
