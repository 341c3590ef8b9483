"""A query's readers on the executors of a cluster, as they are seen from outside: by their sockets."""

import re
from collections.abc import Collection
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
    fields = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    found = {row[9]: int(row[1].split(":")[1], 16) for row in fields if row[3] == state}
    wanted = {f"socket:[{inode}]": port for inode, port in found.items() if ports is None or port in ports}
    holders = {}
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if (port := wanted.get(str(link.readlink()))) is not None:
                holders[port] = int(link.parts[2])
    return holders


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
