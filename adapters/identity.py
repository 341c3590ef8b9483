"""Who holds a lease: the worker, whose id outlives restarts, and the running process, which never comes again."""

from attrs import field, frozen
from attrs.validators import matches_re

from balancer.model import Lease, Notes

PROCESS = "process"
"""Our attribute that names the process which took a lease last, and for which worker."""


@frozen
class Identity:
    """One process of one worker.

    worker   its id
    process  unique among all processes that ever used that id; without "/"
    """

    worker: str
    process: str = field(validator=matches_re(r"[^/]+"))

    @property
    def notes(self) -> Notes:
        """What every taking writes on the row: it tells a restart, which re-adopts, from a twin."""
        return ((PROCESS, f"{self.process}/{self.worker}"),)

    def signed(self, lease: Lease) -> bool:
        """Whether this very process took it last."""
        return lease.note(PROCESS) == f"{self.process}/{self.worker}"

    def predecessor(self, lease: Lease) -> str | None:
        """The other process of this same worker that took it last, if one did.

        A lease given to us is still signed by its giver, which is another worker and no twin.
        """
        process, _, worker = (lease.note(PROCESS) or "").partition("/")
        return process if worker == self.worker and process != self.process else None
