"""Queries work in PySpark 4.0 and 4.1, which announce neither the start of a batch nor that a query should end."""

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from attrs import Factory, define
from fake_stream import KillableStore, Stream, rows_of
from stepped_loop import Stepped, install_stepped_clock, new_reader

from leasehold.adapters.consumer.slices import Slice
from leasehold.adapters.spark.kinesis.options import KINESIS_SOURCE
from leasehold.adapters.spark.leased_source import LeasedReader, SlicedQuery
from leasehold.adapters.spark.options import ALL_SOURCES, OptionReader, parse_lease_options
from leasehold.balancer.model import TRIM_HORIZON, Lease
from leasehold.stores.embedded.memory import MemoryStore
from leasehold.stores.protocol import Done
from leasehold.stores.writes import ClaimLease, CreateLease, DeleteLease, RenewLease

Offset = dict[str, object]
TRIES = 400


@define
class OlderSpark:
    """Makes the calls of such an older Spark, and keeps its two logs.

    ends       the offset log
    committed  how many batches are in the commit log
    """

    stream: Stream
    store: MemoryStore = Factory(MemoryStore)
    ends: list[Offset] = Factory(list)
    committed: int = 0
    sink: dict[int, list[str]] = Factory(dict)
    life: KillableStore = Factory(lambda self: KillableStore(self.store), takes_self=True)
    reader: LeasedReader = Factory(lambda self: self.made(), takes_self=True)

    def made(self, **options: Any) -> LeasedReader:  # noqa: ANN401  as options have it
        self.life = KillableStore(self.store)
        return new_reader(self.stream, self.life, rereadable=True, flush_on_idle="true", **options)

    def restart(self, **options: Any) -> None:  # noqa: ANN401  likewise
        """Restart as after a kill.

        Begin with the last batch of the offset log, and read its rows again if they were not committed.
        """
        self.life.dead = True
        self.reader = self.made(**options)
        if self.ends:
            assert self.reader.partitions(self.ends[-1], self.ends[-1]) == []
        if self.committed < len(self.ends):
            self.run()

    def plan(self) -> bool:
        """Plan the next batch, if there is one, and write its end to the offset log."""
        start = self.ends[-1] if self.ends else self.reader.initialOffset()
        for _ in range(TRIES):
            if json.dumps(end := self.reader.latestOffset()) != json.dumps(start):
                if self.ends:
                    self.reader.commit(self.ends[-1])
                self.ends.append(end)
                return True
        return False

    def run(self) -> None:
        """Let the sink read the last batch. A sink that already has the batch ignores it."""
        number = len(self.ends) - 1
        start = self.ends[-2] if number else self.reader.initialOffset()
        parts = self.reader.partitions(start, self.ends[-1])
        rows = sorted(text for part in parts for batch in self.reader.read(part) for _, _, text in rows_of(batch))
        assert self.sink.setdefault(number, rows) == rows

    def batch(self) -> None:
        assert self.plan()
        self.run()
        self.committed = len(self.ends)

    @property
    def rows(self) -> list[str]:
        return sorted(text for rows in self.sink.values() for text in rows)


