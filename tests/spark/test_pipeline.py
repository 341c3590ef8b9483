"""The pipeline: what lands, what is counted once, and what the progress of a batch contains."""

import json
from collections.abc import Iterable
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
from attrs import frozen
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming.query import StreamingQuery
from typer.testing import CliRunner
from types_boto3_kinesis import KinesisClient
from waiters import AT_ONCE

from leasehold.adapters.cli.pipeline import app, run
from leasehold.adapters.report.progress import BatchProgress, ReadingProgress
from leasehold.adapters.spark import pipeline as pipeline_run
from leasehold.adapters.spark.event_hubs.data_source import DDL as EVENT_HUBS
from leasehold.adapters.spark.kinesis.rows import DDL as KINESIS
from leasehold.adapters.spark.pipeline import OutputPlace, Recipe, landed, windowed

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]

RECIPE = Recipe(
    "json",
    "at timestamp, carrier string, delay int",
    "at",
    "10 minutes",
    "20 minutes",
    by=("carrier",),
    values=("delay",),
)
BAD = ("not json", '{"at": "2026-01-01T00:00:00Z", "delay": "much"}', '{"carrier": "UA"}', "")

_records = count()


def record(minute: int, carrier: str = "UA", delay: int = 5) -> str:
    return json.dumps({"at": f"2026-01-01T{minute // 60:02}:{minute % 60:02}:00Z", "carrier": carrier, "delay": delay})


def put(folder: Path, texts: Iterable[str], start: int) -> None:
    """Write one file of records, numbered from `start`, with the columns of the source."""
    folder.mkdir(exist_ok=True)
    lines = [
        {"shardId": f"s-{n % 2}", "sequenceNumber": str(n), "subSequenceNumber": n % 3}
        | {"approximateArrivalTimestamp": "2026-01-01T00:00:00Z", "text": text}
        for n, text in enumerate(texts, start)
    ]
    whole = folder / f".{next(_records)}"
    whole.write_text("\n".join(map(json.dumps, lines)))
    whole.rename(folder / f"{whole.name[1:]}.json")


def arriving(spark: SparkSession, folder: Path) -> DataFrame:
    """Return these files as a stream with the columns of `kinesis-leased`."""
    columns = KINESIS.replace("data binary", "text string")
    files = spark.readStream.schema(columns).option("maxFilesPerTrigger", 1).json(str(folder))
    return files.withColumn("data", f.col("text").cast("binary"))


def ran(
    records: DataFrame, place: OutputPlace, *, also: tuple[str, ...] = (), windows: bool = True
) -> list[dict[str, Any]]:
    """Return the progress of a run over everything that is there."""
    events = run(records, RECIPE, place, also, windows=windows, once=True)
    return [each.json for each in events if isinstance(each, BatchProgress)]


@pytest.mark.more
def test_records_land_once_and_windows_count_them_once(spark: SparkSession, tmp_path: Path) -> None:
    """A hand-off between applications counts no record twice, and dead letters neither vanish nor stop the query."""
    first = [record(minute, "UA" if minute % 2 else "B6", minute) for minute in range(90)]
    put(tmp_path / "a", [*first, *BAD], 0)
    put(tmp_path / "b", first[60:], 60)  # the other application reads the last third again
    put(tmp_path / "b", [record(600)], 1000)  # moves the watermark past all others
    out = f"{tmp_path}/out"
    progress = ran(arriving(spark, tmp_path / "b"), OutputPlace(out, "two"), windows=False)
    progress += ran(arriving(spark, tmp_path / "a"), OutputPlace(out, "one"), also=("two",))
    again = ran(arriving(spark, tmp_path / "a"), OutputPlace(out, "one"), also=("two",))

    rows = spark.read.parquet(f"{out}/rows/one")
    dead = rows.where("kind = 'dead-letter'").select(f.col("data").cast("string")).collect()
    assert sorted(text for (text,) in dead) == sorted(BAD)
    assert rows.where("kind = 'row'").select("row.delay").distinct().count() == 90
    assert rows.count() == 94
    assert [line["unparsable"] for line in progress if line["query"] == "rows-one"] == [4]
    assert sum(line["rows"] for line in again) == 0

    everything = rows.unionByName(spark.read.parquet(f"{out}/rows/two"))
    batch = windowed(everything, RECIPE).where("start < '2026-01-01T09:00:00Z'")
    streamed = spark.read.parquet(f"{out}/windows")
    assert _sorted(streamed) == _sorted(batch)
    assert sum(row["records"] for row in _sorted(streamed)) == 90
    assert len(_sorted(streamed)) == 18


