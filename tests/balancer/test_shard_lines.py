"""Tests for single listings which shards are related, which leases are obsolete, and what counts as a hole."""

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from leasehold.balancer.actions import Create, Delete
from leasehold.balancer.chance import digest_under
from leasehold.balancer.config import Config
from leasehold.balancer.family import first_hole, problems, unrelated_shards, update_holes
from leasehold.balancer.lineage import children_to_create, deletable, readable
from leasehold.balancer.model import (
    HASH_KEYS,
    LATEST,
    SHARD_END,
    TRIM_HORIZON,
    History,
    Hole,
    Lease,
    Me,
    Position,
    Shard,
    at_timestamp,
)
from leasehold.balancer.plan import plan
from leasehold.balancer.rules.kcl import KclRust

READ = Position("7")


def shard(name: str, *parents: str, keys: tuple[int, int] | None = (0, 9), open: bool = True) -> Shard:  # noqa: A002  the model's word
    return Shard(name, parents=parents, hash_range=keys, open=open)


# Kin: while a row cannot be read, no lease of a related shard is created or deleted


def test_kin_of_unreadable_row_are_ancestors_and_descendants() -> None:
    """If the row of a parent cannot be read, no lease is created for its child, which might skip its first records."""
    related_shards = [shard("0"), shard("1", "0"), shard("2", "0"), shard("3", "1", "x")]
    other_shards = [shard("8"), shard("9", "8")]
    assert unrelated_shards([*related_shards, *other_shards], ["1"]) == tuple(other_shards)
    assert unrelated_shards([*other_shards, *related_shards], ["x"]) == tuple(other_shards)
    assert unrelated_shards([*related_shards, *other_shards], ["8"]) == tuple(related_shards)
    assert unrelated_shards([*related_shards, *other_shards, shard("4")], ["1", "8"]) == (shard("4"),)


def test_all_partitions_of_a_stream_are_kin() -> None:
    """A new partition's start depends on whether any other partition was read, so all partitions are related (L6)."""
    hub_partitions = [Shard("h:0", stream="h"), Shard("h:1", stream="h")]
    other_partitions = [Shard("g:0", stream="g")]
    root_shards = [shard("0"), shard("1")]
    assert unrelated_shards([*hub_partitions, *other_partitions, *root_shards], ["h:1"]) == (
        *other_partitions,
        *root_shards,
    )
    assert unrelated_shards([*hub_partitions, *other_partitions, *root_shards], ["0"]) == (
        *hub_partitions,
        *other_partitions,
        root_shards[1],
    )


def test_no_kin_if_all_rows_are_readable() -> None:
    """If all rows can be read, the creation of leases is not restricted."""
    shards = [shard("0"), shard("1", "0")]
    assert unrelated_shards(shards, []) == tuple(shards)


# Finished leases (L8)

DONE = Lease("0", checkpoint=SHARD_END)


def owners(*names: str, yields: bool = True) -> list[Lease]:
    return [Lease(f"s-{name}", owner=name, yields=yields) for name in names]


def test_ended_lease_stays_until_each_child_has_begun() -> None:
    """An ended lease is kept until all of its children have begun, because it determines where they start."""
    begun_child, waiting_child = (
        Lease("1", parents=("0",), checkpoint=READ),
        Lease("2", parents=("0",), checkpoint=TRIM_HORIZON),
    )
    assert deletable([DONE, begun_child, *owners("a")], "a") == {"0"}
    assert deletable([DONE, begun_child, waiting_child, *owners("a")], "a") == frozenset()
    assert deletable([DONE, waiting_child, begun_child, *owners("a")], "a") == frozenset()
    assert deletable([DONE, evolve(waiting_child, checkpoint=LATEST), *owners("a")], "a") == {"0"}
    assert deletable([DONE, evolve(waiting_child, checkpoint=at_timestamp(7)), *owners("a")], "a") == frozenset()


