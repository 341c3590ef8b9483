"""Encodes and parses the rows of layout `sessions`, and joins them into leases.

The row of a lease contains its owner, and its checkpoint at the time when this owner took the lease. The session row of
the owner shows that the owner is alive, and contains the current checkpoint of each of its leases. A third row, the
session's remarks, contains annotations and throughput. No decision depends on the remarks. They are in a separate row
because otherwise every group write would be longer.

1. An entry of a session counts for a lease only if it has the epoch of the lease's row (G6).
2. If the owner of a lease was stopped, the lease has no owner (G4). Its version no longer changes, and its checkpoint
   is the later one of the checkpoints in its row and its entry.
3. The version of a lease is its epoch. Once the owner has accepted the lease, the count of the session's group writes
   is appended.
"""

import json
from collections.abc import Mapping
from typing import Any, TypeVar
from urllib.parse import quote, unquote

from attrs import Factory, evolve, field, frozen

from leasehold.balancer.model import Annotations, Lease, Position, Version
from leasehold.errors import StoreError
from leasehold.stores.fields import (
    FIELDS,
    BadRowField,
    check_cell,
    check_text,
    lease_from_cells,
    lease_to_cells,
    parse_json_field,
    parse_position,
    parse_row,
    parse_weight,
    parse_whole_number,
)
from leasehold.stores.protocol import Malformed
from leasehold.stores.requests import (
    ObjectFields,
    StampedAnnotations,
    StoredObject,
    decode_annotations,
    decode_percent,
    encode_annotations,
    encode_cell,
    encode_percent,
)

LEASES, SESSIONS, REMARKS = "lease/", "session/", "told/"
"""The name prefixes of the three kinds of rows. In the key of a row, such a prefix follows the prefix of the table."""

_NAMES = {row_field.name: row_field.object for row_field in FIELDS}
_FIELDS = tuple(row_field for row_field in FIELDS if row_field.object and row_field.name != "annotations")
_PERCENT_ENCODED_KINDS = frozenset({"text", "worker"})


NOT_STORED = StoredObject("", "", {})
"""The value of the attribute `stored` of a `LeaseRow` or `Session` that has not been written yet."""


@frozen
class SessionEntry:
    """The entry of a session for one lease.

    Attributes:
        epoch: The epoch of the lease's row when the owner accepted the lease.
        position: The checkpoint.
        frozen: "" unless the owner was stopped. If it was stopped, "held" if it had accepted the lease before, and
            "given" if it had not.
    """

    epoch: int
    position: Position
    frozen: str = ""


@frozen
class LeaseRow:
    """The row of a lease.

    Attributes:
        lease: The lease as it was at its last change of owner, without version and idle time.
        stamps: The stamps of the annotations. If the row and the remark have different values, the one with the higher
            stamp is used.
        session: The session of the lease's owner, or "" if the lease has no owner or its owner has no session.
        next_owners: The session of the next owner, or "".
        writes: The number of times that the row has been written. Because of this number, no two versions of the row
            have the same content.
        stored: The row as stored.
    """

    lease: Lease
    stamps: Mapping[str, int] = Factory(dict)
    session: str = ""
    next_owners: str = ""
    writes: int = 0
    stored: StoredObject = field(default=NOT_STORED, eq=False)


@frozen
class Session:
    """A session of a worker process. A process with many leases has several sessions, called pages.

    Attributes:
        worker: The worker.
        count: The number of group writes by the session's owner. It does not change when another worker stops the
            session.
        ended: Whether the session has ended. A session that has ended never changes again.
        entries: The entries by lease.
        touched: The leases whose rows another worker has changed. The session's owner should read these rows again.
        stored: The row as stored.
    """

    worker: str
    count: int = 0
    ended: bool = False
    entries: Mapping[str, SessionEntry] = Factory(dict)
    touched: frozenset[str] = frozenset()
    stored: StoredObject = field(default=NOT_STORED, eq=False)

    def entry(self, row: LeaseRow) -> SessionEntry | None:
        """Return the session's entry for this lease, if it has the epoch of the row (G6)."""
        entry = self.entries.get(row.lease.key)
        return entry if entry is not None and entry.epoch == row.lease.epoch else None


@frozen
class Remark:
    """The annotations and the throughput that the owner of a lease has written during the epoch `epoch`."""

    epoch: int
    annotations: StampedAnnotations = Factory(dict)
    weight: int | None = None


Remarks = Mapping[str, Remark]


def encode_lease_row(row: LeaseRow) -> ObjectFields:
    """Encode the row of a lease. Stored fields that we do not understand are preserved."""
    lease = row.lease
    values = lease_to_cells(lease) | {
        "shard": lease.shard if lease.shard != lease.key else "",
        "sub": lease.checkpoint.sub or "",
    }
    our_fields = {field.object: _encode_cell(field.kind, values[field.name]) for field in _FIELDS} | {
        "notes": encode_annotations({name: (value, row.stamps.get(name, 0)) for name, value in lease.annotations}),
        "session": row.session,
        "heirsession": row.next_owners,
        "writes": str(row.writes),
    }
    return {name: encoded_value for name, encoded_value in {**row.stored.fields, **our_fields}.items() if encoded_value}


