"""L14: Tests that contradictions between listing and table are named, and that leases are recreated in a safe order."""

from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from leasehold.balancer.contradictions import (
    CONTRADICTION,
    INCARNATION,
    SETTLED_VALUE,
    Contradiction,
    contradictions,
    created_later,
    reported_contradictions,
    restarts,
)
from leasehold.balancer.model import LATEST, SHARD_END, TRIM_HORIZON, Lease, Position, Shard
from leasehold_lab.properties.strategies import scenes
from leasehold_lab.simulator.world.world import create_shard

OLD, NEW = "1:orders:7", "1:orders:9"
SPLIT = (create_shard("0", 0, 99, open=False), create_shard("1", 0, 49, "0"), create_shard("2", 50, 99, "0"))


def _kept(shards: tuple[Shard, ...], incarnation: str) -> dict[str, Lease]:
    """Return the leases of a fleet that has read all of these shards for a while."""
    annotations = ((INCARNATION, incarnation),) if incarnation else ()
    return {
        shard_of_stream.id: Lease(
            shard_of_stream.id,
            parents=shard_of_stream.parents,
            hash_range=shard_of_stream.hash_range,
            checkpoint=Position("500") if shard_of_stream.open else SHARD_END,
            annotations=annotations,
        )
        for shard_of_stream in shards
    }


def _split_shards(root_count: int, split_choices: list[int]) -> tuple[Shard, ...]:
    shards = [create_shard(str(number), 100 * number, 100 * number + 99) for number in range(root_count)]
    for choice in split_choices:
        open_shards = [candidate for candidate in shards if candidate.open]
        parent = open_shards[choice % len(open_shards)]
        first_hash, last_hash = parent.hash_range or (0, 0)
        shards[shards.index(parent)] = evolve(parent, open=False)
        middle_hash = (first_hash + last_hash) // 2
        shards.append(create_shard(str(len(shards)), first_hash, middle_hash, parent.id))
        shards.append(create_shard(str(len(shards)), middle_hash + 1, last_hash, parent.id))
    return tuple(shards)


shard_trees = st.builds(_split_shards, st.integers(1, 3), st.lists(st.integers(0, 9), max_size=3))


@given(scenes(), st.sampled_from(("", OLD, NEW, "x", ":")), st.data())
def test_every_table_and_listing_is_planned(scene: Any, incarnation: str, data: st.DataObject) -> None:  # noqa: ANN401
    """Every combination of rows and shards can be planned, however strange the rows are."""
    values = st.sampled_from((None, "", SETTLED_VALUE, OLD, NEW, "1:orders:9" + "9" * 30, "x", "²:²"))
    leases = [
        lease if (note := data.draw(values)) is None else evolve(lease, annotations=((INCARNATION, note),))
        for lease in scene.leases
    ]
    shards = scene.shards or ()
    contradictions_found = contradictions(shards, leases, incarnation)
    assert contradictions(reversed(shards), reversed(leases), incarnation) == contradictions_found, (
        "whatever their order"
    )
    for start in (TRIM_HORIZON, LATEST):
        steps = restarts(shards, leases, contradictions_found, incarnation, start)
        keys = [(step.stored or step.lease or Lease("")).key for step in steps]
        assert len(set(keys)) == len(keys), "one step for a key"
        assert not (steps and all(not contradiction.restartable for contradiction in contradictions_found)), (
            "another stream's leases stay as they are"
        )


@given(shard_trees, st.sampled_from(("", NEW)))
def test_healthy_fleet_has_no_contradictions(shards: tuple[Shard, ...], incarnation: str) -> None:
    """The table and the listing of a healthy fleet contain no contradictions, so it is never stopped or restarted."""
    assert contradictions(shards, _kept(shards, incarnation).values(), incarnation) == ()
    assert contradictions(shards, _kept(shards, "").values(), incarnation) == (), "of a version before, or of Java"


@given(shard_trees, st.data())
def test_each_contradiction_is_named(shards: tuple[Shard, ...], data: st.DataObject) -> None:
    """A shard that is left unread, or read from another shard's position, is always reported."""
    leases = _kept(shards, "")
    chosen_shard = data.draw(st.sampled_from([item for item in shards if item.open]))
    contradicting_leases: dict[str, Lease] = {
        "ended and open": evolve(leases[chosen_shard.id], checkpoint=SHARD_END),
        "another shard": evolve(leases[chosen_shard.id], hash_range=(7, 8)),
        "made anew": evolve(leases[chosen_shard.id], annotations=((INCARNATION, OLD),)),
        "old listing": evolve(leases[chosen_shard.id], annotations=((INCARNATION, "1:orders:10"),)),
        "another stream": evolve(leases[chosen_shard.id], annotations=((INCARNATION, "1:bills:9"),)),
    }
    for kind, lease in contradicting_leases.items():
        contradictions_found = contradictions(shards, (leases | {chosen_shard.id: lease}).values(), NEW)
        assert [(item.kind, item.key) for item in contradictions_found] == [(kind, chosen_shard.id)]


