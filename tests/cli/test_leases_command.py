"""Tests of the tables and the JSON that `leasehold leases` prints, of its watch, and of its errors."""

import json
import logging
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from attrs import evolve
from rich.console import Console
from typer.testing import CliRunner

from leasehold.adapters.cli import leases
from leasehold.adapters.cli.common.columns import format_as_plain_text
from leasehold.adapters.cli.lease_tables import describe_totals_and_problems, draw_page, format_move, tabulate_leases
from leasehold.adapters.cli.leases import (
    MOVES_SHOWN,
    _convert_to_json,
    app,
    can_use_keys,
    keep_confirmed_states,
    keep_known_states,
    read_states_repeatedly,
)
from leasehold.adapters.cli.main import app as main
from leasehold.adapters.consumer.status import LeaseLag, Status
from leasehold.adapters.json_form import format_lease_json, parse_plan_request
from leasehold.adapters.ops.watching import TableWatch, WatchedTable, describe_table
from leasehold.adapters.worker.progress import PROGRESS_ANNOTATION, Progress
from leasehold.balancer.config import Config
from leasehold.balancer.model import SHARD_END, Lease, Position, Version
from leasehold.errors import OutcomeUnknown
from leasehold.stores.embedded.memory import MemoryStore
from leasehold.stores.embedded.sqlite import SqliteStore
from leasehold.stores.protocol import Listing, Malformed
from leasehold.stores.swap import CONTROL_KEY, MOVED_OWNER_PREFIX, MOVED_TO, swap_notices
from leasehold.stores.writes import CheckpointLease, ClaimLease, ReleaseLease, RenewLease, StealLease
from leasehold_lab.contract.actors import create_lease_with_owner, expect_applied

LARGE_POSITION = Position("49590338271490256608559692538361571095921575989136588898", 2)
LAGS = {
    "s-0": LeaseLag(12.5, age=14.0, host="vm-7", moves=3),
    "s-1": LeaseLag(0.0, end=True),
    "s-2": LeaseLag(),
}
STATUSES = {
    "s-0": Status("BEHIND", "12.5 s behind, and falling further"),
    "s-1": Status("OK", "read to the tip"),
    "s-2": Status("ORPHAN", "nobody owns it, for 99 s"),
    "s-3": Status("OK", "read to its end"),
    "s-4": Status("UNKNOWN", "west tells nothing"),
}
PROBLEM_LINES = [
    "ORPHAN s-2: nobody owns it, for 99 s",
    "BEHIND s-0: 12.5 s behind, and falling further",
    "UNKNOWN s-4: west tells nothing",
]
LEASES = (
    Lease("s-2", checkpoint=LARGE_POSITION, idle=float("inf")),
    Lease("s-0", owner="east-1", idle=0.0, weight=1536, next_owner="east-2", yields=True),
    Lease("s-1", owner="east-2", idle=3.25, weight=2048),
    Lease("s-3", owner="west-1", checkpoint=SHARD_END, idle=9.0),
    Lease("s-4", owner="west", idle=1.0),
)


def page_lines(table: WatchedTable, grouping: str | None = None) -> list[str]:
    """Return the visible lines of the page without the borders of the table."""
    console = Console(width=160, record=True, force_terminal=False)
    console.print(draw_page(table, grouping, 160))
    return [
        " ".join(line.replace("│", "|").split()) for line in console.export_text().splitlines() if line[0] not in "┏┡└"
    ]


def test_the_table_has_one_row_per_lease() -> None:
    assert page_lines(WatchedTable(LEASES, lags=LAGS, statuses=STATUSES)) == [
        "┃ lease ┃ owner ┃ status ┃ lag s ┃ end ┃ checkpoint ┃ age s ┃ idle s ┃ KB/s ┃ switches ┃ host ┃ moving to ┃",
        "| s-0 | east-1 | BEHIND | 12.5 | no | TRIM_HORIZON | 14.0 | | 1.5 | 3 | vm-7 | east-2 |",
        "| s-1 | east-2 | OK | 0.0 | yes | TRIM_HORIZON | | 3.2 | 2.0 | | | |",
        "| s-2 | nobody | ORPHAN | | | …575989136588898/2 | | | | | | |",
        "| s-3 | west-1 | | | | SHARD_END | | 9.0 | | | | |",
        "| s-4 | west | UNKNOWN | | | TRIM_HORIZON | | 1.0 | | | | |",
        "5 leases, 1 finished, 1 without an owner; 3 workers; lag 12.5 s at most; ORPHAN",
        *PROBLEM_LINES,
    ]


