"""`leasehold tables` finds lease tables where they are, and shows only what it knows."""

import json
import time
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import uuid4

import boto3
import pytest
from azure.storage.blob import ContainerClient
from typer.testing import CliRunner

from leasehold.adapters.cli import copy_leases
from leasehold.adapters.cli.steer import tables
from leasehold.balancer.model import SHARD_END, Lease, Position
from leasehold.stores.objects.blob import CONNECTION_STRING
from leasehold.stores.swap import CONTROL, WISH, open_both
from leasehold.stores.urls import open_store
from leasehold.stores.writes import AnnotateLease, RenewLease
from leasehold_lab.contract.actors import done, placed
from leasehold_lab.standins.node import Service
from leasehold_lab.standins.postgres import DATABASE, USER, store_url

LEASES = (
    Lease("a:s-0", stream="a", shard="s-0", checkpoint=SHARD_END),
    Lease("a:s-1", stream="a", shard="s-1", checkpoint=Position("41"), owner="ann"),
)
COUNTED = {"leases": 2, "ended": 1, "malformed": 0, "owners": ["ann"], "streams": ["a"], "swap": [], "why": ""}
NOBODYS = {**COUNTED, "owners": []}
"""Likewise in layout `sessions`, where the leases of a session that was closed are nobody's."""


def made(url: str, leases: tuple[Lease, ...] = LEASES) -> str:
    """Create a table with these leases."""
    store = open_store(url)
    for lease in leases:
        placed(store, lease)
    store.close()
    return url


def told(*places: str, status: int = 0) -> list[dict[str, Any]]:
    """Return what the command prints about each table there."""
    result = CliRunner().invoke(tables.app, [*places, "--json"])
    assert result.exit_code == status, result.output
    found: list[dict[str, Any]] = json.loads(result.stdout)["tables"]
    return found


def test_a_file_is_one_table_and_a_missing_one_is_said(tmp_path: Path) -> None:
    """A look for a forgotten table does not create an empty one."""
    url = made(f"sqlite://{tmp_path}/leases.db")
    (one,) = told(url)
    assert {name: one[name] for name in COUNTED} == COUNTED
    assert (one["url"], one["layout"], one["protected"], one["created"]) == (url, "columns", None, None)
    assert abs(time.time() - one["written"]) < 600
    result = CliRunner().invoke(tables.app, [f"sqlite://{tmp_path}/none.db"])
    assert (result.exit_code, f"there is no file {tmp_path}/none.db" in result.output) == (1, True)
    assert not (tmp_path / "none.db").exists()


def test_a_table_in_layout_sessions_says_so(tmp_path: Path) -> None:
    """Users who look for tables to share with the KCL do not choose this one."""
    url = made(f"sqlite://{tmp_path}/leases.db?layout=sessions")
    for place in (url, url.partition("?")[0]):
        (one,) = told(place)
        assert {name: one[name] for name in (*COUNTED, "layout")} == {**NOBODYS, "layout": "sessions"}


def test_both_tables_of_a_swap_say_so(tmp_path: Path) -> None:
    """The control row does not count as a lease, nor the mark of a moved lease as a worker."""
    urls = tuple(f"sqlite://{tmp_path}/{name}.db" for name in ("from", "to"))
    made(urls[0], (LEASES[1],))
    with closing(open_both(*urls)) as both, closing(open_store(urls[1])) as target:
        (control,), (lease,) = target.get([CONTROL]), both.list().leases
        done(target.write(AnnotateLease(control, WISH, "to")))
        done(both.write(RenewLease(lease)))
    source, goal = told(*urls)
    assert [(each["leases"], each["ended"], each["owners"]) for each in (source, goal)] == [(1, 0, []), (1, 0, ["ann"])]
    assert [len(each["swap"]) for each in (source, goal)] == [1, 1]
    shown = CliRunner().invoke(tables.app, [*urls, "--wide"]).stdout
    assert all(each["swap"][0] in shown for each in (source, goal))


