"""The rows of layout `sessions` as values, their fields, and the one lease that they make together.

A lease's row names its owner and where it stood when it came to that owner. The owner's session row tells that it
lives, and how far each of its leases has come since. A third row of the session holds what no decision rests on: notes
and throughput, which would make each group write longer.

Rule 1: an entry counts for the lease only under the epoch of the lease's row (G6). Rule 2: the lease of an owner that
was stopped is nobody's (G4): its version stands still, and its checkpoint is the later of row and entry. Rule 3: a
version is the epoch, and behind it the count of the session's group writes once the owner has accepted the lease.
"""

import json
from collections.abc import Mapping
from typing import Any, TypeVar
from urllib.parse import quote, unquote

from attrs import Factory, evolve, field, frozen

from leasehold.balancer.model import Lease, Notes, Position, Version
from leasehold.errors import StoreError
from leasehold.stores.fields import (
    FIELDS,
    BadRowField,
    cells,
    checked,
    from_json,
    lease_of,
    position,
    readable,
    text,
    weight,
    whole,
)
from leasehold.stores.protocol import Malformed
from leasehold.stores.requests import ObjectFields, StampedNotes, Stored, heard, said, spelled, stamped, stamps

LEASES, SESSIONS, TOLD = "lease/", "session/", "told/"
"""The prefixes of the three kinds of rows, below the table's own."""

_NAMES = {each.name: each.object for each in FIELDS}
_FIELDS = tuple(each for each in FIELDS if each.object and each.name != "notes")
_WORDS = frozenset({"text", "worker"})


NOWHERE = Stored("", "", {})
"""The row of what is not stored yet."""


@frozen
class SessionEntry:
    """The entry of a session for one lease.

    epoch     of the lease's row when its owner accepted it
    position  up to which its records are done
    frozen    the owner was stopped: "held" once it had accepted the lease, "given" before that
    """

    epoch: int
    position: Position
    frozen: str = ""


@frozen
class LeaseRow:
    """A lease's row.

    lease   as of its last change of owner; without version and idle time
    stamps  of its notes: of two that say a note, the later stamp is believed
    session of its owner, "" where nobody owns it, or a stranger
    heirs   the session of the heir
    writes  one more with each, so that no content comes twice
    """

    lease: Lease
    stamps: Mapping[str, int] = Factory(dict)
    session: str = ""
    next_owners: str = ""
    writes: int = 0
    stored: Stored = field(default=NOWHERE, eq=False)


@frozen
class Session:
    """A page of a process's session.

    count    of its own group writes; it stands still when another stops it
    ended    nothing in it changes any more
    entries  by lease
    touched  leases whose rows another changed, which its owner should read
    """

    worker: str
    count: int = 0
    ended: bool = False
    entries: Mapping[str, SessionEntry] = Factory(dict)
    touched: frozenset[str] = frozenset()
    stored: Stored = field(default=NOWHERE, eq=False)

    def entry(self, row: LeaseRow) -> SessionEntry | None:
        """The session's entry for this lease as its row is now (G6)."""
        found = self.entries.get(row.lease.key)
        return found if found is not None and found.epoch == row.lease.epoch else None


@frozen
class Remark:
    """Notes and throughput of one lease, as its owner told them under this epoch."""

    epoch: int
    notes: StampedNotes = Factory(dict)
    weight: int | None = None


Remarks = Mapping[str, Remark]


def lease_fields(row: LeaseRow) -> ObjectFields:
    """The row of a lease; fields that are not understood survive."""
    lease = row.lease
    told = cells(lease) | {"shard": lease.shard if lease.shard != lease.key else "", "sub": lease.checkpoint.sub or ""}
    ours = {each.object: _spelled(each.kind, told[each.name]) for each in _FIELDS} | {
        "notes": stamps({name: (value, row.stamps.get(name, 0)) for name, value in lease.notes}),
        "session": row.session,
        "heirsession": row.next_owners,
        "writes": str(row.writes),
    }
    return {name: word for name, word in {**row.stored.fields, **ours}.items() if word}


