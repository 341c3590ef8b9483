"""The seam as JSON."""
