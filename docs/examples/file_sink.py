"""A sink of files that has each record exactly once: what is appended and how far it came are one step, and fenced.

Beside `SHARD.out` stands `SHARD.state`, which says how long the output is, up to which record, and by which epoch. The
state is replaced in one step, after the output is on disk: what a killed worker has appended and not put down is cut
off by the next. A worker with a lower epoch than the state's has lost the lease, and is refused.
"""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from leasehold.adapters import Delivery

NOTHING = {"epoch": 0, "position": [0, 0, 0], "length": 0}


class Fenced(Exception):
    """A newer owner has written: this worker has lost the lease and does not know it yet."""


class FileSink:
    """A handler that appends each record to a file of its shard."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, batch: Delivery) -> None:
        """Append what is not there yet. Raises Fenced."""
        with self._locked(batch.shard):
            state = self._state(batch.shard)
            if batch.epoch is None or batch.epoch < state["epoch"]:
                raise Fenced(f"{batch.shard}: epoch {batch.epoch} is over, {state['epoch']} has written")
            new = [each for each in batch.records if list(each.position.order) > state["position"]]
            with (self.folder / f"{batch.shard}.out").open("ab") as file:
                file.truncate(state["length"])  # what was appended and never put down
                file.writelines(each.data + b"\n" for each in new)
                file.flush()
                os.fsync(file.fileno())
                length = os.fstat(file.fileno()).st_size
            position = list(new[-1].position.order) if new else state["position"]
            self._put_down(batch.shard, {"epoch": batch.epoch, "position": position, "length": length})

    @contextmanager
    def _locked(self, shard: str) -> Iterator[None]:
        with (self.folder / f"{shard}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # let go by the system if the process dies
            yield

    def _state(self, shard: str) -> dict[str, Any]:
        path = self.folder / f"{shard}.state"
        return json.loads(path.read_text()) if path.exists() else NOTHING

    def _put_down(self, shard: str, state: dict[str, Any]) -> None:
        new = self.folder / f"{shard}.state.new"
        with new.open("w") as file:
            json.dump(state, file)
            file.flush()
            os.fsync(file.fileno())
        new.rename(self.folder / f"{shard}.state")
