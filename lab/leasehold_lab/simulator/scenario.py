"""The values that completely describe a simulated fleet, so that equal scenarios have equal runs.

All times are seconds since the start of the run. The functions at the end build the fleets on which rule sets are
compared, each from its size and a seed.
"""

import math
import random
from string import ascii_lowercase
from typing import Literal

from attrs import evolve, field, frozen

from leasehold.adapters.consumer.handling import Handler
from leasehold.adapters.consumer.runner import DRAIN_SECONDS
from leasehold.adapters.sources.call_timeouts import POLL_TIMEOUTS
from leasehold.balancer.config import Config
from leasehold.balancer.model import TRIM_HORIZON, Position
from leasehold.stores.fields import KB
from leasehold_lab.simulator.call_faults import CallableFault, CallFault

MemberEnding = Literal["crash", "leave"]
Reshaping = Literal["split", "merge", "double", "anew", "expire", "reset"]

Acknowledging = Literal["return", "late", "random", "never"]
"""When a handler has finished with a record.

"return" means when it returns. In the other cases handlers checkpoint by themselves: some batches later, at random, or
only at the end of a shard, as a child of a MultiLangDaemon may.
"""


@frozen
class Nap:
    """A period in which a process is paused, as in a suspended virtual machine."""

    at: float
    seconds: float


@frozen
class Member:
    """A process of the fleet.

    Attributes:
        worker: Its id; a restarted process has the id of its predecessor.
        config: Its rules, and how often it acts.
        starts: When it starts.
        ends: When it ends.
        ending: Whether it then dies without warning, or drains.
        naps: When it is paused.
        phase: How long after its start it looks a second time, regardless of its plan. This keeps members that start
            together from always looking at the same time.
        plans: Until when it plans. A zombie continues to renew after that.
        foreign: Whether it stands for another library: it answers no requests for planned moves, and steals under the
            version that it saw, as KCL 2.x and the Event Hubs SDKs do.
        rate: How fast its clock runs.
        drain_seconds: The longest that its drain may take.
        knows_calls: Whether it reads and writes the calls in the bulletin, which earlier versions do not.
        present: Whether it was running before the run began. It then knows the table as of 0 s, by a clock that shows 0
            at that time, and starts with its own leases. The table is read only once for all such members, because
            reading it at the start of each would cost workers x leases.
        deaf: When it gets no response from the stream.
        deaf_to: The shards about which it gets no response; if empty, about none.
        gives_up_seconds: How long its calls then wait for one; infinite if they never return.
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
    deaf: tuple[Nap, ...] = ()
    deaf_to: frozenset[str] = frozenset()
    gives_up_seconds: float = POLL_TIMEOUTS[0]

    def alive(self, t: float) -> bool:
        """Whether it is running at `t`."""
        return self.starts <= t < self.ends


@frozen
class Network:
    """The faults of requests, as probabilities unless stated otherwise.

    Attributes:
        latency: Least and greatest number of seconds until a response.
        stall: The response is delayed by 1 to 3 s.
        lost: The request never arrives.
        unanswered: The request is carried out, and its response lost.
        late: The caller gives up after 1 s, and the write arrives within `late_seconds`.
        twice: The client library retries a write whose first response was lost, and returns the second response.
        stale: A listing, or a read that may be stale, shows some rows as they were up to a second ago.
        outages: Periods in which no request is answered, as under throttling.
        reading: Least and greatest number of seconds until a response of the stream.
        slow: Periods in which each read of the stream takes 6 to 25 s.
        patience: The timeouts of a read during such periods.
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
    patience: tuple[float, ...] = POLL_TIMEOUTS


