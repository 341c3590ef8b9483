"""The values of a producer: its settings, the outcomes of its requests, and the results of its records."""

from typing import Literal

from attrs import frozen

from leasehold.adapters.sources.kinesis.producer.shard_queue import Entry


@frozen
class Settings:
    """How a producer sends.

    record_bytes          the largest Kinesis record the stream takes
    least_bytes           aggregates grow to this at least, if records come in time; one PUT unit pays for 25 KiB
    linger_seconds        how long a record may wait for others to share its aggregate
    share                 of each shard's 1 MiB and 1,000 records a second; above 1 it relies on throttling
    time_to_live_seconds  after this a record is late
    epoch                 if given, each record is marked with it and with a counter (see `marks`)
    on_late               "fail": it is given up, and newer ones pass; "block": it keeps its place until it is through
    """

    record_bytes: int = 1 << 20
    least_bytes: int = 25 << 10
    linger_seconds: float = 0.1
    share: float = 1.0
    time_to_live_seconds: float = 30.0
    on_late: Literal["fail", "block"] = "block"
    epoch: int | None = None


@frozen
class Placed:
    """A unit was written."""

    shard: str
    sequence_number: str


@frozen
class Refused:
    """A unit was not written, and may be sent again."""

    code: str


@frozen
class Unknown:
    """Nobody knows whether a unit was written: the answer did not come."""

    code: str


UnitOutcome = Placed | Refused | Unknown


@frozen(eq=False)
class Delivered:
    """The records are in the stream; the place in the tuple is the sub-sequence number."""

    entries: tuple[Entry, ...]
    shard: str
    sequence_number: str


@frozen(eq=False)
class Late:
    """The records were given up; if `unknown`, they may be in the stream all the same."""

    entries: tuple[Entry, ...]
    unknown: bool


Result = Delivered | Late
