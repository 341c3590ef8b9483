"""The server process of the Event Hubs stand-in. It connects sockets to an AMQP engine and to hubs in memory.

One port serves both AMQP and control requests of tests. If the first byte of a connection is `{`, it is a control
connection, on which each request is a line of JSON, and so is its response (`execute_control_line`). A `HubConnection`
passes bytes between a socket and the AMQP engine, which implements the protocol. Each link of a client has one of three
purposes: to receive events (`PartitionLink`), to send events (`HubWriter`), or to send requests to `$cbs`
(authorization) and `$management` (the properties of hubs and partitions). Everything runs on one event loop, so no
locks are needed.

Addresses have the same form as in the service: `hub`, `hub/Partitions/n`, `hub/ConsumerGroups/group/Partitions/n`,
`$cbs` and `$management`. They may be preceded by a scheme and a host.

AMQP allows a sender to omit nulls at the end of a performative, and the engine does. `azure-eventhub` up to version
5.15.1 reads the fields by position, and fails if fields are missing. `FramePadder` therefore adds the missing nulls to
outgoing frames.
"""

import asyncio
import base64
import hashlib
import hmac
import json
from collections.abc import Callable
from typing import Any, cast
from urllib.parse import unquote, urlsplit

from attrs import define, frozen
from proton import (
    UNDESCRIBED,
    Array,
    Collector,
    Condition,
    Connection,
    Data,
    Delivery,
    Event,
    Link,
    Message,
    Receiver,
    Sender,
    Session,
    Transport,
    int32,
    symbol,
    timestamp,
)

from leasehold_lab.standins.hubs.partitions import Hub, HubRejection, Partition, encode_event

EPOCH = "com.microsoft:epoch"
STOLEN = "amqp:link:stolen"
SELECTOR = "apache.org:selector-filter:string"
EPOCHLESS_READERS_MAX = 5
"""The maximum number of readers without an epoch per partition and consumer group, as in the service."""

CREDIT = 1000


@frozen
class LinkAddress:
    """A parsed address, which consists of a hub, and optionally a consumer group and a partition."""

    hub: str
    group: str | None = None
    partition: str | None = None


def parse_address(address: str) -> LinkAddress:
    """Parse an address, which may start with `amqps://host:port/`."""
    parts = [unquote(part) for part in urlsplit(address).path.split("/") if part]
    names = {parts[position].lower(): parts[position + 1] for position in range(1, len(parts) - 1, 2)}
    return LinkAddress(parts[0] if parts else "", names.get("consumergroups"), names.get("partitions"))


@define(eq=False)
class PartitionLink:
    """A link on which a client receives the events of a partition.

    `next` is the sequence number of the next event to send, and `sent` the number of events sent so far.
    """

    link: Sender
    partition: Partition
    group: str
    epoch: int | None
    next: int
    flush: Callable[[], None]
    drop: Callable[[], None]
    sent: int = 0

    def send_events(self) -> None:
        """Send as many events as the client's credit allows. The events are sent as settled, so no response follows."""
        events, first_number, link = self.partition.events, self.partition.first, self.link
        self.next = max(self.next, first_number)  # skip events that were trimmed in the meantime
        end_number = min(first_number + len(events), self.next + link.credit)
        for sequence_number in range(self.next, end_number):
            delivery = link.delivery(str(sequence_number))
            link.stream(events[sequence_number - first_number])
            delivery.settle()
            link.advance()
        self.sent += max(0, end_number - self.next)
        self.next = max(self.next, end_number)

    def end(self, condition: str, description: str) -> None:
        """Detach the client's link, with this error."""
        self.partition.readers.remove(self)
        self.link.condition = Condition(condition, description)
        self.link.close()
        self.flush()


