"""One held lease being read, step by step: order, faults, thefts, ends."""

from collections.abc import Callable
from typing import Any, Never

import pytest
from attrs import define, evolve, field
from virtual_fleet import KCL, Clock, FaultyStore, Kept

from adapters.handling import Delivery, Handling
from adapters.holding import Holding
from adapters.reading import Reading
from adapters.simulator.stream import ListSource, Shelf, records, shard
from adapters.source import Record, SourceError
from adapters.worker import Worker
from balancer.config import Config
from balancer.model import LATEST, SHARD_END, TRIM_HORIZON, Lease, Position, at_timestamp

MINIMAL = Config(lease_seconds=10.0)


@define
class Bench:
    """One worker that holds s-0, and a handler that does what the test says."""

    shelf: Shelf = field(factory=lambda: Shelf(records(5)))
    lease: Lease = field(factory=lambda: Lease("s-0", hash_range=(0, 9)))
    clock: Clock = field(factory=Clock)
    store: FaultyStore = field(factory=FaultyStore)
    source: ListSource = field(factory=ListSource)
    config: Config = MINIMAL
    handed: list[list[bytes]] = field(factory=list)
    happened: list[str] = field(factory=list)
    does: Callable[[Delivery], object] = lambda _delivery: None
    worker: Worker = field(init=False)
    consumer: Kept = field(factory=Kept)

    def __attrs_post_init__(self) -> None:
        self.source.shelves["s-0"] = self.shelf
        self.store.create(self.lease)
        self.worker = Worker(
            store=self.store,
            source=self.source,
            me="a-1",
            config=self.config,
            consumer=self.consumer,
            clock=self.clock,
            process="p-1",
        )
        self.worker.turn(self.clock.now)

    @property
    def holding(self) -> Holding:
        """What it holds."""
        return self.consumer.begun[0]

    def handle(self, delivery: Delivery) -> None:
        """Remember what was handed over, then do what the test says."""
        self.handed.append([record.data for record in delivery.records])
        self.does(delivery)

    def reading(self, **policy: Any) -> Reading:  # noqa: ANN401  any of the policy's settings
        """A reading of what it holds."""
        handling = evolve(
            Handling(self.handle, observer=lambda happening, _holding: self.happened.append(happening)), **policy
        )
        return Reading(self.worker, self.holding, handling)

    def steps(self, reading: Reading, count: int) -> float:
        """That many steps, each when it wishes to be called."""
        due = self.clock.now
        for _ in range(count):
            self.clock.now = max(self.clock.now, due)
            due = reading.step(self.clock.now)
        return due

    def until_over(self, reading: Reading) -> None:
        """Steps until there is nothing left to do."""
        due = self.clock.now
        for _ in range(100):
            self.clock.now = max(self.clock.now, due)
            due = reading.step(self.clock.now)
            if due == float("inf"):
                return
        raise AssertionError(f"still going after {self.happened}")


def data(count: int, start: int = 0) -> list[bytes]:
    """The data of the numbered records."""
    return [record.data for record in records(count, start)]


def test_records_are_handed_over_in_order_and_checkpointed() -> None:
    """Without it a restart would hand them all over again."""
    bench = Bench(Shelf(records(5), size=2))
    bench.steps(bench.reading(), 4)
    assert bench.handed == [data(2), data(2, 2), data(1, 4)]
    assert bench.store.row("s-0").checkpoint == Position("104")
    assert bench.source.opened == [("s-0", TRIM_HORIZON)]


def test_checkpoints_may_be_spared() -> None:
    """Without it a busy shard would cost a write for each batch."""
    bench = Bench(Shelf(records(5), size=1))
    reading = bench.reading(checkpoint_seconds=60)
    bench.steps(reading, 6)
    assert bench.store.row("s-0").checkpoint == Position("100")
    bench.clock.now += 60
    bench.steps(reading, 1)
    assert bench.store.row("s-0").checkpoint == Position("104")


def test_a_child_waits_for_its_parents() -> None:
    """Without it records of one key would be handed over in the wrong order (L12)."""
    bench = Bench(lease=Lease("s-0", parents=("p",)))
    bench.store.create(Lease("p", owner="z-1", checkpoint=Position("3")))
    reading = bench.reading()
    bench.steps(reading, 3)
    assert (bench.handed, bench.source.opened) == ([], [])
    bench.store.rewrite("p", lambda lease: evolve(lease, checkpoint=SHARD_END))
    bench.steps(reading, 3)
    assert bench.handed == [data(5)]


def test_latest_is_pinned_before_the_first_read_and_stays() -> None:
    """Without it what arrives before the first checkpoint would be lost with a crash."""
    bench = Bench(Shelf(), lease=Lease("s-0", checkpoint=LATEST))
    bench.steps(bench.reading(), 1)
    pinned = at_timestamp(1_700_000_000_003)
    assert bench.store.row("s-0").note("latest_ms") == "1700000000003"
    assert bench.store.row("s-0").checkpoint == LATEST
    bench.steps(bench.reading(), 1)
    assert bench.source.opened == [("s-0", pinned), ("s-0", pinned)]


