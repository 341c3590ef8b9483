"""Exports metrics for the command line, using OpenTelemetry's exporters and environment variables."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Any, Protocol

from leasehold.stores.printable import error_summary, make_safe_logger

log = make_safe_logger(logging.getLogger("leasehold.metrics"))

EXPORTER_GROUP = "opentelemetry_metrics_exporter"
"""The entry point group in which OpenTelemetry's exporters are registered."""

EXPORT_INTERVAL_MS = 10_000
"""The interval between two exports of metrics. OpenTelemetry's default of 60 seconds is too long for leases."""


class Meter(Protocol):
    """The methods of an OpenTelemetry meter that we use, declared here because OpenTelemetry may not be installed."""

    def create_counter(self, name: str, unit: str = "", description: str = "") -> Any:  # noqa: ANN401  from an optional package
        """Create a counter."""

    def create_observable_gauge(
        self,
        name: str,
        callbacks: Any = None,  # noqa: ANN401  from an optional package
        unit: str = "",
        description: str = "",
    ) -> Any:  # noqa: ANN401  from an optional package
        """Create a gauge whose value is read through callbacks."""

    def create_gauge(self, name: str, unit: str = "", description: str = "") -> Any:  # noqa: ANN401  from an optional package
        """Create a gauge whose value is set by the program."""


@contextmanager
def exporting(name: str | None) -> Iterator[Meter | None]:
    """Yield a meter whose metrics are exported until the end of the block, or None if the exporter is `none`.

    Args:
        name: The exporter's name. If None, the environment variable OTEL_METRICS_EXPORTER is used, with `none` as its
            default.

    Raises:
        ValueError: There is no such exporter, or it cannot be started.
    """
    exporter_name = (name or os.environ.get("OTEL_METRICS_EXPORTER") or "none").strip().lower()
    if exporter_name == "none":
        yield None
        return
    try:
        from opentelemetry.sdk.metrics import MeterProvider  # noqa: PLC0415  an optional dependency
        from opentelemetry.sdk.metrics.export import (  # noqa: PLC0415  an optional dependency
            ConsoleMetricExporter,
            MetricReader,
            PeriodicExportingMetricReader,
        )
    except ModuleNotFoundError as error:
        raise ValueError(f"metrics: {error.name} is not installed; install leasehold[metrics]") from error
    exporter: Any  # an exporter, or a reader that is polled, such as Prometheus's
    if exporter_name == "console":
        exporter = ConsoleMetricExporter(out=sys.stderr)  # standard output is for events
    else:
        exporters = {entry.name: entry for entry in entry_points(group=EXPORTER_GROUP)}
        # Read the protocol from OpenTelemetry's environment variables. If neither is set, use HTTP, which is the
        # default of newer versions of OpenTelemetry.
        protocol = os.environ.get("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL") or os.environ.get(
            "OTEL_EXPORTER_OTLP_PROTOCOL"
        )
        entry_name = (
            ("otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http")
            if exporter_name == "otlp"
            else exporter_name
        )
        if entry_name not in exporters:
            choices = ", ".join(sorted({"none"} | {entry.partition("_proto_")[0] for entry in exporters}))
            package = f"opentelemetry-exporter-{entry_name.replace('_', '-')}"
            raise ValueError(
                f"metrics: there is no exporter {exporter_name!r}; choose among {choices}, or pip install {package}"
            )
        try:
            exporter = exporters[entry_name].load()()
        except Exception as error:
            raise ValueError(
                f"metrics: exporter {exporter_name!r} cannot be started: {error_summary(error)}"
            ) from error
    if not isinstance(exporter, MetricReader):
        # Keep an interval that the user has set. OpenTelemetry's default of 60 s is too long for leases.
        has_interval = "OTEL_METRIC_EXPORT_INTERVAL" in os.environ
        exporter = PeriodicExportingMetricReader(
            exporter, export_interval_millis=None if has_interval else EXPORT_INTERVAL_MS
        )
    provider = MeterProvider([exporter])
    try:
        yield provider.get_meter("leasehold")
    finally:
        try:
            provider.shutdown()  # sends the metrics since the last export
        except Exception as error:  # noqa: BLE001  an exporter's error must not replace the worker's
            log.warning("the last metrics were not exported: %s", error_summary(error))
