"""One member of the fleet: it renews what it holds, looks, plans, and acts; others keep its appointments.

Rule 1: `renew` and `turn` each do one bounded piece of work, say when they wish to be called next, and
never wait for the other. Rule 2: no thread, no sleep and no wall clock in here.
Rule 3: a failed execution never kills a worker; the next turn sees what is true.
"""

import logging
import math
import random
import time
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from threading import Event, Lock
from typing import Protocol

from adapters.backoff import Backoff
from adapters.discovery import Discovery
from adapters.handoff import Each, Handoffs
from adapters.holding import Holding
from adapters.holdings import Holdings
from adapters.identity import Identity
from adapters.lookout import first_watch, news, renew_pause
from adapters.renewing import RETRY_SECONDS, Begin, Renewing
from adapters.slow_peers import SlowPeers
from adapters.source import Source
from balancer.actions import Action, Claim, Create, Delete, Look, Release, Renew, RequestHandoff, Steal, Withdraw
from balancer.cadence import still
from balancer.config import Config, Kcl
from balancer.model import Lease, Me, Shard
from balancer.plan import look_again, plan
from stores.execute import execute
from stores.protocol import Done, Listing, Lost, Outcome, OutcomeUnknown, Store, StoreError

log = logging.getLogger("leasehold.worker")


SOON_SECONDS = 0.05


class Consumer(Protocol):
    """Whoever works on what is held."""

    def begin(self, holding: Holding) -> None:
        """Start reading; stop as soon as `holding.lost` is set."""
        ...

    def part(self, holding: Holding) -> None:
        """Finish the running batch, then `holding.part`."""
        ...


class Unread:
    """Nobody reads: the worker only takes part in sharing."""

    def begin(self, holding: Holding) -> None:
        """Nothing to start."""

    def part(self, holding: Holding) -> None:
        """Nothing is running, so the lease can go at once."""
        try:
            holding.part()
        except OutcomeUnknown as fault:
            log.warning("lease %s: %s", holding.key, fault)  # the next renewal asks again


