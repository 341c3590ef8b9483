"""The measurements for alarms on a fleet, reported to OpenTelemetry; the program chooses the exporter.

The names are kcl-rust's, but for the lag of the whole application. Only workers that read the table
lately export its figures: under `minimal` most workers read it seldom, and an old view would set off alarms, or keep
them silent. Finished leases and closed shards do not count, or every reshard would look like a loss.
"""

import time
from collections.abc import Callable, Iterable
from functools import cache
from threading import Lock
from weakref import WeakKeyDictionary, WeakSet

from attrs import evolve
from opentelemetry.metrics import CallbackOptions, Meter, Observation, get_meter

from leasehold.adapters.consumer.status import (
    FleetLag,
    GroupWatch,
    Status,
    fleet_lag,
    group_status,
    lags_of,
    statuses_of,
)
from leasehold.adapters.sources.protocol import Batch
from leasehold.adapters.worker.holding import Holding
from leasehold.adapters.worker.progress import NOTE
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.model import Lease

SCOPE = "leasehold"

FRESH_CYCLES = 2.0
"""A worker exports figures of the table if it read it within so many `cycle_seconds`; the lookout always has (C5)."""


class WorkerMetrics:
    """The numbers of one worker; each series carries the worker's id.

    meter  what they are told to; the one of the program's own provider, if left out
    """

    def __init__(self, worker: Worker, meter: Meter | None = None) -> None:
        self._worker = worker
        # Of each lease as long as it is held: batches come many times a second, and the names stay the same.
        self._held: WeakKeyDictionary[Holding, dict[str, str]] = WeakKeyDictionary()
        self._window = GroupWatch()
        self._instruments = _instruments(meter or _own_meter())
        self._instruments.workers.add(self)

    def read(self, holding: Holding, batch: Batch) -> None:
        """Count a batch that was read, perhaps an empty one."""
        series = self._held.get(holding)
        if series is None:
            series = self._held[holding] = self._series(holding.lease)
            # At its first reading alone: later ones are of the same holding.
            if holding.progress.moved:
                self._instruments.owner_switches.add(1, series)
        self._instruments.bytes.add(batch.size, series)
        self._instruments.records.add(batch.count, series)

    def slow(self, holding: Holding) -> None:
        """Count a warning that the lease's handler is slow."""
        self._instruments.slow_handlers.add(1, self._series(holding.lease))

    def total_leases(self) -> Iterable[Observation]:
        """The number of unfinished leases."""
        return self._of_table(lambda: len(self._leases()))

    def total_shards(self) -> Iterable[Observation]:
        """The number of shards that were open when last listed; nothing before the first listing."""
        shards = self._worker.discovery.open_shards
        return () if shards is None else self._observed(shards)

    def unclaimed_leases(self) -> Iterable[Observation]:
        """The number of unfinished leases that have no living owner."""
        # As the rules see it: a lease that stands still for so long is anybody's to claim.
        dead = self._worker.config.lease_seconds
        return self._of_table(lambda: sum(lease.owner is None or lease.idle > dead for lease in self._leases()))

    def lag_max(self) -> Iterable[Observation]:
        """The seconds of the lease that is furthest behind, of all workers; nothing where no row has a note."""
        lag = self._fleet_lag()
        return () if lag is None or lag.most is None else self._observed(lag.most)

    def lag_sum(self) -> Iterable[Observation]:
        """The seconds behind of all leases together, of all workers."""
        lag = self._fleet_lag()
        return () if lag is None or lag.most is None else self._observed(lag.total)

    def group_status(self) -> Iterable[Observation]:
        """The status of the whole group as a number, of all workers."""
        return self._of_table(lambda: group_status(self._statuses()).number)

    def lease_status(self) -> Iterable[Observation]:
        """The status of each lease held here as a number; other workers report theirs."""
        held = {holding.key: holding.lease for holding in self._worker.holdings if not holding.lease.ended}
        return [
            Observation(status.number, self._series(held[key]))
            for key, status in self._statuses().items()
            if key in held
        ]

    def contradictions(self) -> Iterable[Observation]:
        """In how many things listing, table and memory contradict each other, as this worker sees it (L14)."""
        # An owner sees by a refused write what no listing shows.
        held = sum(bool(holding.contradiction) for holding in self._worker.holdings)
        return self._observed(len(self._worker.discovery.contradictions) + held)

    def worker_leases(self) -> Iterable[Observation]:
        """The number of unfinished leases that this worker holds."""
        return self._observed(sum(not holding.lease.ended for holding in self._worker.holdings))

    def rows_remade(self) -> Iterable[Observation]:
        """The number of deleted rows that this worker has written again since it started."""
        return self._observed(self._worker.rows_remade)

    def millis_behind_latest(self) -> Iterable[Observation]:
        """The milliseconds behind of the leases held now, growing while nothing answers; others report theirs."""
        now = self._worker.clock()
        told = [(holding.lease, holding.progress.behind(now)) for holding in self._worker.holdings]
        return [Observation(round(1000 * behind), self._series(lease)) for lease, behind in told if behind is not None]

    def _fleet_lag(self) -> FleetLag | None:
        if not self._fresh():
            return None
        return fleet_lag(lags_of(self._rows(), self._read_at(), self._worker.config.lease_seconds))

    def _statuses(self) -> dict[str, Status]:
        rows, now, held = self._rows(), self._read_at(), {holding.key for holding in self._worker.holdings}
        lease_seconds = self._worker.config.lease_seconds
        lags = lags_of(rows, now, lease_seconds)
        # One look more: whether a lease falls behind all the time is seen by several.
        self._window = self._window.after(self._worker.clock(), rows, lags)
        found = statuses_of(rows, lags, now, lease_seconds, self._window)
        # Where rows have no room for notes each worker knows of its own leases, and tells of them.
        told = self._worker.store.capabilities.free_notes
        return {key: status for key, status in found.items() if told or key in held or status.word != "UNKNOWN"}

    def _rows(self) -> list[Lease]:
        """The leases held here as this process knows them, the others as the last reading of the table told."""
        now, wall = self._worker.clock(), time.time()
        own = {
            holding.key: evolve(
                holding.lease.watched(
                    max(0.0, now - holding.confirmed), holding.lease.held, holding.lease.next_owner_idle
                ),
                notes=((NOTE, holding.progress.progress(now, wall).note),),
            )
            for holding in self._worker.holdings
        }
        seen = {key: sighting.lease for key, sighting in self._worker.watch.sightings.items()}
        # Its own win: the table may have been read before their last renewals.
        return [*(seen | own).values()]

    def _read_at(self) -> float:
        """When this worker last read the table, seconds since 1970: a row is judged by what it said then."""
        # Not now: most workers read it seldom, and would call each other dead for it.
        return time.time() - max(0.0, min(self._worker.clock() - self._worker.watch.full_at, time.time()))

    def _fresh(self) -> bool:
        """Whether this worker read the whole table lately; the others leave the telling to who did."""
        return self._worker.clock() - self._worker.watch.full_at <= FRESH_CYCLES * self._worker.config.cycle_seconds

    def _of_table(self, number: Callable[[], float]) -> Iterable[Observation]:
        # Whoever read the table long ago would report a fleet of then beside those that report the present one.
        return self._observed(number()) if self._fresh() else ()

    def _observed(self, number: float) -> Iterable[Observation]:
        return (Observation(number, {"worker": self._worker.me}),)

    def _series(self, lease: Lease) -> dict[str, str]:
        # In the table of a single Kinesis stream no lease names it.
        stream = {"stream": lease.stream} if lease.stream else {}
        return {"worker": self._worker.me, "lease": lease.key, **stream}

    def _leases(self) -> list[Lease]:
        known = (sighting.lease for sighting in self._worker.watch.sightings.values())
        return [lease for lease in known if not lease.ended]