def start_reader(
    link: Sender, hub: Hub, address: LinkAddress, flush: Callable[[], None], drop_connection: Callable[[], None]
) -> PartitionLink:
    """Start to send the events of a partition to a reader, and return the reader's link.

    If the reader has an epoch, all other readers of its consumer group are detached. Raises HubRejection if another
    reader has a higher epoch, if another reader has an epoch and this one has none, or if there are too many readers.
    """
    group = (address.group or "").lower()
    hub.check_group_exists(group)
    partition = hub.partition(address.partition or "")
    epoch = (link.remote_properties or {}).get(EPOCH)
    other_readers = [reader for reader in partition.readers if reader.group == group]
    highest_epoch = max((reader.epoch for reader in other_readers if reader.epoch is not None), default=None)
    if highest_epoch is not None and epoch is None:
        message = f"At least one receiver for the endpoint is created with epoch of '{highest_epoch}', and so non-epoch"
        raise HubRejection(STOLEN, f"{message} receiver is not allowed.")
    if highest_epoch is not None and epoch is not None and epoch < highest_epoch:
        message = f"Receiver with a higher epoch '{highest_epoch}' already exists."
        raise HubRejection(STOLEN, f"{message} Receiver with epoch {epoch} cannot be created.")
    if epoch is None and len(other_readers) >= EPOCHLESS_READERS_MAX:
        limit_description = (
            "the maximum number of allowed receivers per partition in a consumer group which is "
            f"{EPOCHLESS_READERS_MAX}"
        )
        raise HubRejection("amqp:resource-limit-exceeded", f"Exceeded {limit_description}.")
    # The filter on the link's source contains the start position, as a described or a plain value.
    filters, selector = link.remote_source.filter, None
    filters.rewind()
    if filters.next():
        value: Any = cast("dict[Any, Any]", filters.get_object() or {}).get(symbol(SELECTOR))
        selector = getattr(value, "value", value)
    # Check the start position first, because a reader that is rejected must not detach others.
    start = partition.find_start(None if selector is None else str(selector))
    for other_reader in other_readers if epoch is not None else ():
        other_reader.end(STOLEN, f"New receiver with epoch of '{epoch}' is created hence this one is disconnected.")
    partition_link = PartitionLink(link, partition, group, epoch, start, flush, drop_connection)
    partition.readers.append(partition_link)
    return partition_link


@frozen
class HubWriter:
    """A link on which a client sends events to a hub or to one of its partitions."""

    hub: Hub
    partition: str | None

    def store_message(self, delivery: Delivery, message: bytes) -> Partition | None:
        """Store a message, and return its partition, or None if the message was rejected."""
        try:
            partition = self.hub.enqueue(message, self.partition)
        except HubRejection as error:
            delivery.local.condition = Condition(error.condition, error.description)
            delivery.update(Delivery.REJECTED)
            return None
        delivery.update(Delivery.ACCEPTED)
        return partition


@frozen
class RequestLink:
    """A client's link for requests to `$cbs` or `$management`, or its link for the responses to such requests."""

    node: str
    link: Link

    def carries_responses_to(self, request_link: "RequestLink") -> bool:
        """Return whether responses to requests on `request_link` are sent on this link."""
        return self.link.is_sender and self.node == request_link.node and self.link.session == request_link.link.session


def send_to_readers(partition: Partition | None) -> None:
    """Send new events to the readers of the partition."""
    for reader in partition.readers if partition else ():
        reader.send_events()
        reader.flush()


def accept_link(link: Link) -> None:
    """Confirm the attachment of a link, with the settings that the client requested."""
    link.source.copy(link.remote_source)
    link.target.copy(link.remote_target)
    link.snd_settle_mode, link.rcv_settle_mode = link.remote_snd_settle_mode, link.remote_rcv_settle_mode
    if link.is_receiver:
        link.max_message_size = 1024 * 1024
    link.open()
    if link.is_receiver:
        link.flow(CREDIT)


def reject_link(link: Link, error: HubRejection) -> None:
    """Detach the link with this error. Clients report the error of a link that is attached and then detached."""
    link.condition = Condition(error.condition, error.description)
    link.close()


PARTITION = "com.microsoft:partition"


def respond_to_token(request: Message, key: str | None) -> Message:
    """Return the response to a put-token request.

    The response has status 401 if a key is required and the token was not signed with it, and status 202 otherwise.
    """
    if key is not None:
        fields = dict(part.partition("=")[::2] for part in str(request.body).partition(" ")[2].split("&"))
        # Use the resource exactly as it was sent, because some SDKs escape in upper case and others in lower case.
        signed_bytes = f"{fields.get('sr')}\n{fields.get('se')}".encode()
        expected_signature = base64.b64encode(hmac.new(key.encode(), signed_bytes, hashlib.sha256).digest()).decode()
        if not {"sr", "se", "sig"} <= fields.keys() or not hmac.compare_digest(
            expected_signature, unquote(fields["sig"])
        ):
            return _build_response(request, 401, "InvalidSignature: The token has an invalid signature.")
    return _build_response(request, 202, "Accepted")


