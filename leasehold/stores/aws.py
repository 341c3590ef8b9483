"""Creates boto3 sessions with the credentials named in an AWS URL, instead of those in the environment.

`profile=` names a profile in the AWS configuration. `role_arn=` names a role, which is assumed with the credentials of
the profile or the environment. The role may belong to another account. `external_id=` is the external ID, for roles
that require one. None of these options is a secret. Python callers may pass their own session instead.

This module sends no requests. botocore assumes the role when a client sends its first request, and again before the
role's credentials expire.
"""

import os
import socket
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import botocore.session
from botocore.credentials import (
    AssumeRoleCredentialFetcher,
    CredentialProvider,
    CredentialResolver,
    DeferredRefreshableCredentials,
)
from botocore.exceptions import (
    CredentialRetrievalError,
    EndpointConnectionError,
    InvalidConfigError,
    NoCredentialsError,
    ProfileNotFound,
    SSOError,
    TokenRetrievalError,
)
from botocore.parsers import ResponseParserError

from leasehold.stores.urls import ROLE_ARN_PATTERN

if TYPE_CHECKING:  # imported in a function at run time, because the import takes about 0.1 s of CPU time
    import boto3

CREDENTIALS_FROM = "set them in the environment or a profile (profile=), by SSO (aws sso login), or run under a role"
"""The advice with which an error about missing credentials ends."""


def connection_failure_hint(error: BaseException) -> str:
    """Return the reason why a connection failed, for appending to the message of `error`, or "" for any other error.

    The hint is needed because botocore's own message contains only the URL.
    """
    if not isinstance(error, EndpointConnectionError):
        return ""
    cause: BaseException | None = error.kwargs.get("error")
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__
    hints = [cause.strerror] if cause is not None and cause.strerror else []
    if isinstance(cause, socket.gaierror | None) and ".amazonaws.com" in str(error):
        hints.append("is the region right?")
    return f" ({'; '.join(hints)})" if hints else ""


RETRIEVAL_ERRORS = (CredentialRetrievalError, InvalidConfigError, SSOError, TokenRetrievalError)
"""The exceptions for credentials that are configured but cannot be obtained. A login or a restart may help, so a worker
keeps trying to obtain them."""


def credentials_failure_advice(error: BaseException) -> str:
    """Return the reason why credentials could not be obtained, and what to do about it."""
    cause = str(error).rstrip(".: ")
    if not isinstance(error, (SSOError, TokenRetrievalError)):
        return f"{cause}; check the profile"
    return cause if "sso login" in cause else f"{cause}; run aws sso login"


PARSE_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    ResponseParserError,
    TypeError,
    UnicodeDecodeError,
)
"""The exceptions that parsing an unexpected response, such as a proxy's error page, may raise."""

PROFILE_VARIABLES = frozenset({"AWS_PROFILE", "AWS_DEFAULT_PROFILE"})
"""The environment variables that name a profile. botocore does not look the profile up until it creates a client."""

SESSION_NAME = "leasehold"
"""The session name for an assumed role. CloudTrail shows this name."""


