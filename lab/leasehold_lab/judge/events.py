"""The history of a run, real or simulated: what was sent, read, dispatched and written, and what happened to the fleet.

The judge reads nothing else. Times are seconds on one clock: since 1970 in a real run, since the start in a simulated
one. A process is named by its worker's id; if a worker may have several processes in turn, by the id, a "#" and a
number. A history may be incomplete: what was not recorded is not judged.
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Literal

from attrs import define, field, frozen

from leasehold.balancer.model import Lease, Position
from leasehold.stores import writes
from leasehold.stores.printable import said

RecordPlace = tuple[int, int]
"""A record's sequence number and sub-sequence number, where the second is 0 unless records are aggregated."""

WriteVerb = Literal[
    "create",
    "claim",
    "steal",
    "renew",
    "checkpoint",
    "checkpoint-late",
    "release",
    "request",
    "give",
    "take-back",
    "withdraw",
    "reset",
    "annotate",
    "delete",
]

VERBS: Mapping[type[writes.Write], WriteVerb] = {
    writes.CreateLease: "create",
    writes.ClaimLease: "claim",
    writes.StealLease: "steal",
    writes.RenewLease: "renew",
    writes.CheckpointLease: "checkpoint",
    writes.CheckpointLate: "checkpoint-late",
    writes.ReleaseLease: "release",
    writes.RequestLease: "request",
    writes.WithdrawRequest: "withdraw",
    writes.GiveLease: "give",
    writes.TakeBackLease: "take-back",
    writes.AnnotateLease: "annotate",
    writes.ResetLease: "reset",
    writes.DeleteLease: "delete",
}
"""The verb for each kind of write."""

IncidentKind = Literal[
    "start", "crash", "leave", "gone", "nap", "zombie", "split", "merge", "double", "anew", "trouble", "end"
]

REJECTABLE: frozenset[WriteVerb] = frozenset({"claim", "steal", "request", "release", "create", "delete"})
"""Writes that another worker may have made first."""


def worker_of(process: str) -> str:
    """Return the id of the worker that a process belongs to, or belonged to."""
    return re.sub(r"#\d+$", "", process)


@frozen
class Sent:
    """A record that the stream acknowledged.

    Attributes:
        key: Its partition key, or whatever else records are ordered by.
        number: Increases in the order in which the stream accepted the records of one key.
        digest: A digest of its data, unique among the records of the key.
        t: When it was acknowledged; None if that was not recorded.
    """

    key: str
    number: int
    digest: str
    t: float | None = None


@frozen
class ReadingEvent:
    """An event in the reading of one shard by one process.

    Attributes:
        event: One of these:

            - "initialize": Reading begins.
            - "lease-lost", "shard-ended", "stopped": Reading ends.
            - "read": The source was read.
            - "record": A record is dispatched.
            - "finished": A handler has finished with a record.
            - "dead-lettered": A record was dead-lettered.
            - "acknowledged": A self-checkpointing handler is about to report that it has finished with a record.
        place: The place of the record; like `key` and `digest`, set for events of a record only.
        token: The fencing number that the handler was given with the record, if the layout has any.
    """

    t: float
    process: str
    event: str
    shard: str
    place: RecordPlace = (0, 0)
    key: str = ""
    digest: str = ""
    token: int | None = None

    @property
    def worker(self) -> str:
        """The worker that the process belongs to."""
        return worker_of(self.process)


@frozen
class WriteEvent:
    """A write as the table saw it.

    Attributes:
        t: When it was applied or rejected.
        sent: When the process began it.
        before: The row before the write.
        after: The row after the write, equal to `before` if it was rejected.
    """

    t: float
    sent: float
    worker: str
    process: str
    verb: WriteVerb
    key: str
    before: Lease | None
    after: Lease | None
    done: bool


