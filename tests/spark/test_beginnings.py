"""Queries that cannot start give the reason in one sentence, and leave nothing behind."""

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from pickle import loads
from typing import NoReturn
from uuid import uuid4

import pytest
from fake_stream import Stream
from pyspark.cloudpickle import dumps
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from waiters import WAIT

from leasehold.adapters.spark.kinesis.data_source import KinesisLeased
from leasehold.adapters.spark.leased_source import LeasedReader
from leasehold.adapters.spark.pipeline import start_query
from leasehold.adapters.spark.processes import HIDE_TRACEBACK, raise_plain_errors
from leasehold.adapters.spark.query_run import open_lease_table
from leasehold.errors import OutcomeUnknown, SourceError, SourceUnavailable, StoreError
from leasehold.stores.protocol import Store
from leasehold.stores.urls import open_store


def refusal(spark: SparkSession, folder: Path, trigger: dict[str, bool], options: dict[str, str]) -> str:
    """Return the error with which the query ends, without the description that Spark appends."""
    all_options = {"kinesis.streamName": "orders", "kinesis.region": "eu-west-1", **options}
    rows = spark.readStream.format("kinesis-leased").options(**all_options)

    def start() -> StreamingQuery:
        writer = rows.load().writeStream.format("noop").option("checkpointLocation", str(folder / "progress"))
        return writer.trigger(**trigger).start()

    query = start_query(start)
    with pytest.raises(StreamingQueryException) as exc_info:
        query.awaitTermination(WAIT)
    return str(exc_info.value).partition("=== Streaming Query")[0].strip()


@pytest.mark.more
@pytest.mark.spark
@pytest.mark.xdist_group("spark")
def test_unusable_lease_table_is_one_sentence(spark: SparkSession, tmp_path: Path) -> None:
    error = refusal(spark, tmp_path, {"availableNow": True}, {"lease.store": f"sqlite://{tmp_path}/no/leases.db"})
    first_line, *more_lines = error.splitlines()
    assert f"StoreError: {tmp_path}/no/leases.db: unable to open database file; check the folder" in first_line
    assert [line for line in more_lines if "SQLSTATE" not in line] == []


@pytest.mark.more
@pytest.mark.services
@pytest.mark.spark
@pytest.mark.xdist_group("spark")
def test_wrong_stream_is_one_sentence_and_creates_no_table(
    spark: SparkSession, tmp_path: Path, kinesis_url: str
) -> None:
    lease_file, name = tmp_path / "leases.db", f"none-{uuid4().hex[:8]}"
    options = {"kinesis.streamName": name, "kinesis.endpointUrl": kinesis_url, "lease.store": f"sqlite:///{lease_file}"}
    error = refusal(spark, tmp_path, {"availableNow": True}, options)
    assert f"SourceError: stream '{name}': " in error.splitlines()[0]
    assert "Traceback" not in error
    assert not lease_file.exists()


@pytest.mark.spark
@pytest.mark.xdist_group("spark")
def test_once_trigger_is_rejected(spark: SparkSession, tmp_path: Path) -> None:
    """With `trigger(once=True)`, a query would end without a row, so a job would never make progress."""
    error = refusal(spark, tmp_path, {"once": True}, {"lease.store": f"sqlite://{tmp_path}/leases.db"})
    assert "use trigger(availableNow=True), which reads what exists now" in error.splitlines()[0]
    assert "Traceback" not in error
    assert not (tmp_path / "leases.db").exists()


class Unlisted(Stream):
    """A stream whose shards cannot be listed."""

    def __init__(self, fault: SourceError) -> None:
        super().__init__({"a": ["a0"]})
        self.fault = fault

    def shards(self) -> NoReturn:
        """Raise the given error."""
        raise self.fault


def test_throttled_stream_does_not_keep_a_query_from_starting(tmp_path: Path) -> None:
    busy_stream = Unlisted(SourceUnavailable("slow down"))
    open_lease_table(open_store, f"sqlite://{tmp_path}/leases.db", busy_stream, create=True).close()
    assert (tmp_path / "leases.db").exists()


def test_existing_table_is_opened_without_listing_shards(tmp_path: Path) -> None:
    """A query that is restarted does not need the permission to list shards."""
    missing_stream, url = Unlisted(SourceError("no such stream")), f"sqlite://{tmp_path}/leases.db"
    with pytest.raises(StoreError, match="there is no file"):
        open_lease_table(open_store, url, missing_stream, create=False)
    with pytest.raises(SourceError, match="no such stream"):
        open_lease_table(open_store, url, missing_stream, create=True)
    open_store(url).close()
    open_lease_table(open_store, url, missing_stream, create=True).close()


def test_unresponsive_table_is_asked_once() -> None:
    openings: list[bool] = []

    def open_and_record(_url: str, *, create: bool) -> Store:
        openings.append(create)
        raise OutcomeUnknown("no answer")

    with pytest.raises(OutcomeUnknown):
        open_lease_table(open_and_record, "dynamodb://leases", Stream({}), create=True)
    assert openings == [False]


def test_unexpected_fault_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HIDE_TRACEBACK, "")
    with pytest.raises(KeyError), raise_plain_errors():
        raise KeyError("shard-0")
    assert not os.environ[HIDE_TRACEBACK]


def test_missing_package_error_says_what_to_set(tmp_path: Path) -> None:
    for name in ("pyspark", "py4j"):
        (tmp_path / name).symlink_to(str(import_module(name).__path__[0]))
    source = KinesisLeased({"kinesis.streamname": "s", "lease.store": "sqlite://x"})
    spec, lease, *_ = source._parse_source_options()  # noqa: SLF001  as Spark makes one
    reader = LeasedReader(spec, lease)
    (tmp_path / "task").write_bytes(dumps((source, reader)))  # type: ignore[no-untyped-call]  # Spark has no types there
    assert vars(loads((tmp_path / "task").read_bytes())[1]) == {}  # noqa: S301  our own
    bare_python = [sys.executable, "-S", "-c", "import pickle, pyspark.cloudpickle; pickle.load(open('task', 'rb'))"]
    completed = subprocess.run(bare_python, check=False, cwd=tmp_path, capture_output=True, text=True)
    expected = (
        f"ImportError: No module named 'leasehold': the Python of Spark's tasks is {sys.executable}; set PYSPARK_PYTHON"
    )
    assert expected in completed.stderr.splitlines()[-1]
