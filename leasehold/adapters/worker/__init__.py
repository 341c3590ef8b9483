"""The worker, a member of the fleet: it renews its leases, reads the table, plans, and acts."""
