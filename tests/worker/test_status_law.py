"""The law of status: a group is not OK during a fault that lasts longer than a minute, and is always OK at rest."""

import random
import re
from collections.abc import Callable

import pytest
from attrs import define, evolve, field
from virtual_fleet import FaultyStore
from waiters import Clock

from leasehold.adapters.consumer.dispatcher import Dispatcher
from leasehold.adapters.consumer.executors import Work
from leasehold.adapters.consumer.handler_consumer import handler_reader
from leasehold.adapters.consumer.handling import Delivery, Handling
from leasehold.adapters.consumer.schedule import Step
from leasehold.adapters.consumer.status import Status, group_status, lags_of, statuses_of
from leasehold.adapters.ops.serving.watcher import FleetRecord, TableWatcher
from leasehold.adapters.sources.protocol import Batch, Reader
from leasehold.adapters.threads import ThreadScheduler
from leasehold.adapters.worker.holding import Holding
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.config import Config
from leasehold.balancer.model import TRIM_HORIZON, Lease, Position
from leasehold.balancer.rules.minimal import Minimal
from leasehold.errors import SourceUnavailable, StoreError
from leasehold_lab.simulator.world.world import ListReader, ListSource, ShardRecords, create_even_shards, create_records

EPOCH = 1_700_000_000.0
"""The beginning of virtual time, in seconds since 1970."""

LOOK_SECONDS = 5.0
SETTLE_SECONDS = 100.0
"""The time after which all leases are taken again, and each owner has written that it reads them."""


@define
class FaultyReader:
    """Reads a shard of a `FaultyStream`, with the fault that the shard has at the time of each read."""

    stream: "FaultyStream"
    key: str
    reader: ListReader

    def read(self) -> Batch:
        """Return the next records, or the fault as an empty batch or an exception."""
        fault = self.stream.faults.get(self.key)
        if fault == "throttled":
            return Batch((), None, None, 2.0, fault="asked to slow down")
        if fault == "silent":
            raise SourceUnavailable("nothing answers")
        return evolve(self.reader.read(), wait_seconds=1.0)

    def close(self) -> None:
        """Nothing to close."""


@define
class FaultyStream(ListSource):
    """A stream whose shards may fail individually."""

    faults: dict[str, str] = field(factory=dict)

    def open(self, lease: Lease, start: Position) -> Reader:
        """Return a reader, or raise SourceUnavailable if the shard is silent."""
        if self.faults.get(lease.key) == "silent":
            raise SourceUnavailable("nothing answers")
        return FaultyReader(self, lease.key, ListReader(self.shard_logs[lease.key], self._at(lease.key, start)))

    def _at(self, key: str, start: Position) -> int:
        return sum(record.position.order <= start.order for record in self.shard_logs[key].records)


@define
class HangableExecutor:
    """Calls handlers at once or, if `hung` is set, only after `wake` was called."""

    hung: bool = False
    hung_work: list[Work] = field(factory=list)
    stuck: bool = False

    def start(self, work: Work) -> None:
        """Call the handler now, or keep the work if handlers hang."""
        if self.hung:
            self.hung_work.append(work)
        else:
            work()

    def withdraw(self, work: Work) -> bool:  # noqa: ARG002  the signature of executors
        """Return False, because hanging work counts as running."""
        return False

    def replace_slow_thread(self, work: Work) -> None:
        """Do nothing, because there are no threads to replace."""

    def close(self) -> None:
        """Nothing to close."""

    def wake(self) -> None:
        self.hung = False
        work_to_run, self.hung_work = self.hung_work, []
        for work in work_to_run:
            work()


@define(eq=False)
class Member:
    """One process: a worker, and the readers of the leases that the worker holds."""

    name: str
    world: "World"
    worker: Worker = field(init=False)
    due_times: dict[Step, float] = field(factory=dict)
    asleep_until: float = 0.0
    executor: HangableExecutor = field(factory=HangableExecutor)

    def __attrs_post_init__(self) -> None:
        world = self.world
        world.member_count += 1
        self.worker = Worker(
            store=world.store,
            source=world.source,
            me=self.name,
            config=world.config,
            consumer=self,
            scheduler=ThreadScheduler(world.clock, uniform=world.chance.uniform, process_id=f"p-{world.member_count}"),
        )
        self.worker.wake_runner = self.wake_runner
        self.due_times = {self.worker.turn: world.clock.now, self.worker.renew: world.clock.now}

    def wake_runner(self) -> None:
        """Run a turn at the next step."""
        self.due_times[self.worker.turn] = self.world.clock.now

    def begin(self, holding: Holding) -> None:
        """Start to read the shard, and record the progress that the worker writes as annotations."""
        holding.progress.enable_annotations("vm", self.world.wall, self.world.clock.now)
        handling = Handling(self.world.handle, most_wait_seconds=2.0)
        reading = handler_reader(self.worker, holding, handling, dispatcher=Dispatcher(self.executor))
        self.due_times[reading.step] = self.world.clock.now

    def release(self, holding: Holding) -> None:
        """Do nothing, because the reader of the lease notices the request at its next step."""

    def step(self) -> None:
        """Run the turn, the renewal and the reader steps that are due."""
        now = self.world.clock.now
        for work, due in list(self.due_times.items()):
            if due <= now:
                self.due_times[work] = float("inf")
                self.due_times[work] = min(work(now), self.due_times[work])

    @property
    def due(self) -> float:
        """The time of the next step."""
        return max(min(self.due_times.values()), self.asleep_until)


