"""Tests what the planner returns besides actions: when to read the table again, slow owners, and draws."""

from hashlib import blake2b

import pytest
from attrs import evolve

from leasehold.balancer import children_to_create, readable, slow_owners
from leasehold.balancer.actions import Claim, Create, Delete, Look, Release, Renew, RequestHandoff
from leasehold.balancer.chance import digest_under, draw_leases, draw_owner, order_under
from leasehold.balancer.config import Config
from leasehold.balancer.model import (
    LATEST,
    SHARD_END,
    TRIM_HORIZON,
    BulletinState,
    History,
    Lease,
    Me,
    Shard,
    at_timestamp,
)
from leasehold.balancer.plan import look_again, plan, renewals
from leasehold.balancer.rule_set import RuleSet
from leasehold.balancer.rules.event_hubs import EventHubs
from leasehold.balancer.rules.kcl import Kcl, KclRust
from leasehold.balancer.rules.minimal import Minimal

S0 = Lease("s-0")


@pytest.mark.parametrize(
    ("rules", "mode_seconds"),
    [
        (Kcl(), 20.05),
        (KclRust(), 20.0),
        (EventHubs("dotnet", "balanced"), 30.0),
        (EventHubs("dotnet", "greedy"), 0.0),
        (EventHubs("java", "greedy"), 0.0),
        (EventHubs("python", "greedy"), 30.0),
        (EventHubs("gist", "greedy"), 30.0),
        (Minimal(), 0.7),
    ],
    ids=repr,
)
def test_each_rule_set_reads_again_after_its_own_interval(rules: RuleSet, mode_seconds: float) -> None:
    """After taking a lease, each rule set reads the table again after the interval of its library."""
    assert look_again([Claim(S0, "")], [S0], Me("a"), Config(rules=rules)) == Look(mode_seconds)


def test_quiet_turn_waits_a_whole_cycle() -> None:
    """A worker with nothing to do reads the table again after a cycle."""
    for rules in (Kcl(), EventHubs("dotnet", "greedy"), Minimal()):
        config = Config(rules=rules)
        assert look_again([], [S0], Me("a"), config) == Look(config.cycle_seconds)


def test_other_rule_sets_do_not_wait_for_joiners() -> None:
    """C10: Under the rules of the KCL, a newcomer reads the table once per cycle, as the KCL does."""
    config = Config(rules=Kcl())
    newcomer = Me("a", history=History(fleet_still=0.0, full_apart=0.0))
    own_lease = Lease("s-0", owner="a", held=0.0)
    assert look_again([], [own_lease], newcomer, config) == Look(config.cycle_seconds)


def test_other_rule_sets_have_no_lookout() -> None:
    """C14: Under the rules of the KCL, no worker acts as the lookout, even if others of its fleet write bulletins."""
    config = Config(rules=Kcl())
    worker = Me("a", history=History(hearing=BulletinState()))
    assert look_again([], [Lease("s-0", owner="a"), Lease("s-1", owner="b")], worker, config) == Look(
        config.cycle_seconds
    )


def test_new_leases_are_read_soon() -> None:
    """A new lease gets an owner without waiting a whole cycle."""
    assert look_again([Create(S0, "L3")], [], Me("a"), Config(rules=Kcl())) == Look(1.0)


def test_requested_leases_are_polled_by_key() -> None:
    """A worker polls the leases that it has requested, so it reads the shard as soon as the lease is given."""
    requested_lease = Lease("s-1", owner="b", next_owner="a")
    actions = [RequestHandoff(Lease("s-2", owner="b"), "b", "H2")]
    assert look_again(actions, [requested_lease, S0], Me("a"), Config()) == Look(
        0.125, keys=("s-1", "s-2"), stale_ok=True
    )


@pytest.mark.parametrize("owner", ["a", None])
def test_leases_without_another_owner_are_not_polled(owner: str | None) -> None:
    """A worker that has got a requested lease, or may claim it, reads the whole table after its usual interval."""
    released_lease = Lease("s-1", owner=owner, next_owner="a")
    config = Config()
    assert look_again([], [released_lease, S0], Me("a"), config) == Look(config.cycle_seconds)


