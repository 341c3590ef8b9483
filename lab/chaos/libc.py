"""Stepped clocks and a read-only disk for workers only, through a libc that is preloaded into them."""

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
"""More than the hour for which tokens of the SDKs are valid."""


@define
class UnkindLibc:
    """What the preloaded libc of each worker returns; changes take effect at once.

    disk  the folder that can be made read-only
    """

    _library: Path
    _disk: Path
    _told: Mapping[str, tuple[Path, mmap.mmap]]

    @classmethod
    def made(cls, folder: Path, workers: Sequence[str], disk: Path) -> Self:
        """Compile the library, without any faults; `disk` need not exist."""
        library = folder / "unkind_libc.so"
        subprocess.run(
            ("cc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", str(library), str(SOURCE), "-ldl"), check=True
        )
        return cls(library, disk, {worker: _numbers(folder / f"{worker}.libc") for worker in workers})

    def environment(self, worker: str) -> dict[str, str]:
        """Return the environment variables of a process of this worker."""
        place, _ = self._told[worker]
        return {"LD_PRELOAD": str(self._library), "CHAOS_LIBC": str(place), "CHAOS_DISK": f"{self._disk}/"}

    def step(self, worker: str, seconds: int) -> None:
        """Set the worker's time of day ahead by this much, or right with 0."""
        self._tell(worker, 0, seconds)

    def refuse_writes(self, *, refused: bool) -> None:
        """Make the disk read-only or writable for all workers."""
        for worker in self._told:
            self._tell(worker, 1, refused)

    def _tell(self, worker: str, place: int, number: int) -> None:
        _, told = self._told[worker]
        numbers = list(NUMBERS.unpack(told[:]))
        numbers[place] = number
        told[:] = NUMBERS.pack(*numbers)


def _numbers(place: Path) -> tuple[Path, mmap.mmap]:
    place.write_bytes(NUMBERS.pack(0, 0))
    with place.open("r+b") as file:
        return place, mmap.mmap(file.fileno(), NUMBERS.size)


def libc_can_be_put_before() -> bool:
    """Return whether there is a compiler."""
    return shutil.which("cc") is not None
