"""Stores that need no service. They keep leases in memory, in a file, or in SQLite for the processes of one machine."""
