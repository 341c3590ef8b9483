"""Begins and ends the reading of a shard, for every kind of reader.

No record is lost if the process crashes between two of the following writes. If a lease starts at LATEST, the current
position is stored before the first read. Otherwise, records that arrive before the first checkpoint would be skipped.
At the end of a shard, the children's leases are created first, and only then is SHARD_END written (L3). After a crash
in between, the end of the parent is read once more, and the children exist already. Java workers rely on the same
order, because they create children's leases at no other time.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Protocol

from attrs import evolve

from leasehold.adapters.sources.deduplication import merge_parent_tokens
from leasehold.adapters.sources.protocol import Source
from leasehold.adapters.worker.annotations import latest_annotations, pinned_latest
from leasehold.adapters.worker.holding import Holding
from leasehold.balancer.config import Config
from leasehold.balancer.lineage import children_to_create
from leasehold.balancer.model import LATEST, TRIM_HORIZON, Lease, Position, Shard
from leasehold.stores.printable import escaped
from leasehold.stores.protocol import Done, Store
from leasehold.stores.writes import CreateLease, DeleteLease


class ReadingWorker(Protocol):
    """The part of a worker that a lease reader needs."""

    store: Store
    source: Source
    config: Config
    clock: Callable[[], float]
    uniform: Callable[[float, float], float]

    def hurry(self) -> None:
        """Have the worker read the table and list the shards at its next turn."""

    def parents(self, lease: Lease) -> Mapping[str, Lease]:
        """Return the leases of this lease's parents by key. Raises StoreError."""

    def exclude(self, key: str, seconds: float) -> None:
        """Do not take this lease for this many seconds."""


log = escaped(logging.getLogger("leasehold.start"))


class ReadingStart:
    """Finds where to start reading one held lease."""

    def __init__(self, holding: Holding, source: Source, config: Config) -> None:
        self._holding, self._source, self._config = holding, source, config
        self._latest: Position | None = None

    def find(self, parents: Mapping[str, Lease]) -> Position | None:
        """Return the position at which to open a reader, or None if the lease was lost while that position was stored.

        Args:
            parents: The leases of the shard's parents. If the shard is read from its beginning, the position contains
                the token of the parents, by which rows that a Spark sink has written twice are recognized.

        Raises:
            OutcomeUnknown: The store does not respond; nothing has been read yet.
            SourceUnavailable: The stream does not respond; nothing has been read yet.
        """
        holding, lease = self._holding, self._holding.lease
        if lease.checkpoint == TRIM_HORIZON and parents:
            return evolve(TRIM_HORIZON, token=lease.checkpoint.token or merge_parent_tokens([*parents.values()]))
        if lease.checkpoint == LATEST:
            if (position := pinned_latest(lease)) is not None:
                return position
            # Resolve LATEST only once. If the write of the position got no response, it may have been applied, and
            # another reader may start at that position.
            latest = self._latest = self._latest or self._source.latest(lease)
            if latest.numbered:
                is_stored = holding.checkpoint(latest)  # the Azure SDKs' processors do not read our annotations
            else:
                is_stored = all(holding.annotate(name, value) for name, value in latest_annotations(latest))
            return latest if is_stored else None
        if lease.checkpoint.sequence == "AT_TIMESTAMP" and not lease.checkpoint.sub:
            # The KCL has the time of AT_TIMESTAMP in its configuration, not in the lease row.
            if self._config.initial_position.sequence == "AT_TIMESTAMP":
                return self._config.initial_position
            log.warning(
                "lease %s starts AT_TIMESTAMP, and no initial position says when: starting at TRIM_HORIZON", lease.key
            )
            return TRIM_HORIZON
        return lease.checkpoint


def end_shard(holding: Holding, children: tuple[Shard, ...], worker: ReadingWorker, token: str) -> bool:
    """Create the children's leases, then write SHARD_END.

    Args:
        holding: The lease of the shard.
        children: The child shards, if the last read named them. If there are none, the shards are listed. The lease of
            a child that is not listed yet is created later by a worker's plan.
        worker: The worker.
        token: The token to store with SHARD_END, with which the children start.

    Returns:
        False if the lease was lost.

    Raises:
        StoreError: A write or a read of the table failed; call this again.
        SourceUnavailable: The stream does not respond; call this again.
    """
    parent, store, source, config = holding.lease, worker.store, worker.source, worker.config
    all_shards: tuple[Shard, ...] | None = None
    if not children:
        all_shards = source.shards()
        children = tuple(shard for shard in all_shards if parent.key in shard.parents)
    lease_keys = dict.fromkeys(key for child in children for key in (child.id, *child.parents))
    leases = {lease.key: lease for lease in store.get(lease_keys)} if lease_keys else {}
    if all_shards is None and any(key not in leases for child in children for key in child.parents):
        # If the other parent of a merge has no lease, list the shards to find out whether that parent is still to be
        # read or no longer exists.
        all_shards = source.shards()
    listed_ids = frozenset(shard.id for shard in all_shards or ())
    for create in children_to_create(parent, children, leases, listed_ids, config):
        # If this process was paused, other workers may have finished the children and deleted their leases. Confirm the
        # parent's lease, so that these leases are not created again.
        if not holding.confirm_ownership():
            return False
        # If the store rejects the creation, another worker has already created the same lease, so nothing is left to
        # do.
        outcome = store.write(CreateLease(create.lease))
        if isinstance(outcome, Done) and not holding.confirm_ownership():
            # If the parent's lease was lost, delete the child's new lease, because the child may already be done. If
            # the child is not done, another worker creates its lease again (L3).
            store.write(DeleteLease(outcome.lease))
            return False
    child_keys = tuple(child.id for child in children)
    return holding.checkpoint(
        Position("SHARD_END", token=token), children=child_keys, keep_owner=config.rules.counts_ended
    )
