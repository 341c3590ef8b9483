"""Tests that the policies under docs/rights suffice for their purpose, and grant no unnecessary permission."""

from collections.abc import Callable
from itertools import count
from pathlib import Path
from threading import Thread
from typing import Any

import boto3
import pytest
from attrs import evolve, frozen
from policies import actions, policy
from standins.iam import REGION, Account, Document
from typer.testing import CliRunner
from waiters import WAIT, until

from leasehold.adapters.cli.leases import app as leases
from leasehold.adapters.cli.produce import app as produce
from leasehold.adapters.cli.steer.explain import app as explain
from leasehold.adapters.consumer.runner import Runner
from leasehold.adapters.ops.serving.watcher import FleetRecord, TableWatcher
from leasehold.adapters.ops.swapping import open_for_reading
from leasehold.adapters.sources.urls import open_source
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.config import Config
from leasehold.balancer.model import TRIM_HORIZON, Lease
from leasehold.errors import SourceError, StoreError
from leasehold.stores.urls import open_store
from leasehold_lab.contract.actors import create_lease_with_owner

pytestmark = pytest.mark.services

SHARD = "shardId-000000000001"
SUBSCRIBING = [action for action in actions("fan-out-consumer") if action not in actions("consumer")]

_numbers = count()


def _mark_slow_permissions(rights: list[str], *now: str) -> list[Any]:
    """Return each permission as a parameter. Those that are not in `now` are tested only by `make test-more`."""
    return [pytest.param(permission, marks=() if permission in now else pytest.mark.more) for permission in rights]


@frozen
class Place:
    """A stream and a table of one application in an account, under the names that users give them."""

    aws: Account
    name: str
    monkeypatch: pytest.MonkeyPatch
    earlier: int = 0

    @property
    def stream(self) -> str:
        """The URL of the stream. It requests JSON, because moto rejects CBOR."""
        return f"kinesis://{self.name}?region={REGION}&endpoint={self.aws.service.url}&wire=json"

    @property
    def table(self) -> str:
        return f"dynamodb://{self.name}?region={REGION}&endpoint={self.aws.service.url}"

    def policy(self, name: str, without: str = "") -> Document:
        """Return the policy in this file for the stream and the table."""
        return policy(name, without=without, STREAM=self.name, TABLE=self.name, CONSUMER=self.name)

    def become(self, *policies: Document) -> None:
        """From now on, use credentials that have only the permissions of these policies."""
        self.sign_in(*self.aws.user(*policies))

    def sign_in(self, key: str, secret: str) -> None:
        self.monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
        self.monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
        self.monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)  # boto3 caches a session with other credentials

    def asked(self) -> dict[str, bool]:
        """Return the permissions that were requested on these resources so far, and whether each was always granted."""
        grants: dict[str, bool] = {}
        for action, resource, granted in self.aws.asked()[self.earlier :]:
            if self.name in resource.split("/"):
                grants[action] = granted and grants.get(action, True)
        return grants


