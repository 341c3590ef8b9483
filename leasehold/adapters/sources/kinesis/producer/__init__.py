"""An ordered, aggregating producer for Kinesis."""

from leasehold.adapters.sources.kinesis.producer.client import client_of, clients_of
from leasehold.adapters.sources.kinesis.producer.producer import Producer

__all__ = ["Producer", "client_of", "clients_of"]
