"""`leasehold consume` from outside: what it refuses, what it prints, and how it ends."""

import io
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner
from virtual_fleet import FaultyStore, four_shards

from adapters.cli.callables import load
from adapters.cli.consume import app
from adapters.events import EventLines
from adapters.holding import Holding
from adapters.identity import Identity
from adapters.runner import Runner
from adapters.simulator.stream import ListSource, Shelf, records
from adapters.worker import Worker
from balancer.config import Config
from balancer.model import TRIM_HORIZON, Lease

SOURCE, STORE = "kinesis://orders?region=eu-west-1", "memory://consume"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([SOURCE, "--store", STORE], "choose one of --handler module:function and --events"),
        ([SOURCE, "--store", STORE, "--events", "--handler", "json:dumps"], "choose one of --handler"),
        ([SOURCE, "--store", STORE, "--events", "--rules", "koala"], 'rules: "koala" is not one of kcl, kcl-rust'),
        ([SOURCE, "--store", STORE, "--events", "--lease-seconds", "0"], "lease_seconds: "),
        ([SOURCE, "--store", STORE, "--events", "--set", "max_lease=3"], "max_lease: unknown field"),
        ([SOURCE, "--store", STORE, "--events", "--set", "max_leases"], "'max_leases' is not of the form name=value"),
        ([SOURCE, "--store", STORE, "--events", "--initial-position", "AT_TIMESTAMP"], "timestamp_ms: is missing"),
        ([SOURCE, "--store", STORE, "--events", "--attempts", "0"], "attempts"),
        ([SOURCE, "--store", "redis://x", "--events"], "store URL: unknown scheme 'redis'"),
        ([SOURCE, "--store", STORE, "--events", "--metrics", "koala"], "metrics: there is no exporter 'koala'"),
        (["kafka://x", "--store", STORE, "--events"], "source URL: unknown scheme 'kafka'"),
        ([SOURCE, "--store", STORE, "--handler", "json"], "'json' is not of the form module:function"),
        ([SOURCE, "--store", STORE, "--handler", "json:nothing"], "module 'json' has no function 'nothing'"),
        ([SOURCE, "--store", STORE, "--handler", "no_such:f"], "there is no module 'no_such' here"),
    ],
)
def test_bad_usage_is_one_sentence_and_exit_status_2(arguments: list[str], says: str) -> None:
    """Without it a typing error would start a worker with other settings than meant, or print a stack."""
    done = CliRunner().invoke(app, arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_stream_out_of_reach_of_its_credentials_ends_with_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it whoever watches over the process would think that it had finished."""
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(variable, raising=False)
    done = CliRunner().invoke(app, [SOURCE, "--store", "memory://no-credentials", "--events"])
    assert (done.exit_code, done.stdout) == (1, "")
    assert "leasehold consume: no credentials for stream 'orders': set them in the environment" in done.stderr


def test_a_function_is_found_in_the_folder_the_command_is_called_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it a handler beside the user would not be found."""
    (tmp_path / "my_handlers.py").write_text("def handle(batch):\n    return len(batch.records)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["elsewhere"])
    assert load("my_handlers:handle").__name__ == "handle"


def test_event_lines_tell_every_record_before_its_checkpoint() -> None:
    """Without it nobody could judge from outside what was delivered."""
    store, out = FaultyStore(), io.StringIO()
    source = ListSource(four_shards()[:1], {"s-0": Shelf(records(2))})
    lines = EventLines("a-1", out, wall=lambda: 1.5)
    worker = Worker(store=store, source=source, me="a-1", config=Config(initial_position=TRIM_HORIZON))
    runner = Runner(worker, lines.handling)
    checkpoint, told = store.checkpoint, []

    def checkpoint_and_stop(*given: object, **named: object) -> object:
        runner.stop()
        told.append(out.getvalue().count('"record"'))
        return checkpoint(*given, **named)  # type: ignore[arg-type]

    store.checkpoint = checkpoint_and_stop  # type: ignore[assignment, method-assign]
    runner.run()
    said = [json.loads(line) for line in out.getvalue().splitlines()]
    assert told == [2]
    common = {"t": 1500, "worker": "a-1", "shard": "s-0"}
    assert said == [
        common | {"event": "initialize"},
        common
        | {
            "event": "record",
            "sequence_number": "100",
            "sub_sequence_number": 0,
            "partition_key": "k-0",
            "sha1": "b6589fc6ab0dc82cf12099d1c2d40ab994e8410c",
        },
        common
        | {
            "event": "record",
            "sequence_number": "101",
            "sub_sequence_number": 0,
            "partition_key": "k-1",
            "sha1": "356a192b7913b04c54574d18c28d46e6395428ab",
        },
        common | {"event": "stopped"},
    ]


def test_an_event_of_one_stream_among_several_says_which() -> None:
    """Without it equal shard ids of two streams could not be told apart."""
    out = io.StringIO()
    lease = Lease("1:orders:2:s-0", stream="1:orders:2", shard="s-0")
    holding = Holding(
        FaultyStore(), lease, identity=Identity("a-1", "p-1"), clock=lambda: 0.0, begun=0.0, lease_seconds=10.0
    )
    EventLines("a-1", out, wall=lambda: 1.5).happened("initialize", holding)
    assert json.loads(out.getvalue()) == {
        "t": 1500,
        "worker": "a-1",
        "event": "initialize",
        "stream": "1:orders:2",
        "shard": "s-0",
    }
