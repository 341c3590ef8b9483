"""Defines the operations that an object store must offer so that leases can be stored in it (`Objects`).

Every implementation of `Objects` follows three rules:

1. ETags are passed without quotes, although services return them with quotes except in listings.
2. A rejected write returns None and never raises.
3. A write is sent only once. If its response is lost, `OutcomeUnknown` is raised. A silent retry could be rejected just
   because the first attempt had succeeded.

When a store is opened for writing, it first checks that its service honors the conditions of writes
(`check_conditions_honored`). Each check writes and removes an object with a unique name, so any number of workers can
run the check at the same time. The object is in a separate folder, which no layout and no worker of another library
reads.

This module also contains the code that both object layouts share: the objects that make up a lease, and the common
fields of the ownership object. Objects and the rows of layout `sessions` contain only printable ASCII characters.
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
from leasehold.stores.fields import BadRowField, CellKind, check_text, parse_json_field, parse_whole_number
from leasehold.stores.printable import make_safe_logger

ObjectFields = Mapping[str, str]
"""The fields of an object, by name. The names are in lower case, and the values contain only ASCII characters."""

PAGE_LEASES = 1000
"""The maximum number of leases in a session row of layout `sessions`, for stores whose rows may be large."""

SKEW_SECONDS = 60.0
"""If the local clock and the service's clock differ by more than this many seconds, a warning is logged."""

log = make_safe_logger(logging.getLogger("leasehold.objects"))


@frozen
class StoredObject:
    """An object as it was read.

    Attributes:
        name: The name of the object.
        etag: The ETag of the object, without quotes. ETags can only be compared for equality.
        fields: The content of the object.
        age: The time since the last write of the object, in seconds by the service's clock. One second is subtracted,
            because services round to seconds. The age is never negative.
    """

    name: str
    etag: str
    fields: ObjectFields
    age: float = 0.0


class Objects(Protocol):
    """A container or bucket. Every method raises OutcomeUnknown if the service cannot be reached."""

    def list(self, prefix: str) -> tuple[StoredObject, ...]:
        """Return all objects whose names begin with `prefix`, from all pages. The listing is strongly consistent."""

    def get(self, name: str) -> StoredObject | None:
        """Return the object with this name from a consistent read, or None if it does not exist."""

    def put_if_absent(self, name: str, fields: ObjectFields) -> str | None:
        """Create an object if the name is free (If-None-Match: *).

        Returns:
            The ETag of the object, or None if the write was rejected.
        """

    def put_if_match(self, name: str, fields: ObjectFields, etag: str) -> str | None:
        """Replace an object if its ETag is still `etag` (If-Match).

        Returns:
            The new ETag of the object, or None if the write was rejected.
        """

    def delete(self, name: str, etag: str) -> bool:
        """Delete an object if its ETag is still `etag`.

        Returns:
            False if the deletion was rejected. True if the object no longer exists, even if it did not exist before.
        """

    def close(self) -> None:
        """Close all connections."""


def unquote_etag(etag: str) -> str:
    """Return the ETag without its quotes."""
    return etag.strip('"')


def object_age_seconds(service_now: float, last_modified: float) -> float:
    """Return the age of an object in seconds. One second is subtracted, because services round to seconds.

    Both arguments are times of the service's clock, in seconds since 1970.
    """
    return max(0.0, service_now - last_modified - 1.0)


def is_outcome_unknown(status: int) -> bool:
    """Return whether this HTTP status means that the service is busy or has failed, so the outcome is unknown."""
    return status < 400 or status >= 500 or status in {408, 429}  # noqa: PLR2004  HTTP's status classes


class SkewWarning:
    """Logs one warning if the local clock and the service's clock differ by more than `SKEW_SECONDS`.

    Leases do not depend on the local clock, because their ages are measured by the service's clock. However, other
    software on this machine may depend on the local clock, and so do workers that determine expiry by their own clocks.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = Lock()
        self._warned = False

    def observe(self, service_now: float) -> None:
        """Compare the local clock with the service's, as read from a Date header (seconds since 1970)."""
        skew = self._clock() - service_now
        with self._lock:
            must_warn = abs(skew) > SKEW_SECONDS and not self._warned
            self._warned = self._warned or must_warn
        if must_warn:
            log.warning(
                "the local clock is %.0f s %s the storage service's; leases are judged by the service's clock",
                abs(skew),
                "ahead of" if skew > 0 else "behind",
            )


Part = Literal["ownership", "checkpoint", "notes"]
"""The kinds of objects that make up a lease. A lease that never had an owner may have no ownership object."""


@frozen
class Parts:
    """The objects of one lease. An object that does not exist is None."""

    ownership: StoredObject | None = None
    checkpoint: StoredObject | None = None
    notes: StoredObject | None = None

    @property
    def etag(self) -> str:
        """The ETag of the ownership object, or "" if there is none."""
        return self.ownership.etag if self.ownership else ""

    @property
    def existing(self) -> tuple[StoredObject, ...]:
        """The objects that exist, with the ownership object first."""
        return tuple(stored_object for stored_object in (self.ownership, self.checkpoint, self.notes) if stored_object)

    def part(self, part: Part) -> StoredObject | None:
        """Return the lease's object of this kind, or None if it does not exist."""
        stored_object: StoredObject | None = getattr(self, part)
        return stored_object

    def fields(self, part: Part) -> ObjectFields:
        """Return the fields of the lease's object of this kind, or no fields if the object does not exist."""
        stored_object = self.part(part)
        return stored_object.fields if stored_object else {}

    def replace(self, part: Part, stored_object: StoredObject | None) -> "Parts":
        """Return a copy of these parts with one object replaced."""
        return evolve(self, **{part: stored_object})


