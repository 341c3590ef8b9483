"""Describes simulated fleets by values. Equal scenarios have identical runs.

All times are in seconds since the start of the run. The functions at the end of this module create the fleets with
which rule sets are compared, each from its size and a seed.
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
ReshapeKind = Literal["split", "merge", "double", "anew", "expire", "reset"]

AcknowledgeTiming = Literal["return", "late", "random", "never"]
"""When handlers acknowledge records.

With "return", a record is acknowledged when its handler returns. Otherwise handlers write checkpoints themselves, as a
child process of the MultiLangDaemon does: some batches later ("late"), at random times, or never before the end of the
shard.
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
        worker: The worker's id. A restarted process has the same worker id as its predecessor.
        config: The worker's rules and intervals.
        starts: When the process starts.
        ends: When the process ends.
        ending: How the process ends: "crash" is a death without warning, and "leave" is a drain.
        naps: The periods in which the process is paused.
        phase: The time from the start to an additional read of the table. It keeps members that start together from
            always reading the table at the same time.
        plans: When the worker stops planning. It then becomes a zombie, which only renews its leases.
        foreign: Whether the process simulates another library. Such a worker does not answer hand-off requests, and
            steals a lease only if its version is unchanged, as KCL 2.x and the Event Hubs SDKs do.
        rate: The speed of the process's clock relative to virtual time.
        drain_seconds: The maximum duration of the process's drain.
        present: Whether the process was running before the run began. Its clock then starts at 0, it knows the table as
            of 0 s, and it starts with its own leases. The table is read once for all such members, because a read by
            each of them would take time proportional to workers x leases.
        deaf: The periods in which the process gets no response from the stream.
        deaf_to: The shards whose requests get no response in the `deaf` periods. If empty, no request gets a response.
        gives_up_seconds: The timeout of the process's calls in the `deaf` periods. If infinite, the calls never return.
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
    present: bool = False
    deaf: tuple[Nap, ...] = ()
    deaf_to: frozenset[str] = frozenset()
    gives_up_seconds: float = POLL_TIMEOUTS[0]

    def is_running_at(self, t: float) -> bool:
        """Return whether the process is running at time `t`."""
        return self.starts <= t < self.ends


