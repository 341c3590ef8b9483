"""The metrics that a worker has exported to OpenTelemetry."""

from collections.abc import Mapping

from opentelemetry.sdk.metrics.export import InMemoryMetricReader

Series = dict[tuple[str, str], float]


def exported_values(reader: InMemoryMetricReader) -> Series:
    """Return every value by the name of its metric and its lease or worker."""
    data = reader.get_metrics_data()
    numbers: Series = {}
    for metric in data.resource_metrics[0].scope_metrics[0].metrics if data else ():
        for point in metric.data.data_points:
            of: Mapping[str, object] = point.attributes or {}
            assert of["worker"] == "a-1"
            numbers[metric.name, str(of.get("lease", "a-1"))] = getattr(point, "value", 0)
    return numbers
