"""Creates boto3 sessions with the credentials named in a URL of AWS, instead of those in the environment.

`profile=` names a profile in the AWS configuration. `role_arn=` is a role, perhaps in another account, to assume with
the credentials of the profile or the environment. `external_id=` accompanies it if the role requires one. URLs contain
no secrets. Callers in Python may pass their own session instead.

No request is made here. The first request assumes the role, which is assumed again before it expires.
"""

import os
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

from leasehold.stores.urls import ROLE

if TYPE_CHECKING:  # imported only where needed, because importing it takes some 0.1 s of CPU time
    import boto3

CREDENTIALS_FROM = "set them in the environment or a profile (profile=), by SSO (aws sso login), or run under a role"
"""The advice that ends an error about missing credentials."""


def region_hint(error: BaseException) -> str:
    """Return a question to append to `error` if its cause may be a region that does not exist."""
    unreachable = isinstance(error, EndpointConnectionError) and ".amazonaws.com" in str(error)
    return " (is the region right?)" if unreachable else ""


RETRIEVAL_ERRORS = (CredentialRetrievalError, InvalidConfigError, SSOError, TokenRetrievalError)
"""The exceptions for credentials that are configured but cannot be obtained. A login or a restart may help, so a worker
keeps trying."""


def retrieval_fault(error: BaseException) -> str:
    """Return why credentials could not be obtained, and what to do."""
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
"""The exceptions raised while parsing a response of unexpected form, such as a proxy's page."""

PROFILE_VARIABLES = frozenset({"AWS_PROFILE", "AWS_DEFAULT_PROFILE"})
"""The environment variables that name a profile. botocore looks it up only once a client is made."""

SESSION_NAME = "leasehold"
"""The name of the session of an assumed role, which CloudTrail shows."""


def session_of(
    options: Mapping[str, str], where: str = "store URL", session: "boto3.Session | None" = None
) -> "boto3.Session | None":
    """Return a session with the credentials in the options of a URL.

    Args:
        options: The options.
        where: What the URL is, for errors.
        session: The caller's own session, which is returned if there are no such options.

    Returns:
        A session, or None to use the credentials of the environment.

    Raises:
        ValueError: If the profile that the URL or the environment names does not exist, the role is invalid, or there
            are both a session and such options.
    """
    profile, role, secret = options.get("profile"), options.get("role_arn"), options.get("external_id")
    if session is not None:
        if profile or role or secret:
            raise ValueError(f"{where}: choose one: the session given, or profile, role_arn and external_id")
        return session
    if secret is not None and role is None:
        raise ValueError(f"{where}: option 'external_id' needs option 'role_arn'")
    if role is not None and not ROLE.fullmatch(role):
        raise ValueError(f"{where}: option 'role_arn' must be arn:aws:iam::ACCOUNT:role/NAME")
    from_environment = profile is None and not os.environ.keys().isdisjoint(PROFILE_VARIABLES)
    if profile is None and role is None and not from_environment:
        return None
    botocore_session = botocore.session.Session(profile=profile)
    try:
        botocore_session.get_scoped_config()
    except ProfileNotFound:
        named_by = "environment variable AWS_PROFILE" if from_environment else f"{where}: option 'profile'"
        raise ValueError(f"{named_by}: AWS's configuration has no profile {botocore_session.profile!r}") from None
    if profile is None and role is None:
        return None
    import boto3  # noqa: PLC0415  slow, see above

    if role is not None:
        botocore_session = with_providers([assumed_role(botocore_session, role, external_id=secret)], profile)
    return boto3.Session(botocore_session=botocore_session)


def core_of(session: "boto3.Session | None") -> botocore.session.Session:
    """Return a new botocore session with the credentials and configuration of `session`.

    The caller may change its parsers. `session` does not change, because other clients may be created from it.
    """
    if session is None:
        return botocore.session.get_session()
    # Without a profile, boto3 returns `default`, which botocore rejects if it is not configured.
    profile = session.profile_name if session.profile_name in session.available_profiles else None
    botocore_session = with_providers([_FixedCredentials(session.get_credentials())], profile)
    botocore_session.set_config_variable("region", session.region_name)
    return botocore_session


def with_providers(providers: Iterable[CredentialProvider], profile: str | None = None) -> botocore.session.Session:
    """Return a session that uses the credentials of the first provider that has any."""
    botocore_session = botocore.session.Session(profile=profile)
    botocore_session.register_component("credential_provider", CredentialResolver([*providers]))
    return botocore_session


def assumed_role(
    botocore_session: botocore.session.Session,
    role: str,
    *,
    external_id: str | None = None,
    session_name: str = SESSION_NAME,
    region: str | None = None,
    endpoint: str | None = None,
) -> CredentialProvider:
    """Return a provider of the credentials of a role.

    Args:
        botocore_session: The session whose credentials are used to assume the role.
        role: The ARN of the role.
        external_id: The external id that the role requires, if any.
        session_name: The name of the session, which CloudTrail shows.
        region: The region of STS, or None for the session's.
        endpoint: The endpoint of STS, or None for the region's.
    """

    def sts(service: str, **arguments: Any) -> Any:  # noqa: ANN401  boto's client
        client_options = {name: value for name, value in (("region_name", region), ("endpoint_url", endpoint)) if value}
        return botocore_session.create_client(service, **arguments | client_options)

    def refreshed() -> Mapping[str, Any]:
        if (source := botocore_session.get_credentials()) is None:
            raise NoCredentialsError
        extra = {"RoleSessionName": session_name} | ({} if external_id is None else {"ExternalId": external_id})
        fetched: Mapping[str, Any] = AssumeRoleCredentialFetcher(
            sts, source, role, extra_args=extra
        ).fetch_credentials()
        return fetched

    return _FixedCredentials(DeferredRefreshableCredentials(refresh_using=refreshed, method="assume-role"))


class _FixedCredentials(CredentialProvider):
    """A provider of existing credentials, or None. If they expire, they refresh themselves."""

    METHOD = "given"

    def __init__(self, credentials: Any) -> None:  # noqa: ANN401  boto3's stubs know several
        super().__init__()
        self._credentials = credentials

    def load(self) -> Any:  # noqa: ANN401  likewise
        return self._credentials
