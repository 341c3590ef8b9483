"""Tests which workers the lookout calls, to which rows, and what the called workers do."""

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from looking_fleet import (
    BOARD,
    CONFIG,
    FULL,
    HEARING,
    LAST,
    LOOKOUT,
    NEXT,
    QUIET,
    READER,
    ROWS,
    TABLE,
    THIRDS,
    heard,
    look,
    row,
    table_with_idle_owner,
    told,
)

from leasehold.balancer.actions import Claim, Look, Release
from leasehold.balancer.bulletin import (
    CALL_LENGTH_MAX,
    BulletinTracker,
    LookoutCall,
    call_annotation,
    call_of,
    prolonged_annotations,
    worker_digits,
)
from leasehold.balancer.counting import take_census
from leasehold.balancer.lookout import bulletin_row, lookout_ranks
from leasehold.balancer.model import SHARD_END, Bulletin, History, Lease, Me
from leasehold.balancer.plan import plan
from leasehold.balancer.rules.minimal import Minimal
from leasehold.balancer.watch import Watch

assert BOARD is not None
BOARD_KEY = BOARD.key
NEWS = Bulletin(8, 3, 1)
LARGER_TABLE = (*TABLE, *(row(f"t-{place:02}", f"w-{place % 6}") for place in range(42)))
"""A table so large that a listing costs more than reading a few rows."""

FREE = (*TABLE, row("s-x", None), row("s-y", None))


def history_with_call(*called_workers: str, row: str = BOARD_KEY, acts_read: int = 2) -> History:
    """Return the history of a worker that has read this call, but has not listed the table since `acts` changed."""
    call_text = " ".join((f"8 0 {row}", *called_workers))
    return heard(latest=NEWS, acts_read=acts_read, looks_still=1.0, call=call_text)


@given(st.lists(st.integers(0, 6), min_size=3, max_size=24), st.sampled_from((None, 4)))
def test_future_owners_are_called_to_free_leases(owners: list[int], most: int | None) -> None:
    """C6: The lookout calls the workers that would claim the free leases, so they do so before their next listing."""
    table = tuple(row(f"s-{index:02}", f"w-{owner}" if owner else None) for index, owner in enumerate(owners))
    config = evolve(CONFIG, rules=Minimal(max_leases=most))
    present_workers = sorted({lease.owner for lease in table if lease.owner is not None})
    for lookout in present_workers:
        me = Me(lookout, history=FULL)
        called_keys = config.rules.calls(take_census(table, me, config), me, config)
        for worker in present_workers:
            actions = plan(table, None, Me(worker, history=FULL), config)
            claims = {action.lease.key for action in actions if isinstance(action, Claim) and action.rule == "M6"}
            called_free_keys = {
                key
                for key in called_keys.get(worker, ())
                if any(candidate.key == key and candidate.owner is None for candidate in table)
            }
            assert worker == lookout or called_keys.get(worker) == [] or called_free_keys == claims


def test_only_owners_of_leases_to_be_requested_are_called() -> None:
    """C7: The owners of the leases that a newcomer will request are called, and no other worker is."""
    joined_table = tuple(
        evolve(row_of_table, held=90.0) for row_of_table in (*TABLE, row("t-0", READER), row("t-1", LAST))
    )
    joined_table += (evolve(row("n-0", "new"), held=1.0),)
    me = Me(LOOKOUT, history=evolve(FULL, fleet_still=1.0))
    called_keys = CONFIG.rules.calls(take_census(joined_table, me, CONFIG), me, CONFIG)
    requested_leases = [action.lease for action in plan(joined_table, None, Me("new", history=FULL), CONFIG)]
    assert requested_leases
    assert {(lease.owner, lease.key) for lease in requested_leases if lease.owner != LOOKOUT} == {
        (owner, key) for owner, keys in called_keys.items() for key in keys
    }
    table_after_long = tuple(evolve(row_of_table, held=90.0) for row_of_table in joined_table)
    assert CONFIG.rules.calls(take_census(table_after_long, me, CONFIG), me, CONFIG)["new"] == []


