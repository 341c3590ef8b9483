"""Reports metrics of a fleet to OpenTelemetry, for use in alarms. The program chooses the exporter.

The metrics have the same names as in kcl-rust, except for the lag of the whole application. A worker reports figures
about the lease table only if it has read the table recently, because outdated figures could raise false alarms or
suppress real ones. With the `minimal` protocol, most workers seldom read the table. Finished leases and closed shards
are not counted, so that a reshard does not look like a loss.
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
from leasehold.adapters.worker.progress import PROGRESS_ANNOTATION
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.model import Lease

METER_NAME = "leasehold"

MAX_AGE_CYCLES = 2.0
"""A worker exports figures about the table only if it has read the table within this many times `cycle_seconds`. The
lookout always reads the table that often (C5)."""


class WorkerMetrics:
    """Reports the metrics of one worker. Each time series is labeled with the worker's id.

    Args:
        worker: The worker.
        meter: The OpenTelemetry meter to report to; by default a meter of the program's own provider.
    """

    def __init__(self, worker: Worker, meter: Meter | None = None) -> None:
        self._worker = worker
        # Cache the labels of each held lease, because batches arrive many times per second.
        self._labels_by_holding: WeakKeyDictionary[Holding, dict[str, str]] = WeakKeyDictionary()
        self._group_watch = GroupWatch()
        self._instruments = _instruments(meter or _own_meter())
        self._instruments.workers.add(self)

    def read(self, holding: Holding, batch: Batch) -> None:
        """Count a batch that was read. The batch may be empty."""
        labels = self._labels_by_holding.get(holding)
        if labels is None:
            labels = self._labels_by_holding[holding] = self._labels(holding.lease)
            # Count a switch only at the first read of a holding.
            if holding.progress.owner_changed_before:
                self._instruments.owner_switches.add(1, labels)
        self._instruments.bytes.add(batch.size, labels)
        self._instruments.records.add(batch.count, labels)

    def slow(self, holding: Holding) -> None:
        """Count a warning that the lease's handler is slow."""
        self._instruments.slow_handlers.add(1, self._labels(holding.lease))

    def dead_lettered(self, holding: Holding) -> None:
        """Count a record that was dead-lettered."""
        self._instruments.dead_letters.add(1, self._labels(holding.lease))

    def total_leases(self) -> Iterable[Observation]:
        """Return the number of unfinished leases."""
        return self._table_observation(lambda: len(self._unfinished_leases()))

    def total_shards(self) -> Iterable[Observation]:
        """Return the number of open shards in the last listing, or no value if there has been no listing."""
        shards = self._worker.discovery.open_shards
        return () if shards is None else self._observation(shards)

    def unclaimed_leases(self) -> Iterable[Observation]:
        """Return the number of unfinished leases that have no living owner."""
        # Use the time after which any worker may claim a lease that was not renewed.
        expiry_seconds = self._worker.config.lease_seconds
        return self._table_observation(
            lambda: sum(lease.owner is None or lease.idle > expiry_seconds for lease in self._unfinished_leases())
        )

    def lag_max(self) -> Iterable[Observation]:
        """Return the greatest lag of a lease of any worker, in seconds, or no value if no lag is known."""
        group_lag = self._fleet_lag()
        return () if group_lag is None or group_lag.most is None else self._observation(group_lag.most)

    def lag_sum(self) -> Iterable[Observation]:
        """Return the sum of the lags of all workers' leases, in seconds, or no value if no lag is known."""
        group_lag = self._fleet_lag()
        return () if group_lag is None or group_lag.most is None else self._observation(group_lag.total)

    def lag_is_lower_bound(self) -> Iterable[Observation]:
        """Return 1 if `lag_max` and `lag_sum` are lower bounds, otherwise 0, or no value if no lag is known."""
        group_lag = self._fleet_lag()
        return () if group_lag is None or group_lag.most is None else self._observation(int(group_lag.at_least))

    def group_status(self) -> Iterable[Observation]:
        """Return the status of the whole group as a number."""
        return self._table_observation(lambda: group_status(self._statuses()).number)

    def lease_status(self) -> Iterable[Observation]:
        """Return the status of each lease that this worker holds, as a number."""
        held_leases = {holding.key: holding.lease for holding in self._worker.holdings if not holding.lease.ended}
        return [
            Observation(status.number, self._labels(held_leases[key]))
            for key, status in self._statuses().items()
            if key in held_leases
        ]

    def contradictions(self) -> Iterable[Observation]:
        """Return the number of contradictions between listing, table and memory that this worker knows of (L14)."""
        # Only the owner of a lease sees the contradictions that its rejected writes reveal. No listing shows them.
        rejected_writes = sum(bool(holding.contradiction) for holding in self._worker.holdings)
        return self._observation(len(self._worker.discovery.contradictions) + rejected_writes)

    def worker_leases(self) -> Iterable[Observation]:
        """Return the number of unfinished leases that this worker holds."""
        return self._observation(sum(not holding.lease.ended for holding in self._worker.holdings))

    def rows_remade(self) -> Iterable[Observation]:
        """Return the number of deleted rows that this worker has recreated since it started."""
        return self._observation(self._worker.rows_remade)

    def millis_behind_latest(self) -> Iterable[Observation]:
        """Return the lag of each held lease in milliseconds. The lag grows while the stream does not respond."""
        now = self._worker.clock()
        lag_by_lease = [(holding.lease, holding.progress.behind(now)) for holding in self._worker.holdings]
        return [
            Observation(round(1000 * lag_seconds), self._labels(lease))
            for lease, lag_seconds in lag_by_lease
            if lag_seconds is not None
        ]

    def lease_lag_is_lower_bound(self) -> Iterable[Observation]:
        """Return, for each held lease, 1 if its `millis_behind_latest` is a lower bound, otherwise 0."""
        now, wall_time = self._worker.clock(), time.time()
        held_progress = [
            (holding.lease, holding.progress.progress(now, wall_time)) for holding in self._worker.holdings
        ]
        return [
            Observation(int(progress.lag_may_be_larger(wall_time, is_held=True)), self._labels(lease))
            for lease, progress in held_progress
            if progress.behind is not None
        ]

    def _fleet_lag(self) -> FleetLag | None:
        if not self._has_read_recently():
            return None
        return fleet_lag(lags_of(self._current_leases(), self._last_read_at(), self._worker.config.lease_seconds))

    def _statuses(self) -> dict[str, Status]:
        leases, now, held_keys = (
            self._current_leases(),
            self._last_read_at(),
            {holding.key for holding in self._worker.holdings},
        )
        lease_seconds = self._worker.config.lease_seconds
        lags = lags_of(leases, now, lease_seconds)
        # A single read of the table does not show whether a lease keeps falling behind, so keep the results of several
        # reads.
        self._group_watch = self._group_watch.after(self._worker.clock(), leases, lags)
        statuses = statuses_of(leases, lags, now, lease_seconds, self._group_watch)
        # In a store without free annotations, a worker may not know the status of other workers' leases, so leave those
        # leases out.
        annotations_are_free = self._worker.store.capabilities.free_annotations
        return {
            key: status
            for key, status in statuses.items()
            if annotations_are_free or key in held_keys or status.word != "UNKNOWN"
        }

    def _current_leases(self) -> list[Lease]:
        """Return this worker's leases from memory, and all other leases as last read from the table."""
        now, wall_time = self._worker.clock(), time.time()
        own_leases = {
            holding.key: evolve(
                holding.lease.watched(
                    max(0.0, now - holding.confirmed_at), holding.lease.held, holding.lease.next_owner_idle
                ),
                annotations=((PROGRESS_ANNOTATION, holding.progress.progress(now, wall_time).note),),
            )
            for holding in self._worker.holdings
        }
        table_leases = {key: sighting.lease for key, sighting in self._worker.table.watch.sightings.items()}
        # This worker's own leases take precedence, because the table may have been read before their last renewals.
        return [*(table_leases | own_leases).values()]

    def _last_read_at(self) -> float:
        """Return when this worker last read the table, in seconds since 1970. Lags are computed for that time."""
        # If statuses were computed for the current time, a worker that seldom reads the table would consider all other
        # workers dead.
        return time.time() - max(0.0, min(self._worker.clock() - self._worker.table.watch.full_at, time.time()))

    def _has_read_recently(self) -> bool:
        """Return whether this worker has read the whole table recently.

        A worker that has not read the table recently exports no figures about it.
        """
        return (
            self._worker.clock() - self._worker.table.watch.full_at
            <= MAX_AGE_CYCLES * self._worker.config.cycle_seconds
        )

    def _table_observation(self, number: Callable[[], float]) -> Iterable[Observation]:
        # If this worker has not read the table recently, report nothing. Otherwise, its outdated figures would appear
        # next to the current ones of other workers.
        return self._observation(number()) if self._has_read_recently() else ()

    def _observation(self, number: float) -> Iterable[Observation]:
        return (Observation(number, {"worker": self._worker.me}),)

    def _labels(self, lease: Lease) -> dict[str, str]:
        # The leases of a single Kinesis stream don't contain its name.
        stream = {"stream": lease.stream} if lease.stream else {}
        return {"worker": self._worker.me, "lease": lease.key, **stream}

    def _unfinished_leases(self) -> list[Lease]:
        leases = (sighting.lease for sighting in self._worker.table.watch.sightings.values())
        return [lease for lease in leases if not lease.ended]


