"""Processes that read shards for a query whose planner holds the leases.

The planner is the process that Spark starts for the source. It decides who reads which shard, and plans batches of rows
that readers have reported, so that the ends of each batch are known in advance. A reader reads its shards ahead into
memory and keeps the rows of a batch until it is discarded; tasks fetch them there (`fetching`). If a reader is gone,
others read its shards from their last planned ends, and tasks fetch its rows from the planner, which reads exactly
these ranges again.

`jobs` starts readers and keeps them alive, on the planner's machine (`process`) or on executors. `pool` is the
planner's side and `reader` the reader's side. `messages` is the protocol between them: lines of JSON over a connection
that a reader opens with the query's token.
"""
