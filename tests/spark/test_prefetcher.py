"""The prefetcher of one shard reads ahead of Spark, on a clock that the test advances."""

import math
from collections.abc import Sequence
from threading import Condition

import pyarrow as pa  # type: ignore[import-untyped]  # pyarrow ships no types
import pytest
from attrs import evolve
from fake_stream import Stream
from prefetchers import LeaseHolder, SteppedPrefetcher, new_prefetcher, new_read_ahead_state, pace

from leasehold.adapters.sources.protocol import Batch, Record
from leasehold.adapters.spark.available_now import RETENTION_SILENCE_SECONDS
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
    """All readers of a shard share five requests per second (K5)."""
    stream = Stream({"a": ["x"] * records})
    _, prefetcher = new_prefetcher(stream, new_read_ahead_state())
    now = 0.0
    while now < 10.0:
        prefetcher.take_rows(10_000, 1 << 20)
        next_step = prefetcher.step(now)
        assert next_step > now or stream.readings == 0
        now = max(next_step, now)
    assert 40 <= stream.readings <= 45


def test_planner_is_woken_by_rows_and_not_by_empty_responses() -> None:
    wakeups, responses = list[int](), 0

    class Told(Condition):
        def notify_all(self) -> None:
            wakeups.append(responses)
            super().notify_all()

    stream = Stream({"a": ["x"]})
    _, prefetcher = new_prefetcher(stream, evolve(new_read_ahead_state(), changed=Told()))
    for now in range(20):
        prefetcher.step(float(now))
        responses = stream.readings
    assert responses > 10
    assert wakeups[-1] <= 1, "rows came with the first or the second answer, and nothing after them"
    assert len(wakeups) == 2, "once it was opened, and once rows had come"


def test_end_of_a_shard_is_written_only_after_sparks_commit() -> None:
    stream = Stream({"a": ["x"], "b": []}, {"a": ("b",)})
    worker, prefetcher = new_prefetcher(stream, new_read_ahead_state())
    for now in range(5):
        prefetcher.step(float(now))
    chunk = prefetcher.take_rows(10, 1 << 20)
    assert chunk is not None
    assert (chunk.count, chunk.ends) == (1, SHARD_END)
    assert worker.store.get(["a"])[0].checkpoint == TRIM_HORIZON
    prefetcher.commit(SHARD_END)
    assert prefetcher.step(9.0) == math.inf
    assert worker.store.get(["a"])[0].checkpoint == SHARD_END


