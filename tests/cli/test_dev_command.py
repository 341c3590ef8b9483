"""Tests that `leasehold dev` starts local services, prints how to use them, and leaves nothing behind."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from typer.testing import CliRunner

from leasehold.errors import OutcomeUnknown
from leasehold.stores.urls import open_store
from leasehold_lab.commands import dev as dev_command
from leasehold_lab.commands.dev import app
from leasehold_lab.contract.actors import create_owned_lease
from leasehold_lab.demo.dev import RequestedStream, parse_stream
from leasehold_lab.standins.hubs import event_hubs

LEASEHOLD = (sys.executable, "-m", "leasehold.adapters.cli.main")


@pytest.mark.parametrize(
    ("text", "stream"),
    [
        ("orders=4", RequestedStream("orders", 4)),
        ("x", RequestedStream("x", 1)),
        ("kinesis:x=2", RequestedStream("x", 2)),
        ("eventhubs:flights=3", RequestedStream("flights", 3, "eventhubs")),
        ("table:carts=2", RequestedStream("carts", 2, "table")),
    ],
)
def test_a_stream_argument_sets_its_number_of_shards(text: str, stream: RequestedStream) -> None:
    assert parse_stream(text) == stream


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["orders=0"], "the number of shards is one from 1 to 1000"),
        (["orders=many"], "the number of shards"),
        (["=4"], "names no stream"),
        (["eventhubs://localhost/hub"], "names no stream; write NAME=SHARDS"),
        (["kafka:orders=4"], "names no stream; write NAME=SHARDS"),
        (["eventhubs:flights=0"], "the number of shards"),
        (["eventhubs:flights=2", "--folder", "/nowhere"], "--folder: event hubs and tables can only be kept in memory"),
        (["table:carts=2", "--folder", "/nowhere"], "--folder: event hubs and tables can only be kept in memory"),
        (["a=1", "a=2"], "named twice"),
        (["a=1", "eventhubs:a=2"], "named twice"),
    ],
)
def test_an_invalid_stream_is_reported_before_anything_starts(
    arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dev_command, "replace_aws_environment", lambda: None)
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert says in result.stderr


def test_a_missing_engine_is_reported_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dev_command, "replace_aws_environment", lambda: None)
    monkeypatch.setattr(event_hubs, "has_engine", lambda: False)
    result = CliRunner().invoke(app, ["eventhubs:flights=2"])
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert "pip install cffi python-qpid-proton" in result.stderr


@contextmanager
def run_dev(tmp_path: Path, *arguments: str) -> Iterator[tuple[dict[str, Any], "subprocess.Popen[str]"]]:
    """Run `leasehold dev --json`, and yield the JSON that it printed and its process."""
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    command = (*LEASEHOLD, "dev", *arguments, "--json")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as dev:
        assert dev.stdout is not None
        line = dev.stdout.readline()
        try:
            yield json.loads(line or "null"), dev
        finally:
            dev.send_signal(signal.SIGINT)
            dev.wait(60)


def list_leases(environment: dict[str, str]) -> list[dict[str, Any]]:
    """Return the leases that `leasehold leases` prints. Only the environment contains the table's endpoint."""
    command = (*LEASEHOLD, "leases", "dynamodb://orders-app", "--json")
    completed = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **environment})
    return list(json.loads(completed.stdout)["leases"])


@pytest.mark.more
@pytest.mark.services
def test_the_printed_urls_work_and_no_files_are_left(tmp_path: Path) -> None:
    with run_dev(tmp_path, "orders=2", "--rate", "50") as (dev_document, dev):
        consume = (*LEASEHOLD, "consume", "kinesis://orders", "--store", "dynamodb://orders-app", "--events")
        with subprocess.Popen(
            (*consume, "--from", "trim_horizon", "--set", "cycle_seconds=1", "--checkpoint-seconds", "1000"),
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **dev_document["environment"]},
        ) as worker:
            assert worker.stdout is not None
            shards: set[str] = set()
            while len(shards) < 2:
                event = json.loads(worker.stdout.readline())
                shards |= {event["shard"]} if event["event"] == "record" else set()
            rows = list_leases(dev_document["environment"])
            while not all("reach" in row.get("notes", {}) for row in rows):
                rows = list_leases(dev_document["environment"])
            worker.terminate()
            worker.communicate(timeout=60)
        assert len(rows) == 2
        assert dev_document["streams"]["orders"].startswith(
            "kinesis://orders?region=eu-west-1&endpoint=http://127.0.0.1:"
        )
    assert dev.returncode == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.more
