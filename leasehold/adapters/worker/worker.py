"""A member of the fleet: it renews its leases, reads the table, plans, and acts; a runner calls it in time.

Rule 1: `renew` and `turn` each do one bounded piece of work, return when they wish to be called next, and
never wait for each other. Rule 2: no thread, no sleep and no wall clock in here.
Rule 3: a failed write never ends a worker; the next turn reads the table anew and plans on what it finds.
"""

import logging
import math
import random
import uuid
from collections import deque
from collections.abc import Callable, Collection
from threading import Event
from typing import TYPE_CHECKING, Literal

from attrs import evolve

from leasehold.adapters.sources.backoff import Backoff
from leasehold.adapters.sources.clock import seconds
from leasehold.adapters.sources.protocol import Source, SourceError, SourceUnavailable
from leasehold.adapters.threads import ThreadScheduler
from leasehold.adapters.worker.bench import Bench
from leasehold.adapters.worker.discovery import Discovery, Recreated
from leasehold.adapters.worker.handoffs import Handoffs, ParallelMap
from leasehold.adapters.worker.holding import Holding
from leasehold.adapters.worker.holdings import Holdings
from leasehold.adapters.worker.identity import Identity
from leasehold.adapters.worker.lookout import first_watch, news, renew_pause
from leasehold.adapters.worker.renewals import RETRY_SECONDS, BackgroundMap, Renewing
from leasehold.adapters.worker.scheduler import Scheduler
from leasehold.adapters.worker.slow_peers import SlowPeers
from leasehold.adapters.worker.tidings import HoldingConsumer, Outbox
from leasehold.adapters.worker.tracing.configured import spans_of
from leasehold.balancer.actions import Action, Claim, Create, Delete, Look, Release, Renew, RequestHandoff, Steal
from leasehold.balancer.config import Config
from leasehold.balancer.looking.ranks import scaled
from leasehold.balancer.looking.schedule import LOOK_SECONDS, stalled_keys
from leasehold.balancer.model import TRIM_HORIZON, Lease, Me, Shard
from leasehold.balancer.plan import look_again, plan
from leasehold.stores.execute import execute
from leasehold.stores.printable import escaped
from leasehold.stores.protocol import Done, Listing, Lost, Outcome, OutcomeUnknown, Store, StoreError

if TYPE_CHECKING:  # an extra
    from opentelemetry.trace import Tracer

log = escaped(logging.getLogger("leasehold.worker"))

SOON_SECONDS = 0.05
TOLD_MOST = 10
"""Rows that one line of the log names."""