def test_lease_that_is_released_is_not_renewed() -> None:
    """H3: A plan contains one action for a lease, although its renewal is due when its owner releases it."""
    requested_lease = Lease("s-1", owner="a", next_owner="b", idle=9.0)
    other_leases = (Lease("s-2", owner="b"), Lease("s-3", owner="a"))
    assert plan([requested_lease, *other_leases], None, Me("a"), Config()) == (
        Release(requested_lease, "H3", next_owner="b"),
    )


def test_listing_with_an_open_parent_creates_no_lease() -> None:
    """L2: An open shard has no children, so a listing with both is out of date, and the stream is skipped."""
    shards = [Shard("0", open=True), Shard("1", parents=("0",), open=True)]
    assert plan([], shards, Me("a"), Config()) == ()


@pytest.mark.parametrize("rules", [Minimal(), Kcl(), KclRust(), EventHubs()], ids=repr)
def test_lease_that_is_deleted_is_not_claimed(rules: RuleSet) -> None:
    """L10: A lease whose shard is no longer listed counts toward no share, and the plan contains one action for it."""
    old_lease, own_lease = Lease("s-1"), Lease("s-2", owner="a", checkpoint=LATEST)
    actions = plan([old_lease, own_lease], [Shard("s-2")], Me("a"), Config(rules=rules))
    assert [(type(action), action.lease.key) for action in actions] == [(Delete, "s-1")]


def test_partial_read_is_used_only_for_moves_in_progress() -> None:
    """A newcomer does not request its share of a fleet of two from the rows of its first request alone (M5)."""
    other_leases = tuple(Lease(f"s-{number}", owner="b", yields=True) for number in range(9))
    requested_lease = Lease("s-9", owner="b", yields=True, next_owner="a")
    later_me = Me("a", history=History(full_still=0.25))
    assert plan([*other_leases, requested_lease], None, later_me, Config()) == ()
    assert len(plan([*other_leases, requested_lease], None, Me("a"), Config())) == 4
    assert plan([*other_leases, requested_lease], None, evolve(later_me, worker="b"), Config()) == (
        Release(requested_lease, "H3", next_owner="a"),
    )


def test_draw_is_specified_exactly() -> None:
    """The description in leasehold/balancer/chance.py determines every draw, so that other languages can repeat it."""
    field = blake2b(b"a-1\x004", digest_size=16).digest()
    digests = {key: blake2b(key.encode(), digest_size=8, salt=field).digest() for key in ("s-0", "s-1", "s-2")}
    leases = [Lease(key) for key in digests]
    assert [lease.key for lease in draw_leases(leases, Me("a-1", 4), 3)] == sorted(
        digests, key=lambda key: digests[key]
    )
    assert digests["s-0"].hex() == "9d3cf3f16e45f9e0"
    assert (
        order_under("\ud800")(Lease("\ud800"))[0]
        == blake2b(b"\xed\xa0\x80", digest_size=8, salt=blake2b(b"\xed\xa0\x80", digest_size=16).digest()).digest()
    )


def test_draws_differ_between_workers_and_turns() -> None:
    """Workers draw different leases, and each worker draws others in each turn."""
    leases = [Lease(f"s-{index}") for index in range(50)]
    first_draws = {draw_leases(leases, Me(worker, turn), 1) for worker in ("a", "b", "c", "d") for turn in range(4)}
    assert len(first_draws) > 10


def test_owners_are_drawn_in_proportion_to_their_leases() -> None:
    """Drawing an owner and then a lease is equivalent to drawing from all leases, so small owners lose few leases."""
    counts = {"a": 30, "b": 10}
    drawn_a = sum(draw_owner(counts, Me("c", turn)) == "a" for turn in range(400))
    assert 270 < drawn_a < 330


def test_slow_owners_are_named() -> None:
    """Owners with a longer `lease_seconds` are reported."""
    me = Me("me", history=History(gaps=(("fine", 5.0), ("me", 5.0), ("slow", 5.1))))
    assert slow_owners(me, Config(rules=Kcl(), lease_seconds=10.0)) == (("slow", 5.1),)
    assert slow_owners(me, Config(rules=Minimal(), lease_seconds=10.0)) == ()


PARENT = Lease("0", owner="a", checkpoint=LATEST)