def test_piped_output_has_one_whole_line_per_lease(tmp_path: Path) -> None:
    store = SqliteStore(str(tmp_path / "l.db"))
    key, owner = "orders:shardId-000000000000", "ip-10-0-12-7.eu-central-1.compute.internal-29097"
    expect_applied(
        store.write(ClaimLease(create_lease_with_owner(store, Lease(key, checkpoint=LARGE_POSITION)), owner))
    )
    create_lease_with_owner(store, Lease("two words"))
    store.close()
    for width in ("20", "80"):
        result = CliRunner(env={"COLUMNS": width}).invoke(app, [f"sqlite://{tmp_path}/l.db"])
        assert [line.split()[:2] + line.split()[5:6] for line in result.stdout.splitlines()] == [
            ["LEASE", "OWNER", "CHECKPOINT"],
            [key, owner, f"{LARGE_POSITION.sequence}/{LARGE_POSITION.sub}"],
            ["two\\x20words", "nobody", "TRIM_HORIZON"],
        ]
        assert len({len(line.split()) for line in result.stdout.splitlines()}) == 1


def test_a_narrow_screen_keeps_owners_and_lists_omitted_columns() -> None:
    console = Console(width=45, record=True, force_terminal=False)
    console.print(draw_page(WatchedTable(LEASES), None, 45))
    page_text = console.export_text()
    assert all(name in page_text for name in ("s-0", "east-1", "nobody"))
    assert "moving to; --wide shows every column" in " ".join(page_text.split())
    assert "┃ lease ┃ owner" in page_text


def test_the_table_has_one_row_per_worker_or_group() -> None:
    head = "leases ┃ target ┃ share ┃ workers ┃ lag s ┃ status ┃ KB/s ┃ longest idle s ┃"
    total = "5 leases, 1 finished, 1 without an owner; 3 workers; lag 12.5 s at most; ORPHAN"
    assert page_lines(WatchedTable(LEASES, lags=LAGS, statuses=STATUSES), "worker") == [
        f"┃ worker ┃ {head}",
        "| east-1 | 1 | 1 | 25.0% | 1 | 12.5 | BEHIND | 1.5 | |",
        "| east-2 | 1 | 2 | 25.0% | 1 | 0.0 | OK | 2.0 | 3.2 |",
        "| nobody | 1 | | 25.0% | 0 | | ORPHAN | | |",
        "| west | 1 | 1 | 25.0% | 1 | | UNKNOWN | | 1.0 |",
        total,
        *PROBLEM_LINES,
    ]
    assert page_lines(WatchedTable(LEASES, lags=LAGS, statuses=STATUSES), "group") == [
        f"┃ group ┃ {head}",
        "| (none) | 1 | 1 | 25.0% | 1 | | UNKNOWN | | 1.0 |",
        "| east | 2 | 3 | 50.0% | 2 | 12.5 | BEHIND | 3.5 | 3.2 |",
        "| nobody | 1 | | 25.0% | 0 | | ORPHAN | | |",
        total,
        *PROBLEM_LINES,
    ]


def test_malformed_rows_are_reported_below_the_table() -> None:
    """A malformed row prevents the creation of leases, so it must be reported.

    Markup in the key of a row is shown as plain text.
    """
    assert page_lines(
        WatchedTable((), malformed=(Malformed("[red]s-9", "checkpoint", "is missing"),), trouble="the line is down")
    )[1:] == [
        "0 leases, 0 finished, 0 without an owner; 0 workers; UNKNOWN",
        "[red]s-9 cannot be read: checkpoint: is missing",
        "the line is down; trying again",
    ]


