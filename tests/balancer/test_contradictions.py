"""L14: Contradictions between the listing and the table are named, and leases are recreated in a safe order."""

from typing import Any

from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from leasehold.balancer.contradictions import (
    CONTRADICTION,
    INCARNATION,
    SETTLED,
    Contradiction,
    contradictions,
    reported,
    restarts,
)
from leasehold.balancer.model import LATEST, SHARD_END, TRIM_HORIZON, Lease, Position, Shard
from leasehold_lab.properties.strategies import scenes
from leasehold_lab.simulator.world.world import create_shard

OLD, NEW = "1:orders:7", "1:orders:9"
SPLIT = (create_shard("0", 0, 99, open=False), create_shard("1", 0, 49, "0"), create_shard("2", 50, 99, "0"))


def _kept(shards: tuple[Shard, ...], incarnation: str) -> dict[str, Lease]:
    """Return the leases of a fleet that has read this stream for a while."""
    note = ((INCARNATION, incarnation),) if incarnation else ()
    return {
        each.id: Lease(
            each.id,
            parents=each.parents,
            hash_range=each.hash_range,
            checkpoint=Position("500") if each.open else SHARD_END,
            annotations=note,
        )
        for each in shards
    }


def _grown(counts: int, places: list[int]) -> tuple[Shard, ...]:
    shards = [create_shard(str(number), 100 * number, 100 * number + 99) for number in range(counts)]
    for place in places:
        still = [each for each in shards if each.open]
        parent = still[place % len(still)]
        first, last = parent.hash_range or (0, 0)
        shards[shards.index(parent)] = evolve(parent, open=False)
        middle = (first + last) // 2
        shards.append(create_shard(str(len(shards)), first, middle, parent.id))
        shards.append(create_shard(str(len(shards)), middle + 1, last, parent.id))
    return tuple(shards)


grown = st.builds(_grown, st.integers(1, 3), st.lists(st.integers(0, 9), max_size=3))


@given(scenes(), st.sampled_from(("", OLD, NEW, "x", ":")), st.data())
def test_every_table_and_listing_is_planned(scene: Any, incarnation: str, data: st.DataObject) -> None:  # noqa: ANN401
    """Every combination of rows and shards can be planned, however unexpected its rows are."""
    values = st.sampled_from((None, "", SETTLED, OLD, NEW, "1:orders:9" + "9" * 30, "x", "²:²"))
    leases = [
        lease if (note := data.draw(values)) is None else evolve(lease, annotations=((INCARNATION, note),))
        for lease in scene.leases
    ]
    shards = scene.shards or ()
    found = contradictions(shards, leases, incarnation)
    assert contradictions(reversed(shards), reversed(leases), incarnation) == found, "whatever their order"
    for start in (TRIM_HORIZON, LATEST):
        steps = restarts(shards, leases, found, incarnation, start)
        keys = [(step.stored or step.lease or Lease("")).key for step in steps]
        assert len(set(keys)) == len(keys), "one step for a key"
        assert not (steps and all(not each.restartable for each in found)), "another stream's leases stay as they are"


@given(grown, st.sampled_from(("", NEW)))
def test_healthy_fleet_has_no_contradictions(shards: tuple[Shard, ...], incarnation: str) -> None:
    """The table and the listing of a healthy fleet contain no contradictions, so it is never stopped or restarted."""
    assert contradictions(shards, _kept(shards, incarnation).values(), incarnation) == ()
    assert contradictions(shards, _kept(shards, "").values(), incarnation) == (), "of a version before, or of Java"


