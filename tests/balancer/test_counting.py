"""Tests for single listings which workers are alive, which leases count for shares, and which owners are ours."""

import math

import pytest
from attrs import evolve

from leasehold.balancer.census import FullReading, KnownLeases, our_workers
from leasehold.balancer.config import Config
from leasehold.balancer.counting import late_owners, slow_owners, take_census
from leasehold.balancer.model import SHARD_END, History, Lease, Me
from leasehold.balancer.plan import plan
from leasehold.balancer.rules.kcl import Kcl
from leasehold.balancer.rules.minimal import Minimal

CONFIG = Config(rules=Minimal(), lease_seconds=10.0, cycle_seconds=20.0, renew_seconds=5.0)
ME = Me("me")


def test_child_does_not_count_while_its_parent_is_read() -> None:
    """M1: A child counts for the shares only after its parent has ended, so that counts are even after that."""
    parent, held_child = Lease("0", owner="a"), Lease("3", owner="b", parents=("0",))
    waiting_child, orphan_child = Lease("1", parents=("0",)), Lease("2", parents=("gone",))
    census = take_census([parent, waiting_child, orphan_child, held_child], ME, CONFIG)
    assert (census.leases, census.free) == ((parent, orphan_child, held_child), (orphan_child,))
    moving_child = evolve(held_child, next_owner="c")
    assert take_census([parent, moving_child], ME, CONFIG).leases == (parent, moving_child)
    ended_parent = evolve(parent, checkpoint=SHARD_END)
    assert take_census([ended_parent, waiting_child], ME, CONFIG).leases == (waiting_child,)


def test_child_counts_immediately_under_kcl() -> None:
    """With the KCL's rules a child counts immediately, as in KCL 2.x."""
    table = [Lease("0", owner="me"), Lease("1", parents=("0",))]
    assert take_census(table, ME, Config(rules=Kcl())).free == (table[1],)


def test_lease_at_its_expiry_limit_is_owned() -> None:
    """A lease that is idle for exactly the limit has not expired, according to all checks."""
    lease = Lease("0", owner="a", next_owner="b", idle=10.5)
    assert take_census([lease], ME, CONFIG).expired == ()
    expired_lease = evolve(lease, idle=10.6)
    assert take_census([expired_lease], ME, CONFIG).expired == (expired_lease,)


def test_slow_owner_expires_after_three_of_its_gaps() -> None:
    """An owner that renews seldom keeps its leases for three of its own renewal intervals."""
    me = Me("me", history=History(gaps=(("a", 6.0), ("me", 5.3))))
    assert slow_owners(me, CONFIG) == ()
    me = Me("me", history=History(gaps=(("a", 7.0), ("me", 5.3))))
    lease = Lease("0", owner="a", idle=21.0)
    assert take_census([lease], me, CONFIG).expired == ()
    assert take_census([evolve(lease, idle=21.5)], me, CONFIG).expired == (evolve(lease, idle=21.5),)


def test_pause_of_the_store_does_not_count_as_owners_gap() -> None:
    """If our own leases were not renewed during the same time, the owners of other leases do not look slow."""
    gaps = (("a", 25.0), ("b", 31.0), ("me", 20.0))
    assert slow_owners(Me("me", history=History(gaps=gaps)), CONFIG) == (("b", 31.0),)
    assert late_owners(Me("me", history=History(paces=gaps)), CONFIG) == {"b"}


def test_worker_without_leases_uses_its_own_limits() -> None:
    """A newcomer with short leases recognizes slow owners, and does not treat them as dead."""
    short_config = Config(rules=Minimal(), lease_seconds=1.0)
    assert slow_owners(Me("me", history=History(gaps=(("a", 0.9),))), short_config) == (("a", 0.9),)


def test_lease_given_by_a_leader_expires_after_two_limits() -> None:
    """M14: A worker that got a lease from its leader has two limits of time until its first renewal."""
    me = Me("me", history=History(led=(("k", 0.0),)))
    lease = Lease("0", owner="k", idle=21.0, held=20.0)
    assert take_census([lease], me, CONFIG).expired == ()
    expired_lease = evolve(lease, idle=21.1)
    assert take_census([expired_lease], me, CONFIG).expired == (expired_lease,)
    lease_renewed_before = evolve(lease, idle=10.6, held=90.0)
    lease_of_other_worker = evolve(lease, owner="a", idle=10.6, held=10.0)
    assert take_census([lease_renewed_before], me, CONFIG).expired == (lease_renewed_before,)
    assert take_census([lease_of_other_worker], me, CONFIG).expired == (lease_of_other_worker,)


def test_led_worker_counts_while_others_wait() -> None:
    """M14: A led worker counts for the shares as long as it may still get leases."""
    limit = CONFIG.rules.overdue_seconds(10.0, 20.0)
    assert limit == 70.0
    assert take_census([], Me("me", history=History(led=(("k", 70.0),))), CONFIG).led == ("k",)
    assert take_census([], Me("me", history=History(led=(("k", 70.1),))), CONFIG).led == ()


def test_rule_sets_without_waiting_ignore_led_workers() -> None:
    """A worker with the rules of KCL 2.x also works in a fleet with a KCL 3.x leader."""
    me = Me("me", history=History(led=(("k", 1.0),)))
    assert dict(take_census([], me, Config(rules=Kcl())).counts) == {"me": 0}
    assert plan([Lease("0")], None, me, Config(rules=Kcl()))[0].lease.key == "0"


@pytest.mark.parametrize(
    ("note", "owner", "ours"),
    [("p/a", "a", True), ("p/eu/a", "eu/a", True), ("p/eu/a", "a", False), ("p/b", "a", False), (None, "a", False)],
)
def test_worker_id_may_contain_slashes(note: str | None, owner: str, ours: bool) -> None:
    """A worker whose id contains a slash is recognized as ours (M15)."""
    lease = Lease("0", owner=owner, annotations=(("process", note),) if note else ())
    assert (owner in our_workers([lease])) is ours


def test_each_limit_has_its_own_index() -> None:
    """The same reading answers for several limits, because loads also count workers that are late (M13)."""
    reading = FullReading((Lease("0", owner="a", idle=20.0, annotations=(("process", "p/a"),)),))
    assert [reading.our_workers(limit) for limit in (10.0, math.inf, 10.0)] == [set(), {"a"}, set()]
    assert [list(reading.unsettled(limit)) for limit in (10.0, math.inf, 10.0)] == [["0"], [], ["0"]]


def test_late_lookout_has_the_same_rank_after_every_read() -> None:
    """A worker whose lease is idle for exactly the limit is alive, after a full read and after a partial one."""
    lease = Lease("0", owner="a", idle=10.5, annotations=(("process", "p/a"),))
    known_leases = KnownLeases(FullReading(()), {"0": lease})
    assert known_leases.our_workers(10.5) == our_workers([lease], 10.5) == {"a"}
    assert known_leases.our_workers(10.4) == our_workers([lease], 10.4) == set()
