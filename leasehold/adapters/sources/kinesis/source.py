"""A source that lists the shards of a Kinesis stream, and opens a reader for each."""

import logging
import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast, get_args

from botocore.exceptions import ClientError

from leasehold.adapters.sources.call_timeouts import Backoff, CallTimeouts, TimedClients
from leasehold.adapters.sources.kinesis.aggregation.decode import Misplaced
from leasehold.adapters.sources.kinesis.clients import KinesisClients, WireFormat, create_reading_client
from leasehold.adapters.sources.kinesis.fan_out import FanOut, StreamConsumer
from leasehold.adapters.sources.kinesis.faults import (
    DENIED,
    KINESIS,
    PollPace,
    error_code,
    parse_max_records,
    parse_poll_seconds,
    stream_summary_from_response,
    translate_errors,
    translate_parse_errors,
)
from leasehold.adapters.sources.kinesis.poller import MAX_RECORDS, Poller
from leasehold.adapters.sources.kinesis.records import convert_shards
from leasehold.adapters.sources.kinesis.stream_arn import parse_stream_address
from leasehold.adapters.sources.protocol import SETTLE_SECONDS, SettledShard
from leasehold.adapters.threads import read_boot_clock
from leasehold.balancer.model import Lease, Position, Shard, at_timestamp
from leasehold.errors import SourceError, SourceUnavailable
from leasehold.stores.aws import create_boto3_session
from leasehold.stores.printable import make_safe_logger
from leasehold.stores.urls import parse_date_header

if TYPE_CHECKING:  # the stubs are not installed for users
    from boto3 import Session
    from types_boto3_kinesis import KinesisClient

log = make_safe_logger(logging.getLogger("leasehold.kinesis"))

PAGE_SIZE = 1000
IDENTITY_RETRY_SECONDS = 1.0, 10.0


class PolledStream:
    """The base class of sources whose shards are read with iterators.

    Args:
        clients: The clients of the service.
        name: The name of the stream in messages.
        rewind: Whether a shard whose checkpoint was trimmed restarts at its oldest record; otherwise it is not read.
        poll_seconds: The seconds between two requests for a shard; None for the default pace of `PollPace`.
        max_records: The maximum number of records per request; None for the service's limit.
        clock: Returns the time of a monotonic clock, in seconds. The service's responses relate this clock to the time
            of day.
    """

    service = KINESIS
    stream_parameter = "StreamName"
    """The request parameter that names the stream."""

    def __init__(
        self,
        clients: TimedClients,
        name: str,
        *,
        rewind: bool,
        poll_seconds: float | None,
        max_records: int | None,
        clock: Callable[[], float],
    ) -> None:
        self._clients, self._clock = clients, clock
        self._timeouts = CallTimeouts(clients, retry_first_call=True)
        self.name, self._rewind, self._poll_seconds, self._max_records = name, rewind, poll_seconds, max_records
        self._server_clock_offset: float | None = None

    @property
    def stream(self) -> str:
        """The empty string, because all leases in the table belong to this stream and do not contain its name."""
        return ""

    def shards(self) -> tuple[Shard, ...]:
        """List all shards, and pass a response to `_record_server_time`, which reads the service's time from it."""
        raise NotImplementedError

    def gone(self, shard: str) -> bool:
        """Return whether the service no longer has this shard."""
        try:
            with translate_errors(self.name, self.service):
                parameters: Any = {
                    self.stream_parameter: self._request_name(),
                    "ShardId": shard,
                    "ShardIteratorType": "TRIM_HORIZON",
                }
                self._timeouts.call("get_shard_iterator", **parameters)
        except SourceError as fault:
            is_missing = (
                isinstance(fault.__cause__, ClientError) and error_code(fault.__cause__) == "ResourceNotFoundException"
            )
            if not is_missing:
                raise
            # If the whole stream no longer exists, the error is the same, but then `shards` raises, so no lease is
            # deleted.
            return all(listed_shard.id != shard for listed_shard in self.shards())
        return False

    def latest(self, lease: Lease) -> Position:  # noqa: ARG002  one clock serves all shards
        """Estimate the service's time. The estimate is never late, because start times in the future are rejected."""
        if self._server_clock_offset is None:
            self.shards()
        return at_timestamp(int((self._clock() + (self._server_clock_offset or 0.0)) * 1000))

    def close(self) -> None:
        """Close all connections."""
        self._clients.close()

    def _request_name(self) -> str:
        """Return the name of the stream in requests."""
        return self.name

    def _record_server_time(self, response: Any) -> None:  # noqa: ANN401  the type depends on the service
        # The header is truncated to whole seconds, so the time that we derive from it is less than one second early.
        server_time = parse_date_header(response["ResponseMetadata"]["HTTPHeaders"].get("date"))
        self._server_clock_offset = (time.time() if server_time is None else server_time) - self._clock()


