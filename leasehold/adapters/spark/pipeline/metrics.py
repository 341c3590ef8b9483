"""A pipeline's numbers, reported to OpenTelemetry."""

from typing import TYPE_CHECKING

from leasehold.adapters.report.progress import BatchProgress, ReadingProgress

if TYPE_CHECKING:  # an extra
    from opentelemetry.metrics import Meter


class PipelineMetrics:
    """The metrics of a pipeline, for alarms; each series carries the query's name."""

    def __init__(self, meter: "Meter") -> None:
        self._rows = meter.create_counter("pipeline_rows", "{row}", "Rows read by a query.")
        self._unparsable = meter.create_counter("pipeline_unparsable", "{row}", "Rows that became dead letters.")
        self._late = meter.create_counter("pipeline_late", "{row}", "Rows after the watermark, in no window.")
        self._lag = meter.create_gauge("pipeline_lag", "s", "The age of the newest record when it had landed.")
        self._behind = meter.create_gauge("pipeline_behind", "s", "How far reading is behind, of the furthest shard.")
        self._seconds = meter.create_gauge("pipeline_batch", "s", "How long the last batch took.")

    def tell(self, told: BatchProgress | ReadingProgress) -> None:
        """Count one more batch, or note how far behind reading is."""
        series = {"query": told.query}
        if isinstance(told, ReadingProgress):
            self._behind.set(told.behind, series)
            return
        self._rows.add(told.rows, series)
        self._seconds.set(told.seconds, series)
        if told.unparsable is not None:
            self._unparsable.add(told.unparsable, series)
        if told.late is not None:
            self._late.add(told.late, series)
        if told.lag_seconds is not None:
            self._lag.set(told.lag_seconds, series)
