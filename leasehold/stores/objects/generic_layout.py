"""Lease <-> three objects of our own, for any source: names and fields, byte for byte.

`<prefix>/ownership/<key>`, `<prefix>/checkpoint/<key>` and `<prefix>/notes/<key>`. A lease exists
while its checkpoint object does; that one is written first and also says what never changes
(parents, hash range). A late checkpoint and a note leave the ownership's ETag, and so the owner's
next renewal, alone. Every ownership says a counter, one more at each write, for an S3 ETag is a
digest of the content: without it a renewal would change nothing that anybody could see.
"""

from typing import ClassVar
from urllib.parse import quote, unquote

from attrs import frozen

from leasehold.balancer.model import Lease
from leasehold.stores.fields import FIELDS, BadRowField, cells, checked, kilobytes, lease_of, text, weight, whole
from leasehold.stores.protocol import Capabilities
from leasehold.stores.requests import (
    ObjectFields,
    Part,
    Parts,
    StampedNotes,
    heard,
    owned,
    owner_fields,
    said,
    spelled,
    stamped,
    stamps,
)

_NAMES = {field.name: field.object for field in FIELDS}
_OWNERSHIP = frozenset({"owner", "epoch", "next_owner", "yields", "notes"})
_CHECKPOINT = tuple(field for field in FIELDS if field.object and field.name not in _OWNERSHIP)
"""The fields of a checkpoint object, apart from the notes that it was created with."""


@frozen
class ObjectLayout:
    """The objects below one prefix; "" for the whole container or bucket."""

    above: str = ""

    capabilities: ClassVar[Capabilities] = Capabilities(owner_checked_checkpoint=False)
    """Checkpoint and ownership are two objects."""
    parts: ClassVar[tuple[Part, ...]] = ("ownership", "checkpoint", "notes")
    owned_before_checkpoint: ClassVar[bool] = False
    """A lease without its checkpoint object does not exist."""

    def prefix(self, part: Part) -> str:
        """The folder of one part."""
        return f"{self.above.strip('/')}/{part}/".lstrip("/")

    def name(self, key: str, part: Part) -> str:
        """The key in one segment, whatever it contains."""
        return self.prefix(part) + quote(key, safe=":")

    def key(self, name: str, part: Part) -> str | None:
        """The lease's key; None for a name this layout would not have given."""
        try:
            key = text("name", unquote(name.removeprefix(self.prefix(part))))
        except BadRowField:
            return None
        return key if key and self.name(key, part) == name else None

    def lease(self, key: str, parts: Parts) -> Lease | None:
        """None without a checkpoint object, whatever else there is."""
        if parts.checkpoint is None:
            return None
        fields = parts.checkpoint.fields
        told = {
            field.name: checked(
                field,
                field.object,
                heard(fields, field.object) if field.kind == "text" else fields.get(field.object),
            )
            for field in _CHECKPOINT
        }
        ownership = parts.fields("ownership")
        if "weight" in ownership:  # measured since the lease was made
            told["weight"] = weight("weight", ownership["weight"])
        # On equal stamps the notes of the notes object win, and those of the creation lose.
        latest: StampedNotes = {}
        for part in ("checkpoint", "ownership", "notes"):
            for name, note in stamped(parts.fields(part)).items():
                if note[1] >= latest.get(name, note)[1]:
                    latest[name] = note
        notes = tuple(sorted((name, text) for name, (text, _) in latest.items()))
        counter = whole("counter", ownership.get("counter", "0"))
        return owned(lease_of({"key": key, **told}, _NAMES, epoch=counter, notes=notes), parts, heard)

    def ownership(self, stored: ObjectFields, before: Lease, after: Lease) -> ObjectFields:
        """With the notes that travel in this write, stamped with its counter."""
        counter = max(whole("counter", stored.get("counter", "0")) + 1, after.epoch)
        ours = {
            **owner_fields(before, after, lambda _field, word: said(word)),
            "counter": str(counter),
            "weight": "" if after.weight is None else repr(kilobytes(after.weight)),
            "notes": _stamp(stored, before, after, counter),
        }
        return {name: word for name, word in {**stored, **ours}.items() if word}

    def checkpoint(self, stored: ObjectFields, after: Lease) -> ObjectFields:
        """The checkpoint, with the lease's constant fields and the notes it was created with."""
        told = cells(after) | {
            "sub": after.checkpoint.sub or "",
            "shard": after.shard if after.shard != after.key else "",
        }
        ours = {field.object: spelled(field.kind, told[field.name]) for field in _CHECKPOINT}
        born = {name: (text, 0) for name, text in after.notes}
        ours["notes"] = stored.get("notes", "") if stored else stamps(born)
        return {name: word for name, word in {**stored, **ours}.items() if word}

    def notes(self, stored: ObjectFields, before: Lease, after: Lease) -> ObjectFields:
        """Stamped with the ownership's counter, which this write leaves alone."""
        return {**stored, "notes": _stamp(stored, before, after, after.epoch)}


def _stamp(stored: ObjectFields, before: Lease, after: Lease, counter: int) -> str:
    """The notes of one object with those that this write changes."""
    changed = {name: (text, counter) for name, text in after.notes if before.note(name) != text}
    return stamps({**stamped(stored), **changed})
