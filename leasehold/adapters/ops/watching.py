"""Watches a lease table, and returns its state as a `WatchedTable` and as JSON for pages and monitoring.

The commands `leases`, `serve`, `explain` and `what-if` all show a `WatchedTable`. A `TableWatch` returns one each time
it reads the table. It also tracks, over all its reads, for how long rows have been unchanged and whether positions
move.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from attrs import Factory, asdict, evolve, frozen

from leasehold.adapters.consumer.status import (
    GroupWatch,
    LeaseLag,
    Status,
    confirmed,
    fleet_lag,
    group_status,
    lags_from_stream,
    lags_of,
    statuses_of,
)
from leasehold.adapters.sources.protocol import Source
from leasehold.adapters.worker.progress import progress_of
from leasehold.balancer.config import Config
from leasehold.balancer.contradictions import reported_contradictions
from leasehold.balancer.counting import expires_above
from leasehold.balancer.model import History, Lease
from leasehold.balancer.rules.shares import Groups, workers_with_extra
from leasehold.balancer.watch import Watch
from leasehold.stores.fields import convert_to_kilobytes
from leasehold.stores.protocol import Malformed, Store
from leasehold.stores.swap import (
    LeasePlaces,
    SwapStore,
    count_places,
    is_marked,
    lease_place,
    split_leftover_rows,
    swap_notices,
)

LOOK_SECONDS = 1.0
"""The time between two reads. This is short enough to notice every renewal of a lease with a duration of 10 seconds."""

UNKNOWN_LAG, EMPTY_HISTORY = LeaseLag(), History()
IN_OTHER_TABLE = Status("UNKNOWN", "a swap moves it, or has moved it, to another table: --to TO shows both")


@frozen
class SeenMove:
    """A change of owner between two reads of a table.

    Attributes:
        at: The time of the read that showed the new owner, in seconds since 1970.
        key: The key of the lease.
        before: The owner before the change, or None.
        after: The owner after the change, or None.
        rule: The rule by which the new owner took the lease or the lookout freed it. "" if the old owner released it.
    """

    at: float
    key: str
    before: str | None
    after: str | None
    rule: str = ""


@frozen
class WatchedTable:
    """The state of a table, as known after it was watched for some time.

    Attributes:
        leases: The leases sorted by key, each with the time for which it has been unchanged.
        history: The history of the owners that the watch has collected.
        seconds: The number of seconds for which the table was watched.
        malformed: The rows that cannot be read as leases.
        at: When the table was last read, in seconds since 1970.
        statuses: The status of each lease at that time, by key.
        lags: The lag of each unfinished lease, by key.
        moves: The latest changes of owner, newest first.
        trouble: Why the latest read failed, or "".
        swap: How many leases each table has, if both tables of a swap were read.
        swapping: Sentences about a swap of this table that is in progress or finished.
        leftover_rows: The rows that a finished swap has left here. Their leases are in another table.
        confirmed: Whether every lease with the status OK is certain to have a living owner. If not, read the table
            again.
    """

    leases: tuple[Lease, ...]
    history: History = EMPTY_HISTORY
    seconds: float = 0.0
    malformed: tuple[Malformed, ...] = ()
    at: float = 0.0
    statuses: Mapping[str, Status] = Factory(dict)
    lags: Mapping[str, LeaseLag] = Factory(dict)
    moves: tuple[SeenMove, ...] = ()
    trouble: str = ""
    swap: LeasePlaces | None = None
    swapping: tuple[str, ...] = ()
    leftover_rows: tuple[Lease, ...] = ()
    confirmed: bool = True

    @property
    def unfinished_leases(self) -> tuple[Lease, ...]:
        """The leases whose shards are not finished."""
        return tuple(lease for lease in self.leases if not lease.ended)

    @property
    def unowned(self) -> int:
        """The number of unfinished leases without an owner."""
        return sum(lease.owner is None for lease in self.unfinished_leases)

    @property
    def workers(self) -> frozenset[str]:
        """The workers that own an unfinished lease, or that leave one to other workers for a while after a failure."""
        owners = {lease.owner for lease in self.unfinished_leases if lease.owner is not None}
        progress_of_unowned = (progress_of(lease) for lease in self.unfinished_leases if lease.owner is None)
        resting_workers = {
            progress.owner
            for progress in progress_of_unowned
            if progress is not None and progress.is_put_aside(self.at, 0.0)
        }
        return frozenset(owners | resting_workers)

    @property
    def status(self) -> Status:
        """The status of the whole group."""
        if not (self.statuses or self.trouble) and self.swapping:
            return Status("UNKNOWN", self.swapping[0])
        return group_status(self.statuses, self.trouble)

    def lag(self, lease: Lease) -> LeaseLag:
        """Return how far behind this lease is."""
        return self.lags.get(lease.key, UNKNOWN_LAG)


def owner_changes(table_before: WatchedTable, table_after: WatchedTable) -> tuple[tuple[Lease, Lease], ...]:
    """Return the unfinished leases whose owner changed, each as a pair of the old and the new state."""
    leases_before = {lease.key: lease for lease in table_before.leases}
    return tuple(
        (leases_before[lease.key], lease)
        for lease in table_after.leases
        if lease.key in leases_before and leases_before[lease.key].owner != lease.owner and not lease.ended
    )


class TableWatch:
    """Reads one table repeatedly.

    Args:
        store: The table.
        lease_seconds: The fleet's lease duration, for rows that don't contain it.
        limit: An owner that has not renewed for more than this many seconds counts as dead.
        source: The stream. If given, it is queried for the lag of leases whose rows do not contain a lag.
        clock: Returns the time of a monotonic clock, in seconds.
        wall: Returns seconds since 1970.
    """

    def __init__(
        self,
        store: Store,
        lease_seconds: float,
        limit: float,
        source: Source | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._lease_seconds, self._limit, self._source = store, lease_seconds, limit, source
        self._clock, self._wall = clock, wall
        self._watch, self._group_watch, self._first_look_at = Watch(), GroupWatch(), math.inf

    def look(self) -> WatchedTable:
        """Read the table once. Raises StoreError or SourceError, after which `look` can be called again."""
        started_at = self._clock()
        listing = self._store.list()
        ended_at, now = self._clock(), self._wall()
        current_rows, leftover_rows = split_leftover_rows(listing.leases)
        self._watch, leases = self._watch.look(current_rows, started_at, ended_at)
        self._first_look_at = min(self._first_look_at, started_at)
        rows = tuple(sorted(leases, key=lambda lease: lease.key))
        unmarked_rows = tuple(row for row in rows if not is_marked(row))
        lags = lags_of(unmarked_rows, now, self._limit)
        if self._source is not None:
            lags = lags_from_stream(self._source, unmarked_rows, lags)
        self._group_watch = self._group_watch.after(started_at, unmarked_rows, lags)
        # If a row is marked as moved, the owner renews the lease and writes its progress in the other table.
        elsewhere_statuses = dict.fromkeys(
            (row.key for row in rows if is_marked(row) and not row.ended), IN_OTHER_TABLE
        )
        statuses = statuses_of(rows, lags, now, self._lease_seconds, self._group_watch) | elsewhere_statuses
        swap_places = count_places(self._store.way, rows) if isinstance(self._store, SwapStore) else None
        swap_sentences = swap_notices(listing.leases) if swap_places is None else (f"swap: {swap_places.says}",)
        watched_for, window = ended_at - self._first_look_at, self._group_watch.seconds
        all_confirmed = all(confirmed(row, statuses[row.key], now, self._lease_seconds, window) for row in rows)
        return WatchedTable(
            rows,
            self._watch.history,
            watched_for,
            listing.malformed,
            now,
            statuses=statuses,
            lags=lags,
            swap=swap_places,
            swapping=swap_sentences,
            leftover_rows=leftover_rows,
            confirmed=all_confirmed,
        )


def watch_for(
    store: Store,
    seconds: float,
    lease_seconds: float,
    clock: Callable[[], float] = time.monotonic,
    wait: Callable[[float], object] = time.sleep,
) -> WatchedTable:
    """Read the table repeatedly for `seconds`, at least once, and return its last state. Raises OutcomeUnknown."""
    watch, began_at = TableWatch(store, lease_seconds, lease_seconds, clock=clock), clock()
    while True:
        table = watch.look()
        seconds_left = began_at + seconds - clock()
        if seconds_left <= 0:
            return table
        wait(min(seconds_left, LOOK_SECONDS))


def leases_by_owner(leases: Iterable[Lease]) -> Mapping[str | None, Sequence[Lease]]:
    """Return the unfinished leases by owner. The key of leases without an owner is None."""
    owned_leases: dict[str | None, list[Lease]] = {}
    for lease in leases:
        if not lease.ended:
            owned_leases.setdefault(lease.owner, []).append(lease)
    return owned_leases


def without_dead_owners(leases: Sequence[Lease], config: Config) -> tuple[Lease, ...]:
    """Return the leases. Those that have not been renewed for too long are returned without their owner."""
    limit = expires_above(config)
    return tuple(lease if lease.idle <= limit else evolve(lease, owner=None) for lease in leases)


def shares(leases: Iterable[Lease], groups: Groups = None, extra_workers: Collection[str] = ()) -> Mapping[str, int]:
    """Return the target share of each worker: the mean, rounded down, plus one lease for workers that rule M2 favors.

    A worker that is about to receive a lease already counts as its owner (H1). All owners are assumed to be alive, so
    pass the leases of dead owners without their owner.

    Args:
        leases: The leases.
        groups: How to derive a worker's groups from its name.
        extra_workers: Workers that count although they hold no lease.
    """
    unfinished_leases = [lease for lease in leases if not lease.ended]
    counts = Counter(
        dict.fromkeys((*extra_workers, *(lease.owner for lease in unfinished_leases if lease.owner is not None)), 0)
    )
    counts.update(lease.next_owner or lease.owner for lease in unfinished_leases if lease.owner is not None)
    if not counts:
        return {}
    base_share, extra_count = divmod(len(unfinished_leases), len(counts))
    favored_workers = workers_with_extra(counts, base_share, extra_count, groups)
    return {worker: base_share + (worker in favored_workers) for worker in sorted(counts)}


def describe_table(table: WatchedTable, config: Config) -> dict[str, Any]:
    """Return the state of a table as JSON values: totals, workers, leases, and problems."""
    unfinished_leases, total_lag = table.unfinished_leases, fleet_lag(table.lags)
    live_leases = without_dead_owners(unfinished_leases, config)
    owned_leases = leases_by_owner(live_leases)
    workers: list[dict[str, Any]] = []
    for worker, target in shares(live_leases, config.rules.groups).items():
        own_leases = owned_leases.get(worker, [])  # a next owner may not hold a lease yet
        lag = fleet_lag({lease.key: table.lag(lease) for lease in own_leases})
        kilobytes_per_second = convert_to_kilobytes(sum(lease.weight or 0 for lease in own_leases))
        worker_fields = {
            "worker": worker,
            "leases": len(own_leases),
            "target": target,
            "lag": lag.most,
            "kbps": kilobytes_per_second,
        }
        workers.append(worker_fields | ({"lag_at_least": True} if lag.at_least else {}))
    mean_kbps = sum(worker_row["kbps"] for worker_row in workers) / max(len(workers), 1)
    for worker_row in workers:
        worker_row["kbps_target"] = mean_kbps
    leases = []
    for lease in table.leases:
        status = table.statuses[lease.key]
        leases.append(
            {
                "key": lease.key,
                "owner": lease.owner,
                "ended": lease.ended,
                "heir": lease.next_owner,
                "idle": None if math.isinf(lease.idle) else round(lease.idle, 1),
                "checkpoint": lease.checkpoint.sequence,
                "kbps": None if lease.weight is None else round(convert_to_kilobytes(lease.weight), 1),
                "lag": table.lag(lease).as_json(),
                **status.as_json(),
                "number": status.number,
            }
            | ({} if table.swap is None else {"place": lease_place(lease)})
        )
    return {
        "total": {
            "leases": len(unfinished_leases),
            "finished": len(table.leases) - len(unfinished_leases),
            "unowned": table.unowned,
            "workers": len(table.workers),
            "lag_max": total_lag.most,
            "lag_at_least": total_lag.at_least,
            "lag_sum": total_lag.total if total_lag.most is not None else None,
            "not_ok": sum(not status.ok for status in table.statuses.values()),
        },
        "workers": workers,
        "leases": leases,
        "contradictions": list(reported_contradictions(table.leases)),
        "malformed": [[row.key, row.field, row.why] for row in table.malformed],
        "swapping": list(table.swapping),
        **({} if table.swap is None else {"swap": asdict(table.swap)}),
    }
