"""A batch query over a slice of a stream puts each record in exactly one part, and each part ends by itself."""

from functools import partial
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import cast

import pyarrow as pa  # type: ignore[import-untyped]  # pyarrow ships no types
import pytest
from attrs import define, field
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.datasource import InputPartition

from leasehold.adapters.consumer.handling import Delivery
from leasehold.adapters.consumer.slices import ARRIVAL_MARGIN_SECONDS, NOTE, Slice, run_slice
from leasehold.adapters.sources.call_timeouts import Backoff
from leasehold.adapters.sources.protocol import SETTLE_SECONDS, Batch, Reader, Record, SettledShard
from leasehold.adapters.spark import batch as planning
from leasehold.adapters.spark import batch as reader
from leasehold.adapters.spark.batch import (
    PARTS_PER_SHARD_MAX,
    PartReader,
    ReadBounds,
    SlicedReader,
    plan_parts,
    split_range,
    split_times,
)
from leasehold.adapters.spark.kinesis.options import KINESIS_SOURCE
from leasehold.adapters.spark.kinesis.rows import make_columns
from leasehold.adapters.spark.lease_loop import STALL_SECONDS
from leasehold.adapters.spark.leased_source import SlicedQuery
from leasehold.adapters.spark.options import ALL_SOURCES, OptionReader, parse_lease_options
from leasehold.adapters.spark.rows import SourceColumns, SourceSpec
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.config import Config
from leasehold.balancer.model import LATEST, SHARD_END, TRIM_HORIZON, Lease, Position, at_timestamp
from leasehold.errors import SourceUnavailable
from leasehold.stores.urls import open_store
from leasehold_lab.simulator.world.world import ListReader, ListSource, ShardRecords, create_shard

SINCE, UNTIL, NOW, REPORTED_AGO_MS = 1_000_000, 1_060_000, 1_120_000, 10_000

Times = list[float]


@define
class Stream(ListSource):
    """A stream whose records arrived at given times.

    Reading from a time begins at the first record that arrived then or later.

    tells_last   whether the stream knows its last sequence number, as a hub does, or only its time
    unreachable  how many openings fail
    """

    now: float = NOW / 1000
    tells_last: bool = False
    unreachable: int = 0

    def put(self, name: str, times: Times, size: int = 3, *, ended: bool = False) -> None:
        """Add a shard with a record for each of these times, in seconds after `SINCE`."""
        rows = [
            Record(f"{name}-{number}".encode(), str(number), arrived=SINCE / 1000 + seconds)
            for number, seconds in enumerate(times, 1)
        ]
        self.listed.append(create_shard(name, 0, 9, open=not ended))
        self.shard_logs[name] = ShardRecords(rows, size=size, ended=ended, wait_seconds=0)

    def settled(self, lease: Lease, until: float) -> SettledShard | None:
        """Return the end as a service does, by its clock alone or by its last record."""
        if self.now < until + SETTLE_SECONDS:
            return None
        rows = self.shard_logs[lease.shard].records
        if not self.tells_last:
            return SettledShard()
        return SettledShard(rows[-1].position, rows[-1].arrived) if rows else SettledShard(TRIM_HORIZON)

    def latest(self, lease: Lease) -> Position:  # noqa: ARG002  one clock
        """Return the present time, as the service reported it a while ago."""
        return at_timestamp(int(self.now * 1000) - REPORTED_AGO_MS)

    def open(self, lease: Lease, start: Position) -> Reader:
        """Open a reader just after the record, or at the time."""
        self.unreachable -= 1
        if self.unreachable >= 0:
            raise SourceUnavailable("not now")
        reader = cast("ListReader", super().open(lease, start))
        if start.sequence == "AT_TIMESTAMP":
            rows = self.shard_logs[lease.shard].records
            reader.at = next(
                (index for index, record in enumerate(rows) if (record.arrived or 0) >= start.sub / 1000), len(rows)
            )
        return reader


