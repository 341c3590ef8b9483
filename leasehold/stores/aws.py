"""Sessions of boto3 for the credentials that a URL of AWS names, in place of those that the environment has.

`profile=` names a profile of AWS's configuration. `role_arn=` is a role, perhaps of another account, that is assumed
with the profile's credentials, or the environment's; `external_id=` goes with it, where the role wants one. No URL
holds a secret. A caller in Python may give a session of its own in place of these.

Nothing is asked of a service here: a role is assumed by the first request, and anew before it expires.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import botocore.session
from botocore.credentials import (
    AssumeRoleCredentialFetcher,
    CredentialProvider,
    CredentialResolver,
    DeferredRefreshableCredentials,
)
from botocore.exceptions import EndpointConnectionError, NoCredentialsError, ProfileNotFound
from botocore.parsers import ResponseParserError

from leasehold.stores.urls import ROLE

if TYPE_CHECKING:  # imported where it is needed: it costs a start some 0.1 s of a processor
    import boto3

CREDENTIALS_FROM = "set them in the environment or a profile (profile=), by SSO (aws sso login), or run under a role"
"""The end of a sentence about credentials that are missing."""


def region_hint(error: BaseException) -> str:
    """Return a question to append to `error` if its cause may be a region that does not exist."""
    unreachable = isinstance(error, EndpointConnectionError) and ".amazonaws.com" in str(error)
    return " (is the region right?)" if unreachable else ""


ODD_ANSWER = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    ResponseParserError,
    TypeError,
    UnicodeDecodeError,
)
"""Raised while reading a response of another shape: a proxy's page, or a service's bad moment."""

SESSION_NAME = "leasehold"
"""The session of an assumed role has this name in CloudTrail."""


def session_of(
    options: Mapping[str, str], where: str = "store URL", session: "boto3.Session | None" = None
) -> "boto3.Session | None":
    """The session of these options of a URL, or the one that was given; None: the environment's credentials.

    Raises ValueError for a profile that there is not, what is no role, and a session beside these options.
    """
    profile, role, secret = options.get("profile"), options.get("role_arn"), options.get("external_id")
    if session is not None:
        if profile or role or secret:
            raise ValueError(f"{where}: choose one: the session given, or profile, role_arn and external_id")
        return session
    if secret is not None and role is None:
        raise ValueError(f"{where}: option 'external_id' wants the role_arn that it is for")
    if role is not None and not ROLE.fullmatch(role):
        raise ValueError(f"{where}: option 'role_arn' wants arn:aws:iam::ACCOUNT:role/NAME")
    if profile is None and role is None:
        return None
    import boto3  # noqa: PLC0415  as said above

    core = botocore.session.Session(profile=profile)
    try:
        core.get_scoped_config()
    except ProfileNotFound:
        raise ValueError(f"{where}: option 'profile': AWS's configuration has no profile {profile!r}") from None
    if role is not None:
        core = with_providers([assumed_role(core, role, external_id=secret)], profile)
    return boto3.Session(botocore_session=core)


def core_of(session: "boto3.Session | None") -> botocore.session.Session:
    """A session of botocore's with these credentials and this configuration, whose parsers may be changed.

    A caller's own session stays as it is: other clients are made of it.
    """
    if session is None:
        return botocore.session.get_session()
    # boto3 answers `default` where no profile is chosen, and botocore refuses one that is not configured.
    profile = session.profile_name if session.profile_name in session.available_profiles else None
    core = with_providers([_StandingCredentials(session.get_credentials())], profile)
    core.set_config_variable("region", session.region_name)
    return core


def with_providers(providers: Iterable[CredentialProvider], profile: str | None = None) -> botocore.session.Session:
    """A session that takes the credentials of the first of these that has any."""
    core = botocore.session.Session(profile=profile)
    core.register_component("credential_provider", CredentialResolver([*providers]))
    return core


def assumed_role(
    core: botocore.session.Session,
    role: str,
    *,
    external_id: str | None = None,
    session_name: str = SESSION_NAME,
    region: str | None = None,
    endpoint: str | None = None,
) -> CredentialProvider:
    """The credentials of a role, which is assumed with those of `core`, at this endpoint of STS in this region."""

    def sts(service: str, **arguments: Any) -> Any:  # noqa: ANN401  boto's client
        place = {name: value for name, value in (("region_name", region), ("endpoint_url", endpoint)) if value}
        return core.create_client(service, **arguments | place)

    def refreshed() -> Mapping[str, Any]:
        if (source := core.get_credentials()) is None:
            raise NoCredentialsError
        more = {"RoleSessionName": session_name} | ({} if external_id is None else {"ExternalId": external_id})
        found: Mapping[str, Any] = AssumeRoleCredentialFetcher(sts, source, role, extra_args=more).fetch_credentials()
        return found

    return _StandingCredentials(DeferredRefreshableCredentials(refresh_using=refreshed, method="assume-role"))


class _StandingCredentials(CredentialProvider):
    """Credentials that stand already, perhaps none; where they expire they refresh themselves."""

    METHOD = "given"

    def __init__(self, credentials: Any) -> None:  # noqa: ANN401  boto3's stubs know several
        super().__init__()
        self._credentials = credentials

    def load(self) -> Any:  # noqa: ANN401  likewise
        return self._credentials
