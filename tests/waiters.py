"""Time in tests: a clock that the test moves, waiting for other threads, and boto3's waiters."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from attrs import define

if TYPE_CHECKING:
    from types_boto3_kinesis.type_defs import WaiterConfigTypeDef

WAIT = 120
"""Seconds: no test needs them, and one that fails may take as long on a busy machine."""

# Stand-ins create a stream in milliseconds, but a waiter's default minimum delay is a second.
# The test's time limit bounds the number of attempts.
AT_ONCE: "WaiterConfigTypeDef" = {"Delay": 0, "MaxAttempts": 100_000}


@define
class Clock:
    """A clock that moves only when told to."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now

    def monotonic(self) -> float:
        """The clock under the name that the module `time` uses."""
        return self.now

    def monotonic_ns(self) -> int:
        return int(self.now * 1e9)

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def until(look: Callable[[], Any], what: str = "what others do", seconds: float = WAIT) -> Any:  # noqa: ANN401  any value
    """Call it until it returns something, and return that; if it takes too long, raise with the last result."""
    deadline = time.monotonic() + seconds
    while not (result := look()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.01)
    return result
