"""What tests of real sessions wait for: things that are seen from outside, within a stated time."""

import time
from collections.abc import Callable

WAIT = 120
"""So many seconds: a session starts Java processes, on a machine that may have much else to do."""


def until(true: Callable[[], object], what: str, seconds: float = WAIT) -> None:
    """Wait until this holds; of what does not hold in time, say what it was."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.1)
