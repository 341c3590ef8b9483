"""Decides when a worker lists the shards, finds contradictions between the listing and the table, and resolves them.

The shards are listed rarely, because all workers share the service's rate limit. Each listing is also compared with the
lease table to find contradictions (L14). If the stream was deleted and recreated, and `if_recreated` is set, its leases
are restarted.
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
    translate_foreign_errors,
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
    SETTLED_VALUE,
    Contradiction,
    Restart,
    contradictions,
    created_later,
    reported_contradiction,
    restarts,
)
from leasehold.balancer.family import problems, unrelated_shards
from leasehold.balancer.lineage import HOLE_CONFIDENCE, deletable
from leasehold.balancer.model import LATEST, History, Hole, Lease, Me, Position, Shard
from leasehold.errors import SourceError, SourceUnavailable, StoreError
from leasehold.stores.printable import make_safe_logger
from leasehold.stores.protocol import Done, Listing, Outcome, Store
from leasehold.stores.writes import AnnotateLease, CreateLease, DeleteLease, ReleaseLease, ResetLease

log = make_safe_logger(logging.getLogger("leasehold.discovery"))

SAFETY_SECONDS = 300.0

LISTING_WORKERS = 3
"""The number of workers that list the shards if all workers notice the same reason for a listing.

The workers that list the shards are drawn again each time.
"""


class StreamRecreated(SourceError):
    """Raised if the stream to which a worker is bound was deleted, and another stream now has the same name."""


class Discovery:
    """Makes the shard listings of one worker, and compares them with the lease table.

    The shards are listed

    - at the start and after the end of a shard,
    - when three reads of the table have found that the unfinished leases leave the same hash range uncovered,
    - when the row of an unfinished lease has disappeared,
    - when finished leases wait to be deleted, and
    - whenever `safety_seconds` have passed.

    All workers notice at the same time that a hash range is uncovered, or that `safety_seconds` have passed. In these
    cases, only a few randomly drawn workers list the shards.

    Args:
        source: The stream.
        safety_seconds: The longest time between two listings.

    Attributes:
        has_listed: Whether the shards have been listed successfully at least once.
        contradictions: Those contradictions between the last listing and the table that still hold (L14).
        incarnation: The stream's incarnation, or "" if the source does not know it.
        listed_shards: The shards of the last listing.
        open_shards: The number of open shards in the last listing, or None before the first one.
        listing_failed: Whether the last listing failed for all or some streams, for a reason that may be temporary.
        is_calling_source: Whether a call of the source is in progress.
    """

    def __init__(self, source: Source, *, safety_seconds: float = SAFETY_SECONDS) -> None:
        self._source, self._safety_seconds = source, safety_seconds
        self._selective = source if isinstance(source, SelectiveSource) else None  # cached, because the check is slow
        self._listing_requested = Event()
        self._listing_requested.set()
        self._next_due, self._draw_count = 0.0, 0
        self._holes: tuple[Hole, ...] = ()
        self._finished_keys: frozenset[str] = frozenset()
        self._missing_keys: frozenset[str] = frozenset()
        self.has_listed = False
        self._malformed_keys: frozenset[str] = frozenset()
        self._logged_messages: frozenset[str] = frozenset()
        self._last_failure, self._rejections = "", RejectionCounter()
        self.listing_failed = self.is_calling_source = False
        self.open_shards: int | None = None
        self.incarnation = ""
        self.listed_shards: tuple[Shard, ...] = ()
        self.contradictions: tuple[Contradiction, ...] = ()
        self._suspected_keys: frozenset[str] = frozenset()
        self._bound_incarnation = ""

    def bind_incarnation(self, incarnation: str) -> None:
        """Accept only this incarnation of the stream. Once a later one is listed, `shards` raises StreamRecreated.

        Programs that keep positions outside the table need such a binding, because a position is valid in only one
        incarnation. Listings of earlier incarnations are ignored. An empty string removes the binding.
        """
        self._bound_incarnation = incarnation

    @property
    def is_current(self) -> bool:
        """Whether the shards have been listed and no other listing is requested."""
        return self.has_listed and not self._listing_requested.is_set()

    def request_listing(self) -> None:
        """List the shards at the next turn."""
        self._listing_requested.set()

    def shards(
        self,
        now: float,
        listing: Listing,
        me: Me,
        leases: Collection[Lease] = (),
        finished_long_ago: Collection[str] = (),
    ) -> tuple[Shard, ...] | None:
        """Return a new listing of the shards if one is due and possible, or else None.

        If a row of the table cannot be parsed, the ancestors and descendants of its shard are left out, because the
        start of their leases depends on that row.

        Args:
            now: The time by the worker's clock.
            listing: The rows that were read.
            me: This worker and what it knows.
            leases: The leases from which the plan will be made.
            finished_long_ago: The keys of the leases that have been finished for long enough to be deleted.

        Raises:
            SourceError: The stream cannot be used, and has never been listed successfully.
        """
        malformed_keys = frozenset(row.key for row in listing.malformed)
        # If the workers read bulletins (C3), only this worker notices that a listing is due. Otherwise, all owners
        # notice at the same time that a listing is due, and a few of them are drawn.
        owners = () if me.history.hearing is not None else (lease.owner for lease in listing.leases if lease.owner)
        candidates = frozenset((*owners, me.worker))
        if self._malformed_keys - malformed_keys:
            self.request_listing()  # a row was repaired, so the shards that were left out may need leases now
        self._malformed_keys = malformed_keys
        if (
            self.has_unknown_contradiction(leases)
            or self._has_row_disappeared(me)
            or self._hole_persists(me, candidates)
            or self._finished_lease_waits(leases, me.worker, finished_long_ago)
            or self._safety_listing_due(now, me, candidates)
            or self.listing_failed
        ):
            self.request_listing()
        malformed_row_messages = [
            f"row {row.key}: {row.field} {row.why}; until it is fixed, no lease is created for "
            "ancestors and descendants of its shard, and none is deleted"
            for row in listing.malformed
        ]
        shards = self._list(now) if self._listing_requested.is_set() else None
        self._update_contradictions(shards, leases)
        descriptions = [contradiction.what for contradiction in self.contradictions]
        descriptions += [
            f"shard {problem.shard} {problem.what}" if problem.shard else problem.what
            for problem in problems(shards or ())
        ]
        messages = malformed_row_messages + descriptions
        for message in messages:
            if message not in self._logged_messages:  # log each message once, not at every turn
                log.warning("%s", message)
        self._logged_messages = frozenset(messages) or self._logged_messages
        return None if shards is None or self.leases_unusable else unrelated_shards(shards, malformed_keys)

    def has_unknown_contradiction(self, leases: Iterable[Lease]) -> bool:
        """Return whether another worker has annotated a row with a contradiction that this worker does not know yet."""
        if self.leases_unusable:
            return False
        known_keys = {contradiction.key for contradiction in self.contradictions}
        return any(reported_contradiction(lease) for lease in leases if lease.key not in known_keys)

    @property
    def leases_unusable(self) -> bool:
        """Whether the leases of this stream are unusable (L14).

        If so, this worker takes, creates and deletes no leases, and gives up those that it holds.
        """
        # A contradiction about one shard concerns only that shard, but a contradiction about the stream makes every
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

        If there is no new listing, the contradictions that still hold are kept, and new ones are added only if the rows
        show them and they concern the whole stream.
        """
        has_other_incarnation = any(
            lease.annotation(INCARNATION) not in {None, SETTLED_VALUE, self.incarnation} for lease in leases
        )
        if shards is None and not (self.contradictions or (self.incarnation and has_other_incarnation)):
            return
        current_contradictions = contradictions(self.listed_shards, leases, self.incarnation)
        confirmed_keys = (
            self._suspected_keys if shards is not None else {contradiction.key for contradiction in self.contradictions}
        )
        self.contradictions = tuple(
            contradiction
            for contradiction in current_contradictions
            if contradiction.of_stream or contradiction.key in confirmed_keys
        )
        if shards is not None:
            # A contradiction about a shard counts only if a second listing confirms it, because a listing may be stale.
            self._suspected_keys, suspected_keys_before = (
                frozenset(contradiction.key for contradiction in current_contradictions),
                self._suspected_keys,
            )
            if not self._suspected_keys <= suspected_keys_before or any(
                contradiction.kind == "old listing" for contradiction in current_contradictions
            ):
                self.request_listing()
        elif any(contradiction.kind == "old listing" for contradiction in current_contradictions):
            self.request_listing()

    def without_other_streams(self, listing: Listing) -> Listing:
        """Return the listing without leases of streams that this worker does not read."""
        source = self._selective
        if source is None:
            return listing
        # The source does not list the shards of other streams. If the leases of those shards were kept in the listing,
        # they would be deleted as if their shards were gone.
        with translate_foreign_errors():
            return evolve(listing, leases=tuple(lease for lease in listing.leases if source.reads(lease)))

    def deletable(self, lease: Lease, shards: tuple[Shard, ...]) -> bool:
        """Return whether a lease may be deleted.

        A lease may be deleted if its shard is finished and listed, or if its shard no longer exists.

        If any row cannot be parsed, no lease may be deleted, because such a row may belong to a child or parent of the
        shard.
        """
        if self._malformed_keys:
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
            self.request_listing()  # list again, because the store rejects the delete if the row changes before it
        return shard_is_gone

    def _has_row_disappeared(self, me: Me) -> bool:
        # If a row has disappeared, list the shards immediately, because the lease then has no owner, and only workers
        # that have read the row remember its position.
        missing_keys_before, self._missing_keys = (
            self._missing_keys,
            frozenset(lease.key for lease in me.history.gone if not lease.ended),
        )
        return not self._missing_keys <= missing_keys_before

    def _hole_persists(self, me: Me, candidates: frozenset[str]) -> bool:
        # List the shards only at every third full read that shows the hole. Otherwise, a hole that remains after a
        # listing would cause another listing at every turn.
        holes_changed, self._holes = me.history.holes != self._holes, me.history.holes
        confirmed_counts = [hole.times for hole in me.history.holes if hole.times % HOLE_CONFIDENCE == 0]
        return holes_changed and any(_is_drawn(me, count, candidates) for count in confirmed_counts)

    def _safety_listing_due(self, now: float, me: Me, candidates: frozenset[str]) -> bool:
        if now < self._next_due or not self.has_listed:
            return not self.has_listed
        # The listings of all workers are due at the same time, so a few workers are drawn to make them.
        self._next_due, self._draw_count = now + self._safety_seconds, self._draw_count + 1
        return _is_drawn(me, self._draw_count, candidates)

    def _finished_lease_waits(self, leases: Collection[Lease], worker: str, finished_long_ago: Collection[str]) -> bool:
        # List the shards only once for each finished lease. If the lease still cannot be deleted after that listing,
        # another listing at every turn would not help.
        finished_keys_before, self._finished_keys = (
            self._finished_keys,
            deletable(leases, worker).intersection(finished_long_ago),
        )
        return not self._finished_keys <= finished_keys_before

    def _list(self, now: float) -> tuple[Shard, ...] | None:
        # Clear the event before the listing. Otherwise, the end of a shard during the listing would be missed.
        self._listing_requested.clear()
        try:
            previous_incarnation, incarnation = self.incarnation, self._bound_incarnation
            with self._call():
                shards = self._source.shards()
            # Some sources cannot distinguish two streams of the same name. With such a source, only contradictions show
            # that the stream was recreated.
            if isinstance(self._source, IdentifiedSource):
                try:
                    # The incarnation may not be readable any more, for example because a permission was revoked. In
                    # that case, use the last known one.
                    with self._call():
                        incarnation = self._source.incarnation() or previous_incarnation or incarnation
                except SourceUnavailable:
                    if not previous_incarnation:
                        raise
                    incarnation = previous_incarnation
            if incarnation != self._bound_incarnation and created_later(self._bound_incarnation, incarnation):
                raise SourceUnavailable(
                    f"the listing is of {incarnation}, and {self._bound_incarnation} was listed before"
                )
        except SourceError as fault:
            is_temporary = isinstance(fault, SourceUnavailable) or self._rejections.should_retry(fault)
            # If the very first listing is rejected, a name or a permission is wrong, and a later attempt would fail,
            # too.
            if not (self.has_listed or is_temporary):
                raise
            self.request_listing()
            self._note_failure("the shards could not be listed", fault, is_temporary=is_temporary)
            return None
        self._rejections.reset()
        if self._bound_incarnation and incarnation != self._bound_incarnation:
            raise StreamRecreated(
                f"stream {self._bound_incarnation} was deleted and made anew while it was read, and is {incarnation} "
                "now"
            )
        self.incarnation = incarnation
        self.has_listed, self._next_due = True, now + self._safety_seconds
        if isinstance(self._source, MultiStreamSource) and self._source.unlisted_stream_error is not None:
            self._note_failure(
                "the shards of a stream could not be listed", self._source.unlisted_stream_error, is_temporary=True
            )
        else:
            if self._last_failure:
                log.warning("the shards are listed again")
            self._last_failure, self.listing_failed = "", False
        self.open_shards, self.listed_shards = sum(shard.open for shard in shards), shards
        if previous_incarnation not in {"", self.incarnation}:
            # The stream may have been recreated between the two calls, so these shards may be the old ones.
            self.request_listing()
        return shards

    @contextmanager
    def _call(self) -> Iterator[None]:
        self.is_calling_source = True
        try:
            with translate_foreign_errors():
                yield
        finally:
            self.is_calling_source = False

    def _note_failure(self, summary: str, fault: SourceError, *, is_temporary: bool) -> None:
        # After a temporary failure, the next look comes soon (C18).
        self.listing_failed = is_temporary
        message, previous_message = str(fault), self._last_failure
        self._last_failure = message
        if message != previous_message:  # otherwise every turn would log the same message
            log.warning("%s, trying again until they can: %s", summary, message)


