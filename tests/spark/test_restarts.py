"""Queries that are killed at any bad moment and restarted lose no records, and repeat the same batches."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from crashes import Sink, all_rows, crash_query, drain, restarted_query
from fake_stream import Place, Stream

from leasehold.balancer.model import Position
from leasehold.stores.protocol import Done
from leasehold.stores.writes import CheckpointLease, RenewLease, StealLease

pytestmark = pytest.mark.slow


@pytest.fixture
def place(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Place]:
    """Yield a stream of two shards with one record each."""
    caplog.set_level("INFO", "leasehold")
    streams = Place(Stream({"a": ["a0"], "b": ["b0"]}), tmp_path / "leases.db")
    yield streams
    streams.close()


@pytest.mark.parametrize("sunk", [False, True], ids=["before the sink", "after the sink"])
def test_uncommitted_batch_is_repeated_exactly(place: Place, caplog: pytest.LogCaptureFixture, sunk: bool) -> None:
    """A repeated batch has the same rows, because a sink may skip a batch whose number it knows."""
    crash = crash_query(place, reaches_sink=sunk)
    place.stream.put("a", "came meanwhile")
    place.stream.put("b", "this too")
    query = restarted_query(place, crash)
    assert query.rows == crash.rows
    drain(query, crash.sink, place.stream)
    assert crash.sink.rows == all_rows(place.stream)
    assert f"batch {crash.planned['n']} was planned by an earlier run: reading its 2 ranges again" in caplog.text


def test_committed_batch_is_not_repeated(place: Place) -> None:
    """A restart does not repeat rows that Spark has committed, even if the checkpoints of the leases lag behind."""
    crash = crash_query(place, reaches_sink=True)
    query = place.query(crash.planned)
    drain(query, crash.sink, place.stream)
    assert crash.sink.rows == all_rows(place.stream)


def test_shard_not_reclaimed_before_the_next_kill_is_remembered(place: Place) -> None:
    """Rows that Spark committed before their lease was written are not delivered again under a new number."""
    crash = crash_query(place, reaches_sink=True)
    store = place.queries[0].store
    outcome = store.write(StealLease(store.get(["a"])[0], "away"))
    second_run = place.query(crash.planned)
    place.stream.put("b", "meanwhile")
    while ("b", len(place.stream.records["b"]), "meanwhile") not in crash.sink.rows:
        assert isinstance(outcome, Done)
        outcome = store.write(
            RenewLease(outcome.lease)
        )  # Otherwise this lease would expire at about the same time as the other one.
        row_count = len(second_run.rows)
        second_run.batch()
        crash.sink.take(second_run.offset["n"], second_run.rows[row_count:])
    second_run.kill()
    start, end, _ = second_run.offset["r"]["a"]
    assert start == end == crash.planned["r"]["a"][1]
    third_run = place.query(second_run.offset)
    drain(third_run, crash.sink, place.stream)
    assert crash.sink.rows == all_rows(place.stream)


def test_kill_at_the_end_of_a_shard_loses_neither_tail_nor_children(place: Place) -> None:
    crash = crash_query(
        place,
        reaches_sink=False,
        split=True,
        is_crash_batch=lambda planned: planned["r"].get("a", [""] * 2)[1] == "SHARD_END",
    )
    query = restarted_query(place, crash)
    assert query.rows == crash.rows
    drain(query, crash.sink, place.stream)
    assert crash.sink.rows == all_rows(place.stream)
    query.until(lambda query: query.checkpoints().get("a") == "SHARD_END")


def test_lease_stolen_from_a_dead_query_costs_one_batch(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """A steal while the query is dead loses no batch, does not end the query, and keeps the new owner's checkpoint."""
    crash = crash_query(place, reaches_sink=False)
    store = place.queries[0].store
    outcome = store.write(StealLease(store.get(["a"])[0], "thief"))
    assert isinstance(outcome, Done)
    stolen_checkpoint, new_checkpoint = outcome.lease.checkpoint, Position(str(len(place.stream.records["a"])))
    checkpointed = store.write(CheckpointLease(outcome.lease, new_checkpoint))
    assert isinstance(checkpointed, Done)
    query = restarted_query(place, crash)
    assert query.rows == crash.rows
    place.stream.put("b", "later")
    by_thief = tuple(row for row in all_rows(place.stream) if row[0] == "a" and row[1] > stolen_checkpoint.order[1])
    drain(query, crash.sink, place.stream, also=by_thief)
    assert set(query.rows) & set(by_thief) <= set(crash.rows)
    assert query.store.get(["a"])[0].checkpoint == new_checkpoint
    assert "reading its 2 ranges again" in caplog.text


