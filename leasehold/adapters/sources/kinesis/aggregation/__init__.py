"""Reads and writes aggregated records in the format of the Kinesis Producer Library."""
