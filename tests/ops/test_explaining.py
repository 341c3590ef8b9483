"""Tests that `leasehold explain` describes why a worker acts and why a lease stays where it is."""

import json
import re
from pathlib import Path

import pytest
from attrs import evolve
from typer.testing import CliRunner

from leasehold.adapters.cli.steer.explain import app
from leasehold.adapters.consumer.status import Status
from leasehold.adapters.ops import explaining
from leasehold.adapters.ops.explaining import RULE_SENTENCES, plans, rules_of, story
from leasehold.adapters.ops.watching import WatchedTable, shares, watch_for
from leasehold.adapters.worker.progress import PROGRESS_ANNOTATION, Progress
from leasehold.balancer.actions import Claim, Steal
from leasehold.balancer.config import Config
from leasehold.balancer.model import SHARD_END, History, Lease
from leasehold.balancer.rules.kcl import Kcl
from leasehold.stores.embedded.memory import MemoryStore
from leasehold.stores.embedded.sqlite import SqliteStore
from leasehold.stores.writes import RenewLease
from leasehold_lab.contract.actors import create_lease_with_owner, expect_applied

CONFIG = Config()
OVER = "nothing: it holds more than its share, and takes no leases from others (M3)"


def held(key: str, owner: str | None, idle: float = 1.0) -> Lease:
    """Return a lease as one of our workers writes it."""
    annotations = (("process", f"p/{owner}"),) if owner else ()
    return Lease(key, owner=owner, idle=idle, yields=owner is not None, annotations=annotations)


FLEET = (*(held(f"s-{number}", "a") for number in range(5)), held("s-5", "b"), Lease("s-6", checkpoint=SHARD_END))


def table(*leases: Lease) -> WatchedTable:
    """Return a table with these leases that has been watched for 12 seconds."""
    return WatchedTable(leases, History(), 12.0)


def test_exactly_the_rules_of_plans_have_a_sentence() -> None:
    balancer_folder = Path(__file__).parents[2] / "leasehold" / "balancer"
    rules_used = {
        rule
        for path in balancer_folder.rglob("*.py")
        for rule in re.findall(r'"([A-Z]\d+)"', path.read_text(encoding="utf-8"))
    }
    assert len(rules_used) > 25
    assert RULE_SENTENCES.keys() == rules_used | {"M3"}, "M3 says why a worker does nothing"


def test_a_worker_is_explained_with_its_share_and_next_actions() -> None:
    plan_a, plan_b = plans(table(*FLEET), CONFIG)
    assert (plan_a.held, plan_a.share, plan_a.ours, plan_a.lines) == (5, 3, True, (OVER,))
    assert (plan_b.held, plan_b.share) == (1, 3)
    assert [line.split(" s-")[0] for line in plan_b.lines] == ["would request"] * 2
    assert all(line.endswith("(H2)") for line in plan_b.lines)


def test_a_worker_at_its_share_is_explained() -> None:
    worker_plans = plans(table(held("s-0", "a"), held("s-1", "b")), CONFIG)
    assert [plan.lines for plan in worker_plans] == [("nothing: it holds its share",)] * 2


def test_a_future_worker_can_be_explained() -> None:
    (newcomer,) = (plan for plan in plans(table(*FLEET), CONFIG, ("c",)) if plan.worker == "c")
    assert (newcomer.held, newcomer.share, len(newcomer.actions)) == (0, 2, 1)


def test_a_worker_of_another_library_is_distinguished() -> None:
    java_lease = Lease("s-7", owner="java", idle=1.0)
    assert [(plan.worker, plan.ours) for plan in plans(table(*FLEET, java_lease), CONFIG)] == [
        ("a", True),
        ("b", True),
        ("java", False),
    ]


def test_a_dead_owner_is_not_counted_and_its_lease_is_claimed() -> None:
    dead_lease = evolve(held("s-5", "b"), idle=20.0)
    worker_plans = plans(table(*FLEET[:5], dead_lease, held("s-8", "c")), CONFIG)
    assert [plan.worker for plan in worker_plans] == ["a", "c"]
    lease_story = story(table(dead_lease), CONFIG, dead_lease, worker_plans)
    assert lease_story.past[0] == "b owns it and has not renewed it for 20.0 s: it counts as dead"
    assert lease_story.should.startswith("c, by M6: ")
    assert lease_story.moves == "at c's next turn, within 20.05 s"
    lease_story = story(table(*FLEET), CONFIG, FLEET[0], plans(table(*FLEET), CONFIG))
    assert lease_story.moves == "at b's next turn, within 20.05 s, after the running batch"


