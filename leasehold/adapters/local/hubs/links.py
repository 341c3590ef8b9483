"""The AMQP links of a hub: they hand events out, take them in, or answer requests.

Addresses are the service's own: `hub`, `hub/Partitions/n`, `hub/ConsumerGroups/group/Partitions/n`,
`$cbs` and `$management`; a client may write a whole URL before them.
"""

from collections.abc import Callable
from typing import Any
from urllib.parse import unquote, urlsplit

from attrs import define, frozen
from proton import Condition, Delivery, Link, Sender, symbol

from leasehold.adapters.local.hubs.partitions import Hub, HubRefusal, Partition

EPOCH = "com.microsoft:epoch"
STOLEN = "amqp:link:stolen"
SELECTOR = "apache.org:selector-filter:string"
READERS_MAX = 5
"""Readers without an epoch that one partition serves to one consumer group, as the service does."""

CREDIT = 1000


@frozen
class LinkAddress:
    """The thing that an address names: a hub, perhaps one partition of it, perhaps as one consumer group sees it."""

    hub: str
    group: str | None = None
    partition: str | None = None


def place(address: str) -> LinkAddress:
    """Read an address, with or without `amqps://host:port/` before it."""
    parts = [unquote(part) for part in urlsplit(address).path.split("/") if part]
    named = {parts[at].lower(): parts[at + 1] for at in range(1, len(parts) - 1, 2)}
    return LinkAddress(parts[0] if parts else "", named.get("consumergroups"), named.get("partitions"))


@define(eq=False)
class Reading:
    """A client's receiver of one partition: what it was sent, and what it will be sent next."""

    link: Sender
    partition: Partition
    group: str
    epoch: int | None
    next: int
    flush: Callable[[], None]
    drop: Callable[[], None]
    sent: int = 0

    def pump(self) -> None:
        """Hand out as many events as the client gave credit for; settled, as nobody waits for an answer."""
        stored, first, link = self.partition.events, self.partition.first, self.link
        self.next = max(self.next, first)  # what was trimmed meanwhile never comes
        last = min(first + len(stored), self.next + link.credit)
        for number in range(self.next, last):
            delivery = link.delivery(str(number))
            link.stream(stored[number - first])
            delivery.settle()
            link.advance()
        self.sent += max(0, last - self.next)
        self.next = max(self.next, last)

    def end(self, condition: str, description: str) -> None:
        """Detach the client's link, saying why."""
        self.partition.readers.remove(self)
        self.link.condition = Condition(condition, description)
        self.link.close()
        self.flush()


def read(link: Sender, hub: Hub, where: LinkAddress, flush: Callable[[], None], drop: Callable[[], None]) -> Reading:
    """Begin to hand a partition out; a reader with an epoch ends those with none or no higher one."""
    group = (where.group or "").lower()
    hub.check_group(group)
    partition = hub.partition(where.partition or "")
    epoch = (link.remote_properties or {}).get(EPOCH)
    rivals = [other for other in partition.readers if other.group == group]
    _admit(epoch, rivals)
    start = partition.start(_selector(link))
    for rival in rivals if epoch is not None else ():
        rival.end(STOLEN, f"New receiver with epoch of '{epoch}' is created hence this one is disconnected.")
    reading = Reading(link, partition, group, epoch, start, flush, drop)
    partition.readers.append(reading)
    return reading


def _admit(epoch: int | None, rivals: list[Reading]) -> None:
    """Raises HubRefusal for a reader with a lower epoch than one that reads, with none beside one, or one too many."""
    highest = max((other.epoch for other in rivals if other.epoch is not None), default=None)
    if highest is not None and epoch is None:
        text = f"At least one receiver for the endpoint is created with epoch of '{highest}', and so non-epoch"
        raise HubRefusal(STOLEN, f"{text} receiver is not allowed.")
    if highest is not None and epoch is not None and epoch < highest:
        text = f"Receiver with a higher epoch '{highest}' already exists."
        raise HubRefusal(STOLEN, f"{text} Receiver with epoch {epoch} cannot be created.")
    if epoch is None and len(rivals) >= READERS_MAX:
        most = f"the maximum number of allowed receivers per partition in a consumer group which is {READERS_MAX}"
        raise HubRefusal("amqp:resource-limit-exceeded", f"Exceeded {most}.")


def _selector(link: Sender) -> str | None:
    """The text of the filter on the link's source, described or plain."""
    filters = link.remote_source.filter
    filters.rewind()
    if not filters.next():
        return None
    found: dict[Any, Any] = filters.get_object() or {}
    value = found.get(symbol(SELECTOR))
    text = getattr(value, "value", value)
    return None if text is None else str(text)


@frozen
class LinkWriting:
    """A client's sender to a hub or to one of its partitions."""

    hub: Hub
    partition: str | None

    def take(self, delivery: Delivery, message: bytes) -> Partition | None:
        """Store what came; the partition that grew, or None if it was rejected."""
        try:
            grown = self.hub.enqueue(message, self.partition)
        except HubRefusal as error:
            delivery.local.condition = Condition(error.condition, error.description)
            delivery.update(Delivery.REJECTED)
            return None
        delivery.update(Delivery.ACCEPTED)
        return grown


@frozen
class Asking:
    """A link of the two by which a client asks `$cbs` or `$management`."""

    node: str
    link: Link

    def answers(self, asked: "Asking") -> bool:
        """Whether this is the link by which the answer to a question from `asked` goes back."""
        return self.link.is_sender and self.node == asked.node and self.link.session == asked.link.session


def wake(grown: Partition | None) -> None:
    """Hand what was stored to whoever reads there."""
    for reading in grown.readers if grown else ():
        reading.pump()
        reading.flush()


def accept(link: Link) -> None:
    """Answer an attach with what the client asked for."""
    link.source.copy(link.remote_source)
    link.target.copy(link.remote_target)
    link.snd_settle_mode, link.rcv_settle_mode = link.remote_snd_settle_mode, link.remote_rcv_settle_mode
    if link.is_receiver:
        link.max_message_size = 1024 * 1024
    link.open()
    if link.is_receiver:
        link.flow(CREDIT)


def refuse(link: Link, error: HubRefusal) -> None:
    """Attach and detach at once with the reason: the form of refusal that the client reports."""
    link.condition = Condition(error.condition, error.description)
    link.close()
