"""The life of each process: when it started, was told to go, and ended."""

import math
from collections.abc import Iterable

from attrs import evolve, frozen

from leasehold.adapters.history.events import Incident, worker_of


@frozen
class Life:
    """A process of a worker, from its start to its end; `leaves` is when it was told to go."""

    worker: str
    process: str
    start: float
    leaves: float = math.inf
    end: float = math.inf


def lives(incidents: Iterable[Incident]) -> tuple[Life, ...]:
    """Every process, in order of start; of two of one name the later begins when the earlier is over."""
    found: list[Life] = []
    latest: dict[str, int] = {}
    for incident in sorted(incidents, key=lambda incident: incident.t):
        match incident.what:
            case "start":
                latest[incident.subject] = len(found)
                found.append(Life(worker_of(incident.subject), incident.subject, incident.t))
            case "leave" | "crash" | "gone" if incident.subject in latest:
                life = found[latest[incident.subject]]
                end = life.end if incident.what == "leave" else incident.t
                found[latest[incident.subject]] = evolve(life, leaves=min(life.leaves, incident.t), end=end)
            case _:
                pass
    return tuple(found)


def alive_at(all_lives: Iterable[Life], t: float) -> frozenset[str]:
    """The workers that run then and have not been told to go."""
    return frozenset(life.worker for life in all_lives if life.start <= t < life.leaves)
