"""Prints the functions that are called for one batch with one record, in order, with their files.

`python benchmarks/batch_trace.py` runs a complete worker with a stream and a table in memory. It records the calls
between consecutive handler calls, and prints the shortest such trace, which contains no renewal and no read of the
table. The stream is that of the simulator. Its calls are left out, because a worker's code does not depend on how a
source reads from its service.
"""

import sys
import threading
import time
from collections.abc import Callable
from itertools import groupby, pairwise
from pathlib import Path
from types import FrameType

import leasehold
from leasehold.stores.embedded.memory import MemoryStore
from leasehold_lab.simulator.world.world import ListSource, ShardRecords, create_even_shards, create_records

ROOT = Path(leasehold.__file__).parent
BATCHES = 60
PAUSE_SECONDS = 0.02
Call = tuple[str, str, str]
"""A file in `leasehold/`, the called function, and the name of the calling thread without its number."""


def shortest_trace() -> list[Call]:
    """Return the shortest trace between two handler calls, without calls of the simulator and of this file."""
    calls: list[Call] = []
    handler_ends: list[int] = []
    lab_folder = str(ROOT.parent / "lab")
    names: dict[str, str | None] = {}

    def record_call(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            file = frame.f_code.co_filename
            if file not in names:
                inside = file.startswith(str(ROOT)) and not file.startswith(lab_folder)
                names[file] = str(Path(file).relative_to(ROOT)) if inside else None
            if (name := names[file]) is not None and not _called_from(frame, lab_folder):
                thread = threading.current_thread().name.rstrip("-0123456789")
                calls.append((name, frame.f_code.co_qualname, thread))

    def handle(_batch: leasehold.Delivery) -> None:
        handler_ends.append(len(calls))

    shards = create_even_shards(("s-0",))
    shard_log = ShardRecords(wait_seconds=PAUSE_SECONDS, size=1)
    shard_log.records += create_records(BATCHES)
    source = ListSource(shards, {shards[0].id: shard_log})
    threading.setprofile(record_call)
    with leasehold.worker(source, handle, leases=MemoryStore(), initial_position="TRIM_HORIZON") as worker:
        _wait_until(lambda: len(handler_ends) == BATCHES)
        threading.setprofile(None)
        worker.stop()
    traces = [calls[begin:end] for begin, end in pairwise(handler_ends)]
    return min(traces, key=len)


def _called_from(frame: FrameType | None, folder: str) -> bool:
    while frame is not None and not frame.f_code.co_filename.startswith(folder):
        frame = frame.f_back
    return frame is not None


def _wait_until(holds: Callable[[], bool]) -> None:
    while not holds():
        time.sleep(PAUSE_SECONDS)


def main() -> int:
    """Print the calls in order, without repetitions, and their numbers."""
    calls = shortest_trace()
    for file, name, thread in dict.fromkeys(calls):
        print(f"{thread:20} {file:44} {name}")
    files, functions = {file for file, *_ in calls}, {call[:2] for call in calls}
    print(f"{len(calls)} calls of {len(functions)} functions in {len(files)} files")
    print("threads, in turn:", " > ".join(thread for thread, _ in groupby(thread for *_, thread in calls)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
