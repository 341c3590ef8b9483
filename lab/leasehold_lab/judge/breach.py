"""The limits that a run must keep, and what breaks one."""

import math
from collections.abc import Mapping
from typing import Literal

from attrs import field, frozen

from leasehold.balancer.rules.shares import Groups

BreachKind = Literal[
    "lost",
    "stranger",
    "out of order",
    "repeated",
    "handed over again",
    "handed over unheld",
    "token",
    "two holders",
    "counter",
    "checkpoint went back",
    "checkpoint of another",
    "unfinished",
    "held unread",
    "unforeseen",
    "held by nobody",
    "action at balance",
    "uneven",
    "needless move",
    "unread",
]


@frozen
class Limits:
    """The limits that a run must keep.

    lease_seconds  by worker: how long its lease stands still before others may take it; empty: not judged
    settled        as of when nothing but renewals may be written, and everything must be held, all evenly; None: not
                   judged
    even           whether workers that plan may not differ by more than one lease from any other
    counts_ended   whether a worker's rules count ended leases as its load: while there are some, `even` is not judged
    moves          as of when, and how many more than the least; None: not judged
    groups         how workers form groups
    misdeeds       whether faults may be raised that nothing provides for
    notice_seconds how long after its right to a lease is over a worker may need to stop
    duplicates     whether a record may be handed over again where its shard changed hands in between
    wait_seconds   how much of a record's wait for its hand-over may lie outside the reach of all faults; repetitions
                   want a fault, too. Infinity: not judged
    owned_checkpoints
                   whether the layout checks in the write of a checkpoint that its writer is the owner
    reach_seconds  how long after its end a fault may explain something: as long as a shard takes to pass on
    acknowledged   whether handlers say with what they have finished; else that is judged where one does
    """

    lease_seconds: Mapping[str, float] = field(factory=dict)
    settled: float | None = None
    even: bool = True
    counts_ended: bool = False
    moves: tuple[float, int] | None = None
    groups: Groups = None
    misdeeds: bool = False
    notice_seconds: float = 6.0
    duplicates: bool = True
    wait_seconds: float = math.inf
    reach_seconds: float = 0.0
    owned_checkpoints: bool = True
    acknowledged: bool = False


@frozen
class Breach:
    """A limit was broken: which, when, and what happened."""

    what: BreachKind
    t: float
    why: str

    def __str__(self) -> str:
        return f"{self.what} at {self.t:.3f} s: {self.why}"
