"""Tests with fake credentials as canaries that leasehold repeats none in its output, files or processes."""

import base64
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from children import child
from pyspark import cloudpickle
from pyspark.sql.pandas.types import from_arrow_schema
from typer.testing import CliRunner

from leasehold.adapters.cli.main import app
from leasehold.adapters.consumer.runner import Runner
from leasehold.adapters.sources.event_hubs.access import CONNECTION_STRING as HUB
from leasehold.adapters.sources.event_hubs.access import access_by_connection_string
from leasehold.adapters.sources.urls import open_source
from leasehold.adapters.spark.event_hubs.data_source import EventHubsLeased
from leasehold.adapters.spark.event_hubs.options import parse_event_hubs_options
from leasehold.adapters.spark.kinesis.data_source import KinesisLeased
from leasehold.adapters.spark.kinesis.options import parse_kinesis_options
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.config import Config
from leasehold.stores.objects.blob import CONNECTION_STRING_VARIABLE as BLOB
from leasehold.stores.urls import open_store

KEY_ID, SECRET, TOKEN = "AKIACANARYCANARY0000", "secretcanary/with+slashes", "tokencanary"
AZURE = base64.b64encode(b"azurecanary").decode()
SIGNATURE = "sigcanary"
CANARIES = (KEY_ID, *SECRET.split("/"), TOKEN, AZURE, "azurecanary", SIGNATURE)
NAMESPACE = "place.servicebus.windows.net"
WAIT = 60.0


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set every environment variable that holds a credential to a canary."""
    blob = (
        f"DefaultEndpointsProtocol=https;AccountName=account;AccountKey={AZURE};BlobEndpoint=http://127.0.0.1:1/account"
    )
    hub = f"Endpoint=sb://{NAMESPACE}/;SharedAccessKeyName=name;SharedAccessKey={AZURE};EntityPath=hub"
    variables = {
        "AWS_ACCESS_KEY_ID": KEY_ID,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_SESSION_TOKEN": TOKEN,
        BLOB: blob,
        HUB: hub,
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)  # boto3 caches a session with other credentials


def found_in(output: str | bytes) -> list[str]:
    """Return the canaries that the output contains, in upper or lower case."""
    text = (output if isinstance(output, str) else output.decode(errors="replace")).lower()
    return [canary for canary in CANARIES if canary.lower() in text]


STORES = (
    f"dynamodb://{KEY_ID}:{SECRET}@leases?region=eu-west-1",
    f"dynamodb://leases?region=eu-west-1&X-Amz-Signature={SIGNATURE}",
    f"dynamodb://leases?region=eu-west-1&endpoint=http://ann:{SECRET}@127.0.0.1:1",
    f"s3://{KEY_ID}:{SECRET}@bucket/prefix?region=eu-west-1",
    f"s3://bucket/prefix?X-Amz-Security-Token={TOKEN}",
    f"azblob://account:{AZURE}@account/container",
    f"azblob://account/container?sv=2024-01-01&sig={SIGNATURE}",
    f"azblob://account/container?endpoint=https://account.blob.core.windows.net?sig={SIGNATURE}",
    f"https://account.blob.core.windows.net/container?sv=2024&sig={SIGNATURE}",
    f"DefaultEndpointsProtocol=https;AccountName=account;AccountKey={AZURE}",
)
SOURCES = (
    f"kinesis://{KEY_ID}:{SECRET}@orders?region=eu-west-1",
    f"kinesis://orders?region=eu-west-1&endpoint=http://ann:{SECRET}@127.0.0.1:1",
    f"kinesis://orders?region=eu-west-1&X-Amz-Signature={SIGNATURE}",
    f"eventhubs://name:{AZURE}@place/hub",
    f"eventhubs://name:{SECRET}@place/hub",
    f"eventhubs://place/hub?SharedAccessKey={AZURE}",
    f"Endpoint=sb://{NAMESPACE}/;SharedAccessKeyName=name;SharedAccessKey={AZURE}",
)
OF_STORES = {
    "leases": ["{}"],
    "explain": ["{}", "--for", "0"],
    "what-if": ["{}", "--add", "1", "--for", "0"],
    "serve": ["{}", "--port", "0"],
    "reset": ["{}", "--to", "trim_horizon", "--dry-run"],
    "copy-leases": ["{}", "sqlite://to.db"],
    "consume": ["kinesis://orders?region=eu-west-1", "--store", "{}", "--events"],
}
OF_SOURCES = {
    "consume": ["{}", "--store", "memory://canaries", "--events"],
    "produce": ["{}", os.devnull],
    "leases": ["sqlite://here.db", "--source", "{}"],
}


@pytest.mark.parametrize(
    ("command", "url"),
    [(command, url) for command in OF_STORES for url in STORES],
)
@pytest.mark.usefixtures("planted")
def test_command_does_not_repeat_credentials_of_a_store_url(
    command: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The parts of an AWS secret that contains slashes, as many do, are not repeated either."""
    monkeypatch.chdir(tmp_path)
    _check_rejection([command, *(word.format(url) for word in OF_STORES[command])], caplog)


