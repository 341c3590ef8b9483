"""Which records of a stream belong to a slice, and when a shard of the slice counts as read."""

import pytest
from attrs import define
from timed_shards import TEST_SLICE, UNTIL, TimedStream, read_to_the_end, record
from virtual_fleet import FaultyStore

from leasehold.adapters.consumer.slices import ARRIVAL_MARGIN_SECONDS, NOTE, Slice, SliceReader
from leasehold.adapters.sources.protocol import Batch, Reader, Record, SettledShard
from leasehold.balancer.model import LATEST, SHARD_END, TRIM_HORIZON, Lease, Position, at_timestamp
from leasehold.errors import SourceUnavailable, StoreError
from leasehold.stores.protocol import Capabilities, Done, Listing, Malformed
from leasehold.stores.writes import ClaimLease, CreateLease
from leasehold_lab.contract.actors import create_lease_with_owner
from leasehold_lab.simulator.world.world import ListSource, ShardRecords


def test_times_slightly_out_of_order_lose_no_record() -> None:
    records = [record(1, 59), record(2, 60.5), record(3, 59.5), record(4, 60 + ARRIVAL_MARGIN_SECONDS), record(5, 10)]
    assert read_to_the_end(TimedStream(shard_logs={"s-0": ShardRecords(records)})) == ([1, 3, 5], True)
    assert read_to_the_end(TimedStream(shard_logs={"s-0": ShardRecords(records, size=1)}, now=0.0)) == ([1, 3], True)
    source_with_early_record = TimedStream(
        shard_logs={"s-0": ShardRecords([record(1, 1), record(2, 1 - ARRIVAL_MARGIN_SECONDS), record(3, 2)])}
    )
    assert read_to_the_end(source_with_early_record, TEST_SLICE.begin) == ([1, 3], True)


def test_shard_does_not_end_before_the_slice_ends() -> None:
    source = TimedStream(shard_logs={"s-0": ShardRecords([record(1, 10)])}, now=UNTIL / 1000 - 1)
    assert read_to_the_end(source) == ([1], False)
    source.now = UNTIL / 1000
    assert read_to_the_end(source) == ([1], True)


def test_fully_read_shard_ends_when_it_is_reopened() -> None:
    source = TimedStream(shard_logs={"s-0": ShardRecords([record(1, 10)])}, tells_last=True)
    assert read_to_the_end(source, Position("1")) == ([], True)


def test_read_at_the_tip_counts_only_if_the_slice_was_over_before() -> None:
    class SourceWithSlowReads(TimedStream):
        def open(self, lease: Lease, start: Position) -> Reader:
            reader, source = super().open(lease, start), self

            class Moving:
                def read(self) -> Batch:
                    batch = reader.read()
                    source.now = UNTIL / 1000 + 1  # The slice ends before this read returns.
                    return batch

                def close(self) -> None:
                    reader.close()

            return Moving()

    source = SourceWithSlowReads(shard_logs={"s-0": ShardRecords([])}, now=0.0)
    reader = TEST_SLICE.source(source).open(Lease("s-0"), TRIM_HORIZON)
    assert [reader.read().ended for _ in range(2)] == [False, True]


def test_failing_clock_check_reads_nothing() -> None:
    @define
    class SourceThatFailsToSettle(TimedStream):
        fails: int = 1

        def settled(self, lease: Lease, until: float) -> SettledShard | None:
            self.fails -= 1
            if self.fails >= 0:
                raise SourceUnavailable("not now")
            return super().settled(lease, until)

    reader = TEST_SLICE.source(SourceThatFailsToSettle(shard_logs={"s-0": ShardRecords([record(1, 1)])})).open(
        Lease("s-0"), TRIM_HORIZON
    )
    with pytest.raises(SourceUnavailable):
        reader.read()
    assert len(reader.read().records) == 1
    assert isinstance(reader, SliceReader)


@pytest.mark.parametrize("since", [LATEST, SHARD_END, Position("7"), at_timestamp(UNTIL)])
def test_slice_has_a_start_and_an_end(since: Position) -> None:
    with pytest.raises(ValueError, match="slice: it begins"):
        Slice(since, UNTIL)


