"""The tags of a Spark sink on its records can be read back, are ignored by the KCL, and identify repeated rows."""

import pickle
from typing import Any, cast

import kcl_jar
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from leasehold.adapters.sources.deduplication import SeenRows, Tag, merge_parent_tokens
from leasehold.adapters.sources.kinesis.aggregation import decode
from leasehold.adapters.sources.kinesis.aggregation.decode import deaggregate
from leasehold.adapters.sources.kinesis.aggregation.encode import Aggregate, max_framing_bytes
from leasehold.adapters.sources.kinesis.hash_keys import hash_partition_key
from leasehold.adapters.sources.kinesis.poller import Poller
from leasehold.adapters.sources.kinesis.producer.core import Entry, ShardQueue, TokenBucket
from leasehold.adapters.spark.kinesis.poller import ArrowPoller
from leasehold.adapters.spark.kinesis.rows import make_columns
from leasehold.adapters.spark.row_buffer import RowBuffer
from leasehold.adapters.spark.rows import make_chunk
from leasehold.balancer.model import HASH_KEYS, TRIM_HORIZON, Lease, Position

TAGS = st.builds(
    Tag,
    st.sampled_from(["q", "other"]),
    st.just(100),
    st.integers(0, 2),
    st.sampled_from(["0-0", "7-1"]),
    st.sampled_from(["e", "f-_"]),
    st.integers(0, 300),
    st.just(HASH_KEYS),
)
ROWS = st.lists(
    st.tuples(st.binary(max_size=300), st.sampled_from("abc"), st.none() | TAGS, st.none() | st.just("17")), min_size=1
)


def sealed(rows: list[tuple[bytes, str, Tag | None, str | None]], limit: int = 1 << 20) -> tuple[bytes, int]:
    """Return an aggregate of as many of these rows as fit, and the number of these rows."""
    aggregate, count = Aggregate(limit), 0
    for data, key, tag, hash_key in rows:
        label = (b"", 0) if tag is None else (tag.context, tag.row)
        if not aggregate.add(data, key, hash_key, *label):
            break
        count += 1
    encoded = aggregate.encode()
    assert len(encoded) + len(aggregate.partition_key.encode()) == aggregate.size <= limit
    return encoded, count


@given(ROWS, st.integers(700, 3000))
def test_tags_are_read_back_and_count_as_bytes(
    rows: list[tuple[bytes, str, Tag | None, str | None]], limit: int
) -> None:
    data, count = sealed(rows, limit)
    user_records = deaggregate(data, "a", None)
    if count == 1 and rows[0][2] is None:
        assert user_records.tags == ()  # A single record is not aggregated.
        return
    packed_rows = rows[:count]
    assert list(zip(user_records.payloads, user_records.keys, user_records.hash_keys, strict=True)) == [
        (row[0], row[1], row[3]) for row in packed_rows
    ]
    assert [*user_records.tags] == ([row[2] for row in packed_rows] if any(row[2] for row in packed_rows) else [])


@given(st.binary(min_size=1, max_size=100), st.integers(0, 10**15 - 1), st.text("ab", min_size=1, max_size=9))
def test_record_with_a_tag_fits_the_room_reserved_for_it(data: bytes, row: int, key: str) -> None:
    """With the reserved room, the stream accepts even the largest record that the sink accepts."""
    context = Tag("q" * 11, 10**10, 10**9, "9999-99", "e" * 8, 0).context
    queue = ShardQueue("s", HASH_KEYS, TokenBucket(1.0))
    entry = Entry(0, data, key, hash_partition_key(key), str(HASH_KEYS[1]), 0.0, 1.0, context=context, row=row)
    queue.append_newest(entry)
    unit = queue.pack_unit(1)
    assert unit.size <= entry.single_record_size == len(data) + len(key) + max_framing_bytes(context)
    assert deaggregate(unit.data).tags == [Tag("q" * 11, 10**10, 10**9, "9999-99", "e" * 8, row)]


@pytest.mark.parametrize("key", ["k", "\u00e9\u20ac", "\U0001f600" * 64])
@pytest.mark.parametrize("hash_key", [None, "7"])
@pytest.mark.parametrize("context", [b"", b"q.1.2.p.e"])
@pytest.mark.parametrize("count", [1, 2])
def test_aggregate_accepts_exactly_what_fits(key: str, hash_key: str | None, context: bytes, count: int) -> None:
    """The service counts the bytes of the data and of the partition key."""
    unlimited = Aggregate(10**6)
    for row in range(count):
        assert unlimited.add(b"x" * 300, key, hash_key, context, row)
    size = len(unlimited.encode()) + len(unlimited.partition_key.encode())
    assert unlimited.size == size
    for limit, fits in ((size, True), (size - 1, False)):
        aggregate = Aggregate(limit)
        assert [aggregate.add(b"x" * 300, key, hash_key, context, row) for row in range(count)][-1] is fits
        assert aggregate.count == count - (not fits)


