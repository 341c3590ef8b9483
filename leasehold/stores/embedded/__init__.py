"""Stores that need no service: memory, files, and SQLite for the processes of one machine."""