def respond_to_read(request: Message, hubs: dict[str, Hub]) -> Message:
    """Return the response to a READ request for the properties of a hub or a partition."""
    properties = cast("dict[str, Any] | None", request.properties) or {}
    hub = hubs.get(str(properties.get("name")).lower())
    if hub is None:
        return _build_response(request, 404, f"The messaging entity '{properties.get('name')}' could not be found.")
    try:
        asks_for_partition = str(properties.get("type")) == PARTITION
        body = describe_partition(hub, str(properties.get("partition"))) if asks_for_partition else describe_hub(hub)
    except HubRejection as error:
        return _build_response(request, 404, error.description)
    return _build_response(request, 200, "OK", body)


def describe_hub(hub: Hub) -> dict[str, Any]:
    """Return the properties of a hub as the service does."""
    numbers = [str(number) for number in range(len(hub.partitions))]
    return {
        "name": hub.name,
        "created_at": timestamp(hub.created_ms),
        "partition_count": int32(len(numbers)),
        "georeplication_factor": int32(1),  # required by the client for Go
        "partition_ids": Array(cast("Any", UNDESCRIBED), cast("Any", Data.STRING), *numbers),
    }


def describe_partition(hub: Hub, number: str) -> dict[str, Any]:
    """Return the properties of a partition as the service does. Raises HubRejection if there is no such partition."""
    partition = hub.partition(number)
    last_number, offset, time_ms = partition.last
    return {
        "name": hub.name,
        "partition": number,
        "begin_sequence_number": partition.first,
        "last_enqueued_sequence_number": last_number,
        "last_enqueued_offset": offset,
        "last_enqueued_time_utc": timestamp(time_ms),
        "is_partition_empty": not partition.events,
    }


def _build_response(request: Message, code: int, text: str, body: dict[str, Any] | None = None) -> Message:
    status = {"status-code": int32(code), "status-description": text}
    return Message(body=body, correlation_id=request.id, properties=status)


def execute_control_line(line: bytes, hubs: dict[str, Hub]) -> bytes:
    """Execute a control request such as `{"do": "trim", …}`, and return its response."""
    try:
        request = json.loads(line)
        response = _execute_control_request(hubs, request)
    except (ValueError, KeyError, HubRejection) as error:
        response = {"error": f"{type(error).__name__}: {error}"}
    return json.dumps(response).encode()


def _execute_control_request(hubs: dict[str, Hub], request: dict[str, Any]) -> dict[str, Any]:
    name = request["hub"].lower()
    if request["do"] == "create":
        old_hub, hubs[name] = hubs.get(name), Hub.of(request["hub"], int(request["count"]), request.get("groups", ()))
        for partition in old_hub.partitions if old_hub else ():
            for reader_link in tuple(partition.readers):
                reader_link.end("amqp:not-found", "the hub was deleted, and recreated under its name")
        return {"partitions": len(hubs[name].partitions)}
    hub = hubs[name]
    match request["do"]:
        case "add-partitions":
            hub.add_partitions(int(request["count"]))
            return {"partitions": len(hub.partitions)}
        case "put":
            for body in request["bodies"]:
                send_to_readers(hub.enqueue(encode_event(body.encode()), request["partition"]))
            return {"put": len(request["bodies"])}
        case "trim":
            return {"trimmed": hub.partition(request["partition"]).trim(int(request["before"]))}
        case "detach":
            readers = tuple(hub.partition(request["partition"]).readers)  # a copy, because `end` removes the reader
            for reader in readers:
                reader.end(request["condition"], request.get("description", "asked for by the test"))
            return {"detached": len(readers)}
        case "drop":
            readers = tuple(hub.partition(request["partition"]).readers)
            for reader in readers:
                reader.drop()
            return {"dropped": len(readers)}
        case "look":
            partitions = []
            for partition in hub.partitions:
                reader_rows = [
                    {"group": reader.group, "epoch": reader.epoch, "sent": reader.sent} for reader in partition.readers
                ]
                partitions.append({"events": len(partition.events), "readers": reader_rows})
            return {"partitions": partitions}
        case unknown:
            raise KeyError(unknown)


