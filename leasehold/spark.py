"""Registers leasehold's data sources with Spark, and keeps a streaming query running. Requires `leasehold[spark]`."""

from leasehold.adapters.spark import register
from leasehold.adapters.spark.supervision import supervise

__all__ = ["register", "supervise"]
