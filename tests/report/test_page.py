"""`leasehold report`: the page as its reader sees it, and the command."""

import json
import re
from pathlib import Path

import pytest
from outline import Outline
from typer.testing import CliRunner

from leasehold.adapters.cli.report import app
from leasehold.adapters.json_form import lease_json
from leasehold.adapters.report.page import page
from leasehold.adapters.report.report import report
from leasehold.adapters.report.watching import WatchedTable
from leasehold.adapters.worker.progress import NOTE, Progress
from leasehold.balancer.model import SHARD_END, Lease, Position
from leasehold.balancer.rules.shares import Groups
from leasehold.stores.embedded.sqlite import SqliteStore
from leasehold_lab.contract.actors import placed

EVIL = "<script>alert('$x$')</script>&-1"
LEASES = (
    Lease("s-0", owner="east-1", weight=1536),
    Lease("s-1", owner="east-1"),
    Lease("s-2", owner="east-1"),
    Lease("s-3", owner=EVIL, checkpoint=Position("9")),
    Lease("s-4"),
    Lease("s-5", checkpoint=SHARD_END),
)
LATER = (*LEASES[1:4], Lease("s-0", owner=EVIL, weight=1536), Lease("s-4", owner="east-1"), LEASES[5])


def drawn(*readings: tuple[Lease, ...], groups: Groups = "prefix") -> str:
    """Return the page for these listings, a minute apart."""
    snapshots = [WatchedTable(leases, at=60.0 * minute) for minute, leases in enumerate(readings)]
    return page(report("memory://x", snapshots, groups), groups)


def test_the_page_of_one_snapshot() -> None:
    """The page has all shares and problems, and no churn, which one snapshot cannot show."""
    seen = Outline(drawn(LEASES)).texts
    assert seen["h1"] == ["Leases in memory://x"]
    assert seen["h2"] == [
        "By group",
        "Workers by the number of leases they hold",
        "Progress",
        "By worker",
        "Every lease",
    ]
    assert seen["dd"] == ["5", "1", "1", "2", "1 to 3", "2", "1"]
    assert seen["li"] == [
        "1 of 5 unfinished leases has no owner: nobody reads what is in it.",
        "Workers hold between 1 and 3 leases; even would differ by one.",
    ]
    by_group, by_worker = seen["td"][:24], seen["td"][24:36]
    assert by_group == [
        *(EVIL.removesuffix("-1"), "1", "20.0 %", "1", "1", "1", "1", "-"),
        *("east", "3", "60.0 %", "1", "3", "3", "3", "1.50"),
        *("nobody", "1", "20.0 %", "", "", "", "", ""),
    ]
    assert by_worker == [EVIL, "1", "20.0 %", "-", "east-1", "3", "60.0 %", "1.50", "nobody", "1", "20.0 %", ""]


def test_the_page_of_several_snapshots() -> None:
    """The page shows churn and lag."""
    seen = Outline(drawn(LEASES, LATER)).texts
    assert seen["h2"] == [
        "By group",
        "Workers by the number of leases they hold",
        "Progress",
        "Leases per worker over time",
        "Changes of owner over time",
        "How long checkpoints have stood still",
        "Each snapshot",
        "By worker",
        "Every lease",
    ]
    assert seen["dd"][-1] == "2"
    changed = seen["td"].index("1970-01-01 00:01:00 UTC")
    assert seen["td"][changed + 1 : changed + 9] == ["1", "1", "0", "0", "0", "0", "+0 -0", "0"]
    assert seen["td"][seen["td"].index("s-0") :][:3] == ["s-0", EVIL, "60.0 s"]


def test_names_are_text_and_nothing_is_fetched() -> None:
    """A worker's name cannot run a script in the browser of the report's reader."""
    html = drawn(LEASES, LATER)
    assert "<script" not in html
    assert Outline(html).tags.isdisjoint({"script", "link", "img", "iframe", "object"})
    fetched = re.sub(r'xmlns(:xlink)?="[^"]*"', "", html)
    assert re.findall(r"(?:src|href)=[\"'](?!#)|url\((?!#)|https?://", fetched) == []
    assert "…pt>alert('$x$')</script>&" in Outline(html).texts["text"]  # in the charts, with its dollars


def test_charts_take_the_colours_of_the_page() -> None:
    """On a dark page, charts are not black on black."""
    charts = re.findall(r"<svg.*?</svg>", drawn(LEASES, LATER), re.DOTALL)
    assert len(charts) == 7
    used = set(re.findall(r"#[0-9a-f]{6}\b|#[0-9a-f]{3}\b", "".join(charts)))
    assert used == set()
    assert all("var(--ink)" in chart for chart in charts)


def test_an_even_fleet_is_called_even() -> None:
    """Readers do not have to check for themselves that nothing is wrong."""
    html = drawn((Lease("s-0", owner="a-1"), Lease("s-1", owner="b-1")))
    assert "Every unfinished lease has an owner" in html
    assert Outline(html).texts["li"] == []