def test_messages_contain_a_remedy() -> None:
    """The message about a contradiction describes what is wrong and how to fix it."""
    remedy = "--if-recreated TRIM_HORIZON or LATEST has the workers begin anew, or stop them and use `leasehold reset`"
    new_listing = (create_shard("0", 0, 99),)
    leases = _kept(SPLIT, OLD)
    assert contradictions(new_listing, leases.values(), NEW) == (
        Contradiction(
            "made anew",
            "",
            "0",
            "stream 1:orders was made anew at 9 s since 1970, and its leases are of the one made at 7: nothing is "
            f"read; {remedy}",
        ),
    )
    assert contradictions(new_listing, leases.values(), "") == (
        Contradiction(
            "ended and open",
            "",
            "0",
            "lease 0 is at SHARD_END, but its shard is open and has no children, so nothing reads it; if the stream "
            f"was made anew, {remedy}",
        ),
    )
    (other_stream,) = contradictions(new_listing, leases.values(), "1:bills:9")
    assert (
        other_stream.what
        == "the leases are those of 1:orders, and 1:bills is read: give each stream a table of its own"
    )


@given(shard_trees, shard_trees, st.sampled_from((TRIM_HORIZON, LATEST)), st.booleans(), st.data())
def test_recreation_completes_after_interruptions(
    before: tuple[Shard, ...],
    after: tuple[Shard, ...],
    start: Position,
    some_unnoted: bool,
    data: st.DataObject,
) -> None:
    """Even if a worker dies during the recreation, no row of the old stream looks like one of the new stream."""
    table = _kept(before, OLD)
    if some_unnoted and len(table) > 1:
        last_key = max(table)
        table[last_key] = evolve(table[last_key], annotations=())
    while contradictions_found := contradictions(after, table.values(), NEW):
        assert [item.kind for item in contradictions_found] == ["made anew"], "until the last of them is written"
        steps = restarts(after, table.values(), contradictions_found, NEW, start)
        for step in steps[: data.draw(st.integers(1, len(steps)))]:
            if step.lease is None:
                assert step.stored is not None
                del table[step.stored.key]
            elif step.marks:
                table[step.lease.key] = step.lease
            else:
                table[step.lease.key] = evolve(step.lease, annotations=((INCARNATION, NEW),))
            if step.stored is not None and step.lease is not None and not step.marks:
                parent_incarnations = [
                    table[parent].annotation(INCARNATION) for parent in step.lease.parents if parent in table
                ]
                assert set(parent_incarnations) <= {NEW}, "a child may be read once its parent's lease says the truth"
    names = {item.id for item in after if item.open or start != LATEST}
    assert names <= table.keys() <= {item.id for item in after}
    for item in after:
        if item.id in table:
            row = table[item.id]
            starts_at_shard_end = start == LATEST and not item.open
            assert (row.checkpoint, row.parents, row.hash_range) == (
                SHARD_END if starts_at_shard_end else start,
                item.parents,
                item.hash_range,
            )


def test_reset_lease_belongs_to_the_current_stream() -> None:
    """A stream that was reset by hand can be read again."""
    reset_leases = tuple(
        evolve(lease, annotations=((INCARNATION, SETTLED_VALUE),)) for lease in _kept(SPLIT, OLD).values()
    )
    assert contradictions(SPLIT, reset_leases, NEW) == ()


def test_restart_keeps_leases_that_were_reset() -> None:
    """The position that an operator has set by hand stays while the workers restart the other leases of the stream."""
    leases = _kept(SPLIT, OLD)
    leases["1"] = evolve(leases["1"], checkpoint=Position("700"), annotations=((INCARNATION, SETTLED_VALUE),))
    contradictions_found = contradictions(SPLIT, leases.values(), NEW)
    steps = restarts(SPLIT, leases.values(), contradictions_found, NEW, TRIM_HORIZON)
    assert {step.stored.key for step in steps if step.stored is not None} == {"0", "2"}


def test_annotation_is_reported_until_resolved() -> None:
    """The annotation about a contradiction is reported to operators until the contradiction is resolved."""
    rows = (
        Lease("b", annotations=((CONTRADICTION, "is wrong"),)),
        Lease("a", annotations=((CONTRADICTION, SETTLED_VALUE),)),
        Lease("c"),
    )
    assert reported_contradictions(rows) == ("is wrong",)


