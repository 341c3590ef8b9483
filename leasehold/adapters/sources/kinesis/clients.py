"""The clients that read from Kinesis: boto3's own, but quick about the records."""

import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from botocore.config import Config
from botocore.exceptions import ReadTimeoutError
from botocore.utils import parse_timestamp

from leasehold.adapters.sources.call_patience import POLL_SECONDS, SUBSCRIPTION_SECONDS, TimedClients
from leasehold.adapters.sources.kinesis.stream_arn import ask_by_arn
from leasehold.stores.aws import core_of
from leasehold.stores.deadlines import bound_client
from leasehold.stores.printable import escaped

try:
    from leasehold.adapters.sources.kinesis.cbor.hooks import Wire, read_directly
except ImportError:  # then boto3 takes answers apart by itself
    Wire = None  # type: ignore[assignment,misc]  # the slow way

if TYPE_CHECKING:  # the stubs are no dependency of a user
    from boto3 import Session
    from types_boto3_kinesis import KinesisClient

log = escaped(logging.getLogger("leasehold.kinesis"))

CONNECTIONS = 64
MILLISECONDS = 10**11
"""Numbers from here on are milliseconds, which no time of Kinesis in seconds will reach for 3,000 years."""

WireForm = Literal["cbor", "json", "boto3"]
"""The form of requests for records: in CBOR past boto3, in JSON, or in CBOR through boto3."""


class KinesisClients(TimedClients):
    """Boto3's clients: they know a time-out of a client, and none of a call."""

    late = ReadTimeoutError

    @classmethod
    def of(cls, client: "KinesisClient | KinesisClients") -> "KinesisClients":
        """The clients that were given; or one client of a caller's own, whose time-out is what it is."""
        if isinstance(client, KinesisClients):
            return client
        try:
            seconds = float(client.meta.config.read_timeout)  # type: ignore[attr-defined]  # the stubs know no option
        except (AttributeError, TypeError):  # it stands in for a client
            seconds = POLL_SECONDS[0]
        return cls(lambda _seconds: client, (seconds,), (seconds,))


def reading_client(
    region: str | None,
    endpoint: str | None,
    wire: WireForm = "cbor",
    *,
    read_seconds: float = SUBSCRIPTION_SECONDS[0],
    session: "Session | None" = None,
    arn: str | None = None,
) -> "KinesisClient":
    """A client for many threads, which asks for records in this form. Raises what botocore raises without a region.

    It gives a connection up where nothing comes for `read_seconds`.
    With an `arn`, every request names the stream by it.

    The time of a record is whatever the service wrote: `seconds_of` reads it.
    """
    client: KinesisClient = patient_client("kinesis", region, endpoint, read_seconds, session)
    if arn is not None:
        ask_by_arn(client, arn)
    if Wire is None:
        log.warning("records are read slowly: orjson, pybase64 or cbor2 is missing; install leasehold[aws]")
    else:
        spoken = Wire(client, cbor=wire != "json")
        if wire == "cbor":
            read_directly(client, spoken, arn)
    return client


def patient_client(
    service: Any,  # noqa: ANN401  each service has its own
    region: str | None,
    endpoint: str | None,
    read_seconds: float,
    session: "Session | None" = None,
) -> Any:  # noqa: ANN401  likewise
    """A client of this service for many threads, which gives a connection up where nothing comes for so long."""
    core = core_of(session)
    # The time of arrival, looked up in a local time zone, is more than half of what a record of 1 KB costs boto3.
    core.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=utc)
    # Made by botocore: importing boto3 costs a start some 0.1 s of a processor, and adds nothing to such a client.
    client = core.create_client(
        service,
        region_name=region,
        endpoint_url=endpoint,
        config=Config(
            connect_timeout=5,
            read_timeout=read_seconds,
            max_pool_connections=CONNECTIONS,
            # One quick repetition; longer waits are the poller's, which gives its thread back.
            retries={"mode": "standard", "total_max_attempts": 2},
        ),
    )
    bound_client(client)
    # The next call is given longer than this one; repeated as it was, it would hold its thread for nothing.
    client.meta.events.register_first(f"needs-retry.{client.meta.service_model.service_id.hyphenize()}", _late_once)
    return client


def _late_once(caught_exception: Exception | None = None, **_event: object) -> None:
    if isinstance(caught_exception, ReadTimeoutError):
        raise caught_exception


def utc(value: Any) -> datetime:  # noqa: ANN401  whatever a service may write for a time
    """A time of Kinesis's (seconds since 1970), in UTC; any other form is left to botocore."""
    return datetime.fromtimestamp(value, UTC) if isinstance(value, int | float) else parse_timestamp(value)


def seconds_of(told: object) -> float | None:
    """Seconds since 1970 of a record's time: seconds in JSON, milliseconds in CBOR, and boto3's own value."""
    if isinstance(told, int | float):
        return told / 1000 if told >= MILLISECONDS else float(told)
    if told is None:
        return None
    return (told if isinstance(told, datetime) else utc(told)).timestamp()
