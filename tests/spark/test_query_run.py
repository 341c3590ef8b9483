"""The reader works as Spark calls it, over an in-memory stream and a real lease table, without a session."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Never, cast

import pytest
from fake_stream import PAGE, KillableStore, Place, Query, Stream
from pyspark.sql.datasource import InputPartition
from stepped_loop import Stepped, install_stepped_clock, new_reader
from stolen_leases import steal_lease

from leasehold.adapters.consumer.runner import Runner
from leasehold.adapters.spark import lease_loop, query_run
from leasehold.adapters.spark.compat import ReadMaxBytes, ReadMaxRows
from leasehold.adapters.spark.fetching import RowTransport
from leasehold.adapters.spark.offsets import Offset
from leasehold.balancer.model import Position
from leasehold.errors import StoreError
from leasehold.stores.embedded.memory import MemoryStore
from leasehold.stores.protocol import Done
from leasehold.stores.writes import ReleaseLease, RenewLease, RequestLease, StealLease

pytestmark = pytest.mark.slow


def texts(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{number}" for number in range(count)]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """Yield a stream of two shards, with 35 and 15 records."""
    streams = Place(Stream({"a": texts("a", 35), "b": texts("b", 15)}), tmp_path / "leases.db")
    yield streams
    streams.close()


def all_rows(stream: Stream) -> list[tuple[str, int, str]]:
    """Return every record as a row."""
    return sorted((key, number, text) for key, texts in stream.records.items() for number, text in enumerate(texts, 1))


def test_limited_batches_hold_every_record_once(place: Place) -> None:
    """Batches respect their limits, and rows that a limit cuts off come in a later batch."""
    query = place.query()
    sizes: list[int] = []
    while len(query.rows) < 50:
        sizes.append(len(query.batch(ReadMaxRows(7) if len(sizes) % 2 else ReadMaxBytes(7 * 103))))
    assert max(sizes) <= 7
    assert sorted(query.rows) == all_rows(place.stream)


def test_planning_and_reading_twice_gives_the_same_batch(place: Place) -> None:
    """A sink with two actions sees the same batch twice under the same number."""
    query = place.query()
    end = query.plan(ReadMaxRows(7))
    assert end is not None
    assert query.reader.latestOffset(query.offset, ReadMaxRows(7)) == end
    parts = query.reader.partitions(query.offset, end)
    assert [query.run(end), query.run(end)] == [query.run(end)] * 2
    assert query.reader.partitions(query.offset, end) == parts


def test_tasks_that_could_not_be_made_are_retried_with_the_same_rows(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full for a moment does not remove rows from a batch whose offset already includes these rows."""
    query, faults = place.query(), [OSError("no space left on device")]
    original_make_partitions = RowTransport.make_partitions

    def fail_or_make_partitions(transport: RowTransport, *arguments: Any) -> Any:  # noqa: ANN401  as it is
        if faults:
            raise faults.pop()
        return original_make_partitions(transport, *arguments)

    monkeypatch.setattr(RowTransport, "make_partitions", fail_or_make_partitions)
    end = query.plan()
    assert end is not None
    with pytest.raises(OSError, match="no space"):
        query.reader.partitions(query.offset, end)
    rows = query.run(end)
    assert rows == [row for row in all_rows(place.stream) if row[1] <= int(end["r"].get(row[0], ["", "0"])[1])]
    assert rows