class Worker:
    """One worker of a fleet that shares the leases of one table.

    store     the table of leases
    source    the stream they stand for
    me        this worker's id; keep it over restarts, and leases are re-adopted without a move
    config    the same for the whole fleet
    consumer  works on what is held; nobody, if left out
    each_renewal, each_action
              `map` writes one by one; a pool's `map` side by side. Not the same pool: renewals must
              not queue behind a turn. Renewals need not be waited for: one that stalls holds up no other
    clock     monotonic seconds, the time that `now` is told in
    uniform   draws a number between two others, for waits after faults; nothing else is left to chance
    process   tells this process from every other that ever used the id
    hurried   called (from any thread) when `turn` wishes to be called sooner than it said
    lock      makes what serialises the writes of one lease: a thread's, unless something else waits than threads
    """

    def __init__(
        self,
        *,
        store: Store,
        source: Source,
        me: str,
        config: Config | None = None,
        consumer: Consumer | None = None,
        each_renewal: Begin = map,
        each_action: Each = map,
        clock: Callable[[], float] = time.monotonic,
        uniform: Callable[[float, float], float] = random.uniform,
        process: str | None = None,
        hurried: Callable[[], None] = lambda: None,
        lock: Callable[[], AbstractContextManager[object]] = Lock,
    ) -> None:
        self.store, self.source, self.me = store, source, me
        self.config = config or Config()
        self.consumer: Consumer = consumer or Unread()
        self.each_renewal, self.each_action = each_renewal, each_action
        self.clock, self.uniform, self.hurried = clock, uniform, hurried
        self._identity = Identity(me, process or uuid.uuid4().hex)
        self.discovery, self._slow_peers = Discovery(source), SlowPeers()
        self._holdings = Holdings(
            store,
            self._identity,
            clock=clock,
            lease_seconds=self.config.lease_seconds,
            began=self._began,
            gave=self._gave,
            lock=lock,
        )
        self._handoffs = Handoffs(
            store,
            me,
            clock=clock,
            lease_seconds=self.config.lease_seconds,
            hold=self._took_back,
            doubt=self._holdings.doubt,
        )
        self._renewing = Renewing(self.config, lambda holding: self.consumer.part(holding))  # noqa: PLW0108  it may change
        self.watch, self._look = first_watch(self.config, store.promises), Look(0.0)
        self._look_due = -math.inf
        self._hurry = Event()
        self._benched: dict[str, float] = {}
        self._turns, self._closing = 0, False
        self._backoff = Backoff(RETRY_SECONDS, self.config.cycle_seconds, uniform)

    @property
    def holdings(self) -> tuple[Holding, ...]:
        """What this worker holds now, by key."""
        return self._holdings.all

    def renew(self, now: float) -> float:
        """Renew what is due, and stop what others may have taken; when to call again.

        Raises WorkerError if another living process uses this worker's id.
        """
        self._renewing.begin(self.holdings, now, self._asking(), self._look, self.each_renewal)
        self._holdings.check_identity()
        soon = min(self._renewing.due(self.holdings, now), now + renew_pause(self.watch, self.config))
        return max(now + SOON_SECONDS, soon)

    def turn(self, now: float) -> float:
        """Look, plan and act if that is due, and tend hand-offs; when to call again.

        Raises StoreError or SourceError if the first look shows that they cannot be used at all,
        and WorkerError if another living process uses this worker's id.
        """
        attend = self._handoffs.tend(now, self.each_action)
        if self._closing:
            return attend
        list(self.each_action(self._holdings.adopt, self._holdings.loose))  # H4
        if self._hurry.is_set() or now >= self._look_due:
            whole = self._hurry.is_set()
            self._hurry.clear()
            self._look_due = now + self._look_or_wait(now, None if whole else self._look.keys)
        self._holdings.check_identity()
        if self._holdings.loose:
            attend = min(attend, now + RETRY_SECONDS)
        return now if self._hurry.is_set() else min(attend, self._look_due)

    def hurry(self) -> None:
        """Look at the next opportunity, at shards too: one ended, or is gone."""
        self.discovery.want()
        self._hurry.set()
        self.hurried()

    def bench(self, key: str, seconds: float) -> None:
        """Do not take this lease for so long: what failed here may work elsewhere."""
        self._benched[key] = self.clock() + seconds

    def close(self) -> None:
        """Take nothing more; what is held is for the consumer to part with."""
        self._closing = True
        self._handoffs.withdraw()

    def _look_or_wait(self, now: float, asked: tuple[str, ...] | None) -> float:
        try:
            self._look_and_act(now, asked)
        except StoreError as fault:
            if not (self._turns or isinstance(fault, OutcomeUnknown)):
                raise
            log.warning("the leases could not be read: %s", fault)
            return self._backoff.next()
        self._backoff.reset()
        return self._look.seconds

    def _look_and_act(self, now: float, asked: tuple[str, ...] | None) -> None:
        began = self.clock()
        found = self.store.list() if asked is None else Listing(self.store.get(asked, stale_ok=self._look.stale_ok))
        listing = self.discovery.concerning(found)
        self.watch, leases = self.watch.look(listing.leases, began, self.clock(), asked, found.reports)
        # What was not read now may be another's by now. KCL 2.x renews finished leases too.
        fresh = leases if asked is None else tuple(lease for lease in leases if lease.key in asked)
        strays = self._holdings.strays(fresh, ended=isinstance(self.config.rules, Kcl))
        late = tuple(filter(None, self.each_action(self._holdings.adopt, strays)))
        me = self._asking()
        doubted = self._holdings.doubted(listing.leases, still(fresh, me, self.config))
        list(self.each_action(self._holdings.settle, doubted))
        self._slow_peers.heed(me, self.config)
        shards = self.discovery.shards(now, listing, me, leases) if asked is None else None
        actions = plan(leases, shards, me, self.config)
        if asked is not None:
            # What was not read now may have changed since: leave it to those who look, or to our own next look.
            actions = tuple(action for action in actions if action.lease.key in asked)
            late += fresh
        actions += self._handoffs.again(late)
        list(self.each_action(self._act, [action for action in actions if self._may(action, shards, now)]))
        self._look = look_again(actions, leases, me, self.config)
        self._turns += 1
        told = news(self.holdings, self.me, self._look)
        list(self.each_action(lambda row: self._renewing.renew(*row, self._look), told))

    def _asking(self) -> Me:
        return Me(self.me, self._turns, self.watch.history)

    def _may(self, action: Action, shards: tuple[Shard, ...] | None, now: float) -> bool:
        key = action.lease.key
        match action:
            case Renew():
                return False  # `renew` keeps its own appointments
            case Claim() | Steal():
                return self._holdings.get(key) is None and self._benched.get(key, now) <= now
            case Delete():
                return self.discovery.deletable(action.lease, shards or ())
            case _:
                return True

    def _act(self, action: Action) -> None:
        held = self._holdings.get(action.lease.key)
        if isinstance(action, Release) and held is not None:
            if action.heir:
                held.asked(action.lease)
            else:
                held.ask_release()
            self.consumer.part(held)
            return
        begun = self.clock()
        try:
            outcome = execute(self.store, action, self.me, notes=self._identity.notes)
        except StoreError as fault:
            log.warning("%s of lease %s: %s", type(action).__name__, action.lease.key, fault)
            if isinstance(action, Claim):  # H4; a theft would be asked for under another condition
                self._holdings.doubt(action.lease)
        else:
            self._learn(action, outcome, begun)

    def _learn(self, action: Action, outcome: Outcome, begun: float) -> None:
        match action, outcome:
            case ((Claim() | Steal() | Create()), Done(lease)) if lease.owner == self.me:
                self._hold(lease, begun)
            case RequestHandoff(), Done(lease):
                self._handoffs.asked(lease)
            case Withdraw(lease), _:
                self._handoffs.settled(lease.key)
            case _, Lost(key):
                log.info("%s of lease %s refused: somebody was faster", type(action).__name__, key)
            case _:
                pass

    def _began(self, holding: Holding) -> None:
        self._handoffs.settled(holding.key)
        self.consumer.begin(holding)

    def _hold(self, lease: Lease, begun: float) -> None:
        self._holdings.hold(lease, begun)

    def _took_back(self, lease: Lease, begun: float) -> None:
        self._hold(lease, begun)
        self._hurry.set()  # whoever did not accept it may ask again

    def _gave(self, lease: Lease, now: float) -> None:
        self._handoffs.gave(lease, now)
        self.hurried()
