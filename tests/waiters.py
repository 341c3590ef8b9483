"""Helpers for time in tests: a clock that the test moves, waits for other threads, and settings of boto3's waiters."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from attrs import define

if TYPE_CHECKING:
    from types_boto3_kinesis.type_defs import WaiterConfigTypeDef

WAIT = 120
"""The limit of a wait in seconds. Only failing tests reach it, even on a busy machine."""

# Local services create a stream in milliseconds, but waiters of boto3 normally wait for seconds. The test's time limit
# ends the attempts.
AT_ONCE: "WaiterConfigTypeDef" = {"Delay": 0, "MaxAttempts": 100_000}


@define
class Clock:
    """A clock that moves only when told to."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now

    def monotonic(self) -> float:
        """The current time, under the name that the module `time` uses."""
        return self.now

    def monotonic_ns(self) -> int:
        return int(self.now * 1e9)

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def until(condition: Callable[[], Any], expectation: str = "what others do", seconds: float = WAIT) -> Any:  # noqa: ANN401  any value
    """Call `condition` until it returns a truthy value, and return the value. Raises AssertionError after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {expectation}"
        time.sleep(0.01)
    return result
