"""Everything a report says, as one value, and as JSON; pure."""

from collections.abc import Sequence
from typing import Any

from attrs import asdict, frozen

from adapters.report.changes import Change, Lag, Snapshot, Still, changes, lags, standstill
from adapters.report.distribution import Distribution, distribution, tallies
from balancer.groups import Groups

STILL_MAX = 10
"""How many of the leases that have stood still longest are named."""


@frozen
class Moment:
    """How leases were shared out at one time, in seconds since 1970."""

    at: float
    distribution: Distribution


@frozen
class Report:
    """What a report says of one store; `moments` is in the order of time and not empty.

    malformed  rows of the last snapshot that could not be read as leases
    changes, lags, still  empty where there was one snapshot only
    """

    store: str
    moments: tuple[Moment, ...]
    malformed: int = 0
    changes: tuple[Change, ...] = ()
    lags: tuple[Lag, ...] = ()
    still: tuple[Still, ...] = ()

    @property
    def last(self) -> Distribution:
        """How leases are shared out now."""
        return self.moments[-1].distribution


def report(store: str, snapshots: Sequence[Snapshot], groups: Groups) -> Report:
    """What these snapshots of one store say; at least one, in any order."""
    ordered = sorted(snapshots, key=lambda snapshot: snapshot.at)
    return Report(
        store=store,
        moments=tuple(Moment(each.at, distribution(tallies(each.leases), groups)) for each in ordered),
        malformed=ordered[-1].malformed,
        changes=changes(ordered),
        lags=lags(ordered),
        still=standstill(ordered)[:STILL_MAX] if len(ordered) > 1 else (),
    )


def report_json(said: Report) -> dict[str, Any]:
    """The same as a JSON object; times are in seconds since 1970."""
    return {
        "store": said.store,
        "at": said.moments[-1].at,
        "malformed": said.malformed,
        "distribution": asdict(said.last),
        "over_time": [_moment(moment) for moment in said.moments],
        "changes": [asdict(change) for change in said.changes],
        "lag": [asdict(lag) for lag in said.lags],
        "still": [asdict(still) for still in said.still],
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
