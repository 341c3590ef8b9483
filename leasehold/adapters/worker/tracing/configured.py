"""The choice whether a worker is traced.

Rule: without OpenTelemetry, or without a tracer provider at the time a worker is made, its store, source and handlers
are the very ones that it was given.
"""

from typing import TYPE_CHECKING

from leasehold.adapters.worker.tracing.spans import WorkerSpans

if TYPE_CHECKING:  # an extra
    from opentelemetry.trace import Tracer


def spans_of(worker: str, tracer: "Tracer | None" = None) -> WorkerSpans:
    """The spans of this worker: by this tracer; by the program's own provider, if left out and one is set; or none."""
    try:
        from leasehold.adapters.worker.tracing.traced import TracedSpans, own_tracer  # noqa: PLC0415  OpenTelemetry is an extra
    except ModuleNotFoundError:
        return WorkerSpans()
    chosen = tracer or own_tracer()
    return WorkerSpans() if chosen is None else TracedSpans(chosen, worker)
