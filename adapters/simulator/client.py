"""The store as one process sees it: requests travel, and what may befall them on the way befalls them.

Rule 1: a write is applied at one instant between its sending and its answer, or later if it is late.
Rule 2: whatever goes wrong, the process is told only that it does not know.
"""

import random
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

from adapters.simulator.scenario import Blow
from adapters.simulator.told import Verb, Wrote
from adapters.simulator.world import World
from balancer.model import Lease, Notes, Position
from stores.protocol import Done, Listing, Outcome, OutcomeUnknown, Promises

GIVE_UP_SECONDS = 1.0

Fate = Callable[[Callable[[], Outcome]], Outcome]
"""What becomes of a request on its way; it is given what applies it."""


class Caller(Protocol):
    """The process that calls."""

    @property
    def worker_id(self) -> str:
        """Its worker's id."""
        ...

    @property
    def process_id(self) -> str:
        """The process, which never comes again."""
        ...

    @property
    def foreign(self) -> bool:
        """Whether it stands for another library."""
        ...

    def wait(self, seconds: float) -> None:
        """Let virtual time pass; raises Killed if the process died meanwhile."""
        ...

    def die(self, *, again: bool) -> None:
        """Die without a word; perhaps be started again."""
        ...


class Client:
    """A store over the table, at the other end of a network."""

    def __init__(self, world: World, caller: Caller, draw: random.Random) -> None:
        self._table, self._tasks, self._history = world.table, world.tasks, world.history
        self._caller, self._draw = caller, draw
        self._network = network = world.scenario.network
        self._dated = world.scenario.dated
        self._listed = world.table.dated if self._dated else world.table.list
        self._calm, self._full = world.scenario.calm, world.scenario.full
        self._plot = dict(network.plot)
        self._fates = _cumulated(
            (network.lost, self._never),
            (network.unanswered, self._unanswered),
            (network.late, self._late),
            (network.twice, self._twice),
        )

    @property
    def promises(self) -> Promises:
        """Everything, as DynamoDB; where rows are dated, as in blobs, notes are not free."""
        return Promises(free_notes=not self._dated)

    # Reading

    def list(self) -> Listing:
        """Every lease, some perhaps as they were a moment ago."""
        self._history.requests["list"] += 1
        self._travel()
        listing = self._listed()
        self._travel()
        self._history.scanned += len(listing.leases)
        return self._perhaps_stale(listing)

    def get(self, keys: Iterable[str], *, stale_ok: bool = False) -> tuple[Lease, ...]:
        """These leases, as they are, or some perhaps as they were a moment ago."""
        asked = tuple(keys)
        self._history.requests["get"] += 1
        self._history.fetched += len(asked)
        self._history.glimpsed += len(asked) if stale_ok else 0
        self._travel()
        leases = self._table.get(asked)
        self._travel()
        return self._perhaps_stale(Listing(leases)).leases if stale_ok else leases

    def _perhaps_stale(self, listing: Listing) -> Listing:
        draw, stale = self._draw, self._network.stale
        if not stale or self._tasks.now >= self._calm or draw.random() >= stale:
            return listing
        return self._table.as_it_was(listing, draw.random(), lambda: bool(draw.getrandbits(1)))

    # Writing

    def create(self, lease: Lease) -> Outcome:
        """Condition: the key does not exist."""
        return self._write("create", lease.key, lambda: self._table.create(lease))

    def claim(self, lease: Lease, me: str, notes: Notes = ()) -> Outcome:
        """Condition: the version as seen."""
        return self._write("claim", lease.key, lambda: self._owned(self._table.claim(lease, me, self._noted(notes))))

    def steal(self, lease: Lease, me: str, notes: Notes = ()) -> Outcome:
        """Condition: the owner as seen; of another library the version."""
        steal = self._table.claim if self._caller.foreign else self._table.steal
        return self._write("steal", lease.key, lambda: self._owned(steal(lease, me, self._noted(notes))))

    def renew(self, lease: Lease, notes: Notes = ()) -> Outcome:
        """Condition: version and owner as seen."""
        return self._write("renew", lease.key, lambda: self._table.renew(lease, self._noted(notes)))

    def checkpoint(
        self, lease: Lease, position: Position, *, children: tuple[str, ...] = (), keep_owner: bool = False
    ) -> Outcome:
        """Condition: version and owner as seen, forward."""

        def write() -> Outcome:
            return self._table.checkpoint(lease, position, children=children, keep_owner=keep_owner)

        return self._write("checkpoint", lease.key, write)

    def checkpoint_late(self, lease: Lease, position: Position) -> Outcome:
        """Condition: forward, not ended."""
        return self._write("checkpoint-late", lease.key, lambda: self._table.checkpoint_late(lease, position))

    def release(self, lease: Lease, me: str) -> Outcome:
        """Condition: the owner is me, or the version as seen."""
        return self._write("release", lease.key, lambda: self._table.release(lease, me))

    def request_handoff(self, lease: Lease, me: str) -> Outcome:
        """Condition: the owner as seen, and willing."""
        return self._write("request", lease.key, lambda: self._table.request_handoff(lease, me))

    def give(self, lease: Lease, position: Position) -> Outcome:
        """Condition: version, owner and heir as seen."""
        return self._write("give", lease.key, lambda: self._table.give(lease, position))

    def accept(self, lease: Lease, me: str) -> Outcome:
        """Condition: owner me and the version as seen."""
        return self._write("accept", lease.key, lambda: self._table.accept(lease, me))

    def take_back(self, lease: Lease, me: str) -> Outcome:
        """Condition: owner and version as given."""
        return self._write("take-back", lease.key, lambda: self._table.take_back(lease, me))

    def withdraw(self, lease: Lease, me: str) -> Outcome:
        """Condition: the heir is me."""
        return self._write("withdraw", lease.key, lambda: self._table.withdraw(lease, me))

    def annotate(self, lease: Lease, name: str, value: str, unless: frozenset[str] = frozenset()) -> Outcome:
        """Condition: the owner as seen."""
        return self._write("annotate", lease.key, lambda: self._table.annotate(lease, name, value, unless))

    def delete(self, lease: Lease, me: str) -> Outcome:
        """Condition: still ended, or the version as seen."""
        return self._write("delete", lease.key, lambda: self._table.delete(lease, me))

    def close(self) -> None:
        """Nothing to let go."""

    def _noted(self, notes: Notes) -> Notes:
        """Another library knows nothing of our attributes."""
        return () if self._caller.foreign else notes

    def _owned(self, outcome: Outcome) -> Outcome:
        """Another library leaves no word that its owner would answer requests."""
        if not (isinstance(outcome, Done) and self._caller.foreign):
            return outcome
        return self._table.unwilling(outcome.lease.key)

    # On the way

    def _write(self, verb: Verb, key: str, write: Callable[[], Outcome]) -> Outcome:
        self._history.requests[verb] += 1
        sent = self._tasks.now

        def apply() -> Outcome:
            before = self._table.row(key)
            outcome = write()
            done = isinstance(outcome, Done)
            if self._full or verb != "renew" or not done:
                after = outcome.lease if done and verb != "delete" else self._table.row(key)
                who = self._caller.worker_id, self._caller.process_id
                self._history.writes.append(Wrote(self._tasks.now, sent, *who, verb, key, before, after, done))
            return outcome

        fate = self._plotted(len(self._history.sent)) or self._fate()
        if self._full:
            self._history.sent.append(sent)
        return self._arrives(apply) if fate is None else fate(apply)

    def _plotted(self, number: int) -> Fate | None:
        match self._plot.get(number):
            case None:
                return None
            case "lost":
                return self._never
            case "unanswered":
                return self._unanswered
            case blow:
                return partial(self._dies, blow)

    def _fate(self) -> Fate | None:
        if not self._fates or self._tasks.now >= self._calm:
            return None
        chance = self._draw.random()
        return next((fate for limit, fate in self._fates if chance < limit), None)

    def _arrives(self, apply: Callable[[], Outcome]) -> Outcome:
        self._travel()
        outcome = apply()
        self._travel()
        return outcome

    def _never(self, _apply: Callable[[], Outcome]) -> Outcome:
        self._caller.wait(GIVE_UP_SECONDS)
        raise OutcomeUnknown("the request was lost")

    def _unanswered(self, apply: Callable[[], Outcome]) -> Outcome:
        self._travel()
        apply()
        self._caller.wait(GIVE_UP_SECONDS)
        raise OutcomeUnknown("the answer was lost")

    def _dies(self, blow: Blow, apply: Callable[[], Outcome]) -> Outcome:
        if blow != "crash before":
            self._travel()
            apply()
        self._caller.die(again=blow == "restart")
        self._caller.wait(0.0)
        raise AssertionError("the dead wait for ever")

    def _late(self, apply: Callable[[], Outcome]) -> Outcome:
        # Of its own task: the process may be dead by then.
        def arrive() -> None:
            apply()

        self._tasks.start(arrive, self._tasks.now + self._draw.uniform(0.0, self._network.late_seconds))
        self._caller.wait(GIVE_UP_SECONDS)
        raise OutcomeUnknown("nobody answered in time")

    def _twice(self, apply: Callable[[], Outcome]) -> Outcome:
        self._travel()
        apply()
        self._caller.wait(GIVE_UP_SECONDS)
        outcome = apply()
        self._travel()
        return outcome

    def _travel(self) -> None:
        """Half of the way."""
        draw, network = self._draw, self._network
        least, most = network.latency
        seconds = (least + (most - least) * draw.random()) / 2
        if self._tasks.now < self._calm:
            if draw.random() < network.stall / 2:
                seconds += 1.0 + 2.0 * draw.random()
            if any(0 <= self._tasks.now - outage.at < outage.seconds for outage in network.outages):
                self._caller.wait(GIVE_UP_SECONDS)
                raise OutcomeUnknown("the table cannot be reached")
        self._caller.wait(seconds)


def _cumulated(
    *fates: tuple[float, Fate],
) -> tuple[tuple[float, Fate], ...]:
    total, limits = 0.0, []
    for probability, fate in fates:
        total += probability
        if probability:
            limits.append((total, fate))
    return tuple(limits)
