"""Decides when a worker lists the shards, finds contradictions between listing and table, and resolves them.

Shards are listed seldom, because all workers share the service's rate limit. Each listing is also compared with the
lease table to find contradictions (L14). If `if_recreated` is set, leases of a former stream are restarted.
"""

import logging
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from heapq import nsmallest
from threading import Event
from typing import Literal

from attrs import evolve

from leasehold.adapters.inputs import format_time
from leasehold.adapters.sources.protocol import (
    IdentifiedSource,
    MultiStreamSource,
    RejectionCounter,
    SelectiveSource,
    Source,
    turn_foreign_errors_into_unavailable,
)
from leasehold.adapters.worker.annotations import LATEST_MS, LATEST_POSITION, UNPINNED
from leasehold.adapters.worker.holding import Holding
from leasehold.adapters.worker.progress import Progress, progress_of
from leasehold.balancer.actions import Action, Create
from leasehold.balancer.chance import digest_under
from leasehold.balancer.config import Config
from leasehold.balancer.contradictions import (
    CONTRADICTION,
    INCARNATION,
    SETTLED,
    Contradiction,
    Restart,
    contradictions,
    created_later,
    reported_on,
    restarts,
)
from leasehold.balancer.family import problems, unrelated
from leasehold.balancer.lineage import HOLE_CONFIDENCE, deletable
from leasehold.balancer.model import LATEST, History, Hole, Lease, Me, Position, Shard
from leasehold.errors import SourceError, SourceUnavailable, StoreError
from leasehold.stores.printable import escaped
from leasehold.stores.protocol import Done, Listing, Outcome, Store
from leasehold.stores.writes import AnnotateLease, CreateLease, DeleteLease, ReleaseLease, ResetLease

log = escaped(logging.getLogger("leasehold.discovery"))

SAFETY_SECONDS = 300.0

LISTERS = 3
"""The number of workers that list the shards when every worker sees the same reason to do it.

They are drawn again each time.
"""


class StreamRecreated(SourceError):
    """Raised when the stream that a worker is bound to was deleted, and another stream has its name now."""