def test_an_empty_table_has_a_status_and_a_message() -> None:
    """`--check` exits with status 3 on a table without leases."""
    assert describe_totals_and_problems(WatchedTable(())) == (
        "0 leases, 0 finished, 0 without an owner; 0 workers; UNKNOWN",
        ("UNKNOWN: the table has no leases",),
    )


def test_a_worker_that_put_its_only_lease_aside_is_a_worker() -> None:
    """The worker counts as alive while it leaves the lease to others. After that time, its state is unknown."""
    note = (
        (PROGRESS_ANNOTATION, Progress(at=100.0, owner="w-1", aside=160.0, fault="its handler raised ValueError").note),
    )
    table = WatchedTable((Lease("s-0", annotations=note),), statuses={"s-0": Status("STALLED", "")}, at=110.0)
    later_table = evolve(table, at=161.0)
    assert [
        describe_totals_and_problems(watched_table)[0].split("; ")[1] for watched_table in (table, later_table)
    ] == [
        "1 workers",
        "0 workers",
    ]
    assert [describe_table(watched_table, Config())["total"]["workers"] for watched_table in (table, later_table)] == [
        1,
        0,
    ]


def test_a_lag_that_is_a_lower_bound_is_marked() -> None:
    """The mark appears in the tables of leases and workers, in the totals, and in the JSON description of the table."""
    lease = Lease("s-0", owner="w-1", checkpoint=Position("7"))
    lag = LeaseLag(75.0, at_least=True)
    table = WatchedTable((lease,), lags={"s-0": lag}, statuses={"s-0": Status("OK", "")})
    assert (
        "≥75.0" in format_as_plain_text(tabulate_leases(table, None)),
        "≥75.0" in format_as_plain_text(tabulate_leases(table, "worker")),
    ) == (
        True,
        True,
    )
    assert "; lag ≥ 75.0 s" in describe_totals_and_problems(table)[0]
    description = describe_table(table, Config())
    assert description["leases"][0]["lag"] == {"seconds": 75.0, "end": False, "at_least": True}
    assert (description["total"]["lag_at_least"], description["workers"][0]["lag_at_least"]) == (True, True)


def test_a_table_in_a_swap_is_reported() -> None:
    remaining_leases = (
        Lease("s-0", owner=f"{MOVED_OWNER_PREFIX}east-1"),
        Lease("s-1", owner=MOVED_OWNER_PREFIX),
        Lease("s-2", owner="east-1"),
    )
    assert (
        "2 leases have moved or are moving to another table (leasehold swap): look there, too; --to TO shows both"
        in page_lines(WatchedTable(remaining_leases, swapping=swap_notices(remaining_leases)))
    )
    arrived_leases = (Lease("s-0", owner="east-1"), Lease(CONTROL_KEY, checkpoint=SHARD_END))
    notice = "leasehold-swap is not a lease: a swap into this table is not over (leasehold swap FROM TO --status)"
    assert notice in page_lines(WatchedTable(arrived_leases, swapping=swap_notices(arrived_leases)))
    assert not any("swap" in line for line in page_lines(WatchedTable(LEASES)))


def test_the_old_table_of_a_finished_swap_points_to_the_new_one() -> None:
    """The rows that remain in the old table are not shown, because they are no longer the group's leases."""
    store = MemoryStore()
    stale_progress = Progress(time.time() - 500, "east-1", behind=1.0, read=time.time() - 500)
    create_lease_with_owner(
        store,
        Lease("s-0", owner=f"{MOVED_OWNER_PREFIX}east-1", annotations=((PROGRESS_ANNOTATION, stale_progress.note),)),
    )
    create_lease_with_owner(store, Lease("s-1", owner=f"{MOVED_OWNER_PREFIX}east-1"))
    unlinked_table = TableWatch(store, 10.0, 10.0).look()
    assert ({status.word for status in unlinked_table.statuses.values()}, unlinked_table.lags) == ({"UNKNOWN"}, {})
    assert unlinked_table.status.says.endswith("--to TO shows both")
    create_lease_with_owner(
        store, Lease(CONTROL_KEY, checkpoint=SHARD_END, annotations=((MOVED_TO, "postgres://db/orders"),))
    )
    table = TableWatch(store, 10.0, 10.0).look()
    reason = "the leases have moved to postgres://db/orders (leasehold swap), and that swap is over: look there"
    reason += "; 2 rows that it left here are not shown"
    assert (table.leases, table.swapping, table.status) == ((), (reason,), Status("UNKNOWN", reason))
    assert page_lines(table)[1:] == ["0 leases, 0 finished, 0 without an owner; 0 workers; UNKNOWN", reason]
    json_text = json.dumps(_convert_to_json(table))
    document = json.loads(json_text)
    assert [lease["key"] for lease in document.pop("leases")] == ["s-0", "s-1"], "scripts find the rows as before"
    assert document | {"at": 0} == {"at": 0, "status": "UNKNOWN", "says": reason, "malformed": [], "swapping": [reason]}


