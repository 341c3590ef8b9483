"""Reads records from Kinesis, and writes records to it."""
