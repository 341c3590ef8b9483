"""Named scenarios: the fleets by which rule sets are compared, each a function of its size and a seed."""

import random
from string import ascii_lowercase
from typing import Literal

from attrs import evolve, frozen

from leasehold.adapters.proving.simulator.scenario import Member, Nap, Network, Reshape, Scenario
from leasehold.balancer.config import Config
from leasehold.stores.fields import KB

StartPattern = Literal["spread", "together"]
TOGETHER_SECONDS = 0.1
SETTLE_CYCLES = 2
READY_SECONDS = 1.0


@frozen
class FleetScenario:
    """A scenario, and when what it is about begins."""

    scenario: Scenario
    since: float


def group_of(number: int, workers: int) -> tuple[str, ...]:
    """The ids of one group: a-000, a-001 ..."""
    name = ascii_lowercase[number] if number < len(ascii_lowercase) else f"g{number}"
    return tuple(f"{name}-{worker:0{max(3, len(str(workers - 1)))}d}" for worker in range(workers))


def cold(
    leases: int, workers: tuple[str, ...], config: Config, *, seed: int, start: StartPattern, cycles: float
) -> FleetScenario:
    """Every lease free, every worker new."""
    draw = random.Random(seed)  # noqa: S311  a seed is the point
    members = _starting(workers, config, 0.0, start, draw)
    return _fleet(seed, (None,) * leases, members, since=0.0, seconds=cycles * config.cycle_seconds)


def scale_out(
    leases: int,
    present: tuple[str, ...],
    joining: tuple[str, ...],
    config: Config,
    *,
    seed: int,
    start: StartPattern,
    cycles: float,
) -> FleetScenario:
    """Workers join a fleet that is balanced."""
    draw = random.Random(seed)  # noqa: S311  a seed is the point
    since = SETTLE_CYCLES * config.cycle_seconds
    members = (*_present(present, config, draw), *_starting(joining, config, since, start, draw))
    return _fleet(seed, balanced(leases, present, draw), members, since=since, seconds=cycles * config.cycle_seconds)


def shrink(
    leases: int,
    workers: tuple[str, ...],
    going: int,
    config: Config,
    *,
    seed: int,
    ending: Literal["crash", "leave"],
    cycles: float,
) -> FleetScenario:
    """Some workers of a balanced fleet end at one moment."""
    draw = random.Random(seed)  # noqa: S311  a seed is the point
    since = SETTLE_CYCLES * config.cycle_seconds
    gone = frozenset(draw.sample(workers, going))
    members = tuple(
        evolve(member, ends=since, ending=ending) if member.worker in gone else member
        for member in _present(workers, config, draw)
    )
    return _fleet(seed, balanced(leases, workers, draw), members, since=since, seconds=cycles * config.cycle_seconds)


def rolling(
    leases: int, workers: tuple[str, ...], config: Config, *, gap: float, seed: int, cycles: float
) -> FleetScenario:
    """Each worker leaves in turn, and a new one comes in its place a moment before the next leaves.

    As whoever restarts a fleet in turn waits until the new process runs before the next is told to go.
    """
    draw = random.Random(seed)  # noqa: S311  a seed is the point
    since = SETTLE_CYCLES * config.cycle_seconds
    old = tuple(
        evolve(member, ends=since + gap * place, ending="leave")
        for place, member in enumerate(_present(workers, config, draw))
    )
    new = tuple(
        Member(f"{worker}x", config, starts=since + gap * (place + 1) - READY_SECONDS)
        for place, worker in enumerate(workers)
    )
    seconds = cycles * config.cycle_seconds + gap * len(workers)
    return _fleet(seed, balanced(leases, workers, draw), (*old, *new), since=since, seconds=seconds)