def test_a_cluster_with_more_than_its_part_is_named() -> None:
    """A lasting imbalance between two clusters, although even for each worker, is named."""
    leases = tuple(Lease(f"s-{n}", owner=f"east-{n % 6}" if n < 18 else f"west-{n % 6}") for n in range(30))
    assert Outline(drawn(leases)).texts["li"] == [
        "Group east holds 18 leases; its 6 of 12 workers would evenly hold 15.",
        "Group west holds 12 leases; its 6 of 12 workers would evenly hold 15.",
        "3 moves would make it even, and no fewer.",
    ]


def test_lag_that_rows_tell_is_drawn_and_hot_shards_are_named() -> None:
    """A drained stream does not look as if it fell behind, and one overloaded partition key does not hide in a mean."""

    def seen(key: str, weight: int, behind: float) -> Lease:
        note = Progress(60.0, "a-1", behind=behind, end=not behind).note
        return Lease(key, owner="a-1", weight=weight, notes=((NOTE, note),))

    quiet = tuple(seen(f"s-{number}", 100, 0.0) for number in range(9))
    found = Outline(drawn((*quiet, seen("s-hot", 9_000, 12.5)), (*quiet, seen("s-hot", 9_000, 0.0)))).texts
    assert "Lag: how far behind the tip of their shards leases are" in found["h2"]
    assert "How long checkpoints have stood still" not in found["h2"]
    assert found["li"] == ["Hot: s-hot carry more than 3 times the mean throughput."]
    assert found["td"][-40:-36] == ["s-0", "a-1", "0.0 s", "0.10"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "leases", [(), (LEASES[4],), (LEASES[5],), tuple(Lease(f"s-{n}", owner=f"w{n}") for n in range(60))]
)
@pytest.mark.parametrize("groups", [None, ("/", ":")])
def test_every_shape_of_table_has_a_page(leases: tuple[Lease, ...], groups: Groups) -> None:
    """An empty table, one without workers, and a fleet too large for its chart all have a report."""
    seen = Outline(drawn(leases, leases, groups=groups)).texts
    assert seen["dd"][0] == str(sum(not lease.ended for lease in leases))


def test_from_a_file_of_leases_to_a_page(tmp_path: Path) -> None:
    """The command turns a URL into a page."""
    store = SqliteStore(str(tmp_path / "l.db"))
    placed(store, Lease("s-0", owner="ann-1"))
    store.close()
    ran = CliRunner().invoke(app, [f"sqlite://{tmp_path}/l.db", "-o", str(tmp_path / "r.html"), "--json"])
    assert (ran.exit_code, ran.stderr) == (0, "")
    assert json.loads(ran.stdout)["distribution"]["workers"] == [{"worker": "ann-1", "leases": 1, "weight": None}]
    assert Outline((tmp_path / "r.html").read_text()).texts["h1"] == [f"Leases in sqlite://{tmp_path}/l.db"]


def test_from_saved_snapshots_to_json(tmp_path: Path) -> None:
    """Input is what `leasehold leases --watch --json` saved."""
    for name, at, leases in (("b", 60, LATER), ("a", 0, LEASES)):
        looked = {"at": at, "leases": [lease_json(lease) for lease in leases], "malformed": []}
        (tmp_path / name).write_text(json.dumps(looked) + "\n")
    ran = CliRunner().invoke(app, [str(tmp_path / "b"), str(tmp_path / "a"), "--json", "--groups", "none"])
    told = json.loads(ran.stdout)
    assert (told["store"], told["at"], told["distribution"]["levels"]) == ("b, a", 60.0, [])
    assert (told["changes"][0]["moved"], told["changes"][0]["claimed"]) == (1, 1)


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["memory://x"], 2, "--output: say where"),
        (["memory://x", "-o", "{}/none/r.html"], 2, "--output: there is no folder"),
        (["memory://x", "-o", "{}"], 2, "is a folder; name a file in it"),
        (["memory://nobody-made-it", "--json"], 2, "is seen by the process that made it alone"),
        (["nowhere://x", "--json"], 2, "store URL: unknown scheme 'nowhere'"),
        (["sqlite://{}/none.db", "--json"], 1, "there is no file"),
        (["{}/none.jsonl", "--json"], 1, "No such file"),
        (["memory://x", "memory://y", "--json"], 2, "FROM: one store"),
        (["{}/empty", "--json"], 2, "there is no snapshot"),
        (["memory://x", "--json", "--groups", ""], 2, "groups"),
    ],
)
def test_a_table_that_cannot_be_reported_is_said_in_one_line(
    tmp_path: Path, arguments: list[str], status: int, says: str
) -> None:
    """The user does not see a traceback."""
    (tmp_path / "empty").touch()
    ran = CliRunner().invoke(app, [argument.format(tmp_path) for argument in arguments])
    assert (ran.exit_code, ran.stdout) == (status, "")
    assert ran.stderr.startswith("leasehold report: ")
    assert says in ran.stderr
    assert ran.stderr.count("\n") == 1
