"""When to list the shards of a stream: seldom, because every worker shares the service's rate limit."""

import logging
from collections.abc import Callable, Collection
from heapq import nsmallest
from threading import Event

from attrs import evolve

from adapters.source import Selective, Source, SourceError, SourceUnavailable
from balancer.ancestry import problems
from balancer.chance import digest_under
from balancer.cleanup import ripe
from balancer.lineage import HOLE_CONFIDENCE
from balancer.model import Hole, Lease, Me, Problem, Shard
from stores.protocol import Listing

log = logging.getLogger("leasehold.discovery")

SAFETY_SECONDS = 300.0

LISTERS = 3
"""Of workers that all see the same cause to list, so many do; others are drawn the next time."""


class Discovery:
    """One worker's listings of shards.

    A listing is wanted at the start, after a shard end, when the unended leases have left the same
    hash range uncovered three times, when finished leases wait to be deleted, and every `safety_seconds`.
    What a whole fleet sees, a hole or that time has passed, is for a few of its workers, drawn anew each time.
    `open_shards` is how many shards of the last one are still written to.
    """

    def __init__(self, source: Source, *, safety_seconds: float = SAFETY_SECONDS) -> None:
        self._source, self._safety_seconds = source, safety_seconds
        self._wanted = Event()
        self._wanted.set()
        self._next, self._rounds = 0.0, 0
        self._holes: tuple[Hole, ...] = ()
        self._ripe: frozenset[str] = frozenset()
        self._answered = False
        self._said: frozenset[str] = frozenset()
        self.open_shards: int | None = None

    def want(self) -> None:
        """List at the next turn."""
        self._wanted.set()

    def shards(self, now: float, listing: Listing, me: Me, leases: Collection[Lease] = ()) -> tuple[Shard, ...] | None:
        """The listing if one is wanted now and can be had, else None; `leases` as the plan will see them.

        None too while a row of the table cannot be read: its shard has a lease, so nothing may be
        created or deleted. Raises SourceError if the stream cannot be used and never could.
        """
        crowd = _crowd(listing, me)
        if self._hole_lasts(me, crowd) or self._ripened(leases, me.worker) or self._overdue(now, me, crowd):
            self.want()
        malformed = [
            f"row {row.key}: {row.field} {row.why}; nothing is created or deleted until it is mended"
            for row in listing.malformed
        ]
        shards = self._list(now) if self._wanted.is_set() and not malformed else None
        self._say(malformed + [_told(problem) for problem in problems(shards or ())])
        return shards

    def concerning(self, listing: Listing) -> Listing:
        """The listing without leases of streams that are nothing to this worker."""
        source = self._source
        if not isinstance(source, Selective):
            return listing
        return evolve(listing, leases=tuple(lease for lease in listing.leases if source.reads(lease)))

    def deletable(self, lease: Lease, shards: tuple[Shard, ...]) -> bool:
        """Whether a lease may go: its shard is listed (and finished), or gone by the service's own word."""
        listed = any(shard.id == lease.key for shard in shards)
        return listed or self._confirmed(lambda: self._source.gone(lease.key))

    def _hole_lasts(self, me: Me, crowd: frozenset[str]) -> bool:
        # Every third reading, and only those that looked anew: a hole that listing cannot fill is not hammered at.
        fresh, self._holes = me.history.holes != self._holes, me.history.holes
        lasting = [hole.times for hole in me.history.holes if hole.times % HOLE_CONFIDENCE == 0]
        return fresh and any(_drawn(me, times, crowd) for times in lasting)

    def _overdue(self, now: float, me: Me, crowd: frozenset[str]) -> bool:
        if now < self._next or not self._answered:
            return not self._answered
        self._next, self._rounds = now + self._safety_seconds, self._rounds + 1
        return _drawn(me, self._rounds, crowd)

    def _ripened(self, leases: Collection[Lease], worker: str) -> bool:
        # Once for each finished lease: what a listing did not help is not hammered at either.
        before, self._ripe = self._ripe, ripe(leases, worker)
        return not self._ripe <= before

    def _list(self, now: float) -> tuple[Shard, ...] | None:
        # Cleared first: a shard may end while we list.
        self._wanted.clear()
        try:
            shards = self._source.shards()
        except SourceError as fault:
            if not (self._answered or isinstance(fault, SourceUnavailable)):
                raise
            self.want()
            log.warning("the shards could not be listed, trying again next turn: %s", fault)
            return None
        self._answered, self._next = True, now + self._safety_seconds
        self.open_shards = sum(shard.open for shard in shards)
        return shards

    def _confirmed(self, question: Callable[[], bool]) -> bool:
        try:
            return question()
        except SourceError as fault:
            log.warning("a shard could not be looked up, its lease stays: %s", fault)
            return False

    def _say(self, texts: list[str]) -> None:
        """Say what is wrong once, not every turn."""
        for text in texts:
            if text not in self._said:
                log.warning("%s", text)
        if texts:
            self._said = frozenset(texts)


def _crowd(listing: Listing, me: Me) -> frozenset[str]:
    """Who sees at about the same time what this worker sees; where bulletins are heard (C3), nobody else does."""
    if me.history.hearing is not None:
        return frozenset({me.worker})
    return frozenset({lease.owner for lease in listing.leases if lease.owner is not None} | {me.worker})


def _drawn(me: Me, times: int, crowd: frozenset[str]) -> bool:
    """Whether it falls to this worker of these, the `times`-th time that there is cause."""
    return me.worker in nsmallest(LISTERS, crowd, key=digest_under(str(times)))


def _told(problem: Problem) -> str:
    return f"shard {problem.shard} {problem.what}" if problem.shard else problem.what
