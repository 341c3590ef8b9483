"""The Spark data source `eventhubs-leased`: an event hub, its partitions shared with the rest of the group."""

from collections.abc import Mapping
from typing import ClassVar

from pyspark.sql.datasource import DataSource, DataSourceStreamReader
from pyspark.sql.types import StructType

from adapters.source import Source
from adapters.spark import event_hubs_rows
from adapters.spark.event_hubs_options import EventHubsOptions, event_hubs_options
from adapters.spark.stream import Feedstock, LeasedReader

ALL_ROWS = 2**53
INTERVAL_SECONDS = 0.02


class EventHubsLeased(DataSource):
    """`spark.readStream.format("eventhubs-leased")`, on any cluster.

    spooled  whether driver and executors share a disk
    known    options that the session itself answers, where the user does not
    `register` sets both.
    """

    spooled = False
    known: ClassVar[Mapping[str, str]] = {}

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(options)  # type: ignore[arg-type]  # Spark's own is never written to
        self._asked = event_hubs_options({**self.known, **options})

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "eventhubs-leased"

    def schema(self) -> str:
        """The columns."""
        return event_hubs_rows.DDL

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: ARG002, N802  Spark's name
        """One query's part in its group."""
        asked = self._asked
        stock = Feedstock(
            open=lambda: _source(asked),
            columns=event_hubs_rows.columns(),
            interval_seconds=INTERVAL_SECONDS,
            shard_rows=ALL_ROWS,
            rereadable=False,
            spooled=self.spooled,
        )
        return LeasedReader(stock, asked.lease)


def _source(asked: EventHubsOptions) -> Source:
    # The planner's process needs no client.
    from adapters.event_hubs.access import by_connection_string, by_identity  # noqa: PLC0415
    from adapters.event_hubs.source import EventHubsSource  # noqa: PLC0415

    if asked.secret:
        access = by_connection_string(asked.secret, asked.namespace, asked.hub, asked.group)
    else:
        access = by_identity(asked.namespace, asked.hub, asked.group)
    return EventHubsSource(access, asked.prefetch)
