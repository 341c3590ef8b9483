"""The holder of a lease: the worker, whose id outlives restarts, and its process, whose id is never used again."""

from attrs import field, frozen
from attrs.validators import matches_re

from leasehold.balancer.model import Lease, Notes

PROCESS = "process"
"""Our attribute that names the process which took a lease last, and for which worker."""


@frozen
class Identity:
    """A process of a worker.

    worker   the worker's id
    process  unique among all processes that ever used that id; without "/"
    """

    worker: str
    process: str = field(validator=matches_re(r"[^/]+"))

    @property
    def notes(self) -> Notes:
        """The notes that every taking writes on the row: they distinguish a restart from a second living process."""
        return ((PROCESS, f"{self.process}/{self.worker}"),)

    def signed(self, lease: Lease) -> bool:
        """Whether this process took the lease last."""
        return lease.note(PROCESS) == f"{self.process}/{self.worker}"

    def predecessor(self, lease: Lease) -> str | None:
        """The other process of this worker id that took the lease last, if one did.

        A lease given to us is still signed by its giver, which is another worker.
        """
        process, _, worker = (lease.note(PROCESS) or "").partition("/")
        return process if worker == self.worker and process != self.process else None
