"""Readers as child processes of the planner, on its machine; one that ends is replaced."""

import logging
import os
import subprocess
import sys

from pyspark import cloudpickle

from leasehold.adapters.spark.readers.keeping import KeptReaders
from leasehold.adapters.spark.readers.shelf import ReaderSpec
from leasehold.stores.printable import escaped

log = escaped(logging.getLogger("leasehold.spark"))

COMMAND = (sys.executable, "-m", "leasehold.adapters.spark.readers.process")


class ReaderChildren(KeptReaders):
    """So many children, from `begin` until they are closed."""

    def __init__(self, number: int, spec: ReaderSpec) -> None:
        super().__init__(number)
        # Classes of the user's own program are pickled by value.
        self._spec: bytes = cloudpickle.dumps(spec)  # type: ignore[no-untyped-call]  # Spark's own
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def _end(self) -> None:
        for process in list(self._processes.values()):  # one may be starting
            process.kill()

    def _live(self, place: int) -> str:
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
            return f"status {process.wait()}"