class KinesisSource(PolledStream):
    """A Kinesis stream.

    Args:
        client: The client of the service, which all threads share. With `KinesisClients`, timeouts adapt to a slow
            service.
        name: The name of the stream.
        rewind: Whether a shard whose checkpoint was trimmed restarts at its oldest record; otherwise it is not read.
        misplaced: What to do with aggregates that contain records of another shard.
        whole_aggregates: Whether to return aggregates as they are, instead of their user records.
        arn: The ARN of the stream; "" to request it from the service.
        consumer: The name or ARN of a registered consumer, to read shards by enhanced fan-out; None to poll them.
        poll_seconds: The seconds between two requests for a shard; None for the default pace of `PollPace`.
        max_records: The maximum number of records per request; None for the service's limit.
        clock: Returns the time of a monotonic clock, in seconds. The service's responses relate this clock to the time
            of day.

    Raises:
        ValueError: If `consumer` is not a valid name.
    """

    reader: Callable[..., Poller] = Poller
    """The class of the readers. Spark's subclass returns Arrow columns instead of records."""

    def __init__(
        self,
        client: "KinesisClient | KinesisClients",
        name: str,
        *,
        rewind: bool = False,
        misplaced: Misplaced = "keep",
        whole_aggregates: bool = False,
        arn: str = "",
        consumer: str | None = None,
        poll_seconds: float | None = None,
        max_records: int | None = None,
        clock: Callable[[], float] = read_boot_clock,
    ) -> None:
        clients = KinesisClients.of(client)
        super().__init__(clients, name, rewind=rewind, poll_seconds=poll_seconds, max_records=max_records, clock=clock)
        self._client = clients.client_with_timeout(clients.timeouts[0])
        self.consumer: StreamConsumer | None = None
        if consumer is not None:
            self.consumer = StreamConsumer(self._client, name, consumer, timeouts=self._timeouts)
            self.reader = partial(FanOut, consumer=self.consumer)
        self._misplaced, self._whole_aggregates, self._arn = misplaced, whole_aggregates, arn
        # Remember whether partition keys determine the shard. If the service chooses the shard itself, no aggregate is
        # misplaced.
        self._partitioned_by_key: bool | None = None
        # When a worker starts, all its shards need the stream's identity at the same time. Request it only once,
        # because the whole account shares one quota.
        self._next_identity_request_at, self._identity_backoff = -math.inf, Backoff(*IDENTITY_RETRY_SECONDS)

    def identity(self) -> str:
        """Return the stream's identity as in the KCL, `account:stream:creationEpoch`.

        Raises:
            SourceUnavailable: If the service does not respond or throttles the request. A later attempt may succeed.
            SourceError: If the service rejects the request, for example because of wrong credentials.
        """
        with translate_errors(self.name), translate_parse_errors(self.name):
            response = self._timeouts.call("describe_stream_summary", StreamName=self.name)
            summary = stream_summary_from_response(response, self.name)
            self._partitioned_by_key = summary.get("RecordDistributionStrategy") != "AUTO"
            self._arn = summary["StreamARN"]
            account, created_at = self._arn.split(":")[4], summary["StreamCreationTimestamp"]
            return f"{account}:{self.name}:{int(created_at.timestamp())}"

    def arn(self, _stream: str) -> str:
        """Return the stream's ARN, without an account if the ARN is not known yet."""
        return self._arn or f"arn:aws:kinesis:{self._client.meta.region_name}::stream/{self.name}"

    def incarnation(self) -> str:
        """Return the stream's identity, or "" if the credentials do not allow the worker to request it.

        Raises:
            SourceUnavailable: If the service does not respond or throttles the request. A later attempt may succeed.
            SourceError: If the service rejects the request, for example because of wrong credentials.
        """
        try:
            return self.identity()
        except SourceError as fault:
            if isinstance(fault.__cause__, KeyError) and self._partitioned_by_key is not None:
                return ""  # a stand-in for Kinesis that responds without the ARN or the time
            if not (isinstance(fault.__cause__, ClientError) and error_code(fault.__cause__) in DENIED):
                if isinstance(fault, SourceUnavailable):
                    self._next_identity_request_at = self._clock() + self._identity_backoff.next()
                raise
        if self._partitioned_by_key is None:
            reason = "because these credentials lack kinesis:DescribeStreamSummary"
            consequence = "and a recreated stream of the same name is not noticed"
            log.warning("stream %s: aggregates are filtered by hash range, %s, %s", self.name, consequence, reason)
            self._partitioned_by_key = True
        return ""

    def shards(self) -> tuple[Shard, ...]:
        """List all shards, reading every page of ListShards.

        Raises:
            SourceUnavailable: If the service does not respond or throttles the request. A later attempt may succeed.
            SourceError: If the service rejects the request, for example because of wrong credentials.
        """
        with translate_errors(self.name), translate_parse_errors(self.name):
            page = self._timeouts.call("list_shards", StreamName=self.name, MaxResults=PAGE_SIZE)
            rows = page["Shards"]
            while next_token := page.get("NextToken"):
                page = self._timeouts.call("list_shards", NextToken=next_token, MaxResults=PAGE_SIZE)
                rows += page["Shards"]
            self._record_server_time(page)
            return convert_shards(rows)

    def settled(self, lease: Lease, until: float) -> SettledShard | None:
        """Return a `SettledShard` once the service's clock is `SETTLE_SECONDS` past `until`, and None before that.

        From then on, a read that reaches the tip has returned all records that arrived before `until`.
        """
        return SettledShard() if self.latest(lease).sub / 1000 >= until + SETTLE_SECONDS else None

    def open(self, lease: Lease, start: Position) -> Poller:
        """Return a reader that starts just after `start`.

        Raises:
            SourceUnavailable: If the service does not respond or throttles the request. A later attempt may succeed.
            SourceError: If the service rejects the request, for example because of wrong credentials.
        """
        if self._partitioned_by_key is None:
            if self._clock() < self._next_identity_request_at:
                raise SourceUnavailable(f"stream {self.name!r}: DescribeStreamSummary will be called again in a moment")
            # After a fault, only one shard requests the identity, and the other shards wait.
            if self._identity_backoff.faults:
                self._next_identity_request_at = self._clock() + IDENTITY_RETRY_SECONDS[0]
            self.incarnation()
        return self.reader(
            self._client,
            self.name,
            lease.shard,
            start,
            lease.hash_range if self._partitioned_by_key else None,
            misplaced=self._misplaced,
            whole_aggregates=self._whole_aggregates,
            rewind=self._rewind,
            pace=PollPace(self._poll_seconds),
            timeouts=CallTimeouts(self._clients, first_step=self._timeouts.longest_step),
            max_records=self._max_records,
        )


