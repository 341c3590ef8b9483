"""A process of a test's own, which ends with it."""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def child(command: Sequence[str], **how: Any) -> Iterator[subprocess.Popen[str]]:  # noqa: ANN401  Popen's own
    """Start it, and kill it if it is still there when the block is left: a test that fails waits for nobody."""
    with subprocess.Popen(command, text=True, **how) as process:
        try:
            yield process
        finally:
            process.kill()
