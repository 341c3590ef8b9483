"""Kinesis as a source and a sink of records."""
