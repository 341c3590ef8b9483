"""The census of one reading of the table: which leases are free, expired and mine, and who holds how many.

`counting.py` takes it; every rule set answers by it.

A worker that reads one row of a large table must not pay for all of them. So what `Watch.look` answers to a reading of
few rows is `Known`: the last reading of the whole table, indexed once, and the few rows read since. Every question that
such a look asks (who is alive, who holds how many, what is mine, what moves) is answered from the index, corrected by
those rows. `tuple(known)` holds the same leases, and gives the same answers at the price of the whole table.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, overload

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
    leases: Sequence[Lease]
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
        """The leases of `held_by`, one after the other: for all owners a tuple costs more than the counting."""
        dead = {lease.key for lease in self.expired}
        return (lease for lease in self.leases if lease.owner in owners and lease.key not in dead)


class Whole:
    """A reading of the whole table, indexed when it is first asked, for all readings of few rows that follow it."""

    def __init__(self, leases: tuple[Lease, ...]) -> None:
        self.leases = leases
        self._odd: dict[float, Mapping[str, Lease]] = {}
        self._signers: dict[float, frozenset[str]] = {}
        self._last: dict[str, Lease | None] = {}

    @cached_property
    def by_key(self) -> Mapping[str, Lease]:
        """Every lease."""
        return {lease.key: lease for lease in self.leases}

    @cached_property
    def by_owner(self) -> Mapping[str | None, list[Lease]]:
        """The leases of each owner, in the order of the reading."""
        found: dict[str | None, list[Lease]] = {}
        for lease in self.leases:
            found.setdefault(lease.owner, []).append(lease)
        return found

    @cached_property
    def counts(self) -> Mapping[str | None, int]:
        """The number of leases of each owner, ended and expired ones included."""
        return {owner: len(leases) for owner, leases in self.by_owner.items()}

    @cached_property
    def named(self) -> Mapping[str | None, int]:
        """The number of leases that name each worker, as owner or heir."""
        return Counter([name for lease in self.leases for name in (lease.owner, lease.next_owner)])

    @cached_property
    def measured(self) -> tuple[int, int]:
        """The number of leases with a weight, and the sum of their weights."""
        known = [lease.weight for lease in self.leases if lease.weight is not None]
        return len(known), sum(known)

    @cached_property
    def loads(self) -> Mapping[str | None, tuple[int, int]]:
        """The sum of the weights of each owner's leases, and how many of them have none."""
        found: dict[str | None, tuple[int, int]] = {}
        for lease in self.leases:
            load, unknown = found.get(lease.owner, (0, 0))
            weight = lease.weight
            found[lease.owner] = (load, unknown + 1) if weight is None else (load + weight, unknown)
        return found

    def odd(self, limit: float) -> Mapping[str, Lease]:
        """The few leases that are not held and alive, by key."""
        if limit not in self._odd:
            self._odd[limit] = {lease.key: lease for lease in odd(self.leases, limit)}
        return self._odd[limit]

    def last_of(self, worker: str, order: Callable[[Lease], Any]) -> Lease | None:
        """The last of this owner's unended leases, in an order that goes by their keys alone."""
        if worker not in self._last:
            unended = (lease for lease in self.by_owner.get(worker, ()) if not lease.ended)
            self._last[worker] = max(unended, key=order, default=None)
        return self._last[worker]

    def signers(self, limit: float) -> frozenset[str]:
        """The workers of ours that live: idle leases prove nothing."""
        if limit not in self._signers:
            self._signers[limit] = signers(self.leases, limit)
        return self._signers[limit]