def test_ended_lease_is_deleted_after_its_parents() -> None:
    """An ended lease is deleted after its parents' leases. Otherwise, the parents would look unread."""
    child = Lease("1", parents=("0",), checkpoint=SHARD_END)
    grandchild = Lease("2", parents=("1",), checkpoint=READ)
    assert deletable([DONE, child, grandchild, *owners("a")], "a") == {"0"}
    assert deletable([child, grandchild, *owners("a")], "a") == {"1"}


def test_lease_without_children_or_not_ended_is_kept() -> None:
    """The row of a lease is kept if its shard has no children, or has not ended."""
    assert deletable([DONE, *owners("a")], "a") == frozenset()
    unfinished = Lease("0", owner="a", checkpoint=READ)
    assert deletable([unfinished, Lease("1", parents=("0",), checkpoint=READ)], "a") == frozenset()


def test_one_worker_checks_each_lease_for_deletion() -> None:
    """For each ended lease, one of our workers lists the shards. No worker of the KCL does."""
    names = ["b", "a", "c", "d"]
    for key in map(str, range(20)):
        table = [
            Lease(key, checkpoint=SHARD_END),
            Lease("child", parents=(key,), checkpoint=READ),
            *owners(*names),
            *owners("0-kcl", yields=False),
        ]
        responsible_workers = [name for name in [*names, "0-kcl", "e"] if deletable(table, name)]
        digest = digest_under("")
        later_names = [name for name in sorted(names, key=digest) if digest(name) > digest(key)]
        assert responsible_workers == [(later_names or sorted(names, key=digest))[0]]
    table_without_workers = [DONE, Lease("1", parents=("0",), checkpoint=READ)]
    assert deletable(table_without_workers, "a") == frozenset()


# New leases (L3, L7)


def test_only_kcl_rust_starts_children_at_the_fleets_timestamp() -> None:
    """Under other rules, a fleet with AT_TIMESTAMP reads the children of an ended shard from their first records."""
    timestamp = at_timestamp(200)
    parent = Lease("0", owner="a")
    for config, start in (
        (Config(initial_position=timestamp), TRIM_HORIZON),
        (Config(rules=KclRust(), initial_position=timestamp), timestamp),
        (Config(rules=KclRust(), initial_position=LATEST), TRIM_HORIZON),
    ):
        (create,) = children_to_create(parent, [shard("1", "0")], {}, {"1"}, config)
        assert create.lease.checkpoint == start


def test_shard_id_is_the_key_without_the_stream() -> None:
    """The source knows a shard only by its own id, without the stream."""
    qualified_shard = Shard("acc:orders:1:shardId-0", stream="acc:orders:1", hash_range=(0, 9))
    (create,) = [
        action
        for action in plan([], [qualified_shard], Me("a"), Config(initial_position=LATEST))
        if isinstance(action, Create)
    ]
    assert (create.lease.key, create.lease.shard) == ("acc:orders:1:shardId-0", "shardId-0")


def created_leases(leases: list[Lease], shards: list[Shard], *holes: Hole) -> dict[str, str]:
    """Return the keys of the leases that are created, with their rules."""
    actions = plan(leases, shards, Me("a", history=History(holes=holes)), Config(initial_position=LATEST))
    return {action.lease.key: action.rule for action in actions if isinstance(action, Create)}


def test_merge_child_waits_for_listed_or_leased_parent() -> None:
    """L3: A merge child is read only after both parents have ended, so records stay in order."""
    ended_parent, child = Lease("0", checkpoint=SHARD_END), shard("2", "0", "1", keys=(0, 9), open=False)
    first_parent = shard("0", keys=(0, 4), open=False)
    other_parent = shard("1", keys=(5, 9), open=False)
    assert created_leases([ended_parent], [first_parent, child]) == {"2": "L3"}
    assert "2" not in created_leases([ended_parent], [first_parent, other_parent, child])
    assert "2" not in created_leases([ended_parent, Lease("1", owner="b", checkpoint=READ)], [first_parent, child])


