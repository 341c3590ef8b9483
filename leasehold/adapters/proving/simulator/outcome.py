"""The outcome of a run, in the figures by which rule sets are compared."""

from collections import Counter
from collections.abc import Mapping

from attrs import asdict, frozen

from leasehold.adapters.history.lives import alive_at, lives
from leasehold.adapters.history.ownership import changes, owners_at, refused, settled, unowned
from leasehold.adapters.history.rest import QUIET_VERBS
from leasehold.adapters.proving.simulator.world.events import SimulatedHistory
from leasehold.balancer.rules.groups import Groups, least_moves, path_of

ROW_BYTES = 360
UNIT_BYTES = 4096


@frozen
class Traffic:
    """Requests of a whole fleet, and what DynamoDB bills for them.

    A listing costs half a unit for each 4 KB (eventually consistent, rows of 360 bytes), a row asked
    for by key one unit, half of it where it may be stale, a write one unit.
    """

    requests: int
    rows: int
    read_units: float
    write_units: int


@frozen
class FleetOutcome:
    """How a fleet fared after `since`, when what it had to cope with began.

    cycles         until the last change of owner, in cycles of `cycle_seconds`
    seconds        the same in seconds
    moves          leases that left a living worker, moves_minimum: how few would have done
    moved_again    leases that changed hands more than once
    taken_back     gifts that their heir did not accept in time: no moves, but nobody read meanwhile
    claims         leases taken from nobody, or from a dead worker
    failed_writes  claims, thefts and requests that were refused because somebody was faster
    spread         leases of the fullest living worker less those of the emptiest
    groups         leases by group of workers
    load           throughput of the fullest worker by the mean; 1 where it is not known
    unowned_lease_cycles_max
                   the longest time a lease had no living owner
    quiet_after    cycles until the last write but renewals and checkpoints
    """

    cycles: float
    seconds: float
    moves: int
    moves_minimum: int
    moved_again: int
    taken_back: int
    claims: int
    failed_writes: int
    spread: int
    groups: dict[str, int]
    load: float
    unowned_lease_cycles_max: float
    quiet_after: float
    traffic: Traffic

    def as_json(self) -> dict[str, object]:
        """Values that `json.dumps` takes."""
        return asdict(self)


def outcome(history: SimulatedHistory, *, since: float, cycle_seconds: float, groups: Groups = None) -> FleetOutcome:
    """The figures of a finished run."""
    all_lives = lives(history.incidents)
    changed = [change for change in changes(history.writes) if change.t >= since and change.after is not None]
    passed = settled(changed)
    moves = sum(change.before is not None and change.before in alive_at(all_lives, change.t) for change in passed)
    workers = alive_at(all_lives, history.end - 1e-9)
    owners = owners_at(history, history.end)
    counts = Counter(owner for owner in owners.values() if owner is not None and owner in workers)
    held = [counts[worker] for worker in workers]
    last = max((change.t for change in passed), default=since)
    busy = max(
        (write.t for write in history.writes if write.verb not in QUIET_VERBS and write.t >= since), default=since
    )
    longest = max(unowned(history, history.end, since).values(), default=0.0)
    return FleetOutcome(
        cycles=round((last - since) / cycle_seconds, 3),
        seconds=round(last - since, 3),
        moves=moves,
        moves_minimum=least_moves(owners_at(history, since), workers, groups),
        moved_again=sum(times > 1 for times in Counter(change.key for change in passed).values()),
        taken_back=(len(changed) - len(passed)) // 2,
        claims=len(passed) - moves,
        failed_writes=refused(write for write in history.writes if write.t >= since),
        spread=max(held, default=0) - min(held, default=0),
        groups=_by_group(counts, workers, groups),
        load=_load(history, owners, workers),
        unowned_lease_cycles_max=round(longest / cycle_seconds, 3),
        quiet_after=round((busy - since) / cycle_seconds, 3),
        traffic=traffic(history),
    )


def traffic(history: SimulatedHistory) -> Traffic:
    """The requests that a run made of the table."""
    writes = sum(count for verb, count in history.requests.items() if verb not in {"list", "get"})
    return Traffic(
        requests=sum(history.requests.values()),
        rows=history.scanned + history.fetched,
        read_units=round(history.scanned * ROW_BYTES / UNIT_BYTES / 2 + history.fetched - history.glimpsed / 2, 1),
        write_units=writes,
    )


def _load(history: SimulatedHistory, owners: Mapping[str, str | None], workers: frozenset[str]) -> float:
    loads = dict.fromkeys(workers, 0.0)
    for row in history.first:
        owner = owners.get(row.key)
        if owner in loads:
            loads[owner] += row.weight or 0.0
    mean = sum(loads.values()) / max(len(loads), 1)
    return round(max(loads.values()) / mean, 3) if mean else 1.0


def _by_group(counts: Counter[str], workers: frozenset[str], groups: Groups) -> dict[str, int]:
    totals: Counter[str] = Counter()
    for worker in sorted(workers):
        totals["/".join(path_of(worker, groups or "prefix"))] += counts[worker]
    return dict(totals)
