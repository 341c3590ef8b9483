"""A query over a recreated stream ends and reports this, or begins again if the option `lease.ifRecreated` is set."""

from collections.abc import Mapping

import pytest
from attrs import define, field
from fake_stream import KillableStore, Query, Stream
from stepped_loop import install_stepped_clock, new_reader
from waiters import Clock

from leasehold.adapters.worker.discovery import SAFETY_SECONDS, StreamRecreated
from leasehold.balancer.contradictions import INCARNATION
from leasehold.balancer.model import Position, Shard
from leasehold.errors import SourceError, SourceUnavailable
from leasehold.stores.embedded.memory import MemoryStore

NOT_TOLD: Mapping[str, str] = {}
ANEW = {"lease.ifRecreated": "TRIM_HORIZON"}
REFUSED = r"^stream fake:1000 was deleted and made anew, and is fake:2000 now: .* option lease\.ifRecreated TRIM"


@define
class Table:
    """A stream that knows its incarnation, and the lease table of the queries over it."""

    clock: Clock
    stream: Stream = field(factory=lambda: Stream({"a": [], "b": []}, made=1000))
    store: MemoryStore = field(factory=MemoryStore)
    starts: Mapping[str, Position] = field(factory=dict)

    def query(self, former_run: Query | None = None, options: Mapping[str, str] = NOT_TOLD) -> Query:
        """Return a new run. If `former_run` is given, it is killed, and the new run continues after it."""
        killable_store = KillableStore(self.store)
        if former_run is not None:
            former_run.kill()
            self.clock.now += 60.0
        reader = new_reader(
            self.stream, killable_store, rereadable=True, flush_on_idle="true", start_positions=self.starts, **options
        )
        return Query(
            reader, self.store, killable_store, reader.initialOffset() if former_run is None else former_run.offset
        )

    def read_up(self, query: Query) -> list[str]:
        """Run the query until it has all records of the stream, and return their texts, including duplicates."""
        count = sum(map(len, self.stream.records.values()))
        query.until(lambda query: len(query.rows) >= count)
        return sorted(text for _, _, text in query.rows)

    def noted_incarnations(self) -> set[str | None]:
        """Return the incarnations that the leases record."""
        return {lease.annotation(INCARNATION) for lease in self.store.list().leases}


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Table:
    """Return a lease table and a stream of two shards with five records each."""
    new_table = Table(install_stepped_clock(monkeypatch))
    fill(new_table, "old", 5)
    return new_table


def fill(table: Table, prefix: str, count: int) -> None:
    """Put this many records into each shard."""
    for shard in table.stream.records:
        table.stream.put(shard, *(f"{prefix} {shard}{number}" for number in range(count)))


def test_recreated_stream_ends_the_query_by_default(table: Table) -> None:
    query = table.query()
    table.read_up(query)
    table.stream.recreate("a", "b")
    fill(table, "new", 8)
    new_run = table.query(query)
    for _ in range(2):
        with pytest.raises(SourceError, match=REFUSED):
            new_run.reader.latestOffset(new_run.offset, new_run.reader.getDefaultReadLimit())
    with pytest.raises(SourceError, match=REFUSED):
        new_run.reader.partitions(new_run.reader.initialOffset(), new_run.offset)
    assert table.noted_incarnations() == {"fake:1000"}


def test_recreated_stream_is_read_whole_if_the_option_says_so(table: Table) -> None:
    """The sequence numbers of the new stream begin again, so records before the old offset must not be skipped."""
    query = table.query()
    table.read_up(query)
    table.stream.recreate("a", "b", "c")
    fill(table, "new", 8)
    new_run = table.query(query, ANEW)
    assert table.read_up(new_run) == sorted(f"new {shard}{number}" for shard in "abc" for number in range(8))
    assert (new_run.offset["i"], table.noted_incarnations()) == ("fake:2000", {"fake:2000"})
    # From then on, the recreated stream is a stream like any other, with or without the option.
    fill(table, "newer", 1)
    last_run = table.query(new_run)
    last_run.until(lambda query: len(query.rows) >= 3)
    assert sorted(text for _, _, text in last_run.rows) == ["newer a0", "newer b0", "newer c0"]


def test_batch_planned_on_the_former_stream_is_repeated_empty(table: Table) -> None:
    """Records of the new stream that have the same numbers are not taken for the rows of the old batch."""
    query = table.query()
    planned_offset = query.plan()
    assert planned_offset is not None
    table.stream.recreate("a", "b")
    fill(table, "new", 8)
    new_run = table.query(query, ANEW)
    assert new_run.run(planned_offset) == []
    new_run.reader.commit(planned_offset)
    new_run.offset = planned_offset
    assert table.read_up(new_run) == sorted(f"new {shard}{number}" for shard in "ab" for number in range(8))


