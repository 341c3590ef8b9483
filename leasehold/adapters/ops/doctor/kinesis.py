"""Tries the rights of a worker on a Kinesis stream."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError

from leasehold.adapters.ops.doctor.attempts import Absent, NotTried, RightAttempt, RightsTrial, ServiceClock
from leasehold.adapters.sources.call_timeouts import POLL_TIMEOUTS
from leasehold.adapters.sources.kinesis.clients import create_reading_client
from leasehold.adapters.sources.kinesis.faults import error_code, translate_errors
from leasehold.adapters.sources.kinesis.stream_arn import parse_stream_address
from leasehold.errors import SourceError
from leasehold.stores.aws import create_boto3_session
from leasehold.stores.urls import reject_credentials

if TYPE_CHECKING:  # users don't install the stubs
    from types_boto3_kinesis import KinesisClient

_ABSENT = "ResourceNotFoundException"


def trials(location: str, options: Mapping[str, str]) -> Iterator[RightsTrial]:
    """Yield a trial of the rights on each stream in the URL.

    Raises:
        SourceError: No region is configured.
        StoreError: The endpoint is not valid.
    """
    region, endpoint, session = (
        options.get("region"),
        options.get("endpoint"),
        create_boto3_session(options, "source URL"),
    )
    for stream_text in location.split(","):
        stream = parse_stream_address(stream_text, region, "source URL")
        name = stream.name
        with translate_errors(name):
            client = create_reading_client(
                stream.region, endpoint, read_seconds=POLL_TIMEOUTS[-1], session=session, arn=stream.arn
            )
        reject_credentials(client.meta.endpoint_url)
        clock = ServiceClock()
        client.meta.events.register("after-call.kinesis", clock.read_date_header)
        examined_stream = _ExaminedStream(client, name)
        attempts = [
            RightAttempt("kinesis:DescribeStreamSummary", examined_stream.describe_stream),
            RightAttempt("kinesis:ListShards", examined_stream.list_shards),
            RightAttempt("kinesis:GetShardIterator", examined_stream.get_iterator),
            RightAttempt("kinesis:GetRecords", examined_stream.get_records),
        ]
        if consumer := options.get("consumer"):
            attempts.append(RightAttempt("kinesis:DescribeStreamConsumer", partial(examined_stream.consumer, consumer)))
        yield RightsTrial(f"stream {name}", tuple(attempts), clock, close=client.close)


class _ExaminedStream:
    """Sends requests about one stream. Each request uses values from responses to earlier requests."""

    def __init__(self, client: "KinesisClient", name: str) -> None:
        self._client, self._name = client, name
        self._arn, self._encrypted = "", False
        self._shard, self._iterator = "", ""

    def describe_stream(self) -> str:
        with translate_errors(self._name):
            summary = self._client.describe_stream_summary(StreamName=self._name)["StreamDescriptionSummary"]
        self._arn, self._encrypted = summary["StreamARN"], summary.get("EncryptionType") == "KMS"
        return f"it responds, and is {summary['StreamStatus']}"

    def list_shards(self) -> None:
        with translate_errors(self._name):
            shards = self._client.list_shards(StreamName=self._name)["Shards"]
        if not shards:
            raise SourceError(f"stream {self._name!r} has no shards")
        self._shard = shards[0]["ShardId"]

    def get_iterator(self) -> None:
        # If the shards could not be listed, use the id of the first shard of a new stream. That shard exists unless the
        # stream was resharded.
        shard = self._shard or "shardId-000000000000"
        with translate_errors(self._name):
            response = self._client.get_shard_iterator(
                StreamName=self._name, ShardId=shard, ShardIteratorType="TRIM_HORIZON"
            )
        self._iterator = response["ShardIterator"]

    def get_records(self) -> str:
        if not self._iterator:
            raise NotTried("not tried without an iterator")
        with translate_errors(self._name):
            records: list[Any] = self._client.get_records(ShardIterator=self._iterator, Limit=1)["Records"]
        if self._encrypted and not records:
            return "allowed; without a record, the right to use its key (kms:Decrypt) could not be tried"
        return "allowed"

    def consumer(self, name: str) -> str:
        if not self._arn:
            raise NotTried("not tried, because the stream could not be described")
        consumer_request: dict[str, Any] = (
            {"ConsumerARN": name} if name.startswith("arn:") else {"StreamARN": self._arn, "ConsumerName": name}
        )
        try:
            with translate_errors(self._name):
                description = self._client.describe_stream_consumer(**consumer_request)["ConsumerDescription"]
        except SourceError as error:
            cause = error.__cause__
            if name.startswith("arn:") or not isinstance(cause, ClientError) or error_code(cause) != _ABSENT:
                raise
            message = f"there is no consumer {name}; a worker registers it if it has the right"
            raise Absent(f"{message} (kinesis:RegisterStreamConsumer, not tried)") from error
        # Don't try to subscribe, because a second subscription would end a worker's subscription.
        return (
            f"consumer {description['ConsumerName']} is {description['ConsumerStatus']}; kinesis:SubscribeToShard is "
            "not tried"
        )
