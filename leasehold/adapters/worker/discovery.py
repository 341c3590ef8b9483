"""Discovery: when a worker lists the shards, what listing and table contradict each other in, and the cure for that.

Shards are listed seldom, because all workers share the service's rate limit. What the listing and the table contradict
each other in (L14) is found by the same look. Where it is asked for, leases of a former stream begin anew.
"""

import logging
from collections.abc import Collection, Iterable
from heapq import nsmallest
from threading import Event
from typing import Literal

from attrs import evolve

from leasehold.adapters.inputs import said_moment
from leasehold.adapters.sources.protocol import (
    REJECTED_TRIES,
    Identified,
    Selective,
    Several,
    Source,
    TransientRejection,
    foreign_as_unavailable,
)
from leasehold.adapters.worker.holding import Holding
from leasehold.adapters.worker.notes import LATEST_MS, LATEST_POSITION, UNPINNED
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
    made_later,
    noted_on,
    restarts,
)
from leasehold.balancer.family import apart, problems
from leasehold.balancer.lineage import HOLE_CONFIDENCE, ripe
from leasehold.balancer.model import LATEST, History, Hole, Lease, Me, Position, Shard
from leasehold.errors import SourceError, SourceUnavailable, StoreError
from leasehold.stores.printable import escaped
from leasehold.stores.protocol import Done, Listing, Outcome, Store
from leasehold.stores.writes import AnnotateLease, CreateLease, DeleteLease, ReleaseLease, ResetLease

log = escaped(logging.getLogger("leasehold.discovery"))

SAFETY_SECONDS = 300.0

LISTERS = 3
"""So many workers list where all see the same cause to; others are drawn the next time."""


class MadeAnew(SourceError):
    """The stream that a bound worker reads was deleted, and another one has its name."""


