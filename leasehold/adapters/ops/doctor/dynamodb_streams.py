"""Tries the rights of a worker on the stream of a DynamoDB table."""

from collections.abc import Iterator, Mapping
from typing import Any

from leasehold.adapters.ops.doctor.attempts import NotTried, RightAttempt, RightsTrial, ServiceClock
from leasehold.adapters.sources.call_timeouts import POLL_TIMEOUTS
from leasehold.adapters.sources.dynamodb_streams import STREAMS, is_arn, parse_region
from leasehold.adapters.sources.kinesis.clients import create_client
from leasehold.adapters.sources.kinesis.faults import translate_errors
from leasehold.errors import SourceError
from leasehold.stores.aws import create_boto3_session
from leasehold.stores.urls import reject_credentials


def trials(location: str, options: Mapping[str, str]) -> Iterator[RightsTrial]:
    """Yield the trial of the rights on the table's stream.

    Raises:
        SourceError: No region is configured.
        StoreError: The endpoint is not valid.
    """
    region, endpoint = parse_region(location, options), options.get("endpoint")
    session = create_boto3_session(options, "source URL")
    with translate_errors(location, STREAMS):
        streams = create_client("dynamodbstreams", region, endpoint, POLL_TIMEOUTS[-1], session)
        tables = create_client("dynamodb", region, endpoint, POLL_TIMEOUTS[-1], session)
    for client in (streams, tables):
        reject_credentials(client.meta.endpoint_url)
    clock = ServiceClock()
    streams.meta.events.register("after-call.dynamodb-streams", clock.read_date_header)
    examined_table = _ExaminedTable(streams, tables, location)

    def close() -> None:
        streams.close()
        tables.close()

    table_attempts = (
        () if is_arn(location) else (RightAttempt("dynamodb:DescribeTable", examined_table.describe_table),)
    )
    attempts = (
        *table_attempts,
        RightAttempt("dynamodb:DescribeStream", examined_table.describe_stream),
        RightAttempt("dynamodb:GetShardIterator", examined_table.get_iterator),
        RightAttempt("dynamodb:GetRecords", examined_table.get_records),
    )
    yield RightsTrial(f"stream {location}", attempts, clock, close=close)


class _ExaminedTable:
    """Sends requests about one table. Each request uses values from responses to earlier requests."""

    def __init__(self, streams: Any, tables: Any, name: str) -> None:  # noqa: ANN401  boto3's clients
        self._streams, self._tables, self._name = streams, tables, name
        self._arn = name if is_arn(name) else ""
        self._shard, self._iterator = "", ""

    def describe_table(self) -> str:
        with translate_errors(self._name, STREAMS):
            self._arn = self._tables.describe_table(TableName=self._name)["Table"].get("LatestStreamArn", "")
        if not self._arn:
            raise SourceError(f"table {self._name!r} has no stream: enable one")
        return f"its stream is {self._arn}"

    def describe_stream(self) -> str:
        if not self._arn:
            raise NotTried("not tried, because the stream of the table is not known")
        with translate_errors(self._name, STREAMS):
            description = self._streams.describe_stream(StreamArn=self._arn)["StreamDescription"]
        if not description["Shards"]:
            raise SourceError(f"stream {self._name!r} has no shards")
        self._shard = description["Shards"][-1]["ShardId"]
        return f"it responds, is {description['StreamStatus']}, and has {description['StreamViewType']}"

    def get_iterator(self) -> None:
        if not self._shard:
            raise NotTried("not tried, because no shard is known")
        iterator_request = {"StreamArn": self._arn, "ShardId": self._shard, "ShardIteratorType": "TRIM_HORIZON"}
        with translate_errors(self._name, STREAMS):
            self._iterator = self._streams.get_shard_iterator(**iterator_request)["ShardIterator"]

    def get_records(self) -> None:
        if not self._iterator:
            raise NotTried("not tried without an iterator")
        with translate_errors(self._name, STREAMS):
            self._streams.get_records(ShardIterator=self._iterator, Limit=1)
