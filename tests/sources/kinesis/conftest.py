"""A client of the local Kinesis, and a stream that tests can write to."""

from collections.abc import Iterator
from uuid import uuid4

import pytest
from types_boto3_kinesis import KinesisClient
from waiters import AT_ONCE

from leasehold.adapters.sources.kinesis.producer.producer import create_producer_client


@pytest.fixture
def client(kinesis_url: str) -> Iterator[KinesisClient]:
    """A client that does not retry."""
    client = create_producer_client("eu-west-1", kinesis_url, 8)
    yield client
    client.close()


@pytest.fixture
def stream(client: KinesisClient) -> str:
    """A stream of two shards."""
    name = f"produced-{uuid4().hex[:8]}"
    client.create_stream(StreamName=name, ShardCount=2)
    client.get_waiter("stream_exists").wait(StreamName=name, WaiterConfig=AT_ONCE)
    return name
