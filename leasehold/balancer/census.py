"""Defines the census of the lease table: which leases are free or expired, and how many each worker holds.

`counting.py` takes the census, and every rule set uses it.

The cost of planning after a read of a few rows should not depend on the size of the table. After such a read,
`Watch.look` returns a `KnownLeases`. It consists of the last read of the whole table, which is indexed once, and of the
few rows that were read since then. A query uses the index, and corrects the result according to these rows. There are
queries for the living workers, for the number of leases that each of them holds, for the leases that this worker holds,
and for the leases that are being handed off. If a tuple of the same leases is used instead, the results are the same,
but each query visits every lease.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, overload

from attrs import frozen

from leasehold.balancer.model import Lease

PROCESS_ANNOTATION = "process"
"""The name of the row attribute in which workers of this library store "process/worker".

Ignore the attribute unless it names the lease's current owner. When a worker of the Java KCL takes the lease, the
attribute still names the former owner.
"""


@frozen
class Census:
    """The leases that count, grouped by their state and owner.

    Finished leases are left out, except under the rule set `kcl`, because KCL 2.x counts them.

    All tuples are in the order in which the table was read, which may differ between workers. Sort them by key or by
    digest before you choose leases from them.

    Attributes:
        worker: The worker that plans.
        leases: All leases that count: free, expired and held.
        free: The leases without an owner.
        expired: The leases that have an owner but whose version has not changed for too long, including this worker's
            own.
        mine: The unexpired leases of the worker that plans.
        moving: The leases with a next owner, whether they are held or not (H1 to H4).
        counts: The number of unexpired leases of each owner. The worker that plans and the workers in `led` are always
            included, even if they have no leases. Other workers without a lease cannot be seen. A worker whose leases
            have all expired is left out. Otherwise, the shares of the others would be too small, and the expired leases
            would stay unclaimed for longer.
        led: The workers to which a KCL 3.x leader may still give leases. They do not take leases by themselves (M14).
    """

    worker: str
    leases: Sequence[Lease]
    free: tuple[Lease, ...]
    expired: tuple[Lease, ...]
    mine: tuple[Lease, ...]
    moving: tuple[Lease, ...]
    counts: Mapping[str, int]
    led: tuple[str, ...] = ()

    @property
    def available(self) -> tuple[Lease, ...]:
        """The free and the expired leases, which may be claimed without stealing."""
        return self.free + self.expired

    def held_by(self, owners: Collection[str]) -> tuple[Lease, ...]:
        """Return the unexpired leases of these owners."""
        leases = list(self.each_held_by(owners))  # it is three times as fast to build the tuple from a list
        return tuple(leases)

    def each_held_by(self, owners: Collection[str]) -> Iterator[Lease]:
        """Iterate over the unexpired leases of these owners.

        If there are many owners, this method is faster than `held_by`, because it does not build a tuple of their
        leases.
        """
        expired_keys = {lease.key for lease in self.expired}
        return (lease for lease in self.leases if lease.owner in owners and lease.key not in expired_keys)


class FullReading:
    """The leases from a read of the whole table, with indexes.

    With the indexes, it is cheap to apply later reads of a few rows. Each index is built on first use.
    """

    def __init__(self, leases: tuple[Lease, ...]) -> None:
        self.leases = leases
        self._unsettled_etags: dict[float, Mapping[str, Lease]] = {}
        self._our_workers: dict[float, frozenset[str]] = {}
        self._last: dict[str, Lease | None] = {}

    @cached_property
    def by_key(self) -> Mapping[str, Lease]:
        """All leases by key."""
        return {lease.key: lease for lease in self.leases}

    @cached_property
    def by_owner(self) -> Mapping[str | None, list[Lease]]:
        """The leases of each owner, in the order in which they were read."""
        leases_by_owner: dict[str | None, list[Lease]] = {}
        for lease in self.leases:
            leases_by_owner.setdefault(lease.owner, []).append(lease)
        return leases_by_owner

    @cached_property
    def counts(self) -> Mapping[str | None, int]:
        """The number of leases of each owner, including ended and expired ones."""
        return {owner: len(leases) for owner, leases in self.by_owner.items()}

    @cached_property
    def lease_counts_by_name(self) -> Mapping[str | None, int]:
        """For each worker, the number of leases of which it is the owner or the next owner."""
        return Counter([name for lease in self.leases for name in (lease.owner, lease.next_owner)])

    @cached_property
    def weight_totals(self) -> tuple[int, int]:
        """The number of leases with a weight, and the sum of the weights."""
        weights = [lease.weight for lease in self.leases if lease.weight is not None]
        return len(weights), sum(weights)

    @cached_property
    def loads(self) -> Mapping[str | None, tuple[int, int]]:
        """For each owner, the total weight of its leases and the number of its leases without a weight."""
        loads: dict[str | None, tuple[int, int]] = {}
        for lease in self.leases:
            load, unmeasured = loads.get(lease.owner, (0, 0))
            weight = lease.weight
            loads[lease.owner] = (load, unmeasured + 1) if weight is None else (load + weight, unmeasured)
        return loads

    def unsettled(self, limit: float) -> Mapping[str, Lease]:
        """Return the leases that may need an action, by key (see the function `select_unsettled`)."""
        if limit not in self._unsettled_etags:
            self._unsettled_etags[limit] = {lease.key: lease for lease in select_unsettled(self.leases, limit)}
        return self._unsettled_etags[limit]

    def last_unfinished(self, worker: str, order: Callable[[Lease], Any]) -> Lease | None:
        """Return the last unfinished lease of this owner. `order` must depend only on keys (the result is cached)."""
        if worker not in self._last:
            unfinished_leases = (lease for lease in self.by_owner.get(worker, ()) if not lease.ended)
            self._last[worker] = max(unfinished_leases, key=order, default=None)
        return self._last[worker]

    def our_workers(self, limit: float) -> frozenset[str]:
        """Return those workers of this library that have a lease which was renewed within the last `limit` seconds."""
        if limit not in self._our_workers:
            self._our_workers[limit] = our_workers(self.leases, limit)
        return self._our_workers[limit]


class KnownLeases(Sequence[Lease]):
    """All leases that a worker knows, from the last read of the whole table and later reads of a few rows.

    Attributes:
        full_reading: The last read of the whole table.
        since: The leases from later reads, by key. If a row was deleted, its value is None.
        moved: The keys of the leases that appeared, disappeared, ended or changed their owner in later reads.
    """

    def __init__(self, full_reading: FullReading, since: Mapping[str, Lease | None]) -> None:
        self.whole, self.since = full_reading, since
        full_leases = full_reading.by_key if since else {}
        self.moved = tuple(
            key for key, lease in since.items() if _owner_and_ended(full_leases.get(key)) != _owner_and_ended(lease)
        )
        added_count = sum(lease is not None and key not in full_leases for key, lease in since.items())
        self._len = (
            len(full_reading.leases)
            + added_count
            - sum(lease is None and key in full_leases for key, lease in since.items())
        )

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[Lease]:
        full_leases, later_leases = self.whole.by_key, self.since
        rows = (later_leases.get(lease.key, lease) for lease in self.whole.leases)
        yield from (lease for lease in rows if lease is not None)
        yield from (lease for key, lease in later_leases.items() if lease is not None and key not in full_leases)

    def __eq__(self, other: object) -> bool:
        """Return whether the other sequence contains the same leases in the same order."""
        return tuple(self) == tuple(other) if isinstance(other, tuple | KnownLeases) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # instances are never hashed

    @overload
    def __getitem__(self, index: int) -> Lease: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Lease, ...]: ...
    def __getitem__(self, index: int | slice) -> Lease | tuple[Lease, ...]:
        return self._as_tuple[index]

    @cached_property
    def _as_tuple(self) -> tuple[Lease, ...]:
        return tuple(self)

    def get(self, key: str) -> Lease | None:
        """Return the lease with this key, or None if it is not known."""
        return self.since[key] if key in self.since else self.whole.by_key.get(key)

    def without(self, keys: Iterable[str]) -> "KnownLeases":
        """Return all leases except those with these keys."""
        return KnownLeases(self.whole, {**self.since, **dict.fromkeys(keys)})

    def owned_by(self, worker: str | None) -> Iterator[Lease]:
        """Yield the leases of this owner."""
        full_leases, later_leases = self.whole.by_key, self.since
        for old_lease in self.whole.by_owner.get(worker, ()):
            lease = later_leases.get(old_lease.key, old_lease)
            if lease is not None and lease.owner == worker:
                yield lease
        for key in self.moved:
            lease, old_row = later_leases[key], full_leases.get(key)
            if lease is not None and lease.owner == worker and (old_row is None or old_row.owner != worker):
                yield lease

    def last_unfinished(self, worker: str, order: Callable[[Lease], Any]) -> Lease | None:
        """Return the last unfinished lease of this owner. `order` must depend only on keys (the result is cached)."""
        changed_rows = (row for key in self.moved for row in (self.whole.by_key.get(key), self.since[key]))
        if any(row is not None and row.owner == worker for row in changed_rows):
            return max((lease for lease in self.owned_by(worker) if not lease.ended), key=order, default=None)
        last_lease = self.whole.last_unfinished(worker, order)
        return None if last_lease is None else self.get(last_lease.key)

    def has_owner_or_next_owner(self, worker: str | None) -> bool:
        """Return whether this worker is the owner or next owner of any lease."""
        lease_count = self.whole.lease_counts_by_name.get(worker, 0)
        for key, lease in self.since.items():
            for row, sign in ((self.whole.by_key.get(key), -1), (lease, 1)):
                lease_count += 0 if row is None else sign * ((row.owner == worker) + (row.next_owner == worker))
        return lease_count > 0

    def counts(self) -> dict[str | None, int]:
        """Return the number of leases of each owner, including ended and expired ones."""
        counts = dict(self.whole.counts)
        for key in self.moved:
            for lease, sign in ((self.whole.by_key.get(key), -1), (self.since[key], 1)):
                if lease is not None:
                    counts[lease.owner] = counts.get(lease.owner, 0) + sign
        return counts

    def weight_totals(self) -> tuple[int, int]:
        """Return the number of leases with a weight, and the sum of the weights."""
        measured_count, load = self.whole.weight_totals
        for key, lease in self.since.items():
            for row, sign in ((self.whole.by_key.get(key), -1), (lease, 1)):
                if row is not None and row.weight is not None:
                    measured_count, load = measured_count + sign, load + sign * row.weight
        return measured_count, load

    def load_by_owner(self, unknown: int) -> dict[str | None, int]:
        """Return the sum of the weights of each owner's leases.

        A lease without a weight counts as `unknown`.
        """
        loads = {owner: load + unknown * unmeasured for owner, (load, unmeasured) in self.whole.loads.items()}
        for key, lease in self.since.items():
            for row, sign in ((self.whole.by_key.get(key), -1), (lease, 1)):
                if row is not None:
                    weight = unknown if row.weight is None else row.weight
                    loads[row.owner] = loads.get(row.owner, 0) + sign * weight
        return loads

    def unsettled(self, limit: float) -> list[Lease]:
        """Return the leases that may need an action (see the function `select_unsettled`)."""
        leases = [lease for key, lease in self.whole.unsettled(limit).items() if key not in self.since]
        return leases + select_unsettled((lease for lease in self.since.values() if lease is not None), limit)

    def our_workers(self, limit: float) -> frozenset[str]:
        """Return the living workers of this library."""
        workers = self.whole.our_workers(limit)
        rows = [row for key, lease in self.since.items() for row in (self.whole.by_key.get(key), lease)]
        for worker in {row.owner for row in rows if row is not None and row.owner is not None}:
            is_alive = any(owner_is_ours(lease) for lease in self.owned_by(worker) if lease.idle <= limit)
            if is_alive != (worker in workers):  # if nothing changed, keep the object, because its ranks are cached
                workers ^= {worker}
        return workers


def index_leases(leases: Sequence[Lease]) -> KnownLeases:
    """Return these leases with indexes, so that repeated lookups are fast."""
    return leases if isinstance(leases, KnownLeases) else KnownLeases(FullReading(tuple(leases)), {})


def _owner_and_ended(lease: Lease | None) -> tuple[str | None, bool] | None:
    return None if lease is None else (lease.owner, lease.ended)


def select_unsettled(leases: Iterable[Lease], limit: float) -> list[Lease]:
    """Return the leases for which some worker may have to act.

    A lease is unsettled if it has no owner, is finished, has a next owner, or has not changed for more than `limit`
    seconds. All other leases are held by a living owner.
    """
    return [
        lease
        for lease in leases
        if lease.idle > limit or lease.owner is None or lease.ended or lease.next_owner is not None
    ]


def our_workers(leases: Iterable[Lease], limit: float = math.inf) -> frozenset[str]:
    """Return the owners that are workers of this library, recognized by an attribute on their leases.

    Leases that have not changed for more than `limit` seconds are ignored.
    """
    workers: set[str] = set()
    for lease in leases:
        if lease.owner is not None and lease.owner not in workers and lease.idle <= limit and owner_is_ours(lease):
            workers.add(lease.owner)
    return frozenset(workers)


def owner_is_ours(lease: Lease) -> bool:
    """Return whether the owner of this lease is a worker of this library (rather than a KCL worker, for example)."""
    return (lease.annotation(PROCESS_ANNOTATION) or "").partition("/")[2] == lease.owner
