"""If Spark repeats a batch while the stream does not respond, no row is changed, and no row is skipped later."""

from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import NoReturn

import pytest
from crashes import Crash, Row, all_rows, crash_query, drain, restarted_query
from fake_stream import Place, Stream, options

from leasehold.adapters.spark import replay
from leasehold.adapters.spark.compat import ReadMaxRows
from leasehold.adapters.spark.kinesis.rows import make_columns
from leasehold.adapters.spark.leased_source import LeasedReader
from leasehold.adapters.spark.offsets import Range
from leasehold.adapters.spark.rows import SourceSpec
from leasehold.balancer.model import TRIM_HORIZON, Lease, Position
from leasehold.stores.embedded.memory import MemoryStore
from leasehold.stores.embedded.sqlite import SqliteStore
from leasehold.stores.protocol import Capabilities

pytestmark = pytest.mark.slow

FLUSHING = pytest.mark.parametrize("flush", ["true", "false"], ids=["flushing", "not flushing"])
SUNK = pytest.mark.parametrize("sunk", [False, True], ids=["before the sink", "after the sink"])


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """Yield a stream of two shards with one record each. After a short silence, a range is given up."""
    monkeypatch.setattr("leasehold.adapters.spark.replay.TIP_SILENCE_SECONDS", 0.5)
    monkeypatch.setattr("leasehold.adapters.spark.replay.OWNER_CHECK_SECONDS", 0.3)
    streams = Place(Stream({"a": ["a0"], "b": ["b0"]}), tmp_path / "leases.db")
    yield streams
    streams.close()


def run_once_more(
    place: Place, crash: Crash, flush: str, *, rereadable: bool = True, missing: tuple[Row, ...] = ()
) -> None:
    """Kill the query before it plans another batch, and check that the next run finds every record except `missing`."""
    place.queries[-1].kill()
    last_run = place.query(crash.planned, rereadable=rereadable, **{"lease.flushOnIdle": flush})
    drain(last_run, crash.sink, place.stream, also=missing)


@pytest.mark.sampled(3)
@SUNK
@FLUSHING
def test_throttled_range_is_awaited(place: Place, flush: str, *, sunk: bool) -> None:
    """Spark must not commit a batch without one of its ranges. Then a second kill neither loses nor doubles rows."""
    crash = crash_query(place, reaches_sink=sunk)
    place.stream.throttled["a"] = 8
    query = restarted_query(place, crash, **{"lease.flushOnIdle": flush})
    assert query.rows == crash.rows
    run_once_more(place, crash, flush)
    assert crash.sink.rows == all_rows(place.stream)


def test_range_is_read_again_under_its_original_epoch() -> None:
    """On Event Hubs, a reader under the current epoch would disconnect the shard's owner."""
    stream, planned_range = Stream({"a": ["a0", "a1"]}), Range(TRIM_HORIZON, Position("2"), 3)
    context = replay.ReplayContext(MemoryStore(), stream, make_columns("fake"), exclusive=True)
    rows = replay.RangeReplay(Lease("a", epoch=9), planned_range, context, Event()).read_rows()
    assert rows is not None
    assert (rows.num_rows, stream.opened) == (2, [("a", 3)])


@FLUSHING
def test_range_unanswered_for_too_long_fails_the_query(
    place: Place, monkeypatch: pytest.MonkeyPatch, flush: str
) -> None:
    crash = crash_query(place, reaches_sink=False)
    place.stream.silent.add("a")
    with monkeypatch.context() as patch_context:
        patch_context.setattr("leasehold.adapters.spark.lease_loop.STALL_SECONDS", 0.5)
        patch_context.setattr("leasehold.adapters.spark.lease_loop.STALL_LEASE_TIMES", 0.0)
        number = crash.planned["n"]
        with pytest.raises(TimeoutError, match=rf"^batch {number}, which is repeated: nothing was read .* of a \("):
            restarted_query(place, crash)
    for lease in place.queries[0].store.list().leases:
        assert lease.checkpoint.order <= Position(crash.planned["r"][lease.key][0]).order
    place.stream.silent.clear()
    assert restarted_query(place, crash, **{"lease.flushOnIdle": flush}).rows == crash.rows
    run_once_more(place, crash, flush)
    assert crash.sink.rows == all_rows(place.stream)