class _Instruments:
    """The instruments of one meter, shared by its workers: OpenTelemetry keeps only the first instrument of a name."""

    def __init__(self, meter: Meter) -> None:
        # Weak, as instruments live for as long as the process: a worker that has ended is not told of any more.
        self.workers: WeakSet[WorkerMetrics] = WeakSet()
        self.bytes = meter.create_counter("bytes", "By", "Payload read, an aggregate's own bytes included.")
        self.records = meter.create_counter("records", "{record}", "User records read, after de-aggregation.")
        meaning = "How often a handler was said to be at work for too long: once for each doubling."
        self.slow_handlers = meter.create_counter("slow_handlers", "{warning}", meaning)
        meaning = "How often a lease came to this worker from another one."
        self.owner_switches = meter.create_counter("owner_switches", "{move}", meaning)
        gauges: tuple[tuple[Callable[[WorkerMetrics], Iterable[Observation]], str, str], ...] = (
            (WorkerMetrics.total_leases, "{lease}", "Leases that are not finished."),
            (WorkerMetrics.total_shards, "{shard}", "Open shards, as last listed."),
            (WorkerMetrics.unclaimed_leases, "{lease}", "Unfinished leases without a living owner."),
            (WorkerMetrics.lag_max, "s", "How far the lease that is furthest behind is behind, of all workers."),
            (WorkerMetrics.lag_sum, "s", "How far all leases together are behind, of all workers."),
            (
                WorkerMetrics.contradictions,
                "{contradiction}",
                "What stream, table and memory contradict each other in.",
            ),
            (WorkerMetrics.group_status, "1", "The group's status: 0 OK, 3 not known, up to 8, the worst."),
            (WorkerMetrics.lease_status, "1", "A lease's status, by the same numbers."),
            (WorkerMetrics.worker_leases, "{lease}", "Unfinished leases that this worker holds."),
            (WorkerMetrics.rows_remade, "{row}", "Rows, deleted under the fleet, that this worker made anew."),
            (WorkerMetrics.millis_behind_latest, "ms", "How far reading is behind the tip of the shard."),
        )
        for gauge, unit, meaning in gauges:
            # The gauge as a default: when it is called, the loop has come to its last one.
            def observe(
                _options: CallbackOptions, gauge: Callable[[WorkerMetrics], Iterable[Observation]] = gauge
            ) -> Iterable[Observation]:
                return [told for worker in tuple(self.workers) for told in gauge(worker)]

            meter.create_observable_gauge(gauge.__name__, [observe], unit, meaning)


_made: WeakKeyDictionary[Meter, _Instruments] = WeakKeyDictionary()
_making = Lock()


def _instruments(meter: Meter) -> _Instruments:
    with _making:
        # Under the lock: two workers that begin at once would each make instruments, and the second one's would be
        # lost.
        if meter not in _made:
            _made[meter] = _Instruments(meter)
        return _made[meter]


@cache
def _own_meter() -> Meter:
    # Once: as long as the program has set no provider, each call makes another meter, which OpenTelemetry keeps.
    return get_meter(SCOPE)
