"""A fixture with the stream that the tests of the command read."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from ground import Ground

if TYPE_CHECKING:
    from types_boto3_kinesis import KinesisClient


@pytest.fixture
def ground(dynalite_url: str, kinesis_url: str, kinesis_client: "KinesisClient", tmp_path: Path) -> Iterator[Ground]:
    """Yield the services, with a stream of one shard."""
    environment = Ground(kinesis_client, kinesis_url, dynalite_url, tmp_path)
    kinesis_client.create_stream(StreamName=environment.stream, ShardCount=1)
    kinesis_client.get_waiter("stream_exists").wait(StreamName=environment.stream, WaiterConfig={"Delay": 1})
    yield environment
    kinesis_client.delete_stream(StreamName=environment.stream)
