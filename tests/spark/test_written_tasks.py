"""A task tags its rows by the job, the run and their content, so that readers drop only repetitions."""

from collections.abc import Iterable
from hashlib import sha256
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
import pytest
from attrs import Factory, define, evolve

from leasehold.adapters.sources.deduplication import Tag
from leasehold.adapters.spark import sink
from leasehold.adapters.spark.event_hubs.sink import COLUMNS as HUB_COLUMNS
from leasehold.adapters.spark.options import OptionReader
from leasehold.adapters.spark.sink import (
    ALL_SINKS,
    BATCH_ID,
    QUERY_ID,
    ROW_OVERHEAD_BYTES,
    RUN_ID,
    RUN_NUMBER_LIMIT,
    SinkColumns,
    WriteIdentity,
    compute_edition,
    split_into_sections,
    write_task,
)

IDENTITY = WriteIdentity("name", 4, 5)


@define
class Task:
    """The context of a task, with the local properties that Spark has set."""

    properties: dict[str, str]
    number: int = 3

    def getLocalProperty(self, name: str) -> str | None:  # noqa: N802  Spark's name
        return self.properties.get(name)

    def partitionId(self) -> int:  # noqa: N802  Spark's name
        return self.number

    def get(self) -> "Task":
        return self


@define
class Target:
    """A stream that keeps the tags and the numbers of rows that are written to it."""

    written: list[tuple[Tag, int]] = Factory(list)
    opened: int = 0
    columns: SinkColumns = HUB_COLUMNS

    def open_writer(self) -> "Target":
        self.opened += 1
        return self

    def write(self, rows: pa.Table, tag: Tag) -> None:
        self.written.append((tag, rows.num_rows))


def make_batch(*bodies: bytes, partition: str | None = None) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(
        {"body": list(bodies), "partitionId": pa.array([partition] * len(bodies), pa.string())}
    )


def edition(**columns: Iterable[Any]) -> str:
    (section,) = split_into_sections(HUB_COLUMNS, [pa.RecordBatch.from_pydict(columns)])
    return compute_edition(section)


def tag_in_task(monkeypatch: pytest.MonkeyPatch, identity: WriteIdentity, *values: str, task: int = 3) -> Tag:
    """Return the first tag in a task with these values of the query, the batch and the run."""
    properties = dict(zip((QUERY_ID, BATCH_ID, RUN_ID), values, strict=False))
    monkeypatch.setattr(sink, "TaskContext", Task(properties, task))
    return identity.make_first_tag()


def test_tag_of_a_query_depends_on_every_part_of_its_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    tag = tag_in_task(monkeypatch, IDENTITY, "query", "7", "run")
    assert (tag.batch, tag.part, tag.row) == (7, "3", 0)
    assert tag.run == int.from_bytes(sha256(b"run").digest()[:8]) % RUN_NUMBER_LIMIT
    assert tag_in_task(monkeypatch, WriteIdentity("other", 9, 9), "query", "7", "run") == tag
    assert tag_in_task(monkeypatch, IDENTITY, "query", "7", "run", task=8) == tag._replace(part="8")
    assert tag_in_task(monkeypatch, IDENTITY, "query", "0", "run") == tag._replace(batch=0)
    assert tag_in_task(monkeypatch, IDENTITY, "query", "7") == tag._replace(run=5)
    others = [
        tag_in_task(monkeypatch, IDENTITY, "another", "7", "run"),
        tag_in_task(monkeypatch, evolve(IDENTITY, location="/folder"), "query", "7", "run"),
    ]
    assert all(other.query != tag.query and other._replace(query=tag.query) == tag for other in others)


def test_named_job_ignores_the_query_in_which_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """`foreachBatch` may repeat a named job in another query, and its rows are still the same."""
    named = evolve(IDENTITY, named=True)
    tag = tag_in_task(monkeypatch, named)
    assert (tag.batch, tag.run) == (4, 5)
    assert tag_in_task(monkeypatch, named, "query", "7", "run") == tag
    assert tag_in_task(monkeypatch, evolve(named, batch=6)).query != tag.query


def test_options_name_a_job_fully_or_not_at_all() -> None:
    def read(**options: str) -> WriteIdentity:
        return WriteIdentity.from_options(
            OptionReader({name.replace("_", "."): text for name, text in options.items()}, ALL_SINKS)
        )

    named = read(writer_name="n", writer_batch="0", checkpointLocation="/folder/")
    assert (named.query, named.batch, named.named, named.location) == ("n", 0, True, "/folder")
    unnamed, another = read(), read()
    assert not unnamed.named
    assert unnamed.query != another.query
    for options in ({"writer_name": "n"}, {"writer_batch": "0"}):
        with pytest.raises(ValueError, match="neither of them"):
            read(**options)


def test_edition_depends_on_every_value_and_its_limits() -> None:
    """Readers would drop new rows as duplicates if two contents had one edition."""
    editions = [
        edition(body=[b"ab", b"c"]),
        edition(body=[b"a", b"bc"]),
        edition(body=[b"abc"]),
        edition(body=[b"ab", b"c"], partitionKey=["k", "k"]),
        edition(body=[b"ab", b"c"], partitionKey=["", ""]),
        edition(body=[b"ab", b"c"], partitionId=["k", "k"]),
        edition(body=[b"ab", b"d"]),
        edition(body=[b"c", b"ab"]),
    ]
    assert len(set(editions)) == len(editions)


def test_edition_ignores_the_order_of_properties() -> None:
    properties = pa.map_(pa.string(), pa.string())
    first, second, third = (
        edition(body=[b"a"], properties=pa.array([pairs], properties))
        for pairs in ([("x", "1"), ("y", "2")], [("y", "2"), ("x", "1")], [("x", "2"), ("y", "1")])
    )
    assert first == second != third


def test_sections_are_numbered_and_the_stream_is_opened_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink, "SECTION_BYTES", 2 * (ROW_OVERHEAD_BYTES + 1))
    monkeypatch.setattr(sink, "TaskContext", Task({}))
    target = Target()
    result = write_task(target, IDENTITY, iter([make_batch(b"a"), make_batch(b"b", b"c", b"d"), make_batch(b"e")]))
    assert [(tag.part, count) for tag, count in target.written] == [("3-0", 2), ("3-1", 2), ("3-2", 1)]
    assert len({tag.edition for tag, _ in target.written}) == 3
    assert (target.opened, result.rows) == (1, 5)
    assert result.bytes > 0


def test_task_without_rows_opens_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink, "TaskContext", Task({}))
    target = Target()
    assert write_task(target, IDENTITY, iter([make_batch()])).rows == 0
    assert target.opened == 0


def test_null_is_rejected_only_in_a_required_column() -> None:
    assert HUB_COLUMNS.select_columns(make_batch(b"a")).column_names == list(HUB_COLUMNS.types)
    with pytest.raises(ValueError, match="column body: a row has null"):
        HUB_COLUMNS.select_columns(pa.RecordBatch.from_pydict({"BODY": pa.array([b"a", None], pa.binary())}))


def test_rows_with_equal_keys_keep_their_order() -> None:
    bodies = [b"%03d" % number for number in range(999)]
    batches = [make_batch(*bodies[start : start + 9], partition=str(start % 2)) for start in range(0, 999, 9)]
    (section,) = split_into_sections(HUB_COLUMNS, batches)
    partitions = section["partitionId"].to_pylist()
    assert partitions == sorted(partitions)
    for partition in "01":
        written = [
            body for body, other in zip(section["body"].to_pylist(), partitions, strict=True) if other == partition
        ]
        assert len(written) > 9
        assert written == sorted(written)
