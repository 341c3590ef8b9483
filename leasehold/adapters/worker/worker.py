"""Runs one worker of a group. Whenever a runner calls it, the worker renews leases, or reads the table, plans and acts.

1. `renew` and `turn` each do a bounded amount of work, and return the time of the next call. They never wait for each
   other.
2. This module starts no threads, does not sleep, and does not read the wall clock.
3. A failed write never ends a worker. The next turn reads the table again and plans from its rows.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import Event
from typing import TYPE_CHECKING, Literal, assert_never

from attrs import evolve

from leasehold.adapters.sources.call_timeouts import Backoff
from leasehold.adapters.sources.protocol import NamedSource, Source
from leasehold.adapters.threads import ThreadScheduler
from leasehold.adapters.worker.annotations import Identity
from leasehold.adapters.worker.discovery import Discovery, LeaseRestarter, StreamRecreated, describe_unread_records
from leasehold.adapters.worker.handoffs import ParallelMap
from leasehold.adapters.worker.holding import Holding
from leasehold.adapters.worker.lease_book import LeaseBook, LeaseEvents
from leasehold.adapters.worker.pending_creations import PendingCreations
from leasehold.adapters.worker.renewing import (
    RETRY_SECONDS,
    BackgroundMap,
    Renewing,
    SlowPeers,
    bulletin_renewals,
    renew_pause_seconds,
)
from leasehold.adapters.worker.scheduler import HoldingConsumer, Scheduler
from leasehold.adapters.worker.spans import WorkerSpans
from leasehold.adapters.worker.table_view import TableView
from leasehold.balancer.actions import Action, Claim, Create, Delete, Look, Release, Renew, RequestHandoff, Steal
from leasehold.balancer.bulletin import prolonged_annotations
from leasehold.balancer.config import Config
from leasehold.balancer.lineage import NOT_STARTED
from leasehold.balancer.lookout import LOOKOUT_LISTING_SECONDS, scale_to_lease_seconds
from leasehold.balancer.model import Lease, Me, Shard
from leasehold.balancer.plan import look_again, plan
from leasehold.errors import OutcomeUnknown, SourceError, SourceUnavailable, StoreError, WorkerError
from leasehold.stores.execute import execute
from leasehold.stores.printable import join_limited, make_safe_logger, printable
from leasehold.stores.protocol import Capabilities, Done, Listing, Lost, Store
from leasehold.stores.writes import DeleteLease

if TYPE_CHECKING:  # an optional dependency
    from opentelemetry.trace import Tracer


log = make_safe_logger(logging.getLogger("leasehold.worker"))

MIN_PAUSE_SECONDS = 0.05
LOGGED_ROWS_MAX = 10
"""The maximum number of rows that are named in one log line."""


def check_worker_id(me: object, capabilities: Capabilities) -> None:
    """Raise ValueError if a store with these capabilities cannot store the worker id `me` as an owner.

    If such an id were accepted, every claim by this worker would fail later.
    """
    if not isinstance(me, str) or not me:
        raise ValueError(f"worker: {me!r} is not a worker id; use a non-empty string")
    if "\0" in me or any("\ud800" <= character <= "\udfff" for character in me):
        raise ValueError(f"worker: {printable(me)} contains a character that stores cannot hold; use plain text")
    if capabilities.ascii_owners and not (me.isascii() and me.isprintable() and me == me.strip()):
        raise ValueError(
            f"worker: {printable(me)} cannot be an owner in this store, which keeps owners as HTTP headers; "
            "use printable ASCII without spaces at its ends"
        )


class Worker:
    """A worker of a group that shares the leases of one table.

    Args:
        store: The lease table.
        source: The stream whose shards the workers share.
        me: This worker's id. If it stays the same across restarts, leases are re-adopted instead of moving.
        config: The configuration, which must be the same for all workers of the group.
        consumer: Reads the shards of held leases. If it is None, a runner that is created for this worker reads them.
            Use `Unread()` for a worker that reads nothing, and whose `turn` and `renew` the program itself calls.
        scheduler: Provides everything that differs from run to run: the clock, tasks and locks, random waits, and an id
            for this run of the process. The default uses threads, and a clock that also advances while the machine is
            suspended.
        tracer: Makes the spans. If it is None, the program's own tracer provider is used, provided that one is already
            set.
        if_recreated: The position at which all leases start again if the stream was deleted and recreated under the
            same name. If it is None, reading stops in that case, and a log message describes what to do (L14).

    Examples:
        >>> from leasehold import Config
        >>> from leasehold.adapters import Runner, Worker, open_source
        >>> from leasehold.stores import open_store
        >>> def consume(handler) -> None:
        ...     leases, orders = open_store("sqlite:///srv/orders.db"), open_source("kinesis://orders")
        ...     Runner(Worker(store=leases, source=orders, me="worker-a", config=Config()), handler).run()
    """

    def __init__(
        self,
        *,
        store: Store,
        source: Source,
        me: str,
        config: Config | None = None,
        consumer: HoldingConsumer | None = None,
        scheduler: Scheduler | None = None,
        tracer: "Tracer | None" = None,
        if_recreated: Literal["TRIM_HORIZON", "LATEST"] | None = None,
    ) -> None:
        check_worker_id(me, store.capabilities)
        self.spans = spans_of(me, tracer)
        self.store, self.source, self.me = self.spans.store(store), self.spans.source(source), me
        self.config = config or Config()
        self.scheduler: Scheduler = scheduler or ThreadScheduler()
        self.clock, self.uniform = self.scheduler.clock, self.scheduler.uniform
        self.consumer, self._own_consumer = consumer, consumer is not None
        self.wake_runner: Callable[[], None] = wake_nothing
        """Requests an earlier call of `turn`. The runner sets this callback, and any thread may call it."""
        self.discovery, self._slow_peers = Discovery(source), SlowPeers()
        stream_name = source.name if isinstance(source, NamedSource) else ""
        self._identity = Identity(me, self.scheduler.process_id, lambda: self.discovery.incarnation, stream_name)
        self._restarter = LeaseRestarter(self.store, me, self.discovery, if_recreated)
        self._full_read_requested = Event()
        lease_events = LeaseEvents(
            lease_taken=self._lease_taken,
            lease_given=self._lease_given,
            lease_taken_back=self._full_read_requested.set,  # the next owner did not claim it, and may request it again
            lease_gone=self._lease_gone,
            row_recreated=self._row_recreated,
            release=self._release,
        )
        self._book = LeaseBook(
            self.store, self._identity, self.config, lease_events, clock=self.clock, lock=self.scheduler.lock
        )
        self._renewing = Renewing(self.config, self._release, self.clock)
        self.table, self._look, self._look_due = TableView(self.store, self.config, self.clock), Look(0.0), -math.inf
        self._creations = PendingCreations(self.config, self.source.latest)
        self._turns, self._closing = 0, False
        self.rows_remade, self._recreated_rows = 0, deque[str]()
        # Limit the waits (C17), because after an outage every worker must have read the table before the first of them
        # considers a lease expired.
        retry_seconds_max = min(self.config.cycle_seconds, self.config.lease_seconds / 2)
        self._backoff = Backoff(RETRY_SECONDS, retry_seconds_max, self.uniform)
        self._take_backoff = Backoff(RETRY_SECONDS, retry_seconds_max, self.uniform)
        self._listing_backoff = Backoff(RETRY_SECONDS, self.config.cycle_seconds, self.uniform)

    @property
    def holdings(self) -> tuple[Holding, ...]:
        """The leases that this worker holds now, sorted by key."""
        return self._book.holdings.all

    @property
    def renewers(self) -> int:
        """The number of renewals that must run in parallel, given the number of held leases and the store's latency."""
        return self._renewing.parallel_renewals

    def renew(self, now: float, each: BackgroundMap = map) -> float:
        """Renew the leases that are due, and drop those that other workers may have taken.

        Args:
            now: The time by the worker's clock.
            each: Applies a function to each item. It need not wait for the calls to end, so that a renewal that stalls
                does not delay the others.

        Returns:
            When to call again.

        Raises:
            WorkerError: Another living process uses this worker's id.
        """
        self.table.note_running(now)
        listing_seconds = self.table.listing_seconds(now)
        look, pause = (
            evolve(self._look, annotations=prolonged_annotations(self._look.annotations, listing_seconds)),
            renew_pause_seconds(self.table.watch, self.config),
        )
        checked_holdings = self._renewing.begin(self.holdings, now, self._current_me(), look, each, pause=pause)
        if self.discovery.has_unknown_contradiction(holding.lease for holding in checked_holdings):
            self.hurry()
        self._book.holdings.check_identity()
        silence_due = self._book.silence_due(now)
        if silence_due <= now:
            # D1: only a full read of the table shows whether the stream responds to other workers.
            self.table.note_lease_dropped()
            self._look_due = min(self._look_due, now)
            self.wake_runner()
        next_due = min(self._renewing.due(now), now + pause, silence_due if silence_due > now else math.inf)
        # Always make a pause. Otherwise, a renewal that is due but cannot be made yet would keep a core busy.
        return max(now + MIN_PAUSE_SECONDS, next_due)

    def turn(self, now: float, each: ParallelMap = map) -> float:
        """Read the table, plan, and carry out the plan if that is due.

        Leases that were given away and not claimed in time are taken back.

        Args:
            now: The time by the worker's clock.
            each: Applies a function to each item, one after another or concurrently. It must not use the thread pool of
                the renewals, because then the renewals would have to wait for a turn to end.

        Returns:
            When to call again.

        Raises:
            StoreError: The first look shows that the lease table cannot be used at all.
            SourceError: The first look shows that the stream cannot be used at all.
            WorkerError: Another living process uses this worker's id, or the table belongs to another stream.
        """
        self.table.note_running(now)
        next_call = self._book.handoffs.check_timeouts(now, each)
        recreated_rows = [self._recreated_rows.popleft() for _ in range(len(self._recreated_rows))]
        if recreated_rows:
            log.warning(
                "rows of the lease table were deleted while workers were running; recreated from memory: %s",
                join_limited(recreated_rows, LOGGED_ROWS_MAX, "; "),
            )
        # Leases that were given away must be tracked even while this worker drains, because if a next owner never
        # claims its lease, no worker reads the shard.
        if self._closing:
            return next_call
        if not self._book.holdings.takes_paused:
            list(each(self._book.holdings.readopt, self._book.holdings.unconfirmed))  # H4
        if self._full_read_requested.is_set() or now >= self._look_due:
            # Clear the event before the look, so that a request during the look leads to another look.
            full_read = self._full_read_requested.is_set()
            self._full_read_requested.clear()
            # The rows of dropped leases still name this worker as owner, and only a full read is certain to return
            # these rows (C17).
            full_read |= self.table.needs_listing
            self._look_due = now  # if the look raises, the next turn looks again
            self._look_due = now + self._look_or_back_off(now, None if full_read else self._look.keys, each)
        self._book.holdings.check_identity()
        if self._book.holdings.unconfirmed:
            # The rows of unconfirmed leases may name this worker as owner. If they do, no worker reads the shards until
            # this worker has claimed the leases, so try again soon.
            next_call = min(next_call, now + RETRY_SECONDS)
        return now if self._full_read_requested.is_set() else min(next_call, self._look_due)

    def hurry(self) -> None:
        """Read the whole table and list the shards at the next turn, because a shard has ended or disappeared."""
        self.discovery.request_listing()
        self._full_read_requested.set()
        self.wake_runner()

    def parents(self, lease: Lease) -> Mapping[str, Lease]:
        """Return the parents' leases by key, as they are stored, or as last read if their rows were deleted (L13).

        A finished lease is deleted only after its children have started (L8). Therefore, if the given lease has not
        started, a missing row of a parent does not mean that the parent is finished. The parent is treated as
        unfinished, and a read of the table is requested, after which the row is recreated if necessary.
        """
        stored_parents = {parent.key: parent for parent in self.store.get(lease.parents)} if lease.parents else {}
        if lease.checkpoint.sequence not in NOT_STARTED:
            return stored_parents
        last_known_parents = (self.table.watch.last_seen(key) for key in lease.parents if key not in stored_parents)
        missing_parents = {
            parent.key: parent for parent in last_known_parents if parent is not None and not parent.ended
        }
        still_listed_keys = self.table.watch.sightings.keys() & missing_parents.keys()
        if still_listed_keys:
            self.hurry()
        undecided_keys = (
            missing_parents.keys()
            if not self.discovery.is_current
            else still_listed_keys | (self._creations.keys & missing_parents.keys())
        )
        return {**stored_parents, **{key: missing_parents[key] for key in undecided_keys}}

    def exclude(self, key: str, seconds: float) -> None:
        """Do not take this lease for the next `seconds`, because another worker may be able to read its shard.

        The shards are also listed. If the lease's shard no longer exists, the row must be deleted (L10). Otherwise,
        workers would try to read the shard forever.
        """
        self._book.leave_alone(key, seconds)
        self.discovery.request_listing()

    def close(self) -> None:
        """Take no more leases, and withdraw all requests. The consumer releases the held leases."""
        # Set the flag first. Otherwise, a turn that begins in the meantime could request another lease.
        self._closing = True
        self._book.handoffs.withdraw()

    def _look_or_back_off(self, now: float, requested_keys: tuple[str, ...] | None, parallel_map: ParallelMap) -> float:
        if requested_keys is None:
            self._look = evolve(self._look, keys=None)  # set this first, in case the look fails
        try:
            with self.spans.span_around("look"):
                self._look_and_act(now, requested_keys, parallel_map)
        except StreamRecreated:
            raise  # the stream to which this worker is bound no longer exists
        except (StoreError, SourceError) as fault:
            # If the store or the source rejects requests and has never worked, give up. If it has worked before, the
            # rejection may be temporary, for example until a role or a token is renewed.
            worked_before = self._turns and (isinstance(fault, StoreError) or self.discovery.has_listed)
            if not (worked_before or isinstance(fault, OutcomeUnknown | SourceUnavailable)):
                raise
            self._creations.restart_waits()
            wait_seconds, held_count = self._backoff.next(), len(self.holdings)
            consequence = f"{held_count} leases are read while they can be renewed" if held_count else "nothing is held"
            if isinstance(fault, StoreError) and not isinstance(fault, OutcomeUnknown):
                self._look = evolve(self._look, keys=None)  # a bad row may be the cause, and a listing skips bad rows
            log.warning(
                "the leases could not be looked at, trying again in %.1f s; %s: %s", wait_seconds, consequence, fault
            )
            return wait_seconds
        self._backoff.reset()
        return self._look.seconds

    def _look_and_act(self, now: float, requested_keys: tuple[str, ...] | None, parallel_map: ParallelMap) -> None:
        read_began, unfiltered_listing = self.clock(), self.table.read(requested_keys, stale_ok=self._look.stale_ok)
        listing = self.discovery.without_other_streams(unfiltered_listing)
        leases = self.table.remember_rows(listing.leases, read_began, requested_keys, unfiltered_listing.reports)
        me = self._current_me()
        # Before the first listing, we don't know whether a lease whose row names this worker belongs to the current
        # stream.
        is_first_listing = requested_keys is None and not self.discovery.has_listed
        shards = (
            self._first_listing(now, listing, me, leases) if is_first_listing and self._can_list_shards(now) else None
        )
        # Adopt only leases whose rows were just read, because any other lease may already have a new owner. Under the
        # rules of KCL 2.x, finished leases are adopted, too.
        sightings = self.table.watch.sightings
        leases_read = tuple(
            leases if requested_keys is None else (sightings[key].lease for key in requested_keys if key in sightings)
        )
        self._book.holdings.note_read(leases_read)
        unheld_leases = self._book.holdings.adoptable(leases_read, include_ended=self.config.rules.counts_ended)
        takes_nothing = self.discovery.leases_unusable or self._book.holdings.takes_paused
        adopted_leases = (
            () if takes_nothing else tuple(filter(None, parallel_map(self._book.holdings.readopt, unheld_leases)))
        )
        me = self._current_me()
        table_keys = {lease.key for lease in listing.leases} | {renewal.key for renewal in listing.malformed}
        expected_keys = (
            [holding.key for holding in self.holdings]
            if requested_keys is None
            else filter(self._book.holdings.get, requested_keys)
        )
        missing_keys = tuple(key for key in expected_keys if key not in table_keys)  # a renewal recreates the row
        doubtful_holdings = self._book.holdings.possibly_lost(listing.leases, missing_keys)
        list(parallel_map(Holding.renew_to_find_owner, doubtful_holdings))
        # Check for silent streams before the shards are listed, because a listing takes long if the stream does not
        # respond.
        if requested_keys is None:  # only a read of the whole table shows which other workers get responses
            self._book.release_silent_leases(leases, now, parallel_map)
        if requested_keys is None and not is_first_listing and self._can_list_shards(now):
            shards = self.discovery.shards(now, listing, me, leases, self.table.finished_long_ago(now))
        self.table.remember_released(self._book.holdings.released, None if listing.malformed else shards)
        config, history = self._restarter.planning_inputs(self.config, self.table.history(leases, shards or ()))
        me = evolve(self._current_me(), history=history)
        with self.spans.span_around("plan"):
            actions = self._book.without_excluded(plan(leases, shards, me, config), now)
        if requested_keys is None and shards is not None:
            self._restarter.note_read(actions, leases)
        if requested_keys is not None:
            # Do not act on leases that were not just read, because they may have changed. The lookout or our next full
            # read will handle them.
            actions = tuple(action for action in actions if action.lease.key in requested_keys)
            adopted_leases += leases_read
        actions = self._book.holdings.without_paused_takes(
            actions + self._book.handoffs.repeated_requests(adopted_leases)
        )
        if self.discovery.leases_unusable:
            actions = tuple(action for action in actions if isinstance(action, Renew))
            self._release_all()
        known_leases, dropped_keys = (*leases, *history.gone), self._book.holdings.dropped_keys
        delayed_creations = (
            {}
            if shards is None
            else self._creations.creations_to_delay(actions, known_leases, dropped_keys, now, parallel_map)
        )
        allowed_actions = (
            action for action in actions if action not in delayed_creations and self._is_allowed(action, shards)
        )
        all_leases = self._carry_out(
            list(map(self._creations.with_latest_position, allowed_actions)), leases, parallel_map
        )
        if delayed_creations:
            # Request a listing, because delayed creations are planned again only in a turn that lists the shards.
            self.discovery.request_listing()
        if requested_keys is None and (shards is not None or self.discovery.contradictions):
            self._resolve_contradictions(leases)
        self._look = self._make_look_earlier(look_again(actions, all_leases, me, self.config), delayed_creations)
        if requested_keys is None:
            # The gaps between the renewals of other workers are known only from full reads of the table.
            self._slow_peers.observe(me, self.config)
        self._turns += 1
        renewals_with_bulletin = (
            bulletin_renewals(self.holdings, self.me) if self._look.annotations and requested_keys is None else []
        )
        list(
            parallel_map(
                lambda renewal: self._renewing.renew(*renewal, self._look, patient=False), renewals_with_bulletin
            )
        )

    def _resolve_contradictions(self, leases: Sequence[Lease]) -> None:
        """Resolve contradictions, unless the last read of the table is out of date (L14)."""
        if not self.table.is_outdated(self.clock()) and self._restarter.restart_or_annotate(leases, self.holdings):
            self.hurry()  # the next turn reads the result and lists the shards

    def _release_all(self) -> None:
        """Release all leases once the running batches end, because the positions belong to another stream (L14)."""
        for holding in self.holdings:
            holding.ask_release()
            self._release(holding)

    def _can_list_shards(self, now: float) -> bool:
        """Return whether to list the shards.

        A stream that does not respond to reads would not respond to a listing either.
        """
        return not self._book.is_stream_silent(now)

    def leave_stuck(self, now: float, seconds: float, each: ParallelMap = map) -> None:
        """Release the leases that are being given up while their readers are blocked in a call of the source.

        A lease is released only if its reader has been blocked for at least `seconds`.
        """
        self._book.leave_stuck(now, seconds, each)

    def _first_listing(self, now: float, listing: Listing, me: Me, leases: Sequence[Lease]) -> tuple[Shard, ...] | None:
        """List the shards for the first time. Raise WorkerError if the table belongs to another stream.

        When a worker starts, a table of another stream means that a setting is wrong. If rows of another stream appear
        later, the workers wait until these rows have been removed.
        """
        shards = self.discovery.shards(now, listing, me, leases)
        if (other_stream_error := self.discovery.other_stream) is not None:
            raise WorkerError(other_stream_error)
        return shards

    def _carry_out(
        self, actions: Iterable[Action], leases: Sequence[Lease], parallel_map: ParallelMap
    ) -> Sequence[Lease]:
        """Carry out these actions, and return all leases, including those that this worker has just taken.

        The responses to the writes contain the rows, so the result is known without another read (C10).
        """
        writes_began = self.clock()
        taken_leases = [lease for lease in parallel_map(self.spans.acting(self._act), actions) if lease is not None]
        if not taken_leases or self.table.watch.bulletins is None:
            return leases
        return self.table.remember_rows(taken_leases, writes_began, [lease.key for lease in taken_leases])

    def _make_look_earlier(self, look: Look, delayed_creations: Mapping[Action, float]) -> Look:
        """Make the next full read of the table earlier while leases must be created or a listing is pending.

        The next read is also made earlier while the leases of a recreated stream are being restarted.
        """
        wait_limits = [max(MIN_PAUSE_SECONDS, min(delayed_creations.values()))] if delayed_creations else []
        if self.discovery.listing_failed:
            # C18: the next full read of the table may be minutes away, and until then a new group has no leases.
            wait_limits.append(self._listing_backoff.next())
        else:
            self._listing_backoff.reset()
        if self._book.holdings.take_failed:
            # The store can be read but not written, so look again soon. Otherwise, a lease could wait for a whole cycle
            # after writes succeed again.
            wait_limits.append(self._take_backoff.next())
        else:
            self._take_backoff.reset()
        if self._restarter.is_restarting:
            # No worker holds the leases. If all rows were deleted, a worker that joins the group would create them
            # after its wait (L13), so look again before then.
            wait_limits.append(self.config.renew_seconds)
        return evolve(look, keys=None, seconds=min(look.seconds, *wait_limits)) if wait_limits else look

    def _current_me(self) -> Me:
        return Me(self.me, self._turns, self.table.watch.history)

    def _is_allowed(self, action: Action, shards: tuple[Shard, ...] | None) -> bool:
        if self._closing:
            return False  # `close` does not wait for a turn that is blocked by the stream, so drop that turn's actions
        match action:
            case Renew():
                return False  # `renew` renews the leases on its own schedule
            # Check whether the lease is held, because this worker may have taken it back or adopted it since the plan
            # was made.
            case Claim() | Steal():
                return self._book.holdings.get(action.lease.key) is None
            case Delete(lease) if lease.ended and not self.table.was_finished_long_ago(lease.key, self.clock()):
                return False
            # A listing may be out of date, so shards that are missing from it are looked up in the source (L10).
            case Delete():
                return self.discovery.deletable(action.lease, shards or ())
            case _:
                return True

    def _act(self, action: Action) -> Lease | None:
        """Carry out this action. Return the lease that it has taken, if any."""
        holding = self._book.holdings.get(action.lease.key)
        if isinstance(action, Release) and holding is not None:
            if action.next_owner and action.next_owner == action.lease.next_owner:
                # If the next owner has registered on the row, a single write gives the lease to it. Under M14, however,
                # the plan may name a next owner that has not registered.
                holding.note_next_owner(action.lease)
            else:
                holding.ask_release(action.next_owner)
            self._release(holding)
            return None
        write_began = self.clock()
        if isinstance(action, Create) and self.table.is_outdated(write_began):
            self.hurry()
            return None
        try:
            outcome = execute(self.store, action, self.me, annotations=self._identity.annotations_on(action.lease))
            if isinstance(action, Create) and isinstance(outcome, Done) and self.table.is_outdated(self.clock()):
                self.store.write(
                    DeleteLease(outcome.lease)
                )  # the next plan creates the lease again if it is still missing
                self.hurry()
                return None
        except StoreError as fault:
            if isinstance(action, Claim | Steal):  # H4
                self._book.holdings.note_failed_take(
                    fault, action.lease, write_began, was_claim=isinstance(action, Claim)
                )
            log.warning(
                "%s of lease %s: %s",
                type(action).__name__,
                action.lease.key,
                fault,
                extra=_log_fields(action, "unknown"),
            )
            return None
        if isinstance(action, Claim | Steal):
            self._book.holdings.note_response()
        taken_lease: Lease | None = None
        match action, outcome:
            case ((Claim() | Steal()), Done(lease)):
                self._book.holdings.hold(lease, write_began)
                taken_lease = lease
            case Delete(lease), Done() if (holding := self._book.holdings.get(lease.key)) is not None:
                holding.drop("its shard is gone")  # otherwise its next write would recreate the row
            case Create(rule="L13"), Done(lease):
                self._row_recreated(f"{lease.key} at {lease.checkpoint.sequence}")
            case RequestHandoff(), Done(lease):
                self._book.handoffs.note_request(lease)
            case _:
                pass
        match outcome:
            case Lost(key):
                log_fields = _log_fields(action, "refused", key)
                log.info(
                    "%s of lease %s rejected: another worker was faster", type(action).__name__, key, extra=log_fields
                )
            case Done(lease):
                key, rule = lease.key, action.rule
                log_fields = _log_fields(action, "done", key) | _reason_field(action, key)
                log.info("%s of lease %s done, by %s", type(action).__name__, key, rule, extra=log_fields)
                if isinstance(action, Delete) and rule == "L10" and not action.lease.ended:
                    # Only the worker that deletes the row logs the lost records, so the group logs them only once.
                    log.warning("%s", describe_unread_records(action.lease))
            case _ as never:
                assert_never(never)
        return taken_lease

    def _lease_taken(self, holding: Holding) -> None:
        if self.consumer is not None:
            self.consumer.begin(holding)

    def _release(self, holding: Holding) -> None:
        if self.consumer is not None:
            self.consumer.release(holding)

    def _lease_gone(self, holding: Holding) -> None:
        if holding.expired:
            self.table.note_lease_dropped()
        if not self._own_consumer:  # wake the runner's reader, which may sleep for hours; other consumers watch `lost`
            self._release(holding)

    def _row_recreated(self, description: str) -> None:
        self.rows_remade += 1
        self._recreated_rows.append(description)
        self.hurry()  # other rows may have been deleted, too, and may have no owner that recreates them

    def _lease_given(self, now: float) -> None:
        # A worker that was alone reads the table only rarely, but it must notice if the next owner dies right after it
        # got the lease (C13).
        self._look_due = min(self._look_due, now + scale_to_lease_seconds(LOOKOUT_LISTING_SECONDS, self.config))
        self.wake_runner()


