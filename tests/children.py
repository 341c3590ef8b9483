"""A child process of a test, which ends with it."""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def child(command: Sequence[str], **how: Any) -> Iterator[subprocess.Popen[str]]:  # noqa: ANN401  Popen's own
    """Start the process, and kill it if it still runs at the end of the block. A failed test waits for nothing."""
    with subprocess.Popen(command, text=True, **how) as process:
        try:
            yield process
        finally:
            process.kill()
