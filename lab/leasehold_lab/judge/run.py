"""A run to judge, with its history, its limits, and cached values that several laws need."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import pairwise

from attrs import evolve, frozen

from leasehold.balancer.model import LATEST
from leasehold_lab.judge.breach import JudgeLimits
from leasehold_lab.judge.events import (
    Incident,
    ReadingEvent,
    RecordPlace,
    RunHistory,
    SentRecord,
    WriteVerb,
    parse_worker_id,
)
from leasehold_lab.judge.tenures import Tenure, TenureHistory, compute_tenures, group_by_shard

OPERATOR = "operator"
"""The process name for writes that an operator made without the workers' knowledge."""

TAKING_VERBS: frozenset[WriteVerb] = frozenset({"claim", "steal", "take-back"})
"""Kinds of writes that take a lease. Their response contains the checkpoint from which the new owner starts."""

PositionOrder = tuple[int, int, int]

RecordId = tuple[str, str]
"""A record's key and digest."""


@frozen
class ProcessLifetime:
    """The lifetime of one process of a worker. `leaves` is the time when its drain was requested."""

    worker: str
    process: str
    start: float
    leaves: float = math.inf
    end: float = math.inf


def find_lifetimes(incidents: Iterable[Incident]) -> tuple[ProcessLifetime, ...]:
    """Return the lifetimes of all processes, in order of their starts.

    Two processes may have the same name only if the first ends before the second starts.
    """
    lifetimes: list[ProcessLifetime] = []
    latest_index: dict[str, int] = {}
    for incident in sorted(incidents, key=lambda incident: incident.t):
        match incident.what:
            case "start":
                latest_index[incident.subject] = len(lifetimes)
                lifetimes.append(ProcessLifetime(parse_worker_id(incident.subject), incident.subject, incident.t))
            case "leave" | "crash" | "gone" if incident.subject in latest_index:
                lifetime = lifetimes[latest_index[incident.subject]]
                end_time = lifetime.end if incident.what == "leave" else incident.t
                lifetimes[latest_index[incident.subject]] = evolve(
                    lifetime, leaves=min(lifetime.leaves, incident.t), end=end_time
                )
            case _:
                pass
    return tuple(lifetimes)


def find_workers_alive_at(lifetimes: Iterable[ProcessLifetime], time: float) -> frozenset[str]:
    """Return the workers that are running at time `time` and have not been asked to drain."""
    return frozenset(lifetime.worker for lifetime in lifetimes if lifetime.start <= time < lifetime.leaves)


@frozen
class ReaderChange:
    """A change of a shard's reader, with the number of records that were dispatched again.

    Attributes:
        before: The process that read the shard before.
        after: The process that reads the shard now.
        how: The event that ended the reading of the previous process.
        duplicates: The number of records that the new reader dispatched again after an earlier reader had.
        since: The number of records that earlier readers had dispatched and whose positions are after the last
        checkpoint before the change.
        replayed: The number of duplicates at or before that checkpoint. Any such duplicate is a breach.
    """

    t: float
    shard: str
    before: str
    after: str
    how: str
    duplicates: int
    since: int
    replayed: int


