"""Spark's data source over Kinesis."""