@pytest.mark.parametrize(
    "lease",
    [
        *LEASES,
        Lease(
            "st:s-0",
            stream="st",
            shard="s-0",
            parents=("st:p-0", "st:p-1"),
            version=Version("7"),
            checkpoint=Position("41", 3, "offset"),
            hash_range=(0, 2**128 - 1),
            weight=0,
            held=12.5,
            next_owner="bob",
            next_owner_idle=0.5,
            leaving=True,
            epoch=7,
            annotations=(("a", "1"),),
        ),
    ],
)
def test_the_json_can_be_read_by_plan(lease: Lease) -> None:
    document = json.dumps({"leases": [format_lease_json(lease)], "me": {"worker": "me"}})
    assert parse_plan_request(document.encode()).leases == (lease,)


class Faulty(MemoryStore):
    """A store that fails at its second listing."""

    looks = 0

    def list(self) -> Listing:
        """List the leases; the second call fails."""
        self.looks += 1
        if self.looks == 2:
            raise OutcomeUnknown("the line is down")
        return super().list()


def test_a_watch_continues_after_a_failed_read() -> None:
    store, waits = Faulty(), list[float]()
    create_lease_with_owner(store, Lease("s-0", owner="ann"))
    states = read_states_repeatedly(store, 2.0, waits.append)
    first_state, second_state, third_state = (next(states) for _ in range(3))
    assert second_state == evolve(first_state, trouble="the line is down")
    assert [lease.key for lease in third_state.leases] == ["s-0"]
    assert third_state.leases[0].idle > first_state.leases[0].idle == 0.0
    assert waits == [2.0, 2.0]


def test_a_watch_lists_moves_as_they_happen() -> None:
    store = MemoryStore()
    row = create_lease_with_owner(store, Lease("s-0", owner="ann"))
    states = read_states_repeatedly(store, 2.0, lambda _seconds: None)
    assert next(states).moves == ()
    expect_applied(store.write(StealLease(row, "bob")))
    assert [format_move(move).split(maxsplit=1)[1] for move in next(states).moves] == ["s-0: ann -> bob"]
    expect_applied(store.write(ReleaseLease(store.get(["s-0"])[0], "bob")))
    last_state = next(states)
    assert [format_move(move).split(maxsplit=1)[1] for move in last_state.moves] == [
        "s-0: bob -> nobody",
        "s-0: ann -> bob",
    ]
    assert page_lines(last_state)[-2].endswith("s-0: bob -> nobody")


def test_a_watch_keeps_the_latest_moves_through_failed_reads() -> None:
    store = Faulty()
    create_lease_with_owner(store, Lease("s-0", owner="w-0"))
    states = read_states_repeatedly(store, 2.0, lambda _seconds: None)
    next(states)
    for number in range(1, MOVES_SHOWN + 3):
        expect_applied(store.write(StealLease(store.get(["s-0"])[0], f"w-{number}")))
        state = next(states)
    # The second read fails, so the third one sees two moves as one.
    assert [move.after for move in state.moves] == [f"w-{number}" for number in range(MOVES_SHOWN + 2, 2, -1)]


def test_a_python_without_keyboard_support_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    assert can_use_keys()
    monkeypatch.setattr(leases, "has_keys", lambda: False)
    assert not can_use_keys()
    assert "has no termios; Ctrl-C leaves" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: False))
    assert not can_use_keys()
    assert capsys.readouterr().err == ""