@define
class FakeSource:
    """A source of a batch query, over a stream."""

    stream: Stream = field(factory=Stream)
    columns: SourceColumns = field(factory=lambda: make_columns("fake"))
    pause_seconds: float = 0.0

    def open(self) -> Stream:
        return self.stream

    def open_for_lookup(self) -> Stream:
        return self.stream


def rows_in(batches: list[pa.RecordBatch]) -> list[str]:
    return [value.decode() for batch in batches for value in batch["data"].to_pylist()]


def batch(fake_source: FakeSource, since: Position | None, until: Position | None, tasks: int) -> list[list[str]]:
    """Return the rows of each task."""
    sliced_reader = SlicedReader(fake_source, ReadBounds(since, until, tasks, "kinesis"), cores=1)
    parts = sliced_reader.partitions()
    rows = [rows_in(list(sliced_reader.read(part))) for part in parts]
    assert rows == [
        rows_in(list(sliced_reader.read(part))) for part in parts
    ]  # A task that is run again must get the same rows.
    return rows


def in_time(stream: Stream, since: int, until: int) -> list[str]:
    rows = (record for shard_log in stream.shard_logs.values() for record in shard_log.records)
    return sorted(record.data.decode() for record in rows if since / 1000 <= (record.arrived or 0) < until / 1000)


positions = st.builds(lambda number, sub: Position(str(number), sub), st.integers(1, 30), st.integers(0, 2))


@given(positions | st.just(TRIM_HORIZON), st.lists(positions), positions | st.none(), positions)
def test_parts_follow_one_another_without_a_gap(
    begins: Position, marks: list[Position], ends: Position | None, record: Position
) -> None:
    """Each record belongs to exactly one task."""
    parts = split_range(begins, marks, ends)
    last = (ends or SHARD_END).order
    parts_with_record = [part for part in parts if part[0].order < record.order <= (part[1] or SHARD_END).order]
    assert len(parts_with_record) == (begins.order < record.order <= last)
    assert {part[0] for part in parts} - {begins} <= set(marks)


def test_time_is_cut_into_equal_parts() -> None:
    assert [split_times(0, 100, parts) for parts in (1, 2, 4)] == [[], [50], [25, 50, 75]]


rising = st.lists(st.tuples(st.floats(-100, 200), st.floats(0, ARRIVAL_MARGIN_SECONDS / 2)), max_size=25).map(
    lambda pairs: [first + more for first, more in sorted(pairs)]
)
ends = st.sampled_from([at_timestamp(UNTIL), LATEST, None])


@given(st.lists(rising, min_size=1, max_size=3), st.integers(1, 12), st.integers(1, 9), st.booleans(), ends)
def test_batch_has_each_record_of_its_time_once(
    shards: list[Times], tasks: int, size: int, tells_last: bool, until: Position | None
) -> None:
    fake_source = FakeSource(Stream(tells_last=tells_last))
    for number, times in enumerate(shards):
        fake_source.stream.put(f"s{number}", times, size, ended=not number)
    for since in (at_timestamp(SINCE), None):
        rows_by_task = batch(fake_source, since, until, tasks)
        since_ms = 0 if since is None else SINCE
        expected = in_time(fake_source.stream, since_ms, UNTIL if until == at_timestamp(UNTIL) else 2**53)
        if not tells_last and until != at_timestamp(UNTIL):
            expected = in_time(fake_source.stream, since_ms, NOW - REPORTED_AGO_MS + 1000)
        assert sorted(row for rows in rows_by_task for row in rows) == expected


@given(st.lists(st.floats(-100, 200), max_size=25), st.integers(2, 12), st.integers(1, 9), st.booleans())
def test_arrival_times_cause_neither_overlaps_nor_gaps(times: Times, tasks: int, size: int, ended: bool) -> None:
    """Even if the clocks of a service differ widely, the parts repeat no row and omit none."""
    fake_source = FakeSource()
    fake_source.stream.put("s", times, size, ended=ended)
    rows_of_one_task = batch(fake_source, None, at_timestamp(UNTIL), 1)
    parts = [row for rows in batch(fake_source, None, at_timestamp(UNTIL), tasks) for row in rows]
    assert len(parts) == len(set(parts))
    assert set(parts) <= set(in_time(fake_source.stream, 0, UNTIL))
    # One task stops at a record that came far too late, but other parts may contain records after it.
    assert {row for rows in rows_of_one_task for row in rows} - set(parts) <= _rows_after_first_late(fake_source.stream)


