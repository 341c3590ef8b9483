"""Lease <-> three objects of our own, for any source: names and fields, byte for byte.

`<prefix>/ownership/<key>`, `<prefix>/checkpoint/<key>` and `<prefix>/notes/<key>`. A lease exists
while its checkpoint object does; that one is written first and also says what never changes
(parents, hash range). A late checkpoint and a note leave the ownership's ETag, and so the owner's
next renewal, alone. Every ownership says a counter, one more at each write, for an S3 ETag is a
digest of the content: without it a renewal would change nothing that anybody could see.
"""

import json
from typing import Any
from urllib.parse import quote, unquote

from attrs import evolve, frozen

from balancer.model import Lease, Notes
from stores.fields import BadField, hash_range, position
from stores.layouts import Part, Parts, handoff_version, version_of
from stores.objects import Fields
from stores.protocol import Promises
from stores.writes import counted

_PRINTABLE = "!#$&'()*+,/:;<=>?@[]^`{|}"

_Stamped = dict[str, tuple[str, int]]
"""Notes by name, each with the ownership's counter when it was written; the later word wins."""


def _said(text: str) -> str:
    """Readable, and safe in a header: all but printable ASCII percent-encoded."""
    return quote(text, safe=_PRINTABLE)


@frozen
class ObjectLayout:
    """The objects below one prefix; "" for the whole container or bucket."""

    above: str = ""

    @property
    def promises(self) -> Promises:
        """Checkpoint and ownership are two objects."""
        return Promises(owner_checked_checkpoint=False)

    @property
    def parts(self) -> tuple[Part, ...]:
        """Ownership, checkpoint, notes."""
        return ("ownership", "checkpoint", "notes")

    @property
    def owned_before_checkpoint(self) -> bool:
        """A lease without its checkpoint object does not exist."""
        return False

    def prefix(self, part: Part) -> str:
        """The folder of one part."""
        return f"{self.above.strip('/')}/{part}/".lstrip("/")

    def name(self, key: str, part: Part) -> str:
        """The key in one segment, whatever it contains."""
        return self.prefix(part) + quote(key, safe=":")

    def key(self, name: str, part: Part) -> str | None:
        """The lease's key; None for a name this layout would not have given."""
        key = unquote(name.removeprefix(self.prefix(part)))
        return key if key and self.name(key, part) == name else None

    def lease(self, key: str, parts: Parts) -> Lease | None:
        """None without a checkpoint object, whatever else there is."""
        if parts.checkpoint is None:
            return None
        row = _described(key, parts.checkpoint.fields)
        fields = parts.fields("ownership")
        owner = unquote(fields.get("ownerid", "")) or None
        yields = owner is not None and unquote(fields.get("handoffowner", "")) == owner
        owned = evolve(
            row,
            owner=owner,
            idle=parts.ownership.age if parts.ownership else 0.0,
            heir=(unquote(fields.get("handoffto", "")) or None) if yields else None,
            yields=yields,
            notes=_noted(parts),
        )
        if "weight" in fields:  # measured since it was made
            owned = evolve(owned, weight=_weight(fields["weight"]))
        counter = _whole("counter", fields.get("counter", "0"))
        return evolve(counted(owned, counter), version=version_of(parts, yields=yields))

    def ownership(self, stored: Fields, before: Lease, after: Lease) -> Fields:
        """With the notes that travel in this write, stamped with its counter."""
        counter = _whole("counter", stored.get("counter", "0")) + 1
        ours = {
            "ownerid": _said(after.owner or ""),
            "counter": str(counter),
            "handoffowner": _said(after.owner or "") if after.yields else "",
            "handoffto": _said(after.heir or ""),
            "handoffversion": handoff_version(before, after),
            "weight": "" if after.weight is None else repr(after.weight),
            "notes": _stamp(stored, before, after, counter),
        }
        return _without_blanks({**stored, **ours})

    def checkpoint(self, stored: Fields, after: Lease) -> Fields:
        """What never changes is written with it, and the notes a lease is born with."""
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
            "weight": "" if after.weight is None else repr(after.weight),
            "notes": stored.get("notes", "") if stored else _stamps({n: (v, 0) for n, v in after.notes}),
        }
        return _without_blanks({**stored, **ours})

    def notes(self, stored: Fields, before: Lease, after: Lease) -> Fields:
        """Stamped with the ownership's counter, which this write leaves alone."""
        return {**stored, "notes": _stamp(stored, before, after, after.epoch)}


def _without_blanks(fields: Fields) -> Fields:
    return {name: text for name, text in fields.items() if text}


def _described(key: str, fields: Fields) -> Lease:
    if "sequence" not in fields:
        raise BadField("sequence", "the checkpoint object does not say it")
    sub = _whole("sub", fields.get("sub", "0"))
    return Lease(
        key,
        stream=unquote(fields.get("stream", "")),
        shard=unquote(fields.get("shard", "")) or key,
        parents=_parents(fields.get("parents", "[]")),
        checkpoint=position("sequence", fields["sequence"], sub, unquote(fields.get("token", ""))),
        hash_range=hash_range(("firsthash", "lasthash"), fields.get("firsthash"), fields.get("lasthash")),
        weight=_weight(fields.get("weight")),
    )


def _whole(field: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise BadField(field, f"{text!r} is no whole number")
    return int(text)


def _weight(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        raise BadField("weight", f"{text!r} is no number") from None


def _json(field: str, text: str) -> Any:  # noqa: ANN401  it may hold anything
    try:
        return json.loads(text)
    except ValueError:
        raise BadField(field, f"{text!r} is not JSON") from None


def _parents(text: str) -> tuple[str, ...]:
    parents = _json("parents", text)
    if not (isinstance(parents, list) and all(isinstance(key, str) for key in parents)):
        raise BadField("parents", f"{text!r} is no list of lease keys")
    return tuple(parents)


def _stamped(fields: Fields) -> _Stamped:
    notes = _json("notes", fields.get("notes", "{}"))
    try:
        return {name: (str(value), int(stamp)) for name, (value, stamp) in notes.items()}
    except (AttributeError, TypeError, ValueError):
        raise BadField("notes", "not an object of [text, counter] pairs") from None


def _stamps(notes: _Stamped) -> str:
    return json.dumps(notes) if notes else ""


def _stamp(stored: Fields, before: Lease, after: Lease, counter: int) -> str:
    """The notes of one object with those that this write changes."""
    changed = {name: (text, counter) for name, text in after.notes if before.note(name) != text}
    return _stamps({**_stamped(stored), **changed})


def _noted(parts: Parts) -> Notes:
    """All notes of a lease; on equal stamps the notes object has the later word, the birth the earliest."""
    latest: _Stamped = {}
    for part in ("checkpoint", "ownership", "notes"):
        for name, note in _stamped(parts.fields(part)).items():
            if note[1] >= latest.get(name, note)[1]:
                latest[name] = note
    return tuple(sorted((name, text) for name, (text, _) in latest.items()))
