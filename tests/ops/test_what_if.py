"""Tests that `what-if` forecasts, from the current table, the moves that follow if workers join or leave."""

import json
from pathlib import Path

import pytest
from attrs import evolve
from typer.testing import CliRunner

from leasehold.adapters.ops.watching import WatchedTable
from leasehold.balancer.config import Config
from leasehold.balancer.model import History, Lease
from leasehold.stores.embedded.sqlite import SqliteStore
from leasehold_lab.commands.what_if import app
from leasehold_lab.contract.actors import create_lease_with_owner
from leasehold_lab.simulator.question import FleetForecast
from leasehold_lab.what_if import FleetChange, choose_joining_names, forecast_change

CONFIG = Config()
KEYS = tuple(f"orders:shard-{number:02}" for number in range(12))
ROWS = tuple(
    Lease(key, owner=f"w-{number % 3}", idle=1.0, yields=True, annotations=(("process", f"p/w-{number % 3}"),))
    for number, key in enumerate(KEYS)
)


def forecast_of(change: FleetChange, rows: tuple[Lease, ...] = ROWS) -> FleetForecast:
    """Return the forecast of a change in this table. By default, it has three workers with four leases each."""
    return forecast_change(WatchedTable(rows, History(), 12.0), CONFIG, evolve(change, cycles=6.0))


def test_no_lease_moves_without_a_change() -> None:
    result = forecast_of(FleetChange())
    assert (result.moves, result.before, result.held) == ((), (), {"w-0": 4, "w-1": 4, "w-2": 4})


def test_a_newcomer_gets_its_share_with_the_fewest_moves() -> None:
    result = forecast_of(FleetChange(add=("new",)))
    assert result.held == {"new": 3, "w-0": 3, "w-1": 3, "w-2": 3}
    assert {move.key for move in result.moves} < set(KEYS)
    assert [(move.after, move.before in {"w-0", "w-1", "w-2"}) for move in result.moves] == [("new", True)] * 3
    assert result.figures.moves == result.figures.moves_minimum == 3


@pytest.mark.parametrize(("ending", "least"), [("leave", 0.0), ("crash", 10.0)])
def test_the_leases_of_a_leaving_worker_find_owners(ending: str, least: float) -> None:
    result = forecast_of(FleetChange(remove=("w-1",), ending="crash" if ending == "crash" else "leave"))
    assert result.held == {"w-0": 6, "w-2": 6}
    assert len(result.moves) == 4
    assert result.figures.seconds >= least
    assert (result.figures.unowned_lease_cycles_max * CONFIG.cycle_seconds >= 10.0) == (ending == "crash")


def test_the_same_seed_gives_the_same_forecast() -> None:
    assert forecast_of(FleetChange(add=("x",), seed=3)) == forecast_of(FleetChange(add=("x",), seed=3))


def test_newcomers_get_unused_names() -> None:
    assert choose_joining_names(["2", "z"], ["added-1"]) == ("added-2", "added-3", "z")
    with pytest.raises(ValueError, match="--add: there is a worker 'w-1' already"):
        choose_joining_names(["w-1"], ["w-1"])
    with pytest.raises(ValueError, match="at most 10000 workers"):
        choose_joining_names(["9" * 5000], [])


def test_the_command_prints_moves_seconds_and_balance(tmp_path: Path) -> None:
    store = SqliteStore(str(tmp_path / "l.db"))
    for row in ROWS:
        create_lease_with_owner(store, row)
    store.close()
    arguments = [f"sqlite://{tmp_path}/l.db", "--for", "0", "--add", "1", "--cycles", "6"]
    result = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert {worker["worker"]: worker["leases"] for worker in result["workers"]}["added-1"] == 3
    assert (len(result["moves"]), result["figures"]["moves"], result["moves_before"]) == (3, 3, 0)
    output_lines = CliRunner().invoke(app, arguments).stdout.splitlines()
    assert output_lines[0].startswith("3 moves of least possible 3, 0 claims, over after ")
    assert output_lines[3].split() == ["WORKER", "LEASES", "GAINED", "GIVEN", "KB/S"]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ((), "the table has no unfinished lease; there is nothing to simulate"),
        ((Lease("s-0", owner=None),), "--add: nobody holds a lease; say how many workers come"),
    ],
)
def test_a_fleet_without_shards_or_workers_is_not_simulated(rows: tuple[Lease, ...], says: str) -> None:
    with pytest.raises(ValueError, match=f"^{says}$"):
        forecast_of(FleetChange(), rows)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--remove", "w-9"], "--remove: no living worker 'w-9'"),
        (["--add", "w-1"], "--add: there is a worker 'w-1' already"),
        (["--rules", "none"], "rules"),
    ],
)
def test_an_impossible_change_exits_2(tmp_path: Path, arguments: list[str], says: str) -> None:
    store = SqliteStore(str(tmp_path / "l.db"))
    create_lease_with_owner(store, ROWS[1])
    store.close()
    result = CliRunner().invoke(app, [f"sqlite://{tmp_path}/l.db", "--for", "0", *arguments])
    assert (result.exit_code, result.stdout) == (2, "")
    assert says in result.stderr
