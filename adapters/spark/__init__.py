"""Spark streaming sources that share the shards of a stream with whoever uses the same lease table."""

from adapters.spark.registration import register as register
