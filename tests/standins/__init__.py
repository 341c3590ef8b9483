"""Stand-ins for the clouds' services that only tests and benchmarks start."""