def test_the_command_shows_the_table_in_a_file(tmp_path: Path) -> None:
    store = SqliteStore(str(tmp_path / "l.db"))
    create_lease_with_owner(store, Lease("s-0", owner="ann-1"))
    store.close()
    url = f"sqlite://{tmp_path}/l.db"
    table_result = CliRunner().invoke(app, [url, "--by", "group"])
    reason = "ann-1 tells nothing of its reading: watch it (--watch)"
    total = f"1 leases, 0 finished, 0 without an owner; 1 workers; UNKNOWN\nUNKNOWN s-0: {reason}\n"
    assert (table_result.exit_code, table_result.stdout.splitlines()[1].split()[:2], table_result.stderr) == (
        0,
        ["ann", "1"],
        total,
    )
    json_result = CliRunner().invoke(app, [url, "--json"])
    listing = json.loads(json_result.stdout)
    assert listing == {
        "at": listing["at"],
        "leases": [
            {"key": "s-0", "owner": "ann-1", "version": "1", "idle": 0.0, "checkpoint": "TRIM_HORIZON"}
            | {"yields": True, "epoch": 1}
        ],
        "malformed": [],
        "status": "UNKNOWN",
        "says": f"1 of 1 leases, s-0 first: {reason}",
        "lags": {"s-0": {"end": False}},
        "statuses": {"s-0": {"status": "UNKNOWN", "says": reason}},
    }


@pytest.mark.parametrize(
    ("url", "status", "says"),
    [
        ("nowhere://x", 2, "store URL: unknown scheme 'nowhere'"),
        ("sqlite://{}/none.db", 1, "there is no file"),
        ("dynamodb://leases?endpoint=http://127.0.0.1:9", 1, "Could not connect"),
    ],
)
def test_an_unreadable_store_is_reported_in_one_line(tmp_path: Path, url: str, status: int, says: str) -> None:
    result = CliRunner().invoke(app, [url.format(tmp_path)])
    assert (result.exit_code, result.stdout) == (status, "")
    assert result.stderr.startswith("leasehold leases: ")
    assert says in result.stderr
    assert result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("library", ["azure.identity", "botocore.credentials", "botocore.tokens"])
def test_a_missing_identity_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    monkeypatch.setattr(logging.getLogger(library), "level", logging.NOTSET)
    CliRunner().invoke(main, ["simulate", "--help"])
    assert not logging.getLogger(f"{library}.part").isEnabledFor(logging.WARNING)


def progress_annotations(seconds_ago: float, **more: object) -> tuple[tuple[str, str], ...]:
    """Return the progress annotation that the owner, ann, wrote this many seconds ago, right after a read."""
    written_at = time.time() - seconds_ago
    progress_fields: dict[str, Any] = {
        "behind": 0.0,
        "end": True,
        "read": written_at,
        "done": written_at,
        "tried": written_at,
        "lease": 10.0,
    } | more
    return ((PROGRESS_ANNOTATION, Progress(written_at, "ann", **progress_fields).note),)


@pytest.mark.parametrize(
    ("seconds_ago", "more", "status", "says"),
    [
        (1.0, {}, 0, "; OK\n"),
        (None, {}, 3, "UNKNOWN s-0: ann tells nothing of its reading: watch it (--watch)\n"),
        (1.0, {"grows": True, "behind": 7.0, "end": False}, 4, "BEHIND s-0: 7.0 s behind, and falling further"),
        (1.0, {"done": 1.0, "fault": "throttled"}, 5, " s: throttled\n"),
        (1.0, {"done": 1.0, "work": 1.0}, 6, "HUNG s-0: its handler has been at work for "),
        (1.0, {"done": 1.0}, 7, "UNREAD s-0: ann owns it, and has not read it for "),
        (500.0, {}, 8, "ORPHAN s-0: ann owns it and has not been heard of for "),
    ],
)
def test_check_exits_with_the_number_of_the_status(
    tmp_path: Path, seconds_ago: float | None, more: dict[str, Any], status: int, says: str
) -> None:
    store = SqliteStore(str(tmp_path / "l.db"))
    create_lease_with_owner(
        store,
        Lease("s-0", owner="ann", annotations=() if seconds_ago is None else progress_annotations(seconds_ago, **more)),
    )
    store.close()
    check_result = CliRunner().invoke(app, [f"sqlite://{tmp_path}/l.db", "--check"])
    assert (check_result.exit_code, says in check_result.stderr) == (status, True), check_result.stderr
    assert check_result.stdout.splitlines()[1].split()[:2] == ["s-0", "ann"]
    listing_result = CliRunner().invoke(app, [f"sqlite://{tmp_path}/l.db"])
    outputs = [
        re.sub(r"\d+\.\d", "T", result.stdout) for result in (check_result, listing_result)
    ]  # some time passes between the two
    assert (listing_result.exit_code, outputs[0]) == (0, outputs[1])