@pytest.mark.parametrize(
    ("keys", "last", "behind"),
    [((5, 9), 4, False), ((5, 9), 5, True), ((0, 4), 9, False), ((0, 5), 9, True), (None, 9, False)],
)
def test_shard_overlaps_a_hole_in_one_hash_key(keys: tuple[int, int] | None, last: int, behind: bool) -> None:
    """L7: If a shard shares even one hash key with a hole, it depends on the hole. Its neighbor does not."""
    parent = Lease("0", owner="a", checkpoint=READ, hash_range=(0, 9))
    hole = Hole("", 5 if last == 9 else 0, last, times=3)
    shards = [shard("0", open=False), shard("1", "0", keys=keys, open=False)]
    assert ("1" in created_leases([parent], shards, hole)) is behind
    assert "1" not in created_leases([parent], shards, evolve(hole, times=2))
    assert "1" not in created_leases([parent], shards, evolve(hole, stream="other"))


def test_merge_child_after_a_hole_waits_only_for_listed_parents() -> None:
    """L7: A merge child waits for a listed parent, whose lease is created first, but not for one that is gone."""
    parent = Lease("0", owner="a", checkpoint=READ, hash_range=(0, 9))
    hole = Hole("", 0, 4, times=3)
    first_parent, child = shard("0", open=False), shard("2", "0", "1", keys=(0, 4), open=False)
    assert created_leases([parent], [first_parent, child], hole) == {"2": "L7"}
    assert "2" not in created_leases([parent], [first_parent, shard("1", open=False), child], hole)


def test_new_lease_names_its_stream() -> None:
    """In a table with several streams, each lease names the stream of its source."""
    qualified_shard = Shard("orders:1", stream="orders", parents=("orders:0",), hash_range=(0, 9))
    (create,) = children_to_create(Lease("orders:0", stream="orders"), [qualified_shard], {}, {"orders:1"}, Config())
    assert create.lease == Lease(
        "orders:1", stream="orders", shard="1", parents=("orders:0",), checkpoint=TRIM_HORIZON, hash_range=(0, 9)
    )


def test_ancestors_of_a_read_shard_are_not_created_again() -> None:
    """L4: A finished shard whose lease was deleted is not read again while its grandchild is read."""
    listed_shards = [shard("0", open=False), shard("1", "0", open=False), shard("2", "1")]
    read_lease = Lease("2", owner="a", parents=("1",), checkpoint=READ, hash_range=(0, 9))
    actions = plan([read_lease], listed_shards, Me("a"), Config(initial_position=TRIM_HORIZON))
    assert [action for action in actions if isinstance(action, Create)] == []


def test_child_of_a_finished_shard_waits_for_its_other_parent() -> None:
    """L9 applies only to shards that expired before they were finished, so records stay in order."""
    ended_parent, other_parent = (
        Lease("0", checkpoint=SHARD_END),
        Lease("1", owner="b", checkpoint=READ, hash_range=(0, 9)),
    )
    assert "2" not in created_leases([ended_parent, other_parent], [shard("1", open=False), shard("2", "0", "1")])


def test_child_of_expired_shard_waits_for_row_of_other_parent() -> None:
    """L9: If a worker dies between the two creations, the other parent must not look finished."""
    expired_lease = Lease("0", checkpoint=READ, hash_range=(0, 4))
    shards = [shard("1", keys=(5, 9), open=False), shard("2", "0", "1")]
    assert created_leases([expired_lease], shards) == {"1": "L5"}
    assert created_leases([expired_lease, Lease("1", hash_range=(5, 9))], shards) == {"2": "L9"}


# Rows that were deleted (L13)


def created_positions(
    deleted_leases: list[Lease], shards: list[Shard], leases: list[Lease], start: Position = LATEST
) -> dict[str, Position]:
    """Return the start positions of the leases that a worker creates if it has read these leases before."""
    me = Me("w", history=History(gone=tuple(deleted_leases)))
    actions = plan(leases, shards, me, Config(initial_position=start))
    return {action.lease.key: action.lease.checkpoint for action in actions if isinstance(action, Create)}


