"""The process behind `leasehold.adapters.local.hubs.event_hubs`: sockets on one side, the AMQP engine on the other.

One port serves both AMQP and, to a connection that opens with `{`, the control lines of
`control`. Rule 1: the engine decides what AMQP says; this file moves bytes and hands events to
`links`. Rule 2: everything runs on one event loop, so hubs need no locks.
"""

import asyncio
from typing import cast

from proton import Collector, Connection, Delivery, Event, Link, Message, Receiver, Sender, Session, Transport

from leasehold.adapters.local.hubs.answers import authorised, managed
from leasehold.adapters.local.hubs.control import obey
from leasehold.adapters.local.hubs.frames import Padding
from leasehold.adapters.local.hubs.links import Asking, LinkWriting, Reading, accept, place, read, refuse, wake
from leasehold.adapters.local.hubs.partitions import Hub, HubRefusal

NODES = ("$cbs", "$management")
PIECE = 65536


class HubConnection(asyncio.Protocol):
    """A connection, from its first byte on."""

    def __init__(self, hubs: dict[str, Hub], key: str | None) -> None:
        self._hubs = hubs
        self._key = key
        self._links: dict[str, Reading | LinkWriting | Asking] = {}
        self._padding = Padding()
        self._lines: bytes | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._engine, self._connection, self._events = _engine()
        self._of_link = {
            Event.LINK_FLOW: self._on_flow,
            Event.LINK_REMOTE_OPEN: self._on_attach,
            Event.LINK_REMOTE_CLOSE: self._on_detach,
            Event.LINK_REMOTE_DETACH: self._on_detach,
        }

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember where answers go."""
        self._socket = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  the loop's own signature
        """The connection is gone, and its readers with it."""
        if self._alarm is not None:
            self._alarm.cancel()
        for link in self._links.values():
            _forget(link)
        self._links.clear()

    def data_received(self, data: bytes) -> None:
        """Bytes from the client: control lines if the first of them says so, else AMQP."""
        if self._lines is None and data[:1] != b"{":
            self._amqp(data)
        else:
            self._obey((self._lines or b"") + data)

    def _obey(self, data: bytes) -> None:
        *lines, self._lines = data.split(b"\n")
        for line in lines:
            self._socket.write(obey(line, self._hubs) + b"\n")

    def _amqp(self, data: bytes) -> None:
        while data:
            room = self._engine.capacity()
            if room <= 0:  # the engine has closed its end
                break
            self._engine.push(data[:room])
            data = data[room:]
            self._handle_events()
        self.flush()

    def flush(self) -> None:
        """Send what the engine wants sent."""
        self._beat()
        while (pending := self._engine.pending()) > 0:
            data = self._engine.peek(min(pending, PIECE)) or b""
            self._engine.pop(len(data))
            self._socket.write(self._padding.pad(data))
        if self._engine.pending() < 0:
            self._socket.close()

    def _beat(self) -> None:
        """Have the engine add a heartbeat if one is due, and look again in time: clients leave a silent hub."""
        loop = asyncio.get_running_loop()
        due = self._engine.tick(loop.time())
        if due and self._alarm is None and not self._socket.is_closing():
            self._alarm = loop.call_at(due, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        self.flush()

    def _handle_events(self) -> None:
        while event := self._events.peek():
            self._handle(event)
            self._events.pop()

    def _handle(self, event: Event) -> None:
        kind, link, delivery = event.type, event.link, event.delivery
        if delivery is not None and link is not None and kind is Event.DELIVERY:
            self._on_delivery(delivery, link)
        elif link is not None and kind in self._of_link:
            self._of_link[kind](link)
        elif kind in (Event.CONNECTION_REMOTE_OPEN, Event.SESSION_REMOTE_OPEN):
            cast("Connection | Session", event.context).open()
        elif kind in (Event.CONNECTION_REMOTE_CLOSE, Event.SESSION_REMOTE_CLOSE):
            cast("Connection | Session", event.context).close()

    def _on_attach(self, link: Link) -> None:
        address = (link.remote_source if link.is_sender else link.remote_target).address or ""
        try:
            accept(link)
            self._links[link.name] = self._serve(link, address)
        except HubRefusal as error:
            refuse(link, error)

    def _serve(self, link: Link, address: str) -> Reading | LinkWriting | Asking:
        if address in NODES:
            return Asking(address, link)
        where = place(address)
        hub = self._hubs.get(where.hub.lower())
        if hub is None:
            raise HubRefusal("amqp:not-found", f"The messaging entity '{where.hub}' could not be found.")
        if link.is_sender:
            return read(cast("Sender", link), hub, where, self.flush, self._socket.abort)
        if where.partition is not None:
            hub.partition(where.partition)
        return LinkWriting(hub, where.partition)

    def _on_detach(self, link: Link) -> None:
        _forget(self._links.pop(link.name, None))
        link.close()

    def _on_flow(self, link: Link) -> None:
        reading = self._links.get(link.name)
        if isinstance(reading, Reading):
            reading.pump()

    def _on_delivery(self, delivery: Delivery, link: Link) -> None:
        if not link.is_receiver or delivery.partial:
            return
        receiver = cast("Receiver", link)
        message = receiver.recv(delivery.pending) or b""
        receiver.advance()
        self._take(self._links.get(link.name), delivery, message)
        delivery.settle()
        receiver.flow(1)

    def _take(self, link: Reading | LinkWriting | Asking | None, delivery: Delivery, message: bytes) -> None:
        if isinstance(link, LinkWriting):
            wake(link.take(delivery, message))
        elif isinstance(link, Asking):
            delivery.update(Delivery.ACCEPTED)
            self._answer(link, message)

    def _answer(self, asked: Asking, message: bytes) -> None:
        request = Message()
        request.decode(message)
        answer = authorised(request, self._key) if asked.node == "$cbs" else managed(request, self._hubs)
        for link in self._links.values():
            if isinstance(link, Asking) and link.answers(asked):
                cast("Sender", link.link).send(answer)


def _engine() -> tuple[Transport, Connection, Collector]:
    connection, events, engine = Connection(), Collector(), Transport(Transport.SERVER)
    connection.collect(events)
    sasl = engine.sasl()
    sasl.allowed_mechs("ANONYMOUS PLAIN")
    sasl.allow_insecure_mechs = True
    engine.bind(connection)
    return engine, connection, events


def _forget(link: Reading | LinkWriting | Asking | None) -> None:
    if isinstance(link, Reading) and link in link.partition.readers:
        link.partition.readers.remove(link)


async def serve(hubs: dict[str, Hub], key: str | None, place: tuple[str, int]) -> asyncio.Server:
    """Listen; the caller keeps the server."""
    return await asyncio.get_running_loop().create_server(lambda: HubConnection(hubs, key), *place)
