"""Readers on executors: how the planner asks for them, and what their tasks do."""

import logging
import os
import socket
from collections.abc import Callable
from contextlib import suppress

from attrs import evolve
from pyspark import cloudpickle

from leasehold.adapters.reading.runner import READABLE
from leasehold.adapters.spark.fetching import received
from leasehold.adapters.spark.readers.jobs import ROOM, TEXT_MOST, WISH
from leasehold.adapters.spark.readers.reader import ShardReader
from leasehold.adapters.spark.readers.shelf import ReaderSpec
from leasehold.adapters.spark.runner_process import speak, unpacking
from leasehold.adapters.threads import spawn
from leasehold.stores.printable import escaped, said

log = escaped(logging.getLogger("leasehold.spark"))

CONNECT_SECONDS = 30.0


class ExecutorReaders:
    """Readers that the program which called `register` keeps on executors; they end with the connection to it.

    executors, slots  how many there are now
    """

    def __init__(self, place: str) -> None:
        """Connect. Raises ValueError if that program is gone."""
        self._closed = False
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.settimeout(CONNECT_SECONDS)
        try:
            self._connection.connect(place)
            self.executors, self.slots = ROOM.unpack(received(self._connection, ROOM.size))
        except OSError as fault:
            self._connection.close()
            raise ValueError(
                f"option lease.readers: the program that called register(spark) starts readers on executors, and does "
                f"not answer ({fault}); call it again, where the query is started"
            ) from fault

    def begin(self, number: int, spec: ReaderSpec, told: Callable[[str], None]) -> None:
        """Have so many started, and be told why one has ended. Raises OSError."""
        packed: bytes = cloudpickle.dumps(unpacking(ReaderTask, {"spec": spec}))  # type: ignore[no-untyped-call]
        self._connection.sendall(WISH.pack(number, len(packed)) + packed)
        self._connection.settimeout(None)
        spawn("leasehold-jobs", lambda: self._listen(told), lambda fault: told(f"readers are not heard: {said(fault)}"))

    def _listen(self, told: Callable[[str], None]) -> None:
        with suppress(OSError), self._connection.makefile("rb") as lines:
            for line in lines:
                told(line.decode(errors="replace").strip())
        if not self._closed:
            told("the program that called register(spark) is gone, and the readers with it")

    def close(self) -> None:
        """Have them end."""
        self._closed = True
        with suppress(OSError):  # the program may be gone
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


class ReaderTask:
    """A reader as a task of Spark's."""

    spec: ReaderSpec

    def run(self) -> str:
        """Read until the planner is gone; why it has ended."""
        speak()
        spec, here = self.spec, socket.gethostname()
        # A folder of the driver's machine need not be on this one.
        spec = evolve(spec, folder=spec.folder if os.path.isdir(spec.folder) else "")  # noqa: PTH112  "" is none
        try:
            ShardReader(spec).run()
        except OSError as fault:
            host, port = spec.planner
            return f"{fault}: an executor on {here} cannot reach the driver at {host}, port {port}"
        except READABLE as fault:
            return f"{fault}, on {here}"[:TEXT_MOST]
        return f"the end of its connection to the driver, on {here}"
