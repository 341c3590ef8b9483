"""The store as one process sees it: requests take time, and meet faults on the way.

Rule 1: a write is applied at one instant between its sending and its answer, or later if it is late.
Rule 2: whatever goes wrong, the process is told only that it does not know.
"""

import random
from collections.abc import Callable, Iterable
from functools import partial

from attrs import evolve

from leasehold.adapters.history.events import VERBS, WriteEvent, WriteVerb
from leasehold.adapters.proving.simulator.mishaps import LATE_SECONDS
from leasehold.adapters.proving.simulator.world.caller import Caller
from leasehold.adapters.proving.simulator.world.exchange import Exchange
from leasehold.adapters.proving.simulator.world.world import World
from leasehold.balancer.model import Lease, Version
from leasehold.stores import writes
from leasehold.stores.protocol import Done, Listing, Lost, Outcome, OutcomeUnknown, Promises

GIVE_UP_SECONDS = 1.0

WriteFate = Callable[[Callable[[], Outcome]], Outcome]
"""The way of a request through the network; it is called with the function that applies the request."""

STRANGER = "somebody-else"
STALE_SECONDS = 1.0


class Client:
    """A store over the table, at the other end of a network."""

    def __init__(self, world: World, caller: Caller, exchange: Exchange, draw: random.Random) -> None:
        self._exchange = exchange
        self._table, self._tasks, self._history = world.table, world.tasks, world.history
        self._caller, self._draw = caller, draw
        self._network = network = world.scenario.network
        self._dated = world.scenario.dated
        self._listed = world.table.dated if self._dated else world.table.list
        self._calm, self._full = world.scenario.calm, world.scenario.full
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
        return self._read("store.list", self._list)

    def get(self, keys: Iterable[str], *, stale_ok: bool = False) -> tuple[Lease, ...]:
        """Read these leases: as they are, or some perhaps as they were a moment ago."""
        asked = tuple(keys)
        self._history.requests["get"] += 1
        self._history.fetched += len(asked)
        self._history.glimpsed += len(asked) if stale_ok else 0
        return self._read("store.get", lambda: self._get(asked, stale_ok=stale_ok), stale_ok=stale_ok).leases

    def _list(self) -> Listing:
        self._travel()
        listing = self._listed()
        self._travel()
        self._history.scanned += len(listing.leases)
        return self._perhaps_stale(listing)

    def _get(self, asked: tuple[str, ...], *, stale_ok: bool) -> Listing:
        self._travel()
        leases = self._table.get(asked)
        self._travel()
        return self._perhaps_stale(Listing(leases)) if stale_ok else Listing(leases)

    def _read(self, what: str, read: Callable[[], Listing], *, stale_ok: bool = True) -> Listing:
        """Consistent readings are as the service promises them: they meet no lie."""

        def stale() -> Listing:
            return self._table.as_it_was(read(), STALE_SECONDS, lambda: stale_ok)

        def untrue() -> Listing:
            found = read()
            return Listing(tuple(evolve(row, owner=STRANGER) for row in found.leases)) if stale_ok else found

        listing: Listing = self._exchange.call(what, read, {"stale": stale, "untrue": untrue})
        return listing

    def _perhaps_stale(self, listing: Listing) -> Listing:
        draw, stale = self._draw, self._network.stale
        if not stale or self._tasks.now >= self._calm or draw.random() >= stale:
            return listing
        return self._table.as_it_was(listing, draw.random(), lambda: bool(draw.getrandbits(1)))

    # Writing

    def write(self, write: writes.Write) -> Outcome:
        """Send it on its way; another library writes its own way."""
        verb = VERBS[type(write)]
        self._history.requests[verb] += 1
        sent = self._tasks.now
        if self._caller.foreign:
            write = _as_foreign(write)
        apply = partial(self._applied, write, verb, sent)
        lies = {"untrue": lambda: self._refused(write), "send": lambda: self._arrive(apply, LATE_SECONDS)}
        outcome: Outcome = self._exchange.call(f"store.{verb}", lambda: self._sent(apply), lies)
        return outcome

    def close(self) -> None:
        """Nothing to close."""

    # Transport

    def _applied(self, write: writes.Write, verb: WriteVerb, sent: float) -> Outcome:
        key = write.lease.key
        before = self._table.row(key)
        outcome = self._table.write(write)
        done = isinstance(outcome, Done)
        if done and self._caller.foreign and isinstance(write, writes.ClaimLease):
            # Another library does not note on the row that its owner answers requests.
            outcome = self._table.unwilling(key)
        if self._full or verb != "renew" or not done:
            after = outcome.lease if done and verb != "delete" else self._table.row(key)
            who = self._caller.worker_id, self._caller.process_id
            self._history.writes.append(WriteEvent(self._tasks.now, sent, *who, verb, key, before, after, done))
        return outcome

    def _sent(self, apply: Callable[[], Outcome]) -> Outcome:
        fate = self._fate()
        return self._arrives(apply) if fate is None else fate(apply)

    def _refused(self, write: writes.Write) -> Outcome:
        """Answer that somebody else has it by now."""
        row = self._table.row(write.lease.key)
        return Lost(write.lease.key, row and evolve(row, owner=STRANGER, version=Version("another")))

    def _fate(self) -> WriteFate | None:
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

    def _late(self, apply: Callable[[], Outcome]) -> Outcome:
        self._arrive(apply, self._draw.uniform(0.0, self._network.late_seconds))
        self._caller.wait(GIVE_UP_SECONDS)
        raise OutcomeUnknown("nobody answered in time")

    def _arrive(self, apply: Callable[[], Outcome], seconds: float) -> None:
        # In a task of its own, because the process may be dead by then.
        def arrive() -> None:
            apply()

        self._tasks.start(arrive, self._tasks.now + seconds)

    def _twice(self, apply: Callable[[], Outcome]) -> Outcome:
        self._travel()
        apply()
        self._caller.wait(GIVE_UP_SECONDS)
        outcome = apply()
        self._travel()
        return outcome

    def _travel(self) -> None:
        """Wait for half of the time that a request takes."""
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


def _as_foreign(write: writes.Write) -> writes.Write:
    """Another library steals under the version, and knows nothing of our attributes."""
    match write:
        case writes.ClaimLease(lease, me) | writes.StealLease(lease, me):
            return writes.ClaimLease(lease, me)
        case writes.RenewLease(lease):
            return writes.RenewLease(lease)
        case _:
            return write


def _cumulated(*fates: tuple[float, WriteFate]) -> tuple[tuple[float, WriteFate], ...]:
    total, limits = 0.0, []
    for probability, fate in fates:
        total += probability
        if probability:
            limits.append((total, fate))
    return tuple(limits)
