"""Tests the whole swap of tables, from workers that do not know TO yet until its end, and the way back."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from uuid import uuid4

import pytest
from attrs import evolve
from typer.testing import CliRunner

from leasehold.adapters.cli.common.columns import format_as_plain_text
from leasehold.adapters.cli.lease_tables import describe_totals_and_problems, tabulate_leases
from leasehold.adapters.cli.leases import app as leases_command
from leasehold.adapters.cli.steer.explain import app as explain
from leasehold.adapters.cli.steer.swap import app as swap
from leasehold.adapters.ops.serving.app import prometheus_text
from leasehold.adapters.ops.serving.watcher import FleetRecord, TableWatcher, ViewRequest
from leasehold.adapters.ops.swapping import (
    SwapProgress,
    end_swap,
    move_until_arrived,
    open_for_reading,
    read_control,
    read_swap_progress,
    set_direction,
    wait_until_known,
)
from leasehold.adapters.ops.watching import TableWatch, describe_table
from leasehold.adapters.worker.scheduler import Unread
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.config import Config
from leasehold.balancer.model import SHARD_END, Lease, Position
from leasehold.errors import StoreError
from leasehold.stores.embedded.memory import MemoryStore
from leasehold.stores.protocol import Outcome, PassingStore, Store
from leasehold.stores.swap import (
    CONTROL_KEY,
    DIRECTION,
    FROM,
    MOVED_OWNER_PREFIX,
    MOVED_TO,
    TO,
    SwapStore,
    check_tables_differ,
    get_or_create_control_row,
    reject_moved,
    split_version,
    swap_is_over,
    swap_notices,
)
from leasehold.stores.urls import display_name, open_store
from leasehold.stores.writes import ClaimLease, CreateLease, DeleteLease, ReleaseLease, RenewLease, Write
from leasehold_lab.commands.what_if import app as what_if
from leasehold_lab.contract.actors import create_owned_lease, expect_applied, read_stored_lease
from leasehold_lab.simulator.world.world import ListSource

NAMES = ("memory://from", "memory://to")


@pytest.fixture
def tables() -> tuple[Store, Store]:
    """Return two tables. FROM has three leases: one that ann owns, a finished one, and one without an owner."""
    pair = (MemoryStore(), MemoryStore())
    get_or_create_control_row(pair, NAMES)
    store = open_joined_store(pair)
    create_owned_lease(store, "ann", "s-0", Position("5"))
    expect_applied(store.write(CreateLease(Lease("s-1", checkpoint=SHARD_END))))
    expect_applied(store.write(CreateLease(Lease("s-2", checkpoint=Position("7")))))
    return pair


def open_joined_store(tables: tuple[Store, Store]) -> SwapStore:
    """Return the store through which a worker uses both tables."""
    return SwapStore(tables, NAMES[TO], control_interval_seconds=0.0)


def pause_with_renewals(tables: tuple[Store, Store]) -> Callable[[float], object]:
    """Return a replacement for `sleep` in which every owner renews its leases once."""
    store = open_joined_store(tables)

    def pause(_seconds: float) -> None:
        for lease in store.list().leases:
            if lease.owner:
                expect_applied(store.write(RenewLease(lease)))

    return pause


def test_a_swap_moves_all_leases_and_ends(tables: tuple[Store, Store]) -> None:
    """Leases without an owner do not delay the swap, and the fleet does not need FROM afterwards."""
    store = open_joined_store(tables)
    wait_until_known(tables, store, NAMES[TO], 0.0)
    set_direction(tables, "to")
    reports = list(move_until_arrived(tables, store, NAMES[TO], pause_with_renewals(tables)))
    assert reports == [
        SwapProgress("to", there=3, moving=0, gone=0, unaware=()),
        SwapProgress("to", there=0, moving=0, gone=3, unaware=()),
    ]
    end_swap(tables, store, NAMES[TO], pause_with_renewals(tables))
    rows = [(row.key, row.owner, row.checkpoint.sequence) for row in tables[TO].list().leases]
    assert rows == [("s-0", "ann", "5"), ("s-1", None, "SHARD_END"), ("s-2", None, "7")]
    assert read_stored_lease(store, "s-0").owner == "ann"
    with pytest.raises(StoreError, match="no swap is under way"):
        read_swap_progress(tables, store, NAMES[TO])
    assert swap_is_over(tables, NAMES)


def carry_out_swap(tables: tuple[Store, Store]) -> None:
    """Move all leases to TO, and end the swap."""
    store = open_joined_store(tables)
    set_direction(tables, "to")
    list(move_until_arrived(tables, store, NAMES[TO], pause_with_renewals(tables)))
    end_swap(tables, store, NAMES[TO], pause_with_renewals(tables))


def test_a_worker_restarted_with_both_stores_after_a_swap_uses_to(tables: tuple[Store, Store]) -> None:
    """The restarted worker uses the leases in TO, and does not list the control row as a lease."""
    carry_out_swap(tables)
    for _ in range(2):
        assert get_or_create_control_row(tables, NAMES) is None
        restarted = SwapStore(tables, NAMES[TO], control_interval_seconds=0.0)
        assert [lease.key for lease in restarted.list().leases if lease.key == CONTROL_KEY] == []
        assert expect_applied(restarted.write(RenewLease(read_stored_lease(restarted, "s-0")))).checkpoint == Position(
            "5"
        )
    expect_applied(restarted.write(CreateLease(Lease("s-9"))))
    assert [row.key for row in tables[TO].get(["s-9"])] == ["s-9"]
    assert tables[FROM].get(["s-9"]) == ()


def test_a_worker_that_knows_only_from_learns_where_the_leases_are(tables: tuple[Store, Store]) -> None:
    carry_out_swap(tables)
    with pytest.raises(StoreError, match=f"have moved to {NAMES[TO]} by `leasehold swap`; start the worker with it"):
        Worker(store=tables[FROM], source=ListSource(), me="w", consumer=Unread()).turn(0.0)
    reject_moved(tables[TO].list())
    assert len(tables[TO].list().leases) == 3
    assert "that swap is over: look there" in swap_notices(tables[FROM].list().leases)[-1]
    assert swap_notices(tables[TO].list().leases) == ()


def test_an_ended_swap_shows_both_tables_and_its_end(tmp_path: Path) -> None:
    urls = (f"sqlite://{tmp_path}/from.db", f"sqlite://{tmp_path}/to.db")
    tables = open_store(urls[FROM]), open_store(urls[TO])
    with closing(tables[FROM]), closing(tables[TO]):
        expect_applied(tables[FROM].write(CreateLease(Lease("s-1", checkpoint=SHARD_END))))
        names = (display_name(urls[FROM]), display_name(urls[TO]))
        get_or_create_control_row(tables, names)
        store = SwapStore(tables, names[TO], control_interval_seconds=0.0)
        set_direction(tables, "to")
        list(move_until_arrived(tables, store, names[TO], lambda _seconds: None))
        began_at = int(time.time())
        end_swap(tables, store, names[TO], lambda _seconds: None)
    status = json.loads(CliRunner().invoke(swap, [*urls, "--status", "--json"]).stdout)
    assert began_at <= status.pop("ended_at") <= time.time() + 1
    assert status == {"way": "over", "from": names[FROM], "to": names[TO]}
    status_text = CliRunner().invoke(swap, [*urls, "--status"]).stdout
    assert status_text.startswith(f"from {names[FROM]} to {names[TO]} (ended 20")
    leases_json = CliRunner().invoke(leases_command, [urls[FROM], "--json"])
    assert [lease["key"] for lease in json.loads(leases_json.stdout)["leases"]] == ["s-1"]
    leases_text = CliRunner().invoke(leases_command, [urls[FROM], "--wide"])
    assert "0 leases, 0 finished, 0 without an owner" in leases_text.stderr
    assert f"the leases have moved to {names[TO]}" in leases_text.stderr
    assert leases_text.stderr.endswith("that swap is over: look there; 1 rows that it left here are not shown\n")


def test_an_interrupted_end_of_a_swap_is_completed_by_the_next_run(
    tables: tuple[Store, Store],
) -> None:
    """As long as the control row exists, the swap is not over, even if the row that marks its end exists, too."""
    store = open_joined_store(tables)
    set_direction(tables, "to")
    list(move_until_arrived(tables, store, NAMES[TO], pause_with_renewals(tables)))
    expect_applied(
        tables[FROM].write(CreateLease(Lease(CONTROL_KEY, checkpoint=SHARD_END, annotations=((MOVED_TO, NAMES[TO]),))))
    )
    assert not swap_is_over(tables, NAMES)
    assert get_or_create_control_row(tables, NAMES) is not None
    end_swap(tables, store, NAMES[TO], pause_with_renewals(tables))
    assert swap_is_over(tables, NAMES)


def test_an_end_of_a_swap_that_was_interrupted_between_two_writes_is_completed_by_the_next_run(
    tables: tuple[Store, Store],
) -> None:
    class Interrupting(PassingStore):
        """A table in which the program is interrupted after it has created or deleted a row."""

        def write(self, write: Write) -> Outcome:
            outcome = super().write(write)
            if isinstance(write, CreateLease | DeleteLease):
                raise KeyboardInterrupt
            return outcome

    store = open_joined_store(tables)
    set_direction(tables, "to")
    list(move_until_arrived(tables, store, NAMES[TO], pause_with_renewals(tables)))
    with pytest.raises(KeyboardInterrupt):
        end_swap((Interrupting(tables[FROM]), Interrupting(tables[TO])), store, NAMES[TO], lambda _seconds: None)
    assert get_or_create_control_row(tables, NAMES) is not None
    end_swap(tables, store, NAMES[TO], lambda _seconds: None)
    assert swap_is_over(tables, NAMES)


def test_a_swap_can_go_back_until_it_ends(tables: tuple[Store, Store]) -> None:
    store = open_joined_store(tables)
    set_direction(tables, "to")
    list(move_until_arrived(tables, store, NAMES[TO], pause_with_renewals(tables)))
    set_direction(tables, "from")
    (*_, final_report) = move_until_arrived(tables, store, NAMES[TO], pause_with_renewals(tables))
    assert final_report == SwapProgress("from", there=3, moving=0, gone=0, unaware=())
    assert {lease.version.partition(":")[0] for lease in store.list().leases} == {"from"}
    set_direction(tables, "closed")
    with pytest.raises(StoreError, match="swap in the other direction"):
        set_direction(tables, "from")


def test_a_reversed_swap_completes_moves_of_unowned_leases(tables: tuple[Store, Store]) -> None:
    """A lease may have been marked just before the direction changed, and no worker may be left to move it."""
    (row,) = tables[FROM].get(["s-2"])
    expect_applied(tables[FROM].write(ReleaseLease(row, "", MOVED_OWNER_PREFIX)))
    set_direction(tables, "from")
    reports = list(
        islice(move_until_arrived(tables, open_joined_store(tables), NAMES[TO], pause_with_renewals(tables)), 5)
    )
    assert (reports[0].moving, reports[-1]) == (1, SwapProgress("from", there=3, moving=0, gone=0, unaware=()))


def test_the_end_of_a_swap_includes_leases_that_workers_create_meanwhile(tables: tuple[Store, Store]) -> None:
    """A worker creates new leases in FROM until it reads that the swap is closed."""
    store, worker_store = open_joined_store(tables), SwapStore(tables, NAMES[TO], control_interval_seconds=60.0)
    set_direction(tables, "to")
    list(move_until_arrived(tables, store, NAMES[TO], pause_with_renewals(tables)))
    assert len(worker_store.list().leases) == 3
    new_leases = [Lease("s-9")]

    def create_once(_seconds: float) -> None:
        while new_leases:
            expect_applied(worker_store.write(CreateLease(new_leases.pop())))

    end_swap(tables, store, NAMES[TO], create_once)
    assert [row.key for row in tables[TO].list().leases] == ["s-0", "s-1", "s-2", "s-9"]


def test_a_worker_that_slept_through_the_end_of_a_swap_creates_new_leases_in_to(tables: tuple[Store, Store]) -> None:
    sleeping_store = open_joined_store(tables)
    set_direction(tables, "to")
    assert len(sleeping_store.list().leases) == 3
    carry_out_swap(tables)
    expect_applied(sleeping_store.write(CreateLease(Lease("s-9"))))
    assert [[row.key for row in table.get(["s-9"])] for table in tables] == [[], ["s-9"]]


def test_a_swap_waits_for_workers_that_do_not_know_to(tables: tuple[Store, Store]) -> None:
    """A worker that does not know TO would claim a lease in FROM although that lease is already in TO."""
    (unowned_lease,) = tables[FROM].get(["s-2"])
    expect_applied(tables[FROM].write(ClaimLease(unowned_lease, "bob")))
    store = open_joined_store(tables)
    with pytest.raises(StoreError, match=r"do not know TO own leases of FROM: bob; start them again with --to TO"):
        wait_until_known(tables, store, NAMES[TO], 0.0)
    pauses: list[float] = []

    def restart_worker(seconds: float) -> None:
        pauses.append(seconds)
        expect_applied(store.write(ClaimLease(read_stored_lease(store, "s-2"), "bob")))

    wait_until_known(tables, store, NAMES[TO], 60.0, restart_worker)
    assert pauses == [1.0]


def test_a_swap_is_rejected_next_to_java_workers(tables: tuple[Store, Store]) -> None:
    """Java workers could not find the leases that have moved to TO."""
    rows = tables[FROM]._table.rows  # type: ignore[attr-defined]  # noqa: SLF001  as another library writes it
    rows["s-2"] = evolve(rows["s-2"], owner="java-1")
    with pytest.raises(StoreError, match=r"workers of the KCL or of an SDK share FROM \(java-1\)"):
        wait_until_known(tables, open_joined_store(tables), NAMES[TO], 60.0)


@pytest.fixture
def named_tables(monkeypatch: pytest.MonkeyPatch) -> tuple[tuple[str, str], tuple[Store, Store], list[Store]]:
    """Return the URLs of two tables, their stores, and a list of those that the command closes. Nothing waits."""
    urls = (f"memory://{uuid4().hex}", f"memory://{uuid4().hex}")
    closed_stores: list[Store] = []

    class NotedStore(PassingStore):
        def close(self) -> None:
            closed_stores.append(self)

    pauses: list[float] = []

    def note_pause(seconds: float) -> None:
        pauses.append(seconds)
        assert len(pauses) < 20

    command = import_module("leasehold.adapters.cli.steer.swap")
    for function in (end_swap, move_until_arrived, wait_until_known):
        monkeypatch.setattr(command, function.__name__, partial(function, pause=note_pause))
    monkeypatch.setattr(command, "open_store", lambda url, **_options: NotedStore(open_store(url)))
    return urls, (open_store(urls[FROM]), open_store(urls[TO])), closed_stores


@pytest.mark.parametrize("options", [[], ["--status"], ["--back"]])
def test_the_command_closes_both_tables_whether_or_not_it_succeeds(
    named_tables: tuple[tuple[str, str], tuple[Store, Store], list[Store]], options: list[str]
) -> None:
    urls, tables, closed_stores = named_tables
    expect_applied(tables[FROM].write(CreateLease(Lease("s-1", checkpoint=SHARD_END))))
    assert CliRunner().invoke(swap, [*urls, *options]).exit_code == (1 if options else 0)
    assert len(closed_stores) == 2
    assert CliRunner().invoke(swap, [*urls, "--status"]).exit_code == (1 if options else 0)
    assert len(closed_stores) == 4


@pytest.mark.parametrize("option", ["--status", "--back"])
def test_only_a_swap_that_begins_creates_its_table(tmp_path: Path, option: str) -> None:
    urls = (f"sqlite://{tmp_path}/from.db", f"sqlite://{tmp_path}/to.db")
    open_store(urls[FROM]).close()
    assert CliRunner().invoke(swap, [*urls, option]).exit_code == 1
    assert not (tmp_path / "to.db").exists()


def test_the_command_goes_back_and_forth(
    named_tables: tuple[tuple[str, str], tuple[Store, Store], list[Store]],
) -> None:
    """After the way back, workers move no lease in either direction until the next swap begins."""
    urls, tables, _ = named_tables
    for key in ("s-1", "s-2"):
        expect_applied(tables[FROM].write(CreateLease(Lease(key, checkpoint=Position("5")))))
    names = (display_name(urls[FROM]), display_name(urls[TO]))
    get_or_create_control_row(tables, names)
    set_direction(tables, "to")
    store = SwapStore(tables, names[TO], control_interval_seconds=0.0)
    store.move_unowned(read_stored_lease(store, "s-1"), TO)
    assert CliRunner().invoke(swap, [*urls, "--back"]).exit_code == 0
    assert [split_version(lease)[0] for lease in store.list().leases] == [FROM, FROM]
    assert read_control(tables).annotation(DIRECTION) == ""
    assert CliRunner().invoke(swap, [*urls]).exit_code == 0
    assert swap_is_over(tables, names)
    assert [lease.key for lease in tables[TO].list().leases] == ["s-1", "s-2"]


def test_the_command_moves_nothing_while_an_owner_does_not_know_to(
    named_tables: tuple[tuple[str, str], tuple[Store, Store], list[Store]],
) -> None:
    urls, tables, _ = named_tables
    create_owned_lease(tables[FROM], "ann", "s-1", Position("5"))
    result = CliRunner().invoke(swap, [*urls, "--wait", "0"])
    assert (result.exit_code, "start them again with --to TO" in result.stderr) == (1, True)
    assert not read_control(tables).annotation(DIRECTION)


def test_the_control_row_is_no_lease(tables: tuple[Store, Store]) -> None:
    assert read_control(tables).key == CONTROL_KEY
    assert CONTROL_KEY not in {lease.key for lease in open_joined_store(tables).list().leases}


@pytest.mark.parametrize(
    ("to", "why"),
    [("sqlite://leases.db", "it is the store that already has the leases"), ("file:///b.jsonl", "file:// is a backup")],
)
def test_an_unsuitable_to_is_rejected(to: str, why: str) -> None:
    """Leases must not be moved into their own table, or into a file that workers cannot share."""
    with pytest.raises(ValueError, match=f"--to: {why}"):
        check_tables_differ("sqlite://leases.db", to, "--to")


@pytest.fixture
def half_way(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """Yield the URLs of two tables. One of three leases has moved, one is moving, and one is still in FROM."""
    urls = (f"sqlite://{tmp_path}/from.db", f"sqlite://{tmp_path}/to.db")
    with closing(open_store(urls[FROM])) as source, closing(open_store(urls[TO])) as target:
        both_tables: tuple[Store, Store] = (source, target)
        get_or_create_control_row(both_tables, (display_name(urls[FROM]), display_name(urls[TO])))
        store = SwapStore(both_tables, display_name(urls[TO]), control_interval_seconds=0.0)
        owned_leases = [create_owned_lease(store, "ann", f"s-{number}", Position("5")) for number in range(3)]
        set_direction(both_tables, "to")
        expect_applied(store.write(RenewLease(owned_leases[0])))
        (row,) = source.get(["s-1"])
        expect_applied(source.write(ReleaseLease(row, "", f"{MOVED_OWNER_PREFIX}ann")))
        yield urls


def test_leases_shows_the_table_of_each_lease_in_a_swap(half_way: tuple[str, str]) -> None:
    """The command must read both tables. In FROM alone, moved leases would look lost and their owners unknown."""
    with closing(open_for_reading(*half_way)) as swap_store:
        table = TableWatch(swap_store, 10.0, 10.0).look()
    document = describe_table(table, Config())
    assert [(lease["key"], lease["owner"], lease["place"]) for lease in document["leases"]] == [
        ("s-0", "ann", "TO"),
        ("s-1", "ann", "FROM>TO"),
        ("s-2", "ann", "FROM"),
    ]
    progress_text = "3 leases: 1 in FROM, 1 on their way, 1 in TO; bound for TO"
    assert (document["swap"], document["swapping"]) == (
        {"way": "to", "there": 1, "moving": 1, "gone": 1},
        [f"swap: {progress_text}"],
    )
    assert [worker["worker"] for worker in document["workers"]] == ["ann"]
    total, problems = describe_totals_and_problems(table)
    assert (total.endswith(f"; swap of {progress_text}"), [line for line in problems if "swap" in line]) == (True, [])
    header, *rows = format_as_plain_text(tabulate_leases(table, None, full=True)).splitlines()
    assert header.split()[-1] == "TABLE"
    assert rows[0].endswith(" TO")


def test_a_finished_lease_that_has_moved_has_the_status_ok(tables: tuple[Store, Store]) -> None:
    """Only unfinished leases need a look at the other table."""
    set_direction(tables, "to")
    store = open_joined_store(tables)
    expect_applied(store.move_unowned(read_stored_lease(store, "s-1"), TO))
    expect_applied(store.move_unowned(read_stored_lease(store, "s-2"), TO))
    statuses = TableWatch(tables[FROM], 10.0, 10.0).look().statuses
    assert (statuses["s-1"].word, statuses["s-2"].word) == ("OK", "UNKNOWN")


def test_serve_shows_both_tables_of_a_swap(half_way: tuple[str, str]) -> None:
    """The page and the metrics must not report half of the fleet as dead."""
    with closing(open_for_reading(*half_way)) as swap_store, closing(FleetRecord()) as record:
        watcher = TableWatcher("sqlite://from.db", swap_store, Config(), record, every=60.0)
        watcher.look()
        assert [(row["key"], row["place"]) for row in watcher.view(ViewRequest(sort="key"))["rows"]] == [
            ("s-0", "TO"),
            ("s-1", "FROM>TO"),
            ("s-2", "FROM"),
        ]
        metrics = prometheus_text([(watcher.state(), True)])
        assert [line for line in metrics.splitlines() if line.startswith("leasehold_swap_leases")] == [
            f'leasehold_swap_leases{{store="sqlite://from.db",place="{place}"}} 1'
            for place in ("FROM", "on their way", "TO")
        ]
        explanation = watcher.explain(None, "s-1")
    assert explanation is not None
    assert "a swap is moving it from FROM to TO" in explanation["past"]


@pytest.mark.parametrize("side", [FROM, TO])
def test_explain_of_one_table_reports_the_running_swap(half_way: tuple[str, str], side: int) -> None:
    result = CliRunner().invoke(explain, [half_way[side], "--for", "0"])
    warnings = ("2 leases have moved or are moving", "a swap into this table is not over")
    assert (result.exit_code, warnings[side] in result.stdout) == (0, True)
    result_for_both = CliRunner().invoke(explain, [half_way[FROM], "--to", half_way[TO], "--for", "0"])
    assert (result_for_both.exit_code, result_for_both.stdout.count("moved:")) == (0, 0)
    assert "swap: 3 leases: 1 in FROM, 1 on their way, 1 in TO; bound for TO" in result_for_both.stdout


def test_what_if_simulates_the_fleet_of_both_tables(half_way: tuple[str, str]) -> None:
    """A forecast counts the leases of both tables, and does not mistake a moved lease's mark for a worker."""
    arguments = ["--to", half_way[TO], "--for", "0", "--add", "1", "--cycles", "3", "--json"]
    forecast = json.loads(CliRunner().invoke(what_if, [half_way[FROM], *arguments]).stdout)
    assert {worker["worker"]: worker["leases"] for worker in forecast["workers"]} == {"added-1": 1, "ann": 2}
    assert forecast["swap"] == ["swap: 3 leases: 1 in FROM, 1 on their way, 1 in TO; bound for TO"]
    output_lines = CliRunner().invoke(what_if, [half_way[FROM], *arguments[:-1]]).stdout.splitlines()
    assert output_lines[:2] == [*forecast["swap"], ""]
    assert output_lines[2].startswith("1 moves of least possible 1, 0 claims, over after ")


