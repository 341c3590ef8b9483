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
    "dispatched again",
    "dispatched unheld",
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
class JudgeLimits:
    """The limits with which the judge checks a run.

    Attributes:
        lease_seconds: For each worker, how long its leases may go without a renewal before other workers may take them.
        If empty, this is not checked.
        settled: The time by which the fleet must have come to rest. From then on, only renewals may be written, and all
        leases must have owners and be evenly divided. If None, this is not checked.
        even: Whether leases must be evenly divided. The lease count of each planning worker may then differ by at most
        one from that of any other worker.
        counts_ended: Whether the workers' rules count ended leases as load. If so, `even` is not checked while there
            are ended leases.
        moves: A time and a number. From that time on, the fleet may make at most this number of moves more than
        necessary. If None, moves are not checked.
        groups: How workers are grouped by their ids.
        callable_faults: Whether exceptions that no code handles are allowed.
        notice_seconds: The time that a worker may take to stop after it has lost its right to a lease.
        duplicates: Whether a record may be dispatched again after its shard has changed its reader.
        wait_seconds: How long a record may wait for its dispatch if no fault explains the wait. If infinite, waits are
        not checked. Otherwise repeated dispatches must be explained by a fault, too.
        owned_checkpoints: Whether the table's layout checks on every checkpoint that its writer owns the lease.
        reach_seconds: For how long after its end a fault still explains delays and repeated dispatches. This should be
        the time that another worker needs to take over a shard.
        acknowledged: Whether handlers are known to report the records that they have finished. If False, they are still
        taken to report these records if the history contains such a report.
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
    """A broken law or limit, with its kind, its time and a description of what happened."""

    what: BreachKind
    t: float
    why: str

    def __str__(self) -> str:
        return f"{self.what} at {self.t:.3f} s: {self.why}"
