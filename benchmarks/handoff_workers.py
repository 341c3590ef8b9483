"""Runs the workers of the benchmark `handoff` in separate processes, and collects their events."""

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from uuid import uuid4

sys.path.insert(0, str(Path(__file__).parents[1]))

from attrs import define, field, frozen
from growing_stream import Flow

from leasehold.adapters.consumer.handling import Delivery, Handling, ShardEvent
from leasehold.adapters.consumer.runner import Runner
from leasehold.adapters.worker.holding import Holding
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.config import Config
from leasehold.balancer.model import TRIM_HORIZON
from leasehold.errors import OutcomeUnknown
from leasehold.stores.protocol import Outcome, Store
from leasehold.stores.urls import open_store
from leasehold.stores.writes import RequestLease, Write
from leasehold_lab.judge.events import ReadingEvent

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkServerProcess as Process

LEASES, RATE = 20, 100
NOW = time.monotonic
PROCESSES = multiprocessing.get_context("forkserver")


@frozen
class Target:
    """A store to measure on: a template of its URL, the time between checkpoints, and the lease duration."""

    url: str
    checkpoint_seconds: float
    lease_seconds: float


@frozen
class Table:
    """The lease table of one fleet. `began` is the time when its shards started to grow."""

    url: str
    place: Target
    began: float


@frozen
class Faults:
    """The faults of one process: the write after which it dies, and the writes whose responses it may lose."""

    dies_after: type[Write] | None = None
    forgets: frozenset[type[Write]] = frozenset()


class Faulty:
    """A store with faults. The process dies after a given write, or loses every second response to some writes."""

    def __init__(self, store: Store, report: Callable[[str], None], faults: Faults) -> None:
        self._store, self._report, self._faults = store, report, faults
        self._writes: Counter[type[Write]] = Counter()

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  any attribute of the store
        return getattr(self._store, name)

    def write(self, write: Write) -> Outcome:
        """Write to the store, and apply the faults."""
        outcome, kind = self._store.write(write), type(write)
        self._writes[kind] += 1
        if kind is RequestLease:
            self._report(write.lease.key)
        if kind is self._faults.dies_after:
            os.kill(os.getpid(), signal.SIGKILL)
        if kind in self._faults.forgets and self._writes[kind] % 2:
            raise OutcomeUnknown("the reply was lost")
        return outcome


def member(name: str, table: Table, faults: Faults, pipe: "Connection") -> None:
    """Run a worker, send its events through the pipe, and drain when anything is received."""
    logging.disable(logging.CRITICAL)
    place, send_lock = table.place, threading.Lock()

    def wait_and_stop() -> None:
        pipe.recv()
        runner.stop()

    def send(*words: Any) -> None:  # noqa: ANN401  an event, or the requested lease
        with send_lock:
            pipe.send(words)

    def handle(delivery: Delivery) -> None:
        now = NOW()
        for record in delivery.records:
            send(ReadingEvent(now, name, "record", delivery.lease, (int(record.sequence_number), 0)))

    def on_event(happening: ShardEvent, holding: Holding) -> None:
        send(ReadingEvent(NOW(), name, happening, holding.key))

    config = Config(lease_seconds=place.lease_seconds, initial_position=TRIM_HORIZON)
    store = cast("Store", Faulty(open_store(table.url), send, faults))
    source = Flow(LEASES, RATE, NOW, table.began)
    worker = Worker(store=store, source=source, me=name, config=config)
    runner = Runner(worker, Handling(handle, observer=on_event, checkpoint_seconds=place.checkpoint_seconds))
    threading.Thread(target=wait_and_stop, daemon=True).start()
    runner.run()


@define
class Member:
    """A worker's process, with the leases that it reads and those that it has requested."""

    process: "Process"
    pipe: "Connection"
    listener: threading.Thread
    held: set[str]
    requested: set[str]


@define
class Fleet:
    """Workers in separate processes, and the events that they reported."""

    table: Table
    events: list[ReadingEvent] = field(factory=list)
    members: dict[str, Member] = field(factory=dict)

    def join(self, name: str, faults: Faults | None = None) -> Member:
        """Start a worker."""
        pipe, remote_pipe = PROCESSES.Pipe()
        arguments = (name, self.table, faults or Faults(), remote_pipe)
        process = PROCESSES.Process(target=member, args=arguments, daemon=True)
        process.start()
        remote_pipe.close()
        new_member = Member(
            process, pipe, threading.Thread(target=self._listen, args=(name,), daemon=True), set(), set()
        )
        self.members[name] = new_member
        new_member.listener.start()
        return new_member

    def _listen(self, name: str) -> None:
        listening_member = self.members[name]
        with suppress(EOFError, OSError):
            while True:
                (message,) = listening_member.pipe.recv()
                if isinstance(message, str):
                    listening_member.requested.add(message)
                    continue
                self.events.append(message)
                if message.event != "record":
                    (listening_member.held.add if message.event == "initialize" else listening_member.held.discard)(
                        message.shard
                    )

    def leave(self, name: str) -> None:
        """Make a worker drain, unless its process is dead."""
        leaving_member = self.members[name]
        with suppress(OSError):
            leaving_member.pipe.send("leave")
        leaving_member.process.join(30)
        leaving_member.listener.join(30)

    def freeze(self, name: str) -> None:
        """Stop a worker's process by SIGSTOP, which has the same effect on the fleet as a kill.

        A kill might interrupt a request, which would end dynalite.
        """
        os.kill(cast("int", self.members[name].process.pid), signal.SIGSTOP)

    def until(self, holds: Callable[[], bool], seconds: float, condition: str) -> None:
        """Wait until `holds` returns True, or exit with an error message after `seconds`."""
        deadline = NOW() + seconds
        while not holds():
            if NOW() > deadline:
                counts = {name: len(fleet_member.held) for name, fleet_member in self.members.items()}
                raise SystemExit(f"FAIL: not within {seconds:g} s: {condition}; {counts}")
            time.sleep(0.02)

    def holds(self, name: str, count: int) -> Callable[[], bool]:
        """Return a function that returns whether a worker reads `count` leases."""
        return lambda: len(self.members[name].held) == count


@contextmanager
def fleet(place: Target, faults: Faults | None = None) -> Iterator[Fleet]:
    """Yield a fleet with a new table, in which one worker owns all leases."""
    new_fleet = Fleet(Table(place.url.format(name=f"handoff-{uuid4().hex[:8]}"), place, NOW()))
    try:
        new_fleet.join("giver", faults)
        new_fleet.until(new_fleet.holds("giver", LEASES), 30, "one worker holds everything")
        yield new_fleet
    finally:
        for name in new_fleet.members:
            new_fleet.leave(name)