@pytest.mark.parametrize(
    ("listing", "leases"),
    [
        pytest.param([evolve(shard, hash_range=None) for shard in SPLIT], _kept(SPLIT, ""), id="no hash ranges listed"),
        pytest.param(
            [evolve(shard, hash_range=None, parents=()) for shard in SPLIT], _kept(SPLIT, ""), id="only ids listed"
        ),
        pytest.param([evolve(shard, parents=()) for shard in SPLIT[1:]], _kept(SPLIT, ""), id="parents expired"),
        pytest.param([evolve(SPLIT[0], open=True), *SPLIT[1:]], _kept(SPLIT, ""), id="parent still listed as open"),
        pytest.param(
            SPLIT,
            {key: evolve(lease, parents=(), hash_range=None) for key, lease in _kept(SPLIT, "").items()},
            id="rows with fewer fields",
        ),
        pytest.param(
            [create_shard("2", 0, 99, "1", "0")], _kept((create_shard("2", 0, 99, "0", "1"),), ""), id="other order"
        ),
    ],
)
def test_incomplete_entry_is_no_contradiction(listing: list[Shard], leases: dict[str, Lease]) -> None:
    """A listing or a row that lacks a field does not stop the reading of a healthy shard."""
    assert contradictions(listing, leases.values(), NEW) == ()


@pytest.mark.parametrize("parents", [(), ("7",)])
def test_shard_with_other_parents_is_another_shard(parents: tuple[str, ...]) -> None:
    """A shard of a recreated stream is not read from the position of the old shard with its id."""
    listing = [SPLIT[0], evolve(SPLIT[1], parents=parents), SPLIT[2]]
    assert [(item.kind, item.key) for item in contradictions(listing, _kept(SPLIT, "").values())] == [
        ("another shard", "1")
    ]


@pytest.mark.parametrize(
    ("kind", "changes", "restarted"),
    [
        ("made anew", {"annotations": ((INCARNATION, OLD),)}, {"1"}),
        ("another stream", {"annotations": ((INCARNATION, "1:bills:9"),)}, set()),
        ("old listing", {"annotations": ((INCARNATION, "1:orders:10"),)}, set()),
        ("ended and open", {"checkpoint": SHARD_END}, {"1"}),
        ("another shard", {"parents": ("7",)}, {"1"}),
        ("another shard", {"hash_range": (7, 8)}, {"1"}),
    ],
)
def test_only_contradicting_leases_of_this_stream_restart(
    kind: str, changes: dict[str, Any], restarted: set[str]
) -> None:
    """A restart repairs the whole row, and touches neither healthy leases nor those of another stream."""
    leases = _kept(SPLIT, NEW)
    leases["1"] = evolve(leases["1"], **changes)
    (found,) = contradictions(SPLIT, leases.values(), NEW)
    steps = restarts(SPLIT, leases.values(), [found] if found.restartable else [], NEW, TRIM_HORIZON)
    assert (found.kind, found.of_stream) == (kind, kind in {"made anew", "another stream", "old listing"})
    assert {step.stored.key for step in steps if step.stored is not None} == restarted
    for step in steps:
        assert step.lease is not None
        assert (step.lease.checkpoint, step.lease.parents, step.lease.hash_range, step.marks) == (
            TRIM_HORIZON,
            ("0",),
            (0, 49),
            False,
        )


def test_single_restart_creates_and_marks_no_lease() -> None:
    """If one lease restarts, finished leases that were deleted stay deleted, and no row gets a former incarnation."""
    leases = _kept(SPLIT[1:], "")
    leases["1"] = evolve(leases["1"], checkpoint=SHARD_END)
    found = contradictions(SPLIT, leases.values(), NEW)
    (step,) = restarts(SPLIT, leases.values(), found, NEW, TRIM_HORIZON)
    assert (step.stored, step.marks) == (leases["1"], False)


def test_another_stream_is_reported_before_a_recreated_one() -> None:
    """If the table also contains leases of another stream, the workers stop and do not overwrite these leases."""
    leases = _kept(SPLIT, OLD)
    leases["2"] = evolve(leases["2"], annotations=((INCARNATION, "1:bills:9"),))
    assert [item.kind for item in contradictions(SPLIT, leases.values(), NEW)] == ["another stream"]


@pytest.mark.parametrize(
    ("incarnation", "earlier", "later"),
    [(NEW, OLD, True), (OLD, NEW, False), (NEW, NEW, False), ("1:bills:9", OLD, False), ("x", OLD, False)],
)
def test_stream_is_created_later_only_under_the_same_name(incarnation: str, earlier: str, later: bool) -> None:
    """Only a later stream of the same name replaces the one that is being read."""
    assert created_later(incarnation, earlier) is later


def test_annotations_are_reported_in_key_order_once() -> None:
    """Operators see the same message at every read, whatever the order of the listing."""
    rows = [Lease(key, annotations=((CONTRADICTION, text),)) for key, text in (("c", "x"), ("b", "y"), ("a", "y"))]
    assert reported_contradictions(rows) == ("y", "x")
