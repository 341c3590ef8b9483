"""Creates boto3 clients that read from Kinesis, with a faster parser for the records."""

import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from botocore.config import Config
from botocore.exceptions import ReadTimeoutError
from botocore.utils import parse_timestamp

from leasehold.adapters.sources.call_timeouts import POLL_TIMEOUTS, SUBSCRIPTION_TIMEOUTS, TimedClients
from leasehold.adapters.sources.kinesis.stream_arn import name_stream_by_arn
from leasehold.stores.aws import create_botocore_session
from leasehold.stores.deadlines import add_response_deadlines
from leasehold.stores.printable import make_safe_logger

try:
    from leasehold.adapters.sources.kinesis.cbor.hooks import CborHooks, replace_read_methods
except ImportError:  # then boto3 parses the responses
    CborHooks = None  # type: ignore[assignment,misc]  # slower

if TYPE_CHECKING:  # the stubs are not installed for users
    from boto3 import Session
    from types_boto3_kinesis import KinesisClient

log = make_safe_logger(logging.getLogger("leasehold.kinesis"))

MAX_CONNECTIONS = 64
MILLISECONDS_FROM = 10**11
"""Times at or above this number are in milliseconds. Times in seconds will not reach it for 3,000 years."""

WireFormat = Literal["cbor", "json", "boto3"]
"""How records are requested: in CBOR without boto3, in JSON, or in CBOR through boto3."""


class KinesisClients(TimedClients):
    """The boto3 clients of Kinesis, one per timeout, because boto3 has no timeouts per call."""

    timeout_error = ReadTimeoutError

    @classmethod
    def of(cls, client: "KinesisClient | KinesisClients") -> "KinesisClients":
        """Return `KinesisClients` unchanged, and wrap a single boto3 client.

        The wrapped client keeps its own timeout.
        """
        if isinstance(client, KinesisClients):
            return client
        try:
            timeout_seconds = float(client.meta.config.read_timeout)  # type: ignore[attr-defined]  # the stubs do not declare it
        except (AttributeError, TypeError):  # a test double without botocore's attributes
            timeout_seconds = POLL_TIMEOUTS[0]
        return cls(lambda _seconds: client, (timeout_seconds,), (timeout_seconds,))


def create_reading_client(
    region: str | None,
    endpoint: str | None,
    wire: WireFormat = "cbor",
    *,
    read_seconds: float = SUBSCRIPTION_TIMEOUTS[0],
    session: "Session | None" = None,
    arn: str | None = None,
) -> "KinesisClient":
    """Return a client that many threads can share, and that requests records in the given format.

    The client does not parse the times of records. Use `parse_record_time` for that. If no region is known, botocore's
    error propagates.

    Args:
        region: The region; None to use the environment's.
        endpoint: The URL of the endpoint; None to use the region's.
        wire: How records are requested.
        read_seconds: The read timeout: how many seconds to wait for the next bytes of a response.
        session: The session with the credentials; None to use the environment's credentials.
        arn: The ARN of the stream, to add it to every request; None to use only the stream's name.
    """
    client: KinesisClient = create_client("kinesis", region, endpoint, read_seconds, session)
    if arn is not None:
        name_stream_by_arn(client, arn)
    if CborHooks is None:
        log.warning("records are read slowly: orjson, pybase64 or cbor2 is missing; install leasehold[aws]")
    else:
        hooks = CborHooks(client, cbor=wire != "json")
        if wire == "cbor":
            replace_read_methods(client, hooks, arn)
    return client


def create_client(
    service: Any,  # noqa: ANN401  the type depends on the service
    region: str | None,
    endpoint: str | None,
    read_seconds: float,
    session: "Session | None" = None,
) -> Any:  # noqa: ANN401  the type depends on the service
    """Return a client of this service that many threads can share, with a read timeout of `read_seconds`."""
    botocore_session = create_botocore_session(session)
    # By default, boto3 converts arrival times to the local time zone. For records of 1 KB, this takes more than half of
    # boto3's time.
    botocore_session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=parse_utc_time)
    # Use botocore directly, because importing boto3 takes 0.1 s of CPU time and adds nothing to such a client.
    client = botocore_session.create_client(
        service,
        region_name=region,
        endpoint_url=endpoint,
        config=Config(
            connect_timeout=5,
            read_timeout=read_seconds,
            max_pool_connections=MAX_CONNECTIONS,
            # Allow one quick retry. Longer waits are left to the poller because its waits do not block a thread.
            retries={"mode": "standard", "total_max_attempts": 2},
        ),
    )
    add_response_deadlines(client)
    # Do not retry a call that timed out, because it would time out again. The next call has a longer timeout.
    client.meta.events.register_first(
        f"needs-retry.{client.meta.service_model.service_id.hyphenize()}", _raise_read_timeout
    )
    return client


def _raise_read_timeout(caught_exception: Exception | None = None, **_event: object) -> None:
    if isinstance(caught_exception, ReadTimeoutError):
        raise caught_exception


def parse_utc_time(value: Any) -> datetime:  # noqa: ANN401  whatever a service may write for a time
    """Parse a time from Kinesis (seconds since 1970) as UTC, leaving any other format to botocore."""
    return datetime.fromtimestamp(value, UTC) if isinstance(value, int | float) else parse_timestamp(value)


def parse_record_time(value: object) -> float | None:
    """Return a record's time in seconds since 1970.

    Args:
        value: Seconds (as in JSON), milliseconds (as in CBOR), a datetime, any other format that botocore knows, or
            None.
    """
    if isinstance(value, int | float):
        return value / 1000 if value >= MILLISECONDS_FROM else float(value)
    if value is None:
        return None
    return (value if isinstance(value, datetime) else parse_utc_time(value)).timestamp()
