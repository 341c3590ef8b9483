"""An ordered, aggregating producer for Kinesis."""

from leasehold.adapters.sources.kinesis.producer.producer import (
    Producer,
    create_producer_client,
    create_producer_clients,
)

__all__ = ["Producer", "create_producer_client", "create_producer_clients"]
