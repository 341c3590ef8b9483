"""The meaning of each fault of Kinesis: wait and try again, or a sentence that says what to mend."""

from collections.abc import Iterator
from contextlib import contextmanager

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    HTTPClientError,
    NoCredentialsError,
    NoRegionError,
    PartialCredentialsError,
)
from botocore.parsers import ResponseParserError

from leasehold.adapters.sources.protocol import SourceError, SourceUnavailable
from leasehold.stores.printable import said

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
SERVER_ERROR = 500


def code_of(error: ClientError) -> str:
    """The service's own name for what went wrong."""
    return str(error.response.get("Error", {}).get("Code", ""))


@contextmanager
def said_plainly(stream: str) -> Iterator[None]:
    """Turns the client's errors into SourceUnavailable or SourceError, each a sentence the user can act on."""
    try:
        yield
    except ClientError as error:
        raise _service(error, stream) from error
    except (NoCredentialsError, PartialCredentialsError) as error:
        raise SourceError(f"no credentials for stream {stream!r}: set them in the environment or a profile") from error
    except NoRegionError as error:
        raise SourceError(
            f"no region for stream {stream!r}: add ?region=… to the URL or set AWS_DEFAULT_REGION"
        ) from error
    except (HTTPClientError, BotoCoreError) as error:
        # Refused and reset connections, time-outs, names that do not resolve.
        raise SourceUnavailable(f"Kinesis cannot be reached for stream {stream!r}: {error}") from error


@contextmanager
def understood(stream: str) -> Iterator[None]:
    """Turns what an answer of another shape makes fail into SourceUnavailable: it may be a proxy's, or a bad moment's.

    Nothing of such an answer may count as read.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, ResponseParserError, TypeError, ValueError) as odd:
        raise SourceUnavailable(f"an answer of Kinesis for stream {stream!r} cannot be read: {said(odd)}") from odd


def _service(error: ClientError, stream: str) -> SourceError:
    code, text = code_of(error), str(error.response.get("Error", {}).get("Message", ""))
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    if code in THROTTLED:
        return SourceUnavailable(f"Kinesis asks to slow down on stream {stream!r}: {code}")
    if code in PASSING or status >= SERVER_ERROR:
        return SourceUnavailable(f"Kinesis failed on stream {stream!r}: {code} {text}")
    if code == "ResourceNotFoundException":
        return SourceError(f"stream {stream!r}: {text or 'it does not exist'}; check its name, account and region")
    if code in CREDENTIALS:
        return SourceError(f"the credentials for stream {stream!r} are not accepted ({code}): renew or replace them")
    if code in DENIED:
        return SourceError(_denied(code, error.operation_name, stream, text))
    return SourceError(f"Kinesis refused a request for stream {stream!r}: {code} {text}")


def _denied(code: str, asked: str, stream: str, text: str) -> str:
    writes = asked in {"PutRecord", "PutRecords"}
    right = f"kinesis:{asked}"
    if code == "KMSAccessDeniedException":
        right = f"{'kms:GenerateDataKey' if writes else 'kms:Decrypt'} of the stream's key"
    return (
        f"these credentials may not {'write to' if writes else 'read'} stream {stream!r}, for want of {right}: {text}"
    )
