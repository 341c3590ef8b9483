"""The Spark data source `kinesis-leased`: a Kinesis stream, its shards shared with the rest of the group."""

from collections.abc import Mapping

from pyspark.sql.datasource import DataSource, DataSourceStreamReader
from pyspark.sql.types import StructType

from adapters.spark import kinesis_rows
from adapters.spark.kinesis_options import kinesis_options
from adapters.spark.stream import Feedstock, LeasedReader
from adapters.urls import open_source


class KinesisLeased(DataSource):
    """`spark.readStream.format("kinesis-leased")`, on any cluster."""

    spooled = False

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(options)  # type: ignore[arg-type]  # Spark's own is never written to
        self._asked = kinesis_options(options)

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
            open=lambda: open_source(asked.url),
            columns=kinesis_rows.columns(asked.stream),
            interval_seconds=asked.interval_seconds,
            shard_rows=asked.shard_rows,
            rereadable=True,
            spooled=self.spooled,
        )
        return LeasedReader(stock, asked.lease)


class KinesisLeasedOnOneHost(KinesisLeased):
    """The same where driver and executors share a disk."""

    spooled = True