@frozen
class WriteAnswer:
    """A write as its process saw it: if it took effect, it did so between `sent` and `t`.

    Attributes:
        t: When the response came, or the process stopped waiting for it.
        seen: The owner in the row that the write was based on.
        outcome: "done"; "lost" if the write was rejected; "unknown" if it was not answered and may take effect at any
            time.
        owner: The owner in the response; like `version`, `epoch` (the counter) and `checkpoint`, not set if the outcome
            is unknown.
    """

    t: float
    sent: float
    process: str
    verb: WriteVerb
    shard: str
    outcome: Literal["done", "lost", "unknown"]
    owner: str | None = None
    version: str = ""
    epoch: int = 0
    checkpoint: tuple[int, int, int] = (0, 0, 0)
    seen: str | None = None

    @property
    def worker(self) -> str:
        """The worker that the process belongs to."""
        return worker_of(self.process)

    @property
    def done(self) -> bool:
        """Whether the write is known to have taken effect."""
        return self.outcome == "done"


@frozen
class ObservedRow:
    """A row as shown by a read of the table that ended at `t`, for runs that do not record writes."""

    t: float
    shard: str
    owner: str | None
    checkpoint: Position


@frozen
class Incident:
    """Something that the test did to the fleet or the stream.

    Attributes:
        what: One of these:

            - "start", "crash", "leave", "gone": A process started, died without warning, was told to leave, or left.
            - "nap": It stood still for `seconds`.
            - "zombie": From now on it renews but never plans.
            - "split", "merge", "double": A shard was split or merged, or all shards were split.
            - "trouble": Something failed for `seconds`, described in `note`.
            - "end": From now on no worker is expected to work.
        subject: The process or shard; if empty, "trouble" concerns all of them.
    """

    t: float
    what: IncidentKind
    subject: str = ""
    seconds: float = 0.0
    note: str = ""


@define
class RunHistory:
    """The record of a run, during the run and afterwards.

    Attributes:
        first: The rows at the start.
        events: The events, those of each process in its own order.
        writes: The writes in the order in which the table took them.
        answers: Writes as their processes saw them, if no table recorded them.
        rows: Rows seen in reads of the table.
        parents: The parents of every shard that the stream listed.
        anew: When the listed stream was created; the shards of its predecessors had other parents.
        faults: Exceptions that nothing provides for.
    """

    first: tuple[Lease, ...] = ()
    sent: list[Sent] = field(factory=list)
    events: list[ReadingEvent] = field(factory=list)
    writes: list[WriteEvent] = field(factory=list)
    rows: list[ObservedRow] = field(factory=list)
    incidents: list[Incident] = field(factory=list)
    parents: dict[str, tuple[str, ...]] = field(factory=dict)
    anew: float = 0.0
    faults: list[str] = field(factory=list)
    end: float = 0.0
    answers: list[WriteAnswer] = field(factory=list)

    def of_kinds(self, *events: str) -> Iterator[ReadingEvent]:
        """Yield the events of these kinds, in order of time."""
        yield from sorted((event for event in self.events if event.event in events), key=lambda each: each.t)


def event_of(line: str | bytes) -> ReadingEvent:
    """Parse a line of `leasehold consume --events`. Raises ValueError for anything else."""
    try:
        fields = json.loads(line)
        # Names recur in every line: interned, a history of a million records fits in memory.
        worker, event, shard = (sys.intern(fields[name]) for name in ("worker", "event", "shard"))
        if event != "record":
            return ReadingEvent(fields["t"] / 1000, worker, event, shard)
        place = (int(fields["sequence_number"]), int(fields["sub_sequence_number"]))
        key = sys.intern(fields["partition_key"] or "")
        return ReadingEvent(fields["t"] / 1000, worker, event, shard, place, key, fields["sha1"], fields.get("epoch"))
    except (ArithmeticError, AttributeError, KeyError, RecursionError, TypeError, ValueError) as odd:
        raise ValueError(f"it is no event: {said(odd)}") from odd
