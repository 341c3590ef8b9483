"""Tests that `leasehold leases` shows a table that has unreadable rows."""

import json
import sqlite3
from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner

from leasehold.adapters.cli.leases import app as leases
from leasehold.balancer.model import Lease
from leasehold.stores.embedded.sqlite import SqliteStore
from leasehold_lab.contract.actors import create_lease_with_owner

SPOILT = {
    "deep": f"notes = '{'[' * 20_000}'",
    "long": f"checkpoint = '{'1' * 130}'",
    "far": "counter = 9223372036854775807",
    "odd": "owner = CAST(x'ff' AS TEXT)",
    "half": 'notes = \'{"a": "\\ud800"}\'',
    "heavy": "weight = 9e999",
}


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Return the URL of a table with one good row, and one bad row of each kind."""
    path = str(tmp_path / "leases.db")
    store = SqliteStore(path)
    for key in ("good", *SPOILT):
        create_lease_with_owner(store, Lease(key, owner="ann"))
    store.close()
    with sqlite3.connect(path) as connection:
        for key, spoil in SPOILT.items():
            connection.execute(f"UPDATE leases SET {spoil} WHERE key = '{key}'")  # noqa: S608  the test's own words
    connection.close()
    return f"sqlite://{path}"


def run_successfully(app: Typer, *arguments: str) -> str:
    """Run the command, check that it succeeds, and return its output."""
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, result.stderr) == (0, "")
    result.stdout.encode()
    return result.stdout


def test_leases_command_names_bad_rows_and_shows_good_ones(url: str) -> None:
    result = CliRunner().invoke(leases, [url])
    assert result.exit_code == 0
    output = result.output
    output.encode()
    assert "1 leases, 0 finished" in output
    assert [key for key in SPOILT if f"{key} cannot be read: " not in output] == []
    listing = json.loads(run_successfully(leases, url, "--json"))
    assert [lease["key"] for lease in listing["leases"]] == ["good"]
    assert sorted(row["key"] for row in listing["malformed"]) == sorted(SPOILT)