@frozen
class Capacity:
    """The limits on the requests that the table serves, as a DynamoDB table has them. By default there are none.

    Attributes:
        row_bytes: The length of each row.
        bytes_per_second: How fast one listing is read, page by page; each page shows its rows as of then.
        page_bytes: The greatest size of a page.
        table_units: Read units per second of the whole table, of 8 KB each at eventual consistency. Listings wait for
            them.
        row_units: Read units per second of one row.
        writes: Writes per second of the whole table.
        patience_seconds: A request that would wait longer is rejected, as by a client library out of retries.
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
    """A change of the stream.

    Attributes:
        at: When it happens.
        what: One of these:

            - "split", "merge": One open shard splits, or two merge.
            - "double": All open shards split.
            - "anew": The stream is deleted and recreated, with the shards and ids it started with.
            - "expire": The closed shards are removed from the stream, as at the end of their retention.
            - "reset": Every lease is reset to the beginning of its shard, as an operator may do.
        place: The position, among the open shards, of the one that splits or merges.
    """

    at: float
    what: Reshaping
    place: int = 0


@frozen
class Emptying:
    """The deletion of rows while the fleet runs.

    Attributes:
        at: When the rows are deleted.
        places: Selects rows by their position among the sorted keys. If it is empty, all rows are deleted, as if the
            table had been recreated.
    """

    at: float
    places: tuple[int, ...] = ()


@frozen
class Scenario:
    """A run to simulate.

    Attributes:
        seed: The seed of everything that is random.
        owners: The owner of each lease at the start, None for a free lease. There are as many shards as owners.
        members: Every process, in the order in which they start at equal times.
        seconds: How long the run takes.
        calm: From then on the network has no fault but latency, and nothing more happens to the fleet.
        weights: The throughput of each lease in bytes per second, None if unknown; if empty, all are unknown.
        names: The keys of the leases; if empty, s-0, s-1 and so on.
        reading: Whether records are produced, read and checkpointed.
        checkpoints: The least number of seconds between two checkpoints of a lease; 0 to checkpoint every batch.
        read_seconds: The time between two reads of a shard, and between two records of one.
        weighed: Whether the throughput that readers measure is stored.
        scan_per_cycle: Whether the table is scanned exactly once per `cycle_seconds`, regardless of the plan (C16
            excepted).
        sessions: Whether the table has the layout `sessions`; if there are swaps, the second table has it.
        swaps: When the leases are moved to a second table, back, there again, and so on; if empty, there is one table.
        dated: Whether listings show how long ago each row was written, and bulletins cost requests, as with blobs.
        full: Whether each renewal and each read is recorded, which only a judge needs.
        callable_faults: What the users' callables do besides their work.
        handler: A handler that also receives every batch. Its exceptions and results are treated as in a real worker.
        call_faults: The faults of single calls, which happen only if `full`.
        handling_seconds: How long a handler takes.
        bench_seconds: The cooldown: how long a worker leaves a lease that it cannot read to others.
        start: The checkpoint of the first rows.
        emptyings: When rows are deleted.
        if_recreated: The option that tells all workers what to do with a recreated stream.
        acknowledges: When a handler has finished with a record.
        capacity: The limits on what the table serves.
        ranged: Whether shards have hash ranges. If not, they behave as in the stream of a table: a shard rolls, that is
            one shard follows it, when it would split. It splits when it would merge, because no shard has two parents.
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
    callable_faults: tuple[CallableFault, ...] = ()
    handler: Handler | None = None
    call_faults: tuple[CallFault, ...] = ()
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
    """A scenario, and when the event under study begins."""

    scenario: Scenario
    since: float


def group_of(number: int, workers: int) -> tuple[str, ...]:
    """Return the ids of one group: a-000, a-001 and so on."""
    name = ascii_lowercase[number] if number < len(ascii_lowercase) else f"g{number}"
    return tuple(f"{name}-{worker:0{max(3, len(str(workers - 1)))}d}" for worker in range(workers))


def cold(
    leases: int, workers: tuple[str, ...], config: Config, *, seed: int, start: StartPattern, cycles: float
) -> FleetScenario:
    """Return a fleet in which every lease is free and every worker new."""
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
    """Return a balanced fleet that workers join. With none joining, it is left alone."""
    draw = random.Random(seed)  # noqa: S311  a seed is the point
    since = SETTLE_CYCLES * config.cycle_seconds
    members = (*_present(present, config, draw), *_starting(joining, config, since, start, draw))
    return _fleet(seed, balanced(leases, present, draw), members, since=since, seconds=cycles * config.cycle_seconds)


def shrink(
    leases: int,
    workers: tuple[str, ...],
    ending_workers: int,
    config: Config,
    *,
    seed: int,
    ending: Literal["crash", "leave"],
    cycles: float,
) -> FleetScenario:
    """Return a balanced fleet, a part of which ends at one moment."""
    draw = random.Random(seed)  # noqa: S311  a seed is the point
    since = SETTLE_CYCLES * config.cycle_seconds
    ending_names = frozenset(draw.sample(workers, ending_workers))
    members = tuple(
        evolve(member, ends=since, ending=ending) if member.worker in ending_names else member
        for member in _present(workers, config, draw)
    )
    return _fleet(seed, balanced(leases, workers, draw), members, since=since, seconds=cycles * config.cycle_seconds)


