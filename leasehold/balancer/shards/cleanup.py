"""The leases to delete: finished ones whose children are under way, and those of shards long gone (L8 to L10).

Source: LeaseCleanupManager of the Kinesis Client Library 2.7. KCL remembers what to clean in the
worker that finished the shard, and forgets it with that worker; here it is read from the table.
"""

from collections.abc import Collection

from leasehold.balancer.actions import Delete
from leasehold.balancer.chance import digest_under
from leasehold.balancer.model import Lease
from leasehold.balancer.shards.ancestry import Family

NOT_STARTED = frozenset({"TRIM_HORIZON", "AT_TIMESTAMP"})
"""Checkpoints of a child that nobody has read from (L8); LATEST counts as started."""


def ripe(leases: Collection[Lease], worker: str) -> frozenset[str]:
    """Finished leases that only a listing of shards keeps from being deleted (L8), where that falls to this worker.

    One worker of those that share by our rules lists for all. KCL 2.x counts finished leases as load,
    and its workers settle for fewer shards than their share while any is there.
    """
    ended = {lease.key for lease in leases if lease.ended}
    if not ended:
        return frozenset()
    keys, begun = {lease.key for lease in leases}, dict[str, bool]()
    for child in leases:
        for parent in ended.intersection(child.parents):
            begun[parent] = begun.get(parent, True) and child.checkpoint.sequence not in NOT_STARTED
    roots = {lease.key for lease in leases if keys.isdisjoint(lease.parents)}
    ours = {lease.owner for lease in leases if lease.yields and lease.owner is not None}
    return frozenset(
        key
        for key, done in begun.items()
        if done and key in roots and min(ours, key=digest_under(key), default=None) == worker
    )


def garbage(family: Family, worker: str, expired: Collection[str]) -> tuple[Lease, ...]:
    """L10: leases of unlisted shards that rob nobody: mine, unowned, expired (by key) or ended; in order of key."""
    return tuple(
        lease
        for key, lease in sorted(family.leases.items())
        if key not in family.shards and (lease.owner in {None, worker} or lease.ended or key in expired)
    )


def deletions(family: Family, garbage: Collection[Lease]) -> tuple[Delete, ...]:
    """The leases of a stream without faults that have nothing more to say.

    A worker that deletes an unlisted one first asks the source: a listing may be behind, but a ResourceNotFound
    for the shard, while its stream answers, is certain.
    """
    finished = (
        Delete(lease, rule="L8")
        for _, lease in sorted(family.leases.items())
        if lease.ended and lease.key in family.shards and _succeeded(lease, family)
    )
    gone = (
        Delete(lease, rule="L10")
        for lease in garbage
        if all(child in family.leases for child in family.children.get(lease.key, ()))  # L9
    )
    return (*finished, *gone)


def _succeeded(lease: Lease, family: Family) -> bool:
    """L8: every child has begun, and no parent needs this lease as the proof that its child is done."""
    children = family.children.get(lease.key, ())
    begun = (
        child in family.leases and family.leases[child].checkpoint.sequence not in NOT_STARTED for child in children
    )
    parents = {*lease.parents, *family.shards[lease.key].parents}
    return bool(children) and all(begun) and family.leases.keys().isdisjoint(parents)