@frozen
class JudgedRun:
    """A run to judge. A run that is still in progress is judged as if it ended now."""

    history: RunHistory
    limits: JudgeLimits

    @cached_property
    def lifetimes(self) -> tuple[ProcessLifetime, ...]:
        """The lifetimes of all processes, in order of their starts."""
        return find_lifetimes(self.history.incidents)

    @cached_property
    def planning_workers(self) -> frozenset[str]:
        """The workers that are running and planning at the time `settled`.

        If there are none, leases may stay unowned.
        """
        if self.limits.settled is None:
            return frozenset()
        zombie_workers = {
            parse_worker_id(incident.subject) for incident in self.history.incidents if incident.what == "zombie"
        }
        return find_workers_alive_at(self.lifetimes, self.limits.settled) - zombie_workers

    @cached_property
    def pauses(self) -> tuple[tuple[str, float, float], ...]:
        """All pauses, each with the process or worker that was paused, its start and its end."""
        pause_incidents = (incident for incident in self.history.incidents if incident.what == "nap")
        return tuple((pause.subject, pause.t, pause.t + pause.seconds) for pause in pause_incidents)

    @cached_property
    def tenure_history(self) -> TenureHistory:
        """The periods in which processes read shards, in order of their starts."""
        return compute_tenures(self.history)

    @cached_property
    def tenures(self) -> Mapping[str, list[Tenure]]:
        """The tenures of each shard, in order of their starts."""
        return group_by_shard(self.tenure_history.tenures)

    @cached_property
    def dispatches(self) -> tuple[ReadingEvent, ...]:
        """All dispatches of records, in order of time."""
        return tuple(self.history.select_events("record"))

    @cached_property
    def record_numbers(self) -> Mapping[RecordId, int]:
        """Maps each record that was sent to its number among the records of its key."""
        return {(record.key, record.digest): record.number for record in self.history.sent}

    @cached_property
    def undispatched_records(self) -> list[SentRecord]:
        """The records that were sent but never dispatched."""
        dispatched_ids = {(event.key, event.digest) for event in self.dispatches}
        return [record for record in self.history.sent if (record.key, record.digest) not in dispatched_ids]

    @cached_property
    def former_stream_records(self) -> frozenset[RecordId]:
        """The records of former streams, which are not ordered relative to those of the current stream."""
        return frozenset(
            (record.key, record.digest)
            for record in self.history.sent
            if (record.t or math.inf) < self.history.recreated_at
        )

    @cached_property
    def forgotten_shards(self) -> frozenset[str]:
        """The shards that a worker started at LATEST because it could not know that they had been read before (L13).

        This happens in two steps:

        1. An operator deletes a row while no running worker holds the lease, or less than one lease duration before the
           owner's process ends, or while the table cannot be reached.
        2. A worker that had not read the row creates it again. The worker's process starts after the deletion, or at
           most one lease duration before it.
        """
        lease_seconds, shards = max(self.limits.lease_seconds.values(), default=0.0), set[str]()
        creations_at_latest = [
            write for write in self.history.writes if write.verb == "create" and write.after and write.done
        ]
        creations_at_latest = [
            write for write in creations_at_latest if write.after and write.after.checkpoint == LATEST
        ]
        for deletion in self.history.writes if creations_at_latest else ():
            if deletion.process != OPERATOR or deletion.before is None or deletion.after is not None:
                continue
            deletion_time, owner = deletion.t, deletion.before.owner
            is_table_reachable = not any(
                incident.t == deletion_time and incident.what == "trouble" and incident.seconds
                for incident in self.history.incidents
            )
            tenures = [
                tenure
                for tenure in self.tenures.get(deletion.before.shard, ())
                if tenure.worker == owner and tenure.begin <= deletion_time
            ]
            is_released = bool(tenures) and tenures[-1].how == "lease-lost" and tenures[-1].end <= deletion_time
            is_owner_alive = any(
                lifetime.worker == owner and lifetime.start <= deletion_time < lifetime.end - lease_seconds
                for lifetime in self.lifetimes
            )
            if is_table_reachable and is_owner_alive and not is_released:
                continue
            for creation in (write for write in creations_at_latest if write.t >= deletion_time):
                lineage = self.list_self_and_ancestors(creation.key)
                has_started_recently = any(
                    lifetime.process == creation.process and lifetime.start >= deletion_time - lease_seconds
                    for lifetime in self.lifetimes
                )
                shards |= lineage if has_started_recently and deletion.key in lineage else set()
        return frozenset(shards)

    def must_assume_finished(self, process: str, shard: str, t: float) -> bool:
        """Return whether the process had to conclude, at time `t`, that this shard's lease was finished (L13).

        A process that has never read a row treats the missing row as a finished lease. The process is assumed to have
        never
        read the row if an operator deleted the row before the process started, or at most one lease duration after its
        start.
        """
        lease_seconds = max(self.limits.lease_seconds.values(), default=0.0)
        start_time = max((lifetime.start for lifetime in self.lifetimes if lifetime.process == process), default=0.0)
        deletions = [write for write in self.history.writes if write.process == OPERATOR and write.after is None]
        return any(write.key == shard and write.t <= min(t, start_time + lease_seconds) for write in deletions)

    def list_self_and_ancestors(self, shard: str) -> set[str]:
        """Return the shard and all its ancestors."""
        lineage, shards_to_visit = set[str](), [shard]
        while shards_to_visit:
            if (ancestor := shards_to_visit.pop()) not in lineage:
                lineage.add(ancestor)
                shards_to_visit += self.history.parents.get(ancestor, ())
        return lineage

    @cached_property
    def unsent_records(self) -> list[RecordId]:
        """The records that were dispatched although they were never sent."""
        return sorted({(event.key, event.digest) for event in self.dispatches} - self.record_numbers.keys())

    @cached_property
    def reader_changes(self) -> tuple[ReaderChange, ...]:
        """All changes of a shard's reader, in order of time."""
        checkpoints_by_taker: dict[tuple[str, str], list[tuple[float, PositionOrder]]] = defaultdict(list)
        observed_checkpoints: dict[str, list[tuple[float, PositionOrder]]] = defaultdict(list)
        reset_times: dict[str, list[float]] = defaultdict(list)
        for answer in self.history.answers:
            if answer.verb in {"delete", "reset"} and answer.done:
                reset_times[answer.shard].append(answer.t)
            if answer.verb in TAKING_VERBS and answer.done:
                checkpoints_by_taker[answer.process, answer.shard].append((answer.t, answer.checkpoint))
        for write in self.history.writes:
            if write.done and write.after is not None and write.verb in {"create", "reset"}:
                reset_times[write.after.shard].append(write.t)
            if write.done and write.after is not None and write.verb in TAKING_VERBS:
                checkpoints_by_taker[write.process, write.after.shard].append((write.t, write.after.checkpoint.order))
        for row in self.history.rows:
            observed_checkpoints[row.shard].append((row.t, row.checkpoint.order))
        changes = []
        for shard, readers in self.tenures.items():
            earlier_records: set[tuple[RecordPlace, str]] = (
                set()
            )  # The digests are needed because a recreated event hub counts from 0.
            for earlier_tenure, later_tenure in pairwise(readers):
                earlier_records.update((record.place, record.digest) for record in earlier_tenure.records)
                repeated_places = earlier_records.intersection(
                    (record.place, record.digest) for record in later_tenure.records
                )
                # A reader starts at the checkpoint in the response to its claim. If claims are not recorded, the last
                # checkpoint read from the table is used. Checkpoints from before a reset or a recreation of the row do
                # not count.
                checkpoints = checkpoints_by_taker.get((later_tenure.process, shard)) or observed_checkpoints.get(
                    shard, []
                )
                last_reset_time = max((time for time in reset_times[shard] if time <= later_tenure.begin), default=0.0)
                start_position = max(
                    (position for time, position in checkpoints if last_reset_time <= time <= later_tenure.begin),
                    default=(0, 0, 0),
                )
                changes.append(
                    ReaderChange(
                        t=later_tenure.begin,
                        shard=shard,
                        before=earlier_tenure.process,
                        after=later_tenure.process,
                        how=earlier_tenure.how,
                        duplicates=len(repeated_places),
                        since=sum((1, *record_place) > start_position for record_place, _ in earlier_records),
                        replayed=sum((1, *record_place) <= start_position for record_place, _ in repeated_places),
                    )
                )
        return tuple(sorted(changes, key=lambda change: (change.t, change.shard)))
