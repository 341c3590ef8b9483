"""Finds the processes of a Spark application from outside, by their sockets and their environment."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

CONNECTED = "01"


def connected_to(port: int) -> set[int]:
    """Return the ids of the processes that have an IPv4 connection to this local port."""
    found = {inode for inode, other, now in _tcp() if now == CONNECTED and other == port}
    return {pid for inode, pid in _holders() if inode in found}


def _tcp() -> Iterator[tuple[str, int, str]]:
    """Yield the name of each socket in `/proc/PID/fd`, the port of the other end, and the state."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        row = line.split()
        yield f"socket:[{row[9]}]", int(row[2].split(":")[1], 16), row[3]


def _holders() -> Iterator[tuple[str, int]]:
    """Yield the name of each open file of each process, with the process id."""
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            yield str(link.readlink()), int(link.parts[2])


def marked(mark: str) -> dict[int, str]:
    """Return the command lines, by process id, of all processes whose environment contains this setting."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark.encode() in (place / "environ").read_bytes().split(b"\0"):
                found[int(place.name)] = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return found
