"""What planned moves between our workers cost: records handed over twice or never, overlap, and pause.

    python benchmarks/handoff.py [--store dynalite|azurite] [--checkpoint-seconds N] [--lease-seconds N]

One worker holds every lease; another joins, is given its half, leaves, and joins again. The records are made
up as time passes, so that nothing but leases and workers is measured. A pause is the time from the giver's
last record to the taker's first. Then takers and givers die in the middle of moves, and replies are lost.
"""

import argparse
import logging
import os
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

sys.path.insert(0, str(Path(__file__).parents[1]))

from attrs import define, field, frozen

from adapters.demo.child import ENVIRONMENT
from adapters.handling import Delivery, Handling, Happening
from adapters.history.tenures import by_shard, reading_of
from adapters.history.told import Event
from adapters.holding import Holding
from adapters.local.services import AZURITE_ACCOUNT, azurite, azurite_connection_string, dynalite
from adapters.runner import Runner
from adapters.simulator.flow import FIRST, Flow
from adapters.source import SourceUnavailable
from adapters.worker import Worker
from balancer.config import Config
from balancer.model import TRIM_HORIZON
from stores.protocol import OutcomeUnknown, Store
from stores.urls import open_store

LEASES, MOVES, RATE = 20, 100, 100
LEASE_SECONDS = 3.0
PAUSE_BAR, PAUSE_99_BAR, TAKER_BAR, GIVER_BAR = 0.25, 0.6, 2.5, 1.0
NOW = time.monotonic


class Mortal:
    """A store as one process sees it: dead, nothing gets through; forgetful, every second of some replies is lost."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.dead = threading.Event()
        self.dies_after: str | None = None
        self.forgets: frozenset[str] = frozenset()
        self.calls: defaultdict[str, int] = defaultdict(int)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  whatever the store has
        found = getattr(self._store, name)
        return self._call(name, found) if callable(found) else found

    def _call(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401  as the store's
            if self.dead.is_set():
                raise OutcomeUnknown("this process is dead")
            answer = method(*arguments, **named)
            self.calls[name] += 1
            if name == self.dies_after:
                self.dead.set()
            if name in self.forgets and self.calls[name] % 2:
                raise OutcomeUnknown("the reply was lost")
            return answer

        return call


@define
class Fleet:
    """Workers in threads of one process, and what they told of each lease."""

    store: Callable[[], Store]
    source: Flow
    place: "Place"
    told: list[Event] = field(factory=list)
    held: defaultdict[str, set[str]] = field(factory=lambda: defaultdict(set))
    stores: dict[str, Mortal] = field(factory=dict)
    _running: dict[str, tuple[Runner, threading.Thread]] = field(factory=dict)

    def join(self, name: str, **faults: Any) -> Mortal:  # noqa: ANN401  attributes of the store
        """Start a worker."""
        mortal = Mortal(self.store())
        for fault, value in faults.items():
            setattr(mortal, fault, value)
        config = Config(lease_seconds=self.place.lease_seconds, initial_position=TRIM_HORIZON)
        worker = Worker(store=cast("Store", mortal), source=self.source, me=name, config=config)

        def handle(delivery: Delivery) -> None:
            if mortal.dead.is_set():
                raise SourceUnavailable("this process is dead")
            now = NOW()
            for record in delivery.records:
                self.told.append(Event(now, name, "record", delivery.lease, (int(record.sequence_number), 0)))

        def happened(happening: Happening, holding: Holding) -> None:
            (self.held[name].add if happening == "initialize" else self.held[name].discard)(holding.key)
            self.told.append(Event(NOW(), name, happening, holding.key))

        runner = Runner(worker, Handling(handle, observer=happened, checkpoint_seconds=self.place.checkpoint_seconds))
        thread = threading.Thread(target=runner.run, daemon=True)
        thread.start()
        self.stores[name], self._running[name] = mortal, (runner, thread)
        return mortal

    @property
    def running(self) -> tuple[str, ...]:
        """Who has not left yet."""
        return tuple(self._running)

    def leave(self, name: str) -> None:
        """Drain it."""
        runner, thread = self._running.pop(name)
        runner.stop()
        thread.join(30)

    def until(self, holds: Callable[[], bool], seconds: float, what: str) -> None:
        """Wait for something; a benchmark that does not get there has failed."""
        deadline = NOW() + seconds
        while not holds():
            if NOW() > deadline:
                counts = {name: len(keys) for name, keys in self.held.items()}
                raise SystemExit(f"FAIL: not within {seconds:g} s: {what}; {counts}")
            time.sleep(0.02)

    def holds(self, name: str, count: int) -> Callable[[], bool]:
        """Whether a worker reads so many."""
        return lambda: len(self.held[name]) == count


@frozen
class Place:
    """A store to measure on: its URL with room for a name, the least time between two checkpoints, and the leases'."""

    url: str
    checkpoint_seconds: float
    lease_seconds: float


@contextmanager
def fleet(place: Place) -> Iterator[Fleet]:
    """A table of its own, and one worker that holds everything."""
    url = place.url.format(name=f"handoff-{uuid4().hex[:8]}")
    found = Fleet(lambda: open_store(url), Flow(LEASES, RATE, NOW), place)
    try:
        found.join("giver")
        found.until(found.holds("giver", LEASES), 30, "one worker holds everything")
        yield found
    finally:
        for name in found.running:
            found.stores[name].dead.clear()  # the dead end in good order too, once nothing is measured any more
            found.leave(name)


@frozen
class Cost:
    """What the moves of a fleet cost, in records and seconds."""

    moves: int
    duplicates: int
    lost: int
    overlap: float
    pauses: tuple[float, ...]


