"""Small fleets that read under virtual time while a seed breaks things: nothing lost, nothing out of order."""

import random
from collections.abc import Iterable
from typing import Literal

import pytest
from attrs import define, field
from virtual_fleet import Clock, FaultyStore, four_shards

from leasehold.adapters.proving.simulator.world.world import ListSource, ShardRecords, records, shard
from leasehold.adapters.reading.handling import Delivery, Handling
from leasehold.adapters.reading.reading import ShardReading
from leasehold.adapters.reading.runner import Step
from leasehold.adapters.worker.holding import Holding
from leasehold.adapters.worker.holdings import WorkerError
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.config import Config
from leasehold.balancer.model import TRIM_HORIZON, Lease, Shard
from leasehold.stores.protocol import Outcome, OutcomeUnknown
from leasehold.stores.writes import CreateLease, DeleteLease, ResetLease, Write

CONFIG = Config(lease_seconds=10.0, initial_position=TRIM_HORIZON)
QUARTER = 2**126


class ChancyStore(FaultyStore):
    """Loses requests and replies by a seed, and tells when a checkpoint goes back."""

    def __init__(self, chance: random.Random, fault: float) -> None:
        super().__init__()
        self.chance, self.fault = chance, fault
        self.went_back: list[str] = []
        self.fences_fell: list[str] = []

    def write(self, write: Write) -> Outcome:
        """Apply it and answer, mostly."""
        if isinstance(write, CreateLease | DeleteLease):
            return super().write(write)
        key = write.lease.key
        before = super().get([key])
        if self.chance.random() < self.fault:
            raise OutcomeUnknown("the request was lost")
        outcome = super().write(write)
        after = super().get([key])
        if before and after and after[0].checkpoint.order < before[0].checkpoint.order:
            self.went_back += [] if isinstance(write, ResetLease) else [key]
        if before and after and after[0].epoch < before[0].epoch:
            self.fences_fell.append(key)
        if self.chance.random() < self.fault:
            raise OutcomeUnknown("the reply was lost")
        return outcome

    def get(self, keys: Iterable[str], *, stale_ok: bool = False) -> tuple[Lease, ...]:
        """These leases, mostly."""
        if self.chance.random() < self.fault:
            raise OutcomeUnknown("the request was lost")
        return super().get(keys, stale_ok=stale_ok)


@define(eq=False)
class Member:
    """One process: a worker, and the readings of what it holds."""

    name: str
    world: "World"
    process: str
    worker: Worker = field(init=False)
    dues: dict[Step, float] = field(factory=dict)
    asleep_until: float = 0.0

    def __attrs_post_init__(self) -> None:
        self.worker = Worker(
            store=self.world.store,
            source=self.world.source,
            me=self.name,
            config=CONFIG,
            consumer=self,
            clock=self.world.clock,
            process=self.process,
            uniform=self.world.chance.uniform,
            hurried=self.hurried,
            if_recreated=self.world.if_recreated,
        )
        self.dues = {self.worker.turn: self.world.clock.now, self.worker.renew: self.world.clock.now}

    def hurried(self) -> None:
        """Turn at the next step."""
        self.dues[self.worker.turn] = self.world.clock.now

    def begin(self, holding: Holding) -> None:
        """Read it."""
        handling = Handling(
            lambda delivery: self.world.handle(self, delivery),
            most_wait_seconds=2.0,
            attempts=1000,
            bench_seconds=self.world.bench_seconds,
        )
        self.dues[ShardReading(self.worker, holding, handling).step] = self.world.clock.now

    def part(self, holding: Holding) -> None:
        """Its reading sees for itself at its next step."""

    def step(self) -> None:
        """One appointment that is due."""
        now = self.world.clock.now
        for work, due in list(self.dues.items()):
            if due <= now:
                self.dues[work] = float("inf")
                answer = work(now)
                self.dues[work] = min(answer, self.dues[work])

    @property
    def due(self) -> float:
        """When it wants to be called next."""
        return max(min(self.dues.values()), self.asleep_until)