@pytest.mark.sampled(3)
@FLUSHING
@pytest.mark.parametrize("rereadable", [True, False], ids=["anybody may read", "the owner alone may read"])
def test_range_given_up_is_remembered_by_the_next_run(place: Place, flush: str, *, rereadable: bool) -> None:
    """If the query is killed before the next offset, the next run does not skip the range as if the sink had it."""
    crash = crash_query(place, reaches_sink=False, rereadable=rereadable)
    place.stream.numbers = not rereadable
    place.stream.refuses.add("a")
    query = restarted_query(place, crash, rereadable=rereadable, **{"lease.flushOnIdle": flush})
    assert query.rows == [row for row in crash.rows if row[0] == "b"]
    place.stream.refuses.clear()
    run_once_more(place, crash, flush, rereadable=rereadable)
    assert set(crash.sink.rows) == set(all_rows(place.stream))
    if rereadable:
        assert crash.sink.rows == all_rows(place.stream)


@pytest.mark.sampled(5)
@FLUSHING
@pytest.mark.parametrize("counts", [True, False], ids=["owners are counted", "owners are not counted"])
@pytest.mark.parametrize("rereadable", [True, False], ids=["anybody may read", "the owner alone may read"])
def test_range_given_up_stays_out_of_its_repeated_batch(
    place: Place, monkeypatch: pytest.MonkeyPatch, flush: str, *, counts: bool, rereadable: bool
) -> None:
    """A sink that has the batch without the range would skip a repetition that contains the range."""
    monkeypatch.setattr(SqliteStore, "capabilities", Capabilities(counts_owners=counts))
    crash = crash_query(place, reaches_sink=False, rereadable=rereadable)
    place.stream.numbers = not rereadable
    place.stream.refuses.add("a")
    restarted_query(place, crash, rereadable=rereadable, **{"lease.flushOnIdle": flush})
    place.queries[-1].kill()
    place.stream.refuses.clear()
    query = restarted_query(place, crash, rereadable=rereadable, **{"lease.flushOnIdle": flush})
    drain(query, crash.sink, place.stream)
    assert set(crash.sink.rows) == set(all_rows(place.stream))
    if rereadable:
        assert crash.sink.rows == all_rows(place.stream)


def test_trimmed_range_is_left_out_and_the_rest_arrives(place: Place) -> None:
    """A query starts even if part of its last batch is past retention."""
    crash = crash_query(place, reaches_sink=False)
    oldest_number = min(row[1] for row in crash.rows if row[0] == "a")
    place.stream.trimmed["a"] = oldest_number
    query = restarted_query(place, crash)
    assert query.rows == [row for row in crash.rows if row[0] == "b" or row[1] > oldest_number]
    trimmed_rows = tuple(row for row in all_rows(place.stream) if row[0] == "a" and row[1] == oldest_number)
    run_once_more(place, crash, "true", missing=trimmed_rows)
    assert crash.sink.rows == [row for row in all_rows(place.stream) if row not in trimmed_rows]


def test_late_commit_does_not_pass_a_range_left_out_earlier(place: Place) -> None:
    crash = crash_query(place, reaches_sink=False, rereadable=False)
    place.stream.numbers = True
    place.stream.refuses.add("a")
    restarted_query(place, crash, rereadable=False).kill()
    place.stream.refuses.clear()
    place.stream.silent.add("b")
    query = place.query(crash.planned, rereadable=False)
    start, end, _ = crash.planned["r"]["a"]
    assert query.plan(ReadMaxRows(1)) is not None
    query.reader.commit(crash.planned)
    query.reader.stop()
    assert query.store.get(["a"])[0].checkpoint.order <= Position(start).order < Position(end).order


@pytest.mark.parametrize("call", ["latestOffset", "partitions", "commit"])
def test_offset_of_another_stream_is_rejected_before_anything_opens(tmp_path: Path, call: str) -> None:
    offset_of_other_stream = {"v": 1, "n": 3, "s": "kinesis://orders", "r": {"a": ["TRIM_HORIZON", "5", 1]}}
    source_spec = SourceSpec(_never, make_columns("fake"), 0.01, 100, rereadable=True, stream="kinesis://flights")
    reader = LeasedReader(source_spec, options(tmp_path / "leases.db", "LATEST"), _never)
    arguments = {
        "latestOffset": (reader.getDefaultReadLimit(),),
        "partitions": (offset_of_other_stream,),
        "commit": (),
    }[call]
    with pytest.raises(ValueError, match=r"is of kinesis://orders, but the query reads kinesis://flights; [^\n]*$"):
        getattr(reader, call)(offset_of_other_stream, *arguments)


def _never(*_args: object, **_kwargs: object) -> NoReturn:
    raise AssertionError("it was opened")
