"""A source that lists the shards of a DynamoDB table's stream, and opens a reader for each.

The readers extend the Kinesis poller, because iterators and their expiry, the pace of requests, growing timeouts, and
the end of a shard work in the same way. The differences are:

- A stream is identified by its ARN. Each time streaming is enabled for a table, DynamoDB creates a new stream with a
  new ARN.
- A shard has no hash range, and at most one parent. It is closed after some hours, and expires after a day.
- A listing is not a snapshot, because one page may be older than another. A shard that has a child therefore counts as
  closed, even if its own entry is open.
- A response does not contain the lag, so we compute it from the time of the last record and the service's clock.
"""

import json
import logging
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from itertools import dropwhile
from typing import TYPE_CHECKING, Any, ClassVar

from boto3 import Session
from botocore.exceptions import ClientError, ParamValidationError, ReadTimeoutError

from leasehold.adapters.sources.call_timeouts import CallTimeouts, TimedClients
from leasehold.adapters.sources.kinesis.clients import create_client
from leasehold.adapters.sources.kinesis.faults import (
    AwsService,
    PollPace,
    error_code,
    parse_max_records,
    parse_poll_seconds,
    translate_errors,
    translate_parse_errors,
)
from leasehold.adapters.sources.kinesis.poller import TRIMMED_TEXT, Poller
from leasehold.adapters.sources.kinesis.source import PolledStream
from leasehold.adapters.sources.protocol import Batch, Record
from leasehold.adapters.threads import read_boot_clock
from leasehold.balancer.model import TRIM_HORIZON, Lease, Position, Shard, at_timestamp
from leasehold.errors import SourceError, Trimmed
from leasehold.stores.aws import create_boto3_session
from leasehold.stores.printable import make_safe_logger
from leasehold.stores.urls import parse_date_header

if TYPE_CHECKING:  # use the type stubs of Kinesis, because those of DynamoDB Streams are not installed
    from types_boto3_kinesis import KinesisClient

log = make_safe_logger(logging.getLogger("leasehold.dynamodb_streams"))

STREAMS = AwsService("DynamoDB Streams", "dynamodb")
SHARDS_PER_PAGE = 100
SEQUENCE_NUMBER_DIGITS = 21, 40
"""The minimum and maximum number of digits in a sequence number."""
EMPTY_RESPONSES_AT_TIP = 3
"""After this many consecutive empty responses, we assume that a reader is at the tip of its shard. A single empty
response does not prove that, because the service may also send one between two records."""
BEHIND_SECONDS = 2.0
"""If the last record of a response is older than this, there are probably more records to read. The value is this large
because record times are in whole seconds."""


class StreamsClients(TimedClients):
    """The boto3 clients of DynamoDB Streams."""

    timeout_error = ReadTimeoutError
    service = STREAMS.name


class TableClients(TimedClients):
    """The boto3 clients of DynamoDB."""

    timeout_error = ReadTimeoutError
    service = "DynamoDB"


