"""Lease <-> SQLite row: one column per fact, readable with any SQLite tool."""

import json
from collections.abc import Mapping
from sqlite3 import Row
from types import NoneType

from leasehold.balancer.model import Lease
from leasehold.stores.fields import (
    BadRowField,
    hash_range,
    keys,
    kilobytes,
    name,
    notes,
    position,
    readable,
    shown,
    weight,
    whole,
)
from leasehold.stores.protocol import Malformed
from leasehold.stores.writes import counted

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
  weight     REAL,                        -- KB/s
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
        "weight": None if lease.weight is None else kilobytes(lease.weight),
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
            raise BadRowField(column, f"{shown(row[column])} is not of the type this column holds")
    lease = Lease(
        key=name("key", row["key"]),
        stream=row["stream"],
        shard=row["shard"],
        parents=keys("parents", row["parents"]),
        owner=row["owner"] or None,
        checkpoint=position("checkpoint", row["checkpoint"], whole("sub", row["sub"]), row["token"]),
        hash_range=hash_range(("first_hash", "last_hash"), row["first_hash"], row["last_hash"]),
        weight=weight("weight", row["weight"]),
        heir=row["heir"] or None,
        yields=bool(row["yields"]),
        notes=notes("notes", row["notes"]),
    )
    return counted(lease, whole("counter", row["counter"]))
