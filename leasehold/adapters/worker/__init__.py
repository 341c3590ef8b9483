"""Contains the worker, which renews its leases, reads the lease table, plans and acts."""