class Known(Sequence[Lease]):
    """Every known lease after readings of few rows.

    whole  the last reading of the whole table
    since  by key: the rows read since; None where a row is gone
    moved  the keys of those that came, went, ended or changed hands since
    """

    def __init__(self, whole: Whole, since: Mapping[str, Lease | None]) -> None:
        self.whole, self.since = whole, since
        before = whole.by_key if since else {}
        self.moved = tuple(key for key, lease in since.items() if _holder(before.get(key)) != _holder(lease))
        came = sum(lease is not None and key not in before for key, lease in since.items())
        self._len = len(whole.leases) + came - sum(lease is None and key in before for key, lease in since.items())

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[Lease]:
        before, since = self.whole.by_key, self.since
        now = (since.get(lease.key, lease) for lease in self.whole.leases)
        yield from (lease for lease in now if lease is not None)
        yield from (lease for key, lease in since.items() if lease is not None and key not in before)

    def __eq__(self, other: object) -> bool:
        """Whether the other holds the same leases in the same order, as a tuple does."""
        return tuple(self) == tuple(other) if isinstance(other, tuple | Known) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # nothing keeps one by its content

    @overload
    def __getitem__(self, place: int) -> Lease: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[Lease, ...]: ...
    def __getitem__(self, place: int | slice) -> Lease | tuple[Lease, ...]:
        return self._all[place]

    @cached_property
    def _all(self) -> tuple[Lease, ...]:
        return tuple(self)

    def get(self, key: str) -> Lease | None:
        """The lease of this key, if there is one."""
        return self.since[key] if key in self.since else self.whole.by_key.get(key)

    def without(self, keys: Iterable[str]) -> "Known":
        """All leases but those of these keys."""
        return Known(self.whole, {**self.since, **dict.fromkeys(keys)})

    def owned_by(self, worker: str | None) -> Iterator[Lease]:
        """The leases of this owner."""
        before, since = self.whole.by_key, self.since
        for old in self.whole.by_owner.get(worker, ()):
            lease = since.get(old.key, old)
            if lease is not None and lease.owner == worker:
                yield lease
        for key in self.moved:
            lease, old_row = since[key], before.get(key)
            if lease is not None and lease.owner == worker and (old_row is None or old_row.owner != worker):
                yield lease

    def last_of(self, worker: str, order: Callable[[Lease], Any]) -> Lease | None:
        """The last of this owner's unended leases, in an order that goes by their keys alone."""
        touched = (row for key in self.moved for row in (self.whole.by_key.get(key), self.since[key]))
        if any(row is not None and row.owner == worker for row in touched):
            return max((lease for lease in self.owned_by(worker) if not lease.ended), key=order, default=None)
        last = self.whole.last_of(worker, order)
        return None if last is None else self.get(last.key)

    def names(self, worker: str | None) -> bool:
        """Whether any lease names this worker as its owner or its heir."""
        left = self.whole.named.get(worker, 0)
        for key, lease in self.since.items():
            for row, sign in ((self.whole.by_key.get(key), -1), (lease, 1)):
                left += 0 if row is None else sign * ((row.owner == worker) + (row.next_owner == worker))
        return left > 0

    def counts(self) -> dict[str | None, int]:
        """The number of leases of each owner, ended and expired ones included."""
        counts = dict(self.whole.counts)
        for key in self.moved:
            for lease, sign in ((self.whole.by_key.get(key), -1), (self.since[key], 1)):
                if lease is not None:
                    counts[lease.owner] = counts.get(lease.owner, 0) + sign
        return counts

    def measured(self) -> tuple[int, int]:
        """The number of leases with a weight, and the sum of their weights."""
        number, load = self.whole.measured
        for key, lease in self.since.items():
            for row, sign in ((self.whole.by_key.get(key), -1), (lease, 1)):
                if row is not None and row.weight is not None:
                    number, load = number + sign, load + sign * row.weight
        return number, load

    def load_of_each(self, unknown: int) -> dict[str | None, int]:
        """The sum of the weights of each owner's leases; this is the weight of one that has none."""
        loads = {owner: load + unknown * blank for owner, (load, blank) in self.whole.loads.items()}
        for key, lease in self.since.items():
            for row, sign in ((self.whole.by_key.get(key), -1), (lease, 1)):
                if row is not None:
                    weight = unknown if row.weight is None else row.weight
                    loads[row.owner] = loads.get(row.owner, 0) + sign * weight
        return loads

    def odd(self, limit: float) -> list[Lease]:
        """The few leases that are anything but held and alive."""
        found = [lease for key, lease in self.whole.odd(limit).items() if key not in self.since]
        return found + odd((lease for lease in self.since.values() if lease is not None), limit)

    def signers(self, limit: float) -> frozenset[str]:
        """The workers of ours that live."""
        found = self.whole.signers(limit)
        rows = [row for key, lease in self.since.items() for row in (self.whole.by_key.get(key), lease)]
        for worker in {row.owner for row in rows if row is not None and row.owner is not None}:
            lives = any(signed(lease) for lease in self.owned_by(worker) if lease.idle <= limit)
            if lives != (worker in found):  # else the same set, for whoever ranked it already
                found ^= {worker}
        return found


def indexed(leases: Sequence[Lease]) -> Known:
    """These leases, indexed for several questions."""
    return leases if isinstance(leases, Known) else Known(Whole(tuple(leases)), {})


def _holder(lease: Lease | None) -> tuple[str | None, bool] | None:
    return None if lease is None else (lease.owner, lease.ended)


def odd(leases: Iterable[Lease], limit: float) -> list[Lease]:
    """The leases that are anything but held and alive: without an owner, ended, moving, or idle for longer."""
    return [
        lease
        for lease in leases
        if lease.idle > limit or lease.owner is None or lease.ended or lease.next_owner is not None
    ]


def signers(leases: Iterable[Lease], limit: float = math.inf) -> frozenset[str]:
    """The owners of ours, told by the attribute that they write on their leases; by those not idle for longer."""
    found: set[str] = set()
    for lease in leases:
        if lease.owner is not None and lease.owner not in found and lease.idle <= limit and signed(lease):
            found.add(lease.owner)
    return frozenset(found)


def signed(lease: Lease) -> bool:
    """Whether its owner is one of ours."""
    return (lease.note(OURS) or "").partition("/")[2] == lease.owner
