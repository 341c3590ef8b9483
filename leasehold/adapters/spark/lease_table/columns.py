"""The columns of `lease-table`: those of a lease as JSON, and one for rows that are none."""

import math
from typing import Any

from leasehold.balancer.model import Lease
from leasehold.stores.fields import kilobytes
from leasehold.stores.protocol import Malformed

DDL = (
    "key string, stream string, shard string, parents array<string>, owner string, version string, idle double, "
    "checkpoint string, sub bigint, token string, ended boolean, hash_range array<string>, weight double, "
    "heir string, yields boolean, leaving boolean, epoch bigint, notes map<string,string>, malformed string"
)
"""`idle` is in seconds, `weight` in KB/s; `hash_range` has 39 digits at most, more than any number of Spark's."""

_EMPTY = 17
"""Columns between a malformed row's key and what is wrong with it."""


def row(read: Lease | Malformed) -> tuple[Any, ...]:
    """The row of a lease; of a malformed one, its key and what is wrong."""
    if isinstance(read, Malformed):
        return (read.key, *(None,) * _EMPTY, f"{read.field}: {read.why}")
    return (
        read.key,
        read.stream,
        read.shard,
        list(read.parents),
        read.owner,
        read.version,
        None if math.isinf(read.idle) else float(read.idle),
        read.checkpoint.sequence,
        read.checkpoint.sub,
        read.checkpoint.token,
        read.ended,
        None if read.hash_range is None else [str(end) for end in read.hash_range],
        None if read.weight is None else kilobytes(read.weight),
        read.heir,
        read.yields,
        read.leaving,
        read.epoch,
        dict(read.notes),
        None,
    )
