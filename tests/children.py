"""Starts a child process of a test, and ends it with the test."""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def child(command: Sequence[str], **how: Any) -> Iterator[subprocess.Popen[str]]:  # noqa: ANN401  Popen's own
    """Start a process, and kill it at the end of the block, so that a failed test does not wait for it."""
    with subprocess.Popen(command, text=True, **how) as process:
        try:
            yield process
        finally:
            process.kill()
