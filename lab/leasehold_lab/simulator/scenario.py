"""The values that describe a simulated fleet completely, so that equal scenarios run alike.

All times are seconds since the start of the run. The functions at the end make the fleets by which rule sets are
compared, each of its size and a seed.
"""

import math
import random
from string import ascii_lowercase
from typing import Literal

from attrs import evolve, field, frozen

from leasehold.adapters.consumer.handling import Handler
from leasehold.adapters.consumer.runner import DRAIN_SECONDS
from leasehold.adapters.sources.call_patience import POLL_SECONDS
from leasehold.balancer.config import Config
from leasehold.balancer.model import TRIM_HORIZON, Position
from leasehold.stores.fields import KB
from leasehold_lab.simulator.mishaps import Misdeed, Mishap

MemberEnding = Literal["crash", "leave"]
Reshaping = Literal["split", "merge", "double", "anew", "expire", "reset"]

Acknowledging = Literal["return", "late", "random", "never"]
"""When handlers are done with a record: on return; or they checkpoint by themselves, some batches later, where chance
has it, or only at the end of a shard, as a child of a MultiLangDaemon may."""


@frozen
class Nap:
    """A time in which a process stands still, as a paused virtual machine does."""

    at: float
    seconds: float


@frozen
class Member:
    """A process of the fleet.

    worker  its id; a restarted process has the id of its predecessor
    config  its rules and cadence
    starts, ends, ending
            when it runs, and whether it dies without a word or drains
    naps    when it stands still
    phase   so long after its start it looks again, whatever it planned: fleets that begin together do not go on
            looking together
    plans   until when it plans; a zombie renews for longer than it plans
    foreign whether it stands for another library: it answers no requests for planned moves, and steals
            under the version as seen, as KCL 2.x and the Event Hubs SDKs do
    rate    how fast its clock runs
    drain_seconds
            most time for its drain
    knows_calls
            whether it reads and writes whom the bulletin calls, as earlier versions do not
    present whether it was there before the run began: it knows what a reading of the table at 0 s showed, by a clock
            that shows 0 then, and begins with its own leases. What each of a large fleet would read at its start,
            which costs workers x leases, is read once
    """

    worker: str
    config: Config
    starts: float = 0.0
    ends: float = math.inf
    ending: MemberEnding = "crash"
    naps: tuple[Nap, ...] = ()
    phase: float = 0.0
    plans: float = math.inf
    foreign: bool = False
    rate: float = 1.0
    drain_seconds: float = DRAIN_SECONDS
    knows_calls: bool = True
    present: bool = False

    def alive(self, t: float) -> bool:
        """Whether it runs then."""
        return self.starts <= t < self.ends


@frozen
class Network:
    """The faults of requests, each with its probability.

    latency    least and most seconds to an answer
    stall      a delay of 1 to 3 s
    lost       the request never arrives
    unanswered it is carried out, and the answer lost
    late       the caller gives up after 1 s, and the write arrives within `late_seconds`
    twice      the client library repeats a write whose first answer was lost: the second answer comes back
    stale      a listing, or a reading that may be stale, shows some rows as they were up to a second ago
    outages    times in which nothing is answered (throttling included)
    reading    least and most seconds to an answer of the stream
    slow       times in which each reading of the stream is answered after 6 to 25 s
    patience   the time-outs of a reading, where there are such times
    """

    latency: tuple[float, float] = (0.005, 0.05)
    stall: float = 0.002
    lost: float = 0.0
    unanswered: float = 0.002
    late: float = 0.0
    late_seconds: float = 20.0
    twice: float = 0.0
    stale: float = 0.0
    outages: tuple[Nap, ...] = ()
    reading: tuple[float, float] = (0.0, 0.0)
    slow: tuple[Nap, ...] = ()
    patience: tuple[float, ...] = POLL_SECONDS


@frozen
class Capacity:
    """The requests that the table serves, as a table of DynamoDB does; the default has no limits.

    row_bytes        length of each row
    bytes_per_second how fast one listing is read, page after page; each page shows its rows as they are then
    page_bytes       most of one page
    table_units      read units a second of the whole table, at eventual consistency 8 KB each; a listing waits for them
    row_units        read units a second of one row
    writes           writes a second of the whole table
    patience_seconds who waits for longer is refused, as a client library does that has tried again often enough
    """

    row_bytes: int = 513
    bytes_per_second: float = math.inf
    page_bytes: int = 1 << 20
    table_units: float = math.inf
    row_units: float = math.inf
    writes: float = math.inf
    patience_seconds: float = 20.0


@frozen
class Reshape:
    """A change of the stream: the shards, by place among those open, that split or merge; "double" splits all.

    "anew" deletes the stream and makes it again, with the shards and ids of the start. "expire" removes the closed
    shards from the stream, as its retention does. "reset" sets every lease back to the beginning of its shard, as an
    operator may.
    """

    at: float
    what: Reshaping
    place: int = 0


@frozen
class Emptying:
    """Rows are deleted under the running fleet: by place among the keys then, or all, as in a table made anew."""

    at: float
    places: tuple[int, ...] = ()


