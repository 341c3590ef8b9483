"""Finds the processes of a Spark application from outside, by their sockets and their environment."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

CONNECTED = "01"


def connected_to(port: int) -> set[int]:
    """Return the ids of the processes that have an IPv4 connection to this local port."""
    connected_inodes = {inode for inode, peer_port, state in _tcp_sockets() if state == CONNECTED and peer_port == port}
    return {pid for inode, pid in _open_files() if inode in connected_inodes}


def _tcp_sockets() -> Iterator[tuple[str, int, str]]:
    """Yield the name of each socket in `/proc/PID/fd`, the port of the other end, and the state."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        row = line.split()
        yield f"socket:[{row[9]}]", int(row[2].split(":")[1], 16), row[3]


def _open_files() -> Iterator[tuple[str, int]]:
    """Yield the name of each open file of each process, with the process id."""
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            yield str(link.readlink()), int(link.parts[2])


def marked(mark: str) -> dict[int, str]:
    """Return the command lines, by process id, of all processes whose environment contains this setting."""
    command_lines = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                command_lines[int(folder.name)] = (
                    (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
    return command_lines