def test_deleted_lease_starts_at_its_last_known_position() -> None:
    """A lease whose row was deleted is created again at the position that a worker remembers."""
    deleted_leases = [Lease("0", checkpoint=READ, epoch=7, owner="dead")]
    assert created_positions(deleted_leases, [shard("0"), shard("1")], []) == {"0": READ, "1": LATEST}
    (creation,) = plan([], [shard("0")], Me("w", history=History(gone=tuple(deleted_leases))), Config())
    assert (creation.rule, creation.lease.epoch) == ("L13", 1_000_007)
    assert created_positions(deleted_leases, [shard("0")], [Lease("0")]) == {}
    assert created_positions([evolve(deleted_leases[0], stream="other")], [shard("0")], []) == {"0": LATEST}


@pytest.mark.parametrize("start", [LATEST, TRIM_HORIZON])
def test_ended_lease_with_deleted_row_is_not_created_again(start: Position) -> None:
    """An ended parent is not read again next to its children, and no child skips its first records under LATEST."""
    listed_shards = [shard("0", open=False), shard("1", "0"), shard("2", "0")]
    ended_lease = Lease("0", checkpoint=SHARD_END)
    assert created_positions([ended_lease], listed_shards, [], start) == {"1": TRIM_HORIZON, "2": TRIM_HORIZON}
    assert created_positions([ended_lease, Lease("1", checkpoint=READ, parents=("0",))], listed_shards, [], start) == {
        "1": READ,
        "2": TRIM_HORIZON,
    }
    assert (
        created_positions(
            [ended_lease], listed_shards, [Lease("1", checkpoint=READ), Lease("2", checkpoint=READ)], start
        )
        == {}
    )


def test_a_merged_child_comes_after_the_row_of_the_parent_that_is_yet_to_be_read() -> None:
    """A parent whose row was deleted looks finished, but its rest must be read before the merged child."""
    listed_shards = [shard("0", open=False), shard("1", "0"), shard("2", "0", open=False), shard("3", open=False)]
    listed_shards.append(shard("4", "2", "3"))
    deleted_leases = [Lease("0", checkpoint=READ), Lease("3", checkpoint=SHARD_END)]
    assert created_positions(deleted_leases, listed_shards, []) == {"0": READ}
    half_read_lease = Lease("2", checkpoint=READ, parents=("0",))
    assert created_positions(deleted_leases[1:], listed_shards, [Lease("1", checkpoint=READ), half_read_lease]) == {
        "4": TRIM_HORIZON
    }
    assert created_positions([deleted_leases[1], half_read_lease], listed_shards, [Lease("1", checkpoint=READ)]) == {
        "2": READ
    }


def test_child_deleted_with_its_parents_starts_at_its_beginning() -> None:
    """A sibling has begun, so the parent counts as finished, although no listing showed its end.

    The child is created anyway.
    """
    listed_shards = [shard("0", open=False), shard("1", "0"), shard("2", "0")]
    parent, sibling = Lease("0", checkpoint=READ), Lease("1", checkpoint=READ, parents=("0",))
    assert created_positions([parent], listed_shards, [sibling]) == {"2": TRIM_HORIZON}


def test_unfinished_parent_with_deleted_row_is_read_before_its_children() -> None:
    """If the row of an unfinished parent was deleted, the rest of the parent is read before its children."""
    listed_shards = [shard("0", open=False), shard("1", "0"), shard("2", "0")]
    parent = Lease("0", checkpoint=READ)
    assert created_positions([parent], listed_shards, []) == {"0": READ}
    assert created_positions([parent], listed_shards, [Lease("1"), Lease("2")]) == {"0": READ}
    children = [Lease(key, checkpoint=TRIM_HORIZON, parents=("0",)) for key in ("1", "2")]
    assert created_positions([parent, *children], listed_shards, []) == {"0": READ}
    assert created_positions(children, listed_shards, [parent]) == {"1": TRIM_HORIZON, "2": TRIM_HORIZON}


def test_lease_that_ended_and_was_deleted_is_not_created_again() -> None:
    """A worker that reads the table seldom does not read a shard again that others have finished (L8)."""
    listed_shards = [shard("0", open=False), shard("1", "0", open=False), shard("2", "1")]
    parent = Lease("0", checkpoint=READ)
    assert (
        created_positions([parent], [listed_shards[0], shard("1", "0")], [Lease("1", checkpoint=READ, parents=("0",))])
        == {}
    )
    assert created_positions([parent], listed_shards, [Lease("2", checkpoint=READ, parents=("1",))]) == {}


