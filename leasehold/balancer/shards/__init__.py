"""The lifecycle of shards: families, holes, new leases, and leases that may go."""
