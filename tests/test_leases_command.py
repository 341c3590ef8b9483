"""`leasehold leases`: the tables, the JSON, the watch, and every way it can fail."""

import json
from pathlib import Path

import pytest
from attrs import evolve
from rich.console import Console
from typer.testing import CliRunner

from adapters.cli.lease_tables import Reading, page
from adapters.cli.leases import app, readings
from adapters.lease_json import lease_json
from adapters.plan_question import question
from balancer.model import SHARD_END, Lease, Position, Version
from stores.memory import MemoryStore
from stores.protocol import Listing, Malformed, OutcomeUnknown
from stores.sqlite import SqliteStore

FAR = Position("49590338271490256608559692538361571095921575989136588898", 2)
LEASES = (
    Lease("s-2", checkpoint=FAR, idle=float("inf")),
    Lease("s-0", owner="east-1", idle=0.0, weight=1.5, heir="east-2", yields=True),
    Lease("s-1", owner="east-2", idle=3.25, weight=2.0),
    Lease("s-3", owner="west-1", checkpoint=SHARD_END, idle=9.0),
    Lease("s-4", owner="west", idle=1.0),
)


def text(reading: Reading, by: str | None = None) -> list[str]:
    """What the eye sees, without the lines around it."""
    console = Console(width=100, record=True, force_terminal=False)
    console.print(page(reading, by))
    return [
        " ".join(line.replace("│", "|").split()) for line in console.export_text().splitlines() if line[0] not in "┏┡└"
    ]


def test_one_row_for_each_lease() -> None:
    """An operator would not see which lease nobody reads."""
    assert text(Reading(LEASES)) == [
        "┃ lease ┃ owner ┃ idle s ┃ checkpoint ┃ KB/s ┃ moving to ┃",
        "| s-0 | east-1 | | TRIM_HORIZON | 1.5 | east-2 |",
        "| s-1 | east-2 | 3.2 | TRIM_HORIZON | 2.0 | |",
        "| s-2 | nobody | | …575989136588898/2 | | |",
        "| s-3 | west-1 | 9.0 | SHARD_END | | |",
        "| s-4 | west | 1.0 | TRIM_HORIZON | | |",
        "5 leases, 1 finished, 1 without an owner; 3 workers",
    ]


def test_one_row_for_each_worker_or_group() -> None:
    """An uneven fleet would have to be counted by hand."""
    assert text(Reading(LEASES), "worker") == [
        "┃ worker ┃ leases ┃ share ┃ workers ┃ KB/s ┃ longest idle s ┃",
        "| east-1 | 1 | 25.0% | 1 | 1.5 | |",
        "| east-2 | 1 | 25.0% | 1 | 2.0 | 3.2 |",
        "| nobody | 1 | 25.0% | 0 | | |",
        "| west | 1 | 25.0% | 1 | | 1.0 |",
        "5 leases, 1 finished, 1 without an owner; 3 workers",
    ]
    assert text(Reading(LEASES), "group") == [
        "┃ group ┃ leases ┃ share ┃ workers ┃ KB/s ┃ longest idle s ┃",
        "| (no group) | 1 | 25.0% | 1 | | 1.0 |",
        "| east | 2 | 50.0% | 2 | 3.5 | 3.2 |",
        "| nobody | 1 | 25.0% | 0 | | |",
        "5 leases, 1 finished, 1 without an owner; 3 workers",
    ]


def test_what_is_wrong_stands_below() -> None:
    """A row nobody can read would stop all creation without a word, and markup in a name spoil the screen."""
    assert text(Reading((), (Malformed("[red]s-9", "checkpoint", "is missing"),), "the line is down"))[1:] == [
        "0 leases, 0 finished, 0 without an owner; 0 workers",
        "[red]s-9 cannot be read: checkpoint: is missing",
        "the line is down; trying again",
    ]


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
            weight=0.0,
            held=12.5,
            heir="bob",
            heir_idle=0.5,
            leaving=True,
            epoch=7,
            notes=(("a", "1"),),
        ),
    ],
)
def test_the_json_is_what_plan_reads(lease: Lease) -> None:
    """A listing could not be piped into a plan, and what it says of a lease would be lost on the way."""
    asked = json.dumps({"leases": [lease_json(lease)], "me": {"worker": "me"}})
    assert question(asked.encode()).leases == (lease,)


class Faulty(MemoryStore):
    """Fails at its second listing."""

    looks = 0

    def list(self) -> Listing:
        """As the memory store, but for the second time."""
        self.looks += 1
        if self.looks == 2:
            raise OutcomeUnknown("the line is down")
        return super().list()


def test_a_watch_goes_on_after_a_failed_look() -> None:
    """The screen would be empty, or the command end, just when somebody needs it."""
    store, waits = Faulty(), list[float]()
    store.create(Lease("s-0", owner="ann"))
    looks = readings(store, 2.0, waits.append)
    first, second, third = (next(looks) for _ in range(3))
    assert second == evolve(first, trouble="the line is down")
    assert [lease.key for lease in third.leases] == ["s-0"]
    assert third.leases[0].idle > first.leases[0].idle == 0.0
    assert waits == [2.0, 2.0]


def test_the_command_shows_a_table_of_a_file(tmp_path: Path) -> None:
    """The command would not find its way from a URL to a screen."""
    store = SqliteStore(str(tmp_path / "l.db"))
    store.create(Lease("s-0", owner="ann-1"))
    store.close()
    url = f"sqlite://{tmp_path}/l.db"
    shown = CliRunner().invoke(app, [url, "--by", "group"])
    assert (shown.exit_code, "ann" in shown.stdout, shown.stderr) == (0, True, "")
    printed = CliRunner().invoke(app, [url, "--json"])
    told = json.loads(printed.stdout)
    assert told == {
        "at": told["at"],
        "leases": [
            {"key": "s-0", "owner": "ann-1", "version": "1", "idle": 0.0, "checkpoint": "TRIM_HORIZON"}
            | {"yields": True, "epoch": 1}
        ],
        "malformed": [],
    }


@pytest.mark.parametrize(
    ("url", "status", "says"),
    [
        ("nowhere://x", 2, "store URL: unknown scheme 'nowhere'"),
        ("sqlite://{}/none.db", 1, "there is no file"),
        ("dynamodb://leases?endpoint=http://127.0.0.1:9", 1, "Could not connect"),
    ],
)
def test_a_store_that_cannot_be_read_is_said_in_one_line(tmp_path: Path, url: str, status: int, says: str) -> None:
    """A user would see a traceback; or the command would make an empty table where there is none."""
    ran = CliRunner().invoke(app, [url.format(tmp_path)])
    assert (ran.exit_code, ran.stdout) == (status, "")
    assert ran.stderr.startswith("leasehold leases: ")
    assert says in ran.stderr
    assert ran.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
