"""A slice of a stream is read from one time to another, once, by a group that ends by itself."""

import threading
from collections.abc import Callable, Sequence
from typing import cast

import pytest
from attrs import define, evolve, field
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner
from virtual_fleet import Clock, FaultyStore

from leasehold.adapters.cli.consume import app
from leasehold.adapters.proving.simulator.world.stream import ListReader, ListSource, ShardRecords, shard
from leasehold.adapters.reading.handlers.handling import Delivery, Handling
from leasehold.adapters.reading.slices.running import SliceVerdict, is_read, run_slice
from leasehold.adapters.reading.slices.slice import LATE_SECONDS, NOTE, Slice, SliceReader
from leasehold.adapters.sources.protocol import Batch, Reader, Record, Settled, SourceUnavailable
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.config import Config
from leasehold.balancer.model import LATEST, SHARD_END, TRIM_HORIZON, Lease, Position, at_timestamp
from leasehold.stores.contract.actors import placed
from leasehold.stores.embedded.memory import MemoryStore
from leasehold.stores.urls import open_store

SINCE, UNTIL = 1_000_000, 1_060_000
CUT = Slice(at_timestamp(SINCE), UNTIL)


def record(number: int, seconds: float) -> Record:
    """A record that arrived so many seconds after the slice began."""
    return Record(b"%d" % number, str(number), arrived=SINCE / 1000 + seconds)


@define
class Timed(ListSource):
    """A stream whose clock the test sets; a time as the start is the place behind all that arrived before it."""

    now: float = UNTIL / 1000 + 60
    tells_last: bool = False

    def settled(self, lease: Lease, until: float) -> Settled | None:
        """As a service says: by its clock alone, or by its last record."""
        if self.now < until:
            return None
        rows = self.shelves[lease.key].records
        if not self.tells_last:
            return Settled()
        return Settled(rows[-1].position, rows[-1].arrived) if rows else Settled(TRIM_HORIZON)

    def open(self, lease: Lease, start: Position) -> Reader:
        """From just after the record, or from the time."""
        reader = cast("ListReader", super().open(lease, start))
        if start.sequence == "AT_TIMESTAMP":
            rows = self.shelves[lease.key].records
            early = (at for at, each in enumerate(rows, 1) if (each.arrived or 0) < start.sub / 1000)
            reader.at = max(early, default=0)
        return reader


def read_to_the_end(source: Timed, start: Position = TRIM_HORIZON) -> tuple[list[int], bool]:
    """The numbers of the records that a reader of the slice brings, and whether it ends."""
    reader = CUT.source(source).open(Lease("s-0"), start)
    found: list[int] = []
    for _ in range(100):
        batch = reader.read()
        found += [int(each.sequence_number) for each in batch.records]
        if batch.ended:
            return found, True
    return found, False


late = st.floats(0, LATE_SECONDS / 2)
near = st.integers(-3, 3) | st.floats(-100, 200)


@given(st.lists(st.tuples(near, late), max_size=30), st.integers(1, 10), st.booleans(), st.booleans())
def test_a_reader_brings_what_arrived_in_time_and_nothing_else(
    gaps: list[tuple[float, float]], size: int, tells_last: bool, ended: bool
) -> None:
    """Without it a slice would lack records, have another's, or never end."""
    # Times rise, but for some seconds.
    rows = [record(number, seconds + more) for number, (seconds, more) in enumerate(sorted(gaps), 1)]
    source = Timed(shelves={"s-0": ShardRecords(rows, size=size, ended=ended)}, tells_last=tells_last)
    within = [int(each.sequence_number) for each in rows if SINCE / 1000 <= (each.arrived or 0) < UNTIL / 1000]
    assert read_to_the_end(source) == (within, True)


def test_times_that_do_not_quite_rise_lose_nothing() -> None:
    """Without it a record that arrived in time would be left out for one before it that did not."""
    rows = [record(1, 59), record(2, 60.5), record(3, 59.5), record(4, 60 + LATE_SECONDS), record(5, 10)]
    assert read_to_the_end(Timed(shelves={"s-0": ShardRecords(rows)})) == ([1, 3, 5], True)
    assert read_to_the_end(Timed(shelves={"s-0": ShardRecords(rows, size=1)}, now=0.0)) == ([1, 3], True)
    early = Timed(shelves={"s-0": ShardRecords([record(1, 1), record(2, 1 - LATE_SECONDS), record(3, 2)])})
    assert read_to_the_end(early, CUT.begin) == ([1, 3], True)


