"""The Spark data source `dynamodb-leased`: the changes of a DynamoDB table, its shards shared with a group.

A query alone: the service has no time of a shard up to which all is known, by which a batch could end.
"""

from collections.abc import Mapping
from functools import partial

from leasehold.adapters.sources.protocol import Source
from leasehold.adapters.spark.batch import Bounds, bounds_of
from leasehold.adapters.spark.dynamodb_streams import rows as change_rows
from leasehold.adapters.spark.feed import SourceSpec
from leasehold.adapters.spark.leased_source import LeasedSource
from leasehold.adapters.spark.options import Given, LeaseOptions, lease_options, start_of

INTERVAL_MS = 250
"""Between two requests for one shard, of which the service answers five a second."""

ROWS_PER_SHARD = 100_000


class DynamoLeased(LeasedSource):
    """`spark.readStream.format("dynamodb-leased")`."""

    FORMAT, DDL = "dynamodb-leased", change_rows.DDL

    def asked(self, options: Mapping[str, str]) -> tuple[SourceSpec, LeaseOptions, None, Bounds]:
        """Read one table's stream; any worker can read a shard again, for a day."""
        given = Given(options)
        table = given.need("dynamodb.tableName", "name the table, or give its stream's ARN")
        place = {"region": given.text("dynamodb.region"), "endpoint": given.text("dynamodb.endpointUrl")}
        interval = given.number("dynamodb.getRecords.fetchIntervalMs", INTERVAL_MS, least=INTERVAL_MS) or 0
        rows = given.number("dynamodb.maxFetchRecordsPerShard", ROWS_PER_SHARD) or 0
        given.refuse(
            {"dynamodb.endingPosition": "a table's stream is read by a query; trigger(availableNow=True) ends it"}
        )
        name = "dynamodb.startingPosition"
        text = given.text(name)
        since = start_of(name, text, ("TRIM_HORIZON",), ("LATEST",), text if text.isdigit() else "") if text else None
        bounds = bounds_of(given, "dynamodb", since, None)
        lease = lease_options(given, "", bounds.initial(), 10.0, "maxRowsPerTrigger")
        if lease.readers != 0:
            raise ValueError(
                "option lease.readers: not supported; two processes at a time may read a shard, of all applications; "
                "leave it out"
            )
        given.done()
        spec = SourceSpec(
            open=partial(_source, table, {name: value for name, value in place.items() if value}),
            columns=change_rows.columns(),
            interval_seconds=interval / 1000,
            shard_rows=rows,
            rereadable=True,
            stream=f"dynamodb-streams://{table}",
        )
        return spec, lease, None, bounds


def _source(table: str, options: Mapping[str, str]) -> Source:
    # The planner's process needs no client.
    from leasehold.adapters.sources.dynamodb_streams import open_url  # noqa: PLC0415

    return open_url(table, options)
