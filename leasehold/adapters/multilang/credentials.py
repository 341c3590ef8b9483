"""The credentials that a `.properties` file names by classes of Java's SDK, as sessions of boto3.

    Name[|argument…][|key=value…], and several of these with commas in between: the first that has any serves

A name may be that of the class alone or with its package, which is not looked at. What only a JVM can have is refused:
records would be read with other credentials than the file says, perhaps of another account.
"""

import re
from collections.abc import Mapping

import boto3
import botocore.session
from attrs import field, frozen
from botocore.credentials import CredentialProvider

from leasehold.stores.aws import SESSION_NAME, assumed_role, with_providers
from leasehold.stores.printable import did_you_mean, printable

DEFAULT = "DefaultCredentialsProvider"
PROFILE = "ProfileCredentialsProvider"
ROLE = re.compile("(Kcl)?S(?i:ts)AssumeRole(Session)?CredentialsProvider")
_OF_THE_CHAIN: Mapping[str, str] = {
    "EnvironmentVariableCredentialsProvider": "env",
    "InstanceProfileCredentialsProvider": "iam-role",
    "ContainerCredentialsProvider": "container-role",
    "WebIdentityTokenFileCredentialsProvider": "assume-role-with-web-identity",
}
"""Each is one provider of botocore's default chain, by its name there."""
# Of Java's first SDK; KCL 3.x finds no class of this name, and KCL 2.x takes it for the default chain.
_OLD_DEFAULT = "DefaultAWSCredentialsProviderChain"
_KEYS = {"externalid": "external_id", "endpointregion": "region", "endpoint": "endpoint"}


@frozen
class _Provider:
    """A provider of credentials: its class without the package, the class's arguments, and its settings by key."""

    name: str
    arguments: tuple[str, ...] = ()
    keys: Mapping[str, str] = field(factory=dict)

    def found(self, chain: botocore.session.Session) -> list[CredentialProvider]:
        """The providers of botocore that do as this one. Raises ValueError for a profile that there is not."""
        if self.name == PROFILE:
            chain = botocore.session.Session(profile=self.arguments[0] if self.arguments else None)
            if self.arguments and self.arguments[0] not in chain.available_profiles:
                raise ValueError(f"AWS's configuration has no profile {printable(self.arguments[0])!r}")
        if ROLE.fullmatch(self.name):
            role, *name = self.arguments
            return [assumed_role(chain, role, session_name=name[0] if name else SESSION_NAME, **self.keys)]
        wanted = _OF_THE_CHAIN.get(self.name)
        every = chain.get_component("credential_provider").providers
        return [each for each in every if wanted is None or wanted == each.METHOD]


@frozen
class Credentials:
    """The providers, in the order in which they are asked; none are botocore's default chain."""

    providers: tuple[_Provider, ...] = ()

    def __str__(self) -> str:
        """The classes alone: what stands behind them may be a secret."""
        return ", ".join(each.name for each in self.providers) or "botocore's default chain"

    def session(self) -> boto3.Session | None:
        """A session that asks them; None where they are the default. Raises ValueError."""
        if {each.name for each in self.providers} <= {DEFAULT}:
            return None
        chain = botocore.session.Session()
        every = [found for each in self.providers for found in each.found(chain)]
        return boto3.Session(botocore_session=with_providers(every))


def credentials_of(text: str) -> Credentials:
    """The credentials of such a value. Raises ValueError for what cannot be had here."""
    return Credentials(tuple(_provider(each.strip()) for each in text.split(",") if each.strip()))


def _provider(text: str) -> _Provider:
    whole, *rest = text.split("|")
    name = whole.strip().rpartition(".")[2]
    name = DEFAULT if name == _OLD_DEFAULT else name
    known = name in {DEFAULT, PROFILE, *_OF_THE_CHAIN} or ROLE.fullmatch(name) is not None
    if not known:
        names = (DEFAULT, PROFILE, "StsAssumeRoleCredentialsProvider", *_OF_THE_CHAIN)
        raise ValueError(
            f"{printable(name)!r} can only be had in a JVM{did_you_mean(name, names)}; take {DEFAULT}, or "
            f"{PROFILE}|NAME: a profile may have a role, a login or a credential_process"
        )
    arguments = tuple(each.strip() for each in rest if "=" not in each)
    keys: dict[str, str] = {}
    for each in rest:
        key, given, value = (part.strip() for part in each.partition("="))
        if not given:
            continue
        meaning = _KEYS.get(key.lower())
        if meaning is None or not ROLE.fullmatch(name):
            raise ValueError(f"{name}: {printable(key)!r} has no meaning here")
        keys[meaning] = value
    if ROLE.fullmatch(name):
        if not arguments:
            raise ValueError(f"{name}: the role's ARN is missing: {name}|ARN|SESSION")
        # `endpoint=URL^REGION` says both at once.
        endpoint, both, region = keys.get("endpoint", "").partition("^")
        if both:
            keys |= {"endpoint": endpoint, "region": region}
    return _Provider(name, arguments, keys)
