"""The errors, the output and the exit status of the command `leasehold consume`."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from running import run_to_its_end
from typer.testing import CliRunner
from virtual_fleet import FaultyStore, four_shards

from leasehold.adapters import consuming
from leasehold.adapters.cli.consume import app
from leasehold.adapters.consumer.events import EventLines
from leasehold.adapters.consumer.runner import Runner
from leasehold.adapters.consuming import load_function
from leasehold.adapters.worker.annotations import Identity
from leasehold.adapters.worker.holding import Holding
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.config import Config
from leasehold.balancer.model import TRIM_HORIZON, Lease
from leasehold.errors import OutcomeUnknown
from leasehold.stores.protocol import Outcome, Store
from leasehold.stores.urls import open_store
from leasehold.stores.writes import CheckpointLease, Write
from leasehold_lab.simulator.world.world import ListSource, ShardRecords, create_records

SOURCE, STORE = "kinesis://orders?region=eu-west-1", "memory://consume"
SOURCE_BY_ARN = "kinesis://arn:aws:kinesis:eu-west-1:123456789012:stream/orders"


EVENTS = (SOURCE, "--store", STORE, "--events")
HANDLER = (SOURCE, "--store", STORE, "--handler")
SECRET = "hunter2"  # noqa: S105  a made-up password


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((SOURCE, "--store", STORE), "choose one of --handler module:function and --events"),
        ((*EVENTS, "--handler", "json:dumps"), "choose one of --handler"),
        ((*EVENTS, "--lease-seconds", "0"), "--lease-seconds: 0 s is less than 1 s"),
        ((*EVENTS, "--set", "max_leases"), "'max_leases' is not of the form name=value"),
        ((*EVENTS, "--initial-position", "AT_TIMESTAMP"), "in place of AT_TIMESTAMP write the time itself"),
        ((*EVENTS, "--from", "yesterday"), "--initial-position: 'yesterday' is neither"),
        ((*EVENTS, "--until", "now"), "slice: it begins (--from) at TRIM_HORIZON or at a time, not at LATEST"),
        (
            (*EVENTS, "--from", "now", "--until", "now-1h"),
            "slice: it begins (--from) no earlier than it ends (--until)",
        ),
        ((*EVENTS, "--from", "TRIM_HORIZON", "--until", "later"), "--until: 'later' is not a time such as"),
        ((*EVENTS, "--processes", "0"), "--processes: 0 is not a whole number above 0"),
        ((*EVENTS, "--concurrency", "2"), "--concurrency: it goes with --handler"),
        ((*EVENTS, "--linger-seconds", "2"), "--linger-seconds: it goes with --handler"),
        ((*HANDLER, "fnmatch:fnmatchcase", "--concurrency", "0"), "--concurrency: 0 is not a whole number above 0"),
        (("kafka://x", "--store", STORE, "--events"), "source URL: unknown scheme 'kafka'"),
        ((*HANDLER, "json:nothing"), "module 'json' has no function 'nothing'"),
        ((*HANDLER, "no_such:f"), "there is no module 'no_such' here"),
        ((*HANDLER, "fnmatch:fnmatch"), "does not fit: missing a required argument: 'pat'"),
        ((*HANDLER, "ast:walk"), "handler: a generator does nothing when it is called"),
        ((*EVENTS, "--dead-letter", "json:dumps"), "dead_letter: it is called with (batch,"),
        ((*EVENTS, "--dead-letter", "gopher://x"), "dead letter URL: unknown scheme 'gopher'"),
        ((*EVENTS, "--dead-letter", f"s3://key:{SECRET}@b"), "dead letter URL: credentials do not belong in it"),
        ((*EVENTS, "--lease-seconds", "10ms"), "--lease-seconds: 0.01 s is less than 1 s; a bare number is in seconds"),
        ((*EVENTS, "--set", "lease_seconds=0.5"), "--set lease_seconds: 0.5 s is less than 1 s"),
        ((*EVENTS, "--worker", ""), "worker: '' is not a worker id"),
        ((*EVENTS, "--handler-seconds", "0"), "--handler-seconds: 0 s is less than 0.01 s"),
        ((*EVENTS, "--dead-letter", SOURCE), "--dead-letter: it is the stream that is read"),
        ((*EVENTS, "--dead-letter", SOURCE_BY_ARN), "--dead-letter: it is the stream that is read"),
    ],
)
def test_bad_usage_prints_one_sentence_and_exits_with_2(arguments: tuple[str, ...], message: str) -> None:
    """Usage errors show neither a stack trace nor a secret."""
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert SECRET not in result.stderr


def test_missing_credentials_exit_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit status differs from that of a finished run, so that a supervisor can react."""
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(variable, raising=False)
    result = CliRunner().invoke(app, [SOURCE, "--store", "memory://no-credentials", "--events"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert "leasehold consume: no credentials for stream 'orders': set them in the environment" in result.stderr


def test_first_start_ends_if_the_stream_does_not_respond(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(variable, "test")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    unreachable_source = f"{SOURCE}&endpoint=http://127.0.0.1:9"
    result = CliRunner().invoke(app, [unreachable_source, "--store", "memory://nobody", "--events", "--no-wait"])
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert result.stderr.startswith("leasehold consume: ")
    assert "Could not connect to the endpoint URL" in result.stderr


@pytest.mark.parametrize(("wait", "requests"), [("--wait", 3), ("--no-wait", 1)])
def test_store_that_is_slow_at_start_is_asked_again(wait: str, requests: int, monkeypatch: pytest.MonkeyPatch) -> None:
    opened_urls: list[str] = []

    def open_slow_store(url: str, **options: Any) -> Store:  # noqa: ANN401  the signature of the replaced function
        opened_urls.append(url)
        if len(opened_urls) < 3:
            raise OutcomeUnknown("table 'orders': the service cannot be reached")
        return open_store(url, **options)

    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(consuming, "open_store", open_slow_store)
    monkeypatch.setattr(consuming, "FAULT_WAITS", (0.0, 0.0))
    result = CliRunner().invoke(app, [SOURCE, "--store", "memory://slow-to-answer", "--events", wait])
    assert (result.exit_code, len(opened_urls)) == (1, requests)
    assert ("the service cannot be reached" if wait == "--no-wait" else "no credentials") in result.stderr


def test_handler_is_found_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_handlers.py").write_text("def handle(batch):\n    return len(batch.records)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["elsewhere"])
    assert load_function("my_handlers:handle").__name__ == "handle"


def test_event_lines_show_each_record_before_its_checkpoint() -> None:
    store, output = FaultyStore(), io.StringIO()
    source = ListSource(four_shards()[:1], {"s-0": ShardRecords(create_records(2))})
    event_lines = EventLines("a-1", output, wall=lambda: 1.5)
    worker = Worker(store=store, source=source, me="a-1", config=Config(initial_position=TRIM_HORIZON))
    runner = Runner(worker, event_lines.handling)
    original_write, record_counts = store.write, []

    def stop_at_checkpoint(write: Write) -> Outcome:
        if isinstance(write, CheckpointLease):
            runner.stop()
            record_counts.append(output.getvalue().count('"record"'))
        return original_write(write)

    store.write = stop_at_checkpoint  # type: ignore[method-assign]
    run_to_its_end(runner)
    events = [json.loads(line) for line in output.getvalue().splitlines()]
    assert record_counts == [2]
    common_fields = {"t": 1500, "worker": "a-1", "shard": "s-0"}
    assert events == [
        common_fields | {"event": "initialize"},
        common_fields
        | {
            "event": "record",
            "sequence_number": "100",
            "sub_sequence_number": 0,
            "partition_key": "k-0",
            "sha1": "b6589fc6ab0dc82cf12099d1c2d40ab994e8410c",
            "epoch": 1,
        },
        common_fields
        | {
            "event": "record",
            "sequence_number": "101",
            "sub_sequence_number": 0,
            "partition_key": "k-1",
            "sha1": "356a192b7913b04c54574d18c28d46e6395428ab",
            "epoch": 1,
        },
        common_fields | {"event": "stopped"},
    ]


def test_event_names_its_stream_among_several() -> None:
    """Two streams may have equal shard ids."""
    output = io.StringIO()
    lease = Lease("1:orders:2:s-0", stream="1:orders:2", shard="s-0")
    holding = Holding(
        FaultyStore(), lease, identity=Identity("a-1", "p-1"), clock=lambda: 0.0, write_began=0.0, lease_seconds=10.0
    )
    EventLines("a-1", output, wall=lambda: 1.5).write_shard_event("initialize", holding)
    assert json.loads(output.getvalue()) == {
        "t": 1500,
        "worker": "a-1",
        "event": "initialize",
        "stream": "1:orders:2",
        "shard": "s-0",
    }
