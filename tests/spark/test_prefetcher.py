"""One shard read ahead, on a clock that the test moves."""

import math
from collections.abc import Sequence
from threading import Condition

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
import pytest
from attrs import evolve
from fake_stream import Stream
from prefetchers import LeaseHolder, SteppedFeed, new_ahead, new_feed, pace

from leasehold.adapters.sources.protocol import Batch, Record
from leasehold.adapters.spark.available_now import SILENT_SECONDS
from leasehold.adapters.spark.prefetcher import EXCLUDED_SECONDS, ReadAheadState
from leasehold.adapters.spark.row_buffer import concatenate_batches
from leasehold.adapters.spark.rows import ArrowBatch
from leasehold.adapters.threads import ThreadScheduler
from leasehold.adapters.worker.holding import Holding
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.config import Config
from leasehold.balancer.model import LATEST, SHARD_END, TRIM_HORIZON, Lease, Position
from leasehold.stores.embedded.memory import MemoryStore
from leasehold.stores.protocol import Done
from leasehold.stores.writes import CreateLease, StealLease


@pytest.mark.parametrize("records", [0, 100_000])
def test_shard_is_read_at_most_four_and_a_half_times_a_second(records: int) -> None:
    """All readers of a shard share five requests a second (K5)."""
    stream = Stream({"a": ["x"] * records})
    _, feed = new_feed(stream, new_ahead())
    now = 0.0
    while now < 10.0:
        feed.take_rows(10_000, 1 << 20)
        due = feed.step(now)
        assert due > now or stream.readings == 0
        now = max(due, now)
    assert 40 <= stream.readings <= 45


def test_planner_is_woken_by_rows_and_not_by_empty_responses() -> None:
    woken, answers = list[int](), 0

    class Told(Condition):
        def notify_all(self) -> None:
            woken.append(answers)
            super().notify_all()

    stream = Stream({"a": ["x"]})
    _, feed = new_feed(stream, evolve(new_ahead(), changed=Told()))
    for now in range(20):
        feed.step(float(now))
        answers = stream.readings
    assert answers > 10
    assert woken[-1] <= 1, "rows came with the first or the second answer, and nothing after them"
    assert len(woken) == 2, "once it was opened, and once rows had come"


def test_end_of_a_shard_is_written_only_after_sparks_commit() -> None:
    stream = Stream({"a": ["x"], "b": []}, {"a": ("b",)})
    worker, feed = new_feed(stream, new_ahead())
    for now in range(5):
        feed.step(float(now))
    chunk = feed.take_rows(10, 1 << 20)
    assert chunk is not None
    assert (chunk.count, chunk.ends) == (1, SHARD_END)
    assert worker.store.get(["a"])[0].checkpoint == TRIM_HORIZON
    feed.commit(SHARD_END)
    assert feed.step(9.0) == math.inf
    assert worker.store.get(["a"])[0].checkpoint == SHARD_END


def test_distant_faults_do_not_add_up() -> None:
    """An error starts with the shortest wait again if reads succeeded since the last one."""
    stream, waits = Stream({"a": []}), list[float]()
    worker, feed = new_feed(stream, new_ahead())
    worker.uniform = lambda _least, most: most
    feed = SteppedFeed(worker, feed.holding, new_ahead())
    for now in range(0, 1000, 20):
        stream.late["a"] = 1 if now % 40 else 0
        due = feed.step(float(now))
        waits += [round(due - now, 6)] if now % 40 and now > 40 else []
    assert (len(waits), len(set(waits))) == (24, 1)


def test_unreadable_shard_is_released_at_once_and_avoided_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream, exclusions = Stream({"a": ["x"]}, denied={"a"}), list[tuple[object, ...]]()
    worker, feed = new_feed(stream, new_ahead())
    monkeypatch.setattr(worker, "exclude", lambda *arguments: exclusions.append(arguments))
    monkeypatch.setattr(worker, "hurry", lambda: exclusions.append(("hurry",)))
    assert [feed.step(1.0), feed.step(1.0)] == [1.0, math.inf]
    assert (exclusions, worker.store.get(["a"])[0].owner) == ([("a", EXCLUDED_SECONDS), ("hurry",)], None)


