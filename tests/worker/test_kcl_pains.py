"""Problems that users of the Java KCL have reported and that do not occur with our rules.

The numbers are those of public issues in the repository of the Java KCL.
"""

import math
from collections import Counter

import pytest
from attrs import evolve
from virtual_fleet import DrivenWorker, FaultyStore, member, together
from waiters import Clock

from leasehold.balancer.actions import Action, Claim, Create, Release, RequestHandoff
from leasehold.balancer.config import Config
from leasehold.balancer.model import SHARD_END, TRIM_HORIZON, History, Lease, Me, Position
from leasehold.balancer.plan import plan
from leasehold.balancer.rule_set import RuleSet
from leasehold.balancer.rules.kcl import Kcl
from leasehold.balancer.rules.minimal import Minimal
from leasehold_lab.simulator.world.world import ListSource, create_even_shards

MINIMAL = Config(lease_seconds=10.0)
SHARDS = tuple(f"s-{n}" for n in range(6))


def fleet(names: str) -> tuple[Clock, FaultyStore, list[DrivenWorker]]:
    """Return the clock, the store and the workers of a group that shares six shards and no longer moves leases."""
    clock, store = Clock(), FaultyStore()
    source = ListSource(create_even_shards(SHARDS))
    workers = [member(store, source, clock, name, f"p-{name}", MINIMAL) for name in names]
    together(workers, 100)
    assert sorted(len(driven_worker.held) for driven_worker in workers) == [len(SHARDS) // len(names)] * len(names)
    return clock, store, workers


def leases_of_live_owner(owner: str, *keys: str) -> list[Lease]:
    """Return the leases of a worker that renews them and responds to requests."""
    return [Lease(key, owner=owner, checkpoint=Position("7"), yields=True) for key in keys]


def actions_planned_by(leases: list[Lease], me: str, rules: RuleSet = MINIMAL.rules) -> tuple[Action, ...]:
    """Return the actions that a worker plans for these leases."""
    return plan(leases, None, Me(me), Config(rules=rules, lease_seconds=10.0))


def test_leases_of_a_stopped_worker_are_taken_before_they_expire() -> None:
    """Threads 845 and 474: a KCL worker that shuts down keeps its leases, so shards are unread for 20 s or more."""
    _, store, (staying_worker, leaving_worker) = fleet("ab")
    leaving_worker.worker.close()
    for holding in leaving_worker.worker.holdings:
        holding.ask_release()
        holding.release()
    together([staying_worker], 6)
    assert {lease.owner for lease in store.list().leases} == {"a"}


@pytest.mark.parametrize("victim", ["a", "b", "c"])
def test_death_of_any_worker_makes_no_lease_wait_for_a_leader(victim: str) -> None:
    """Thread 1803: when the KCL 3 leader was killed, nothing was assigned for two minutes, or ever again."""
    _, store, workers = fleet("abc")
    living = [driven_worker for driven_worker in workers if driven_worker.worker.me != victim]
    together(living, MINIMAL.lease_seconds + 2 * MINIMAL.cycle_seconds)
    owners = Counter(lease.owner for lease in store.list().leases)
    assert owners == {driven_worker.worker.me: 3 for driven_worker in living}


def test_newcomer_takes_from_several_owners_in_one_turn() -> None:
    """Thread 708: KCL 2 takes one lease from one worker every 20 s."""
    leases = [
        *(lease for owner in "abcd" for lease in leases_of_live_owner(owner, *(f"{owner}-{n}" for n in range(5)))),
        *leases_of_live_owner("me", "one"),
    ]
    owners = [action.from_owner for action in actions_planned_by(leases, "me") if isinstance(action, RequestHandoff)]
    assert len(set(owners)) == len(owners) == 3


def test_newcomer_counts_before_it_owns_a_lease() -> None:
    """The KCL counts only owners. If workers start together, the first ones take leases that the others take back."""
    leases_of_full_worker = leases_of_live_owner("full", *(f"f-{n}" for n in range(6)))
    leases_without_newcomer = [*leases_of_full_worker, *leases_of_live_owner("me", "mine")]
    leases_with_request = [
        *leases_of_live_owner("full", *(f"f-{n}" for n in range(5))),
        *leases_of_live_owner("me", "mine"),
    ]
    leases_with_request.append(
        Lease("f-5", owner="full", checkpoint=Position("7"), yields=True, next_owner="newcomer", next_owner_idle=1.0)
    )
    assert [len(actions_planned_by(leases, "me")) for leases in (leases_without_newcomer, leases_with_request)] == [
        2,
        1,
    ]


def test_finished_shards_count_as_no_load() -> None:
    """Thread 1247: finished parents counted as load, so their owners were left with one or two shards to read."""
    finished_leases = [Lease(f"d-{n}", owner="me", checkpoint=SHARD_END) for n in range(4)]
    leases = [*leases_of_live_owner("full", "f-0", "f-1", "f-2"), *leases_of_live_owner("me", "mine"), *finished_leases]
    kcl_actions = [
        action for action in actions_planned_by(leases, "me", Kcl()) if isinstance(action, RequestHandoff | Claim)
    ]
    minimal_actions = actions_planned_by(leases, "me")
    assert (kcl_actions, [action.from_owner for action in minimal_actions if isinstance(action, RequestHandoff)]) == (
        [],
        ["full"],
    )


def test_children_spread_at_once_after_a_reshard() -> None:
    """Threads 54 and 50: the first worker that saw the children took them all, and then lost most one by one."""
    children = [Lease(f"c-{n}", idle=math.inf) for n in range(8)]
    leases = [*children, *leases_of_live_owner("a", "a-0", "a-1"), *leases_of_live_owner("b", "b-0", "b-1")]

    def claimed_keys(worker_id: str, rules: RuleSet) -> set[str]:
        return {
            action.lease.key for action in actions_planned_by(leases, worker_id, rules) if isinstance(action, Claim)
        }

    claims_by_worker = [claimed_keys(worker_id, MINIMAL.rules) for worker_id in "ab"]
    assert [len(keys) for keys in claims_by_worker] == [4, 4]
    assert claims_by_worker[0].isdisjoint(claims_by_worker[1])
    assert len(claimed_keys("a", Kcl())) == 8


def test_new_shard_does_not_wait_for_a_deployment() -> None:
    """Threads 339 and 185: of 95 new shards, 5 had no lease, because the worker that should create it was gone."""
    parents = [evolve(shard, open=False) for shard in create_even_shards(tuple(f"p-{n}" for n in range(48)))]
    children = [
        evolve(child, parents=(f"p-{n // 2}",))
        for n, child in enumerate(create_even_shards(tuple(map(str, range(96)))))
    ]
    leases = [
        *(Lease(shard.id, checkpoint=SHARD_END, hash_range=shard.hash_range) for shard in parents),
        *(Lease(shard.id, owner="a", parents=shard.parents, hash_range=shard.hash_range) for shard in children[:91]),
    ]
    creations = [
        action for action in plan(leases, [*parents, *children], Me("b"), MINIMAL) if isinstance(action, Create)
    ]
    assert [(action.lease.key, action.lease.checkpoint, action.rule) for action in creations] == [
        (str(n), TRIM_HORIZON, "L3") for n in range(91, 96)
    ]


def test_restart_under_the_same_id_moves_nothing() -> None:
    """Thread 108 and others: every restart moved leases, and after a restart of a whole cluster they kept moving."""
    clock, store, (staying_worker, stopped_worker) = fleet("ab")
    owners_before = {lease.key: lease.owner for lease in store.list().leases}
    together([staying_worker], 5)
    restarted = member(store, ListSource(list(stopped_worker.worker.source.shards())), clock, "b", "p-b2", MINIMAL)
    together([staying_worker, restarted], 60)
    assert {lease.key: lease.owner for lease in store.list().leases} == owners_before
    assert restarted.held == [key for key, owner in owners_before.items() if owner == "b"]


def test_worker_with_all_leases_frees_one_for_a_peer_without_requests() -> None:
    """A KCL 3 leader takes no lease from an owner without worker metrics, so its workers get only what we release."""
    rules = Minimal(release=True, expected_workers=("me", "java"))
    leases = leases_of_live_owner("me", "s-0", "s-1", "s-2", "s-3")
    settled_worker = Me("me", 0, History(owners_still=1000.0))
    actions = plan(leases, None, settled_worker, Config(rules=rules, lease_seconds=10.0))
    assert [(type(action), action.rule) for action in actions] == [(Release, "M11")]
