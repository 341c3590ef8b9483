"""Readers as child processes of the planner, on its machine; one that ends is replaced."""

import logging
import os
import subprocess
import sys
from threading import Event, Thread

from pyspark import cloudpickle

from leasehold.adapters.sources.backoff import Backoff
from leasehold.adapters.spark.readers.shelf import ReaderSpec
from leasehold.stores.printable import escaped

log = escaped(logging.getLogger("leasehold.spark"))

AGAIN_SECONDS = 0.2, 30.0
END_SECONDS = 5.0
COMMAND = (sys.executable, "-m", "leasehold.adapters.spark.readers.process")


class ReaderChildren:
    """So many readers, from its making until it is closed."""

    def __init__(self, number: int, spec: ReaderSpec) -> None:
        # Classes of the user's own program are pickled by value.
        self._spec: bytes = cloudpickle.dumps(spec)  # type: ignore[no-untyped-call]  # Spark's own
        self._over = Event()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._threads = [
            Thread(target=self._keep, args=(place,), name="leasehold-child", daemon=True) for place in range(number)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End them, and start no more: what a reader has is not needed any more, or read again."""
        self._over.set()
        for process in self._processes.values():
            process.kill()
        for thread in self._threads:
            thread.join(END_SECONDS)

    def _keep(self, place: int) -> None:
        pause = Backoff(*AGAIN_SECONDS)
        while not self._over.is_set():
            status = self._live(place)
            if not self._over.is_set():
                wait = pause.next()
                log.warning("reader %d ended with status %d, starting another in %.1f s", place, status, wait)
                self._over.wait(wait)

    def _live(self, place: int) -> int:
        """Start one, and wait for its end; its status."""
        # What it prints goes where this process prints; modules are found where this process finds them.
        path = os.pathsep.join(filter(None, sys.path))
        environment = os.environ | {"PYTHONPATH": path}
        with subprocess.Popen(COMMAND, stdin=subprocess.PIPE, env=environment) as process:  # noqa: S603  our own
            self._processes[place] = process
            if self._over.is_set():  # perhaps it was not seen
                process.kill()
            try:
                process.communicate(self._spec)
            except BrokenPipeError:
                log.debug("reader %d ended before it was told what to read", place)
            return process.wait()
