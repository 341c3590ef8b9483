"""What alarms on a fleet are built from, told to OpenTelemetry; who exports it, and where to, is the program's choice.

The names are kcl-rust's. The first four are this worker's view at its last look at the table; finished
leases and closed shards do not count, or every reshard would look like a loss.
"""

from collections.abc import Callable, Iterable
from functools import cache
from threading import Lock
from weakref import WeakKeyDictionary, WeakSet

from opentelemetry.metrics import CallbackOptions, Meter, Observation, get_meter

from adapters.holding import Holding
from adapters.source import Batch
from adapters.worker import Worker
from balancer.model import Lease

SCOPE = "leasehold"


class Metrics:
    """The numbers of one worker; each series carries the worker's id.

    meter  what they are told to; the one of the program's own provider, if left out
    """

    def __init__(self, worker: Worker, meter: Meter | None = None) -> None:
        self._worker = worker
        self._behind: dict[str, float] = {}
        self._lock = Lock()
        self._instruments = _instruments(meter or _own_meter())
        self._instruments.workers.add(self)

    def read(self, holding: Holding, batch: Batch) -> None:
        """Something, or nothing, was read of this lease."""
        series = self._series(holding.lease)
        self._instruments.bytes.add(batch.size, series)
        self._instruments.records.add(batch.count, series)
        if batch.behind_seconds is not None:
            with self._lock:
                self._behind[holding.key] = batch.behind_seconds

    def total_leases(self) -> Iterable[Observation]:
        """Those not finished."""
        return self._observed(len(self._leases()))

    def total_shards(self) -> Iterable[Observation]:
        """Those open when last listed; nothing before that."""
        shards = self._worker.discovery.open_shards
        return () if shards is None else self._observed(shards)

    def unclaimed_leases(self) -> Iterable[Observation]:
        """Those not finished that have no living owner."""
        dead = self._worker.config.lease_seconds
        return self._observed(sum(lease.owner is None or lease.idle > dead for lease in self._leases()))

    def worker_leases(self) -> Iterable[Observation]:
        """Those not finished that this worker holds."""
        return self._observed(sum(not holding.lease.ended for holding in self._worker.holdings))

    def millis_behind_latest(self) -> Iterable[Observation]:
        """Only of what is held now: what is read elsewhere is somebody else's to tell."""
        held = {holding.key: holding.lease for holding in self._worker.holdings}
        with self._lock:
            self._behind = {key: behind for key, behind in self._behind.items() if key in held}
            told = tuple(self._behind.items())
        return [Observation(round(1000 * behind), self._series(held[key])) for key, behind in told]

    def _observed(self, number: int) -> Iterable[Observation]:
        return (Observation(number, {"worker": self._worker.me}),)

    def _series(self, lease: Lease) -> dict[str, str]:
        stream = {"stream": lease.stream} if lease.stream else {}
        return {"worker": self._worker.me, "lease": lease.key, **stream}

    def _leases(self) -> list[Lease]:
        known = (sighting.lease for sighting in self._worker.watch.sightings.values())
        return [lease for lease in known if not lease.ended]


class _Instruments:
    """The instruments of one meter, for all its workers: of several of one name OpenTelemetry hears only the first."""

    def __init__(self, meter: Meter) -> None:
        self.workers: WeakSet[Metrics] = WeakSet()
        self.bytes = meter.create_counter("bytes", "By", "Payload read, an aggregate's own bytes included.")
        self.records = meter.create_counter("records", "{record}", "User records read, after de-aggregation.")
        gauges: tuple[tuple[Callable[[Metrics], Iterable[Observation]], str, str], ...] = (
            (Metrics.total_leases, "{lease}", "Leases that are not finished."),
            (Metrics.total_shards, "{shard}", "Open shards, as last listed."),
            (Metrics.unclaimed_leases, "{lease}", "Unfinished leases without a living owner."),
            (Metrics.worker_leases, "{lease}", "Unfinished leases that this worker holds."),
            (Metrics.millis_behind_latest, "ms", "How far reading is behind the tip of the shard."),
        )
        for gauge, unit, meaning in gauges:
            meter.create_observable_gauge(gauge.__name__, [self._of_all(gauge)], unit, meaning)

    def _of_all(
        self, gauge: Callable[[Metrics], Iterable[Observation]]
    ) -> Callable[[CallbackOptions], Iterable[Observation]]:
        return lambda _options: [told for worker in tuple(self.workers) for told in gauge(worker)]


_made: WeakKeyDictionary[Meter, _Instruments] = WeakKeyDictionary()
_making = Lock()


def _instruments(meter: Meter) -> _Instruments:
    with _making:
        if meter not in _made:
            _made[meter] = _Instruments(meter)
        return _made[meter]


@cache
def _own_meter() -> Meter:
    return get_meter(SCOPE)