def test_a_backup_and_a_restore_keep_every_checkpoint(tmp_path: Path) -> None:
    """A restored fleet starts at the same positions, and with no number that handlers have already seen."""
    fleet = made(f"sqlite://{tmp_path}/leases.db")
    backup, anew = f"file://{tmp_path}/backup.jsonl", f"sqlite://{tmp_path}/anew.db"
    for words in ((fleet, backup), (backup, anew)):
        result = CliRunner().invoke(copy_leases.app, [*words, "--still-seconds", "0.1"])
        assert result.exit_code == 0, result.output
    before, after = (open_store(url, create=False).list().leases for url in (fleet, anew))
    assert [(lease.key, lease.checkpoint, lease.stream) for lease in after] == [
        (lease.key, lease.checkpoint, lease.stream) for lease in before
    ]
    assert [lease.owner for lease in after] == [None, None]
    assert all(new.epoch >= old.epoch for new, old in zip(after, before, strict=True))
    (one,) = told(backup)
    assert (one["layout"], one["leases"]) == ("lines of JSON", 2)


def test_rows_that_cannot_be_read_are_said(tmp_path: Path) -> None:
    """An incomplete backup does not look whole."""
    fleet, backup = made(f"sqlite://{tmp_path}/leases.db"), tmp_path / "backup.jsonl"
    assert CliRunner().invoke(copy_leases.app, [fleet, f"file://{backup}"]).exit_code == 0
    backup.write_text(backup.read_text(encoding="utf-8")[:-20], encoding="utf-8")
    (one,) = told(f"file://{backup}")
    assert (one["leases"], one["malformed"]) == (1, 1)
    assert "1 rows cannot be read" in CliRunner().invoke(tables.app, [f"file://{backup}", "--wide"]).stdout


def test_a_backup_of_a_living_fleet_needs_no_leave(tmp_path: Path) -> None:
    """Backups would not be made if the fleet had to be stopped for them. The previous backup is moved forward."""
    url = made(f"sqlite://{tmp_path}/leases.db")
    backup = tmp_path / "backup.jsonl"
    assert CliRunner().invoke(copy_leases.app, [url, f"file://{backup}"]).exit_code == 0
    first = backup.read_text(encoding="utf-8")
    assert CliRunner().invoke(copy_leases.app, [url, f"file://{backup}"]).exit_code == 0
    assert backup.read_text(encoding="utf-8") == first


@pytest.mark.services
def test_tables_of_postgresql_are_found_by_their_columns(postgres_service: Service) -> None:
    """Another program's table is not listed as leases, and one in another schema is not missed."""
    name = f"found_{uuid4().hex[:8]}"
    url = made(store_url(postgres_service, name))
    place = f"postgres://127.0.0.1:{postgres_service.port}/{DATABASE}?user={USER}"
    (one,) = (each for each in told(place) if name in each["url"])
    assert {key: one[key] for key in COUNTED} == COUNTED
    assert (one["url"], one["layout"]) == (f"{place}&table={name}", "columns")
    assert abs(time.time() - one["written"]) < 600
    (same,) = told(url)
    assert same["url"] == one["url"]


@pytest.mark.services
def test_tables_of_dynamodb_are_found_by_their_keys(dynalite_url: str) -> None:
    """Another application's data is not listed as leases, nor the parts of a shared table as one."""
    name = f"found-{uuid4().hex[:8]}"
    made(f"dynamodb://{name}?endpoint={dynalite_url}")
    for prefix in ("a/", "b/"):
        made(f"dynamodb://{name}-shared?prefix={prefix}&endpoint={dynalite_url}")
    client = boto3.client("dynamodb", endpoint_url=dynalite_url)
    key: Any = {"AttributeName": "id", "KeyType": "HASH"}
    kind: Any = {"AttributeName": "id", "AttributeType": "S"}
    client.create_table(
        TableName=f"{name}-orders", KeySchema=[key], AttributeDefinitions=[kind], BillingMode="PAY_PER_REQUEST"
    )
    client.close()
    found = [each for each in told(f"dynamodb://?endpoint={dynalite_url}") if name in each["url"]]
    at = f"endpoint={dynalite_url}"
    assert [(each["url"], each["layout"]) for each in found] == [
        (f"dynamodb://{name}-shared?prefix=a/&{at}", "KCL's, many applications"),
        (f"dynamodb://{name}-shared?prefix=b/&{at}", "KCL's, many applications"),
        (f"dynamodb://{name}?{at}", "KCL's"),
    ]
    for each in found:
        assert {key: each[key] for key in COUNTED} == COUNTED
        assert (each["written"], each["recoverable"]) == (None, None)
        assert abs(time.time() - each["created"]) < 600


