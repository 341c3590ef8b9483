"""Converts a lease to three objects in our own layout, which suits any source, and back.

The objects are `<prefix>/ownership/<key>`, `<prefix>/checkpoint/<key>` and `<prefix>/notes/<key>`. A lease exists while
its checkpoint object exists. The checkpoint is written first and also contains the fields that never change (parents,
hash range). A late checkpoint or an annotation does not change the ownership object's ETag, so the owner's next renewal
still succeeds. Every ownership object contains a counter that each write increments, because an ETag in S3 is a digest
of the content. Without the counter, a renewal would not change the ETag.
"""

from typing import ClassVar
from urllib.parse import quote, unquote

from attrs import frozen

from leasehold.balancer.model import Lease
from leasehold.stores.fields import (
    FIELDS,
    BadRowField,
    check_cell,
    check_text,
    convert_to_kilobytes,
    lease_from_cells,
    lease_to_cells,
    parse_weight,
    parse_whole_number,
)
from leasehold.stores.protocol import Capabilities
from leasehold.stores.requests import (
    ObjectFields,
    Part,
    Parts,
    StampedAnnotations,
    decode_annotations,
    decode_owner_fields,
    decode_percent,
    encode_annotations,
    encode_cell,
    encode_owner_fields,
    encode_percent,
)

_NAMES = {field.name: field.object for field in FIELDS}
_OWNERSHIP_FIELDS = frozenset({"owner", "epoch", "next_owner", "yields", "annotations"})
_CHECKPOINT_FIELDS = tuple(field for field in FIELDS if field.object and field.name not in _OWNERSHIP_FIELDS)
"""The fields of a checkpoint object, except for the annotations with which the lease was created."""


@frozen
class ObjectLayout:
    """The layout of the objects below the prefix `folder`.

    If the prefix is empty, the objects are at the top level of the container or bucket.
    """

    folder: str = ""

    capabilities: ClassVar[Capabilities] = Capabilities(owner_checked_checkpoint=False)
    """A checkpoint cannot check the owner, because checkpoint and ownership are two objects."""
    parts: ClassVar[tuple[Part, ...]] = ("ownership", "checkpoint", "notes")
    owned_before_checkpoint: ClassVar[bool] = False
    """A lease without its checkpoint object does not exist."""

    def prefix(self, part: Part) -> str:
        """Return the folder of this kind of object."""
        return f"{self.folder.strip('/')}/{part}/".lstrip("/")

    def name(self, key: str, part: Part) -> str:
        """Return the name of an object, with the key encoded as a single path segment."""
        return self.prefix(part) + quote(key, safe=":")

    def key(self, name: str, part: Part) -> str | None:
        """Return the key of the lease from the name of an object, or None if this layout does not use such names."""
        try:
            key = check_text("name", unquote(name.removeprefix(self.prefix(part))))
        except BadRowField:
            return None
        return key if key and self.name(key, part) == name else None

    def lease(self, key: str, parts: Parts) -> Lease | None:
        """Parse the objects of a lease. Return None if there is no checkpoint object."""
        if parts.checkpoint is None:
            return None
        checkpoint_fields = parts.checkpoint.fields
        values = {
            field.name: check_cell(
                field,
                field.object,
                decode_percent(checkpoint_fields, field.object)
                if field.kind == "text"
                else checkpoint_fields.get(field.object),
            )
            for field in _CHECKPOINT_FIELDS
        }
        ownership_fields = parts.fields("ownership")
        if "weight" in ownership_fields:  # the owner has measured the weight after the lease was created
            values["weight"] = parse_weight("weight", ownership_fields["weight"])
        # If several objects contain an annotation, use the value with the highest counter. If the counters are equal,
        # use the value of the object that comes later in this tuple.
        latest_annotations: StampedAnnotations = {}
        for part in ("checkpoint", "ownership", "notes"):
            for name, stamped_value in decode_annotations(parts.fields(part)).items():
                if stamped_value[1] >= latest_annotations.get(name, stamped_value)[1]:
                    latest_annotations[name] = stamped_value
        annotations = tuple(sorted((name, text) for name, (text, _) in latest_annotations.items()))
        counter = parse_whole_number("counter", ownership_fields.get("counter", "0"))
        return decode_owner_fields(
            lease_from_cells({"key": key, **values}, _NAMES, epoch=counter, annotations=annotations),
            parts,
            decode_percent,
        )

    def ownership(self, stored_fields: ObjectFields, old_lease: Lease, new_lease: Lease) -> ObjectFields:
        """Return the new ownership object, with its incremented counter and the annotations that this write changes."""
        counter = max(parse_whole_number("counter", stored_fields.get("counter", "0")) + 1, new_lease.epoch)
        our_fields = {
            **encode_owner_fields(old_lease, new_lease, lambda _field, value: encode_percent(value)),
            "counter": str(counter),
            "weight": "" if new_lease.weight is None else repr(convert_to_kilobytes(new_lease.weight)),
            "notes": _stamped_annotations(stored_fields, old_lease, new_lease, counter),
        }
        return {name: value for name, value in {**stored_fields, **our_fields}.items() if value}

    def checkpoint(self, stored_fields: ObjectFields, new_lease: Lease) -> ObjectFields:
        """Return the new checkpoint object, with the lease's constant fields and its initial annotations."""
        values = lease_to_cells(new_lease) | {
            "sub": new_lease.checkpoint.sub or "",
            "shard": new_lease.shard if new_lease.shard != new_lease.key else "",
        }
        our_fields = {field.object: encode_cell(field.kind, values[field.name]) for field in _CHECKPOINT_FIELDS}
        initial_annotations = {name: (text, 0) for name, text in new_lease.annotations}
        our_fields["notes"] = (
            stored_fields.get("notes", "") if stored_fields else encode_annotations(initial_annotations)
        )
        return {name: value for name, value in {**stored_fields, **our_fields}.items() if value}

    def annotations(self, stored_fields: ObjectFields, old_lease: Lease, new_lease: Lease) -> ObjectFields:
        """Return the new fields of the notes object. Changes are stamped with the ownership's counter."""
        return {**stored_fields, "notes": _stamped_annotations(stored_fields, old_lease, new_lease, new_lease.epoch)}


def _stamped_annotations(stored_fields: ObjectFields, old_lease: Lease, new_lease: Lease, counter: int) -> str:
    """Return the annotations of one object, updated with those that this write changes."""
    changed_annotations = {
        name: (text, counter) for name, text in new_lease.annotations if old_lease.annotation(name) != text
    }
    return encode_annotations({**decode_annotations(stored_fields), **changed_annotations})
