"""A newcomer waits for others who join now, before it takes leases from the living (C10)."""

from collections.abc import Iterable

from leasehold.balancer.model import History, Lease, Me
from leasehold.balancer.rule_set import FleetSeconds

GATHER = 0.5
"""A newcomer waits for so many `lease_seconds` after each change of the fleet for the next change (C10)."""
MOST_SECONDS = 10.0
"""Where nothing is heard, leases may be long because renewals are dear; joiners come no later for that."""


def awaits_joiners(leases: Iterable[Lease], me: Me, config: FleetSeconds) -> bool:
    """C10: whether this worker, new here, waits for others who join now before it takes from the living.

    Shares computed without them would be taken, and taken away again. The wait ends a cycle after its first lease.
    """
    history = me.history
    # 0.8: whoever reads once a cycle waits a cycle for everybody else already.
    seldom = history.hearing is None and history.full_apart >= 0.8 * config.cycle_seconds
    # 0.8: four of the five seconds, for readings measure a little less than the whole wait.
    if seldom or history.fleet_still >= 0.8 * GATHER * _scale(history, config):
        return False
    here = max((lease.held for lease in leases if lease.owner == me.worker), default=0.0)
    return here < config.cycle_seconds


def until_gathered(history: History, config: FleetSeconds) -> float:
    """C10: a newcomer lists again soon after a listing that showed a change, else when the wait is over.

    Those who start together would otherwise see each other only when the waiting should be over, and wait once more.
    """
    scale = _scale(history, config)
    wait, stood = GATHER * scale, history.fleet_still - history.full_still
    if stood <= 0:
        # 0.1: a second, in which others that start now take their first lease and are seen.
        return 0.1 * scale
    return wait - stood if stood < wait else wait


def _scale(history: History, config: FleetSeconds) -> float:
    return config.lease_seconds if history.hearing is not None else min(config.lease_seconds, MOST_SECONDS)
