"""The onlookers of a reading: the worker's metrics and spans, then the user's own.

A fault in one is logged and ends there.
"""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec

from attrs import evolve

from leasehold.adapters.reading.handlers.handling import Handling
from leasehold.adapters.sources.protocol import Batch
from leasehold.adapters.worker.holding import Holding
from leasehold.adapters.worker.worker import Worker
from leasehold.stores.printable import escaped

if TYPE_CHECKING:  # an extra
    from opentelemetry.metrics import Meter

log = escaped(logging.getLogger("leasehold.runner"))

P = ParamSpec("P")


def traced(worker: Worker, handling: Handling) -> Handling:
    """The handling with a span over each call of the handler and of the dead letter, where spans are told."""
    letter = handling.dead_letter
    return evolve(
        handling,
        handler=worker.spans.handler(handling.handler),
        dead_letter=None if letter is None else worker.spans.handler(letter),
    )


def metered(worker: Worker, handling: Handling, meter: "Meter | None") -> Handling:
    """The handling with metrics, where OpenTelemetry is installed."""
    try:
        from leasehold.adapters.reading.metrics import WorkerMetrics  # noqa: PLC0415  OpenTelemetry is an extra
    except ModuleNotFoundError:
        return handling
    metrics = WorkerMetrics(worker, meter)
    count_read, count_slow = _harmless(metrics.read), _harmless(metrics.slow)

    def measure(holding: Holding, batch: Batch) -> None:
        count_read(holding, batch)
        handling.measure(holding, batch)

    def slow(holding: Holding, seconds: float) -> None:
        count_slow(holding)
        handling.slow(holding, seconds)

    return evolve(handling, measure=measure, slow=slow)


def _harmless(told: Callable[P, object]) -> Callable[P, None]:
    said: list[bool] = []

    def tell(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            told(*args, **kwargs)
        except Exception as fault:
            # The fault comes again with each reading: one trace is enough for a log.
            log.log(logging.DEBUG if said else logging.ERROR, "metrics raised; going on without them", exc_info=fault)
            said.append(True)

    return tell
