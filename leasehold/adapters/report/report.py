"""Computes the content of a report, as one value and as JSON.

`changes` compares each snapshot of a lease table with the next: owners, workers, checkpoints. `saved` reads snapshots
from the output of `leasehold leases --json`, and `looked` takes them from a store.

The lag of a lease is what its owner writes into the row. If no row contains it, snapshots only show for how long, at
least, a checkpoint has stood still: since the first of the consecutive snapshots with the same checkpoint. A shard
without new records stands still as well, so we don't call this lag.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from attrs import asdict, frozen

from leasehold.adapters.consumer.status import lags_of
from leasehold.adapters.json_form import BadJsonField, JsonValue, lease_of, parse
from leasehold.adapters.report.distribution import Distribution, distribution, tallies
from leasehold.adapters.report.watching import WatchedTable
from leasehold.balancer.model import Position
from leasehold.balancer.rules.shares import Groups, least_moves
from leasehold.stores.fields import kilobytes
from leasehold.stores.protocol import Malformed, Store
from leasehold.stores.swap import current_and_left


@frozen
class SnapshotChange:
    """The difference between a snapshot and the one before it.

    Attributes:
        at: The time of the later snapshot, in seconds since 1970.
        seconds: The time between the two.
        moved: The number of unfinished leases that went from one owner to another.
        claimed: The number of unfinished leases that had no owner, and now have one.
        freed: The number of unfinished leases that had an owner, and now have none.
        ended: The number of leases that were finished in between.
        created: The number of new leases.
        deleted: The number of leases that are gone.
        joined: The number of workers that own unfinished leases now, and owned none before.
        left: The number of workers that owned unfinished leases before, and own none now.
        advanced: The number of unfinished leases whose checkpoint moved.
    """

    at: float
    seconds: float
    moved: int = 0
    claimed: int = 0
    freed: int = 0
    ended: int = 0
    created: int = 0
    deleted: int = 0
    joined: int = 0
    left: int = 0
    advanced: int = 0

    @property
    def owner_changes(self) -> int:
        """The number of leases whose owner changed, including those that gained or lost one."""
        return self.moved + self.claimed + self.freed


@frozen
class StalledLease:
    """An unfinished lease, and the minimum number of seconds for which its checkpoint has stood still."""

    key: str
    owner: str | None
    seconds: float


@frozen
class CheckpointLag:
    """How far behind the leases of one snapshot were, or how long they had stood still, in seconds."""

    at: float
    median: float
    most: float


def changes(snapshots: Sequence[WatchedTable]) -> tuple[SnapshotChange, ...]:
    """Return the changes between consecutive snapshots, which must be sorted by time."""
    results = []
    for earlier, later in pairwise(snapshots):
        old, new = ({lease.key: lease for lease in snapshot.leases} for snapshot in (earlier, later))
        workers_before, workers_now = (
            {lease.owner for lease in snapshot.unended} - {None} for snapshot in (earlier, later)
        )
        in_both = [(old[key], lease) for key, lease in new.items() if key in old]
        owners = [(first.owner, last.owner) for first, last in in_both if not last.ended]
        results.append(
            SnapshotChange(
                at=later.at,
                seconds=later.at - earlier.at,
                moved=sum(None not in (first, last) and first != last for first, last in owners),
                claimed=sum(first is None and last is not None for first, last in owners),
                freed=sum(first is not None and last is None for first, last in owners),
                ended=sum(last.ended and not first.ended for first, last in in_both),
                created=len(new.keys() - old.keys()),
                deleted=len(old.keys() - new.keys()),
                joined=len(workers_now - workers_before),
                left=len(workers_before - workers_now),
                advanced=sum(first.checkpoint != last.checkpoint and not last.ended for first, last in in_both),
            )
        )
    return tuple(results)


def standstill(snapshots: Sequence[WatchedTable]) -> tuple[StalledLease, ...]:
    """Return the unfinished leases of the last snapshot, the one that has stood still longest first."""
    *_, last = _stills(snapshots)
    return tuple(sorted(last, key=lambda still: (-still.seconds, still.key)))


def lags(snapshots: Sequence[WatchedTable]) -> tuple[CheckpointLag, ...]:
    """Return how far behind the leases of each snapshot were, leaving out snapshots whose rows don't report it."""
    results = []
    for snapshot in snapshots:
        measured = lags_of(snapshot.leases, snapshot.at, math.inf).values()
        if seconds := [lag.seconds for lag in measured if lag.seconds is not None]:
            results.append(CheckpointLag(snapshot.at, median(seconds), max(seconds)))
    return tuple(results)