class Discovery:
    """The shard listings of one worker.

    The shards are listed

    - at the start and after the end of a shard,
    - when the unfinished leases have left the same hash range uncovered three times,
    - when the row of an unfinished lease is gone,
    - when finished leases wait to be deleted, and
    - every `safety_seconds`.

    All workers notice at the same time that a hash range is uncovered, or that `safety_seconds` have passed. In these
    cases, only a few randomly drawn workers list the shards.

    Args:
        source: The stream.
        safety_seconds: The longest time between two listings.

    Attributes:
        answered: Whether there has been a listing.
        contradictions: The contradictions between the last listing and the table that still hold (L14).
        incarnation: The stream's incarnation, or "" if the source does not know it.
        listed: The shards of the last listing.
        open_shards: The number of open shards in the last listing, or None before the first one.
        refused: Whether the last listing failed, entirely or for some streams, for a reason that may be temporary.
        calling: Whether a call of the source is running.
    """

    def __init__(self, source: Source, *, safety_seconds: float = SAFETY_SECONDS) -> None:
        self._source, self._safety_seconds = source, safety_seconds
        self._selective = source if isinstance(source, SelectiveSource) else None  # cached, because the check is slow
        self._wanted = Event()
        self._wanted.set()
        self._next_due, self._rounds = 0.0, 0
        self._holes: tuple[Hole, ...] = ()
        self._finished_keys: frozenset[str] = frozenset()
        self._missing_keys: frozenset[str] = frozenset()
        self.answered = False
        self._unread: frozenset[str] = frozenset()
        self._logged: frozenset[str] = frozenset()
        self._fault, self._rejections = "", RejectionCounter()
        self.refused = self.calling = False
        self.open_shards: int | None = None
        self.incarnation = ""
        self.listed: tuple[Shard, ...] = ()
        self.contradictions: tuple[Contradiction, ...] = ()
        self._suspected: frozenset[str] = frozenset()
        self._bound = ""

    def bind(self, incarnation: str) -> None:
        """Read only this incarnation of the stream. Once a later one is listed, `shards` raises StreamRecreated.

        Programs that keep positions outside the table need this, because a position is valid in only one incarnation.
        Listings of earlier incarnations are ignored. An empty string removes the binding.
        """
        self._bound = incarnation

    @property
    def current(self) -> bool:
        """Whether there was a listing and no other one is requested."""
        return self.answered and not self._wanted.is_set()

    def want(self) -> None:
        """List the shards at the next turn."""
        self._wanted.set()

    def shards(
        self,
        now: float,
        listing: Listing,
        me: Me,
        leases: Collection[Lease] = (),
        finished_long_ago: Collection[str] = (),
    ) -> tuple[Shard, ...] | None:
        """Return a new listing of the shards if one is due and possible, or else None.

        If a row of the table cannot be parsed, the ancestors and descendants of its shard are left out, because where
        their leases start depends on that row.

        Args:
            now: The time by the worker's clock.
            listing: The rows that were read.
            me: This worker and what it knows.
            leases: The leases as the plan will see them.
            finished_long_ago: The keys of the leases that have been finished for long enough to be deleted.

        Raises:
            SourceError: The stream cannot be used, and has never been listed successfully.
        """
        malformed_keys = frozenset(row.key for row in listing.malformed)
        # If workers read bulletins (C3), only this worker notices that a listing is due. Otherwise every owner notices
        # it at the same time.
        owners = () if me.history.hearing is not None else (lease.owner for lease in listing.leases if lease.owner)
        candidates = frozenset((*owners, me.worker))
        if self._unread - malformed_keys:
            self.want()  # a row was repaired, so leases of the shards that were left out may be due
        self._unread = malformed_keys
        if (
            self.has_unknown_contradiction(leases)
            or self._row_vanished(me)
            or self._hole_lasts(me, candidates)
            or self._finished_lease_waits(leases, me.worker, finished_long_ago)
            or self._overdue(now, me, candidates)
            or self.refused
        ):
            self.want()
        malformed = [
            f"row {row.key}: {row.field} {row.why}; until it is fixed, no lease is created for "
            "ancestors and descendants of its shard, and none is deleted"
            for row in listing.malformed
        ]
        shards = self._list(now) if self._wanted.is_set() else None
        self._update_contradictions(shards, leases)
        descriptions = [contradiction.what for contradiction in self.contradictions]
        descriptions += [
            f"shard {problem.shard} {problem.what}" if problem.shard else problem.what
            for problem in problems(shards or ())
        ]
        messages = malformed + descriptions
        for message in messages:
            if message not in self._logged:  # log each message once, not at every turn
                log.warning("%s", message)
        self._logged = frozenset(messages) or self._logged
        return None if shards is None or self.refusing else unrelated(shards, malformed_keys)

    def has_unknown_contradiction(self, leases: Iterable[Lease]) -> bool:
        """Return whether another worker has annotated a row with a contradiction that this worker does not know yet."""
        if self.refusing:
            return False
        known_keys = {contradiction.key for contradiction in self.contradictions}
        return any(reported_on(lease) for lease in leases if lease.key not in known_keys)

    @property
    def refusing(self) -> bool:
        """Whether the leases of this stream are unusable (L14).

        If the leases are unusable, this worker takes, creates and deletes none of them, and keeps none that it holds.
        """
        # A contradiction about one shard concerns only that shard. A contradiction about the stream makes every
        # position in the table doubtful.
        return any(contradiction.of_stream for contradiction in self.contradictions)

    @property
    def other_stream(self) -> str | None:
        """The error message for a table whose leases belong to another stream, or None."""
        return next(
            (contradiction.what for contradiction in self.contradictions if contradiction.kind == "another stream"),
            None,
        )

    def _update_contradictions(self, shards: tuple[Shard, ...] | None, leases: Collection[Lease]) -> None:
        """Update the contradictions.

        Without a new listing, contradictions that still hold are kept. Contradictions about whole streams that the rows
        show are added.
        """
        of_other_incarnation = any(
            lease.annotation(INCARNATION) not in {None, SETTLED, self.incarnation} for lease in leases
        )
        if shards is None and not (self.contradictions or (self.incarnation and of_other_incarnation)):
            return
        current_contradictions = contradictions(self.listed, leases, self.incarnation)
        established = (
            self._suspected if shards is not None else {contradiction.key for contradiction in self.contradictions}
        )
        self.contradictions = tuple(
            contradiction
            for contradiction in current_contradictions
            if contradiction.of_stream or contradiction.key in established
        )
        if shards is not None:
            # A contradiction about a shard counts only if a second listing confirms it, because a listing may be stale.
            self._suspected, suspected_before = (
                frozenset(contradiction.key for contradiction in current_contradictions),
                self._suspected,
            )
            if not self._suspected <= suspected_before or any(
                contradiction.kind == "old listing" for contradiction in current_contradictions
            ):
                self.want()
        elif any(contradiction.kind == "old listing" for contradiction in current_contradictions):
            self.want()

    def without_other_streams(self, listing: Listing) -> Listing:
        """Return the listing without leases of streams that this worker does not read."""
        source = self._selective
        if source is None:
            return listing
        # This source does not list the shards of these leases. Without this check, the leases would be deleted as if
        # their shards were gone.
        with turn_foreign_errors_into_unavailable():
            return evolve(listing, leases=tuple(lease for lease in listing.leases if source.reads(lease)))

    def deletable(self, lease: Lease, shards: tuple[Shard, ...]) -> bool:
        """Return whether a lease may be deleted because its shard is listed (and finished), or is gone at the service.

        If some row cannot be parsed, no lease may be deleted, because the row may belong to a child or parent of the
        shard.
        """
        if self._unread:
            return False
        if any(shard.id == lease.key for shard in shards):
            return True
        try:
            with self._call():
                shard_is_gone = self._source.gone(lease.key)
        except SourceError as fault:
            log.warning("a shard could not be looked up, its lease is kept: %s", fault)
            return False
        if shard_is_gone:
            self.want()  # if the row changes before the delete, the store rejects the delete, so check again
        return shard_is_gone

    def _row_vanished(self, me: Me) -> bool:
        # List immediately. A lease without a row has no owner, and only workers that have read the row remember its
        # position.
        before, self._missing_keys = (
            self._missing_keys,
            frozenset(lease.key for lease in me.history.gone if not lease.ended),
        )
        return not self._missing_keys <= before

    def _hole_lasts(self, me: Me, candidates: frozenset[str]) -> bool:
        # List the shards at every third full read that shows the hole. Otherwise, a hole that remains after a listing
        # would cause a listing at every turn.
        holes_changed, self._holes = me.history.holes != self._holes, me.history.holes
        confirmed_times = [hole.times for hole in me.history.holes if hole.times % HOLE_CONFIDENCE == 0]
        return holes_changed and any(_is_drawn(me, times, candidates) for times in confirmed_times)

    def _overdue(self, now: float, me: Me, candidates: frozenset[str]) -> bool:
        if now < self._next_due or not self.answered:
            return not self.answered
        # Listings of all workers are due at the same time. A few workers are drawn, so that not all of them list at
        # once.
        self._next_due, self._rounds = now + self._safety_seconds, self._rounds + 1
        return _is_drawn(me, self._rounds, candidates)

    def _finished_lease_waits(self, leases: Collection[Lease], worker: str, finished_long_ago: Collection[str]) -> bool:
        # List once for each finished lease. If the lease still cannot be deleted after that listing, another listing at
        # every turn would not help.
        before, self._finished_keys = self._finished_keys, deletable(leases, worker).intersection(finished_long_ago)
        return not self._finished_keys <= before

    def _list(self, now: float) -> tuple[Shard, ...] | None:
        # Clear the event before the listing. Otherwise the end of a shard during the listing would be missed.
        self._wanted.clear()
        try:
            before, incarnation = self.incarnation, self._bound
            with self._call():
                shards = self._source.shards()
            # Some sources cannot distinguish two streams of the same name. There, only contradictions show that the
            # stream was recreated.
            if isinstance(self._source, IdentifiedSource):
                try:
                    # The incarnation may have become unreadable, for example because a permission was revoked. The last
                    # known one is still valid.
                    with self._call():
                        incarnation = self._source.incarnation() or before or incarnation
                except SourceUnavailable:
                    if not before:
                        raise
                    incarnation = before
            if incarnation != self._bound and created_later(self._bound, incarnation):
                raise SourceUnavailable(f"the listing is of {incarnation}, and {self._bound} was listed before")
        except SourceError as fault:
            is_temporary = isinstance(fault, SourceUnavailable) or self._rejections.should_retry(fault)
            # If the first listing is rejected, a name or a permission is wrong, and a later try would fail, too.
            if not (self.answered or is_temporary):
                raise
            self.want()
            self._note_failure("the shards could not be listed", fault, is_temporary=is_temporary)
            return None
        self._rejections.reset()
        if self._bound and incarnation != self._bound:
            raise StreamRecreated(
                f"stream {self._bound} was deleted and made anew while it was read, and is {incarnation} now"
            )
        self.incarnation = incarnation
        self.answered, self._next_due = True, now + self._safety_seconds
        if isinstance(self._source, MultiStreamSource) and self._source.unlisted_stream_error is not None:
            self._note_failure(
                "the shards of a stream could not be listed", self._source.unlisted_stream_error, is_temporary=True
            )
        else:
            if self._fault:
                log.warning("the shards are listed again")
            self._fault, self.refused = "", False
        self.open_shards, self.listed = sum(shard.open for shard in shards), shards
        if before not in {"", self.incarnation}:
            self.want()  # the stream may have been recreated between the two calls, so these shards may be the old ones
        return shards

    @contextmanager
    def _call(self) -> Iterator[None]:
        self.calling = True
        try:
            with turn_foreign_errors_into_unavailable():
                yield
        finally:
            self.calling = False

    def _note_failure(self, what: str, fault: SourceError, *, is_temporary: bool) -> None:
        # If the reason may pass, the next look comes soon (C18).
        self.refused = is_temporary
        message, before = str(fault), self._fault
        self._fault = message
        if message != before:  # otherwise every turn would log it
            log.warning("%s, trying again until they can: %s", what, message)