def test_a_shard_does_not_end_before_the_time_is_over() -> None:
    """Without it records that arrive meanwhile would be left out."""
    source = Timed(shelves={"s-0": ShardRecords([record(1, 10)])}, now=UNTIL / 1000 - 1)
    assert read_to_the_end(source) == ([1], False)
    source.now = UNTIL / 1000
    assert read_to_the_end(source) == ([1], True)


def test_a_shard_that_is_read_to_its_last_record_ends_when_it_is_opened_again() -> None:
    """Without it a restarted worker would wait for a record that never comes."""
    source = Timed(shelves={"s-0": ShardRecords([record(1, 10)])}, tells_last=True)
    assert read_to_the_end(source, Position("1")) == ([], True)


def test_a_reading_at_the_tip_counts_only_if_the_time_was_over_before_it() -> None:
    """Without it what arrived between the reading and the look at the clock would be left out."""

    class Late(Timed):
        def open(self, lease: Lease, start: Position) -> Reader:
            reader, source = super().open(lease, start), self

            class Moving:
                def read(self) -> Batch:
                    batch = reader.read()
                    source.now = UNTIL / 1000 + 1  # the time is over once this reading has been answered
                    return batch

                def close(self) -> None:
                    reader.close()

            return Moving()

    source = Late(shelves={"s-0": ShardRecords([])}, now=0.0)
    reader = CUT.source(source).open(Lease("s-0"), TRIM_HORIZON)
    assert [reader.read().ended for _ in range(2)] == [False, True]


def test_a_fault_of_the_look_at_the_clock_reads_nothing() -> None:
    """Without it the records of that reading would be lost."""

    @define
    class Down(Timed):
        fails: int = 1

        def settled(self, lease: Lease, until: float) -> Settled | None:
            self.fails -= 1
            if self.fails >= 0:
                raise SourceUnavailable("not now")
            return super().settled(lease, until)

    reader = CUT.source(Down(shelves={"s-0": ShardRecords([record(1, 1)])})).open(Lease("s-0"), TRIM_HORIZON)
    with pytest.raises(SourceUnavailable):
        reader.read()
    assert len(reader.read().records) == 1
    assert isinstance(reader, SliceReader)


@pytest.mark.parametrize("since", [LATEST, SHARD_END, Position("7"), at_timestamp(UNTIL)])
def test_a_slice_has_a_beginning_and_an_end(since: Position) -> None:
    """Without it a slice could be empty, or another for each worker."""
    with pytest.raises(ValueError, match="slice: it begins"):
        Slice(since, UNTIL)


@pytest.mark.parametrize("note", [(), ((NOTE, "0..5"),)])
def test_a_table_with_other_leases_is_refused(note: tuple[tuple[str, str], ...]) -> None:
    """Without it a slice would finish the leases of a group that goes on."""
    store = FaultyStore()
    placed(store, Lease("s-0", notes=note))
    with pytest.raises(ValueError, match=r"its table holds leases of another .*give it a table of its own"):
        CUT.store(store)


def test_what_cannot_be_cut_is_refused() -> None:
    """Without it a worker would run for ever."""
    with pytest.raises(ValueError, match="this source does not tell"):
        CUT.source(ListSource())


@define
class Fleet:
    """Workers in threads that read a slice of a stream with a split in it."""

    store: MemoryStore = field(factory=MemoryStore)
    source: Timed = field(factory=Timed)
    handled: list[int] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.source.listed = [shard("p", 0, 9), shard("q", 10, 19)]
        self.source.shelves = {
            "p": ShardRecords([record(number, number) for number in range(1, 31)], size=5),
            "q": ShardRecords([record(100 + number, number) for number in range(1, 91)], size=7),
            "p.0": ShardRecords([record(200 + number, 30 + number) for number in range(1, 61)], size=7),
            "p.1": ShardRecords([], size=7),
        }
        self.source.end("p", shard("p.0", 0, 4, "p"), shard("p.1", 5, 9, "p"))

    def worker(self, name: str) -> Worker:
        """A worker of the slice."""
        config = Config(initial_position=CUT.since, lease_seconds=1.0)
        return Worker(store=CUT.store(self.store), source=CUT.source(self.source), me=name, config=config)

    def handle(self, delivery: Delivery) -> None:
        """Take all."""
        self.handled += [int(each.sequence_number) for each in delivery.records]

    @property
    def wanted(self) -> list[int]:
        """What arrived in time."""
        rows = (each for shelf in self.source.shelves.values() for each in shelf.records)
        return sorted(int(each.sequence_number) for each in rows if (each.arrived or 0) * 1000 < UNTIL)