# Leases of shards that are gone (L10), and faults of a listing (L2)


def test_leases_of_expired_shards_are_deleted() -> None:
    """The leases of expired shards are deleted, so the table does not grow forever."""
    lease_of_expired_shard = Lease("0", owner="a", checkpoint=READ)
    read_lease = Lease("1", owner="b", checkpoint=READ, hash_range=HASH_KEYS)
    actions = plan([lease_of_expired_shard, read_lease], [shard("1", keys=HASH_KEYS)], Me("a"), Config())
    assert [action for action in actions if isinstance(action, Delete)] == [Delete(lease_of_expired_shard, "L10")]


def test_no_lease_is_deleted_while_another_is_created() -> None:
    """L5: The last lease that proves that a stream was read is kept until the later shards have leases."""
    actions = plan([Lease("0", owner="a", checkpoint=READ)], [shard("1", keys=HASH_KEYS)], Me("a"), Config())
    assert [(type(action), action.lease.key) for action in actions] == [(Create, "1")]


def test_fault_of_a_listing_names_its_stream() -> None:
    """In a fleet with several streams, the message about a faulty listing names the stream."""
    keys = {"stream": "orders", "hash_range": (0, 9)}
    parent, child = Shard("0", **keys), Shard("1", parents=("0",), **keys)  # type: ignore[arg-type]
    cyclic_shards = [Shard("0", parents=("1",), open=False, **keys), Shard("1", parents=("0",), open=False, **keys)]  # type: ignore[arg-type]
    faults = [
        [(problem.stream, problem.shard) for problem in problems(shards)]
        for shards in ([parent, child], cyclic_shards, [parent])
    ]
    assert faults == [[("orders", "0"), ("orders", "")], [("orders", "0")], [("orders", "")]]


def test_holes_are_not_reported_if_a_range_is_unknown() -> None:
    """L7: No hole is reported if a shard's range is unknown, because it may cover the gap."""
    shard_with_range, shard_without_range = shard("0"), shard("1", keys=None)
    assert (len(problems([shard_with_range])), len(problems([shard_with_range, shard_without_range]))) == (1, 0)
    leases = [Lease("0", hash_range=(0, 9)), Lease("1")]
    assert (len(update_holes(leases[:1], ())), len(update_holes(leases, ()))) == (1, 0)
    ended_lease = evolve(leases[1], checkpoint=SHARD_END)
    assert len(update_holes([leases[0], ended_lease], ())) == 1


@given(st.data())
def test_line_without_hash_ranges_continues_with_the_oldest_shard(data: st.DataObject) -> None:
    """After an outage, reading continues with the oldest listed shard, not at LATEST, which would skip records (L5).

    Each shard is the only child of the one before it. The first shards are gone, and one shard was being read.
    """
    count = data.draw(st.integers(2, 8))
    read_index, first_listed_index = data.draw(st.integers(0, count - 1)), data.draw(st.integers(0, count - 1))
    all_shards = [Shard(f"{n}", parents=(f"{n - 1}",), open=n == count - 1) for n in range(count)]
    table = {f"{read_index}": Lease(f"{read_index}", parents=(f"{read_index - 1}",), owner="w", checkpoint=READ)}
    position_by_key = dict[str, Position]()
    for _ in range(3 * count):
        for action in plan(table.values(), all_shards[first_listed_index:], Me("w"), Config(initial_position=LATEST)):
            match action:
                case Create(lease):
                    position_by_key[lease.key] = lease.checkpoint
                    table[lease.key] = evolve(lease, owner="w")
                case Delete(lease):
                    del table[lease.key]
                case _:
                    pass
        # The owner reads the oldest listed shard to its end.
        for key in sorted(table, key=int):
            if int(key) >= first_listed_index and int(key) < count - 1 and readable(table[key], table):
                table[key] = evolve(table[key], checkpoint=SHARD_END)
    assert position_by_key == {f"{n}": TRIM_HORIZON for n in range(max(first_listed_index, read_index + 1), count)}


