"""Shards made of Kinesis' answers: the pages of ListShards, and the children that GetRecords names."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from leasehold.balancer.model import Shard

if TYPE_CHECKING:  # the stubs are no dependency of a user
    from types_boto3_kinesis.type_defs import ChildShardTypeDef, ShardTypeDef


def listed(rows: Iterable["ShardTypeDef"]) -> tuple[Shard, ...]:
    """The shards of a listing; one without a last sequence number is still written to."""
    return tuple(
        Shard(
            id=row["ShardId"],
            parents=tuple(
                parent for parent in (row.get("ParentShardId"), row.get("AdjacentParentShardId")) if parent is not None
            ),
            hash_range=(int(row["HashKeyRange"]["StartingHashKey"]), int(row["HashKeyRange"]["EndingHashKey"])),
            open="EndingSequenceNumber" not in row["SequenceNumberRange"],
        )
        for row in rows
    )


def children(rows: Iterable["ChildShardTypeDef"]) -> tuple[Shard, ...]:
    """The shards that follow one that ended."""
    return tuple(
        Shard(
            id=row["ShardId"],
            parents=tuple(row["ParentShards"]),
            hash_range=(int(row["HashKeyRange"]["StartingHashKey"]), int(row["HashKeyRange"]["EndingHashKey"])),
        )
        for row in rows
    )