def _encode_cell(kind: str, cell: object) -> str:
    if isinstance(cell, bool):
        return "1" if cell else ""
    return encode_percent(str(cell)) if kind == "worker" and cell else encode_cell(kind, cell)  # type: ignore[arg-type]


def parse_lease_row(key: str, stored_row: StoredObject) -> LeaseRow | Malformed:
    """Parse the row of a lease."""
    return parse_row(key, lambda: _parse_valid_lease_row(key, stored_row))


def _parse_valid_lease_row(key: str, stored_row: StoredObject) -> LeaseRow:
    fields = stored_row.fields
    values = {
        field.name: check_cell(
            field,
            field.object,
            (
                decode_percent(fields, field.object)
                if field.kind in _PERCENT_ENCODED_KINDS
                else fields.get(field.object)
            ),
        )
        for field in _FIELDS
    }
    stamped_annotations = decode_annotations(fields)
    annotations = tuple(sorted((name, value) for name, (value, _) in stamped_annotations.items()))
    lease = lease_from_cells({"key": key, **values}, _NAMES, annotations=annotations)
    return LeaseRow(
        lease,
        {name: stamp for name, (_, stamp) in stamped_annotations.items()},
        fields.get("session", ""),
        fields.get("heirsession", ""),
        parse_whole_number("writes", fields.get("writes", "0")),
        stored_row,
    )


def encode_session(session: Session) -> ObjectFields:
    """Encode the row of a session. Entries are short, because every group write contains all of them."""
    entries = {key: _encode_entry(entry) for key, entry in session.entries.items()}
    our_fields = {
        "worker": encode_percent(session.worker),
        "count": str(session.count),
        "state": "ended" if session.ended else "living",
        "leases": json.dumps(entries, separators=(",", ":")),
        "touched": json.dumps(sorted(session.touched)) if session.touched else "",
    }
    return {name: value for name, value in {**session.stored.fields, **our_fields}.items() if value}


def _encode_entry(entry: SessionEntry) -> list[object]:
    position = entry.position
    items: list[object] = [entry.epoch, position.sequence, position.sub, position.token, entry.frozen]
    while items[-1] in ("", 0) and len(items) > 2:  # noqa: PLR2004  epoch and position
        items.pop()
    return items


def parse_session(stored_row: StoredObject) -> Session | Malformed:
    """Parse the row of a session."""
    return parse_row(stored_row.name, lambda: _parse_valid_session(stored_row))


def _parse_valid_session(stored_row: StoredObject) -> Session:
    fields = stored_row.fields
    if fields.get("state") not in {"living", "ended"}:
        raise BadRowField("state", "is neither living nor ended")
    entries = parse_json_field("leases", fields.get("leases", "{}"))
    if not isinstance(entries, dict):
        raise BadRowField("leases", "is not an object of entries")
    touched_keys = parse_json_field("touched", fields.get("touched", "[]"))
    return Session(
        decode_percent(fields, "worker"),
        parse_whole_number("count", fields.get("count", "0")),
        fields["state"] == "ended",
        {key: _parse_entry(items) for key, items in entries.items()},
        frozenset(map(str, touched_keys if isinstance(touched_keys, list) else [])),
        stored_row,
    )


def _parse_entry(items: Any) -> SessionEntry:  # noqa: ANN401  the row may contain anything
    match items:
        case [int(epoch), str(sequence), *optional_items] if len(optional_items) <= 3:  # noqa: PLR2004  sub, token, frozen
            sub, token, frozen = optional_items + [0, "", ""][len(optional_items) :]
            checkpoint = parse_position(
                "leases", sequence, parse_whole_number("leases", sub), check_text("leases", token)
            )
            return SessionEntry(epoch, checkpoint, check_text("leases", frozen))
        case _:
            raise BadRowField("leases", "has an entry that is not [epoch, position, …]")


def encode_remarks(remarks: Remarks) -> ObjectFields:
    """Encode the row of a session's remarks."""
    rows = {key: [remark.epoch, remark.weight, remark.annotations] for key, remark in remarks.items()}
    return {"told": json.dumps(rows, separators=(",", ":"))}


def parse_remarks(stored_row: StoredObject | None) -> Remarks:
    """Parse the row of a session's remarks.

    If the row is invalid, return no remarks, because no decision depends on them.
    """
    remarks: dict[str, Remark] = {}
    try:
        rows = parse_json_field("told", stored_row.fields.get("told", "{}")) if stored_row else {}
        for key, (epoch, weight, annotations) in rows.items():
            stamps = {
                check_text("told", name): (check_text("told", value), parse_whole_number("told", stamp))
                for name, (value, stamp) in annotations.items()
            }
            remarks[key] = Remark(
                parse_whole_number("told", epoch), stamps, parse_weight("told", weight) and int(weight)
            )
    except (BadRowField, AttributeError, TypeError, ValueError):
        return {}
    return remarks