def _spelled(kind: str, cell: object) -> str:
    if isinstance(cell, bool):
        return "1" if cell else ""
    return said(str(cell)) if kind == "worker" and cell else spelled(kind, cell)  # type: ignore[arg-type]


def lease_row(key: str, stored: Stored) -> LeaseRow | Malformed:
    """The lease's row, or what is wrong with it."""
    return readable(key, lambda: _lease_row(key, stored))


def _lease_row(key: str, stored: Stored) -> LeaseRow:
    fields = stored.fields
    told = {
        each.name: checked(
            each, each.object, (heard(fields, each.object) if each.kind in _WORDS else fields.get(each.object))
        )
        for each in _FIELDS
    }
    noted = stamped(fields)
    notes = tuple(sorted((name, value) for name, (value, _) in noted.items()))
    lease = lease_of({"key": key, **told}, _NAMES, notes=notes)
    return LeaseRow(
        lease,
        {name: stamp for name, (_, stamp) in noted.items()},
        fields.get("session", ""),
        fields.get("heirsession", ""),
        whole("writes", fields.get("writes", "0")),
        stored,
    )


def session_fields(session: Session) -> ObjectFields:
    """The row of a session; entries are short, for every group write carries all of them."""
    entries = {key: _short(entry) for key, entry in session.entries.items()}
    ours = {
        "worker": said(session.worker),
        "count": str(session.count),
        "state": "ended" if session.ended else "living",
        "leases": json.dumps(entries, separators=(",", ":")),
        "touched": json.dumps(sorted(session.touched)) if session.touched else "",
    }
    return {name: word for name, word in {**session.stored.fields, **ours}.items() if word}


def _short(entry: SessionEntry) -> list[object]:
    at = entry.position
    told: list[object] = [entry.epoch, at.sequence, at.sub, at.token, entry.frozen]
    while told[-1] in ("", 0) and len(told) > 2:  # noqa: PLR2004  epoch and position
        told.pop()
    return told


def session_of(stored: Stored) -> Session | Malformed:
    """The session of a row, or what is wrong with it."""
    return readable(stored.name, lambda: _session(stored))


def _session(stored: Stored) -> Session:
    fields = stored.fields
    if fields.get("state") not in {"living", "ended"}:
        raise BadRowField("state", "is neither living nor ended")
    found = from_json("leases", fields.get("leases", "{}"))
    if not isinstance(found, dict):
        raise BadRowField("leases", "is no object of entries")
    touched = from_json("touched", fields.get("touched", "[]"))
    return Session(
        heard(fields, "worker"),
        whole("count", fields.get("count", "0")),
        fields["state"] == "ended",
        {key: _entry(told) for key, told in found.items()},
        frozenset(map(str, touched if isinstance(touched, list) else [])),
        stored,
    )


def _entry(told: Any) -> SessionEntry:  # noqa: ANN401  whatever somebody wrote
    match told:
        case [int(epoch), str(sequence), *rest] if len(rest) <= 3:  # noqa: PLR2004  sub, token, frozen
            sub, token, frozen_as = rest + [0, "", ""][len(rest) :]
            at = position("leases", sequence, whole("leases", sub), text("leases", token))
            return SessionEntry(epoch, at, text("leases", frozen_as))
        case _:
            raise BadRowField("leases", "holds an entry that is no [epoch, position, …]")


def told_fields(told: Remarks) -> ObjectFields:
    """The row of a session's remarks, beside its entries."""
    rows = {key: [one.epoch, one.weight, one.notes] for key, one in told.items()}
    return {"told": json.dumps(rows, separators=(",", ":"))}


def told_of(stored: Stored | None) -> Remarks:
    """The remarks of the row; none where the row cannot be read, for no decision rests on it."""
    found: dict[str, Remark] = {}
    try:
        rows = from_json("told", stored.fields.get("told", "{}")) if stored else {}
        for key, (epoch, heavy, notes) in rows.items():
            noted = {text("told", name): (text("told", value), whole("told", n)) for name, (value, n) in notes.items()}
            found[key] = Remark(whole("told", epoch), noted, weight("told", heavy) and int(heavy))
    except (BadRowField, AttributeError, TypeError, ValueError):
        return {}
    return found