def test_worker_that_is_not_called_reads_nothing() -> None:
    """C7: After a join or a death, workers that are not called do not read the table, even if the counters changed."""
    bulletin_only = Look(2.5, keys=(BOARD_KEY,), stale_ok=True)
    assert look(READER, TABLE, history_with_call(f"{worker_digits(LAST)}=s-x")) == bulletin_only
    assert look(READER, TABLE, history_with_call()) == bulletin_only
    assert look(READER, TABLE, history_with_call(f"{worker_digits(READER)}=s-x,s-y")) == Look(0.0), (
        "cheaper than two rows alone"
    )
    assert look(READER, LARGER_TABLE, history_with_call(f"{worker_digits(READER)}=s-x,s-y")) == Look(
        0.5, keys=(BOARD_KEY, "s-x", "s-y"), stale_ok=True
    )
    recent_call = history_with_call(f"{worker_digits(READER)}=s-x")
    assert recent_call.hearing is not None
    recent_call = evolve(recent_call, hearing=evolve(recent_call.hearing, looks_still=0.0))
    assert look(READER, TABLE, recent_call).seconds == 0.05
    for word in ("*", worker_digits(READER)):
        assert look(READER, TABLE, history_with_call(word)) == Look(0.0)
        assert look(READER, TABLE, history_with_call(word, acts_read=3)) == bulletin_only, (
            "it has listed the table since"
        )
    assert look("new", TABLE, history_with_call()) == Look(0.0), "a worker without a lease cannot be called"


def test_bulletin_of_earlier_version_calls_all_workers() -> None:
    """C6: Workers follow the counters of a lookout of an earlier version, and ignore the old call in its rows."""
    row_before = row("s-0", "a", bulletin="7 2 1")
    watch, _ = Watch(bulletins=BulletinTracker()).look((row_before,), 0.0, 0.5)
    with_call = evolve(row_before, annotations=(("bulletin", "8 3 1"), ("call", "8 0 s-0"), ("process", "p/a")))
    watch_with_call, _ = watch.look((with_call,), 1.0, 1.5, ["s-0"])
    assert watch_with_call.history.hearing is not None
    assert watch_with_call.history.hearing.call == "8 0 s-0"
    watch_of_old_call, _ = watch_with_call.look(
        (evolve(with_call, annotations=(("bulletin", "9 3 1"), *with_call.annotations[1:])),), 2.0, 2.5, ["s-0"]
    )
    assert watch_of_old_call.history.hearing is not None
    assert (watch_of_old_call.history.hearing.latest, watch_of_old_call.history.hearing.call) == (Bulletin(9, 3, 1), "")
    assert look(READER, TABLE, heard(latest=Bulletin(9, 3, 1))) == Look(0.0)
    row_with_longer_call = evolve(
        with_call, annotations=(("bulletin", "8 3 1"), ("call", "8 4 s-0"), ("process", "p/a"))
    )
    watch_of_longer_call, _ = watch_with_call.look((row_with_longer_call,), 2.0, 2.5, ["s-0"])
    assert watch_of_longer_call.history.hearing is not None
    assert watch_of_longer_call.history.hearing.call == "8 4 s-0"


def test_called_worker_claims_only_the_leases_of_the_call() -> None:
    """C6: a called worker reads only the rows in the call, and claims no other leases."""
    history = history_with_call(f"{worker_digits(READER)}=s-x,s-y,s-00")
    claims = {action for action in plan(FREE, None, Me(READER, history=history), CONFIG) if isinstance(action, Claim)}
    assert claims == {Claim(lease, "C6") for lease in FREE if lease.owner is None}
    assert plan(FREE, None, Me(LAST, history=history), CONFIG) == ()
    config_with_limit = evolve(CONFIG, rules=Minimal(max_leases=4))
    assert len(plan(FREE, None, Me(READER, history=history), config_with_limit)) == 1


