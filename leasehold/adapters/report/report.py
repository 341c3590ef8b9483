"""Everything a report says, as one value, and as JSON; pure.

`changes` are those from each snapshot of a lease table to the next: owners, workers, checkpoints. `saved` and `looked`
read snapshots: from what `leasehold leases --json` has printed, or from a store that is looked at several times.

How far behind a lease is, its owner writes into the row. Where no row tells, snapshots can only tell how long a
checkpoint has stood still, at least: since the first of the snapshots in a row that show it where it is now. A shard
into which nobody writes stands still as well, so that this is not called lag.
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


@frozen
class SnapshotChange:
    """The difference between a snapshot and the one before it.

    at          the later one's time, in seconds since 1970
    seconds     between the two
    moved       leases that went from one owner to another
    claimed     leases that had no owner, and have one
    freed       leases that had an owner, and have none, other than by ending
    ended       leases finished since
    created, deleted  leases
    joined, left      workers
    advanced    unfinished leases whose checkpoint moved
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
        """Leases that have another owner than before, or one at last, or none any more."""
        return self.moved + self.claimed + self.freed


@frozen
class StalledLease:
    """An unfinished lease, and for how many seconds at least its checkpoint has stood still."""

    key: str
    owner: str | None
    seconds: float


@frozen
class CheckpointLag:
    """How far behind leases were at one snapshot, or how long they had stood still: half at most `median` seconds."""

    at: float
    median: float
    most: float


def changes(snapshots: Sequence[WatchedTable]) -> tuple[SnapshotChange, ...]:
    """The changes between neighbouring snapshots, which are in the order of time."""
    found = []
    for before, after in pairwise(snapshots):
        old, new = ({lease.key: lease for lease in each.leases} for each in (before, after))
        was, now = ({lease.owner for lease in each.unended} - {None} for each in (before, after))
        kept = [(old[key], lease) for key, lease in new.items() if key in old]
        owners = [(first.owner, then.owner) for first, then in kept if not then.ended]
        found.append(
            SnapshotChange(
                at=after.at,
                seconds=after.at - before.at,
                moved=sum(None not in (first, then) and first != then for first, then in owners),
                claimed=sum(first is None and then is not None for first, then in owners),
                freed=sum(first is not None and then is None for first, then in owners),
                ended=sum(then.ended and not first.ended for first, then in kept),
                created=len(new.keys() - old.keys()),
                deleted=len(old.keys() - new.keys()),
                joined=len(now - was),
                left=len(was - now),
                advanced=sum(first.checkpoint != then.checkpoint and not then.ended for first, then in kept),
            )
        )
    return tuple(found)


def standstill(snapshots: Sequence[WatchedTable]) -> tuple[StalledLease, ...]:
    """The unfinished leases at the last snapshot, those that have stood still longest first."""
    *_, last = _stills(snapshots)
    return tuple(sorted(last, key=lambda still: (-still.seconds, still.key)))


def lags(snapshots: Sequence[WatchedTable]) -> tuple[CheckpointLag, ...]:
    """How far behind the leases of each snapshot were, as the rows tell; nothing of one whose rows tell nothing."""
    told = []
    for snapshot in snapshots:
        found = lags_of(snapshot.leases, snapshot.at, math.inf).values()
        if known := [lag.seconds for lag in found if lag.seconds is not None]:
            told.append(CheckpointLag(snapshot.at, median(known), max(known)))
    return tuple(told)


def standstills(snapshots: Sequence[WatchedTable]) -> tuple[CheckpointLag, ...]:
    """How long checkpoints had stood still at each snapshot but the first, which has none before it."""
    followed = list(zip(snapshots, _stills(snapshots), strict=True))[1:]
    return tuple(
        CheckpointLag(snapshot.at, median(still.seconds for still in stills), max(still.seconds for still in stills))
        for snapshot, stills in followed
        if stills
    )