def reshard(leases: int, workers: tuple[str, ...], config: Config, *, seed: int, cycles: float) -> FleetScenario:
    """Every shard of a balanced fleet splits: as many parents end, and twice as many children begin."""
    draw = random.Random(seed)  # noqa: S311  a seed is the point
    since = SETTLE_CYCLES * config.cycle_seconds
    members = _present(workers, config, draw)
    fleet = _fleet(seed, balanced(leases, workers, draw), members, since=since, seconds=cycles * config.cycle_seconds)
    return evolve(fleet, scenario=evolve(fleet.scenario, reshapes=(Reshape(since, "double"),), reading=True))


def weighed(leases: int, workers: tuple[str, ...], config: Config, *, seed: int, cycles: float) -> FleetScenario:
    """Nothing happens to a fleet of even counts, but its leases differ in throughput."""
    draw = random.Random(seed)  # noqa: S311  a seed is the point
    members = _present(workers, config, draw)
    fleet = _fleet(seed, balanced(leases, workers, draw), members, since=0.0, seconds=cycles * config.cycle_seconds)
    weights = tuple(round(64 * KB * draw.lognormvariate(0.0, 1.0)) for _ in range(leases))
    return evolve(fleet, scenario=evolve(fleet.scenario, weights=weights))


def mixed(fleet: FleetScenario, peer: Config, share: float, seed: int) -> FleetScenario:
    """The fleet with only a share of the workers under its rules; the others have a peer's."""
    draw = random.Random(seed)  # noqa: S311  a seed is the point
    workers = sorted({member.worker for member in fleet.scenario.members})
    ours = frozenset(draw.sample(workers, round(share * len(workers))))
    members = tuple(
        member if member.worker in ours else evolve(member, config=peer, foreign=True)
        for member in fleet.scenario.members
    )
    return evolve(fleet, scenario=evolve(fleet.scenario, members=members))


def paused(fleet: FleetScenario, per_hour: float, seed: int) -> FleetScenario:
    """The fleet with pauses: every worker stands still now and then, for 1 to 3 s."""
    draw = random.Random(seed)  # noqa: S311  a seed is the point
    members = tuple(
        evolve(member, naps=_naps(draw, fleet.scenario.seconds, per_hour)) for member in fleet.scenario.members
    )
    return evolve(fleet, scenario=evolve(fleet.scenario, members=members))


def balanced(leases: int, workers: tuple[str, ...], draw: random.Random) -> tuple[str | None, ...]:
    """Owners of leases, as even as can be, in an order drawn by chance."""
    owners = [workers[number % len(workers)] for number in range(leases)]
    draw.shuffle(owners)
    return tuple(owners)


def _present(workers: tuple[str, ...], config: Config, draw: random.Random) -> tuple[Member, ...]:
    """There from the beginning, each looking at its own time of the cycle.

    All begin within a second: longer, and those whose leases wait for them would seem to be slow to renew.
    """
    return tuple(
        evolve(member, starts=draw.uniform(0.0, 1.0), phase=draw.uniform(0.0, config.cycle_seconds))
        for member in _starting(workers, config, 0.0, "together", draw)
    )


def _starting(
    workers: tuple[str, ...], config: Config, at: float, start: StartPattern, draw: random.Random
) -> tuple[Member, ...]:
    """The start of each worker: spread over a cycle, or all at once."""
    within = config.cycle_seconds if start == "spread" else TOGETHER_SECONDS
    foreign = not config.rules.keeps_lookout
    return tuple(Member(worker, config, at + draw.uniform(0.0, within), foreign=foreign) for worker in workers)


def _fleet(
    seed: int, owners: tuple[str | None, ...], members: tuple[Member, ...], *, since: float, seconds: float
) -> FleetScenario:
    end = since + seconds
    return FleetScenario(Scenario(seed, owners, members, end, calm=end, network=Network()), since)


def _naps(draw: random.Random, seconds: float, per_hour: float) -> tuple[Nap, ...]:
    naps = []
    t = draw.expovariate(per_hour / 3600)
    while t < seconds:
        naps.append(Nap(t, draw.uniform(1.0, 3.0)))
        t += draw.expovariate(per_hour / 3600)
    return tuple(naps)
