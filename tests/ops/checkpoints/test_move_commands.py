"""Tests `copy-leases` and `reset` as commands, also between stores of different clouds."""

import json
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import uuid4

import pytest
from typer.testing import CliRunner

from leasehold.adapters.cli import copy_leases, reset
from leasehold.adapters.consumer.status import LeaseLag, lag_of
from leasehold.adapters.worker.progress import PROGRESS_ANNOTATION, Progress
from leasehold.balancer.model import LATEST, SHARD_END, TRIM_HORIZON, Lease, Position
from leasehold.stores.embedded.memory import MemoryStore
from leasehold.stores.objects.blob import CONNECTION_STRING_VARIABLE
from leasehold.stores.protocol import Store
from leasehold.stores.swap import CONTROL_KEY, DIRECTION, lease_place, open_both
from leasehold.stores.urls import open_store
from leasehold.stores.writes import AnnotateLease, CheckpointLate, ClaimLease, CreateLease, ReleaseLease, RenewLease
from leasehold_lab.contract.actors import clear_layout_fields, create_lease_with_owner, expect_applied

AT_9, AT_10 = Position("9", 0, "4520"), Position("10", 0, "4530")
SOON = ("--still-seconds", "0.1")
SHARDS = (
    Lease("s-0", checkpoint=SHARD_END, hash_range=(0, 9)),
    Lease("s-1", parents=("s-0",), checkpoint=Position("41", 3), hash_range=(0, 4)),
    Lease("s-2", parents=("s-0",), checkpoint=TRIM_HORIZON, hash_range=(5, 9)),
)


@pytest.fixture
def new_table() -> tuple[str, MemoryStore]:
    """Return the URL of a new in-memory table, and its store."""
    name = uuid4().hex
    return f"memory://{name}", MemoryStore(name)


def create_leases(url: str, leases: tuple[Lease, ...]) -> Store:
    """Create these leases in the store at this URL, and return the store."""
    store = open_store(url)
    for lease in leases:
        expect_applied(store.write(CreateLease(lease)))
    return store


def run_command(app: Any, *arguments: str) -> tuple[int, str]:  # noqa: ANN401  typer's own application
    """Run a command, and return its exit status and everything that it printed."""
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.output


def run_copy(*arguments: str) -> tuple[int, list[tuple[str, str]]]:
    """Run `copy-leases`, and return its exit status and the result for each lease."""
    status, output = run_command(copy_leases.app, *arguments, "--json")
    return status, [(lease["key"], lease["do"]) for lease in json.loads(output)["leases"]]