@pytest.mark.parametrize(
    ("lease", "should", "moves"),
    [
        (FLEET[6], "no worker: it is finished", "never"),
        (FLEET[5], "b: it holds 1 where its share is 3, no more than its share", "when workers join or leave; or if b"),
        (evolve(FLEET[5], next_owner="a"), "", "once its owner has finished"),
    ],
)
def test_a_lease_is_explained(lease: Lease, should: str, moves: str) -> None:
    rows = tuple(row for row in FLEET if row.key != lease.key)
    watched_table = table(*rows, lease)
    lease_story = story(
        watched_table,
        CONFIG,
        lease,
        plans(watched_table, CONFIG),
    )
    assert should in lease_story.should
    assert lease_story.moves.startswith(moves)


def test_shares_and_groups_are_even() -> None:
    """The displayed targets are those that the rules use."""
    assert shares(FLEET) == {"a": 3, "b": 3}
    rows = [held(f"s-{number}", f"x-{number % 3}" if number else "y-0") for number in range(6)]
    assert shares(rows, "prefix") == {"x-0": 1, "x-1": 2, "x-2": 2, "y-0": 1}
    assert shares([Lease("s-0")]) == {}


def test_watching_distinguishes_living_from_dead_workers() -> None:
    """If a table has no times, one read cannot show which workers are dead. A second read can."""
    store, clock_seconds = MemoryStore(), [0.0]
    living_lease, dead_lease = (
        create_lease_with_owner(store, Lease(key, owner=owner)) for key, owner in (("s-0", "a"), ("s-1", "b"))
    )
    rows = [living_lease]

    def wait(seconds: float) -> None:
        clock_seconds[0] += seconds
        rows.append(expect_applied(store.write(RenewLease(rows[-1]))))

    watched_table = watch_for(store, 12.0, 10.0, lambda: clock_seconds[0], wait)
    assert [lease.idle for lease in watched_table.leases] == [0.0, 12.0]
    assert (watched_table.seconds, dead_lease.owner) == (12.0, "b")


def test_the_command_explains_a_worker_and_a_lease(tmp_path: Path) -> None:
    store = SqliteStore(str(tmp_path / "l.db"))
    for row in FLEET[:6]:
        create_lease_with_owner(store, row)
    store.close()
    url = f"sqlite://{tmp_path}/l.db"
    result = CliRunner().invoke(app, [url, "--for", "0", "--worker", "b"])
    assert (result.exit_code, result.stdout.splitlines()[1]) == (0, "b  holds 1, share 3")
    document = json.loads(CliRunner().invoke(app, [url, "--for", "0", "--json", "--rules", "kcl"]).stdout)
    assert [
        (worker["worker"], worker["actions"][0]["rule"]) for worker in document["workers"] if worker["actions"]
    ] == [("b", "K8")]
    assert document["says"]["K8"] == RULE_SENTENCES["K8"]
    lease = CliRunner().invoke(app, [url, "--for", "0", "--lease", "s-5"])
    assert lease.stdout.splitlines() == [
        "s-5",
        "UNKNOWN: b tells nothing of its reading: watch it (--watch)",
        "  b owns it; a single read of the table does not show when it was renewed",
        "  checkpoint TRIM_HORIZON",
        "  its row tells nothing of its reading",
        "should have it: b: it holds 1 where its share is 3, no more than its share",
        "would move: when workers join or leave; or if b renews nothing for another 10.5 s",
    ]


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["memory://nowhere-to-be-seen"], 2, "exists only in the process that created it"),
        (["sqlite://{}/none.db"], 1, "there is no file"),
        (["sqlite://{}/none.db", "--rules", "kc"], 2, "rules"),
        (["sqlite://{}/none.db", "--worker", "a", "--lease", "b"], 2, "choose one of them"),
    ],
)
def test_a_table_that_cannot_be_explained_is_reported_in_one_line(
    tmp_path: Path, arguments: list[str], status: int, says: str
) -> None:
    result = CliRunner().invoke(app, [*(argument.format(tmp_path) for argument in arguments), "--for", "0"])
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (status, "", 1)
    assert says in result.stderr


