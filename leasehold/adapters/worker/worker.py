"""A member of the fleet: it renews its leases, reads the table, plans, and acts; a runner calls it in time.

Rule 1: `renew` and `turn` each do one bounded piece of work, return when they wish to be called next, and
never wait for each other. Rule 2: no thread, no sleep and no wall clock in here.
Rule 3: a failed write never ends a worker; the next turn reads the table anew and plans on what it finds.
"""

import gc
import logging
import math
import random
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Event
from typing import TYPE_CHECKING, Literal, assert_never

from attrs import evolve

from leasehold.adapters.sources.call_patience import Backoff
from leasehold.adapters.sources.protocol import Named, Source, foreign_as_unavailable
from leasehold.adapters.threads import ThreadScheduler, seconds
from leasehold.adapters.worker.discovery import Discovery, MadeAnew, Recreated, expired_unread
from leasehold.adapters.worker.handoffs import Handoffs, ParallelMap
from leasehold.adapters.worker.holding import Holding
from leasehold.adapters.worker.holdings import Cooldown, Holdings
from leasehold.adapters.worker.notes import Identity, latest_notes
from leasehold.adapters.worker.renewing import (
    RETRY_SECONDS,
    BackgroundMap,
    Renewing,
    SlowPeers,
    first_watch,
    news,
    renew_pause,
)
from leasehold.adapters.worker.scheduler import HoldingConsumer, Scheduler
from leasehold.adapters.worker.spans import WorkerSpans
from leasehold.balancer.actions import Action, Claim, Create, Delete, Look, Release, Renew, RequestHandoff, Steal
from leasehold.balancer.bulletin import going_on
from leasehold.balancer.config import Config
from leasehold.balancer.contradictions import INCARNATION
from leasehold.balancer.family import families
from leasehold.balancer.lineage import NOT_STARTED
from leasehold.balancer.lookout import LOOK_SECONDS, scaled
from leasehold.balancer.model import LATEST, SHARD_END, TRIM_HORIZON, History, Lease, Me, Position, Shard
from leasehold.balancer.plan import look_again, plan
from leasehold.errors import OutcomeUnknown, SourceError, SourceUnavailable, StoreError, WorkerError
from leasehold.stores.execute import execute
from leasehold.stores.printable import escaped, few, printable
from leasehold.stores.protocol import Capabilities, Done, Listing, Lost, Store
from leasehold.stores.writes import DeleteLease

if TYPE_CHECKING:  # an extra
    from opentelemetry.trace import Tracer


log = escaped(logging.getLogger("leasehold.worker"))

SOON_SECONDS = 0.05
TOLD_MOST = 10
"""Rows that one line of the log names."""


def check_worker_id(me: object, capabilities: Capabilities) -> None:
    """Raise ValueError if a store with these promises cannot hold `me` as an owner.

    Without the check, every claim of such a worker would fail.
    """
    if not isinstance(me, str) or not me:
        raise ValueError(f"worker: {me!r} is no worker id; write some text")
    if "\0" in me or any("\ud800" <= each <= "\udfff" for each in me):
        raise ValueError(f"worker: {printable(me)} has a character that no store can hold; write plain text")
    if capabilities.ascii_owners and not (me.isascii() and me.isprintable() and me == me.strip()):
        raise ValueError(
            f"worker: {printable(me)} cannot be an owner in this store, which keeps owners as HTTP headers; "
            "use printable ASCII without spaces at its ends"
        )


