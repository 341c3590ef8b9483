"""Lease <-> three objects of our own, for any source: names and fields, byte for byte.

`<prefix>/ownership/<key>`, `<prefix>/checkpoint/<key>` and `<prefix>/notes/<key>`. A lease exists
while its checkpoint object does; that one is written first and also says what never changes
(parents, hash range). A late checkpoint and a note leave the ownership's ETag, and so the owner's
next renewal, alone. Every ownership says a counter, one more at each write, for an S3 ETag is a
digest of the content: without it a renewal would change nothing that anybody could see.
"""

import json
from typing import ClassVar
from urllib.parse import quote, unquote

from attrs import evolve, frozen

from leasehold.balancer.model import Lease, Notes
from leasehold.stores.fields import BadRowField, from_json, hash_range, keys, kilobytes, position, text, weight, whole
from leasehold.stores.objects.store import ObjectFields, Part, Parts, handoff_version, version_of
from leasehold.stores.protocol import Promises
from leasehold.stores.writes import counted

_PRINTABLE = "!#$&'()*+,/:;<=>?@[]^`{|}"

_Stamped = dict[str, tuple[str, int]]
"""Notes by name, each with the ownership's counter when it was written; the later word wins."""


def _said(word: str) -> str:
    """Readable, and safe in a header: all but printable ASCII percent-encoded."""
    return quote(word, safe=_PRINTABLE)


def _heard(fields: ObjectFields, name: str) -> str:
    """The reverse; nothing where it is not said."""
    try:
        return text(name, unquote(fields.get(name, ""), errors="strict"))
    except UnicodeDecodeError:
        raise BadRowField(name, "it is not UTF-8") from None


@frozen
class ObjectLayout:
    """The objects below one prefix; "" for the whole container or bucket."""

    above: str = ""

    promises: ClassVar[Promises] = Promises(owner_checked_checkpoint=False)
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
        row = _described(key, parts.checkpoint.fields)
        fields = parts.fields("ownership")
        owner = _heard(fields, "ownerid") or None
        yields = owner is not None and _heard(fields, "handoffowner") == owner
        owned = evolve(
            row,
            owner=owner,
            idle=parts.ownership.age if parts.ownership else 0.0,
            heir=(_heard(fields, "handoffto") or None) if yields else None,
            yields=yields,
            notes=_noted(parts),
        )
        if "weight" in fields:  # measured since it was made
            owned = evolve(owned, weight=weight("weight", fields["weight"]))
        counter = whole("counter", fields.get("counter", "0"))
        return evolve(counted(owned, counter), version=version_of(parts, yields=yields))

    def ownership(self, stored: ObjectFields, before: Lease, after: Lease) -> ObjectFields:
        """With the notes that travel in this write, stamped with its counter."""
        counter = max(whole("counter", stored.get("counter", "0")) + 1, after.epoch)
        ours = {
            "ownerid": _said(after.owner or ""),
            "counter": str(counter),
            "handoffowner": _said(after.owner or "") if after.yields else "",
            "handoffto": _said(after.heir or ""),
            "handoffversion": handoff_version(before, after),
            "weight": "" if after.weight is None else repr(kilobytes(after.weight)),
            "notes": _stamp(stored, before, after, counter),
        }
        return _without_blanks({**stored, **ours})

    def checkpoint(self, stored: ObjectFields, after: Lease) -> ObjectFields:
        """The checkpoint, with the lease's constant fields and the notes it was created with."""
        first, last = (str(end) for end in after.hash_range) if after.hash_range else ("", "")
        ours = {
            "sequence": after.checkpoint.sequence,
            "sub": str(after.checkpoint.sub or ""),
            "token": _said(after.checkpoint.token),
            "stream": _said(after.stream),
            "shard": _said(after.shard) if after.shard != after.key else "",
            "parents": json.dumps(after.parents) if after.parents else "",
            "firsthash": first,
            "lasthash": last,
            "weight": "" if after.weight is None else repr(kilobytes(after.weight)),
            "notes": stored.get("notes", "") if stored else _stamps({n: (v, 0) for n, v in after.notes}),
        }
        return _without_blanks({**stored, **ours})

    def notes(self, stored: ObjectFields, before: Lease, after: Lease) -> ObjectFields:
        """Stamped with the ownership's counter, which this write leaves alone."""
        return {**stored, "notes": _stamp(stored, before, after, after.epoch)}


def _without_blanks(fields: ObjectFields) -> ObjectFields:
    return {name: text for name, text in fields.items() if text}


def _described(key: str, fields: ObjectFields) -> Lease:
    if "sequence" not in fields:
        raise BadRowField("sequence", "the checkpoint object does not say it")
    sub = whole("sub", fields.get("sub", "0"))
    return Lease(
        key,
        stream=_heard(fields, "stream"),
        shard=_heard(fields, "shard") or key,
        parents=keys("parents", fields.get("parents", "[]")),
        checkpoint=position("sequence", fields["sequence"], sub, _heard(fields, "token")),
        hash_range=hash_range(("firsthash", "lasthash"), fields.get("firsthash"), fields.get("lasthash")),
        weight=weight("weight", fields.get("weight")),
    )


def _stamped(fields: ObjectFields) -> _Stamped:
    match from_json("notes", fields.get("notes", "{}")):
        case dict(notes):
            return {text("notes", name): _note(pair) for name, pair in notes.items()}
        case _:
            raise BadRowField("notes", "not an object of [text, counter] pairs")


def _note(pair: object) -> tuple[str, int]:
    match pair:
        case [str(value), int(stamp)]:
            return text("notes", value), whole("notes", stamp)
        case _:
            raise BadRowField("notes", "not an object of [text, counter] pairs")


def _stamps(notes: _Stamped) -> str:
    return json.dumps(notes) if notes else ""


def _stamp(stored: ObjectFields, before: Lease, after: Lease, counter: int) -> str:
    """The notes of one object with those that this write changes."""
    changed = {name: (text, counter) for name, text in after.notes if before.note(name) != text}
    return _stamps({**_stamped(stored), **changed})


def _noted(parts: Parts) -> Notes:
    """The notes of a lease; on equal stamps those of the notes object win, and those of the creation lose."""
    latest: _Stamped = {}
    for part in ("checkpoint", "ownership", "notes"):
        for name, note in _stamped(parts.fields(part)).items():
            if note[1] >= latest.get(name, note)[1]:
                latest[name] = note
    return tuple(sorted((name, text) for name, (text, _) in latest.items()))
