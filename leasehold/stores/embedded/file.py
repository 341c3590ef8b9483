"""Stores leases in a file of JSON lines, one per lease. Such a file is a backup of a table, for one command at a time.

1. Workers cannot use such a file, because there is no compare-and-swap between processes.
2. The file is replaced atomically when the store is closed. If a command ends before that, the previous backup remains.

Each line has the names and values of the SQLite store's columns (`leasehold.stores.embedded.sqlite`). The leases in a
new backup have no owners.
"""

import json
import os
from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from leasehold.balancer.model import Lease
from leasehold.errors import StoreError
from leasehold.stores.embedded.memory import MemoryStore
from leasehold.stores.embedded.sqlite import COLUMNS, to_lease, to_row
from leasehold.stores.printable import error_summary
from leasehold.stores.protocol import Done, Listing, Malformed, Outcome, PassingStore
from leasehold.stores.writes import CreateLease, Write


class FileStore(PassingStore):
    """A store that keeps the leases of a file in memory. If a lease was written, `close` replaces the file."""

    def __init__(self, path: str, *, create: bool = True) -> None:
        super().__init__(MemoryStore())
        self._path, self._changed = Path(path), False
        self._malformed: tuple[Malformed, ...] = ()
        try:
            file_content = self._path.read_text(encoding="utf-8")
        except FileNotFoundError:
            if not create:
                raise StoreError(f"there is no file {path}; name a backup that is there") from None
            if not self._path.parent.is_dir():  # fail now, and not in `close` after writes have succeeded
                raise StoreError(f"there is no folder {self._path.parent}; make it first") from None
            return
        except (OSError, UnicodeDecodeError) as error:
            raise StoreError(f"{path} cannot be read as a backup: {error_summary(error)}") from error
        # `splitlines` would also split a line at characters such as U+2028, which JSON strings may contain.
        for line_number, line in enumerate(StringIO(file_content), 1):
            row = _parse_line(line_number, line)
            if isinstance(row, Malformed):
                self._malformed += (row,)
            elif not isinstance(self._store.write(CreateLease(row)), Done):
                self._malformed += (
                    Malformed(row.key, "key", f"line {line_number} repeats a lease of an earlier line"),
                )

    def list(self) -> Listing:
        """Return every lease, and every line that is not a valid lease."""
        return Listing(self._store.list().leases, self._malformed)

    def write(self, write: Write) -> Outcome:
        self._changed = True
        return self._store.write(write)

    def close(self) -> None:
        """Replace the file if a lease was written (rule 2). Raises StoreError if the file cannot be written."""
        if not self._changed:
            return
        self._changed = False
        lines = "".join(f"{format_line(lease)}\n" for lease in self._store.list().leases)
        try:
            # Only the file's owner may read it, as with SQLite files, because it may contain annotations and worker
            # names.
            with NamedTemporaryFile("w", encoding="utf-8", dir=self._path.parent, delete=False) as temporary_file:
                temporary_file.write(lines)
                temporary_file.flush()
                os.fsync(temporary_file.fileno())
            Path(temporary_file.name).replace(self._path)
        except OSError as error:
            raise StoreError(f"{self._path} cannot be written: {error_summary(error)}") from error


def format_line(lease: Lease) -> str:
    """Return the line for a lease."""
    return json.dumps(to_row(lease), ensure_ascii=False)


def _parse_line(line_number: int, line: str) -> Lease | Malformed:
    try:
        columns = json.loads(line)
    except (ValueError, RecursionError):
        columns = None
    if not isinstance(columns, dict) or not columns.keys() >= set(COLUMNS):
        return Malformed(f"line {line_number}", "line", "is not a JSON object with the columns of a lease")
    row: Mapping[str, Any] = columns
    return to_lease(row)


def open_url(
    location: str,
    options: Mapping[str, str],  # noqa: ARG001  there are none
    *,
    create: bool,
    request_seconds: float | None,  # noqa: ARG001  it never waits
) -> FileStore:
    """Open the store in this file.

    After two slashes in the URL, the path is relative, and after three, it is absolute.
    """
    if not location.strip("/"):
        raise ValueError("store URL: file:// wants the path of a file")
    return FileStore(location, create=create)
