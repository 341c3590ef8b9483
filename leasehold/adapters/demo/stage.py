"""Starts and kills the workers of a run, reshapes its stream, and records everything.

The order of events is in `story`, their picture in `screen`.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from attrs import define, evolve, field

from leasehold.adapters.demo.child import Child
from leasehold.adapters.demo.stream import Stream
from leasehold.adapters.demo.tail import Tail
from leasehold.adapters.history.events import Incident, IncidentKind, ReadingEvent, RunHistory, Sent, event_of, seen
from leasehold.adapters.history.tenures import TenureHistory
from leasehold.adapters.history.verdict import RunVerdict, verdict_on
from leasehold.balancer.model import Lease
from leasehold.stores.protocol import Store

TICK_SECONDS = 0.2
AT_WORK = "at work"


class StageError(Exception):
    """The run cannot go on: what stopped, and its last words."""


@define
class Stage:
    """A run of the demo.

    folder    where the processes write
    stream    what they read
    store     the table, for watching; `store_url` is what the workers are given
    settings  further options of `leasehold consume`
    watched   called at each tick
    """

    folder: Path
    stream: Stream
    store: Store
    store_url: str
    settings: tuple[str, ...] = ()
    watched: Callable[["Stage"], None] = lambda _stage: None
    history: RunHistory = field(factory=RunHistory)
    leases: tuple[Lease, ...] = ()
    reading: TenureHistory = field(factory=TenureHistory)
    distinct: set[tuple[str, str]] = field(factory=set)
    handed: Counter[str] = field(factory=Counter)
    workers: dict[str, str] = field(factory=dict)
    """Each worker's state, as a word for people."""
    open_shards: int = 0
    _children: dict[str, Child] = field(factory=dict)
    _tails: list[Tail[ReadingEvent]] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        """Count the shards there are."""
        self._reshaped()

    # Actions

    def join(self, worker: str) -> None:
        """Start a worker process."""
        command = ("-m", "leasehold.adapters.cli.main", "consume", self.stream.url, "--store", self.store_url)
        self.admit(Child(worker, (*command, "--events", "--worker", worker, *self.settings), self.folder))

    def admit(self, child: Child) -> None:
        """Have a process that prints event lines take part as the worker of its name."""
        self._children[child.name] = child
        self._tails.append(Tail(child.out, event_of))
        self._incident("start", child.name, "at work")

    def kill(self, worker: str) -> None:
        """SIGKILL."""
        self._children.pop(worker).kill()
        self._incident("crash", worker, "killed")
        self.tick()  # read what it wrote, then note its death
        self.reading.died(worker, self.history.incidents[-1].t)

    def leave(self, worker: str) -> Child:
        """SIGTERM: it drains while the others go on; its process, to be waited for."""
        child = self._children.pop(worker)
        self._incident("leave", worker, "drained")
        child.ask_to_end()
        return child

    def split(self) -> str:
        """Split the widest shard; its id."""
        began = _now()
        shard = self.stream.split()
        self.history.incidents.append(Incident(began, "split", shard))
        self._reshaped()
        return shard

    def merge(self) -> tuple[str, str]:
        """Merge the narrowest neighbours; their ids."""
        began = _now()
        shards = self.stream.merge()
        self.history.incidents.append(Incident(began, "merge", " ".join(shards)))
        self._reshaped()
        return shards

    def end(self) -> None:
        """Let all workers drain, side by side."""
        self._incident("end")
        for child in self._children.values():
            child.ask_to_end()
        self._look()
        for worker, child in self._children.items():
            status = child.wait()
            self.workers[worker] = "drained" if not status else f"ended with status {status}"
        self._children.clear()
        self.tick()

    def abandon(self) -> None:
        """Leave no process behind, in whatever state."""
        for child in self._children.values():
            child.kill()
        self._children.clear()

    # Observations

    def tick(self) -> None:
        """Take in what has been written since, and read the table."""
        self._look()
        for worker, child in self._children.items():
            if not child.running:
                raise StageError(f"{worker} ended by itself; its last words:\n{child.said}")
        self.watched(self)

    def until(self, holds: Callable[[], bool], seconds: float) -> bool:
        """Tick until something holds; False if it does not within so many seconds."""
        deadline = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > deadline:
                return False
            time.sleep(TICK_SECONDS)
            self.tick()
        return True

    def pause(self, seconds: float) -> None:
        """Let it run."""
        self.until(lambda: False, seconds)

    def living(self) -> tuple[str, ...]:
        """Workers at work."""
        return tuple(worker for worker, state in self.workers.items() if state == AT_WORK)

    def held(self) -> Mapping[str, int]:
        """How many unfinished leases each living worker owns."""
        counts = dict.fromkeys(self.living(), 0)
        for lease in self.leases:
            if lease.owner in counts and not lease.ended:
                counts[lease.owner] += 1
        return counts

    def balanced(self) -> bool:
        """Whether every open shard is read by its living owner, and no two owners differ by more than one."""
        current = [lease for lease in self.leases if not lease.ended]
        held = self.held()
        read = all(self.reading.owner(lease.shard) == lease.owner and lease.owner in held for lease in current)
        return read and len(current) == self.open_shards and max(held.values()) - min(held.values()) <= 1

    def verdict(self, sent: list[Sent]) -> RunVerdict:
        """The judge's verdict on the history."""
        return verdict_on(self.recorded(sent))

    def recorded(self, sent: list[Sent]) -> RunHistory:
        """The history so far, of a producer that sent this."""
        return evolve(self.history, sent=sent, parents=dict(self.stream.parents()), end=_now())

    def _look(self) -> None:
        for tail in self._tails:
            for event in tail.more():
                self._take_in(event)
        self.leases = self.store.list().leases
        now = _now()
        self.history.rows += [seen(lease, now) for lease in self.leases]

    def _take_in(self, event: ReadingEvent) -> None:
        self.history.events.append(event)
        self.reading.add(event)
        if event.event == "record":
            self.distinct.add((event.key, event.digest))
            self.handed[event.worker] += 1

    def _incident(self, what: IncidentKind, subject: str = "", state: str = "") -> None:
        self.history.incidents.append(Incident(_now(), what, subject))
        if state:
            self.workers[subject] = state

    def _reshaped(self) -> None:
        self.open_shards = sum(shard.open for shard in self.stream.shards())


def _now() -> float:
    return time.time()
