"""Measures how long each lease has not changed, by this worker's own clock.

All functions in this module are pure. Their results depend only on the reads of the table that are passed in, and on
the times of these reads.

Rule 1: this module reads no clock. The caller passes the times at which each read began and ended, in seconds, from the
same monotonic clock.
Rule 2: a lease counts as unchanged from the *end* of the first read that showed its present version to the *start* of
the last such read. Otherwise, a delay on our side could make a living worker look dead.

Example: a read from 0 s to 1 s shows version 7 for the first time, and a read from 9 s to 12 s shows it again. The
lease may have got version 7 at 0.9 s, and version 8 at 9.1 s, just after its row was read. Therefore, it is certain
only that the version did not change from 1 s to 9 s. The three seconds of the second read are not counted against the
owner.

Rule 3 (C17): the time during which the store has an outage does not count. Owners could not renew during the outage, so
the first worker whose read succeeds must not take their leases. Therefore, for every lease that did not change during
an outage, the time starts again at the end of the first read that succeeds. The time since a hand-off was requested
also starts again. The store has an outage if all reads fail for longer than `silence_seconds`.

KCL 3.x workers do not take leases by themselves. Their leader assigns free leases to them (M14). Before such a worker
gets its first lease, no lease shows that it exists. Therefore, this module also tracks the reports (worker metrics)
that these workers store next to the leases.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from attrs import evolve, field, frozen

from leasehold.balancer.bulletin import BulletinTracker
from leasehold.balancer.census import FullReading, KnownLeases
from leasehold.balancer.family import update_holes
from leasehold.balancer.model import History, Lease, Shard

REPORT_AGE_MAX = 35.0
"""A KCL 3.x worker counts as alive if its last report is not older than this, in seconds.

KCL 3.x workers usually report every 30 s. A worker that has not reported for this long has missed a report or has
ended.
"""
LEADER_MEMORY_SECONDS = 60.0
"""A KCL 3.x leader may give leases to a worker for this long after the worker's last report.

