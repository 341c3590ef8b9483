"""Lease <-> SQLite row: one column per fact, readable with any SQLite tool."""

import json
from collections.abc import Mapping
from sqlite3 import Row
from types import NoneType
from typing import Any

from balancer.model import Lease, Notes
from stores.fields import BadField, hash_range, position, readable
from stores.protocol import Malformed
from stores.writes import counted

_KINDS: Mapping[str, type | tuple[type, ...]] = {
    "key": str,
    "stream": str,
    "shard": str,
    "parents": str,
    "owner": (str, NoneType),
    "counter": int,
    "checkpoint": str,
    "sub": int,
    "token": str,
    "first_hash": (str, NoneType),
    "last_hash": (str, NoneType),
    "weight": (float, NoneType),
    "heir": (str, NoneType),
    "yields": int,
    "notes": str,
}

COLUMNS = tuple(_KINDS)

SCHEMA = """
CREATE TABLE IF NOT EXISTS leases (
  key        TEXT PRIMARY KEY NOT NULL,
  stream     TEXT NOT NULL DEFAULT '',
  shard      TEXT NOT NULL,
  parents    TEXT NOT NULL DEFAULT '[]',  -- JSON list of lease keys
  owner      TEXT,
  counter    INTEGER NOT NULL,            -- one more at every renewal and owner change
  checkpoint TEXT NOT NULL,               -- sequence number or sentinel
  sub        INTEGER NOT NULL DEFAULT 0,
  token      TEXT NOT NULL DEFAULT '',
  first_hash TEXT,                        -- decimal: 128 bits do not fit an INTEGER
  last_hash  TEXT,
  weight     REAL,
  heir       TEXT,
  yields     INTEGER NOT NULL DEFAULT 0,
  notes      TEXT NOT NULL DEFAULT '{}'   -- JSON object of strings
) WITHOUT ROWID
"""


def to_row(lease: Lease) -> Mapping[str, str | int | float | None]:
    """The row of a lease, by column."""
    first, last = (str(end) for end in lease.hash_range) if lease.hash_range else (None, None)
    return {
        "key": lease.key,
        "stream": lease.stream,
        "shard": lease.shard,
        "parents": json.dumps(lease.parents),
        "owner": lease.owner,
        "counter": lease.epoch,
        "checkpoint": lease.checkpoint.sequence,
        "sub": lease.checkpoint.sub,
        "token": lease.checkpoint.token,
        "first_hash": first,
        "last_hash": last,
        "weight": lease.weight,
        "heir": lease.heir,
        "yields": int(lease.yields),
        "notes": json.dumps(dict(lease.notes), ensure_ascii=False),
    }


def to_lease(row: Row) -> Lease | Malformed:
    """The lease of a row, or what is wrong with it: SQLite lets anything stand in any column."""
    return readable(str(row["key"]), lambda: _lease(row))


def _lease(row: Row) -> Lease:
    for column, kind in _KINDS.items():
        if not isinstance(row[column], kind):
            raise BadField(column, f"{row[column]!r} is not of the type this column holds")
    lease = Lease(
        key=row["key"],
        stream=row["stream"],
        shard=row["shard"],
        parents=_parents(row["parents"]),
        owner=row["owner"],
        checkpoint=position("checkpoint", row["checkpoint"], row["sub"], row["token"]),
        hash_range=hash_range(("first_hash", "last_hash"), row["first_hash"], row["last_hash"]),
        weight=row["weight"],
        heir=row["heir"],
        yields=bool(row["yields"]),
        notes=_notes(row["notes"]),
    )
    return counted(lease, row["counter"])


def _json(column: str, text: str) -> Any:  # noqa: ANN401  it may hold anything
    try:
        return json.loads(text)
    except ValueError:
        raise BadField(column, f"{text!r} is not JSON") from None


def _parents(text: str) -> tuple[str, ...]:
    parents = _json("parents", text)
    if not (isinstance(parents, list) and all(isinstance(key, str) for key in parents)):
        raise BadField("parents", f"{text!r} is no list of lease keys")
    return tuple(parents)


def _notes(text: str) -> Notes:
    notes = _json("notes", text)
    if not (isinstance(notes, dict) and all(isinstance(value, str) for value in notes.values())):
        raise BadField("notes", f"{text!r} is no object of strings")
    return tuple(sorted(notes.items()))
