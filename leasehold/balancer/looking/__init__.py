"""Readings of the table: what is remembered of them, and when to read again."""
