"""The holder of a lease: the worker, whose id outlives restarts, and its process, whose id is never used again.

With it stand the notes that a holder writes on its rows.
"""

from collections.abc import Callable

from attrs import field, frozen
from attrs.validators import matches_re

from leasehold.balancer.model import Lease, Notes
from leasehold.balancer.shards.contradictions import INCARNATION, SETTLED

PROCESS = "process"
"""Our attribute that names the process which took a lease last, and for which worker."""

LATEST_MS = "latest_ms"
"""Our attribute: the time that LATEST means on this row, in milliseconds since 1970."""

UNPINNED = "-"
"""Its value once the row was set to LATEST anew: the next owner pins it."""


@frozen
class Identity:
    """A process of a worker.

    worker       the worker's id
    process      unique among all processes that ever used that id; without "/"
    incarnation  which of the streams that ever had this name is read, as far as this process knows by now, or ""
    """

    worker: str
    process: str = field(validator=matches_re(r"[^/]+"))
    incarnation: Callable[[], str] = field(default=str, eq=False)

    def notes_on(self, lease: Lease) -> Notes:
        """The notes that every taking writes on this row.

        They distinguish a restart from a second living process, and a stream from one made anew under its name. The
        incarnation is noted once: a row that names another one keeps it, for its checkpoint belongs to that (L14).
        """
        present = self.incarnation() if lease.note(INCARNATION) in {None, SETTLED} else ""
        return (*(((INCARNATION, present),) if present else ()), (PROCESS, f"{self.process}/{self.worker}"))

    def lacking(self, lease: Lease) -> Notes:
        """Those of them that the row does not have."""
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