def open_url(name: str, options: Mapping[str, str], *, session: "Session | None" = None) -> KinesisSource:
    """Open the stream of this name or ARN.

    Raises:
        SourceError: If no region is known.
        ValueError: If an option is wrong.
    """
    if options.get("if_trimmed", "TRIM_HORIZON") != "TRIM_HORIZON":
        raise ValueError(
            "source URL: option 'if_trimmed' must be TRIM_HORIZON; without it, a shard with a trimmed checkpoint is "
            "not read"
        )
    if (wire := options.get("wire", "cbor")) not in get_args(WireFormat):
        raise ValueError(
            "source URL: option 'wire' must be cbor, json or boto3; without it, records are requested in CBOR"
        )
    if (misplaced := options.get("misplaced", "keep")) not in get_args(Misplaced):
        raise ValueError(
            "source URL: option 'misplaced' must be keep or drop; without it, the records of this shard are kept"
        )
    if (aggregates := options.get("aggregates", "records")) not in {"records", "whole"}:
        raise ValueError(
            "source URL: option 'aggregates' must be records or whole; without it, handlers get the user records"
        )
    poll_seconds = parse_poll_seconds(options["poll_seconds"]) if "poll_seconds" in options else None
    address = parse_stream_address(name, options.get("region"), "source URL")
    endpoint, wire_format = options.get("endpoint"), cast("WireFormat", wire)
    opened_session = create_boto3_session(options, "source URL", session)
    clients = KinesisClients(
        lambda seconds: create_reading_client(
            address.region, endpoint, wire_format, read_seconds=seconds, session=opened_session, arn=address.arn
        )
    )
    with translate_errors(address.name):
        return KinesisSource(
            clients,
            address.name,
            rewind="if_trimmed" in options,
            misplaced=cast("Misplaced", misplaced),
            whole_aggregates=aggregates == "whole",
            arn=address.arn or "",
            consumer=options.get("consumer"),
            poll_seconds=poll_seconds,
            max_records=parse_max_records(options, MAX_RECORDS),
        )
