"""The metrics that a worker has exported to OpenTelemetry."""

from collections.abc import Mapping

from opentelemetry.sdk.metrics.export import InMemoryMetricReader

Series = dict[tuple[str, str], float]


def exported_values(reader: InMemoryMetricReader) -> Series:
    """Return every value, by the metric's name and the lease or worker that it belongs to."""
    metrics_data = reader.get_metrics_data()
    values: Series = {}
    for metric in metrics_data.resource_metrics[0].scope_metrics[0].metrics if metrics_data else ():
        for point in metric.data.data_points:
            attributes: Mapping[str, object] = point.attributes or {}
            assert attributes["worker"] == "a-1"
            values[metric.name, str(attributes.get("lease", "a-1"))] = getattr(point, "value", 0)
    return values