def test_query_that_could_not_join_closes_what_it_opened(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    query = place.query()

    def raise_store_error(*_args: object) -> Never:
        raise StoreError("the table is away")

    monkeypatch.setattr(query_run, "find_delivered_keys", raise_store_error)
    with pytest.raises(StoreError):
        query.plan()
    query.reader.stop()
    assert (place.stream.closed, place.stream.open_readers) == (True, [])


def test_idle_query_commits_its_last_batch_by_an_empty_one(place: Place) -> None:
    query = place.query()
    query.until(lambda query: len(query.rows) == 50)
    assert query.checkpoints() != {"a": "35", "b": "15"}
    assert query.batch() == []
    query.until(lambda query: query.checkpoints() == {"a": "35", "b": "15"})
    flushed_offset = query.offset
    assert [query.reader.latestOffset(flushed_offset, ReadMaxRows(9)) for _ in range(15)] == [flushed_offset] * 15


def test_planned_batch_is_repeated_exactly(place: Place) -> None:
    """A repeated batch has the same rows, because a sink may skip a batch whose number it knows."""
    first_run = place.query(maxRowsPerTrigger="7")
    rows_of_first_batch = first_run.batch()
    first_offset = first_run.offset
    rows = first_run.batch()
    second_offset = first_run.offset
    first_run.reader.stop()
    place.stream.put("a", *texts("late", 5))
    second_run = place.query(first_offset)
    assert second_run.run(second_offset) == rows
    second_run.reader.stop()
    place.path = place.path.with_name("another.db")  # the lease table is lost as well
    third_run = place.query(first_offset)
    assert third_run.run(second_offset) == rows
    third_run.offset = second_offset
    third_run.until(lambda query: sorted({*rows_of_first_batch, *query.rows}) == all_rows(place.stream))
    assert len(rows_of_first_batch) + len(third_run.rows) == 55


def test_lease_stolen_between_plan_and_commit_costs_only_a_repetition(place: Place) -> None:
    """A steal neither ends the query nor moves a checkpoint back, and no record is left unread by the two workers."""
    query = place.query()
    query.until(lambda query: query.offset["r"].keys() == {"a", "b"})
    steal_lease(query.store, "a", "3")
    place.stream.put("b", "more")
    query.until(lambda query: sorted(set(query.rows)) == all_rows(place.stream))
    query.until(lambda query: query.checkpoints() == {"a": "35", "b": "16"})
    # Rows that the sink already has are not read again, because their range ends after the new owner's checkpoint.
    assert len(query.rows) == 51


def test_returning_lease_is_read_after_the_checkpoint_of_its_other_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, store, stream = install_stepped_clock(monkeypatch), MemoryStore(), Stream({"a": texts("a", 35)})
    reader = new_reader(stream, KillableStore(store), rereadable=True, flush_on_idle="true")
    query = Query(reader, store, KillableStore(store), reader.initialOffset())
    query.batch(ReadMaxRows(7))
    steal_lease(store, "a", "20")
    run = reader._run  # noqa: SLF001  its worker
    assert run is not None
    run._loop._worker.renew(clock.now + 10.0)  # noqa: SLF001  so that it notices
    query.until(lambda query: query.checkpoints() == {"a": "35"})
    assert [number for _, number, _ in query.rows] == [*range(1, 8), *range(21, 36)]
    reader.stop()


def test_commit_is_rejected_while_another_worker_owns_the_lease(place: Place) -> None:
    place.stream.records = {"a": texts("a", 5), "b": texts("b", 5)}
    query = place.query()
    query.until(lambda query: len(query.rows) == 10)
    place.stream.put("a", "more")
    query.until(lambda query: len(query.rows) == 11)  # the end of "a" is now planned but not committed
    steal_lease(query.store, "a")
    stolen_lease = query.store.get(["a"])[0]
    query.reader.commit(query.offset)
    query.until(lambda query: query.checkpoints()["b"] == "5")
    assert query.store.get(["a"])[0] == stolen_lease
    assert stolen_lease.owner == "thief"
    assert stolen_lease.checkpoint.sequence != "6"


def test_shard_that_cannot_be_repeated_resumes_at_its_checkpoint(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """If another worker reads the partition of an event hub, the query continues, and the range is read later."""
    monkeypatch.setattr("leasehold.adapters.spark.replay.TIP_SILENCE_SECONDS", 0.5)
    place.stream.records = {"a": texts("a", 5), "b": texts("b", 5)}
    end = {"v": 1, "n": 1, "r": {key: ["TRIM_HORIZON", "5", 1] for key in "ab"}}
    place.stream.refuses.add("a")
    query = place.query(rereadable=False)
    assert query.run(end) == [row for row in all_rows(place.stream) if row[0] == "b"]
    query.offset = end
    place.stream.refuses.clear()
    query.until(lambda query: sorted(query.rows) == all_rows(place.stream))


def test_commit_leaves_out_a_shard_that_could_not_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sink lacks the rows of this shard, so its checkpoint stays before them."""
    install_stepped_clock(monkeypatch)
    monkeypatch.setattr(lease_loop, "STALL_SECONDS", 60.0)  # a repetition takes real time
    store, stream = MemoryStore(), Stream({"a": texts("a", 5), "b": texts("b", 5)}, refuses={"a"})
    reader = new_reader(stream, KillableStore(store), rereadable=False, flush_on_idle="false")
    query = Query(reader, store, KillableStore(store), reader.initialOffset())
    end = {"v": 1, "n": 1, "r": {key: ["TRIM_HORIZON", "5", 1] for key in "ab"}}
    query.run(end)
    run = reader._run  # noqa: SLF001  it waits as Spark does
    assert run is not None
    run._loop.wait_until(lambda: len(stream.open_readers) == 2, 60.0)  # noqa: SLF001  likewise
    reader.commit(end)
    run._loop.wait_until(lambda: False, 5.0)  # noqa: SLF001  likewise
    assert query.checkpoints() == {"a": "TRIM_HORIZON", "b": "5"}
    reader.stop()


def test_children_follow_the_commit_of_their_parents_end(place: Place) -> None:
    """Because of this order, a crash at the end of a shard loses no record, and no child is read before its parent."""
    place.stream.split("a", "c", "d")
    place.stream.put("c", "first of c")
    query = place.query()
    query.until(lambda query: query.offset["r"].get("a", ["", ""])[1] == "SHARD_END")
    assert sorted(query.checkpoints()) == ["a", "b"]
    query.until(lambda query: sorted(query.rows) == all_rows(place.stream))
    assert query.checkpoints()["a"] == "SHARD_END"


def test_requested_lease_is_handed_off_after_its_batch_is_committed(place: Place) -> None:
    query = place.query()
    query.until(lambda query: len(query.rows) == 50)
    lease = query.store.get(["a"])[0]
    request_outcome = query.store.write(RequestLease(lease, "heir"))
    assert isinstance(request_outcome, Done)
    query.until(lambda query: query.store.get(["a"])[0].owner == "heir")
    assert query.checkpoints()["a"] == "35"


def test_available_now_query_ends_with_all_committed_and_released(place: Place) -> None:
    query = place.query()
    query.reader.prepareForTriggerAvailableNow()
    sizes = []
    while query.reader.latestOffset(query.offset, query.reader.getDefaultReadLimit()) != query.offset:
        sizes.append(len(query.batch()))
        place.stream.put("b", "too late")
    query.reader.stop()
    leases = [(lease.key, lease.owner, lease.checkpoint.sequence) for lease in query.store.list().leases]
    assert sizes[-1] == 0
    assert 0 not in sizes[:-1]
    assert {row for row in query.rows if row[2] != "too late"} == {
        row for row in all_rows(place.stream) if row[2] != "too late"
    }
    assert leases == [("a", None, "35"), ("b", None, str(max(row[1] for row in query.rows if row[0] == "b")))]


def test_query_reports_how_far_behind_its_shards_are(place: Place) -> None:
    place.stream.put("a", *texts("x", 4000))
    query = place.query(buffer_rows="100")
    assert query.reader.reportLatestOffset() is None
    progress: dict[str, Any] = {}

    def reports_both_shards(query: Query) -> bool:
        progress.update(query.reader.reportLatestOffset() or {})
        return progress.get("shards") == 2 and progress["behindMsByShard"].keys() == {"a"}

    query.until(reports_both_shards)
    assert progress["behindMs"] == progress["behindMsByShard"]["a"] > 0
    json.dumps(progress)


def test_reading_ahead_stops_at_a_full_buffer(place: Place) -> None:
    place.stream.put("a", *texts("x", 4000))
    query = place.query(buffer_rows="100")
    query.batch()
    query.batch()
    assert len(query.batch()) <= 100 + 2 * PAGE


def test_available_now_query_fails_if_a_shard_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STALL_SECONDS", "STALL_LEASE_TIMES"):
        monkeypatch.setattr(lease_loop, name, 0.5)
    stream_setup = Place(Stream({"a": ["x"]}), tmp_path / "leases.db")
    stream_setup.stream.unreachable["a"] = 1_000_000
    query = stream_setup.query()
    query.reader.prepareForTriggerAvailableNow()
    with pytest.raises(TimeoutError, match=r"nothing was read for 1 s of a \(its end is not reached\)"):
        query.reader.latestOffset(query.offset, query.reader.getDefaultReadLimit())
    stream_setup.close()


def test_committed_batch_is_freed(place: Place) -> None:
    query = place.query()
    while len(query.rows) < 50:
        query.batch(ReadMaxRows(7))
    (task, *_) = query.reader.partitions(query.reader.initialOffset(), query.offset)
    assert [*query.reader.read(task)]
    query.reader.commit(query.offset)
    with pytest.raises(RuntimeError, match=r"^batch \d+ is done: its rows are not kept any more$"):
        list(query.reader.read(task))
    run = query.reader._run  # noqa: SLF001  what it keeps
    assert run is not None
    assert (dict(run._plans), dict(run._partitions)) == ({}, {})  # noqa: SLF001  likewise


def test_task_of_another_source_is_rejected(place: Place) -> None:
    with pytest.raises(TypeError, match=r"^InputPartition is no partition of this source$"):
        list(place.query().reader.read(InputPartition(0)))


def test_row_larger_than_a_batch_arrives_alone(place: Place) -> None:
    place.stream.records = {"a": texts("a", 4), "b": texts("b", 4)}
    query = place.query()
    sizes = [len(query.batch(ReadMaxBytes(1))) for _ in range(8)]
    assert (sizes, sorted(query.rows)) == ([1] * 8, all_rows(place.stream))


def test_empty_batch_of_an_earlier_run_is_not_read_again(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    query = place.query()
    assert query.run({"v": 1, "n": 1, "r": {"a": ["5", "5", 1]}}) == []
    assert "planned by an earlier run" not in caplog.text


def test_ending_query_waits_for_no_commit(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A query that ends releases its shards even if Spark will not commit their rows any more."""
    query, ending_flags, stop = place.query(), list[bool](), Runner.stop
    query.plan()
    run = query.reader._run  # noqa: SLF001  what its shards look at
    assert run is not None

    def record_and_stop(runner: Runner) -> None:
        ending_flags.append(run._loop._shared_tables.ending)  # noqa: SLF001  likewise
        stop(runner)

    monkeypatch.setattr(Runner, "stop", record_and_stop)
    query.reader.stop()
    assert ending_flags == [True]


def test_ending_query_sends_its_last_metrics(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    exports_ended = list[bool]()

    @contextmanager
    def exporting(_meter: object) -> Iterator[None]:
        yield
        exports_ended.append(True)

    monkeypatch.setattr(lease_loop, "exporting", exporting)
    query = place.query()
    query.plan()
    assert exports_ended == []
    query.reader.stop()
    assert exports_ended == [True]


def test_query_raises_what_ended_its_worker(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_store_error(_runner: Runner) -> Never:
        raise StoreError("the table is away")

    monkeypatch.setattr(Runner, "run", raise_store_error)
    with pytest.raises(StoreError, match=r"^the table is away$"):
        place.query().plan()


def test_query_is_closed_once_even_if_closing_fails(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """If closing has failed, the signal that follows a closed channel does not close the query again."""
    query, closings = place.query(), list[Callable[[], None]]()
    query.plan()
    run = query.reader._run  # noqa: SLF001  what it closes
    assert run is not None
    close = run.close

    def fail_to_close() -> Never:
        closings.append(close)
        raise OSError("the disk is full")

    monkeypatch.setattr(run, "close", fail_to_close)
    with pytest.raises(OSError, match="the disk is full"):
        query.reader.stop()
    query.reader.stop()
    assert closings == [close]
    close()


def test_lag_of_buffered_rows_does_not_grow_while_they_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """`behindMs` does not grow with the time for which buffered rows wait for a slow sink."""
    clock, stream = install_stepped_clock(monkeypatch), Stream({"a": texts("a", 500)})
    query_options: dict[str, Any] = {"rereadable": True, "flush_on_idle": "true", "lease.bufferRows": "20"}
    reader = new_reader(stream, KillableStore(MemoryStore()), **query_options)
    start = reader.initialOffset()
    while reader.latestOffset(start, ReadMaxRows(1)) == start:
        pass
    progress = reader.reportLatestOffset()
    clock.now += 5.0
    assert reader.reportLatestOffset() == progress
    assert progress is not None
    assert progress["behindMs"] > 0
    reader.stop()


def test_available_now_query_knows_what_it_still_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduled query waits for each shard that it must read, but not for those that another worker reads."""
    clock, store = install_stepped_clock(monkeypatch), MemoryStore()
    reader = new_reader(Stream({"a": ["x"]}), KillableStore(store), rereadable=True, flush_on_idle="true")
    reader.prepareForTriggerAvailableNow()
    run = reader._get_or_start_run()  # noqa: SLF001  what it asks
    loop = cast("Stepped", run._loop)  # noqa: SLF001  likewise
    run.join_group(Offset())
    assert loop.awaited_shards == {"(all)": "there are no leases yet"}
    while not loop._prefetchers:  # noqa: SLF001  it has the lease, and no step has been made
        clock.now += 1.0
        loop._worker.turn(clock.now)  # noqa: SLF001  as its task does
    assert loop.awaited_shards == {"a": "it cannot be opened"}
    loop.wait_for_rows(1.0)
    assert loop.awaited_shards == {"a": "its end is not reached"}
    loop.take_rows(10, 10, 1000)
    loop.commit({"a": Position("1")})
    for _ in range(3):
        loop.tick()
    assert loop.awaited_shards == {}
    outcome = store.write(StealLease(store.get(["a"])[0], "thief"))
    loop._worker.renew(clock.now + 10.0)  # noqa: SLF001  so that it notices
    loop.tick()
    assert loop.awaited_shards == {"a": "thief owns it and does not renew it"}
    assert isinstance(outcome, Done)
    assert isinstance(store.write(RenewLease(outcome.lease)), Done)
    assert loop.awaited_shards == {}, "whoever renews it reads it"
    store.write(ReleaseLease(store.get(["a"])[0], "thief"))
    assert loop.awaited_shards == {"a": "nobody owns it"}
    assert (reader.reportLatestOffset() or {})["shards"] == 0
    reader.stop()


def test_lease_that_returns_before_its_old_reader_is_closed_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, store, stream = install_stepped_clock(monkeypatch), MemoryStore(), Stream({"a": texts("a", 5)})
    reader = new_reader(stream, KillableStore(store), rereadable=True, flush_on_idle="true")
    run = reader._get_or_start_run()  # noqa: SLF001  what Spark asks
    loop = cast("Stepped", run._loop)  # noqa: SLF001  likewise
    run.join_group(Offset())
    loop.wait_for_rows(10.0)
    steal_lease(store, "a")
    loop._worker.renew(clock.now + 1.0)  # noqa: SLF001  so that it notices
    store.write(ReleaseLease(store.get(["a"])[0], "thief"))
    while not loop._worker.holdings:  # noqa: SLF001  its shards make no steps
        clock.now += 1.0
        loop._worker.turn(clock.now)  # noqa: SLF001  as its task does
    assert [shard_reader.closed for shard_reader in stream.readers] == [False]
    loop.wait_for_rows(10.0)
    assert [shard_reader.closed for shard_reader in stream.readers] == [True, False]
    assert loop.take_rows(10, 10, 1000)[1].keys() == {"a"}
    reader.stop()


@pytest.mark.parametrize("failing", [(), ("loop",), ("transport",), ("source",), ("loop", "transport", "source")])
def test_query_closes_everything_once_although_parts_of_it_fail(
    monkeypatch: pytest.MonkeyPatch, failing: tuple[str, ...]
) -> None:
    """The leases are released while the table and the source are still open."""
    install_stepped_clock(monkeypatch)
    store, stream, closed = MemoryStore(), Stream({"a": texts("a", 3)}), list[str]()
    reader = new_reader(stream, KillableStore(store), rereadable=True, flush_on_idle="true")
    Query(reader, store, KillableStore(store), reader.initialOffset()).batch(ReadMaxRows(7))
    run = cast("Any", reader._run)  # noqa: SLF001  what it closes

    def record_close(name: str, close_part: Callable[[object], None]) -> Callable[[object], None]:
        def close(part: object) -> None:
            closed.append(name)
            close_part(part)
            if name in failing:
                raise OSError(name)

        return close

    for name, part in {"loop": run._loop, "transport": run._transport, "source": run._source}.items():  # noqa: SLF001
        monkeypatch.setattr(type(part), "close", record_close(name, type(part).close))
    if failing:
        with pytest.raises(OSError, match=failing[-1]):
            reader.stop()
    reader.stop()
    assert closed == ["loop", "transport", "source"]


def test_plan_of_another_run_with_the_same_number_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sink may have rows of the other plan, so a repetition must have exactly the rows of its offset."""
    install_stepped_clock(monkeypatch)
    store, stream = MemoryStore(), Stream({"a": texts("a", 9)})
    reader = new_reader(stream, KillableStore(store), rereadable=True, flush_on_idle="true")
    query = Query(reader, store, KillableStore(store), reader.initialOffset())
    planned_end = query.plan(ReadMaxRows(7))
    assert planned_end is not None
    other_end = json.loads(json.dumps(planned_end))
    other_end["r"]["a"][1] = "4"
    assert [number for _, number, _ in query.run(other_end)] == [1, 2, 3, 4]
    reader.stop()


def test_spark_without_arguments_gets_each_end_until_it_plans_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark before 4.2 asks for the end alone, and asks again after an error of its own."""
    install_stepped_clock(monkeypatch)
    store, stream = MemoryStore(), Stream({"a": texts("a", 9)})
    reader = new_reader(stream, KillableStore(store), rereadable=True, flush_on_idle="false", maxRowsPerTrigger="4")
    ends = [reader.initialOffset()]
    for last in ("4", "8", "9"):
        while (end := reader.latestOffset()) == ends[-1]:
            pass  # nothing has been read yet
        assert end["r"]["a"][1] == last
        assert reader.latestOffset() is end
        reader.partitions(ends[-1], end)
        ends.append(end)
    assert reader.latestOffset() == ends[-1]
    assert reader.partitions(ends[-1], ends[-1]) == []
    reader.stop()


def test_copy_of_a_reader_for_executors_has_no_options(place: Place) -> None:
    """Options may contain a secret."""
    create, arguments = place.query().reader.__reduce__()
    assert vars(create(*arguments)) == {}


def test_plan_belongs_to_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that begins elsewhere has rows of its own, although it has the number of an earlier plan."""
    install_stepped_clock(monkeypatch)
    store, stream = MemoryStore(), Stream({"a": texts("a", 9)})
    reader = new_reader(stream, KillableStore(store), rereadable=True, flush_on_idle="true")
    query = Query(reader, store, KillableStore(store), reader.initialOffset())
    planned_end = query.plan(ReadMaxRows(4))
    assert planned_end is not None
    other_start = {**planned_end, "n": planned_end["n"] - 1}
    other_end = reader.latestOffset(other_start, ReadMaxRows(4))
    assert (other_end["n"], other_end["r"]["a"][:2]) == (planned_end["n"], ["4", "8"])
    reader.stop()


def test_committed_batch_needs_no_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit frees the batch and those before it, and an idle query plans no empty batch to have it committed."""
    clock = install_stepped_clock(monkeypatch)
    store, stream = MemoryStore(), Stream({"a": texts("a", 9)})
    reader = new_reader(stream, KillableStore(store), rereadable=True, flush_on_idle="true")
    query = Query(reader, store, KillableStore(store), reader.initialOffset())
    while len(query.rows) < 9:
        query.batch(ReadMaxRows(7))
    reader.commit(query.offset)
    run = cast("Any", reader._run)  # noqa: SLF001  what it keeps
    assert (run._plans, run._partitions) == ({}, {})  # noqa: SLF001  likewise
    clock.now += 2 * query_run.FLUSH_SECONDS
    assert [reader.latestOffset(query.offset, ReadMaxRows(7)) for _ in range(3)] == [query.offset] * 3
    reader.stop()