def test_commit_during_a_checkpoint_is_written_next(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, prefetcher = new_prefetcher(Stream({"a": ["x"] * 20}), new_read_ahead_state())
    for now in range(5):
        prefetcher.step(float(now))
    assert prefetcher.take_rows(20, 1 << 20) is not None
    original_checkpoint = prefetcher.holding.checkpoint

    def checkpoint(position: Position) -> bool:
        prefetcher.commit(Position("20"))
        return original_checkpoint(position)

    monkeypatch.setattr(prefetcher.holding, "checkpoint", checkpoint)
    prefetcher.commit(Position("10"))
    for now in range(5, 10):
        prefetcher.step(float(now))
    assert worker.store.get(["a"])[0].checkpoint == Position("20")


def test_distant_faults_do_not_add_up() -> None:
    """If a read has succeeded since the last error, the waits begin again with the shortest one."""
    stream, waits = Stream({"a": []}), list[float]()
    worker, prefetcher = new_prefetcher(stream, new_read_ahead_state())
    worker.uniform = lambda _least, most: most
    prefetcher = SteppedPrefetcher(worker, prefetcher.holding, new_read_ahead_state())
    for now in range(0, 1000, 20):
        stream.late["a"] = 1 if now % 40 else 0
        next_step = prefetcher.step(float(now))
        waits += [round(next_step - now, 6)] if now % 40 and now > 40 else []
    assert (len(waits), len(set(waits))) == (24, 1)


def test_unreadable_shard_is_released_at_once_and_avoided_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream, exclusions = Stream({"a": ["x"]}, denied={"a"}), list[tuple[object, ...]]()
    worker, prefetcher = new_prefetcher(stream, new_read_ahead_state())
    monkeypatch.setattr(worker, "exclude", lambda *arguments: exclusions.append(arguments))
    monkeypatch.setattr(worker, "hurry", lambda: exclusions.append(("hurry",)))
    assert [prefetcher.step(1.0), prefetcher.step(1.0)] == [1.0, math.inf]
    assert (exclusions, worker.store.get(["a"])[0].owner) == ([("a", EXCLUDED_SECONDS), ("hurry",)], None)


def test_lease_lost_before_its_start_is_stored_is_not_read() -> None:
    """The new owner decides where to begin reading the shard."""
    stream, lease_holder = Stream({"a": ["x"]}), LeaseHolder()
    store, config = MemoryStore(), Config(initial_position=LATEST)
    store.write(CreateLease(Lease("a", checkpoint=LATEST)))  # as other libraries do, without a time
    worker = Worker(
        store=store, source=stream, me="w", config=config, consumer=lease_holder, scheduler=ThreadScheduler(lambda: 0.0)
    )
    next_turn = 0.0
    for _ in range(3):
        next_turn = worker.turn(next_turn)
    prefetcher = SteppedPrefetcher(worker, lease_holder.held[0], new_read_ahead_state())
    assert isinstance(worker.store.write(StealLease(worker.store.get(["a"])[0], "thief")), Done)
    assert prefetcher.step(1.0) == math.inf
    assert (stream.opened, worker.store.get(["a"])[0].checkpoint) == ([], LATEST)


def test_child_is_opened_once_its_parents_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a parent was reset, its child is not read at the same time, so the records of each key stay in order (L12)."""
    stream, parents = Stream({"b": ["x"]}), {"a": Lease("a")}
    read_ahead = new_read_ahead_state()
    worker, prefetcher = new_prefetcher(stream, read_ahead)
    child = SteppedPrefetcher(worker, prefetcher.holding, read_ahead)
    monkeypatch.setattr(prefetcher.holding, "_lease", evolve(prefetcher.holding.lease, parents=("a",)))
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
    batch = pa.RecordBatch.from_pydict({"data": [b"x"]})
    assert concatenate_batches([batch]) is batch
    combined = concatenate_batches([batch, batch])
    assert combined.to_pydict() == {"data": [b"x", b"x"]}


@pytest.mark.parametrize("last", [20, 19, 21])
def test_commit_of_the_last_number_is_written_without_a_read(last: int) -> None:
    """A nightly query that finds nothing new ends. A commit other than that of the last number is not written."""
    stream, committed = Stream({"a": ["x"] * 20}, numbers=True, silent={"a"}), Position(str(last))
    read_ahead = ReadAheadState(
        pace(), Condition(), lambda _holding, _checkpoint: committed, lambda _key: committed, only_now=True
    )
    worker, prefetcher = new_prefetcher(stream, read_ahead)
    for moment in range(4):
        prefetcher.step(float(moment))
    assert worker.store.get(["a"])[0].checkpoint == (committed if last == 20 else TRIM_HORIZON)
    assert (prefetcher.is_idle, stream.readings == 0) == (last > 19, last > 19)
    now = 4.0
    while not prefetcher.is_idle and now < 2 * RETENTION_SILENCE_SECONDS:
        now = prefetcher.step(now)
    assert (last == 19) == (
        RETENTION_SILENCE_SECONDS < now < RETENTION_SILENCE_SECONDS + 5
    )  # Records after 19 may be past retention.


def test_every_read_is_measured() -> None:
    read_ahead, measurements = new_read_ahead_state(), list[tuple[str, int, float | None]]()
    read_ahead.measure = lambda holding, batch: measurements.append((holding.key, batch.count, batch.behind_seconds))
    _, prefetcher = new_prefetcher(Stream({"a": ["x"] * 15}), read_ahead)
    for now in range(4):
        prefetcher.step(float(now))
    assert measurements == [("a", 10, 0.005), ("a", 5, 0.0), ("a", 0, 0.0)]


def test_available_now_query_ends_although_records_keep_arriving() -> None:
    """A query over a busy stream ends at the last record that existed when the query began."""
    stream, read_ahead = (
        Stream({"a": ["x"] * 5000}),
        new_read_ahead_state(),
    )  # Reading all records takes two minutes, and then the query would be a few seconds behind.
    read_ahead.only_now = True
    _, prefetcher = new_prefetcher(stream, read_ahead)
    now = 0.0
    while not prefetcher.is_idle and now < 60.0:
        prefetcher.take_rows(10_000, 1 << 20)
        now = max(prefetcher.step(now), now)
    # The query reads for ten seconds longer than its lag, so it has read all records that existed when it began.
    assert 13.0 < now < 16.0


def test_available_now_query_continues_after_an_empty_first_response() -> None:
    """The service returns an empty response where the shard has a gap."""
    stream, read_ahead = Stream({"a": ["x"] * 20}, numbers=True, silent={"a"}), new_read_ahead_state()
    read_ahead.only_now = True
    _, prefetcher = new_prefetcher(stream, read_ahead)
    for now in range(1000, 1005):
        prefetcher.step(float(now))
    assert (stream.readings > 0, prefetcher.has_caught_up) == (True, False)
    stream.silent.clear()
    for now in range(1005, 1010):
        prefetcher.step(float(now))
    assert (prefetcher.buffered_rows_and_bytes[0], prefetcher.has_caught_up) == (20, True)


def test_shard_of_a_blocked_sink_keeps_its_weight() -> None:
    """A blocked query keeps the measured weight of its shards, so that it is not given more shards."""
    read_ahead = new_read_ahead_state()
    read_ahead.held_count = 1000  # ten rows fill this shard's part of the buffer
    _, prefetcher = new_prefetcher(Stream({"a": ["x" * 1000] * 1000}), read_ahead)
    for now in range(65):
        prefetcher.take_rows(10, 1 << 20)
        prefetcher.step(float(now))
    weight_before = prefetcher.holding.throughput.average(65.0)
    for now in range(65, 300):
        prefetcher.step(float(now))
    assert weight_before is not None
    assert weight_before > 5
    assert prefetcher.holding.throughput.average(300.0) == weight_before


@pytest.mark.parametrize(("rows", "size"), [(100, 1 << 20), (10_000, 100)], ids=["rows", "bytes"])
def test_every_shard_is_read_however_many_share_the_buffer(rows: int, size: int) -> None:
    read_ahead = new_read_ahead_state()
    read_ahead.pace, read_ahead.held_count = evolve(read_ahead.pace, rows=rows, bytes=size), 101
    _, prefetcher = new_prefetcher(Stream({"a": ["x"] * 30}), read_ahead)
    rows_taken = 0
    for now in range(9):
        prefetcher.step(float(now))
        chunk = prefetcher.take_rows(10_000, 1 << 20)
        rows_taken += chunk.count if chunk is not None else 0
    assert rows_taken == 30


def test_lease_expired_by_our_own_clock_is_neither_read_nor_planned() -> None:
    """After the process was suspended, another worker may have read the records of the expired lease."""
    now = [0.0]
    stream = Stream({"a": ["x"] * 30})
    worker, prefetcher = new_prefetcher(stream, new_read_ahead_state(), lambda: now[0])
    for _ in range(3):
        prefetcher.step(now[0])
    now[0] = worker.config.lease_seconds + 1
    reads_before = stream.readings
    prefetcher.step(now[0])
    assert (prefetcher.range_start, stream.readings) == (None, reads_before)
    worker.renew(now[0])
    prefetcher.step(now[0])
    assert prefetcher.range_start is not None
    assert stream.readings == reads_before + 1


def test_fault_after_a_read_loses_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a metric fails or memory runs out, the records of the page are still delivered."""
    read_ahead, faults = new_read_ahead_state(), [MemoryError("no room"), ArithmeticError("no such metric")]
    original_rows = read_ahead.pace.columns.rows

    def rows(lease: Lease, records: Sequence[Record]) -> pa.RecordBatch:
        if len(faults) > 1:
            raise faults.pop(0)
        return original_rows(lease, records)

    def measure(_holding: Holding, _batch: Batch) -> None:
        while faults:
            raise faults.pop()

    read_ahead.pace, read_ahead.measure = (
        evolve(read_ahead.pace, columns=evolve(read_ahead.pace.columns, rows=rows)),
        measure,
    )
    _, prefetcher = new_prefetcher(Stream({"a": [f"x{index}" for index in range(15)]}), read_ahead)
    raised, counted_sizes = list[str](), list[int]()
    monkeypatch.setattr(prefetcher.holding.throughput, "add", lambda size, _now: counted_sizes.append(size))
    for now in range(6):
        try:
            prefetcher.step(float(now))
        except (MemoryError, ArithmeticError) as fault:
            raised.append(str(fault))
    chunk = prefetcher.take_rows(100, 1 << 20)
    assert (raised, counted_sizes[:2]) == (
        ["no room", "no such metric"],
        [20, 15],
    )  # kept records are counted even if they are not measured
    assert chunk is not None
    assert chunk.rows["sequenceNumber"].to_pylist() == [str(index) for index in range(1, 16)]


def test_commit_of_an_earlier_run_is_written_after_a_read() -> None:
    """A lease gets the numbers of an earlier run only after a read has shown that the numbers belong to this stream."""
    stream = Stream({"a": ["x"] * 30}, silent={"a"})
    read_ahead = ReadAheadState(
        pace(), Condition(), lambda _holding, _checkpoint: Position("20"), lambda _key: Position("20")
    )
    worker, prefetcher = new_prefetcher(stream, read_ahead)
    for now in range(5):
        prefetcher.step(float(now))
    assert stream.readings > 0
    assert worker.store.get(["a"])[0].checkpoint == TRIM_HORIZON
    stream.silent.clear()
    prefetcher.step(9.0)
    prefetcher.step(10.0)
    assert worker.store.get(["a"])[0].checkpoint == Position("20")


def opened_prefetcher(stream: Stream, read_ahead: ReadAheadState) -> tuple[Worker, SteppedPrefetcher]:
    """Return a prefetcher that has read the shard."""
    worker, prefetcher = new_prefetcher(stream, read_ahead)
    for now in range(3):
        prefetcher.step(float(now))
    assert prefetcher.range_start is not None
    return worker, prefetcher


def test_rows_of_a_lost_lease_are_not_planned() -> None:
    _, prefetcher = opened_prefetcher(Stream({"a": ["x"]}), new_read_ahead_state())
    prefetcher.holding.lost.set()
    assert prefetcher.range_start is None


def test_each_range_begins_where_the_previous_one_ended() -> None:
    _, prefetcher = opened_prefetcher(Stream({"a": ["x"] * 15}), new_read_ahead_state())
    for begins in (TRIM_HORIZON, Position("5"), Position("10"), Position("15")):
        assert prefetcher.range_start is not None
        assert prefetcher.range_start.begins == begins
        prefetcher.take_rows(5, 1 << 20)


def test_batch_waits_only_for_a_shard_that_reads_on() -> None:
    """After a fault, or once the buffer is full, no rows are on their way."""
    read_ahead = new_read_ahead_state()
    _, prefetcher = opened_prefetcher(Stream({"a": ["x"]}), read_ahead)
    prefetcher.keep(Batch((Record(b"x", "2"),), Position("2"), behind_seconds=1.0, wait_seconds=0.0))
    was_behind = [prefetcher.is_behind]
    read_ahead.pace = evolve(read_ahead.pace, rows=2)
    was_behind.append(prefetcher.is_behind)
    read_ahead.pace = pace()
    was_behind.append(prefetcher.is_behind)
    prefetcher.step_failed()
    assert [*was_behind, prefetcher.is_behind] == [True, False, True, False]


def test_only_rows_that_were_taken_delay_a_release() -> None:
    """A query that is ending commits no more, so its leases do not wait."""
    read_ahead = new_read_ahead_state()
    _, prefetcher = opened_prefetcher(Stream({"a": ["x"] * 15}), read_ahead)
    assert not prefetcher.poll(3.0).awaits_commit
    prefetcher.take_rows(5, 1 << 20)
    assert prefetcher.poll(3.0).awaits_commit
    read_ahead.ending = True
    assert not prefetcher.poll(3.0).awaits_commit


@pytest.mark.parametrize(
    ("committed", "checkpoint"),
    [(Position("19", 3), Position("19", 3)), (Position("20", 1), Position("20", 1)), (Position("20", 2), TRIM_HORIZON)],
)
def test_commit_after_the_start_is_not_written_before_its_rows_are_read(
    committed: Position, checkpoint: Position
) -> None:
    """A position that lies after the start belongs to records that this run reads and commits again."""
    read_ahead = ReadAheadState(
        pace(), Condition(), lambda _holding, _checkpoint: Position("20", 1), lambda _key: committed
    )
    worker, prefetcher = new_prefetcher(Stream({"a": ["x"] * 30}), read_ahead)
    for now in range(5):
        prefetcher.step(float(now))
    assert worker.store.get(["a"])[0].checkpoint == checkpoint


def test_shard_opened_late_is_not_taken_for_past_retention() -> None:
    """The minute without records begins when the shard is opened, not with the process."""
    stream = Stream({"a": ["x"] * 3}, silent={"a"})
    _, prefetcher = new_prefetcher(stream, evolve(new_read_ahead_state(), only_now=True), lambda: 1000.0)
    for now in range(1000, 1005):
        prefetcher.step(float(now))
    assert prefetcher.is_opened
    assert not prefetcher.has_caught_up


def test_rows_of_a_lease_to_be_handed_off_are_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, the hand-off would wait for one batch after another."""
    _, prefetcher = opened_prefetcher(Stream({"a": ["x"]}), new_read_ahead_state())
    monkeypatch.setattr(Holding, "releasing", True)
    assert prefetcher.range_start is None


def test_position_without_rows_is_planned_and_committed() -> None:
    """If all records of a page were dropped, the position after them is still committed."""
    _, prefetcher = opened_prefetcher(Stream({"a": []}), new_read_ahead_state())
    prefetcher.keep(Batch((), Position("9"), behind_seconds=0.0, wait_seconds=0.0))
    assert prefetcher.buffered_rows_and_bytes == (1, 0)
    chunk = prefetcher.take_rows(1, 1)
    assert chunk is not None
    assert (chunk.count, chunk.ends) == (0, Position("9"))
    assert prefetcher.buffered_rows_and_bytes == (0, 0)


def test_shard_read_to_its_target_is_idle_once_its_commit_is_written() -> None:
    """An available-now query waits for the last commit, but for no rows after the target."""
    stream = Stream({"a": ["x"] * 5})
    _, prefetcher = new_prefetcher(stream, evolve(new_read_ahead_state(), only_now=True))
    for now in range(3):
        prefetcher.step(float(now))
    prefetcher.keep(Batch((), None, behind_seconds=5.0, wait_seconds=0.0))
    assert prefetcher.has_caught_up
    assert not prefetcher.is_behind
    assert not prefetcher.is_idle
    assert prefetcher.take_rows(5, 1 << 20) is not None
    prefetcher.commit(Position("5"))
    assert not prefetcher.is_idle
    prefetcher.step(9.0)
    assert prefetcher.is_idle
