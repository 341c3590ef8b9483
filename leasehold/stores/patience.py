"""The time that one request of a store may take: several must fit into a lease, or a stalled one costs it."""

from attrs import frozen

TRY_SECONDS = 2.5
"""A try that is given less is not worth repeating: better one that is waited for."""

PAUSE_SECONDS = 4.0
"""The longest that an SDK waits before it repeats a reading."""


@frozen
class Patience:
    """The time limits and retries of an SDK.

    connect_seconds, read_seconds  of one try
    attempts                       most tries of a reading; a write is always sent once
    """

    connect_seconds: float
    read_seconds: float
    attempts: int

    def within(self, seconds: float | None) -> "Patience":
        """As much of it as takes at most so many seconds, pauses included; all of it for None."""
        if seconds is None:
            return self
        attempts = next((most for most in range(self.attempts, 1, -1) if _each(seconds, most) >= TRY_SECONDS), 1)
        scale = min(1.0, _each(seconds, attempts) / (self.connect_seconds + self.read_seconds))
        return Patience(scale * self.connect_seconds, scale * self.read_seconds, attempts)


def _each(seconds: float, attempts: int) -> float:
    return (seconds - PAUSE_SECONDS * (attempts - 1)) / attempts
