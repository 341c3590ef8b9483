"""How long a shard is left alone between two requests: five a second are the quota of all its readers together."""

TIP_SECONDS = 0.5
BEHIND_SECONDS = 0.25
IDLE_SECONDS = 2.0
QUOTA_SECONDS = 0.2
STRETCH, STRETCH_MOST, RELIEF = 2.0, 8.0, 0.9
"""A refusal makes all pauses so many times longer, at most so many times in all; an answer makes them shorter again."""


class PollPace:
    """The pauses of one shard, from the beginning of one request to that of the next.

    poll_seconds  the least of them; None: half a second at the tip, half of that while there is more to read
    """

    def __init__(self, poll_seconds: float | None = None) -> None:
        self._tip = TIP_SECONDS if poll_seconds is None else poll_seconds
        self._behind = BEHIND_SECONDS if poll_seconds is None else poll_seconds
        self._idle = self._tip
        self._stretch = 1.0

    def throttled(self) -> None:
        """Note that the service refused: others read this shard, too."""
        self._stretch = min(STRETCH * self._stretch, STRETCH_MOST)

    def answered(self, *, idle: bool, behind: bool) -> float:
        """Seconds until the next request. Idle, nothing came and nothing is there; behind, there is more."""
        self._idle = min(2 * self._idle, max(IDLE_SECONDS, self._tip)) if idle else self._tip
        stretch, self._stretch = self._stretch, max(1.0, RELIEF * self._stretch)
        return (self._behind if behind else self._idle) * stretch


def poll_seconds_of(text: str) -> float:
    """The pause that a URL asks for. Raises ValueError."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not QUOTA_SECONDS <= seconds <= 60:  # noqa: PLR2004  a minute
        raise ValueError(
            "source URL: option 'poll_seconds' wants 0.2 to 60, for five requests a second are a shard's quota"
        )
    return seconds
