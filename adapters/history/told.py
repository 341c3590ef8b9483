"""What is told of a run: what was sent, what workers wrote, what was done to them, and what the table showed.

All times are milliseconds since 1970 by one machine's clock, all places what Kinesis calls a sequence
number with the sub-sequence number of an aggregated record.
"""

import json
import sys
from typing import Any, Literal

from attrs import frozen

from balancer.model import Lease, Position

Place = tuple[int, int]
"""A record's sequence number and sub-sequence number."""

Doing = Literal["join", "kill", "leave", "split", "merge", "end"]


@frozen
class Sent:
    """A record that the stream acknowledged.

    key     its partition key
    number  grows in the order in which the stream took the records of one key
    sha1    of its data, which no other record of the key has
    """

    key: str
    number: int
    sha1: str


@frozen
class Event:
    """One line of `leasehold consume --events`; only records have a place, a key and a digest."""

    t: float
    worker: str
    event: str
    shard: str
    place: Place = (0, 0)
    key: str = ""
    sha1: str = ""


@frozen
class Deed:
    """What was done to the fleet or the stream.

    join, kill, leave  a worker started, died without a word, or was told to go (`subject`)
    split, merge       a shard was
    end                from here on nobody is expected to work
    """

    t: float
    what: Doing
    subject: str = ""


@frozen
class Seen:
    """One row of the table, as a reading that ended at `t` showed it."""

    t: float
    shard: str
    owner: str | None
    checkpoint: Position


def seen(lease: Lease, t: float) -> Seen:
    """A row as told."""
    return Seen(t, lease.shard, lease.owner, lease.checkpoint)


def event_of(line: str | bytes) -> Event:
    """One event as its worker wrote it. Raises ValueError or KeyError for anything else."""
    told: dict[str, Any] = json.loads(line)
    # Names come again in every line: kept once, a history of a million records fits in memory.
    worker, event, shard = (sys.intern(told[name]) for name in ("worker", "event", "shard"))
    if event != "record":
        return Event(told["t"], worker, event, shard)
    place = (int(told["sequence_number"]), int(told["sub_sequence_number"]))
    return Event(told["t"], worker, event, shard, place, sys.intern(told["partition_key"] or ""), told["sha1"])
