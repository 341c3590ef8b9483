"""The end of a shard: its children get leases first, and only then is it finished (L3).

A crash between the two writes strands nobody: the parent is read to its end once more, and the children
are there already; Java workers, which create children nowhere else, rely on the same order.
"""

from collections.abc import Iterable

from leasehold.adapters.sources.protocol import Source
from leasehold.adapters.worker.holding import Holding
from leasehold.balancer.config import Config
from leasehold.balancer.model import SHARD_END, Lease, Shard
from leasehold.balancer.shards.lineage import births
from leasehold.stores.protocol import Store
from leasehold.stores.writes import CreateLease


def end(holding: Holding, children: tuple[Shard, ...], store: Store, source: Source, config: Config) -> bool:
    """Create the children's leases, then write SHARD_END; False if the lease was lost.

    Children that neither the last reading nor a listing names are created by the plan once they are listed.
    Raises StoreError or SourceUnavailable; all of it may then be done again.
    """
    parent = holding.lease
    listed: tuple[Shard, ...] | None = None
    if not children:
        listed = source.shards()
        children = tuple(shard for shard in listed if parent.key in shard.parents)
    leases = _leases(children, store)
    if listed is None and any(name not in leases for child in children for name in child.parents):
        listed = source.shards()
    ids = frozenset(shard.id for shard in listed or ())
    for create in births(parent, children, leases, ids, config):
        store.write(CreateLease(create.lease))  # refused: somebody was faster, which is as good
    keys = tuple(child.id for child in children)
    return holding.checkpoint(SHARD_END, children=keys, keep_owner=config.rules.counts_ended)


def _leases(children: Iterable[Shard], store: Store) -> dict[str, Lease]:
    names = dict.fromkeys(name for child in children for name in (child.id, *child.parents))
    return {lease.key: lease for lease in store.get(names)} if names else {}