@pytest.mark.more
def test_applications_begin_in_any_order_and_go_on_until_they_are_stopped(spark: SparkSession, tmp_path: Path) -> None:
    """A pipeline begins although another one has not landed anything yet, and its queries end with it."""
    put(tmp_path / "a", map(record, range(30)), 0)
    put(tmp_path / "b", map(record, range(30, 60)), 30)
    put(tmp_path / "b", [record(600)], 1000)
    out = f"{tmp_path}/out"
    one = run(arriving(spark, tmp_path / "a"), RECIPE, OutputPlace(out, "one"), ("two",), windows=True, once=False)
    batches = (each for each in one if isinstance(each, BatchProgress))
    progress = [next(batches)]
    ran(arriving(spark, tmp_path / "b"), OutputPlace(out, "two"), windows=False)
    while sum(line.rows for line in progress if line.query == "windows") < 61:
        progress.append(next(batches))
    assert sorted(query.name for query in spark.streams.active) == ["rows-one", "windows"]
    one.close()
    assert spark.streams.active == []


@frozen
class Idler:
    """A query that waited before its batch and after it, as Spark reports it, and has ended."""

    id = "q"
    recentProgress = tuple(  # noqa: N815  Spark's name
        SimpleNamespace(
            batchId=number,
            durationMs=durations,
            timestamp=f"2026-01-01T00:00:{at:02}.000Z",
            told=BatchProgress("q", number, 0.0, rows, 0.1),
            read=ReadingProgress("q", at, 2, 0.0, {}),
        )
        for number, durations, rows, at in (
            (3, {"latestOffset": 5}, 0, 10),
            (3, {"addBatch": 5}, 9, 12),
            (4, {"latestOffset": 5}, 0, 22),
        )
    )

    def awaitTermination(self, _seconds: int) -> bool:  # noqa: N802  Spark's name
        return True


TOLD = [
    ReadingProgress("q", 10, 2, 0.0, {}),
    ReadingProgress("q", 12, 2, 0.0, {}),
    BatchProgress("q", 3, 0.0, 9, 0.1),
    ReadingProgress("q", 22, 2, 0.0, {}),
]


