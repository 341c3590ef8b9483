"""Records the writes of one process, as the process saw them, in a file of JSON lines for the judge."""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

from leasehold.adapters import consuming
from leasehold.balancer.model import Lease
from leasehold.stores.protocol import Done, Outcome, PassingStore, Store
from leasehold.stores.swap import SwapStore
from leasehold.stores.urls import open_store
from leasehold.stores.writes import Write
from leasehold_lab.judge.events import VERBS, WriteAnswer

TRUE_CLOCK = 5
"""Linux's CLOCK_REALTIME_COARSE, which chaos does not step."""

Result = Literal["done", "lost", "unknown"]


def read_true_time() -> float:
    """Return the true time in seconds since 1970, even if the clock is stepped.

    The time lags by some milliseconds, but by the same amount in all processes.
    """
    return time.clock_gettime(TRUE_CLOCK)


class RecordingStore(PassingStore):
    """A store that records each write with its outcome, and with the times of the request and the response."""

    def __init__(self, store: Store, path: Path, clock: Callable[[], float] = read_true_time) -> None:
        super().__init__(store)
        self._clock = clock
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(self, write: Write) -> Outcome:
        """Forward the write, and record it. If an exception is raised, the outcome is unknown."""
        send_time = self._clock()
        try:
            outcome = super().write(write)
        except BaseException:
            self._record(send_time, write, "unknown", None)
            raise
        self._record(send_time, write, "done" if isinstance(outcome, Done) else "lost", outcome.lease)
        return outcome

    def close(self) -> None:
        super().close()
        os.close(self._file)

    def _record(self, send_time: float, write: Write, outcome: Result, row: Lease | None) -> None:
        entry: dict[str, Any] = {
            "sent": send_time,
            "verb": VERBS[type(write)],
            "shard": write.lease.shard,
            "seen": write.lease.owner,
        }
        if row is not None:
            version, checkpoint = str(row.version), row.checkpoint.order
            entry |= {"owner": row.owner, "version": version, "epoch": row.epoch, "checkpoint": checkpoint}
        # Write each line in one call, so that the lines of several threads do not mix.
        os.write(self._file, json.dumps({"t": self._clock(), "outcome": outcome, **entry}).encode() + b"\n")


@contextmanager
def record_writes(output_path: Path) -> Iterator[None]:
    """Make workers of this process record their writes of leases, to one table or to both tables of a swap."""
    with (
        patch.object(
            consuming, "open_store", lambda url, **options: RecordingStore(open_store(url, **options), output_path)
        ),
        patch.object(consuming, "SwapStore", lambda tables, name: RecordingStore(SwapStore(tables, name), output_path)),
    ):
        yield


def parse_answer(line: bytes, process: str) -> WriteAnswer:
    """Return the write that a line of a `RecordingStore` contains."""
    entry = json.loads(line)
    return WriteAnswer(process=process, **entry | {"checkpoint": tuple(entry.get("checkpoint", (0, 0, 0)))})
