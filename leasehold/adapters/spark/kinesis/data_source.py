"""The Spark data source `kinesis-leased`, which shares the shards of a Kinesis stream with the rest of its group."""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from attrs import frozen

from leasehold.adapters.sources.protocol import Source
from leasehold.adapters.spark.batch import BoundedSource, ReadBounds, StreamLocation
from leasehold.adapters.spark.kinesis import rows as kinesis_rows
from leasehold.adapters.spark.kinesis.options import parse_kinesis_options
from leasehold.adapters.spark.kinesis.sink import KINESIS_SINK, parse_kinesis_sink
from leasehold.adapters.spark.leased_source import LeasedSource
from leasehold.adapters.spark.options import LeaseOptions, OptionReader
from leasehold.adapters.spark.rows import SourceColumns, SourceSpec
from leasehold.adapters.spark.sink import SinkTarget

if TYPE_CHECKING:  # an optional dependency
    from leasehold.adapters.sources.kinesis.poller import Poller


class KinesisLeased(LeasedSource):
    """The format `kinesis-leased`, for `spark.readStream`, `spark.read`, `df.writeStream` and `df.write`."""

    FORMAT, DDL, SINK_OPTIONS = "kinesis-leased", kinesis_rows.DDL, KINESIS_SINK

    def parse_options(self, options: Mapping[str, str]) -> tuple[SourceSpec, LeaseOptions, StreamLocation, ReadBounds]:
        parsed_options = parse_kinesis_options(options)
        # A query with an ending position reads stored records. These are polled, even if a registered consumer is
        # configured.
        live_consumer = parsed_options.consumer if parsed_options.bounds.until is None else ""
        source_spec = SourceSpec(
            open=partial(
                _open_source, parsed_options.stream, {**parsed_options.url_options, "consumer": live_consumer}
            ),
            open_for_replay=partial(_open_source, parsed_options.stream, parsed_options.url_options),
            columns=kinesis_rows.make_columns(parsed_options.name),
            interval_seconds=0.0 if live_consumer else parsed_options.interval_seconds,
            shard_rows=parsed_options.shard_rows,
            rereadable=True,
            stream=f"kinesis://{parsed_options.stream}",
            start_positions=parsed_options.start_positions,
        )
        return (
            source_spec,
            parsed_options.lease,
            KinesisLocation(
                parsed_options.stream, parsed_options.name, parsed_options.url_options, parsed_options.interval_seconds
            ),
            parsed_options.bounds,
        )

    def sink_target(self, opts: OptionReader) -> SinkTarget:
        return parse_kinesis_sink(opts)


@frozen
class KinesisLocation:
    """The address of a stream, which any process can open with its own credentials.

    Attributes:
        stream: The stream's name or its ARN.
        name: The stream's name.
        options: The options of the stream's URL.
        pause_seconds: The time between two reads of a shard that only one task reads.
    """

    stream: str
    name: str
    options: Mapping[str, str]
    pause_seconds: float

    @property
    def columns(self) -> SourceColumns:
        """The columns of the rows that are made from records."""
        return kinesis_rows.make_columns(self.name)

    def open(self) -> Source:
        """Open the stream for reading. Records that were trimmed after the batch was planned are skipped."""
        return _open_source(self.stream, {**self.options, "if_trimmed": "TRIM_HORIZON"})

    def open_for_lookup(self) -> BoundedSource:
        """Open the stream for reading one record at a time."""
        from leasehold.adapters.spark.kinesis.poller import SingleRecordPoller  # noqa: PLC0415  the module needs a client

        return _open_source(self.stream, self.options, SingleRecordPoller)


def _open_source(stream: str, options: Mapping[str, str], reader: "type[Poller] | None" = None) -> BoundedSource:
    # Import the client here, because a process that only registers the format does not need it.
    from leasehold.adapters.sources.kinesis.source import open_url  # noqa: PLC0415
    from leasehold.adapters.spark.kinesis.poller import ArrowFanOut, ArrowPoller  # noqa: PLC0415

    source = open_url(stream, {name: value for name, value in options.items() if value})
    # To a registered consumer, the service pushes events. Stored records and repeated ranges are polled instead.
    subscriber = source.consumer and partial(ArrowFanOut, consumer=source.consumer)
    source.reader = reader or subscriber or ArrowPoller
    return source
