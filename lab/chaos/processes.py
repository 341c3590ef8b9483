"""Processes of a fleet on this machine: which one has a connection, and which resources they are denied."""

import os
import resource
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

PROC = Path("/proc")
PIDS = Path("/sys/fs/cgroup/pids")
LOCAL, INODE = 1, 9
"""Columns of /proc/net/tcp: the address of this end, and the socket's inode."""


def in_group(group: int) -> Iterator[int]:
    """Yield the processes of this group."""
    for place in PROC.iterdir():
        with suppress(ValueError, ProcessLookupError):
            if os.getpgid(int(place.name)) == group:
                yield int(place.name)


def descendants(of: int) -> Iterator[int]:
    """Yield the descendants of a process, parents before their children."""
    parents: dict[int, list[int]] = {}
    for place in PROC.iterdir():
        with suppress(ValueError, OSError):
            # The name is in brackets and may contain brackets; the parent's id is the second word after them.
            fields = (place / "stat").read_text().rpartition(")")[2].split()
            parents.setdefault(int(fields[1]), []).append(int(place.name))
    todo = [of]
    while todo:
        started = parents.get(todo.pop(0), [])
        yield from started
        todo += started


def with_setting(setting: str) -> Iterator[int]:
    """Yield the running processes that were started with this `NAME=value` in their environment."""
    for place in PROC.iterdir():
        with suppress(ValueError, OSError):
            if f"\0{setting}\0".encode() in b"\0" + (place / "environ").read_bytes() + b"\0":
                yield int(place.name)


def client_at(port: int, groups: Mapping[str, int]) -> str:
    """Return which of these process groups has this port of the loopback address, or "" for none."""
    rows = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    sockets = {f"socket:[{row[INODE]}]" for row in rows if int(row[LOCAL].partition(":")[2], 16) == port}
    for name, group in groups.items():
        for pid in in_group(group):
            with suppress(OSError):
                for file in (PROC / str(pid) / "fd").iterdir():
                    with suppress(OSError):
                        if str(file.readlink()) in sockets:
                            return name
    return ""


class NoMoreThreads:
    """A control group that lets the processes of a worker have no more threads than they have."""

    def __init__(self, group: int) -> None:
        """Make the control group. Raises OSError if this user may not."""
        self._folder = PIDS / f"leasehold-chaos-{group}"
        self._folder.mkdir()
        self._move(in_group(group), self._folder)
        (self._folder / "pids.max").write_text((self._folder / "pids.current").read_text())

    def end(self) -> None:
        """Remove the limit."""
        (self._folder / "pids.max").write_text("max")
        # The control group also has their new children, in whatever process group.
        while there := (self._folder / "cgroup.procs").read_text().split():
            self._move(map(int, there), PIDS / _own_group())
        self._folder.rmdir()

    @staticmethod
    def _move(pids: Iterable[int], to: Path) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                (to / "cgroup.procs").write_text(str(pid))


SPARE_BYTES = 1 << 20
"""What a process without more memory has left, so that an allocation deep inside it fails."""


def descriptors_of(pid: int) -> int:
    """Return one more than the highest descriptor that this process has open."""
    return max((int(file.name) for file in (PROC / str(pid) / "fd").iterdir()), default=-1) + 1


def memory_of(pid: int) -> int:
    """Return the bytes of the process's data, which the system counts, and a little more."""
    status = (PROC / str(pid) / "status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmData:")) * 1024 + SPARE_BYTES


class NoMore:
    """Limits that let the processes of a worker have no more of a resource than they have.

    what  the resource, by the system's number
    used  how much of it a process may have
    """

    def __init__(self, group: int, what: int, used: Callable[[int], int]) -> None:
        self._what = what
        self._before: dict[int, tuple[int, int]] = {}
        for pid in in_group(group):
            with suppress(ProcessLookupError, FileNotFoundError):
                _, most = resource.prlimit(pid, what)
                self._before[pid] = resource.prlimit(pid, what, (used(pid), most))

    @classmethod
    def descriptors(cls, group: int) -> Self:
        """Deny the processes more files and connections."""
        return cls(group, resource.RLIMIT_NOFILE, descriptors_of)

    @classmethod
    def memory(cls, group: int) -> Self:
        """Deny the processes more memory."""
        return cls(group, resource.RLIMIT_DATA, memory_of)

    def end(self) -> None:
        """Remove the limits of the processes that still run."""
        for pid, limits in self._before.items():
            with suppress(ProcessLookupError):
                resource.prlimit(pid, self._what, limits)


def threads_can_be_refused() -> bool:
    """Return whether this machine has such control groups, and this user may make them."""
    try:
        (PIDS / "leasehold-chaos").mkdir()
        (PIDS / "leasehold-chaos").rmdir()
    except OSError:
        return False
    return True


def _own_group() -> str:
    lines = (line.split(":") for line in Path("/proc/self/cgroup").read_text().splitlines())
    return next(words[2].lstrip("/") for words in lines if words[1] == "pids")