@define
class World:
    """A table, a stream that grows, splits and merges, and a fleet."""

    seed: int
    if_recreated: Literal["TRIM_HORIZON", "LATEST"] | None = None
    bench_seconds: float = 60.0
    first: int = 0
    chance: random.Random = field(init=False)
    clock: Clock = field(factory=Clock)
    store: ChancyStore = field(init=False)
    source: ListSource = field(factory=lambda: ListSource(four_shards()))
    fleet: list[Member] = field(factory=list)
    made: int = 0
    handed: list[tuple[str, int]] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.chance = random.Random(self.seed)  # noqa: S311  a seed is the point
        self.store = ChancyStore(self.chance, 0.02)
        for each in self.source.listed:
            self.source.shelves[each.id] = ShardRecords(size=3)

    def join(self, name: str) -> None:
        """One more process."""
        self.made += 1
        self.fleet.append(Member(name, self, f"p-{self.made}"))

    def handle(self, member: Member, delivery: Delivery) -> None:
        """Remember, and sometimes fail, checkpoint half-way, or take long."""
        for record in delivery.records:
            self.handed.append((delivery.shard, int(record.sequence_number)))
            if self.chance.random() < 0.02:
                raise OSError("a passing fault")
            if self.chance.random() < 0.05:
                delivery.checkpoint(record)
        if self.chance.random() < 0.01:
            member.asleep_until = self.clock.now + self.chance.uniform(0, 25)

    def put(self) -> None:
        """A few more records on each open shard."""
        for each in self.source.listed:
            if each.open:
                shelf = self.source.shelves[each.id]
                shelf.records += records(self.chance.randint(0, 3), self.first + len(shelf.records))

    def close(self, name: str, children: tuple[Shard, ...]) -> None:
        """End a shard."""
        listed = self.source.listed
        place = next(place for place, each in enumerate(listed) if each.id == name)
        ends = listed[place].hash_range or (0, 0)
        listed[place] = shard(name, *ends, *listed[place].parents, open=False)
        self.source.shelves[name].ended, self.source.shelves[name].children = True, children
        known = {each.id for each in listed}
        listed += [each for each in children if each.id not in known]
        for each in children:
            self.source.shelves.setdefault(each.id, ShardRecords(size=3))

    def make_anew(self, shards: list[Shard]) -> None:
        """Delete the stream, and make another one of its name, whose numbers are higher, as those of Kinesis are."""
        self.source.recreate(shards)
        self.first += 100_000
        self.source.shelves = {each.id: ShardRecords(size=3) for each in shards}

    def run(self, seconds: float) -> None:
        """Keep everybody's appointments."""
        end = self.clock.now + seconds
        while (member := min(self.fleet, key=lambda each: each.due)).due <= end:
            self.clock.now = max(self.clock.now, member.due)
            try:
                member.step()
            except WorkerError:
                self.fleet.remove(member)
                self.join(member.name)  # whoever watches over the process starts it again
        self.clock.now = end

    def live(self) -> None:
        """Records, kills, restarts, naps, an outage, a split and a merge."""
        for round_ in range(40):
            self.put()
            self.run(self.chance.uniform(0.5, 4))
            self.store.down = round_ % 13 == 12
            victim = self.chance.randrange(len(self.fleet))
            match self.chance.randrange(12):
                case 0:
                    name = self.fleet.pop(victim).name
                    self.join(name if self.chance.random() < 0.5 else f"w-{self.made + 1}")
                case 1:
                    self.fleet[victim].asleep_until = self.clock.now + self.chance.uniform(0, 30)
            if round_ == 10:
                middle = QUARTER // 2
                self.close("s-0", (shard("c-0", 0, middle - 1, "s-0"), shard("c-1", middle, QUARTER - 1, "s-0")))
            if round_ == 20:
                child = shard("c-2", QUARTER, 3 * QUARTER - 1, "s-1", "s-2")
                self.close("s-1", (child,))
                self.close("s-2", (child,))
        self.store.down, self.store.fault = False, 0.0
        self.run(200)
        for _ in range(3):  # a gift for the sake of throughput may be on its way just then
            if len(self.held) < sum(each.open for each in self.source.listed):
                self.run(1)

    @property
    def held(self) -> list[str]:
        """What anybody holds, as often as it is held."""
        return sorted(holding.key for member in self.fleet for holding in member.worker.holdings)


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 25))])
def test_whatever_breaks_everything_is_handed_over_in_order(seed: int) -> None:
    """Without it some interleaving of faults, thefts and restarts would lose a record or break an order."""
    world = World(seed)
    for name in ("w-a", "w-b", "w-c"):
        world.join(name)
    world.live()
    first = list(dict.fromkeys(world.handed))
    for name, shelf in world.source.shelves.items():
        handed = [number for shard_, number in first if shard_ == name]
        assert handed == [int(record.sequence_number) for record in shelf.records]
    for each in world.source.listed:
        above = [place for place, (name, _) in enumerate(first) if name in each.parents]
        below = [place for place, (name, _) in enumerate(first) if name == each.id]
        assert max(above, default=-1) < min(below, default=len(first)), f"{each.id} before its parents (L12)"
    assert world.store.went_back == []
    leases = {lease.key: lease for lease in world.store.list().leases}
    open_shards = {each.id for each in world.source.listed if each.open}
    assert world.held == sorted(open_shards), "every open shard held, and once"
    ends = {name: world.source.shelves[name].records[-1].position.order for name in open_shards}
    assert {name: leases[name].checkpoint.order for name in open_shards} == ends


