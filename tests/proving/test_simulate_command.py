"""`leasehold simulate` works for one seed, and for many seeds on this machine and on Spark."""

import json
import logging
import subprocess
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from leasehold_lab.commands.simulate import app

SMALL = ("--leases", "20", "--workers", "4+2", "--cycles", "6")
AT_LEAST = {
    "cycles",
    "moves",
    "moves_minimum",
    "claims",
    "failed_writes",
    "spread",
    "groups",
    "unowned_lease_cycles_max",
    "quiet_after",
}


def run_command(*arguments: str) -> Any:  # noqa: ANN401  JSON
    """Run the command in a separate process, because a sweep forks its process. Return the JSON that it prints."""
    command = [sys.executable, "-m", "leasehold.adapters.cli.main", "simulate", *arguments, "--json"]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def simulate_seed(seed: int) -> Any:  # noqa: ANN401  JSON
    """Return the result of one seed, simulated in this process."""
    result = CliRunner().invoke(app, [*SMALL, "--seed", str(seed), "--json"])
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_scale_out_takes_the_least_moves() -> None:
    """The figures of the simulated fleet are printed, and its moves are the least possible."""
    outcome = run_command(*SMALL, "--seed", "7")
    assert outcome.keys() >= AT_LEAST
    # With 20 leases, six workers should have three or four each after growing from four.
    figures = [outcome[name] for name in ("moves", "moves_minimum", "claims", "spread", "groups")]
    assert figures == [6, 6, 0, 1, {"a": 14, "b": 6}]


@pytest.mark.more
def test_workers_that_know_the_table_read_few_rows() -> None:
    """With `--known`, workers read few rows before the event, so large fleets can be simulated."""
    crash_options = ("--leases", "80", "--workers", "8", "--event", "crash", "--pace", "own", "--cycles", "2")
    unknown_result, known_result = run_command(*crash_options), run_command(*crash_options, "--known")
    assert (
        (known_result["claims"], known_result["spread"])
        == (unknown_result["claims"], unknown_result["spread"])
        == (10, 1)
    )
    assert unknown_result["traffic"]["rows"] - known_result["traffic"]["rows"] >= 7 * 80
    rejected_run = CliRunner().invoke(app, [*crash_options[:-4], "--known"])
    assert (rejected_run.exit_code, "use pace own" in rejected_run.stderr) == (2, True)


def test_simulation_restores_the_log_level() -> None:
    """A program that runs a simulation still gets the log messages of its own workers."""
    log = logging.getLogger("leasehold")
    log.setLevel(logging.INFO)
    simulate_seed(7)
    assert log.level == logging.INFO


@pytest.mark.slow
def test_sweep_gives_the_same_results_as_single_seeds() -> None:
    """Each result of a sweep belongs to its seed, and equals the result of a single simulation."""
    outcomes = run_command(*SMALL, "--seed", "7", "--sweep", "3", "--jobs", "2")["seeds"]
    assert [outcome.pop("seed") for outcome in outcomes] == [7, 8, 9]
    assert outcomes == [simulate_seed(seed) for seed in (7, 8, 9)]


@pytest.mark.more
@pytest.mark.spark
def test_sweep_on_spark_gives_the_same_results() -> None:
    """A sweep on Spark simulates the same fleets as a local one."""
    sweep_options = (*SMALL, "--seed", "7", "--sweep", "5")
    assert run_command(*sweep_options, "--master", "local[2]") == run_command(*sweep_options, "--jobs", "1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--leases", "9", "--workers", "2+x"), "workers: '2+x' is not"),
        (("--leases", "9", "--workers", "2", "--rules", "best"), "rules: 'best' is none of"),
        (("--leases", "9", "--workers", "2", "--peer", "best"), "peer: 'best' is none of"),
    ],
)
def test_invalid_option_is_rejected_with_its_name(arguments: tuple[str, ...], message: str) -> None:
    """An invalid option is rejected with a message that names it."""
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