def texts(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{number:03}" for number in range(count)]


@pytest.fixture
def older(monkeypatch: pytest.MonkeyPatch) -> Callable[..., OlderSpark]:
    """Return a function that creates an older Spark with a query over these shards."""
    install_stepped_clock(monkeypatch)
    monkeypatch.setattr("leasehold.adapters.spark.query_run.HAS_AVAILABLE_NOW", False)
    return lambda **records: OlderSpark(Stream(records))


def test_batches_are_contiguous_although_spark_names_no_start(older: Callable[..., OlderSpark]) -> None:
    query = older(a=texts("a", 30), b=texts("b", 25))
    query.reader = query.made(maxRowsPerTrigger="7")
    while len(query.rows) < 55:
        query.batch()
    assert query.rows == texts("a", 30) + texts("b", 25)


def test_end_that_was_not_planned_is_returned_again(older: Callable[..., OlderSpark]) -> None:
    """No rows are skipped if Spark asks twice for the end of a batch."""
    query = older(a=texts("a", 30))
    query.reader = query.made(maxRowsPerTrigger="7")
    unplanned_ends = [query.reader.latestOffset() for _ in range(TRIES)]
    assert query.plan()
    query.run()
    assert unplanned_ends[-1] == query.ends[0]
    assert query.rows == texts("a", 7)


@pytest.mark.parametrize("killed", ["planned", "run", "committed"])
def test_run_starts_where_the_log_ends(older: Callable[..., OlderSpark], killed: str) -> None:
    """The rows of the last batch are delivered exactly once, and under the same number."""
    query = older(a=texts("a", 30), b=texts("b", 25))
    query.restart(maxRowsPerTrigger="7")
    for run_number in range(4):
        query.batch()
        if killed != "committed":
            assert query.plan()
        if killed == "run":
            query.run()
        query.stream.put("a", f"z{run_number}")
        query.restart(maxRowsPerTrigger="7")
        query.committed = len(query.ends)
    while len(query.rows) < 59:
        query.batch()
    assert query.rows == [*texts("a", 30), *texts("b", 25), *(f"z{run_number}" for run_number in range(4))]


def test_first_batch_of_a_run_has_everything_there_is(older: Callable[..., OlderSpark]) -> None:
    """With `trigger(availableNow=True)`, an older Spark does not name the trigger, and reads all rows in one batch."""
    query = older(a=texts("a", 300), b=texts("b", 25), c=texts("c", 1))
    query.batch()
    assert query.rows == texts("a", 300) + texts("b", 25) + texts("c", 1)


def test_full_first_batch_is_not_delayed(older: Callable[..., OlderSpark]) -> None:
    query = older(a=texts("a", 300), b=[])
    query.stream.silent.add("b")
    query.reader = query.made(maxRowsPerTrigger="20")
    started_at = Stepped.clock.now
    query.batch()
    assert (query.rows, Stepped.clock.now - started_at < 2.0) == (texts("a", 20), True)


def test_slice_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A query over a slice could not end, because an older Spark asks for only one batch, so the slice is rejected."""
    monkeypatch.setattr("leasehold.adapters.spark.leased_source.HAS_AVAILABLE_NOW", False)
    option_reader = OptionReader({"lease.cores": "1"}, ALL_SOURCES, KINESIS_SOURCE)
    options = parse_lease_options(option_reader, "sqlite:///unused", {}, "maxRowsPerTrigger")
    reader = new_reader(Stream({}), KillableStore(MemoryStore()), rereadable=True, flush_on_idle="true")
    source_spec = reader._source_spec  # noqa: SLF001  what it reads
    with pytest.raises(ValueError, match=r"^option endingPosition: this version of Spark does not announce triggers"):
        SlicedQuery(source_spec, options, Slice(TRIM_HORIZON, 1)).latestOffset()


def test_features_missing_in_older_pyspark_are_replaced() -> None:
    code = (
        "import sys; from pyspark.sql import datasource; sys.modules['pyspark.sql.streaming.datasource'] = None\n"
        "for name in ('DataSourceStreamArrowWriter', 'EqualTo', 'Filter'): delattr(datasource, name)\n"
        "from leasehold.adapters.spark import compat, leased_source, query_run, sink\n"
        "assert not compat.HAS_AVAILABLE_NOW\n"
        "assert issubclass(sink.StreamSinkWriter, (datasource.DataSourceStreamWriter))\n"
        "assert issubclass(sink.StreamSinkWriter, (datasource.DataSourceArrowWriter))\n"
        "assert sink.StreamSinkWriter.commit is datasource.DataSourceStreamWriter.commit\n"
        "assert compat.ReadMaxRows(7).max_rows == 7\n"
    )
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (completed.returncode, completed.stderr) == (0, "")


@define
class NightlyRuns:
    """Runs with `trigger(availableNow=True)`. An older Spark asks for one batch per run, and takes it for all there is.

    elsewhere  shards whose lease another worker holds and renews
    """

    stream: Stream
    store: MemoryStore = Factory(MemoryStore)
    ends: list[Offset] = Factory(list)
    rows: list[str] = Factory(list)
    elsewhere: set[str] = Factory(set)

    def run(self, **options: Any) -> None:  # noqa: ANN401  as options have it
        renewing_store = Renewing(self.store, self.elsewhere)
        reader = new_reader(self.stream, renewing_store, rereadable=True, flush_on_idle="true", **options)
        start = self.ends[-1] if self.ends else reader.initialOffset()
        if self.ends:
            assert reader.partitions(start, start) == []
        if json.dumps(end := reader.latestOffset()) != json.dumps(start):
            parts = reader.partitions(start, end)
            self.rows += [text for part in parts for batch in reader.read(part) for _, _, text in rows_of(batch)]
            self.ends.append(end)
        reader.stop()
        renewing_store.dead = True

    def run_until_read(self, **options: Any) -> int:  # noqa: ANN401  likewise
        """Run until everything was read that this query should read, and return the number of runs."""
        for runs in range(1, MAX_NIGHTLY_RUNS):
            self.run(**options)
            if set(self.rows) == set(self.theirs):
                return runs
        raise AssertionError(f"never read: {set(self.theirs) - set(self.rows)}")

    @property
    def theirs(self) -> list[str]:
        """The records of all shards that this query reads."""
        return sorted(text for key, texts in self.stream.records.items() if key not in self.elsewhere for text in texts)


class Renewing(KillableStore):
    """A store in which another worker holds leases, and renews them whenever the table is read."""

    def __init__(self, store: MemoryStore, keys: set[str]) -> None:
        super().__init__(store)
        self._keys, self._memory = keys, store

    def list(self, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401  as stores have it
        for lease in self._memory.get(sorted(self._keys)):
            held_lease = lease if lease.owner == OTHER else self._memory.write(ClaimLease(lease, OTHER)).lease
            assert held_lease is not None
            assert isinstance(self._memory.write(RenewLease(held_lease)), Done)
        return self._memory.list(*arguments, **options)


MAX_NIGHTLY_RUNS, OTHER = 9, "other"


def split_and_merge_halves(stream: Stream) -> None:
    stream.split("a", "c", "d")
    stream.merge("e", "c", "d")


def merge_and_split(stream: Stream) -> None:
    stream.merge("c", "a", "b")
    stream.split("c", "d", "e")


LAYOUTS: dict[str, Callable[[Stream], None]] = {
    "as it was": lambda _: None,
    "split": lambda stream: stream.split("a", "c", "d"),
    "merge": lambda stream: stream.merge("c", "a", "b"),
    "merge of the halves of a split": split_and_merge_halves,
    "split of a merged shard": merge_and_split,
}


@pytest.mark.parametrize("when", ["before the first run", "between runs"])
@pytest.mark.parametrize("most", ["7", "1000"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_nightly_runs_read_every_record_once(
    older: Callable[..., OlderSpark], layout: Callable[[Stream], None], most: str, when: str
) -> None:
    """Runs continue where the previous one ended, through splits and merges, and end even if a shard is empty."""
    nights = NightlyRuns(older(a=texts("a", 9), b=texts("b", 5), empty=[]).stream)
    if when == "between runs":
        nights.run(maxRowsPerTrigger=most)
    layout(nights.stream)
    for key, records in nights.stream.records.items():
        records.extend(texts(key, 4) if key not in {"a", "b", "empty"} else [])
    nights.run_until_read(maxRowsPerTrigger=most)
    assert sorted(nights.rows) == nights.theirs


def test_nightly_runs_ignore_shards_of_a_living_owner(older: Callable[..., OlderSpark]) -> None:
    nights = NightlyRuns(older(a=texts("a", 9), b=texts("b", 5)).stream, elsewhere={"b"})
    assert isinstance(nights.store.write(CreateLease(Lease("b", owner=OTHER))), Done)
    nights.run_until_read()
    assert sorted(nights.rows) == texts("a", 9)


def test_nightly_runs_continue_after_the_lease_table_is_deleted(older: Callable[..., OlderSpark]) -> None:
    """The checkpointLocation knows which rows the sink has, whatever was deleted from the table."""
    nights = NightlyRuns(older(a=texts("a", 9), b=texts("b", 5)).stream)
    nights.run_until_read()
    nights.stream.put("a", "late")
    for lease in nights.store.list().leases:
        assert isinstance(nights.store.write(DeleteLease(lease)), Done)
    nights.run_until_read()
    assert sorted(nights.rows) == nights.theirs
