"""An ordered, aggregating producer for Kinesis."""

from leasehold.adapters.sources.kinesis.producer.producer import Producer, client_of, clients_of

__all__ = ["Producer", "client_of", "clients_of"]
