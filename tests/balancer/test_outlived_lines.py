"""After a stream was read, no outage skips a record that is still listed, however many shards expired meanwhile."""

from attrs import evolve, frozen
from hypothesis import given
from hypothesis import strategies as st

from leasehold.balancer.actions import Create, Delete
from leasehold.balancer.config import Config
from leasehold.balancer.lineage import children_to_create, readable
from leasehold.balancer.model import HASH_KEYS, LATEST, SHARD_END, TRIM_HORIZON, Lease, Me, Position, Shard
from leasehold.balancer.plan import plan

READ, LATER = Position("77"), Position("99")
FROM_LATEST = Config(initial_position=LATEST)
WORKERS = ("a", "b", "c")
PARTIAL_ROUNDS = 3
MOST_ROUNDS = 40


@frozen
class Lineage:
    """All shards that a stream has ever had, in order of age, and the ids of the open ones after each reshard."""

    shards: tuple[Shard, ...]
    cuts: tuple[tuple[str, ...], ...]

    def ancestors(self, ids: set[str]) -> set[str]:
        """Return every ancestor of these shards."""
        parents, seen, todo = {shard.id: shard.parents for shard in self.shards}, set[str](), list(ids)
        while todo:
            new = set(parents[todo.pop()]) - seen
            seen |= new
            todo += new
        return seen