class Discovery:
    """The shard listings of one worker.

    A listing is wanted at the start, after a shard end, when the unended leases have left the same
    hash range uncovered three times, when the row of an unended lease is gone, when finished leases wait to be
    deleted, and every `safety_seconds`.
    A whole fleet sees a hole, or that this time has passed: then a few workers list, drawn anew each time.
    `open_shards` counts the open shards of the last listing, `listed`; `answered` tells whether there was one.
    `refused` tells whether the last one that was wanted could not be had, or not of all streams, for a reason that may
    pass.
    `incarnation` is that of the stream, "" where the source cannot tell it; `contradictions` are those between the last
    listing and the table that still hold (L14).
    """

    def __init__(self, source: Source, *, safety_seconds: float = SAFETY_SECONDS) -> None:
        self._source, self._safety_seconds = source, safety_seconds
        self._selective = source if isinstance(source, Selective) else None  # asked once: each look would pay for it
        self._wanted = Event()
        self._wanted.set()
        self._next, self._rounds = 0.0, 0
        self._holes: tuple[Hole, ...] = ()
        self._ripe: frozenset[str] = frozenset()
        self._vanished: frozenset[str] = frozenset()
        self.answered = False
        self._unread: frozenset[str] = frozenset()
        self._said: frozenset[str] = frozenset()
        self._fault, self._rejections = "", 0
        self.refused = False
        self.open_shards: int | None = None
        self.incarnation = ""
        self.listed: tuple[Shard, ...] = ()
        self.contradictions: tuple[Contradiction, ...] = ()
        self._suspected: frozenset[str] = frozenset()
        self._bound = ""

    def bind(self, incarnation: str) -> None:
        """Read this incarnation alone: once a later one is listed, `shards` raises MadeAnew.

        For a program that keeps positions outside of the table, each of which counts records of one incarnation. An
        answer that tells of an earlier one counts as none. "" binds to none.
        """
        self._bound = incarnation

    @property
    def current(self) -> bool:
        """Whether there was a listing, and nothing asks for another one."""
        return self.answered and not self._wanted.is_set()

    def want(self) -> None:
        """List at the next turn."""
        self._wanted.set()

    def shards(self, now: float, listing: Listing, me: Me, leases: Collection[Lease] = ()) -> tuple[Shard, ...] | None:
        """The listing if one is wanted now and can be had, else None; `leases` as the plan will see them.

        While a row of the table cannot be read, the shards of its line are left out: only that row tells where
        their leases begin. Raises SourceError if the stream cannot be used and never could.
        """
        unread = frozenset(row.key for row in listing.malformed)
        # Under bulletins (C3) this worker alone has cause to list now; else every owner sees the same cause.
        owners = () if me.history.hearing is not None else (each.owner for each in listing.leases if each.owner)
        crowd = frozenset((*owners, me.worker))
        if self._unread - unread:
            self.want()  # a row was mended: leases for the shards left out may be due
        self._unread = unread
        if (
            self.unheard(leases)
            or self._row_vanished(me)
            or self._hole_lasts(me, crowd)
            or self._ripened(leases, me.worker)
            or self._overdue(now, me, crowd)
            or self.refused
        ):
            self.want()
        malformed = [
            f"row {row.key}: {row.field} {row.why}; until it is mended no lease is made for shards of its line, "
            "and none is deleted"
            for row in listing.malformed
        ]
        shards = self._list(now) if self._wanted.is_set() else None
        self._judge(shards, leases)
        told = [each.what for each in self.contradictions]
        told += [f"shard {each.shard} {each.what}" if each.shard else each.what for each in problems(shards or ())]
        texts = malformed + told
        for text in texts:
            if text not in self._said:  # not at every turn
                log.warning("%s", text)
        self._said = frozenset(texts) or self._said
        return None if shards is None or self.refusing else apart(shards, unread)

    def unheard(self, leases: Iterable[Lease]) -> bool:
        """Whether another worker noted a contradiction on one of these rows, and this one has not seen it yet."""
        if self.refusing:
            return False
        known = {each.key for each in self.contradictions}
        return any(noted_on(lease) for lease in leases if lease.key not in known)

    @property
    def refusing(self) -> bool:
        """Whether no lease of the stream can be trusted: none is taken, created, deleted, or kept (L14)."""
        # Of a single shard it is enough to leave that shard alone; of the stream every position may count other
        # records.
        return any(each.of_stream for each in self.contradictions)

    @property
    def other_stream(self) -> str | None:
        """The sentence for a table whose leases are those of another stream, or None."""
        return next((each.what for each in self.contradictions if each.kind == "another stream"), None)

    def _judge(self, shards: tuple[Shard, ...] | None, leases: Collection[Lease]) -> None:
        """Find what contradicts; without a listing, what still does, or what other workers have noted since."""
        strange = any(lease.note(INCARNATION) not in {None, SETTLED, self.incarnation} for lease in leases)
        if shards is None and not (self.contradictions or (self.incarnation and strange)):
            return
        found = contradictions(self.listed, leases, self.incarnation)
        known = self._suspected if shards is not None else {each.key for each in self.contradictions}
        self.contradictions = tuple(each for each in found if each.of_stream or each.key in known)
        if shards is not None:
            # What one listing alone shows of a shard is listed once more: a listing may be a moment old.
            self._suspected, before = frozenset(each.key for each in found), self._suspected
            if not self._suspected <= before or any(each.kind == "old listing" for each in found):
                self.want()
        elif any(each.kind == "old listing" for each in found):
            self.want()

    def concerning(self, listing: Listing) -> Listing:
        """The listing without leases of streams that this worker does not read."""
        source = self._selective
        if source is None:
            return listing
        # Their shards are in no listing of this source: they would be deleted as shards that are gone.
        with foreign_as_unavailable():
            return evolve(listing, leases=tuple(lease for lease in listing.leases if source.reads(lease)))

    def deletable(self, lease: Lease, shards: tuple[Shard, ...]) -> bool:
        """Whether a lease may go: its shard is listed (and finished), or the service says that it is gone.

        None may while a row cannot be read: it may be that of a child or parent.
        """
        if self._unread:
            return False
        if any(shard.id == lease.key for shard in shards):
            return True
        try:
            with foreign_as_unavailable():
                gone = self._source.gone(lease.key)
        except SourceError as fault:
            log.warning("a shard could not be looked up, its lease stays: %s", fault)
            return False
        if gone:
            self.want()  # the row may change before it is deleted, and stay: it is asked for once more
        return gone

    def _row_vanished(self, me: Me) -> bool:
        # At once: while its row is gone, a lease is held by nobody, and only those who have seen it know where it was.
        before, self._vanished = self._vanished, frozenset(lease.key for lease in me.history.gone if not lease.ended)
        return not self._vanished <= before

    def _hole_lasts(self, me: Me, crowd: frozenset[str]) -> bool:
        # At every third full reading that shows the hole: one that no listing fills is not listed for at every turn.
        fresh, self._holes = me.history.holes != self._holes, me.history.holes
        lasting = [hole.times for hole in me.history.holes if hole.times % HOLE_CONFIDENCE == 0]
        return fresh and any(_drawn(me, times, crowd) for times in lasting)

    def _overdue(self, now: float, me: Me, crowd: frozenset[str]) -> bool:
        if now < self._next or not self.answered:
            return not self.answered
        # The whole fleet is due in the same moments: some are drawn, so that not all of it asks the service at once.
        self._next, self._rounds = now + self._safety_seconds, self._rounds + 1
        return _drawn(me, self._rounds, crowd)

    def _ripened(self, leases: Collection[Lease], worker: str) -> bool:
        # Once for each finished lease: where a listing did not help, it is not repeated at every turn.
        before, self._ripe = self._ripe, ripe(leases, worker)
        return not self._ripe <= before

    def _list(self, now: float) -> tuple[Shard, ...] | None:
        # Cleared first: a shard may end while we list.
        self._wanted.clear()
        try:
            before, present = self.incarnation, self._bound
            with foreign_as_unavailable():
                shards = self._source.shards()
            # Of a source that cannot tell streams of one name apart contradictions alone show that it was made anew.
            if isinstance(self._source, Identified):
                try:
                    # What was once told and is not told now (a right was taken away) still holds.
                    with foreign_as_unavailable():
                        present = self._source.incarnation() or before or present
                except SourceUnavailable:
                    if not before:
                        raise
                    present = before
            if present != self._bound and made_later(self._bound, present):
                raise SourceUnavailable(f"the answer is of {present}, and {self._bound} was listed before")
        except SourceError as fault:
            passing = isinstance(fault, SourceUnavailable) or self._may_pass(fault)
            # Rejected before there ever was a response: a name or a right is wrong, and waiting does not help.
            if not (self.answered or passing):
                raise
            self.want()
            self._missed("the shards could not be listed", fault, passing=passing)
            return None
        self._rejections = 0
        if self._bound and present != self._bound:
            raise MadeAnew(f"stream {self._bound} was deleted and made anew while it was read, and is {present} now")
        self.incarnation = present
        self.answered, self._next = True, now + self._safety_seconds
        if isinstance(self._source, Several) and self._source.unlisted is not None:
            self._missed("the shards of a stream could not be listed", self._source.unlisted, passing=True)
        else:
            if self._fault:
                log.warning("the shards are listed again")
            self._fault, self.refused = "", False
        self.open_shards, self.listed = sum(shard.open for shard in shards), shards
        if before not in {"", self.incarnation}:
            self.want()  # it may have been made anew between the two answers: these shards may be the former ones
        return shards

    def _may_pass(self, fault: SourceError) -> bool:
        """Whether this rejection is one of the first few in a row of a kind that may pass by itself."""
        self._rejections += 1
        return isinstance(fault, TransientRejection) and self._rejections <= REJECTED_TRIES

    def _missed(self, what: str, fault: SourceError, *, passing: bool) -> None:
        # If the reason may pass by itself, the next look comes soon (C18).
        self.refused = passing
        text, before = str(fault), self._fault
        self._fault = text
        if text != before:  # at every turn it would fill the log
            log.warning("%s, trying again until they can: %s", what, text)


