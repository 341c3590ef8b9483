"""kcl-rust: what is free, greedily; else one lease from a worker with two more (rules R1 and R2).

Source: the README of kcl-rust, "Spawning". Which of the fullest it robs is not stated there; here it
is drawn by chance among those with the most leases.
"""

from balancer.actions import Action, Claim, Steal
from balancer.census import Census
from balancer.chance import digest_under, drawn
from balancer.config import Config, KclRust
from balancer.model import Me


def take(census: Census, me: Me, _config: Config, rules: KclRust) -> tuple[Action, ...]:
    """What this worker takes in one turn."""
    mine = len(census.mine)
    room = len(census.leases) if rules.max_leases is None else rules.max_leases - mine
    if census.free or census.expired:  # R1
        loot = drawn(census.available, me, min(rules.leases_to_acquire, room))
        return tuple(Claim(lease, rule="R1") for lease in loot)
    most = max(census.counts.values())
    if most < mine + 2 or room < 1:  # R2: two more, or the lease would only change places
        return ()
    digest = digest_under(f"{me.worker}\0{me.turn}")
    fullest = (owner for owner, count in census.counts.items() if count == most)
    victim = min(fullest, key=lambda owner: (digest(owner), owner))
    return tuple(Steal(lease, victim=victim, rule="R2") for lease in drawn(census.held_by({victim}), me, 1))
