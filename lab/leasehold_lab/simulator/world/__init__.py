"""The simulated world: its clock, table, stream and processes."""
