"""Tables of leases with compare-and-swap."""