@pytest.mark.parametrize("note", [(), ((NOTE, "0..5"),)])
def test_table_with_other_leases_is_rejected(note: tuple[tuple[str, str], ...]) -> None:
    store = FaultyStore()
    create_lease_with_owner(store, Lease("s-0", annotations=note))
    with pytest.raises(ValueError, match=r"its table holds leases of another .*give it a table of its own"):
        TEST_SLICE.store(store)


def test_stream_without_times_is_rejected() -> None:
    with pytest.raises(ValueError, match="this source cannot detect"):
        TEST_SLICE.source(ListSource())


@pytest.mark.parametrize(("since", "until"), [(TRIM_HORIZON, 1), (at_timestamp(UNTIL - 1), UNTIL)])
def test_slice_may_begin_with_the_oldest_record_or_just_before_its_end(since: Position, until: int) -> None:
    assert Slice(since, until).since == since


def test_empty_slice_from_the_oldest_record_is_rejected() -> None:
    with pytest.raises(ValueError, match="no earlier than it ends"):
        Slice(TRIM_HORIZON, 0)


def batch(*arrived: float | None, first: int = 1, behind: float | None = 3.0, ended: bool = False) -> Batch:
    """Return a batch of records that arrived at these times. Their sequence numbers start with `first`."""
    records = tuple(Record(b"", str(first + index), arrived=time) for index, time in enumerate(arrived))
    return Batch(records, None, behind, 0.0, ended)


@pytest.mark.parametrize("times", [(), (None,), (1000.0, 1059.9), (1000.0, None)])
def test_read_within_the_slice_is_returned_unchanged(times: tuple[float | None, ...]) -> None:
    batch_read = batch(*times)
    assert TEST_SLICE.cut_batch(batch_read) is batch_read


@pytest.mark.parametrize("outside", [999.9, 1060.0])
def test_record_outside_the_slice_is_left_out(outside: float) -> None:
    """A record at the boundary of two adjacent slices belongs to exactly one of them."""
    batch_read = batch(1000.0, outside, None)
    batch_in_slice = TEST_SLICE.cut_batch(batch_read)
    assert (batch_in_slice.records, batch_in_slice.end) == (
        (batch_read.records[0], batch_read.records[2]),
        Position("3"),
    )


@define
class ScriptedSource:
    """A source that is also its own reader. The test defines its responses."""

    answers: list[Batch]
    settled_results: list[SettledShard | None]
    requests: list[tuple[Lease, float]]

    def settled(self, lease: Lease, until: float) -> SettledShard | None:
        self.requests.append((lease, until))
        return self.settled_results.pop(0)

    def read(self) -> Batch:
        return self.answers.pop(0)

    def close(self) -> None:
        """Discard the remaining answers, by which the test notices the call."""
        self.answers.clear()


def reads_that_ended_shard(
    settled_shard: SettledShard | None, *read: Batch, start: Position = TRIM_HORIZON
) -> list[bool]:
    """Return for each of these reads whether it ended the shard."""
    scripted_source = ScriptedSource(list(read), [settled_shard] * len(read), [])
    reader = SliceReader(scripted_source, scripted_source, Lease("s-0"), TEST_SLICE, start)
    return [reader.read().ended for _ in read]


EMPTY = batch(behind=0.0)
SETTLED_AT_SEVEN = SettledShard(Position("7"))


@pytest.mark.parametrize(
    ("settled", "read", "ended"),
    [
        (None, EMPTY, False),
        (None, batch(ended=True), True),
        (None, batch(1064.9), False),
        (None, batch(1065.0), True),
        (None, batch(None), False),
        (SettledShard(), EMPTY, True),
        (SettledShard(), batch(behind=1.0), False),
        (SettledShard(), batch(behind=None), False),
        (SettledShard(), batch(1001.0, behind=0.0), False),
        (SettledShard(), Batch((), Position("6"), 0.0, 0.0), False),
        (SETTLED_AT_SEVEN, EMPTY, False),
        (SETTLED_AT_SEVEN, batch(1001.0, first=6), False),
        (SETTLED_AT_SEVEN, batch(1001.0, first=7), True),
        (SETTLED_AT_SEVEN, batch(1001.0, first=8), True),
        (SettledShard(Position("7"), 994.5), EMPTY, True),
        (SettledShard(Position("7"), 995.0), EMPTY, False),
    ],
)
def test_shard_ends_once_all_records_of_the_slice_are_read(
    settled: SettledShard | None, read: Batch, ended: bool
) -> None:
    assert reads_that_ended_shard(settled, read) == [ended]


