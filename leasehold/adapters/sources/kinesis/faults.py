"""The meaning of each fault of Kinesis, and the pace of requests that refusals make slower.

A fault is waited for and tried again, or is a sentence that says what to fix. A rejection that may pass by itself is a
`TransientRejection`. How long a shard is left alone between two requests follows from the faults, too: five requests a
second are the quota of all its readers together.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    HTTPClientError,
    NoCredentialsError,
    NoRegionError,
    PartialCredentialsError,
)

from leasehold.adapters.sources.protocol import TransientRejection
from leasehold.errors import SourceError, SourceUnavailable
from leasehold.stores.aws import CREDENTIALS_FROM, ODD_ANSWER, region_hint
from leasehold.stores.printable import said


class AwsService(NamedTuple):
    """The name of a service in sentences, and the prefix of its rights."""

    name: str
    rights: str


KINESIS = AwsService("Kinesis", "kinesis")

THROTTLED = frozenset(
    {
        "ProvisionedThroughputExceededException",
        "LimitExceededException",
        "ThrottlingException",
        "Throttling",
        "KMSThrottlingException",
        "RequestLimitExceeded",
    }
)
PASSING = frozenset({"InternalFailure", "InternalFailureException", "ServiceUnavailable", "RequestTimeout"})
CREDENTIALS = frozenset(
    {
        "UnrecognizedClientException",
        "InvalidSignatureException",
        "IncompleteSignature",
        "InvalidClientTokenId",
        "MissingAuthenticationToken",
        "MissingAuthenticationTokenException",
        "ExpiredTokenException",
        "ExpiredToken",
    }
)
DENIED = frozenset({"AccessDeniedException", "AccessDenied", "KMSAccessDeniedException"})
LASTING = frozenset(
    {
        "InvalidArgumentException",
        "KMSDisabledException",
        "KMSNotFoundException",
        "KMSOptInRequired",
        "OptInRequired",
        "SerializationException",
        "SubscriptionRequiredException",
        "UnknownOperationException",
        "ValidationError",
        "ValidationException",
    }
)
"""Codes that the same request gets again. Every other one may come from a proxy, a clock or a key that is being set."""
SERVER_ERROR = 500


def code_of(error: ClientError) -> str:
    """The service's own name for what went wrong."""
    return str(error.response.get("Error", {}).get("Code", ""))


@contextmanager
def said_plainly(stream: str, service: AwsService = KINESIS) -> Iterator[None]:
    """Turns the client's errors into SourceUnavailable or SourceError, each a sentence the user can act on."""
    try:
        yield
    except ClientError as error:
        raise _refusal(error, stream, service) from error
    except (NoCredentialsError, PartialCredentialsError) as error:
        raise SourceError(f"no credentials for stream {stream!r}: {CREDENTIALS_FROM}") from error
    except NoRegionError as error:
        raise SourceError(
            f"no region for stream {stream!r}: add ?region=… to the URL or set AWS_DEFAULT_REGION"
        ) from error
    except (HTTPClientError, BotoCoreError) as error:
        # Refused and reset connections, timeouts, names that do not resolve.
        what = f"{service.name} cannot be reached for stream {stream!r}: {error}{region_hint(error)}"
        raise SourceUnavailable(what) from error


@contextmanager
def understood(stream: str, service: AwsService = KINESIS) -> Iterator[None]:
    """Turns what an answer of another shape makes fail into SourceUnavailable: it may be a proxy's, or a bad moment's.

    Nothing of such an answer may count as read.
    """
    try:
        yield
    except (*ODD_ANSWER, ValueError) as odd:
        what = f"an answer of {service.name} for stream {stream!r} cannot be read: {said(odd)}"
        raise SourceUnavailable(what) from odd


def summary_of(told: Mapping[str, Any], stream: str) -> Mapping[str, Any]:
    """Return the summary of this stream. Raises LookupError if the answer is about something else."""
    summary: Mapping[str, Any] = told["StreamDescriptionSummary"]
    if (name := summary.get("StreamName", stream)) != stream:
        raise LookupError(f"it is about stream {name!r}")
    return summary


def _refusal(error: ClientError, stream: str, service: AwsService) -> SourceError:
    code, text = code_of(error), str(error.response.get("Error", {}).get("Message", ""))
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    if code in THROTTLED:
        return SourceUnavailable(f"{service.name} asks to slow down on stream {stream!r}: {code}")
    if code in PASSING or status >= SERVER_ERROR:
        return SourceUnavailable(f"{service.name} failed on stream {stream!r}: {code} {text}")
    if code == "ResourceNotFoundException":
        return SourceError(f"stream {stream!r}: {text or 'it does not exist'}; check its name, account and region")
    if code in CREDENTIALS:
        what = f"the credentials for stream {stream!r} are not accepted ({code}): renew or replace them"
        return TransientRejection(what)
    if code in DENIED:
        asked, right = error.operation_name, f"{service.rights}:{error.operation_name}"
        writes = asked in {"PutRecord", "PutRecords"}
        if code == "KMSAccessDeniedException":
            right = f"{'kms:GenerateDataKey' if writes else 'kms:Decrypt'} of the stream's key"
        do = "write to" if writes else "read"
        return SourceError(f"these credentials may not {do} stream {stream!r}, for want of {right}: {text}")
    kind = SourceError if code in LASTING else TransientRejection
    return kind(f"{service.name} refused a request for stream {stream!r}: {code} {text}")


TIP_SECONDS = 0.5
BEHIND_SECONDS = 0.25
IDLE_SECONDS = 2.0
QUOTA_SECONDS = 0.2
STRETCH, STRETCH_MOST, RELIEF = 2.0, 8.0, 0.9
"""A refusal makes all pauses so many times longer, at most so many times in all; an answer makes them shorter again."""


class PollPace:
    """The pauses of one shard, from the beginning of one request to that of the next.

    poll_seconds  the least of them; None: half a second at the tip, half of that while there is more to read
    """

    def __init__(self, poll_seconds: float | None = None) -> None:
        self._tip = TIP_SECONDS if poll_seconds is None else poll_seconds
        self._behind = BEHIND_SECONDS if poll_seconds is None else poll_seconds
        self._idle = self._tip
        self._stretch = 1.0

    def throttled(self) -> None:
        """Note that the service refused: others read this shard, too."""
        self._stretch = min(STRETCH * self._stretch, STRETCH_MOST)

    def answered(self, *, idle: bool, behind: bool) -> float:
        """Seconds until the next request. Idle, nothing came and nothing is there; behind, there is more."""
        self._idle = min(2 * self._idle, max(IDLE_SECONDS, self._tip)) if idle else self._tip
        stretch, self._stretch = self._stretch, max(1.0, RELIEF * self._stretch)
        return (self._behind if behind else self._idle) * stretch


def max_records_of(options: Mapping[str, str], most: int) -> int | None:
    """Return the `max_records` of a URL, or None if it has none. Raises ValueError unless it is 1 to `most`."""
    if (text := options.get("max_records")) is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 6 and 1 <= int(text) <= most):  # noqa: PLR2004  digits
        raise ValueError(f"source URL: option 'max_records' wants 1 to {most}, the records that one request asks for")
    return int(text)


def poll_seconds_of(text: str) -> float:
    """The pause that a URL asks for. Raises ValueError."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not QUOTA_SECONDS <= seconds <= 60:  # noqa: PLR2004  a minute
        raise ValueError(
            "source URL: option 'poll_seconds' wants 0.2 to 60, for five requests a second are a shard's quota"
        )
    return seconds