@pytest.mark.services
def test_leases_copied_through_all_clouds_return_unchanged(
    tmp_path: Path,
    dynalite_url: str,
    azurite_connection: str,
    moto_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(CONNECTION_STRING_VARIABLE, azurite_connection)
    name = f"round-{uuid4().hex}"
    urls = [
        f"sqlite://{tmp_path}/first.db",
        f"dynamodb://{name}?region=eu-west-1&endpoint={dynalite_url}",
        f"azblob://devstoreaccount1/{name}?prefix=fleet",
        f"s3://{name}/fleet?region=eu-west-1&endpoint={moto_url}",
        f"sqlite://{tmp_path}/last.db",
    ]
    create_leases(urls[0], SHARDS).close()
    for source, target in pairwise(urls):
        assert run_copy(source, target) == (0, [("s-0", "create"), ("s-1", "create"), ("s-2", "create")])
    assert [clear_layout_fields(lease) for lease in open_store(urls[-1]).list().leases] == list(SHARDS)


@pytest.mark.services
def test_a_hubs_checkpoints_keep_their_offsets(
    dynalite_url: str, azurite_connection: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint keeps the offset from which the official workers resume."""
    monkeypatch.setenv(CONNECTION_STRING_VARIABLE, azurite_connection)
    name = f"hub-{uuid4().hex}"
    dynamodb_url = f"dynamodb://{name}?region=eu-west-1&endpoint={dynalite_url}"
    blob_url = f"azblob://devstoreaccount1/{name}?eventhub=ns/orders"
    create_leases(blob_url, (Lease("0", checkpoint=AT_9), Lease("1"))).close()
    assert run_copy(blob_url, dynamodb_url) == (0, [("0", "create"), ("1", "create")])
    table = open_store(dynamodb_url)
    expect_applied(table.write(CheckpointLate(table.get(["0"])[0], AT_10)))
    expect_applied(table.write(CreateLease(Lease("2", checkpoint=Position("5")))))
    expect_applied(table.write(CreateLease(Lease("shardId-0"))))
    assert run_copy(dynamodb_url, blob_url) == (
        1,
        [("0", "forward"), ("1", "same"), ("2", "refuse"), ("shardId-0", "refuse")],
    )
    rows = [(lease.key, lease.checkpoint, lease.checkpoint.token) for lease in open_store(blob_url).list().leases]
    assert rows == [("0", AT_10, "4530"), ("1", TRIM_HORIZON, "")]


def test_a_dry_run_writes_nothing(new_table: tuple[str, MemoryStore], tmp_path: Path) -> None:
    url, target = new_table
    source = f"sqlite://{tmp_path}/leases.db"
    create_leases(source, SHARDS).close()
    status, output = run_command(copy_leases.app, source, url, "--dry-run")
    assert (status, target.list().leases) == (0, ())
    assert [line.split() for line in output.splitlines()] == [
        ["LEASE", "IS", "WANTED", "WOULD"],
        ["s-0", "-", "SHARD_END", "create"],
        ["s-1", "-", "41.3", "create"],
        ["s-2", "-", "TRIM_HORIZON", "create"],
    ]
    assert run_command(reset.app, source, "--to", "LATEST", "--dry-run")[0] == 0
    assert [clear_layout_fields(lease) for lease in open_store(source).list().leases] == list(SHARDS)


def test_a_later_checkpoint_is_kept_and_reported(new_table: tuple[str, MemoryStore], tmp_path: Path) -> None:
    url, target = new_table
    source = f"sqlite://{tmp_path}/leases.db"
    create_leases(source, (Lease("0", checkpoint=AT_9), Lease("1", checkpoint=AT_10)))
    create_leases(url, (Lease("0", checkpoint=AT_10), Lease("1", checkpoint=AT_9)))
    status, output = run_command(copy_leases.app, source, url, "--json")
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


def test_a_reset_sets_only_the_given_leases(new_table: tuple[str, MemoryStore]) -> None:
    url, store = new_table
    create_leases(url, SHARDS)
    assert run_command(reset.app, url, "--to", "7", "--sub", "1", "--key", "s-1")[0] == 0
    assert [clear_layout_fields(lease) for lease in store.list().leases] == [
        SHARDS[0],
        Lease("s-1", parents=("s-0",), checkpoint=Position("7", 1), hash_range=(0, 4)),
        SHARDS[2],
    ]
    assert run_command(reset.app, url, "--to", "AT_TIMESTAMP", "--timestamp-ms", "1700000000000")[0] == 0
    assert {lease.checkpoint for lease in store.list().leases} == {Position("AT_TIMESTAMP", 1_700_000_000_000)}


def test_the_lag_after_a_reset_is_unknown_until_the_shard_is_read(new_table: tuple[str, MemoryStore]) -> None:
    url, store = new_table
    progress = Progress(
        at=1_700_000_000.0, owner="w-1", behind=0.0, end=True, read=1_700_000_000.0, done=1_700_000_000.0
    )
    create_leases(url, (Lease("s-0", checkpoint=Position("7"), annotations=((PROGRESS_ANNOTATION, progress.note),)),))
    assert run_command(reset.app, url, "--to", "TRIM_HORIZON")[0] == 0
    (lease,) = store.list().leases
    assert (lease.checkpoint, lag_of(lease, 1_700_000_030.0, 10.0)) == (TRIM_HORIZON, LeaseLag())


@pytest.mark.parametrize(
    ("to", "stored"),
    [
        ("2023-11-14T22:13:20Z", Position("AT_TIMESTAMP", 1_700_000_000_000)),
        ("2023-11-15T00:13:20+02:00", Position("AT_TIMESTAMP", 1_700_000_000_000)),
        ("now-2h", Position("AT_TIMESTAMP", 1_699_992_800_000)),
        ("latest", LATEST),
        ("trim-horizon", TRIM_HORIZON),
    ],
)
def test_a_reset_accepts_times_and_named_positions(
    new_table: tuple[str, MemoryStore], monkeypatch: pytest.MonkeyPatch, to: str, stored: Position
) -> None:
    url, store = new_table
    create_leases(url, SHARDS)
    monkeypatch.setattr("leasehold.adapters.cli.reset.time", lambda: 1_700_000_000.0)
    assert run_command(reset.app, url, "--to", to)[0] == 0
    assert {lease.checkpoint for lease in store.list().leases} == {stored}


def test_a_reset_shifts_each_lease_from_its_own_position(
    new_table: tuple[str, MemoryStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards may be hours apart. If all were set to the same time, some would be read again from far back."""
    url, store = new_table
    monkeypatch.setattr("leasehold.adapters.cli.reset.time", lambda: 1_700_000_000.0)
    note = Progress(1_699_999_990.0, "a", arrived=1_699_990_000.0).note
    create_leases(url, (SHARDS[0], Lease("s-3", checkpoint=Position("7"), annotations=((PROGRESS_ANNOTATION, note),))))
    assert run_command(reset.app, url, "--to", "now-3h", "--key", "s-0", "--even-if-owned")[0] == 0
    assert run_command(reset.app, url, "--shift-by", "-15m")[0] == 0
    assert [lease.checkpoint for lease in store.list().leases] == [
        Position("AT_TIMESTAMP", 1_699_988_300_000),
        Position("AT_TIMESTAMP", 1_699_989_100_000),
    ]
    assert run_command(reset.app, url, "--shift-by", "+2w")[0] == 0
    assert {lease.checkpoint.sub for lease in store.list().leases} == {1_700_000_000_000}


def test_a_reset_plan_is_not_applied_to_leases_that_moved_since(
    new_table: tuple[str, MemoryStore], tmp_path: Path
) -> None:
    """If a worker continues between a dry run and the reset, the reset must not repeat its work unnoticed."""
    url, store = new_table
    create_leases(url, SHARDS)
    plan = tmp_path / "plan.json"
    status, output = run_command(reset.app, url, "--to", "TRIM_HORIZON", "--dry-run", "--json")
    plan.write_text(output)
    moved_lease = store.get(["s-1"])[0]
    expect_applied(store.write(CheckpointLate(moved_lease, Position("99999"))))
    status, output = run_command(reset.app, url, "--plan", str(plan), "--json")
    results = {lease["key"]: (lease["do"], lease.get("why", "")) for lease in json.loads(output)["leases"]}
    assert (status, results["s-0"][0], results["s-1"][0]) == (1, "back", "refuse")
    assert results["s-1"][1].startswith("its checkpoint is 99999, no longer ")
    assert store.get(["s-0"])[0].checkpoint == TRIM_HORIZON
    assert store.get(["s-1"])[0].checkpoint == Position("99999")


def test_a_reset_plan_can_be_run_again(new_table: tuple[str, MemoryStore], tmp_path: Path) -> None:
    """A second run carries out the rest of a plan, and accepts the leases that the first run has set."""
    url, store = new_table
    create_leases(url, SHARDS)
    plan = tmp_path / "plan.json"
    plan.write_text(run_command(reset.app, url, "--to", "TRIM_HORIZON", "--dry-run", "--json")[1])
    assert run_command(reset.app, url, "--to", "TRIM_HORIZON", "--key", "s-0")[0] == 0
    assert run_command(reset.app, url, "--plan", str(plan))[0] == 0
    assert {lease.checkpoint for lease in store.list().leases} == {TRIM_HORIZON}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("no json", "--plan: input: not a JSON document"),
        ("{}", "--plan: leases: is missing"),
        ('{"leases": [{"key": "s-0", "was": {"checkpoint": "1"}}]}', "--plan: leases[0].wanted: is missing"),
        (
            '{"leases": [{"key": "s-0", "was": {"checkpoint": "1"}, "wanted": {"checkpoint": "x"}}]}',
            '--plan: leases[0].wanted.checkpoint: "x" is not one of',
        ),
        (
            '{"leases": [{"key": "s-9", "was": {"checkpoint": "1"}, "wanted": {"checkpoint": "1"}}]}',
            "--plan: there is no lease 's-9'; is it the plan of another store?",
        ),
        (
            json.dumps({"leases": [{"key": "s-1", "was": {"checkpoint": "1"}, "wanted": {"checkpoint": "1"}}] * 2}),
            "--plan: lease 's-1' is given twice",
        ),
        (
            '{"leases": [{"key": "s-1", "was": {"checkpoint": "1"}, "wanted": {"checkpoint": "SHARD_END"}}]}',
            "--plan: lease 's-1': a lease ends only when its shard has been read to the end",
        ),
    ],
)
def test_an_unreadable_plan_is_rejected_as_a_whole(
    new_table: tuple[str, MemoryStore], tmp_path: Path, text: str, says: str
) -> None:
    url, store = new_table
    create_leases(url, SHARDS)
    (tmp_path / "plan.json").write_text(text)
    listing_before = store.list()
    status, output = run_command(reset.app, url, "--plan", str(tmp_path / "plan.json"))
    assert (status, says in output) == (2, True), output
    assert store.list() == listing_before
    assert run_command(reset.app, url, "--plan", str(tmp_path / "none.json"))[0] == 2
    assert run_command(reset.app, url, "--plan", str(tmp_path / "plan.json"), "--to", "LATEST")[0] == 2


