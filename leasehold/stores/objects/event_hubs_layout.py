"""Converts a lease to the blobs that the event processors of the Azure SDKs use, and back.

`<namespace>/<hub>/<group>/ownership/<partition>` contains `ownerid`. If `ownerid` is missing or empty, the lease has no
owner. `<namespace>/<hub>/<group>/checkpoint/<partition>` contains `offset` and `sequencenumber`. All names are in lower
case, and the data is in the metadata of empty blobs.

Fields that the SDKs do not know are stored as additional metadata (`handoffowner`, `handoffto`, `handoffversion`,
`throughputkbps`, `notes`, `position`, `had`). When a worker of an SDK writes a blob, it omits the additional metadata,
which is then lost.
"""

import json
from typing import ClassVar

from attrs import frozen

from leasehold.balancer.model import LATEST, TRIM_HORIZON, Lease, Position
from leasehold.errors import StoreError
from leasehold.stores.fields import (
    BadRowField,
    check_text,
    convert_to_kilobytes,
    parse_annotations,
    parse_position,
    parse_weight,
    parse_whole_number,
    shortened_repr,
)
from leasehold.stores.protocol import Capabilities
from leasehold.stores.requests import ObjectFields, Part, Parts, decode_owner_fields, encode_owner_fields

BEGINNING_OFFSET = "-1"
"""The offset, and also the sequence number, that stands for the position before the first event of a partition."""

END_OF_STREAM = "@latest"
"""The offset of the end of a partition. Reading starts with the next event that arrives."""

NO_OFFSET = frozenset({"", "no offset"})
"""The values that some SDKs write if they do not know the offset."""
DEDUPLICATION_FIELD, DEDUPLICATION_LENGTH_MAX = "had", 6000
"""The name of our own checkpoint field, and the maximum length of its value. The metadata of a blob is limited to 8
KiB."""


def qualified_namespace(namespace: str) -> str:
    """Return the fully qualified namespace, which the SDKs use in the names of their blobs."""
    return namespace if {".", ":"} & set(namespace) else f"{namespace}.servicebus.windows.net"


def stream_name(namespace: str, hub: str, group: str) -> str:
    """Return the name of the stream to which the leases of a consumer group belong.

    The name is also the path of the folder that contains the group's blobs.
    """
    return f"{namespace}/{hub}/{group}".lower()


