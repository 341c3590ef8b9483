"""Spark streaming sources that share the shards of a stream with all users of the same lease table.

A query is one worker of a group. Its lease loop (`lease_loop`) runs in Spark's source-runner process on the driver,
beside the reader that Spark calls there (`leased_source`), whose run plans batches and commits them (`stream`).
Executors only fetch rows (`fetching`). Where one process is too little, others read for it (`readers`); all that
follows holds for them, too, with their reports in place of readings.

Three records say how far a shard is done, and none of them can be written together with another:

    checkpointLocation   Spark's: the offset of each batch, written when it is planned; and which batches are committed
    the sink             the user's: it has a batch whole, or not at all, and may skip a batch whose number it knows
    the lease            ours: the checkpoint, which the next owner starts behind, in this query or in any other worker

An offset says of each shard the exact range of its batch (`offsets`), so that it can be planned again from itself.

The order of events in a batch
------------------------------
1. Each held shard is read ahead into a bounded buffer (`feed`), as a reading of any other worker is: parents first,
   LATEST pinned before the first read.
2. `latestOffset` takes rows out of the buffers. The end of each range is the position of its last row, and the next
   range of that shard begins there. The same `start` always gets the same end.
3. Spark writes the end offset to its checkpointLocation, and asks `partitions` for the rows.
4. The sink takes the batch. Spark writes down that the batch is committed.
5. Spark calls `commit` when it plans the next batch, and not before. Where no rows come, an offset without rows is
   planned (a flush), so that the last batch is committed, too.
6. The feed writes the checkpoint of each shard, or SHARD_END after its children (L3), if the lease is still ours.
7. A lease that another worker asked for is handed over after step 6, so that nothing is processed twice.

What a crash, or a theft, leaves
--------------------------------
- Before step 3: nothing of the batch is known. Each shard is read again behind its checkpoint.
- Between 3 and 4: Spark repeats the batch in the next run. `replay` reads exactly the ranges of the offset, before
  the query joins the group. A range that cannot be had is left out whole, since a sink that skips a known batch would
  lose rows that only the repetition had. Where anybody
  may read, that is noted on the lease. Reading goes on where the range began.
- Between 4 and 6: the next run of the query knows the ends from the offset, and begins behind them (`resumed`);
  another worker knows the checkpoint alone, and processes the batch again. The checkpoint of an earlier run is written
  only once this run has read the shard: the checkpointLocation may be of another stream.
- A lost lease: its rows in batches that are planned stay there, and are the sink's. Its checkpoint is no longer
  written; the thief, which starts behind the old one, processes these rows again.
- A hand-over to another worker before step 6 happens only when the query ends: it does not wait for Spark then.

Why nothing is skipped
----------------------
1. A checkpoint is written only of a range whose batch Spark has committed, or whose rows this run has seen to be in
   the sink. Rows that were read ahead move nothing.
2. A shard taken anew begins at the latest of three places up to which the sink has everything: the lease's checkpoint,
   the beginning of the last range, and its end if the sink is known to have it. Within a run it begins behind what was
   handed to Spark, which this run delivers, or fails.
3. Ranges of one shard follow one another without a gap: each begins where the last ended, also across a flush, and a
   shard leaves the offset only when its lease says how far it is done.
4. Where only one reader may read a partition at a time (Event Hubs), a repetition may have been refused in silence, so
   no run believes that its predecessor's last batch was delivered in full; it goes on where that batch began.
5. A fault of the source or the table says nothing about records. Reading waits, and the query fails in the end, so
   that Spark repeats the batch; it never goes on without them.
"""

from typing import TYPE_CHECKING

from leasehold.adapters.spark.registration import register as register

if TYPE_CHECKING:  # pyspark is an extra
    from leasehold.adapters.spark.supervision import run as run


def __getattr__(name: str) -> object:
    if name == "run":
        from leasehold.adapters.spark.supervision import run as found  # noqa: PLC0415  pyspark is an extra

        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
