"""Detects forks, and calls functions at the exit of a process: a fork copies every object, and no other thread."""

import atexit
import os
import sys
from collections.abc import Callable

_process = object()


def current_process() -> object:
    """Return an object that stands for this process. After a fork, the child has another."""
    return _process


def call_at_exit(call: Callable[[], object]) -> None:
    """Call this when the process that calls us ends by itself; its forked children leave it out.

    A child process of `multiprocessing` calls no `atexit` function, only finalizers of its own.
    """
    here = _process

    def called() -> None:
        if here is _process:
            call()

    atexit.register(called)
    process, util = (sys.modules.get(f"multiprocessing.{name}") for name in ("process", "util"))
    if process is not None and util is not None and process.parent_process() is not None:
        util.Finalize(None, called, exitpriority=0)


def _forked() -> None:
    global _process  # noqa: PLW0603  it tells this process from its parent
    _process = object()


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=_forked)
