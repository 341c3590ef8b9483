"""A worker with one lease table reads several streams, uses the lease keys of the KCL, and adds or removes streams."""

from contextlib import closing
from datetime import UTC, datetime
from threading import Lock
from typing import Any, cast
from uuid import uuid4

import boto3
import pytest
from attrs import define, field
from botocore.stub import Stubber
from running import running
from types_boto3_dynamodb import DynamoDBClient
from types_boto3_kinesis import KinesisClient
from waiters import AT_ONCE, until

from leasehold.adapters.consumer.handling import Delivery
from leasehold.adapters.consumer.runner import Runner
from leasehold.adapters.sources.kinesis.source import KinesisSource
from leasehold.adapters.sources.kinesis.streams import KinesisStreams
from leasehold.adapters.sources.protocol import Batch
from leasehold.adapters.sources.urls import open_source
from leasehold.adapters.worker.discovery import Discovery
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.config import Config
from leasehold.balancer.model import TRIM_HORIZON, Lease, Me, Position, Shard
from leasehold.errors import SourceError, SourceUnavailable
from leasehold.stores.protocol import Listing
from leasehold.stores.urls import open_store


def create_stream(client: KinesisClient, shards: int = 1) -> str:
    """Create a stream and return its name."""
    name = f"many-{uuid4().hex[:8]}"
    client.create_stream(StreamName=name, ShardCount=shards)
    client.get_waiter("stream_exists").wait(StreamName=name, WaiterConfig=AT_ONCE)
    return name


@pytest.mark.services
def test_streams_are_added_and_removed_while_a_worker_reads(
    client: KinesisClient, dynalite_url: str, dynalite_client: DynamoDBClient
) -> None:
    stream_1, stream_2, stream_3 = create_stream(client), create_stream(client, 2), create_stream(client)
    table = f"many-{uuid4().hex[:8]}"
    sources = {name: KinesisSource(client, name) for name in (stream_1, stream_2, stream_3)}
    streams = KinesisStreams([sources[stream_1], sources[stream_2]])
    store = open_store(f"dynamodb://{table}?region=eu-west-1&endpoint={dynalite_url}", create=True)
    worker = Worker(
        store=store, source=streams, me="a-1", config=Config(lease_seconds=3.0, initial_position=TRIM_HORIZON)
    )
    received_records: list[tuple[str, bytes]] = []
    lock = Lock()

    def handle(delivery: Delivery) -> None:
        with lock:
            received_records.extend((delivery.stream.split(":")[1], record.data) for record in delivery.records)

    runner = Runner(worker, handle)
    with running(runner):
        for name in (stream_1, stream_2, stream_3):
            client.put_record(StreamName=name, Data=b"first", PartitionKey="k")
        until(
            lambda: sorted(received_records) == sorted([(stream_1, b"first"), (stream_2, b"first")]),
            f"{received_records}",
        )
        streams.remove(stream_1)
        streams.add(sources[stream_3])
        worker.hurry()
        until(lambda: (stream_3, b"first") in received_records, f"{received_records}")
        until(lambda: len(worker.holdings) == 3, "the removed stream's lease is released")
        client.put_record(StreamName=stream_1, Data=b"second", PartitionKey="k")
        client.split_shard(StreamName=stream_3, ShardToSplit="shardId-000000000000", NewStartingHashKey=str(2**127))
        client.get_waiter("stream_exists").wait(StreamName=stream_3, WaiterConfig=AT_ONCE)
        client.put_record(StreamName=stream_3, Data=b"second", PartitionKey="k")
        until(lambda: (stream_3, b"second") in received_records, f"{received_records}")
    assert sorted(received_records) == sorted(
        [(stream_1, b"first"), (stream_2, b"first"), (stream_3, b"first"), (stream_3, b"second")]
    )

    rows = {item["leaseKey"]["S"]: item for item in dynalite_client.scan(TableName=table)["Items"]}
    identity_3, identity_1 = sources[stream_3].identity(), sources[stream_1].identity()
    child = rows[f"{identity_3}:shardId-000000000001"]
    assert (child["streamName"], child["shardId"]) == ({"S": identity_3}, {"S": "shardId-000000000001"})
    assert child["parentShardId"] == {"SS": ["shardId-000000000000"]}
    removed_row = rows[f"{identity_1}:shardId-000000000000"]
    assert ("leaseOwner" in removed_row, removed_row["checkpoint"]["S"].isdigit()) == (False, True)
    assert identity_1.split(":")[1:2] == [stream_1]