@frozen
class Scenario:
    """A run to simulate.

    seed      of everything that is left to chance
    owners    the owner of each lease at the start, None where it is free; its length is the number of shards
    members   every process, in the order in which they start at equal times
    seconds   how long it runs
    calm      from then on the network has no fault but latency, and nothing more happens to the fleet
    weights   the throughput of each lease in bytes per second, None where unknown; empty: all unknown
    names     the keys of the leases; empty: s-0, s-1 and so on
    reading   whether records are produced, read and checkpointed
    checkpoints
              least seconds between two checkpoints of a lease; 0: after every batch
    read_seconds
              between two readings of a shard, and between two records of one
    weighed   whether the throughput that readers measure is written down
    scan_per_cycle
              whether the table is scanned once per `cycle_seconds` and no more often, whatever the plan asks but C16
    sessions  whether the table is in layout `sessions`; where there are swaps, the second one
    swaps     when the leases are sent to a second table, back, there again, and so on; empty: there is one table
    dated     whether a listing tells how long ago each row was written, and bulletins are not free, as with blobs
    full      whether each renewal and each reading is recorded, which only a judge needs
    misdeeds  what the callables of users do besides their work
    handler   is given every batch besides; what it raises or answers is judged as a handler's of a real worker is
    mishaps   what befalls single calls, where everything is recorded
    handling_seconds
              how long a handler takes
    bench_seconds
              how long a worker leaves a lease to others that it cannot read
    start     the checkpoint of the first rows
    emptyings when rows are deleted
    if_recreated
              what all workers are told to do with a stream that was made anew
    acknowledges
              when handlers are done with a record
    capacity  what the table serves
    ranged    whether shards have hash ranges; as in the stream of a table, they have none, each rolls where it would
              split and is followed by one, and splits where it would merge, since none has two parents
    """

    seed: int
    owners: tuple[str | None, ...]
    members: tuple[Member, ...]
    seconds: float
    calm: float = 0.0
    network: Network = field(factory=Network)
    reshapes: tuple[Reshape, ...] = ()
    weights: tuple[int | None, ...] = ()
    names: tuple[str, ...] = ()
    reading: bool = False
    checkpoints: float = 0.0
    read_seconds: float = 1.0
    weighed: bool = False
    scan_per_cycle: bool = False
    dated: bool = False
    sessions: bool = False
    swaps: tuple[float, ...] = ()
    full: bool = False
    misdeeds: tuple[Misdeed, ...] = ()
    handler: Handler | None = None
    mishaps: tuple[Mishap, ...] = ()
    handling_seconds: float = 0.0
    bench_seconds: float = 60.0
    start: Position = TRIM_HORIZON
    emptyings: tuple[Emptying, ...] = ()
    if_recreated: Literal["TRIM_HORIZON", "LATEST"] | None = None
    acknowledges: Acknowledging = "return"
    capacity: Capacity = field(factory=Capacity)
    ranged: bool = True

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of the leases at the start."""
        if self.names:
            return self.names
        width = len(str(max(len(self.owners) - 1, 0)))
        return tuple(f"s-{number:0{width}d}" for number in range(len(self.owners)))


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
    """Workers join a fleet that is balanced; none joining, it is left to itself."""
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
    """A part of a balanced fleet ends at one moment."""
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
    fleet = scale_out(
        leases,
        workers,
        (),
        config,
        seed=seed,
        start="spread",
        cycles=cycles + gap * len(workers) / config.cycle_seconds,
    )
    ends = [fleet.since + gap * place for place in range(len(workers) + 1)]
    old = (evolve(each, ends=end, ending="leave") for each, end in zip(fleet.scenario.members, ends, strict=False))
    new = (Member(f"{each}x", config, starts=end - READY_SECONDS) for each, end in zip(workers, ends[1:], strict=True))
    return evolve(fleet, scenario=evolve(fleet.scenario, members=(*old, *new)))


def reshard(leases: int, workers: tuple[str, ...], config: Config, *, seed: int, cycles: float) -> FleetScenario:
    """Every shard of a balanced fleet splits: as many parents end, and twice as many children begin."""
    fleet = scale_out(leases, workers, (), config, seed=seed, start="spread", cycles=cycles)
    return evolve(fleet, scenario=evolve(fleet.scenario, reshapes=(Reshape(fleet.since, "double"),), reading=True))


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


def known(fleet: FleetScenario) -> FleetScenario:
    """The fleet, but that those who are there from the beginning have read the table before.

    Else a fleet begins with two readings of the whole table by each worker, which take longest to simulate.
    """
    members = (evolve(each, present=True, phase=0.0) if each.phase else each for each in fleet.scenario.members)
    return evolve(fleet, scenario=evolve(fleet.scenario, members=tuple(members)))


def paused(fleet: FleetScenario, per_hour: float, seed: int) -> FleetScenario:
    """The fleet with pauses: every worker stands still now and then, for 1 to 3 s."""
    draw = random.Random(seed)  # noqa: S311  a seed is the point
    members = []
    for member in fleet.scenario.members:
        naps, t = [], draw.expovariate(per_hour / 3600)
        while t < fleet.scenario.seconds:
            naps.append(Nap(t, draw.uniform(1.0, 3.0)))
            t += draw.expovariate(per_hour / 3600)
        members.append(evolve(member, naps=tuple(naps)))
    return evolve(fleet, scenario=evolve(fleet.scenario, members=tuple(members)))


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
