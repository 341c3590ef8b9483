"""How long each lease has stood still, by our own clock: a pure fold over readings of the table.

Rule 1: nothing here reads a clock; a reading comes with the times it began and ended (seconds of one
monotonic clock). Rule 2: our watching runs from the *end* of the first reading that showed something
to the *start* of the last that showed it, so that a stall of ours makes nobody look dead.
"""

import math
from collections.abc import Collection, Iterable, Mapping

from attrs import evolve, field, frozen

from balancer.bulletins import Ear
from balancer.holes import holes_after
from balancer.model import History, Lease
from balancer.reports import NO_REPORTS, Reports, Roll


@frozen
class Sighting:
    """What is known of one lease.

    lease       as last read, with `idle`, `held` and `heir_idle` filled in
    version_at  end of the first reading that showed its version
    owner_at    the same of its owner; minus infinity where it was there before we looked
    heir_at     the same of its heir
    gap         how long its version last stood still before its present owner moved it
    pace        no less than the seconds between its owner's last renewals; 0 where renewals are not counted
    """

    lease: Lease
    version_at: float
    owner_at: float
    heir_at: float
    gap: float = 0.0
    pace: float = 0.0


@frozen
class Watch:
    """Everything earlier readings taught; give `history` to `Me`.

    sightings   by key: every known lease
    owners_at   end of the first reading that showed the present owner of every lease
    fleet_at    end of the first reading that showed the present set of owners and heirs
    full_at     end of the last reading of the whole table
    ear         hears bulletins; None where none are written (C14)
    roll        of the workers that report beside the leases
    """

    history: History = field(factory=History)
    sightings: Mapping[str, Sighting] = field(factory=dict)
    owners_at: float | None = None
    fleet_at: float | None = None
    full_at: float = -math.inf
    ear: Ear | None = None
    roll: Roll = field(factory=Roll)

    def look(
        self,
        listing: Iterable[Lease],
        began: float,
        ended: float,
        asked: Collection[str] | None = None,
        reports: Reports = NO_REPORTS,
    ) -> tuple["Watch", tuple[Lease, ...]]:
        """Fold in one reading; answers every known lease, with its `idle`, `held` and `heir_idle`.

        listing  the leases as read; `idle` is the store's own age of the row, 0 where it has none.
                 A listing that failed on any page must not be given.
        began    when the reading began, ended when its last page had come, in seconds
        asked    the keys asked for, or None for a full reading. Asked-for keys that did not come back
                 are gone; leases not asked for stay as they were.
        reports  of workers, beside the leases; of a full reading only

        `idle` is infinite only at first sight without an owner; at first sight with an owner it is the
        store's age. `held` is infinite while the owner is the one found there by the first reading: how
        long it had been at it is unknown, and no reason to spare it. With no owner, `held` says the same
        of the time without one.
        """
        fresh = {lease.key: self._sight(lease, began, ended) for lease in listing}
        if asked is None:
            sightings = fresh
        else:
            gone = set(asked) - fresh.keys()
            sightings = {**{key: old for key, old in self.sightings.items() if key not in gone}, **fresh}
        leases = tuple(sighting.lease for sighting in sightings.values())
        owners_at, fleet_at = self._changes(sightings, fresh if asked is not None else sightings, ended)
        full_at = self.full_at if asked is not None else ended
        read = (sighting.lease for sighting in fresh.values())
        ear = None if self.ear is None else self.ear.after(read, began, ended, asked, full_at)
        roll = self.roll if asked is not None else self.roll.after(reports, leases, ended)
        history = evolve(
            self.history if asked is not None else _of_all(sightings.values(), leases, self.history),
            owners_still=max(0.0, began - owners_at),
            fleet_still=max(0.0, began - fleet_at),
            full_still=max(0.0, began - full_at),
            hearing=None if ear is None else ear.hearing,
            led=roll.led(began),
        )
        return Watch(history, sightings, owners_at, fleet_at, full_at, ear, roll), leases

    def _sight(self, lease: Lease, began: float, ended: float) -> Sighting:
        before = self.sightings.get(lease.key)
        if before is None:
            return self._first_sight(lease, ended)
        still, kept = before.lease.version == lease.version, before.lease.owner == lease.owner
        version_at = before.version_at if still else ended
        owner_at = before.owner_at if kept else ended
        heir_at = before.heir_at if before.lease.heir == lease.heir else ended
        # How long a lease waits for the first renewal by whom it was given to says nothing of the second.
        renewed = before.lease.idle < before.lease.held
        moved = before.lease.idle if renewed and math.isfinite(before.lease.idle) else 0.0
        return Sighting(
            lease=lease.watched(
                idle=max(lease.idle, began - version_at if still else 0.0),
                held=max(0.0, began - owner_at),
                heir_idle=max(0.0, began - heir_at) if lease.heir is not None else 0.0,
            ),
            version_at=version_at,
            owner_at=owner_at,
            heir_at=heir_at,
            gap=(before.gap if still else moved) if kept else 0.0,
            pace=(before.pace if still else _pace(before, lease, began)) if kept and not lease.ended else 0.0,
        )

    def _first_sight(self, lease: Lease, ended: float) -> Sighting:
        # What a later reading shows for the first time has begun since the one before.
        owner_at = -math.inf if self.owners_at is None else ended
        seen = lease.watched(
            idle=math.inf if lease.owner is None else lease.idle,
            held=math.inf if self.owners_at is None else 0.0,
            heir_idle=0.0,
        )
        return Sighting(seen, version_at=ended, owner_at=owner_at, heir_at=ended)

    def _changes(
        self, sightings: Mapping[str, Sighting], read: Mapping[str, Sighting], ended: float
    ) -> tuple[float, float]:
        if self.owners_at is not None and self.fleet_at is not None and self._as_they_were(sightings, read):
            return self.owners_at, self.fleet_at
        old, new = _owners(self.sightings), _owners(sightings)
        owners_at = self.owners_at if old == new else None
        fleet_at = self.fleet_at if _fleet(self.sightings) == _fleet(sightings) else None
        return (ended if owners_at is None else owners_at), (ended if fleet_at is None else fleet_at)

    def _as_they_were(self, sightings: Mapping[str, Sighting], read: Mapping[str, Sighting]) -> bool:
        # Of many leases few are read, and often: only those can have changed, unless one is gone.
        return len(sightings) == len(self.sightings) and all(
            key in self.sightings and _parties(self.sightings[key]) == _parties(now) for key, now in read.items()
        )


