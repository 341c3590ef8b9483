"""Reads one partition for its lease: never waits, drops what was done, and begins again after faults."""

import logging
import random
import time
from itertools import dropwhile

from adapters.backoff import Backoff
from adapters.event_hubs.access import Access
from adapters.event_hubs.background import Background
from adapters.event_hubs.faults import Contended, explained
from adapters.event_hubs.feed import Feed
from adapters.event_hubs.partitions import starting
from adapters.source import Batch, Record, SourceUnavailable
from balancer.model import Position

log = logging.getLogger("leasehold.event_hubs")

IDLE_SECONDS, IDLE_SECONDS_MOST = 0.05, 0.5
FAULT_SECONDS, FAULT_SECONDS_MOST = 1.0, 30.0

CONTENDED_SECONDS = 10.0
"""Before a link is taken back: longer than a worker needs to learn that its lease is gone."""


class PartitionReader:
    """Reads one partition from just after `start`.

    A reading takes what has already arrived. Faults that may pass come back as an empty batch with a
    longer wait, after which the partition is opened again just after the last record handed out.
    """

    def __init__(
        self, background: Background, access: Access, partition: str, start: Position, *, epoch: int, prefetch: int
    ) -> None:
        self._background, self._access, self._partition = background, access, partition
        self._epoch, self._prefetch = epoch, prefetch
        self._position = start
        self._last = int(start.sequence) if start.numbered else -1
        self._idle = IDLE_SECONDS
        self._backoff = Backoff(FAULT_SECONDS, FAULT_SECONDS_MOST, random.uniform)
        self._behind: float | None = None
        self._feed: Feed | None = self._opened()

    def read(self) -> Batch:
        """What has arrived since, at once. Raises SourceError if trying again cannot help."""
        self._feed = feed = self._feed or self._opened()
        records = feed.take()
        if records:
            return self._batch(records)
        fault = feed.fault
        return self._waiting() if fault is None else self._again(fault)

    def close(self) -> None:
        """Give the link up."""
        if self._feed is not None:
            self._feed.close()

    def _opened(self) -> Feed:
        start = starting(self._position)
        return Feed(self._background, self._access, self._partition, start, epoch=self._epoch, prefetch=self._prefetch)

    def _batch(self, came: list[Record]) -> Batch:
        # What was done can only come first: a partition's numbers rise.
        records = tuple(dropwhile(self._done, came))
        if records:
            self._last, self._position = int(records[-1].sequence_number), records[-1].position
        self._idle, self._behind = IDLE_SECONDS, _behind(came[-1])
        self._backoff.reset()
        return Batch(records, self._position, self._behind, wait_seconds=0.0)

    def _done(self, record: Record) -> bool:
        return int(record.sequence_number) <= self._last

    def _waiting(self) -> Batch:
        wait, self._idle = self._idle, min(2 * self._idle, IDLE_SECONDS_MOST)
        return Batch((), None, None if self._behind is None else 0.0, wait)

    def _again(self, fault: BaseException) -> Batch:
        why = explained(fault, self._access, self._partition)
        self.close()
        self._feed = None
        if not isinstance(why, SourceUnavailable):
            raise why from fault
        wait = CONTENDED_SECONDS if isinstance(why, Contended) else self._backoff.next()
        log.warning("%s; trying again in %.1f s", why, wait)
        return Batch((), None, self._behind, wait)


def _behind(last: Record) -> float | None:
    """The age of what was read last, by this machine's clock."""
    return None if last.arrived is None else max(0.0, time.time() - last.arrived)
