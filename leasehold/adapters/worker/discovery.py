"""The decision when to list a stream's shards: seldom, because all workers share the service's rate limit."""

import logging
from collections.abc import Callable, Collection
from heapq import nsmallest
from threading import Event

from attrs import evolve

from leasehold.adapters.sources.protocol import Selective, Source, SourceError, SourceUnavailable
from leasehold.balancer.chance import digest_under
from leasehold.balancer.model import Hole, Lease, Me, Problem, Shard
from leasehold.balancer.shards.ancestry import apart, problems
from leasehold.balancer.shards.cleanup import ripe
from leasehold.balancer.shards.lineage import HOLE_CONFIDENCE
from leasehold.stores.printable import escaped
from leasehold.stores.protocol import Listing

log = escaped(logging.getLogger("leasehold.discovery"))

SAFETY_SECONDS = 300.0

LISTERS = 3
"""Where all workers see the same cause to list, so many of them do; others are drawn the next time."""


class Discovery:
    """The shard listings of one worker.

    A listing is wanted at the start, after a shard end, when the unended leases have left the same
    hash range uncovered three times, when the row of an unended lease is gone, when finished leases wait to be
    deleted, and every `safety_seconds`.
    A whole fleet sees a hole, or that this time has passed: then a few workers list, drawn anew each time.
    `open_shards` counts the open shards of the last listing; `answered` tells whether there was one.
    """

    def __init__(self, source: Source, *, safety_seconds: float = SAFETY_SECONDS) -> None:
        self._source, self._safety_seconds = source, safety_seconds
        self._wanted = Event()
        self._wanted.set()
        self._next, self._rounds = 0.0, 0
        self._holes: tuple[Hole, ...] = ()
        self._ripe: frozenset[str] = frozenset()
        self._vanished: frozenset[str] = frozenset()
        self.answered = False
        self._unread: frozenset[str] = frozenset()
        self._said: frozenset[str] = frozenset()
        self._fault = ""
        self.open_shards: int | None = None

    def want(self) -> None:
        """List at the next turn."""
        self._wanted.set()

    def shards(self, now: float, listing: Listing, me: Me, leases: Collection[Lease] = ()) -> tuple[Shard, ...] | None:
        """The listing if one is wanted now and can be had, else None; `leases` as the plan will see them.

        While a row of the table cannot be read, the shards of its line are left out: only that row tells where
        their leases begin. Raises SourceError if the stream cannot be used and never could.
        """
        crowd, unread = _crowd(listing, me), frozenset(row.key for row in listing.malformed)
        if self._unread - unread:
            self.want()  # a row was mended: leases for the shards left out may be due
        self._unread = unread
        if (
            self._row_vanished(me)
            or self._hole_lasts(me, crowd)
            or self._ripened(leases, me.worker)
            or self._overdue(now, me, crowd)
        ):
            self.want()
        malformed = [
            f"row {row.key}: {row.field} {row.why}; until it is mended no lease is made for shards of its line, "
            "and none is deleted"
            for row in listing.malformed
        ]
        shards = self._list(now) if self._wanted.is_set() else None
        self._say(malformed + [_told(problem) for problem in problems(shards or ())])
        return shards if shards is None else apart(shards, unread)

    def concerning(self, listing: Listing) -> Listing:
        """The listing without leases of streams that this worker does not read."""
        source = self._source
        if not isinstance(source, Selective):
            return listing
        return evolve(listing, leases=tuple(lease for lease in listing.leases if source.reads(lease)))

    def deletable(self, lease: Lease, shards: tuple[Shard, ...]) -> bool:
        """Whether a lease may go: its shard is listed (and finished), or the service says that it is gone.

        None may while a row cannot be read: it may be that of a child or parent.
        """
        if self._unread:
            return False
        if any(shard.id == lease.key for shard in shards):
            return True
        gone = self._confirmed(lambda: self._source.gone(lease.key))
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
            shards = self._source.shards()
        except SourceError as fault:
            if not (self.answered or isinstance(fault, SourceUnavailable)):
                raise
            self.want()
            if (text := str(fault)) != self._fault:  # at every turn it would bury the rest of the log
                log.warning("the shards could not be listed, trying again at each turn: %s", text)
            self._fault = text
            return None
        if self._fault:
            log.warning("the shards are listed again")
        self.answered, self._next, self._fault = True, now + self._safety_seconds, ""
        self.open_shards = sum(shard.open for shard in shards)
        return shards

    def _confirmed(self, question: Callable[[], bool]) -> bool:
        try:
            return question()
        except SourceError as fault:
            log.warning("a shard could not be looked up, its lease stays: %s", fault)
            return False

    def _say(self, texts: list[str]) -> None:
        """Log what is wrong once, not at every turn."""
        for text in texts:
            if text not in self._said:
                log.warning("%s", text)
        if texts:
            self._said = frozenset(texts)


def _crowd(listing: Listing, me: Me) -> frozenset[str]:
    """The workers that would list shards for the same reason now; under bulletins (C3) this worker alone."""
    if me.history.hearing is not None:
        return frozenset({me.worker})
    return frozenset({lease.owner for lease in listing.leases if lease.owner is not None} | {me.worker})


def _drawn(me: Me, times: int, crowd: frozenset[str]) -> bool:
    """Whether this worker is drawn from the crowd, the `times`-th time that there is cause."""
    return me.worker in nsmallest(LISTERS, crowd, key=digest_under(str(times)))


def _told(problem: Problem) -> str:
    return f"shard {problem.shard} {problem.what}" if problem.shard else problem.what
