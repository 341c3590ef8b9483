"""Runs a scenario to its end and returns its history.

`measure_outcome` computes the figures by which rule sets are compared. `shrink_scenario` simplifies a failing scenario:
it removes one part at a time, and keeps each removal after which the scenario still fails.
"""

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

from attrs import asdict, evolve, frozen

from leasehold.adapters.worker.annotations import PROCESS
from leasehold.balancer.model import TRIM_HORIZON, Lease, Shard
from leasehold.balancer.rules.shares import Groups, least_moves, path_of
from leasehold.stores.protocol import Done, Store
from leasehold.stores.sessions.rows import LeaseRow, encode_lease_row, lease_row_name
from leasehold.stores.sessions.store import SessionStore
from leasehold.stores.swap import TO, SwapStore, get_or_create_control_row
from leasehold.stores.writes import ReleaseLease, ResetLease, with_counter
from leasehold_lab.judge.breach import Breach
from leasehold_lab.judge.events import Incident, SentRecord, WriteEvent
from leasehold_lab.judge.explanations import judge_history
from leasehold_lab.judge.rights import (
    QUIET_VERBS,
    count_rejected_writes,
    drop_taken_back_handoffs,
    find_owner_changes,
    find_owners_at,
    measure_unowned_seconds,
)
from leasehold_lab.judge.run import OPERATOR, find_lifetimes, find_workers_alive_at
from leasehold_lab.simulator.chaos import Trial
from leasehold_lab.simulator.scenario import Member, Reshape, RowDeletion, Scenario
from leasehold_lab.simulator.world.layouts import NAMES, run_swaps
from leasehold_lab.simulator.world.process import RESTART_SECONDS, Process
from leasehold_lab.simulator.world.tasks import TaskScheduler
from leasehold_lab.simulator.world.world import (
    ListSource,
    ShardRecords,
    SimulatedHistory,
    SimulatedTable,
    UnitBudget,
    World,
    create_first_shards,
    create_records,
    create_shard,
)

_NEXT_STREAM_OFFSET = 1_000_000
"""Added to the sequence numbers of a recreated stream, so that they exceed those of its predecessor, as in Kinesis."""


