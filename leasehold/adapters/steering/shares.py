"""The share of each worker: how many leases it should hold, as the default rules divide them."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from leasehold.balancer.model import Lease
from leasehold.balancer.rules.groups import Groups, favoured


def shares(leases: Iterable[Lease], groups: Groups = None, more: Collection[str] = ()) -> Mapping[str, int]:
    """The target share by worker: everybody the floor, and one more for those whom rule M2 favours.

    more  workers that hold nothing, and count nevertheless
    An heir counts as the owner already (H1). Whether owners live is for the caller to say: leave out the leases of the
    dead only to see what the living will hold of the rest, else give them without an owner.
    """
    working = [lease for lease in leases if not lease.ended]
    counts = Counter(dict.fromkeys((*more, *(lease.owner for lease in working if lease.owner is not None)), 0))
    counts.update(lease.heir or lease.owner for lease in working if lease.owner is not None)
    if not counts:
        return {}
    floor, extras = divmod(len(working), len(counts))
    lucky = favoured(counts, floor, extras, groups)
    return {worker: floor + (worker in lucky) for worker in sorted(counts)}
