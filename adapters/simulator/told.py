"""What a run leaves behind: who wrote what when, who held and handed over what, and what was done to the fleet.

A judge reads nothing else.
"""

from collections import Counter
from typing import Literal

from attrs import define, field, frozen

from balancer.model import Lease

Verb = Literal[
    "create",
    "claim",
    "steal",
    "renew",
    "checkpoint",
    "checkpoint-late",
    "release",
    "request",
    "give",
    "accept",
    "take-back",
    "withdraw",
    "annotate",
    "delete",
]

Doing = Literal["start", "crash", "leave", "gone", "nap", "zombie", "split", "merge", "double"]

REFUSABLE: frozenset[Verb] = frozenset({"claim", "steal", "request", "release", "create", "delete"})
"""What another worker may have been faster at."""


@frozen
class Wrote:
    """One write as the table saw it.

    t       when it was applied or refused
    sent    when its process began it
    worker, process
            who wrote; a restarted worker is another process
    before  the row as it was, after as it became; the same where it was refused
    """

    t: float
    sent: float
    worker: str
    process: str
    verb: Verb
    key: str
    before: Lease | None
    after: Lease | None
    done: bool


@frozen
class Handed:
    """Records that a process handed over, by number: from the first to the last."""

    t: float
    process: str
    shard: str
    first: int
    last: int


@frozen
class Deed:
    """What was done to the fleet or the stream."""

    t: float
    what: Doing
    subject: str
    seconds: float = 0.0


@define
class History:
    """One run, as it goes on and afterwards.

    requests  by verb ("list" and "get" included): how many
    scanned   rows that listings read
    fetched   rows that were asked for by key, glimpsed those of them that might be stale
    sent      when each write was sent, where everything is recorded
    """

    first: tuple[Lease, ...] = ()
    writes: list[Wrote] = field(factory=list)
    handed: list[Handed] = field(factory=list)
    deeds: list[Deed] = field(factory=list)
    requests: Counter[str] = field(factory=Counter)
    scanned: int = 0
    fetched: int = 0
    glimpsed: int = 0
    sent: list[float] = field(factory=list)
    produced: dict[str, int] = field(factory=dict)
    parents: dict[str, tuple[str, ...]] = field(factory=dict)
    end: float = 0.0
