"""Contains the worker, a member of a fleet, which renews its leases, reads the table, plans and acts."""
