"""Translates the errors of Kinesis, and adapts the pace of requests to throttling.

Errors become SourceUnavailable (wait and try again), SourceError (the message says what to fix), or TransientRejection
(a rejection that may be temporary). The pauses between requests for a shard become longer after throttling, because all
readers of the shard share a quota of five requests per second.
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
from leasehold.stores.aws import (
    CREDENTIALS_FROM,
    PARSE_ERRORS,
    RETRIEVAL_ERRORS,
    connection_failure_hint,
    credentials_failure_advice,
)
from leasehold.stores.printable import error_summary


class AwsService(NamedTuple):
    """The name of a service in messages, and the prefix of its IAM actions."""

    name: str
    iam_prefix: str


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
TRANSIENT_CODES = frozenset({"InternalFailure", "InternalFailureException", "ServiceUnavailable", "RequestTimeout"})
CREDENTIALS_CODES = frozenset(
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
PERMANENT_CODES = frozenset(
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
"""Error codes of permanent rejections. All other rejections may be temporary. Their cause may be a proxy, a wrong clock
or new access keys, for example."""
SERVER_ERROR_STATUS = 500


def error_code(error: ClientError) -> str:
    """Return the error code of the service."""
    return str(error.response.get("Error", {}).get("Code", ""))


@contextmanager
def translate_errors(stream: str, service: AwsService = KINESIS) -> Iterator[None]:
    """Turn the client's errors into SourceUnavailable or SourceError, with messages that the user can act on."""
    try:
        yield
    except ClientError as error:
        raise _translate_client_error(error, stream, service) from error
    except (NoCredentialsError, PartialCredentialsError) as error:
        raise SourceError(f"no credentials for stream {stream!r}: {CREDENTIALS_FROM}") from error
    except RETRIEVAL_ERRORS as error:
        raise SourceUnavailable(f"no credentials for stream {stream!r}: {credentials_failure_advice(error)}") from error
    except NoRegionError as error:
        raise SourceError(
            f"no region for stream {stream!r}: add ?region=… to the URL or set AWS_DEFAULT_REGION"
        ) from error
    except (HTTPClientError, BotoCoreError) as error:
        # Botocore raises these errors for refused or reset connections, timeouts, and host names that do not resolve.
        message = f"{service.name} cannot be reached for stream {stream!r}: {error}{connection_failure_hint(error)}"
        raise SourceUnavailable(message) from error


@contextmanager
def translate_parse_errors(stream: str, service: AwsService = KINESIS) -> Iterator[None]:
    """Turn parse errors of an unexpected response (a proxy's page, say) into a retryable SourceUnavailable.

    The caller must discard the whole response, and must not treat any of its records as read.
    """
    try:
        yield
    except (*PARSE_ERRORS, ValueError) as error:
        message = f"a response of {service.name} for stream {stream!r} cannot be read: {error_summary(error)}"
        raise SourceUnavailable(message) from error


def stream_summary_from_response(response: Mapping[str, Any], stream: str) -> Mapping[str, Any]:
    """Return the stream's summary from a response. Raises LookupError if the response is about another stream."""
    summary: Mapping[str, Any] = response["StreamDescriptionSummary"]
    if (name := summary.get("StreamName", stream)) != stream:
        raise LookupError(f"it is about stream {name!r}")
    return summary


def _translate_client_error(error: ClientError, stream: str, service: AwsService) -> SourceError:
    code, error_message = error_code(error), str(error.response.get("Error", {}).get("Message", ""))
    http_status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    if code in THROTTLED:
        return SourceUnavailable(f"{service.name} throttled a request for stream {stream!r}: {code}")
    if code in TRANSIENT_CODES or http_status >= SERVER_ERROR_STATUS:
        return SourceUnavailable(f"{service.name} failed on stream {stream!r}: {code} {error_message}")
    if code == "ResourceNotFoundException":
        return SourceError(
            f"stream {stream!r}: {error_message or 'it does not exist'}; check its name, account and region"
        )
    if code in CREDENTIALS_CODES:
        message = f"the credentials for stream {stream!r} are not accepted ({code}): renew or replace them"
        return TransientRejection(message)
    if code in DENIED:
        operation, permission = error.operation_name, f"{service.iam_prefix}:{error.operation_name}"
        is_write = operation in {"PutRecord", "PutRecords"}
        if code == "KMSAccessDeniedException":
            permission = f"{'kms:GenerateDataKey' if is_write else 'kms:Decrypt'} of the stream's key"
        denied_action = "write to" if is_write else "read"
        return SourceError(
            f"these credentials cannot {denied_action} stream {stream!r}, because they lack {permission}: "
            f"{error_message}"
        )
    error_type = SourceError if code in PERMANENT_CODES else TransientRejection
    return error_type(f"{service.name} rejected a request for stream {stream!r}: {code} {error_message}")


TIP_SECONDS = 0.5
BEHIND_SECONDS = 0.25
IDLE_SECONDS = 2.0
QUOTA_SECONDS = 0.2
STRETCH, STRETCH_MAX, RELIEF = 2.0, 8.0, 0.9
"""Each throttled request multiplies the pauses by STRETCH, at most STRETCH_MAX in total. Each response multiplies that
factor by RELIEF, down to 1."""


class PollPace:
    """The pauses between the requests for one shard, from the start of one request to the start of the next.

    Args:
        poll_seconds: The shortest pause. By default it is 0.5 s at the tip, and 0.25 s while there is more to read.
    """

    def __init__(self, poll_seconds: float | None = None) -> None:
        self._tip_pause = TIP_SECONDS if poll_seconds is None else poll_seconds
        self._behind_pause = BEHIND_SECONDS if poll_seconds is None else poll_seconds
        self._idle_pause = self._tip_pause
        self._stretch_factor = 1.0

    def slow_down(self) -> None:
        """Lengthen the pauses after a throttled request. Throttling means that other consumers read this shard, too."""
        self._stretch_factor = min(STRETCH * self._stretch_factor, STRETCH_MAX)

    def next_pause(self, *, idle: bool, behind: bool) -> float:
        """Return the seconds until the next request.

        Args:
            idle: Whether the response was empty and there is nothing more to read.
            behind: Whether there is more to read.
        """
        self._idle_pause = min(2 * self._idle_pause, max(IDLE_SECONDS, self._tip_pause)) if idle else self._tip_pause
        stretch_factor, self._stretch_factor = self._stretch_factor, max(1.0, RELIEF * self._stretch_factor)
        return (self._behind_pause if behind else self._idle_pause) * stretch_factor


def parse_max_records(options: Mapping[str, str], limit: int) -> int | None:
    """Return the option `max_records` of a URL, or None if it is unset. Raises ValueError unless it is 1 to `limit`."""
    if (text := options.get("max_records")) is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 6 and 1 <= int(text) <= limit):  # noqa: PLR2004  digits
        raise ValueError(
            f"source URL: option 'max_records' must be 1 to {limit}, the most records that one request may return"
        )
    return int(text)


def parse_poll_seconds(text: str) -> float:
    """Parse the option `poll_seconds` of a URL. Raises ValueError unless it is 0.2 to 60."""
    try:
        pause = float(text)
    except ValueError:
        pause = 0.0
    if not QUOTA_SECONDS <= pause <= 60:  # noqa: PLR2004  a minute
        raise ValueError(
            "source URL: option 'poll_seconds' must be 0.2 to 60, because a shard allows five requests per second"
        )
    return pause
