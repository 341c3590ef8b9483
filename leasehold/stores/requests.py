"""Small objects under ETags: the operations that a service of blobs must offer to hold leases, and its probe.

Rule 1: an ETag here is bare; services list it bare and answer it quoted. Rule 2: a refused write
is None, never an exception. Rule 3: a write is sent once; if its reply is lost it raises
`OutcomeUnknown`, for a silent second try would be refused by its own first.

Every store that is opened for writing asks once whether its service keeps these conditions. Each opening writes an
object of its own and removes it again, so that any number may ask at once. It lies in a folder beside those of the
leases, where no layout and no official worker looks.

The parts of one lease stand here, too: the objects that it is made of, and the fields of the ownership that both
layouts have. Texts, values and notes are spelled in printable ASCII alone, in objects and in rows of layout `sessions`.
"""

import json
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from threading import Lock
from typing import Any, Literal, Protocol
from urllib.parse import quote, unquote
from uuid import uuid4

from attrs import evolve, frozen

from leasehold.balancer.model import Lease, Version
from leasehold.errors import StoreError
from leasehold.stores.fields import BadRowField, CellKind, from_json, text, whole
from leasehold.stores.printable import escaped

ObjectFields = Mapping[str, str]
"""The content of an object: names in lower case, values in ASCII."""

PAGE_LEASES = 1000
"""Leases of a page of layout `sessions` where a row's size has no limit that matters."""

SKEW_SECONDS = 60.0
"""A local clock further off than this from the service's is worth a warning."""

log = escaped(logging.getLogger("leasehold.objects"))


@frozen
class Stored:
    """An object as a reading showed it.

    etag   bare, compared for equality only
    age    seconds since it was last written, both ends by the service's own clock, less the
           second to which the service rounds; never below 0
    """

    name: str
    etag: str
    fields: ObjectFields
    age: float = 0.0


class Objects(Protocol):
    """A container or bucket. Every method raises `OutcomeUnknown` if the service cannot be reached."""

    def list(self, prefix: str) -> tuple[Stored, ...]:
        """Every object whose name begins with this, on however many pages; strongly consistent."""

    def get(self, name: str) -> Stored | None:
        """The object of this name, by a consistent reading; None if it is not there."""

    def put_new(self, name: str, fields: ObjectFields) -> str | None:
        """Write it if the name is free (If-None-Match: *); its ETag, or None if refused."""

    def put_over(self, name: str, fields: ObjectFields, etag: str) -> str | None:
        """Replace it if it is still this one (If-Match); its new ETag, or None if refused."""

    def delete(self, name: str, etag: str) -> bool:
        """Remove it if it is still this one; False if refused, True also if it was gone."""

    def close(self) -> None:
        """Close all connections."""


def bare(etag: str) -> str:
    """The ETag without its quotes."""
    return etag.strip('"')


def age(service_now: float, last_modified: float) -> float:
    """Seconds since an object was written, both by the service's clock, less its rounding of 1 s."""
    return max(0.0, service_now - last_modified - 1.0)


def unanswered(status: int) -> bool:
    """Whether this HTTP status is no usable answer: busy, or a failure of the service's own."""
    return status < 400 or status >= 500 or status in {408, 429}  # noqa: PLR2004  HTTP's classes of answers


class SkewWarning:
    """Says once, with the measured seconds, that the local clock is far off the service's.

    Nothing here depends on the local clock: ages come from the service's own. What may depend
    on it is everything else on this machine, and peers that judge expiry by theirs.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = Lock()
        self._said = False

    def saw(self, service_now: float) -> None:
        """Compare with the service's clock (seconds since 1970), as in its Date header."""
        skew = self._clock() - service_now
        with self._lock:
            far = abs(skew) > SKEW_SECONDS and not self._said
            self._said = self._said or far
        if far:
            log.warning(
                "the local clock is %.0f s %s the storage service's; leases are judged by the service's clock",
                abs(skew),
                "ahead of" if skew > 0 else "behind",
            )


Part = Literal["ownership", "checkpoint", "notes"]
"""The kinds of objects of a lease; the first may be missing where nobody has owned it yet."""


@frozen
class Parts:
    """The objects of one lease, as far as they exist."""

    ownership: Stored | None = None
    checkpoint: Stored | None = None
    notes: Stored | None = None

    @property
    def etag(self) -> str:
        """The ownership's ETag; empty where the lease never had an owner."""
        return self.ownership.etag if self.ownership else ""

    @property
    def existing(self) -> tuple[Stored, ...]:
        """The objects that exist, the ownership first."""
        return tuple(one for one in (self.ownership, self.checkpoint, self.notes) if one)

    def part(self, part: Part) -> Stored | None:
        """The object of this part, if it exists."""
        stored: Stored | None = getattr(self, part)
        return stored

    def fields(self, part: Part) -> ObjectFields:
        """The fields of the object of this part; none where it does not exist."""
        stored = self.part(part)
        return stored.fields if stored else {}

    def having(self, part: Part, stored: Stored | None) -> "Parts":
        """The same objects, but `stored` as this part."""
        return evolve(self, **{part: stored})