@pytest.mark.parametrize(
    ("ranges", "hole"),
    [
        ([(0, 9), (2, 3), (10, HASH_KEYS[1])], None),
        ([(10, HASH_KEYS[1]), (0, 9)], None),
        ([(0, 9), (11, HASH_KEYS[1])], (10, 10)),
        ([(1, HASH_KEYS[1])], (0, 0)),
        ([(0, HASH_KEYS[1] - 1)], (HASH_KEYS[1], HASH_KEYS[1])),
        ([], HASH_KEYS),
    ],
)
def test_hole_begins_at_the_first_uncovered_hash_key(
    ranges: list[tuple[int, int]], hole: tuple[int, int] | None
) -> None:
    """L7: Ranges may overlap, because a parent and its children have leases at the same time."""
    assert first_hole(ranges) == hole


def test_hole_among_open_shards_is_reported() -> None:
    """A closed shard receives no more records, so it covers no hash keys of new ones."""
    assert len(problems([shard("0", keys=HASH_KEYS, open=False), shard("1", "0", keys=(0, 9))])) == 1


def test_another_hole_is_counted_from_one() -> None:
    """L7: No lease is created because of a hole that was seen only once, even if another one was seen before."""
    (hole,) = update_holes([Lease("0", hash_range=(0, 9))], (Hole("", 20, HASH_KEYS[1], times=2),))
    assert hole == Hole("", 10, HASH_KEYS[1], times=1)


def test_hole_creates_no_lease_for_a_root_shard() -> None:
    """L7: A shard without leased parents starts at the initial position, because it may be a new one."""
    shards = [shard("0"), shard("1", keys=(10, 19))]
    leases = [Lease("0", hash_range=(0, 9))]
    assert created_leases(leases, shards, Hole("", 10, 19, times=3)) == {"1": "L4"}


def test_disabled_stream_is_read() -> None:
    """L4: All shards of a disabled DynamoDB stream are closed, but its last records are read."""
    shards = [shard("0", open=False), shard("1", "0", open=False), shard("2", "0", open=False)]
    assert created_leases([], shards) == {"1": "L4", "2": "L4"}


@pytest.mark.parametrize(("position", "start"), [(SHARD_END, TRIM_HORIZON), (READ, TRIM_HORIZON), (LATEST, LATEST)])
def test_stream_counts_as_read_by_any_finished_or_numbered_lease(position: Position, start: Position) -> None:
    """L5: LATEST skips the records of an outage only in a stream that has never been read."""
    assert created_positions([], [shard("5", "4")], [Lease("0", owner="b", checkpoint=position)]) == {"5": start}


@pytest.mark.parametrize("deleted", [True, False])
def test_parent_of_a_read_shard_is_not_read_again(deleted: bool) -> None:
    """L5, L13: The parent of a shard with a lease was read, even if the row is gone or names no parents."""
    shards = [shard("0", open=False), shard("1", "0"), shard("2", "0"), shard("8")]
    lease, other_lease = Lease("1", checkpoint=READ), Lease("8", checkpoint=READ)
    created = created_positions([lease] if deleted else [], shards, [other_lease] if deleted else [lease, other_lease])
    assert created == {"2": TRIM_HORIZON} | ({"1": READ} if deleted else {})


def test_child_of_an_unlisted_parent_waits_for_its_reader() -> None:
    """L9: While another worker reads an unlisted parent, no lease at LATEST is created for its child."""
    assert created_positions([], [shard("1", "0")], [Lease("0", owner="b", checkpoint=READ)]) == {}


@pytest.mark.parametrize(
    ("lease", "is_deleted"),
    [
        (Lease("0", checkpoint=READ), True),
        (Lease("0", owner="a", checkpoint=READ), True),
        (Lease("0", owner="b", checkpoint=READ), False),
        (Lease("0", owner="b", checkpoint=READ, idle=99.0), True),
        (Lease("0", owner="b", checkpoint=SHARD_END), True),
    ],
)
def test_lease_of_expired_shard_is_deleted_unless_another_worker_reads_it(lease: Lease, is_deleted: bool) -> None:
    """L10: Only a living worker that still reads the shard keeps the row."""
    other_lease = Lease("1", owner="b", checkpoint=READ, hash_range=HASH_KEYS)
    actions = plan([lease, other_lease], [shard("1", keys=HASH_KEYS)], Me("a"), Config())
    assert [action.lease for action in actions if isinstance(action, Delete)] == ([lease] if is_deleted else [])


