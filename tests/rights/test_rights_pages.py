"""Tests that the files and pages of docs/rights agree with the permissions that the code uses."""

import json
import re
from pathlib import Path
from typing import Any

import boto3
import hcl2
import pytest
from policies import FOLDER, actions
from psycopg import connect
from standins.careless_line import careless_line
from standins.iam import REGION

from leasehold.adapters.sources.event_hubs import access as faults
from leasehold.adapters.sources.urls import open_source
from leasehold.balancer.model import TRIM_HORIZON, Lease
from leasehold.errors import StoreError
from leasehold.stores import postgres as postgres_store
from leasehold.stores.dynamodb import store as calls
from leasehold.stores.dynamodb.rows import KEY
from leasehold.stores.objects import blob
from leasehold.stores.protocol import Listing
from leasehold.stores.urls import open_store
from leasehold.stores.writes import RenewLease
from leasehold_lab.contract.actors import create_owned_lease
from leasehold_lab.standins.node import Service
from leasehold_lab.standins.postgres import build_conninfo
from leasehold_lab.standins.tables import TableStreams, run_table_server

PAGE = FOLDER.with_name("rights.md").read_text()
FILES = sorted(path.name for path in FOLDER.iterdir())
ROLES = {
    "Storage Blob Data Contributor": "ba92f5b4-2d11-453d-a403-e96b0029c9fe",
    "Storage Blob Data Reader": "2a2b9908-6ea1-4ae2-8e65-a410df84e7d1",
    "Azure Event Hubs Data Receiver": "a638d3c7-ab3a-418d-83e6-5f17a39d4fde",
}
"""The built-in roles of Azure, with their ids, which are the same in every tenant."""


def test_the_error_for_a_missing_right_lists_the_rights_of_the_files() -> None:
    worker_advice, reader_advice = calls.ADVICE["AccessDeniedException"].split("; ")[1:]
    names = re.findall(r"[A-Z][a-z]+(?:[A-Z][a-z]+)*\b", worker_advice)
    assert sorted(f"dynamodb:{name}" for name in names) == sorted(
        action for action in actions("consumer", "make-table") if action.startswith("dynamodb:")
    )
    assert reader_advice == "tools that only read need the first two"
    assert sorted(f"dynamodb:{name}" for name in names[:2]) == actions("read-only")


def test_a_table_stream_reader_uses_exactly_the_rights_of_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "demo")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "demo")
    table = TableStreams(open_shard_count=1)
    with run_table_server(table) as endpoint:
        source = open_source(f"dynamodb-streams://orders?region={REGION}&endpoint={endpoint}")
        (shard,) = source.shards()
        assert source.open(Lease(shard.id), TRIM_HORIZON).read().fault == ""
    file = json.loads((FOLDER / "aws-table-consumer.json").read_text())["Statement"]
    find_actions, read_actions, keep_actions = (set(statement["Action"]) for statement in file)
    assert {f"dynamodb:{operation}" for operation in table.asked} == find_actions | read_actions
    assert keep_actions == {action for action in actions("consumer") if action.startswith("dynamodb:")}


def test_a_fan_out_consumer_has_all_rights_of_a_polling_one() -> None:
    """A fan-out consumer polls the shards if the stream has no room for another consumer."""
    assert set(actions("consumer")) < set(actions("fan-out-consumer"))


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".json")])
def test_no_file_grants_a_wildcard(name: str) -> None:
    for statement in json.loads((FOLDER / name).read_text())["Statement"]:
        grant_json = json.dumps([statement["Action"], statement["Resource"]])
        assert "*" not in grant_json.replace("consumer/CONSUMER:*", "").replace("table/STREAM/stream/*", ""), name
        assert set(re.findall(r"\b[A-Z]{4,}\b", grant_json)) <= {"REGION", "ACCOUNT", "STREAM", "TABLE", "CONSUMER"}


def test_the_page_lists_exactly_the_files() -> None:
    assert sorted(set(re.findall(r"\(rights/([\w.-]+)\)", PAGE))) == FILES


def test_the_azure_roles_are_those_in_the_errors() -> None:
    script = (FOLDER / "azure-roles.sh").read_text()
    bicep = (FOLDER / "azure-roles.bicep").read_text()
    for role, identifier in ROLES.items():
        assert f'--role "{role}"' in script
        assert identifier in bicep
        assert role in bicep
        assert role in PAGE
    assert "Storage Blob Data Contributor" in Path(blob.__file__).read_text()
    assert "Azure Event Hubs Data Receiver" in Path(faults.__file__).read_text()


