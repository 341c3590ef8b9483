"""Begins and ends the reading of a shard, for every kind of reader.

The order of the writes ensures that no record is lost if the process crashes between two of them. If a lease starts at
LATEST, the current position is stored before the first read. Otherwise, a crash before the first checkpoint would skip
the records that arrive until the next owner starts. At the end of a shard, the children's leases are created before
SHARD_END is written (L3). After a crash in between, the end of the parent is read again, and the children's leases
exist already. Java workers rely on this order, because they create children's leases at no other time.
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
from leasehold.stores.printable import make_safe_logger
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
        """Make the worker read the table and list the shards in its next turn."""

    def parents(self, lease: Lease) -> Mapping[str, Lease]:
        """Return the leases of this lease's parents by key. Raises StoreError."""

    def exclude(self, key: str, seconds: float) -> None:
        """Prevent the worker from taking this lease for this many seconds."""


log = make_safe_logger(logging.getLogger("leasehold.start"))


class ReadingStart:
    """Finds where to start reading one held lease."""

    def __init__(self, holding: Holding, source: Source, config: Config) -> None:
        self._holding, self._source, self._config = holding, source, config
        self._resolved_latest: Position | None = None

    def find(self, parents: Mapping[str, Lease]) -> Position | None:
        """Return the position at which to open a reader, or None if the lease was lost while that position was stored.

        Args:
            parents: The leases of the shard's parents. If the shard is read from its beginning, the returned position
                contains the parents' token, which is needed to recognize rows that a Spark sink has written twice.

        Raises:
            OutcomeUnknown: The store did not respond. Nothing has been read yet.
            SourceUnavailable: The stream did not respond. Nothing has been read yet.
        """
        holding, lease = self._holding, self._holding.lease
        if lease.checkpoint == TRIM_HORIZON and parents:
            return evolve(TRIM_HORIZON, token=lease.checkpoint.token or merge_parent_tokens([*parents.values()]))
        if lease.checkpoint == LATEST:
            if (pinned_position := pinned_latest(lease)) is not None:
                return pinned_position
            # Resolve LATEST only once. If the write of the position got no response, it may have been applied, and
            # another reader may start at that position.
            latest_position = self._resolved_latest = self._resolved_latest or self._source.latest(lease)
            if latest_position.numbered:
                is_stored = holding.checkpoint(
                    latest_position
                )  # do not use an annotation, because the Azure SDKs would not read it
            else:
                is_stored = all(holding.annotate(name, value) for name, value in latest_annotations(latest_position))
            return latest_position if is_stored else None
        if lease.checkpoint.sequence == "AT_TIMESTAMP" and not lease.checkpoint.sub:
            # Java workers keep the time of AT_TIMESTAMP in their configuration, not in the lease row.
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
        children: The child shards that the last read returned. If it returned none, the shards are listed. If a child
            is not listed yet, a worker's plan creates its lease later.
        worker: The worker.
        token: The token to store with SHARD_END. The children's positions begin with it.

    Returns:
        False if the lease was lost.

    Raises:
        StoreError: A write or a read of the table failed. Call this function again.
        SourceUnavailable: The stream did not respond. Call this function again.
    """
    parent, store, source, config = holding.lease, worker.store, worker.source, worker.config
    all_shards: tuple[Shard, ...] | None = None
    if not children:
        all_shards = source.shards()
        children = tuple(shard for shard in all_shards if parent.key in shard.parents)
    lease_keys = dict.fromkeys(key for child in children for key in (child.id, *child.parents))
    leases = {lease.key: lease for lease in store.get(lease_keys)} if lease_keys else {}
    if all_shards is None and any(key not in leases for child in children for key in child.parents):
        # If the other parent of a merge has no lease, list the shards to find out whether that parent must still be
        # read or no longer exists.
        all_shards = source.shards()
    listed_ids = frozenset(shard.id for shard in all_shards or ())
    for creation in children_to_create(parent, children, leases, listed_ids, config):
        # If this process was paused, other workers may have finished the children and deleted their leases. Confirm
        # that we still own the parent's lease. Otherwise, we would create those leases again.
        if not holding.confirm_ownership():
            return False
        # If the store rejects the write, another worker has already created the lease, so nothing is left to do.
        outcome = store.write(CreateLease(creation.lease))
        if isinstance(outcome, Done) and not holding.confirm_ownership():
            # If the parent's lease was lost, delete the child's new lease, because the child may already be done. If
            # the child is not done, another worker creates its lease again (L3).
            store.write(DeleteLease(outcome.lease))
            return False
    child_keys = tuple(child.id for child in children)
    return holding.checkpoint(
        Position("SHARD_END", token=token), children=child_keys, keep_owner=config.rules.counts_ended
    )