def _log_fields(action: Action, outcome: str, key: str | None = None) -> dict[str, str]:
    """Return the fields of a log line about an action.

    If a lease other than the first choice was taken, pass its key as `key`.
    """
    return {"lease": key or action.lease.key, "rule": action.rule, "outcome": outcome}


def _reason_field(action: Action, key: str) -> dict[str, str]:
    """Return a log field with the reason why the lease could be taken, or no field if the action takes no lease."""
    if not isinstance(action, Claim | Steal):
        return {}
    taken_candidate = next(candidate for candidate in (action, *action.alternates) if candidate.lease.key == key)
    if isinstance(taken_candidate, Steal):
        return {"taken": f"{taken_candidate.from_owner} had more than its share"}
    return {
        "taken": f"{taken_candidate.lease.owner} stopped renewing it"
        if taken_candidate.lease.owner
        else "no worker had it"
    }


def wake_nothing() -> None:
    """Do nothing, because no runner is waiting. This is the default for programs that call `turn` by themselves."""


def spans_of(worker: str, tracer: "Tracer | None" = None) -> WorkerSpans:
    """Return an object that makes this worker's spans with the given tracer, or with the program's tracer provider.

    If OpenTelemetry is not installed, or if there is neither a tracer nor a tracer provider when the worker is created,
    its store, source and handlers are not wrapped.
    """
    try:
        from leasehold.adapters.worker.traced import TracedSpans, program_tracer  # noqa: PLC0415  OpenTelemetry is an extra
    except ModuleNotFoundError:
        return WorkerSpans()
    chosen_tracer = tracer or program_tracer()
    return WorkerSpans() if chosen_tracer is None else TracedSpans(chosen_tracer, worker)