def test_reader_follows_the_bulletin_row_in_the_call() -> None:
    """C4: a reader reads the row that the call names as the bulletin row, which may change between its listings."""
    table_with_new_row = (*TABLE, row("z-9", LOOKOUT))
    keys = look(READER, table_with_new_row, history_with_call(row="z-9")).keys
    assert keys == ("z-9",)
    assert look(READER, TABLE, history_with_call(row="z-9")).keys == (BOARD_KEY, "z-9"), "unknown until it is read"
    table_without_owner = tuple(
        evolve(lease, owner=None, held=0.4) if lease.key == BOARD_KEY else lease for lease in LARGER_TABLE
    )
    call_with_rows = history_with_call(row=",".join(ROWS))
    assert look(READER, table_without_owner, call_with_rows).keys == tuple(ROWS), "whoever stands in is heard there"
    assert look(NEXT, table_without_owner, call_with_rows) == Look(0.0), (
        "the next in rank need not wait for a lookout that has left"
    )
    outdated_call = evolve(
        call_with_rows, hearing=evolve(HEARING, call=f"8 0 {BOARD_KEY},t-00", latest=NEWS, looks_still=1.0)
    )
    assert look("w-0", table_without_owner, outdated_call) == Look(0.0), (
        "the call knows better than an old listing who is next"
    )


def test_renewals_by_kcl_do_not_delay_the_next_lookout() -> None:
    """C8: If a KCL worker owns the bulletin row, its renewals do not count as a sign of life of the lookout."""
    kcl_row = Lease(BOARD_KEY, owner="java", idle=0.0, held=0.4)
    table = tuple(kcl_row if lease.key == BOARD_KEY else lease for lease in LARGER_TABLE)
    assert look(NEXT, table, history_with_call(row=",".join(ROWS))) == Look(0.0)


def test_replaced_lookout_names_the_new_bulletin_row() -> None:
    """C3: A replaced lookout names the new bulletin row, so the workers need not list the table."""
    annotations = row("", NEXT, bulletin="9 2 1").annotations
    former_table = tuple(evolve(lease, annotations=annotations) if lease.owner == NEXT else lease for lease in TABLE)
    assert look(NEXT, former_table, heard(latest=Bulletin(9, 2, 1))).annotations == told(10, 3, 1)


def test_no_worker_stands_in_during_a_long_listing() -> None:
    """C8: Other workers do not stand in while a long listing of the lookout is in progress."""
    ranks = lookout_ranks(TABLE, CONFIG, Me(NEXT, history=history_with_call()))
    for seconds, idle_seconds, expected in ((0, 7.6, True), (12, 31.4, False), (12, 31.6, True), (1000, 127.6, True)):
        hearing = evolve(HEARING, call=f"7 {seconds} {BOARD_KEY}", looks_still=idle_seconds)
        assert ranks.on_duty(Me(NEXT, history=evolve(QUIET, hearing=hearing)), hearing, CONFIG) == expected
    assert prolonged_annotations(told(8, 2, 1, "4f2a91c0=s-3"), 7.9) == (
        ("bulletin", "8 2 1"),
        ("call", f"8 7 {','.join(ROWS)} 4f2a91c0=s-3"),
    )
    slow_history = evolve(FULL, full_took=8.0)
    renewed_table = tuple(evolve(lease, idle=0.0) for lease in TABLE)
    assert look(LOOKOUT, renewed_table, slow_history).seconds == 3.0, (
        "from the start of the last one, so at once when it ends"
    )
    partly_renewed_table = tuple(
        evolve(lease, idle=0.5) if lease.owner == READER else evolve(lease, idle=0.0) for lease in TABLE
    )
    assert look(LOOKOUT, partly_renewed_table, slow_history).seconds == pytest.approx(10.0), (
        "it begins when it can judge"
    )


@pytest.mark.parametrize("text", ["", "8", "8 0", "x 0 s-0", "8 x s-0", "8 0 ", "9" * 19 + " 0 s-0"])
def test_unreadable_call_is_ignored(text: str) -> None:
    """The counters of a bulletin are read even if its call cannot be parsed."""
    assert call_of(text) is None


