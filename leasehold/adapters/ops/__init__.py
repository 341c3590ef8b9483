"""Tools for the operator of a lease table, to explain, watch, check, copy, reset and swap leases."""