class ChangePoller(Poller):
    """A reader of one shard of a table's stream.

    If the start is a time, but the service or an older boto3 does not support iterators that start at a time, the shard
    is read from its beginning, and changes before that time are dropped.
    """

    max_records = 1000
    service = STREAMS
    parameter_names: ClassVar[Mapping[str, str]] = {
        **Poller.parameter_names,
        "Stream": "StreamArn",
        "SequenceNumber": "SequenceNumber",
    }

    def __init__(
        self,
        client: "KinesisClient",
        stream: str,
        shard: str,
        start: Position,
        *,
        rewind: bool = False,
        pace: PollPace | None = None,
        timeouts: CallTimeouts | None = None,
        max_records: int | None = None,
    ) -> None:
        super().__init__(
            client, stream, shard, start, None, rewind=rewind, pace=pace, timeouts=timeouts, max_records=max_records
        )
        self._since_seconds = self._start.sub / 1000 if self._start.sequence == "AT_TIMESTAMP" else None
        self._empty_response_count = 0

    def _new_iterator(self) -> str:
        min_digits, max_digits = SEQUENCE_NUMBER_DIGITS
        if (
            self._last_read is None
            and self._start.numbered
            and not min_digits <= len(self._start.sequence) <= max_digits
        ):
            self._restart_or_raise(None)  # no record has such a number, and boto3 would reject it
        try:
            return super()._new_iterator()
        except (ClientError, ParamValidationError) as error:
            is_unsupported = isinstance(error, ParamValidationError) or error_code(error) == "ValidationException"
            if not (is_unsupported and self._starting_position()["Type"] == "AT_TIMESTAMP"):
                raise
            self._start = TRIM_HORIZON
            iterator = super()._new_iterator()
            log.info(
                "shard %s: the service has no iterator for a time; reading from the beginning of the shard", self._shard
            )
            return iterator

    def _rewind_from(self, error: ClientError) -> None:
        if error_code(error) != "TrimmedDataAccessException":
            raise error
        self._restart_or_raise(error)

    def _needs_new_iterator(self, error: ClientError) -> bool:
        if error_code(error) == "TrimmedDataAccessException":
            self._restart_or_raise(error)
            return True
        return super()._needs_new_iterator(error)

    def _restart_or_raise(self, error: ClientError | None) -> None:
        """Restart at the oldest record, or raise Trimmed if a sequence number is known and `rewind` is not set."""
        sequence_number = self._last_read or (self._start.sequence if self._start.numbered else None)
        if sequence_number is not None and not self._rewind:
            raise Trimmed(TRIMMED_TEXT.format(self._shard, self._stream, sequence_number)) from error
        self._start, self._last_read, self._skip_through = TRIM_HORIZON, None, None
        log.warning(
            "shard %s: %s no longer exists; starting at TRIM_HORIZON", self._shard, sequence_number or "its start"
        )

    def _make_batch(self, response: Any) -> Batch:  # noqa: ANN401  boto3's type stubs are not a dependency
        new_records = records = tuple(map(convert_record, response["Records"]))
        skip_through, since = self._skip_through, self._since_seconds
        # Drop only leading records. Records are in order of time, so all records after the first one to keep are kept.
        if skip_through is not None:
            new_records = tuple(dropwhile(lambda record: record.position.order <= skip_through, new_records))
        if since is not None:
            new_records = tuple(dropwhile(lambda record: _latest_possible_arrival(record) < since, new_records))
        if records:
            self._log_gap(records[0].sequence_number)
        next_iterator = response.get("NextShardIterator") or None
        self._empty_response_count = 0 if records else self._empty_response_count + 1
        is_at_tip = next_iterator is None or self._empty_response_count >= EMPTY_RESPONSES_AT_TIP
        behind_seconds = 0.0 if is_at_tip else None
        if records:
            # Compute the age of the last record by the service's clock, which is in the response's headers.
            server_time = parse_date_header(response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date"))
            last_arrived = records[-1].arrived
            behind_seconds = (
                None if server_time is None or last_arrived is None else max(0.0, server_time - last_arrived)
            )
        has_more = behind_seconds is not None and behind_seconds > BEHIND_SECONDS
        batch = Batch(
            records=new_records,
            read_to=Position(records[-1].sequence_number) if records else None,
            behind_seconds=behind_seconds,
            wait_seconds=self._pause(idle=not records, behind=has_more),
            ended=next_iterator is None,
        )
        if new_records:
            self._skip_through = self._since_seconds = None
        self._iterator = next_iterator
        self._last_read = records[-1].sequence_number if records else self._last_read
        return batch


def convert_record(row: Mapping[str, Any]) -> Record:
    """Convert a stream record from boto3.

    The record's data is the change in the format of the API, as JSON with sorted keys, so that every reader returns the
    same bytes. The partition key is the item's key in the same format, so all changes of an item have the same
    partition key.

    Raises:
        KeyError, TypeError, ValueError: If the row does not have the structure of a stream record.
    """
    details = row["dynamodb"]
    sequence_number, created_at = details["SequenceNumber"], details.get("ApproximateCreationDateTime")
    if not (isinstance(sequence_number, str) and sequence_number.isascii() and sequence_number.isdigit()):
        raise ValueError(f"a record has the invalid sequence number {sequence_number!r}")
    # Validate the data here, so that code that reads it later, such as the Spark columns, can rely on it.
    is_valid = isinstance(row["eventName"], str) and isinstance(row.get("userIdentity") or {}, Mapping)
    if not is_valid:
        raise ValueError(f"record {sequence_number} has an invalid eventName or userIdentity")
    return Record(
        encode_canonical_json(row).encode(),
        sequence_number,
        partition_key=encode_canonical_json(details["Keys"]),
        arrived=None if created_at is None else created_at.timestamp(),
    )


def encode_canonical_json(value: object) -> str:
    """Return the value as JSON. Equal values have equal strings."""
    return json.dumps(value, default=_encode_json_value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def _encode_json_value(value: object) -> object:
    match value:
        case bytes() | bytearray():
            return b64encode(value).decode()
        case datetime():
            seconds = value.timestamp()
            return int(seconds) if seconds.is_integer() else seconds
        case _:
            raise TypeError(f"{type(value).__name__} is not a DynamoDB type")


def _latest_possible_arrival(record: Record) -> float:
    """Return the latest possible creation time of the record, whose time is truncated to seconds or minutes."""
    if record.arrived is None:
        return float("inf")
    return record.arrived + (1.0 if record.arrived % 60 else 60.0)


class TableStream(PolledStream):
    """The stream of a table.

    Args:
        clients: The clients of DynamoDB Streams, which all threads share.
        name: The name of a table, to read its current stream, or the ARN of a stream.
        tables: The clients of DynamoDB, to look up the table's stream.
        rewind: Whether a shard whose checkpoint was trimmed restarts at its oldest record; otherwise it is not read.
        poll_seconds: The seconds between two requests for a shard; None for the default pace of `PollPace`.
        max_records: The maximum number of records per request; None for the service's limit.
        clock: Returns the time of a monotonic clock, in seconds. The service's responses relate this clock to the time
            of day.
    """

    service = STREAMS
    stream_parameter = "StreamArn"

    def __init__(
        self,
        clients: TimedClients,
        name: str,
        tables: TimedClients,
        *,
        rewind: bool = False,
        poll_seconds: float | None = None,
        max_records: int | None = None,
        clock: Callable[[], float] = read_boot_clock,
    ) -> None:
        super().__init__(clients, name, rewind=rewind, poll_seconds=poll_seconds, max_records=max_records, clock=clock)
        self._table_clients, self._table_timeouts = tables, CallTimeouts(tables, retry_first_call=True)
        self._arn = name if is_arn(name) else ""
        self._incarnation = ""

    def arn(self, _stream: str) -> str:
        """Return the ARN of the most recently listed stream.

        Raises:
            SourceUnavailable: If the service does not respond or throttles the request. A later attempt may succeed.
            SourceError: If the service rejects the request, for example because of wrong credentials.
        """
        return self._request_name()

    def incarnation(self) -> str:
        """Return `account:table:creation time` of the most recently listed stream.

        Raises:
            SourceUnavailable: If the service does not respond or throttles the request. A later attempt may succeed.
            SourceError: If the service rejects the request, for example because of wrong credentials.
        """
        if not self._incarnation:
            self.shards()
        return self._incarnation

    def shards(self) -> tuple[Shard, ...]:
        """List all shards, reading every page of DescribeStream.

        Raises:
            SourceUnavailable: If the service does not respond or throttles the request. A later attempt may succeed.
            SourceError: If the service rejects the request, for example because of wrong credentials.
        """
        self._find_current_stream()
        with translate_errors(self.name, STREAMS), translate_parse_errors(self.name, STREAMS):
            rows: list[Any] = []
            page_parameters: dict[str, str] = {}
            while True:
                page = self._timeouts.call(
                    "describe_stream", StreamArn=self._arn, Limit=SHARDS_PER_PAGE, **page_parameters
                )
                description = page["StreamDescription"]
                rows += description["Shards"]
                if not (last_shard := description.get("LastEvaluatedShardId")):
                    break
                page_parameters = {"ExclusiveStartShardId": last_shard}
            self._record_server_time(page)
            created_seconds = int(description["CreationRequestDateTime"].timestamp())
            self._incarnation = f"{self._arn.split(':')[4]}:{description['TableName']}:{created_seconds}"
            return convert_shards(rows)

    def latest(self, lease: Lease) -> Position:
        """Return the service's time in whole seconds, because the times of records are truncated to seconds."""
        return at_timestamp(super().latest(lease).sub // 1000 * 1000)

    def open(self, lease: Lease, start: Position) -> ChangePoller:
        return ChangePoller(
            self._clients.client_with_timeout(self._clients.timeouts[0]),
            self._request_name(),
            lease.shard,
            start,
            rewind=self._rewind,
            pace=PollPace(self._poll_seconds),
            timeouts=CallTimeouts(self._clients, first_step=self._timeouts.longest_step),
            max_records=self._max_records,
        )

    def close(self) -> None:
        super().close()
        self._table_clients.close()

    def _request_name(self) -> str:
        if not self._arn:
            self._find_current_stream()
        return self._arn

    def _find_current_stream(self) -> None:
        """Look up the table's current stream. A table gets a new one when streaming is disabled and enabled again."""
        if is_arn(self.name):
            return
        with translate_errors(self.name, STREAMS), translate_parse_errors(self.name, STREAMS):
            table = self._table_timeouts.call("describe_table", TableName=self.name)["Table"]
            arn = table.get("LatestStreamArn")
        if not arn:
            raise SourceError(
                f"table {self.name!r} has no stream: enable one with NEW_AND_OLD_IMAGES, or the images that you need"
            )
        if self._arn and arn != self._arn:
            log.warning("table %s has a new stream: %s instead of %s", self.name, arn, self._arn)
        self._arn = arn


def is_arn(name: str) -> bool:
    """Return whether this is an ARN rather than the name of a table."""
    return name.startswith("arn:")


def convert_shards(listed_shards: Sequence[Mapping[str, Any]]) -> tuple[Shard, ...]:
    """Return the shards of a listing. A shard that has a child is closed, even if its own entry is still open."""
    parent_ids = {row.get("ParentShardId") for row in listed_shards}
    return tuple(
        Shard(
            id=row["ShardId"],
            parents=tuple(parent for parent in (row.get("ParentShardId"),) if parent),
            open="EndingSequenceNumber" not in row["SequenceNumberRange"] and row["ShardId"] not in parent_ids,
        )
        for row in listed_shards
    )


def parse_region(name: str, options: Mapping[str, str]) -> str | None:
    """Return the region of a table or ARN, or None to use the environment's region.

    Raises ValueError if the name is neither the name of a table nor the ARN of a stream.
    """
    if not is_arn(name):
        if "/" in name or "," in name:
            raise ValueError("source URL: it must name one table: dynamodb-streams://TABLE, or the ARN of a stream")
        return options.get("region")
    arn_parts = name.split(":", 5)
    if (
        len(arn_parts) < 6  # noqa: PLR2004  the form of an ARN
        or arn_parts[2] != "dynamodb"
        or arn_parts[5].count("/") != 3  # noqa: PLR2004  the form of an ARN
        or "/stream/" not in arn_parts[5]
    ):
        raise ValueError(
            "source URL: this is not the ARN of a stream; write arn:aws:dynamodb:REGION:ACCOUNT:table/NAME/stream/LABEL"
        )
    return options.get("region") or arn_parts[3]


def open_url(name: str, options: Mapping[str, str], *, session: Session | None = None) -> TableStream:
    """Open the stream of this table, or of this ARN.

    Raises:
        SourceError: If no region is known.
        ValueError: If the name or an option is wrong.
    """
    region, endpoint = parse_region(name, options), options.get("endpoint")
    if options.get("if_trimmed", "TRIM_HORIZON") != "TRIM_HORIZON":
        raise ValueError(
            "source URL: option 'if_trimmed' must be TRIM_HORIZON; without it, a shard with a trimmed checkpoint is "
            "not read"
        )
    poll_seconds = parse_poll_seconds(options["poll_seconds"]) if "poll_seconds" in options else None
    max_records = parse_max_records(options, ChangePoller.max_records)
    opened_session = create_boto3_session(options, "source URL", session)
    clients = StreamsClients(
        lambda timeout: create_client("dynamodbstreams", region, endpoint, timeout, opened_session)
    )
    tables = TableClients(lambda timeout: create_client("dynamodb", region, endpoint, timeout, opened_session))
    with translate_errors(name, STREAMS):
        clients.client_with_timeout(clients.timeouts[0])  # raises now if no region is known
    return TableStream(
        clients, name, tables, rewind="if_trimmed" in options, poll_seconds=poll_seconds, max_records=max_records
    )
