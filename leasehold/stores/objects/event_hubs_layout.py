"""Lease <-> the blobs of the Azure SDKs' own event processors: names and metadata, byte for byte.

`<namespace>/<hub>/<group>/ownership/<partition>` holds `ownerid`; an owner absent or empty has let
go. `<namespace>/<hub>/<group>/checkpoint/<partition>` holds `offset` and `sequencenumber`. All
names are lower case, all blobs empty. What the SDKs have no word for stands in metadata of our
own beside theirs (`handoffowner`, `handoffto`, `handoffversion`, `throughputkbps`, `notes`, `position`); their workers
leave it out when they write, and every reader treats it as void then.
"""

import json
from typing import ClassVar

from attrs import frozen

from leasehold.balancer.model import LATEST, TRIM_HORIZON, Lease, Position
from leasehold.errors import StoreError
from leasehold.stores.fields import BadRowField, kilobytes, notes, position, shown, text, weight, whole
from leasehold.stores.protocol import Capabilities
from leasehold.stores.requests import ObjectFields, Part, Parts, owned, owner_fields

BEGINNING = "-1"
"""The offset, and the sequence number, just before a partition's first event."""

END_OF_STREAM = "@latest"
"""The offset that Event Hubs reads as "what arrives from now on"."""

NO_OFFSET = frozenset({"", "no offset"})
HAD, HAD_MOST = "had", 6000
"""Our own field of a checkpoint; of a blob's metadata 8 KiB are kept in all."""
"""The words that some SDKs have written in place of an unknown offset."""


def full_namespace(namespace: str) -> str:
    """`namespace` is short for its full name, which the SDKs write: so their blobs and ours have the same names."""
    return namespace if {".", ":"} & set(namespace) else f"{namespace}.servicebus.windows.net"


def stream_of(namespace: str, hub: str, group: str) -> str:
    """The name that leases of one consumer group of one hub carry, in every layout: the folder of its blobs."""
    return f"{namespace}/{hub}/{group}".lower()


@frozen
class EventHubLayout:
    """The blobs of one consumer group of one event hub; a lease's key is its partition's id.

    namespace  fully qualified, with the port where there is one
    start      where a partition starts that is owned but has no checkpoint yet
    """

    namespace: str
    hub: str
    group: str
    start: Position = TRIM_HORIZON

    capabilities: ClassVar[Capabilities] = Capabilities(
        owner_checked_checkpoint=False, free_notes=False, counts_owners=False, ascii_owners=True
    )
    """Checkpoint and ownership are two blobs, notes stand on the second, and official workers count nothing."""
    parts: ClassVar[tuple[Part, ...]] = ("ownership", "checkpoint")
    owned_before_checkpoint: ClassVar[bool] = True
    """The SDKs claim a partition long before they checkpoint it."""

    def prefix(self, part: Part) -> str:
        """Lower case throughout, and the slash at the end, or `ownership-old/0` would count."""
        return f"{self._stream}/{part}/"

    def name(self, key: str, part: Part) -> str:
        """The blob of one partition. Raises StoreError for what is none."""
        if not _is_partition(key):
            raise StoreError(f"lease {key!r}: the Azure SDKs' layout has room for partitions (0, 1, …) only")
        return self.prefix(part) + key

    def key(self, name: str, part: Part) -> str | None:
        """The partition; None for a name that no partition has."""
        partition = name.removeprefix(self.prefix(part))
        return partition if _is_partition(partition) else None

    def lease(self, key: str, parts: Parts) -> Lease | None:
        """The lease of either blob or both; a checkpoint alone is a lease that nobody owns."""
        if not parts.existing:
            return None
        fields = parts.fields("ownership")
        lease = Lease(
            key,
            stream=self._stream,
            checkpoint=read_position(parts.fields("checkpoint"), self.start),
            weight=weight("throughputkbps", fields.get("throughputkbps")),
            notes=notes("notes", fields.get("notes") or "{}"),
        )
        return owned(lease, parts, lambda fields, name: text(name, fields.get(name, "")))

    def ownership(self, stored: ObjectFields, before: Lease, after: Lease) -> ObjectFields:
        """`ownerid` always, even empty: the Python SDK's listing fails on a blob without it."""
        ours = {
            **owner_fields(before, after, _plain),
            "throughputkbps": "" if after.weight is None else repr(kilobytes(after.weight)),
            "notes": json.dumps(dict(after.notes)) if after.notes else "",
        }
        return {name: word for name, word in {**stored, **ours}.items() if word or name == "ownerid"}

    def checkpoint(self, stored: ObjectFields, after: Lease) -> ObjectFields:
        """Both fields, always: an SDK's listing fails on a blob that lacks one. Raises StoreError."""
        kept, at = {name: word for name, word in stored.items() if name not in {"position", HAD}}, after.checkpoint
        if at.numbered:
            # Behind the offset stands what was had of Spark sinks: an SDK's worker leaves it out, and has rows twice.
            offset, _, had = at.token.partition(" ")
            kept |= {HAD: _plain(HAD, had)} if had and len(had) <= HAD_MOST else {}
            if not offset or at.sub:
                raise StoreError(
                    f"checkpoint {at.sequence}: the Azure SDKs' layout wants its offset and no sub-sequence"
                )
            return {**kept, "offset": _plain("offset", offset), "sequencenumber": at.sequence}
        if at == LATEST:
            return {**kept, "offset": END_OF_STREAM, "sequencenumber": BEGINNING}
        # An SDK worker begins at the beginning where it does not know a start: records repeat, and none is lost.
        beginning = {**kept, "offset": BEGINNING, "sequencenumber": BEGINNING}
        return beginning if at == TRIM_HORIZON else {**beginning, "position": f"{at.sequence} {at.sub}"}

    def notes(self, stored: ObjectFields, before: Lease, after: Lease) -> ObjectFields:
        """Never asked for: notes stand on the ownership."""
        return self.ownership(stored, before, after)

    @property
    def _stream(self) -> str:
        return stream_of(self.namespace, self.hub, self.group)


def _is_partition(key: str) -> bool:
    """Hubs number partitions from 0 without leading zeros: a blob `007` is somebody's copy, not partition 7."""
    return key.isascii() and key.isdigit() and (key == "0" or key[0] != "0")


def _plain(field: str, word: str) -> str:
    if not (word.isascii() and word.isprintable() and word == word.strip()):
        raise StoreError(f"{field}: {word!r} cannot stand in a blob's metadata; use printable ASCII")
    return word


def read_position(fields: ObjectFields, start: Position) -> Position:
    """Prefer the offset; some SDKs leave it out or write a placeholder for it, others do so with the number."""
    offset, number = fields.get("offset", ""), fields.get("sequencenumber", "")
    known = number not in ("", BEGINNING)
    if offset == BEGINNING:
        if "position" not in fields:
            return TRIM_HORIZON
        sequence, _, sub = fields["position"].partition(" ")
        return position("position", sequence, whole("position", sub))
    if offset == END_OF_STREAM:
        return LATEST
    if offset in NO_OFFSET:
        return _numbered(number) if known else start
    # Without a number the offset still says where to start; any number counts as past it.
    had = fields.get(HAD, "")
    return _numbered(number if known else "0", f"{offset} {had}" if had else offset)


def _numbered(number: str, offset: str = "") -> Position:
    if not (number.isascii() and number.isdigit()):
        raise BadRowField("sequencenumber", f"{shown(number)} is no decimal sequence number")
    return position("sequencenumber", number, 0, text("offset", offset))