FIELDS = {
    0x10: 10,  # open
    0x11: 8,  # begin
    0x12: 14,  # attach
    0x13: 11,  # flow
    0x14: 11,  # transfer
    0x15: 6,  # disposition
    0x16: 3,  # detach
    0x17: 1,  # end
    0x18: 1,  # close
    0x40: 1,  # SASL mechanisms
    0x44: 2,  # SASL outcome
}
"""The number of fields that each performative has in the specification, by descriptor."""

HEADER = 8
NULL = b"\x40"
LIST_0, LIST_8, LIST_32 = 0x45, 0xC0, 0xD0


class FramePadder:
    """Adds missing fields to the outgoing frames of a connection. Incomplete frames are kept until the rest arrives."""

    def __init__(self) -> None:
        self._rest = b""

    def add_missing_fields(self, data: bytes) -> bytes:
        """Return the frames that are now complete, with missing fields added."""
        buffer, position, frames = self._rest + data, 0, []
        while len(buffer) - position >= HEADER:
            # A frame starts with its size, but a protocol header starts with "AMQP".
            frame_start = buffer[position : position + 4]
            frame_size = HEADER if frame_start == b"AMQP" else int.from_bytes(frame_start)
            if len(buffer) - position < frame_size:
                break
            frames.append(pad_frame(buffer[position : position + frame_size]))
            position += frame_size
        self._rest = buffer[position:]
        return b"".join(frames)


def pad_frame(frame: bytes) -> bytes:
    """Return the frame with missing fields added. Protocol headers and heartbeats are returned unchanged."""
    if len(frame) == HEADER:
        return frame
    descriptor, list_type = frame[10], frame[11]
    # There are three encodings of lists. Get the number of fields, the encoded fields and the payload after them.
    if list_type == LIST_0:
        count, values, payload = 0, b"", frame[12:]
    elif list_type == LIST_8:
        end = 13 + frame[12]
        count, values, payload = frame[13], frame[14:end], frame[end:]
    else:
        end = 16 + int.from_bytes(frame[12:16])
        count, values, payload = int.from_bytes(frame[16:20]), frame[20:end], frame[end:]
    missing_count = FIELDS.get(descriptor, count) - count
    values += NULL * missing_count
    size_fields = (len(values) + 4).to_bytes(4) + (count + missing_count).to_bytes(4)
    body = bytes((0, 0x53, descriptor, LIST_32)) + size_fields + values + payload
    return (HEADER + len(body)).to_bytes(4) + frame[4:HEADER] + body


NODES = ("$cbs", "$management")
PIECE = 65536