class _Instruments:
    """The instruments of one meter. All workers share them, because OpenTelemetry keeps one instrument per name."""

    def __init__(self, meter: Meter) -> None:
        # Use weak references, because the instruments outlive the workers and must not report workers that have ended.
        self.workers: WeakSet[WorkerMetrics] = WeakSet()
        self.bytes = meter.create_counter("bytes", "By", "Payload read, an aggregate's own bytes included.")
        self.records = meter.create_counter("records", "{record}", "User records read, after de-aggregation.")
        description = "How often a handler was said to be at work for too long: once for each doubling."
        self.slow_handlers = meter.create_counter("slow_handlers", "{warning}", description)
        self.dead_letters = meter.create_counter("dead_letters", "{record}", "Records that went to the dead letter.")
        description = "How often a lease came to this worker from another one."
        self.owner_switches = meter.create_counter("owner_switches", "{move}", description)
        gauge_specs: tuple[tuple[Callable[[WorkerMetrics], Iterable[Observation]], str, str], ...] = (
            (WorkerMetrics.total_leases, "{lease}", "Leases that are not finished."),
            (WorkerMetrics.total_shards, "{shard}", "Open shards, as last listed."),
            (WorkerMetrics.unclaimed_leases, "{lease}", "Unfinished leases without a living owner."),
            (WorkerMetrics.lag_max, "s", "How far the lease that is furthest behind is behind, of all workers."),
            (WorkerMetrics.lag_sum, "s", "How far all leases together are behind, of all workers."),
            (WorkerMetrics.lag_is_lower_bound, "1", "1 if the lag of a lease is a lower bound: its stream is silent."),
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
            (WorkerMetrics.lease_lag_is_lower_bound, "1", "1 if the lease's lag is a lower bound."),
        )
        for gauge, unit, description in gauge_specs:
            # Bind the gauge as a default value. Otherwise, every callback would use the last gauge of the loop.
            def observe(
                _options: CallbackOptions, gauge: Callable[[WorkerMetrics], Iterable[Observation]] = gauge
            ) -> Iterable[Observation]:
                return [observation for worker in tuple(self.workers) for observation in gauge(worker)]

            meter.create_observable_gauge(gauge.__name__, [observe], unit, description)


_instruments_by_meter: WeakKeyDictionary[Meter, _Instruments] = WeakKeyDictionary()
_instruments_lock = Lock()


def _instruments(meter: Meter) -> _Instruments:
    with _instruments_lock:
        # Without the lock, two workers could each create a set of instruments.
        if meter not in _instruments_by_meter:
            _instruments_by_meter[meter] = _Instruments(meter)
        return _instruments_by_meter[meter]


@cache
def _own_meter() -> Meter:
    # Cache the meter, because each call of `get_meter` creates another one, and OpenTelemetry keeps all of them in
    # memory if the program has set no provider.
    return get_meter(METER_NAME)