def _parties(sighting: Sighting) -> tuple[str | None, str | None]:
    return sighting.lease.owner, sighting.lease.heir


def _owners(sightings: Mapping[str, Sighting]) -> dict[str, str | None]:
    return {key: sighting.lease.owner for key, sighting in sightings.items()}


def _fleet(sightings: Mapping[str, Sighting]) -> frozenset[str | None]:
    """Everybody named in the table: who asked for a first lease has joined."""
    leases = [sighting.lease for sighting in sightings.values()]
    return frozenset([lease.owner for lease in leases] + [lease.heir for lease in leases]) - {None}


def _pace(before: Sighting, lease: Lease, began: float) -> float:
    """Between two readings: had it been renewed any faster, its counter would have moved once more."""
    renewals = lease.epoch - before.lease.epoch
    return max(0.0, began - before.version_at) / (renewals + 1) if renewals > 0 else 0.0


def _of_all(seen: Collection[Sighting], leases: tuple[Lease, ...], before: History) -> History:
    """What only a reading of the whole table tells."""
    return evolve(
        before,
        holes=holes_after(leases, before.holes),
        gaps=_longest((sighting.lease.owner, sighting.gap) for sighting in seen),
        paces=_longest((sighting.lease.owner, sighting.pace) for sighting in seen),
    )


def _longest(seconds: Iterable[tuple[str | None, float]]) -> tuple[tuple[str, float], ...]:
    """Of each owner, where there are any."""
    longest: dict[str, float] = {}
    for owner, each in seconds:
        if owner is not None and each > longest.get(owner, 0.0):
            longest[owner] = each
    return tuple(sorted(longest.items()))