class LeaseRestarter:
    """Restarts leases that contradict the listed shards at `start`. If `start` is None, only annotates them.

    Several workers may do this at the same time. Each step is a conditional write of one lease, so it is applied only
    once even if two workers try it. A worker first releases its own leases, after the running batches. It takes leases
    away from other owners, whose next writes are then rejected, because their positions belong to a stream that no
    longer exists. If a step is rejected or gets no response, the pass ends, and the next look continues with the
    remaining steps. A lease whose shard exists always keeps a row, and fencing numbers never decrease.

    While no worker holds the leases, their rows may be deleted. The table then contains no trace of the former stream,
    and a worker that joins treats the group as new. A worker that has seen the stream recreated therefore sets
    `beginning`. While `beginning` is true, the worker creates missing leases at `start`, never at a position of the
    former stream. The flag is reset once a full read and a listing show that every lease exists.

    Args:
        store: The lease table.
        me: The worker's id.
        discovery: The shard listings of the worker.
        start: The position at which leases restart, or None to annotate them only. Any other value raises ValueError.
    """

    def __init__(
        self, store: Store, me: str, discovery: Discovery, start: Literal["TRIM_HORIZON", "LATEST"] | None
    ) -> None:
        if start not in {None, "TRIM_HORIZON", "LATEST"}:
            raise ValueError(f"if_recreated: {start!r} is neither TRIM_HORIZON nor LATEST")
        self._store, self._me, self._discovery = store, me, discovery
        self._start = None if start is None else Position(start)
        self.beginning = False

    def planning_inputs(self, config: Config, history: History) -> tuple[Config, History]:
        """Return the config and history to plan with.

        After the stream was recreated, no deleted row is restored at a position of the former stream.
        """
        if not self.beginning or self._start is None:
            return config, history
        incarnations = {SETTLED, self._discovery.incarnation}
        current_leases = tuple(lease for lease in history.gone if lease.annotation(INCARNATION) in incarnations)
        return evolve(config, initial_position=self._start), evolve(history, gone=current_leases)

    def note_read(self, actions: Collection[Action], leases: Collection[Lease]) -> None:
        """Reset `beginning` if a full read and a listing show that every lease has been created."""
        if leases and not self._discovery.refusing and not any(isinstance(action, Create) for action in actions):
            self.beginning = False

    def resolve(self, leases: Collection[Lease], holdings: Collection[Holding]) -> bool:
        """Restart leases, or annotate them. Return whether any were restarted.

        If the shards were listed in this turn, the caller must have read `leases` before that listing.
        """
        contradictions_found, discovery = self._discovery.contradictions, self._discovery
        self.beginning |= self._start is not None and any(
            contradiction.kind == "made anew" for contradiction in contradictions_found
        )
        restartable = [contradiction for contradiction in contradictions_found if contradiction.restartable]
        if self._start is None or not restartable:
            # A contradiction may be due to an old listing instead of a fault in the table. The next listing then clears
            # it.
            self._annotate(
                [contradiction for contradiction in contradictions_found if contradiction.kind != "old listing"], leases
            )
            return False
        if not discovery.current or (discovery.refusing and holdings):
            return False  # wait for a later look, once the listing is current and nothing is held here
        steps = restarts(discovery.listed, leases, restartable, discovery.incarnation, self._start)
        try:
            for done, step in enumerate(steps):
                if not isinstance(self._take_step(step), Done):
                    log.info("%d of %d leases restarted here, another worker restarts them, too", done, len(steps))
                    return True
        except StoreError as fault:
            log.warning("leases could not be restarted, trying again: %s", fault)
            return False
        if not any(step.marks for step in steps):
            log.warning("%d leases restarted at %s", len(steps), self._start.sequence)
        return True

    def _take_step(self, step: Restart) -> Outcome:
        match step:
            case Restart(None, Lease() as fresh):
                self._store.write(CreateLease(fresh))  # a rejection means that another worker has created it
                return Done(fresh)
            case Restart(Lease() as stored, None):
                return self._store.write(DeleteLease(stored))
            case Restart(Lease() as stored, Lease() as fresh, marks=True):
                return self._store.write(AnnotateLease(stored, INCARNATION, fresh.annotation(INCARNATION) or SETTLED))
            case Restart(Lease() as stored, Lease() as fresh):
                # First take the lease from its owner. The owner's next write, whose position belongs to the former
                # stream, is then rejected.
                freed = Done(stored) if stored.owner is None else self._store.write(ReleaseLease(stored, self._me))
                if not isinstance(freed, Done):
                    return freed
                current_lease = evolve(freed.lease, parents=fresh.parents, hash_range=fresh.hash_range)
                # Write the current incarnation, remove any earlier contradiction, and make the next owner resolve
                # LATEST again.
                annotations = {INCARNATION: self._discovery.incarnation or SETTLED}
                if stored.annotation(CONTRADICTION) is not None:
                    annotations[CONTRADICTION] = SETTLED
                if self._start == LATEST or stored.annotation(LATEST_MS) is not None:
                    annotations[LATEST_MS] = UNPINNED
                if stored.annotation(LATEST_POSITION) is not None:
                    annotations[LATEST_POSITION] = UNPINNED
                return self._store.write(
                    ResetLease(current_lease, fresh.checkpoint, tuple(sorted(annotations.items())))
                )
            case _:
                raise AssertionError(step)

    def _annotate(self, faults: Collection[Contradiction], leases: Collection[Lease]) -> None:
        """Write the contradictions on their rows, for tools that read only the table.

        In some stores an annotation looks like a renewal. There, only two kinds of leases are annotated: those without
        an owner, and those of a recreated stream.
        """
        descriptions = {contradiction.key: contradiction.what for contradiction in faults}
        stream_wide = next((contradiction.what for contradiction in faults if contradiction.of_stream), None)
        current_incarnations = {None, SETTLED, self._discovery.incarnation}
        for lease in leases:
            old_annotation = lease.annotation(CONTRADICTION)
            stream_fault = stream_wide if lease.annotation(INCARNATION) not in current_incarnations else None
            annotation = (
                descriptions.get(lease.key) or stream_fault or (SETTLED if old_annotation is not None else None)
            )
            may_annotate = lease.owner is None or stream_fault is not None or self._store.capabilities.free_annotations
            if annotation not in {None, old_annotation} and may_annotate:
                try:
                    self._store.write(AnnotateLease(lease, CONTRADICTION, annotation or SETTLED))
                except StoreError as fault:
                    log.debug("lease %s: the contradiction could not be written on its row: %s", lease.key, fault)


def expired_unread(lease: Lease) -> str:
    """Describe the records that expired unread because the lease's shard expired before it was finished."""
    first, last = lease.hash_range or ("unknown", "unknown")
    progress = progress_of(lease) or Progress(0.0, "")
    event_times = {
        "the last record before them arrived at": progress.arrived,
        "the shard was last read at": progress.read,
    }
    time_notes = [f"{what} {format_time(time * 1000)}" for what, time in event_times.items() if time is not None]
    return (
        f"lease {lease.key}: its shard expired before it was read to its end; any records of hash keys {first} "
        f"to {last} after {lease.checkpoint.sequence} are lost ({', '.join(time_notes) or 'their times are unknown'}); "
        "reading continues at the beginning of the oldest shards that are left"
    )


def _is_drawn(me: Me, times: int, candidates: frozenset[str]) -> bool:
    """Return whether this worker is among the few candidates that are drawn in draw number `times`."""
    # All workers compute the same digest, so they agree on the draw without communication.
    return me.worker in nsmallest(LISTERS, candidates, key=digest_under(str(times)))
