"""`copy-leases` and `reset` from the command line, across stores and clouds."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from azure.storage.blob import ContainerClient
from typer.testing import CliRunner

from adapters.cli import copy_leases, reset
from balancer.model import SHARD_END, TRIM_HORIZON, Lease, Position
from stores.blob import CONNECTION_STRING
from stores.contract.actors import done, facts
from stores.memory import MemoryStore
from stores.protocol import Store
from stores.urls import open_store

AT_9, AT_10 = Position("9", 0, "4520"), Position("10", 0, "4530")
SHARDS = (
    Lease("s-0", checkpoint=SHARD_END, hash_range=(0, 9)),
    Lease("s-1", parents=("s-0",), checkpoint=Position("41", 3), hash_range=(0, 4)),
    Lease("s-2", parents=("s-0",), checkpoint=TRIM_HORIZON, hash_range=(5, 9)),
)


@pytest.fixture
def here() -> tuple[str, MemoryStore]:
    """A new table of this process, and its URL."""
    name = uuid4().hex
    return f"memory://{name}", MemoryStore(name)


def filled(url: str, leases: tuple[Lease, ...]) -> Store:
    """The store at this URL, with these leases."""
    store = open_store(url)
    for lease in leases:
        done(store.create(lease))
    return store


def ran(app: Any, *arguments: str) -> tuple[int, str]:  # noqa: ANN401  typer's own application
    """Exit status, and all that was printed."""
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.output


def copied(*arguments: str) -> tuple[int, list[tuple[str, str]]]:
    """Exit status, and what became of each lease."""
    status, output = ran(copy_leases.app, *arguments, "--json")
    return status, [(lease["key"], lease["do"]) for lease in json.loads(output)["leases"]]


@pytest.mark.services
def test_leases_go_round_the_clouds_and_come_back_whole(
    tmp_path: Path,
    dynalite_url: str,
    azurite_connection: str,
    moto_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A shard would start over, or before its parents, in the cloud its fleet moves to."""
    monkeypatch.setenv(CONNECTION_STRING, azurite_connection)
    name = f"round-{uuid4().hex}"
    stops = [
        f"sqlite://{tmp_path}/first.db",
        f"dynamodb://{name}?region=eu-west-1&endpoint={dynalite_url}",
        f"azblob://devstoreaccount1/{name}?prefix=fleet",
        f"s3://{name}/fleet?region=eu-west-1&endpoint={moto_url}",
        f"sqlite://{tmp_path}/last.db",
    ]
    filled(stops[0], SHARDS).close()
    for source, target in pairwise(stops):
        assert copied(source, target) == (0, [("s-0", "create"), ("s-1", "create"), ("s-2", "create")])
    assert [facts(lease) for lease in open_store(stops[-1]).list().leases] == list(SHARDS)