@pytest.mark.parametrize(("renewed", "word", "seconds"), [(True, "OK", 3.0), (False, "UNKNOWN", 8.0)])
def test_a_single_read_waits_for_the_renewal_that_is_due(*, renewed: bool, word: str, seconds: float) -> None:
    """If the owner was killed, its last annotation is not enough for the command to report OK."""
    store, clock_seconds = MemoryStore(), [0.0]
    rows = [create_lease_with_owner(store, Lease("s-0", owner="ann", annotations=progress_annotations(7.0)))]

    def wait(for_seconds: float) -> None:
        clock_seconds[0] += for_seconds
        if renewed and clock_seconds[0] > 2:
            rows.append(expect_applied(store.write(CheckpointLease(rows[-1], Position(str(int(clock_seconds[0])))))))

    states = keep_confirmed_states(read_states_repeatedly(store, 1.0, wait, clock=lambda: clock_seconds[0]))
    assert (next(states).status.word, clock_seconds[0]) == (word, seconds)


def test_the_command_reports_a_lease_that_was_not_renewed(tmp_path: Path) -> None:
    store = SqliteStore(str(tmp_path / "l.db"))
    create_lease_with_owner(store, Lease("s-0", owner="ann", annotations=progress_annotations(7.0, lease=1.0)))
    store.close()
    result = CliRunner().invoke(app, [f"sqlite://{tmp_path}/l.db", "--check"])
    assert (result.exit_code, "UNKNOWN s-0: ann owns it and has not renewed it for " in result.stderr) == (3, True)


def test_check_watches_until_the_status_is_known_within_a_limit() -> None:
    """The command watches a Java fleet until its status is known. It does not watch a quiet fleet forever."""
    store, clock_seconds = MemoryStore(), [0.0]
    rows = [create_lease_with_owner(store, Lease("s-0", owner="java"))]

    def first_known(wait: Callable[[float], None], *, watch: bool = True) -> str:
        states = read_states_repeatedly(store, 2.0, wait, clock=lambda: clock_seconds[0])
        return next(keep_known_states(states, watch=watch, clock=lambda: clock_seconds[0])).status.word

    def wait(seconds: float) -> None:
        clock_seconds[0] += seconds
        if owner_is_alive and clock_seconds[0] > 7:
            rows.append(expect_applied(store.write(CheckpointLease(rows[-1], Position(str(int(clock_seconds[0])))))))

    owner_is_alive = True
    assert (first_known(wait), clock_seconds[0]) == ("OK", 8.0)
    owner_is_alive, clock_seconds[0] = False, 0.0
    assert (first_known(wait, watch=False), clock_seconds[0]) == ("UNKNOWN", 0.0)
    # No worker renews the lease meanwhile, so after this time its owner is known to be dead.
    assert (first_known(wait), clock_seconds[0]) == ("ORPHAN", 52.0)

    def wait_and_renew(seconds: float) -> None:
        clock_seconds[0] += seconds
        rows.append(expect_applied(store.write(RenewLease(rows[-1]))))

    clock_seconds[0] = 0.0
    assert (first_known(wait_and_renew), clock_seconds[0]) == ("UNKNOWN", 120.0)
