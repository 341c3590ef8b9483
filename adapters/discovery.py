"""When to list the shards of a stream: seldom, because every worker shares the service's rate limit."""

import logging
from collections.abc import Callable, Collection
from threading import Event

from attrs import evolve

from adapters.source import Selective, Source, SourceError, SourceUnavailable
from balancer.ancestry import problems
from balancer.cleanup import ripe
from balancer.lineage import HOLE_CONFIDENCE
from balancer.model import History, Hole, Lease, Me, Problem, Shard
from stores.protocol import Listing

log = logging.getLogger("leasehold.discovery")

SAFETY_SECONDS = 300.0


class Discovery:
    """One worker's listings of shards.

    A listing is wanted at the start, after a shard end, when the unended leases have left the same
    hash range uncovered three times, when finished leases wait to be deleted, and every `safety_seconds`.
    `open_shards` is how many shards of the last one are still written to.
    """

    def __init__(self, source: Source, *, safety_seconds: float = SAFETY_SECONDS) -> None:
        self._source, self._safety_seconds = source, safety_seconds
        self._wanted = Event()
        self._wanted.set()
        self._next = 0.0
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
        if self._hole_lasts(me.history) or self._ripened(leases, me.worker) or now >= self._next:
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

    def _hole_lasts(self, history: History) -> bool:
        # Every third reading, and only those that looked anew: a hole that listing cannot fill is not hammered at.
        fresh, self._holes = history.holes != self._holes, history.holes
        return fresh and any(hole.times % HOLE_CONFIDENCE == 0 for hole in history.holes)

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


def _told(problem: Problem) -> str:
    return f"shard {problem.shard} {problem.what}" if problem.shard else problem.what