The value is twice the usual interval between reports.
"""


@frozen
class Reports:
    """The reports of KCL 3.x workers, as returned by one read of the table.

    Attributes:
        leader: The worker that holds the leader's lock, or None.
        stamps: For each worker, a string that changes with each of its reports.
    """

    leader: str | None = None
    stamps: tuple[tuple[str, str], ...] = ()


NO_REPORTS = Reports()


@frozen
class ReportTrack:
    """The state of one worker according to its reports.

    Each time is the end of the first read that showed the value or the change.

    Attributes:
        stamp: A string that identifies the latest report.
        stamp_at: The time at which `stamp` was first read.
        moved_at: The same as `stamp_at`, or minus infinity if the latest report does not prove that the worker is still
            alive.
        count: The number of the worker's leases.
        since: When the worker was last given a lease, lost its last lease, or was first known to be alive, whichever is
            latest.
    """

    stamp: str
    stamp_at: float
    moved_at: float
    count: int
    since: float


@frozen
class WorkerReports:
    """The state of all workers that write reports, according to all reads of the whole table.

    Attributes:
        leader: The leader in the last read.
        tracks: The state of each worker.
        is_first: Whether no read of the table has been added yet.
    """

    leader: str | None = None
    tracks: Mapping[str, ReportTrack] = field(factory=dict)
    is_first: bool = True

    def after(self, reports: Reports, leases: Iterable[Lease], ended: float) -> "WorkerReports":
        """Return the state after another read of the whole table."""
        lease_counts = Counter(lease.owner for lease in leases if not lease.ended) if reports.stamps else Counter()
        tracks = {
            worker: self._next_track(worker, stamp, lease_counts[worker], ended) for worker, stamp in reports.stamps
        }
        return WorkerReports(reports.leader, tracks, is_first=False)

    def led(self, began: float) -> tuple[tuple[str, float], ...]:
        """Return the living workers of a living KCL 3.x leader, each with the seconds since it was last given a lease.

        The time is infinite while the leader may still mistake an ended worker for a living one and give leases to it.
        This is possible as long as the last report of the ended worker is recent. It is also possible until every
        worker without leases has reported once more, because only a new report proves that such a worker is alive. The
        wait starts again when another worker without leases appears.
        """
        living_tracks = {
            worker: track for worker, track in self.tracks.items() if began - track.moved_at <= REPORT_AGE_MAX
        }
        if self.leader not in living_tracks:
            return ()
        forget_times = [
            track.stamp_at + LEADER_MEMORY_SECONDS
            for worker, track in self.tracks.items()
            if worker not in living_tracks
        ]
        forgotten_at = max(forget_times, default=-math.inf)
        tracks_without_leases = [track for track in living_tracks.values() if not track.count]
        last_change = max([forgotten_at, *(track.since for track in tracks_without_leases)])
        leases_may_be_given = began >= forgotten_at and all(
            track.moved_at >= last_change for track in tracks_without_leases
        )
        return tuple(
            (worker, max(0.0, began - max(forgotten_at, track.since)) if leases_may_be_given else math.inf)
            for worker, track in sorted(living_tracks.items())
        )

    def _next_track(self, worker: str, stamp: str, lease_count: int, ended_at: float) -> ReportTrack:
        """Return the state of a worker after another read of the table."""
        old_track = self.tracks.get(worker)
        if old_track is None:
            # A report in the first read may be years old. A report that first appears in a later read was written after
            # the previous read.
            return ReportTrack(stamp, ended_at, -math.inf if self.is_first else ended_at, lease_count, ended_at)
        stamp_at = old_track.stamp_at if stamp == old_track.stamp else ended_at
        if old_track.count and not lease_count:
            # The worker may have died just after its last report, so that other workers took its leases. Only its next
            # report proves that it is alive.
            return ReportTrack(stamp, stamp_at, -math.inf, lease_count, ended_at)
        moved_at = old_track.moved_at if stamp == old_track.stamp else ended_at
        gained_leases = lease_count > old_track.count or old_track.moved_at == -math.inf
        return ReportTrack(stamp, stamp_at, moved_at, lease_count, ended_at if gained_leases else old_track.since)


class Sighting(NamedTuple):
    """The state of one lease according to all reads of the table.

    The class is a named tuple because each read of the table creates an instance for every lease, and creating an
    instance of an attrs class takes three times as long.

    Attributes:
        lease: The lease as it was last read, with `idle`, `held` and `next_owner_idle` filled in.
        version_at: The end of the first read that showed the lease's version.
        owner_at: The end of the first read that showed the lease's owner, or minus infinity if that was our first read.
        next_owner_at: The end of the first read that showed the lease's next owner.
        watched: The seconds for which the version has not changed, by this worker's own clock. Unlike `idle`, the value
            does not depend on the store's clock, which may be reset.
        previous_unchanged_seconds: The seconds for which the previous version stayed the same before the present owner
            changed it.
        gap: The shorter of the last two intervals without a renewal, in seconds. One long interval may be a pause of
            the store, but two in a row show a slow owner.
        pace: A lower bound for the owner's renewal interval in seconds, or 0 if the store does not count renewals.
    """

    lease: Lease
    version_at: float
    owner_at: float
    next_owner_at: float
    watched: float = 0.0
    previous_unchanged_seconds: float = 0.0
    gap: float = 0.0
    pace: float = 0.0


@frozen
class Sightings(Mapping[str, Sighting]):
    """The state of each lease after the last read of the whole table and later reads of a few rows.

    If a row was deleted after the last read of the whole table, `since` contains None for its key.
    """

    whole: Mapping[str, Sighting]
    since: Mapping[str, Sighting | None]

    def __getitem__(self, key: str) -> Sighting:
        sighting = self.since[key] if key in self.since else self.whole[key]
        if sighting is None:
            raise KeyError(key)
        return sighting

    def __iter__(self) -> Iterator[str]:
        return iter(self.merged())

    def __len__(self) -> int:
        return len(self.merged())

    def merged(self) -> dict[str, Sighting]:
        """Return the states of all leases by key, in the order in which the leases were read."""
        return {key: sighting for key, sighting in {**self.whole, **self.since}.items() if sighting is not None}


@frozen
class Watch:
    """The knowledge of a worker from all reads of the table so far. Pass its `history` to `Me`.

    Attributes:
        history: The facts about earlier reads that the rules need.
        sightings: The known leases by key.
        owners_at: The end of the first read that showed the present owners of all leases.
        fleet_at: The end of the first read that showed the present set of owners and next owners.
        full_at: The end of the last read of the whole table.
        bulletins: Tracks bulletins; None if no worker writes bulletins (C14).
        worker_reports: Tracks the workers that store reports next to the leases.
        whole: The last read of the whole table, as `look` returned it.
        silence_seconds: If every read fails for longer than this, the store has an outage (C17).
        silent_at: The beginning of the first of the latest failed reads, or None if the latest read succeeded.
        recovered_at: The end of the first read that succeeded after an outage.

    Examples:
        >>> from leasehold import Lease, Watch
        >>> from leasehold.planner import Version
        >>> row = Lease("shard-0", owner="worker-b", version=Version("7"))
        >>> watch, _ = Watch().look([row], began=0.0, ended=1.0)
        >>> watch, (lease,) = watch.look([row], began=9.0, ended=12.0)
        >>> lease.idle  # from the end of the first read to the start of the last
        8.0
    """

    history: History = field(factory=History)
    sightings: Mapping[str, Sighting] = field(factory=dict)
    owners_at: float | None = None
    fleet_at: float | None = None
    full_at: float = -math.inf
    bulletins: BulletinTracker | None = None
    worker_reports: WorkerReports = field(factory=WorkerReports)
    whole: FullReading = field(factory=lambda: FullReading(()), eq=False, repr=False)
    silence_seconds: float = math.inf
    silent_at: float | None = None
    recovered_at: float = -math.inf

    def unanswered(self, began: float) -> "Watch":
        """Return the watch after a failed read. `began` is the time at which this read began."""
        return self if self.silent_at is not None else evolve(self, silent_at=began)

    def look(
        self,
        listing: Iterable[Lease],
        began: float,
        ended: float,
        requested_keys: Collection[str] | None = None,
        reports: Reports = NO_REPORTS,
    ) -> tuple["Watch", Sequence[Lease]]:
        """Add a read of the table.

        Return the new watch, and all known leases with `idle`, `held` and `next_owner_idle`.

        The cost of adding a read of a few rows does not grow with the number of known leases (`KnownLeases`).

        When a lease is first read, its `idle` is infinite if it has no owner, and otherwise the age of the row
        according to the store.

        `held` is the time since the owner last changed. It is infinite until the first change, because it is unknown
        for how long the first owner has held the lease. For a lease without an owner, `held` is the time for which the
        lease has had no owner.

        Args:
            listing: The leases as they were read. Their `idle` is the age of the row according to the store, or 0 if
                the store does not record ages. Do not pass a listing if the read of any page failed.
            began: The time at which the read began, in seconds.
            ended: The time at which the last page of the read arrived, in seconds.
            requested_keys: The keys that were read, or None for a read of the whole table. If a key is not in
                `listing`, its lease was deleted. Leases with other keys stay as they were.
            reports: The reports of workers, which only a read of the whole table returns.
        """
        if self.silent_at is not None:
            recovered_at = ended if began - self.silent_at > self.silence_seconds else self.recovered_at
            return evolve(self, silent_at=None, recovered_at=recovered_at).look(
                listing, began, ended, requested_keys, reports
            )
        if requested_keys is None:
            earlier_sightings = self.sightings.merged() if isinstance(self.sightings, Sightings) else self.sightings
            new_sightings = {
                lease.key: self._next_sighting(earlier_sightings.get(lease.key), lease, began, ended)
                for lease in listing
            }
            sightings: Mapping[str, Sighting] = new_sightings
            leases: Sequence[Lease] = tuple([sighting.lease for sighting in new_sightings.values()])
            full_reading, deleted_keys = FullReading(tuple(leases)), earlier_sightings.keys() - new_sightings.keys()
            is_unchanged = not deleted_keys and _same_state(earlier_sightings, new_sightings)
            owners_at, fleet_at = self._changes(earlier_sightings, new_sightings, ended, unchanged=is_unchanged)
            history = self._history(sightings, leases, unchanged=is_unchanged)
        else:
            new_sightings = {
                lease.key: self._next_sighting(self.sightings.get(lease.key), lease, began, ended) for lease in listing
            }
            sightings = self._updated_sightings(new_sightings, set(requested_keys) - new_sightings.keys())
            deleted_keys, full_reading = (
                {key for key in requested_keys if key not in new_sightings and key in self.sightings},
                self.whole,
            )
            leases = _known_leases(full_reading, sightings)
            owners_at, fleet_at = self._changes_in(new_sightings, deleted_keys, leases, ended)
            history = self.history
        full_at = self.full_at if requested_keys is not None else ended
        leases_read = (sighting.lease for sighting in new_sightings.values())
        bulletins = (
            None if self.bulletins is None else self.bulletins.after(leases_read, began, ended, requested_keys, full_at)
        )
        worker_reports = (
            self.worker_reports if requested_keys is not None else self.worker_reports.after(reports, leases, ended)
        )
        history = evolve(
            history,
            owners_still=max(0.0, began - owners_at),
            fleet_still=max(0.0, began - fleet_at),
            full_still=max(0.0, began - full_at),
            full_apart=history.full_apart if requested_keys is not None else max(0.0, began - self.full_at),
            full_took=history.full_took if requested_keys is not None else max(0.0, ended - began),
            hearing=None if bulletins is None else bulletins.hearing,
            led=worker_reports.led(began),
            gone=self._deleted_leases(sightings, deleted_keys),
        )
        watch = Watch(history, sightings, owners_at, fleet_at, full_at, bulletins, worker_reports, full_reading)
        return evolve(watch, silence_seconds=self.silence_seconds, recovered_at=self.recovered_at), leases

    def _history(self, sightings: Mapping[str, Sighting], leases: Iterable[Lease], *, unchanged: bool) -> History:
        """Return the history, updated with holes, gaps and paces, which only a read of the whole table shows."""
        holes = self.history.holes
        persisting_holes = (evolve(hole, times=hole.times + 1) for hole in holes)
        holes = tuple(persisting_holes) if unchanged else update_holes(leases, holes)
        gaps, paces = dict[str, float](), dict[str, float]()  # the longest gap and the longest pace of each owner
        for sighting in sightings.values():
            gap, pace, owner = sighting.gap, sighting.pace, sighting.lease.owner
            if owner is None:
                continue
            if gap > gaps.get(owner, 0.0):
                gaps[owner] = gap
            if pace > paces.get(owner, 0.0):
                paces[owner] = pace
        return evolve(self.history, holes=holes, gaps=tuple(sorted(gaps.items())), paces=tuple(sorted(paces.items())))

    def last_seen(self, key: str) -> Lease | None:
        """Return the lease as it was last read, even if its row has been deleted since then."""
        if (sighting := self.sightings.get(key)) is not None:
            return sighting.lease
        return next((lease for lease in self.history.gone if lease.key == key), None)

    def recalling(self, own: Mapping[str, Lease], shards: Collection[Shard] | None) -> "Watch":
        """Return the watch with the latest known versions of deleted leases.

        `own` contains the leases as this process last wrote them, which may be later than its last read. Deleted leases
        whose shards are no longer listed are dropped.
        """
        if not self.history.gone:
            return self
        latest_leases = (
            max(lease, own.get(lease.key, lease), key=lambda candidate: candidate.epoch) for lease in self.history.gone
        )
        listed_ids, streams = {shard.id for shard in shards or ()}, {shard.stream for shard in shards or ()}
        deleted_leases = tuple(
            lease for lease in latest_leases if lease.key in listed_ids or lease.stream not in streams
        )
        return evolve(self, history=evolve(self.history, gone=deleted_leases))

    def _deleted_leases(
        self, current_sightings: Mapping[str, Sighting], deleted_keys: Collection[str]
    ) -> tuple[Lease, ...]:
        """Return the known leases that no longer have a row.

        Deleted leases are kept so that their rows can be recreated. This worker may be the only one that knows how far
        their shards were read.
        """
        if not (self.history.gone or deleted_keys):
            return ()
        leases = {lease.key: lease for lease in self.history.gone} | {
            key: self.sightings[key].lease for key in deleted_keys
        }
        return tuple(leases[key] for key in sorted(leases) if key not in current_sightings)

    def _updated_sightings(self, new_sightings: Mapping[str, Sighting], deleted_keys: Iterable[str]) -> Sightings:
        """Return the states of all leases, updated with `new_sightings` and without the leases in `deleted_keys`."""
        old_sightings = self.sightings if isinstance(self.sightings, Sightings) else Sightings(self.sightings, {})
        return Sightings(old_sightings.whole, {**old_sightings.since, **dict.fromkeys(deleted_keys), **new_sightings})

    def _next_sighting(self, old_sighting: Sighting | None, lease: Lease, began_at: float, ended_at: float) -> Sighting:
        """Return the new state of a lease, given its state before this read.

        The times of the version, the owner and the next owner are tracked separately. Each of them starts again when
        its value changes.
        """
        if old_sighting is None:
            # The lease was not in an earlier read. Unless this is the first read, the owner got the lease after the
            # previous read.
            owner_at = -math.inf if self.owners_at is None else ended_at
            watched_lease = lease.watched(
                idle=math.inf if lease.owner is None else lease.idle,
                held=math.inf if self.owners_at is None else 0.0,
                next_owner_idle=0.0,
            )
            return Sighting(watched_lease, version_at=ended_at, owner_at=owner_at, next_owner_at=ended_at)
        old_lease, version_at, owner_at, next_owner_at, watched_seconds, previous_interval, shortest_interval, pace = (
            old_sighting
        )
        same_owner = old_lease.owner == lease.owner
        # Do not compare only the versions, because a row that was deleted and recreated starts a new counter, so it may
        # have an earlier version again (L13).
        if same_owner and old_lease.version == lease.version:
            version_at = max(version_at, self.recovered_at)
        else:
            # Ignore the time before a new owner's first renewal, because it does not show how often the new owner
            # renews.
            interval = watched_seconds if version_at > owner_at else 0.0
            shortest_interval = min(interval, previous_interval) if same_owner else 0.0
            renewals = lease.epoch - old_lease.epoch if same_owner else 0
            # `pace` is a lower bound, because an owner with a shorter renewal interval would have renewed at least once
            # more between the two reads.
            pace = max(0.0, began_at - version_at) / (renewals + 1) if renewals > 0 else 0.0
            previous_interval, version_at = interval, ended_at
        if not same_owner:
            owner_at = ended_at
        # During an outage, the owner cannot release the lease to the next owner (C17).
        next_owner_at = max(next_owner_at, self.recovered_at) if old_lease.next_owner == lease.next_owner else ended_at
        watched_seconds = began_at - version_at if began_at > version_at else 0.0
        # The age of the row according to the store may include an outage, so limit it to the time since the outage
        # (C17).
        age = min(lease.idle, max(0.0, began_at - self.recovered_at)) if lease.idle else 0.0
        idle_seconds, held_seconds = max(age, watched_seconds), began_at - owner_at if began_at > owner_at else 0.0
        watched_lease = lease.watched(
            idle_seconds, held_seconds, max(0.0, began_at - next_owner_at) if lease.next_owner is not None else 0.0
        )
        return Sighting(
            watched_lease,
            version_at,
            owner_at,
            next_owner_at,
            watched_seconds,
            previous_interval,
            shortest_interval,
            0.0 if lease.ended else pace,
        )

    def _changes(
        self,
        old_sightings: Mapping[str, Sighting],
        new_sightings: Mapping[str, Sighting],
        ended_at: float,
        *,
        unchanged: bool,
    ) -> tuple[float, float]:
        """Return when the present owners and the present set of workers were first read."""
        owners_at = (
            self.owners_at if unchanged or _owner_by_key(old_sightings) == _owner_by_key(new_sightings) else None
        )
        fleet_at = (
            self.fleet_at if unchanged or _named_workers(old_sightings) == _named_workers(new_sightings) else None
        )
        return (ended_at if owners_at is None else owners_at), (ended_at if fleet_at is None else fleet_at)

    def _changes_in(
        self,
        new_sightings: Mapping[str, Sighting],
        deleted_keys: Collection[str],
        new_leases: KnownLeases,
        ended_at: float,
    ) -> tuple[float, float]:
        """Return when the present owners and the present set of workers were first read, after a read of a few rows.

        Only the rows that were read, and the workers that are named in them, are visited, because nothing else can have
        changed.
        """
        sighting_pairs = [(self.sightings.get(key), new_sightings.get(key)) for key in {*new_sightings, *deleted_keys}]
        changed_pairs = [
            (old_sighting, new_sighting)
            for old_sighting, new_sighting in sighting_pairs
            if _owner_and_next_owner(old_sighting) != _owner_and_next_owner(new_sighting)
        ]
        if not changed_pairs and self.owners_at is not None and self.fleet_at is not None:
            return self.owners_at, self.fleet_at
        old_leases = _known_leases(self.whole, self.sightings)
        workers_named = {
            name
            for sighting_pair in changed_pairs
            for owner_and_next_owner in map(_owner_and_next_owner, sighting_pair)
            for name in owner_and_next_owner
        } - {None}
        fleet_same = all(
            old_leases.has_owner_or_next_owner(name) == new_leases.has_owner_or_next_owner(name)
            for name in workers_named
        )
        owners_same = all(
            None not in sighting_pair
            and _owner_and_next_owner(sighting_pair[0])[:1] == _owner_and_next_owner(sighting_pair[1])[:1]
            for sighting_pair in changed_pairs
        )
        owners_at = self.owners_at if owners_same else None
        fleet_at = self.fleet_at if fleet_same else None
        return (ended_at if owners_at is None else owners_at), (ended_at if fleet_at is None else fleet_at)


def _known_leases(full_reading: FullReading, sightings: Mapping[str, Sighting]) -> KnownLeases:
    """Return all known leases, that is, the leases of the last full read, updated with later reads."""
    later_sightings = sightings.since if isinstance(sightings, Sightings) else {}
    return KnownLeases(
        full_reading, {key: None if sighting is None else sighting.lease for key, sighting in later_sightings.items()}
    )


def _same_state(old_sightings: Mapping[str, Sighting], new_sightings: Mapping[str, Sighting]) -> bool:
    """Return whether no lease is new, has ended, or has another owner, next owner, hash range or stream than before."""
    for key, sighting in new_sightings.items():
        if (old_sighting := old_sightings.get(key)) is None:
            return False
        old_lease, new_lease = old_sighting.lease, sighting.lease
        same_owners = (
            old_lease.owner == new_lease.owner
            and old_lease.next_owner == new_lease.next_owner
            and old_lease.ended is new_lease.ended
        )
        if not (same_owners and old_lease.hash_range == new_lease.hash_range and old_lease.stream == new_lease.stream):
            return False
    return True


def _owner_and_next_owner(sighting: Sighting | None) -> tuple[str | None, ...]:
    """Return the owner and next owner of a lease, or an empty tuple if there is no lease."""
    return () if sighting is None else (sighting.lease.owner, sighting.lease.next_owner)


def _owner_by_key(sightings: Mapping[str, Sighting]) -> dict[str, str | None]:
    return {key: sighting.lease.owner for key, sighting in sightings.items()}


def _named_workers(sightings: Mapping[str, Sighting]) -> frozenset[str | None]:
    """Return all owners and next owners.

    A worker that has only requested a lease is included, because it has joined the group.
    """
    leases = [sighting.lease for sighting in sightings.values()]
    return frozenset([lease.owner for lease in leases] + [lease.next_owner for lease in leases]) - {None}
