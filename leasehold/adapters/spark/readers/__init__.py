"""Processes that read shards for a query whose planner holds the leases.

The planner is the process that Spark starts for the source. It decides who reads which shard, and plans batches of what
readers have reported, so that ends are known before. A reader reads its shards ahead into memory and keeps the rows of
a batch until it is discarded; tasks fetch them there (`fetching`). Once a reader is gone its shards are read elsewhere
behind their last planned ends, and tasks fetch what it had from the planner, which reads exactly these ranges again.

`jobs` starts readers and keeps them alive, on the planner's machine (`process`) or on executors. `pool` is the
planner's side of them and `reader` their own. `messages` is what the two say to each other, as lines of JSON over a
connection that a reader opens with the query's token.
"""
