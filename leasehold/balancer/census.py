"""The census of one reading of the table: which leases are free, expired and mine, and who holds how many.

`counting.py` takes it; every rule set answers by it.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping

from attrs import frozen

from leasehold.balancer.model import Lease

OURS = "process"
"""Our attribute says "process/worker". Ignore it unless it names the current owner: Java leaves it behind when it
takes the lease.
"""


@frozen
class Census:
    """The leases in play, told apart by who holds them.

    Ended leases are not in play, except under `kcl`, which counts them as KCL 2.x does.
    Every tuple keeps the order of the reading: sort, or order by chance, before choosing.

    worker   who is asking
    leases   all in play: free, expired and held
    free     without an owner
    expired  owned, but its version stood still too long; my own among them
    mine     held by me and not expired
    moving   held or not, with an heir named (H1 to H4)
    counts   unexpired leases by owner. The asking worker is always there, perhaps with 0, and so are
             those that are led. Other workers without a lease cannot be seen, and a worker whose leases
             have all expired is not counted, or the target would be too low and its leases would wait.
    led      workers who may yet be given leases by their KCL 3.x leader, and take none themselves (M14)
    """

    worker: str
    leases: tuple[Lease, ...]
    free: tuple[Lease, ...]
    expired: tuple[Lease, ...]
    mine: tuple[Lease, ...]
    moving: tuple[Lease, ...]
    counts: Mapping[str, int]
    led: tuple[str, ...] = ()

    @property
    def available(self) -> tuple[Lease, ...]:
        """The leases that may be claimed without robbing anybody: free ones and expired ones."""
        return self.free + self.expired

    def held_by(self, owners: Collection[str]) -> tuple[Lease, ...]:
        """The unexpired leases of these owners."""
        held = list(self.each_held_by(owners))  # a tuple that grows costs three times as much as a list
        return tuple(held)

    def each_held_by(self, owners: Collection[str]) -> Iterator[Lease]:
        """The same leases one after the other: where all owners are asked for, a copy costs more than the counting."""
        dead = {lease.key for lease in self.expired}
        return (lease for lease in self.leases if lease.owner in owners and lease.key not in dead)


def signers(leases: Iterable[Lease]) -> frozenset[str]:
    """The owners of ours, told by the attribute that they write on their leases."""
    found: set[str] = set()
    for lease in leases:
        if lease.owner is not None and lease.owner not in found and signed(lease):
            found.add(lease.owner)
    return frozenset(found)


def signed(lease: Lease) -> bool:
    """Whether its owner is one of ours."""
    return (lease.note(OURS) or "").partition("/")[2] == lease.owner
