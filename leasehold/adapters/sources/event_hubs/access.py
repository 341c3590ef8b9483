"""How one event hub is reached as one consumer group, and what the client's faults mean.

It is reached by connection string, or as who we are. Each fault becomes a sentence that a user can act on.
"""

import asyncio
from typing import Any, Self, cast

from attrs import field, frozen
from azure.core.credentials import AccessToken, TokenCredential
from azure.core.credentials_async import AsyncTokenCredential
from azure.core.exceptions import ClientAuthenticationError
from azure.eventhub import TransportType, parse_connection_string
from azure.eventhub.aio import EventHubConsumerClient
from azure.eventhub.exceptions import AuthenticationError, EventHubError

from leasehold.adapters.sources.protocol import SourceError, SourceUnavailable, Trimmed
from leasehold.stores.objects.event_hubs_layout import stream_of

CONNECTION_STRING = "EVENTHUBS_CONNECTION_STRING"
"""The environment variable that holds the connection string, where one is used."""


class AsyncCredential:
    """A credential of `azure-identity` for the asynchronous client.

    Its asynchronous twins would bring an HTTP library of their own; a thread serves as well.
    """

    def __init__(self, credential: TokenCredential) -> None:
        self._credential = credential

    async def get_token(self, *scopes: str, **options: Any) -> AccessToken:  # noqa: ANN401  the SDK's own signature
        """A token; raises the client's AuthenticationError, which it hands on as it is."""
        try:
            return await asyncio.to_thread(self._credential.get_token, *scopes, **options)
        except ClientAuthenticationError as refused:
            raise AuthenticationError(str(refused.message)) from refused

    async def close(self) -> None:
        """The credential is the source's, not one client's."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_raised: object) -> None:
        await self.close()


@frozen
class Access:
    """An event hub as a consumer group sees it.

    namespace   fully qualified, with a port for a local one
    secret      the connection string, or "" to go by `identity`
    websockets  AMQP over websockets on port 443, where 5671 is closed
    """

    namespace: str
    hub: str
    group: str
    secret: str = field(default="", repr=False)
    identity: AsyncCredential | None = field(default=None, repr=False)
    websockets: bool = False

    @property
    def stream(self) -> str:
        """The name that leases of this group of this hub carry."""
        return stream_of(self.namespace, self.hub, self.group)

    def client(self) -> EventHubConsumerClient:
        """A new client. Faults surface at once: the runner does the waiting."""
        options: dict[str, Any] = {"retry_total": 0, "retry_backoff_factor": 0}
        if self.websockets:
            options["transport_type"] = TransportType.AmqpOverWebsocket
        if self.secret:
            return EventHubConsumerClient.from_connection_string(
                self.secret, self.group, eventhub_name=self.hub, **options
            )
        identity = cast("AsyncTokenCredential", self.identity)
        return EventHubConsumerClient(self.namespace, self.hub, self.group, credential=identity, **options)


def by_connection_string(secret: str, namespace: str, hub: str, group: str, *, websockets: bool = False) -> Access:
    """Raises ValueError, never repeating the secret, if it cannot be read or is for another place."""
    try:
        told = parse_connection_string(secret)
    except ValueError:
        told = None
    # What stands before an @, or behind a ?, may be secret, and the namespace is repeated below.
    if told is None or set("@?#") & set(told.fully_qualified_namespace):
        raise ValueError(f"{CONNECTION_STRING}: it is no Event Hubs connection string")
    if told.fully_qualified_namespace.lower() != namespace.lower():
        other = told.fully_qualified_namespace
        raise ValueError(f"eventhubs URL: {CONNECTION_STRING} is for namespace {other!r}, not {namespace!r}")
    if told.eventhub_name and told.eventhub_name.lower() != hub.lower():
        raise ValueError(f"eventhubs URL: {CONNECTION_STRING} is for event hub {told.eventhub_name!r}, not {hub!r}")
    return Access(namespace, hub, group, secret, websockets=websockets)


def by_identity(namespace: str, hub: str, group: str, *, websockets: bool = False) -> Access:
    """Access as this machine or user, whom `DefaultAzureCredential` finds."""
    from azure.identity import DefaultAzureCredential  # noqa: PLC0415  slow to load, and not needed beside a key

    return Access(namespace, hub, group, identity=AsyncCredential(DefaultAzureCredential()), websockets=websockets)


_EXPIRED = "CBS Authentication Expired"
"""The client's own fault, without a request, after a process slept through its token's life or its clock was set."""


class Contended(SourceUnavailable):
    """Another reader took the partition's link: the lease is lost, or a reader has none."""


def explained(error: BaseException, access: Access, partition: str | None = None) -> SourceError:
    """The fault as an error that says what to do; SourceUnavailable if trying again later may help.

    Nothing of a connection string is repeated: the client's own texts hold none.
    """
    where = f"event hub {access.hub!r} in {access.namespace}" + (f", partition {partition}" if partition else "")
    if isinstance(error, SourceError):
        return error
    if isinstance(error, AuthenticationError):
        if _EXPIRED in str(error):
            return SourceUnavailable(f"{where}: its token has expired by this machine's clock; the next one is fetched")
        return SourceError(f"{where}: access refused: {_sign_in(access)} ({_first_line(error)})")
    if isinstance(error, ImportError):
        return SourceError(f"{where}: websockets need aiohttp; install leasehold[azure]")
    if isinstance(error, ValueError):
        return SourceError(f"{where}: {_first_line(error)}")
    condition = (error.error if isinstance(error, EventHubError) else None) or ""
    said = _first_line(error)
    match condition:
        case "link:stolen":
            return Contended(f"{where}: another reader of group {access.group!r} took it: lease lost, or contended")
        case "not-found":
            return SourceError(f"{where}: there is no such hub or consumer group {access.group!r}; check the URL")
        case "unauthorized-access":
            return SourceError(f"{where}: access refused: {_sign_in(access)} ({said})")
        case "argument-error" | "argument-out-of-range" | "invalid-field":
            hint = "if the hub was made anew, set the checkpoints back with `leasehold reset`"
            return Trimmed(f"{where}: the starting position is refused; {hint} ({said})")
        case "resource-limit-exceeded":
            hint = f"give this fleet a consumer group of its own, as others read in {access.group!r} too"
            return SourceUnavailable(f"{where}: too many readers; {hint} ({said})")
        case _:
            return SourceUnavailable(f"{where}: {said}")


def _sign_in(access: Access) -> str:
    if access.secret:
        return f"check the key in {CONNECTION_STRING}, which must allow listening, and this machine's clock"
    return "this identity needs the role 'Azure Event Hubs Data Receiver'"


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