def test_missing_stream_is_an_immediate_error() -> None:
    kinesis: KinesisClient = boto3.client("kinesis", region_name="eu-west-1")
    streams = KinesisStreams([KinesisSource(kinesis, "ordres")])
    with Stubber(kinesis) as stub:
        stub.add_client_error("describe_stream_summary", "ResourceNotFoundException")
        with pytest.raises(SourceError, match="stream 'ordres': it does not exist"):
            streams.shards()
        stub.add_client_error("describe_stream_summary", "LimitExceededException")
        assert not streams.reads(Lease("s-0", stream="1:orders:2"))


def test_recreated_stream_is_another_stream() -> None:
    """A recreated stream has shards with the same ids, but the old checkpoints do not apply to them."""
    kinesis: KinesisClient = boto3.client("kinesis", region_name="eu-west-1")
    streams = KinesisStreams([KinesisSource(kinesis, "orders")])
    with Stubber(kinesis) as stub:
        for created_at in (7, 9):
            stub.add_response("describe_stream_summary", _summary("orders", created_at))
        stub.add_response("list_shards", _shards())
        assert [shard.id for shard in streams.shards()] == ["1:orders:9:shardId-000000000000"]
        assert [streams.reads(Lease("s", stream=f"1:orders:{created_at}")) for created_at in (7, 9)] == [False, True]


def test_incarnation_is_unknown_without_the_permission_to_describe(caplog: pytest.LogCaptureFixture) -> None:
    kinesis: KinesisClient = boto3.client("kinesis", region_name="eu-west-1")
    source = KinesisSource(kinesis, "orders")
    with Stubber(kinesis) as stub:
        for _ in range(2):
            stub.add_client_error("describe_stream_summary", "AccessDeniedException")
        assert [source.incarnation() for _ in range(2)] == ["", ""]
        stub.add_response("describe_stream_summary", _summary("orders", 9))
        assert source.incarnation() == "1:orders:9"
        stub.add_client_error("describe_stream_summary", "LimitExceededException")
        with pytest.raises(SourceUnavailable):
            source.incarnation()
    warning = (
        "stream orders: aggregates are filtered by hash range, and a recreated stream of the same name is not noticed"
    )
    reason = "because these credentials lack kinesis:DescribeStreamSummary"
    assert caplog.messages == [f"{warning}, {reason}"]


def _summary(name: str, created_at: int) -> dict[str, Any]:
    return {
        "StreamDescriptionSummary": {
            "StreamName": name,
            "StreamARN": f"arn:aws:kinesis:eu-west-1:1:stream/{name}",
            "StreamStatus": "ACTIVE",
            "RetentionPeriodHours": 24,
            "StreamCreationTimestamp": datetime.fromtimestamp(created_at, UTC),
            "EnhancedMonitoring": [],
            "OpenShardCount": 1,
        }
    }


def _shards() -> dict[str, Any]:
    keys = {"StartingHashKey": "0", "EndingHashKey": str(2**128 - 1)}
    shard = {"ShardId": "shardId-000000000000", "HashKeyRange": keys, "SequenceNumberRange": {}}
    shard["SequenceNumberRange"] = {"StartingSequenceNumber": "1"}
    return {"Shards": [shard], "ResponseMetadata": {"HTTPHeaders": {}}}


@define
class FakeStream:
    """A stream whose only shard ends with two children. It counts some calls. Requests raise `fault` if it is set."""

    name: str
    fault: SourceError | None = None
    named: int = 0
    closed: int = 0

    def identity(self) -> str:
        """Count the call, and return the stream's identity or raise the fault."""
        self.named += 1
        return f"1:{self.name}:7{self.answered()}"

    def incarnation(self) -> str:
        return f"1:{self.name}:7{self.answered()}"

    def shards(self) -> tuple[Shard, ...]:
        return (Shard(f"s-0{self.answered()}"),)

    def open(self, _lease: Lease, _start: Position) -> "FakeStream":
        return self

    def read(self) -> Batch:
        """Return a batch that ends the shard."""
        children = tuple(Shard(child, parents=("s-0",)) for child in ("s-1", "s-2"))
        return Batch((), None, 0.0, 0.0, ended=True, children=children)

    def close(self) -> None:
        self.closed += 1

    def answered(self) -> str:
        if self.fault is not None:
            raise self.fault
        return ""


def streams_of(*sources: FakeStream) -> KinesisStreams:
    return KinesisStreams(cast("list[KinesisSource]", sources))


