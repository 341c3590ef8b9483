"""Runs a worker of the examples in a process of its own, with a fault.

The arguments are FOLDER LEASES ME SINK FAULT. With the fault `killed`, the worker dies between the write to the sink
and the checkpoint. With `stopped`, it stops before the write until it gets SIGCONT. For each batch, it prints `done` or
`fenced`, and the shard.
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
    """A lease table in which no write is in progress while the process is stopped."""

    between = Lock()
    resumed = Event()

    def write(self, write: Write) -> Outcome:
        """Make one write at a time, and none while this process is stopped."""
        with self.between:
            return super().write(write)


def main(folder: str, leases: str, me: str, sink: str, fault: str) -> None:
    kind, _, location = sink.partition(":")
    fenced: type[Exception] = Fenced
    put: Callable[[Delivery], None]
    if kind == "postgres":
        import postgres_sink  # noqa: PLC0415  its driver is not asked for otherwise

        put, fenced = postgres_sink.PostgresSink(location), postgres_sink.Fenced
    else:
        put = FileSink(Path(location))

    def handle(batch: Delivery) -> None:
        if fault == "stopped":
            with Interrupted.between:
                os.kill(os.getpid(), signal.SIGSTOP)
                Interrupted.resumed.wait()  # this thread may still run for a moment after SIGSTOP was sent
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
