"""Watches a lease table, and reports the distribution of its leases as figures and charts."""
