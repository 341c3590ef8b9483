"""How leases are shared out and how that changes: the figures, without a store or a page."""

import math

import pytest
from hypothesis import given

from leasehold.adapters.json_form import BadJsonField
from leasehold.adapters.report.distribution import Distribution, GroupShare, Share, Spread, distribution, tallies
from leasehold.adapters.report.report import (
    CheckpointLag,
    SnapshotChange,
    StalledLease,
    changes,
    looked,
    report,
    report_json,
    saved,
    standstill,
    standstills,
)
from leasehold.adapters.report.watching import WatchedTable
from leasehold.balancer.model import SHARD_END, Lease, Position
from leasehold.balancer.rules.shares import Groups
from leasehold.stores.embedded.memory import MemoryStore
from leasehold.stores.protocol import Malformed
from leasehold_lab.contract.actors import placed

LEASES = (
    Lease("s-0", owner="a/east-1", weight=1536),
    Lease("s-1", owner="a/east-1", checkpoint=Position("7")),
    Lease("s-2", owner="a/east-2", weight=2048),
    Lease("s-3", owner="b/west-1", checkpoint=Position("LATEST")),
    Lease("s-4"),
    Lease("s-5", owner="b/west-9", checkpoint=SHARD_END, weight=9216),
    Lease("s-6", checkpoint=SHARD_END),
)
EVEN_ONE, EAST = Spread(1, 1, 1.0, 0.0), Spread(1, 2, 1.5, 0.5)


def test_every_share_of_a_small_table() -> None:
    """Finished leases do not count for their last owners, and leases without an owner are included."""
    shared = distribution(tallies(LEASES))
    assert shared == Distribution(
        leases=7,
        ended=2,
        unowned=1,
        workers=(Share("a/east-1", 2, 1.5), Share("a/east-2", 1, 2.0), Share("b/west-1", 1, None)),
        spread=Spread(1, 2, 4 / 3, math.sqrt(2 / 9)),
        levels=((GroupShare(("a/east",), 3, 2, EAST, 3.5), GroupShare(("b/west",), 1, 1, EVEN_ONE, None)),),
        progress=(("TRIM_HORIZON", 3), ("SHARD_END", 2), ("LATEST", 1), ("NUMBER", 1)),
    )
    assert shared.working == 5


@pytest.mark.parametrize(
    ("groups", "levels"),
    [
        (None, ()),
        (("/",), ((GroupShare(("a",), 3, 2, EAST, 3.5), GroupShare(("b",), 1, 1, EVEN_ONE, None)),)),
        (
            ("/", "-"),
            (
                (GroupShare(("a",), 3, 2, EAST, 3.5), GroupShare(("b",), 1, 1, EVEN_ONE, None)),
                (GroupShare(("a", "east"), 3, 2, EAST, 3.5), GroupShare(("b", "west"), 1, 1, EVEN_ONE, None)),
            ),
        ),
    ],
)
def test_separators_make_levels(groups: Groups, levels: tuple[tuple[GroupShare, ...], ...]) -> None:
    """A zone may hold more than its part while each of its clusters looks even."""
    assert distribution(tallies(LEASES), groups).levels == levels


def test_an_empty_table_has_figures_too() -> None:
    """The first look at a new table succeeds."""
    assert distribution(()) == Distribution(0, 0, 0, (), Spread(), ((),), ())


def test_the_disbalance_of_two_clusters_is_seen() -> None:
    """Two clusters of a hundred workers, with three leases each and with two, look even by each worker's count."""
    leases = tuple(Lease(f"s-{n}", owner=f"east-{n % 100}" if n < 300 else f"west-{n % 100}") for n in range(500))
    (level,) = distribution(tallies(leases)).levels
    assert [(each.path, each.leases, each.workers, each.spread) for each in level] == [
        (("east",), 300, 100, Spread(3, 3, 3.0, 0.0)),
        (("west",), 200, 100, Spread(2, 2, 2.0, 0.0)),
    ]


@given(...)
def test_no_lease_is_counted_twice_or_lost(owners: list[str], ended: list[bool]) -> None:
    """Shares add up to the whole."""
    leases = tuple(
        Lease(f"s-{n}", owner=owner or None, checkpoint=SHARD_END if done else Position("1"))
        for n, (owner, done) in enumerate(zip(owners, ended, strict=False))
    )
    shared = distribution(tallies(leases))
    assert sum(share.leases for share in shared.workers) + shared.unowned == shared.working
    assert sum(each.leases for level in shared.levels for each in level) + shared.unowned == shared.working
    assert sum(count for _, count in shared.progress) == shared.leases == len(leases)


