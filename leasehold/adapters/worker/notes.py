"""The notes that a holder writes on its rows, beside the lease: the process that holds it, and the place of LATEST."""

from collections.abc import Callable

from attrs import field, frozen
from attrs.validators import matches_re

from leasehold.balancer.contradictions import INCARNATION, SETTLED
from leasehold.balancer.model import Lease, Notes, Position, at_timestamp

PROCESS = "process"
"""Our attribute that names the process which took a lease last, and for which worker."""

LATEST_MS = "latest_ms"
"""Our attribute: the time that LATEST means on this row, in milliseconds since 1970."""

LATEST_POSITION = "latest_position"
"""Our attribute where a source gives LATEST as a number, as event hubs do: that number, `@`, and its token."""

UNPINNED = "-"
"""Their value once the row was set to LATEST anew: the next owner pins it."""

_MS_DIGITS = 14
"""Enough for three thousand years; a service refuses what lies further off."""


def latest_notes(latest: Position) -> Notes:
    """The notes that say on a row what LATEST means there.

    The row's checkpoint stays LATEST. A number there would count as progress, and whoever remembers an earlier
    position of a table that was emptied would skip what lies between.
    """
    if latest.numbered:
        return ((LATEST_POSITION, f"{latest.sequence}@{latest.token}"),)
    return ((LATEST_MS, str(latest.sub)),)


def noted_latest(lease: Lease) -> Position | None:
    """The position that LATEST means on this row; None where nobody has noted it, or somebody has noted nonsense."""
    sequence, _, token = (lease.note(LATEST_POSITION) or "").partition("@")
    if sequence.isascii() and sequence.isdigit():
        return Position(sequence, token=token)
    noted = lease.note(LATEST_MS) or ""
    return at_timestamp(int(noted)) if noted.isascii() and noted.isdigit() and len(noted) <= _MS_DIGITS else None


@frozen
class Identity:
    """The holder of a lease: a worker, whose id outlives restarts, and its process, whose id is never used again.

    worker       the worker's id
    process      unique among all processes that ever used that id; without "/"
    incarnation  which of the streams that ever had this name is read, as far as this process knows by now, or ""
    stream       the name of the stream where leases carry none, as those of a single Kinesis stream; else ""
    """

    worker: str
    process: str = field(validator=matches_re(r"[^/]+"))
    incarnation: Callable[[], str] = field(default=str, eq=False)
    stream: str = ""

    def notes_on(self, lease: Lease) -> Notes:
        """The notes that every taking writes on this row.

        They distinguish a restart from a second living process, and a stream from a later one of its name. The
        incarnation is noted once: a row that names another one keeps it, for its checkpoint belongs to that (L14).
        """
        present = self.incarnation() if lease.note(INCARNATION) in {None, SETTLED} else ""
        return (*(((INCARNATION, present),) if present else ()), (PROCESS, f"{self.process}/{self.worker}"))

    def lacking(self, lease: Lease) -> Notes:
        """The notes of every taking that the row does not have."""
        return tuple((name, value) for name, value in self.notes_on(lease) if lease.note(name) != value)

    def signed(self, lease: Lease) -> bool:
        """Whether this process took the lease last."""
        return lease.note(PROCESS) == f"{self.process}/{self.worker}"

    def predecessor(self, lease: Lease) -> str | None:
        """The other process of this worker id that took the lease last, if one did.

        A lease given to us is still signed by its giver, which is another worker.
        """
        process, _, worker = (lease.note(PROCESS) or "").partition("/")
        return process if worker == self.worker and process != self.process else None