@frozen
class Network:
    """The delays and faults of requests. Numbers without a unit are the probabilities of a fault.

    Attributes:
        latency: The minimum and maximum response time of the table, in seconds.
        stall: The response is delayed by 1 to 3 s.
        lost: The request is lost.
        unanswered: The request is carried out, but its response is lost.
        late: The caller gives up after 1 s, and the write arrives within `late_seconds`.
        twice: The response to a write is lost, and the client library sends the write again.
        stale: A listing, or a read that may be stale, returns some rows as they were up to one second ago.
        outages: Periods in which the table cannot be reached.
        reading: The minimum and maximum response time of the stream, in seconds.
        slow: Periods in which each read of the stream takes 6 to 25 s.
        patience: The timeouts of a read during the `slow` periods.
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
    """The throughput limits of the table, similar to those of DynamoDB. By default there are no limits.

    Attributes:
        row_bytes: The size of each row.
        bytes_per_second: The speed of one listing. Listings are read page by page, and each page contains its rows as
            they are when the page is read.
        page_bytes: The maximum size of a page.
        table_units: The number of read units per second that the whole table serves to listings. One unit is 8 KB with
            eventual consistency.
        row_units: The number of read units per second that each row serves.
        writes: The number of writes per second that the whole table accepts.
        patience_seconds: The maximum time for which a request waits for capacity. A request that would wait longer
            fails, as if the client library had used up its retries.
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
        at: When the change happens.
        what: The kind of change:

            - "split", "merge": One open shard splits, or two open shards merge.
            - "double": All open shards split.
            - "anew": The stream is deleted and recreated with its initial shards and their ids.
            - "expire": All closed shards are removed from the stream, as if their retention had passed.
            - "reset": Every lease is reset to the beginning of its shard, as an operator can do.
        place: The index of the shard that splits or merges, among the open shards.
    """

    at: float
    what: ReshapeKind
    place: int = 0


@frozen
class RowDeletion:
    """The deletion of rows while the fleet runs.

    Attributes:
        at: When the rows are deleted.
        places: The indexes of the deleted rows in the order of their keys. If empty, all rows are deleted, as if the
            table had been recreated.
    """

    at: float
    places: tuple[int, ...] = ()


@frozen
class Scenario:
    """A run to simulate.

    Attributes:
        seed: The seed of all random numbers.
        owners: The initial owner of each lease, or None for a free lease. The stream has one shard for each lease.
        members: All processes. Processes with equal start times start in the order of this tuple.
        seconds: The duration of the run.
        calm: When the faults end. After this time, the network only has latency.
        network: The delays and faults of requests.
        reshapes: The changes of the stream.
        weights: The throughput of each lease in bytes per second, or None if unknown. If empty, all are unknown.
        names: The keys of the leases. If empty, they are s-0, s-1 and so on.
        reading: Whether records are produced, read and checkpointed.
        checkpoints: The minimum number of seconds between two checkpoints of a lease. With 0, every batch is
            checkpointed.
        read_seconds: The time between two reads of a shard, and between two records in a shard.
        weighed: Whether the table stores the throughput that readers measure.
        scan_per_cycle: Whether each worker lists the table exactly once per `cycle_seconds`, except under rule C16.
        dated: Whether listings contain the age of each row and bulletins cost requests, as with blobs.
        sessions: Whether the table has the layout `sessions`. If there are swaps, only the second table has it.
        swaps: The times at which leases start to move to a second table, back again, and so on. If empty, there is one
            table.
        full: Whether every renewal and every read is recorded. Only the judge needs these events.
        callable_faults: The faults of the functions that stand for a user's code.
        handler: A handler that also receives every batch. Its exceptions and results are treated as in a real worker.
        call_faults: The faults of single calls. They have no effect unless `full`.
        handling_seconds: The time that a handler takes.
        bench_seconds: For how long a worker does not take a lease again after it failed to read the shard.
        start: The checkpoint of all leases at the start.
        emptyings: The deletions of rows.
        if_recreated: The worker option `if_recreated`, for all workers.
        acknowledges: When handlers acknowledge records.
        capacity: The throughput limits of the table.
        ranged: Whether shards have hash ranges. If False, the stream behaves like a DynamoDB stream. A "split" then
        rolls a shard, which means that one new shard follows it. A "merge" splits a shard instead, because no shard has
        two parents.
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
    emptyings: tuple[RowDeletion, ...] = ()
    if_recreated: Literal["TRIM_HORIZON", "LATEST"] | None = None
    acknowledges: AcknowledgeTiming = "return"
    capacity: Capacity = field(factory=Capacity)
    ranged: bool = True

    @property
    def keys(self) -> tuple[str, ...]:
        """The initial keys of the leases."""
        if self.names:
            return self.names
        width = len(str(max(len(self.owners) - 1, 0)))
        return tuple(f"s-{number:0{width}d}" for number in range(len(self.owners)))


StartPattern = Literal["spread", "together"]
NEARLY_TOGETHER_SECONDS = 0.1
SETTLE_CYCLES = 2
READY_SECONDS = 1.0


@frozen
class FleetScenario:
    """A scenario, and when the event under study begins."""

    scenario: Scenario
    since: float


def name_group_workers(group_index: int, worker_count: int) -> tuple[str, ...]:
    """Return the worker ids of one group, such as a-000, a-001 and so on."""
    group_name = ascii_lowercase[group_index] if group_index < len(ascii_lowercase) else f"g{group_index}"
    return tuple(
        f"{group_name}-{worker_index:0{max(3, len(str(worker_count - 1)))}d}" for worker_index in range(worker_count)
    )


