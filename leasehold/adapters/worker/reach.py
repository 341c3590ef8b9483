"""How far behind a lease's reading is: its owner writes it beside the throughput, so that one listing knows the fleet.

Rule 1: it is a note of ours, which every other library keeps and none reads; it travels with renewals where notes are
free, and costs a write of its own only where checkpoints alone renewed a lease for `TELL_SECONDS`. Rule 2: times in it
are of the owner's wall clock; whoever reads it can only trust them as far as the clocks of the two agree.
"""

import json
import math
from collections.abc import Callable
from threading import Lock
from typing import Any

from attrs import asdict, evolve, frozen

from leasehold.adapters.sources.protocol import Batch
from leasehold.balancer.model import Lease, Notes

NOTE = "reach"
"""Our attribute with a `Reach` as JSON."""

TELL_SECONDS = 20.0
"""A lease that checkpoints alone renew is renewed for the note's sake after so many seconds."""

FIRST_SECONDS = 3.0
"""A new owner tells so soon, or a look would miss the lag of what has just moved."""

SILENT_SECONDS = 30.0
"""A reader that read nothing for longer is behind by that time too: what arrived since, nobody knows."""

LARGEST = 1e12
"""No time and no count of a real row comes near."""


@frozen
class Reach:
    """How far the reading of a lease has come, as its owner told.

    at       when this was written, seconds since 1970
    owner    the worker that wrote it
    host     the machine it runs on
    moves    how often the lease passed from one worker to another, as far as our workers saw
    behind   seconds behind the tip of the shard: of the last reading, and longer while its batch is not done
    end      whether the last reading reached the tip, and its batch is done
    arrived  when the last record that was done had arrived in the stream, seconds since 1970
    read     when the shard was last read, seconds since 1970
    """

    at: float
    owner: str
    host: str = ""
    moves: int = 0
    behind: float | None = None
    end: bool = False
    arrived: float | None = None
    read: float | None = None

    @property
    def note(self) -> str:
        """The text of the note; what is unknown is left out."""
        known = {name: value for name, value in asdict(self).items() if value is not None and value is not False}
        return json.dumps({name: value for name, value in known.items() if value != ""})

    def lag(self, now: float, *, held: bool) -> float | None:
        """Seconds behind at `now`, at most: what nobody reads since may be as old as the silence.

        held  whether a living owner reads it
        """
        if self.behind is None:
            return None
        silence = max(0.0, now - self.at)
        return self.behind + (0.0 if held and silence <= SILENT_SECONDS + TELL_SECONDS else silence)


def reach_of(lease: Lease) -> Reach | None:
    """The reach that the row tells, or None where it tells nothing that can be read."""
    try:
        said = json.loads(lease.note(NOTE) or "null")
        return Reach(**said) if isinstance(said, dict) and _fits(said) else None
    except (ValueError, TypeError, RecursionError):
        return None


def _fits(said: dict[str, Any]) -> bool:
    times = [said[name] for name in ("at", "behind", "arrived", "read") if name in said]
    moves = said.get("moves", 0)
    texts = all(isinstance(said.get(name, ""), str) for name in ("owner", "host"))
    return (
        texts and all(map(_time, times)) and isinstance(moves, int) and _time(moves) and said.get("end", True) is True
    )


def _time(value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 <= value < LARGEST  # type: ignore[operator]  # it is a number by now


class ReachMeter:
    """Measures how far the reading of one held lease has come; silent until `tell` is called.

    lease  as it was when it became ours: its note tells how often it has moved before
    me     its owner

    `moved` says whether another worker had the lease before, as far as the note tells.
    """

    def __init__(self, lease: Lease, me: str) -> None:
        before = reach_of(lease)
        moved = before is not None and before.owner != me
        self.moved = moved
        self._now = Reach(
            0.0, me, moves=(before.moves if before else 0) + moved, behind=before.behind if before else None
        )
        self._wall: Callable[[], float] | None = None
        self._behind: float | None = None
        self._read = self._told = -math.inf
        self._unfinished = False
        self._arriving: float | None = None
        self._lock = Lock()

    def tell(self, host: str, wall: Callable[[], float], now: float) -> None:
        """Write notes from now on; `wall` tells seconds since 1970."""
        self._wall, self._told = wall, now + FIRST_SECONDS - TELL_SECONDS
        self._now = evolve(self._now, host=host)

    def read(self, batch: Batch, now: float) -> None:
        """Note a reading, before its batch is handled."""
        with self._lock:
            self._behind = batch.behind_seconds if batch.behind_seconds is not None else self._behind
            self._read, self._unfinished = now, bool(batch.count)
            self._arriving = batch.last_arrived

    def done(self) -> None:
        """Note that what was read last is done."""
        with self._lock:
            self._unfinished = False
            if self._arriving is not None:
                self._now = evolve(self._now, arrived=self._arriving)

    def behind(self, now: float) -> float | None:
        """Seconds behind the tip now; None before the first reading that knew."""
        with self._lock:
            return self._behind_at(now)

    def _behind_at(self, now: float) -> float | None:
        if self._behind is None:
            return None
        silence = now - self._read
        return self._behind + (silence if self._unfinished or silence > SILENT_SECONDS else 0.0)

    def untold(self, now: float) -> bool:
        """Whether the last note is old."""
        told = self._wall is not None and self._read > -math.inf
        return told and now - self._told >= TELL_SECONDS

    def notes(self, now: float) -> Notes:
        """The note to write now; none before anything was read, or while silent."""
        if self._wall is None or self._read == -math.inf:
            return ()
        with self._lock:
            self._told, wall = now, self._wall()
            behind = self._behind_at(now)
            told = evolve(
                self._now,
                at=round(wall, 3),
                behind=None if behind is None else round(behind, 3),
                end=behind == 0.0,
                read=round(wall - (now - self._read), 3),
            )
        return ((NOTE, told.note),)
