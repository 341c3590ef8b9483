"""From a URL to a source: `scheme://place?option=value`, each scheme importing only what it needs.

kinesis://stream?region=…&endpoint=…    Amazon Kinesis Data Streams, by name or ARN, several as `a,b`;
                                        `if_trimmed=TRIM_HORIZON` goes on where a checkpoint was trimmed;
                                        `consumer=NAME` reads by enhanced fan-out;
                                        `misplaced=drop` drops aggregates on a wrong shard whole, as KCL does;
                                        `aggregates=whole` hands aggregates over as they are, not as user records;
                                        `wire=json` asks for records in JSON, not in CBOR, `wire=boto3` by boto3;
                                        `poll_seconds=1` leaves a shard alone for so long between two requests;
                                        `max_records=500` has a request ask for no more records
dynamodb-streams://table?region=…       The changes of the items of a table of DynamoDB; a stream's ARN in place of
                                        the table reads that stream; `endpoint`, `if_trimmed`, `poll_seconds` likewise
eventhubs://namespace/hub?group=…       Azure Event Hubs, as consumer group `$Default` if none is named;
                                        `transport=websockets` needs port 443 alone, and passes the proxy that
                                        HTTPS_PROXY names, or `proxy=http://host:port`;
                                        `prefetch=300` lets a partition send so many events ahead

Those of AWS take `profile=NAME`, `role_arn=…` and `external_id=…` in place of the environment's credentials.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from leasehold.adapters.sources.protocol import Source
from leasehold.errors import SourceError
from leasehold.stores.urls import AWS, Scheme, Schemes, endpoint_of, read_url, session_for

if TYPE_CHECKING:  # an extra brings it
    from boto3 import Session


_OURS = {
    "kinesis": Scheme(
        "leasehold.adapters.sources.kinesis.streams",
        AWS | {"if_trimmed", "misplaced", "aggregates", "consumer", "wire", "poll_seconds", "max_records"},
        "aws",
    ),
    "dynamodb-streams": Scheme(
        "leasehold.adapters.sources.dynamodb_streams",
        AWS | {"if_trimmed", "poll_seconds", "max_records"},
        "aws",
    ),
    "eventhubs": Scheme(
        "leasehold.adapters.sources.event_hubs.poller", frozenset({"group", "transport", "proxy", "prefetch"}), "azure"
    ),
}

_SCHEMES = Schemes("sources", _OURS)


def open_source(url: str, *, session: "Session | None" = None) -> Source:
    """The source this URL names; nothing is asked of the service yet.

    session  of boto3's, with the credentials for a URL of AWS; None: the URL's, or the environment's

    Raises ValueError, naming what is wrong and never repeating the URL (it may hold a secret), and
    SourceError if the source cannot be used as asked.

    Examples:
        >>> from leasehold.adapters import open_source
        >>> open_source("kinesis://orders?region=eu-west-1").close()
    """
    scheme, place, options = source_address(url)
    module = _SCHEMES[scheme].load("source", SourceError)
    source: Source = module.open_url(place, options, **session_for(_SCHEMES[scheme], session, "source URL"))
    return source


def source_address(url: str) -> tuple[str, str, Mapping[str, str]]:
    """The scheme, the place and the options of a source's URL. Raises ValueError, never repeating the URL."""
    scheme, place, options = read_url(url, "source", _SCHEMES)
    if not place:
        raise ValueError(f"source URL: it names no stream; write {scheme}://NAME")
    endpoint_of(options.get("endpoint"), "source URL")
    return scheme, place, options