@frozen
class EventHubLayout:
    """The blobs of one consumer group of an event hub. The key of a lease is the id of its partition.

    Attributes:
        namespace: The fully qualified namespace, with its port if it has one.
        hub: The event hub.
        group: The consumer group.
        start: The position at which to start a partition that has an owner but no checkpoint yet.
    """

    namespace: str
    hub: str
    group: str
    start: Position = TRIM_HORIZON

    capabilities: ClassVar[Capabilities] = Capabilities(
        owner_checked_checkpoint=False, free_annotations=False, counts_owners=False, ascii_owners=True
    )
    """A checkpoint cannot check the owner, because checkpoint and ownership are two blobs. An annotation changes the
    version, because it is stored in the ownership. Owners are not counted, because the workers of the Azure SDKs do not
    count them.
    """
    parts: ClassVar[tuple[Part, ...]] = ("ownership", "checkpoint")
    owned_before_checkpoint: ClassVar[bool] = True
    """The SDKs claim a partition long before they checkpoint it."""

    def prefix(self, part: Part) -> str:
        """Return the folder of this kind of blob, in lower case.

        The name of the folder ends with a slash, so that the name of a blob `ownership-old/0` does not match.
        """
        return f"{self._stream}/{part}/"

    def name(self, key: str, part: Part) -> str:
        """Return the name of a partition's blob. Raises StoreError if the key is not a partition."""
        if not _is_partition(key):
            raise StoreError(f"lease {key!r}: the Azure SDKs' layout can only store partitions (0, 1, …)")
        return self.prefix(part) + key

    def key(self, name: str, part: Part) -> str | None:
        """Return the partition from the name of a blob, or None if it is not the blob of a partition."""
        partition = name.removeprefix(self.prefix(part))
        return partition if _is_partition(partition) else None

    def lease(self, key: str, parts: Parts) -> Lease | None:
        """Parse the blobs of a lease.

        Either blob alone suffices for a lease. A lease without an ownership blob has no owner.
        """
        if not parts.existing:
            return None
        fields = parts.fields("ownership")
        lease = Lease(
            key,
            stream=self._stream,
            checkpoint=parse_checkpoint(parts.fields("checkpoint"), self.start),
            weight=parse_weight("throughputkbps", fields.get("throughputkbps")),
            annotations=parse_annotations("notes", fields.get("notes") or "{}"),
        )
        return decode_owner_fields(lease, parts, lambda fields, name: check_text(name, fields.get(name, "")))

    def ownership(self, stored_fields: ObjectFields, old_lease: Lease, new_lease: Lease) -> ObjectFields:
        """Return the new metadata of the ownership.

        `ownerid` is always present, even if it is empty, because the Python SDK cannot list a blob without this field.
        """
        our_fields = {
            **encode_owner_fields(old_lease, new_lease, _check_ascii),
            "throughputkbps": "" if new_lease.weight is None else repr(convert_to_kilobytes(new_lease.weight)),
            "notes": json.dumps(dict(new_lease.annotations)) if new_lease.annotations else "",
        }
        return {name: value for name, value in {**stored_fields, **our_fields}.items() if value or name == "ownerid"}

    def checkpoint(self, stored_fields: ObjectFields, new_lease: Lease) -> ObjectFields:
        """Return the new metadata of the checkpoint. Raises StoreError if the layout cannot store the position.

        `offset` and `sequencenumber` are always present, because the SDKs cannot list a blob that lacks one of them.
        """
        other_fields, new_position = (
            {name: value for name, value in stored_fields.items() if name not in {"position", DEDUPLICATION_FIELD}},
            new_lease.checkpoint,
        )
        if new_position.numbered:
            # The token of a position is its offset, perhaps followed by data with which rows that our Spark sink has
            # repeated are detected. If a worker of an SDK writes the checkpoint, these data are lost, and repeated rows
            # are not detected.
            offset, _, written_rows = new_position.token.partition(" ")
            other_fields |= (
                {DEDUPLICATION_FIELD: _check_ascii(DEDUPLICATION_FIELD, written_rows)}
                if written_rows and len(written_rows) <= DEDUPLICATION_LENGTH_MAX
                else {}
            )
            if not offset or new_position.sub:
                raise StoreError(
                    f"checkpoint {new_position.sequence}: the Azure SDKs' layout needs an offset and no sub-sequence"
                )
            return {**other_fields, "offset": _check_ascii("offset", offset), "sequencenumber": new_position.sequence}
        if new_position == LATEST:
            return {**other_fields, "offset": END_OF_STREAM, "sequencenumber": BEGINNING_OFFSET}
        # The SDKs support neither sub-sequence numbers nor times. If a checkpoint has one, their workers start at the
        # beginning of the partition, so they repeat records but skip none.
        beginning_fields = {**other_fields, "offset": BEGINNING_OFFSET, "sequencenumber": BEGINNING_OFFSET}
        return (
            beginning_fields
            if new_position == TRIM_HORIZON
            else {**beginning_fields, "position": f"{new_position.sequence} {new_position.sub}"}
        )

    def annotations(self, stored_fields: ObjectFields, old_lease: Lease, new_lease: Lease) -> ObjectFields:
        """Return the new metadata of the ownership.

        `EtagStore` never calls this method for a layout without notes objects.
        """
        return self.ownership(stored_fields, old_lease, new_lease)

    @property
    def _stream(self) -> str:
        return stream_name(self.namespace, self.hub, self.group)


def _is_partition(key: str) -> bool:
    """Return whether this is the id of a partition, which is a number without leading zeros.

    `007` is not partition 7.
    """
    return key.isascii() and key.isdigit() and (key == "0" or key[0] != "0")


def _check_ascii(field: str, value: str) -> str:
    if not (value.isascii() and value.isprintable() and value == value.strip()):
        raise StoreError(f"{field}: {value!r} cannot be stored in a blob's metadata; use printable ASCII")
    return value


def parse_checkpoint(fields: ObjectFields, default_position: Position) -> Position:
    """Parse a checkpoint. The position is determined by the offset, if there is one.

    Some SDKs omit the offset or write a placeholder in its place. Other SDKs omit the sequence number or write a
    placeholder for it.
    """
    offset, sequence_number = fields.get("offset", ""), fields.get("sequencenumber", "")
    has_number = sequence_number not in ("", BEGINNING_OFFSET)
    if offset == BEGINNING_OFFSET:
        if "position" not in fields:
            return TRIM_HORIZON
        sequence, _, sub_sequence = fields["position"].partition(" ")
        return parse_position("position", sequence, parse_whole_number("position", sub_sequence))
    if offset == END_OF_STREAM:
        return LATEST
    if offset in NO_OFFSET:
        return _parse_sequence_number(sequence_number) if has_number else default_position
    # If there is no sequence number, reading can still start from the offset. Set the number to 0, so that a checkpoint
    # with any other number is later than this one.
    written_rows = fields.get(DEDUPLICATION_FIELD, "")
    return _parse_sequence_number(
        sequence_number if has_number else "0", f"{offset} {written_rows}" if written_rows else offset
    )


def _parse_sequence_number(sequence_number: str, offset: str = "") -> Position:
    if not (sequence_number.isascii() and sequence_number.isdigit()):
        raise BadRowField("sequencenumber", f"{shortened_repr(sequence_number)} is not a decimal sequence number")
    return parse_position("sequencenumber", sequence_number, 0, check_text("offset", offset))