def test_short_tag_refers_to_the_previous_record_even_if_it_is_misplaced() -> None:
    tags = [Tag("q", 100, 0, "0-0", "e", row, HASH_KEYS) for row in range(3)]
    data, _ = sealed([(b"x", "a", tag, hash_key) for tag, hash_key in zip(tags, ("17", "200", "200"), strict=True)])
    assert deaggregate(data, hash_range=(100, HASH_KEYS[1])).tags == tags[1:]


class ShardReads:
    """A reader of a shard that starts at a given position, and the responses of the service to it."""

    def __init__(self, kind: type[Poller], records: list[bytes], start: Position) -> None:
        self.poller = kind(cast("Any", object()), "s", "shard-0", start, HASH_KEYS)
        first_index = int(start.sequence) if start.numbered else 0
        rows = [{"Data": data, "SequenceNumber": str(n), "PartitionKey": "a"} for n, data in enumerate(records)]
        self.rows = rows[first_index:]

    def batches(self, size: int) -> list[Any]:
        """Return all batches, with at most `size` records each."""
        row_groups = [self.rows[index : index + size] for index in range(0, len(self.rows), size)]
        response: Any = {"NextShardIterator": "more", "MillisBehindLatest": 1}
        return [self.poller._make_batch(response | {"Records": rows}) for rows in row_groups]  # noqa: SLF001  parse a response of Kinesis


def test_child_shard_starts_with_the_rows_that_its_parent_has_read() -> None:
    tags = [Tag("q", 100, 0, "0-0", "e", row, HASH_KEYS) for row in range(2)]
    reads = ShardReads(Poller, [sealed([(b"x", "a", tag, None) for tag in tags])[0]], TRIM_HORIZON)
    response: Any = {"Records": reads.rows, "MillisBehindLatest": 0}
    last_batch = reads.poller._make_batch(response)  # noqa: SLF001  parse a response of Kinesis
    assert last_batch.ended
    assert last_batch.reached is not None
    token = merge_parent_tokens([Lease("shard-0", checkpoint=last_batch.reached)])
    assert SeenRows.of(evolve(TRIM_HORIZON, token=token)).check_duplicate(tags[1], lambda: 0, Position("1"))


class ScriptedClient:
    """A Kinesis client whose GetRecords returns these responses, in order."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        self.answers = [*answers]

    def get_shard_iterator(self, **_request: object) -> dict[str, str]:
        return {"ShardIterator": "first"}

    def get_records(self, **_request: object) -> dict[str, Any]:
        return self.answers.pop(0)


def test_tagged_records_of_an_unreadable_response_arrive_with_the_next() -> None:
    """If a response cannot be parsed, its tags are not remembered, so its records are not skipped when read again."""
    tags = [Tag("q", 100, 0, "0-0", "e", row, HASH_KEYS) for row in range(3)]
    data, _ = sealed([(b"x", "a", tag, None) for tag in tags])

    def make_response() -> dict[str, Any]:
        row = {"Data": data, "SequenceNumber": "4", "PartitionKey": "a"}
        return {"Records": [row], "NextShardIterator": "more", "MillisBehindLatest": 0}

    client = ScriptedClient(make_response() | {"ChildShards": [{"ShardId": "c", "HashKeyRange": {}}]}, make_response())
    poller = Poller(cast("Any", client), "orders", "s-0", TRIM_HORIZON, HASH_KEYS)
    assert poller.read().fault is not None
    assert [record.data for record in poller.read().records] == [b"x"] * 3


def test_tagged_records_before_an_unreadable_one_arrive_with_the_next_response() -> None:
    tags = [Tag("q", 100, 0, "0-0", "e", row, HASH_KEYS) for row in range(3)]
    aggregates = [sealed([(b"%d" % tag.row, "a", tag, None)])[0] for tag in tags]

    def make_response(*sequence_numbers: str) -> dict[str, Any]:
        rows = [
            {"Data": data, "SequenceNumber": number, "PartitionKey": "a"}
            for data, number in zip(aggregates, sequence_numbers, strict=True)
        ]
        return {"Records": rows, "NextShardIterator": "more", "MillisBehindLatest": 0}

    client = ScriptedClient(make_response("4", "five", "6"), make_response("4", "5", "6"))
    poller = Poller(cast("Any", client), "orders", "s-0", TRIM_HORIZON, HASH_KEYS)
    assert poller.read().fault
    assert [record.data for record in poller.read().records] == [b"0", b"1", b"2"]


def test_tagged_records_of_a_partly_unreadable_response_arrive_once_it_is_read_again() -> None:
    data, _ = sealed([(b"0", "a", Tag("q", 100, 0, "0-0", "e", 0, HASH_KEYS), None)])

    def make_response(last_number: str) -> dict[str, Any]:
        tagged_row = {"Data": data, "SequenceNumber": "4", "PartitionKey": "a"}
        last_row = {"Data": b"1", "SequenceNumber": last_number, "PartitionKey": "a"}
        return {"Records": [tagged_row, last_row], "NextShardIterator": "more", "MillisBehindLatest": 0}

    client = ScriptedClient(make_response("five"), make_response("5"))
    poller = Poller(cast("Any", client), "orders", "s-0", TRIM_HORIZON, HASH_KEYS)
    assert poller.read().fault
    assert [record.data for record in poller.read().records] == [b"0", b"1"]


def test_untagged_aggregate_keeps_the_token_of_the_rows_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint at any record contains the rows that were read before it."""
    monkeypatch.setattr(decode, "_CAN_LOCATE", True)
    tagged, _ = sealed([(b"x", "a", Tag("q", 100, 0, "0-0", "e", 0), None)])
    untagged, _ = sealed([(b"y", "a", None, None)] * 2)
    (batch,) = ShardReads(Poller, [tagged, untagged], TRIM_HORIZON).batches(2)
    assert [record.data for record in batch.records] == [b"x", b"y", b"y"]
    assert {record.token for record in batch.records} == {batch.token} != {""}


