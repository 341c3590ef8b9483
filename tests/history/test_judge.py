"""The judge, shown histories with one fault planted in each, and asked to name it."""

from hashlib import sha1

import pytest

from adapters.history.changes import Change
from adapters.history.judge import Verdict, judge
from adapters.history.moves import least_moves
from adapters.history.told import Deed, Event, Seen, Sent, event_of
from balancer.model import SHARD_END, Position


def digest(key: str, number: int) -> str:
    """Of the data of one record."""
    return sha1(f"{key} {number}".encode(), usedforsecurity=False).hexdigest()


def sent(*numbers: int, key: str = "k") -> list[Sent]:
    """Records of one key, as the stream took them."""
    return [Sent(key, number, digest(key, number)) for number in numbers]


def begins(t: float, worker: str, shard: str = "s-0") -> Event:
    """A worker begins to read."""
    return Event(t, worker, "initialize", shard)


def ends(t: float, worker: str, shard: str = "s-0", how: str = "stopped") -> Event:
    """It stops."""
    return Event(t, worker, how, shard)


def records(t: float, worker: str, *numbers: int, shard: str = "s-0", key: str = "k") -> list[Event]:
    """It hands records over; each lies at a hundred and its number."""
    return [Event(t, worker, "record", shard, (100 + n, 0), key, digest(key, n)) for n in numbers]


def good() -> list[Event]:
    """One worker hands a shard to another, without a hitch."""
    return [
        begins(0, "a"),
        *records(10, "a", 1, 2, 3),
        ends(20, "a"),
        begins(30, "b"),
        *records(40, "b", 4, 5),
        ends(50, "b"),
    ]


def faults(events: list[Event], count: int = 5, rows: tuple[Seen, ...] = ()) -> tuple[str, ...]:
    """What the judge objects to."""
    return judge(sent(*range(1, count + 1)), events, rows=rows).faults


def test_a_good_run_is_told_whole() -> None:
    """Without it a verdict could leave out, or invent, what people and programs read from it."""
    deeds = [Deed(-2, "join", "a"), Deed(-1, "join", "b"), Deed(45, "end")]
    assert judge(sent(1, 2, 3, 4, 5), good(), deeds=deeds, parents={"s-0": ()}) == Verdict(
        produced=5,
        delivered=5,
        lost=0,
        strangers=0,
        duplicates=0,
        shards=1,
        unowned_seconds_max=0.01,
        unowned_shard="s-0",
        moves=1,
        moves_least=0,
        owner_changes=(Change(30, "s-0", "a", "b", "stopped", 0, 3, 0),),
        faults=(),
    )


@pytest.mark.parametrize(
    ("events", "said"),
    [
        (good()[:-2], "lost: 1 records were never handed over, the first is number 5 of k"),
        ([*good()[:-1], *records(45, "b", 6)], "stranger: 1 records were handed over and never sent, one of them of k"),
        ([*good(), *records(60, "b", 5)], "outside: b handed over 1 records while not reading, as of s-0"),
        (
            [*good()[:4], *records(15, "a", 3), *good()[4:]],
            "repeated: a handed over 1 records of s-0 twice without a change of owner",
        ),
        (
            [begins(0, "a"), *records(10, "a", 1, 3, 2, 4, 5)],
            "order: a handed over number 2 of k after number 3, both of s-0",
        ),
        (
            [begins(0, "a"), *records(20, "a", 1, 2, 4, 5), begins(5, "b", "s-1"), *records(10, "b", 3, shard="s-1")],
            "order: number 3 of k was handed over before number 2, on another shard",
        ),
    ],
)
def test_each_fault_is_named(events: list[Event], said: str) -> None:
    """Without it a run that lost or garbled something could be called good, or a reader be left to guess."""
    assert faults(events) == (said,)


def crash(*again: int) -> list[Event]:
    """A worker dies after three records; the next begins with these."""
    return [begins(0, "a"), *records(10, "a", 1, 2, 3), begins(30, "b"), *records(40, "b", *again, 4, 5)]


def stored(t: float, number: int) -> Seen:
    """The table said then that so much was done."""
    return Seen(t, "s-0", "a", Position(str(100 + number)))


def test_what_was_not_checkpointed_may_come_again() -> None:
    """Without it every crash would be called a fault, or its duplicates not be counted."""
    verdict = judge(sent(1, 2, 3, 4, 5), crash(2, 3), deeds=[Deed(15, "kill", "a")], rows=[stored(12, 1)])
    assert (verdict.duplicates, verdict.faults) == (2, ())
    assert verdict.owner_changes == (Change(30, "s-0", "a", "b", "cut", duplicates=2, since=2, replayed=0),)