@pytest.mark.services
def test_a_worker_uses_the_table_of_the_terraform_file(moto_url: str) -> None:
    """If the file's key had another name, only the first worker would notice it.

    The test checks the syntax and the values of the file. Only `terraform validate` could show whether the provider
    accepts them.
    """
    table = _block(hcl2.loads((FOLDER / "lease-table.tf").read_text()), "resource", "aws_dynamodb_table", "leases")
    (attribute,), (recovery,) = table["attribute"], table["point_in_time_recovery"]
    assert (_text(table["name"]), recovery["enabled"], "merge(" in table["tags"]) == ("${var.table}", True, True)
    client = boto3.client("dynamodb", endpoint_url=moto_url, region_name=REGION)
    client.create_table(
        TableName="from-terraform",
        KeySchema=[{"AttributeName": _text(table["hash_key"]), "KeyType": "HASH"}],
        AttributeDefinitions=[{"AttributeName": _text(attribute["name"]), "AttributeType": _text(attribute["type"])}],
        BillingMode=_text(table["billing_mode"]),
        DeletionProtectionEnabled=table["deletion_protection_enabled"],
    )
    assert _text(attribute["name"]) == KEY
    store = open_store(f"dynamodb://from-terraform?region={REGION}&endpoint={moto_url}", create=False)
    assert store.list().leases == ()
    store.close()
    client.close()


def _block(document: dict[str, Any], *labels: str) -> Any:  # noqa: ANN401  whatever stands in the file
    """Return the block of this kind with these labels. The parser may keep the quotes around labels."""
    kind, *names = labels
    (inner,) = document[kind]
    for name in names:
        inner = inner.get(name) or inner[f'"{name}"']
    return inner


def _text(value: str) -> Any:  # noqa: ANN401  typed as the caller needs it
    return value.strip('"')


def test_a_shared_table_worker_uses_exactly_the_rights_of_its_file(dynalite_url: str) -> None:
    file = json.loads((FOLDER / "aws-shared-table-consumer.json").read_text())["Statement"]
    read_actions, find_actions, keep_actions = (statement["Action"] for statement in file)
    assert read_actions == json.loads((FOLDER / "aws-consumer.json").read_text())["Statement"][0]["Action"]
    client = boto3.client("dynamodb", endpoint_url=dynalite_url)
    with careless_line(dynalite_url) as line:
        url = f"dynamodb://rights-shared?prefix=a/&endpoint={line.url}"
        open_store(url).close()  # creates the table
        line.requests.clear()
        store = open_store(url, create=False)
        create_owned_lease(store)
        store.list()
        store.get(["none"])
        store.close()
    assert {f"dynamodb:{operation}" for operation in line.requests} == {find_actions, *keep_actions}
    client.close()
    assert file[2]["Condition"] == {"ForAllValues:StringEquals": {"dynamodb:LeadingKeys": ["PREFIX"]}}


def test_postgresql_users_have_the_documented_rights(postgres_service: Service) -> None:
    """A worker has all permissions that it needs, and a user who only reads cannot write."""
    with connect(build_conninfo(postgres_service), autocommit=True) as connection:
        connection.execute("CREATE DATABASE rights")
    url = f"postgres://127.0.0.1:{postgres_service.port}/rights"
    with connect(
        build_conninfo(postgres_service).replace("dbname=postgres", "dbname=rights"), autocommit=True
    ) as owner:
        owner.execute((FOLDER / "postgres.sql").read_bytes())
    worker = open_store(f"{url}?user=leases_worker", create=False)
    owned_lease = create_owned_lease(worker)
    reader = open_store(f"{url}?user=leases_reader", create=False, write=False)
    assert reader.list() == worker.list() == Listing((owned_lease,))
    with pytest.raises(StoreError, match="this user may not do that"):
        reader.write(RenewLease(owned_lease))
    worker.close()
    reader.close()


def test_the_documented_table_is_the_one_that_workers_create() -> None:
    created_columns = re.sub(r"--.*", "", postgres_store.SCHEMA).replace("{{}}", "{}").partition("(")[2]
    documented_columns = re.sub(r"--.*", "", (FOLDER / "postgres.sql").read_text()).partition("(")[2].partition(";")[0]
    assert created_columns.split() == documented_columns.split()
