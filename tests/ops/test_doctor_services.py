"""Tests that `leasehold doctor` finds denied permissions and foreign tables on local services, and changes nothing."""

import json
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import boto3
import pytest
from psycopg import connect
from standins.careless_line import careless_line
from typer.testing import CliRunner
from types_boto3_dynamodb import DynamoDBClient
from waiters import AT_ONCE, until

from leasehold.adapters.cli.steer.doctor import app
from leasehold.adapters.ops.doctor.attempts import Finding, try_rights
from leasehold.adapters.ops.doctor.event_hubs import trials as hub_trials
from leasehold.adapters.sources.event_hubs.poller import open_url as open_hub
from leasehold.balancer.model import TRIM_HORIZON, Lease
from leasehold.stores.objects.blob import CONNECTION_STRING_VARIABLE
from leasehold.stores.urls import open_store
from leasehold_lab.contract.actors import create_lease_with_owner
from leasehold_lab.standins.hubs.event_hubs import event_hubs
from leasehold_lab.standins.node import Service
from leasehold_lab.standins.postgres import build_conninfo, build_store_url
from leasehold_lab.standins.tables import TableStreams, run_table_server

if TYPE_CHECKING:
    from types_boto3_kinesis import KinesisClient

pytestmark = pytest.mark.services

CANARY = "hunter2canary"
KEY = "aHVudGVyMmNhbmFyeQ=="
"""`CANARY` in base64, as the key of an Azure account has to be."""


@pytest.fixture(scope="module")
def stream(kinesis_client: "KinesisClient") -> str:
    """Return the name of a stream with two shards and one record."""
    name = f"examined-{uuid4().hex[:8]}"
    kinesis_client.create_stream(StreamName=name, ShardCount=2)
    kinesis_client.get_waiter("stream_exists").wait(StreamName=name, WaiterConfig=AT_ONCE)
    kinesis_client.put_record(StreamName=name, Data=b"1", PartitionKey="k")
    return name


@pytest.fixture
def source(stream: str, kinesis_url: str) -> str:
    return f"kinesis://{stream}?endpoint={kinesis_url}"


def run_doctor(*arguments: str) -> tuple[int, dict[str, Any]]:
    """Run `leasehold doctor --json`, and return its exit status and its findings by name."""
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.stderr == ""
    return result.exit_code, {finding["what"]: finding for finding in json.loads(result.stdout)["findings"]}


def states(findings: dict[str, Any], prefix: str) -> dict[str, str]:
    """Return the states of the findings whose names start with this prefix. The prefix is removed from the keys."""
    return {
        name.removeprefix(prefix): finding["state"] for name, finding in findings.items() if name.startswith(prefix)
    }


def test_a_healthy_fleet_passes_and_its_table_is_unchanged(
    source: str, dynalite_url: str, dynalite_client: DynamoDBClient
) -> None:
    table = f"examined-{uuid4().hex[:8]}"
    url = f"dynamodb://{table}?endpoint={dynalite_url}"
    store = open_store(url)
    for number in range(2):
        create_lease_with_owner(store, Lease(f"shardId-{number:012}", owner=f"w-{number}"))
    store.close()
    items_before = dynalite_client.scan(TableName=table)["Items"]
    status, findings = run_doctor(source, "--store", url)
    assert (status, {finding["state"] for finding in findings.values()}) == (0, {"ok"})
    rights = {"DescribeTable", "Scan", "BatchGetItem", "DeleteItem", "UpdateItem", "PutItem"}
    assert states(findings, "dynamodb:").keys() == rights
    assert states(findings, "kinesis:").keys() == {
        "DescribeStreamSummary",
        "ListShards",
        "GetShardIterator",
        "GetRecords",
    }
    assert "2 leases of this stream, and 2 owners" in findings["table"]["says"]
    assert "2 open shards, 2 workers" in findings["cost"]["says"]
    protections = "deletion protection: unknown, point-in-time recovery: unknown"  # dynalite reports neither
    assert protections in findings["dynamodb:DescribeTable"]["says"]
    assert dynalite_client.scan(TableName=table)["Items"] == items_before


def test_a_read_only_check_writes_nothing(source: str, dynalite_url: str) -> None:
    table = f"examined-{uuid4().hex[:8]}"
    open_store(f"dynamodb://{table}?endpoint={dynalite_url}").close()
    with careless_line(dynalite_url) as proxy:
        status, findings = run_doctor(source, "--store", f"dynamodb://{table}?endpoint={proxy.url}", "--read-only")
    assert status == 0
    assert set(proxy.requests) == {"DescribeTable", "DescribeContinuousBackups", "Scan", "BatchGetItem"}
    assert findings["conditional writes"]["state"] == "unknown"