def test_what_was_checkpointed_may_not() -> None:
    """Without it a successor that starts before the checkpoint, or reads a finished shard, would pass."""
    for row in (stored(12, 2), Seen(12, "s-0", None, SHARD_END)):
        said = judge(sent(1, 2, 3, 4, 5), crash(2), rows=[row]).faults
        assert said == ("replayed: b handed over 1 records of s-0 again that a or another had checkpointed",)


def test_a_checkpoint_seen_after_the_change_excuses_nothing_and_accuses_nobody() -> None:
    """Without it the successor's own checkpoints would be held against it."""
    assert faults(crash(2, 3), rows=(stored(12, 1), stored(45, 5))) == ()


def test_keys_are_judged_apart() -> None:
    """Without it two keys of one shard, between which no order was promised, would be faulted."""
    events = [begins(0, "a"), *records(10, "a", 2), *records(20, "a", 1, key="other")]
    assert judge([*sent(2), *sent(1, key="other")], events).faults == ()


def test_the_longest_time_without_a_reader_is_found() -> None:
    """Without it a shard that nobody reads for long, a child above all, could go unseen."""
    parents = {"s-0": (), "s-1": ("s-0",), "s-2": ("s-0",)}
    read = [begins(0, "a"), ends(1000, "a", how="shard-ended"), begins(1200, "a", "s-1"), ends(3000, "a", "s-1")]
    late = [*read, begins(4500, "b", "s-1"), begins(1100, "b", "s-2")]
    assert _gap(late, parents, 5000) == (1.5, "s-1")
    assert _gap(read, {"s-0": (), "s-1": ("s-0",)}, 9000) == (6.0, "s-1")
    assert _gap(read, parents, 9000) == (8.0, "s-2")  # never read at all
    assert _gap(read[:2], {"s-0": ()}, 9000) == (0.0, "")


def _gap(events: list[Event], parents: dict[str, tuple[str, ...]], end: float) -> tuple[float, str]:
    verdict = judge([], events, deeds=[Deed(end, "end")], parents=parents)
    return verdict.unowned_seconds_max, verdict.unowned_shard


def test_who_was_killed_reads_no_more() -> None:
    """Without it the time between a crash and the takeover would not count."""
    verdict = judge(sent(1, 2, 3, 4, 5), crash(), deeds=[Deed(15, "kill", "a")])
    assert (verdict.unowned_seconds_max, verdict.unowned_shard) == (0.015, "s-0")


def test_moves_are_counted_between_the_living_only() -> None:
    """Without it taking over from the dead, or starting children, would look like unrest."""
    four = ["s-0", "s-1", "s-2", "s-3"]
    events = [begins(1, "a", shard) for shard in four]
    for shard in four[2:]:
        events += [ends(20, "a", shard), begins(21, "b", shard)]
    events += [begins(40, "b", shard) for shard in four[:2]]
    deeds = [Deed(0, "join", "a"), Deed(10, "join", "b"), Deed(30, "kill", "a"), Deed(50, "end")]
    verdict = judge([], events, deeds=deeds)
    assert (verdict.moves, verdict.moves_least) == (2, 2)


def test_moves_beyond_the_least_show() -> None:
    """Without it a fleet that passes leases round in circles would look like one that does what it must."""
    events = [begins(1, "a"), begins(1, "b", "s-1"), ends(20, "a"), begins(21, "b"), ends(30, "b"), begins(31, "a")]
    verdict = judge([], events, deeds=[Deed(0, "join", "a"), Deed(0, "join", "b"), Deed(50, "end")])
    assert (verdict.moves, verdict.moves_least) == (2, 0)


@pytest.mark.parametrize(
    ("held", "leases", "least"),
    [((6, 0, 0), 6, 4), ((4, 4, 0), 8, 2), ((3, 2, 2), 7, 0), ((2, 2), 7, 0), ((5,), 5, 0), ((), 3, 0), ((4, 1), 6, 1)],
)
def test_the_least_moves_of_a_division(held: tuple[int, ...], leases: int, least: int) -> None:
    """Without it a fleet would be measured against a wrong optimum."""
    assert least_moves(held, leases) == least


def test_a_line_is_read_as_its_worker_wrote_it() -> None:
    """Without it the judge and `leasehold consume --events` could drift apart."""
    line = (
        b'{"t": 17, "worker": "a", "event": "record", "shard": "s-0", "sequence_number": "101", '
        b'"sub_sequence_number": 2, "partition_key": null, "sha1": "f00"}'
    )
    assert event_of(line) == Event(17, "a", "record", "s-0", (101, 2), "", "f00")
    assert event_of('{"t": 18, "worker": "a", "event": "lease-lost", "shard": "s-0"}') == ends(
        18, "a", how="lease-lost"
    )