def owner_fields(before: Lease, after: Lease, spelled: Callable[[str, str], str]) -> ObjectFields:
    """The fields of an ownership that both layouts have; blank ones are not to be stored.

    A request for the lease, or its withdrawal, keeps the version from before. Its owner did not write it: a
    new version would make watchers take a dead owner for alive, and the store would refuse the owner's own next write.
    """
    owner = spelled("owner", after.owner or "")
    kept = before.version if before.next_owner != after.next_owner and before.epoch == after.epoch else ""
    return {
        "ownerid": owner,
        "handoffowner": owner if after.yields else "",
        "handoffto": spelled("heir", after.next_owner or ""),
        "handoffversion": kept,
    }


def owned(lease: Lease, parts: Parts, said: Callable[[ObjectFields, str], str]) -> Lease:
    """The lease with what its ownership says in the fields that both layouts have."""
    fields = parts.fields("ownership")
    owner = said(fields, "ownerid") or None
    # A worker that answers no requests may keep our fields when it renews, without knowing them: void then.
    yields = owner is not None and said(fields, "handoffowner") == owner
    return evolve(
        lease,
        owner=owner,
        version=Version((fields.get("handoffversion") if yields else None) or parts.etag),
        idle=parts.ownership.age if parts.ownership else 0.0,
        next_owner=(said(fields, "handoffto") or None) if yields else None,
        yields=yields,
    )


FOLDER = "probe/"


def prove(objects: Objects, above: str) -> None:
    """Return if the service keeps all conditions that leases rest on; `above` is their folder, with its slash.

    Raises StoreError if it does not, OutcomeUnknown if it cannot be reached.
    """
    name = f"{above}{FOLDER}{uuid4().hex}"
    try:
        broken = _broken(objects, name)
    except StoreError:
        _clear(objects, name)
        raise
    if broken:
        _clear(objects, name)
        raise StoreError(
            f"the service {broken}, so two workers could own one lease; "
            "leases need a service with conditional writes and deletions"
        )


def _broken(objects: Objects, name: str) -> str | None:
    """The condition that the service does not keep, or None; after None the object is gone."""
    first = objects.put_new(name, {"probe": "1"})
    if first is None:
        return "refuses a new object under If-None-Match: *"
    if objects.put_new(name, {"probe": "2"}) is not None:
        return "ignores If-None-Match: * on a write"
    second = objects.put_over(name, {"probe": "3"}, first)
    if second is None or second == first:
        return "refuses a write whose If-Match holds" if second is None else "gives new content an old ETag"
    if objects.put_over(name, {"probe": "4"}, first) is not None:
        return "ignores If-Match on a write"
    if objects.delete(name, first):
        return "ignores If-Match on a deletion"
    return None if objects.delete(name, second) else "refuses a deletion whose If-Match holds"


def _clear(objects: Objects, name: str) -> None:
    with suppress(StoreError):  # the fault of the service has been found already
        left = objects.get(name)
        if left:
            objects.delete(name, left.etag)


_PRINTABLE = "!#$&'()*+,/:;<=>?@[]^`{|}"

StampedNotes = dict[str, tuple[str, int]]
"""Notes by name, each with the ownership's counter when it was written; the later word wins."""


def said(word: str) -> str:
    """Readable, and safe in a header: all but printable ASCII percent-encoded."""
    return quote(word, safe=_PRINTABLE)


def heard(fields: ObjectFields, name: str) -> str:
    """The reverse; nothing where it is not said."""
    try:
        return text(name, unquote(fields.get(name, ""), errors="strict"))
    except UnicodeDecodeError:
        raise BadRowField(name, "it is not UTF-8") from None


def spelled(kind: CellKind, cell: Any) -> str:  # noqa: ANN401  by kind
    """The cell as text, "" for one that is to be left out."""
    if cell in (None, "", []):
        return ""
    return said(cell) if kind == "text" else json.dumps(cell) if kind == "names" else str(cell)


def stamped(fields: ObjectFields) -> StampedNotes:
    """The notes of one object."""
    found, stamped = from_json("notes", fields.get("notes", "{}")), {}
    for name, pair in found.items() if isinstance(found, dict) else [("", None)]:
        match pair:
            case [str(value), int(stamp)]:
                stamped[text("notes", name)] = text("notes", value), whole("notes", stamp)
            case _:
                raise BadRowField("notes", "not an object of [text, counter] pairs")
    return stamped


def stamps(notes: StampedNotes) -> str:
    """The reverse, "" for none."""
    return json.dumps(notes) if notes else ""