class HubConnection(asyncio.Protocol):
    """A connection from a client or from a test."""

    def __init__(self, hubs: dict[str, Hub], key: str | None) -> None:
        self._hubs = hubs
        self._key = key
        self._links: dict[str, PartitionLink | HubWriter | RequestLink] = {}
        self._padding = FramePadder()
        self._lines: bytes | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._engine, self._connection, self._events = Transport(Transport.SERVER), Connection(), Collector()
        self._connection.collect(self._events)
        sasl = self._engine.sasl()
        sasl.allowed_mechs("ANONYMOUS PLAIN")
        sasl.allow_insecure_mechs = True
        self._engine.bind(self._connection)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._socket = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  the loop's own signature
        if self._alarm is not None:
            self._alarm.cancel()
        for name in tuple(self._links):
            self._forget_link(name)

    def data_received(self, data: bytes) -> None:
        """Handle control requests if the first byte of the connection was `{`, and AMQP otherwise."""
        if self._lines is not None or data[:1] == b"{":
            *lines, self._lines = ((self._lines or b"") + data).split(b"\n")
            for line in lines:
                self._socket.write(execute_control_line(line, self._hubs) + b"\n")
            return
        while data:
            free_space = self._engine.capacity()
            if free_space <= 0:  # the engine has closed its side
                break
            self._engine.push(data[:free_space])
            data = data[free_space:]
            while event := self._events.peek():
                self._handle_event(event)
                self._events.pop()
        self.flush()

    def flush(self) -> None:
        """Send the engine's output, and schedule the next heartbeat, which clients need to keep the connection open."""
        loop = asyncio.get_running_loop()
        next_heartbeat = self._engine.tick(loop.time())
        if next_heartbeat and self._alarm is None and not self._socket.is_closing():
            self._alarm = loop.call_at(next_heartbeat, self._flush_after_timer)  # Flushing sends the heartbeat.
        while (pending := self._engine.pending()) > 0:
            data = self._engine.peek(min(pending, PIECE)) or b""
            self._engine.pop(len(data))
            self._socket.write(self._padding.add_missing_fields(data))
        if self._engine.pending() < 0:
            self._socket.close()

    def _flush_after_timer(self) -> None:
        self._alarm = None
        self.flush()

    def _handle_event(self, event: Event) -> None:
        kind, link, delivery = event.type, event.link, event.delivery
        if link is not None and delivery is not None and kind is Event.DELIVERY:
            if link.is_receiver and not delivery.partial:
                # A complete message has arrived, which is an event or a batch to store, or a request.
                receiver, link_purpose = cast("Receiver", link), self._links.get(link.name)
                message = receiver.recv(delivery.pending) or b""
                receiver.advance()
                if isinstance(link_purpose, HubWriter):
                    send_to_readers(link_purpose.store_message(delivery, message))
                elif isinstance(link_purpose, RequestLink):
                    delivery.update(Delivery.ACCEPTED)
                    request = Message()
                    request.decode(message)
                    is_authorization = link_purpose.node == "$cbs"
                    response = (
                        respond_to_token(request, self._key)
                        if is_authorization
                        else respond_to_read(request, self._hubs)
                    )
                    for other_link in self._links.values():
                        if isinstance(other_link, RequestLink) and other_link.carries_responses_to(link_purpose):
                            cast("Sender", other_link.link).send(response)
                delivery.settle()
                receiver.flow(1)
        elif link is not None and kind is Event.LINK_REMOTE_OPEN:
            address = (link.remote_source if link.is_sender else link.remote_target).address or ""
            try:
                accept_link(link)
                self._links[link.name] = self._serve_link(link, address)
            except HubRejection as error:
                reject_link(link, error)
        elif link is not None and kind in (Event.LINK_REMOTE_CLOSE, Event.LINK_REMOTE_DETACH):
            self._forget_link(link.name)
            link.close()
        elif link is not None and kind is Event.LINK_FLOW:
            reader_link = self._links.get(link.name)
            if isinstance(reader_link, PartitionLink):
                reader_link.send_events()
        elif kind in (Event.CONNECTION_REMOTE_OPEN, Event.SESSION_REMOTE_OPEN):
            cast("Connection | Session", event.context).open()
        elif kind in (Event.CONNECTION_REMOTE_CLOSE, Event.SESSION_REMOTE_CLOSE):
            cast("Connection | Session", event.context).close()

    def _forget_link(self, name: str) -> None:
        link = self._links.pop(name, None)
        if isinstance(link, PartitionLink) and link in link.partition.readers:
            link.partition.readers.remove(link)

    def _serve_link(self, link: Link, address: str) -> PartitionLink | HubWriter | RequestLink:
        if address in NODES:
            return RequestLink(address, link)
        link_address = parse_address(address)
        hub = self._hubs.get(link_address.hub.lower())
        if hub is None:
            raise HubRejection("amqp:not-found", f"The messaging entity '{link_address.hub}' could not be found.")
        if link.is_sender:
            return start_reader(cast("Sender", link), hub, link_address, self.flush, self._socket.abort)
        if link_address.partition is not None:
            hub.partition(link_address.partition)
        return HubWriter(hub, link_address.partition)


async def serve_hubs(hubs: dict[str, Hub], key: str | None, address: tuple[str, int]) -> asyncio.Server:
    """Start to listen on this host and port, and return the server. The caller must keep a reference to it."""
    return await asyncio.get_running_loop().create_server(lambda: HubConnection(hubs, key), *address)
