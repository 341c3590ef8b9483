"""Runs a scenario to its end, and answers its history."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from attrs import evolve

from leasehold.adapters.history.events import Incident, Sent, WriteEvent
from leasehold.adapters.proving.simulator.scenario import Emptying, Member, Reshape, Scenario
from leasehold.adapters.proving.simulator.world.events import SimulatedHistory
from leasehold.adapters.proving.simulator.world.process import RESTART_SECONDS, Process
from leasehold.adapters.proving.simulator.world.stream import ListSource, ShardRecords, even_shards, records, shard
from leasehold.adapters.proving.simulator.world.table import SimulatedTable
from leasehold.adapters.proving.simulator.world.tasks import Tasks
from leasehold.adapters.proving.simulator.world.world import World
from leasehold.balancer.model import Lease, Shard
from leasehold.stores.writes import counted

OPERATOR = "operator"
_FURTHER = 1_000_000
"""The numbers of a stream that was made anew go on above those of the former one, as those of Kinesis do."""


def run(scenario: Scenario) -> SimulatedHistory:
    """The history of one run; the same scenario gives the same history, on any machine."""
    tasks = Tasks()
    source = ListSource(even_shards(scenario.keys) if scenario.keys else [])
    weights = scenario.weights or (None,) * len(scenario.owners)
    source.made = int(any(reshape.what == "anew" for reshape in scenario.reshapes))
    rows = zip(source.listed, scenario.owners, weights, strict=True)
    first = tuple(_row(each, owner, weight, scenario) for each, owner, weight in rows)
    table = SimulatedTable(first, lambda: tasks.now, weighed=scenario.weighed or bool(scenario.weights))
    history = SimulatedHistory(first)
    count = iter(range(1_000_000))

    def join(member: Member) -> None:
        tasks.start(lambda: begin(member), member.starts)

    def begin(member: Member) -> None:
        try:
            process = Process(member, next(count), world)
        except RuntimeError:  # no thread for it: its supervisor tries again
            join(evolve(member, starts=tasks.now + RESTART_SECONDS))
        else:
            process.run()

    world = World(scenario, tasks, table, source, history, join)
    for member in scenario.members:
        join(member)
    for reshape in scenario.reshapes:
        tasks.start(lambda reshape=reshape: _reshape(world, reshape), reshape.at)  # type: ignore[misc]
    for emptying in scenario.emptyings:
        tasks.start(lambda emptying=emptying: _empty(world, emptying), emptying.at)  # type: ignore[misc]
    if scenario.reading:
        tasks.start(lambda: _produce(world))
    try:
        with _uncollected():
            tasks.run(scenario.seconds)
    finally:
        tasks.close()
    return _told(world)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Collect garbage once, before the run: each collection visits every row that hundreds of watchers keep."""
    before = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def _row(each: Shard, owner: str | None, weight: int | None, scenario: Scenario) -> Lease:
    ours = {member.worker for member in scenario.members if not member.foreign}
    row = Lease(each.id, owner=owner, hash_range=each.hash_range, checkpoint=scenario.start, weight=weight)
    return counted(evolve(row, yields=owner in ours), int(owner is not None))


def _told(world: World) -> SimulatedHistory:
    history = world.history
    history.end = world.tasks.now
    if world.scenario.full:
        shelves = world.source.shelves.items()
        numbers = ((shard, record.sequence_number) for shard, shelf in shelves for record in shelf.records)
        history.sent = [Sent(shard, int(number), number) for shard, number in numbers]
    history.parents = {each.id: each.parents for each in world.source.listed}
    return history


def _produce(world: World) -> None:
    """Put a record on every open shard each `read_seconds`, until the fleet is left to itself."""
    seconds = world.scenario.read_seconds
    while True:
        for each in world.source.listed:
            shelf = world.source.shelves.setdefault(each.id, ShardRecords(wait_seconds=seconds))
            if each.open and world.tasks.now < world.scenario.calm:
                shelf.records += records(1, _FURTHER * world.source.made + len(shelf.records))
        world.tasks.sleep(seconds)


def _empty(world: World, emptying: Emptying) -> None:
    """Delete rows behind the back of the fleet."""
    rows, now = world.table.list().leases, world.tasks.now
    chosen = {place % len(rows) for place in emptying.places} if rows else set[int]()
    gone = [row for place, row in enumerate(rows) if not emptying.places or place in chosen]
    for row in gone:
        world.table.remove(row.key)
        world.history.writes.append(WriteEvent(now, now, OPERATOR, OPERATOR, "delete", row.key, row, None, done=True))
    world.history.incidents.append(Incident(now, "trouble", "", 0.0, f"{len(gone)} of {len(rows)} rows deleted"))


def _reshape(world: World, reshape: Reshape) -> None:
    """Split a shard, merge it with its neighbour, split all, or make the stream anew."""
    world.history.incidents.append(Incident(world.tasks.now, reshape.what, str(reshape.place)))
    ranged = [(each.hash_range, each) for each in world.source.listed if each.open and each.hash_range]
    shards = [each for _, each in sorted(ranged, key=lambda pair: pair[0])]
    match reshape.what:
        case "double":
            for each in shards:
                _split(world.source, each)
        case "split":
            _split(world.source, shards[reshape.place % len(shards)])
        case "merge" if len(shards) > 1:
            place = reshape.place % (len(shards) - 1)
            _merge(world.source, shards[place], shards[place + 1])
        case "anew":
            world.source.recreate(even_shards(world.scenario.keys))
        case "merge":
            pass


def _split(source: ListSource, parent: Shard) -> None:
    first, last = parent.hash_range or (0, 0)
    middle = (first + last) // 2
    source.end(
        parent.id,
        shard(f"{parent.id}.0", first, middle, parent.id),
        shard(f"{parent.id}.1", middle + 1, last, parent.id),
    )


def _merge(source: ListSource, left: Shard, right: Shard) -> None:
    first, last = (left.hash_range or (0, 0))[0], (right.hash_range or (0, 0))[1]
    child = shard(f"{left.id}+{right.id}", first, last, left.id, right.id)
    source.end(left.id, child)
    source.end(right.id, child)