def rolling(
    leases: int, workers: tuple[str, ...], config: Config, *, gap: float, seed: int, cycles: float
) -> FleetScenario:
    """Return a fleet in which each worker leaves in turn, and its replacement starts just before the next one leaves.

    This is a rolling restart that waits until the new process runs before it stops the next.
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
    ends = [fleet.since + gap * index for index in range(len(workers) + 1)]
    old = (evolve(member, ends=end, ending="leave") for member, end in zip(fleet.scenario.members, ends, strict=False))
    new = (
        Member(f"{worker}x", config, starts=end - READY_SECONDS) for worker, end in zip(workers, ends[1:], strict=True)
    )
    return evolve(fleet, scenario=evolve(fleet.scenario, members=(*old, *new)))


def reshard(leases: int, workers: tuple[str, ...], config: Config, *, seed: int, cycles: float) -> FleetScenario:
    """Return a balanced fleet in which every shard splits, so that twice as many children replace their parents."""
    fleet = scale_out(leases, workers, (), config, seed=seed, start="spread", cycles=cycles)
    return evolve(fleet, scenario=evolve(fleet.scenario, reshapes=(Reshape(fleet.since, "double"),), reading=True))


def weighed(leases: int, workers: tuple[str, ...], config: Config, *, seed: int, cycles: float) -> FleetScenario:
    """Return a fleet with even counts in which nothing happens, but whose leases differ in throughput."""
    draw = random.Random(seed)  # noqa: S311  a seed is the point
    members = _present(workers, config, draw)
    fleet = _fleet(seed, balanced(leases, workers, draw), members, since=0.0, seconds=cycles * config.cycle_seconds)
    weights = tuple(round(64 * KB * draw.lognormvariate(0.0, 1.0)) for _ in range(leases))
    return evolve(fleet, scenario=evolve(fleet.scenario, weights=weights))


def mixed(fleet: FleetScenario, peer: Config, share: float, seed: int) -> FleetScenario:
    """Return the fleet with its rules on only a share of the workers, and a peer's rules on the others."""
    draw = random.Random(seed)  # noqa: S311  a seed is the point
    workers = sorted({member.worker for member in fleet.scenario.members})
    ours = frozenset(draw.sample(workers, round(share * len(workers))))
    members = tuple(
        member if member.worker in ours else evolve(member, config=peer, foreign=True)
        for member in fleet.scenario.members
    )
    return evolve(fleet, scenario=evolve(fleet.scenario, members=members))


def known(fleet: FleetScenario) -> FleetScenario:
    """Return the fleet with the table already known to the members that are there from the beginning.

    Otherwise each worker begins with two reads of the whole table, which take longest to simulate.
    """
    members = (evolve(member, present=True, phase=0.0) if member.phase else member for member in fleet.scenario.members)
    return evolve(fleet, scenario=evolve(fleet.scenario, members=tuple(members)))


def paused(fleet: FleetScenario, per_hour: float, seed: int) -> FleetScenario:
    """Return the fleet with pauses: every worker is paused now and then, for 1 to 3 s."""
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
    """Return the owners of leases, as evenly as possible and in random order."""
    owners = [workers[number % len(workers)] for number in range(leases)]
    draw.shuffle(owners)
    return tuple(owners)


def _present(workers: tuple[str, ...], config: Config, draw: random.Random) -> tuple[Member, ...]:
    """Return workers that are there from the beginning and look at different times of the cycle.

    All workers start within a second. If some started later, the others would wait for them and seem slow to renew.
    """
    return tuple(
        evolve(member, starts=draw.uniform(0.0, 1.0), phase=draw.uniform(0.0, config.cycle_seconds))
        for member in _starting(workers, config, 0.0, "together", draw)
    )


def _starting(
    workers: tuple[str, ...], config: Config, at: float, start: StartPattern, draw: random.Random
) -> tuple[Member, ...]:
    """Return one member per worker, whose starts are spread over a cycle or nearly simultaneous."""
    within = config.cycle_seconds if start == "spread" else TOGETHER_SECONDS
    foreign = not config.rules.keeps_lookout
    return tuple(Member(worker, config, at + draw.uniform(0.0, within), foreign=foreign) for worker in workers)


def _fleet(
    seed: int, owners: tuple[str | None, ...], members: tuple[Member, ...], *, since: float, seconds: float
) -> FleetScenario:
    end = since + seconds
    return FleetScenario(Scenario(seed, owners, members, end, calm=end, network=Network()), since)