def standstills(snapshots: Sequence[WatchedTable]) -> tuple[CheckpointLag, ...]:
    """Return how long checkpoints had stood still at each snapshot except the first."""
    followed = list(zip(snapshots, _stills(snapshots), strict=True))[1:]
    return tuple(
        CheckpointLag(snapshot.at, median(still.seconds for still in stills), max(still.seconds for still in stills))
        for snapshot, stills in followed
        if stills
    )


def _stills(snapshots: Sequence[WatchedTable]) -> Iterator[list[StalledLease]]:
    """Yield, for each snapshot, its unfinished leases and how long their checkpoints had stood still."""
    since: dict[str, tuple[Position, float]] = {}
    for snapshot in snapshots:
        since = {
            lease.key: previous
            if previous is not None and previous[0] == lease.checkpoint
            else (lease.checkpoint, snapshot.at)
            for lease in snapshot.unended
            for previous in [since.get(lease.key)]
        }
        yield [StalledLease(row.key, row.owner, snapshot.at - since[row.key][1]) for row in snapshot.unended]


STILL_MAX = 10
"""How many of the leases that have stood still longest a report names."""


@frozen
class Moment:
    """The distribution of leases at one time, in seconds since 1970."""

    at: float
    distribution: Distribution


HOT = 3.0
"""A shard is hot if its throughput is more than this many times the mean of all known ones."""


@frozen
class LeaseLine:
    """A lease of the last snapshot.

    Attributes:
        key: The key of the lease.
        owner: The owner, if there is one.
        ended: Whether it is finished.
        lag: How many seconds it is behind; None if unknown.
        weight: Its throughput in KB/s; None if unknown.
        hot: Whether its throughput is far above the mean.
    """

    key: str
    owner: str | None
    ended: bool
    lag: float | None
    weight: float | None
    hot: bool


@frozen
class Report:
    """The content of a report on one store.

    Attributes:
        store: The name of the store.
        moments: The distribution at each snapshot, sorted by time; not empty.
        malformed: The number of rows in the last snapshot that could not be read as leases.
        changes: The changes between snapshots; empty if there is only one.
        lags: The lag at each snapshot, as the rows report it; empty if none does.
        still: The leases that have stood still longest; empty if there is only one snapshot.
        stood: How long checkpoints had stood still at each snapshot; empty if there is only one.
        leases: Every lease, the one that is furthest behind first; empty if another process counted them.
        least: The minimum number of moves to an even distribution.
    """

    store: str
    moments: tuple[Moment, ...]
    malformed: int = 0
    changes: tuple[SnapshotChange, ...] = ()
    lags: tuple[CheckpointLag, ...] = ()
    still: tuple[StalledLease, ...] = ()
    stood: tuple[CheckpointLag, ...] = ()
    leases: tuple[LeaseLine, ...] = ()
    least: int = 0

    @property
    def last(self) -> Distribution:
        """The distribution of leases at the last snapshot."""
        return self.moments[-1].distribution


