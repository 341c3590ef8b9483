"""Every law of `leasehold.testing` finds the fault that is planted for it, and describes the breach."""

from collections.abc import Callable, Iterable, Iterator

import pytest
from attrs import evolve
from hypothesis import Phase, settings

from leasehold.balancer.actions import Action, Claim, Release, Renew, Steal
from leasehold.balancer.config import Config
from leasehold.balancer.model import SHARD_END, Lease, Me, Position, Shard
from leasehold.balancer.plan import plan
from leasehold.balancer.rules.kcl import Kcl
from leasehold.balancer.rules.minimal import Minimal
from leasehold.testing import LawBroken, Scene, SmallFleet, chaos, laws, simulate
from leasehold_lab.properties.laws import Law
from leasehold_lab.properties.simulation import Planner
from leasehold_lab.properties.strategies import format_as_code

pytestmark = pytest.mark.slow

Actions = tuple[Action, ...]


@pytest.fixture(autouse=True)
def _unshrunk() -> Iterator[None]:
    """Disable shrinking, which takes most of the time and is not needed to find and name a planted fault."""
    previous_profile = settings.get_current_profile_name()
    settings.register_profile("unshrunk", settings.get_profile(previous_profile), phases=(Phase.generate,))
    settings.load_profile("unshrunk")
    yield
    settings.load_profile(previous_profile)


def change_plans(change: Callable[[Actions, list[Lease], Me], Iterable[Action]]) -> Planner:
    """Return a planner whose plans are changed by a function."""

    def plan_with_change(leases: Iterable[Lease], shards: Iterable[Shard] | None, me: Me, config: Config) -> Actions:
        table = list(leases)
        return tuple(change(plan(table, shards, me, config), table, me))

    return plan_with_change


def plan_and_drop_lease(leases: Iterable[Lease], shards: Iterable[Shard] | None, me: Me, config: Config) -> Actions:
    """Remove a lease from the list that was passed in, which breaks a law."""
    actions = plan(leases, shards, me, config)
    if isinstance(leases, list) and leases:
        leases.pop()
    return actions


PLANTED: dict[str, tuple[Law, Planner, str]] = {
    "the first that is listed": (
        laws.order_does_not_matter,
        change_plans(lambda actions, table, _me: (*actions, *(Renew(lease, "X") for lease in table[:1]))),
        "the order of the listing matters",
    ),
    "a lease taken off the list": (laws.input_is_unchanged, plan_and_drop_lease, "the plan changed its input"),
    "everything twice": (
        laws.each_lease_has_at_most_one_action,
        change_plans(lambda actions, _table, _me: (*actions, *actions)),
        "more than one action",
    ),
    "a theft that is called a claim": (
        laws.takes_from_living_owners_name_them,
        change_plans(
            lambda actions, _table, _me: (
                Claim(each.lease, "X") if isinstance(each, Steal) else each for each in actions
            )
        ),
        "which its living owner",
    ),
    "no renewals": (
        laws.renewals_match_the_plan,
        change_plans(lambda actions, _table, _me: (each for each in actions if not isinstance(each, Renew))),
        "the plan renews other leases than are due",
    ),
    "a lease let go": (
        laws.balanced_fleet_is_unchanged,
        change_plans(lambda _actions, table, me: (Release(lease, "X") for lease in table if lease.owner == me.worker)),
        "moves leases of a balanced fleet",
    ),
    "nothing claimed": (
        laws.comes_to_rest,
        change_plans(lambda actions, _table, _me: (each for each in actions if not isinstance(each, Claim))),
        "at rest, and nobody holds",
    ),
    "nothing stolen": (
        laws.comes_to_rest,
        change_plans(lambda actions, _table, _me: (each for each in actions if not isinstance(each, Steal))),
        "at rest, and uneven",
    ),
    "kcl as it is": (laws.equal_readings_make_disjoint_plans, plan, "more than one worker wants"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", PLANTED)
def test_planted_fault_is_found_and_named(name: str) -> None:
    """Each law finds the fault that was planted to break it, and its message describes the breach."""
    law, planner, words = PLANTED[name]
    with pytest.raises(LawBroken, match=words):
        law.check(planner, Kcl(), examples=2000)  # 100 examples would miss the fault now and then


def test_planner_that_fails_on_one_row_is_found() -> None:
    """A planner that raises an exception because of one row breaks a law."""

    def fail_on_one_row(actions: Actions, table: list[Lease], _me: Me) -> Actions:
        return tuple(action for action in actions if not any(1 // len(lease.parents) for lease in table if lease.ended))

    with pytest.raises(ZeroDivisionError):
        laws.every_table_gives_a_plan.check(change_plans(fail_on_one_row), Kcl(), examples=2000)


def test_every_law_has_a_planted_fault() -> None:
    """Every law has a planted fault that breaks it."""
    assert {law for law, *_ in PLANTED.values()} == {*laws.LAWS, laws.equal_readings_make_disjoint_plans} - {
        laws.every_table_gives_a_plan
    }


def test_case_is_shown_as_python_code() -> None:
    """A failure contains the case as code that can be pasted into a test."""
    lease = Lease("s-0", owner="b", checkpoint=SHARD_END, parents=("s-9",))
    scene = Scene(
        (lease, Lease("s-1", checkpoint=Position("7", 2), idle=float("inf"))), None, Me("a", 2), Config(Kcl())
    )
    assert format_as_code(scene) == (
        "Scene((Lease('s-0', parents=('s-9',), owner='b', checkpoint=Position('SHARD_END')), "
        "Lease('s-1', idle=math.inf, checkpoint=Position('7', sub=2))), None, Me('a', turn=2), Config(rules=Kcl()))"
    )


def test_lease_that_moves_in_a_circle_is_not_at_rest() -> None:
    """A lease that moves through the whole fleet in each round ends where it began, but the fleet is not at rest."""
    fleet = SmallFleet(("a", "b", "c"), ("c",), Config(Kcl()))
    circling_planner = change_plans(
        lambda _actions, table, _me: (Steal(lease, lease.owner or "", "X") for lease in table)
    )
    with pytest.raises(LawBroken, match="leases still move"):
        laws.comes_to_rest(circling_planner, fleet)


def test_own_handler_receives_every_record() -> None:
    """A user's handler is called with every record of the simulated stream."""
    handled_records: set[tuple[str, str]] = set()

    def handle(batch: object) -> None:
        handled_records.update((batch.shard, record.sequence_number) for record in batch.records)  # type: ignore[attr-defined]

    run = simulate(Minimal(), leases=3, workers=(2,), event="crash", cycles=3, handler=handle)
    run.check()
    assert handled_records == {(sent_record.key, str(sent_record.number)) for sent_record in run.history.sent}


def test_handler_that_always_fails_is_reported() -> None:
    """Records that a handler never finishes count as lost, whatever the rules are."""

    def refuse(_batch: object) -> None:
        raise ValueError("no")

    run = simulate(Minimal(), leases=1, workers=(1,), cycles=3, handler=refuse)
    assert {breach.what for breach in run.breaches} & {"lost", "unfinished", "held unread", "action at balance"}


def test_same_seed_gives_the_same_chaos() -> None:
    """A failing seed can be replayed, because equal seeds give equal histories."""
    first_run, second_run = chaos(Minimal(), seed=3), chaos(Minimal(), seed=3)
    assert first_run.history == second_run.history
    assert evolve(first_run.scenario, seed=0) != first_run.scenario