@pytest.mark.parametrize("rereadable", [True, False], ids=["anybody may read", "the owner alone may read"])
@pytest.mark.parametrize("start", ["TRIM_HORIZON", "LATEST"])
def test_query_without_its_lease_table_resumes_at_sparks_offset(
    place: Place, caplog: pytest.LogCaptureFixture, start: str, rereadable: bool
) -> None:
    """A query over a recreated lease table does not begin at the latest records."""
    crash = crash_query(place, reaches_sink=True, rereadable=rereadable)
    place.path = place.path.with_name("another.db")
    place.stream.numbers = not rereadable  # as Event Hubs report the latest position
    place.stream.put("a", "came meanwhile")
    query = restarted_query(place, crash, start=start, rereadable=rereadable)
    assert query.rows == crash.rows
    drain(query, crash.sink, place.stream)
    assert crash.sink.rows == all_rows(place.stream)
    assert f"its lease has checkpoint {start}, but this query continues after" in caplog.text


@pytest.mark.parametrize("rereadable", [True, False], ids=["anybody may read", "the owner alone may read"])
def test_query_without_its_lease_table_and_batch_skips_nothing(
    place: Place, monkeypatch: pytest.MonkeyPatch, rereadable: bool
) -> None:
    """A range that cannot be read again at that moment is not skipped as if the sink had it."""
    monkeypatch.setattr("leasehold.adapters.spark.replay.TIP_SILENCE_SECONDS", 0.5)
    crash = crash_query(place, reaches_sink=False, rereadable=rereadable)
    place.path = place.path.with_name("another.db")
    place.stream.numbers = True
    place.stream.refuses.add("a")
    query = restarted_query(place, crash, start="LATEST", rereadable=rereadable)
    assert query.rows == [row for row in crash.rows if row[0] == "b"]
    place.stream.refuses.clear()
    drain(query, crash.sink, place.stream)
    assert crash.sink.rows == all_rows(place.stream)


def test_query_without_sparks_checkpoint_resumes_at_its_leases(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    crash = crash_query(place, reaches_sink=True)
    checkpoints = {lease.key: lease.checkpoint.order[1] for lease in place.queries[0].store.list().leases}
    query = place.query()
    tips = {key: str(len(texts)) for key, texts in place.stream.records.items()}
    query.until(lambda query: query.checkpoints() == tips)
    assert [row for row in query.rows if row[1] <= checkpoints[row[0]]] == []
    assert set(query.rows) | set(crash.sink.rows) == set(all_rows(place.stream))
    assert "no earlier batch is known: each shard continues at its lease's checkpoint" in caplog.text


def test_scheduled_runs_read_everything_with_one_empty_batch_each(place: Place) -> None:
    """A nightly job skips and repeats no record, and holds no lease between its runs."""
    offset, sink = None, Sink()
    for new_texts in (("early",), ("late", "later")):
        place.stream.put("b", *new_texts)
        query = place.query(offset)
        query.reader.prepareForTriggerAvailableNow()
        sizes = []
        while query.reader.latestOffset(query.offset, query.reader.getDefaultReadLimit()) != query.offset:
            sizes.append(len(query.batch()))
            sink.take(query.offset["n"], query.rows[sum(sizes[:-1]) :])
        query.reader.stop()
        offset = query.offset
        assert sizes.count(0) == 1 == (sizes[-1] == 0)
        assert sink.rows == all_rows(place.stream)
        tips = {key: str(len(texts)) for key, texts in place.stream.records.items()}
        assert {lease.key: (lease.owner, lease.checkpoint.sequence) for lease in query.store.list().leases} == {
            key: (None, tip) for key, tip in tips.items()
        }


def test_scheduled_run_does_not_wait_forever_for_a_silent_shard(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leasehold.adapters.spark.lease_loop.STALL_SECONDS", 1.0)
    monkeypatch.setattr("leasehold.adapters.spark.lease_loop.STALL_LEASE_TIMES", 0.0)
    place.stream.silent.add("a")
    query = place.query()
    query.reader.prepareForTriggerAvailableNow()
    while not query.rows:
        query.batch()
    with pytest.raises(TimeoutError, match=r"nothing was read for 1 s of a \(its end is not reached\); earlier rows"):
        query.reader.latestOffset(query.offset, query.reader.getDefaultReadLimit())
