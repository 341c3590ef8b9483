"""Finds the processes of a fleet on this machine, and denies them resources such as threads and memory."""

import os
import resource
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

PROC = Path("/proc")
PIDS_CONTROLLER = Path("/sys/fs/cgroup/pids")
LOCAL_COLUMN, INODE_COLUMN = 1, 9
"""The indexes of the columns of /proc/net/tcp that contain the local address and the inode of the socket."""


def list_processes_in_group(group: int) -> Iterator[int]:
    """Yield the ids of the processes in this group."""
    for process_folder in PROC.iterdir():
        with suppress(ValueError, ProcessLookupError):
            if os.getpgid(int(process_folder.name)) == group:
                yield int(process_folder.name)


def list_descendants(ancestor: int) -> Iterator[int]:
    """Yield the ids of a process's descendants, parents before their children."""
    children_by_parent: dict[int, list[int]] = {}
    for process_folder in PROC.iterdir():
        with suppress(ValueError, OSError):
            # The program's name is in parentheses and may contain parentheses. The parent's id is the second word after
            # it.
            fields = (process_folder / "stat").read_text().rpartition(")")[2].split()
            children_by_parent.setdefault(int(fields[1]), []).append(int(process_folder.name))
    processes_to_visit = [ancestor]
    while processes_to_visit:
        children = children_by_parent.get(processes_to_visit.pop(0), [])
        yield from children
        processes_to_visit += children


def list_processes_with_setting(setting: str) -> Iterator[int]:
    """Yield the ids of the running processes that were started with this `NAME=value` in their environment."""
    for process_folder in PROC.iterdir():
        with suppress(ValueError, OSError):
            if f"\0{setting}\0".encode() in b"\0" + (process_folder / "environ").read_bytes() + b"\0":
                yield int(process_folder.name)


def find_client_at_port(port: int, groups: Mapping[str, int]) -> str:
    """Return the name of the process group that has a connection from this local port, or "" if none has."""
    connections = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    sockets = {
        f"socket:[{fields[INODE_COLUMN]}]"
        for fields in connections
        if int(fields[LOCAL_COLUMN].partition(":")[2], 16) == port
    }
    for name, group in groups.items():
        for pid in list_processes_in_group(group):
            with suppress(OSError):
                for file in (PROC / str(pid) / "fd").iterdir():
                    with suppress(OSError):
                        if str(file.readlink()) in sockets:
                            return name
    return ""


class ThreadLimit:
    """A control group that prevents the processes of a worker from starting more threads."""

    def __init__(self, group: int) -> None:
        """Create the control group. Raises OSError if this user may not create one."""
        self._folder = PIDS_CONTROLLER / f"leasehold-chaos-{group}"
        self._folder.mkdir()
        self._move_processes(list_processes_in_group(group), self._folder)
        (self._folder / "pids.max").write_text((self._folder / "pids.current").read_text())

    def end(self) -> None:
        """Remove the limit."""
        (self._folder / "pids.max").write_text("max")
        # The control group also contains children that were started since, even those in other process groups.
        while pids := (self._folder / "cgroup.procs").read_text().split():
            self._move_processes(map(int, pids), PIDS_CONTROLLER / _find_own_group())
        self._folder.rmdir()

    @staticmethod
    def _move_processes(pids: Iterable[int], control_group: Path) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                (control_group / "cgroup.procs").write_text(str(pid))


SPARE_BYTES = 1 << 20
"""How much memory a process may still allocate. It is small, so that an allocation deep inside its work fails."""


def find_highest_descriptor(pid: int) -> int:
    """Return the highest open file descriptor of this process plus one."""
    return max((int(file.name) for file in (PROC / str(pid) / "fd").iterdir()), default=-1) + 1


def measure_memory(pid: int) -> int:
    """Return the size of the process's data (VmData), as the system counts it, plus `SPARE_BYTES`."""
    status_lines = (PROC / str(pid) / "status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status_lines if line.startswith("VmData:")) * 1024 + SPARE_BYTES


class ResourceLimit:
    """Limits that prevent the processes of a worker from using more of a resource than they use now.

    Args:
        group: The process group.
        resource_number: The resource, as one of the numbers `resource.RLIMIT_*`.
        measure_limit: Returns the limit for the process with this id.
    """

    def __init__(self, group: int, resource_number: int, measure_limit: Callable[[int], int]) -> None:
        self._resource = resource_number
        self._former_limits: dict[int, tuple[int, int]] = {}
        for pid in list_processes_in_group(group):
            with suppress(ProcessLookupError, FileNotFoundError):
                _, hard_limit = resource.prlimit(pid, resource_number)
                self._former_limits[pid] = resource.prlimit(pid, resource_number, (measure_limit(pid), hard_limit))

    @classmethod
    def descriptors(cls, group: int) -> Self:
        """Deny the processes more files and connections."""
        return cls(group, resource.RLIMIT_NOFILE, find_highest_descriptor)

    @classmethod
    def memory(cls, group: int) -> Self:
        """Deny the processes more memory."""
        return cls(group, resource.RLIMIT_DATA, measure_memory)

    def end(self) -> None:
        """Remove the limits of the processes that still run."""
        for pid, limits in self._former_limits.items():
            with suppress(ProcessLookupError):
                resource.prlimit(pid, self._resource, limits)


def can_limit_threads() -> bool:
    """Return whether this user can create control groups that limit threads."""
    try:
        (PIDS_CONTROLLER / "leasehold-chaos").mkdir()
        (PIDS_CONTROLLER / "leasehold-chaos").rmdir()
    except OSError:
        return False
    return True


def _find_own_group() -> str:
    lines = (line.split(":") for line in Path("/proc/self/cgroup").read_text().splitlines())
    return next(fields[2].lstrip("/") for fields in lines if fields[1] == "pids")
