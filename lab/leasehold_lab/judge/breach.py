"""Defines the limits of a run, and the breaches that the judge reports."""

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

    Attributes:
        lease_seconds: For each worker, how long its lease must go without a renewal before others may take it. If
            empty, this is not judged.
        settled: When the fleet must have come to rest: from then on only renewals may be written, and every lease must
            be held, evenly. None if this is not judged.
        even: Whether a worker that plans must be within one lease of every other worker.
        counts_ended: Whether the workers' rules count ended leases as load. While there are ended leases, `even` is
            then not judged.
        moves: When to begin counting moves, and how many more than the least number are allowed. None if this is not
            judged.
        groups: How workers form groups.
        callable_faults: Whether unforeseen exceptions are allowed.
        notice_seconds: How long a worker may take to stop after it has lost its right to a lease.
        duplicates: Whether a record may be dispatched again after its shard changed hands.
        wait_seconds: How much of a record's wait for its dispatch may lie outside the reach of all faults. Unless this
            is infinite (not judged), repetitions need a fault to explain them, too.
        owned_checkpoints: Whether the layout checks, when a checkpoint is written, that the writer is the owner.
        reach_seconds: How long after its end a fault may explain something: as long as a shard takes to pass on.
        acknowledged: Whether handlers are known to report what they have finished. Otherwise they count as reporting
            if any of them does.
    """

    lease_seconds: Mapping[str, float] = field(factory=dict)
    settled: float | None = None
    even: bool = True
    counts_ended: bool = False
    moves: tuple[float, int] | None = None
    groups: Groups = None
    callable_faults: bool = False
    notice_seconds: float = 6.0
    duplicates: bool = True
    wait_seconds: float = math.inf
    reach_seconds: float = 0.0
    owned_checkpoints: bool = True
    acknowledged: bool = False


@frozen
class Breach:
    """A breach of a limit: which one, when, and what happened."""

    what: BreachKind
    t: float
    why: str

    def __str__(self) -> str:
        return f"{self.what} at {self.t:.3f} s: {self.why}"
