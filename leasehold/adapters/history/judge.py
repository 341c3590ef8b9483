"""Judges a run, real or simulated, by its history alone, and explains what must not be.

Rule 1: nothing here asks a stream, a table, a worker or a clock; the program that ran the fleet recorded all of it.
Rule 2: a breach says what, when and why, never a mere False.
Rule 3: a law is judged where what it speaks of was recorded. Records sent and handed over are enough for losses,
order, duplicates, tokens and gaps; writes, and the times of readings and of finished handlers, allow the others.
Writes come as the table took them, or as each process saw the answers to its own: then two are compared only where
one was answered before the other was sent.
Rule 4: a fault is named by the program that caused it; a long wait or a repetition that none explains is a breach.
"""

from leasehold.adapters.history.answers import answer_breaches
from leasehold.adapters.history.breach import Breach, Limits
from leasehold.adapters.history.events import RunHistory
from leasehold.adapters.history.explanations import Explanations
from leasehold.adapters.history.records import record_breaches
from leasehold.adapters.history.rest import planners, rest_breaches
from leasehold.adapters.history.rights import write_breaches
from leasehold.adapters.history.tenures import by_shard, reading_of


def judge(history: RunHistory, limits: Limits) -> tuple[Breach, ...]:
    """Every breach, in order of time; none for a good run."""
    due = limits.settled is None or bool(planners(history, limits.settled))
    reading = reading_of(history)
    breaches = [
        *record_breaches(history, reading, limits, all_due=due),
        *Explanations(history, by_shard(reading.tenures), limits).breaches(),
        *write_breaches(history, limits),
        *answer_breaches(history, limits),
        *(Breach("unforeseen", history.end, fault) for fault in history.faults if not limits.misdeeds),
        *(rest_breaches(history, limits, limits.settled) if limits.settled is not None else ()),
    ]
    return tuple(sorted(breaches, key=lambda breach: breach.t))
