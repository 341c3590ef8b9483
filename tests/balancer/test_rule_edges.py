"""Tests the limits of other libraries' rules and of groups."""

import pytest

from leasehold.balancer.actions import Action, Claim, Steal
from leasehold.balancer.config import Config
from leasehold.balancer.model import Lease, Me
from leasehold.balancer.plan import plan
from leasehold.balancer.rule_set import RuleSet
from leasehold.balancer.rules.event_hubs import DIALECTS, EventHubs
from leasehold.balancer.rules.kcl import Kcl, KclRust
from leasehold.balancer.rules.shares import least_moves, path_of


def planned_takes(rules: RuleSet, owners: str, turn: int = 0) -> list[Action]:
    """Return the actions of worker a if the leases s-0, s-1 … have these owners.

    "-" means that a lease has no owner.
    """
    leases = [
        Lease(f"s-{index}", owner=None if owner == "-" else owner, idle=0.0) for index, owner in enumerate(owners)
    ]
    return [
        action for action in plan(leases, None, Me("a", turn), Config(rules=rules)) if isinstance(action, Claim | Steal)
    ]


def test_last_allowed_lease_may_be_stolen() -> None:
    """R2: Under kcl-rust, a worker that may hold one lease steals it from a worker that holds two."""
    assert [type(action) for action in planned_takes(KclRust(max_leases=1), "bb")] == [Steal]
    assert planned_takes(KclRust(max_leases=1), "abbb") == []


def test_steals_are_spread_over_the_fullest_workers() -> None:
    """R2: Steals are spread over all workers with the most leases."""
    previous_owners = {
        action.from_owner
        for turn in range(20)
        for action in planned_takes(KclRust(), "bbcc", turn)
        if isinstance(action, Steal)
    }
    assert previous_owners == {"b", "c"}


def test_gist_has_no_greedy_mode() -> None:
    """The document behind the dialect `gist` describes no greedy mode, so there is no dialect `gist-greedy`."""
    dialects = {"gist", "dotnet", "java", "python"}
    assert set(EventHubs.variants()) == {"event-hubs", *dialects, "dotnet-greedy", "java-greedy", "python-greedy"}


def test_ownership_is_renewed_three_times_before_it_expires() -> None:
    """E7: A partition is renewed often enough that a single failed write does not lose it."""
    assert [EventHubs().renew_seconds(seconds) for seconds in (30.0, 60.0, 120.0)] == [10.0, 20.0, 20.0]


@pytest.mark.parametrize("seconds", [0.5, 120.0])
def test_ownership_of_dotnet_and_java_expires_exactly_at_its_limit(seconds: float) -> None:
    """A worker and its peers must decide in the same way whether the worker still owns a partition."""
    expires = {dialect: EventHubs(dialect).expires_above(seconds) for dialect in ("dotnet", "java", "python", "gist")}
    assert all(0.999 * seconds < expires[dialect] < seconds for dialect in ("dotnet", "java"))
    assert expires["python"] == expires["gist"] == seconds


def test_ownership_lasts_as_long_as_in_each_sdk() -> None:
    """E1: A worker with a shorter limit than its peers would steal the partitions of living workers."""
    seconds = {dialect: Config(rules=EventHubs(dialect)).lease_seconds for dialect in DIALECTS}
    assert seconds == {"gist": 120.0, "dotnet": 120.0, "java": 120.0, "python": 180.0}


def test_python_worker_with_its_share_claims_nothing() -> None:
    """E3: A worker with its share leaves free leases to workers that have fewer."""
    assert planned_takes(EventHubs("python"), "aab-") == []
    assert [type(action) for action in planned_takes(EventHubs("python"), "ab--")] == [Claim]


def test_group_name_ends_at_the_first_separator() -> None:
    """If a worker's id contains several separators, its group is the part before the first one."""
    assert path_of("eu/a/b-7", ("/", "-")) == ("eu", "a/b")


