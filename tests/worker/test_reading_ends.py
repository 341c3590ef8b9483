"""How the reading of a lease ends, step by step: stolen in between, asked to part, or ended by a user's exception."""

import logging
import math
from contextlib import nullcontext
from typing import cast

import pytest
from attrs import define, evolve, field
from test_reading import Bench, data
from virtual_fleet import FaultySource, FaultyStore
from waiters import Clock

from leasehold.adapters.proving.simulator.world.world import ListReader, ListSource, ShardRecords, records, shard
from leasehold.adapters.reading.handling import Delivery
from leasehold.adapters.reading.handovers import Found, GivenUp, Later, LeaseLost
from leasehold.adapters.reading.lifecycle import EXPIRED_SECONDS, ROOM_SECONDS
from leasehold.adapters.reading.reading import Room
from leasehold.adapters.worker.holding import MEASURE_SECONDS
from leasehold.balancer.model import LATEST, SHARD_END, TRIM_HORIZON, Lease, Position, Shard, at_timestamp
from leasehold.stores.writes import CheckpointLease, CreateLease, GiveLease, RequestLease, StealLease, Write


def of_kind(store: FaultyStore, kind: type[Write]) -> list[Write]:
    """The writes of this kind that were asked for."""
    return [write for write in store.asked if isinstance(write, kind)]


def rob(bench: Bench) -> None:
    """Another worker takes the lease."""
    bench.store.write(StealLease(bench.store.row("s-0"), "b-1", (("process", "p-2/b-1"),)))


def found_robbed(bench: Bench) -> None:
    """It is taken, and a renewal tells so."""
    rob(bench)
    assert not bench.holding.renew()


def test_a_batch_read_while_the_lease_was_lost_is_not_handed_over() -> None:
    """Two workers would handle it; and the observer must hear why reading ended."""
    source = FaultySource()
    bench = Bench(source=source)
    source.on_read = lambda _batch: found_robbed(bench)
    assert bench.steps(bench.reading(), 2) == math.inf
    assert (bench.handed, bench.happened) == ([], ["initialize", "lease-lost"])


def test_a_theft_during_the_handler_ends_the_reading_in_the_same_step() -> None:
    """Its observer would hear of it only when the next batch is due, and hold its state until then."""
    for lost in (rob, found_robbed):
        bench = Bench(ShardRecords(records(2), wait_seconds=60.0))
        bench.does = lambda _delivery, bench=bench, lost=lost: lost(bench)  # type: ignore[misc]
        assert bench.steps(bench.reading(), 2) == math.inf
        assert bench.happened == ["initialize", "lease-lost"]
        assert bench.store.row("s-0").checkpoint == TRIM_HORIZON


def test_a_theft_between_two_halves_of_a_failing_batch_ends_the_reading() -> None:
    """The second half would be handed over here and to the thief."""

    def fails_whole(delivery: Delivery) -> None:
        if len(delivery.records) > 1:
            raise ValueError("poison")
        rob(bench)

    bench = Bench(ShardRecords(records(2)), does=fails_whole)
    reading = bench.reading(attempts=1, dead_letter=lambda _delivery, _error: None)
    assert bench.steps(reading, 3) == math.inf
    assert (bench.handed, bench.happened) == ([data(2), data(1)], ["initialize", "lease-lost"])


def test_a_batch_that_its_handler_checkpointed_whole_before_it_raised_is_done() -> None:
    """An empty batch would be handed over, or the shard stand still."""

    def checkpoints_then_fails(delivery: Delivery) -> None:
        if len(bench.handed) == 1:
            assert delivery.checkpoint()
            raise OSError("after all was done")

    bench = Bench(ShardRecords(records(4), size=2), does=checkpoints_then_fails)
    bench.steps(bench.reading(), 4)
    assert bench.handed == [data(2), data(2, 2)]


def test_at_the_end_of_a_shard_no_time_is_lost() -> None:
    """Its children would wait for the time of a next reading that never comes."""
    bench = Bench(ShardRecords(records(2), ended=True, wait_seconds=60.0))
    reading = bench.reading()
    bench.steps(reading, 1)
    assert bench.steps(reading, 1) == bench.clock.now


def test_an_heir_waits_for_the_running_batch_and_for_nothing_else() -> None:
    """The shard stands still for each write and each second between the last record here and the first one there."""
    store = FaultyStore()
    bench = Bench(ShardRecords(records(2), wait_seconds=60.0), lease=Lease("s-0"), store=store)

    def is_asked_for(_delivery: Delivery) -> None:
        store.write(RequestLease(store.row("s-0"), "b-1"))
        bench.holding.asked(store.row("s-0"))
        assert bench.holding.renew()
        assert bench.holding.parting

    bench.does = is_asked_for
    reading = bench.reading()
    bench.steps(reading, 1)
    assert bench.steps(reading, 1) == bench.clock.now
    assert bench.steps(reading, 1) == math.inf
    assert of_kind(store, CheckpointLease) == []
    (given,) = of_kind(store, GiveLease)
    assert isinstance(given, GiveLease)
    assert (given.position, store.row("s-0").owner) == (Position("101"), "b-1")
    assert bench.happened == ["initialize", "stopped"]