@pytest.mark.parametrize(
    ("shards", "parents"),
    [
        ([shard("0", open=False), shard("1", "0", open=False), shard("2", "1")], ()),
        ([shard("1", open=False), shard("2", "1")], ("0",)),
    ],
    ids=["named in the listing", "named in the row"],
)
def test_finished_leases_are_deleted_parents_first(shards: list[Shard], parents: tuple[str, ...]) -> None:
    """L8: Whether the row or the listing names a parent, its lease is deleted first."""
    leases = [DONE, Lease("1", checkpoint=SHARD_END, parents=parents), Lease("2", checkpoint=READ, parents=("1",))]
    for expected_keys in (["0"], ["1"], []):
        actions = plan(leases, shards, Me("a"), Config())
        keys = [action.lease.key for action in actions if isinstance(action, Delete)]
        assert keys == expected_keys
        leases = [lease for lease in leases if lease.key not in keys]


def test_finished_lease_stays_until_its_children_have_begun() -> None:
    """L8: Until then, only this lease shows that its children start at their beginning."""
    listed_shards = [shard("0", open=False), shard("1", "0"), shard("2", "0")]
    children = [Lease(key, parents=("0",), checkpoint=position) for key, position in (("1", READ), ("2", TRIM_HORIZON))]
    actions = plan([DONE, *children], listed_shards, Me("a"), Config())
    assert [action for action in actions if isinstance(action, Delete)] == []


@pytest.mark.parametrize(
    ("deleted_epochs", "epochs", "lowest"),
    [((7,), (), 1_000_007), ((7,), (9,), 1_000_009), ((), (999_999,), 0), ((), (1_000_000,), 1_000_000)],
)
def test_new_lease_continues_the_epochs_of_deleted_rows(
    deleted_epochs: tuple[int, ...], epochs: tuple[int, ...], lowest: int
) -> None:
    """L13: A handler never gets a lower fencing number for a shard than before, whatever rows were deleted."""
    deleted_leases = [Lease(f"d-{index}", checkpoint=READ, epoch=epoch) for index, epoch in enumerate(deleted_epochs)]
    leases = [Lease(f"s-{index}", checkpoint=READ, epoch=epoch) for index, epoch in enumerate(epochs)]
    shards = [shard(lease.key) for lease in (*deleted_leases, *leases)]
    me = Me("w", history=History(gone=tuple(deleted_leases)))
    creates = [action for action in plan(leases, [*shards, shard("new")], me, Config()) if isinstance(action, Create)]
    assert [create.lease.epoch for create in creates if create.lease.key == "new"] == [lowest]


def test_deleted_child_of_a_finished_shard_continues_at_its_checkpoint() -> None:
    """L13: The last known position of a child overrides the beginning of its shard."""
    listed_shards = [shard("0", open=False), shard("1", "0"), shard("2", "0")]
    deleted_leases = [Lease("1", parents=("0",), checkpoint=READ)]
    assert created_positions(deleted_leases, listed_shards, [DONE]) == {"1": READ, "2": TRIM_HORIZON}


@pytest.mark.parametrize(
    ("keys", "position", "start"),
    [(None, READ, TRIM_HORIZON), (None, LATEST, at_timestamp(5)), ((0, 9), READ, at_timestamp(5))],
)
def test_only_an_added_partition_starts_at_its_beginning(
    keys: tuple[int, int] | None, position: Position, start: Position
) -> None:
    """L6: A partition that is added to a hub that has been read starts at its beginning, and no other root shard."""
    shards = [shard("0", keys=keys), shard("1", keys=keys)]
    lease = Lease("0", owner="b", checkpoint=position, hash_range=keys)
    assert created_positions([], shards, [lease], at_timestamp(5)) == {"1": start}
