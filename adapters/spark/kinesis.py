"""The Spark data source `kinesis-leased`: a Kinesis stream, its shards shared with the rest of the group."""

from collections.abc import Mapping
from typing import ClassVar

from pyspark.sql.datasource import DataSource, DataSourceStreamReader
from pyspark.sql.types import StructType

from adapters.source import Source
from adapters.spark import kinesis_rows
from adapters.spark.kinesis_options import KinesisOptions, kinesis_options
from adapters.spark.stream import Feedstock, LeasedReader


class KinesisLeased(DataSource):
    """`spark.readStream.format("kinesis-leased")`, on any cluster.

    spooled  whether driver and executors share a disk
    known    options that the session itself answers, where the user does not
    `register` sets both.
    """

    spooled = False
    known: ClassVar[Mapping[str, str]] = {}

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(options)  # type: ignore[arg-type]  # Spark's own is never written to
        self._asked = kinesis_options({**self.known, **options})

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "kinesis-leased"

    def schema(self) -> str:
        """The columns."""
        return kinesis_rows.DDL

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: ARG002, N802  Spark's name
        """One query's part in its group."""
        asked = self._asked
        stock = Feedstock(
            open=lambda: _source(asked),
            columns=kinesis_rows.columns(asked.stream),
            interval_seconds=asked.interval_seconds,
            shard_rows=asked.shard_rows,
            rereadable=True,
            spooled=self.spooled,
        )
        return LeasedReader(stock, asked.lease)


def _source(asked: KinesisOptions) -> Source:
    # The planner's process needs no client.
    from adapters.kinesis.source import open_url  # noqa: PLC0415
    from adapters.spark.kinesis_poller import ArrowPoller  # noqa: PLC0415

    source = open_url(asked.stream, {name: value for name, value in asked.place.items() if value})
    source.reader = ArrowPoller
    return source