T = TypeVar("T")


def require_valid_row(row: T | Malformed) -> T:
    """Return the row, or raise StoreError if it cannot be parsed. No decision may be based on a malformed row."""
    if isinstance(row, Malformed):
        raise StoreError(f"row {row.key}: {row.field}: {row.why}; correct the row, or delete it")
    return row


@frozen
class JoinedLease:
    """A lease joined from its row and the session of its owner.

    Attributes:
        lease: The lease as the store returns it.
        row: The row of the lease.
        session: The session of its owner, or None if there is no owner or the session no longer exists.
        named: The lease with the owner that is named in the row, even if this owner was stopped.
        stamps: The stamps of the lease's annotations.
    """

    lease: Lease
    row: LeaseRow
    session: Session | None
    named: Lease
    stamps: Mapping[str, int]

    @property
    def entry(self) -> SessionEntry | None:
        """The session's entry for the lease, if it has the epoch of the row."""
        return self.session.entry(self.row) if self.session else None

    @property
    def stopped(self) -> bool:
        """Whether the owner's writes have no effect on the lease any more.

        The owner was stopped if it has no session, if its session has ended, or if the session's entry for the lease is
        frozen.
        """
        entry = self.entry
        return self.session is None or self.session.ended or (entry is not None and entry.frozen != "")

    @property
    def accepted(self) -> bool:
        """Whether the owner has accepted the lease in its session."""
        entry = self.entry
        return entry is not None and entry.frozen != "given"


def join_lease(row: LeaseRow, session: Session | None, remarks: Remarks) -> JoinedLease:
    """Join the row of a lease with the session of its owner and that session's remarks.

    If the session was not found, the joined lease keeps the owner that is named in its row. Other workers must then
    wait until the lease expires. There are two reasons why they must not claim it earlier: the two rows may have been
    read at different moments, and an owner whose session row was deleted may still write its positions (G14).
    """
    entry = session.entry(row) if session else None
    lease, epoch = row.lease, row.lease.epoch
    checkpoint = entry.position if entry and entry.position.order >= lease.checkpoint.order else lease.checkpoint
    annotations: StampedAnnotations = {name: (value, row.stamps.get(name, 0)) for name, value in lease.annotations}
    remark, weight = remarks.get(lease.key), lease.weight
    if remark is not None and remark.epoch == epoch and row.session:
        annotations |= {
            name: stamped_value
            for name, stamped_value in remark.annotations.items()
            if name not in annotations or stamped_value[1] > annotations[name][1]
        }
        weight = remark.weight if remark.weight is not None else weight
    is_accepted = entry is not None and entry.frozen != "given"
    version = f"{epoch}.{session.count}" if is_accepted and session else str(epoch)
    ages = [row.stored.age, *([session.stored.age] if session and is_accepted else [])]
    named_lease = evolve(
        lease,
        checkpoint=checkpoint,
        weight=weight,
        version=Version(version),
        idle=min(ages),
        annotations=tuple(sorted((name, value) for name, (value, _) in annotations.items())),
    )
    stamp_by_name = {name: stamp for name, (_, stamp) in annotations.items()}
    joined_lease = JoinedLease(named_lease, row, session, named_lease, stamp_by_name)
    if not row.session or session is None or not joined_lease.stopped:
        return joined_lease
    return evolve(joined_lease, lease=evolve(named_lease, owner=None, next_owner=None, yields=False))


def increment_stamps(joined_lease: JoinedLease, new_annotations: Annotations) -> dict[str, int]:
    """Return the stamps of these annotations. If the value of an annotation has changed, its stamp is incremented."""
    return {
        name: joined_lease.stamps.get(name, 0)
        + (joined_lease.named.annotation(name) != value and name in joined_lease.stamps)
        for name, value in new_annotations
    }


def lease_row_name(key: str) -> str:
    """Return the name of a lease's row, with the key encoded as a single path segment."""
    return LEASES + quote(key, safe=":")


def lease_key(name: str) -> str | None:
    """Return the key of the lease from the name of its row, or None if no lease has such a row."""
    try:
        key = check_text("name", unquote(name.removeprefix(LEASES)))
    except BadRowField:
        return None
    return key if key and lease_row_name(key) == name else None


def split_version(version: str) -> tuple[int, int]:
    """Split a version into epoch and count. Each of them is -1 if it is missing."""
    epoch, _, count = version.partition(".")
    return (int(epoch) if epoch.isdigit() else -1), (int(count) if count.isdigit() else -1)
