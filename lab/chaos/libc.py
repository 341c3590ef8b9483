"""Steps the clocks of workers and makes their disk read-only, with a library preloaded only into the workers."""

import mmap
import shutil
import struct
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from attrs import define

SOURCE = Path(__file__).with_name("unkind_libc.c")
NUMBERS = struct.Struct("=qq")
STEP_SECONDS = 7200
"""The step of a clock in seconds. It exceeds the hour for which tokens of the SDKs are valid."""


@define
class FaultyLibc:
    """Controls the preloaded libc of each worker. Changes take effect immediately."""

    _library: Path
    _disk: Path
    _settings: Mapping[str, tuple[Path, mmap.mmap]]

    @classmethod
    def compile(cls, folder: Path, workers: Sequence[str], disk: Path) -> Self:
        """Compile the library, with all faults off.

        `disk` is the folder that can be made read-only. It need not exist yet.
        """
        library_path = folder / "unkind_libc.so"
        subprocess.run(
            ("cc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", str(library_path), str(SOURCE), "-ldl"),
            check=True,
        )
        return cls(library_path, disk, {worker: _create_settings(folder / f"{worker}.libc") for worker in workers})

    def environment(self, worker: str) -> dict[str, str]:
        """Return the environment variables of a process of this worker."""
        settings_file, _ = self._settings[worker]
        return {"LD_PRELOAD": str(self._library), "CHAOS_LIBC": str(settings_file), "CHAOS_DISK": f"{self._disk}/"}

    def set_clock_ahead(self, worker: str, seconds: int) -> None:
        """Set the worker's time of day ahead by this many seconds. With 0, the time is right again."""
        self._set_number(worker, 0, seconds)

    def refuse_writes(self, *, enabled: bool) -> None:
        """Make the disk read-only or writable for all workers."""
        for worker in self._settings:
            self._set_number(worker, 1, enabled)

    def _set_number(self, worker: str, index: int, number: int) -> None:
        _, shared_memory = self._settings[worker]
        numbers = list(NUMBERS.unpack(shared_memory[:]))
        numbers[index] = number
        shared_memory[:] = NUMBERS.pack(*numbers)


def _create_settings(path: Path) -> tuple[Path, mmap.mmap]:
    path.write_bytes(NUMBERS.pack(0, 0))
    with path.open("r+b") as file:
        return path, mmap.mmap(file.fileno(), NUMBERS.size)


def has_compiler() -> bool:
    """Return whether a C compiler is installed."""
    return shutil.which("cc") is not None