T = TypeVar("T")


def certain(row: T | Malformed) -> T:
    """The row; raises StoreError if it cannot be read, for then nothing may be decided on it."""
    if isinstance(row, Malformed):
        raise StoreError(f"row {row.key}: {row.field}: {row.why}; correct the row, or delete it")
    return row


@frozen
class Joint:
    """A lease as its row and its owner's session tell it together.

    lease   as everybody sees it
    row     its row
    session that of its owner; None where there is none, or it is gone
    named   the lease with the owner that the row names, whether or not that owner was stopped
    stamps  of its notes
    """

    lease: Lease
    row: LeaseRow
    session: Session | None
    named: Lease
    stamps: Mapping[str, int]

    @property
    def entry(self) -> SessionEntry | None:
        """The session's entry for the lease under the epoch of its row."""
        return self.session.entry(self.row) if self.session else None

    @property
    def stopped(self) -> bool:
        """Whether no write of the owner's can count any more: it has no session, or an ended or frozen one."""
        entry = self.entry
        return self.session is None or self.session.ended or (entry is not None and entry.frozen != "")

    @property
    def accepted(self) -> bool:
        """Whether its owner has said, in its session, that it has the lease."""
        entry = self.entry
        return entry is not None and entry.frozen != "given"


def joined(row: LeaseRow, session: Session | None, told: Remarks) -> Joint:
    """The lease of a row and its owner's session.

    If that session was not found, the row's owner is shown, so that the lease has to expire first: either the rows were
    read at different moments, or the session's row was deleted and its owner may still write its positions (G14).
    """
    entry = session.entry(row) if session else None
    lease, epoch = row.lease, row.lease.epoch
    at = entry.position if entry and entry.position.order >= lease.checkpoint.order else lease.checkpoint
    notes: StampedNotes = {name: (value, row.stamps.get(name, 0)) for name, value in lease.notes}
    remark, heavy = told.get(lease.key), lease.weight
    if remark is not None and remark.epoch == epoch and row.session:
        notes |= {name: one for name, one in remark.notes.items() if name not in notes or one[1] > notes[name][1]}
        heavy = remark.weight if remark.weight is not None else heavy
    counted = entry is not None and entry.frozen != "given"
    version = f"{epoch}.{session.count}" if counted and session else str(epoch)
    kept = [row.stored.age, *([session.stored.age] if session and counted else [])]
    named = evolve(
        lease,
        checkpoint=at,
        weight=heavy,
        version=Version(version),
        idle=min(kept),
        notes=tuple(sorted((name, value) for name, (value, _) in notes.items())),
    )
    stamps_of = {name: stamp for name, (_, stamp) in notes.items()}
    found = Joint(named, row, session, named, stamps_of)
    if not row.session or session is None or not found.stopped:
        return found
    return evolve(found, lease=evolve(named, owner=None, next_owner=None, yields=False))


def restamped(joint: Joint, after: Notes) -> dict[str, int]:
    """The stamps of these notes: of those that changed, one above all that was said before."""
    return {
        name: joint.stamps.get(name, 0) + (joint.named.note(name) != value and name in joint.stamps)
        for name, value in after
    }


def lease_name(key: str) -> str:
    """The key in one segment, whatever it contains."""
    return LEASES + quote(key, safe=":")


def key_of(name: str) -> str | None:
    """The lease's key; None for a name that no lease would have."""
    try:
        key = text("name", unquote(name.removeprefix(LEASES)))
    except BadRowField:
        return None
    return key if key and lease_name(key) == name else None


def key_and_epoch(version: str) -> tuple[int, int]:
    """The epoch and the count of a version; -1 where it has none."""
    epoch, _, count = version.partition(".")
    return (int(epoch) if epoch.isdigit() else -1), (int(count) if count.isdigit() else -1)
