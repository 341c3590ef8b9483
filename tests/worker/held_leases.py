"""One lease as a process holds it, with a clock that tests set."""

from virtual_fleet import FaultyStore
from waiters import Clock

from leasehold.adapters.worker.annotations import Identity
from leasehold.adapters.worker.holding import Holding
from leasehold.balancer.model import Lease
from leasehold.stores.writes import (
    ClaimLease,
    CreateLease,
)


class HeldLease:
    """Lease s-0, held by process p-1 of worker ann."""

    def __init__(self, process: str = "p-1", replaced: str | None = None, store: FaultyStore | None = None) -> None:
        self.store, self.clock = store or FaultyStore(), Clock()
        self.noticed: list[Holding] = []
        self.losses: list[tuple[str, bool, bool]] = []
        self.row_recreations: list[str] = []
        self.store.write(CreateLease(Lease("s-0", weight=100)))
        self.store.write(ClaimLease(self.row, "ann", (("process", f"{process}/ann"),)))
        self.store.write_requests.clear()
        self.holding = Holding(
            self.store,
            self.row,
            identity=Identity("ann", process),
            clock=self.clock,
            write_began=1000.0,
            lease_seconds=10.0,
            replaced_process=replaced,
            on_lost=self._notice,
            on_row_recreated=self.row_recreations.append,
        )

    def _notice(self, holding: Holding) -> None:
        self.noticed.append(holding)
        self.losses.append((holding.why, holding.duplicate_process, holding.lease.ended))

    @property
    def row(self) -> Lease:
        return self.store.row("s-0")

    @property
    def end(self) -> tuple[bool, str]:
        """Whether the lease is lost, and the reason for the loss."""
        return self.holding.lost.is_set(), self.holding.why