@pytest.fixture
def place(aws: Account, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Create a stream, and a table with one lease that has a parent. The environment's credentials may do anything."""
    return _create_place(aws, f"orders-{next(_numbers)}", monkeypatch)


@pytest.fixture
def lasting(aws: Account, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Return resources that several tests share, because these tests need no new ones."""
    if "lasting" in aws.client("kinesis").list_streams(Limit=1000)["StreamNames"]:
        return Place(aws, "lasting", monkeypatch, earlier=len(aws.asked()))
    return _create_place(aws, "lasting", monkeypatch)


def _create_place(aws: Account, name: str, monkeypatch: pytest.MonkeyPatch) -> Place:
    new_place = Place(aws, name, monkeypatch)
    kinesis, admin = aws.client("kinesis"), aws.admin.get_credentials()
    kinesis.create_stream(StreamName=new_place.name, ShardCount=2)
    kinesis.put_records(
        StreamName=new_place.name, Records=[{"Data": b"x", "PartitionKey": str(key)} for key in range(9)]
    )
    assert admin is not None
    new_place.sign_in(admin.access_key, admin.secret_key)
    store = open_store(new_place.table)
    create_lease_with_owner(store, Lease(SHARD, parents=("shardId-gone",), checkpoint=TRIM_HORIZON))
    store.close()
    return evolve(new_place, earlier=len(aws.asked()))


def run_worker(resources: Place, stream: str, enough: Callable[[list[bytes], str], object]) -> str:
    """Run a real worker until `enough` returns true, and return all errors."""
    read_data: list[bytes] = []
    errors: list[str] = []
    try:
        store, source = open_store(resources.table), open_source(stream)
        worker = Worker(store=store, source=source, me="ann", config=Config(initial_position=TRIM_HORIZON))
    except StoreError as fault:
        return str(fault)
    runner = Runner(worker, lambda batch: read_data.extend(record.data for record in batch.records))

    def run() -> None:
        try:
            runner.run()
        except (StoreError, SourceError) as fault:
            errors.append(str(fault))

    thread = Thread(target=run, daemon=True)
    thread.start()
    try:
        until(lambda: errors or enough(read_data, "".join(errors)), "nothing read, and nothing said")
    finally:
        runner.stop()
        thread.join(WAIT)
        store.close()
    return "".join(errors)


def test_a_consumer_needs_only_the_rights_of_its_file(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    place.become(place.policy("consumer"))
    errors = run_worker(place, place.stream, lambda read, _: len(read) == 9)
    assert (errors, [line for line in caplog.messages if "may not" in line]) == ("", [])
    assert place.asked() == dict.fromkeys(actions("consumer"), True)


@pytest.mark.parametrize(
    "right", _mark_slow_permissions(actions("consumer"), "dynamodb:UpdateItem", "kinesis:GetRecords")
)
def test_a_consumer_reports_each_missing_right(place: Place, right: str, caplog: pytest.LogCaptureFixture) -> None:
    """Each permission in the file is needed, and the error names the missing one."""
    place.become(place.policy("consumer", without=right))
    errors = run_worker(place, place.stream, lambda read, _: right in caplog.text or len(read) == 9)
    assert right in errors + caplog.text
    assert place.asked()[right] is False


def test_the_table_is_created_only_with_the_right_to_create_it(place: Place) -> None:
    """A worker needs the permission to create the table only if the table does not exist yet."""
    place.aws.client("dynamodb").delete_table(TableName=place.name)
    place.become(place.policy("consumer"))
    with pytest.raises(
        StoreError, match=r"AccessDeniedException: these credentials may not .*\(dynamodb:CreateTable\)"
    ):
        open_store(place.table)
    place.become(place.policy("consumer"), place.policy("make-table"))
    open_store(place.table).close()


@pytest.mark.parametrize(
    ("other", "message"),
    [("STREAM", "these credentials cannot read stream"), ("TABLE", "these credentials may not")],
    ids=["STREAM", "TABLE"],
)
def test_the_rights_cover_only_one_stream_and_one_table(
    place: Place, other: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    resource_names = {"STREAM": place.name, "TABLE": place.name, other: "another"}
    place.become(policy("consumer", **resource_names))
    errors = run_worker(place, place.stream, lambda read, _: read)
    assert message in errors + caplog.text


def test_a_fan_out_consumer_needs_only_the_rights_of_its_file(place: Place) -> None:
    """The test shows only that the request is permitted, because moto does not implement subscriptions."""
    place.become(place.policy("fan-out-consumer"))
    run_worker(place, f"{place.stream}&consumer={place.name}", lambda *_: "kinesis:SubscribeToShard" in place.asked())
    rights = place.asked()
    assert all(rights.values())
    assert set(SUBSCRIBING) <= set(rights)


@pytest.mark.parametrize("right", _mark_slow_permissions(SUBSCRIBING, "kinesis:SubscribeToShard"))
def test_a_fan_out_consumer_reports_each_missing_right(
    place: Place, right: str, caplog: pytest.LogCaptureFixture
) -> None:
    place.become(place.policy("fan-out-consumer", without=right))
    errors = run_worker(place, f"{place.stream}&consumer={place.name}", lambda *_: right in caplog.text)
    assert f"cannot read stream '{place.name}', because they lack {right}" in errors + caplog.text


@pytest.mark.parametrize("right", _mark_slow_permissions(["", *actions("producer")], "", "kinesis:PutRecords"))
def test_a_producer_reports_each_missing_right(lasting: Place, right: str, tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    lines.write_text("one\ntwo\n")
    lasting.become(lasting.policy("producer", without=right))
    result = CliRunner().invoke(produce, [lasting.stream.removesuffix("&wire=json"), str(lines), "--linger-ms", "0"])
    assert (result.exit_code, right in result.stderr) == (1 if right else 0, True)
    if not right:
        assert lasting.asked() == dict.fromkeys(actions("producer"), True)


@pytest.mark.parametrize("right", _mark_slow_permissions(["", *actions("read-only")], ""))
@pytest.mark.parametrize("tool", ["leases", "explain", "serve"])
def test_reading_tools_report_each_missing_right(lasting: Place, tool: str, right: str) -> None:
    """Tools that only read need no permission to write."""
    lasting.become(lasting.policy("read-only", without=right))
    status, output = _run_tool(tool, lasting.table)
    assert (status, right in output) == (1 if right else 0, True)
    if not right:
        assert lasting.asked() == dict.fromkeys(actions("read-only"), True)


def _run_tool(tool: str, table: str) -> tuple[int, str]:
    if tool == "serve":
        return _run_serve(table)
    app, options = {
        "leases": (leases, ["--json"]),
        "explain": (explain, ["--for", "0"]),
    }[tool]
    result = CliRunner().invoke(app, [table, *options])
    return result.exit_code, result.stderr


def _run_serve(table: str) -> tuple[int, str]:
    """Read a table as `serve` does."""
    record = FleetRecord(None)
    try:
        watcher = TableWatcher("orders", open_for_reading(table), Config(), record, every=1.0)
        watcher.look()
    except StoreError as fault:
        return 1, str(fault)
    finally:
        record.close()
    return (0, "") if watcher.is_fresh else (1, str(watcher.state()))