def create_cold_fleet(
    leases: int, workers: tuple[str, ...], config: Config, *, seed: int, start: StartPattern, cycles: float
) -> FleetScenario:
    """Return a fleet whose leases are all free and whose workers all start at the beginning of the run."""
    rng = random.Random(seed)  # noqa: S311  a seed is the point
    members = _create_starting_members(workers, config, 0.0, start, rng)
    return _create_fleet(seed, (None,) * leases, members, since=0.0, seconds=cycles * config.cycle_seconds)


def create_scaled_out_fleet(
    leases: int,
    present: tuple[str, ...],
    joining: tuple[str, ...],
    config: Config,
    *,
    seed: int,
    start: StartPattern,
    cycles: float,
) -> FleetScenario:
    """Return a balanced fleet that the workers in `joining` join. If `joining` is empty, the fleet does not change."""
    rng = random.Random(seed)  # noqa: S311  a seed is the point
    join_time = SETTLE_CYCLES * config.cycle_seconds
    members = (
        *_create_present_members(present, config, rng),
        *_create_starting_members(joining, config, join_time, start, rng),
    )
    return _create_fleet(
        seed,
        assign_owners_evenly(leases, present, rng),
        members,
        since=join_time,
        seconds=cycles * config.cycle_seconds,
    )


def create_shrunk_fleet(
    leases: int,
    workers: tuple[str, ...],
    ending_workers: int,
    config: Config,
    *,
    seed: int,
    ending: Literal["crash", "leave"],
    cycles: float,
) -> FleetScenario:
    """Return a balanced fleet in which `ending_workers` workers end at the same time."""
    rng = random.Random(seed)  # noqa: S311  a seed is the point
    end_time = SETTLE_CYCLES * config.cycle_seconds
    ending_ids = frozenset(rng.sample(workers, ending_workers))
    members = tuple(
        evolve(member, ends=end_time, ending=ending) if member.worker in ending_ids else member
        for member in _create_present_members(workers, config, rng)
    )
    return _create_fleet(
        seed,
        assign_owners_evenly(leases, workers, rng),
        members,
        since=end_time,
        seconds=cycles * config.cycle_seconds,
    )


def create_rolling_fleet(
    leases: int, workers: tuple[str, ...], config: Config, *, gap: float, seed: int, cycles: float
) -> FleetScenario:
    """Return a fleet in which each worker leaves in turn, and its replacement starts before the next worker leaves.

    The scenario is a rolling restart in which the next old process is stopped only after the previous new process is
    running.
    """
    fleet = create_scaled_out_fleet(
        leases,
        workers,
        (),
        config,
        seed=seed,
        start="spread",
        cycles=cycles + gap * len(workers) / config.cycle_seconds,
    )
    end_times = [fleet.since + gap * index for index in range(len(workers) + 1)]
    old_members = (
        evolve(member, ends=end, ending="leave") for member, end in zip(fleet.scenario.members, end_times, strict=False)
    )
    new_members = (
        Member(f"{worker}x", config, starts=end - READY_SECONDS)
        for worker, end in zip(workers, end_times[1:], strict=True)
    )
    return evolve(fleet, scenario=evolve(fleet.scenario, members=(*old_members, *new_members)))


def create_resharded_fleet(
    leases: int, workers: tuple[str, ...], config: Config, *, seed: int, cycles: float
) -> FleetScenario:
    """Return a balanced fleet in which every shard splits into two children."""
    fleet = create_scaled_out_fleet(leases, workers, (), config, seed=seed, start="spread", cycles=cycles)
    return evolve(fleet, scenario=evolve(fleet.scenario, reshapes=(Reshape(fleet.since, "double"),), reading=True))


def create_weighed_fleet(
    leases: int, workers: tuple[str, ...], config: Config, *, seed: int, cycles: float
) -> FleetScenario:
    """Return a fleet whose workers have equal numbers of leases, but whose leases differ in throughput."""
    rng = random.Random(seed)  # noqa: S311  a seed is the point
    members = _create_present_members(workers, config, rng)
    fleet = _create_fleet(
        seed,
        assign_owners_evenly(leases, workers, rng),
        members,
        since=0.0,
        seconds=cycles * config.cycle_seconds,
    )
    weights = tuple(round(64 * KB * rng.lognormvariate(0.0, 1.0)) for _ in range(leases))
    return evolve(fleet, scenario=evolve(fleet.scenario, weights=weights))


