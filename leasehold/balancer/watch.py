"""The watch measures how long each lease has stood still, by our own clock: a pure fold over readings of the table.

Rule 1: nothing here reads a clock; a reading comes with the times it began and ended (seconds of one
monotonic clock). Rule 2: our watching runs from the *end* of the first reading that showed something
to the *start* of the last that showed it, so that a stall of ours makes nobody look dead.

Example: a reading from 0 s to 1 s shows version 7 for the first time, and a reading from 9 s to 12 s shows it again.
The lease may have been renewed to 7 at 0.9 s, and to 8 at 9.1 s, after its row was read: it stood still for 8 s for
certain, from 1 s to 9 s. The three seconds for which the second reading stalled are not counted against its owner.

Rule 3 (C17): an outage of the store counts against nobody. While nothing was answered no owner could renew, and the
first reader that comes through must not take what others had no chance yet to renew. So what stood still meanwhile
counts from the end of the first reading that was answered again. An outage is longer than `silence_seconds`: a single
late answer counts as ever.

Workers of a KCL 3.x leader live by what they report of themselves, beside the leases (M14). They take nothing: their
leader gives them what is free, and until there is something to give, no lease shows them.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from attrs import evolve, field, frozen

from leasehold.balancer.bulletin import BulletinTracker
from leasehold.balancer.census import Known, Whole
from leasehold.balancer.family import holes_after
from leasehold.balancer.model import History, Lease, Shard

REPORT_SECONDS = 35.0
"""A worker reports every 30 s as a rule; one that has not for so long has missed a report, or ended."""
SILENT_SECONDS = 60.0
"""A leader gives nothing to a worker that has not reported for so long: twice the usual interval of reports."""


@frozen
class Reports:
    """The reports of workers, as one reading of the table shows them.

    leader  the worker that holds the leader's lock, or None
    stamps  by worker: a text that changes with each of its reports
    """

    leader: str | None = None
    stamps: tuple[tuple[str, str], ...] = ()


NO_REPORTS = Reports()


@frozen
class ReportTrack:
    """The trace holds all that is known of one worker; times are the ends of the first readings that showed it so.

    stamp     of its latest report
    stood_at  when it was first seen
    moved_at  when that came; minus infinity: it may be the last of somebody dead
    count     its leases
    since     when it was known to live with so few
    """

    stamp: str
    stood_at: float
    moved_at: float
    count: int
    since: float


@frozen
class WorkerReports:
    """The fold over whole readings.

    leader  of the last one
    traces  by worker
    empty   before the first
    """

    leader: str | None = None
    traces: Mapping[str, ReportTrack] = field(factory=dict)
    empty: bool = True

    def after(self, reports: Reports, leases: Iterable[Lease], ended: float) -> "WorkerReports":
        """A reading of the whole table is folded in."""
        counts = Counter(lease.owner for lease in leases if not lease.ended) if reports.stamps else Counter()
        traces = {worker: self._trace(worker, stamp, counts[worker], ended) for worker, stamp in reports.stamps}
        return WorkerReports(reports.leader, traces, empty=False)

    def led(self, began: float) -> tuple[tuple[str, float], ...]:
        """The living workers of a living leader, each with the seconds for which it was given nothing more.

        Infinite where somebody gone may be taken for alive, by us or by the leader, who would give that one what it
        finds too much with the others. So it is while the report of a worker that ended is young, and then until each
        worker without leases has reported once more: nothing else shows that it lives. So it is, too, when another one
        without leases has come.
        """
        alive = {worker: trace for worker, trace in self.traces.items() if began - trace.moved_at <= REPORT_SECONDS}
        if self.leader not in alive:
            return ()
        forgotten = [trace.stood_at + SILENT_SECONDS for worker, trace in self.traces.items() if worker not in alive]
        calm = max(forgotten, default=-math.inf)
        idle = [trace for trace in alive.values() if not trace.count]
        last = max([calm, *(trace.since for trace in idle)])
        certain = began >= calm and all(trace.moved_at >= last for trace in idle)
        return tuple(
            (worker, max(0.0, began - max(calm, trace.since)) if certain else math.inf)
            for worker, trace in sorted(alive.items())
        )

    def _trace(self, worker: str, stamp: str, count: int, ended: float) -> ReportTrack:
        """The trace of a worker after another reading."""
        before = self.traces.get(worker)
        if before is None:
            # A report in the very first reading may be years old; one that is new since was written since.
            return ReportTrack(stamp, ended, -math.inf if self.empty else ended, count, ended)
        stood_at = before.stood_at if stamp == before.stamp else ended
        if before.count and not count:
            # A worker may have lost its leases by dying just after a report: only the next report proves it alive.
            return ReportTrack(stamp, stood_at, -math.inf, count, ended)
        moved_at = before.moved_at if stamp == before.stamp else ended
        grown = count > before.count or before.moved_at == -math.inf
        return ReportTrack(stamp, stood_at, moved_at, count, ended if grown else before.since)


class Sighting(NamedTuple):
    """A sighting holds all that is known of one lease.

    A named tuple: one of each lease is made at every look, and a class of attrs takes three times as long to make.

    lease       as last read, with `idle`, `held` and `next_owner_idle` filled in
    version_at  end of the first reading that showed its version
    owner_at    the same of its owner; minus infinity where it was there before we looked
    heir_at     the same of its heir
    watched     seconds for which its version has stood still by our own watching alone, for the storage's clock
                may be set anew
    stood       how long its version last stood still before its present owner moved it
    gap         the shorter of the last two such times: one may be a pause of the store, two are a habit
    pace        no less than the seconds between its owner's last renewals; 0 where renewals are not counted
    """

    lease: Lease
    version_at: float
    owner_at: float
    next_owner_at: float
    watched: float = 0.0
    stood: float = 0.0
    gap: float = 0.0
    pace: float = 0.0


@frozen
class Sightings(Mapping[str, Sighting]):
    """The sightings of the last reading of the whole table, with those of the rows read since; None: it is gone."""

    whole: Mapping[str, Sighting]
    since: Mapping[str, Sighting | None]

    def __getitem__(self, key: str) -> Sighting:
        found = self.since[key] if key in self.since else self.whole[key]
        if found is None:
            raise KeyError(key)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self.flat())

    def __len__(self) -> int:
        return len(self.flat())

    def flat(self) -> dict[str, Sighting]:
        """All of them, in the order of the reading."""
        return {key: found for key, found in {**self.whole, **self.since}.items() if found is not None}


@frozen
class Watch:
    """The watch holds everything that earlier readings taught; give `history` to `Me`.

    sightings   by key: every known lease
    owners_at   end of the first reading that showed the present owner of every lease
    fleet_at    end of the first reading that showed the present set of owners and heirs
    full_at     end of the last reading of the whole table
    bulletins   follows bulletins; None where none are written (C14)
    roll        of the workers that report beside the leases
    whole       the last reading of the whole table, as `look` answered it
    silence_seconds
                a store that answers nothing for longer has an outage (C17)
    silent_at   when the first reading began of those that were not answered lately
    back_at     end of the first reading that was answered after an outage

    Examples:
        >>> from leasehold import Lease, Version, Watch
        >>> row = Lease("shard-0", owner="worker-b", version=Version("7"))
        >>> watch, _ = Watch().look([row], began=0.0, ended=1.0)
        >>> watch, (lease,) = watch.look([row], began=9.0, ended=12.0)
        >>> lease.idle  # from the end of the first reading to the start of the last
        8.0
    """

    history: History = field(factory=History)
    sightings: Mapping[str, Sighting] = field(factory=dict)
    owners_at: float | None = None
    fleet_at: float | None = None
    full_at: float = -math.inf
    bulletins: BulletinTracker | None = None
    roll: WorkerReports = field(factory=WorkerReports)
    whole: Whole = field(factory=lambda: Whole(()), eq=False, repr=False)
    silence_seconds: float = math.inf
    silent_at: float | None = None
    back_at: float = -math.inf

    def unanswered(self, began: float) -> "Watch":
        """The watch after a reading that began at this time and got no answer."""
        return self if self.silent_at is not None else evolve(self, silent_at=began)

    def look(
        self,
        listing: Iterable[Lease],
        began: float,
        ended: float,
        asked: Collection[str] | None = None,
        reports: Reports = NO_REPORTS,
    ) -> tuple["Watch", Sequence[Lease]]:
        """Fold this reading in, and answer every known lease, with its `idle`, `held` and `next_owner_idle`.

        A reading of few rows costs what those rows cost, however many leases are known (`Known`).

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
        if self.silent_at is not None:
            back_at = ended if began - self.silent_at > self.silence_seconds else self.back_at
            return evolve(self, silent_at=None, back_at=back_at).look(listing, began, ended, asked, reports)
        if asked is None:
            earlier = self.sightings.flat() if isinstance(self.sightings, Sightings) else self.sightings
            fresh = {lease.key: self._sight(earlier.get(lease.key), lease, began, ended) for lease in listing}
            sightings: Mapping[str, Sighting] = fresh
            leases: Sequence[Lease] = tuple([sighting.lease for sighting in fresh.values()])
            whole, lost = Whole(tuple(leases)), earlier.keys() - fresh.keys()
            stood = not lost and _stood(earlier, fresh)
            owners_at, fleet_at = self._changes(earlier, fresh, ended, stood=stood)
            history = self._history(sightings, leases, stood=stood)
        else:
            fresh = {lease.key: self._sight(self.sightings.get(lease.key), lease, began, ended) for lease in listing}
            sightings = self._with(fresh, set(asked) - fresh.keys())
            lost, whole = {key for key in asked if key not in fresh and key in self.sightings}, self.whole
            leases = _known(whole, sightings)
            owners_at, fleet_at = self._changes_in(fresh, lost, leases, ended)
            history = self.history
        full_at = self.full_at if asked is not None else ended
        read = (sighting.lease for sighting in fresh.values())
        bulletins = None if self.bulletins is None else self.bulletins.after(read, began, ended, asked, full_at)
        roll = self.roll if asked is not None else self.roll.after(reports, leases, ended)
        history = evolve(
            history,
            owners_still=max(0.0, began - owners_at),
            fleet_still=max(0.0, began - fleet_at),
            full_still=max(0.0, began - full_at),
            full_apart=history.full_apart if asked is not None else max(0.0, began - self.full_at),
            full_took=history.full_took if asked is not None else max(0.0, ended - began),
            hearing=None if bulletins is None else bulletins.hearing,
            led=roll.led(began),
            gone=self._gone(sightings, lost),
        )
        seen = Watch(history, sightings, owners_at, fleet_at, full_at, bulletins, roll, whole)
        return evolve(seen, silence_seconds=self.silence_seconds, back_at=self.back_at), leases

    def _history(self, sightings: Mapping[str, Sighting], leases: Iterable[Lease], *, stood: bool) -> History:
        """The history, with what only a reading of the whole table shows."""
        holes = self.history.holes
        again = (evolve(hole, times=hole.times + 1) for hole in holes)
        holes = tuple(again) if stood else holes_after(leases, holes)
        gaps, paces = dict[str, float](), dict[str, float]()  # the longest of each owner
        for each in sightings.values():
            gap, pace, owner = each.gap, each.pace, each.lease.owner
            if owner is None:
                continue
            if gap > gaps.get(owner, 0.0):
                gaps[owner] = gap
            if pace > paces.get(owner, 0.0):
                paces[owner] = pace
        return evolve(self.history, holes=holes, gaps=tuple(sorted(gaps.items())), paces=tuple(sorted(paces.items())))

    def last_seen(self, key: str) -> Lease | None:
        """The lease as the last reading that showed it did, also where it has no row any more."""
        if (sighting := self.sightings.get(key)) is not None:
            return sighting.lease
        return next((lease for lease in self.history.gone if lease.key == key), None)

    def recalling(self, own: Mapping[str, Lease], shards: Collection[Shard] | None) -> "Watch":
        """The watch with what this process last wrote of leases that are gone, and without those of unlisted shards."""
        if not self.history.gone:
            return self
        latest = (max(lease, own.get(lease.key, lease), key=lambda each: each.epoch) for lease in self.history.gone)
        listed, streams = {shard.id for shard in shards or ()}, {shard.stream for shard in shards or ()}
        kept = tuple(lease for lease in latest if lease.key in listed or lease.stream not in streams)
        return evolve(self, history=evolve(self.history, gone=kept))

    def _gone(self, now: Mapping[str, Sighting], lost: Collection[str]) -> tuple[Lease, ...]:
        """The leases that were known and have no row any more: nobody else may know how far they were."""
        if not (self.history.gone or lost):
            return ()
        known = {lease.key: lease for lease in self.history.gone} | {key: self.sightings[key].lease for key in lost}
        return tuple(known[key] for key in sorted(known) if key not in now)

    def _with(self, fresh: Mapping[str, Sighting], gone: Iterable[str]) -> Sightings:
        """The sightings of all leases after `fresh` ones, without those that are gone."""
        before = self.sightings if isinstance(self.sightings, Sightings) else Sightings(self.sightings, {})
        return Sightings(before.whole, {**before.since, **dict.fromkeys(gone), **fresh})

    def _sight(self, before: Sighting | None, lease: Lease, began: float, ended: float) -> Sighting:
        """A lease is compared with its last sighting: each time goes on if its subject stayed, or starts anew."""
        if before is None:
            # A lease without an earlier sighting has no history of ours. An owner that a later reading shows for the
            # first time came after the reading before.
            owner_at = -math.inf if self.owners_at is None else ended
            seen = lease.watched(
                idle=math.inf if lease.owner is None else lease.idle,
                held=math.inf if self.owners_at is None else 0.0,
                next_owner_idle=0.0,
            )
            return Sighting(seen, version_at=ended, owner_at=owner_at, next_owner_at=ended)
        old, version_at, owner_at, next_owner_at, watched, stood, gap, pace = before
        kept = old.owner == lease.owner
        # A row that was deleted and written again counts from the start, and comes by versions seen before (L13).
        if kept and old.version == lease.version:
            version_at = max(version_at, self.back_at)
        else:
            # Not the gap before a new owner's first renewal: it says nothing of how often that owner renews.
            now_stood = watched if version_at > owner_at else 0.0
            gap = min(now_stood, stood) if kept else 0.0
            renewals = lease.epoch - old.epoch if kept else 0
            # An owner that renewed any faster between two readings would have moved its counter once more.
            pace = max(0.0, began - version_at) / (renewals + 1) if renewals > 0 else 0.0
            stood, version_at = now_stood, ended
        if not kept:
            owner_at = ended
        if old.next_owner != lease.next_owner:
            next_owner_at = ended
        watched = began - version_at if began > version_at else 0.0
        # The store's own age of a row counts an outage, too (C17).
        age = min(lease.idle, max(0.0, began - self.back_at)) if lease.idle else 0.0
        idle, held = max(age, watched), began - owner_at if began > owner_at else 0.0
        seen = lease.watched(idle, held, max(0.0, began - next_owner_at) if lease.next_owner is not None else 0.0)
        return Sighting(seen, version_at, owner_at, next_owner_at, watched, stood, gap, 0.0 if lease.ended else pace)

    def _changes(
        self, before: Mapping[str, Sighting], now: Mapping[str, Sighting], ended: float, *, stood: bool
    ) -> tuple[float, float]:
        """The ends of the first readings that showed the present owners, and the present fleet."""
        owners_at = self.owners_at if stood or _owners(before) == _owners(now) else None
        fleet_at = self.fleet_at if stood or _fleet(before) == _fleet(now) else None
        return (ended if owners_at is None else owners_at), (ended if fleet_at is None else fleet_at)

    def _changes_in(
        self, fresh: Mapping[str, Sighting], lost: Collection[str], now: Known, ended: float
    ) -> tuple[float, float]:
        """The same times after a reading of few rows: only these and the workers that they name can change."""
        pairs = [(self.sightings.get(key), fresh.get(key)) for key in {*fresh, *lost}]
        changed = [(old, new) for old, new in pairs if _parties(old) != _parties(new)]
        if not changed and self.owners_at is not None and self.fleet_at is not None:
            return self.owners_at, self.fleet_at
        before = _known(self.whole, self.sightings)
        named = {name for pair in changed for parties in map(_parties, pair) for name in parties} - {None}
        fleet_same = all(before.names(name) == now.names(name) for name in named)
        owners_same = all(None not in pair and _parties(pair[0])[:1] == _parties(pair[1])[:1] for pair in changed)
        owners_at = self.owners_at if owners_same else None
        fleet_at = self.fleet_at if fleet_same else None
        return (ended if owners_at is None else owners_at), (ended if fleet_at is None else fleet_at)