@given(grown, st.data())
def test_each_contradiction_is_named(shards: tuple[Shard, ...], data: st.DataObject) -> None:
    """A shard that is left unread, or read from another shard's position, is always reported."""
    leases = _kept(shards, "")
    victim = data.draw(st.sampled_from([each for each in shards if each.open]))
    untrue: dict[str, Lease] = {
        "ended and open": evolve(leases[victim.id], checkpoint=SHARD_END),
        "another shard": evolve(leases[victim.id], hash_range=(7, 8)),
        "made anew": evolve(leases[victim.id], annotations=((INCARNATION, OLD),)),
        "old listing": evolve(leases[victim.id], annotations=((INCARNATION, "1:orders:10"),)),
        "another stream": evolve(leases[victim.id], annotations=((INCARNATION, "1:bills:9"),)),
    }
    for kind, lease in untrue.items():
        found = contradictions(shards, (leases | {victim.id: lease}).values(), NEW)
        assert [(each.kind, each.key) for each in found] == [(kind, victim.id)]


def test_messages_contain_a_remedy() -> None:
    """The message about a contradiction describes what is wrong and how to fix it."""
    do = "--if-recreated TRIM_HORIZON or LATEST has the workers begin anew, or stop them and use `leasehold reset`"
    again = (create_shard("0", 0, 99),)
    kept = _kept(SPLIT, OLD)
    assert contradictions(again, kept.values(), NEW) == (
        Contradiction(
            "made anew",
            "",
            "0",
            "stream 1:orders was made anew at 9 s since 1970, and its leases are of the one made at 7: nothing is "
            f"read; {do}",
        ),
    )
    assert contradictions(again, kept.values(), "") == (
        Contradiction(
            "ended and open",
            "",
            "0",
            "lease 0 is at SHARD_END, but its shard is open and has no children, so nothing reads it; if the stream "
            f"was made anew, {do}",
        ),
    )
    (other,) = contradictions(again, kept.values(), "1:bills:9")
    assert other.what == "the leases are those of 1:orders, and 1:bills is read: give each stream a table of its own"


@given(grown, grown, st.sampled_from((TRIM_HORIZON, LATEST)), st.booleans(), st.data())
def test_recreation_completes_after_interruptions(
    before: tuple[Shard, ...],
    after: tuple[Shard, ...],
    start: Position,
    some_unnoted: bool,
    data: st.DataObject,
) -> None:
    """After a worker died at any step of the recreation, no row of the old stream looks like one of the new stream."""
    table = _kept(before, OLD)
    if some_unnoted and len(table) > 1:
        last = max(table)
        table[last] = evolve(table[last], annotations=())
    while found := contradictions(after, table.values(), NEW):
        assert [each.kind for each in found] == ["made anew"], "until the last of them is written"
        steps = restarts(after, table.values(), found, NEW, start)
        for step in steps[: data.draw(st.integers(1, len(steps)))]:
            if step.lease is None:
                assert step.stored is not None
                del table[step.stored.key]
            elif step.marks:
                table[step.lease.key] = step.lease
            else:
                table[step.lease.key] = evolve(step.lease, annotations=((INCARNATION, NEW),))
            if step.stored is not None and step.lease is not None and not step.marks:
                above = [table[parent].annotation(INCARNATION) for parent in step.lease.parents if parent in table]
                assert set(above) <= {NEW}, "a child may be read once its parent's lease says the truth"
    names = {each.id for each in after if each.open or start != LATEST}
    assert names <= table.keys() <= {each.id for each in after}
    for each in after:
        if each.id in table:
            row = table[each.id]
            closed = start == LATEST and not each.open
            assert (row.checkpoint, row.parents, row.hash_range) == (
                SHARD_END if closed else start,
                each.parents,
                each.hash_range,
            )


def test_reset_lease_belongs_to_the_current_stream() -> None:
    """A stream that was reset by hand can be read again."""
    settled = tuple(evolve(lease, annotations=((INCARNATION, SETTLED),)) for lease in _kept(SPLIT, OLD).values())
    assert contradictions(SPLIT, settled, NEW) == ()


def test_annotation_is_reported_until_resolved() -> None:
    """The annotation about a contradiction is reported to operators until the contradiction is resolved."""
    rows = (
        Lease("b", annotations=((CONTRADICTION, "is wrong"),)),
        Lease("a", annotations=((CONTRADICTION, SETTLED),)),
        Lease("c"),
    )
    assert reported(rows) == ("is wrong",)
