"""The history of a real or simulated run: the records sent, the events of readers, the writes, and the incidents.

The judge uses only this history. All times are in seconds on one clock, which counts from 1970 in a real run and from
the start in a simulated run. The name of a process is its worker's id. If several processes may run one after another
under the same worker id, a "#" and a number are added to the name. A history may be incomplete. The judge does not
check
laws about events that were not recorded.
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Literal

from attrs import define, field, frozen

from leasehold.balancer.model import Lease, Position
from leasehold.stores import writes
from leasehold.stores.printable import error_summary

RecordPlace = tuple[int, int]
"""A record's sequence number and sub-sequence number. The latter is 0 unless the record was part of an aggregate."""

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

VERBS_REJECTED_IN_RACES: frozenset[WriteVerb] = frozenset({"claim", "steal", "request", "release", "create", "delete"})
"""Writes that are rejected if another worker's write to the row arrives first."""


def parse_worker_id(process: str) -> str:
    """Return the worker id that the name of a process contains."""
    return re.sub(r"#\d+$", "", process)


@frozen
class SentRecord:
    """A record that was sent and that the stream acknowledged.

    Attributes:
        key: The record's partition key, or another key by which the source orders records.
        number: A number that increases in the order in which the stream accepted the records of the key.
        digest: A digest of the record's data, unique among the records of the key.
        t: The time of the acknowledgment, or None if it was not recorded.
    """

    key: str
    number: int
    digest: str
    t: float | None = None


@frozen
class ReadingEvent:
    """An event that occurs while a process reads a shard.

    Attributes:
        event: The kind of event:

            - "initialize": The process starts to read the shard.
            - "lease-lost", "shard-ended", "stopped": The process stops reading the shard, for the reason that the word
              names.
            - "read": A read of the source returned.
            - "record": A record is dispatched.
            - "finished": A handler has finished with a record.
            - "dead-lettered": A record became a dead letter.
            - "acknowledged": A handler that checkpoints itself is about to checkpoint a record.
        place: The sequence number and sub-sequence number of the record. Like `key` and `digest`, this is set only for
        events of a record.
        token: The fencing number that was dispatched with the record, or None if the layout has no such numbers.
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
        """The id of the process's worker."""
        return parse_worker_id(self.process)


@frozen
class WriteEvent:
    """A write as recorded by the table.

    Attributes:
        t: The time when the table applied or rejected the write.
        sent: The time when the process sent the write.
        key: The key of the lease.
        before: The row before the write.
        after: The row after the write. If the write was rejected, this is equal to `before`.
        done: Whether the write was applied.
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
    """A write as recorded by the process that sent it. A successful write was applied between `sent` and `t`.

    Attributes:
        t: The time when the response arrived, or when the process stopped waiting for it.
        sent: The time when the process sent the write.
        outcome: "done" if the write was applied, "lost" if it was rejected, and "unknown" if there was no response, in
            which case it may be applied at any time.
        owner: The owner in the response. If the outcome is unknown, `owner`, `version`, `epoch` (the number that grows
        with each owner) and `checkpoint` are not set.
        seen: The owner in the row as the process had last read it before the write.
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
        """The id of the process's worker."""
        return parse_worker_id(self.process)

    @property
    def done(self) -> bool:
        """Whether the write is known to have been applied."""
        return self.outcome == "done"


@frozen
class ObservedRow:
    """A lease row returned by a read of the table that ended at `t`.

    Runs that do not record writes have these rows instead.
    """

    t: float
    shard: str
    owner: str | None
    checkpoint: Position


@frozen
class Incident:
    """A change or a fault that the test caused in the fleet or the stream.

    Attributes:
        what: The kind of incident:

            - "start", "crash", "leave", "gone": A process started, died without warning, was asked to drain, or has
              ended after its drain.
            - "nap": A process was paused for `seconds`.
            - "zombie": A process stopped planning, but still renews its leases.
            - "split", "merge", "double": A shard was split, two shards were merged, or all shards were split.
            - "anew": The stream was deleted and recreated.
            - "trouble": A fault that is described in `note` lasted for `seconds`.
            - "end": No worker is expected to work any more.
        subject: The process or the shards. If it is empty, "trouble" affects all processes and shards.
    """

    t: float
    what: IncidentKind
    subject: str = ""
    seconds: float = 0.0
    note: str = ""


@define
class RunHistory:
    """Everything that was recorded during a run.

    Attributes:
        first: The initial rows of the table.
        sent: The records that the stream acknowledged.
        events: The events of readers. The events of each process are in the order in which they occurred.
        writes: The writes that the table recorded, in the order in which they arrived.
        rows: The rows that reads of the table returned.
        incidents: The changes and faults that the test caused.
        parents: The parents of each shard that the stream listed.
        recreated_at: The time when the listed stream was created, or 0.0 if it is the first. The shards of earlier
        streams may have had different parents.
        faults: Descriptions of exceptions that no code handled.
        end: The time when the run ended.
        answers: The writes that processes recorded, if the table of the run records no writes.
    """

    first: tuple[Lease, ...] = ()
    sent: list[SentRecord] = field(factory=list)
    events: list[ReadingEvent] = field(factory=list)
    writes: list[WriteEvent] = field(factory=list)
    rows: list[ObservedRow] = field(factory=list)
    incidents: list[Incident] = field(factory=list)
    parents: dict[str, tuple[str, ...]] = field(factory=dict)
    recreated_at: float = 0.0
    faults: list[str] = field(factory=list)
    end: float = 0.0
    answers: list[WriteAnswer] = field(factory=list)

    def select_events(self, *events: str) -> Iterator[ReadingEvent]:
        """Yield the events of these kinds, in order of time."""
        yield from sorted((event for event in self.events if event.event in events), key=lambda event: event.t)


def parse_event(line: str | bytes) -> ReadingEvent:
    """Parse a line that `leasehold consume --events` printed. Raises ValueError if the line is not an event."""
    try:
        event_fields = json.loads(line)
        # The same names occur on many lines. Interning them lets a history of a million records fit in memory.
        worker, event, shard = (sys.intern(event_fields[name]) for name in ("worker", "event", "shard"))
        if event != "record":
            return ReadingEvent(event_fields["t"] / 1000, worker, event, shard)
        record_place = (int(event_fields["sequence_number"]), int(event_fields["sub_sequence_number"]))
        key = sys.intern(event_fields["partition_key"] or "")
        return ReadingEvent(
            event_fields["t"] / 1000,
            worker,
            event,
            shard,
            record_place,
            key,
            event_fields["sha1"],
            event_fields.get("epoch"),
        )
    except (ArithmeticError, AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"it is no event: {error_summary(error)}") from error
