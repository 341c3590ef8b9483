"""Tests that a fleet that has read a stream skips no listed record after an outage, however many shards expired."""

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
MAX_ROUNDS = 40


@frozen
class Lineage:
    """The history of a stream: all its shards, oldest first, and the ids of the open ones after each reshard."""

    shards: tuple[Shard, ...]
    cuts: tuple[tuple[str, ...], ...]

    def ancestors(self, ids: set[str]) -> set[str]:
        """Return every ancestor of these shards."""
        parents, ancestor_ids, pending_ids = {shard.id: shard.parents for shard in self.shards}, set[str](), list(ids)
        while pending_ids:
            new_parents = set(parents[pending_ids.pop()]) - ancestor_ids
            ancestor_ids |= new_parents
            pending_ids += new_parents
        return ancestor_ids


@st.composite
def lineages(draw: st.DrawFn) -> Lineage:
    """Draw up to three initial shards, and up to six reshards. Each reshard splits a shard or merges two neighbors."""
    root_count, has_hash_ranges = draw(st.integers(1, 3)), draw(st.booleans())
    range_starts = [number * (HASH_KEYS[1] + 1) // root_count for number in range(root_count + 1)]
    shards = {
        f"s{n:02}": Shard(f"s{n:02}", hash_range=(range_starts[n], range_starts[n + 1] - 1)) for n in range(root_count)
    }
    open_ids = list(shards)
    open_ids_after_reshard = [tuple(open_ids)]
    for _ in range(draw(st.integers(1, 6))):
        index = draw(st.integers(0, len(open_ids) - 1))
        is_merge = index + 1 < len(open_ids) and draw(st.booleans())
        parents = open_ids[index : index + 2] if is_merge else open_ids[index : index + 1]
        first_hash, last_hash = (
            (shards[parents[0]].hash_range or HASH_KEYS)[0],
            (shards[parents[-1]].hash_range or HASH_KEYS)[1],
        )
        middle_hash = (first_hash + last_hash) // 2
        ranges = [(first_hash, last_hash)] if is_merge else [(first_hash, middle_hash), (middle_hash + 1, last_hash)]
        children = [f"s{len(shards) + n:02}" for n in range(len(ranges))]
        for parent in parents:
            shards[parent] = evolve(shards[parent], open=False)
        for child, keys in zip(children, ranges, strict=True):
            shards[child] = Shard(child, parents=tuple(parents), hash_range=keys)
        open_ids[index : index + len(parents)] = children
        open_ids_after_reshard.append(tuple(open_ids))
    all_shards = (shard if has_hash_ranges else evolve(shard, hash_range=None) for shard in shards.values())
    return Lineage(tuple(all_shards), tuple(open_ids_after_reshard))


@frozen
class Outage:
    """A lineage, the shards in it that are still listed, and the leases at the time when all workers stopped."""

    lineage: Lineage
    listed: tuple[Shard, ...]
    leases: tuple[Lease, ...]

    @property
    def due(self) -> dict[str, Shard]:
        """The listed shards that have no leased descendants."""
        ancestors_of_leases = self.lineage.ancestors({lease.key for lease in self.leases})
        return {shard.id: shard for shard in self.listed if shard.id not in ancestors_of_leases}

    @property
    def unbegun(self) -> set[str]:
        """The shards in `due` that have no lease."""
        return self.due.keys() - {lease.key for lease in self.leases}


@st.composite
def outages(draw: st.DrawFn, *, orderly: bool) -> Outage:
    """Draw an outage.

    In an orderly outage, closed shards have expired only together with their ancestors, and each part of the stream had
    a lease.
    """
    lineage = draw(lineages())
    closed_shard_ids = [shard.id for shard in lineage.shards if not shard.open]
    expired_shard_ids = set(draw(st.lists(st.sampled_from(closed_shard_ids), unique=True)))
    expired_shard_ids |= lineage.ancestors(expired_shard_ids) if orderly else set()
    open_shard_ids = draw(st.sampled_from(lineage.cuts))
    leased_ids = (
        draw(st.lists(st.sampled_from(open_shard_ids), min_size=1, unique=True)) if orderly else list(open_shard_ids)
    )
    by_id = {shard.id: shard for shard in lineage.shards}
    leases = []
    for number, key in enumerate(leased_ids):
        shard, owner = by_id[key], draw(st.sampled_from([None, "dead", *WORKERS]))
        position = READ if number == 0 else draw(st.sampled_from([READ, TRIM_HORIZON]))
        leases.append(Lease(key, parents=shard.parents, checkpoint=position, hash_range=shard.hash_range, owner=owner))
    return Outage(lineage, tuple(shard for shard in lineage.shards if shard.id not in expired_shard_ids), tuple(leases))


@frozen
class Outcome:
    """The start position of each lease that was created, and the shards in the order in which they were read."""

    begun: dict[str, Position]
    order: list[str]
    left: dict[str, Lease]


def run_to_fixpoint(
    listed_shards: tuple[Shard, ...], leases: tuple[Lease, ...], data: st.DataObject | None = None
) -> Outcome:
    """Let several workers plan from one listing and read all shards that they may read, until nothing changes.

    If `data` is given, it draws which planned actions are executed in the first rounds, as if workers died.
    """
    table = {lease.key: lease for lease in leases}
    shards, start_positions, read_shard_ids = (
        {shard.id: shard for shard in listed_shards},
        dict[str, Position](),
        list[str](),
    )

    def create(lease: Lease) -> None:
        if lease.key not in table:
            table[lease.key], start_positions[lease.key] = lease, lease.checkpoint

    for turn in range(MAX_ROUNDS):
        table_before = dict(table)
        observed_leases = tuple(evolve(lease, idle=1e6) for lease in table.values())
        for worker in WORKERS:
            for action in plan(observed_leases, listed_shards, Me(worker, turn), FROM_LATEST):
                if data is not None and turn < PARTIAL_ROUNDS and not data.draw(st.booleans()):
                    continue
                match action:
                    case Create(lease):
                        create(lease)
                    case Delete(lease) if table.get(lease.key) == table_before[lease.key]:
                        del table[lease.key]
                    case _:
                        pass
        for key in sorted(table.keys() & shards.keys()):
            if table[key].ended or not readable(table[key], table):
                continue
            read_shard_ids += [key] if key not in read_shard_ids else []
            if shards[key].open:
                table[key] = evolve(table[key], checkpoint=LATER)
                continue
            children = [shard for shard in listed_shards if key in shard.parents]
            for creation in children_to_create(table[key], children, table, shards, FROM_LATEST):
                create(creation.lease)
            table[key] = evolve(table[key], checkpoint=SHARD_END)
        if table == table_before and turn >= PARTIAL_ROUNDS:
            return Outcome(start_positions, read_shard_ids, table)
    raise AssertionError(f"no fixpoint after {MAX_ROUNDS} rounds")


@given(outages(orderly=True), st.data())
def test_no_listed_record_is_skipped_once_the_stream_was_read(outage: Outage, data: st.DataObject) -> None:
    """Each listed shard without leased descendants is read once, after its parents, from its start or checkpoint."""
    shards_to_read = outage.due
    outcome = run_to_fixpoint(outage.listed, outage.leases, data)
    assert {key: outcome.begun.get(key) for key in outage.unbegun} == dict.fromkeys(outage.unbegun, TRIM_HORIZON)
    assert set(outcome.order) == shards_to_read.keys()
    pairs = [
        (parent, key) for key in shards_to_read for parent in shards_to_read[key].parents if parent in shards_to_read
    ]
    assert [pair for pair in pairs if outcome.order.index(pair[0]) > outcome.order.index(pair[1])] == []
    assert outcome.left.keys() <= {shard.id for shard in outage.listed}


@given(outages(orderly=False))
def test_shard_that_outlived_its_children_is_read_from_the_start(outage: Outage) -> None:
    """Whichever shards have expired, each listed shard without leased descendants is read."""
    outcome = run_to_fixpoint(outage.listed, outage.leases)
    assert {key: outcome.begun.get(key) for key in outage.unbegun} == dict.fromkeys(outage.unbegun, TRIM_HORIZON)
    assert outage.due.keys() <= set(outcome.order)