def replace_some_workers(fleet: FleetScenario, peer: Config, share: float, seed: int) -> FleetScenario:
    """Return a copy of the fleet in which some random workers are replaced by workers with the configuration `peer`.

    `share` is the fraction of workers that keep their configuration.
    """
    rng = random.Random(seed)  # noqa: S311  a seed is the point
    workers = sorted({member.worker for member in fleet.scenario.members})
    unchanged_workers = frozenset(rng.sample(workers, round(share * len(workers))))
    members = tuple(
        member if member.worker in unchanged_workers else evolve(member, config=peer, foreign=True)
        for member in fleet.scenario.members
    )
    return evolve(fleet, scenario=evolve(fleet.scenario, members=members))


def give_members_the_table(fleet: FleetScenario) -> FleetScenario:
    """Return a copy of the fleet whose members have already read the table if they are present at the start.

    Otherwise each such member would start with two reads of the whole table, which would take most of the simulation's
    time.
    """
    members = (evolve(member, present=True, phase=0.0) if member.phase else member for member in fleet.scenario.members)
    return evolve(fleet, scenario=evolve(fleet.scenario, members=tuple(members)))


def add_random_pauses(fleet: FleetScenario, per_hour: float, seed: int) -> FleetScenario:
    """Return a copy of the fleet with random pauses of every worker, each lasting 1 to 3 s."""
    rng = random.Random(seed)  # noqa: S311  a seed is the point
    members = []
    for member in fleet.scenario.members:
        naps, pause_start = [], rng.expovariate(per_hour / 3600)
        while pause_start < fleet.scenario.seconds:
            naps.append(Nap(pause_start, rng.uniform(1.0, 3.0)))
            pause_start += rng.expovariate(per_hour / 3600)
        members.append(evolve(member, naps=tuple(naps)))
    return evolve(fleet, scenario=evolve(fleet.scenario, members=tuple(members)))


def assign_owners_evenly(leases: int, workers: tuple[str, ...], rng: random.Random) -> tuple[str | None, ...]:
    """Return an owner for each lease, with the leases divided as evenly as possible and in random order."""
    owners = [workers[lease_number % len(workers)] for lease_number in range(leases)]
    rng.shuffle(owners)
    return tuple(owners)


def _create_present_members(workers: tuple[str, ...], config: Config, rng: random.Random) -> tuple[Member, ...]:
    """Return workers that are present from the start, and that read the table at different times in the cycle.

    All workers start within one second. If some workers started later, the others would wait for them, and would appear
    to renew late.
    """
    return tuple(
        evolve(member, starts=rng.uniform(0.0, 1.0), phase=rng.uniform(0.0, config.cycle_seconds))
        for member in _create_starting_members(workers, config, 0.0, "together", rng)
    )


def _create_starting_members(
    workers: tuple[str, ...], config: Config, first_start: float, start_pattern: StartPattern, rng: random.Random
) -> tuple[Member, ...]:
    """Return one member per worker. They start at random times within a cycle, or nearly at the same time."""
    spread_seconds = config.cycle_seconds if start_pattern == "spread" else NEARLY_TOGETHER_SECONDS
    is_foreign = not config.rules.keeps_lookout
    return tuple(
        Member(worker, config, first_start + rng.uniform(0.0, spread_seconds), foreign=is_foreign) for worker in workers
    )


def _create_fleet(
    seed: int, owners: tuple[str | None, ...], members: tuple[Member, ...], *, since: float, seconds: float
) -> FleetScenario:
    end_time = since + seconds
    return FleetScenario(Scenario(seed, owners, members, end_time, calm=end_time, network=Network()), since)
