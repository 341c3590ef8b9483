"""A client of the local Kinesis service, and a stream that tests can write to."""

from collections.abc import Iterator
from uuid import uuid4

import pytest
from types_boto3_kinesis import KinesisClient
from waiters import AT_ONCE

from leasehold.adapters.sources.kinesis.producer.producer import create_producer_client


@pytest.fixture
def client(kinesis_url: str) -> Iterator[KinesisClient]:
    """Yield a client that does not retry requests."""
    client = create_producer_client("eu-west-1", kinesis_url, 8)
    yield client
    client.close()


@pytest.fixture
def stream(client: KinesisClient) -> str:
    """Create a stream with two shards, and return its name."""
    name = f"produced-{uuid4().hex[:8]}"
    client.create_stream(StreamName=name, ShardCount=2)
    client.get_waiter("stream_exists").wait(StreamName=name, WaiterConfig=AT_ONCE)
    return name
