"""Lease <-> the blobs of the Azure SDKs' own event processors: names and metadata, byte for byte.

`<namespace>/<hub>/<group>/ownership/<partition>` holds `ownerid`; an owner absent or empty has let
go. `<namespace>/<hub>/<group>/checkpoint/<partition>` holds `offset` and `sequencenumber`. All
names are lower case, all blobs empty. What the SDKs have no word for stands in metadata of our
own beside theirs (`handoffowner`, `handoffto`, `handoffversion`, `throughputkbps`, `notes`, `position`); their workers
leave it out when they write, and every reader treats it as void then.
"""

import json

from attrs import frozen

from balancer.model import LATEST, TRIM_HORIZON, Lease, Notes, Position
from stores.fields import BadField, position
from stores.layouts import Part, Parts, handoff_version, version_of
from stores.objects import Fields
from stores.protocol import Promises, StoreError

BEGINNING = "-1"
"""The offset, and the sequence number, just before a partition's first event."""

END_OF_STREAM = "@latest"
"""The offset that Event Hubs reads as "what arrives from now on"."""

_NO_OFFSET = frozenset({"", "no offset"})
"""What some SDKs have written where they knew none."""


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

    @property
    def promises(self) -> Promises:
        """Checkpoint and ownership are two blobs, and notes stand on the second."""
        return Promises(owner_checked_checkpoint=False, free_notes=False)

    @property
    def parts(self) -> tuple[Part, ...]:
        """Ownership, then checkpoint."""
        return ("ownership", "checkpoint")

    @property
    def owned_before_checkpoint(self) -> bool:
        """The SDKs claim a partition long before they checkpoint it."""
        return True

    def prefix(self, part: Part) -> str:
        """Lower case throughout, and the slash at the end, or `ownership-old/0` would count."""
        return f"{self._stream}/{part}/"

    def name(self, key: str, part: Part) -> str:
        """The blob of one partition. Raises StoreError for what is none."""
        if not (key.isascii() and key.isdigit()):
            raise StoreError(f"lease {key!r}: the Azure SDKs' layout has room for partitions (0, 1, …) only")
        return self.prefix(part) + key

    def key(self, name: str, part: Part) -> str | None:
        """The partition; None for a name that no partition has."""
        partition = name.removeprefix(self.prefix(part))
        return partition if partition.isascii() and partition.isdigit() else None

    def lease(self, key: str, parts: Parts) -> Lease | None:
        """Either blob makes a lease: of a checkpoint alone, one that nobody owns."""
        if not parts.existing:
            return None
        fields = parts.fields("ownership")
        owner = fields.get("ownerid") or None
        yields = owner is not None and fields.get("handoffowner") == owner
        return Lease(
            key,
            stream=self._stream,
            owner=owner,
            version=version_of(parts, yields=yields),
            idle=parts.ownership.age if parts.ownership else 0.0,
            checkpoint=read_position(parts.fields("checkpoint"), self.start) if parts.checkpoint else self.start,
            heir=(fields.get("handoffto") or None) if yields else None,
            yields=yields,
            weight=_number("throughputkbps", fields.get("throughputkbps")),
            notes=read_notes(fields.get("notes", "")),
        )

    def ownership(self, stored: Fields, before: Lease, after: Lease) -> Fields:
        """`ownerid` always, even empty: the Python SDK's listing fails on a blob without it."""
        ours = {
            "ownerid": _plain("owner", after.owner or ""),
            "handoffowner": _plain("owner", after.owner or "") if after.yields else "",
            "handoffto": _plain("heir", after.heir or ""),
            "handoffversion": handoff_version(before, after),
            "throughputkbps": "" if after.weight is None else repr(after.weight),
            "notes": json.dumps(dict(after.notes)) if after.notes else "",
        }
        return {name: text for name, text in {**stored, **ours}.items() if text or name == "ownerid"}

    def checkpoint(self, stored: Fields, after: Lease) -> Fields:
        """Both fields, always: an SDK's listing fails on a blob that lacks one. Raises StoreError."""
        kept = {name: text for name, text in stored.items() if name != "position"}
        return {**kept, **_written(after.checkpoint)}

    def notes(self, stored: Fields, before: Lease, after: Lease) -> Fields:
        """Never asked for: notes stand on the ownership."""
        return self.ownership(stored, before, after)

    @property
    def _stream(self) -> str:
        return stream_of(self.namespace, self.hub, self.group)


def _plain(field: str, text: str) -> str:
    if not (text.isascii() and text.isprintable() and text == text.strip()):
        raise StoreError(f"{field}: {text!r} cannot stand in a blob's metadata; use printable ASCII")
    return text


def _number(field: str, text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        raise BadField(field, f"{text!r} is no number") from None


def read_notes(text: str) -> Notes:
    """Notes from a JSON object of strings; none from nothing. Raises BadField."""
    try:
        notes = json.loads(text or "{}")
    except ValueError:
        raise BadField("notes", f"{text!r} is not JSON") from None
    if not (isinstance(notes, dict) and all(isinstance(value, str) for value in notes.values())):
        raise BadField("notes", f"{text!r} is no object of strings")
    return tuple(sorted(notes.items()))


def _written(at: Position) -> Fields:
    if at.numbered:
        if not at.token or at.sub:
            raise StoreError(f"checkpoint {at.sequence}: the Azure SDKs' layout wants its offset and no sub-sequence")
        return {"offset": _plain("offset", at.token), "sequencenumber": at.sequence}
    if at == LATEST:
        return {"offset": END_OF_STREAM, "sequencenumber": BEGINNING}
    # An SDK worker that meets a start it has no word for begins at the beginning: late, but nothing lost.
    beginning = {"offset": BEGINNING, "sequencenumber": BEGINNING}
    return beginning if at == TRIM_HORIZON else {**beginning, "position": f"{at.sequence} {at.sub}"}


def read_position(fields: Fields, start: Position) -> Position:
    """The offset wins; some SDKs leave it out or write a word for none, others the number."""
    offset, number = fields.get("offset", ""), fields.get("sequencenumber", "")
    known = number not in ("", BEGINNING)
    if offset == BEGINNING:
        return _ours(fields["position"]) if "position" in fields else TRIM_HORIZON
    if offset == END_OF_STREAM:
        return LATEST
    if offset in _NO_OFFSET:
        return _numbered(number) if known else start
    # Without a number the offset still says where to start; any number counts as past it.
    return _numbered(number if known else "0", offset)


def _numbered(number: str, offset: str = "") -> Position:
    if not (number.isascii() and number.isdigit()):
        raise BadField("sequencenumber", f"{number!r} is no decimal sequence number")
    return Position(number, token=offset)


def _ours(text: str) -> Position:
    sequence, _, sub = text.partition(" ")
    if not (sub.isascii() and sub.isdigit()):
        raise BadField("position", f"{text!r} is not a position and its sub-sequence number")
    return position("position", sequence, int(sub))