@define
class World:
    """A lease table, a growing stream, the workers that read it, and a watcher of the table."""

    seed: int
    shards: tuple[str, ...] = ()
    chance: random.Random = field(init=False)
    clock: Clock = field(factory=Clock)
    store: FaultyStore = field(factory=FaultyStore)
    source: FaultyStream = field(init=False)
    config: Config = field(init=False)
    fleet: list[Member] = field(factory=list)
    watcher: TableWatcher = field(init=False)
    member_count: int = 0
    busy: bool = True
    poison: tuple[str, ...] = ()

    def __attrs_post_init__(self) -> None:
        self.chance = random.Random(self.seed)  # noqa: S311  the seed makes it reproducible
        self.shards = tuple(f"s-{number}" for number in range(self.chance.randint(1, 6)))
        workers = self.chance.randint(1, 3)
        lease_seconds = self.chance.choice((5.0, 10.0, 15.0))
        limit = -(-len(self.shards) // workers)
        self.config = Config(Minimal(max_leases=limit), lease_seconds=lease_seconds, initial_position=TRIM_HORIZON)
        self.busy = self.chance.random() < 0.7
        self.source = FaultyStream(create_even_shards(self.shards), {key: ShardRecords(size=10) for key in self.shards})
        self.watcher = TableWatcher(
            "memory://x", self.store, self.config, FleetRecord(), every=LOOK_SECONDS, wall=self.wall, clock=self.clock
        )
        self.fleet = [Member(f"w-{number}", self) for number in range(workers)]

    def wall(self) -> float:
        return EPOCH + self.clock.now

    def handle(self, delivery: Delivery) -> None:
        """Raise an error if the shard is poisoned."""
        if delivery.shard in self.poison:
            raise ValueError("no handler takes it")

    def live(self, seconds: float, on_look: Callable[[], None] = lambda: None) -> None:
        """Run the workers for this many seconds, while records arrive and the watcher reads the table."""
        end_time = self.clock.now + seconds
        while self.clock.now < end_time:
            for key in self.shards if self.busy else ():
                shard_log = self.source.shard_logs[key].records
                new_records = create_records(self.chance.randint(0, 3), len(shard_log))
                shard_log += [record._replace(arrived=self.wall()) for record in new_records]
            self._run(min(LOOK_SECONDS, end_time - self.clock.now))
            self.watcher.try_look()
            on_look()

    def _run(self, seconds: float) -> None:
        end_time = self.clock.now + seconds
        while self.fleet and (member := min(self.fleet, key=lambda driven: driven.due)).due <= end_time:
            self.clock.now = max(self.clock.now, member.due)
            member.step()
        self.clock.now = end_time

    def once(self) -> Status:
        """Return the status that a single look at the table shows, without watching it."""
        try:
            leases = self.store.list().leases
        except StoreError as exc:
            return group_status({}, str(exc))
        lags = lags_of(leases, self.wall(), 50.0)
        return group_status(statuses_of(leases, lags, self.wall(), 10.0))


Fault = Callable[[World], Callable[[], None]]
"""A function that causes a fault, and returns the function that ends the fault."""


def stream(fault: str, *, all_shards: bool) -> Fault:
    """Return a fault in which the stream, or one of its shards, returns no records."""

    def begin(world: World) -> Callable[[], None]:
        keys = world.shards if all_shards else (world.chance.choice(world.shards),)
        world.source.faults = dict.fromkeys(keys, fault)
        return world.source.faults.clear

    return begin


def hang(world: World) -> Callable[[], None]:
    """Make the handlers of one worker hang, and let records arrive that they should process."""
    world.busy = True
    hung_member = world.chance.choice([member for member in world.fleet if member.worker.holdings])
    hung_member.executor.hung = True
    return hung_member.executor.wake


def poison(world: World) -> Callable[[], None]:
    """Make all handlers fail on one shard. Each worker then tries the shard and releases its lease."""
    world.busy, world.poison = True, (world.chance.choice(world.shards),)

    def heal() -> None:
        world.poison = ()

    return heal


def store_down(world: World) -> Callable[[], None]:
    """Make the table unreachable."""
    world.store.down = True

    def heal() -> None:
        world.store.down = False

    return heal


def dead(count: int) -> Fault:
    """Return a fault that kills this many workers. The other workers may already hold as many leases as they may."""

    def begin(world: World) -> Callable[[], None]:
        killed_members = [world.fleet.pop() for _ in range(min(count, len(world.fleet)))]

        def heal() -> None:
            world.fleet += [Member(member.name, world) for member in killed_members]

        return heal

    return begin


def paused(world: World) -> Callable[[], None]:
    """Pause every process until the fault is healed."""
    fleet = tuple(world.fleet)
    for member in fleet:
        member.asleep_until = float("inf")

    def heal() -> None:
        for member in fleet:
            member.asleep_until = 0.0

    return heal


FAULTS: dict[str, Fault] = {
    "the stream is silent": stream("silent", all_shards=True),
    "the stream is throttled": stream("throttled", all_shards=True),
    "one shard is silent": stream("silent", all_shards=False),
    "one shard is throttled": stream("throttled", all_shards=False),
    "a handler hangs": hang,
    "a handler fails": poison,
    "a worker is dead": dead(1),
    "all workers are dead": dead(99),
    "the store is silent": store_down,
    "all processes are paused": paused,
}

SLOW, MORE = pytest.mark.slow, pytest.mark.more
SEEDS = [0, *(pytest.param(seed, marks=MORE) for seed in range(1, 6))]


def no_worker_can_take_over(world: World, name: str) -> bool:
    """Return whether no other worker can take a dead worker's leases, because all hold as many as they may."""
    limit = world.config.rules.most_leases or 0
    return name != "a worker is dead" or limit * (len(world.fleet) - 1) < len(world.shards)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("seed", SEEDS)
def test_group_is_not_ok_during_a_long_fault_and_ok_afterwards(seed: int, name: str) -> None:
    world = World(seed)
    world.live(SETTLE_SECONDS + world.chance.uniform(0, 60))
    assert (world.watcher.status.word, world.once().word) == ("OK", "OK")
    leases_stay_unowned = no_worker_can_take_over(world, name)
    heal = FAULTS[name](world)
    world.live(world.chance.uniform(61, 200))
    watched_status, single_look_status = world.watcher.status, world.once()
    assert leases_stay_unowned == (not watched_status.ok), watched_status
    assert leases_stay_unowned == (not single_look_status.ok), single_look_status
    last_table = world.watcher.last_state.table
    for key in world.source.faults:
        assert last_table is not None
        lag = last_table.lags[key]
        assert (lag.end, (lag.seconds or 0.0) > 30.0) == (False, True), "what cannot be read is not at the end"
    heal()
    world.live(SETTLE_SECONDS)
    assert (world.watcher.status.word, world.once().word) == ("OK", "OK"), world.watcher.status


def age(world: World, key: str) -> float:
    """Return the seconds since the arrival of the first record that no handler has finished."""
    checkpoint = world.store.row(key).checkpoint.order
    arrivals = (record.arrived for record in world.source.shard_logs[key].records if record.position.order > checkpoint)
    return world.wall() - (next(arrivals, None) or world.wall())


@pytest.mark.parametrize("fault", [poison, hang], ids=["fails", "hangs"])
@pytest.mark.parametrize("seed", SEEDS)
def test_failing_shard_is_named_at_every_look_with_its_lag(seed: int, fault: Fault) -> None:
    """Lag and standstill keep growing with the clock through every attempt, release and change of owner."""
    world = World(seed)
    world.live(SETTLE_SECONDS)
    heal = fault(world)
    world.live(100)
    stuck_shards = {key for key in world.shards if age(world, key) > 60}
    assert stuck_shards
    wrong_statuses, standstills = list[str](), dict.fromkeys(stuck_shards, 0.0)

    def look() -> None:
        table = world.watcher.last_state.table
        assert table is not None
        for key in stuck_shards:
            status, lag_seconds = table.statuses[key], table.lags[key].seconds or 0.0
            fault_is_named = "its handler raised ValueError" in status.says or status.word == "HUNG"
            seconds = re.search(r"(?:stood|at work) for (\d+) s", status.says)
            standstill_seconds = float(seconds[1]) if seconds else 0.0
            # The watcher has just read the table, to which the workers write every few seconds.
            if (
                not fault_is_named
                or status.word not in {"STALLED", "HUNG"}
                or lag_seconds < age(world, key)
                or standstill_seconds < standstills[key]
            ):
                wrong_statuses.append(f"{status} lag {lag_seconds} age {age(world, key)} stood {standstills[key]}")
            standstills[key] = standstill_seconds

    world.live(400, look)
    assert wrong_statuses == []
    heal()
    world.live(SETTLE_SECONDS)
    assert (world.watcher.status.word, world.once().word) == ("OK", "OK"), world.watcher.status


QUIET = [0, *(pytest.param(number, marks=MORE) for number in range(1, 30))]


@pytest.mark.parametrize("block", QUIET)
def test_group_at_rest_is_always_ok(block: int) -> None:
    for seed in range(1_000 + 10 * block, 1_000 + 10 * (block + 1)):
        world = World(seed)
        world.live(SETTLE_SECONDS)
        wrong_statuses: list[str] = []

        def look(world: World = world, wrong_statuses: list[str] = wrong_statuses) -> None:
            wrong_statuses += [str(status) for status in (world.watcher.status, world.once()) if not status.ok]

        world.live(world.chance.uniform(30, 240), look)
        assert wrong_statuses == [], seed
