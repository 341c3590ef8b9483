"""The Spark data source `kinesis-leased`: a Kinesis stream, its shards shared with the rest of the group."""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from attrs import frozen

from leasehold.adapters.sources.protocol import Source
from leasehold.adapters.spark.batch import BoundedSource, Bounds, StreamPlace
from leasehold.adapters.spark.kinesis import rows as kinesis_rows
from leasehold.adapters.spark.kinesis.options import kinesis_options
from leasehold.adapters.spark.kinesis.sink import kinesis_sink
from leasehold.adapters.spark.leased_source import LeasedSource
from leasehold.adapters.spark.options import Given, LeaseOptions
from leasehold.adapters.spark.rows import Columns, SourceSpec
from leasehold.adapters.spark.sink import SinkTarget

if TYPE_CHECKING:  # an extra
    from leasehold.adapters.sources.kinesis.poller import Poller


class KinesisLeased(LeasedSource):
    """`spark.readStream.format("kinesis-leased")` and `spark.read`, `df.writeStream` and `df.write`."""

    FORMAT, DDL = "kinesis-leased", kinesis_rows.DDL

    def asked(self, options: Mapping[str, str]) -> tuple[SourceSpec, LeaseOptions, StreamPlace, Bounds]:
        """Read one stream; any worker can read a shard again, from any record."""
        asked = kinesis_options(options)
        # What is stored is polled, and at its pace; to look for events asks nobody.
        live = asked.consumer if asked.bounds.until is None else ""
        spec = SourceSpec(
            # Readers on other machines are given no more.
            open=partial(_source, asked.stream, {**asked.place, "consumer": live}),
            again=partial(_source, asked.stream, asked.place),
            columns=kinesis_rows.columns(asked.name),
            interval_seconds=0.0 if live else asked.interval_seconds,
            shard_rows=asked.shard_rows,
            rereadable=True,
            stream=f"kinesis://{asked.stream}",
            starts=asked.starts,
        )
        return (
            spec,
            asked.lease,
            KinesisPlace(asked.stream, asked.name, asked.place, asked.interval_seconds),
            asked.bounds,
        )

    def writes_to(self, given: Given) -> SinkTarget:
        """Write to one stream."""
        return kinesis_sink(given)


@frozen
class KinesisPlace:
    """Where a stream is; whoever opens it has credentials of its own.

    stream         its name or its ARN
    name           its name
    options        as a URL has them
    pause_seconds  between two readings of a shard, if it has one reader
    """

    stream: str
    name: str
    options: Mapping[str, str]
    pause_seconds: float

    @property
    def columns(self) -> Columns:
        """The columns that its records become."""
        return kinesis_rows.columns(self.name)

    def open(self) -> Source:
        """The stream; what was trimmed since a batch was planned is gone, and no reason to read nothing."""
        return _source(self.stream, {**self.options, "if_trimmed": "TRIM_HORIZON"})

    def probe(self) -> BoundedSource:
        """The stream, read a record at a time."""
        from leasehold.adapters.spark.kinesis.poller import Probe  # noqa: PLC0415  it needs a client

        return _source(self.stream, self.options, Probe)


def _source(stream: str, options: Mapping[str, str], reader: "type[Poller] | None" = None) -> BoundedSource:
    # The planner's process needs no client.
    from leasehold.adapters.sources.kinesis.source import open_url  # noqa: PLC0415
    from leasehold.adapters.spark.kinesis.poller import ArrowFanOut, ArrowPoller  # noqa: PLC0415

    source = open_url(stream, {name: value for name, value in options.items() if value})
    # With a consumer the service sends events; what is stored, and what is repeated, is polled.
    subscriber = source.consumer and partial(ArrowFanOut, consumer=source.consumer)
    source.reader = reader or subscriber or ArrowPoller
    return source
