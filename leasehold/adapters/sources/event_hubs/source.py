"""An event hub as a source of records: its partitions, and a reader for each.

In a URL the default consumer group is written `$Default`. A shell puts a variable of that name in its
place unless the URL stands in single quotes: `'eventhubs://namespace/hub?group=$Default'`. It may as
well be left out, being the default.
"""

import os
import time
from collections.abc import Mapping

from leasehold.adapters.sources.event_hubs.access import CONNECTION_STRING, Access, by_connection_string, by_identity
from leasehold.adapters.sources.event_hubs.background import Background
from leasehold.adapters.sources.event_hubs.partitions import Partitions
from leasehold.adapters.sources.event_hubs.poller import PartitionReader
from leasehold.adapters.sources.protocol import SETTLE_SECONDS, Settled, SourceError
from leasehold.balancer.model import Lease, Position, Shard
from leasehold.stores.fields import decimal
from leasehold.stores.objects.event_hubs_layout import full_namespace

DEFAULT_GROUP = "$Default"
PREFETCH = 1000
PREFETCH_MOST = 10_000
TRANSPORTS = ("amqp", "websockets")

_STRANGE = (
    "lease {!r}: the hub and group it names is {}, not {}: "
    "give each group of each hub a table, a container or a prefix of its own"
)


class EventHubsSource:
    """An event hub as a consumer group reads it.

    access     how the hub is reached
    exclusive  whether a partition's reader drives out all others, as the owner of its lease does
    """

    def __init__(self, access: Access, prefetch: int = PREFETCH, *, exclusive: bool = True) -> None:
        self.access, self._prefetch, self._exclusive = access, prefetch, exclusive
        self._background = Background()
        self._partitions = Partitions(self._background, access)

    @property
    def stream(self) -> str:
        """Namespace, hub and group, in lower case."""
        return self.access.stream

    def reads(self, lease: Lease) -> bool:
        """True. Raises SourceError for a lease of another hub or group, whose partitions have the same ids."""
        if lease.stream != self.stream:
            raise SourceError(_STRANGE.format(lease.key, lease.stream or "none", self.stream))
        return True

    def shards(self) -> tuple[Shard, ...]:
        """Every partition, those added at run time included. Raises SourceUnavailable or SourceError."""
        return self._partitions.all()

    def incarnation(self) -> str:
        """Namespace, hub and group, and when the hub was made, as the last listing told."""
        made = self._partitions.made
        return "" if made is None else f"{self.stream}:{int(made.timestamp())}"

    def gone(self, shard: str) -> bool:
        """Whether the hub answers and has no such partition: it was made anew, with fewer."""
        return all(each.id != shard for each in self._partitions.all())

    def latest(self, lease: Lease) -> Position:
        """The last event enqueued now. Raises SourceUnavailable or SourceError."""
        return self._partitions.latest(lease.shard)

    def settled(self, lease: Lease, until: float) -> Settled | None:
        """The last event there is, once that time is well past by this machine's clock: the service tells none."""
        return self._partitions.last(lease.shard) if time.time() >= until + SETTLE_SECONDS else None

    def open(self, lease: Lease, start: Position) -> PartitionReader:
        """A reader that starts just after `start`; the lease's epoch is its owner level."""
        epoch = lease.epoch if self._exclusive else None
        return PartitionReader(self._background, self.access, lease.shard, start, epoch=epoch, prefetch=self._prefetch)

    def close(self) -> None:
        """Close all connections."""
        self._background.close()


def open_url(place: str, options: Mapping[str, str]) -> EventHubsSource:
    """The source at `namespace/hub`.

    group (default $Default), transport (amqp, or websockets where only port 443 is open) and
    prefetch (events) are its options. The key comes from the connection string in the environment;
    without one, the identity of this machine or user is asked for. Raises ValueError, SourceError.
    """
    namespace, slash, hub = place.partition("/")
    if not (namespace and slash and hub) or "/" in hub:
        raise ValueError("eventhubs URL: write eventhubs://namespace/hub")
    group = options.get("group", DEFAULT_GROUP)
    if not group:
        raise ValueError("eventhubs URL: 'group' is empty; in a shell, $Default wants single quotes around the URL")
    transport = options.get("transport", "amqp")
    if transport not in TRANSPORTS:
        raise ValueError(f"eventhubs URL: transport is one of {', '.join(TRANSPORTS)}, not {transport!r}")
    access = _access(full_namespace(namespace), hub, group, websockets=transport == "websockets")
    return EventHubsSource(access, _prefetch(options.get("prefetch", str(PREFETCH))))


def _access(namespace: str, hub: str, group: str, *, websockets: bool) -> Access:
    secret = os.environ.get(CONNECTION_STRING)
    if secret:
        return by_connection_string(secret, namespace, hub, group, websockets=websockets)
    try:
        return by_identity(namespace, hub, group, websockets=websockets)
    except ModuleNotFoundError as missing:
        raise SourceError(
            f"{CONNECTION_STRING} is not set, and signing in without it needs azure-identity"
        ) from missing


def _prefetch(text: str) -> int:
    if prefetch := decimal(text, PREFETCH_MOST):
        return prefetch
    raise ValueError(f"eventhubs URL: prefetch is a number from 1 to {PREFETCH_MOST}, not {text!r}")