def test_a_service_that_ignores_conditions_is_reported_and_cleaned(
    source: str, dynalite_url: str, dynalite_client: DynamoDBClient
) -> None:
    table = f"examined-{uuid4().hex[:8]}"
    open_store(f"dynamodb://{table}?endpoint={dynalite_url}").close()
    with careless_line(dynalite_url, "PutItem", "UpdateItem") as proxy:
        status, findings = run_doctor(source, "--store", f"dynamodb://{table}?endpoint={proxy.url}")
    assert status == 1
    assert "the service ignores the conditions of writes" in findings["dynamodb:UpdateItem"]["says"]
    assert dynalite_client.scan(TableName=table)["Items"] == []


def test_a_missing_table_is_not_created(source: str, dynalite_url: str, dynalite_client: DynamoDBClient) -> None:
    table = f"absent-{uuid4().hex[:8]}"
    status, findings = run_doctor(source, "--store", f"dynamodb://{table}?endpoint={dynalite_url}")
    assert (status, findings["dynamodb:DescribeTable"]["state"]) == (0, "unknown")
    assert "dynamodb:CreateTable, not tried" in findings["dynamodb:DescribeTable"]["says"]
    assert table not in dynalite_client.list_tables()["TableNames"]
    status, findings = run_doctor(source.replace("examined", "no-such"), "--store", "memory://absent")
    assert (status, findings["kinesis:DescribeStreamSummary"]["state"]) == (1, "wrong")


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"order_id": {"S": "7"}}, "its key is order_id (S, HASH), and a lease table's is leaseKey"),
        ({"leaseKey": {"S": "7"}, "total": {"N": "3"}}, "none of its 1 rows is a lease"),
    ],
)
def test_the_table_of_another_application_is_recognized(
    source: str, dynalite_url: str, dynalite_client: DynamoDBClient, row: dict[str, Any], says: str
) -> None:
    table, key = f"orders-{uuid4().hex[:8]}", next(iter(row))
    dynalite_client.create_table(
        TableName=table,
        KeySchema=[{"AttributeName": key, "KeyType": "HASH"}],
        AttributeDefinitions=[{"AttributeName": key, "AttributeType": "S"}],
        BillingMode="PAY_PER_REQUEST",
    )
    dynalite_client.get_waiter("table_exists").wait(TableName=table, WaiterConfig=AT_ONCE)
    dynalite_client.put_item(TableName=table, Item=row)
    status, findings = run_doctor(source, "--store", f"dynamodb://{table}?endpoint={dynalite_url}")
    assert (status, findings["table"]["state"]) == (1, "wrong")
    assert says in findings["table"]["says"]
    assert dynalite_client.scan(TableName=table)["Items"] == [row]


def _reset_auth(moto_url: str, calls: str) -> None:
    request = urllib.request.Request(  # noqa: S310  moto on this machine
        f"{moto_url}/moto-api/reset-auth", calls.encode(), {"Content-Type": "text/plain"}, method="POST"
    )
    urllib.request.urlopen(request).close()  # noqa: S310  moto on this machine


