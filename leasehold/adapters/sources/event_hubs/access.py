"""Creates clients for an event hub and a consumer group, and translates their errors.

The client authenticates with a connection string, or with the identity of this machine or user. Its errors are
translated into messages that say how to fix the problem.
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
from leasehold.stores.objects.event_hubs_layout import stream_name

CONNECTION_STRING = "EVENTHUBS_CONNECTION_STRING"
"""The environment variable that contains the connection string. If it is not set, we authenticate with the identity of
this machine or user."""


class AsyncCredential:
    """Adapts a synchronous credential of `azure-identity` to the asynchronous client.

    The credential runs in a thread, because azure-identity's asynchronous credentials need an additional HTTP library.
    """

    def __init__(self, credential: TokenCredential) -> None:
        self._credential = credential

    async def get_token(self, *scopes: str, **options: Any) -> AccessToken:  # noqa: ANN401  the SDK's own signature
        """Return a token. Raises the client's AuthenticationError, which the client does not wrap."""
        try:
            return await asyncio.to_thread(self._credential.get_token, *scopes, **options)
        except ClientAuthenticationError as error:
            raise AuthenticationError(str(error.message)) from error

    async def close(self) -> None:
        """Do nothing, because the credential belongs to the source and not to one client."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_raised: object) -> None:
        await self.close()


@frozen
class Access:
    """An event hub, a consumer group, and how to connect to them.

    Attributes:
        namespace: The fully qualified namespace, with a port if it is local.
        hub: The name of the hub.
        group: The name of the consumer group.
        secret: The connection string, or "" to use `identity`.
        identity: The credential, if there is no connection string.
        websockets: Whether to use AMQP over websockets on port 443, in case port 5671 is closed.
        proxy: The address of an HTTP proxy, `http://host:port`, which requires `websockets`. If the address is "", the
            proxy in HTTPS_PROXY is used, unless NO_PROXY excludes the host.
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
        """The stream name in the leases of this hub and group."""
        return stream_name(self.namespace, self.hub, self.group)

    def create_client(self) -> EventHubConsumerClient:
        """Return a new client that does not retry, because retries are left to the caller."""
        options: dict[str, Any] = {"retry_total": 0, "retry_backoff_factor": 0}
        if self.websockets:
            options["transport_type"] = TransportType.AmqpOverWebsocket
            options["http_proxy"] = find_http_proxy(self.namespace, self.proxy)
        if self.secret:
            return EventHubConsumerClient.from_connection_string(
                self.secret, self.group, eventhub_name=self.hub, **options
            )
        credential = cast("AsyncTokenCredential", self.identity)
        return EventHubConsumerClient(self.namespace, self.hub, self.group, credential=credential, **options)


def find_http_proxy(host: str, proxy: str) -> dict[str, Any] | None:
    """Return the client's proxy settings for connections to `host`, or None if they need no proxy.

    Args:
        host: The namespace, with its domain.
        proxy: The proxy's address, or "" to use the environment's (`HTTPS_PROXY`, unless `NO_PROXY` excludes the host).

    Raises:
        ValueError: If the proxy's address cannot be parsed. The message never repeats the address, because an address
            from the environment may contain a password.
    """
    # An entry of NO_PROXY may contain a port. The client connects to port 443, unless the host contains another one.
    proxied_host = host if ":" in host else f"{host}:443"
    proxy_address = proxy or ("" if proxy_bypass(proxied_host) else getproxies().get("https", ""))
    if not proxy_address:
        return None
    try:
        proxy_url = urlsplit(proxy_address if "://" in proxy_address else f"http://{proxy_address}")
        default_port = _PROXY_PORTS[proxy_url.scheme]
        proxy_port = proxy_url.port or default_port
    except (ValueError, KeyError):
        proxy_url, proxy_port = None, 0
    if proxy_url is None or not proxy_url.hostname:
        raise ValueError(f"{'eventhubs URL: proxy' if proxy else 'HTTPS_PROXY'}: write http://host:port")
    # The client joins host and port with a colon and passes the result to aiohttp, which needs a scheme.
    settings: dict[str, Any] = {
        "proxy_hostname": f"{proxy_url.scheme}://{proxy_url.hostname}",
        "proxy_port": proxy_port,
    }
    if proxy_url.username is not None:
        settings |= {"username": unquote(proxy_url.username), "password": unquote(proxy_url.password or "")}
    return settings


_PROXY_PORTS = {"http": 80, "https": 443}


