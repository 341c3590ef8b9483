"""Temporary rejections by a service are distinguished from lasting ones."""

import pytest
from azure.eventhub.exceptions import AuthenticationError, ConnectError
from botocore.exceptions import ClientError

from leasehold.adapters.sources.dynamodb_streams import STREAMS
from leasehold.adapters.sources.event_hubs.access import Access, translate_error
from leasehold.adapters.sources.kinesis.faults import KINESIS, AwsService, translate_errors
from leasehold.adapters.sources.protocol import TransientRejection
from leasehold.errors import SourceError, SourceUnavailable

TEMPORARY = [
    ("307", 307),
    ("413", 413),
    ("RequestTimeTooSkewed", 403),
    ("RequestExpired", 400),
    ("UnrecognizedClientException", 400),
    ("InvalidSignatureException", 400),
    ("ExpiredTokenException", 400),
    ("KMSInvalidStateException", 400),
    ("SomethingNew", 400),
]
LASTING = [
    ("ResourceNotFoundException", 400),
    ("AccessDeniedException", 400),
    ("InvalidArgumentException", 400),
    ("ValidationException", 400),
    ("KMSDisabledException", 400),
    ("AccessDenied", 400),
    ("KMSAccessDeniedException", 400),
    ("KMSNotFoundException", 400),
    ("KMSOptInRequired", 400),
    ("OptInRequired", 400),
    ("SerializationException", 400),
    ("SubscriptionRequiredException", 400),
    ("UnknownOperationException", 400),
    ("ValidationError", 400),
]
THROTTLED = [
    "ProvisionedThroughputExceededException",
    "LimitExceededException",
    "ThrottlingException",
    "Throttling",
    "KMSThrottlingException",
    "RequestLimitExceeded",
]
UNAVAILABLE = [
    *((code, 400) for code in THROTTLED),
    *((code, 400) for code in ("InternalFailure", "InternalFailureException", "ServiceUnavailable", "RequestTimeout")),
    ("SomethingNew", 500),
    ("503", 503),
]


@pytest.mark.parametrize("service", [KINESIS, STREAMS], ids=["kinesis", "dynamodb-streams"])
@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        (*rejection, kind)
        for rejection, kind in [
            *((rejection, TransientRejection) for rejection in TEMPORARY),
            *((rejection, SourceError) for rejection in LASTING),
            *((rejection, SourceUnavailable) for rejection in UNAVAILABLE),
        ]
    ],
)
def test_aws_rejection_is_lasting_only_if_a_retry_gets_it_again(
    code: str, status: int, kind: type[SourceError], service: AwsService
) -> None:
    """For example, a redirect is temporary, and a missing permission is lasting."""
    error = {"Error": {"Code": code, "Message": "no"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    with pytest.raises(SourceError) as exc_info, translate_errors("orders", service):
        raise ClientError(error, "GetRecords")  # type: ignore[arg-type]  # The other fields are not needed.
    assert type(exc_info.value) is kind


def _message_of(code: str) -> str:
    """Return the message of the error with which a rejection with this code is reported."""
    error = {"Error": {"Code": code, "Message": "no"}, "ResponseMetadata": {"HTTPStatusCode": 400}}
    with pytest.raises(SourceError) as exc_info, translate_errors("orders"):
        raise ClientError(error, "GetRecords")  # type: ignore[arg-type]  # The other fields are not needed.
    return str(exc_info.value)


@pytest.mark.parametrize("code", THROTTLED)
def test_throttling_is_named(code: str) -> None:
    assert _message_of(code) == f"Kinesis throttled a request for stream 'orders': {code}"


@pytest.mark.parametrize(
    "code",
    [
        "UnrecognizedClientException",
        "InvalidSignatureException",
        "IncompleteSignature",
        "InvalidClientTokenId",
        "MissingAuthenticationToken",
        "MissingAuthenticationTokenException",
        "ExpiredTokenException",
        "ExpiredToken",
    ],
)
def test_rejected_aws_credentials_are_named(code: str) -> None:
    assert _message_of(code) == f"the credentials for stream 'orders' are not accepted ({code}): renew or replace them"


@pytest.mark.parametrize("code", ["AccessDeniedException", "AccessDenied"])
def test_missing_aws_permission_is_named(code: str) -> None:
    assert "because they lack kinesis:GetRecords: no" in _message_of(code)


def _connect_error(condition: str) -> ConnectError:
    """Return an error of the Event Hubs client, with this condition as the reason that the service gave."""
    error = ConnectError("no")
    error.error = condition
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (AuthenticationError("Unauthorized"), TransientRejection),
        (_connect_error("unauthorized-access"), TransientRejection),
        (_connect_error("not-found"), SourceError),
        (ValueError("no"), SourceError),
        (_connect_error("server-busy"), SourceUnavailable),
    ],
    ids=["token", "unauthorized", "not-found", "value", "busy"],
)
def test_rejected_event_hub_credentials_may_be_temporary(error: Exception, kind: type[SourceError]) -> None:
    """After a role was granted, or while a token is being renewed, a request may be rejected once or twice."""
    assert type(translate_error(error, Access("ns.servicebus.windows.net", "hub", "$Default"))) is kind