@pytest.fixture
def rights(moto_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Create a user in moto who has only some permissions, and yield the user's secrets."""
    iam, name = boto3.client("iam", endpoint_url=moto_url), f"worker-{uuid4().hex[:8]}"
    allowed_actions = [
        "kinesis:*",
        "dynamodb:DescribeTable",
        "dynamodb:Scan",
        "dynamodb:PutItem",
        "dynamodb:DeleteItem",
    ]
    policy = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": allowed_actions, "Resource": "*"}]}
    iam.create_user(UserName=name)
    iam.put_user_policy(UserName=name, PolicyName="worker", PolicyDocument=json.dumps(policy))
    key = iam.create_access_key(UserName=name)["AccessKey"]
    iam.close()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key["AccessKeyId"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", key["SecretAccessKey"])
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    _reset_auth(moto_url, "0")
    yield [key["SecretAccessKey"], key["AccessKeyId"]]
    _reset_auth(moto_url, "inf")


@pytest.fixture
def at_moto(moto_url: str) -> tuple[str, str]:
    """Create a stream and a table on moto, and return their URLs."""
    name = f"denied-{uuid4().hex[:8]}"
    client = boto3.client("kinesis", endpoint_url=moto_url)
    client.create_stream(StreamName=name, ShardCount=1)
    client.close()
    store = f"dynamodb://{name}?endpoint={moto_url}"
    open_store(store).close()
    return f"kinesis://{name}?endpoint={moto_url}", store


def test_each_denied_right_is_reported(at_moto: tuple[str, str], rights: list[str]) -> None:
    result = CliRunner().invoke(app, [at_moto[0], "--store", at_moto[1], "--json"])
    findings = {finding["what"]: finding for finding in json.loads(result.stdout)["findings"]}
    assert result.exit_code == 1
    assert {right for right, state in states(findings, "").items() if state == "wrong"} == {
        "dynamodb:BatchGetItem",
        "dynamodb:UpdateItem",
    }
    assert findings["dynamodb:UpdateItem"]["todo"] == "allow dynamodb:UpdateItem"
    assert findings["conditional writes"]["state"] == "unknown"
    assert not [secret for secret in rights if secret in result.output]


def test_buckets_and_containers_are_unchanged(
    source: str, moto_url: str, azurite_connection: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = f"examined-{uuid4().hex[:8]}"
    url = f"s3://{bucket}/fleet?region=eu-west-1&endpoint={moto_url}"
    status, findings = run_doctor(source, "--store", url)
    assert (status, findings["s3:ListBucket"]["state"]) == (0, "unknown")
    open_store(url).close()
    status, findings = run_doctor(source, "--store", url)
    assert (status, {finding["state"] for finding in findings.values()}) == (0, {"ok"})
    assert states(findings, "s3:").keys() == {"ListBucket", "GetObject", "PutObject", "DeleteObject"}
    assert "US$" in findings["cost"]["says"]
    client = boto3.client("s3", endpoint_url=moto_url)
    assert client.list_objects_v2(Bucket=bucket)["KeyCount"] == 0
    client.close()
    monkeypatch.setenv(CONNECTION_STRING_VARIABLE, azurite_connection)
    container = f"azblob://devstoreaccount1/{bucket}?prefix=fleet"
    status, findings = run_doctor(source, "--store", container)
    assert (status, findings["blobs/read (list)"]["state"]) == (0, "unknown")
    open_store(container).close()
    status, findings = run_doctor(source, "--store", container)
    assert (status, {finding["state"] for finding in findings.values()}) == (0, {"ok"})
    assert "US$" not in findings["cost"]["says"]


@pytest.mark.slow
def test_a_hub_is_examined_while_a_worker_reads_it(
    amqp_engine: None,  # noqa: ARG001  it skips the test if there is no engine
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The check does not take the partition from its worker, and notices a missing consumer group."""
    with event_hubs({}) as hubs:
        hubs.create("orders", 1, ("$Default",))
        monkeypatch.setenv("EVENTHUBS_CONNECTION_STRING", hubs.connection_string())
        hub_path = f"{hubs.namespace}/orders"
        status, findings = run_doctor(f"eventhubs://{hub_path}", "--store", "memory://hub")
        assert (status, set(states(findings, "Listen").values())) == (0, {"ok"})
        worker = open_hub(hub_path, {})
        reader = worker.open(Lease("0", stream=worker.stream, epoch=3), TRIM_HORIZON)
        hubs.put("orders", "0", ["a"])
        until(lambda: reader.read().records)
        listing_finding, offset_finding, receive_finding = findings_on_hub(hub_path)
        assert {listing_finding.state, offset_finding.state, receive_finding.state} == {"ok"}
        assert "a worker reads partition 0 undisturbed" in receive_finding.says
        assert [item["epoch"] for item in hubs.list_partitions("orders")[0]["readers"]] == [3]
        worker.close()
        assert [item.state for item in findings_on_hub(hub_path, group="absent")] == ["ok", "ok", "wrong"]


def findings_on_hub(hub_path: str, **options: str) -> list[Finding]:
    """Try the permissions on this hub, and return the findings."""
    (trial,) = hub_trials(hub_path, options)
    with closing(trial):
        return list(try_rights(trial, read_only=False))


@pytest.mark.parametrize(
    "words",
    [
        ["kinesis://orders?endpoint=http://ann:{canary}@127.0.0.1:1", "--store", "memory://m"],
        ["kinesis://orders", "--store", "dynamodb://t-1?endpoint=http://ann:{canary}@127.0.0.1:1"],
        ["kinesis://{canary}@orders", "--store", "memory://m"],
        ["kinesis://orders", "--store", "azblob://account/c"],
        ["eventhubs://ns/hub", "--store", "memory://m"],
        ["kinesis://orders", "--store", "dynamodb://t-1"],
        ["kinesis://orders", "--store", "s3://bucket/p"],
    ],
)
def test_no_credential_is_printed(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", CANARY)
    monkeypatch.setenv("AWS_SESSION_TOKEN", CANARY)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://ann:{CANARY}@127.0.0.1:1")
    blob_settings = f"BlobEndpoint=http://127.0.0.1:1/account;SharedAccessSignature=sv=2024&sig={CANARY}"
    monkeypatch.setenv(CONNECTION_STRING_VARIABLE, f"AccountName=account;AccountKey={KEY};{blob_settings}")
    hub = f"Endpoint=sb://ns.servicebus.windows.net/;SharedAccessKeyName=k;SharedAccessKey={CANARY}"
    monkeypatch.setenv("EVENTHUBS_CONNECTION_STRING", hub)
    for more_arguments in ([], ["--json"]):
        result = CliRunner().invoke(app, [argument.format(canary=CANARY) for argument in words] + more_arguments)
        assert result.exit_code in {1, 2}
        assert CANARY not in result.output
        assert KEY not in result.output


def test_each_right_on_the_stream_of_a_table_is_tried(tmp_path: Path) -> None:
    table = TableStreams()
    with run_table_server(table) as endpoint:
        arguments = (f"dynamodb-streams://orders?endpoint={endpoint}", "--store", f"sqlite:///{tmp_path}/leases.db")
        rights = ("DescribeTable", "DescribeStream", "GetShardIterator", "GetRecords")
        status, findings = run_doctor(*arguments)
        assert (status, states(findings, "dynamodb:")) == (0, dict.fromkeys(rights, "ok"))
        assert table.arn in findings["dynamodb:DescribeTable"]["says"]
        table.denied.add("GetShardIterator")
        status, findings = run_doctor(*arguments)
        expected = {"GetShardIterator": "wrong", "GetRecords": "unknown"}
        assert (status, states(findings, "dynamodb:")) == (1, dict.fromkeys(rights, "ok") | expected)
        assert findings["dynamodb:GetShardIterator"]["todo"] == "allow dynamodb:GetShardIterator"
        table.status = ""
        status, findings = run_doctor(*arguments)
        assert (status, states(findings, "dynamodb:")) == (1, {"DescribeTable": "wrong"})


def test_a_part_of_a_shared_table_is_examined_by_its_prefix(source: str, dynalite_url: str) -> None:
    """A worker on a part of a shared table needs the permission for a query instead of a scan."""
    table = f"shared-{uuid4().hex[:8]}"
    url = f"dynamodb://{table}?prefix=orders/&endpoint={dynalite_url}"
    status, findings = run_doctor(source, "--store", url)
    assert (status, findings["dynamodb:DescribeTable"]["state"]) == (0, "unknown")
    with closing(open_store(url)) as store:
        create_lease_with_owner(store, Lease("shardId-000000000000", owner="w-0"))
    status, findings = run_doctor(source, "--store", url)
    assert (status, {finding["state"] for finding in findings.values()}) == (0, {"ok"})
    rights = {"DescribeTable", "Query", "BatchGetItem", "DeleteItem", "UpdateItem", "PutItem"}
    assert states(findings, "dynamodb:").keys() == rights
    status, findings = run_doctor(source, "--store", url.replace("prefix=orders/&", ""))
    assert (status, "add ?prefix=" in findings["table"]["says"]) == (1, True)


def test_a_postgresql_table_is_examined_and_unchanged(source: str, postgres_service: Service) -> None:
    table = f"examined_{uuid4().hex[:8]}"
    url = build_store_url(postgres_service, table)
    status, findings = run_doctor(source, "--store", url)
    assert (status, findings["SELECT"]["state"]) == (0, "unknown")
    with closing(open_store(url)) as store:
        create_lease_with_owner(store, Lease("shardId-000000000000", owner="w-0"))
        listing_before = store.list()
        status, findings = run_doctor(source, "--store", url)
        assert (status, {finding["state"] for finding in findings.values()}) == (0, {"ok"})
        assert {"SELECT", "INSERT", "UPDATE", "DELETE", "standbys", "conditional writes"} <= findings.keys()
        assert "no standby follows it" in findings["standbys"]["says"]
        assert store.list() == listing_before
    with connect(build_conninfo(postgres_service), autocommit=True) as connection:
        for statement in ("CREATE ROLE r_{} LOGIN", "GRANT SELECT ON {} TO r_{}"):
            connection.execute(statement.replace("{}", table).encode())
    status, findings = run_doctor(source, "--store", url.replace("user=tester", f"user=r_{table}"))
    assert status == 1
    assert [findings[right]["todo"] for right in ("INSERT", "UPDATE", "DELETE")] == [
        f"allow {right}" for right in ("INSERT", "UPDATE", "DELETE")
    ]
