"""A run under judgement: its history, its limits, and the facts that several laws need, each computed once."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import pairwise

from attrs import evolve, frozen

from leasehold.balancer.model import LATEST
from leasehold_lab.judge.breach import Limits
from leasehold_lab.judge.events import (
    Incident,
    ReadingEvent,
    RecordPlace,
    RunHistory,
    Sent,
    WriteVerb,
    worker_of,
)
from leasehold_lab.judge.tenures import Tenure, TenureHistory, by_shard, reading_of

OPERATOR = "operator"
"""The process whose writes are made behind the back of all workers."""

TAKES: frozenset[WriteVerb] = frozenset({"claim", "steal", "take-back"})
"""The writes in whose reply a process finds the checkpoint that it starts from."""

PositionOrder = tuple[int, int, int]

RecordId = tuple[str, str]
"""A record's key and digest."""


@frozen
class Life:
    """A process of a worker, from its start to its end; `leaves` is when it was told to go."""

    worker: str
    process: str
    start: float
    leaves: float = math.inf
    end: float = math.inf


def lives(incidents: Iterable[Incident]) -> tuple[Life, ...]:
    """Every process, in order of start; of two of one name the later begins when the earlier is over."""
    found: list[Life] = []
    latest: dict[str, int] = {}
    for incident in sorted(incidents, key=lambda incident: incident.t):
        match incident.what:
            case "start":
                latest[incident.subject] = len(found)
                found.append(Life(worker_of(incident.subject), incident.subject, incident.t))
            case "leave" | "crash" | "gone" if incident.subject in latest:
                life = found[latest[incident.subject]]
                end = life.end if incident.what == "leave" else incident.t
                found[latest[incident.subject]] = evolve(life, leaves=min(life.leaves, incident.t), end=end)
            case _:
                pass
    return tuple(found)


def alive_at(all_lives: Iterable[Life], t: float) -> frozenset[str]:
    """The workers that run then and have not been told to go."""
    return frozenset(life.worker for life in all_lives if life.start <= t < life.leaves)


