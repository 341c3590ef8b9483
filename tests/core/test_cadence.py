"""Who looks when: the lookout, its deputies and its readers, in the moments that matter."""

from attrs import evolve

from balancer.actions import Action, Claim, Look, Release, Steal
from balancer.cadence import (
    Bulletin,
    Hearing,
    appointment,
    bulletin_of,
    bulletin_row,
    crew,
    on_duty,
    reaps,
    settle_seconds,
)
from balancer.config import Config, Minimal
from balancer.model import Lease, Me

CONFIG = Config(rules=Minimal())
QUIET = Hearing(latest=Bulletin(7, 2, 1), acts_read=2, full_still=5.0)


def row(key: str, owner: str | None, idle: float = 1.0, bulletin: str = "0 0 0") -> Lease:
    return Lease(key, owner=owner, idle=idle, notes=(("bulletin", bulletin), ("process", f"p/{owner}")))


TABLE = tuple(row(f"s-{place}", f"w-{place % 6}") for place in range(18))
LOOKOUT, *DEPUTIES, READER, LAST = crew(TABLE, CONFIG)
TABLE = tuple(row(lease.key, lease.owner, bulletin="7 2 1") if lease.owner == LOOKOUT else lease for lease in TABLE)
BOARD = bulletin_row(TABLE, LOOKOUT)


def standing_still(idle: float, owner: str = LOOKOUT) -> tuple[Lease, ...]:
    return tuple(evolve(lease, idle=idle) if lease.owner == owner else lease for lease in TABLE)


def look(worker: str, leases: tuple[Lease, ...] = TABLE, hearing: Hearing = QUIET, *actions: Action) -> Look:
    return appointment(actions, leases, Me(worker), CONFIG, hearing)


def test_only_our_living_workers_are_ranked() -> None:
    """C3: a peer that writes no bulletin, or a dead worker, as lookout would leave the table unwatched."""
    java = Lease("j-1", owner="java", notes=(("process", "p/w-9"),))
    dead = row("d-1", "w-8", idle=11.0)
    assert crew((*TABLE, java, dead), CONFIG) == (LOOKOUT, *DEPUTIES, READER, LAST)


def test_one_reads_the_table_and_the_others_one_row() -> None:
    """C4, C5, C7: if all read everything, a fleet of sixty pays for sixty readings."""
    assert BOARD is not None
    assert look(LOOKOUT) == Look(3.0, notes=Bulletin(8, 2, 1).note)
    assert [look(worker) for worker in DEPUTIES] == [Look(1.0, keys=(BOARD.key,))] * 3
    assert [look(worker) for worker in (READER, LAST)] == [Look(2.5, keys=(BOARD.key,))] * 2


def test_a_suspect_is_looked_at_when_its_time_is_up() -> None:
    """C5: three seconds later would be three seconds of an unread shard; and the others are warned."""
    assert look(LOOKOUT, standing_still(9.0, READER)) == Look(1.5, notes=Bulletin(8, 2, 2).note)
    assert BOARD is not None
    assert look(READER, TABLE, evolve(QUIET, warned=2.0)) == Look(0.5, keys=(BOARD.key,))


def test_the_dead_ones_leases_are_freed_for_all_but_what_is_taken() -> None:
    """C6: who did not watch a lease may not claim it before lease_seconds more, unless it is free."""
    dead = standing_still(11.0, READER)
    gone = [lease for lease in dead if lease.owner == READER]
    taking = Claim(gone[0], "M6")
    assert reaps((taking,), dead, Me(LOOKOUT), CONFIG, QUIET) == tuple(Release(lease, "C6") for lease in gone[1:])
    assert reaps((), dead, Me(LAST), CONFIG, QUIET) == ()
    assert look(LOOKOUT, dead, QUIET, taking).notes == Bulletin(8, 3, 1).note


def test_news_send_every_reader_to_the_table() -> None:
    """C7: a reader that does not come leaves the freed leases to the others, or unread."""
    assert look(READER, TABLE, evolve(QUIET, latest=Bulletin(8, 3, 1))) == Look(0.0)
    assert look(READER, TABLE, evolve(QUIET, turned=True)) == Look(0.0)


def test_deputies_stand_in_at_once_and_all_at_last() -> None:
    """C8: nobody's death may stop the rest; and the clocks of all run before they are needed."""
    silent = standing_still(2.6)
    assert [on_duty(silent, Me(worker), CONFIG, QUIET) for worker in (*DEPUTIES, READER)] == [True] * 3 + [False]
    stuck = evolve(QUIET, looks_still=7.6)
    assert [on_duty(TABLE, Me(worker), CONFIG, stuck) for worker in (*DEPUTIES, READER)] == [True] * 3 + [False]
    assert look(READER, standing_still(6.1), evolve(QUIET, full_still=30.0)) == Look(0.0)
    assert look(READER, standing_still(6.1), evolve(QUIET, full_still=1.0)).keys is not None
    assert on_duty(standing_still(10.4), Me(READER), CONFIG, evolve(QUIET, looks_still=21.1))


def test_who_lost_the_first_rank_says_so_once() -> None:
    """C3: readers of the old lookout's row would wait until it falls silent."""
    old = tuple(
        evolve(lease, notes=row("", READER, bulletin="9 2 1").notes) if lease.owner == READER else lease
        for lease in TABLE
    )
    assert look(READER, old, evolve(QUIET, latest=Bulletin(9, 2, 1))).notes == Bulletin(10, 3, 1).note
    assert look(READER, old, evolve(QUIET, latest=Bulletin(11, 3, 1), acts_read=3)).notes == ()


def test_a_lone_worker_seldom_looks() -> None:
    """C13: with nobody to watch, every look is for joiners only, and those take a lease and are seen."""
    alone = tuple(row(f"s-{place}", "w-1") for place in range(3))
    assert look("w-1", alone).seconds == 20.0


def test_after_taking_one_looks_soon() -> None:
    """C10: a fleet that waits a cycle after each announcement needs forty seconds to start."""
    assert settle_seconds((), CONFIG) is None
    assert settle_seconds((Claim(TABLE[0], "M5"),), CONFIG) == 1.0
    assert settle_seconds((Steal(TABLE[0], "w-0", "M5"),), CONFIG) == 5.0
    assert look(READER, TABLE, QUIET, Claim(TABLE[0], "M5")) == Look(1.0)


def test_readings_are_folded_by_our_own_clock() -> None:
    """C1: a stall of the reader must not look like a silent lookout."""
    first = Hearing().after(TABLE, began=0.0, ended=1.0, asked=None)
    assert (first.latest, first.acts_read, first.looks_still) == (Bulletin(7, 2, 1), 2, 0.0)
    board = (evolve(TABLE[0], held=90.0, notes=row("", "w-0", bulletin="7 3 1").notes),)
    later = first.after(board, began=6.0, ended=9.0, asked=("s-0",))
    assert (later.latest, later.acts_read, later.looks_still, later.full_still) == (Bulletin(7, 3, 1), 2, 5.0, 5.0)
    assert not later.turned
    assert later.after((), began=10.0, ended=10.0, asked=("s-0",)).turned
    assert later.after((evolve(board[0], held=1.0),), began=10.0, ended=10.0, asked=("s-0",)).turned
    assert bulletin_of(evolve(TABLE[0], notes=(("bulletin", "7 x 1"),))) == Bulletin()