def test_each_move_in_a_pipe_is_one_uncut_line(new_table: tuple[str, MemoryStore]) -> None:
    long_number, timestamp = "4959033827149025660855969253836157109592157598913658889", "2023-11-14T22:13:20.000Z"
    create_leases(new_table[0], (Lease("s-0", checkpoint=Position(long_number)),))
    _, output = run_command(reset.app, new_table[0], "--to", timestamp, "--dry-run")
    assert [line.split(maxsplit=3) for line in output.splitlines()[1:]] == [
        ["s-0", long_number, f"AT_TIMESTAMP={timestamp}", "set back"]
    ]


def renew_during_waits(
    monkeypatch: pytest.MonkeyPatch, store: MemoryStore, lease: Lease
) -> tuple[list[Lease], list[float]]:
    """Renew this lease whenever a command waits. Return its versions and the durations of the waits."""
    versions, waits = [lease], list[float]()

    def renew(seconds: float) -> None:
        waits.append(seconds)
        versions.append(expect_applied(store.write(RenewLease(versions[-1]))))

    monkeypatch.setattr("leasehold.adapters.ops.checkpoints.sleep", renew)
    return versions, waits


def test_a_living_owners_lease_is_reset_only_if_forced(
    new_table: tuple[str, MemoryStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A running worker would overwrite the reset position with its next checkpoint."""
    url, store = new_table
    lease = create_lease_with_owner(store, Lease("0", owner="ann", checkpoint=AT_9))
    versions, _ = renew_during_waits(monkeypatch, store, lease)
    status, output = run_command(reset.app, url, "--to", "TRIM_HORIZON", "--json")
    assert (status, json.loads(output)["leases"][0]["why"]) == (1, "ann is working on it")
    assert store.get(["0"]) == (versions[-1],)
    assert run_command(reset.app, url, "--to", "TRIM_HORIZON", "--even-if-owned")[0] == 0
    assert clear_layout_fields(store.get(["0"])[0]) == Lease("0")


def test_leases_of_a_living_fleet_are_copied_only_if_forced(
    new_table: tuple[str, MemoryStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy is refused while a fleet reads FROM. After a copy, two fleets could read one stream."""
    url, target = new_table
    name = uuid4().hex
    source = MemoryStore(name)
    lease = create_lease_with_owner(source, Lease("0", owner="ann", checkpoint=AT_9))
    expect_applied(source.write(CreateLease(Lease("1", checkpoint=AT_9))))
    _, waits = renew_during_waits(monkeypatch, source, lease)
    create_leases(url, (Lease("1", owner="bob"),))
    status, output = run_command(copy_leases.app, f"memory://{name}", url, "--json")
    reason = "FROM is still read by ann; stop its workers first"
    assert (status, [lease["why"] for lease in json.loads(output)["leases"]]) == (1, [reason, reason])
    assert waits == [40.0]
    assert [lease.key for lease in target.list().leases] == ["1"]
    options = ("--even-if-read", "--even-if-owned")
    assert run_copy(f"memory://{name}", url, *options) == (0, [("0", "create"), ("1", "forward")])
    assert waits == [40.0]


@pytest.mark.parametrize(
    ("options", "outcomes"),
    [
        ([], ["refuse", "refuse"]),
        (["--even-if-owned"], ["refuse", "refuse"]),
        (["--even-if-read"], ["create", "refuse"]),
        (["--even-if-owned", "--even-if-read"], ["create", "forward"]),
    ],
)
def test_each_option_of_a_forced_copy_concerns_the_owners_of_one_table(
    new_table: tuple[str, MemoryStore], monkeypatch: pytest.MonkeyPatch, options: list[str], outcomes: list[str]
) -> None:
    url, target = new_table
    name = uuid4().hex
    source = MemoryStore(name)
    expect_applied(source.write(CreateLease(Lease("1", checkpoint=AT_10))))
    owned_leases = [
        create_lease_with_owner(store, lease)
        for store, lease in (
            (source, Lease("0", owner="ann", checkpoint=AT_9)),
            (target, Lease("1", owner="bob", checkpoint=AT_9)),
        )
    ]

    def renew(_seconds: float) -> None:
        for index, store in enumerate((source, target)):
            owned_leases[index] = expect_applied(store.write(RenewLease(owned_leases[index])))

    monkeypatch.setattr("leasehold.adapters.ops.checkpoints.sleep", renew)
    status, moves = run_copy(f"memory://{name}", url, *options)
    assert (status, moves) == (int("refuse" in outcomes), [*zip("01", outcomes, strict=True)])


def test_owners_that_no_longer_renew_delay_no_copy(
    new_table: tuple[str, MemoryStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, _ = new_table
    name = uuid4().hex
    source = MemoryStore(name)
    for key in "01":
        create_lease_with_owner(source, Lease(key, owner=f"w-{key}", checkpoint=AT_9))
    monkeypatch.setattr("leasehold.adapters.ops.checkpoints.sleep", lambda _seconds: None)
    assert run_copy(f"memory://{name}", url) == (0, [("0", "create"), ("1", "create")])


def test_a_living_fleet_is_recognized_in_a_copy_that_renames_its_keys(
    new_table: tuple[str, MemoryStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, target = new_table
    name = uuid4().hex
    source = MemoryStore(name)
    lease = create_lease_with_owner(source, Lease("orders:0", owner="ann", checkpoint=AT_9))
    renew_during_waits(monkeypatch, source, lease)
    assert run_copy(f"memory://{name}", url, "--strip", "orders:") == (1, [("0", "refuse")])
    assert target.list().leases == ()


def test_a_finished_copy_does_not_watch_owners(
    new_table: tuple[str, MemoryStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, _ = new_table
    name = uuid4().hex
    create_leases(f"memory://{name}", (Lease("0", owner="ann", checkpoint=AT_9),))
    create_leases(url, (Lease("0", owner="bob", checkpoint=AT_9),))
    monkeypatch.delattr("leasehold.adapters.ops.checkpoints.sleep")
    assert run_copy(f"memory://{name}", url) == (0, [("0", "same")])


@pytest.mark.parametrize("is_forced", [False, True])
@pytest.mark.parametrize("command", [reset, copy_leases])
def test_a_forced_move_is_tried_again_if_the_owner_renews(
    new_table: tuple[str, MemoryStore], monkeypatch: pytest.MonkeyPatch, command: ModuleType, is_forced: bool
) -> None:
    """An owner may renew between the two writes of a move. Only `--even-if-owned` then repeats both."""
    url, store = new_table
    versions = [create_lease_with_owner(store, Lease("0", owner="ann", epoch=2, checkpoint=AT_9))]
    former_name = uuid4().hex
    create_leases(f"memory://{former_name}", (Lease("0", epoch=8, checkpoint=AT_10),))
    monkeypatch.setattr("leasehold.adapters.ops.checkpoints.sleep", lambda _seconds: None)
    write, released = store.write, list[ReleaseLease]()

    def write_and_renew(action: Any) -> Any:  # noqa: ANN401  the store's own types
        if isinstance(action, ReleaseLease) and not released:
            released.append(action)
            versions.append(expect_applied(write(RenewLease(versions[-1]))))
        return write(action)

    monkeypatch.setattr(store, "write", write_and_renew)
    monkeypatch.setattr(command, "open_store", lambda opened, **_: store if opened == url else open_store(opened))
    arguments = (url, "--to", "TRIM_HORIZON") if command is reset else (f"memory://{former_name}", url)
    options = ("--even-if-owned",) if is_forced else ()
    assert run_command(command.app, *arguments, *options)[0] == (0 if is_forced else 1)
    wanted = TRIM_HORIZON if command is reset else AT_10
    assert store.get(["0"])[0].checkpoint == (wanted if is_forced else AT_9)


@pytest.mark.parametrize("is_dry_run", [False, True])
@pytest.mark.parametrize("command", [reset, copy_leases])
def test_only_a_table_that_is_written_is_created_or_needs_rights_to_write(
    new_table: tuple[str, MemoryStore], monkeypatch: pytest.MonkeyPatch, command: ModuleType, is_dry_run: bool
) -> None:
    url, _ = new_table
    opened: list[tuple[str, bool, bool]] = []

    def open_noted_store(name: str, *, create: bool = True, write: bool = True) -> Store:
        opened.append((name, create, write))
        return open_store(name)

    monkeypatch.setattr(command, "open_store", open_noted_store)
    options = ("--dry-run",) if is_dry_run else ()
    if command is reset:
        assert run_command(reset.app, url, "--to", "TRIM_HORIZON", *options)[0] == 0
        assert opened == [(url, False, not is_dry_run)]
    else:
        former_url = f"memory://{uuid4().hex}"
        assert run_command(copy_leases.app, former_url, url, *options)[0] == 0
        assert opened == [(former_url, False, False), (url, not is_dry_run, not is_dry_run)]


def test_one_table_of_a_swap_cannot_be_copied_or_reset(tmp_path: Path) -> None:
    """During a swap, each table has only some of the leases, and a row that was reset in FROM would be used again."""
    tables = tuple(f"sqlite://{tmp_path}/{name}.db" for name in ("from", "to"))
    create_leases(tables[0], SHARDS[1:]).close()
    with closing(open_both(*tables)) as swap_store:
        moved_lease, _ = (
            expect_applied(swap_store.write(ClaimLease(lease, "ann"))) for lease in swap_store.list().leases
        )
        with closing(open_store(tables[1])) as target:
            (control,) = target.get([CONTROL_KEY])
            expect_applied(target.write(AnnotateLease(control, DIRECTION, "to")))
        assert lease_place(expect_applied(swap_store.write(RenewLease(moved_lease)))) == "TO"
        listing_before = swap_store.list()
        for url, reason in zip(tables, ("moved 1 of these leases", "a swap into this table is not over"), strict=True):
            for app, arguments in (
                (reset.app, (url, "--to", "TRIM_HORIZON", "--even-if-owned")),
                (copy_leases.app, (url, f"file://{tmp_path}/backup.jsonl")),
                (copy_leases.app, (f"sqlite://{tmp_path}/elsewhere.db", url)),
            ):
                create_leases(f"sqlite://{tmp_path}/elsewhere.db", ()).close()
                status, output = run_command(app, *arguments)
                assert (status, reason in " ".join(output.split())) == (1, True), output
        assert not (tmp_path / "backup.jsonl").exists()
        assert swap_store.list() == listing_before


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--to", "7"], "--to: a sequence number belongs to one shard; name its lease with --key"),
        (["--to", "soon"], "--to: 'soon' is neither TRIM_HORIZON"),
        (["--to", "SHARD_END"], "--to: a lease ends only when its shard has been read to the end"),
        (["--to", "AT_TIMESTAMP"], "--timestamp-ms: give it with --to AT_TIMESTAMP"),
        (["--to", "LATEST", "--timestamp-ms", "5"], "--timestamp-ms: give it with --to AT_TIMESTAMP"),
        (["--to", "AT_TIMESTAMP", "--timestamp-ms", "9700000000000"], "--timestamp-ms: it lies in the future"),
        (["--to", "now+1h"], "--to: it lies in the future"),
        (["--to", "now", "--shift-by", "-1h"], "give one of them"),
        (["--shift-by", "1h"], "wants a sign"),
        (["--to", "LATEST", "--offset", "5"], "--sub and --offset: they go with a sequence number"),
        (["--to", "LATEST", "--key", "none"], "--key: there is no lease 'none'"),
    ],
)
def test_bad_usage_is_reported_and_exits_2(new_table: tuple[str, MemoryStore], arguments: list[str], says: str) -> None:
    status, output = run_command(reset.app, new_table[0], *arguments)
    assert (status, says in output) == (2, True), output


def test_an_unreachable_store_exits_1_and_a_bad_url_2(tmp_path: Path) -> None:
    """A script can distinguish a typing error from a store that is down."""
    missing_url = f"sqlite://{tmp_path}/missing.db"
    assert [
        run_command(copy_leases.app, missing_url, "memory://x")[0],
        run_command(reset.app, missing_url, "--to", "LATEST")[0],
    ] == [1, 1]
    assert [
        run_command(copy_leases.app, "x://y", "memory://x")[0],
        run_command(reset.app, "x://y", "--to", "LATEST")[0],
    ] == [2, 2]
