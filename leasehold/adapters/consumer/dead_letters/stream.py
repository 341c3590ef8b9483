"""Stores dead letters as records of a Kinesis stream, and puts the records of dead letters back into a stream."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError

from leasehold.adapters.consumer.dead_letters.dead_letter import DeadLetterEntry
from leasehold.adapters.sources.call_timeouts import POLL_TIMEOUTS
from leasehold.adapters.sources.kinesis.faults import error_code, translate_errors, translate_parse_errors
from leasehold.adapters.sources.kinesis.stream_arn import name_stream_by_arn, parse_stream_address
from leasehold.errors import DeadLetterError, SourceError
from leasehold.stores.aws import create_boto3_session
from leasehold.stores.deadlines import add_response_deadlines

if TYPE_CHECKING:  # users do not install the stubs
    from types_boto3_kinesis import KinesisClient

ATTEMPTS_MAX = 5


class StreamSink:
    """Writes records to a stream, one at a time. The service has confirmed each record when `put` returns."""

    def __init__(self, client: "KinesisClient", stream: str) -> None:
        self._client, self._stream = client, stream

    def put(self, dead_letter: DeadLetterEntry) -> None:
        """Write the dead letter as a record, with the partition key of the record that failed."""
        # Use the partition key of the record, so that the dead letters of one key stay in the order in which the
        # records failed.
        self._put(dead_letter.line, dead_letter.record.partition_key or dead_letter.lease, None)

    def put_back(self, dead_letter: DeadLetterEntry) -> None:
        """Write the record of the dead letter back, with its original keys. Raises DeadLetterError."""
        record = dead_letter.record
        self._put(record.data, record.partition_key or dead_letter.lease, record.explicit_hash_key)

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def missing(self) -> bool:
        """Return whether the stream is known not to exist. If we lack the permission to check, return False."""
        try:
            self._client.describe_stream_summary(StreamName=self._stream)
        except ClientError as error:
            # A user who may write to the stream may lack the permission to describe it, so ignore other errors.
            return error_code(error) == "ResourceNotFoundException"
        return False

    def _put(self, data: bytes, key: str, hash_key: str | None) -> None:
        key_options: dict[str, Any] = {} if hash_key is None else {"ExplicitHashKey": hash_key}
        try:
            with translate_errors(self._stream), translate_parse_errors(self._stream):
                response = self._client.put_record(StreamName=self._stream, Data=data, PartitionKey=key, **key_options)
                if not response["SequenceNumber"]:  # without it the response does not confirm the write
                    raise LookupError("it has no sequence number")
        except SourceError as fault:
            raise DeadLetterError(str(fault)) from fault


def open_url(
    name: str,
    options: Mapping[str, str],
    *,
    create: bool,  # noqa: ARG001  streams are never created
    session: boto3.Session | None = None,
) -> StreamSink:
    """Open the stream of this name.

    Raises ValueError if the URL is wrong, and DeadLetterError if there is no such stream or it cannot be reached.
    """
    stream = parse_stream_address(name, options.get("region"), "letters URL")
    name = stream.name
    if not name or "," in name or "/" in name:
        raise ValueError("letters URL: kinesis:// wants the name of one stream")
    aws_session = create_boto3_session(options, "letters URL", session) or boto3
    try:
        with translate_errors(name), translate_parse_errors(name):
            client = aws_session.client(
                "kinesis",
                region_name=stream.region,
                endpoint_url=options.get("endpoint"),
                config=Config(
                    connect_timeout=5,
                    read_timeout=POLL_TIMEOUTS[-1],  # a retry after a timeout would write the dead letter twice
                    retries={"mode": "standard", "total_max_attempts": ATTEMPTS_MAX},
                ),
            )
            add_response_deadlines(client)
            if stream.arn is not None:
                name_stream_by_arn(client, stream.arn)
            sink = StreamSink(client, name)
            is_missing = sink.missing()
    except SourceError as fault:
        raise DeadLetterError(str(fault)) from fault
    if is_missing:
        raise DeadLetterError(f"there is no stream {name!r}")
    return sink