@pytest.mark.services
def test_a_table_that_is_made_protected_is_and_says_so(moto_url: str) -> None:
    """Someone who cleans up cannot delete it with its checkpoints."""
    name = f"kept-{uuid4().hex[:8]}"
    made(f"dynamodb://{name}?protect=on&endpoint={moto_url}")
    made(f"dynamodb://{name}-not?endpoint={moto_url}")
    found = [each for each in told(f"dynamodb://?endpoint={moto_url}") if name in each["url"]]
    assert [(each["protected"], each["recoverable"]) for each in found] == [(False, False), (True, True)]
    client = boto3.client("dynamodb", endpoint_url=moto_url)
    with pytest.raises(client.exceptions.ClientError):
        client.delete_table(TableName=name)
    client.close()


@pytest.mark.services
def test_tables_of_a_bucket_and_a_container_are_found_by_their_names(
    moto_url: str, azurite_connection: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A data bucket is not read object by object, and blobs of Azure's SDKs are not taken for ours."""
    bucket = f"found-{uuid4().hex[:8]}"
    at = f"region=eu-west-1&endpoint={moto_url}"
    url = made(f"s3://{bucket}/fleet/one?{at}")
    client = boto3.client("s3", endpoint_url=moto_url)
    client.put_object(Bucket=bucket, Key="data/2026/part-0.parquet", Body=b"x")
    client.close()
    apart = made(f"s3://{bucket}/fleet/two?{at}&layout=sessions").removesuffix("&layout=sessions")
    found = told(f"s3://{bucket}?{at}")
    assert [{key: one[key] for key in COUNTED} for one in found] == [COUNTED, NOBODYS]
    assert [(one["url"], one["layout"], one["created"]) for one in found] == [
        (url, "objects", None),
        (apart, "sessions", None),
    ]
    monkeypatch.setenv(CONNECTION_STRING, azurite_connection)
    with ContainerClient.from_connection_string(azurite_connection, f"found-{uuid4().hex}") as blobs:
        blobs.create_container()
        place = f"azblob://devstoreaccount1/{blobs.container_name}"
        made(f"{place}?eventhub=ns.servicebus.windows.net/orders", (Lease("0", owner="ann"),))
        made(f"{place}?prefix=fleet/one")
        assert [(each["url"], each["layout"], each["leases"]) for each in told(place)] == [
            (f"{place}?eventhub=ns.servicebus.windows.net/orders&group=$default", "the Azure SDKs'", 1),
            (f"{place}?prefix=fleet/one", "objects", 2),
        ]


def test_people_see_a_line_for_each_table(tmp_path: Path) -> None:
    """A value that is not known is not shown as if it were."""
    url = made(f"sqlite://{tmp_path}/leases.db")
    shown = CliRunner().invoke(tables.app, [url]).stdout.splitlines()
    assert shown[0].split() == [*("TABLE", "LAYOUT", "LEASES", "ENDED", "OWNERS", "STREAMS"), *shown[0].split()[6:]]
    assert shown[1].split()[:7] == [url, "columns", "2", "1", "1", "a", "-"]
    assert shown[1].split()[8:] == ["-", "-", "-"]
