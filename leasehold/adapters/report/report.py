"""Everything a report says, as one value, and as JSON; pure."""

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from attrs import asdict, frozen

from leasehold.adapters.reading.status import lags_of
from leasehold.adapters.report.changes import (
    CheckpointLag,
    Snapshot,
    SnapshotChange,
    StalledLease,
    changes,
    lags,
    standstill,
    standstills,
)
from leasehold.adapters.report.distribution import Distribution, distribution, tallies
from leasehold.balancer.model import Lease
from leasehold.balancer.rules.groups import Groups, least_moves
from leasehold.stores.fields import kilobytes

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


def report(store: str, snapshots: Sequence[Snapshot], groups: Groups) -> Report:
    """Make the report of these snapshots of one store; at least one, in any order."""
    ordered = sorted(snapshots, key=lambda snapshot: snapshot.at)
    return Report(
        store=store,
        moments=tuple(Moment(each.at, distribution(tallies(each.leases), groups)) for each in ordered),
        malformed=ordered[-1].malformed,
        changes=changes(ordered),
        lags=lags(ordered),
        still=standstill(ordered)[:STILL_MAX] if len(ordered) > 1 else (),
        stood=standstills(ordered),
        leases=_lines(ordered[-1]),
        least=_least(ordered[-1].leases, groups),
    )


def _lines(last: Snapshot) -> tuple[LeaseLine, ...]:
    lags = lags_of(last.leases, last.at, math.inf)
    known = [lease.weight for lease in last.leases if lease.weight is not None and not lease.ended]
    hot = HOT * fmean(known) if known else math.inf
    lines = [
        LeaseLine(
            lease.key,
            lease.owner,
            lease.ended,
            lags[lease.key].seconds if lease.key in lags else None,
            None if lease.weight is None else kilobytes(lease.weight),
            not lease.ended and lease.weight is not None and lease.weight > hot,
        )
        for lease in last.leases
    ]
    return tuple(sorted(lines, key=lambda line: (line.ended, -(line.lag or 0.0), line.key)))


def _least(leases: Sequence[Lease], groups: Groups) -> int:
    owners = {lease.key: lease.owner for lease in leases if not lease.ended}
    return least_moves(owners, {owner for owner in owners.values() if owner is not None}, groups)


def report_json(said: Report) -> dict[str, Any]:
    """The report as a JSON object; times are in seconds since 1970."""
    return {
        "store": said.store,
        "at": said.moments[-1].at,
        "malformed": said.malformed,
        "distribution": asdict(said.last),
        "over_time": [_moment(moment) for moment in said.moments],
        "changes": [asdict(change) for change in said.changes],
        "lag": [asdict(lag) for lag in said.lags],
        "still": [asdict(still) for still in said.still],
        "stood": [asdict(stood) for stood in said.stood],
        "leases": [asdict(line) for line in said.leases],
        "moves_least": said.least,
    }


def _moment(moment: Moment) -> dict[str, Any]:
    shared = moment.distribution
    return {
        "at": moment.at,
        "working": shared.working,
        "unowned": shared.unowned,
        "workers": len(shared.workers),
        "spread": asdict(shared.spread),
    }