@contextmanager
def disable_gc() -> Iterator[None]:
    """Disable the garbage collector during a run, because all long-lived objects of a run are in use until its end."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def run(scenario: Scenario) -> SimulatedHistory:
    """Run the scenario and return its history, which is the same on every machine."""
    tasks = TaskScheduler()
    source = ListSource(create_first_shards(scenario))
    source.made = int(any(reshape.what == "anew" for reshape in scenario.reshapes))
    first_rows = tuple(_create_first_rows(scenario, source))
    table = SimulatedTable(first_rows, lambda: tasks.now, weighed=scenario.weighed or bool(scenario.weights))
    history = SimulatedHistory(first_rows)
    process_numbers = iter(range(1_000_000))

    def start_member_later(member: Member) -> None:
        tasks.start(lambda: start_member(member), member.starts)

    def start_member(member: Member) -> None:
        try:
            process = Process(member, next(process_numbers), world)
        except RuntimeError:  # no thread is available; a supervisor would try again
            start_member_later(evolve(member, starts=tasks.now + RESTART_SECONDS))
        else:
            process.run()

    read_budget, write_budget = (
        UnitBudget(units, lambda: tasks.now) for units in (scenario.capacity.table_units, scenario.capacity.writes)
    )
    world = World(scenario, tasks, table, source, history, start_member_later, read_budget, write_budget)
    for row in first_rows if scenario.sessions and not scenario.swaps else ():
        world.cells.put_if_absent(lease_row_name(row.key), encode_lease_row(LeaseRow(row)))
    for member in scenario.members:
        start_member_later(member)
    for reshape in scenario.reshapes:
        tasks.start(partial(_reshape_stream, world, reshape), reshape.at)
    for emptying in scenario.emptyings:
        tasks.start(partial(_delete_rows, world, emptying), emptying.at)
    if scenario.swaps:
        get_or_create_control_row((table, SessionStore(world.cells) if scenario.sessions else world.goal), NAMES)
        tasks.start(partial(run_swaps, world))
    if scenario.reading:
        tasks.start(partial(_produce_records, world))
    # Garbage is collected only before a run, because a collection during the run would visit every row that hundreds of
    # workers keep. No collection has promoted the objects of the previous run, so they are all in the young
    # generations, and the oldest generation need not be visited.
    gc.collect(1)
    with closing(tasks), disable_gc():
        tasks.run(scenario.seconds)
    history.end = tasks.now
    if scenario.full:
        shard_logs = source.shard_logs.items()
        shard_sequence_numbers = (
            (shard, record.sequence_number) for shard, shard_log in shard_logs for record in shard_log.records
        )
        history.sent = [SentRecord(shard, int(number), number) for shard, number in shard_sequence_numbers]
    history.parents = {shard_listed.id: shard_listed.parents for shard_listed in source.listed}
    return history


def _create_first_rows(scenario: Scenario, source: ListSource) -> Iterator[Lease]:
    our_workers = {member.worker for member in scenario.members if not member.foreign}
    present_workers = {member.worker for member in scenario.members if member.present}
    weights = scenario.weights or (None,) * len(scenario.owners)
    for shard, owner, weight in zip(source.listed, scenario.owners, weights, strict=True):
        row = Lease(shard.id, owner=owner, hash_range=shard.hash_range, checkpoint=scenario.start, weight=weight)
        annotations = ((PROCESS, f"before/{owner}"),) if owner in present_workers else ()
        yield with_counter(evolve(row, yields=owner in our_workers, annotations=annotations), int(owner is not None))


QUIET_FACTOR = 5
"""The factor by which the interval between reads grows when no more records are produced."""


def _produce_records(world: World) -> None:
    """Put a record on every open shard every `read_seconds` seconds, until the faults end.

    After the faults have ended, shards are read less often, because most reads would return no records.
    """
    read_seconds = world.scenario.read_seconds
    while True:
        for shard in world.source.listed:
            shard_log = world.source.shard_logs.setdefault(shard.id, ShardRecords(wait_seconds=read_seconds))
            if world.tasks.now >= world.scenario.calm:
                shard_log.wait_seconds = QUIET_FACTOR * read_seconds
            elif shard.open:
                shard_log.records += create_records(1, _NEXT_STREAM_OFFSET * world.source.made + len(shard_log.records))
        world.tasks.sleep(read_seconds)


def _delete_rows(world: World, emptying: RowDeletion) -> None:
    """Delete rows of the table as an operator would, without notifying the workers."""
    rows, now = world.table.list().leases, world.tasks.now
    deleted_indexes = {index % len(rows) for index in emptying.places} if rows else set[int]()
    deleted_rows = [row for index, row in enumerate(rows) if not emptying.places or index in deleted_indexes]
    for row in deleted_rows:
        world.table.delete_row(row.key)
        world.history.writes.append(WriteEvent(now, now, OPERATOR, OPERATOR, "delete", row.key, row, None, done=True))
    # If there is an outage, no worker can notice the deletion before the outage ends.
    outages = world.scenario.network.outages
    outage_seconds_left = max(
        (outage.at + outage.seconds - now for outage in outages if outage.at <= now < outage.at + outage.seconds),
        default=0.0,
    )
    world.history.incidents.append(
        Incident(now, "trouble", "", outage_seconds_left, f"{len(deleted_rows)} of {len(rows)} rows deleted")
    )


def _reset_leases(world: World) -> None:
    """Release every unfinished lease, and reset it to the beginning of its shard."""
    store: Store = SessionStore(world.cells, gather_seconds=0.0) if world.scenario.sessions else world.table
    if world.scenario.swaps:
        second_table = store if world.scenario.sessions else world.goal
        store = SwapStore((world.table, second_table), NAMES[TO], clock=lambda: world.tasks.now)
    for lease in store.list().leases:
        if not lease.ended:
            release_outcome = store.write(ReleaseLease(lease, lease.owner)) if lease.owner else Done(lease)
            if release_outcome.lease is not None:
                store.write(ResetLease(release_outcome.lease, TRIM_HORIZON))


def _reshape_stream(world: World, reshape: Reshape) -> None:
    """Apply a planned change: change the shards of the stream, or reset its leases."""
    source = world.source
    if reshape.what == "expire":
        source.remove_closed_shards()
        return
    if reshape.what == "reset":
        _reset_leases(world)
        return
    world.history.incidents.append(Incident(world.tasks.now, reshape.what, str(reshape.place)))
    if reshape.what == "anew":
        source.recreate_stream(create_first_shards(world.scenario))
        return
    if not world.scenario.ranged:
        # Shards without hash ranges cannot be split or merged in the usual way. A shard ends and gets new children
        # instead.
        open_shards = [open_shard for open_shard in source.listed if open_shard.open]
        child_count = 2 if reshape.what == "merge" else 1
        for open_shard in open_shards if reshape.what == "double" else [open_shards[reshape.place % len(open_shards)]]:
            source.end(
                open_shard.id,
                *(
                    Shard(f"{open_shard.id}.{child_number}", parents=(open_shard.id,))
                    for child_number in range(child_count)
                ),
            )
        return
    shards_with_ranges = [
        (open_shard.hash_range, open_shard) for open_shard in source.listed if open_shard.open and open_shard.hash_range
    ]
    shards = [open_shard for _, open_shard in sorted(shards_with_ranges, key=lambda pair: pair[0])]
    index = reshape.place % max(1, len(shards) - (reshape.what == "merge"))
    match reshape.what:
        case "double" | "split":
            for parent in shards if reshape.what == "double" else [shards[index]]:
                first_key, last_key = parent.hash_range or (0, 0)
                middle_hash = (first_key + last_key) // 2
                low_child = create_shard(f"{parent.id}.0", first_key, middle_hash, parent.id)
                source.end(parent.id, low_child, create_shard(f"{parent.id}.1", middle_hash + 1, last_key, parent.id))
        case "merge" if len(shards) > 1:
            left_parent, right_parent = shards[index : index + 2]
            first_key, last_key = (left_parent.hash_range or (0, 0))[0], (right_parent.hash_range or (0, 0))[1]
            child = create_shard(
                f"{left_parent.id}+{right_parent.id}", first_key, last_key, left_parent.id, right_parent.id
            )
            source.end(left_parent.id, child)
            source.end(right_parent.id, child)
        case "merge":
            pass  # there is only one shard


ROW_BYTES = 360
UNIT_BYTES = 4096


@frozen
class TableTraffic:
    """The number of requests of the whole fleet, and the capacity units that DynamoDB would bill for them.

    A listing is eventually consistent and costs half a unit per 4 KB; a row has 360 bytes. A read of a row by key costs
    one
    unit, or half a unit if the row may be stale. A write costs one unit.
    """

    requests: int
    rows: int
    read_units: float
    write_units: int


@frozen
class FleetOutcome:
    """The figures of a fleet after an event, such as the death of a worker.

    Attributes:
        cycles: The time from the event to the last change of an owner, in cycles of `cycle_seconds`.
        seconds: The time from the event to the last change of an owner, in seconds.
        moves: The number of times that a lease moved away from a living worker.
        moves_minimum: The number of moves that would have been enough.
        moved_again: The number of leases that changed owners more than once.
        taken_back: The number of hand-offs that the next owner did not accept in time. They do not count as moves,
        although no worker reads the shard meanwhile.
        claims: The number of leases that were claimed while they were free, or from a dead worker.
        failed_writes: The number of claims, steals and requests that were rejected because another worker wrote first.
        spread: The difference between the largest and the smallest number of leases of a living worker.
        groups: The number of leases of each group of workers.
        load: The largest throughput of a worker divided by the mean, or 1 if throughputs are unknown.
        unowned_lease_cycles_max: The longest time, in cycles, for which a lease had no living owner.
        quiet_after: The time from the event to the last write other than renewals and checkpoints, in cycles.
        traffic: The requests of the whole run.
    """

    cycles: float
    seconds: float
    moves: int
    moves_minimum: int
    moved_again: int
    taken_back: int
    claims: int
    failed_writes: int
    spread: int
    groups: dict[str, int]
    load: float
    unowned_lease_cycles_max: float
    quiet_after: float
    traffic: TableTraffic

    def as_json(self) -> dict[str, object]:
        """Return values that `json.dumps` accepts."""
        return asdict(self)


def measure_outcome(
    history: SimulatedHistory, *, since: float, cycle_seconds: float, groups: Groups = None
) -> FleetOutcome:
    """Return the figures of a finished run, for an event at `since`."""
    lifetimes = find_lifetimes(history.incidents)
    owner_changes = [
        change for change in find_owner_changes(history.writes) if change.t >= since and change.after is not None
    ]
    lasting_changes = drop_taken_back_handoffs(owner_changes)
    move_count = sum(
        change.before is not None and change.before in find_workers_alive_at(lifetimes, change.t)
        for change in lasting_changes
    )
    workers = find_workers_alive_at(lifetimes, history.end - 1e-9)
    owners = find_owners_at(history, history.end)
    counts_by_owner = Counter(owner for owner in owners.values() if owner is not None and owner in workers)
    lease_counts = [counts_by_owner[worker] for worker in workers]
    counts_by_group = Counter[str]()
    for worker in sorted(workers):
        counts_by_group["/".join(path_of(worker, groups or "prefix"))] += counts_by_owner[worker]
    loads = dict.fromkeys(workers, 0.0)
    for row in history.first:
        owner = owners.get(row.key)
        if owner in loads:
            loads[owner] += row.weight or 0.0
    mean_load = sum(loads.values()) / max(len(loads), 1)
    last_change_time = max((change.t for change in lasting_changes), default=since)
    last_write_time = max(
        (write.t for write in history.writes if write.verb not in QUIET_VERBS and write.t >= since), default=since
    )
    longest_unowned_seconds = max(measure_unowned_seconds(history, history.end, since).values(), default=0.0)
    return FleetOutcome(
        cycles=round((last_change_time - since) / cycle_seconds, 3),
        seconds=round(last_change_time - since, 3),
        moves=move_count,
        moves_minimum=least_moves(find_owners_at(history, since), workers, groups),
        moved_again=sum(
            change_count > 1 for change_count in Counter(change.key for change in lasting_changes).values()
        ),
        taken_back=(len(owner_changes) - len(lasting_changes)) // 2,
        claims=len(lasting_changes) - move_count,
        failed_writes=count_rejected_writes(write for write in history.writes if write.t >= since),
        spread=max(lease_counts, default=0) - min(lease_counts, default=0),
        groups=dict(counts_by_group),
        load=round(max(loads.values()) / mean_load, 3) if mean_load else 1.0,
        unowned_lease_cycles_max=round(longest_unowned_seconds / cycle_seconds, 3),
        quiet_after=round((last_write_time - since) / cycle_seconds, 3),
        traffic=measure_traffic(history),
    )


def measure_traffic(history: SimulatedHistory) -> TableTraffic:
    """Return the requests that a run made to the table."""
    return TableTraffic(
        requests=history.requests.total(),
        rows=history.scanned + history.fetched,
        read_units=round(history.scanned * ROW_BYTES / UNIT_BYTES / 2 + history.fetched - history.fetched_stale / 2, 1),
        write_units=sum(count for verb, count in history.requests.items() if verb not in {"list", "get"}),
    )


EVENTS = ("reshapes", "emptyings", "callable_faults")
FAULTS = ("stall", "lost", "unanswered", "late", "twice", "stale")


def shrink_scenario(scenario: Scenario, fails: Callable[[Scenario], bool], *, max_runs: int = 200) -> Scenario:
    """Return the smallest failing scenario that can be found in `max_runs` runs."""
    run_count = 0
    was_simplified = True
    while was_simplified:
        was_simplified = False
        for candidate in _list_smaller_scenarios(scenario):
            run_count += 1
            if run_count > max_runs:
                return scenario
            if fails(candidate):
                scenario, was_simplified = candidate, True
                break
    return scenario


def _list_smaller_scenarios(scenario: Scenario) -> Iterator[Scenario]:
    """Yield simpler scenarios, beginning with those that leave out the most."""
    members, network = scenario.members, scenario.network
    for index, member in enumerate(members):
        remaining_members = (*members[:index], *members[index + 1 :])
        removed_workers = {member.worker} - {remaining_member.worker for remaining_member in remaining_members}
        owners = tuple(None if owner in removed_workers else owner for owner in scenario.owners)
        yield evolve(scenario, members=remaining_members, owners=owners)
    for field_name in EVENTS:
        events = getattr(scenario, field_name)
        for index in range(len(events)):
            field_with_fewer_events: dict[str, Any] = {field_name: (*events[:index], *events[index + 1 :])}
            yield evolve(scenario, **field_with_fewer_events)
    if len(scenario.owners) > 1:
        yield evolve(scenario, owners=scenario.owners[:-1])
    for fault, neutral_value in (("outages", ()), *((fault, 0.0) for fault in FAULTS)):
        if getattr(network, fault):
            field_without_fault: dict[str, Any] = {fault: neutral_value}
            yield evolve(scenario, network=evolve(network, **field_without_fault))
    for index, member in enumerate(members):
        if member.naps:
            member_with_fewer_naps = evolve(member, naps=member.naps[1:])
            yield evolve(scenario, members=(*members[:index], member_with_fewer_naps, *members[index + 1 :]))


def describe_scenario(scenario: Scenario) -> str:
    """Return a description of the scenario, one fact per line."""
    network = scenario.network
    faults = ", ".join(f"{fault} {getattr(network, fault):.4f}" for fault in FAULTS if getattr(network, fault))
    return "\n".join(
        (
            f"seed {scenario.seed}, {len(scenario.owners)} leases owned by {', '.join(map(str, scenario.owners))}",
            *(f"member {member}" for member in scenario.members),
            *(f"{event}" for field_name in EVENTS for event in getattr(scenario, field_name)),
            f"network: {faults or 'no faults'}; outages {network.outages or 'none'}",
        )
    )


def run_and_find_breaches(trial: Trial) -> tuple[Breach, ...]:
    """Run the trial, and return the breaches that the judge finds in its history."""
    return judge_history(run(trial.scenario), trial.limits)


def explain_failure(trial: Trial) -> str:
    """Simplify a failing trial, and return a report of the remaining breaches and the simplified fleet."""
    broken_laws = {breach.what for breach in run_and_find_breaches(trial)}

    def still_fails(candidate: Scenario) -> bool:
        return bool(broken_laws & {breach.what for breach in run_and_find_breaches(evolve(trial, scenario=candidate))})

    smallest_scenario = shrink_scenario(trial.scenario, still_fails)
    breaches = run_and_find_breaches(evolve(trial, scenario=smallest_scenario))
    return "\n".join((*map(str, breaches), "in the smallest fleet found:", describe_scenario(smallest_scenario)))