def _rows_after_first_late(stream: Stream) -> set[str]:
    rows = stream.shard_logs["s"].records
    first_late_index = next(
        (index for index, record in enumerate(rows) if (record.arrived or 0) >= UNTIL / 1000 + ARRIVAL_MARGIN_SECONDS),
        len(rows),
    )
    return {record.data.decode() for record in rows[first_late_index:]}


class StreamSplitMeanwhile(Stream):
    """A stream that gets another shard while a batch waits for the end of its slice."""

    def settled(self, lease: Lease, until: float) -> SettledShard | None:
        """Add the shard, and return the end."""
        if len(self.listed) == 1:
            self.put("b", [2.0])
        return super().settled(lease, until)


def test_batch_includes_shards_that_appear_before_its_end() -> None:
    fake_source = FakeSource(StreamSplitMeanwhile())
    fake_source.stream.put("a", [1.0])
    assert sorted(batch(fake_source, None, at_timestamp(UNTIL), 1)) == [["a-1"], ["b-1"]]


def test_only_few_shards_are_cut_into_parts() -> None:
    """If there are few shards, they are cut so that all cores are busy.

    The shards of a large stream are not divided into parts, so no requests are spent on finding positions.
    """
    fake_source = FakeSource()
    fake_source.stream.put("a", [*range(60)])
    fake_source.stream.put("b", [*range(60)])
    counts = {
        tasks: len(plan_parts(fake_source, ReadBounds(None, at_timestamp(UNTIL), tasks, "kinesis"), tasks))
        for tasks in range(1, 4)
    }
    assert counts == {1: 2, 2: 2, 3: 4}
    assert (
        len(plan_parts(fake_source, ReadBounds(None, at_timestamp(UNTIL), 0, "kinesis"), 99)) == 2 * PARTS_PER_SHARD_MAX
    )
    fake_source.stream.opened.clear()
    parts = plan_parts(fake_source, ReadBounds(None, None, 0, "kinesis"), 2)
    assert (fake_source.stream.opened, [part.shard for part in parts]) == ([], ["a", "b"])
    assert [len(rows) for rows in batch(fake_source, None, at_timestamp(UNTIL), 8)] == [16, 16, 15, 15, 15, 15, 14, 14]


def test_readers_of_one_shard_share_its_request_limit() -> None:
    fake_source = FakeSource(pause_seconds=0.25)
    fake_source.stream.put("a", [*range(60)])
    assert {
        part.pause_seconds for part in plan_parts(fake_source, ReadBounds(None, at_timestamp(UNTIL), 0, "kinesis"), 4)
    } == {1.0}


def test_stream_without_shards_or_records_is_an_empty_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_source = FakeSource()
    assert batch(fake_source, None, None, 4) == []
    fake_source.stream.put("a", [])
    assert batch(fake_source, None, None, 4) == [[]]
    fake_source.stream.tells_last = True
    assert batch(fake_source, None, None, 4) == []
    monkeypatch.setattr(planning, "CLOCK_SKEW_SECONDS", 0.0)
    assert batch(fake_source, at_timestamp(2**52), None, 4) == []
    sliced_reader = SlicedReader(fake_source, ReadBounds(None, None, 1, "kinesis"), cores=1)
    assert list(sliced_reader.read(InputPartition(None))) == []


