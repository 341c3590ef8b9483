"""Where the reading of a shard begins and how it ends, whoever reads it: LATEST is pinned, children get leases first.

A crash between two of these writes strands nobody. Before the first read the start is stored, or what arrives until
the first checkpoint would be skipped. At the end the children's leases are created, and only then is SHARD_END written
(L3): the parent is read to its end once more, and the children are there already; Java workers, which create children
nowhere else, rely on the same order.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Protocol

from attrs import evolve

from leasehold.adapters.sources.deduplication import inherited
from leasehold.adapters.sources.protocol import Source
from leasehold.adapters.worker.holding import Holding
from leasehold.adapters.worker.notes import latest_notes, noted_latest
from leasehold.balancer.config import Config
from leasehold.balancer.lineage import births
from leasehold.balancer.model import LATEST, TRIM_HORIZON, Lease, Position, Shard
from leasehold.stores.printable import escaped
from leasehold.stores.protocol import Done, Store
from leasehold.stores.writes import CreateLease, DeleteLease

PARENT_WAITS = (1.0, 5.0)
"""Seconds between two looks whether the parents of a shard are done: at first, and at most."""
FAULT_WAITS = (0.2, 10.0)
"""Seconds before the next try after a fault: about the first wait, and the longest."""
REJECTED_WAITS = (0.5, 4.0)
"""Seconds before the next try after a rejection that may pass by itself: the shortest wait, and the longest."""


class ReadingWorker(Protocol):
    """The worker, as far as a reading needs it."""

    store: Store
    source: Source
    config: Config
    clock: Callable[[], float]
    uniform: Callable[[float, float], float]

    def hurry(self) -> None:
        """Read the table and list the shards at the worker's next turn."""

    def parents(self, lease: Lease) -> Mapping[str, Lease]:
        """The leases of the parents of this one, by key. Raises StoreError."""

    def exclude(self, key: str, seconds: float) -> None:
        """Do not take this lease for so many seconds."""


log = escaped(logging.getLogger("leasehold.start"))


class ReadingStart:
    """Where the reading of one held lease starts."""

    def __init__(self, holding: Holding, source: Source, config: Config) -> None:
        self._holding, self._source, self._config = holding, source, config
        self._latest: Position | None = None

    def find(self, parents: Mapping[str, Lease]) -> Position | None:
        """The position to open a reader at; None if the lease was lost while it was pinned.

        At the beginning of a shard it carries along what was had of Spark sinks in its parents, these leases.
        Raises OutcomeUnknown or SourceUnavailable: then nothing has been read yet.
        """
        holding, lease = self._holding, self._holding.lease
        if lease.checkpoint == TRIM_HORIZON and parents:
            return evolve(TRIM_HORIZON, token=lease.checkpoint.token or inherited([*parents.values()]))
        if lease.checkpoint == LATEST:
            if (noted := noted_latest(lease)) is not None:
                return noted
            # Asked for once: an unanswered write of it may have been applied, and another reader may start there.
            latest = self._latest = self._latest or self._source.latest(lease)
            if latest.numbered:
                kept = holding.checkpoint(latest)  # the Azure SDKs' processors read no notes of ours
            else:
                kept = all(holding.annotate(name, value) for name, value in latest_notes(latest))
            return latest if kept else None
        if lease.checkpoint.sequence == "AT_TIMESTAMP" and not lease.checkpoint.sub:
            # KCL keeps the time of AT_TIMESTAMP in its settings and not on the row.
            if self._config.initial_position.sequence == "AT_TIMESTAMP":
                return self._config.initial_position
            log.warning(
                "lease %s starts AT_TIMESTAMP, and no initial position says when: starting at TRIM_HORIZON", lease.key
            )
            return TRIM_HORIZON
        return lease.checkpoint


def end(holding: Holding, children: tuple[Shard, ...], member: ReadingWorker, token: str) -> bool:
    """Create the children's leases, then write SHARD_END; False if the lease was lost.

    Children that neither the last reading nor a listing names are created by the plan once they are listed. They begin
    with the token that the end carries along.
    Raises StoreError or SourceUnavailable; all of it may then be done again.
    """
    parent, store, source, config = holding.lease, member.store, member.source, member.config
    listed: tuple[Shard, ...] | None = None
    if not children:
        listed = source.shards()
        children = tuple(shard for shard in listed if parent.key in shard.parents)
    names = dict.fromkeys(name for child in children for name in (child.id, *child.parents))
    leases = {lease.key: lease for lease in store.get(names)} if names else {}
    if listed is None and any(name not in leases for child in children for name in child.parents):
        # Another parent of a merge has no lease: a listing tells whether it is still to be read, or gone.
        listed = source.shards()
    ids = frozenset(shard.id for shard in listed or ())
    for create in births(parent, children, leases, ids, config):
        # After a pause, others may have finished the children, too, and deleted their rows.
        if not holding.confirm():
            return False
        made = store.write(CreateLease(create.lease))  # refused: another worker was faster, which is as good
        if isinstance(made, Done) and not holding.confirm():
            store.write(DeleteLease(made.lease))  # where it is still due, the plan of another worker creates it (L3)
            return False
    keys = tuple(child.id for child in children)
    return holding.checkpoint(Position("SHARD_END", token=token), children=keys, keep_owner=config.rules.counts_ended)
