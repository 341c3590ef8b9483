"""Property-based tests: what to draw, the laws of the seam, and fleets under virtual time, for rules of one's own."""