def access_by_connection_string(
    secret: str, namespace: str, hub: str, group: str, *, websockets: bool = False, proxy: str = ""
) -> Access:
    """Return the access that a connection string grants.

    Raises:
        ValueError: If the string cannot be parsed, or is for another namespace or hub. The message never contains the
            secret.
    """
    secret = secret.strip()  # a secret from a file or pipe ends with a newline
    try:
        properties = parse_connection_string(secret)
    except ValueError:
        properties = None
    # Text before an @ or after a ? may be a secret. Reject such a namespace, because a message below would show it.
    if properties is None or set("@?#") & set(properties.fully_qualified_namespace):
        raise ValueError(f"{CONNECTION_STRING}: this is not an Event Hubs connection string")
    if properties.fully_qualified_namespace.lower() != namespace.lower():
        other_namespace = properties.fully_qualified_namespace
        raise ValueError(f"eventhubs URL: {CONNECTION_STRING} is for namespace {other_namespace!r}, not {namespace!r}")
    if properties.eventhub_name and properties.eventhub_name.lower() != hub.lower():
        raise ValueError(
            f"eventhubs URL: {CONNECTION_STRING} is for event hub {properties.eventhub_name!r}, not {hub!r}"
        )
    return Access(namespace, hub, group, secret, websockets=websockets, proxy=proxy)


def access_by_identity(namespace: str, hub: str, group: str, *, websockets: bool = False, proxy: str = "") -> Access:
    """Return access with the identity of this machine or user, as found by `DefaultAzureCredential`."""
    from azure.identity import DefaultAzureCredential  # noqa: PLC0415  slow to load, and not needed with a key

    credential = AsyncCredential(DefaultAzureCredential())
    return Access(namespace, hub, group, identity=credential, websockets=websockets, proxy=proxy)


_EXPIRED_MESSAGE = "CBS Authentication Expired"
"""The message of the client's error if its token has expired, for example because the process was suspended or the
clock was changed. The client raises this error without sending a request."""


class LinkTakenOver(SourceUnavailable):
    """Another reader opened a link to the partition, which closed our link.

    Either this worker has lost the lease, or the other reader connected without owning it.
    """


def translate_error(error: BaseException, access: Access, partition: str | None = None) -> SourceError:
    """Translate an error of the client. The result is a SourceUnavailable if trying again may help.

    Rejected credentials become a TransientRejection, because the token may soon be renewed, or the role may only just
    have been assigned. The messages contain no part of a connection string, because the client's own messages contain
    none.
    """
    hub_description = f"event hub {access.hub!r} in {access.namespace}" + (
        f", partition {partition}" if partition else ""
    )
    if isinstance(error, SourceError):
        return error
    if isinstance(error, AuthenticationError):
        if _EXPIRED_MESSAGE in str(error):
            return SourceUnavailable(
                f"{hub_description}: its token has expired by this machine's clock; a new one will be requested"
            )
        return TransientRejection(
            f"{hub_description}: access denied: {_make_credential_hint(access)} ({_first_line_without_ids(error)})"
        )
    if isinstance(error, ImportError):
        return SourceError(f"{hub_description}: websockets need aiohttp; install leasehold[azure]")
    if isinstance(error, ValueError):
        return SourceError(f"{hub_description}: {_first_line_without_ids(error)}")
    error_condition = (error.error if isinstance(error, EventHubError) else None) or ""
    message = _first_line_without_ids(error)
    match error_condition:
        case "link:stolen":
            return LinkTakenOver(
                f"{hub_description}: another reader of group {access.group!r} took it over: "
                "the lease is lost, or two fleets share the group"
            )
        case "not-found":
            return SourceError(
                f"{hub_description}: there is no such hub or consumer group {access.group!r}; check the URL"
            )
        case "unauthorized-access":
            return TransientRejection(f"{hub_description}: access denied: {_make_credential_hint(access)} ({message})")
        case "argument-error" | "argument-out-of-range" | "invalid-field":
            hint = "if the hub was recreated, set the checkpoints back with `leasehold reset`"
            return Trimmed(f"{hub_description}: the starting position was rejected; {hint} ({message})")
        case "resource-limit-exceeded":
            hint = f"use a separate consumer group for this fleet, because others read in {access.group!r}, too"
            return SourceUnavailable(f"{hub_description}: too many readers; {hint} ({message})")
        case _:
            return SourceUnavailable(f"{hub_description}: {message}")


def _make_credential_hint(access: Access) -> str:
    if access.secret:
        return f"check the key in {CONNECTION_STRING}, which must allow listening, and this machine's clock"
    return "this identity needs the role 'Azure Event Hubs Data Receiver'"


_VARYING_PARTS_PATTERN = re.compile(
    r",? ?\b(?:tracking_?id|systemtracker|timestamp|reference)\b ?[:=] ?[^\s,)\]]*(?:T[\d:.]+Z?)?| at 0x[0-9a-f]+",
    re.IGNORECASE,
)
"""The parts of the client's messages that differ each time, such as timestamps. Without them, a repeated fault can be
recognized, so that it is not logged at each attempt."""


def _first_line_without_ids(error: BaseException) -> str:
    first_line = (str(error) or type(error).__name__).splitlines()[0]
    return _VARYING_PARTS_PATTERN.sub("", first_line) or type(error).__name__