@pytest.fixture
def _as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use progress objects that carry their own reports."""
    monkeypatch.setattr(pipeline_run, "told_of", lambda progress: progress.told)
    monkeypatch.setattr(pipeline_run, "reading_of", lambda progress: progress.read)


@pytest.mark.usefixtures("_as_it_is")
def test_a_batch_is_told_though_the_query_idled_before_it_and_reading_also_while_it_idles() -> None:
    """Spark gives an idle trigger the number of the batch it waits for, and no rows may be missed because of that."""
    assert list(pipeline_run.finished([cast("StreamingQuery", Idler())], 1)) == TOLD


class Endless(Idler):
    """The same query, which does not end."""

    def awaitTermination(self, _seconds: int) -> bool:  # noqa: N802  Spark's name
        return False


@pytest.mark.usefixtures("_as_it_is")
def test_a_pipeline_asked_to_end_looks_no_further() -> None:
    """An interrupt may be lost between two calls to Java, so the pipeline also checks for it."""
    looks: list[None] = []
    events = pipeline_run.finished(
        [cast("StreamingQuery", Endless())], 1, lambda: looks.append(None), lambda: len(looks) == 2
    )
    assert list(events) == TOLD
    assert len(looks) == 2


class Late:
    """A query whose Python process did not start in time for Spark, or one that runs."""

    status: ClassVar = {"message": "Waiting for data to arrive"}

    def __init__(self, fault: str | None) -> None:
        self.isActive, self.fault = fault is None, fault

    def exception(self) -> str | None:
        return self.fault


@pytest.mark.parametrize("busy", [0, 2, 4], ids=["at once", "later", "at last"])
@pytest.mark.parametrize("when", ["loads", "starts"])
def test_a_query_is_begun_again_where_python_was_not_started_in_time(when: str, busy: int) -> None:
    """A busy machine does not end a pipeline that has no fault of its own."""
    tries, late = list[int](), "Python worker failed to connect back."

    def start() -> StreamingQuery:
        tries.append(0)
        if len(tries) <= busy and when == "loads":
            raise OSError(late)
        return cast("StreamingQuery", Late(late if len(tries) <= busy else None))

    assert pipeline_run.begun(start).isActive
    assert len(tries) == busy + 1


@pytest.mark.parametrize(("fault", "tries"), [("no such stream", 1), ("failed to connect back", 5)])
@pytest.mark.parametrize("when", ["loads", "starts"])
def test_a_query_that_fails_otherwise_or_for_ever_is_not_begun_again(when: str, fault: str, tries: int) -> None:
    """A wrong option is not tried again, and a machine without Python only a few times."""
    starts = list[int]()

    def start() -> StreamingQuery:
        starts.append(0)
        if when == "loads":
            raise OSError(fault)
        return cast("StreamingQuery", Late(fault))

    with pytest.raises(OSError, match=fault) if when == "loads" else nullcontext():
        assert str(pipeline_run.begun(start).exception()) == fault
    assert len(starts) == tries


def _sorted(windows: DataFrame) -> list[Any]:
    return [row.asDict() for row in windows.orderBy("start", "carrier").collect()]


@pytest.mark.more
def test_csv_and_events_of_a_hub_land_too(spark: SparkSession) -> None:
    recipe = Recipe("csv", "at timestamp, delay int", "at")
    frame = spark.createDataFrame(
        [{"body": body, "partition": "7", "sequenceNumber": 3} for body in (b"2026-01-01T00:00:00Z,4", b"never,x")],
        EVENT_HUBS,
    )
    landed_rows = landed(frame, recipe)
    assert landed_rows.schema.simpleString() == spark.createDataFrame([], recipe.landed_schema).schema.simpleString()
    columns = [(row.shardId, row.sequenceNumber, row.row and row.row.delay, row.data) for row in landed_rows.collect()]
    assert columns == [("7", "3", 4, None), ("7", "3", None, b"never,x")]


@pytest.mark.services
def test_from_a_stream_to_files(
    spark: SparkSession, kinesis_client: KinesisClient, kinesis_url: str, tmp_path: Path
) -> None:
    """The command reads a leased stream and writes Parquet."""
    kinesis_client.create_stream(StreamName="piped", ShardCount=1)
    kinesis_client.get_waiter("stream_exists").wait(StreamName="piped", WaiterConfig=AT_ONCE)
    for text in (*map(record, range(5)), "bad"):
        kinesis_client.put_record(StreamName="piped", Data=text.encode(), PartitionKey="k")
    options = {"streamName": "piped", "endpointUrl": kinesis_url, "region": "eu-west-1", "startingPosition": "EARLIEST"}
    sets = [f"--set=kinesis.{name}={value}" for name, value in options.items()]
    sets.append(f"--set=lease.store=sqlite:///{tmp_path}/leases.db")
    ends = ["--folder", str(tmp_path), "--schema", RECIPE.schema, "--time", "at", "--no-windows", "--once"]
    done = CliRunner().invoke(app, ["kinesis-leased", *sets, *ends])
    assert (done.exit_code, done.stderr) == (0, "")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert (sum(line["rows"] for line in lines), sum(line["unparsable"] for line in lines)) == (6, 1)
    assert spark.read.parquet(f"{tmp_path}/rows/main").groupBy("kind").count().orderBy("kind").collect() == [
        ("dead-letter", 1),
        ("row", 5),
    ]
    kinesis_client.delete_stream(StreamName="piped")


def test_a_bad_option_is_said_in_one_line(spark: SparkSession) -> None:
    """The user sees no Java traceback, and Spark gets no secret to show on its pages."""
    assert spark.version
    ends = ["--folder", "x", "--schema", "a int", "--time", "a"]
    refused = CliRunner().invoke(app, ["eventhubs-leased", "--set", "EventHubs.connectionString=hush", *ends])
    assert (refused.exit_code, "Spark would show it" in refused.stderr, "hush" in refused.stderr) == (2, True, False)
    done = CliRunner().invoke(app, ["kinesis-leased", "--set", "streamName", *ends])
    assert (done.exit_code, done.stderr) == (2, "leasehold pipeline: --set: 'streamName' is not NAME=VALUE\n")


def test_a_lease_table_that_cannot_be_used_is_said_in_one_line(spark: SparkSession, tmp_path: Path) -> None:
    """The user does not have to look for the cause in a hundred lines of Spark and Python."""
    assert spark.version
    sets = ["--set=kinesis.streamName=s", f"--set=lease.store=sqlite://{tmp_path}/no/leases.db"]
    ends = ["--folder", str(tmp_path), "--schema", "at timestamp", "--time", "at", "--once"]
    done = CliRunner().invoke(app, ["kinesis-leased", *sets, *ends])
    assert done.exit_code == 1
    assert done.stderr.startswith(f"leasehold pipeline: {tmp_path}/no/leases.db: unable to open database file; check ")
    assert done.stderr.count("\n") == 1