@pytest.mark.parametrize("url", SOURCES)
@pytest.mark.parametrize("command", OF_SOURCES)
@pytest.mark.usefixtures("planted")
def test_command_does_not_repeat_credentials_of_a_source_url(
    command: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    open_store("sqlite://here.db").close()
    _check_rejection([command, *(word.format(url) for word in OF_SOURCES[command])], caplog)


def _check_rejection(arguments: list[str], caplog: pytest.LogCaptureFixture) -> None:
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, found_in(result.output + repr(result.exception) + caplog.text)) == (2, [])
    assert result.stderr.startswith(f"leasehold {arguments[0]}: ")


@pytest.mark.parametrize("url", [*STORES, *SOURCES])
def test_opening_a_url_raises_none_of_its_credentials(url: str) -> None:
    """Applications that embed a store log its exceptions."""
    for open_url in (open_store, open_source):
        with pytest.raises(ValueError, match="URL") as exc_info:
            open_url(url)
        assert found_in(str(exc_info.value) + repr(exc_info.value)) == []


@pytest.mark.usefixtures("planted")
def test_repr_and_str_hide_credentials() -> None:
    kinesis = open_source("kinesis://orders?region=eu-west-1&endpoint=http://127.0.0.1:1")
    hub = open_source(f"eventhubs://{NAMESPACE}/hub")
    worker = Worker(store=open_store("memory://canaries"), source=kinesis, me="ann", config=Config())
    secret = os.environ[HUB]
    objects: list[object] = [kinesis, hub, worker, Runner(worker, lambda _: None)]
    objects += [
        access_by_connection_string(secret, NAMESPACE, "hub", "$Default"),
        parse_event_hubs_options({"lease.store": "sqlite://x"}),
    ]
    objects += [parse_kinesis_options({"kinesis.streamName": "orders", "lease.store": "sqlite://x"})]
    for shown_object in objects:
        assert found_in(f"{shown_object!r} {shown_object!s}") == []
    kinesis.close()
    hub.close()


SPARK: dict[str, tuple[Callable[[dict[str, str]], Any], dict[str, str]]] = {
    "kinesis": (KinesisLeased, {"kinesis.streamName": "orders", "kinesis.region": "eu-west-1"}),
    "eventhubs": (EventHubsLeased, {}),
}


@pytest.mark.parametrize("kind", SPARK)
@pytest.mark.usefixtures("planted")
def test_spark_files_and_tasks_hold_no_credential(kind: str) -> None:
    """Many users can read checkpoint folders, and Spark sends a pickle of the reader to every executor."""
    source, options = SPARK[kind]
    spark_source = source({**options, "lease.store": "sqlite://x"})
    reader = spark_source.streamReader(from_arrow_schema(spark_source._parse_source_options()[0].columns.schema))  # noqa: SLF001  its own columns
    assert found_in(json.dumps(reader.initialOffset())) == []
    assert found_in(cloudpickle.dumps(reader)) == []  # type: ignore[no-untyped-call]  # Spark's own
    assert found_in(repr(reader)) == []


@pytest.mark.services
@pytest.mark.usefixtures("planted")
def test_worker_and_its_tools_leave_no_credential_anywhere(
    moto_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Users who may not read the stream may see logs, events, metrics, command lines, rows and reports."""
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "console")
    kinesis = boto3.client("kinesis", endpoint_url=moto_url, region_name="eu-west-1")
    kinesis.create_stream(StreamName="canaries", ShardCount=1)
    kinesis.put_record(StreamName="canaries", Data=b"x", PartitionKey="a")
    kinesis.close()
    options = f"region=eu-west-1&endpoint={moto_url}"
    table = f"dynamodb://canaries?{options}"
    worker_options = ["--from", "trim_horizon", "--log", "json", "--verbose"]
    outputs = [
        *_run_worker(
            [f"kinesis://canaries?{options}&wire=json", "--store", table, "--events", *worker_options], tmp_path
        )
    ]
    page = tmp_path / "page.html"
    for arguments in (
        ["leases", table, "--json"],
        ["explain", table, "--for", "0"],
        ["serve", table, "--once", str(page)],
    ):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        outputs.append(result.output)
    store = open_store(table, write=False)
    outputs += [page.read_text(), repr(store), repr(store.list())]
    store.close()
    assert [found_in(output) for output in outputs] == [[]] * len(outputs)


def _run_worker(arguments: list[str], folder: Path) -> Iterator[str]:
    """Run a worker until it has read a record, and stop it. Yield its command line, its events and its log."""
    out, log = folder / "out", folder / "log"
    command = [sys.executable, "-c", "from leasehold.adapters.cli import run; run()", "consume", *arguments]
    with out.open("w") as stdout, log.open("w") as stderr, child(command, stdout=stdout, stderr=stderr) as worker:
        end = time.monotonic() + WAIT
        while '"record"' not in out.read_text():
            assert (worker.poll(), time.monotonic() < end) == (None, True), log.read_text()
            time.sleep(0.05)
        if (line := Path(f"/proc/{worker.pid}/cmdline")).exists():
            yield line.read_text()
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(WAIT) == 0, log.read_text()
    assert "resource_metrics" in out.read_text() + log.read_text()
    yield out.read_text()
    yield log.read_text()
