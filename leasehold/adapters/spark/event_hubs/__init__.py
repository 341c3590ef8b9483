"""Spark's data source over Event Hubs."""