def test_tagged_record_of_a_misplaced_aggregate_keeps_its_number(caplog: pytest.LogCaptureFixture) -> None:
    """The token contains the number of the record in its aggregate, as the checkpoint does."""
    caplog.set_level("INFO", "leasehold")
    tags = [Tag("q", 100, 0, "0-0", "e", row) for row in range(3)]
    data, _ = sealed([(b"x", "a", tag, hash_key) for tag, hash_key in zip(tags, ("17", "200", "200"), strict=True)])
    row = {"Data": data, "SequenceNumber": "4", "PartitionKey": "a"}
    poller = Poller(cast("Any", object()), "s", "shard-0", TRIM_HORIZON, (100, HASH_KEYS[1]))
    response: Any = {"Records": [row], "NextShardIterator": "more"}
    records = poller._make_batch(response).records  # noqa: SLF001  parse a response of Kinesis
    assert [record.position.order for record in records] == [(1, 4, 1), (1, 4, 2)]
    for record in records:
        assert SeenRows.of(record.position).position == Position("4", record.sub_sequence_number)
    poller.close()
    assert "duplicates" not in caplog.text


def test_records_before_the_checkpoint_are_no_duplicates(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "leasehold")
    data, _ = sealed([(b"x", "a", Tag("q", 100, 0, "0-0", "e", row), None) for row in range(3)])
    (batch,) = ShardReads(Poller, [data], TRIM_HORIZON).batches(1)
    resumed = ShardReads(Poller, [data], batch.records[0].position)
    assert [len(batch.records) for batch in resumed.batches(1)] == [2]
    resumed.poller.close()
    assert caplog.messages == []


def test_repeated_row_is_recognized_by_its_explicit_hash_key() -> None:
    tag = Tag("q", 100, 0, "0-0", "e", 0, (0, 9))
    aggregate = Aggregate(1 << 20, *tag.span)
    assert aggregate.add(b"x", "a", "5", tag.context, tag.row)
    assert hash_partition_key("a") > tag.span[1]
    (batch,) = ShardReads(Poller, [aggregate.encode()] * 2, TRIM_HORIZON).batches(2)
    assert [record.data for record in batch.records] == [b"x"]


def test_possible_duplicates_are_in_the_batch_that_contains_them() -> None:
    tags = [Tag("q", 1, 5, "0-0", "e", 0), Tag("q", 2, 3, "0-0", "e", 0), Tag("q", 2, 9, "0-0", "e", 0)]
    records = [sealed([(b"x", "a", tag, None)])[0] for tag in tags]
    batches = ShardReads(Poller, records, TRIM_HORIZON).batches(1)
    assert [(len(batch.records), batch.possible_duplicates) for batch in batches] == [(1, 0), (1, 1), (1, 0)]


