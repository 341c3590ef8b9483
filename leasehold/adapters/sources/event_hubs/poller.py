"""Reads one partition for its lease: never waits, drops what was done, and begins again after faults.

A link drives out all of a lower owner level, whoever holds the lease by then: official workers have none above ours.
So the first events of a link tell for how long it was opening, and the end of one that another took over is said at
once; who calls finds out by the lease whether the partition is still ours.

A link on which nothing comes may be quiet, or dead without a word: a service or a network that hangs ends no link, and
the client's own time-out (`idle_timeout`) does not count the service's empty frames, so it would end quiet links. So a
quiet link is a reading only for `HEARD_SECONDS` after the service was last heard, and after `ASK_SECONDS` of silence
the service is asked, over a connection of its own, for the last number of the partition. If we have it, all is well; if
the link does not bring it for `LATE_SECONDS`, it is opened again.
"""

import logging
import math
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import dropwhile
from typing import Any

from leasehold.adapters.sources import arrow
from leasehold.adapters.sources.backoff import Backoff
from leasehold.adapters.sources.clock import seconds
from leasehold.adapters.sources.event_hubs.access import Access
from leasehold.adapters.sources.event_hubs.background import ANSWER_SECONDS, Background
from leasehold.adapters.sources.event_hubs.faults import Contended, explained
from leasehold.adapters.sources.event_hubs.feed import PartitionReceiver
from leasehold.adapters.sources.event_hubs.partitions import starting
from leasehold.adapters.sources.protocol import Batch, Record, SourceUnavailable
from leasehold.balancer.model import Position
from leasehold.stores.printable import escaped

log = escaped(logging.getLogger("leasehold.event_hubs"))

IDLE_SECONDS, IDLE_SECONDS_MOST = 0.05, 0.5
FAULT_SECONDS, FAULT_SECONDS_MOST = 1.0, 30.0

HEARD_SECONDS = 8.0
"""A quiet link is a reading for so long after the service was heard: short, so that a status soon follows a fault."""

ASK_SECONDS = 30.0
"""A service that has said nothing of a partition for so long is asked: one request for each, at rest."""

LATE_SECONDS = 2 * ANSWER_SECONDS
"""A link that has not brought for so long what the service says is there is opened again: to open one takes about twice
as long as such an answer, which may take `ANSWER_SECONDS`."""

CONTENDED_SECONDS = 10.0
"""Before a link is taken back: longer than a worker needs to learn that its lease is gone."""


