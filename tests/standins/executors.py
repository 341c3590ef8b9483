"""A query's readers on the executors of a cluster, as they are seen from outside: by their sockets."""

import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

LISTENS, CONNECTED = "0A", "01"
CAME = re.compile(r"reader \('127\.0\.0\.1', (\d+)\) has come")


def came(log: Path) -> list[int]:
    """The ports from which readers have come to the planner, as it told this log."""
    return [int(port) for port in CAME.findall(log.read_text(errors="replace"))]


def readers(log: Path) -> set[int]:
    """The processes that read now."""
    return set(sockets(came(log), CONNECTED).values())


def sockets(ports: Collection[int] | None, state: str) -> dict[int, int]:
    """Processes that have sockets over IPv4 in this state, by the port that is theirs; of these ports, or of all."""
    found = {inode: own for inode, own, _, now in _tcp() if now == state and (ports is None or own in ports)}
    return {found[inode]: pid for inode, pid in _holders() if inode in found}


def connected_to(port: int) -> set[int]:
    """The processes that have a connection over IPv4 to this port of this machine."""
    found = {inode for inode, _, other, now in _tcp() if now == CONNECTED and other == port}
    return {pid for inode, pid in _holders() if inode in found}


def _tcp() -> Iterator[tuple[str, int, int, str]]:
    """Of each socket: how it stands in a folder of descriptors, its own port, the other end's, its state."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        row = line.split()
        own, other = (int(row[end].split(":")[1], 16) for end in (1, 2))
        yield f"socket:[{row[9]}]", own, other, row[3]


def _holders() -> Iterator[tuple[str, int]]:
    """What each process has open, and its number."""
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            yield str(link.readlink()), int(link.parts[2])


def executor_of(pid: int) -> int:
    """The Java process below which this is. Raises OSError if it is below none, or gone."""
    while b"CoarseGrainedExecutorBackend" not in Path(f"/proc/{pid}/cmdline").read_bytes():
        pid = _parent(pid)
    return pid


def marked(mark: str) -> dict[int, str]:
    """The processes whose environment has this setting, wherever they were started; the command line of each."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark.encode() in (place / "environ").read_bytes().split(b"\0"):
                found[int(place.name)] = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return found


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