@pytest.mark.parametrize("who", ["handler", "dead letter"])
def test_an_exception_that_ends_the_process_releases_the_lease_at_once(
    who: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Ctrl-C in a user's function: others would wait for the lease to expire."""

    def interrupted(_delivery: Delivery, _error: Exception | None = None) -> None:
        raise KeyboardInterrupt

    def fails(_delivery: Delivery) -> None:
        raise ValueError("poison")

    bench = Bench(ShardRecords(records(1)), does=interrupted if who == "handler" else fails)
    reading = bench.reading(attempts=2 if who == "handler" else 1, dead_letter=interrupted)
    for _ in range(10):
        due = reading.step(bench.clock.now)
        if bench.holding.parting:
            break
    assert due == bench.clock.now
    assert "stops here" not in caplog.text, "no fault of the shard"
    assert reading.step(bench.clock.now) == math.inf
    assert (bench.store.row("s-0").owner, bench.store.row("s-0").checkpoint) == (None, TRIM_HORIZON)


def test_the_log_names_the_record_that_is_skipped_and_why(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody could find it again in the stream."""

    def fails(_delivery: Delivery) -> None:
        raise ValueError("poison")

    bench = Bench(ShardRecords(records(1)), does=fails)
    with caplog.at_level(logging.WARNING):
        bench.steps(bench.reading(attempts=1, dead_letter=lambda _delivery, _error: None), 4)
    assert "shard s-0: record 100.0 went to the dead letter: ValueError" in caplog.text


def test_the_log_names_the_record_that_nothing_took(caplog: pytest.LogCaptureFixture) -> None:
    """The shard stands still for it, and somebody has to mend it."""

    def fails(*_given: object) -> None:
        raise OSError("disk full")

    bench = Bench(ShardRecords(records(1)), does=fails)
    bench.until_over(bench.reading(attempts=1, dead_letter=fails))
    assert "neither its handler nor the dead letter took record 100.0: OSError: disk full" in caplog.text


def test_a_lease_stolen_before_its_shards_end_is_lost_and_not_ended() -> None:
    """The observer would close the books of a shard whose last records somebody else handles again."""
    bench = Bench(ShardRecords(records(1), ended=True))
    reading = bench.reading()
    bench.steps(reading, 2)
    rob(bench)
    assert bench.steps(reading, 1) == math.inf
    assert bench.happened == ["initialize", "lease-lost"]


def test_an_heir_that_takes_its_request_back_leaves_the_shard_where_it_is() -> None:
    """The shard would be given to nobody, and its reading end while the lease stays here."""
    bench = Bench(ShardRecords(records(2)))
    reading = bench.reading()
    bench.steps(reading, 1)
    bench.holding.asked(evolve(bench.holding.lease, heir="b-1"))
    assert bench.holding.parting
    bench.clock.now += 11.0  # the row names nobody any more, as the renewal finds
    assert reading.step(bench.clock.now) == bench.clock.now
    assert (bench.happened, bench.store.row("s-0").owner) == (["initialize"], "a-1")
    bench.steps(reading, 1)
    assert bench.handed == [data(2)]


# What a look at a handler answers


@define
class Watched:
    """Stands in for the watch of a handler: it always finds this."""

    what: Found
    began: list[float] = field(factory=list)
    at_work: bool = False
    looked: list[float] = field(factory=list)

    def look(self, now: float) -> Found:
        """Remember when."""
        self.looked.append(now)
        return self.what

    def begin(self, _call: object, now: float, **_last: bool) -> Found:
        """Remember when."""
        self.began.append(now)
        return self.what


def found(what: Found) -> tuple[Bench, float, Watched]:
    """A batch whose handler is looked after, and this was found: what the step answers."""
    bench, watched = Bench(ShardRecords(records(2))), Watched(what)
    reading = bench.reading(bench_seconds=30.0)
    bench.steps(reading, 1)
    reading._watch = watched  # type: ignore[assignment]  # noqa: SLF001  the one stand-in
    return bench, bench.steps(reading, 1), watched


def test_a_handler_that_takes_its_time_is_looked_after_when_the_look_wished_so() -> None:
    """A hung handler would never be said to hang."""
    bench, due, watched = found(Later(1042.0))
    assert (due, watched.began) == (1042.0, [bench.clock.now])


def test_a_handler_whose_lease_is_lost_is_left_at_once() -> None:
    """The successor under the same key could not begin."""
    bench, due, _ = found(LeaseLost())
    assert (due, bench.happened) == (math.inf, ["initialize", "lease-lost"])


def test_a_handler_that_is_given_up_costs_its_lease_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    """The shard would be held by a worker that cannot read it, or move without a word."""
    bench, due, _ = found(GivenUp("its handler has been at work for ever"))
    assert (due, bench.holding.parting) == (bench.clock.now, True)
    assert "shard s-0 stops here: its handler has been at work for ever; released, not taken again for 30 s" in (
        caplog.text
    )


# The end of a shard (L3)


def ended(store: FaultyStore, *children: Shard, listed: tuple[Shard, ...] = ()) -> Bench:
    """A shard read to its end, which these follow; what was listed by then was no business of its reading."""
    bench = Bench(ShardRecords(records(1), children, ended=True), store=store)
    bench.source.listed, bench.source.listings = list(listed), 0
    bench.until_over(bench.reading())
    return bench


def test_a_split_needs_no_listing_and_names_the_children_on_the_row() -> None:
    """A listing of ten thousand shards for each one that ends; and KCL 2.x reads childShardIds."""
    store = FaultyStore()
    bench = ended(store, shard("c-0", 0, 4, "s-0"), shard("c-1", 5, 9, "s-0"))
    assert bench.source.listings == 0
    (end,) = of_kind(store, CheckpointLease)[-1:]
    assert isinstance(end, CheckpointLease)
    assert (end.position, end.children) == (SHARD_END, ("c-0", "c-1"))


def test_children_that_are_there_are_not_made_again() -> None:
    """A write for each child of each parent, refused each time."""
    store = FaultyStore()
    store.write(CreateLease(Lease("c-0", parents=("s-0",), checkpoint=Position("7"))))
    ended(store, shard("c-0", 0, 4, "s-0"), shard("c-1", 5, 9, "s-0"))
    assert [write.lease.key for write in of_kind(store, CreateLease)] == ["c-0", "s-0", "c-1"]
    assert store.row("c-0").checkpoint == Position("7")


@pytest.mark.parametrize(("other", "listings"), [("leased", 0), ("listed", 1), ("gone", 1)])
def test_the_end_of_a_merges_first_parent_asks_for_a_listing_only_where_it_must(other: str, listings: int) -> None:
    """A child whose other parent is past retention must not wait for it; one whose other parent is leased need not."""
    store, child = FaultyStore(), shard("c-0", 0, 9, "s-0", "s-1")
    if other == "leased":
        store.write(CreateLease(Lease("s-1", checkpoint=SHARD_END)))
    bench = ended(store, child, listed=(shard("s-1", 5, 9),) if other == "listed" else ())
    assert bench.source.listings == listings
    assert bool(store.get(["c-0"])) is (other != "listed")


# Where reading starts


def test_where_latest_is_a_position_it_is_stored_as_the_checkpoint() -> None:
    """After a crash before the first checkpoint another worker would start at another present."""
    bench = Bench(
        ShardRecords(records(4)), lease=Lease("s-0", checkpoint=LATEST), source=FaultySource(present=Position("101"))
    )
    bench.steps(bench.reading(), 1)
    assert (bench.store.row("s-0").checkpoint, bench.store.row("s-0").note("latest_ms")) == (Position("101"), None)
    assert bench.source.opened == [("s-0", Position("101"))]


def test_nothing_is_read_where_the_lease_was_stolen_while_latest_was_pinned() -> None:
    """The thief pins a present of its own: both would read."""
    for source in (ListSource(), FaultySource(present=Position("101"))):
        bench = Bench(lease=Lease("s-0", checkpoint=LATEST), source=source)
        rob(bench)
        assert bench.steps(bench.reading(), 1) == math.inf
        assert (bench.source.opened, bench.happened) == ([], ["lease-lost"])


@pytest.mark.parametrize(
    ("noted", "taken"),
    [("1700000000001", True), ("9" * 14, True), ("9" * 15, False), ("-", False), ("٣٣", False), ("1.5", False)],
)
def test_only_a_time_counts_as_a_pinned_present(noted: str, taken: bool) -> None:
    """A row that somebody edited would stop its shard for good."""
    bench = Bench(lease=Lease("s-0", checkpoint=LATEST, notes=(("latest_ms", noted),)))
    bench.store.rewrite("s-0", lambda lease: evolve(lease, notes=(*lease.notes, ("latest_ms", noted))))
    bench.holding._lease = bench.store.row("s-0")  # noqa: SLF001  as if it had been claimed so
    bench.steps(bench.reading(), 1)
    ((_, start),) = bench.source.opened
    assert (start == at_timestamp(int(noted))) is taken if taken else start.sub == 1_700_000_000_005


def test_a_reading_that_waits_for_room_goes_on_when_there_is_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that once found no room would stand still, or its throughput be that of a busy one."""
    bench = Bench(ShardRecords(records(2)))
    reading = bench.reading()
    room = iter([False, True])
    monkeypatch.setattr(reading._slot, "ask", lambda: next(room))  # noqa: SLF001  the one stand-in
    bench.steps(reading, 3)
    assert bench.handed == [data(2)]


# When a step is due


def test_a_store_that_is_away_is_asked_again_after_a_wait() -> None:
    """All shards of a worker would ask it in a loop, just while it recovers."""
    bench = Bench(lease=Lease("s-0", checkpoint=LATEST))
    reading = bench.reading()
    bench.store.down = True
    due = reading.step(bench.clock.now)
    assert due > bench.clock.now
    bench.store.down = False
    assert reading.step(bench.clock.now) == due, "it was hurried"
    bench.clock.now = due
    assert reading.step(due) == due
    assert len(bench.source.opened) == 1


def test_an_expired_lease_waits_for_its_renewal_and_reads_nothing() -> None:
    """Another worker may have it by now; in a loop it would wait at the cost of a processor."""
    bench = Bench()
    bench.clock.now += 11.0
    assert bench.reading().step(bench.clock.now) == bench.clock.now + EXPIRED_SECONDS
    assert bench.source.opened == []


def test_a_handler_at_work_is_looked_after_at_the_time_of_the_step() -> None:
    """A second batch would be read beside the one at work, or a slow handler never be found slow."""
    bench, watched = Bench(ShardRecords(records(2))), Watched(Later(1042.0), at_work=True)
    reading = bench.reading()
    reading._watch = watched  # type: ignore[assignment]  # noqa: SLF001  the one stand-in
    assert reading.step(1007.0) == 1042.0
    assert (watched.looked, bench.source.opened) == ([1007.0], [])


def test_an_observer_that_fails_is_named_as_such(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody would know which of the worker's functions to mend."""

    def fails(*_told: object) -> None:
        raise OSError("no such file")

    bench = Bench()
    bench.steps(bench.reading(observer=fails), 2)
    assert "the observer failed; this is said once, and reading goes on" in caplog.text
    assert bench.handed == [data(5)]


def test_the_first_batch_is_checkpointed_at_once_on_a_machine_that_has_just_started() -> None:
    """Where the clock counts from the start of the machine, what was handled first would be handled twice."""
    bench = Bench(clock=Clock(0.25))
    bench.steps(bench.reading(checkpoint_seconds=60), 2)
    assert bench.store.row("s-0").checkpoint == Position("104")


def test_reading_goes_on_at_the_stored_number() -> None:
    """Every take-over would begin the shard anew."""
    bench = Bench(lease=Lease("s-0", checkpoint=Position("101")))
    bench.steps(bench.reading(), 2)
    assert bench.source.opened == [("s-0", Position("101"))]
    assert bench.handed == [data(3, 2)]


def test_a_reading_without_room_asks_again_after_a_second_and_measures_from_then_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A wake-up that was missed would stop the shard for good; and it would look idle for as long as it waited."""
    bench = Bench(ShardRecords(records(2)))
    reading = bench.reading()
    bench.steps(reading, 1)
    monkeypatch.setattr(reading._slot, "ask", lambda: False)  # noqa: SLF001  the one stand-in
    now = bench.clock.now
    bench.holding.throughput.add(600, now - MEASURE_SECONDS)
    assert reading.step(now) == now + ROOM_SECONDS == now + 1.0
    assert bench.holding.throughput.average(now) is None


@pytest.mark.parametrize("how", ["done", "broken", "interrupted", "stolen"])
def test_room_is_free_once_a_batch_is_not_needed(how: str) -> None:
    """The memory of shards that left would be missing to those that stay, for ever."""

    def handle(_delivery: Delivery) -> None:
        if how == "stolen":
            raise ValueError
        if how == "interrupted":
            raise KeyboardInterrupt

    bench, room = Bench(ShardRecords(records(2)), source=FaultySource(), does=handle), Room()
    reading = bench.reading(room)
    bench.steps(reading, 1)
    (reader,) = cast("FaultySource", bench.source).readers
    if how == "broken":
        cast("ListReader", reader.reader).shelf = cast("ShardRecords", None)
    with pytest.raises(AttributeError) if how == "broken" else nullcontext():
        bench.steps(reading, 1)
    assert (room.used_bytes > 0) is (how == "stolen")
    if how == "stolen":
        bench.store.write(StealLease(bench.store.row("s-0"), "b-1", (("process", "p-2/b-1"),)))
        assert not bench.holding.renew()
        bench.until_over(reading)
    assert room.used_bytes == 0
    assert reader.closed is (how in {"broken", "stolen"})