def encode_owner_fields(old_lease: Lease, new_lease: Lease, encode: Callable[[str, str], str]) -> ObjectFields:
    """Return those fields of an ownership object that both layouts have. The caller must leave out empty fields.

    A request for a lease changes the ownership object, although the lease's owner has not renewed the lease. If the
    request looked like a renewal, other workers would mistake a dead owner for a living one, and the owner's next write
    would be rejected. Therefore, requests and their withdrawals store the previous version as `handoffversion`.

    Args:
        old_lease: The lease before the write.
        new_lease: The lease after the write.
        encode: Encodes the name of a worker. The first argument is the name of the field, for error messages.
    """
    owner = encode("owner", new_lease.owner or "")
    old_version = (
        old_lease.version if old_lease.next_owner != new_lease.next_owner and old_lease.epoch == new_lease.epoch else ""
    )
    return {
        "ownerid": owner,
        "handoffowner": owner if new_lease.yields else "",
        "handoffto": encode("heir", new_lease.next_owner or ""),
        "handoffversion": old_version,
    }


def decode_owner_fields(lease: Lease, parts: Parts, decode: Callable[[ObjectFields, str], str]) -> Lease:
    """Return the lease with the common fields of its ownership object, which `decode` decodes."""
    fields = parts.fields("ownership")
    owner = decode(fields, "ownerid") or None
    # A worker of another program may copy the fields of a request unchanged when it renews or takes the lease. Ignore
    # these fields if they name an owner other than the one in `ownerid`.
    yields = owner is not None and decode(fields, "handoffowner") == owner
    return evolve(
        lease,
        owner=owner,
        version=Version((fields.get("handoffversion") if yields else None) or parts.etag),
        idle=parts.ownership.age if parts.ownership else 0.0,
        next_owner=(decode(fields, "handoffto") or None) if yields else None,
        yields=yields,
    )


PROBE_FOLDER = "probe/"


def check_conditions_honored(objects: Objects, folder: str) -> None:
    """Check that the service honors all the conditions on which leases depend.

    Args:
        objects: The container or bucket.
        folder: The folder of the leases, with a final slash.

    Raises:
        StoreError: If the service does not honor one of these conditions.
        OutcomeUnknown: If the service cannot be reached.
    """
    name = f"{folder}{PROBE_FOLDER}{uuid4().hex}"
    try:
        violation = _find_unhonored_condition(objects, name)
    except StoreError:
        _delete_probe(objects, name)
        raise
    if violation:
        _delete_probe(objects, name)
        raise StoreError(
            f"the service {violation}, so two workers could own one lease; "
            "leases need a service with conditional writes and deletions"
        )


def _find_unhonored_condition(objects: Objects, name: str) -> str | None:
    """Return a description of the first condition that the service does not honor, or None if it honors all of them."""
    created_etag = objects.put_if_absent(name, {"probe": "1"})
    if created_etag is None:
        return "refuses a new object under If-None-Match: *"
    if objects.put_if_absent(name, {"probe": "2"}) is not None:
        return "ignores If-None-Match: * on a write"
    replaced_etag = objects.put_if_match(name, {"probe": "3"}, created_etag)
    if replaced_etag is None or replaced_etag == created_etag:
        return "refuses a write whose If-Match holds" if replaced_etag is None else "gives new content an old ETag"
    if objects.put_if_match(name, {"probe": "4"}, created_etag) is not None:
        return "ignores If-Match on a write"
    if objects.delete(name, created_etag):
        return "ignores If-Match on a deletion"
    return None if objects.delete(name, replaced_etag) else "refuses a deletion whose If-Match holds"


def _delete_probe(objects: Objects, name: str) -> None:
    with suppress(StoreError):  # the caller raises a more useful error
        probe = objects.get(name)
        if probe:
            objects.delete(name, probe.etag)


_UNENCODED_CHARACTERS = "!#$&'()*+,/:;<=>?@[]^`{|}"

StampedAnnotations = dict[str, tuple[str, int]]
"""Annotations by name, each with a value and a stamp.

The stamp is the counter of the ownership object at the last write of the annotation. If several objects contain an
annotation, the value with the highest stamp is used.
"""


def encode_percent(text: str) -> str:
    """Percent-encode a string for use in a header. Most printable ASCII characters stay readable."""
    return quote(text, safe=_UNENCODED_CHARACTERS)


def decode_percent(fields: ObjectFields, name: str) -> str:
    """Return the decoded value of this field, or "" if the field is missing. Raises BadRowField if it is not UTF-8."""
    try:
        return check_text(name, unquote(fields.get(name, ""), errors="strict"))
    except UnicodeDecodeError:
        raise BadRowField(name, "it is not UTF-8") from None


def encode_cell(kind: CellKind, value: Any) -> str:  # noqa: ANN401  by kind
    """Encode a value of this kind as a string, which is "" if the value need not be stored."""
    if value in (None, "", []):
        return ""
    return encode_percent(value) if kind == "text" else json.dumps(value) if kind == "names" else str(value)


def decode_annotations(fields: ObjectFields) -> StampedAnnotations:
    """Parse the annotations of one object."""
    pairs, annotations = parse_json_field("notes", fields.get("notes", "{}")), {}
    for name, pair in pairs.items() if isinstance(pairs, dict) else [("", None)]:
        match pair:
            case [str(value), int(stamp)]:
                annotations[check_text("notes", name)] = check_text("notes", value), parse_whole_number("notes", stamp)
            case _:
                raise BadRowField("notes", "not an object of [text, counter] pairs")
    return annotations


def encode_annotations(annotations: StampedAnnotations) -> str:
    """Encode annotations as JSON, or as "" if there are none."""
    return json.dumps(annotations) if annotations else ""
