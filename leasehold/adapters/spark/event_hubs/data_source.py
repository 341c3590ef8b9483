"""The Spark data source `eventhubs-leased`, which shares the partitions of an event hub with the rest of its group."""

from collections.abc import Mapping

from attrs import frozen

from leasehold.adapters.sources.event_hubs.arrow_rows import SCHEMA, rows_of
from leasehold.adapters.sources.protocol import Source
from leasehold.adapters.spark.batch import BoundedSource, ReadBounds, StreamLocation
from leasehold.adapters.spark.event_hubs.options import (
    HUB,
    EventHubsOptions,
    find_executor_secret,
    parse_event_hubs_options,
)
from leasehold.adapters.spark.event_hubs.sink import parse_hub_sink
from leasehold.adapters.spark.leased_source import LeasedSource
from leasehold.adapters.spark.options import LeaseOptions, OptionReader
from leasehold.adapters.spark.rows import SourceColumns, SourceSpec
from leasehold.adapters.spark.sink import SinkTarget
from leasehold.balancer.model import Position

SHARD_ROWS_MAX = 2**53
READ_INTERVAL_SECONDS = 0.02

DDL = (
    "body binary, partition string, offset string, sequenceNumber bigint, enqueuedTime timestamp, "
    "publisher string, partitionKey string, properties map<string,string>, connectionDeviceID string, "
    "systemProperties map<string,string>"
)
"""The columns of a row. They have the same names as in the Azure connector."""


class EventHubsLeased(LeasedSource):
    """The format `eventhubs-leased`, for `spark.readStream`, `spark.read`, `df.writeStream` and `df.write`."""

    FORMAT, DDL, SINK_OPTIONS = "eventhubs-leased", DDL, HUB

    def parse_options(self, options: Mapping[str, str]) -> tuple[SourceSpec, LeaseOptions, StreamLocation, ReadBounds]:
        parsed_options = parse_event_hubs_options(options)
        source_spec = SourceSpec(
            # Read exclusively, so that a process that has lost its lease is disconnected when the next owner connects.
            open=lambda: _open_source(
                HubLocation.from_options(parsed_options), parsed_options.secret, parsed_options.prefetch, exclusive=True
            ),
            columns=make_columns(),
            interval_seconds=READ_INTERVAL_SECONDS,
            shard_rows=SHARD_ROWS_MAX,
            rereadable=False,
            # Event Hubs ignores the case of names, so convert the URL to lower case. Otherwise, one hub could look like
            # two.
            stream=f"eventhubs://{parsed_options.namespace}/{parsed_options.hub}".lower(),
        )
        return source_spec, parsed_options.lease, HubLocation.from_options(parsed_options), parsed_options.bounds

    def sink_target(self, opts: OptionReader) -> SinkTarget:
        return parse_hub_sink(opts)


@frozen
class HubLocation:
    """The address of a hub. Each process that opens the hub looks up the connection string itself.

    Attributes:
        namespace: The fully qualified namespace.
        hub: The hub's name.
        group: The consumer group.
        prefetch: The number of events to prefetch from each partition.
        file: The file with the connection string; "" for the environment.
        has_secret: Whether the driver has a connection string. If it has none, each process uses its own identity.
    """

    namespace: str
    hub: str
    group: str
    prefetch: int
    file: str
    has_secret: bool

    @classmethod
    def from_options(cls, options: EventHubsOptions) -> "HubLocation":
        """Return the address of the hub that these options name."""
        return cls(
            options.namespace,
            options.hub,
            options.group,
            options.prefetch,
            options.file,
            has_secret=bool(options.secret),
        )

    @property
    def columns(self) -> SourceColumns:
        """The columns of the rows that are made from events."""
        return make_columns()

    @property
    def pause_seconds(self) -> float:
        """The time between two reads of a partition, in seconds. It is short because a read makes no request."""
        return READ_INTERVAL_SECONDS

    def open(self) -> Source:
        """Open the hub for reading without exclusive access. The service allows five such readers per partition."""
        return _open_source(self, self._read_secret(), self.prefetch, exclusive=False)

    def open_for_lookup(self) -> BoundedSource:
        """Open the hub for looking up single events, with a prefetch of one."""
        return _open_source(self, self._read_secret(), 1, exclusive=False)

    def _read_secret(self) -> str:
        return find_executor_secret(self.file, has_secret=self.has_secret)


def _open_source(location: HubLocation, secret: str, prefetch: int, *, exclusive: bool) -> BoundedSource:
    # Import the client here, because a process that only registers the format does not need it.
    from leasehold.adapters.sources.event_hubs.access import access_by_connection_string, access_by_identity  # noqa: PLC0415
    from leasehold.adapters.sources.event_hubs.poller import EventHubsSource  # noqa: PLC0415

    if secret:
        hub_access = access_by_connection_string(secret, location.namespace, location.hub, location.group)
    else:
        hub_access = access_by_identity(location.namespace, location.hub, location.group)
    return EventHubsSource(hub_access, prefetch, exclusive=exclusive)


def make_columns() -> SourceColumns:
    """Return the columns of a hub's events."""
    return SourceColumns(
        SCHEMA,
        "body",
        lambda lease, records: rows_of(lease.shard, records),
        lambda rows, row: Position(str(rows["sequenceNumber"][row].as_py()), token=rows["offset"][row].as_py() or ""),
    )