def test_tokens_stay_with_their_records_in_slices_and_copies() -> None:
    untagged, _ = sealed([(b"y", "a", None, None)] * 2)
    tagged, _ = sealed([(b"x", "a", Tag("q", 100, 0, "0-0", "e", row), None) for row in range(3)])
    (batch,) = ShardReads(Poller, [untagged, tagged, untagged], TRIM_HORIZON).batches(3)
    rows = tuple(batch.records)
    assert [row.token for row in rows[:2]] == ["", ""]
    assert all(row.token for row in rows[2:])
    ends = range(len(rows) + 1)
    assert [tuple(batch.records[begin:end]) for begin in ends for end in ends] == [
        rows[begin:end] for begin in ends for end in ends
    ]
    assert [batch.records[index] for index in range(len(rows))] == [*rows]
    assert tuple(batch.records[::-1]) == rows[::-1]
    assert tuple(pickle.loads(pickle.dumps(batch.records))) == rows  # noqa: S301  our own


@settings(max_examples=60)
@given(st.lists(ROWS, min_size=1, max_size=6), st.integers(1, 3), st.data())
def test_reader_that_resumes_anywhere_gets_the_same_records(
    aggregates: list[list[tuple[bytes, str, Tag | None, str | None]]], size: int, draw: st.DataObject
) -> None:
    """A reader that starts at a checkpoint in the middle of a batch neither repeats nor skips rows."""
    records = [sealed(rows)[0] for rows in aggregates]
    all_records = [
        record for batch in ShardReads(Poller, records, TRIM_HORIZON).batches(size) for record in batch.records
    ]
    tags = [tag for data in records for tag in deaggregate(data).tags if tag is not None]
    assert len(all_records) >= len({(tag.query, tag.part, tag.edition) for tag in tags if tag.batch == 2})
    if not all_records:
        return
    resume_index = draw.draw(st.integers(0, len(all_records) - 1))
    resumed = [
        user_record
        for batch in ShardReads(Poller, records, all_records[resume_index].position).batches(size)
        for user_record in batch.records
    ]
    assert [(user_record.position.order, user_record.token) for user_record in resumed] == [
        (read_record.position.order, read_record.token) for read_record in all_records[resume_index + 1 :]
    ]


@settings(max_examples=60)
@given(st.lists(ROWS, min_size=1, max_size=6), st.integers(1, 3), st.integers(1, 5))
def test_columns_drop_the_same_records_and_end_at_the_same_positions(
    aggregates: list[list[tuple[bytes, str, Tag | None, str | None]]], size: int, limit: int
) -> None:
    """Spark gets the same rows as the handler of a worker, and the same rows again if a batch is repeated."""
    records = [sealed(rows)[0] for rows in aggregates]
    worker_records = [
        record for batch in ShardReads(Poller, records, TRIM_HORIZON).batches(size) for record in batch.records
    ]
    buffer, spark_rows = RowBuffer(make_columns("s")), list[tuple[bytes, tuple[int, int]]]()
    for batch in ShardReads(ArrowPoller, records, TRIM_HORIZON).batches(size):
        chunk = make_chunk(make_columns("s"), Lease("shard-0"), batch)
        assert chunk is not None
        buffer.append_chunk(chunk)
    tokens = list[str]()
    while (taken_rows := buffer.take_rows(limit, 1 << 40)) is not None:
        spark_rows += zip(
            taken_rows.rows["data"].to_pylist(),
            zip(
                map(int, taken_rows.rows["sequenceNumber"].to_pylist()),
                taken_rows.rows["subSequenceNumber"].to_pylist(),
                strict=True,
            ),
            strict=True,
        )
        tokens.append(taken_rows.ends.token)
    assert spark_rows == [
        (worker_record.data, (int(worker_record.sequence_number), worker_record.sub_sequence_number))
        for worker_record in worker_records
    ]
    if worker_records and tokens:
        assert tokens[-1] == ShardReads(Poller, records, TRIM_HORIZON).batches(99)[-1].token


@pytest.mark.more
@settings(max_examples=1)
@given(st.lists(ROWS, min_size=20, max_size=60))
def test_kcl_ignores_the_tags(aggregates: list[list[tuple[bytes, str, Tag | None, str | None]]]) -> None:
    if missing_tools := kcl_jar.missing():
        pytest.skip(f"the KCL jar is not run: no {missing_tools}")
    rows: list[list[tuple[bytes, str, Tag | None, str | None]]] = [
        [(data, key, tag or Tag("q", 1, 0, "0", "e", 0), None) for data, key, tag, _ in aggregate_rows]
        for aggregate_rows in aggregates
    ]
    kcl_results = kcl_jar.kcl_records((sealed(aggregate_rows)[0], *HASH_KEYS) for aggregate_rows in rows)
    assert kcl_results == [
        tuple((key, None, data, sub, True) for sub, (data, key, _, _) in enumerate(aggregate_rows))
        for aggregate_rows in rows
    ]
