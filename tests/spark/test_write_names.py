"""The tags of a Spark sink's rows are equal if one write repeats another, and different otherwise."""

from types import SimpleNamespace

import pytest
from pyspark.sql.types import BinaryType, StringType, StructField, StructType

from leasehold.adapters.sources.deduplication import Tag
from leasehold.adapters.spark import sink
from leasehold.adapters.spark.kinesis.data_source import KinesisLeased
from leasehold.adapters.spark.options import OptionReader
from leasehold.adapters.spark.sink import ALL_SINKS, BATCH_ID, QUERY_ID, RUN_ID, WriteIdentity

QUERY = {QUERY_ID: "query", BATCH_ID: "7", RUN_ID: "run"}
HERE = {"checkpointLocation": "s3a://bucket/here"}
NAMED = {"writer.name": "orders", "writer.batch": "7"}

Write = tuple[dict[str, str], dict[str, str]]
"""The options of a writer, and the Spark properties of its tasks."""

CASES: dict[str, tuple[Write, Write, bool, bool]] = {
    "a batch again in one run": ((HERE, QUERY), (HERE, QUERY), True, True),
    "a batch again in the next run": ((HERE, QUERY), (HERE, QUERY | {RUN_ID: "next"}), True, False),
    "the next batch of a run": ((HERE, QUERY), (HERE, QUERY | {BATCH_ID: "8"}), True, True),
    "a copy of the checkpoint": ((HERE, QUERY), ({"checkpointLocation": "s3a://bucket/there"}, QUERY), False, True),
    "one location with a slash": ((HERE, QUERY), ({"checkpointLocation": "s3a://bucket/here/"}, QUERY), True, True),
    "no location in options": (({}, QUERY), ({}, QUERY), True, True),
    "two queries": ((HERE, QUERY), (HERE, QUERY | {QUERY_ID: "other"}), False, True),
    "a named job again": ((NAMED, {}), (NAMED, {}), True, False),
    "a named job in foreachBatch again": ((NAMED, QUERY), (NAMED, QUERY | {RUN_ID: "next"}), True, False),
    "two batches of a name": ((NAMED, {}), (NAMED | {"writer.batch": "8"}, {}), False, False),
    "two names": ((NAMED, {}), (NAMED | {"writer.name": "others"}, {}), False, False),
    "a name that ends as a batch does": (
        ({"writer.name": "1 a", "writer.batch": "1"}, {}),
        ({"writer.name": "a", "writer.batch": "11"}, {}),
        False,
        False,
    ),
    "two jobs without a name": (({}, {}), ({}, {}), False, False),
}


@pytest.mark.parametrize(("one", "other", "one_query", "one_run"), CASES.values(), ids=CASES)
def test_writes_have_the_same_name_only_if_one_repeats_the_other(
    monkeypatch: pytest.MonkeyPatch, one: Write, other: Write, *, one_query: bool, one_run: bool
) -> None:
    """A named job is identified by its name and batch, and a query by its id and checkpointLocation."""

    def make_tag(write: Write) -> Tag:
        options, properties = write
        context = SimpleNamespace(getLocalProperty=properties.get, partitionId=lambda: 3)
        monkeypatch.setattr(sink, "TaskContext", SimpleNamespace(get=lambda: context))
        return WriteIdentity.from_options(OptionReader(options, ALL_SINKS)).make_first_tag()

    first_tag, second_tag = make_tag(one), make_tag(other)
    assert (first_tag.query == second_tag.query, first_tag.run == second_tag.run) == (one_query, one_run)
    assert len(first_tag.context) < len(Tag("q" * 11, 10**12, 10**9, "3", "", 0).context)


def test_query_that_names_its_checkpoint_location_has_names_of_its_own() -> None:
    """Queries with copies of one checkpoint have the same id in Spark. The option tells them apart."""
    schema = StructType([StructField("data", BinaryType()), StructField("partitionKey", StringType())])
    options = {"kinesis.streamName": "orders", "kinesis.region": "eu-west-1"}
    locations = [
        KinesisLeased({**options, **more_options})._make_sink(schema, overwrites=False)[1].location  # noqa: SLF001
        for more_options in ({}, {"checkpointLocation": "s3://jobs/a/"}, {"checkpointLocation": "s3://jobs/b"})
    ]
    assert locations == ["", "s3://jobs/a", "s3://jobs/b"]