def cost(told: list[Event]) -> Cost:
    """Judge what was told. Of the changes of owner, those away from the giver are the planned moves."""
    shards = by_shard(reading_of(told, ()).tenures)
    numbers = [[record.place[0] for tenure in readers for record in tenure.records] for readers in shards.values()]
    moves = [
        (before.records[-1].t, after.records[0].t)
        for readers in shards.values()
        for before, after in pairwise(tenure for tenure in readers if tenure.records)
        if before.worker == "giver"
    ]
    return Cost(
        moves=len(moves),
        duplicates=sum(len(each) - len(set(each)) for each in numbers),
        lost=sum(max(each) + 1 - FIRST - len(set(each)) for each in numbers),
        overlap=sum(max(0.0, last - first) for last, first in moves),
        pauses=tuple(sorted(first - last for last, first in moves)),
    )


def silence(told: list[Event]) -> float:
    """The longest time for which a shard had no record handed over."""
    times: dict[str, list[float]] = {}
    for event in told:
        if event.event == "record":
            times.setdefault(event.shard, []).append(event.t)
    return max(after - before for each in times.values() for before, after in pairwise(each))


def planned(place: Place, **faults: Any) -> Cost:  # noqa: ANN401  attributes of the store
    """Moves without end: a taker joins, is given half, and leaves."""
    with fleet(place) as found:
        for name, value in faults.items():
            setattr(found.stores["giver"], name, value)
        for round_ in range(MOVES // (LEASES // 2)):
            taker = f"taker-{round_}"
            found.join(taker, **faults)
            found.until(found.holds(taker, LEASES // 2), 60, f"{taker} holds its half")
            time.sleep(0.5)
            found.leave(taker)
            found.until(found.holds("giver", LEASES), 30, "the giver holds everything again")
        found.leave("giver")
        return cost(found.told)


def taker_killed(place: Place) -> float:
    """The longest silence when a taker dies just after its request was written."""
    with fleet(place) as found:
        found.join("taker", dies_after="request_handoff")
        found.until(found.stores["taker"].dead.is_set, 30, "a request")
        time.sleep(place.lease_seconds + 2)
        return silence(found.told)


def giver_killed(place: Place) -> float:
    """The longest silence when a giver dies as it is asked, and the taker is left with everything."""
    with fleet(place) as found:
        found.join("taker")
        found.until(lambda: bool(found.stores["taker"].calls["request_handoff"]), 30, "a request")
        found.stores["giver"].dead.set()
        found.until(found.holds("taker", LEASES), 60, "the taker holds everything")
        time.sleep(0.5)
        return silence(found.told)


def say(what: str, figure: str, *, good: bool) -> bool:
    """One line of the table."""
    print(f"{'pass' if good else 'FAIL'}  {what:58} {figure}")
    return good


def measure(name: str, place: Place) -> bool:
    """Everything on one store; whether all bars hold."""
    print(f"-- {name}: {LEASES} leases, lease_seconds {place.lease_seconds:g}, {RATE} records/s each")
    done, forgetful = planned(place), planned(place, forgets=frozenset({"request_handoff", "give"}))
    p99 = done.pauses[min(len(done.pauses) - 1, int(0.99 * len(done.pauses)))]
    median, alone, orphans = statistics.median(done.pauses), taker_killed(place), giver_killed(place)
    within = place.lease_seconds + GIVER_BAR
    return all(
        [
            say(f"{MOVES} planned moves", str(done.moves), good=done.moves >= MOVES),
            say("records handed over twice: 0", str(done.duplicates), good=not done.duplicates),
            say("records lost: 0", str(done.lost), good=not done.lost),
            say("both at work: 0 s", f"{done.overlap:.3f} s", good=not done.overlap),
            say("pause, median: 0.25 s at most", f"{median:.3f} s", good=median <= PAUSE_BAR),
            say("pause, 99th percentile: 0.6 s at most", f"{p99:.3f} s", good=p99 <= PAUSE_99_BAR),
            say(
                "every second reply lost: 0 twice, 0 lost",
                f"{forgetful.duplicates}, {forgetful.lost}",
                good=not (forgetful.duplicates or forgetful.lost),
            ),
            say(f"taker killed after asking: {TAKER_BAR} s at most", f"{alone:.2f} s", good=alone <= TAKER_BAR),
            say(f"giver killed when asked: {within:g} s at most", f"{orphans:.2f} s", good=orphans <= within),
        ]
    )


def main() -> int:
    """Measure on the store named, by default on a table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--store", choices=("dynalite", "azurite"), default="dynalite")
    options.add_argument("--checkpoint-seconds", type=float, default=0.0, help="0: after every batch (%(default)s)")
    options.add_argument("--lease-seconds", type=float, default=LEASE_SECONDS, help="(%(default)s)")
    given = options.parse_args()
    store = given.store
    os.environ.update(ENVIRONMENT)
    logging.disable(logging.CRITICAL)  # of the faults made here each would be told
    with ExitStack() as stack:
        if store == "dynalite":
            url = f"dynamodb://{{name}}?endpoint={stack.enter_context(dynalite()).url}"
        else:
            service = stack.enter_context(azurite())
            os.environ["AZURE_STORAGE_CONNECTION_STRING"] = azurite_connection_string(service)
            url = f"azblob://{AZURITE_ACCOUNT}/{{name}}"
        return 0 if measure(store, Place(url, given.checkpoint_seconds, given.lease_seconds)) else 1


if __name__ == "__main__":
    sys.exit(main())
