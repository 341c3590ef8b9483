"""Makes boto3 sessions from the credentials in a `.properties` file, which names classes of the AWS SDK for Java.

The value of a credentials key is a list of providers, separated by commas. The first provider that has credentials is
used. Each has this form:

    Name[|argument…][|key=value…]

A class name may include its package, which is ignored. A class that needs a JVM is rejected. Otherwise, records would
be read with credentials other than those in the file, perhaps those of another account.
"""

import re
from collections.abc import Mapping

import boto3
import botocore.session
from attrs import field, frozen
from botocore.credentials import CredentialProvider

from leasehold.stores.aws import SESSION_NAME, create_role_provider, create_session_with_providers
from leasehold.stores.printable import did_you_mean, printable

DEFAULT_PROVIDER = "DefaultCredentialsProvider"
PROFILE_PROVIDER = "ProfileCredentialsProvider"
ROLE_PROVIDER_PATTERN = re.compile("(Kcl)?S(?i:ts)AssumeRole(Session)?CredentialsProvider")
_BOTOCORE_METHODS: Mapping[str, str] = {
    "EnvironmentVariableCredentialsProvider": "env",
    "InstanceProfileCredentialsProvider": "iam-role",
    "ContainerCredentialsProvider": "container-role",
    "WebIdentityTokenFileCredentialsProvider": "assume-role-with-web-identity",
}
"""Java's provider classes and the equivalent providers in botocore's default chain."""
# This class is from version 1 of Java's SDK. KCL 3.x does not find it, and KCL 2.x treats it as the default chain.
_DEFAULT_OF_SDK_V1 = "DefaultAWSCredentialsProviderChain"
_SETTING_PARAMETERS = {"externalid": "external_id", "endpointregion": "region", "endpoint": "endpoint"}


@frozen
class _CredentialProvider:
    """A credential provider in the file, with its class name (without the package), its arguments and its settings."""

    name: str
    arguments: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(factory=dict)

    def make_botocore_providers(self, botocore_session: botocore.session.Session) -> list[CredentialProvider]:
        """Return the equivalent botocore providers. Raises ValueError if the profile does not exist."""
        if self.name == PROFILE_PROVIDER:
            botocore_session = botocore.session.Session(profile=self.arguments[0] if self.arguments else None)
            if self.arguments and self.arguments[0] not in botocore_session.available_profiles:
                raise ValueError(f"AWS's configuration has no profile {printable(self.arguments[0])!r}")
        if ROLE_PROVIDER_PATTERN.fullmatch(self.name):
            role_arn, *session_names = self.arguments
            return [
                create_role_provider(
                    botocore_session,
                    role_arn,
                    session_name=session_names[0] if session_names else SESSION_NAME,
                    **self.settings,
                )
            ]
        method_name = _BOTOCORE_METHODS.get(self.name)
        chain_providers = botocore_session.get_component("credential_provider").providers
        return [provider for provider in chain_providers if method_name is None or method_name == provider.METHOD]


@frozen
class Credentials:
    """Credential providers, in the order in which they are tried. An empty tuple means botocore's default chain."""

    providers: tuple[_CredentialProvider, ...] = ()

    def __str__(self) -> str:
        """Return the class names alone, because arguments and settings may be secret."""
        return ", ".join(provider.name for provider in self.providers) or "botocore's default chain"

    def session(self) -> boto3.Session | None:
        """Return a session that uses these providers, or None for the default chain.

        Raises:
            ValueError: If a provider names a profile that does not exist.
        """
        if {provider.name for provider in self.providers} <= {DEFAULT_PROVIDER}:
            return None
        botocore_session = botocore.session.Session()
        providers = [
            botocore_provider
            for provider in self.providers
            for botocore_provider in provider.make_botocore_providers(botocore_session)
        ]
        return boto3.Session(botocore_session=create_session_with_providers(providers))


def parse_credentials(text: str) -> Credentials:
    """Parse the value of a credentials key. Raises ValueError for providers that aren't available here."""
    return Credentials(tuple(_parse_provider(part.strip()) for part in text.split(",") if part.strip()))


def _parse_provider(text: str) -> _CredentialProvider:
    class_name, *parts = text.split("|")
    name = class_name.strip().rpartition(".")[2]
    name = DEFAULT_PROVIDER if name == _DEFAULT_OF_SDK_V1 else name
    is_supported = (
        name in {DEFAULT_PROVIDER, PROFILE_PROVIDER, *_BOTOCORE_METHODS}
        or ROLE_PROVIDER_PATTERN.fullmatch(name) is not None
    )
    if not is_supported:
        supported_names = (DEFAULT_PROVIDER, PROFILE_PROVIDER, "StsAssumeRoleCredentialsProvider", *_BOTOCORE_METHODS)
        raise ValueError(
            f"{printable(name)!r} is only available in a JVM{did_you_mean(name, supported_names)}; use "
            f"{DEFAULT_PROVIDER}, or "
            f"{PROFILE_PROVIDER}|NAME: a profile may have a role, a login or a credential_process"
        )
    arguments = tuple(part.strip() for part in parts if "=" not in part)
    settings: dict[str, str] = {}
    for setting in parts:
        key, separator, value = (part.strip() for part in setting.partition("="))
        if not separator:
            continue
        parameter_name = _SETTING_PARAMETERS.get(key.lower())
        if parameter_name is None or not ROLE_PROVIDER_PATTERN.fullmatch(name):
            raise ValueError(f"{name}: {printable(key)!r} has no meaning here")
        settings[parameter_name] = value
    if ROLE_PROVIDER_PATTERN.fullmatch(name):
        if not arguments:
            raise ValueError(f"{name}: the role's ARN is missing: {name}|ARN|SESSION")
        # `endpoint=URL^REGION` sets the endpoint and the region.
        endpoint, caret, region = settings.get("endpoint", "").partition("^")
        if caret:
            settings |= {"endpoint": endpoint, "region": region}
    return _CredentialProvider(name, arguments, settings)