def test_shard_of_one_stream_ends_with_all_of_its_children() -> None:
    """Both children of a split are known as soon as their parent ends, before the next listing."""
    stream = FakeStream("a")
    streams = streams_of(stream)
    (shard,) = streams.shards()
    reader = streams.open(Lease("s-0", stream=shard.stream), TRIM_HORIZON)
    assert reader.read().children == tuple(
        Shard(f"1:a:7:{child}", stream="1:a:7", parents=("1:a:7:s-0",)) for child in ("s-1", "s-2")
    )
    reader.close()
    assert stream.closed == 1, "its subscription would stay open for as long as the process runs"


def test_stream_identity_is_requested_once() -> None:
    """The identity is kept, because the service allows only twenty DescribeStreamSummary requests per second."""
    stream = FakeStream("a")
    streams = streams_of(stream)
    for _ in range(3):
        streams.shards()
        assert streams.reads(Lease("s-0", stream="1:a:7"))
    assert stream.named == 1


def test_listing_has_the_streams_that_respond_and_fails_if_none_does(caplog: pytest.LogCaptureFixture) -> None:
    stream_a, stream_b = FakeStream("a"), FakeStream("b")
    streams = streams_of(stream_a, stream_b)
    streams.shards()
    stream_b.fault = SourceError("b may not be listed")
    assert [shard.id for shard in streams.shards()] == ["1:a:7:s-0"]
    assert caplog.messages == ["the shards of one stream could not be listed: b may not be listed"]
    stream_a.fault = SourceUnavailable("a is slow")
    with pytest.raises(SourceUnavailable, match="a is slow"):
        streams.shards()


@pytest.mark.parametrize("named", [False, True])
def test_throttled_stream_is_listed_again_soon(caplog: pytest.LogCaptureFixture, *, named: bool) -> None:
    slow_stream = FakeStream("b")
    streams = streams_of(FakeStream("a"), slow_stream)
    if named:
        streams.reads(Lease("s-0"))
    slow_stream.fault = SourceUnavailable("b is slow")
    discovery, empty_table, me = Discovery(streams), Listing(()), Me("a-1")
    shard_listings = [discovery.shards(now, empty_table, me) for now in (0.0, 1.0)]
    assert [[shard.stream for shard in shards or ()] for shards in shard_listings] == [["1:a:7"]] * 2
    assert (discovery.listing_failed, discovery.is_current) == (True, True)
    slow_stream.fault = None
    shard_listings = [discovery.shards(now, empty_table, me) for now in (2.0, 3.0)]
    assert [shards and [shard.stream for shard in shards] for shards in shard_listings] == [["1:a:7", "1:b:7"], None]
    assert not discovery.listing_failed
    warning = "the shards of a stream could not be listed, trying again until they can: b is slow"
    assert caplog.messages == [warning, "the shards are listed again"]


def test_throttled_stream_is_read_once_it_is_identified() -> None:
    slow_stream = FakeStream("b", SourceUnavailable("b is slow"))
    streams = streams_of(FakeStream("a"), slow_stream)
    assert [shard.id for shard in streams.shards()] == ["1:a:7:s-0"]
    slow_stream.fault = None
    assert [shard.id for shard in streams.shards()] == ["1:a:7:s-0", "1:b:7:s-0"]


def test_stream_removed_before_it_is_identified_is_not_read() -> None:
    slow_stream = FakeStream("b", SourceUnavailable("b is slow"))
    streams = streams_of(FakeStream("a"), slow_stream)
    streams.shards()
    streams.remove("b")
    slow_stream.fault = None
    assert [shard.id for shard in streams.shards()] == ["1:a:7:s-0"]


def test_wrong_name_next_to_a_right_one_is_an_error() -> None:
    streams = streams_of(
        FakeStream("a"), FakeStream("c", SourceUnavailable("c is slow")), FakeStream("b", SourceError("no stream b"))
    )
    with pytest.raises(SourceError, match="no stream b"):
        streams.shards()


@define
class RecreatedStream(FakeStream):
    """A stream whose incarnation a test changes, and which records the shards and the leases that it is asked about."""

    epoch: str = "7"
    shards_asked: list[str] = field(factory=list)

    def incarnation(self) -> str:
        return self.epoch and f"1:{self.name}:{self.epoch}"

    def gone(self, shard: str) -> bool:
        self.shards_asked.append(shard)
        return True

    def latest(self, _lease: Lease) -> Position:
        return Position(self.name)

    def settled(self, _lease: Lease, _until: float) -> str:
        return self.name


