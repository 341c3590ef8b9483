"""Streams named by ARN. Every request contains the ARN, so no stream of another account is used."""

from typing import Any

import pytest
from standins.wire_service import Service, Spoken, listening
from types_boto3_kinesis import KinesisClient

from leasehold.adapters.producing import open_producer
from leasehold.adapters.sources.kinesis.source import KinesisSource
from leasehold.adapters.sources.kinesis.stream_arn import parse_stream_address
from leasehold.adapters.sources.protocol import Source
from leasehold.adapters.sources.urls import open_source
from leasehold.balancer.model import TRIM_HORIZON, Lease

ARN = "arn:aws:kinesis:eu-west-1:123456789012:stream/orders"


def test_stream_address_is_a_name_or_an_arn_with_its_region() -> None:
    """The region is taken from the ARN. A URL with a different region is rejected."""
    assert parse_stream_address("orders", "eu-west-1", "source URL").arn is None
    address = parse_stream_address(ARN, None, "source URL")
    assert (address.name, address.arn, address.region) == ("orders", ARN, "eu-west-1")
    assert parse_stream_address(ARN, "eu-west-1", "source URL") == address
    with pytest.raises(
        ValueError, match=r"source URL: the ARN is in region eu-west-1, but option 'region' is 'us-east-1'"
    ):
        parse_stream_address(ARN, "us-east-1", "source URL")
    for invalid_arn in (ARN + "/", ARN.replace("kinesis", "dynamodb"), ARN.replace(":stream/", ":"), "arn:aws:kinesis"):
        with pytest.raises(ValueError, match="source URL: write a stream's ARN as"):
            parse_stream_address(invalid_arn, None, "source URL")


SUMMARY = {
    "StreamDescriptionSummary": {
        "StreamName": "orders",
        "StreamARN": ARN,
        "StreamStatus": "ACTIVE",
        "StreamCreationTimestamp": 1700000000,
        "RetentionPeriodHours": 24,
        "EnhancedMonitoring": [],
        "OpenShardCount": 1,
    }
}
ROW = {
    "ShardId": "s-0",
    "HashKeyRange": {"StartingHashKey": "0", "EndingHashKey": str(2**128 - 1)},
    "SequenceNumberRange": {"StartingSequenceNumber": "1"},
}


def _open_source_by_arn(service: Spoken, wire: str) -> Source:
    return open_source(f"kinesis://{ARN}?endpoint={listening(service)}&wire={wire}")


@pytest.mark.parametrize("wire", ["cbor", "json", "boto3"])
def test_every_request_of_a_reader_contains_the_arn(wire: str) -> None:
    """Only requests for further pages of ListShards omit the ARN, because the service requires that."""
    pages: list[dict[str, Any]] = [{"Shards": [ROW], "NextToken": "more"}, {"Shards": []}]
    empty_batch = {"Records": [], "NextShardIterator": "i-2", "MillisBehindLatest": 0}
    # The form of the first response determines the form of the second request.
    service = Service(*pages, SUMMARY, {"ShardIterator": "i-1"}, empty_batch, empty_batch)
    source = _open_source_by_arn(service, wire)
    shards = source.shards()
    reader = source.open(Lease("s-0", hash_range=shards[0].hash_range), TRIM_HORIZON)
    reader.read()
    reader.read()
    source.close()
    assert [request.get("StreamARN") for request in service.asked] == [ARN, None, ARN, ARN, ARN, ARN]
    assert {request.get("StreamName") for request in service.asked} <= {None, "orders"}


@pytest.mark.parametrize("wire", ["cbor", "json", "boto3"])
def test_every_request_of_a_producer_contains_the_arn(wire: str) -> None:
    """PutRecords also contains the ARN, with and without boto3."""
    response = {"FailedRecordCount": 0, "Records": [{"ShardId": "s-0", "SequenceNumber": "7"}]}
    service = Service(SUMMARY, {"Shards": [ROW]}, response, response)
    with open_producer(f"kinesis://{ARN}?endpoint={listening(service)}&wire={wire}", {}) as producer:
        for data in (b"a book", b"a lamp"):
            assert producer.put(data, "customer-7").result(20).sequence_number == "7"
    assert [request.get("StreamARN") for request in service.asked] == [ARN] * 4
    assert {request.get("StreamName") for request in service.asked} <= {None, "orders"}


def test_records_are_written_and_read_by_arn(client: KinesisClient, kinesis_url: str, stream: str) -> None:
    arn = client.describe_stream_summary(StreamName=stream)["StreamDescriptionSummary"]["StreamARN"]
    url = f"kinesis://{arn}?endpoint={kinesis_url}"
    with open_producer(url, {}) as producer:
        shard = producer.put(b"a lamp", "customer-7").result(20).shard
    source = open_source(url)
    lease = next(
        Lease(listed_shard.id, hash_range=listed_shard.hash_range)
        for listed_shard in source.shards()
        if listed_shard.id == shard
    )
    reader = source.open(lease, TRIM_HORIZON)
    while not (records := reader.read().records):
        pass
    assert [record.data for record in records] == [b"a lamp"]
    reader.close()
    source.close()


def test_source_knows_its_arn_before_any_request() -> None:
    source = open_source(f"kinesis://{ARN}")
    assert isinstance(source, KinesisSource)
    assert source.arn("orders") == ARN
    source.close()