def test_part_resumes_once_its_source_responds() -> None:
    fake_source = FakeSource()
    fake_source.stream.put("a", [*range(9)])
    sliced_reader = SlicedReader(fake_source, ReadBounds(None, at_timestamp(UNTIL), 1, "kinesis"), cores=1)
    (part,) = sliced_reader.partitions()
    fake_source.stream.unreachable = 1
    assert rows_in(list(sliced_reader.read(part))) == in_time(fake_source.stream, 0, UNTIL)


def test_part_without_any_response_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_source = FakeSource()
    fake_source.stream.put("a", [1.0])
    sliced_reader = SlicedReader(fake_source, ReadBounds(None, at_timestamp(UNTIL), 1, "kinesis"), cores=1)
    (part,) = sliced_reader.partitions()
    monkeypatch.setattr(reader, "STALL_SECONDS", -1.0)
    fake_source.stream.unreachable = 1
    with pytest.raises(TimeoutError, match="shard a: reading it made no progress"):
        list(sliced_reader.read(part))


def test_end_in_the_future_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch query does not wait for its end, because it does not see shards that a reshard adds in the meantime."""
    fake_source = FakeSource()
    fake_source.stream.put("a", [1.0])
    monkeypatch.setattr(planning, "CLOCK_SKEW_SECONDS", 0.0)
    sliced_reader = SlicedReader(fake_source, ReadBounds(None, at_timestamp(NOW + 60_000), 1, "kinesis"), cores=1)
    with pytest.raises(ValueError, match=r"^option kinesis\.endingPosition: it lies in the future; use readStream"):
        sliced_reader.partitions()


@pytest.mark.parametrize(
    ("since", "until", "message"),
    [
        (
            at_timestamp(5),
            at_timestamp(5),
            "option kinesis.endingPosition: it is not later than kinesis.startingPosition",
        ),
        (LATEST, at_timestamp(5), "option kinesis.startingPosition: a batch, or a query with an ending position, must"),
    ],
)
def test_empty_bounds_are_rejected(since: Position, until: Position, message: str) -> None:
    with pytest.raises(ValueError, match="option") as exc_info:
        ReadBounds(since, until, 0, "kinesis")
    assert str(exc_info.value).startswith(message)


def test_batch_starting_at_the_tip_is_rejected() -> None:
    sliced_reader = SlicedReader(FakeSource(), ReadBounds(LATEST, None, 0, "kinesis"), cores=1)
    with pytest.raises(ValueError, match=r"must begin at the oldest record or at a time, not at LATEST$"):
        sliced_reader.partitions()


def test_slice_query_requires_an_end_time() -> None:
    """The end of a streaming query must be a time, because the latest record differs between the workers of a group."""
    with pytest.raises(
        ValueError, match=r"^option eventhubs\.endingPosition: a query needs a time here, because LATEST"
    ):
        ReadBounds(None, LATEST, 0, "eventhubs").make_query_slice()
    assert ReadBounds(LATEST, None, 0, "eventhubs").make_query_slice() is None
    assert ReadBounds(None, None, 0, "kinesis").find_initial_position() == {"initial_position": "LATEST"}
    assert ReadBounds(None, at_timestamp(5), 0, "kinesis").find_initial_position() == {
        "initial_position": "TRIM_HORIZON"
    }


def query_of(fake_source: FakeSource, path: Path, time_slice: Slice, start: str = "AT_TIMESTAMP") -> SlicedQuery:
    """Return a query over the slice that has its leases in this file."""
    source_spec = SourceSpec(
        lambda: fake_source.stream, fake_source.columns, 0.01, 2**53, rereadable=True, stream="kinesis://s"
    )
    settings = OptionReader({"lease.durationMs": "2000"}, ALL_SOURCES, KINESIS_SOURCE)
    position = {"initial_position": start, "timestamp_ms": time_slice.since_ms}
    return SlicedQuery(
        source_spec, parse_lease_options(settings, f"sqlite:///{path}", position, "maxRowsPerTrigger"), time_slice
    )


def run_query(query: SlicedQuery) -> list[str]:
    """Run the query with the calls that Spark makes, in the same order, and return all rows."""
    query.prepareForTriggerAvailableNow()
    offset, rows = query.initialOffset(), []
    try:
        while (end := query.latestOffset(offset, query.getDefaultReadLimit())) != offset:
            if offset["n"]:
                query.commit(offset)
            rows += [row for part in query.partitions(offset, end) for row in rows_in([*query.read(part)])]
            offset = end
    finally:
        query.stop()
    return rows


def test_queries_and_workers_share_a_slice_across_a_split(tmp_path: Path) -> None:
    fake_source, time_slice = FakeSource(), Slice(at_timestamp(SINCE), UNTIL)
    for name in ("p", "q", "c"):
        fake_source.stream.put(name, [float(record) for record in range(-9, 100)], size=20)
    fake_source.stream.listed = [create_shard("p", 0, 9), create_shard("q", 10, 19)]
    fake_source.stream.end("p", create_shard("c", 0, 9, "p"))
    path, handled_rows = tmp_path / "leases.db", list[str]()
    config = Config(initial_position=time_slice.since, lease_seconds=2.0)
    worker = Worker(
        store=time_slice.store(open_store(f"sqlite:///{path}")),
        source=time_slice.source(fake_source.stream),
        me="b-1",
        config=config,
    )

    def handle(delivery: Delivery) -> None:
        handled_rows.extend(record.data.decode() for record in delivery.records)

    worker_thread = Thread(target=run_slice, args=(worker, handle), kwargs={"check_seconds": 0.1})
    worker_thread.start()
    rows = run_query(query_of(fake_source, path, time_slice))
    leases = open_store(f"sqlite:///{path}").list().leases
    assert {lease.key for lease in leases} >= {"q", "c"}  # the lease of a parent may already be deleted
    assert {(lease.ended, lease.annotation(NOTE)) for lease in leases} == {(True, time_slice.note)}
    worker_thread.join(60)
    assert not worker_thread.is_alive()
    assert sorted({*rows, *handled_rows}) == in_time(fake_source.stream, SINCE, UNTIL)
    assert run_query(query_of(fake_source, path, time_slice)) == []


def test_lone_query_reads_a_slice_whole_and_once(tmp_path: Path) -> None:
    """A query that is alone in its group also reads the children of a split, and repeats no row."""
    fake_source, time_slice = FakeSource(), Slice(at_timestamp(SINCE), UNTIL)
    for name in ("p", "c"):
        fake_source.stream.put(name, [float(seconds) for seconds in range(-9, 100)], size=20)
    fake_source.stream.listed = [create_shard("p", 0, 9)]
    fake_source.stream.end("p", create_shard("c", 0, 9, "p"))
    assert sorted(run_query(query_of(fake_source, tmp_path / "leases.db", time_slice))) == in_time(
        fake_source.stream, SINCE, UNTIL
    )


def test_query_that_would_never_end_is_rejected(tmp_path: Path) -> None:
    """Without `trigger(availableNow=True)`, a query over a past slice would idle forever, so it is rejected."""
    query = query_of(FakeSource(), tmp_path / "leases.db", Slice(TRIM_HORIZON, UNTIL))
    with pytest.raises(ValueError, match=r"would not end with this trigger; use trigger\(availableNow=True\)$"):
        query.latestOffset(query.initialOffset(), query.getDefaultReadLimit())


def test_checkpoint_of_another_slice_is_rejected(tmp_path: Path) -> None:
    """A query continues at the ends in its checkpoint. Those of another slice would make it skip its first records."""
    fake_source = FakeSource()
    fake_source.stream.put("a", [1.0])
    offset_of_other_slice = query_of(fake_source, tmp_path / "a.db", Slice(TRIM_HORIZON, UNTIL - 1)).initialOffset()
    query = query_of(fake_source, tmp_path / "b.db", Slice(TRIM_HORIZON, UNTIL))
    query.prepareForTriggerAvailableNow()
    with pytest.raises(
        ValueError, match=r"is of kinesis://s 0\.\.1059999, but the query reads kinesis://s 0\.\.1060000"
    ):
        query.latestOffset(offset_of_other_slice, query.getDefaultReadLimit())


def test_cuts_divide_a_range_at_sub_sequences_without_a_gap() -> None:
    """Each record is in exactly one part, also if the parts meet within an aggregated record."""
    begin, end = Position("5", 1), Position("7", 3)
    inside = [Position("5", 2), Position("6"), Position("7", 2)]
    outside = [Position("4"), Position("5"), begin, end, Position("7", 4), Position("10")]
    parts = split_range(begin, [*reversed(inside), *outside, *inside], end)
    assert parts == [*zip([begin, *inside], [*inside, end], strict=True)]
    endless_parts = split_range(begin, [*inside, Position("10"), begin], None)
    assert [part_begin for part_begin, _ in endless_parts] == [begin, *inside, Position("10")]
    assert endless_parts[-1][1] is None
    assert split_range(begin, [], None) == [(begin, None)]


def test_interval_is_cut_between_its_ends_only() -> None:
    assert split_times(100, 200, 4) == [125, 150, 175]
    assert split_times(100, 200, 1) == []


def test_bounds_are_at_least_a_millisecond_apart() -> None:
    begin = at_timestamp(5)
    assert ReadBounds(begin, at_timestamp(6), 0, "kinesis").make_query_slice() == Slice(begin, 6)
    for until_ms in (4, 5):
        with pytest.raises(ValueError, match="not later"):
            ReadBounds(begin, at_timestamp(until_ms), 0, "kinesis")
    assert ReadBounds(TRIM_HORIZON, at_timestamp(0), 0, "kinesis").begins == TRIM_HORIZON


@pytest.mark.parametrize(
    ("since", "until", "fields"),
    [
        (None, None, {"initial_position": "LATEST"}),
        (None, at_timestamp(7), {"initial_position": "TRIM_HORIZON"}),
        (LATEST, None, {"initial_position": "LATEST"}),
        (at_timestamp(5), None, {"initial_position": "AT_TIMESTAMP", "timestamp_ms": 5}),
        (at_timestamp(5), at_timestamp(7), {"initial_position": "AT_TIMESTAMP", "timestamp_ms": 5}),
    ],
)
def test_shards_without_a_lease_start_where_the_bounds_begin(
    since: Position | None, until: Position | None, fields: dict[str, object]
) -> None:
    """A backfill starts at the oldest record, and a live query at the newest."""
    assert ReadBounds(since, until, 0, "kinesis").find_initial_position() == fields


@pytest.mark.parametrize("tasks", [1, 4])
def test_batch_has_a_last_record_that_arrived_as_it_begins(tasks: int) -> None:
    fake_source = FakeSource(Stream(tells_last=True))
    fake_source.stream.put("a", [0.0])
    assert [row for rows in batch(fake_source, at_timestamp(SINCE), None, tasks) for row in rows] == ["a-1"]


def test_part_waits_and_fails_by_what_happened_since_its_last_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_source, now = FakeSource(), [0.0]
    fake_source.stream.put("a", [1.0])
    (part,) = plan_parts(fake_source, ReadBounds(None, at_timestamp(UNTIL), 1, "kinesis"), 1)
    monkeypatch.setattr(planning, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(planning, "Backoff", partial(Backoff, uniform=lambda _low, high: high))
    part_reader = PartReader(fake_source.stream, fake_source.columns, part)
    fault, progress = SourceUnavailable("not now"), Batch((), None, behind_seconds=1.0, wait_seconds=0.5)

    def pauses(*responses: Batch | SourceUnavailable) -> list[float]:
        return [part_reader._find_next_pause(response, now[0]) for response in responses]  # noqa: SLF001  as it reads

    for _ in range(3):
        assert pauses(fault, fault, progress) == pytest.approx([1.2, 3.6, 0.5])
        now[0] += STALL_SECONDS
    now[0] += 1.0
    with pytest.raises(TimeoutError):
        pauses(fault)
