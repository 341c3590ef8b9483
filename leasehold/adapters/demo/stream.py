"""The stream of a run: created, split and merged; each call waits until the service has done it."""

import time
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

import boto3
from botocore.config import Config as ClientConfig

from leasehold.adapters.sources.kinesis.source import KinesisSource
from leasehold.balancer.model import Shard

if TYPE_CHECKING:  # the stubs are no dependency of a user
    from types_boto3_kinesis import KinesisClient
    from types_boto3_kinesis.type_defs import PutRecordsRequestEntryTypeDef

POLL_SECONDS = 0.05
WAIT_SECONDS = 30.0


class StreamError(Exception):
    """The stand-in did not do as asked."""


def client(endpoint: str) -> "KinesisClient":
    """A client that never sends anything twice: a repeated put is a duplicate of the producer's own."""
    return boto3.client(
        "kinesis",
        endpoint_url=endpoint,
        config=ClientConfig(retries={"total_max_attempts": 1, "mode": "standard"}, read_timeout=60),
    )


class Stream:
    """A stream of a local service."""

    def __init__(self, endpoint: str, name: str, shards: int) -> None:
        """Create it, and wait until it takes records."""
        self.name, self.url = name, f"kinesis://{name}?endpoint={endpoint}"
        self._client = client(endpoint)
        self._source = KinesisSource(self._client, name)
        self._client.create_stream(StreamName=name, ShardCount=shards)
        self._settle()

    def shards(self) -> tuple[Shard, ...]:
        """All shards of the stream, closed ones included."""
        return self._source.shards()

    def parents(self) -> Mapping[str, tuple[str, ...]]:
        """Each shard's parents."""
        return {shard.id: shard.parents for shard in self.shards()}

    def split(self) -> str:
        """Split the widest open shard in half; its id."""
        shard = max(self._open(), key=lambda shard: (_width(shard), shard.id))
        first, last = shard.hash_range or (0, 0)
        self._client.split_shard(
            StreamName=self.name, ShardToSplit=shard.id, NewStartingHashKey=str((first + last) // 2 + 1)
        )
        self._settle()
        return shard.id

    def merge(self) -> tuple[str, str]:
        """Merge the two narrowest open neighbours; their ids."""
        ordered = sorted(self._open(), key=lambda shard: shard.hash_range or (0, 0))
        left, right = min(pairwise(ordered), key=lambda pair: (_width(pair[0]) + _width(pair[1]), pair[0].id))
        self._client.merge_shards(StreamName=self.name, ShardToMerge=left.id, AdjacentShardToMerge=right.id)
        self._settle()
        return left.id, right.id

    def put(self, *rows: tuple[str, bytes]) -> None:
        """Send (partition key, data) pairs in one request. Raises StreamError if any was refused."""
        put(self._client, self.name, rows)

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def _open(self) -> tuple[Shard, ...]:
        return tuple(shard for shard in self.shards() if shard.open)

    def _settle(self) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while self._status() != "ACTIVE":
            if time.monotonic() > deadline:
                raise StreamError(f"stream {self.name} was not ready within {WAIT_SECONDS:g} s")
            time.sleep(POLL_SECONDS)

    def _status(self) -> str:
        return self._client.describe_stream_summary(StreamName=self.name)["StreamDescriptionSummary"]["StreamStatus"]


def put(to: "KinesisClient", stream: str, rows: Iterable[tuple[str, bytes]]) -> None:
    """Send (partition key, data) pairs in one request. Raises StreamError if any was refused.

    A service that refuses a part of a request leaves its keys out of order; the stand-in never does.
    """
    entries: list[PutRecordsRequestEntryTypeDef] = [{"PartitionKey": key, "Data": data} for key, data in rows]
    refused = to.put_records(StreamName=stream, Records=entries)["FailedRecordCount"]
    if refused:
        raise StreamError(f"stream {stream} refused {refused} of {len(entries)} records")


def _width(shard: Shard) -> int:
    first, last = shard.hash_range or (0, 0)
    return last - first
