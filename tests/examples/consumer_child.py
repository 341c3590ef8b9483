"""Runs a worker of the examples in its own process, with a fault: FOLDER LEASES ME SINK FAULT.

`killed`: it dies between the sink and the checkpoint. `stopped`: it stops before the sink until it is told to go on. It
prints a word and the shard for each batch.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Event, Lock

from directory import Directory
from file_sink import Fenced, FileSink

from leasehold import Delivery, run
from leasehold.adapters.options import Options
from leasehold.stores import Outcome, Write
from leasehold.stores.embedded.sqlite import SqliteStore

LEASE_SECONDS = 1.0


class Interrupted(SqliteStore):
    """A file without blocking waits, so that the process stops between two writes."""

    between = Lock()
    resumed = Event()

    def write(self, write: Write) -> Outcome:
        """Write one at a time, and none while this process is stopped."""
        with self.between:
            return super().write(write)


def main(folder: str, leases: str, me: str, sink: str, fault: str) -> None:
    kind, _, where = sink.partition(":")
    fenced: type[Exception] = Fenced
    put: Callable[[Delivery], None]
    if kind == "postgres":
        import postgres_sink  # noqa: PLC0415  its driver is not asked for otherwise

        put, fenced = postgres_sink.PostgresSink(where), postgres_sink.Fenced
    else:
        put = FileSink(Path(where))

    def handle(batch: Delivery) -> None:
        if fault == "stopped":
            with Interrupted.between:
                os.kill(os.getpid(), signal.SIGSTOP)
                Interrupted.resumed.wait()  # this thread may run for a moment before all threads are stopped
        try:
            put(batch)
        except fenced:
            sys.stdout.write(f"fenced {batch.shard}\n")
            sys.stdout.flush()
            raise
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        sys.stdout.write(f"done {batch.shard}\n")
        sys.stdout.flush()

    signal.signal(signal.SIGCONT, lambda _number, _frame: Interrupted.resumed.set())
    options = Options(worker=me, lease_seconds=LEASE_SECONDS, initial_position="TRIM_HORIZON")
    run(Directory(Path(folder)), handle, leases=Interrupted(leases), **options)


if __name__ == "__main__":
    main(*sys.argv[1:])