class Worker:
    """A worker of a fleet that shares the leases of one table.

    store     the table of leases
    source    the stream whose shards the leases stand for
    me        this worker's id; keep it over restarts, and leases are re-adopted without a move
    config    the same for the whole fleet
    consumer  reads the held leases; if left out, a runner does, once it is made. `Unread()` for a
              worker that a program calls by itself and that reads nothing
    clock     seconds that never go back, the time that `now` is told in; left out, they go on during a suspension
    uniform   draws a number between two others, for waits after faults; nothing else is random
    process   tells this process from every other that ever used the id
    hurried   called (from any thread) when `turn` wishes to be called sooner than it said; the runner, if left out
    scheduler makes what serialises the writes of one lease, and runs the tasks of a runner: threads, if left out
    tracer    where spans go; to the program's own provider, if left out and it has set one before
    if_recreated
              where the leases begin anew if the stream was deleted and made anew under its name; if left out, nothing
              is read then, and the log says what to do (L14)

    Examples:
        >>> from leasehold import Config
        >>> from leasehold.adapters import Worker, open_source, run
        >>> from leasehold.stores import open_store
        >>> def consume(handler) -> None:
        ...     leases, orders = open_store("sqlite:///srv/orders.db"), open_source("kinesis://orders")
        ...     run(Worker("worker-a", leases, orders, Config()), handler)
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
        check_worker_id(me, store.capabilities)
        self.spans = spans_of(me, tracer)
        self.store, self.source, self.me = self.spans.store(store), self.spans.source(source), me
        self.config = config or Config()
        self.scheduler: Scheduler = scheduler or ThreadScheduler(clock)
        self.consumer, self._own_consumer = consumer, consumer is not None
        self.clock, self.uniform = clock, uniform
        self.hurried = hurried or nobody
        self.discovery, self._slow_peers = Discovery(source), SlowPeers()
        name = source.name if isinstance(source, Named) else ""
        self._identity = Identity(me, process or uuid.uuid4().hex, lambda: self.discovery.incarnation, name)
        self._recreated = Recreated(self.store, me, self.discovery, if_recreated)
        self._holdings = Holdings(
            self.store,
            self._identity,
            clock=clock,
            lease_seconds=self.config.lease_seconds,
            # Others see the last write up to a look late, and that the lease has expired up to another look late.
            rest_seconds=self.config.rules.expires_above(self.config.lease_seconds) + 2 * self.config.cycle_seconds,
            began=self._began,
            gave=self._gave,
            gone=self._gone,
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
        self._renewing = Renewing(self.config, self._release, clock)
        self.watch, self._look = first_watch(self.config, store.capabilities), Look(0.0)
        self._look_due = self._planned_from = -math.inf
        self._awake, self._slept_through = math.inf, frozenset[str]()
        self._listing_since: float | None = None
        self._hurry, self._turns, self._closing = Event(), 0, False
        self._dropped = Event()
        self.rows_remade, self._gone_rows = 0, deque[str]()
        self._absent: dict[str, float] = {}
        self._latest: dict[str, Position] = {}
        self._cooldown = Cooldown()
        # C17: after an outage everybody has read the table before anybody's lease is judged by the first who did.
        self._backoff = Backoff(RETRY_SECONDS, min(self.config.cycle_seconds, self.config.lease_seconds / 2), uniform)
        self._relist = Backoff(RETRY_SECONDS, self.config.cycle_seconds, uniform)

    @property
    def holdings(self) -> tuple[Holding, ...]:
        """The leases that this worker holds now, sorted by key."""
        return self._holdings.all

    @property
    def renewers(self) -> int:
        """The number of renewals that must run at a time, for the leases held now and the store's present speed."""
        return self._renewing.side_by_side

    def renew(self, now: float, each: BackgroundMap = map) -> float:
        """Renew the leases that are due, and drop those that others may have taken; return when to call again.

        `each` need not wait for the renewals that it begins: one that stalls holds up no other.
        Raises WorkerError if another living process uses this worker's id.
        """
        self._wake(now)
        going = 0.0 if (since := self._listing_since) is None else now - since
        look, pause = evolve(self._look, notes=going_on(self._look.notes, going)), renew_pause(self.watch, self.config)
        seen = self._renewing.begin(self.holdings, now, self._asking(), look, each, pause=pause)
        if self.discovery.unheard(holding.lease for holding in seen):
            self.hurry()
        self._holdings.check_identity()
        soon = min(self._renewing.due(now), now + pause)
        # Never without a pause: what is due and cannot be done yet would keep a core busy.
        return max(now + SOON_SECONDS, soon)

    def turn(self, now: float, each: ParallelMap = map) -> float:
        """Read the table, plan and act if that is due, and take back unclaimed gifts; return when to call again.

        `each` writes one by one or side by side, not in the pool of renewals, which must not queue behind a turn.
        Raises StoreError or SourceError if the first look shows that they cannot be used at all,
        and WorkerError if another living process uses this worker's id, or the table is another stream's.
        """
        self._wake(now)
        attend = self._handoffs.check_timeouts(now, each)
        told = [self._gone_rows.popleft() for _ in range(len(self._gone_rows))]
        if told:
            log.warning(
                "rows of the lease table were deleted under this fleet; made anew from memory: %s",
                few(told, TOLD_MOST, "; "),
            )
        # Gifts are still looked after while it leaves: what an heir does not claim nobody else would read.
        if self._closing:
            return attend
        if not self._holdings.rests:
            list(each(self._holdings.readopt, self._holdings.unconfirmed))  # H4
        if self._hurry.is_set() or now >= self._look_due:
            # Cleared before the look: what is asked for while it runs is for the next one.
            whole = self._hurry.is_set()
            self._hurry.clear()
            # Rows of what was dropped still name this worker, and only a whole reading shows them (C17).
            whole |= self._dropped.is_set()
            self._look_due = now  # if the look raises, the next turn looks again
            self._look_due = now + self._look_or_wait(now, None if whole else self._look.keys, each)
        self._holdings.check_identity()
        if self._holdings.unconfirmed:
            # The table may say that they are ours, so others leave them, and nobody reads them until then.
            attend = min(attend, now + RETRY_SECONDS)
        return now if self._hurry.is_set() else min(attend, self._look_due)

    def hurry(self) -> None:
        """Read the whole table and list the shards at the next turn: a shard has ended, or is gone."""
        self.discovery.want()
        self._hurry.set()
        self.hurried()

    def parents(self, lease: Lease) -> Mapping[str, Lease]:
        """The leases of its parents, by key: as stored, or as last seen where the row was deleted unfinished (L13).

        A finished lease goes only once its children have begun (L8), so where this one has not, a missing row tells
        nothing. A look, which this asks for, decides whether it is made anew: until then the parent is not done.
        """
        stored = {parent.key: parent for parent in self.store.get(lease.parents)} if lease.parents else {}
        if lease.checkpoint.sequence not in NOT_STARTED:
            return stored
        missing = (self.watch.last_seen(key) for key in lease.parents if key not in stored)
        lost = {parent.key: parent for parent in missing if parent is not None and not parent.ended}
        unlooked = self.watch.sightings.keys() & lost.keys()
        if unlooked:
            self.hurry()
        undecided = lost.keys() if not self.discovery.current else unlooked | (self._absent.keys() & lost.keys())
        return {**stored, **{key: lost[key] for key in undecided}}

    def exclude(self, key: str, seconds: float) -> None:
        """Do not take this lease for so many seconds: another worker may succeed where this one failed.

        The shards are listed, too: if there is no such shard, its row goes (L10), or it would be tried for ever.
        """
        held = self._holdings.get(key)
        lease = self._holdings.released.get(key) if held is None else held.lease
        if held is not None:
            held.progress.put_aside(seconds, self.clock())
        self._cooldown.put(key, self.clock() + seconds, None if lease is None else lease.note(INCARNATION))
        self.discovery.want()

    def close(self) -> None:
        """Take no more leases; the consumer hands over those that are held."""
        # First: a turn that begins meanwhile must ask for nothing more.
        self._closing = True
        self._handoffs.withdraw()

    def _look_or_wait(self, now: float, asked: tuple[str, ...] | None, each: ParallelMap) -> float:
        if asked is None:
            self._look = evolve(self._look, keys=None)  # so it stays if this look fails
        try:
            with self.spans.over("look"):
                self._look_and_act(now, asked, each)
        except MadeAnew:
            raise  # no answer to come can be of the stream that this worker is bound to
        except (StoreError, SourceError) as fault:
            # A store or a source that never answered is not waited for. A refusal after an earlier answer may pass,
            # when a role or a token is renewed.
            answered = self._turns and (isinstance(fault, StoreError) or self.discovery.answered)
            if not (answered or isinstance(fault, OutcomeUnknown | SourceUnavailable)):
                raise
            self._absent.clear()  # while the table does not answer, no owner can make its row anew
            wait, held = self._backoff.next(), len(self.holdings)
            goes_on = f"{held} leases are read while they can be renewed" if held else "nothing is held"
            if isinstance(fault, StoreError) and not isinstance(fault, OutcomeUnknown):
                self._look = evolve(self._look, keys=None)  # one row may be at fault: a listing goes on without it
            log.warning("no look at the leases, the next in %.1f s; %s: %s", wait, goes_on, fault)
            return wait
        self._backoff.reset()
        return self._look.seconds

    def _look_and_act(self, now: float, asked: tuple[str, ...] | None, each: ParallelMap) -> None:
        began, found = self.clock(), self._found(asked)
        listing = self.discovery.concerning(found)
        with uncollected():
            self.watch, leases = self.watch.look(listing.leases, began, self.clock(), asked, found.reports)
        me = self._asking()
        # Before the first listing nobody knows whether a lease that names this worker is one of the present stream.
        first = asked is None and not self.discovery.answered
        shards = self._first_listing(now, listing, me, leases) if first else None
        # A lease that was not read now may have another owner by now. KCL 2.x renews finished leases too.
        seen = self.watch.sightings
        fresh = tuple(leases if asked is None else (seen[key].lease for key in asked if key in seen))
        self._holdings.looked(fresh)
        unheld = self._holdings.unheld(fresh, ended=self.config.rules.counts_ended)
        idle = self.discovery.refusing or self._holdings.rests
        late = () if idle else tuple(filter(None, each(self._holdings.readopt, unheld)))
        me = self._asking()
        there = {lease.key for lease in listing.leases} | {row.key for row in listing.malformed}
        asked_of = [held.key for held in self.holdings] if asked is None else filter(self._holdings.get, asked)
        missing = tuple(key for key in asked_of if key not in there)  # a renewal makes the row anew
        doubted = self._holdings.doubted(listing.leases, missing)
        list(each(Holding.reconfirm, doubted))
        if asked is None and not first:
            shards = self.discovery.shards(now, listing, me, leases)
        self.watch = self.watch.recalling(self._holdings.released, None if listing.malformed else shards)
        config, history = self._recreated.planned(self.config, self._awake_history(leases, shards or ()))
        me = evolve(self._asking(), history=history)
        with self.spans.over("plan"):
            actions = self._cooldown.without(plan(leases, shards, me, config), now)
        if asked is None and shards is not None:
            self._recreated.looked(actions, leases)
        if asked is not None:
            # A lease not read now may have changed since: leave it to the lookout, or to our next full reading.
            actions = tuple(action for action in actions if action.lease.key in asked)
            late += fresh
        actions = self._holdings.allowed(actions + self._handoffs.again(late))
        if self.discovery.refusing:
            actions = tuple(action for action in actions if isinstance(action, Renew))
            # L14: the records are not those that the leases count, so running batches end and everything is released.
            for holding in self.holdings:
                holding.ask_release()
                self._release(holding)
        early = self._early(actions, (*leases, *history.gone), now, each) if shards is not None else {}
        due = [self._pinned(action) for action in actions if action not in early and self._may(action, shards)]
        known = self._carry_out(due, leases, each)
        if early:
            # They are planned again from a listing of the shards alone.
            self.discovery.want()
        judged = (
            asked is None and (shards is not None or self.discovery.contradictions) and not self._stale(self.clock())
        )
        if judged and self._recreated.mended(leases, self.holdings):
            self.hurry()  # see what became of it, and list
        self._look = self._sooner(look_again(actions, known, me, self.config), early)
        if asked is None:
            # How seldom others renew is known from readings of the whole table alone.
            self._slow_peers.observe(me, self.config)
        self._turns += 1
        told = news(self.holdings, self.me) if self._look.notes and asked is None else []
        list(each(lambda row: self._renewing.renew(*row, self._look, patient=False), told))

    def _first_listing(self, now: float, listing: Listing, me: Me, leases: Sequence[Lease]) -> tuple[Shard, ...] | None:
        """List the shards; raise WorkerError if the table is another stream's.

        At the start a setting is wrong; if such rows turn up later, workers wait until they are gone.
        """
        shards = self.discovery.shards(now, listing, me, leases)
        if (other := self.discovery.other_stream) is not None:
            raise WorkerError(other)
        return shards

    def _carry_out(self, actions: Iterable[Action], leases: Sequence[Lease], each: ParallelMap) -> Sequence[Lease]:
        """Carry these out, and answer the leases as they are once those that were taken are this worker's.

        The answer of a write is a reading of its row, so no row is read again to see what became of it (C10).
        """
        began = self.clock()
        won = [lease for lease in each(self.spans.acting(self._act), actions) if lease is not None]
        if not won or self.watch.bulletins is None:
            return leases
        self.watch, known = self.watch.look(won, began, self.clock(), [lease.key for lease in won])
        return known

    def _sooner(self, look: Look, early: Mapping[Action, float]) -> Look:
        """The next look: soon, and at all rows, where leases or a listing are waited for, or the stream begins anew."""
        soon = [max(SOON_SECONDS, min(early.values()))] if early else []
        if self.discovery.refused:
            # C18: the next reading of the whole table may be minutes away, and a new group has no lease until then.
            soon.append(self._relist.next())
        else:
            self._relist.reset()
        if self._recreated.beginning:
            # Nobody holds the leases. Were all rows deleted, a worker that joins would begin them after its wait (L13).
            soon.append(self.config.renew_seconds)
        return evolve(look, keys=None, seconds=min(look.seconds, *soon)) if soon else look

    def _found(self, asked: tuple[str, ...] | None) -> Listing:
        """The rows asked for; a reading without an answer is kept in mind, and so is what only a whole one shows."""
        began, dropped = self.clock(), asked is None and self._dropped.is_set()
        if dropped:
            # Before the reading: what is dropped while it runs wants another whole one.
            self._dropped.clear()
        self._planned_from, self._listing_since = began, began if asked is None else None
        try:
            return self.store.list() if asked is None else Listing(self.store.get(asked, stale_ok=self._look.stale_ok))
        except StoreError:
            self.watch = self.watch.unanswered(began)
            if dropped:
                # There was no answer: those rows are still to be looked for.
                self._dropped.set()
            raise
        finally:
            self._listing_since = None

    def _asking(self) -> Me:
        return Me(self.me, self._turns, self.watch.history)

    def _early(
        self, actions: Collection[Action], known_leases: Collection[Lease], now: float, each: ParallelMap
    ) -> dict[Action, float]:
        """The leases not to create yet, and for how long: a living worker may know better where they begin (L13)."""
        config, streams = self.config, {lease.stream for lease in known_leases}
        waits = dict[Action, float]()
        for action in actions:
            match action:
                # Its owner makes a deleted row anew at its next renewal; what was dropped here has no such owner.
                case Create(lease, rule="L13"):
                    waits[action] = 0.0 if lease.key in self._holdings.dropped else config.renew_seconds
                # What nobody here has seen waits until every living worker has read the table: one may know it.
                case Create(lease, rule="L6"):
                    waits[action] = config.renew_seconds + config.cycle_seconds
                case Create(lease, rule="L4" | "L5" as rule):
                    # Without a lease of this stream it is a new group's, or its table was emptied: then the first owner
                    # that renews makes its row anew, and shows which of the two.
                    known = lease.stream in streams
                    # At TRIM_HORIZON nothing is skipped, and nothing waits: owners take such rows over (`Holding`).
                    # Under LATEST it waits, since another worker may still be making the leases of a new group.
                    if lease.checkpoint != TRIM_HORIZON or (
                        known and (rule == "L5" or config.initial_position == LATEST)
                    ):
                        rest = config.cycle_seconds if known else RETRY_SECONDS
                        waits[action] = config.renew_seconds + rest
                case _:
                    pass
        self._absent = {one.lease.key: self._absent.get(one.lease.key, now) for one in waits}
        # What LATEST means is asked for before the wait, so that none of what comes meanwhile is skipped.
        unpinned = [one.lease for one in waits if one.lease.checkpoint == LATEST and one.lease.key not in self._latest]
        pins = zip(unpinned, each(self._latest_of, unpinned), strict=True)
        known_pins = {key: pin for key, pin in self._latest.items() if key in self._absent}
        self._latest = known_pins | {lease.key: pin for lease, pin in pins if pin is not None}
        if unpinned and not streams:
            seconds = max(waits.values())
            log.info("no lease of this stream yet: made in %.1f s; nothing that comes meanwhile is skipped", seconds)
        left = {one: self._absent[one.lease.key] + seconds - now for one, seconds in waits.items()}
        for one in waits:
            if one.lease.checkpoint == LATEST and one.lease.key not in self._latest:
                left[one] = max(left[one], RETRY_SECONDS)
        return {one: seconds for one, seconds in left.items() if seconds > 0}

    def _latest_of(self, lease: Lease) -> Position | None:
        """Return what LATEST means for this lease, or None if the source cannot tell it now.

        A shard that does not answer delays its own lease alone.
        """
        try:
            with foreign_as_unavailable():
                return self.source.latest(lease)
        except SourceError as fault:
            log.warning("lease %s is not made yet: where LATEST is cannot be told: %s", lease.key, fault)
            return None

    def _pinned(self, action: Action) -> Action:
        """The action with the place that LATEST meant when the lease was first seen to be due."""
        pin = self._latest.get(action.lease.key)
        if not isinstance(action, Create) or action.lease.checkpoint != LATEST or pin is None:
            return action
        return evolve(action, lease=evolve(action.lease, notes=latest_notes(pin)))

    def _may(self, action: Action, shards: tuple[Shard, ...] | None) -> bool:
        match action:
            case Renew():
                return False  # `renew` keeps its own schedule
            # A take-back or an adoption may have made it ours since the plan.
            case Claim() | Steal():
                return self._holdings.get(action.lease.key) is None
            # A listing may be behind: of what it does not show the source itself is asked (L10).
            case Delete():
                return self.discovery.deletable(action.lease, shards or ())
            case _:
                return True

    def _act(self, action: Action) -> Lease | None:
        """Carry this out, and answer the lease that was taken by it, if one was."""
        held = self._holdings.get(action.lease.key)
        if isinstance(action, Release) and held is not None:
            if action.next_owner and action.next_owner == action.lease.next_owner:
                # The heir named itself on the row, so the gift is one write; a stranger to it (M14) is the plan's.
                held.asked(action.lease)
            else:
                held.ask_release(action.next_owner)
            self._release(held)
            return None
        begun = self.clock()
        if isinstance(action, Create) and self._stale(begun):
            self.hurry()
            return None
        try:
            outcome = execute(self.store, action, self.me, notes=self._identity.notes_on(action.lease))
            if isinstance(action, Create) and isinstance(outcome, Done) and self._stale(self.clock()):
                self.store.write(DeleteLease(outcome.lease))  # where it is still due, the next plan creates it
                self.hurry()
                return None
        except StoreError as fault:
            if isinstance(action, Claim | Steal):  # H4
                self._holdings.not_answered(action.lease, begun, claimed=isinstance(action, Claim))
            log.warning(
                "%s of lease %s: %s", type(action).__name__, action.lease.key, fault, extra=_said(action, "unknown")
            )
            return None
        if isinstance(action, Claim | Steal):
            self._holdings.answered()
        taken: Lease | None = None
        match action, outcome:
            case ((Claim() | Steal()), Done(lease)):
                self._holdings.hold(lease, begun)
                taken = lease
            case Delete(lease), Done() if (held := self._holdings.get(lease.key)) is not None:
                held.drop("its shard is gone")  # or its next write would make the row anew
            case Create(rule="L13"), Done(lease):
                self._remade(f"{lease.key} at {lease.checkpoint.sequence}")
            case RequestHandoff(), Done(lease):
                self._handoffs.asked(lease)
            case _:
                pass
        match outcome:
            case Lost(key):
                extra = _said(action, "refused", key)
                log.info("%s of lease %s refused: somebody was faster", type(action).__name__, key, extra=extra)
            case Done(lease):
                key, rule = lease.key, action.rule
                extra = _said(action, "done", key) | _taken_from(action, key)
                log.info("%s of lease %s done, by %s", type(action).__name__, key, rule, extra=extra)
                if isinstance(action, Delete) and rule == "L10" and not action.lease.ended:
                    # Only the worker that deletes the row reports the gap, so the group reports it once.
                    log.warning("%s", expired_unread(action.lease))
            case _ as never:
                assert_never(never)
        return taken

    def _stale(self, now: float) -> bool:
        """Whether the planned creations are too old: others may have created, finished and deleted those leases."""
        return now - self._planned_from > self.config.lease_seconds

    def _wake(self, now: float) -> None:
        """Notice that this process stood still for so long that others may have taken over what it knows."""
        if now - self._awake > self.config.lease_seconds:
            self._slept_through = frozenset(self.watch.sightings) | {lease.key for lease in self.watch.history.gone}
        self._awake = now

    def _awake_history(self, leases: Sequence[Lease], shards: Collection[Shard]) -> History:
        """Return the history, in which leases without a row that were last seen before a pause may be finished (L13).

        Such a shard may have been finished meanwhile. Its lease is deleted only after its children were begun (L8), so
        if a descendant has a lease it was, even if that one was reset since.
        """
        history = self.watch.history
        if not self._slept_through:
            return history
        if not history.full_still:
            self._slept_through &= {lease.key for lease in history.gone}
        passed = {key for family in families(shards, leases) for key in family.shards.keys() - family.unread({})}
        passed &= self._slept_through
        gone = (evolve(lease, checkpoint=SHARD_END) if lease.key in passed else lease for lease in history.gone)
        return evolve(history, gone=tuple(gone))

    def _began(self, holding: Holding) -> None:
        self._handoffs.settled(holding.key)
        if self.consumer is not None:
            self.consumer.begin(holding)

    def _release(self, holding: Holding) -> None:
        if self.consumer is not None:
            self.consumer.release(holding)

    def _gone(self, holding: Holding) -> None:
        if holding.expired:
            self._dropped.set()
        if not self._own_consumer:  # a runner's reading may wait for hours; a consumer of one's own watches `lost`
            self._release(holding)

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
        self.hurried()