@pytest.mark.services
def test_a_hubs_checkpoints_keep_their_offsets(
    dynalite_url: str, azurite_connection: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The official workers would not know where to start, and neither would ours on the way back."""
    monkeypatch.setenv(CONNECTION_STRING, azurite_connection)
    name = f"hub-{uuid4().hex}"
    aws = f"dynamodb://{name}?region=eu-west-1&endpoint={dynalite_url}"
    azure = f"azblob://devstoreaccount1/{name}?eventhub=ns/orders"
    filled(azure, (Lease("0", checkpoint=AT_9), Lease("1"))).close()
    assert copied(azure, aws) == (0, [("0", "create"), ("1", "create")])
    table = open_store(aws)
    done(table.checkpoint_late(table.get(["0"])[0], AT_10))
    done(table.create(Lease("2", checkpoint=Position("5"))))
    done(table.create(Lease("shardId-0")))
    assert copied(aws, azure) == (1, [("0", "forward"), ("1", "same"), ("2", "refuse"), ("shardId-0", "refuse")])
    rows = [(lease.key, lease.checkpoint, lease.checkpoint.token) for lease in open_store(azure).list().leases]
    assert rows == [("0", AT_10, "4530"), ("1", TRIM_HORIZON, "")]


@pytest.mark.services
def test_the_retired_hosts_checkpoints_begin_a_group_of_today(
    azurite_connection: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A fleet that leaves the Event Processor Host would start over, in either kind of store."""
    monkeypatch.setenv(CONNECTION_STRING, azurite_connection)
    name = f"eph-{uuid4().hex}"
    told = {"PartitionId": "0", "Owner": "host-1", "Token": "t", "Epoch": 3, "Offset": "4520", "SequenceNumber": 9}
    host, place = f"azblob-eph://devstoreaccount1/{name}", "ns.servicebus.windows.net/orders/$default"
    today, sqlite = f"azblob://devstoreaccount1/{name}?eventhub=ns/orders", f"sqlite://{tmp_path}/leases.db"
    with ContainerClient.from_connection_string(azurite_connection, name) as blobs:
        blobs.create_container()
        blobs.upload_blob("hosts/0", json.dumps(told).encode())
    assert copied(f"{host}?prefix=hosts", today) == (0, [("0", "create")])
    assert copied(f"{host}?prefix=hosts", sqlite, "--stream", place) == (0, [("0", "create")])
    for store in (open_store(today), open_store(sqlite)):
        (lease,) = store.list().leases
        store.close()
        assert (facts(lease), lease.checkpoint.token) == (Lease("0", place, checkpoint=AT_9), "4520")


def test_a_dry_run_writes_nothing(here: tuple[str, MemoryStore], tmp_path: Path) -> None:
    """What was meant as a question would be an answer."""
    url, target = here
    source = f"sqlite://{tmp_path}/leases.db"
    filled(source, SHARDS).close()
    status, output = ran(copy_leases.app, source, url, "--dry-run")
    assert (status, target.list().leases) == (0, ())
    assert [line.split("│")[1:5] for line in output.splitlines() if "s-" in line] == [
        [" s-0   ", " -  ", " SHARD_END    ", " create "],
        [" s-1   ", " -  ", " 41.3         ", " create "],
        [" s-2   ", " -  ", " TRIM_HORIZON ", " create "],
    ]
    assert ran(reset.app, source, "--to", "LATEST", "--dry-run")[0] == 0
    assert [facts(lease) for lease in open_store(source).list().leases] == list(SHARDS)


def test_a_later_checkpoint_is_left_and_said(here: tuple[str, MemoryStore], tmp_path: Path) -> None:
    """Records processed since the last copying would be processed again."""
    url, target = here
    source = f"sqlite://{tmp_path}/leases.db"
    filled(source, (Lease("0", checkpoint=AT_9), Lease("1", checkpoint=AT_10)))
    filled(url, (Lease("0", checkpoint=AT_10), Lease("1", checkpoint=AT_9)))
    status, output = ran(copy_leases.app, source, url, "--json")
    assert (status, json.loads(output)) == (
        1,
        {
            "dry_run": False,
            "refused": 1,
            "leases": [
                {
                    "key": "0",
                    "do": "refuse",
                    "why": "a later checkpoint is stored there",
                    "was": {"checkpoint": "10", "token": "4530"},
                    "wanted": {"checkpoint": "9", "token": "4520"},
                },
                {
                    "key": "1",
                    "do": "forward",
                    "was": {"checkpoint": "9", "token": "4520"},
                    "wanted": {"checkpoint": "10", "token": "4530"},
                },
            ],
        },
    )
    assert [lease.checkpoint for lease in target.list().leases] == [AT_10, AT_10]


def test_a_reset_sets_what_it_is_told(here: tuple[str, MemoryStore]) -> None:
    """An operator who replays one shard would replay the stream."""
    url, store = here
    filled(url, SHARDS)
    assert ran(reset.app, url, "--to", "7", "--sub", "1", "--key", "s-1")[0] == 0
    assert [facts(lease) for lease in store.list().leases] == [
        SHARDS[0],
        Lease("s-1", parents=("s-0",), checkpoint=Position("7", 1), hash_range=(0, 4)),
        SHARDS[2],
    ]
    assert ran(reset.app, url, "--to", "AT_TIMESTAMP", "--timestamp-ms", "1700000000000")[0] == 0
    assert {lease.checkpoint for lease in store.list().leases} == {Position("AT_TIMESTAMP", 1_700_000_000_000)}


def test_a_living_owners_lease_is_not_reset_unless_told(
    here: tuple[str, MemoryStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A running worker would checkpoint over the reset, and the operator believe it done."""
    url, store = here
    row = [done(store.create(Lease("0", owner="ann", checkpoint=AT_9)))]

    def renew(_seconds: float) -> None:
        row.append(done(store.renew(row[-1])))

    monkeypatch.setattr("adapters.moves.time.sleep", renew)
    status, output = ran(reset.app, url, "--to", "TRIM_HORIZON", "--json")
    assert (status, json.loads(output)["leases"][0]["why"]) == (1, "ann is working on it")
    assert store.get(["0"]) == (row[-1],)
    assert ran(reset.app, url, "--to", "TRIM_HORIZON", "--even-if-owned")[0] == 0
    assert facts(store.get(["0"])[0]) == Lease("0")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--to", "7"], "--to: a sequence number belongs to one shard; name its lease with --key"),
        (["--to", "soon"], "--to: 'soon' is not TRIM_HORIZON"),
        (["--to", "SHARD_END"], "--to: a lease ends when its shard has been read"),
        (["--to", "AT_TIMESTAMP"], "--timestamp-ms: it goes with --to AT_TIMESTAMP"),
        (["--to", "LATEST", "--timestamp-ms", "5"], "--timestamp-ms: it goes with --to AT_TIMESTAMP"),
        (["--to", "LATEST", "--offset", "5"], "--sub and --offset: they go with a sequence number"),
        (["--to", "LATEST", "--key", "none"], "--key: there is no lease 'none'"),
    ],
)
def test_bad_usage_is_named_and_exits_2(here: tuple[str, MemoryStore], arguments: list[str], says: str) -> None:
    """A typo would be taken for a wish."""
    status, output = ran(reset.app, here[0], *arguments)
    assert (status, says in output) == (2, True), output


def test_a_store_that_is_not_there_exits_1_and_a_bad_url_2(tmp_path: Path) -> None:
    """A script could not tell a typing error from a store that is down."""
    missing = f"sqlite://{tmp_path}/missing.db"
    assert [ran(copy_leases.app, missing, "memory://x")[0], ran(reset.app, missing, "--to", "LATEST")[0]] == [1, 1]
    assert [ran(copy_leases.app, "x://y", "memory://x")[0], ran(reset.app, "x://y", "--to", "LATEST")[0]] == [2, 2]
