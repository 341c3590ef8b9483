"""Leases in a file of JSON lines, one a lease: a backup of a table, which one command at a time reads or writes.

Rule 1: no fleet works on it: between processes nothing is compared. Rule 2: what was written is put in the place of the
file at once, when the store is closed, so that a command that ends in between leaves the backup of before.

A line has SQLite's columns by their names (`stores/embedded/sqlite.py`), and a new backup no owners.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from leasehold.balancer.model import Lease
from leasehold.errors import StoreError
from leasehold.stores.embedded.memory import MemoryStore
from leasehold.stores.embedded.sqlite import COLUMNS, to_lease, to_row
from leasehold.stores.printable import said
from leasehold.stores.protocol import Done, Listing, Malformed, Outcome, PassingStore
from leasehold.stores.writes import CreateLease, Write


class FileStore(PassingStore):
    """The leases of the file in memory; the file is written anew by `close`, if anything was written."""

    def __init__(self, path: str, *, create: bool = True) -> None:
        super().__init__(MemoryStore())
        self._path, self._changed = Path(path), False
        self._malformed: tuple[Malformed, ...] = ()
        try:
            text = self._path.read_text(encoding="utf-8")
        except FileNotFoundError:
            if not create:
                raise StoreError(f"there is no file {path}; name a backup that is there") from None
            if not self._path.parent.is_dir():  # told before anybody is told what was written
                raise StoreError(f"there is no folder {self._path.parent}; make it first") from None
            return
        except (OSError, UnicodeDecodeError) as error:
            raise StoreError(f"{path} cannot be read as a backup: {said(error)}") from error
        for number, line in enumerate(text.splitlines(), 1):
            row = _lease(number, line)
            if isinstance(row, Malformed):
                self._malformed += (row,)
            elif not isinstance(self._store.write(CreateLease(row)), Done):
                self._malformed += (Malformed(row.key, "key", f"line {number} has a lease of an earlier line"),)

    def list(self) -> Listing:
        """Every lease, and each line that is none."""
        return Listing(self._store.list().leases, self._malformed)

    def write(self, write: Write) -> Outcome:
        """Apply the write in memory."""
        self._changed = True
        return self._store.write(write)

    def close(self) -> None:
        """Put what was written in the place of the file (rule 2). Raises StoreError."""
        if not self._changed:
            return
        self._changed = False
        lines = "".join(f"{line_of(lease)}\n" for lease in self._store.list().leases)
        try:
            # Its owner's alone, as a new SQLite file is: notes and names of workers may be in it.
            with NamedTemporaryFile("w", encoding="utf-8", dir=self._path.parent, delete=False) as anew:
                anew.write(lines)
                anew.flush()
                os.fsync(anew.fileno())
            Path(anew.name).replace(self._path)
        except OSError as error:
            raise StoreError(f"{self._path} cannot be written: {said(error)}") from error


def line_of(lease: Lease) -> str:
    """The line of a lease."""
    return json.dumps(to_row(lease), ensure_ascii=False)


def _lease(number: int, line: str) -> Lease | Malformed:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not found.keys() >= set(COLUMNS):
        return Malformed(f"line {number}", "line", "is no JSON object with the columns of a lease")
    row: Mapping[str, Any] = found
    return to_lease(row)


def open_url(
    place: str,
    options: Mapping[str, str],  # noqa: ARG001  it has none
    *,
    create: bool,
    request_seconds: float | None,  # noqa: ARG001  it never waits
) -> FileStore:
    """The store of this file; a path after two slashes is relative, after three absolute."""
    if not place.strip("/"):
        raise ValueError("store URL: file:// wants the path of a file")
    return FileStore(place, create=create)
