"""Processes that read shards for a query whose planner holds the leases.

The planner is the process that Spark starts for the source. It decides who reads which shard, and plans batches of what
readers have reported, so that ends are known before. A reader reads its shards ahead into memory and keeps the rows of
a batch until it is discarded; tasks fetch them there (`fetching`). Once a reader is gone its shards are read elsewhere
behind their last planned ends, and tasks fetch what it had from the planner, which reads exactly these ranges again.

Under a `local` master readers are children of the planner (`children`, `process`). On a cluster they are tasks on its
executors, started by the program that called `register`, since the planner has no session (`jobs`); the planner asks it
for them by a socket of their machine (`executors`). `keeping` starts again what ends; `way` chooses among all of these.

`messages` is what the two say to each other, as lines of JSON over a connection that a reader opens with the query's
token. `reader` and `shelf` are the reader's side; `pool`, `connection`, `far_rows` and `far_transport` the planner's.
"""
