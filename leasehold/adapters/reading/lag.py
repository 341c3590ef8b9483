"""How far behind each lease is, and the application as a whole: from the owners' notes, or asked of the stream."""

from collections.abc import Iterable, Mapping
from typing import Any

from attrs import asdict, frozen

from leasehold.adapters.sources.protocol import Source, SourceError
from leasehold.adapters.worker.reach import patience, reach_of
from leasehold.balancer.model import Lease


@frozen
class LeaseLag:
    """How far behind the reading of one lease is.

    seconds  behind the tip of the shard, at most; None where nobody told
    events   the same as a count, where the stream tells counts (Event Hubs)
    end      whether reading had reached the tip, and lately
    age      seconds that the last record that was done had been in the stream, when its owner told of it
    host     the machine of the owner that told
    moves    how often the lease passed from one worker to another, as far as our workers saw
    """

    seconds: float | None = None
    events: int | None = None
    end: bool = False
    age: float | None = None
    host: str = ""
    moves: int | None = None

    def as_json(self) -> dict[str, Any]:
        """Values that `json.dumps` takes; what is unknown is left out."""
        return {name: value for name, value in asdict(self).items() if value not in {None, ""}}


def lag_of(lease: Lease, now: float, limit: float) -> LeaseLag:
    """The lag of an unfinished lease, as its row tells it.

    now    seconds since 1970
    limit  an owner whose lease stands still for more seconds counts as dead
    """
    reach = reach_of(lease)
    held = lease.owner is not None and lease.idle <= limit
    if reach is None:
        return LeaseLag()
    ours, long = reach.owner == lease.owner, patience(reach.lease or limit)
    if held and not ours and now - reach.at > long:
        return LeaseLag(moves=reach.moves + 1)  # another library reads it by now, and tells nothing
    seconds = reach.lag(now, held=held and ours)
    return LeaseLag(
        seconds=None if seconds is None else round(seconds, 3),
        end=reach.end and held and ours and now - (reach.done or now) <= long,
        age=None if reach.arrived is None else round(max(0.0, reach.at - reach.arrived), 3),
        host=reach.host if ours else "",
        moves=reach.moves + (lease.owner is not None and not ours),
    )


def lags_of(leases: Iterable[Lease], now: float, limit: float) -> dict[str, LeaseLag]:
    """The lag of every unfinished lease, by key."""
    return {lease.key: lag_of(lease, now, limit) for lease in leases if not lease.ended}


@frozen
class FleetLag:
    """How far behind the whole application is.

    most     seconds of the lease that is furthest behind; None where nobody told of any
    total    seconds of all leases together
    """

    most: float | None
    total: float


def fleet_lag(lags: Mapping[str, LeaseLag]) -> FleetLag:
    """The lags of all leases as one."""
    known = [lag.seconds for lag in lags.values() if lag.seconds is not None]
    return FleetLag(max(known, default=None), round(sum(known), 3))


def asked(source: Source, leases: Iterable[Lease], lags: Mapping[str, LeaseLag]) -> dict[str, LeaseLag]:
    """The lags, with what the stream itself says of leases of which no row tells, such as Java's.

    Where the stream numbers its events without a gap (Event Hubs), they are counted; else one batch is read at the
    checkpoint, which tells how far that is behind. Raises SourceError.
    """
    found = dict(lags)
    for lease in leases:
        if lease.key in found and found[lease.key].seconds is None:
            found[lease.key] = _asked(source, lease, found[lease.key])
    return found


def _asked(source: Source, lease: Lease, known: LeaseLag) -> LeaseLag:
    latest = source.latest(lease)
    if latest.numbered and lease.checkpoint.numbered:
        events = max(0, int(latest.sequence) - int(lease.checkpoint.sequence))
        return LeaseLag(0.0 if not events else None, events, not events)
    if latest.sequence != "AT_TIMESTAMP" or lease.checkpoint.sequence == "LATEST":
        return known
    reader = source.open(lease, lease.checkpoint)
    try:
        batch = reader.read()
    except SourceError:
        return known
    finally:
        reader.close()
    waiting = batch.records[0].arrived if batch.records else None
    behind = batch.behind_seconds if waiting is None else max(0.0, latest.sub / 1000 - waiting)
    return known if behind is None else LeaseLag(round(behind, 3), end=not behind)