class LeaseRestarter:
    """Resets leases that contradict the listed shards to the position `start`. If `start` is None, only annotates them.

    Several workers may restart leases at the same time. Each step is a conditional write of one lease, so it is applied
    only once even if two workers try it. A worker first releases its own leases, once the running batches have ended.
    It then takes leases away from other owners, because their positions belong to a stream that no longer exists. The
    next writes of those owners are rejected. If a step is rejected or gets no response, the pass ends, and the next
    look continues with the remaining steps. A lease whose shard exists always keeps a row, and fencing numbers never
    decrease.

    While no worker holds the leases, their rows may be deleted. The table then contains no trace of the former stream,
    and a worker that joins treats the group as new. Therefore, a worker that has noticed that the stream was recreated
    sets `is_restarting`. While this flag is true, the worker creates missing leases at `start`, and never at a position
    of the former stream. The flag is reset once a full read and a listing show that every lease exists.

    Args:
        store: The lease table.
        me: The worker's id.
        discovery: The shard listings of the worker.
        start: TRIM_HORIZON or LATEST, the position at which leases restart, or None to only annotate them.
    """

    def __init__(
        self, store: Store, me: str, discovery: Discovery, start: Literal["TRIM_HORIZON", "LATEST"] | None
    ) -> None:
        if start not in {None, "TRIM_HORIZON", "LATEST"}:
            raise ValueError(f"if_recreated: {start!r} is neither TRIM_HORIZON nor LATEST")
        self._store, self._me, self._discovery = store, me, discovery
        self._restart_position = None if start is None else Position(start)
        self.is_restarting = False

    def planning_inputs(self, config: Config, history: History) -> tuple[Config, History]:
        """Return the configuration and the history from which to plan.

        If the stream was recreated, the plan is thereby prevented from restoring a row at a position of the former
        stream.
        """
        if not self.is_restarting or self._restart_position is None:
            return config, history
        incarnations = {SETTLED_VALUE, self._discovery.incarnation}
        current_leases = tuple(lease for lease in history.gone if lease.annotation(INCARNATION) in incarnations)
        return evolve(config, initial_position=self._restart_position), evolve(history, gone=current_leases)

    def note_read(self, actions: Collection[Action], leases: Collection[Lease]) -> None:
        """Reset `is_restarting` if a plan from a full read and a listing creates no lease, because all leases exist."""
        if leases and not self._discovery.leases_unusable and not any(isinstance(action, Create) for action in actions):
            self.is_restarting = False

    def restart_or_annotate(self, leases: Collection[Lease], holdings: Collection[Holding]) -> bool:
        """Restart or annotate the leases that contradict the listing. Return whether any were restarted.

        If the shards were listed in this turn, the caller must have read `leases` before that listing.
        """
        contradictions_found, discovery = self._discovery.contradictions, self._discovery
        self.is_restarting |= self._restart_position is not None and any(
            contradiction.kind == "made anew" for contradiction in contradictions_found
        )
        restartable = [contradiction for contradiction in contradictions_found if contradiction.restartable]
        if self._restart_position is None or not restartable:
            # Do not annotate contradictions that may come from an old listing, because the next listing may resolve
            # them.
            self._annotate(
                [contradiction for contradiction in contradictions_found if contradiction.kind != "old listing"], leases
            )
            return False
        if not discovery.is_current or (discovery.leases_unusable and holdings):
            return False  # wait until the listing is current and this worker holds no leases
        steps = restarts(discovery.listed_shards, leases, restartable, discovery.incarnation, self._restart_position)
        try:
            for done_count, step in enumerate(steps):
                if not isinstance(self._take_step(step), Done):
                    log.info(
                        "%d of %d leases restarted here, another worker restarts them, too", done_count, len(steps)
                    )
                    return True
        except StoreError as fault:
            log.warning("leases could not be restarted, trying again: %s", fault)
            return False
        if not any(step.marks for step in steps):
            log.warning("%d leases restarted at %s", len(steps), self._restart_position.sequence)
        return True

    def _take_step(self, step: Restart) -> Outcome:
        match step:
            case Restart(None, Lease() as new_lease):
                self._store.write(CreateLease(new_lease))  # a rejection means that another worker has created it
                return Done(new_lease)
            case Restart(Lease() as stored_lease, None):
                return self._store.write(DeleteLease(stored_lease))
            case Restart(Lease() as stored_lease, Lease() as new_lease, marks=True):
                return self._store.write(
                    AnnotateLease(stored_lease, INCARNATION, new_lease.annotation(INCARNATION) or SETTLED_VALUE)
                )
            case Restart(Lease() as stored_lease, Lease() as new_lease):
                # First take the lease away from its owner. Then the owner's next write, whose position belongs to the
                # former stream, is rejected.
                release_outcome = (
                    Done(stored_lease)
                    if stored_lease.owner is None
                    else self._store.write(ReleaseLease(stored_lease, self._me))
                )
                if not isinstance(release_outcome, Done):
                    return release_outcome
                released_lease = evolve(
                    release_outcome.lease, parents=new_lease.parents, hash_range=new_lease.hash_range
                )
                # Write the current incarnation, remove any earlier contradiction, and make the next owner resolve
                # LATEST again.
                annotations = {INCARNATION: self._discovery.incarnation or SETTLED_VALUE}
                if stored_lease.annotation(CONTRADICTION) is not None:
                    annotations[CONTRADICTION] = SETTLED_VALUE
                if self._restart_position == LATEST or stored_lease.annotation(LATEST_MS) is not None:
                    annotations[LATEST_MS] = UNPINNED
                if stored_lease.annotation(LATEST_POSITION) is not None:
                    annotations[LATEST_POSITION] = UNPINNED
                return self._store.write(
                    ResetLease(released_lease, new_lease.checkpoint, tuple(sorted(annotations.items())))
                )
            case _:
                raise AssertionError(step)

    def _annotate(self, faults: Collection[Contradiction], leases: Collection[Lease]) -> None:
        """Write the contradictions on the rows of their leases, for tools that read only the table.

        In some stores, other workers would mistake an annotation for a renewal. In such stores, only leases without an
        owner and leases of a recreated stream are annotated.
        """
        descriptions = {contradiction.key: contradiction.what for contradiction in faults}
        stream_description = next((contradiction.what for contradiction in faults if contradiction.of_stream), None)
        current_incarnations = {None, SETTLED_VALUE, self._discovery.incarnation}
        for lease in leases:
            old_annotation = lease.annotation(CONTRADICTION)
            stream_fault = stream_description if lease.annotation(INCARNATION) not in current_incarnations else None
            annotation = (
                descriptions.get(lease.key) or stream_fault or (SETTLED_VALUE if old_annotation is not None else None)
            )
            may_annotate = lease.owner is None or stream_fault is not None or self._store.capabilities.free_annotations
            if annotation not in {None, old_annotation} and may_annotate:
                try:
                    self._store.write(AnnotateLease(lease, CONTRADICTION, annotation or SETTLED_VALUE))
                except StoreError as fault:
                    log.debug("lease %s: the contradiction could not be written on its row: %s", lease.key, fault)


def describe_unread_records(lease: Lease) -> str:
    """Return a message about the records that are lost because the lease's shard expired before it was read."""
    first_hash_key, last_hash_key = lease.hash_range or ("unknown", "unknown")
    progress = progress_of(lease) or Progress(0.0, "")
    event_times = {
        "the last record before them arrived at": progress.arrived,
        "the shard was last read at": progress.read,
    }
    time_notes = [f"{label} {format_time(time * 1000)}" for label, time in event_times.items() if time is not None]
    return (
        f"lease {lease.key}: its shard expired before it was read to its end; any records of hash keys "
        f"{first_hash_key} "
        f"to {last_hash_key} after {lease.checkpoint.sequence} are lost "
        f"({', '.join(time_notes) or 'their times are unknown'}); "
        "reading continues at the beginning of the oldest shards that are left"
    )


def _is_drawn(me: Me, draw_number: int, candidates: frozenset[str]) -> bool:
    """Return whether this worker is one of the `LISTING_WORKERS` candidates in the draw with this number."""
    # All workers compute the same digest, so they agree on the draw without communication.
    return me.worker in nsmallest(LISTING_WORKERS, candidates, key=digest_under(str(draw_number)))