def test_lease_lost_before_its_start_is_stored_is_not_read() -> None:
    """The new owner decides where the shard begins."""
    stream, hands = Stream({"a": ["x"]}), LeaseHolder()
    store, config = MemoryStore(), Config(initial_position=LATEST)
    store.write(CreateLease(Lease("a", checkpoint=LATEST)))  # as other libraries do, which do not say when that was
    worker = Worker(
        store=store, source=stream, me="w", config=config, consumer=hands, scheduler=ThreadScheduler(lambda: 0.0)
    )
    due = 0.0
    for _ in range(3):
        due = worker.turn(due)
    feed = SteppedFeed(worker, hands.held[0], new_ahead())
    assert isinstance(worker.store.write(StealLease(worker.store.get(["a"])[0], "thief")), Done)
    assert feed.step(1.0) == math.inf
    assert (stream.opened, worker.store.get(["a"])[0].checkpoint) == ([], LATEST)


def test_child_is_opened_once_its_parents_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child whose parent was reset is not read next to it, so the order of its keys is kept (L12)."""
    stream, parents = Stream({"b": ["x"]}), {"a": Lease("a")}
    ahead = new_ahead()
    worker, feed = new_feed(stream, ahead)
    child = SteppedFeed(worker, feed.holding, ahead)
    monkeypatch.setattr(feed.holding, "_lease", evolve(feed.holding.lease, parents=("a",)))
    monkeypatch.setattr(worker, "parents", lambda _lease: parents)
    waits = [child.step(0.0) for _ in range(5)]
    assert (waits, stream.opened, child.range_start) == ([1.0, 2.0, 4.0, 5.0, 5.0], [], None)
    parents["a"] = Lease("a", checkpoint=SHARD_END)
    child.step(0.0)
    assert [shard for shard, _ in stream.opened] == ["b"]


def test_columns_without_a_time_have_no_arrival_time() -> None:
    rows = pa.RecordBatch.from_pydict({"data": [b"x"]})
    batch = ArrowBatch((), Position("1"), 0.0, 0.0, rows=rows)
    assert (batch.count, batch.last_arrival_time) == (1, None)


def test_single_batch_is_not_copied() -> None:
    one = pa.RecordBatch.from_pydict({"data": [b"x"]})
    assert concatenate_batches([one]) is one
    both = concatenate_batches([one, one])
    assert both.to_pydict() == {"data": [b"x", b"x"]}


@pytest.mark.parametrize("last", [20, 19, 21])
def test_commit_of_the_last_number_is_written_without_a_read(last: int) -> None:
    """A nightly query that finds nothing new ends, but a commit that does not match the last number is not written."""
    stream, committed = Stream({"a": ["x"] * 20}, numbers=True, silent={"a"}), Position(str(last))
    ahead = ReadAheadState(
        pace(), Condition(), lambda _holding, _checkpoint: committed, lambda _key: committed, only_now=True
    )
    worker, feed = new_feed(stream, ahead)
    for moment in range(4):
        feed.step(float(moment))
    assert worker.store.get(["a"])[0].checkpoint == (committed if last == 20 else TRIM_HORIZON)
    assert (feed.is_idle, stream.readings == 0) == (last > 19, last > 19)
    now = 4.0
    while not feed.is_idle and now < 2 * SILENT_SECONDS:
        now = feed.step(now)
    assert (last == 19) == (SILENT_SECONDS < now < SILENT_SECONDS + 5)  # records after 19 may be past retention


def test_every_read_is_measured() -> None:
    ahead, measurements = new_ahead(), list[tuple[str, int, float | None]]()
    ahead.measure = lambda holding, batch: measurements.append((holding.key, batch.count, batch.behind_seconds))
    _, feed = new_feed(Stream({"a": ["x"] * 15}), ahead)
    for now in range(4):
        feed.step(float(now))
    assert measurements == [("a", 10, 0.005), ("a", 5, 0.0), ("a", 0, 0.0)]


def test_available_now_query_ends_although_records_keep_arriving() -> None:
    """A query over a busy stream ends at what was there when it began."""
    stream, ahead = Stream({"a": ["x"] * 5000}), new_ahead()  # read in two minutes, and a few seconds behind by then
    ahead.only_now = True
    _, feed = new_feed(stream, ahead)
    now = 0.0
    while not feed.is_idle and now < 60.0:
        feed.take_rows(10_000, 1 << 20)
        now = max(feed.step(now), now)
    # It reads for ten seconds longer than its lag, so that it has read what was there when it began.
    assert 13.0 < now < 16.0


def test_shard_of_a_blocked_sink_keeps_its_weight() -> None:
    """A blocked query keeps its weight, so it is not given more shards."""
    ahead = new_ahead()
    ahead.held_count = 1000  # ten rows fill its part of the buffer
    _, feed = new_feed(Stream({"a": ["x" * 1000] * 1000}), ahead)
    for now in range(65):
        feed.take_rows(10, 1 << 20)
        feed.step(float(now))
    before = feed.holding.throughput.average(65.0)
    for now in range(65, 300):
        feed.step(float(now))
    assert before is not None
    assert before > 5
    assert feed.holding.throughput.average(300.0) == before


@pytest.mark.parametrize(("rows", "size"), [(100, 1 << 20), (10_000, 100)], ids=["rows", "bytes"])
def test_every_shard_is_read_however_many_share_the_buffer(rows: int, size: int) -> None:
    ahead = new_ahead()
    ahead.pace, ahead.held_count = evolve(ahead.pace, rows=rows, bytes=size), 101
    _, feed = new_feed(Stream({"a": ["x"] * 30}), ahead)
    rows_taken = 0
    for now in range(9):
        feed.step(float(now))
        chunk = feed.take_rows(10_000, 1 << 20)
        rows_taken += chunk.count if chunk is not None else 0
    assert rows_taken == 30


def test_lease_expired_by_our_own_clock_is_neither_read_nor_planned() -> None:
    """After a suspension, another worker may have read those records."""
    now = [0.0]
    stream = Stream({"a": ["x"] * 30})
    worker, feed = new_feed(stream, new_ahead(), lambda: now[0])
    for _ in range(3):
        feed.step(now[0])
    now[0] = worker.config.lease_seconds + 1
    before = stream.readings
    feed.step(now[0])
    assert (feed.range_start, stream.readings) == (None, before)
    worker.renew(now[0])
    feed.step(now[0])
    assert feed.range_start is not None
    assert stream.readings == before + 1


def test_fault_after_a_read_loses_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a metric fails or memory runs out, the records of the page are still delivered."""
    ahead, faults = new_ahead(), [MemoryError("no room"), ArithmeticError("no such metric")]
    whole = ahead.pace.columns.rows

    def rows(lease: Lease, records: Sequence[Record]) -> pa.RecordBatch:
        if len(faults) > 1:
            raise faults.pop(0)
        return whole(lease, records)

    def measure(_holding: Holding, _batch: Batch) -> None:
        while faults:
            raise faults.pop()

    ahead.pace, ahead.measure = evolve(ahead.pace, columns=evolve(ahead.pace.columns, rows=rows)), measure
    _, feed = new_feed(Stream({"a": [f"x{place}" for place in range(15)]}), ahead)
    raised, counted = list[str](), list[int]()
    monkeypatch.setattr(feed.holding.throughput, "add", lambda size, _now: counted.append(size))
    for now in range(6):
        try:
            feed.step(float(now))
        except (MemoryError, ArithmeticError) as fault:
            raised.append(str(fault))
    chunk = feed.take_rows(100, 1 << 20)
    assert (raised, counted[:2]) == (["no room", "no such metric"], [20, 15])  # kept is counted even if not measured
    assert chunk is not None
    assert chunk.rows["sequenceNumber"].to_pylist() == [str(place) for place in range(1, 16)]


def test_commit_of_an_earlier_run_is_written_after_a_read() -> None:
    """A lease gets the numbers of an earlier run only after a read showed that they belong to this stream."""
    stream = Stream({"a": ["x"] * 30}, silent={"a"})
    ahead = ReadAheadState(
        pace(), Condition(), lambda _holding, _checkpoint: Position("20"), lambda _key: Position("20")
    )
    worker, feed = new_feed(stream, ahead)
    for now in range(5):
        feed.step(float(now))
    assert stream.readings > 0
    assert worker.store.get(["a"])[0].checkpoint == TRIM_HORIZON
    stream.silent.clear()
    feed.step(9.0)
    feed.step(10.0)
    assert worker.store.get(["a"])[0].checkpoint == Position("20")
