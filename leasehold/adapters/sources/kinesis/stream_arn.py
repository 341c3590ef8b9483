"""Adds a stream's ARN to requests. The service requires the ARN if the stream belongs to another account.

Our code always passes `StreamName`, and a client that was created for an ARN adds `StreamARN` to its requests. Kinesis
accepts both together. Local services that know only names still work.
"""

import re
from typing import TYPE_CHECKING, Any

from attrs import frozen

if TYPE_CHECKING:  # the stubs are not installed for users
    from types_boto3_kinesis import KinesisClient

_ARN_PATTERN = re.compile(
    r"arn:[a-z0-9-]+:kinesis:(?P<region>[a-z0-9-]+):\d{12}:stream/(?P<name>[a-zA-Z0-9_.-]{1,128})", re.ASCII
)


@frozen
class StreamAddress:
    """Identifies a stream by its name or ARN.

    Attributes:
        name: The stream's name, without account and region.
        arn: The stream's ARN, or None if the stream was given by name.
        region: The region of the stream, or None to use the environment's.
    """

    name: str
    arn: str | None
    region: str | None


def parse_stream_address(name_or_arn: str, region: str | None, origin: str) -> StreamAddress:
    """Return the address of a stream given by name or by ARN.

    Args:
        name_or_arn: The name or the ARN.
        region: The region that the user gave in addition, if any.
        origin: Where `name_or_arn` came from, for error messages, such as "source URL".

    Raises:
        ValueError: If `name_or_arn` starts like an ARN and is not that of a stream, or if its region differs from
            `region`.
    """
    if not name_or_arn.startswith("arn:"):
        return StreamAddress(name_or_arn, None, region)
    match = _ARN_PATTERN.fullmatch(name_or_arn)
    if match is None:
        raise ValueError(f"{origin}: write a stream's ARN as arn:aws:kinesis:REGION:ACCOUNT:stream/NAME")
    if region is not None and region != match["region"]:
        raise ValueError(
            f"{origin}: the ARN is in region {match['region']}, but option 'region' is {region!r}; remove that option"
        )
    return StreamAddress(match["name"], name_or_arn, match["region"])


def name_stream_by_arn(client: "KinesisClient", arn: str) -> None:
    """Make `client` send `StreamARN` in every request that names a stream, or reads from one."""

    def add_arn(params: dict[str, Any], **_event: object) -> None:
        # Other requests need no ARN, because a page token or a consumer's ARN already identifies the stream. If a
        # request contains a page token, Kinesis even rejects a stream's name.
        if "StreamName" in params or "ShardIterator" in params:
            params["StreamARN"] = arn

    client.meta.events.register("before-parameter-build.kinesis", add_arn)
