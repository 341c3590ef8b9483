"""Opens a source by its URL, `scheme://place?option=value`. The module for a scheme is imported only if it is used.

kinesis://stream?region=…&endpoint=…    Amazon Kinesis Data Streams, by name or ARN; several streams as `a,b`:
                                        `if_trimmed=TRIM_HORIZON` starts at the oldest record if a checkpoint was
                                        trimmed;
                                        `consumer=NAME` reads by enhanced fan-out;
                                        `misplaced=drop` drops aggregates on a wrong shard entirely, as the KCL does;
                                        `aggregates=whole` dispatches aggregates as they are, not as user records;
                                        `wire=json` requests records in JSON instead of CBOR, `wire=boto3` in CBOR
                                        through boto3;
                                        `poll_seconds=1` is the interval between two requests for a shard;
                                        `max_records=500` is the maximum number of records per request
dynamodb-streams://table?region=…       The item changes of a DynamoDB table, or of a stream given by its ARN in place
                                        of the table; `endpoint`, `if_trimmed`, `poll_seconds` and `max_records` as
                                        above
eventhubs://namespace/hub?group=…       Azure Event Hubs, as consumer group `$Default` unless one is named:
                                        `transport=websockets` needs only port 443, and goes through the proxy in
                                        HTTPS_PROXY, or in `proxy=http://host:port`;
                                        `prefetch=300` is the number of events that are sent ahead per partition

The AWS schemes take `profile=NAME`, `role_arn=…` and `external_id=…` in place of the environment's credentials.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from leasehold.adapters.sources.protocol import Source
from leasehold.errors import SourceError
from leasehold.stores.urls import AWS_OPTIONS, Scheme, Schemes, check_endpoint, session_argument, split_url

if TYPE_CHECKING:  # boto3 is an optional dependency
    from boto3 import Session


_BUILTIN_SCHEMES = {
    "kinesis": Scheme(
        "leasehold.adapters.sources.kinesis.streams",
        AWS_OPTIONS | {"if_trimmed", "misplaced", "aggregates", "consumer", "wire", "poll_seconds", "max_records"},
        "aws",
    ),
    "dynamodb-streams": Scheme(
        "leasehold.adapters.sources.dynamodb_streams",
        AWS_OPTIONS | {"if_trimmed", "poll_seconds", "max_records"},
        "aws",
    ),
    "eventhubs": Scheme(
        "leasehold.adapters.sources.event_hubs.poller", frozenset({"group", "transport", "proxy", "prefetch"}), "azure"
    ),
}

_SCHEMES = Schemes("sources", _BUILTIN_SCHEMES)


def open_source(url: str, *, session: "Session | None" = None) -> Source:
    """Return the source at this URL, without calling the service yet.

    Args:
        url: The URL, as described in the docstring of this module.
        session: The boto3 session with the credentials for an AWS URL. By default they are those that the URL names, or
            those of the environment.

    Raises:
        ValueError: If the URL is wrong. The message never repeats the URL, which may contain a secret.
        SourceError: If the source cannot be opened, for example because a package is not installed.

    Examples:
        >>> from leasehold.adapters import open_source
        >>> open_source("kinesis://orders?region=eu-west-1").close()
    """
    scheme, location, options = source_address(url)
    module = _SCHEMES[scheme].load("source", SourceError)
    source: Source = module.open_url(location, options, **session_argument(_SCHEMES[scheme], session, "source URL"))
    return source


def source_address(url: str) -> tuple[str, str, Mapping[str, str]]:
    """Split the URL of a source into scheme, location and options.

    Raises:
        ValueError: If the URL is wrong. The message never repeats the URL.
    """
    scheme, location, options = split_url(url, "source", _SCHEMES)
    if not location:
        raise ValueError(f"source URL: it names no stream; write {scheme}://NAME")
    check_endpoint(options.get("endpoint"), "source URL")
    return scheme, location, options