def test_a_claim_of_a_dead_workers_lease_is_not_called_a_steal() -> None:
    """The new owner would also have stolen a lease from a live worker, but that rule does not explain this claim."""
    lease, other_lease = held("s-0", "a"), held("s-1", "a")
    steal, claim = Steal(other_lease, "a", "M6"), Claim(lease, "M5")
    likely_rule = explaining._likely_rule  # noqa: SLF001  a moment in which a worker would do both is hard to come by
    assert [likely_rule(lease, (steal,), (claim,)), likely_rule(lease, (steal,), ()), likely_rule(lease, (), ())] == [
        "M5",
        "M6",
        "",
    ]


def test_kcl_plans_are_explained_by_kcl_rules() -> None:
    _, plan_b = plans(table(*FLEET[:6]), Config(Kcl()))
    assert [action.rule for action in plan_b.actions] == ["K8"]


NOW = 1_700_000_000.0
TOLD = Progress(
    NOW - 5, "a", behind=62.0, read=NOW - 60, done=NOW - 61, tried=NOW - 6, fault="asked to slow down", work=NOW - 55
)


@pytest.mark.parametrize(
    ("reach", "lines"),
    [
        (
            TOLD,
            (
                "its owner wrote its progress 5.0 s ago",
                "its lag was 62.0 s then; it was last read 60.0 s ago, and last tried 6.0 s ago",
                "the last fault: asked to slow down",
                "its handler has been running for 55.0 s without an end or a checkpoint",
            ),
        ),
        (
            evolve(TOLD, tried=TOLD.read, fault="", work=None, behind=None, excused="its parents are not done"),
            (
                "its owner wrote its progress 5.0 s ago",
                "its lag was unknown; it was last read 60.0 s ago",
                "it is not read now: its parents are not done",
            ),
        ),
        (
            Progress(NOW - 9, "z"),
            (
                "z, who had it before, wrote its progress 9.0 s ago",
                "its lag was unknown; it has not been read since it came to z",
            ),
        ),
        (None, ("its row tells nothing of its reading",)),
    ],
)
def test_a_lease_that_is_not_read_is_explained_with_the_reason(reach: Progress | None, lines: tuple[str, ...]) -> None:
    row = evolve(
        FLEET[0], annotations=FLEET[0].annotations + (() if reach is None else ((PROGRESS_ANNOTATION, reach.note),))
    )
    status = Status("STALLED", "it has not moved for 61 s: asked to slow down")
    watched_table = evolve(table(row, *FLEET[1:]), at=NOW, statuses={"s-0": status})
    lease_story = story(watched_table, CONFIG, row, plans(watched_table, CONFIG))
    assert (lease_story.reading, lease_story.status) == (lines, status)
    document = lease_story.as_json()
    assert (document["reading"], document["status"], document["says"]) == (list(lines), "STALLED", status.says)
    assert story(watched_table, CONFIG, FLEET[6], plans(watched_table, CONFIG)).reading == ()


def test_uneven_counts_are_explained_by_loads() -> None:
    """If counts differ because throughput is balanced, no worker is reported as having too few leases."""
    heavy_leases = [evolve(held(f"s-{number}", "a"), weight=4 * 1024 * 1024) for number in range(3)]
    light_leases = [evolve(held(f"s-{number}", "b"), weight=2 * 1024 * 1024 + 400_000) for number in range(3, 8)]
    watched_table = table(*heavy_leases, *light_leases)
    plan_a, plan_b = plans(watched_table, CONFIG)
    by_load = "as throughput is balanced before counts (M13): its leases bring"
    assert plan_a.lines == (
        f"nothing: it holds less than its share, {by_load} 12288.0 KB/s, and the mean over all workers is 12240.6",
    )
    assert plan_b.lines == (
        f"nothing: it holds more than its share, {by_load} 12193.1 KB/s, and the mean over all workers is 12240.6",
    )
    assert rules_of((plan_a, plan_b)) == {"M13": RULE_SENTENCES["M13"]}
    recommendation = story(watched_table, CONFIG, light_leases[0], (plan_a, plan_b)).should
    assert recommendation == f"b: {plan_b.idle_reason.removeprefix('nothing: it ')}, where its share is 4"
    # M13 does not apply without measured throughput, or under rules that balance counts.
    assert [plan.loads for plan in plans(table(*FLEET), CONFIG)] == [None, None]
    assert [plan.loads for plan in plans(watched_table, Config(Kcl()))] == [None, None]