def test_children_are_created_before_the_end_is_written() -> None:
    """L3: The children's leases are created before the end is written, so a crash between the two is harmless."""
    children = [Shard("2", parents=("0",)), Shard("1", parents=("0",), hash_range=(0, 9))]
    assert children_to_create(PARENT, children, {"0": PARENT}, {"0", "1", "2"}, Config(rules=Kcl())) == (
        Create(Lease("1", parents=("0",), checkpoint=TRIM_HORIZON, hash_range=(0, 9)), "L3"),
        Create(Lease("2", parents=("0",), checkpoint=TRIM_HORIZON), "L3"),
    )


def test_children_start_at_the_fleets_timestamp_under_kcl_rust() -> None:
    """L3: Under kcl-rust, all leases start at the fleet's timestamp, including those of later shards."""
    config = Config(rules=KclRust(), initial_position=at_timestamp(200))
    (create,) = children_to_create(PARENT, [Shard("1", parents=("0",))], {}, {"1"}, config)
    assert create.lease.checkpoint == at_timestamp(200)


@pytest.mark.parametrize(
    ("leases", "listed", "born"), [({}, {"1"}, False), ({"1": Lease("1")}, {"1"}, True), ({}, set(), True)]
)
def test_merge_child_is_created_after_its_other_parent(leases: dict[str, Lease], listed: set[str], born: bool) -> None:
    """L3: A merge child is created only once its other parent is leased or done."""
    child = Shard("2", parents=("0", "1"))
    assert bool(children_to_create(PARENT, [child], leases, listed, Config())) == born


def test_child_is_read_after_its_parents() -> None:
    """L12: A child is read after its parents, so that records of one key are handled in order."""
    child = Lease("2", parents=("0", "1"))
    ended_parent, open_parent = Lease("0", checkpoint=SHARD_END), Lease("1", checkpoint=LATEST)
    assert [readable(child, leases) for leases in ({}, {"0": ended_parent}, {"0": ended_parent, "1": open_parent})] == [
        True,
        True,
        False,
    ]


def test_renewals_and_steals_do_not_depend_on_the_listing_order() -> None:
    """Renewals and steals do not depend on the order in which leases are listed."""
    own_leases = [Lease(f"s-{index}", owner="a", idle=9.0) for index in range(3)]
    other_leases = [Lease(f"o-{index}", owner="bc"[index % 2]) for index in range(14)]
    for rules in (Kcl(), EventHubs("java")):
        config = Config(rules=rules, lease_seconds=12.0)
        actions = plan([*own_leases, *other_leases], None, Me("a"), config)
        assert plan([*other_leases[::-1], *own_leases[::-1]], None, Me("a"), config) == actions
        assert len(actions) == 4


def test_renewals_are_returned_in_key_order() -> None:
    """The renewals between two plans contain all leases that are due, in the order of their keys."""
    due_leases = [Lease(f"s-{index}", owner="a", idle=5.0) for index in (2, 1)]
    other_leases = [
        Lease("s-3", owner="a", idle=4.9),
        Lease("s-4", owner="b", idle=5.0),
        Lease("s-5", owner="a", idle=90.0),
    ]
    config = Config(rules=Minimal(), lease_seconds=10.0, renew_seconds=5.0)
    assert renewals([*due_leases, *other_leases], Me("a"), config) == (
        Renew(due_leases[1], "C2"),
        Renew(due_leases[0], "C2"),
    )


@pytest.mark.parametrize(
    ("history", "whole"),
    [
        (History(full_still=19.9), False),
        (History(full_still=20.0), True),
        (History(full_still=2.9, fleet_still=4.9, hearing=BulletinState()), False),
        (History(full_still=3.0, fleet_still=5.0, hearing=BulletinState()), True),
    ],
)
def test_next_owner_lists_the_table_regularly(history: History, whole: bool) -> None:
    """A worker that waits for a lease also lists the table regularly, and notices other changes."""
    requested_lease, other_leases = (
        Lease("s-1", owner="b", next_owner="a"),
        [Lease(f"b-{index}", owner="b") for index in range(3)],
    )
    config = Config(rules=Minimal(), lease_seconds=10.0, cycle_seconds=20.0)
    decision = look_again([], [requested_lease, *other_leases], Me("a", history=history), config)
    assert decision == (Look(0.125) if whole else Look(0.125, keys=("s-1",), stale_ok=True))