def _said(action: Action, outcome: str, key: str | None = None) -> dict[str, str]:
    """The fields of a log line about an action; an alternate may have been taken in place of the first choice."""
    return {"lease": key or action.lease.key, "rule": action.rule, "outcome": outcome}


def _taken_from(action: Action, key: str) -> dict[str, str]:
    """For a lease that was taken: how it came to be free to take, in words for people."""
    if not isinstance(action, Claim | Steal):
        return {}
    taken = next(each for each in (action, *action.alternates) if each.lease.key == key)
    if isinstance(taken, Steal):
        return {"taken": f"{taken.from_owner} had more than its share"}
    return {"taken": f"{taken.lease.owner} stopped renewing it" if taken.lease.owner else "no worker had it"}


def nobody() -> None:
    """Wake no task: a program that calls `turn` by itself looks in time."""


def spans_of(worker: str, tracer: "Tracer | None" = None) -> WorkerSpans:
    """The spans of this worker: by this tracer; by the program's own provider, if left out and one is set; or none.

    Without OpenTelemetry, or without a tracer provider when a worker is made, its store, source and handlers are the
    very ones that it was given.
    """
    try:
        from leasehold.adapters.worker.traced import TracedSpans, own_tracer  # noqa: PLC0415  OpenTelemetry is an extra
    except ModuleNotFoundError:
        return WorkerSpans()
    chosen = tracer or own_tracer()
    return WorkerSpans() if chosen is None else TracedSpans(chosen, worker)


@contextmanager
def uncollected() -> Iterator[None]:
    """Pause the collector of garbage, for all threads; where it is off already it stays off.

    For the moment in which a reading replaces what is known of every lease, some 5 µs for each, without a request of
    the store. A reading of 100,000 rows makes 300,000 objects, and lets as many old ones go. In between they look like
    growth to the collector, which visited every object of the process two to four times: more than half of what a
    reading cost. Of several workers of a process the first that ends lets it go on.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
