"""The annotations that a holder writes on its rows: the process that holds the lease, and the position of LATEST."""

from collections.abc import Callable

from attrs import field, frozen
from attrs.validators import matches_re

from leasehold.balancer.contradictions import INCARNATION, SETTLED
from leasehold.balancer.model import Annotations, Lease, Position, at_timestamp

PROCESS = "process"
"""Our attribute with the process that last took the lease, and its worker."""

LATEST_MS = "latest_ms"
"""Our attribute with the time that LATEST stands for on this row, in milliseconds since 1970."""

LATEST_POSITION = "latest_position"
"""Our attribute with the position of LATEST, if the source gives it as a number (event hubs do): number, `@`, token."""

UNPINNED = "-"
"""The value of both once the row was set to LATEST again, so that the next owner pins it."""

_MS_DIGITS = 14
"""Enough for three thousand years. Services reject later times."""


def latest_annotations(latest: Position) -> Annotations:
    """Return the annotations that store the position of LATEST on a row.

    The row's checkpoint stays LATEST, because a number there would count as progress. If the table was emptied, a
    worker that remembers an earlier position would then skip the records in between.
    """
    if latest.numbered:
        return ((LATEST_POSITION, f"{latest.sequence}@{latest.token}"),)
    return ((LATEST_MS, str(latest.sub)),)


def pinned_latest(lease: Lease) -> Position | None:
    """Return the position that LATEST stands for on this row; None if it is not annotated, or not validly."""
    sequence, _, token = (lease.annotation(LATEST_POSITION) or "").partition("@")
    if sequence.isascii() and sequence.isdigit():
        return Position(sequence, token=token)
    milliseconds = lease.annotation(LATEST_MS) or ""
    return (
        at_timestamp(int(milliseconds))
        if milliseconds.isascii() and milliseconds.isdigit() and len(milliseconds) <= _MS_DIGITS
        else None
    )


@frozen
class Identity:
    """The holder of a lease: a worker, whose id outlives restarts, and its process, whose id is never used again.

    Attributes:
        worker: The worker's id.
        process: An id without "/", unique among all processes that have ever used the worker's id.
        incarnation: Returns which of the streams that ever had this name is being read; "" while that is unknown.
        stream: The name of the stream if leases do not contain it, as for a single Kinesis stream; otherwise "".
    """

    worker: str
    process: str = field(validator=matches_re(r"[^/]+"))
    incarnation: Callable[[], str] = field(default=str, eq=False)
    stream: str = ""

    def annotations_on(self, lease: Lease) -> Annotations:
        """Return the annotations that every take writes on this row.

        They distinguish a restart from a second living process, and a stream from a later one of the same name. The
        incarnation is written only once. A row that names another one keeps it, because its checkpoint belongs to that
        incarnation (L14).
        """
        incarnation = self.incarnation() if lease.annotation(INCARNATION) in {None, SETTLED} else ""
        return (*(((INCARNATION, incarnation),) if incarnation else ()), (PROCESS, f"{self.process}/{self.worker}"))

    def lacking(self, lease: Lease) -> Annotations:
        """Return the annotations of `annotations_on` that the row does not have."""
        return tuple((name, value) for name, value in self.annotations_on(lease) if lease.annotation(name) != value)

    def signed(self, lease: Lease) -> bool:
        """Return whether this process was the last one to take the lease."""
        return lease.annotation(PROCESS) == f"{self.process}/{self.worker}"

    def predecessor(self, lease: Lease) -> str | None:
        """Return the process that last took the lease, if it is another one of this worker id; otherwise None.

        A lease given to us is still signed by its giver, which is another worker.
        """
        process, _, worker = (lease.annotation(PROCESS) or "").partition("/")
        return process if worker == self.worker and process != self.process else None

    def why_ours(self, lease: Lease) -> str:
        """Return why the row of this lease names our worker, to be logged once the lease is taken up."""
        process, _, worker = (lease.annotation(PROCESS) or "").partition("/")
        if worker not in {"", self.worker}:
            return f"{worker} handed it off"
        return f"process {process} of this worker held it" if process not in {"", self.process} else "it was ours"
