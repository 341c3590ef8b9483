"""The requests of a producer: PutRecords, the listing of shards, and the stream's settings."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import boto3
from attrs import evolve
from botocore.config import Config as ClientConfig
from botocore.exceptions import ClientError, ConnectTimeoutError, EndpointConnectionError, ProxyConnectionError

from leasehold.adapters.sources.call_patience import CallPatience
from leasehold.adapters.sources.kinesis.clients import KinesisClients, WireForm
from leasehold.adapters.sources.kinesis.faults import SERVER_ERROR, code_of, said_plainly
from leasehold.adapters.sources.kinesis.producer.shard_map import ShardMap, mapped
from leasehold.adapters.sources.kinesis.producer.shard_queue import Unit
from leasehold.adapters.sources.kinesis.producer.values import Placed, Refused, Settings, UnitOutcome, Unknown
from leasehold.adapters.sources.kinesis.shards import listed
from leasehold.adapters.sources.protocol import SourceError, SourceUnavailable
from leasehold.stores.printable import escaped

try:
    from leasehold.adapters.sources.kinesis.wire.puts import PutRows, PutWire
except ImportError:  # then boto3 writes requests by itself
    PutRows, PutWire = list, None  # type: ignore[assignment,misc]  # the slow way

if TYPE_CHECKING:  # the stubs are no dependency of a user
    from types_boto3_kinesis import KinesisClient
    from types_boto3_kinesis.type_defs import PutRecordsResultEntryTypeDef

log = escaped(logging.getLogger("leasehold.kinesis"))

PUT_SECONDS = 10.0, 20.0, 30.0
"""For the next bytes of an answer; a request given up may have been carried out, and is sent again."""
QUICK = 20
"""So many answers in time, one after another, bring the least time-out back: one request is for many shards."""

_NOT_SENT = (ConnectTimeoutError, EndpointConnectionError, ProxyConnectionError)


def clients_of(region: str | None, endpoint: str | None, connections: int, wire: WireForm = "cbor") -> KinesisClients:
    """The clients of a producer, which waits longer for a service that is slow."""
    return KinesisClients(
        lambda seconds: client_of(region, endpoint, connections, wire, read_seconds=seconds), PUT_SECONDS
    )


def client_of(
    region: str | None,
    endpoint: str | None,
    connections: int,
    wire: WireForm = "cbor",
    *,
    read_seconds: float = PUT_SECONDS[0],
) -> "KinesisClient":
    """A client that sends each request once: its own repetitions would write twice, and unseen.

    The records of a producer go in this form, if the service speaks it.
    """
    client: KinesisClient = boto3.client(
        "kinesis",
        region_name=region,
        endpoint_url=endpoint,
        config=ClientConfig(
            connect_timeout=5,
            read_timeout=read_seconds,
            max_pool_connections=connections + 1,
            retries={"total_max_attempts": 1},
        ),
    )
    if PutWire is None:
        log.warning("records are sent slowly: orjson, pybase64 or cbor2 is missing; install leasehold[aws]")
    else:
        PutWire(client, cbor=wire == "cbor")
    return client


class KinesisPutClient:
    """The requests that a producer makes of its stream."""

    def __init__(self, client: "KinesisClient | KinesisClients", stream: str) -> None:
        """Send requests to `stream` by `client`, which must not repeat them by itself."""
        clients = KinesisClients.of(client)
        self._stream = stream
        self._putting, self._asking = CallPatience(clients, quick=QUICK), CallPatience(clients, insists=True)

    def fitting(self, settings: Settings) -> Settings:
        """The settings, with the stream's own record limit. Raises SourceError where order cannot be kept."""
        with said_plainly(self._stream):
            told = self._asking.call("describe_stream_summary", StreamName=self._stream)
        summary = told["StreamDescriptionSummary"]
        if summary.get("RecordDistributionStrategy") == "AUTO":
            raise SourceError(
                f"stream {self._stream!r} spreads its records itself (RecordDistributionStrategy AUTO): keys do not "
                "choose a shard, and consumers drop aggregated records; set the strategy to PARTITION_KEY"
            )
        return evolve(settings, record_bytes=1024 * int(summary.get("MaxRecordSizeInKiB") or 1024))

    def shards(self) -> ShardMap | None:
        """The map of a complete listing, or None. Raises SourceUnavailable or SourceError."""
        with said_plainly(self._stream):
            page = self._asking.call("list_shards", StreamName=self._stream)
            rows = page["Shards"]
            while token := page.get("NextToken"):
                page = self._asking.call("list_shards", NextToken=token)
                rows += page["Shards"]
        return mapped(listed(rows))

    def put(self, units: Sequence[Unit]) -> list[UnitOutcome]:
        """Send units together, once. Raises SourceError if sending again cannot help."""
        rows = PutRows(
            {"Data": unit.data, "PartitionKey": unit.partition_key, "ExplicitHashKey": str(unit.hash_key)}
            for unit in units
        )
        try:
            with said_plainly(self._stream):
                answer = self._putting.call("put_records", StreamName=self._stream, Records=rows)
        except SourceUnavailable as fault:
            return [_without_answer(fault.__cause__)] * len(units)
        results = answer.get("Records", ())  # an answer that cannot be read has none
        if len(results) != len(units):
            return [Unknown("ResultCountMismatch")] * len(units)
        return [_outcome(row) for row in results]


def _outcome(row: "PutRecordsResultEntryTypeDef") -> UnitOutcome:
    code = row.get("ErrorCode")
    return Refused(code) if code else Placed(row["ShardId"], row["SequenceNumber"])


def _without_answer(cause: BaseException | None) -> UnitOutcome:
    """Throttled or never sent: refused. Anything else may have been written."""
    if isinstance(cause, ClientError):
        status = int(cause.response.get("ResponseMetadata", {}).get("HTTPStatusCode", SERVER_ERROR))
        return Refused(code_of(cause)) if status < SERVER_ERROR else Unknown(code_of(cause))
    code = type(cause).__name__
    return Refused(code) if isinstance(cause, _NOT_SENT) else Unknown(code)
