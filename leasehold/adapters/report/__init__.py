"""Reports on how leases are distributed, and how that changes, as figures and as a page."""
