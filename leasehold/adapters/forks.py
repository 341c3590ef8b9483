"""Tells a forked copy of an object from the original.

A fork copies the objects of a worker, and of its threads only the one that forked. Such a copy must not wait for
threads that it does not have, and must not write as the worker whose leases it seems to hold.
"""

import os
import sys
import traceback
from typing import NoReturn

from leasehold.errors import WorkerError


class Origin:
    """The process in which an object was made."""

    def __init__(self) -> None:
        self._process = os.getpid()

    @property
    def left(self) -> bool:
        """Whether this is another process."""
        return os.getpid() != self._process

    def check(self) -> None:
        """Raise WorkerError in another process."""
        if self.left:
            raise WorkerError(
                f"this worker belongs to process {self._process}, and a fork copies none of its threads; "
                "start another one in this process"
            )

    def end_copy(self, fault: BaseException | None) -> None:
        """In another process: end it, as Python ends a program with this fault. Otherwise do nothing.

        A child that a handler has forked gets here when it leaves the handler. Nothing else runs in it, so it would
        wait forever.
        """
        if self.left:
            _end_process(fault)


def _end_process(fault: BaseException | None) -> NoReturn:
    status = 1
    try:
        if fault is None:
            status = 0
        elif not isinstance(fault, SystemExit):
            traceback.print_exception(fault)
        elif fault.code is None or isinstance(fault.code, int):
            status = fault.code or 0
        else:
            print(fault.code, file=sys.stderr)  # noqa: T201  as Python does
        for output in (sys.stdout, sys.stderr):
            if output is not None:
                output.flush()
    finally:
        os._exit(status & 0xFF)
