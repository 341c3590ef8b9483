"""How leases are shared out, and how that changes, as figures and as a page."""
