"""The local hub's side of a connection, tested with a bare AMQP engine instead of an SDK."""

import asyncio
import base64
import hashlib
import hmac
from typing import cast
from urllib.parse import quote

import pytest

# The local hub needs this AMQP engine, which is compiled from C when it is installed.
pytest.importorskip("proton", reason="python-qpid-proton was not built: no C compiler", exc_type=ImportError)

from proton import Connection, Link, Message, Transport

from leasehold_lab.standins.hubs.partitions import Hub
from leasehold_lab.standins.hubs.server import HubConnection, describe_hub, respond_to_token

KEY = "local-key"
IDLE_SECONDS, WAIT_SECONDS = 0.2, 10.0
HEARTBEAT = bytes.fromhex("0000000802000000")


class Wire:
    """The transport of a connection to the hub. It stores the bytes that the hub writes, and notices heartbeats."""

    def __init__(self) -> None:
        self.written = b""
        self.heartbeat_seen = asyncio.Event()

    def write(self, data: bytes) -> None:
        self.written += data
        if data.endswith(HEARTBEAT):
            self.heartbeat_seen.set()

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        """Do nothing, because there is no real socket."""


class Client:
    """A client that consists of an AMQP engine and is connected to a hub in memory."""

    def __init__(self, wire: Wire, idle_seconds: float | None = None) -> None:
        self._wire, self._read = wire, 0
        self._hub = HubConnection({"hub": Hub.of("hub", 1)}, KEY)
        self._hub.connection_made(cast("asyncio.Transport", wire))
        self._engine = Transport()
        if idle_seconds is not None:
            self._engine.idle_timeout = idle_seconds
        self.connection = Connection()
        self._engine.bind(self.connection)
        self.connection.open()

    def talk(self) -> None:
        """Pass bytes in both directions until neither side has more to send."""
        while (pending := self._engine.pending()) > 0:
            data = self._engine.peek(pending) or b""
            self._engine.pop(len(data))
            self._hub.data_received(data)
            self._engine.push(self._wire.written[self._read :])
            self._read = len(self._wire.written)

    def leave(self) -> None:
        self._hub.connection_lost(None)


def _token(resource: str, key: str = KEY) -> Message:
    signed = hmac.new(key.encode(), f"{resource}\n2000000000".encode(), hashlib.sha256).digest()
    fields = f"sr={resource}&sig={quote(base64.b64encode(signed), safe='')}&se=2000000000&skn=local"
    return Message(body=f"SharedAccessSignature {fields}", id="1")


def _status(token: Message) -> int:
    properties = cast("dict[str, int]", respond_to_token(token, KEY).properties)
    return properties["status-code"]


@pytest.mark.parametrize("mode", [Link.SND_SETTLED, Link.SND_UNSETTLED, Link.SND_MIXED])
def test_link_is_settled_as_its_client_requests(mode: int) -> None:
    """Go's client disconnects unless the reply links of `$cbs` and `$management` are settled as it requests."""

    async def attach_link() -> tuple[int, int]:
        client = Client(Wire())
        session = client.connection.session()
        session.open()
        link = session.receiver("replies")
        link.source.address, link.target.address = "$cbs", "replies"
        link.snd_settle_mode, link.rcv_settle_mode = mode, Link.RCV_SECOND
        link.open()
        client.talk()
        client.leave()
        return link.remote_snd_settle_mode, link.remote_rcv_settle_mode

    assert asyncio.run(attach_link()) == (mode, Link.RCV_SECOND)


def test_silent_hub_sends_heartbeats() -> None:
    """Without heartbeats, the clients for Go, Java and JavaScript would disconnect from a silent hub."""

    async def wait_for_heartbeats() -> bool:
        wire = Wire()
        client = Client(wire, IDLE_SECONDS)
        client.talk()
        wire.heartbeat_seen.clear()
        async with asyncio.timeout(WAIT_SECONDS):
            await wire.heartbeat_seen.wait()
            wire.heartbeat_seen.clear()
            await wire.heartbeat_seen.wait()
        client.leave()
        return True

    assert asyncio.run(wait_for_heartbeats())


@pytest.mark.parametrize("resource", ["amqp%3A%2F%2Flocalhost%2Fhub", "amqp%3a%2f%2flocalhost%2fhub"])
def test_token_resource_is_checked_as_it_was_signed(resource: str) -> None:
    """The token of Go's client, which escapes the resource in lower case, must be accepted, too."""
    assert _status(_token(resource)) == 202
    assert _status(_token(resource, "another")) == 401
    assert _status(_token("amqp%3a%2f%2flocalhost%2fhub&sr=more")) == 401


def test_hub_sends_what_clients_require() -> None:
    """Go's client ignores a response without `georeplication_factor`."""
    assert describe_hub(Hub.of("hub", 1))["georeplication_factor"] == 1