def report(store: str, snapshots: Sequence[WatchedTable], groups: Groups) -> Report:
    """Return the report on these snapshots of one store, of which there is at least one, in any order."""
    ordered = sorted(snapshots, key=lambda snapshot: snapshot.at)
    last = ordered[-1]
    behind = lags_of(last.leases, last.at, math.inf)
    weights = [lease.weight for lease in last.unended if lease.weight is not None]
    hot = HOT * fmean(weights) if weights else math.inf
    leases = [
        LeaseLine(
            lease.key,
            lease.owner,
            lease.ended,
            behind[lease.key].seconds if lease.key in behind else None,
            None if lease.weight is None else kilobytes(lease.weight),
            not lease.ended and lease.weight is not None and lease.weight > hot,
        )
        for lease in last.leases
    ]
    owners = {lease.key: lease.owner for lease in last.unended}
    return Report(
        store=store,
        moments=tuple(Moment(snapshot.at, distribution(tallies(snapshot.leases), groups)) for snapshot in ordered),
        malformed=len(last.malformed),
        changes=changes(ordered),
        lags=lags(ordered),
        still=standstill(ordered)[:STILL_MAX] if len(ordered) > 1 else (),
        stood=standstills(ordered),
        leases=tuple(sorted(leases, key=lambda line: (line.ended, -(line.lag or 0.0), line.key))),
        least=least_moves(owners, {owner for owner in owners.values() if owner is not None}, groups),
    )


def report_json(said: Report) -> dict[str, Any]:
    """Return the report as a JSON object, with times in seconds since 1970."""
    return {
        "store": said.store,
        "at": said.moments[-1].at,
        "malformed": said.malformed,
        "distribution": asdict(said.last),
        "over_time": [
            {
                "at": moment.at,
                "working": moment.distribution.working,
                "unowned": moment.distribution.unowned,
                "workers": len(moment.distribution.workers),
                "spread": asdict(moment.distribution.spread),
            }
            for moment in said.moments
        ],
        "changes": [asdict(change) for change in said.changes],
        "lag": [asdict(lag) for lag in said.lags],
        "still": [asdict(still) for still in said.still],
        "stood": [asdict(stood) for stood in said.stood],
        "leases": [asdict(line) for line in said.leases],
        "moves_least": said.least,
    }


LAST_SECOND = 253_402_300_799
"""The last second of the year 9999, which is the latest that `datetime` can represent."""


def looked(
    store: Store, times: int, seconds: float, wait: Callable[[float], object] = time.sleep
) -> Iterator[WatchedTable]:
    """Take snapshots of a store.

    Args:
        store: The store.
        times: The number of snapshots.
        seconds: The time between two snapshots.
        wait: Waits for this many seconds.

    Raises:
        OutcomeUnknown: A snapshot failed.
    """
    for look in range(times):
        if look:
            wait(seconds)
        listing = store.list()
        leases, _left = current_and_left(listing.leases)
        yield WatchedTable(leases, at=time.time(), malformed=listing.malformed)


def saved(name: str, lines: Iterable[bytes]) -> Iterator[WatchedTable]:
    """Read snapshots from lines of JSON.

    Skips lines that repeat an earlier reading because a later one failed.

    Args:
        name: The name of the file, for errors.
        lines: The lines.

    Raises:
        BadJsonField: A line is not a snapshot. The message names the line and the field.
    """
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            fields = parse(line).fields()
            at = fields.need("at").number(most=LAST_SECOND)
            leases = tuple(lease_of(value) for value in fields.need("leases").items())
            malformed = fields.read("malformed", lambda value: len(value.items()), 0)
            trouble = fields.read("trouble", JsonValue.text, "")
            for ignored in ("lags", "status", "says", "statuses", "swap", "swapping"):
                fields.read(ignored, lambda _: None, None)  # the leases' annotations contain the same
            fields.done()
        except BadJsonField as bad:
            raise BadJsonField(f"{name}, line {number}: {bad}") from None
        if not trouble:
            # A report only has the number of malformed rows.
            yield WatchedTable(leases, at=at, malformed=(Malformed("", "", ""),) * malformed)
