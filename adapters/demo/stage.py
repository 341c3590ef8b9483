"""Where it all happens: workers are started and killed, the stream reshaped, and everything recorded.

Nothing in here decides what happens next (see the stories) or how it looks (see the screen).
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from attrs import define, field

from adapters.demo.child import Child
from adapters.demo.stream import Stream
from adapters.demo.tail import Tail
from adapters.history.judge import Verdict, judge
from adapters.history.tenures import Reading
from adapters.history.told import Deed, Doing, Event, Seen, Sent, event_of, seen
from balancer.model import Lease
from stores.protocol import Store

TICK_SECONDS = 0.2
AT_WORK = "at work"


class StageError(Exception):
    """The run cannot go on: what stopped, and its last words."""


@define
class Stage:
    """One run.

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
    deeds: list[Deed] = field(factory=list)
    rows: list[Seen] = field(factory=list)
    events: list[Event] = field(factory=list)
    leases: tuple[Lease, ...] = ()
    reading: Reading = field(factory=Reading)
    distinct: set[tuple[str, str]] = field(factory=set)
    handed: Counter[str] = field(factory=Counter)
    workers: dict[str, str] = field(factory=dict)
    """Each worker's state, as a word for people."""
    open_shards: int = 0
    _children: dict[str, Child] = field(factory=dict)
    _tails: list[Tail[Event]] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        """Count the shards there are."""
        self._reshaped()

    # What is done

    def join(self, worker: str) -> None:
        """Start a worker process."""
        command = ("-m", "adapters.cli.main", "consume", self.stream.url, "--store", self.store_url)
        self.admit(Child(worker, (*command, "--events", "--worker", worker, *self.settings), self.folder))

    def admit(self, child: Child) -> None:
        """Have a process that prints event lines take part as the worker of its name."""
        self._children[child.name] = child
        self._tails.append(Tail(child.out, event_of))
        self._deed("join", child.name, "at work")

    def kill(self, worker: str) -> None:
        """SIGKILL."""
        self._children.pop(worker).kill()
        self._deed("kill", worker, "killed")
        self.tick()  # all it wrote before is known before it is called dead
        self.reading.died(worker, self.deeds[-1].t)

    def leave(self, worker: str) -> Child:
        """SIGTERM: it drains while the others go on; its process, to be waited for."""
        child = self._children.pop(worker)
        self._deed("leave", worker, "drained")
        child.ask_to_end()
        return child

    def split(self) -> str:
        """Split the widest shard; its id."""
        began = _now()
        shard = self.stream.split()
        self.deeds.append(Deed(began, "split", shard))
        self._reshaped()
        return shard

    def merge(self) -> tuple[str, str]:
        """Merge the narrowest neighbours; their ids."""
        began = _now()
        shards = self.stream.merge()
        self.deeds.append(Deed(began, "merge", " ".join(shards)))
        self._reshaped()
        return shards

    def end(self) -> None:
        """Let all workers drain, side by side."""
        self._deed("end")
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

    # What is seen

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

    def verdict(self, sent: list[Sent]) -> Verdict:
        """What the history says."""
        return judge(sent, self.events, deeds=self.deeds, rows=self.rows, parents=self.stream.parents())

    def _look(self) -> None:
        for tail in self._tails:
            for event in tail.more():
                self._take_in(event)
        self.leases = self.store.list().leases
        now = _now()
        self.rows += [seen(lease, now) for lease in self.leases]

    def _take_in(self, event: Event) -> None:
        self.events.append(event)
        self.reading.add(event)
        if event.event == "record":
            self.distinct.add((event.key, event.sha1))
            self.handed[event.worker] += 1

    def _deed(self, what: Doing, subject: str = "", state: str = "") -> None:
        self.deeds.append(Deed(_now(), what, subject))
        if state:
            self.workers[subject] = state

    def _reshaped(self) -> None:
        self.open_shards = sum(shard.open for shard in self.stream.shards())


def _now() -> float:
    return time.time() * 1000
