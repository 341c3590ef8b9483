"""Writes the rows of a DataFrame to a Kinesis stream with this project's producer, which aggregates rows in order.

A Spark process runs its tasks one after another, and all of them share one producer. If each task had a producer of its
own, the stream's shards would be listed more often than Kinesis allows. After an error, the producer and its
outstanding requests are abandoned.
"""

import logging
from typing import Literal

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
import pyarrow.compute as pc  # type: ignore[import-untyped]  # likewise
from attrs import frozen

from leasehold.adapters.sources.deduplication import Tag
from leasehold.adapters.spark.kinesis.options import KINESIS_STREAM, parse_credentials
from leasehold.adapters.spark.options import OptionReader, SparkOption
from leasehold.adapters.spark.sink import RowWriter, SinkColumns, read_row_values
from leasehold.errors import SourceError
from leasehold.stores.printable import error_summary, limited_error_text, make_safe_logger

log = make_safe_logger(logging.getLogger("leasehold.spark"))

COLUMNS = SinkColumns(
    {"data": pa.large_binary(), "partitionKey": pa.large_string(), "explicitHashKey": pa.large_string()},
    order=("partitionKey",),
    required=frozenset({"data", "partitionKey"}),
)
CONCURRENT_REQUESTS = 4

KINESIS_SINK = (
    SparkOption(
        "kinesis.streamName", "Write to the stream with this name or ARN.", required="name the stream to write to"
    ),
    *KINESIS_STREAM,
    SparkOption("kinesis.wire", "Send records in this format.", "cbor", choices=("cbor", "json")),
    SparkOption(
        "kinesis.lingerMs",
        "Let a row wait this long for others to share its aggregate.",
        100,
        minimum=0,
        maximum=60_000,
    ),
    SparkOption(
        "kinesis.sharePercent",
        "Let each task use at most this percentage of each shard's write rate.",
        100,
        maximum=1000,
    ),
)
"""The options of the sink `kinesis-leased`, in addition to those of all sinks."""


@frozen
class KinesisSinkTarget:
    """A stream to write to, which any process can open with its own credentials.

    Attributes:
        stream: The stream's name or its ARN.
        region: The stream's region; "" for the environment's.
        endpoint: The endpoint URL; "" for the environment's.
        wire: The format in which records are sent.
        share: The fraction of each shard's write limit that a task may use.
        linger_seconds: The maximum time for which a record waits for others to be sent with it.
        credentials: The credential options of a URL; empty for the environment's credentials.
    """

    stream: str
    region: str
    endpoint: str
    wire: str
    share: float
    linger_seconds: float
    credentials: tuple[tuple[str, str], ...] = ()

    @property
    def columns(self) -> SinkColumns:
        """The columns that become records."""
        return COLUMNS

    def open_writer(self) -> RowWriter:
        """Return the writer of this process. Raises SourceError."""
        if self not in _writers:
            _writers[self] = KinesisRowWriter(self)
        return _writers[self]


_writers = dict[KinesisSinkTarget, "KinesisRowWriter"]()
"""The writers that the tasks of this process share. A process runs one task at a time."""


