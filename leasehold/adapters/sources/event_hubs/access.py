"""How one event hub is reached as one consumer group, and what the client's faults mean.

It is reached by connection string, or as who we are. Each fault becomes a sentence that a user can act on.
"""

import asyncio
import re
from typing import Any, Self, cast
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from attrs import field, frozen
from azure.core.credentials import AccessToken, TokenCredential
from azure.core.credentials_async import AsyncTokenCredential
from azure.core.exceptions import ClientAuthenticationError
from azure.eventhub import TransportType, parse_connection_string
from azure.eventhub.aio import EventHubConsumerClient
from azure.eventhub.exceptions import AuthenticationError, EventHubError

from leasehold.adapters.sources.protocol import TransientRejection
from leasehold.errors import SourceError, SourceUnavailable, Trimmed
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
    proxy       the address of an HTTP proxy, `http://host:port`, which wants websockets; "": what HTTPS_PROXY and
                NO_PROXY say
    """

    namespace: str
    hub: str
    group: str
    secret: str = field(default="", repr=False)
    identity: AsyncCredential | None = field(default=None, repr=False)
    websockets: bool = False
    proxy: str = ""

    @property
    def stream(self) -> str:
        """The name that leases of this group of this hub carry."""
        return stream_of(self.namespace, self.hub, self.group)

    def client(self) -> EventHubConsumerClient:
        """A new client. Faults surface at once: the runner does the waiting."""
        options: dict[str, Any] = {"retry_total": 0, "retry_backoff_factor": 0}
        if self.websockets:
            options["transport_type"] = TransportType.AmqpOverWebsocket
            options["http_proxy"] = http_proxy_of(self.namespace, self.proxy)
        if self.secret:
            return EventHubConsumerClient.from_connection_string(
                self.secret, self.group, eventhub_name=self.hub, **options
            )
        identity = cast("AsyncTokenCredential", self.identity)
        return EventHubConsumerClient(self.namespace, self.hub, self.group, credential=identity, **options)


def http_proxy_of(host: str, proxy: str) -> dict[str, Any] | None:
    """Return the client's settings for an HTTP proxy to `host`, or None if it is reached directly.

    Args:
        host: The namespace, with its domain.
        proxy: The proxy's address; "" for that of the environment (`HTTPS_PROXY`, unless `NO_PROXY` has the host).

    Raises:
        ValueError: If the address cannot be read. It is never repeated: the environment's may hold a password.
    """
    given = proxy or ("" if proxy_bypass(host) else getproxies().get("https", ""))
    if not given:
        return None
    try:
        parts = urlsplit(given if "://" in given else f"http://{given}")
        usual = _PROXY_PORTS[parts.scheme]
        port = parts.port or usual
    except (ValueError, KeyError):
        parts, port = None, 0
    if parts is None or not parts.hostname:
        raise ValueError(f"{'eventhubs URL: proxy' if proxy else 'HTTPS_PROXY'}: write http://host:port")
    # The client joins both with a colon, and asks aiohttp for the result, which wants a scheme.
    settings: dict[str, Any] = {"proxy_hostname": f"{parts.scheme}://{parts.hostname}", "proxy_port": port}
    if parts.username is not None:
        settings |= {"username": unquote(parts.username), "password": unquote(parts.password or "")}
    return settings


_PROXY_PORTS = {"http": 80, "https": 443}


def by_connection_string(
    secret: str, namespace: str, hub: str, group: str, *, websockets: bool = False, proxy: str = ""
) -> Access:
    """Raises ValueError, never repeating the secret, if it cannot be read or is for another place."""
    secret = secret.strip()  # files and pipes end with a line end
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
    return Access(namespace, hub, group, secret, websockets=websockets, proxy=proxy)


def by_identity(namespace: str, hub: str, group: str, *, websockets: bool = False, proxy: str = "") -> Access:
    """Access as this machine or user, whom `DefaultAzureCredential` finds."""
    from azure.identity import DefaultAzureCredential  # noqa: PLC0415  slow to load, and not needed beside a key

    identity = AsyncCredential(DefaultAzureCredential())
    return Access(namespace, hub, group, identity=identity, websockets=websockets, proxy=proxy)


_EXPIRED = "CBS Authentication Expired"
"""The client's own fault, without a request, after a process slept through its token's life or its clock was set."""


class Contended(SourceUnavailable):
    """Another reader took the partition's link: the lease is lost, or a reader has none."""


def explained(error: BaseException, access: Access, partition: str | None = None) -> SourceError:
    """The fault as an error that says what to do; SourceUnavailable if trying again later may help.

    Rejected credentials are a TransientRejection: a token may be about to be renewed, a role just given.
    Nothing of a connection string is repeated: the client's own texts hold none.
    """
    where = f"event hub {access.hub!r} in {access.namespace}" + (f", partition {partition}" if partition else "")
    if isinstance(error, SourceError):
        return error
    if isinstance(error, AuthenticationError):
        if _EXPIRED in str(error):
            return SourceUnavailable(f"{where}: its token has expired by this machine's clock; the next one is fetched")
        return TransientRejection(f"{where}: access refused: {_sign_in(access)} ({_first_line(error)})")
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
            return TransientRejection(f"{where}: access refused: {_sign_in(access)} ({said})")
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


_NEW_EACH_TIME = re.compile(
    r",? ?\b(?:tracking_?id|systemtracker|timestamp|reference)\b ?[:=] ?[^\s,)\]]*(?:T[\d:.]+Z?)?| at 0x[0-9a-f]+",
    re.IGNORECASE,
)
"""Parts of the client's messages that differ each time: with them, the same fault would be logged at each try."""


def _first_line(error: BaseException) -> str:
    text = (str(error) or type(error).__name__).splitlines()[0]
    return _NEW_EACH_TIME.sub("", text) or type(error).__name__