@given(
    st.dictionaries(st.sampled_from(("a", "b", "c")), st.lists(st.text("ab1-", min_size=1), max_size=3)),
    st.integers(0, 10**18 - 1),
    st.floats(0, 10**7),
)
def test_call_round_trips(names: dict[str, list[str]], looks: int, seconds: float) -> None:
    ((_, text),) = call_annotation(looks, seconds, ["s-0", "s-1"], names)
    parsed_call = call_of(text)
    assert parsed_call == LookoutCall(
        looks,
        min(int(seconds), 10**6),
        "s-0",
        ("s-1",),
        names={worker_digits(name): tuple(dict.fromkeys(keys)) for name, keys in sorted(names.items())},
    )


def test_call_that_does_not_fit_calls_all_workers() -> None:
    """C6: If keys contain spaces, or are too many for a row, the call names all workers."""
    many_keys = {f"w-{index}": ["shardId-000000000001"] for index in range(CALL_LENGTH_MAX // 20)}
    for names in (many_keys, {"a": ["s 1"]}, {"a": ["s,1"]}):
        ((_, text),) = call_annotation(8, 0.0, ["s-0"], names)
        assert text == "8 0 s-0 *"
    assert call_annotation(8, 0.0, ["s 0"], {}) == (("call", ""),)


def test_lease_that_stays_free_calls_all_workers() -> None:
    """C6, M9: If a lease stays free for long although a worker was called to it, all workers are called."""
    history = evolve(FULL, hearing=evolve(HEARING, acts_still=21.0), fleet_still=90.0)
    long_free_table: tuple[Lease, ...] = (*TABLE, row("s-x", None, idle=31.0))
    short_free_table: tuple[Lease, ...] = (*TABLE, row("s-x", None, idle=29.0))
    assert look(LOOKOUT, long_free_table, history).annotations == told(8, 3, 1, "*")
    ((_, counts), (_, text)) = look(LOOKOUT, short_free_table, history).annotations
    assert counts == "8 3 1"
    call = call_of(text)
    assert call is not None
    assert (call.to_all, len(call.names)) == (False, 1)


def test_time_in_a_call_never_decreases() -> None:
    """C8: When a listing begins, the call still contains the time of the last listing, which may have been slow."""
    slow_call = (("bulletin", "8 2 1"), ("call", f"8 12 {BOARD_KEY}"))
    assert prolonged_annotations(slow_call, 3.0) == prolonged_annotations(slow_call, 12.9) == slow_call
    assert prolonged_annotations(slow_call, 13.0) == (("bulletin", "8 2 1"), ("call", f"8 13 {BOARD_KEY}"))


@pytest.mark.parametrize("times", [(0, 4), (4, 0)])
def test_longest_time_in_the_rows_counts(times: tuple[int, int]) -> None:
    """C8: The lookout renews its rows at different moments, so the time differs. The longest one counts."""

    def row_with_time(key: str, seconds: int) -> Lease:
        return Lease(key, owner="a", annotations=(("bulletin", "8 3 1"), ("call", f"8 {seconds} s-0")))

    rows = tuple(row_with_time(f"s-{index}", seconds) for index, seconds in enumerate(times))
    watch, _ = Watch(bulletins=BulletinTracker()).look(rows, 0.0, 0.5)
    later_watch, _ = watch.look((row_with_time("s-0", 2),), 1.0, 1.5, ["s-0"])
    for history in (watch.history, later_watch.history):
        assert history.hearing is not None
        assert history.hearing.call == "8 4 s-0"


@pytest.mark.parametrize(("called", "own"), [(12, 0.0), (0, 12.0)])
@pytest.mark.parametrize(("idle", "expected"), [(8.5, False), (8.6, True)])
def test_long_listing_may_delay_the_bulletin_row(called: int, own: float, idle: float, expected: bool) -> None:
    """C8: The row may be late by half the time of a listing, whoever has measured this time, and no later."""
    hearing = evolve(HEARING, call=f"7 {called} {BOARD_KEY}")
    me = Me(NEXT, history=evolve(QUIET, hearing=hearing, full_took=own))
    assert lookout_ranks(table_with_idle_owner(idle), CONFIG, me).on_duty(me, hearing, CONFIG) is expected


def test_workers_that_the_call_names_stand_in_first() -> None:
    """C8: Workers that the call does not name follow one after another, so that they do not all list the table."""
    history = history_with_call(row=f"{BOARD_KEY},{ROWS[2]},{ROWS[3]}")
    places = [
        lookout_ranks(TABLE, CONFIG, me).stand_ins_before(me)
        for me in (Me(worker, history=history) for worker in (*THIRDS, NEXT, READER, LAST))
    ]
    assert places == [0, 1, 2, 3, 4]


def test_bulletin_row_is_not_one_of_a_finished_shard() -> None:
    """C4: When the shard of the bulletin's row ends, its readers follow another row of the lookout."""
    table = tuple(evolve(lease, checkpoint=SHARD_END) if lease.key == BOARD_KEY else lease for lease in TABLE)
    next_row = bulletin_row(table, LOOKOUT)
    assert next_row is not None
    assert lookout_ranks(table, CONFIG, Me(READER, history=history_with_call())).row == next_row
    assert next_row.key != BOARD_KEY


def test_former_stand_in_waits_for_its_turn_after_the_lookout_died() -> None:
    """C8: A worker stays on duty in place of a lookout that renews its row, but not in place of a dead one."""
    own_row = row("own", THIRDS[0], bulletin="8 2 1")
    history = heard(latest=Bulletin(8, 2, 1), call="8 0 own")
    assert history.hearing is not None
    me = Me(THIRDS[0], history=history)
    for idle, expected in ((2.5, True), (2.6, False), (3.6, True)):
        ranks = lookout_ranks((*table_with_idle_owner(idle), own_row), CONFIG, me)
        assert ranks.on_duty(me, history.hearing, CONFIG) is expected


def test_lookout_does_not_free_its_own_expired_lease() -> None:
    """C6: A worker still reads the shard of its own late lease, and claims the lease again if it lacks one."""
    own_leases = (row("t-0", LOOKOUT), row("t-1", LOOKOUT), row("t-2", LOOKOUT, idle=11.0))
    actions = plan((*TABLE, *own_leases), None, Me(LOOKOUT, history=FULL), CONFIG)
    assert [action for action in actions if isinstance(action, Release)] == []


def test_lookout_lists_on_time_while_workers_join() -> None:
    """C5, C7: Reads of its own rows do not delay the lookout's next listing."""
    joined_table = (*TABLE, row("n-0", "new"))
    history = evolve(QUIET, fleet_still=14.0)
    decisions = [look(LOOKOUT, joined_table, evolve(history, full_still=seconds)) for seconds in (1.0, 2.4, 2.6)]
    assert [(decision.seconds, decision.keys is None) for decision in decisions] == [
        (0.5, False),
        (0.5, False),
        (pytest.approx(0.4), True),
    ]
    fuller_table = (*joined_table, row("s-18", LOOKOUT), row("s-19", LOOKOUT))
    decision = look(LOOKOUT, fuller_table, evolve(history, full_still=1.0))
    assert (decision.seconds, decision.keys) == (1.0, None), "many rows cost more than a listing"


@pytest.mark.parametrize(("looks_still", "idle", "read"), [(7.5, 1.0, 1), (7.6, 1.0, 4), (1.0, 2.6, 4), (1.0, 2.5, 1)])
def test_rows_of_stand_ins_are_read_when_the_lookout_stops(looks_still: float, idle: float, read: int) -> None:
    """C8: Whether the row or only its count stops changing, readers of a large table look for another bulletin."""
    table = tuple(evolve(lease, idle=idle) if lease.owner == LOOKOUT else lease for lease in LARGER_TABLE)
    assert len(look(LAST, table, heard(looks_still=looks_still)).keys or ()) == read
