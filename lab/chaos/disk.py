"""Provides a folder for an SQLite lease file. The disk of the folder can be filled up, and the file can be locked."""

import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Self

from attrs import define, field

SIZE = "32m"
PIECE = b"\0" * 4096


@define
class Disk:
    """A folder for the lease file, on a small disk in memory if this user may mount one.

    Attributes:
        small: Whether the folder is on a small disk, which can be filled up.
    """

    folder: Path
    small: bool = False
    _lock: sqlite3.Connection | None = field(default=None)

    @property
    def file(self) -> Path:
        return self.folder / "leases.db"

    @contextmanager
    def mount_folder(self) -> Iterator[Self]:
        """Create the folder, and yield this object. After the block, unmount the small disk if there is one."""
        self.folder.mkdir(parents=True)
        mount_command = ("mount", "-t", "tmpfs", "-o", f"size={SIZE}", "none", str(self.folder))
        with suppress(OSError):
            self.small = subprocess.run(mount_command, capture_output=True, check=False).returncode == 0
        try:
            yield self
        finally:
            self.end_transaction()
            if self.small:
                subprocess.run(("umount", "--lazy", str(self.folder)), check=True)

    def fill_up(self) -> None:
        """Fill the disk up."""
        with suppress(OSError), (self.folder / "ballast").open("wb", buffering=0) as ballast:
            while ballast.write(PIECE):
                pass

    def free_space(self) -> None:
        (self.folder / "ballast").unlink()

    def hold_transaction(self) -> None:
        """Begin a write transaction and keep it open."""
        self._lock = sqlite3.connect(self.file, isolation_level=None)
        self._lock.execute("PRAGMA busy_timeout = 2000")
        with suppress(sqlite3.OperationalError):  # a worker was writing all the time, so nothing is locked
            self._lock.execute("BEGIN IMMEDIATE")

    def end_transaction(self) -> None:
        """End the transaction without writing anything."""
        if self._lock is not None:
            with closing(self._lock):
                self._lock = None