@st.composite
def lineages(draw: st.DrawFn) -> Lineage:
    """Draw up to three first shards and up to six reshards, each a split or a merge of neighbors."""
    roots, ranged = draw(st.integers(1, 3)), draw(st.booleans())
    edges = [number * (HASH_KEYS[1] + 1) // roots for number in range(roots + 1)]
    shards = {f"s{n:02}": Shard(f"s{n:02}", hash_range=(edges[n], edges[n + 1] - 1)) for n in range(roots)}
    open_ids = list(shards)
    cuts = [tuple(open_ids)]
    for _ in range(draw(st.integers(1, 6))):
        place = draw(st.integers(0, len(open_ids) - 1))
        merges = place + 1 < len(open_ids) and draw(st.booleans())
        parents = open_ids[place : place + 2] if merges else open_ids[place : place + 1]
        first, last = (shards[parents[0]].hash_range or HASH_KEYS)[0], (shards[parents[-1]].hash_range or HASH_KEYS)[1]
        middle = (first + last) // 2
        ranges = [(first, last)] if merges else [(first, middle), (middle + 1, last)]
        children = [f"s{len(shards) + n:02}" for n in range(len(ranges))]
        for parent in parents:
            shards[parent] = evolve(shards[parent], open=False)
        for child, keys in zip(children, ranges, strict=True):
            shards[child] = Shard(child, parents=tuple(parents), hash_range=keys)
        open_ids[place : place + len(parents)] = children
        cuts.append(tuple(open_ids))
    every = (shard if ranged else evolve(shard, hash_range=None) for shard in shards.values())
    return Lineage(tuple(every), tuple(cuts))


@frozen
class Outage:
    """A lineage, its shards that are still listed, and the leases at the time when all workers stopped."""

    lineage: Lineage
    listed: tuple[Shard, ...]
    leases: tuple[Lease, ...]

    @property
    def due(self) -> dict[str, Shard]:
        """The listed shards that precede no lease."""
        before = self.lineage.ancestors({lease.key for lease in self.leases})
        return {shard.id: shard for shard in self.listed if shard.id not in before}

    @property
    def unbegun(self) -> set[str]:
        """The shards in `due` that have no lease."""
        return self.due.keys() - {lease.key for lease in self.leases}


@st.composite
def outages(draw: st.DrawFn, *, orderly: bool) -> Outage:
    """Draw an outage. If it is orderly, any closed shards have expired, but each part of the stream had a lease."""
    lineage = draw(lineages())
    closed = [shard.id for shard in lineage.shards if not shard.open]
    expired = set(draw(st.lists(st.sampled_from(closed), unique=True)))
    expired |= lineage.ancestors(expired) if orderly else set()
    cut = draw(st.sampled_from(lineage.cuts))
    held = draw(st.lists(st.sampled_from(cut), min_size=1, unique=True)) if orderly else list(cut)
    by_id = {shard.id: shard for shard in lineage.shards}
    leases = []
    for number, key in enumerate(held):
        shard, owner = by_id[key], draw(st.sampled_from([None, "dead", *WORKERS]))
        position = READ if number == 0 else draw(st.sampled_from([READ, TRIM_HORIZON]))
        leases.append(Lease(key, parents=shard.parents, checkpoint=position, hash_range=shard.hash_range, owner=owner))
    return Outage(lineage, tuple(shard for shard in lineage.shards if shard.id not in expired), tuple(leases))


@frozen
class Outcome:
    """The start position of each lease that was created, and the shards in the order in which they were read."""

    begun: dict[str, Position]
    order: list[str]
    left: dict[str, Lease]


def settled(listed: tuple[Shard, ...], leases: tuple[Lease, ...], data: st.DataObject | None = None) -> Outcome:
    """Let several workers plan from one listing and read all shards that they may, until nothing changes.

    If given, `data` draws which planned actions are carried out in the first rounds, as when workers die.
    """
    table = {lease.key: lease for lease in leases}
    shards, begun, order = {shard.id: shard for shard in listed}, dict[str, Position](), list[str]()

    def create(lease: Lease) -> None:
        if lease.key not in table:
            table[lease.key], begun[lease.key] = lease, lease.checkpoint

    for turn in range(MOST_ROUNDS):
        before = dict(table)
        seen = tuple(evolve(lease, idle=1e6) for lease in table.values())
        for worker in WORKERS:
            for action in plan(seen, listed, Me(worker, turn), FROM_LATEST):
                if data is not None and turn < PARTIAL_ROUNDS and not data.draw(st.booleans()):
                    continue
                match action:
                    case Create(lease):
                        create(lease)
                    case Delete(lease) if table.get(lease.key) == before[lease.key]:
                        del table[lease.key]
                    case _:
                        pass
        for key in sorted(table.keys() & shards.keys()):
            if table[key].ended or not readable(table[key], table):
                continue
            order += [key] if key not in order else []
            if shards[key].open:
                table[key] = evolve(table[key], checkpoint=LATER)
                continue
            children = [shard for shard in listed if key in shard.parents]
            for birth in children_to_create(table[key], children, table, shards, FROM_LATEST):
                create(birth.lease)
            table[key] = evolve(table[key], checkpoint=SHARD_END)
        if table == before and turn >= PARTIAL_ROUNDS:
            return Outcome(begun, order, table)
    raise AssertionError(f"no fixpoint after {MOST_ROUNDS} rounds")


@given(outages(orderly=True), st.data())
def test_no_listed_record_is_skipped_once_the_stream_was_read(outage: Outage, data: st.DataObject) -> None:
    """Each listed shard that precedes no lease is read once, after its parents, from its beginning or checkpoint."""
    due = outage.due
    outcome = settled(outage.listed, outage.leases, data)
    assert {key: outcome.begun.get(key) for key in outage.unbegun} == dict.fromkeys(outage.unbegun, TRIM_HORIZON)
    assert set(outcome.order) == due.keys()
    pairs = [(parent, key) for key in due for parent in due[key].parents if parent in due]
    assert [pair for pair in pairs if outcome.order.index(pair[0]) > outcome.order.index(pair[1])] == []
    assert outcome.left.keys() <= {shard.id for shard in outage.listed}


@given(outages(orderly=False))
def test_shard_that_outlived_its_children_is_read_from_the_start(outage: Outage) -> None:
    """Whatever subset of the shards has expired, each listed one that precedes no lease is read."""
    outcome = settled(outage.listed, outage.leases)
    assert {key: outcome.begun.get(key) for key in outage.unbegun} == dict.fromkeys(outage.unbegun, TRIM_HORIZON)
    assert outage.due.keys() <= set(outcome.order)