def test_other_streams_are_still_read_after_one_is_recreated() -> None:
    streams = streams_of(FakeStream("a"), recreated_stream := RecreatedStream("b"), FakeStream("c"))
    streams.shards()
    recreated_stream.epoch = "9"
    assert sorted(shard.stream for shard in streams.shards()) == ["1:a:7", "1:b:9", "1:c:7"]


def test_stream_keeps_its_identity_if_the_service_does_not_describe_it_any_more() -> None:
    stream = RecreatedStream("a")
    streams = streams_of(stream)
    streams.shards()
    stream.epoch = ""
    assert [shard.id for shard in streams.shards()] == ["1:a:7:s-0"]


def test_each_request_goes_to_the_stream_of_its_lease() -> None:
    sources = [RecreatedStream(name) for name in "12"]
    streams = streams_of(*sources)
    streams.shards()
    for name, source in zip("12", sources, strict=True):
        lease = Lease("s-0", stream=f"1:{name}:7")
        assert streams.gone(f"1:{name}:7:s-{name}")
        assert source.shards_asked == [f"s-{name}"]
        assert streams.latest(lease) == Position(name)
        assert cast("str", streams.settled(lease, 0.0)) == name


def test_every_stream_is_closed_even_before_it_is_identified() -> None:
    sources = [FakeStream("a"), FakeStream("b", SourceUnavailable("b is slow"))]
    streams = streams_of(*sources)
    streams.shards()
    streams.close()
    assert [source.closed for source in sources] == [1, 1]


def test_identities_are_resolved_by_one_thread_at_a_time() -> None:
    """Workers list the shards in one thread and check leases in others."""
    stream, locked = FakeStream("a"), list[bool]()
    streams = streams_of(stream)

    def answered(_stream: FakeStream) -> str:
        locked.append(streams._lock.locked())  # noqa: SLF001
        return ""

    with pytest.MonkeyPatch.context() as patch_context:
        patch_context.setattr(FakeStream, "answered", answered)
        assert streams.reads(Lease("s-0", stream="1:a:7"))
    assert locked == [True]


def test_url_may_name_several_streams() -> None:
    source_of_two = open_source("kinesis://orders,returns?region=eu-west-1")
    assert isinstance(source_of_two, KinesisStreams)
    source_of_two.close()
    with pytest.raises(ValueError, match="must differ and be separated by commas"):
        open_source("kinesis://orders,orders?region=eu-west-1")
    with pytest.raises(ValueError, match="must differ and be separated by commas"):
        open_source("kinesis://orders,,returns?region=eu-west-1")
    with pytest.raises(ValueError, match="an ARN belongs to one stream"):
        open_source("kinesis://orders,returns?region=eu-west-1&consumer=arn:aws:kinesis:eu-west-1:1:consumer/c")
    with closing(open_source("kinesis://orders?region=eu-west-1")) as source_of_one:
        assert (type(source_of_one), source_of_one.stream) == (
            KinesisSource,
            "",
        )  # The leases of a single stream contain no stream name.


def test_removed_stream_is_no_longer_read_and_is_closed() -> None:
    """A removed stream may now be read by another worker, so its open readers fail and its connections are closed."""
    kinesis: KinesisClient = boto3.client("kinesis", region_name="eu-west-1")
    closed_streams: list[str] = []
    streams = KinesisStreams([KinesisSource(kinesis, "orders"), KinesisSource(kinesis, "carts")])
    with Stubber(kinesis) as stub, pytest.MonkeyPatch.context() as patch_context:
        patch_context.setattr(KinesisSource, "close", lambda source: closed_streams.append(source.name))
        for name in ("orders", "carts"):
            stub.add_response("describe_stream_summary", _summary(name, 7))
        for _ in range(2):
            stub.add_response("list_shards", _shards())
        assert len(streams.shards()) == 2
        reader = streams.open(Lease("1:orders:7:s-0", stream="1:orders:7"), TRIM_HORIZON)
        streams.remove("orders")
        with pytest.raises(SourceError, match="stream '1:orders:7' was removed from this source"):
            reader.read()
        with pytest.raises(SourceError, match="stream '1:orders:7' is not one of the streams of this source"):
            streams.open(Lease("1:orders:7:s-0", stream="1:orders:7"), TRIM_HORIZON)
        streams.close()
    assert "carts" in closed_streams