@pytest.mark.parametrize(
    ("lease", "expected"),
    [
        (held("s-0", "a", 2.5), "a owns it and renewed it 2.5 s ago"),
        (held("s-0", "a", 0.0), "a owns it and renewed it lately"),
        (held("s-0", "a", 10.5), "a owns it and renewed it 10.5 s ago"),
        (held("s-0", "a", 10.6), "a owns it and has not renewed it for 10.6 s: it counts as dead"),
        (held("s-0", None), "nobody owns it"),
    ],
)
def test_the_age_of_a_renewal_is_described(lease: Lease, expected: str) -> None:
    watched_table = table(lease)
    assert story(watched_table, CONFIG, lease, ()).past[0] == expected
    unowned_outlook = "at the turn of a worker below its share, or when a worker joins"
    remaining = 10.5 - lease.idle
    owned_outlook = f"when workers join or leave; or if a renews nothing for another {remaining:.1f} s"
    assert story(watched_table, CONFIG, lease, ()).moves == (
        unowned_outlook if lease.owner is None or remaining < 0 else owned_outlook
    )


def test_the_explanation_of_a_moving_lease_is_complete() -> None:
    """The explanation of a move names the next owner, and does not say that the current owner is robbed."""
    lease = evolve(held("s-5", "b"), next_owner="a", held=7.0, yields=False)
    watched_table = table(*FLEET[:5], lease)
    assert story(watched_table, CONFIG, lease, plans(watched_table, CONFIG)).past == (
        "b owns it and renewed it 1.0 s ago",
        "b took it 7 s ago, while the table was watched",
        "it is being handed off to a",
        "b answers no requests, so a worker that should have it steals it",
        "checkpoint TRIM_HORIZON",
    )
    finished_lease = FLEET[6]
    lease_story = story(table(*FLEET), CONFIG, finished_lease, ())
    assert lease_story.past == ("its shard has been read to the end", "it needs no owner", "checkpoint SHARD_END")
    assert lease_story.moves == "never: the row is removed once the children of its shard are being read"


def test_a_released_failing_lease_is_explained_during_its_cooldown() -> None:
    """The worker that could not handle a lease still counts as a worker, but is not expected to take that lease now."""
    progress = Progress(1000.0, "a", behind=9.0, done=900.0, fault="its handler raised ValueError", aside=1050.0)
    unowned_lease = Lease("s-0", idle=5.0, annotations=((PROGRESS_ANNOTATION, progress.note), ("process", "p/a")))
    watched_table = evolve(table(unowned_lease), at=1005.0)
    worker_plans = plans(watched_table, CONFIG)
    assert [(plan.worker, plan.actions) for plan in worker_plans] == [("a", ())]
    lease_story = story(watched_table, CONFIG, unowned_lease, worker_plans)
    assert lease_story.should == "any worker but a, which could not handle it and leaves it to others for now"
    assert lease_story.moves == "when a may take it again, in 45 s; or sooner, at another worker's turn"
    assert lease_story.reading[-2:] == (
        "the last fault: its handler raised ValueError",
        "a put it aside, and may take it again in 45 s",
    )
    plans_with_b = plans(watched_table, CONFIG, ("b",))
    assert [len(plan.actions) for plan in plans_with_b] == [0, 1]
    assert story(watched_table, CONFIG, unowned_lease, plans_with_b).moves.startswith("at b's next turn, within 20")
    watched_later = evolve(watched_table, at=1051.0)
    assert "a put it aside" not in str(story(watched_later, CONFIG, unowned_lease, plans(watched_later, CONFIG)))


def test_watching_waits_no_longer_than_requested() -> None:
    now, waits = [0.0], list[float]()

    def wait(seconds: float) -> None:
        waits.append(seconds)
        now[0] += seconds

    watch_for(MemoryStore(), 2.5, 10.0, lambda: now[0], wait)
    assert waits == [1.0, 1.0, 0.5]