def _stills(snapshots: Sequence[WatchedTable]) -> Iterator[list[StalledLease]]:
    """For each snapshot, its unfinished leases, and since when the checkpoint of each is where it is."""
    since: dict[str, tuple[Position, float]] = {}
    for snapshot in snapshots:
        since = {
            lease.key: known if known is not None and known[0] == lease.checkpoint else (lease.checkpoint, snapshot.at)
            for lease in snapshot.unended
            for known in [since.get(lease.key)]
        }
        yield [StalledLease(row.key, row.owner, snapshot.at - since[row.key][1]) for row in snapshot.unended]


STILL_MAX = 10
"""How many of the leases that have stood still longest are named."""


@frozen
class Moment:
    """How leases were shared out at one time, in seconds since 1970."""

    at: float
    distribution: Distribution


HOT = 3.0
"""A shard is hot whose throughput is so many times the mean of all that are known."""


@frozen
class LeaseLine:
    """A lease of the last snapshot: seconds behind and KB/s, None where nobody told; `hot` far above the mean."""

    key: str
    owner: str | None
    ended: bool
    lag: float | None
    weight: float | None
    hot: bool


@frozen
class Report:
    """The content of a report on one store; `moments` is in the order of time and not empty.

    malformed  rows of the last snapshot that could not be read as leases
    changes, still, stood  empty where there was one snapshot only
    lags     as the rows tell; empty where none does
    stood    how long checkpoints had stood still
    leases   every lease, those that are furthest behind first; empty where another process counted
    least    how few moves would make it even
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
        """How leases are shared out now."""
        return self.moments[-1].distribution


def report(store: str, snapshots: Sequence[WatchedTable], groups: Groups) -> Report:
    """Make the report of these snapshots of one store; at least one, in any order."""
    ordered = sorted(snapshots, key=lambda snapshot: snapshot.at)
    last = ordered[-1]
    behind = lags_of(last.leases, last.at, math.inf)
    known = [lease.weight for lease in last.unended if lease.weight is not None]
    hot = HOT * fmean(known) if known else math.inf
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
        moments=tuple(Moment(each.at, distribution(tallies(each.leases), groups)) for each in ordered),
        malformed=len(last.malformed),
        changes=changes(ordered),
        lags=lags(ordered),
        still=standstill(ordered)[:STILL_MAX] if len(ordered) > 1 else (),
        stood=standstills(ordered),
        leases=tuple(sorted(leases, key=lambda line: (line.ended, -(line.lag or 0.0), line.key))),
        least=least_moves(owners, {owner for owner in owners.values() if owner is not None}, groups),
    )


def report_json(said: Report) -> dict[str, Any]:
    """The report as a JSON object; times are in seconds since 1970."""
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
"""The last second of the year 9999: no calendar has later times."""


def looked(
    store: Store, times: int, seconds: float, wait: Callable[[float], object] = time.sleep
) -> Iterator[WatchedTable]:
    """Take this many snapshots of a store, so many seconds apart. Raises OutcomeUnknown if one fails."""
    for look in range(times):
        if look:
            wait(seconds)
        listing = store.list()
        yield WatchedTable(listing.leases, at=time.time(), malformed=listing.malformed)


def saved(name: str, lines: Iterable[bytes]) -> Iterator[WatchedTable]:
    """The snapshots in these lines of JSON; `name` says whose they are.

    Lines that repeat an earlier look, because a later one failed, are left out.
    Raises BadJsonField, naming the line and the field.
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
            for noted in ("lags", "status", "says", "statuses", "swap"):
                fields.read(noted, lambda _: None, None)  # the leases' own notes say the same
            fields.done()
        except BadJsonField as bad:
            raise BadJsonField(f"{name}, line {number}: {bad}") from None
        if not trouble:
            # Only how many there were is reported; which ones, the line itself tells.
            yield WatchedTable(leases, at=at, malformed=(Malformed("", "", ""),) * malformed)
