"""Lease tables without a service: memory, and SQLite for the processes of one machine."""