def test_tables_without_a_swap_are_not_shown_together(half_way: tuple[str, str], tmp_path: Path) -> None:
    open_store(other_url := f"sqlite://{tmp_path}/other.db").close()
    with pytest.raises(StoreError, match="no swap is under way between these tables"):
        open_for_reading(half_way[FROM], other_url)
    with pytest.raises(StoreError, match="is the goal of a swap from"):
        open_for_reading(other_url, half_way[TO])
    with pytest.raises(ValueError, match="--to: it is the store that already has the leases"):
        open_for_reading(half_way[TO], half_way[TO])


@pytest.mark.parametrize("over", [False, True], ids=["later swap under way", "later swap over"])
def test_a_worker_of_an_ended_swap_cannot_list_during_a_later_one(tables: tuple[Store, Store], over: bool) -> None:
    """The marks in TO belong to the later swap, and other workers read these leases. The worker must not claim them."""
    carry_out_swap(tables)
    old_store = SwapStore(tables, NAMES[TO], control_interval_seconds=0.0)
    later_tables, names = (tables[TO], MemoryStore()), (NAMES[TO], "memory://later")
    get_or_create_control_row(later_tables, names)
    later_store = SwapStore(later_tables, names[TO], control_interval_seconds=0.0)
    assert len(old_store.list().leases) == 3
    set_direction(later_tables, "to")
    if over:
        list(move_until_arrived(later_tables, later_store, names[TO], pause_with_renewals(later_tables)))
        end_swap(later_tables, later_store, names[TO], pause_with_renewals(later_tables))
        with pytest.raises(StoreError, match="have moved to memory://later by a later"):
            get_or_create_control_row(tables, NAMES)
    else:
        expect_applied(later_store.write(RenewLease(read_stored_lease(later_store, "s-0"))))
        assert get_or_create_control_row(tables, NAMES) is None
    for store in (old_store, SwapStore(tables, NAMES[TO], control_interval_seconds=0.0)):
        with pytest.raises(StoreError, match="have moved to"):
            store.list()
