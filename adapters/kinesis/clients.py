"""The client that reads from Kinesis: boto3's own, but quick about the time that each record carries."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import boto3
import botocore.session
from botocore.config import Config
from botocore.utils import parse_timestamp

if TYPE_CHECKING:  # the stubs are no dependency of a user
    from types_boto3_kinesis import KinesisClient

CONNECTIONS = 64


def reading_client(region: str | None, endpoint: str | None) -> "KinesisClient":
    """A client for many threads. Raises what botocore raises where no region is known."""
    core = botocore.session.get_session()
    # The time of arrival, looked up in a local time zone, is more than half of what a record of 1 KB costs.
    core.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=utc)
    return boto3.session.Session(botocore_session=core).client(
        "kinesis",
        region_name=region,
        endpoint_url=endpoint,
        config=Config(
            connect_timeout=5,
            read_timeout=15,
            max_pool_connections=CONNECTIONS,
            # One quick repetition; longer waits are the poller's, which gives its thread back.
            retries={"mode": "standard", "total_max_attempts": 2},
        ),
    )


def utc(value: Any) -> datetime:  # noqa: ANN401  whatever a service may write for a time
    """A time as Kinesis tells it (seconds since 1970), in UTC; any other form is left to botocore."""
    return datetime.fromtimestamp(value, UTC) if isinstance(value, int | float) else parse_timestamp(value)
