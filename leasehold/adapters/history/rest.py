"""The laws of a fleet at rest: everything has a living owner, nothing is written but renewals, and all is even."""

from collections import Counter
from collections.abc import Iterator

from leasehold.adapters.history.breach import Breach, Limits
from leasehold.adapters.history.events import RunHistory, WriteVerb, worker_of
from leasehold.adapters.history.lives import alive_at, lives
from leasehold.adapters.history.ownership import changes, owners_at, unowned
from leasehold.balancer.rules.groups import least_moves

QUIET_VERBS: frozenset[WriteVerb] = frozenset({"renew", "checkpoint", "checkpoint-late", "annotate", "take-back"})
"""The writes of a fleet at rest; the last two only end a planned move that has been counted."""


def planners(history: RunHistory, t: float) -> frozenset[str]:
    """The workers that run then and plan: without one nothing can be asked of a fleet."""
    zombies = {worker_of(each.subject) for each in history.incidents if each.what == "zombie"}
    return alive_at(lives(history.incidents), t) - zombies


def rest_breaches(history: RunHistory, limits: Limits, settled: float) -> Iterator[Breach]:
    """The breaches as of `settled`, if a worker that plans is alive then."""
    yield from _restless(history, settled)
    yield from _needless(history, limits)
    there = planners(history, settled)
    if not there:
        return
    for key, seconds in unowned(history, history.end, settled).items():
        if seconds > 0.0:
            why = f"{key} had no living owner for {seconds:.3f} s, when everybody had long been left in peace"
            yield Breach("held by nobody", history.end, why)
    if limits.even:
        yield from _uneven(history, there)


def _restless(history: RunHistory, settled: float) -> Iterator[Breach]:
    for write in history.writes:
        # The lease of an ended shard may be deleted whenever a worker lists the shards.
        cleared = write.verb == "delete" and write.before is not None and write.before.ended
        if write.t > settled and write.verb not in QUIET_VERBS and not cleared:
            lease = f"{write.key} ({write.before.owner if write.before else None})"
            why = f"{write.process} wrote a {write.verb} of {lease}, {'done' if write.done else 'refused'}"
            yield Breach("action at balance", write.t, why)


def _uneven(history: RunHistory, there: frozenset[str]) -> Iterator[Breach]:
    workers = alive_at(lives(history.incidents), history.end - 1e-9)
    held = Counter(owner for owner in owners_at(history, history.end).values() if owner is not None)
    most = max(workers, key=lambda worker: (held[worker], worker))
    least = min(there, key=lambda worker: (held[worker], worker))
    if held[most] - held[least] > 1:
        yield Breach("uneven", history.end, f"{most} holds {held[most]} leases, and {least} {held[least]}")


def _needless(history: RunHistory, limits: Limits) -> Iterator[Breach]:
    """Blame the last of the moves beyond the least: no single move can be called needless."""
    if limits.moves is None:
        return
    since, more = limits.moves
    all_lives = lives(history.incidents)
    workers = alive_at(all_lives, history.end - 1e-9)
    least = least_moves(owners_at(history, since), workers, limits.groups)
    moved = [
        change
        for change in changes(history.writes)
        if change.t >= since and change.before in alive_at(all_lives, change.t)
    ]
    for place, change in enumerate(moved[least + more :], least + more + 1):
        why = f"{change.key} from {change.before} to {change.after} is move {place}, and {least} would have done"
        yield Breach("needless move", change.t, why)