def _known(whole: Whole, sightings: Mapping[str, Sighting]) -> Known:
    """Every lease of these sightings."""
    since = sightings.since if isinstance(sightings, Sightings) else {}
    return Known(whole, {key: None if each is None else each.lease for key, each in since.items()})


def _stood(before: Mapping[str, Sighting], now: Mapping[str, Sighting]) -> bool:
    """Whether each of these leases was there before, and is whose it was, to the same end, for the same hash range."""
    for key, sighting in now.items():
        if (earlier := before.get(key)) is None:
            return False
        old, new = earlier.lease, sighting.lease
        same = old.owner == new.owner and old.next_owner == new.next_owner and old.ended is new.ended
        if not (same and old.hash_range == new.hash_range and old.stream == new.stream):
            return False
    return True


def _parties(sighting: Sighting | None) -> tuple[str | None, ...]:
    """The owner and the heir of a lease; nobody where there is none."""
    return () if sighting is None else (sighting.lease.owner, sighting.lease.next_owner)


def _owners(sightings: Mapping[str, Sighting]) -> dict[str, str | None]:
    """The owner of each lease, by key."""
    return {key: sighting.lease.owner for key, sighting in sightings.items()}


def _fleet(sightings: Mapping[str, Sighting]) -> frozenset[str | None]:
    """Everybody named in the table: a worker that asked for its first lease has joined."""
    leases = [sighting.lease for sighting in sightings.values()]
    return frozenset([lease.owner for lease in leases] + [lease.next_owner for lease in leases]) - {None}
