"""Streams to read from, behind one protocol."""