@pytest.mark.services
def test_the_stream_of_a_table_is_read_and_nothing_is_left(tmp_path: Path) -> None:
    with run_dev(tmp_path, "table:carts=2", "--rate", "50") as (dev_document, dev):
        consume = (
            *LEASEHOLD,
            "consume",
            dev_document["streams"]["carts"],
            "--store",
            "dynamodb://carts-app",
            "--events",
        )
        environment = {**os.environ, **dev_document["environment"]}
        command = (*consume, "--from", "trim_horizon")
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as worker:
            assert worker.stdout is not None
            keys_by_shard: dict[str, set[str]] = {}
            while len(keys_by_shard) < 2:
                event = json.loads(worker.stdout.readline())
                if event["event"] == "record":
                    keys_by_shard.setdefault(event["shard"], set()).add(event["partition_key"])
            worker.terminate()
            worker.communicate(timeout=60)
        first_keys, second_keys = keys_by_shard.values()
        assert (first_keys & second_keys, '{"id":{"S":"sensor-00"}}' in first_keys | second_keys) == (set(), True)
    assert dev.returncode == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.more
@pytest.mark.services
@pytest.mark.usefixtures("amqp_engine")
def test_a_local_hub_is_read_and_nothing_is_left(tmp_path: Path) -> None:
    with run_dev(tmp_path, "eventhubs:flights=2", "--rate", "50") as (dev_document, dev):
        source, table = dev_document["streams"]["flights"], dev_document["tables"]["flights"]
        consume = (*LEASEHOLD, "consume", source, "--store", table, "--events", "--from", "trim_horizon")
        environment = {**os.environ, **dev_document["environment"]}
        with subprocess.Popen(consume, stdout=subprocess.PIPE, text=True, env=environment) as worker:
            assert worker.stdout is not None
            numbers_by_shard: dict[str, list[str]] = {}
            while len(numbers_by_shard) < 2:
                event = json.loads(worker.stdout.readline())
                if event["event"] == "record":
                    numbers_by_shard.setdefault(event["shard"], []).append(event["sequence_number"])
            list_command = (*LEASEHOLD, "leases", table, "--json")
            rows = json.loads(subprocess.check_output(list_command, text=True, env=environment))["leases"]
            worker.terminate()
            worker.communicate(timeout=60)
        assert (len(rows), len({row["owner"] for row in rows})) == (2, 1)
        assert {numbers[0] for numbers in numbers_by_shard.values()} == {"0"}
    assert dev.returncode == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.more
@pytest.mark.services
@pytest.mark.slow
def test_a_folder_keeps_streams_and_tables(tmp_path: Path) -> None:
    """With `--folder`, streams and tables still exist after a restart."""
    folder, temporary = tmp_path / "kept", tmp_path / "temporary"
    temporary.mkdir()
    with run_dev(temporary, "orders=2", "--folder", str(folder)) as (dev_document, _):
        produce = (*LEASEHOLD, "produce", dev_document["streams"]["orders"], "--json")
        completed = subprocess.run(
            produce,
            input="one\n",
            text=True,
            check=True,
            capture_output=True,
            env=dict(os.environ) | dev_document["environment"],
        )
        assert json.loads(completed.stdout)["UserRecordsPut"] == 1
        assert create_lease_table(dev_document["environment"]) == 0
    with run_dev(temporary, "orders=2", "--folder", str(folder)) as (dev_document, _):
        assert list_leases(dev_document["environment"]) == []


def create_lease_table(environment: dict[str, str]) -> int:
    """Create the lease table by opening its store, and return the exit status."""
    script = "from leasehold.stores.urls import open_store; open_store('dynamodb://orders-app').close()"
    return subprocess.run((sys.executable, "-c", script), check=False, env={**os.environ, **environment}).returncode


@pytest.mark.more
@pytest.mark.services
def test_the_printed_page_serves_the_leases(tmp_path: Path) -> None:
    command = (*LEASEHOLD, "dev", "orders=1")
    env = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as dev:
        assert dev.stdout is not None
        page = next(line.split()[-1] for line in iter(dev.stdout.readline, "") if "Page with the leases: " in line)
        with urlopen(f"{page}leases.json", timeout=30) as response:  # noqa: S310  on this machine
            (entry,) = json.load(response)
        dev.terminate()
        assert (dev.wait(60), entry["store"]) == (0, "dynamodb://orders-app")


@pytest.mark.more
@pytest.mark.services
def test_leases_are_stored_in_postgresql_on_request() -> None:
    """The command starts a PostgreSQL server, and stops it when it ends."""
    command = (*LEASEHOLD, "dev", "my-orders=1", "--postgres", "--json")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as dev:
        assert dev.stdout is not None
        ready = json.loads(dev.stdout.readline() or "null")
        table = ready["tables"]["my-orders"]
        assert re.fullmatch(r"postgres://127\.0\.0\.1:\d+/postgres\?user=tester&table=my_orders_app", table)
        assert ready["environment"]["STORE"] == table
        assert "AWS_ENDPOINT_URL_DYNAMODB" not in ready["environment"]
        store = open_store(table)
        create_owned_lease(store)
        store.close()
        dev.send_signal(signal.SIGINT)
        assert dev.wait(60) == 0
    with pytest.raises(OutcomeUnknown):
        open_store(table)