def test_nothing_is_read_while_latest_cannot_be_pinned() -> None:
    """Without it the first read could come before the note that makes it safe."""
    bench = Bench(Shelf(), lease=Lease("s-0", checkpoint=LATEST))
    bench.store.down = True
    bench.steps(bench.reading(), 2)
    assert bench.source.opened == []


def test_a_time_that_only_the_settings_know_is_taken_from_them() -> None:
    """Without it a row written by KCL would start somewhere else."""
    start = at_timestamp(1_600_000_000_000)
    bench = Bench(
        lease=Lease("s-0", checkpoint=Position("AT_TIMESTAMP")), config=evolve(MINIMAL, initial_position=start)
    )
    bench.steps(bench.reading(), 1)
    assert bench.source.opened == [("s-0", start)]


def test_a_handler_that_raises_gets_the_rest_of_its_batch_again() -> None:
    """Without it one passing fault would lose records, or repeat those already checkpointed."""

    def fails_once(delivery: Delivery) -> None:
        if len(bench.handed) == 1:
            assert delivery.checkpoint(delivery.records[1])
            raise OSError("passing")

    bench = Bench(does=fails_once)
    bench.steps(bench.reading(), 3)
    assert bench.handed == [data(5), data(3, 2)]
    assert bench.store.row("s-0").checkpoint == Position("104")


def test_a_handler_that_keeps_raising_stops_its_shard_and_skips_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Without it a poisoned record would be skipped silently, or retried for ever by the same worker."""

    def fails(_delivery: Delivery) -> None:
        raise OSError("for good")

    bench = Bench(does=fails)
    bench.until_over(bench.reading(attempts=3))
    row = bench.store.row("s-0")
    assert (bench.handed, bench.happened) == ([data(5)] * 3, ["initialize", "stopped"])
    assert (row.owner, row.checkpoint) == (None, TRIM_HORIZON)
    assert "shard s-0 stops here: its handler raised OSError on records 100 to 104, attempt 3 of 3" in caplog.text
    bench.worker.turn(bench.clock.now)
    assert bench.worker.holdings == ()


def test_a_dead_letter_takes_a_batch_over_and_the_shard_goes_on() -> None:
    """Without it those who prefer going on to waiting would have no way."""
    letters: list[tuple[list[bytes], str]] = []

    def fails_on_the_first(delivery: Delivery) -> None:
        if delivery.records[0].data == b"0":
            raise ValueError("poison")

    bench = Bench(Shelf(records(4), size=2), does=fails_on_the_first)
    bury = lambda delivery, error: letters.append(([each.data for each in delivery.records], str(error)))  # noqa: E731
    bench.steps(bench.reading(attempts=2, dead_letter=bury), 4)
    assert letters == [(data(2), "poison")]
    assert bench.handed == [data(2), data(2), data(2, 2)]
    assert bench.store.row("s-0").checkpoint == Position("103")


def test_a_dead_letter_that_raises_stops_the_shard() -> None:
    """Without it records could vanish between the handler and the dead letter."""

    def fails(*_given: object) -> None:
        raise OSError("disk full")

    bench = Bench(does=fails)
    bench.until_over(bench.reading(attempts=1, dead_letter=fails))
    assert (bench.happened, bench.store.row("s-0").checkpoint) == (["initialize", "stopped"], TRIM_HORIZON)


def test_a_handler_whose_lease_was_stolen_is_told_so() -> None:
    """Without it a handler could commit on the strength of a checkpoint that was refused."""
    told: list[bool] = []

    def robbed(delivery: Delivery) -> None:
        bench.store.steal(bench.store.row("s-0"), "b-1", (("process", "p-2/b-1"),))
        told.append(delivery.checkpoint())
        told.append(delivery.lost)

    bench = Bench(does=robbed)
    bench.until_over(bench.reading())
    assert (told, bench.happened) == ([False, True], ["initialize", "lease-lost"])
    assert bench.store.row("s-0").checkpoint == TRIM_HORIZON


def test_after_a_theft_work_done_may_be_said_late() -> None:
    """Without the option the thief would do again what was done already."""

    def robbed(_delivery: Delivery) -> None:
        bench.store.steal(bench.store.row("s-0"), "b-1", (("process", "p-2/b-1"),))

    bench = Bench(does=robbed)
    bench.until_over(bench.reading(late_checkpoints=True))
    row = bench.store.row("s-0")
    assert (row.owner, row.checkpoint) == ("b-1", Position("104"))


def test_a_checkpoint_beyond_the_batch_is_refused() -> None:
    """Without it a handler could skip records it never saw."""
    refused: list[str] = []

    def overreaches(delivery: Delivery) -> None:
        with pytest.raises(ValueError, match="behind this batch, which ends at 104") as caught:
            delivery.checkpoint(Record(b"", "105"))
        refused.append(str(caught.value))

    bench = Bench(does=overreaches)
    bench.steps(bench.reading(), 2)
    assert len(refused) == 1


def test_a_shard_ends_after_its_last_record_and_its_childrens_leases() -> None:
    """Without this order a crash in between would strand the children, or skip the tail (L3)."""
    children = (shard("c-0", 0, 4, "s-0"), shard("c-1", 5, 9, "s-0"))
    bench = Bench(Shelf(records(3), children, ended=True))
    bench.until_over(bench.reading())
    row = bench.store.row("s-0")
    assert bench.store.writes[-3:] == ["c-0", "c-1", "s-0"]
    assert (bench.handed, bench.happened) == ([data(3)], ["initialize", "shard-ended"])
    assert (row.checkpoint, row.owner) == (SHARD_END, None)
    made = [(lease.key, lease.parents, lease.checkpoint) for lease in bench.store.get(["c-0", "c-1"])]
    assert made == [("c-0", ("s-0",), TRIM_HORIZON), ("c-1", ("s-0",), TRIM_HORIZON)]
    bench.clock.now = bench.worker.turn(bench.clock.now)
    assert bench.worker.holdings != (), "a lifecycle turn at once"
    bench.worker.turn(bench.clock.now)
    assert {holding.key for holding in bench.worker.holdings} == {"c-0", "c-1"}


def test_a_handler_that_fails_on_the_last_batch_keeps_the_shard_open() -> None:
    """Without it the end of a shard could overtake its last records."""

    def fails(_delivery: Delivery) -> None:
        raise OSError("for good")

    bench = Bench(Shelf(records(3), (shard("c-0", 0, 9, "s-0"),), ended=True), does=fails)
    bench.until_over(bench.reading(attempts=2))
    assert bench.store.row("s-0").checkpoint == TRIM_HORIZON
    assert bench.store.get(["c-0"]) == ()


def test_a_merged_child_waits_for_the_lease_of_its_other_parent() -> None:
    """Without it the child could be read before a parent that nobody has met yet."""
    child = shard("c-0", 0, 9, "s-0", "s-1")
    bench = Bench(Shelf(records(1), (child,), ended=True))
    bench.source.listed = [shard("s-0", 0, 4, open=False), shard("s-1", 5, 9, open=False), child]
    bench.until_over(bench.reading())
    assert bench.store.get(["c-0"]) == ()
    assert bench.store.row("s-0").ended


def test_an_end_without_named_children_looks_them_up() -> None:
    """Without it services that do not name children would leave the rest of the stream unread."""
    bench = Bench(Shelf(records(1), ended=True))
    bench.source.listed = [shard("s-0", 0, 9, open=False), shard("c-0", 0, 9, "s-0")]
    bench.until_over(bench.reading())
    assert [lease.key for lease in bench.store.get(["c-0"])] == ["c-0"]


def test_kcl_keeps_the_owner_of_a_finished_lease() -> None:
    """Without it a fleet under KCL's rules would count its load differently from KCL."""
    bench = Bench(Shelf(records(1), ended=True), config=KCL)
    bench.until_over(bench.reading())
    assert (bench.store.row("s-0").owner, bench.store.row("s-0").ended) == ("a-1", True)
    assert [holding.key for holding in bench.worker.holdings] == ["s-0"]


