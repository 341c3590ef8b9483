"""The Spark data source `eventhubs-leased`: an event hub, its partitions shared with the rest of the group."""

from collections.abc import Mapping

from attrs import frozen

from leasehold.adapters.sources.event_hubs.arrow_rows import SCHEMA, rows_of
from leasehold.adapters.sources.protocol import Source
from leasehold.adapters.spark.batch import BoundedSource, Bounds, StreamPlace
from leasehold.adapters.spark.event_hubs.options import EventHubsOptions, event_hubs_options, secret_of_executor
from leasehold.adapters.spark.event_hubs.sink import hub_sink
from leasehold.adapters.spark.leased_source import LeasedSource
from leasehold.adapters.spark.options import Given, LeaseOptions
from leasehold.adapters.spark.rows import Columns, SourceSpec
from leasehold.adapters.spark.sink import SinkTarget
from leasehold.balancer.model import Position

ALL_ROWS = 2**53
INTERVAL_SECONDS = 0.02

DDL = (
    "body binary, partition string, offset string, sequenceNumber bigint, enqueuedTime timestamp, "
    "publisher string, partitionKey string, properties map<string,string>, connectionDeviceID string, "
    "systemProperties map<string,string>"
)
"""The columns, as the Azure connector names them."""


class EventHubsLeased(LeasedSource):
    """`spark.readStream.format("eventhubs-leased")` and `spark.read`, `df.writeStream` and `df.write`."""

    FORMAT, DDL = "eventhubs-leased", DDL

    def asked(self, options: Mapping[str, str]) -> tuple[SourceSpec, LeaseOptions, StreamPlace, Bounds]:
        """Read one hub; a partition has one reader at a time, so that a batch may not be repeatable."""
        asked = event_hubs_options(options)
        spec = SourceSpec(
            # With an owner level: the link of a process that has lost the lease ends when the next owner opens its own.
            open=lambda: _source(HubPlace.of(asked), asked.secret, asked.prefetch, exclusive=True),
            columns=columns(),
            interval_seconds=INTERVAL_SECONDS,
            shard_rows=ALL_ROWS,
            rereadable=False,
            # Event Hubs takes its names in any case, and one hub must not look like two.
            stream=f"eventhubs://{asked.namespace}/{asked.hub}".lower(),
        )
        return spec, asked.lease, HubPlace.of(asked), asked.bounds

    def writes_to(self, given: Given) -> SinkTarget:
        """Write to one hub."""
        return hub_sink(given)


@frozen
class HubPlace:
    """Where a hub is; whoever opens it looks for the connection string by itself.

    file   where that stands, "" for the environment
    keyed  whether there is one on the driver; else the identity of whoever opens it is asked for
    """

    namespace: str
    hub: str
    group: str
    prefetch: int
    file: str
    keyed: bool

    @classmethod
    def of(cls, asked: EventHubsOptions) -> "HubPlace":
        """The hub that these options name."""
        return cls(asked.namespace, asked.hub, asked.group, asked.prefetch, asked.file, keyed=bool(asked.secret))

    @property
    def columns(self) -> Columns:
        """The columns that its events become."""
        return columns()

    @property
    def pause_seconds(self) -> float:
        """Between two readings of a partition; what was not sent is not asked for."""
        return INTERVAL_SECONDS

    def open(self) -> Source:
        """The hub, each partition for up to five readers beside one another."""
        return _source(self, self._secret(), self.prefetch, exclusive=False)

    def probe(self) -> BoundedSource:
        """The hub, of which few events are sent ahead."""
        return _source(self, self._secret(), 1, exclusive=False)

    def _secret(self) -> str:
        return secret_of_executor(self.file, keyed=self.keyed)


def _source(place: HubPlace, secret: str, prefetch: int, *, exclusive: bool) -> BoundedSource:
    # The planner's process needs no client.
    from leasehold.adapters.sources.event_hubs.access import by_connection_string, by_identity  # noqa: PLC0415
    from leasehold.adapters.sources.event_hubs.poller import EventHubsSource  # noqa: PLC0415

    if secret:
        access = by_connection_string(secret, place.namespace, place.hub, place.group)
    else:
        access = by_identity(place.namespace, place.hub, place.group)
    return EventHubsSource(access, prefetch, exclusive=exclusive)


def columns() -> Columns:
    """The columns of a hub's events."""
    return Columns(
        SCHEMA,
        "body",
        lambda lease, records: rows_of(lease.shard, records),
        lambda rows, row: Position(str(rows["sequenceNumber"][row].as_py()), token=rows["offset"][row].as_py() or ""),
    )