def test_earlier_read_counts_toward_the_end() -> None:
    scripted = ScriptedSource([batch(1001.0, first=7), EMPTY, EMPTY], [None, SETTLED_AT_SEVEN], [])
    reader = SliceReader(scripted, scripted, Lease("s-0"), TEST_SLICE, TRIM_HORIZON)
    assert [reader.read().ended for _ in range(3)] == [False, True, True]
    assert scripted.requests == [(Lease("s-0"), 1060.0)] * 2
    scripted.answers.append(EMPTY)
    reader.close()
    assert scripted.answers == []


def test_reader_begins_at_the_slice_start_unless_a_checkpoint_is_known() -> None:
    """A new shard is read from the beginning of the slice, and a lease with a checkpoint from there."""
    source = TimedStream(shard_logs={"s-0": ShardRecords([])})
    for start in (TRIM_HORIZON, LATEST, Position("7")):
        TEST_SLICE.source(source).open(Lease("s-0"), start)
    assert source.opened == [("s-0", TEST_SLICE.begin), ("s-0", TEST_SLICE.begin), ("s-0", Position("7"))]


def test_new_lease_is_annotated_with_its_slice() -> None:
    """The annotation of the slice is added, and other annotations are kept."""
    store = FaultyStore()
    slice_store = TEST_SLICE.store(store)
    slice_store.write(CreateLease(Lease("s-0", annotations=(("z", "1"), ("a", "2")))))
    assert store.row("s-0").annotations == (("a", "2"), (NOTE, TEST_SLICE.note), ("z", "1"))
    assert isinstance(slice_store.write(ClaimLease(store.row("s-0"), "w-1")), Done)
    assert store.row("s-0").owner == "w-1"
    assert TEST_SLICE.store(store).list().leases == store.list().leases


@pytest.mark.parametrize(
    ("notes", "message"),
    [
        ((), "slice: its table holds leases of another group (s-0); give it a table of its own"),
        (((NOTE, "0..5"),), "slice: its table holds leases of another slice (s-0); give it a table of its own"),
    ],
)
def test_error_names_the_slice_of_the_tables_leases(notes: tuple[tuple[str, str], ...], message: str) -> None:
    store = FaultyStore()
    create_lease_with_owner(store, Lease("s-0", annotations=notes))
    with pytest.raises(ValueError, match=r"^slice: its table") as exc_info:
        TEST_SLICE.store(store)
    assert str(exc_info.value) == message


def test_table_with_an_unreadable_row_is_rejected() -> None:
    class Damaged(FaultyStore):
        def list(self) -> Listing:
            return Listing((), (Malformed("s-9", "x", "it is odd"),))

    with pytest.raises(StoreError, match=r"^slice: row s-9 of its table cannot be read"):
        TEST_SLICE.store(Damaged())


def test_table_without_room_for_the_annotation_is_rejected() -> None:
    with pytest.raises(ValueError, match="slice: the Azure SDKs' layout has no room for it"):
        TEST_SLICE.store(FaultyStore(Capabilities(counts_owners=False)))


@pytest.mark.parametrize(("sub", "ended"), [(2, False), (3, True), (4, True)])
def test_shard_ends_with_the_last_user_record_of_an_aggregate(sub: int, ended: bool) -> None:
    read = Batch((Record(b"", "7", sub, arrived=1001.0),), None, 0.0, 0.0)
    assert reads_that_ended_shard(SettledShard(Position("7", 3)), read) == [ended]


def test_slice_of_the_first_seconds_begins_at_the_first_time() -> None:
    assert Slice(at_timestamp(1000), UNTIL).begin == at_timestamp(0)