def test_a_shard_that_cannot_be_read_stops_and_is_released() -> None:
    """Without it a worker would hold for ever what it cannot read."""

    class Broken(ListSource):
        def open(self, lease: Lease, start: Position) -> Never:
            raise SourceError(f"{lease.key} at {start.sequence}: no such shard")

    bench = Bench(source=Broken())
    bench.until_over(bench.reading())
    assert (bench.happened, bench.store.row("s-0").owner) == (["stopped"], None)


def test_a_checkpoint_of_unknown_outcome_is_settled_before_the_next() -> None:
    """Without it a lost reply would either stop the reader or move a checkpoint back."""
    bench = Bench(Shelf(records(4), size=2))
    reading = bench.reading()
    bench.steps(reading, 1)
    bench.store.lose_replies = 1
    bench.steps(reading, 4)
    assert bench.handed == [data(2), data(2, 2)]
    assert (bench.store.row("s-0").checkpoint, bench.holding.lost.is_set()) == (Position("103"), False)


def test_parting_comes_before_another_attempt_and_keeps_what_is_done() -> None:
    """Without it a failing handler would hold up every shutdown."""

    def fails_on_the_second(delivery: Delivery) -> None:
        if delivery.records[0].data == b"2":
            raise OSError("passing")

    bench = Bench(Shelf(records(4), size=2), does=fails_on_the_second)
    reading = bench.reading(checkpoint_seconds=3600)
    bench.steps(reading, 3)
    bench.holding.ask_release()
    assert reading.step(bench.clock.now) == float("inf")
    row = bench.store.row("s-0")
    assert (row.owner, row.checkpoint, bench.happened) == (None, Position("101"), ["initialize", "stopped"])
