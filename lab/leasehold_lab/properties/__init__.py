"""Property-based tests for your own rule sets: strategies, the laws of the seam, and fleets under virtual time."""