def create_boto3_session(
    options: Mapping[str, str], url_kind: str = "store URL", session: "boto3.Session | None" = None
) -> "boto3.Session | None":
    """Return a session with the credentials that are named by the options of a URL.

    Args:
        options: The options.
        url_kind: The kind of URL, for error messages.
        session: The caller's own session, which is returned if the options name no credentials.

    Returns:
        A session, or None to use the credentials of the environment.

    Raises:
        ValueError: If the profile named by the URL or the environment does not exist, if the role is invalid, or if the
            caller passes a session although the options name credentials.
    """
    profile, role, external_id = options.get("profile"), options.get("role_arn"), options.get("external_id")
    if session is not None:
        if profile or role or external_id:
            raise ValueError(f"{url_kind}: pass either a session, or profile, role_arn and external_id")
        return session
    if external_id is not None and role is None:
        raise ValueError(f"{url_kind}: option 'external_id' needs option 'role_arn'")
    if role is not None and not ROLE_ARN_PATTERN.fullmatch(role):
        raise ValueError(f"{url_kind}: option 'role_arn' must be arn:aws:iam::ACCOUNT:role/NAME")
    from_environment = profile is None and not os.environ.keys().isdisjoint(PROFILE_VARIABLES)
    if profile is None and role is None and not from_environment:
        return None
    botocore_session = botocore.session.Session(profile=profile)
    try:
        botocore_session.get_scoped_config()
    except ProfileNotFound:
        profile_origin = "environment variable AWS_PROFILE" if from_environment else f"{url_kind}: option 'profile'"
        raise ValueError(f"{profile_origin}: AWS's configuration has no profile {botocore_session.profile!r}") from None
    if profile is None and role is None:
        return None
    import boto3  # noqa: PLC0415  the import is slow, see above

    if role is not None:
        botocore_session = create_session_with_providers(
            [create_role_provider(botocore_session, role, external_id=external_id)], profile
        )
    return boto3.Session(botocore_session=botocore_session)


def create_botocore_session(session: "boto3.Session | None") -> botocore.session.Session:
    """Return a new botocore session with the credentials and configuration of `session`.

    The caller may change the response parsers of the new session without affecting `session`, from which other clients
    may have been created.
    """
    if session is None:
        return botocore.session.get_session()
    # If no profile is set, `profile_name` is `default`. botocore rejects this name unless a profile with this name is
    # configured.
    profile = session.profile_name if session.profile_name in session.available_profiles else None
    botocore_session = create_session_with_providers([_FixedCredentials(session.get_credentials())], profile)
    botocore_session.set_config_variable("region", session.region_name)
    return botocore_session


def create_session_with_providers(
    providers: Iterable[CredentialProvider], profile: str | None = None
) -> botocore.session.Session:
    """Return a session that uses the credentials of the first provider that has credentials."""
    botocore_session = botocore.session.Session(profile=profile)
    botocore_session.register_component("credential_provider", CredentialResolver([*providers]))
    return botocore_session


def create_role_provider(
    botocore_session: botocore.session.Session,
    role: str,
    *,
    external_id: str | None = None,
    session_name: str = SESSION_NAME,
    region: str | None = None,
    endpoint: str | None = None,
) -> CredentialProvider:
    """Return a provider for the credentials of an assumed role.

    Args:
        botocore_session: The session whose credentials are used to assume the role.
        role: The ARN of the role.
        external_id: The external id that the role requires, if any.
        session_name: The name of the session, which CloudTrail shows.
        region: The region of STS, or None for the session's region.
        endpoint: The endpoint of STS, or None for the region's default endpoint.
    """

    def create_sts_client(service: str, **arguments: Any) -> Any:  # noqa: ANN401  boto's client
        client_options = {name: value for name, value in (("region_name", region), ("endpoint_url", endpoint)) if value}
        return botocore_session.create_client(service, **arguments | client_options)

    def fetch_credentials() -> Mapping[str, Any]:
        if (source_credentials := botocore_session.get_credentials()) is None:
            raise NoCredentialsError
        assume_role_arguments = {"RoleSessionName": session_name} | (
            {} if external_id is None else {"ExternalId": external_id}
        )
        credentials: Mapping[str, Any] = AssumeRoleCredentialFetcher(
            create_sts_client, source_credentials, role, extra_args=assume_role_arguments
        ).fetch_credentials()
        return credentials

    return _FixedCredentials(DeferredRefreshableCredentials(refresh_using=fetch_credentials, method="assume-role"))


class _FixedCredentials(CredentialProvider):
    """A provider that returns the given credentials, which may refresh themselves before they expire, or None."""

    METHOD = "given"

    def __init__(self, credentials: Any) -> None:  # noqa: ANN401  boto3 has several types of credentials
        super().__init__()
        self._credentials = credentials

    def load(self) -> Any:  # noqa: ANN401  likewise
        return self._credentials
