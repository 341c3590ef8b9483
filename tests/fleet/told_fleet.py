"""Worker processes that print event lines, and the events in these lines."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attrs import define, field


@define
class Fleet:
    """Worker processes that write their event lines to files."""

    command: list[str]
    folder: Path
    processes: dict[str, "subprocess.Popen[bytes]"] = field(factory=dict)

    def start(self, worker: str) -> None:
        with self.path(worker).open("wb") as out:
            self.processes[worker] = subprocess.Popen([*self.command, "--worker", worker], stdout=out)

    def path(self, worker: str) -> Path:
        """Return the path of the file with this worker's event lines."""
        return self.folder / f"{worker}.jsonl"

    def events(self, worker: str) -> list[dict[str, Any]]:
        """Return this worker's events so far. The last line, which may be cut, is left out."""
        lines = self.path(worker).read_text().split("\n")
        return [json.loads(line) for line in lines[:-1]]

    def records(self) -> list[dict[str, Any]]:
        """Return the events of all dispatched records, in order of time."""
        events = [event for worker in self.processes for event in self.events(worker) if event["event"] == "record"]
        return sorted(events, key=lambda event: event["t"])

    def seen(self) -> set[str]:
        """Return the digests of the records that were dispatched at least once."""
        return {event["sha1"] for event in self.records()}

    def reading(self, worker: str) -> set[str]:
        """Return the shards that this worker reads now."""
        shards: set[str] = set()
        for event in self.events(worker):
            if event["event"] == "initialize":
                shards.add(event["shard"])
            elif event["event"] != "record":
                shards.discard(event["shard"])
        return shards


@contextmanager
def a_fleet(command: list[str], folder: Path) -> Iterator[Fleet]:
    """Yield a fleet without workers. Its workers are killed at the end of the block."""
    fleet = Fleet(command, folder)
    try:
        yield fleet
    finally:
        for process in fleet.processes.values():
            process.kill()
            process.wait()
