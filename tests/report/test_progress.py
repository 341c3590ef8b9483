"""A pipeline's progress: batches are reported, drawn, and counted."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from outline import Outline

from leasehold.adapters.report.progress import (
    BATCHES_MAX,
    PAUSE_SECONDS,
    BatchProgress,
    ProgressPage,
    ReadingProgress,
    reading_of,
    told_of,
)
from leasehold.adapters.spark.pipeline import PipelineMetrics

PROGRESS = {
    "name": "rows-one",
    "batchId": 3,
    "numInputRows": 10,
    "timestamp": "1970-01-01T00:01:40.000Z",
    "durationMs": {"triggerExecution": 1500},
    "eventTime": {},
    "stateOperators": [],
    "observedMetrics": {"landed": {"rows": 10, "unparsable": 2, "newest": 91.25}},
}


def test_progress_tells_lag_and_lateness() -> None:
    """An operator sees how far behind the pipeline is, and that it drops rows."""
    assert told_of(PROGRESS).json == {
        "query": "rows-one",
        "batch": 3,
        "at": 101.5,
        "rows": 10,
        "seconds": 1.5,
        "unparsable": 2,
        "lag_seconds": 10.25,
    }
    state = [{"numRowsDroppedByWatermark": 2}, {"numRowsDroppedByWatermark": 1}]
    windows = PROGRESS | {"name": "windows", "eventTime": {"watermark": "w"}, "stateOperators": state}
    told = told_of(windows | {"observedMetrics": {}}).json
    assert told == {
        "query": "windows",
        "batch": 3,
        "at": 101.5,
        "rows": 10,
        "seconds": 1.5,
        "watermark": "w",
        "late": 3,
    }


def test_progress_without_a_sum_is_summed_up() -> None:
    """Spark Connect reports rows by source only, and no times for an empty batch; the pipeline goes on."""
    sources = [{"numInputRows": 4}, {"numInputRows": 5}]
    progress = PROGRESS | {"numInputRows": None, "sources": sources, "observedMetrics": {"landed": {"unparsable": 0}}}
    assert told_of(progress) == BatchProgress("rows-one", 3, 101.5, 9, 1.5, unparsable=0)
    assert told_of(progress | {"observedMetrics": {"landed": {}}}) == BatchProgress("rows-one", 3, 101.5, 9, 1.5)


def test_reading_is_told_with_a_batch_and_without_one() -> None:
    """Users see how far a query is behind even while it produces nothing."""
    told = '{"shards": 4, "behindMs": 2500, "behindMsByShard": {"s-1": 2500, "s-2": 10}}'
    progress = PROGRESS | {"numInputRows": 0, "observedMetrics": {}, "sources": [{"latestOffset": told}]}
    assert reading_of(progress) == ReadingProgress("rows-one", 101.5, 4, 2.5, {"s-1": 2.5, "s-2": 0.01})
    for others in ([], [{"latestOffset": None}], [{"latestOffset": '{"logOffset": 3}'}], [{"latestOffset": "null"}]):
        assert reading_of(progress | {"sources": others}) is None


ROWS = BatchProgress("rows-<b>", 0, 1000.0, 20, 0.5, unparsable=2, lag_seconds=1.5)
WINDOWS = BatchProgress("windows", 0, 1001.0, 18, 0.5, watermark="1970-01-01T00:10:00Z", late=3)


READ = ReadingProgress("rows-<b>", 1003.0, 4, 7.5, {"s-<i>": 7.5, "s-2": 1.0})


def drawn(path: Path, batches: Sequence[BatchProgress | ReadingProgress], *, running: bool) -> Outline:
    """Return the page of these batches after its last update."""
    page = ProgressPage("flights", path)
    for told in batches:
        page.tell(told)
    page.write(running=running)
    return Outline(path.read_text(encoding="utf-8"))


def test_the_page_shows_what_each_query_did(tmp_path: Path) -> None:
    """Users see that a pipeline falls behind, or drops rows."""
    more = [ROWS, WINDOWS, BatchProgress("rows-<b>", 1, 1002.0, 30, 0.7, unparsable=1, lag_seconds=2.5)]
    seen = drawn(tmp_path / "p.html", more, running=False)
    assert seen.texts["dd"] == ["50", "0.7 s", "3", "2.5 s", "18", "0.5 s", "3"]
    assert seen.texts["h2"] == [
        "Query rows-<b>",
        "Rows a second",
        "How long batches took",
        "Lag: age of the newest record landed",
        "Query windows",
        "How long batches took",
        "Late: after the watermark, and in no window",
    ]
    assert "b" not in seen.tags
    assert list(tmp_path.iterdir()) == [tmp_path / "p.html"]


def test_the_page_shows_how_far_each_shard_is_behind_though_no_rows_come(tmp_path: Path) -> None:
    """A query that cannot reach its records does not look like one that has read them all."""
    silent = drawn(tmp_path / "p.html", [READ], running=True)
    assert silent.texts["dd"] == ["4", "7.5 s"]
    assert silent.texts["td"] == ["s-<i>", "7.5 s", "s-2", "1.0 s"]
    assert "i" not in silent.tags
    level = ReadingProgress("rows-<b>", 1004.0, 4, 0.0, {})
    seen = drawn(tmp_path / "p.html", [READ, ROWS, level], running=True)
    assert seen.texts["dd"] == ["20", "0.5 s", "2", "1.5 s", "4", "0.0 s"]
    assert seen.texts["td"] == []
    none = drawn(tmp_path / "p.html", [ReadingProgress("rows-<b>", 1004.0, 0, 0.0, {})], running=True)
    assert none.texts["dd"] == ["0"]  # a reader that has read nothing is not up to date


def test_the_page_is_written_now_and_then_and_keeps_the_last_batches(tmp_path: Path) -> None:
    """Drawing does not take longer than the batches, and memory does not grow while a pipeline runs."""
    path = tmp_path / "p.html"
    page = ProgressPage("flights", path)
    page.tell(ROWS)
    first = path.read_text(encoding="utf-8")
    page.tell(WINDOWS)
    assert path.read_text(encoding="utf-8") == first
    for number in range(BATCHES_MAX):
        page.tell(BatchProgress("windows", number, 1000.0 + PAUSE_SECONDS, 1, 0.1, late=0))
    written = Outline(path.read_text(encoding="utf-8"))
    assert "Query windows" in written.texts["h2"]
    assert (len(page.queries["windows"].batches), page.queries["windows"].rows) == (BATCHES_MAX, BATCHES_MAX + 18)


@pytest.mark.parametrize("running", [True, False])
def test_a_page_of_what_runs_loads_itself_anew(tmp_path: Path, *, running: bool) -> None:
    """Viewers see the current state, and a finished page stops reloading."""
    drawn(tmp_path / "p.html", [ROWS], running=running)
    assert ('http-equiv="refresh"' in (tmp_path / "p.html").read_text(encoding="utf-8")) == running


def test_opentelemetry_is_told() -> None:
    """Alarms can use a pipeline's lag."""
    reader = InMemoryMetricReader()
    metrics = PipelineMetrics(MeterProvider([reader]).get_meter("test"))
    for told in (ROWS, ROWS, WINDOWS, READ):
        metrics.tell(told)
    data = reader.get_metrics_data()
    numbers = {
        (metric.name, (point.attributes or {})["query"]): getattr(point, "value", None)
        for metric in (data.resource_metrics[0].scope_metrics[0].metrics if data else ())
        for point in metric.data.data_points
    }
    assert numbers == {
        ("pipeline_rows", "rows-<b>"): 40,
        ("pipeline_rows", "windows"): 18,
        ("pipeline_unparsable", "rows-<b>"): 4,
        ("pipeline_late", "windows"): 3,
        ("pipeline_lag", "rows-<b>"): 1.5,
        ("pipeline_behind", "rows-<b>"): 7.5,
        ("pipeline_batch", "rows-<b>"): 0.5,
        ("pipeline_batch", "windows"): 0.5,
    }