@frozen
class ReaderChange:
    """A shard passed from one reader to the next, at the cost of records handed over again.

    duplicates     records of the next that earlier readers had handed over already
    since          what earlier readers had handed over since the checkpoint last seen before the change
    replayed       duplicates at or before that checkpoint: these nothing excuses
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
    """A run that is over, or judged as if it were."""

    history: RunHistory
    limits: Limits

    @cached_property
    def lives(self) -> tuple[Life, ...]:
        """Every process, in order of start."""
        return lives(self.history.incidents)

    @cached_property
    def planners(self) -> frozenset[str]:
        """The workers that run and plan when the fleet must be at rest: without one nothing can be asked of it."""
        if self.limits.settled is None:
            return frozenset()
        zombies = {worker_of(each.subject) for each in self.history.incidents if each.what == "zombie"}
        return alive_at(self.lives, self.limits.settled) - zombies

    @cached_property
    def naps(self) -> tuple[tuple[str, float, float], ...]:
        """The times in which a process or worker stood still, from then to then."""
        naps = (each for each in self.history.incidents if each.what == "nap")
        return tuple((nap.subject, nap.t, nap.t + nap.seconds) for nap in naps)

    @cached_property
    def reading(self) -> TenureHistory:
        """The tenures of all processes."""
        return reading_of(self.history)

    @cached_property
    def tenures(self) -> Mapping[str, list[Tenure]]:
        """The tenures of each shard, in the order they began."""
        return by_shard(self.reading.tenures)

    @cached_property
    def records(self) -> tuple[ReadingEvent, ...]:
        """Every hand-over of a record, in order of time."""
        return tuple(self.history.told("record"))

    @cached_property
    def numbers(self) -> Mapping[RecordId, int]:
        """The place of each record that was sent, among those of its key."""
        return {(each.key, each.digest): each.number for each in self.history.sent}

    @cached_property
    def lost(self) -> list[Sent]:
        """The records that were sent and never handed over."""
        got = {(event.key, event.digest) for event in self.records}
        return [each for each in self.history.sent if (each.key, each.digest) not in got]

    @cached_property
    def former(self) -> frozenset[RecordId]:
        """The records of former streams: what is handed over of them stands in no order to the present one."""
        return frozenset(
            (each.key, each.digest) for each in self.history.sent if (each.t or math.inf) < self.history.anew
        )

    @cached_property
    def forgotten(self) -> frozenset[str]:
        """The shards that a new group began at LATEST, where nobody could tell it that they had been read before (L13).

        Somebody deleted their rows while nobody held them (their owner may have lost them and still be named there),
        while their owner was in the last lease of its life, or while the table could not be reached; and whoever made
        a row anew had never read the table: it began after that, or within a lease before it.
        """
        lease, found = max(self.limits.lease_seconds.values(), default=0.0), set[str]()
        at_latest = [each for each in self.history.writes if each.verb == "create" and each.after and each.done]
        at_latest = [each for each in at_latest if each.after and each.after.checkpoint == LATEST]
        for deleted in self.history.writes if at_latest else ():
            if deleted.process != OPERATOR or deleted.before is None or deleted.after is not None:
                continue
            t, owner = deleted.t, deleted.before.owner
            reached = not any(
                each.t == t and each.what == "trouble" and each.seconds for each in self.history.incidents
            )
            told = [
                each for each in self.tenures.get(deleted.before.shard, ()) if each.worker == owner and each.begin <= t
            ]
            let_go = bool(told) and told[-1].how == "lease-lost" and told[-1].end <= t
            living = any(life.worker == owner and life.start <= t < life.end - lease for life in self.lives)
            if reached and living and not let_go:
                continue
            for made in (each for each in at_latest if each.t >= t):
                line = self.line_above(made.key)
                newcomer = any(life.process == made.process and life.start >= t - lease for life in self.lives)
                found |= line if newcomer and deleted.key in line else set()
        return frozenset(found)

    def unaware(self, process: str, shard: str, t: float) -> bool:
        """Whether a process could not know then that this shard's lease was unfinished (L13).

        Somebody had deleted its row, and the process had not read the table before, or only within a lease before
        that. To it a missing row is that of a finished lease.
        """
        lease = max(self.limits.lease_seconds.values(), default=0.0)
        start = max((life.start for life in self.lives if life.process == process), default=0.0)
        deleted = [each for each in self.history.writes if each.process == OPERATOR and each.after is None]
        return any(each.key == shard and each.t <= min(t, start + lease) for each in deleted)

    def line_above(self, shard: str) -> set[str]:
        """The shard and all its ancestors."""
        line, todo = set[str](), [shard]
        while todo:
            if (one := todo.pop()) not in line:
                line.add(one)
                todo += self.history.parents.get(one, ())
        return line

    @cached_property
    def strangers(self) -> list[RecordId]:
        """The records that were handed over and never sent."""
        return sorted({(event.key, event.digest) for event in self.records} - self.numbers.keys())

    @cached_property
    def reader_changes(self) -> tuple[ReaderChange, ...]:
        """Every change of a shard's reader, in order of time."""
        taken: dict[tuple[str, str], list[tuple[float, PositionOrder]]] = defaultdict(list)
        seen: dict[str, list[tuple[float, PositionOrder]]] = defaultdict(list)
        anew: dict[str, list[float]] = defaultdict(list)
        for answer in self.history.answers:
            if answer.verb in {"delete", "reset"} and answer.done:
                anew[answer.shard].append(answer.t)
            if answer.verb in TAKES and answer.done:
                taken[answer.process, answer.shard].append((answer.t, answer.checkpoint))
        for write in self.history.writes:
            if write.done and write.after is not None and write.verb in {"create", "reset"}:
                anew[write.after.shard].append(write.t)
            if write.done and write.after is not None and write.verb in TAKES:
                taken[write.process, write.after.shard].append((write.t, write.after.checkpoint.order))
        for row in self.history.rows:
            seen[row.shard].append((row.t, row.checkpoint.order))
        found = []
        for shard, readers in self.tenures.items():
            earlier: set[tuple[RecordPlace, str]] = set()  # an event hub that is made anew counts from 0 again
            for before, after in pairwise(readers):
                earlier.update((record.place, record.digest) for record in before.records)
                again = earlier.intersection((record.place, record.digest) for record in after.records)
                # A reader starts at the checkpoint in its claim's reply; where no claims are recorded, at the last
                # one seen before. Of a row that was reset, or deleted and created again, what was written since counts.
                known = taken.get((after.process, shard)) or seen.get(shard, [])
                since = max((t for t in anew[shard] if t <= after.begin), default=0.0)
                start = max((order for t, order in known if since <= t <= after.begin), default=(0, 0, 0))
                found.append(
                    ReaderChange(
                        t=after.begin,
                        shard=shard,
                        before=before.process,
                        after=after.process,
                        how=before.how,
                        duplicates=len(again),
                        since=sum((1, *place) > start for place, _ in earlier),
                        replayed=sum((1, *place) <= start for place, _ in again),
                    )
                )
        return tuple(sorted(found, key=lambda change: (change.t, change.shard)))
