"""Detects forks, ends forked copies of a program, and calls functions at the exit of a process.

A fork copies all objects, but only one thread, the one that forked. In the child, the copy of a worker or producer must
not wait for threads that were not copied. The copy must not write to the lease table either, because the original
worker in the parent still does.
"""

import atexit
import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from leasehold.errors import WorkerError

_process = object()


def current_process() -> object:
    """Return an object that identifies this process. After a fork, the child has a different object."""
    return _process


def call_at_exit(function: Callable[[], object]) -> None:
    """Register a function to call at the normal exit of this process, but not of its forked children.

    The function is also called in a child process of `multiprocessing`, which runs its own finalizers but no `atexit`
    functions.
    """
    registering_process = _process

    def call_in_this_process() -> None:
        if registering_process is _process:
            function()

    atexit.register(call_in_this_process)
    process, multiprocessing_util = (sys.modules.get(f"multiprocessing.{name}") for name in ("process", "util"))
    if process is not None and multiprocessing_util is not None and process.parent_process() is not None:
        multiprocessing_util.Finalize(None, call_in_this_process, exitpriority=0)


def _renew_process_mark() -> None:
    global _process  # noqa: PLW0603  distinguishes this process from its parent
    _process = object()


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=_renew_process_mark)


class Origin:
    """The process in which an object was created."""

    def __init__(self) -> None:
        self._process, self._id = _process, os.getpid()

    @property
    def is_other_process(self) -> bool:
        """Whether the current process is not the one that created the object."""
        return self._process is not _process

    def check_same_process(self) -> None:
        """Raise WorkerError if the current process is not the one that created the object."""
        if self.is_other_process:
            raise WorkerError(
                f"this worker belongs to process {self._id}, and a fork copies none of its threads; "
                "start another one in this process"
            )

    def end_forked_copy(self, fault: BaseException | None) -> None:
        """If this is a forked copy of the process, end it as Python ends a program that raised this exception.

        If a handler forks, the child reaches this call when it returns from the handler. If the child continued, it
        would wait forever for threads that the fork did not copy.
        """
        if self.is_other_process:
            _exit_like_python(fault)


def _exit_like_python(fault: BaseException | None) -> NoReturn:
    exit_status = 1
    try:
        if fault is None:
            exit_status = 0
        elif not isinstance(fault, SystemExit):
            traceback.print_exception(fault)
        elif fault.code is None or isinstance(fault.code, int):
            exit_status = fault.code or 0
        else:
            print(fault.code, file=sys.stderr)  # noqa: T201  as Python does
        for output in (sys.stdout, sys.stderr):
            if output is not None:
                output.flush()
    finally:
        os._exit(exit_status & 0xFF)