class Recreated:
    """The cure for contradictions: leases begin anew at `start`, or they are noted where it is None.

    Several workers do so at once. Each step is a conditional write of one lease, so that two workers which take the
    same step do it once. A worker first lets its own leases go, batches in hand included; those of others are taken
    from them, and their next write is refused: what they hold counts records of a stream that is no more. A step that
    is refused, or not answered, ends the pass; the next look begins with what is left. No lease whose shard is there
    is ever without its row, and no number that handlers are given falls.

    Rows may be deleted meanwhile, while nobody holds them. Then the table says nothing of the former stream, and a
    worker that joins takes it for a new group's. So whoever has seen that the stream was made anew is `beginning` until
    a whole reading with a listing leaves no lease to make: it begins those without a row at `start`, and none where the
    former stream's was.
    Raises ValueError for another start.
    """

    def __init__(
        self, store: Store, me: str, discovery: Discovery, start: Literal["TRIM_HORIZON", "LATEST"] | None
    ) -> None:
        if start not in {None, "TRIM_HORIZON", "LATEST"}:
            raise ValueError(f"if_recreated: {start!r} is neither TRIM_HORIZON nor LATEST")
        self._store, self._me, self._discovery = store, me, discovery
        self._start = None if start is None else Position(start)
        self.beginning = False

    def planned(self, config: Config, history: History) -> tuple[Config, History]:
        """The config and history to plan by; while the stream starts over, former places restore no deleted row."""
        if not self.beginning or self._start is None:
            return config, history
        of_this = {SETTLED, self._discovery.incarnation}
        kept = tuple(lease for lease in history.gone if lease.note(INCARNATION) in of_this)
        return evolve(config, initial_position=self._start), evolve(history, gone=kept)

    def looked(self, actions: Collection[Action], leases: Collection[Lease]) -> None:
        """After a reading of the whole table and a listing: whether every lease has been made by now."""
        if leases and not self._discovery.refusing and not any(isinstance(action, Create) for action in actions):
            self.beginning = False

    def mended(self, leases: Collection[Lease], holdings: Collection[Holding]) -> bool:
        """Whether leases began anew by now; `leases` as read before the shards were listed, or with no new listing."""
        found, discovery = self._discovery.contradictions, self._discovery
        self.beginning |= self._start is not None and any(each.kind == "made anew" for each in found)
        mendable = [each for each in found if each.mendable]
        if self._start is None or not mendable:
            # What an old listing shows is no fault of the table, and the next listing clears it.
            self._note([each for each in found if each.kind != "old listing"], leases)
            return False
        if not discovery.current or (discovery.refusing and holdings):
            return False  # at a look to come: once the shards are listed as they are, and nothing is held here
        steps = restarts(discovery.listed, leases, mendable, discovery.incarnation, self._start)
        try:
            for done, step in enumerate(steps):
                if not isinstance(self._taken(step), Done):
                    log.info("%d of %d leases begin anew here, another worker writes them too", done, len(steps))
                    return True
        except StoreError as fault:
            log.warning("leases that were to begin anew are tried again: %s", fault)
            return False
        if not any(step.marks for step in steps):
            log.warning("%d leases begin anew at %s", len(steps), self._start.sequence)
        return True

    def _taken(self, step: Restart) -> Outcome:
        match step:
            case Restart(None, Lease() as fresh):
                self._store.write(CreateLease(fresh))  # refused: another worker was faster, which is as good
                return Done(fresh)
            case Restart(Lease() as stored, None):
                return self._store.write(DeleteLease(stored))
            case Restart(Lease() as stored, Lease() as fresh, marks=True):
                return self._store.write(AnnotateLease(stored, INCARNATION, fresh.note(INCARNATION) or SETTLED))
            case Restart(Lease() as stored, Lease() as fresh):
                # First from its owner, whose next write is then refused: what it holds counts records of the former
                # stream.
                freed = Done(stored) if stored.owner is None else self._store.write(ReleaseLease(stored, self._me))
                if not isinstance(freed, Done):
                    return freed
                seen = evolve(freed.lease, parents=fresh.parents, hash_range=fresh.hash_range)
                # It notes the present incarnation, nothing that was wrong before, and LATEST for the next owner to pin.
                notes = {INCARNATION: self._discovery.incarnation or SETTLED}
                if stored.note(CONTRADICTION) is not None:
                    notes[CONTRADICTION] = SETTLED
                if self._start == LATEST or stored.note(LATEST_MS) is not None:
                    notes[LATEST_MS] = UNPINNED
                if stored.note(LATEST_POSITION) is not None:
                    notes[LATEST_POSITION] = UNPINNED
                return self._store.write(ResetLease(seen, fresh.checkpoint, tuple(sorted(notes.items()))))
            case _:
                raise AssertionError(step)

    def _note(self, found: Collection[Contradiction], leases: Collection[Lease]) -> None:
        """Note it for readers of the table; where that costs a renewal, only if the stream was created again."""
        wrong = {each.key: each.what for each in found}
        whole = next((each.what for each in found if each.of_stream), None)
        present = {None, SETTLED, self._discovery.incarnation}
        for lease in leases:
            before = lease.note(CONTRADICTION)
            strange = whole if lease.note(INCARNATION) not in present else None
            said = wrong.get(lease.key) or strange or (SETTLED if before is not None else None)
            free = lease.owner is None or strange is not None or self._store.capabilities.free_notes
            if said not in {None, before} and free:
                try:
                    self._store.write(AnnotateLease(lease, CONTRADICTION, said or SETTLED))
                except StoreError as fault:
                    log.debug("lease %s: not noted: %s", lease.key, fault)


def expired_unread(lease: Lease) -> str:
    """Describe the records that expired unread, given a lease whose shard is gone before it was finished."""
    first, last = lease.hash_range or ("unknown", "unknown")
    progress = progress_of(lease) or Progress(0.0, "")
    times = {"the last record before them arrived at": progress.arrived, "the shard was last read at": progress.read}
    known = [f"{what} {said_moment(time * 1000)}" for what, time in times.items() if time is not None]
    return (
        f"lease {lease.key}: its shard expired before it was read to its end; any records of hash keys {first} "
        f"to {last} after {lease.checkpoint.sequence} are lost ({', '.join(known) or 'their times are unknown'}); "
        "reading continues at the beginning of the oldest shards that are left"
    )


def _drawn(me: Me, times: int, crowd: frozenset[str]) -> bool:
    """Whether this worker is drawn from the crowd, the `times`-th time that there is cause."""
    # By a digest that all compute alike: nobody has to be asked who lists this time.
    return me.worker in nsmallest(LISTERS, crowd, key=digest_under(str(times)))
