"""Defines the annotations that an owner writes on its rows: its process id, and the position that LATEST stands for."""

from collections.abc import Callable

from attrs import field, frozen
from attrs.validators import matches_re

from leasehold.balancer.contradictions import INCARNATION, SETTLED_VALUE
from leasehold.balancer.model import Annotations, Lease, Position, at_timestamp

PROCESS = "process"
"""The name of the row attribute that contains the id of the process that last took the lease, and its worker's id."""

LATEST_MS = "latest_ms"
"""The name of the row attribute that contains the time for which LATEST stands, in milliseconds since 1970."""

LATEST_POSITION = "latest_position"
"""The name of the row attribute that contains the position for which LATEST stands, if that position has a number.

Only Event Hubs returns a position with a number. The attribute's value consists of the sequence number, `@` and the
token.
"""

UNPINNED = "-"
"""The value that `LATEST_MS` and `LATEST_POSITION` get when the row is reset to LATEST. The next owner then resolves
LATEST again."""

_MS_DIGITS_MAX = 14
"""The maximum number of digits of a time in milliseconds. Services reject times that need more digits."""


def latest_annotations(latest: Position) -> Annotations:
    """Return the annotations that store on a row the position for which LATEST stands.

    The row's checkpoint stays LATEST, because a sequence number would count as progress. Suppose that the table is
    emptied and the row is created again with a later sequence number. An owner that remembers an earlier number would
    accept the later one, and the records in between would be skipped.
    """
    if latest.numbered:
        return ((LATEST_POSITION, f"{latest.sequence}@{latest.token}"),)
    return ((LATEST_MS, str(latest.sub)),)


def pinned_latest(lease: Lease) -> Position | None:
    """Return the position for which LATEST stands on this row, or None if the row has no valid annotation."""
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

    The worker's id stays the same across restarts, but each process has a new id.

    Attributes:
        worker: The worker's id.
        process: An id without "/", unique among all processes that have ever used the worker's id.
        incarnation: Returns the incarnation of the stream that is being read, or "" while it is unknown.
        stream: The name of the stream if leases do not contain this name, as for a single Kinesis stream; otherwise "".
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
        """Return those annotations of `annotations_on` that the row does not contain yet."""
        return tuple((name, value) for name, value in self.annotations_on(lease) if lease.annotation(name) != value)

    def was_last_taken_here(self, lease: Lease) -> bool:
        """Return whether this process was the last one to take the lease."""
        return lease.annotation(PROCESS) == f"{self.process}/{self.worker}"

    def earlier_process(self, lease: Lease) -> str | None:
        """Return the id of another process of this worker if that process was the last to take the lease, or else None.

        If another worker has given the lease to us, the row still names that worker's process, which is not an earlier
        process of ours.
        """
        process, _, worker = (lease.annotation(PROCESS) or "").partition("/")
        return process if worker == self.worker and process != self.process else None

    def ownership_reason(self, lease: Lease) -> str:
        """Return the reason why the row of a newly held lease named our worker as owner. It is part of a log line."""
        process, _, worker = (lease.annotation(PROCESS) or "").partition("/")
        if worker not in {"", self.worker}:
            return f"{worker} handed it off"
        return f"process {process} of this worker held it" if process not in {"", self.process} else "it was ours"
