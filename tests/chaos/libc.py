"""Clocks that are stepped, and a disk that is read-only, for workers alone: by a libc that is put before theirs."""

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
"""Beyond the hour for which tokens of the SDKs are good."""


@define
class UnkindLibc:
    """What each worker is told, which it sees at once.

    disk  the folder that can be made read-only
    """

    _library: Path
    _disk: Path
    _told: Mapping[str, tuple[Path, mmap.mmap]]

    @classmethod
    def made(cls, folder: Path, workers: Sequence[str], disk: Path) -> Self:
        """Compile it, and tell everybody the truth; `disk` need not be there."""
        library = folder / "unkind_libc.so"
        subprocess.run(
            ("cc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", str(library), str(SOURCE), "-ldl"), check=True
        )
        return cls(library, disk, {worker: _numbers(folder / f"{worker}.libc") for worker in workers})

    def environment(self, worker: str) -> dict[str, str]:
        """The variables of a process of this worker."""
        place, _ = self._told[worker]
        return {"LD_PRELOAD": str(self._library), "CHAOS_LIBC": str(place), "CHAOS_DISK": f"{self._disk}/"}

    def step(self, worker: str, seconds: int) -> None:
        """Its time of day is ahead by so much; 0: it is right."""
        self._tell(worker, 0, seconds)

    def refuse_writes(self, *, refused: bool) -> None:
        """Whether the disk is read-only, for all of them."""
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
    """Whether there is a compiler."""
    return shutil.which("cc") is not None