def test_running_query_ends_once_its_stream_is_listed_as_recreated(table: Table) -> None:
    query = table.query(options=ANEW)
    table.read_up(query)
    table.stream.recreate("a", "b")
    table.clock.now += SAFETY_SECONDS
    with pytest.raises(
        StreamRecreated, match=r"^stream fake:1000 was deleted and made anew while it was read, and is fake:2000"
    ):
        query.plan()


def test_unnamed_offset_has_the_incarnation_that_its_leases_note(table: Table) -> None:
    """If a checkpointLocation of an earlier version names no incarnation, no records of the new stream are skipped."""
    table.stream.records["c"] = ["old c0"]
    query = table.query()
    table.read_up(query)
    del query.offset["i"]
    table.stream.recreate("a", "b")
    fill(table, "new", 8)
    with pytest.raises(SourceError, match=REFUSED):
        table.query(query).plan()
    new_run = table.query(query, ANEW)
    assert table.read_up(new_run) == sorted(f"new {shard}{number}" for shard in "ab" for number in range(8))
    # Now the leases name the new stream, but the offset without an incarnation still belongs to the former one.
    assert new_run.offset["r"].keys() == {"a", "b"}


def test_unnamed_offset_resumes_if_nothing_was_recreated(table: Table) -> None:
    query = table.query()
    table.read_up(query)
    del query.offset["i"]
    fill(table, "more", 1)
    new_run = table.query(query)
    new_run.until(lambda query: len(query.rows) >= 2)
    assert [text for _, _, text in new_run.rows] == ["more a0", "more b0"]
    assert new_run.offset["i"] == "fake:1000"


@pytest.mark.parametrize(("created", "message"), [(1000, "fake:2000, but the query reads fake:1000"), (0, "")])
def test_offset_of_a_later_incarnation_is_rejected(table: Table, created: int, message: str) -> None:
    """Even if a listing is outdated, the ranges of an offset are not read from another incarnation of the stream."""
    table.stream.made = 2000
    query = table.query()
    table.read_up(query)
    table.stream.made = created
    new_run = table.query(query, ANEW)
    if message:
        with pytest.raises(SourceError, match=rf"^offset: the checkpointLocation is of {message}"):
            new_run.plan()
    else:
        fill(table, "more", 1)
        new_run.until(lambda query: len(query.rows) >= 2)
        assert new_run.offset["i"] == "fake:2000", "a right that was taken away does not make it another stream"


@pytest.mark.parametrize("more", [NOT_TOLD, ANEW])
def test_new_query_over_leases_of_a_former_stream_fails_or_restarts(table: Table, more: Mapping[str, str]) -> None:
    table.read_up(former_run := table.query())
    former_run.kill()
    table.stream.recreate("a", "b")
    fill(table, "new", 3)
    query = table.query(options=more)
    if more:
        assert table.read_up(query) == sorted(f"new {shard}{number}" for shard in "ab" for number in range(3))
        return
    with pytest.raises(SourceError, match=r"made anew at 2000 s .*nothing is read; .*\(of a query: option lease\.ifR"):
        query.plan()


def test_shard_of_a_recreated_stream_starts_where_the_option_says(table: Table) -> None:
    """A starting position for one shard is a position in the old stream, so it does not apply to the new one."""
    table.starts = {"a": Position("3")}
    query = table.query()
    query.until(lambda query: len(query.rows) >= 7)
    assert sorted(text for _, _, text in query.rows)[:2] == ["old a3", "old a4"]
    table.stream.recreate("a", "b")
    fill(table, "new", 5)
    new_run = table.query(query, ANEW)
    assert table.read_up(new_run) == sorted(f"new {shard}{number}" for shard in "ab" for number in range(5))


def test_run_waits_until_the_stream_is_identified(
    table: Table, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each batch names the stream's incarnation, so that the batch is valid for this incarnation only."""
    faults = iter([SourceUnavailable("slow down"), SourceUnavailable("slow down")])
    original_shards = Stream.shards

    def shards_or_fault(stream: Stream) -> tuple[Shard, ...]:
        if fault := next(faults, None):
            raise fault
        return original_shards(stream)

    monkeypatch.setattr(Stream, "shards", shards_or_fault)
    query = table.query()
    assert len(table.read_up(query)) == 10
    assert query.offset["i"] == "fake:1000"
    assert caplog.messages.count("the stream cannot be reached, trying again: slow down") == 1


def test_stream_that_is_identified_by_a_listing_is_listed_first(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """The offsets of a run name the incarnation, so the offsets of a former stream do not apply to the new one."""
    listings, shards, incarnation = list[bool](), Stream.shards, Stream.incarnation

    def list_and_record(stream: Stream) -> tuple[Shard, ...]:
        listings.append(True)
        return shards(stream)

    monkeypatch.setattr(Stream, "shards", list_and_record)
    monkeypatch.setattr(Stream, "incarnation", lambda stream: incarnation(stream) if listings else "")
    query = table.query()
    table.read_up(query)
    assert query.offset["i"] == "fake:1000"