FIRST = WatchedTable(
    at=100.0,
    leases=(
        Lease("s-0", owner="a", checkpoint=Position("1")),
        Lease("s-1", owner="a", checkpoint=Position("1")),
        Lease("s-2", owner="b"),
        Lease("s-3"),
        Lease("s-4", owner="b"),
        Lease("s-5", checkpoint=SHARD_END),
    ),
)
SECOND = WatchedTable(
    at=110.0,
    leases=(
        Lease("s-0", owner="c", checkpoint=Position("2")),
        Lease("s-1", owner="a", checkpoint=Position("1")),
        Lease("s-2"),
        Lease("s-3", owner="c"),
        Lease("s-4", checkpoint=SHARD_END),
        Lease("s-6", owner="c"),
    ),
)
THIRD = WatchedTable(SECOND.leases[1:], at=125.0, malformed=(Malformed("x", "f", "w"),))


def test_the_changes_between_snapshots() -> None:
    """A fleet that moves its leases back and forth does not look as calm as one that keeps them."""
    assert changes((FIRST, SECOND, THIRD)) == (
        SnapshotChange(
            at=110.0,
            seconds=10.0,
            moved=1,
            claimed=1,
            freed=1,
            ended=1,
            created=1,
            deleted=1,
            joined=1,
            left=1,
            advanced=1,
        ),
        SnapshotChange(at=125.0, seconds=15.0, deleted=1),
    )
    assert changes((FIRST, SECOND))[0].owner_changes == 3


def test_how_long_checkpoints_have_stood_still() -> None:
    """A shard that is no longer read does not hide among those that move, and a finished one does not look stuck."""
    assert standstill((FIRST, SECOND, THIRD)) == (
        StalledLease("s-1", "a", 25.0),
        StalledLease("s-2", None, 25.0),
        StalledLease("s-3", "c", 25.0),
        StalledLease("s-6", "c", 15.0),
    )
    assert standstills((FIRST, SECOND, THIRD)) == (CheckpointLag(110.0, 10.0, 10.0), CheckpointLag(125.0, 25.0, 25.0))


def test_a_report_orders_its_snapshots_and_says_the_last() -> None:
    """Files given in any order still show the true history."""
    told = report_json(report("x", (THIRD, FIRST, SECOND), None))
    assert (told["at"], told["malformed"], told["distribution"]["leases"]) == (125.0, 1, 5)
    assert told["over_time"] == [
        {"at": 100.0, "working": 5, "unowned": 1, "workers": 2, "spread": _spread(2, 2, 2.0, 0.0)},
        {"at": 110.0, "working": 5, "unowned": 1, "workers": 2, "spread": _spread(1, 3, 2.0, 1.0)},
        {"at": 125.0, "working": 4, "unowned": 1, "workers": 2, "spread": _spread(1, 2, 1.5, 0.5)},
    ]
    assert [change["at"] for change in told["changes"]] == [110.0, 125.0]


def _spread(least: int, most: int, mean: float, deviation: float) -> dict[str, float]:
    return {"least": least, "most": most, "mean": mean, "deviation": deviation}


def test_looks_at_a_store_are_as_many_as_asked() -> None:
    """A series ends with its last snapshot, without another wait."""
    store, waits = MemoryStore(), list[float]()
    placed(store, Lease("s-0", owner="ann"))
    found = tuple(looked(store, 3, 5.0, waits.append))
    assert [[lease.owner for lease in each.leases] for each in found] == [["ann"]] * 3
    assert waits == [5.0, 5.0]


SAVED = (
    b'{"at": 5, "leases": [{"key": "s-0", "owner": "ann"}], "malformed": [{"key": "x", "field": "f", "why": "w"}]}\n',
    b"\n",
    b'{"at": 7, "leases": [], "malformed": [], "trouble": "the line is down"}\n',
)


def test_saved_snapshots_are_read_back() -> None:
    """What was watched overnight can be reported in the morning, and failed looks do not count as calm."""
    assert tuple(saved("f", SAVED)) == (
        WatchedTable((Lease("s-0", owner="ann"),), at=5.0, malformed=(Malformed("", "", ""),)),
    )


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"leases": []}', "f, line 2: at: is missing"),
        (b'{"at": 1, "leases": [{"owner": "x"}]}', "f, line 2: leases[0].key: is missing"),
        (b"{", "f, line 2: input: not a JSON document"),
    ],
)
def test_a_bad_line_is_named(line: bytes, says: str) -> None:
    """Users find the broken line in a long file."""
    with pytest.raises(BadJsonField) as raised:
        tuple(saved("f", (SAVED[0], line)))
    assert str(raised.value).startswith(says)