def test_table_is_listed_when_requests_are_settled() -> None:
    """A newcomer lists the table as soon as its first requests are settled."""
    later_me = Me("a", history=History(full_still=0.25))
    assert look_again([], [Lease("s-1", owner="a")], later_me, Config(rules=Minimal())) == Look(0.0)


def test_no_wait_exceeds_a_cycle() -> None:
    """If a cycle takes half a second, the table is read again after half a second, even if a shard is new."""
    assert look_again([Create(S0, "L3")], [], Me("a"), Config(rules=Kcl(), cycle_seconds=0.5)) == Look(0.5)


def test_leases_are_created_for_every_stream_of_a_table() -> None:
    """In a table with several streams, leases are created for each stream independently."""
    shards = [Shard(f"{name}:0", stream=name, hash_range=(0, 9)) for name in "abc"]
    existing_lease = Lease("a:0", stream="a", owner="w", hash_range=(0, 9))
    creations = [action for action in plan([existing_lease], shards, Me("w"), Config()) if isinstance(action, Create)]
    assert [create.lease.key for create in creations] == ["b:0", "c:0"]


def test_key_of_another_stream_is_not_created_again() -> None:
    """If a lease of another stream has the same key, it is not overwritten."""
    existing_lease = Lease("0", stream="a", owner="w")
    assert plan([existing_lease], [Shard("0", stream="a"), Shard("0", stream="b")], Me("w"), Config()) == ()


def test_lease_that_the_lookout_claims_is_not_freed() -> None:
    """A turn writes each lease only once, so a lease that the lookout claims is not freed in the same turn."""
    dead_leases = [Lease(f"d-{index}", owner="dead", idle=90.0, yields=True) for index in range(2)]
    requested_lease = Lease("s-1", owner="dead", next_owner="a", idle=90.0, yields=True)
    own_lease = Lease("s-2", owner="a", idle=1.0, held=90.0)
    history = History(owners_still=30.0, fleet_still=30.0, hearing=BulletinState())
    config = Config(rules=Minimal(), lease_seconds=10.0)
    keys = [
        action.lease.key
        for action in plan([*dead_leases, requested_lease, own_lease], None, Me("a", history=history), config)
    ]
    assert sorted(keys) == ["d-0", "d-1", "s-1"]


@pytest.mark.parametrize("turn", range(12))
def test_owner_draw_is_specified_exactly(turn: int) -> None:
    """The position of the digest in the list of leases, sorted by owner, determines the owner."""
    field = blake2b(f"a-1\0{turn}".encode(), digest_size=16).digest()
    position = int.from_bytes(blake2b(b"", digest_size=8, salt=field).digest()) % 5
    assert draw_owner({"c": 1, "b": 2, "a": 2}, Me("a-1", turn)) == "aabbc"[position]


def test_worker_id_may_contain_a_lone_surrogate() -> None:
    """JSON may contain lone surrogates, so each digest of a worker id accepts them."""
    assert (
        digest_under("")("\ud800")
        == blake2b(b"\xed\xa0\x80", digest_size=8, salt=blake2b(b"", digest_size=16).digest()).digest()
    )


@pytest.mark.parametrize("rules", [Kcl(), KclRust(), EventHubs(), EventHubs("python"), Minimal()], ids=repr)
def test_default_intervals_follow_the_configured_lease_seconds(rules: RuleSet) -> None:
    """With short leases, a worker renews early enough that its own leases do not expire."""
    config = Config(rules=rules, lease_seconds=3.0)
    assert (config.cycle_seconds, config.renew_seconds) == (rules.cycle_seconds(3.0), rules.renew_seconds(3.0))
    assert config.renew_seconds < rules.expires_above(3.0)


def test_option_without_a_value_keeps_the_one_of_the_rule_set() -> None:
    """An option that is None, or that belongs to another rule set, changes nothing."""
    rules = Minimal(max_leases=5, patience=2)
    assert rules.given(max_leases=None, patience=4, dialect="java") == Minimal(max_leases=5, patience=4)
