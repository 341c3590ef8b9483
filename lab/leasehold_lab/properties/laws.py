"""Laws that every plan must keep. Use them to check your own rule set or `plan` function on single or random cases.

    laws.check(plan, MyRules())                                  every law, on examples that Hypothesis draws
    laws.comes_to_rest.check(plan, st.builds(MyRules, ...))      one law, over the options too
    laws.takes_from_living_owners_name_them(plan, Scene(...))    one law on one case

A law that is broken raises LawBroken with the case, the planned actions and a description of the fault. `plan` may be
any function with the signature of `leasehold.plan`: that function itself, a wrapper around it, or a client of a program
in another language.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from random import Random
from typing import Any

from attrs import evolve, frozen
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from leasehold.balancer.actions import Action, Delete, Renew, RequestHandoff, Steal, Taking
from leasehold.balancer.counting import take_census
from leasehold.balancer.model import Me
from leasehold.balancer.plan import look_again, renewals
from leasehold.balancer.rule_set import RuleSet
from leasehold.balancer.rules.shares import describe_imbalance
from leasehold_lab.properties.simulation import LawBroken, Planner, format_actions, settled
from leasehold_lab.properties.strategies import (
    Scene,
    SmallFleet,
    balanced_fleets,
    fleets,
    format_as_code,
    scenes,
    weighed_fleets,
)

Rules = RuleSet | st.SearchStrategy[RuleSet]


@frozen
class Law:
    """A law about plans, which can be checked on one case or on many random cases.

    Attributes:
        name: The name of the law in this module.
        says: The law in one sentence.
        cases: A function that takes a strategy for rule sets, and returns a strategy for the cases on which the law is
        checked.
    """

    name: str
    says: str
    cases: Callable[[st.SearchStrategy[RuleSet]], st.SearchStrategy[Any]]
    _holds: Callable[[Planner, Any], None]

    def __call__(self, plan: Planner, case: Scene | SmallFleet) -> None:
        """Check the law on one case. Raises LawBroken, or any exception that `plan` raises."""
        self._holds(plan, case)

    def __str__(self) -> str:
        return self.name

    def check(self, plan: Planner, rules: Rules, *, examples: int | None = None) -> None:
        """Check the law on random cases that Hypothesis draws. Hypothesis also simplifies a case that fails.

        Args:
            plan: The function to check.
            rules: The rule set, or a strategy for rule sets.
            examples: The number of cases. By default, the active Hypothesis profile determines it.

        Raises:
            LawBroken: The plan for one of the cases breaks the law. The message contains the simplest such case that
            was found.
        """

        def holds(case: Any) -> None:  # noqa: ANN401  a Scene or a SmallFleet
            self(plan, case)

        holds.__name__ = holds.__qualname__ = self.name  # Hypothesis uses the name in its report of a failure
        phases = tuple(phase for phase in settings().phases if phase != Phase.explain)  # explain shows internal lines
        hypothesis_settings = settings(deadline=None, phases=phases, max_examples=examples or settings().max_examples)
        strategy = rules
        if not isinstance(strategy, st.SearchStrategy):
            strategy = st.just(strategy)
        hypothesis_settings(given(case=self.cases(strategy))(holds))()


def check(plan: Planner, rules: Rules, *, examples: int | None = None) -> None:
    """Check all laws in `LAWS`. Raises LawBroken for the first broken law, with the simplest case that was found."""
    for law in LAWS:
        law.check(plan, rules, examples=examples)


def _declare_law(
    cases: Callable[[st.SearchStrategy[RuleSet]], st.SearchStrategy[Any]],
) -> Callable[[Callable[..., None]], Law]:
    def decorate(holds: Callable[..., None]) -> Law:
        return Law(holds.__name__, (holds.__doc__ or "").partition("\n")[0], cases, holds)

    return decorate


def _plan_scene(plan: Planner, scene: Scene) -> tuple[Action, ...]:
    return plan(scene.leases, scene.shards, scene.me, scene.config)


@_declare_law(scenes)
def order_does_not_matter(plan: Planner, scene: Scene) -> None:
    """The plan does not depend on the order in which leases and shards are listed.

    Stores return rows in any order. If the plan depended on the order, two workers that read the same table could plan
    differently.
    """

    def shuffle(items: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(Random(scene.order).sample(items, len(items)))  # noqa: S311  seeded, so that the order can be repeated

    shuffled_scene = evolve(scene, leases=shuffle(scene.leases), shards=scene.shards and shuffle(scene.shards))
    plan_in_order, plan_of_shuffled = _plan_scene(plan, scene), _plan_scene(plan, shuffled_scene)
    if plan_in_order != plan_of_shuffled:
        raise LawBroken(
            "the order of the listing matters",
            scene,
            plan_in_order,
            f"listed otherwise: {format_actions(plan_of_shuffled)}",
        )
    expected_renewals = renewals(scene.leases, scene.me, scene.config)
    if expected_renewals != renewals(shuffled_scene.leases, scene.me, scene.config):
        raise LawBroken("the order of the listing matters to renewals", scene, expected_renewals)


@_declare_law(scenes)
def input_is_unchanged(plan: Planner, scene: Scene) -> None:
    """Planning does not change its arguments.

    If a plan function changed the owner of a lease in its arguments, later counts of the same leases would be wrong.
    """
    plan_leases, plan_shards = list(scene.leases), None if scene.shards is None else list(scene.shards)
    expected_leases, expected_shards = (
        [evolve(lease) for lease in scene.leases],
        [evolve(shard) for shard in scene.shards or ()],
    )
    actions = plan(plan_leases, plan_shards, scene.me, scene.config)
    if (plan_leases, plan_shards or []) != (expected_leases, expected_shards):
        raise LawBroken("the plan changed its input", scene, actions)


@_declare_law(scenes)
def each_lease_has_at_most_one_action(plan: Planner, scene: Scene) -> None:
    """A plan has at most one action per lease, including alternates.

    Two writes to one row would require the same version, so the second would be rejected, or would undo the first.
    """
    actions = _plan_scene(plan, scene)
    repeated_keys = [key for key, count in Counter(_list_keys(actions)).items() if count > 1]
    if repeated_keys:
        raise LawBroken(f"{', '.join(sorted(repeated_keys))}: more than one action", scene, actions)


@_declare_law(scenes)
def takes_from_living_owners_name_them(plan: Planner, scene: Scene) -> None:
    """A plan takes a living owner's lease only by a Steal or RequestHandoff with this owner, or deletes an ended lease.

    Any other write would take the lease from a healthy worker without regard to its ownership.
    """
    expired_keys = {lease.key for lease in take_census(scene.leases, scene.me, scene.config).expired}
    actions = _plan_scene(plan, scene)
    for action in _add_alternates(actions):
        lease = action.lease
        is_owner_alive = (
            lease.owner not in {None, scene.me.worker} and lease.key not in expired_keys and lease in scene.leases
        )
        if isinstance(action, Steal | RequestHandoff):
            if (action.from_owner, is_owner_alive) != (lease.owner, True):
                actual_owner = (
                    f"{lease.owner}, who is dead" if lease.owner and not is_owner_alive else lease.owner or "nobody"
                )
                raise LawBroken(
                    f"{format_actions((action,))} from {action.from_owner}, but it belongs to {actual_owner}",
                    scene,
                    actions,
                )
        elif is_owner_alive and not (isinstance(action, Delete) and lease.ended):
            raise LawBroken(f"{format_actions((action,))}, which its living owner {lease.owner} holds", scene, actions)


@_declare_law(scenes)
def every_table_gives_a_plan(plan: Planner, scene: Scene) -> None:
    """There is a plan for every table, and the next read of the table follows within a cycle.

    If `plan` raised an exception instead, one unexpected row could prevent a worker from renewing its other leases.
    """
    actions = _plan_scene(plan, scene)
    next_look = look_again(actions, scene.leases, scene.me, scene.config)
    if not 0 <= next_look.seconds <= scene.config.cycle_seconds:
        raise LawBroken(f"the next look comes after {next_look.seconds:g} s", scene, actions)


@_declare_law(scenes)
def renewals_match_the_plan(plan: Planner, scene: Scene) -> None:
    """The renewals between two plans are for the same leases as the renewals in a plan.

    A lease that is renewed by plans but not between them, or the other way round, would expire in the meantime.
    """
    actions = _plan_scene(plan, scene)
    other_keys = set(_list_keys([action for action in actions if not isinstance(action, Renew)]))
    expected_renewals = [
        renewal for renewal in renewals(scene.leases, scene.me, scene.config) if renewal.lease.key not in other_keys
    ]
    if [action for action in actions if isinstance(action, Renew)] != expected_renewals:
        raise LawBroken(
            "the plan renews other leases than are due", scene, actions, f"due: {format_actions(expected_renewals)}"
        )


@_declare_law(balanced_fleets)
def balanced_fleet_is_unchanged(plan: Planner, fleet: SmallFleet) -> None:
    """If the leases are evenly distributed, plans contain only renewals.

    If a balanced fleet moved leases, it would move them forever, and each move may repeat records.
    """
    for worker in fleet.workers:
        actions = plan(fleet.leases, None, Me(worker, fleet.turn), fleet.config)
        if any(not isinstance(action, Renew) for action in actions):
            raise LawBroken(f"{worker} moves leases of a balanced fleet", fleet, actions)


@_declare_law(fleets)
def comes_to_rest(plan: Planner, fleet: SmallFleet) -> None:
    """From every start, and in any order of planning, the fleet comes to rest with all leases owned and evenly divided.

    The division is not checked for rules that do not guarantee it (`RuleSet.evens_out`). Nothing is checked for fleets
    whose workers may not own all leases together (`RuleSet.most_leases`).
    """
    settled_fleet = settled(plan, fleet)
    most_leases = fleet.config.rules.most_leases
    if most_leases is not None and most_leases * len(fleet.workers) < len(fleet.owners):
        return
    if unowned_keys := [key for key, owner in settled_fleet.owners.items() if owner is None]:
        raise LawBroken(f"at rest, and nobody holds {', '.join(unowned_keys)}", fleet, (), settled_fleet.story)
    lease_counts = {worker: settled_fleet.counts[worker] for worker in fleet.workers}
    if fleet.config.rules.evens_out and describe_imbalance(lease_counts, fleet.workers, len(fleet.owners)):
        raise LawBroken(
            f"at rest, and uneven: {format_as_code(tuple(lease_counts.values()))}", fleet, (), settled_fleet.story
        )


@_declare_law(weighed_fleets)
def equal_readings_make_disjoint_plans(plan: Planner, scene: Scene) -> None:
    """S4: two workers that read the same table never plan to take the same lease.

    If two workers planned to take the same lease, one of the writes would be rejected, which would cost a round. The
    rule set `minimal` guarantees this law, but most others do not, so it is not in `LAWS`.
    """
    owners = sorted({lease.owner for lease in scene.leases if lease.owner is not None})
    plans = [plan(scene.leases, None, Me(owner, scene.me.turn), scene.config) for owner in owners]
    claim_counts = Counter(action.lease.key for actions in plans for action in actions if isinstance(action, Taking))
    if contested_keys := [key for key, count in claim_counts.items() if count > 1]:
        raise LawBroken(f"more than one worker wants {', '.join(contested_keys)}", scene, sum(plans, ()))


LAWS: tuple[Law, ...] = (
    order_does_not_matter,
    input_is_unchanged,
    each_lease_has_at_most_one_action,
    takes_from_living_owners_name_them,
    every_table_gives_a_plan,
    renewals_match_the_plan,
    balanced_fleet_is_unchanged,
    comes_to_rest,
)
"""The laws that every rule set must keep."""


def _add_alternates(actions: Iterable[Action]) -> list[Action]:
    groups = ((action, *(action.alternates if isinstance(action, Taking) else ())) for action in actions)
    return [action for action_with_alternates in groups for action in action_with_alternates]


def _list_keys(actions: Iterable[Action]) -> list[str]:
    return [action.lease.key for action in _add_alternates(actions)]
