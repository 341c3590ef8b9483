"""What alarms on a fleet are built from, told to OpenTelemetry; who exports it, and where to, is the program's choice.

The names are kcl-rust's. The first four are this worker's view at its last look at the table; finished
leases and closed shards do not count, or every reshard would look like a loss.
"""

from collections.abc import Callable, Iterable
from threading import Lock

from opentelemetry.metrics import CallbackOptions, Meter, Observation, get_meter

from adapters.holding import Holding
from adapters.source import Batch
from adapters.worker import Worker
from balancer.model import Lease

SCOPE = "leasehold"


class Metrics:
    """The instruments of one worker; each series carries the worker's id.

    meter  where they are made; the one of the program's own provider, if left out
    """

    def __init__(self, worker: Worker, meter: Meter | None = None) -> None:
        self._worker = worker
        meter = meter or get_meter(SCOPE)
        self._behind: dict[str, float] = {}
        self._lock = Lock()
        self._bytes = meter.create_counter("bytes", "By", "Payload read, an aggregate's own bytes included.")
        self._records = meter.create_counter("records", "{record}", "User records read, after de-aggregation.")
        gauges: tuple[tuple[str, str, str, Callable[[], int | None]], ...] = (
            ("total_leases", "{lease}", "Leases that are not finished.", lambda: len(self._leases())),
            ("total_shards", "{shard}", "Open shards, as last listed.", lambda: worker.discovery.open_shards),
            ("unclaimed_leases", "{lease}", "Unfinished leases without a living owner.", self._unclaimed),
            ("worker_leases", "{lease}", "Of those, this worker's.", self._held),
        )
        for name, unit, meaning, value in gauges:
            meter.create_observable_gauge(name, [self._of_worker(value)], unit, meaning)
        meter.create_observable_gauge(
            "millis_behind_latest", [self._of_leases], "ms", "How far reading is behind the tip of the shard."
        )

    def read(self, holding: Holding, batch: Batch) -> None:
        """Something, or nothing, was read of this lease."""
        series = self._series(holding.lease)
        self._bytes.add(batch.size, series)
        self._records.add(len(batch.records), series)
        if batch.behind_seconds is not None:
            with self._lock:
                self._behind[holding.key] = batch.behind_seconds

    def _of_worker(self, value: Callable[[], int | None]) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_options: CallbackOptions) -> Iterable[Observation]:
            number = value()
            return () if number is None else (Observation(number, {"worker": self._worker.me}),)

        return observe

    def _of_leases(self, _options: CallbackOptions) -> Iterable[Observation]:
        """Only of what is held now: what is read elsewhere is somebody else's to tell."""
        held = {holding.key: holding.lease for holding in self._worker.holdings}
        with self._lock:
            self._behind = {key: behind for key, behind in self._behind.items() if key in held}
            told = tuple(self._behind.items())
        return [Observation(round(1000 * behind), self._series(held[key])) for key, behind in told]

    def _series(self, lease: Lease) -> dict[str, str]:
        stream = {"stream": lease.stream} if lease.stream else {}
        return {"worker": self._worker.me, "lease": lease.key, **stream}

    def _leases(self) -> list[Lease]:
        known = (sighting.lease for sighting in self._worker.watch.sightings.values())
        return [lease for lease in known if not lease.ended]

    def _held(self) -> int:
        return sum(not holding.lease.ended for holding in self._worker.holdings)

    def _unclaimed(self) -> int:
        dead = self._worker.config.lease_seconds
        return sum(lease.owner is None or lease.idle > dead for lease in self._leases())