class PartitionReader:
    """Reads one partition from just after `start`.

    A reading takes what has already arrived. Faults that may pass come back as an empty batch with a
    longer wait, after which the partition is opened again just after the last record handed out.
    """

    def __init__(
        self,
        background: Background,
        access: Access,
        partition: str,
        start: Position,
        *,
        epoch: int | None,
        prefetch: int,
        clock: Callable[[], float] = seconds,
    ) -> None:
        self._background, self._access, self._partition = background, access, partition
        self._epoch, self._prefetch, self._clock = epoch, prefetch, clock
        self._opening: float | None = None
        self._position = start
        self._last = int(start.sequence) if start.numbered else -1
        self._idle = IDLE_SECONDS
        self._backoff = Backoff(FAULT_SECONDS, FAULT_SECONDS_MOST, random.uniform)
        self._behind: float | None = None
        self._refused = ""
        self._heard = self._asked_at = clock()
        self._asked: Future[int] | None = None
        self._owed: tuple[int, float] | None = None
        self._feed: PartitionReceiver | None = self._opened()

    def read(self) -> Batch:
        """The events that have arrived since, at once. Raises SourceError if trying again cannot help."""
        self._feed = feed = self._feed or self._opened()
        records = feed.take()
        if records:
            return self._batch(records)
        fault = feed.fault
        return self._waiting() if fault is None else self._again(fault)

    def close(self) -> None:
        """Give the link up."""
        if self._asked is not None:
            self._asked.cancel()
            self._asked = None
        if self._feed is not None:
            self._feed.close()

    def _opened(self) -> PartitionReceiver:
        self._opening = self._clock()
        start = starting(self._position)
        return PartitionReceiver(
            self._background, self._access, self._partition, start, epoch=self._epoch, prefetch=self._prefetch
        )

    def _batch(self, came: list[Record]) -> Batch:
        # What was done can only come first: a partition's numbers rise.
        records = tuple(dropwhile(self._done, came))
        if records:
            self._tell_of_a_gap(int(records[0].sequence_number))
            self._last, self._position = int(records[-1].sequence_number), records[-1].position
        self._idle, self._behind = IDLE_SECONDS, _behind(came[-1])
        self._hear(self._clock())
        self._backoff.reset()
        in_columns = partial(_in_columns, self._partition)
        opening, self._opening = self._opening, None
        unlinked = 0.0 if opening is None else self._clock() - opening
        return Batch(
            records, self._position, self._behind, wait_seconds=0.0, in_columns=in_columns, unlinked_seconds=unlinked
        )

    def _tell_of_a_gap(self, first: int) -> None:
        # The service numbers each partition's events without a gap, and begins at the oldest it has kept.
        gone = first - self._last - 1
        if self._last >= 0 and gone > 0:
            log.error("%s: %d events behind number %d are gone, past retention", self._where, gone, self._last)

    @property
    def _where(self) -> str:
        return f"event hub {self._access.hub!r}, partition {self._partition}"

    def _done(self, record: Record) -> bool:
        return int(record.sequence_number) <= self._last

    def _waiting(self) -> Batch:
        now = self._clock()
        if self._asked is None and now - max(self._heard, self._asked_at) > ASK_SECONDS:
            self._asked, self._asked_at = self._background.start(self._last_enqueued()), now
        if self._asked is not None and (self._asked.done() or now - self._asked_at > ANSWER_SECONDS):
            self._answered(self._asked, now)
            self._asked = None
        if self._owed is not None and now - self._owed[1] > LATE_SECONDS:
            return self._again(ConnectionError(f"its link brings nothing, and event {self._owed[0]} is there"))
        wait, self._idle = self._idle, min(2 * self._idle, IDLE_SECONDS_MOST)
        silence, fault = now - self._heard, ""
        if silence > HEARD_SECONDS:
            fault = f"{self._refused or self._where}: nothing was heard of it for {silence:.0f} s"
        return Batch((), None, None if self._behind is None or fault else 0.0, wait, fault=fault)

    def _answered(self, asked: "Future[int]", now: float) -> None:
        """Take the answer, or that none came. The link stays: a slow service may be just about to open it."""
        if asked.cancel():
            error: BaseException | None = TimeoutError(f"no answer within {ANSWER_SECONDS:g} s")
        else:
            error = asked.exception()
        if error is not None:
            self._refused = str(explained(error, self._access, self._partition))
            log.warning("%s", self._refused)
        elif asked.result() > self._last:
            self._owed = self._owed or (asked.result(), now)
        else:
            self._hear(now)

    def _hear(self, now: float) -> None:
        self._heard, self._refused, self._owed = now, "", None

    async def _last_enqueued(self) -> int:
        """The number of the last event that the link owes us; -1 if it owes none as far as numbers tell."""
        async with self._access.client() as client:
            told = await client.get_partition_properties(self._partition)
        # Of a reader that begins at a time nobody knows which events come, until one has.
        unknown = self._position.sequence == "AT_TIMESTAMP" or told["is_empty"]
        return -1 if unknown else int(told["last_enqueued_sequence_number"])

    def _again(self, fault: BaseException) -> Batch:
        why = explained(fault, self._access, self._partition)
        self.close()
        self._feed = self._owed = None
        if not isinstance(why, SourceUnavailable):
            raise why from fault
        wait = CONTENDED_SECONDS if isinstance(why, Contended) else self._backoff.next()
        log.warning("%s; trying again in %.1f s", why, wait)
        unlinked = math.inf if isinstance(why, Contended) else 0.0
        return Batch((), None, None, wait, fault=str(why), unlinked_seconds=unlinked)


def _behind(last: Record) -> float | None:
    """The age of what was read last, by this machine's clock."""
    return None if last.arrived is None else max(0.0, time.time() - last.arrived)


def _in_columns(partition: str, records: Sequence[Record]) -> Any:  # noqa: ANN401  an extra has the type
    with arrow.wanted():
        from leasehold.adapters.sources.event_hubs.arrow_rows import rows_of  # noqa: PLC0415  pyarrow is an extra
    return rows_of(partition, records)
