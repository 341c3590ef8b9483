"""Defines the annotations that an owner writes on its rows: its process id, and the position that LATEST stands for."""

from collections.abc import Callable

from attrs import field, frozen
from attrs.validators import matches_re

from leasehold.balancer.contradictions import INCARNATION, SETTLED_VALUE
from leasehold.balancer.model import Annotations, Lease, Position, at_timestamp

PROCESS = "process"
"""The name of the row attribute with the process that last took the lease, and the id of its worker."""

LATEST_MS = "latest_ms"
"""The name of the row attribute with the time that LATEST stands for on this row, in milliseconds since 1970."""

LATEST_POSITION = "latest_position"
"""The name of the row attribute with the position that LATEST stands for, if the source returns a numbered position.

Only Event Hubs returns one. The value of the attribute consists of the sequence number, `@` and the token.
"""

UNPINNED = "-"
"""The value that both attributes get when the row is reset to LATEST. The next owner then resolves LATEST again."""

_MS_DIGITS_MAX = 14
"""The maximum number of digits of a time in milliseconds. Services reject times that need more digits."""


def latest_annotations(latest: Position) -> Annotations:
    """Return the annotations that store on a row the position that LATEST stands for.

    The row's checkpoint stays LATEST, because a sequence number would count as progress. Suppose that the table is
    emptied and the row is created again with a later sequence number. An owner that remembers an earlier one would
    accept the later one, and the records in between would be skipped.
    """
    if latest.numbered:
        return ((LATEST_POSITION, f"{latest.sequence}@{latest.token}"),)
    return ((LATEST_MS, str(latest.sub)),)


def pinned_latest(lease: Lease) -> Position | None:
    """Return the position that LATEST stands for on this row, or None if the row has no valid annotation."""
    sequence, _, token = (lease.annotation(LATEST_POSITION) or "").partition("@")
    if sequence.isascii() and sequence.isdigit():
        return Position(sequence, token=token)
    milliseconds = lease.annotation(LATEST_MS) or ""
    return (
        at_timestamp(int(milliseconds))
        if milliseconds.isascii() and milliseconds.isdigit() and len(milliseconds) <= _MS_DIGITS_MAX
        else None
    )


@frozen
class Identity:
    """The owner of a lease, which is a worker that runs in a process.

    The worker's id stays the same across restarts. Each process has a new id.

    Attributes:
        worker: The worker's id.
        process: An id without "/", unique among all processes that have ever used the worker's id.
        incarnation: Returns the incarnation of the stream that is being read, or "" while it is unknown.
        stream: The name of the stream if leases do not contain it, as for a single Kinesis stream, or else "".
    """

    worker: str
    process: str = field(validator=matches_re(r"[^/]+"))
    incarnation: Callable[[], str] = field(default=str, eq=False)
    stream: str = ""

    def annotations_on(self, lease: Lease) -> Annotations:
        """Return the annotations that every write which takes this lease must contain.

        The process id distinguishes a restart from a second living process. The incarnation distinguishes a stream from
        a later one with the same name. A row that already has an incarnation keeps it, because its checkpoint
        belongs to that incarnation (L14).
        """
        incarnation = self.incarnation() if lease.annotation(INCARNATION) in {None, SETTLED_VALUE} else ""
        return (*(((INCARNATION, incarnation),) if incarnation else ()), (PROCESS, f"{self.process}/{self.worker}"))

    def missing_annotations(self, lease: Lease) -> Annotations:
        """Return the annotations that `annotations_on` returns and the row does not have."""
        return tuple((name, value) for name, value in self.annotations_on(lease) if lease.annotation(name) != value)

    def was_last_taken_here(self, lease: Lease) -> bool:
        """Return whether this process was the last one to take the lease."""
        return lease.annotation(PROCESS) == f"{self.process}/{self.worker}"

    def earlier_process(self, lease: Lease) -> str | None:
        """Return the process that last took the lease, if it is another process with this worker's id, or else None.

        The row of a lease that another worker has given to us still names that worker's process, which is not a
        predecessor.
        """
        process, _, worker = (lease.annotation(PROCESS) or "").partition("/")
        return process if worker == self.worker and process != self.process else None

    def ownership_reason(self, lease: Lease) -> str:
        """Return the reason why the row of a newly held lease named our worker as owner. It is part of a log line."""
        process, _, worker = (lease.annotation(PROCESS) or "").partition("/")
        if worker not in {"", self.worker}:
            return f"{worker} handed it off"
        return f"process {process} of this worker held it" if process not in {"", self.process} else "it was ours"