class KinesisRowWriter:
    """Writes sections with one producer."""

    def __init__(self, target: KinesisSinkTarget) -> None:
        from leasehold.adapters.sources.kinesis.producer.core import Settings  # noqa: PLC0415  needs boto3
        from leasehold.adapters.sources.kinesis.producer.producer import Producer, create_producer_clients  # noqa: PLC0415  likewise
        from leasehold.adapters.sources.kinesis.stream_arn import parse_stream_address  # noqa: PLC0415  likewise
        from leasehold.stores.aws import create_boto3_session  # noqa: PLC0415  likewise

        wire: Literal["json", "cbor"] = "json" if target.wire == "json" else "cbor"
        session = create_boto3_session(dict(target.credentials), "options")
        address = parse_stream_address(target.stream, target.region or None, "option kinesis.streamName")
        endpoint = target.endpoint or None
        clients = create_producer_clients(
            address.region, endpoint, CONCURRENT_REQUESTS, wire, session=session, arn=address.arn
        )
        settings = Settings(share=target.share, linger_seconds=target.linger_seconds)
        self._target = target
        self._producer: Producer = Producer(clients, address.name, settings, requests=CONCURRENT_REQUESTS)

    def write(self, rows: pa.Table, tag: Tag) -> None:
        """Write these rows and wait until they are written.

        Raises SourceError, or ValueError for a row that no stream accepts.
        """
        context, put = tag.context, self._producer.put
        self._check(rows, context)
        try:
            put_futures = [
                put(data, key, hash_key, context=context, row=row_number)
                for row_number, (data, key, hash_key) in enumerate(read_row_values(rows), tag.row)
            ]
            # Put all rows into the producer before waiting for any of them, because a request contains many rows.
            self._producer.flush()
            for put_future in put_futures:
                put_future.result()
        except BaseException as fault:
            # Close the producer, so that no more of these rows are sent. The next attempt sends them again.
            _writers.pop(self._target, None)
            try:
                self._producer.close(0)
            except Exception as close_error:  # noqa: BLE001  the error that ended the write is raised below
                log.debug("the producer could not be closed: %s", close_error)
            if isinstance(fault, ValueError | KeyboardInterrupt | SystemExit):
                raise
            raise SourceError(
                f"stream {self._target.stream}: not all rows were written: {error_summary(fault)}"
            ) from fault

    def _check(self, rows: pa.Table, context: bytes) -> None:
        """Raise ValueError, naming the column, if the stream would reject any of these rows."""
        # Check all rows before any of them is sent, because rows that were sent cannot be removed. After the user has
        # removed the invalid row, the section has another edition, so readers would not recognize the repeated rows as
        # duplicates.
        try:
            for data, key, hash_key in read_row_values(_find_extreme_rows(rows)):
                self._producer.check(data, key, hash_key, context=context)
        except ValueError as fault:
            raise ValueError(
                f"column {limited_error_text(fault)}"
            ) from None  # the message begins with the name of the column


def _find_extreme_rows(rows: pa.Table) -> pa.Table:
    """Return the largest row, the rows with the longest and the shortest key, and one row for each hash key.

    If the stream would reject any of `rows`, it would reject one of the returned rows.
    """
    character_counts = pc.utf8_length(rows["partitionKey"])
    row_sizes = pc.add(pc.binary_length(rows["data"]), pc.binary_length(rows["partitionKey"]))
    row_indices = [
        pc.index(lengths, extreme(lengths)).as_py()
        for lengths, extreme in ((row_sizes, pc.max), (character_counts, pc.max), (character_counts, pc.min))
    ]
    if rows["explicitHashKey"].null_count < rows.num_rows:
        keys_with_row = pa.table({"key": rows["explicitHashKey"], "row": pa.array(range(rows.num_rows), pa.int64())})
        row_indices += keys_with_row.group_by("key").aggregate([("row", "min")])["row_min"].to_pylist()
    return rows.take(row_indices)


def parse_kinesis_sink(opts: OptionReader) -> KinesisSinkTarget:
    """Parse the options of a sink. Raises ValueError, naming the option."""
    stream = opts.read_text("kinesis.streamName")
    opts.reject_renamed(
        {"streamName": "kinesis.streamName", "region": "kinesis.region", "endpoint": "kinesis.endpointUrl"}
    )
    share_percent, linger_ms = opts.read_number("kinesis.sharePercent"), opts.read_number("kinesis.lingerMs")
    return KinesisSinkTarget(
        stream,
        opts.read_text("kinesis.region"),
        opts.read_text("kinesis.endpointUrl"),
        opts.read_choice("kinesis.wire"),
        share_percent / 100,
        linger_ms / 1000,
        (*parse_credentials(opts, "kinesis").items(),),
    )
