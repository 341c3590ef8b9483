"""Property-based tests for your own rule sets: strategies, laws that each plan must keep, and simulated fleets."""
