"""How often a shard left a living reader, against the least that any balanced division would have needed.

A history is cut at each incident. What is read at the end of a part, and by whom at its start, says how few moves
would have done: shards that are new, or whose reader died, go where they are wanted for nothing.
"""

from collections.abc import Mapping
from itertools import pairwise

from leasehold.adapters.history.events import RunHistory
from leasehold.adapters.history.lives import alive_at, lives
from leasehold.adapters.history.tenures import Tenure
from leasehold.balancer.rules.groups import least_moves


def moves(history: RunHistory, tenures: Mapping[str, list[Tenure]]) -> tuple[int, int]:
    """Moves made, and the least possible, up to the incident called end."""
    done = least = 0
    all_lives = lives(history.incidents)
    for incident, following in pairwise(sorted(history.incidents, key=lambda incident: incident.t)):
        if incident.what == "end":
            break
        living = alive_at(all_lives, incident.t)
        done += sum(
            before.worker in living and before.worker != after.worker
            for readers in tenures.values()
            for before, after in pairwise(readers)
            if incident.t <= after.begin < following.t
        )
        there = [readers for readers in tenures.values() if _reader_at(readers, following.t) is not None]
        least += least_moves({each[0].shard: _reader_at(each, incident.t) for each in there}, living)
    return done, least


def _reader_at(readers: list[Tenure], t: float) -> str | None:
    return next((tenure.worker for tenure in reversed(readers) if tenure.begin < t <= tenure.end), None)
