"""The history of a run, real or simulated: what was sent, read, handed over and written, and what befell the fleet.

The judge reads nothing else. Times are seconds by one clock: since 1970 of a real run, since its start of a simulated
one. A process is called by its worker's id; where a worker may have several one after the other, by the id, a "#" and
a number. No history need hold everything: what was not recorded is not judged.
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
"""A record's sequence number and sub-sequence number, the second 0 where records are not aggregated."""

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
"""The word for each kind of write."""

IncidentKind = Literal[
    "start", "crash", "leave", "gone", "nap", "zombie", "split", "merge", "double", "anew", "trouble", "end"
]

REFUSABLE: frozenset[WriteVerb] = frozenset({"claim", "steal", "request", "release", "create", "delete"})
"""The writes that another worker may have made first."""


def worker_of(process: str) -> str:
    """The id of the worker that this process is, or was, one of."""
    return re.sub(r"#\d+$", "", process)


@frozen
class Sent:
    """A record that the stream acknowledged.

    key     its partition key, or whatever else the order is kept within
    number  grows in the order in which the stream took the records of one key
    digest  of its data, which no other record of the key has
    t       when it was acknowledged; None: not recorded
    """

    key: str
    number: int
    digest: str
    t: float | None = None


@frozen
class ReadingEvent:
    """An event in the reading of one shard by one process.

    event   "initialize": reading begins; "lease-lost", "shard-ended", "stopped": it ends; "read": the source was
            asked; "record": a record is handed over; "finished": a handler has finished with it; "dead-lettered": a
            dead letter has taken it; "acknowledged": a handler that checkpoints by itself is about to say that it
            has finished with it
    place, key, digest
            of the record
    token   the fencing number that the handler was given with it, if the layout has any
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
        """The worker whose process it is."""
        return worker_of(self.process)


@frozen
class WriteEvent:
    """A write as the table saw it.

    t       when it was applied or refused
    sent    when its process began it
    before  the row as it was, after as it became; the same where it was refused
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
    """A write as its process saw it: it took effect, if it did, between `sent` and `t`.

    t                 when the answer came, or none any more
    seen              the owner of the row that the write was made of
    outcome           "done"; "lost": refused; "unknown": no answer, the write may take effect at any time
    owner, version, epoch, checkpoint
                      of the row in the answer; of an unknown outcome there is none
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
        """The worker whose process it is."""
        return worker_of(self.process)

    @property
    def done(self) -> bool:
        """Whether it is known to have taken effect."""
        return self.outcome == "done"


@frozen
class ObservedRow:
    """A row of the table, as a reading that ended at `t` showed it: where writes are not recorded."""

    t: float
    shard: str
    owner: str | None
    checkpoint: Position


@frozen
class Incident:
    """An incident that the test caused to the fleet or the stream.

    start, crash, leave, gone  a process (`subject`) started, died without a word, was told to go, and had gone
    nap, zombie                it stood still for so many seconds; from here on it renews and never plans
    split, merge, double       a shard was; double: all of them were split
    trouble                    something failed for so many seconds, as `note` says: for a process, or (no subject) all
    end                        from here on nobody is expected to work
    """

    t: float
    what: IncidentKind
    subject: str = ""
    seconds: float = 0.0
    note: str = ""


@define
class RunHistory:
    """The record of a run, while it goes on and afterwards.

    first    rows at the start
    events   of each process in its own order
    writes   in the order in which the table took them
    answers  writes as their processes saw them, where no table recorded its own
    rows     readings of the table
    parents  of every shard that the stream listed
    anew     when the stream that was listed was made; the shards of its predecessors had other parents
    faults   what was raised that nothing provides for
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

    def told(self, *events: str) -> Iterator[ReadingEvent]:
        """The events of these kinds, in order of time."""
        yield from sorted((each for each in self.events if each.event in events), key=lambda each: each.t)


def event_of(line: str | bytes) -> ReadingEvent:
    """Read a line of `leasehold consume --events`. Raises ValueError for anything else."""
    try:
        told = json.loads(line)
        # Names come again in every line: kept once, a history of a million records fits in memory.
        worker, event, shard = (sys.intern(told[name]) for name in ("worker", "event", "shard"))
        if event != "record":
            return ReadingEvent(told["t"] / 1000, worker, event, shard)
        place = (int(told["sequence_number"]), int(told["sub_sequence_number"]))
        key = sys.intern(told["partition_key"] or "")
        return ReadingEvent(told["t"] / 1000, worker, event, shard, place, key, told["sha1"], told.get("epoch"))
    except (ArithmeticError, AttributeError, KeyError, RecursionError, TypeError, ValueError) as odd:
        raise ValueError(f"it is no event: {said(odd)}") from odd
