"""A small disk of its own for a file of leases, which can be filled up, and a writer who does not let go of it."""

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
    """A folder, which is a disk in memory where this user may mount one.

    small  whether it is one, and so can be full
    """

    folder: Path
    small: bool = False
    _lock: sqlite3.Connection | None = field(default=None)

    @property
    def file(self) -> Path:
        return self.folder / "leases.db"

    @contextmanager
    def mounted(self) -> Iterator[Self]:
        """Make it, and take it down."""
        self.folder.mkdir(parents=True)
        mount = ("mount", "-t", "tmpfs", "-o", f"size={SIZE}", "none", str(self.folder))
        with suppress(OSError):
            self.small = subprocess.run(mount, capture_output=True, check=False).returncode == 0
        try:
            yield self
        finally:
            self.let_go()
            if self.small:
                subprocess.run(("umount", "--lazy", str(self.folder)), check=True)

    def fill(self) -> None:
        """Leave no room on it."""
        with suppress(OSError), (self.folder / "ballast").open("wb", buffering=0) as ballast:
            while ballast.write(PIECE):
                pass

    def clear(self) -> None:
        (self.folder / "ballast").unlink()

    def hold(self) -> None:
        """Begin to write, and do not end."""
        self._lock = sqlite3.connect(self.file, isolation_level=None)
        self._lock.execute("PRAGMA busy_timeout = 2000")
        with suppress(sqlite3.OperationalError):  # another wrote all that time: then nobody is held up
            self._lock.execute("BEGIN IMMEDIATE")

    def let_go(self) -> None:
        """End it without having written anything."""
        if self._lock is not None:
            with closing(self._lock):
                self._lock = None