def side_by_side(works: Sequence[Callable[[], SliceVerdict]]) -> list[SliceVerdict]:
    """What all of them answer."""
    verdicts: list[SliceVerdict] = []
    threads = [threading.Thread(target=lambda work=work: verdicts.append(work())) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return verdicts


def test_a_fleet_reads_a_slice_and_ends() -> None:
    """Without it a slice would have to be watched, and ended by hand."""
    fleet = Fleet()

    def work(name: str) -> Callable[[], SliceVerdict]:
        return lambda: run_slice(fleet.worker(name), fleet.handle, look_seconds=0.05)

    verdicts = side_by_side([work("a-1"), work("b-1")])
    assert [verdict.finished for verdict in verdicts] == [True, True]
    assert sorted(set(fleet.handled)) == fleet.wanted
    assert sum(verdict.records for verdict in verdicts) == len(fleet.handled)
    assert sum(verdict.shards for verdict in verdicts) == 4
    leases = fleet.store.list().leases
    assert {lease.note(NOTE) for lease in leases} == {CUT.note}
    assert all(lease.ended for lease in leases)


def test_a_worker_that_comes_later_finds_the_slice_read() -> None:
    """Without it a worker that was started again would read it anew, or wait for ever."""
    fleet = Fleet()
    assert run_slice(fleet.worker("a-1"), fleet.handle, look_seconds=0.05).finished
    before = list(fleet.handled)
    assert run_slice(fleet.worker("a-2"), fleet.handle, look_seconds=0.05) == SliceVerdict(True, 0, 0, 0)
    assert fleet.handled == before


def test_a_slice_that_was_interrupted_goes_on_where_it_was() -> None:
    """Without it a kill would lose the rest, or begin from the start."""
    fleet = Fleet()

    def ends_soon(delivery: Delivery) -> None:
        fleet.handle(delivery)
        if len(fleet.handled) > 40:
            raise SystemExit(3)

    with pytest.raises(SystemExit):
        run_slice(fleet.worker("a-1"), Handling(ends_soon, checkpoint_seconds=0.0), look_seconds=0.05)
    assert not is_read(fleet.worker("a-1"))
    assert run_slice(fleet.worker("a-2"), fleet.handle, look_seconds=0.05).finished
    assert sorted(set(fleet.handled)) == fleet.wanted
    assert len(fleet.handled) < len(fleet.wanted) + 40


def test_async_handlers_and_dead_letters_count_too() -> None:
    """Without it the verdict would say that nothing was done."""
    fleet = Fleet()

    async def handle(delivery: Delivery) -> None:
        if any(int(each.sequence_number) == 7 for each in delivery.records):
            raise ValueError
        fleet.handle(delivery)

    async def bury(delivery: Delivery, _error: Exception) -> None:
        fleet.handle(delivery)

    verdict = run_slice(fleet.worker("a-1"), Handling(handle, attempts=1, dead_letter=bury), look_seconds=0.05)
    assert (verdict.finished, verdict.records, verdict.letters) == (True, len(fleet.wanted) - 1, 1)
    assert sorted(fleet.handled) == fleet.wanted


def test_a_slice_is_not_read_while_a_child_has_no_lease_or_the_table_does_not_answer() -> None:
    """Without it a worker would end before the children are read, or with a false verdict."""
    fleet, store = Fleet(), FaultyStore()
    ended = Lease("p", hash_range=(0, 9), checkpoint=SHARD_END, notes=((NOTE, CUT.note),))
    for lease in (ended, evolve(ended, key="q", shard="q", hash_range=(10, 19))):
        placed(store, lease)
    config = Config(initial_position=CUT.since)
    worker = Worker(store=CUT.store(store), source=CUT.source(fleet.source), me="a", config=config, clock=Clock())
    assert not is_read(worker)
    for name in ("p.0", "p.1"):
        placed(store, evolve(ended, key=name, shard=name, parents=("p",)))
    assert is_read(worker)
    store.down = True
    assert not is_read(worker)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--until", "now"], "slice: it begins (--from) at TRIM_HORIZON or at a time, not at LATEST"),
        (["--from", "now", "--until", "now-1h"], "slice: it begins (--from) no earlier than it ends (--until)"),
        (["--from", "TRIM_HORIZON", "--until", "later"], "--until: 'later' is not a time such as"),
        (["--from", "TRIM_HORIZON", "--until", "now"], "its table holds leases of another group (s-0)"),
    ],
)
def test_bad_usage_of_a_slice_is_one_sentence(arguments: list[str], says: str) -> None:
    """Without it a typing error would read another slice than meant."""
    store = open_store("memory://not-a-slice")
    if not store.list().leases:
        placed(store, Lease("s-0"))
    source = "kinesis://orders?region=eu-west-1"
    done = CliRunner().invoke(app, [source, "--store", "memory://not-a-slice", "--events", *arguments])
    assert (done.exit_code, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert says in done.stderr