class Worker:
    """A worker of a fleet that shares the leases of one table.

    store     the table of leases
    source    the stream whose shards the leases stand for
    me        this worker's id; keep it over restarts, and leases are re-adopted without a move
    config    the same for the whole fleet
    consumer  reads the held leases; if left out, a runner does, which is told by `tidings`. `Unread()` for a
              worker that a program calls by itself and that reads nothing
    clock     seconds that never go back, the time that `now` is told in; left out, they go on during a suspension
    uniform   draws a number between two others, for waits after faults; nothing else is random
    process   tells this process from every other that ever used the id
    hurried   called (from any thread) when `turn` wishes to be called sooner than it said; `tidings` if left out
    scheduler makes what serialises the writes of one lease, and runs the tasks of a runner: threads, if left out
    tracer    where spans go; to the program's own provider, if left out and it has set one before
    if_recreated
              where the leases begin anew if the stream was deleted and made anew under its name; if left out, nothing
              is read then, and the log says what to do (L14)
    """

    def __init__(
        self,
        *,
        store: Store,
        source: Source,
        me: str,
        config: Config | None = None,
        consumer: HoldingConsumer | None = None,
        clock: Callable[[], float] = seconds,
        uniform: Callable[[float, float], float] = random.uniform,
        process: str | None = None,
        hurried: Callable[[], None] | None = None,
        scheduler: Scheduler | None = None,
        tracer: "Tracer | None" = None,
        if_recreated: Literal["TRIM_HORIZON", "LATEST"] | None = None,
    ) -> None:
        self.spans = spans_of(me, tracer)
        self.store, self.source, self.me = self.spans.store(store), self.spans.source(source), me
        self.config = config or Config()
        self.scheduler: Scheduler = scheduler or ThreadScheduler(clock)
        self.tidings = self.scheduler.queue()
        outbox = Outbox(self.tidings)
        self.consumer: HoldingConsumer = consumer or outbox
        self.clock, self.uniform = clock, uniform
        self._hurried = hurried or (outbox.hurry if consumer is None else _nobody)
        self.discovery, self._slow_peers = Discovery(source), SlowPeers()
        self._identity = Identity(me, process or uuid.uuid4().hex, lambda: self.discovery.incarnation)
        self._recreated = Recreated(self.store, me, self.discovery, if_recreated)
        self._holdings = Holdings(
            self.store,
            self._identity,
            clock=clock,
            lease_seconds=self.config.lease_seconds,
            began=self._began,
            gave=self._gave,
            gone=outbox.part if consumer is None else _nobody,
            remade=self._remade,
            lock=self.scheduler.lock,
        )
        self._handoffs = Handoffs(
            self.store,
            me,
            clock=clock,
            lease_seconds=self.config.lease_seconds,
            hold=self._took_back,
            doubt=self._holdings.mark_unconfirmed,
        )
        self._renewing = Renewing(self.config, self.consumer.part)
        self.watch, self._look = first_watch(self.config, store.promises), Look(0.0)
        self._look_due = -math.inf
        self._hurry, self._turns, self._closing = Event(), 0, False
        self.rows_remade, self._gone_rows = 0, deque[str]()
        self._absent: dict[str, float] = {}
        self._bench = Bench()
        self._backoff = Backoff(RETRY_SECONDS, self.config.cycle_seconds, uniform)

    @property
    def holdings(self) -> tuple[Holding, ...]:
        """The leases that this worker holds now, sorted by key."""
        return self._holdings.all

    def renew(self, now: float, each: BackgroundMap = map) -> float:
        """Renew the leases that are due, and drop those that others may have taken; return when to call again.

        `each` need not wait for the renewals that it begins: one that stalls holds up no other.
        Raises WorkerError if another living process uses this worker's id.
        """
        self._renewing.begin(self.holdings, now, self._asking(), self._look, each)
        if self.discovery.unheard(holding.lease for holding in self.holdings):
            self.hurry()
        self._holdings.check_identity()
        soon = min(self._renewing.due(self.holdings, now), now + renew_pause(self.watch, self.config))
        return max(now + SOON_SECONDS, soon)

    def turn(self, now: float, each: ParallelMap = map) -> float:
        """Read the table, plan and act if that is due, and take back unclaimed gifts; return when to call again.

        `each` writes one by one or side by side, not in the pool of renewals, which must not queue behind a turn.
        Raises StoreError or SourceError if the first look shows that they cannot be used at all,
        and WorkerError if another living process uses this worker's id.
        """
        attend = self._handoffs.check_timeouts(now, each)
        self._say_remade()
        if self._closing:
            return attend
        list(each(self._holdings.readopt, self._holdings.unconfirmed))  # H4
        if self._hurry.is_set() or now >= self._look_due:
            whole = self._hurry.is_set()
            self._hurry.clear()
            self._look_due = now + self._look_or_wait(now, None if whole else self._look.keys, each)
        self._holdings.check_identity()
        if self._holdings.unconfirmed:
            attend = min(attend, now + RETRY_SECONDS)
        return now if self._hurry.is_set() else min(attend, self._look_due)

    def hurry(self) -> None:
        """Read the whole table and list the shards at the next turn: a shard has ended, or is gone."""
        self.discovery.want()
        self._hurry.set()
        self._hurried()

    def exclude(self, key: str, seconds: float) -> None:
        """Do not take this lease for so many seconds: another worker may succeed where this one failed.

        The shards are listed, too: if there is no such shard, its row goes (L10), or it would be tried for ever.
        """
        self._bench.put(key, self.clock() + seconds)
        self.discovery.want()

    def close(self) -> None:
        """Take no more leases; the consumer hands over those that are held."""
        self._closing = True
        self._handoffs.withdraw()

    def _say_remade(self) -> None:
        told = [self._gone_rows.popleft() for _ in range(len(self._gone_rows))]
        if told:
            more = f" and {len(told) - TOLD_MOST} more" if len(told) > TOLD_MOST else ""
            log.warning(
                "rows of the lease table were deleted under this fleet; made anew from memory: %s%s",
                "; ".join(told[:TOLD_MOST]),
                more,
            )

    def _look_or_wait(self, now: float, asked: tuple[str, ...] | None, each: ParallelMap) -> float:
        try:
            with self.spans.over("look"):
                self._look_and_act(now, asked, each)
        except (StoreError, SourceError) as fault:
            if self._is_final(fault):
                raise
            wait, held = self._backoff.next(), len(self.holdings)
            goes_on = f"{held} leases are read while they can be renewed" if held else "nothing is held"
            log.warning("no look at the leases, the next in %.1f s; %s: %s", wait, goes_on, fault)
            if isinstance(fault, StoreError) and not isinstance(fault, OutcomeUnknown):
                self._look = evolve(self._look, keys=None)  # one row may be at fault: a listing goes on without it
            return wait
        self._backoff.reset()
        return self._look.seconds

    def _is_final(self, fault: StoreError | SourceError) -> bool:
        """Whether store or source never answered at all; a later refusal may pass, when a role or token is renewed."""
        match fault:
            case OutcomeUnknown() | SourceUnavailable():
                return False
            case StoreError():
                return not self._turns
            case _:
                return not (self._turns and self.discovery.answered)

    def _look_and_act(self, now: float, asked: tuple[str, ...] | None, each: ParallelMap) -> None:
        began = self.clock()
        found = self.store.list() if asked is None else Listing(self.store.get(asked, stale_ok=self._look.stale_ok))
        listing = self.discovery.concerning(found)
        self.watch, leases = self.watch.look(listing.leases, began, self.clock(), asked, found.reports)
        me = self._asking()
        # Before the first listing nobody knows whether a lease that names this worker is one of the present stream.
        first = asked is None and not self.discovery.answered
        shards = self.discovery.shards(now, listing, me, leases) if first else None
        # A lease that was not read now may have another owner by now. KCL 2.x renews finished leases too.
        fresh = leases if asked is None else tuple(lease for lease in leases if lease.key in asked)
        unheld = self._holdings.unheld(fresh, ended=self.config.rules.counts_ended)
        late = () if self.discovery.refusing else tuple(filter(None, each(self._holdings.readopt, unheld)))
        me = self._asking()
        there = {lease.key for lease in listing.leases} | {row.key for row in listing.malformed}
        asked_of = tuple(held.key for held in self.holdings if asked is None or held.key in asked)
        missing = tuple(key for key in asked_of if key not in there)  # a renewal makes the row anew
        doubted = self._holdings.doubted(listing.leases, (*stalled_keys(fresh, me, self.config), *missing))
        list(each(self._holdings.reconfirm, doubted))
        self._slow_peers.observe(me, self.config)
        if asked is None and not first:
            shards = self.discovery.shards(now, listing, me, leases)
        self.watch = self.watch.recalling(self._holdings.parted, None if listing.malformed else shards)
        me = self._asking()
        with self.spans.over("plan"):
            actions = self._bench.without(plan(leases, shards, me, self.config), now)
        if asked is not None:
            # A lease not read now may have changed since: leave it to the lookout, or to our next full reading.
            actions = tuple(action for action in actions if action.lease.key in asked)
            late += fresh
        actions += self._handoffs.again(late)
        if self.discovery.refusing:
            actions = tuple(action for action in actions if isinstance(action, Renew))
            self._leave_all()
        early = self._early(actions, leases, now) if asked is None else {}
        list(
            each(
                self.spans.acting(self._act),
                [action for action in actions if action not in early and self._may(action, shards)],
            )
        )
        self._look = look_again(actions, leases, me, self.config)
        if early:
            self.discovery.want()
            soon = max(SOON_SECONDS, min(early.values()))
            self._look = evolve(self._look, keys=None, seconds=min(self._look.seconds, soon))
        judged = asked is None and (shards is not None or self.discovery.contradictions)
        if judged and self._recreated.mended(leases, self.holdings):
            self.hurry()  # see what became of it, and list
        self._turns += 1
        told = news(self.holdings, self.me, self._look)
        list(each(lambda row: self._renewing.renew(*row, self._look), told))

    def _leave_all(self) -> None:
        """Finish the running batches and release everything: the records are not those that the leases count (L14)."""
        for holding in self.holdings:
            holding.ask_release()
            self.consumer.part(holding)

    def _asking(self) -> Me:
        return Me(self.me, self._turns, self.watch.history)

    def _early(self, actions: Collection[Action], leases: Collection[Lease], now: float) -> dict[Action, float]:
        """The leases not to create yet, and for how long: a living worker may know better where they begin.

        An owner makes a deleted row anew at its next renewal, and any other worker that has seen the row once it has
        waited for that. So what was held by others waits for a renewal. What nobody here has seen, and would begin at
        LATEST or again at the beginning of a closed shard, waits until every living worker has read the table, too. A
        stream of which neither the table nor this process knows any lease is taken for a new group's, which begins at
        once: owners whose rows it is made in the place of move them forward and take them over (`Holding`).
        """
        config, streams = self.config, {lease.stream for lease in (*leases, *self.watch.history.gone)}
        waits = dict[Action, float]()
        for action in actions:
            match action:
                case Create(lease, rule="L13") if lease.key not in self._holdings.dropped:
                    waits[action] = config.renew_seconds
                case Create(lease, rule="L4" | "L5" as rule) if lease.stream in streams:
                    if rule == "L5" or lease.checkpoint != TRIM_HORIZON:
                        waits[action] = config.renew_seconds + config.cycle_seconds
                case _:
                    pass
        self._absent = {each.lease.key: self._absent.get(each.lease.key, now) for each in waits}
        left = {each: self._absent[each.lease.key] + seconds - now for each, seconds in waits.items()}
        return {each: seconds for each, seconds in left.items() if seconds > 0}

    def _may(self, action: Action, shards: tuple[Shard, ...] | None) -> bool:
        match action:
            case Renew():
                return False  # `renew` keeps its own appointments
            case Claim() | Steal():
                return self._holdings.get(action.lease.key) is None
            case Delete():
                return self.discovery.deletable(action.lease, shards or ())
            case _:
                return True

    def _act(self, action: Action) -> None:
        held = self._holdings.get(action.lease.key)
        if isinstance(action, Release) and held is not None:
            if action.heir and action.heir == action.lease.heir:
                held.asked(action.lease)
            else:
                held.ask_release(action.heir)
            self.consumer.part(held)
            return
        begun = self.clock()
        try:
            outcome = execute(self.store, action, self.me, notes=self._identity.notes_on(action.lease))
        except StoreError as fault:
            log.warning(
                "%s of lease %s: %s", type(action).__name__, action.lease.key, fault, extra=_said(action, "unknown")
            )
            if isinstance(action, Claim):  # H4; a theft would be asked for under another condition
                self._holdings.mark_unconfirmed(action.lease)
        else:
            self._learn(action, outcome, begun)

    def _learn(self, action: Action, outcome: Outcome, begun: float) -> None:
        if isinstance(outcome, Done):
            key, rule = outcome.lease.key, action.rule
            log.info("%s of lease %s done, by %s", type(action).__name__, key, rule, extra=_said(action, "done", key))
        match action, outcome:
            case ((Claim() | Steal()), Done(lease)):
                self._holdings.hold(lease, begun)
            case Delete(lease), Done() if (held := self._holdings.get(lease.key)) is not None:
                held.drop("its shard is gone")  # or its next write would make the row anew
            case Create(rule="L13"), Done(lease):
                self._remade(f"{lease.key} at {lease.checkpoint.sequence}")
            case RequestHandoff(), Done(lease):
                self._handoffs.asked(lease)
            case _, Lost(key):
                extra = _said(action, "refused", key)
                log.info("%s of lease %s refused: somebody was faster", type(action).__name__, key, extra=extra)
            case _:
                pass

    def _began(self, holding: Holding) -> None:
        self._handoffs.settled(holding.key)
        self.consumer.begin(holding)

    def _remade(self, what: str) -> None:
        self.rows_remade += 1
        self._gone_rows.append(what)
        self.hurry()  # other rows may be gone, and some of them nobody's

    def _took_back(self, lease: Lease, begun: float) -> None:
        self._holdings.hold(lease, begun)
        self._hurry.set()  # the heir that did not accept it may ask again

    def _gave(self, lease: Lease, now: float) -> None:
        self._handoffs.gave(lease, now)
        # C13: whoever was alone looks seldom, and the heir may die as soon as it has the lease.
        self._look_due = min(self._look_due, now + scaled(LOOK_SECONDS, self.config))
        self._hurried()


def _said(action: Action, outcome: str, key: str | None = None) -> dict[str, str]:
    """The fields of a log line about an action; an alternate may have been taken in place of the first choice."""
    return {"lease": key or action.lease.key, "rule": action.rule, "outcome": outcome}


def _nobody(_holding: Holding | None = None) -> None:
    """Wake no task: a program that calls `turn` by itself, or reads by itself, looks in time."""
