"""Spark's data source over the stream of a DynamoDB table."""