def _remade(seed: int, if_recreated: Literal["TRIM_HORIZON", "LATEST"] | None, *, split: bool, noted: bool) -> World:
    """A fleet that has read a shard and its children, as its stream is made anew: perhaps while it stands still.

    split  whether the second stream has a shard that was split, too, and other hash keys besides
    noted  whether the first one could be told from another by its workers
    """
    world = World(seed, if_recreated)
    world.source.made = int(noted)
    for name in ("w-a", "w-b", "w-c"):
        world.join(name)
    half, end = QUARTER // 2, QUARTER - 1
    for round_ in range(8):
        world.put()
        world.run(world.chance.uniform(2, 6))
        if round_ == 3:
            world.close("s-0", (shard("c-0", 0, half - 1, "s-0"), shard("c-1", half, end, "s-0")))
    world.store.fault = 0.0 if seed % 3 == 0 else world.store.fault
    stopped = [world.fleet.pop().name for _ in range(len(world.fleet))] if seed % 2 else []
    world.run(world.chance.uniform(0, 2)) if not stopped else None
    world.make_anew(four_shards())
    world.put()
    for name in stopped:
        world.join(name)
    world.run(world.chance.uniform(0, 3))
    if split:
        third = QUARTER // 3
        world.close("s-0", (shard("c-0", 0, third - 1, "s-0"), shard("c-1", third, end, "s-0")))
    return world


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("seed", [0, 1, 2, 3, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 40))])
def test_a_stream_that_was_made_anew_is_read_from_its_beginning_if_told_so(seed: int, split: bool) -> None:
    """Without it a shard whose former lease is at SHARD_END is never read, or its children wait for it for ever."""
    world = _remade(seed, "TRIM_HORIZON", split=split, noted=True)
    for _ in range(6):
        world.put()
        world.run(world.chance.uniform(2, 6))
    world.store.fault = 0.0
    world.run(300)
    first = list(dict.fromkeys(each for each in world.handed if each[1] >= world.first))
    assert {name: [number for shard_, number in first if shard_ == name] for name in world.source.shelves} == {
        name: [int(record.sequence_number) for record in shelf.records] for name, shelf in world.source.shelves.items()
    }
    for each in world.source.listed:
        above = [place for place, (name, _) in enumerate(first) if name in each.parents]
        below = [place for place, (name, _) in enumerate(first) if name == each.id]
        assert max(above, default=-1) < min(below, default=len(first)), f"{each.id} before its parents (L12)"
    assert (world.store.went_back, world.store.fences_fell) == ([], [])
    assert world.held == sorted(each.id for each in world.source.listed if each.open), "every open shard held, and once"


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("seed", [0, 1, 2, 3, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 40))])
def test_a_stream_that_was_made_anew_is_not_read_unless_told_so(
    seed: int,
    split: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Without it checkpoints of records that are gone would hide those that are there, and nobody would say so."""
    world = _remade(seed, None, split=split, noted=True)
    world.run(2 * CONFIG.cycle_seconds + CONFIG.lease_seconds)
    before = {lease.key: lease.checkpoint for lease in world.store.list().leases}
    world.put()
    world.run(400)
    after = {lease.key: lease.checkpoint for lease in world.store.list().leases}
    assert (after, world.held, [each for each in world.handed if each[1] >= world.first]) == (before, [], [])
    said = [text for text in caplog.messages if "stream listed was made anew at 2 s since 1970" in text]
    assert len(said) == len(world.fleet), "each worker says it, once"
    assert [len(member.worker.discovery.contradictions) for member in world.fleet] == [1, 1, 1]
