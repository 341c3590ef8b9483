"""Exports metrics from the command line, by OpenTelemetry's own exporters and its own environment variables."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Any, Protocol

GROUP = "opentelemetry_metrics_exporter"
"""Where OpenTelemetry's exporters register themselves."""

EXPORT_MS = 10_000
"""The leases' metrics are wanted every 10 seconds; OpenTelemetry's own default is 60."""


class Meter(Protocol):
    """A meter of OpenTelemetry, as far as it is used: without that extra nobody has its types."""

    def create_counter(self, name: str, unit: str = "", description: str = "") -> Any:  # noqa: ANN401  a type of the extra's
        """Make what counts."""

    def create_observable_gauge(
        self,
        name: str,
        callbacks: Any = None,  # noqa: ANN401  likewise
        unit: str = "",
        description: str = "",
    ) -> Any:  # noqa: ANN401  likewise
        """Make what is asked."""

    def create_gauge(self, name: str, unit: str = "", description: str = "") -> Any:  # noqa: ANN401  likewise
        """Make what is set."""


@contextmanager
def exporting(name: str | None) -> Iterator[Meter | None]:
    """A meter whose numbers this exporter sends until the end; None for `none`.

    None stands for what OTEL_METRICS_EXPORTER says, or `none`. Raises ValueError for an exporter that is not there.
    """
    chosen = (name or os.environ.get("OTEL_METRICS_EXPORTER") or "none").strip().lower()
    if chosen == "none":
        yield None
        return
    try:
        from opentelemetry.sdk.metrics import MeterProvider  # noqa: PLC0415  an extra
        from opentelemetry.sdk.metrics.export import (  # noqa: PLC0415  likewise
            ConsoleMetricExporter,
            MetricReader,
            PeriodicExportingMetricReader,
        )
    except ModuleNotFoundError as missing:
        raise ValueError(f"metrics: {missing.name} is not installed; install leasehold[metrics]") from missing
    made: Any  # an exporter, or a reader such as Prometheus's, which is asked
    if chosen == "console":
        made = ConsoleMetricExporter(out=sys.stderr)  # standard output is for events
    else:
        known = {entry.name: entry for entry in entry_points(group=GROUP)}
        # As OpenTelemetry itself resolves it; its newer default protocol where none is named.
        protocol = os.environ.get("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL") or os.environ.get(
            "OTEL_EXPORTER_OTLP_PROTOCOL"
        )
        full = ("otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http") if chosen == "otlp" else chosen
        if full not in known:
            choice = ", ".join(sorted({"none"} | {each.partition("_proto_")[0] for each in known}))
            package = f"opentelemetry-exporter-{full.replace('_', '-')}"
            raise ValueError(
                f"metrics: there is no exporter {chosen!r}; choose among {choice}, or pip install {package}"
            )
        made = known[full].load()()
    if not isinstance(made, MetricReader):
        # Their own default of 60 s would miss what happens to a lease; who has set another is left alone.
        paced = "OTEL_METRIC_EXPORT_INTERVAL" in os.environ
        made = PeriodicExportingMetricReader(made, export_interval_millis=None if paced else EXPORT_MS)
    provider = MeterProvider([made])
    try:
        yield provider.get_meter("leasehold")
    finally:
        provider.shutdown()  # sends what has gathered since the last time