@pytest.mark.parametrize(
    ("owners", "workers"),
    [(("z-3", "x-1"), ("y-0", "x-1", "y-2", "z-3")), (("z-2", "z-1"), ("x-0", "z-1", "z-2", "y-3"))],
)
def test_group_with_half_the_workers_gets_half_the_leases(owners: tuple[str, ...], workers: tuple[str, ...]) -> None:
    """S8: If a group holds too many or too few leases, at least one move counts as necessary."""
    owner_by_key = {f"s-{index}": owner for index, owner in enumerate(owners)}
    assert least_moves(owner_by_key, workers, "prefix") == 1


OTHER_RULES = (Kcl(), KclRust(), *(EventHubs(dialect) for dialect in DIALECTS))


@pytest.mark.parametrize("rules", OTHER_RULES, ids=repr)
def test_remaining_lease_is_claimed_but_not_stolen(rules: RuleSet) -> None:
    """E3 to E6, K4, R2: If one lease remains after an even division, a worker claims it, and no worker steals it."""
    assert [type(action) for action in planned_takes(rules, "ab-")] == [Claim]
    assert planned_takes(rules, "abb") == []


@pytest.mark.parametrize("rules", OTHER_RULES, ids=repr)
def test_lease_of_a_dead_owner_is_claimed_before_any_is_stolen(rules: RuleSet) -> None:
    """E3 to E6, K7, R1: A shard that no worker reads comes first, although its row still names an owner."""
    config = Config(rules=rules)
    held_leases = [Lease(f"b-{index}", owner="b", idle=1.0) for index in range(4)]
    for idle in (1.5 * config.lease_seconds, 200.0):
        actions = plan([*held_leases, Lease("d-0", owner="d", idle=idle)], None, Me("a"), config)
        assert [(type(action), action.lease.key) for action in actions] == [(Claim, "d-0")]


@pytest.mark.parametrize("rules", OTHER_RULES, ids=repr)
def test_order_of_a_listing_changes_no_steal(rules: RuleSet) -> None:
    """E3 to E6, K8, R2: If several workers hold the most leases, the choice does not depend on the order of rows."""
    leases = [Lease(f"{owner}-{index}", owner=owner) for owner in "cdb" for index in range(4)]
    actions = plan(leases, None, Me("a"), Config(rules=rules))
    assert [type(action) for action in actions] == [Steal]
    assert plan(leases[::-1], None, Me("a"), Config(rules=rules)) == actions


def test_very_old_leases_are_limited_by_max_leases() -> None:
    """K5: Very old leases are taken regardless of the target, but not of `max_leases`. The value 0 turns K5 off."""
    leases = [*(Lease(f"a-{index}", owner="a") for index in range(2)), *(Lease(f"f-{n}", idle=99.0) for n in range(6))]

    def planned_rules(rules: Kcl) -> list[str]:
        return [action.rule for action in plan(leases, None, Me("a"), Config(rules=rules))]

    assert planned_rules(Kcl(max_leases=3)) == ["K5"]
    assert planned_rules(Kcl()) == ["K5"] * 6
    assert planned_rules(Kcl(very_old_multiplier=0, max_leases=4)) == ["K7"] * 2


@pytest.mark.parametrize(
    ("rules", "owners", "count"),
    [
        (Kcl(), "bbbbbb", 1),
        (Kcl(max_steals=2), "bbbbbb", 2),
        (Kcl(max_steals=9), "bbbbbb", 3),
        (Kcl(max_steals=9, max_leases=2), "bbbbbb", 2),
        (Kcl(max_steals=9), "bbcc", 1),
        (Kcl(max_steals=9), "abbcc", 0),
        (KclRust(leases_to_acquire=2), "----", 2),
        (KclRust(max_leases=3), "a----", 2),
    ],
    ids=repr,
)
def test_each_turn_takes_as_many_leases_as_allowed(rules: RuleSet, owners: str, count: int) -> None:
    """K4, K8, R1: The options and the target limit what one worker takes in one turn."""
    assert len(planned_takes(rules, owners)) == count
