"""Reads again exactly what an offset says: Spark repeats a batch that it had planned and not finished.

A repeated batch has of each shard the same rows, or none, and never more: a sink that skips a batch it knows would
lose what only the repetition had.

Rule 1: a fault says nothing about the records. A reading that is throttled, cannot be reached or is not answered is
tried again, and said; where no shard is heard of for too long the query fails, so that Spark repeats the batch when
it is started again.
Rule 2: a range is given up only where the source answers and has it no more, or where a partition that one reader
alone may read is another worker's. Reading goes on where the range began. What one repetition gave up, each later one
leaves out, too: the sink may have the batch without it.
Rule 3: Spark commits a batch also where a range of it was given up, and a later run would take the range for done. So
the range is noted on its lease before Spark gets the batch. Where one alone may read and another has taken the lease,
the epoch has grown, and says the same; where the store counts no epochs, no range of an earlier run is taken for done.
"""

import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import closing
from threading import Event

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
from attrs import evolve, frozen

from leasehold.adapters.consumer.cursor import Cursor, ShardPull
from leasehold.adapters.sources.call_patience import Backoff
from leasehold.adapters.sources.protocol import Batch, Source
from leasehold.adapters.spark.feed import read_through
from leasehold.adapters.spark.lease_loop import Waiting, told
from leasehold.adapters.spark.offsets import Offset, Range, text_of
from leasehold.adapters.spark.rows import Columns
from leasehold.balancer.model import Lease
from leasehold.errors import OutcomeUnknown, SourceUnavailable, StoreError, Trimmed
from leasehold.stores.printable import escaped
from leasehold.stores.protocol import Done, Store
from leasehold.stores.writes import AnnotateLease

log = escaped(logging.getLogger("leasehold.spark"))

UNREAD = "spark_unread"
"""Our attribute on a lease: the range that a repeated batch could not have."""

THREADS = 16
SILENT_SECONDS, SILENT_SECONDS_OWNED = 30.0, 5.0
"""So long a source must answer that there is nothing, until a range is taken for gone; and how long an exclusive
partition stays mute, until its lease is looked at for a living owner."""
PAUSE_SECONDS, FAULT_SECONDS_MOST = 0.25, 10.0
LOOK_SECONDS, SAID_LOOKS = 1.0, 10
ATTEMPTS = 3


@frozen
class Place:
    """Where ranges are read.

    exclusive  whether only one reader at a time may read a shard, and silence is no answer, as over Event Hubs
    """

    store: Store
    source: Source
    columns: Columns
    exclusive: bool

    def believes(self, lease: Lease, wanted: Range) -> bool:
        """Whether a batch that Spark takes for complete has this range."""
        return not self.taken_since(lease, wanted) and not _given_up(lease, wanted)

    def taken_since(self, lease: Lease, wanted: Range) -> bool:
        """Whether another may have read this range alone; for all we know, where a store does not count owners."""
        return self.exclusive and (not self.store.capabilities.counts_owners or lease.epoch != wanted.epoch)


def replayed(offset: Offset, place: Place, waiting: Waiting) -> dict[str, pa.RecordBatch]:
    """The rows of each range that is still there to be read, by lease key; an empty range is left out.

    Raises what `waiting` raises, SourceError where trying again cannot help, and StoreError.
    """
    ranges = {key: each for key, each in offset.ranges if not each.empty}
    leases, over = _leases(ranges, place), Event()
    # A range that an earlier run found to be gone is not waited for again.
    wanted = {key: each for key, each in ranges.items() if not _given_up(leases[key], each)}
    again = {key: Repetition(leases[key], each, place, over) for key, each in wanted.items()}
    with ThreadPoolExecutor(THREADS, thread_name_prefix="leasehold-replay") as pool:
        try:
            work = {key: pool.submit(each.rows) for key, each in again.items()}
            looks = 0
            while left := {key: again[key].trouble for key, each in work.items() if not each.done()}:
                waiting.go_on(left, sum(each.answers for each in again.values()))
                # Said now and then: a query that waits for a stream to come back must not look as if it hung.
                looks += 1
                if not looks % SAID_LOOKS:
                    log.warning("the repeated batch waits for %s", told(left))
                ended, _ = wait(work.values(), LOOK_SECONDS, FIRST_EXCEPTION)
                # A fault of one range ends the wait at once, and with it the query, whose next run begins anew.
                for done in ended:
                    done.result()
        finally:
            over.set()  # one that fails ends the others: the batch comes whole, or the query fails
    found = {key: each.result() for key, each in work.items()}
    return {key: rows for key, rows in found.items() if rows is not None}


def believed(offset: Offset, place: Place) -> frozenset[str]:
    """The shards that the sink has up to this offset once Spark has committed its batch. Raises StoreError."""
    ranges = dict(offset.ranges)
    leases = {lease.key: lease for lease in place.store.get(ranges)}
    # A row that is gone had no other owner that we know of, and is made anew from this offset.
    seen = {key: leases.get(key, Lease(key, epoch=each.epoch)) for key, each in ranges.items()}
    return frozenset(key for key, each in ranges.items() if place.believes(seen[key], each))


def _given_up(lease: Lease, wanted: Range) -> bool:
    return lease.note(UNREAD) == text_of(wanted)


def _leases(wanted: Mapping[str, Range], place: Place) -> dict[str, Lease]:
    """The leases by which shards are opened; where the table is gone, made from the listing of shards."""
    try:
        found = {lease.key: lease for lease in place.store.get(wanted)}
    except StoreError as fault:
        found = {}
        log.warning("the leases could not be read: %s", fault)
    # Rows of the table may be gone, where the batch is not: only the shard's hash range is needed to read it.
    if wanted.keys() - found.keys():
        listed = {shard.id: Lease(shard.id, hash_range=shard.hash_range) for shard in place.source.shards()}
        found = listed | found
    return {key: found.get(key, Lease(key)) for key in wanted}


class Repetition:
    """Reads one range again.

    trouble  why it is not read yet
    answers  how many readings were answered
    """

    def __init__(self, lease: Lease, wanted: Range, place: Place, over: Event) -> None:
        self.trouble, self.answers = "it does not answer", 0
        self._lease, self._wanted, self._place, self._over = lease, wanted, place, over
        self._cursor = Cursor(wanted.begins, until=wanted.ends)
        # Under the epoch of that time, so that a reader with a later one is not disconnected.
        self._pull = ShardPull(
            self._cursor, lambda start: place.source.open(evolve(self._lease, epoch=wanted.epoch), start)
        )
        self._faults = Backoff(PAUSE_SECONDS, FAULT_SECONDS_MOST)
        self._silent = self._mute = self._looked = 0.0

    def rows(self) -> pa.RecordBatch | None:
        """Read the whole range; None if it is gone, or another worker's to read."""
        try:
            return pa.concat_batches(list(self._batches()))
        except Trimmed as gone:
            # The batch goes on without it: what is gone will never come, and a query that waits for it never ends.
            log.warning("shard %s: its range is left out of the repeated batch: %s", self._lease.key, gone)
        self._note()
        return None

    def _batches(self) -> Iterator[pa.RecordBatch]:
        """Raises Trimmed if the end of the range will not come."""
        with closing(read_through(self._pull, self._place.columns, self._lease, ended=self._over.is_set)) as answers:
            for answer, rows in answers:
                if isinstance(answer, SourceUnavailable):
                    self.trouble = str(answer)
                    log.warning("shard %s: a range is to be read again, and cannot be yet: %s", self._lease.key, answer)
                elif answer.fault:
                    self.trouble = answer.fault
                yield from rows
                if not self._cursor.over:
                    self._over.wait(self._pause(answer, came=bool(rows)))

    def _pause(self, answer: Batch | SourceUnavailable, *, came: bool) -> float:
        """Count the silence, and return the seconds until the next reading. Raises Trimmed once it lasted enough."""
        if isinstance(answer, SourceUnavailable):
            # Unreachable is not silent: the time in which nobody answered counts for nothing.
            return self._faults.next()
        self._faults.reset()
        pause = max(PAUSE_SECONDS, answer.wait_seconds)
        if came:
            self.answers += 1
            self._silent = self._mute = self._looked = 0.0
        elif self._place.exclusive:
            # An empty answer is no answer: a link that another reader has displaced says nothing, too.
            self._mute += pause
            self._ask_about(self._mute)
        elif answer.behind_seconds is not None:
            self.answers += 1
            self._silent = 0.0 if answer.behind_seconds else self._silent + pause
            # Only at the tip: an answer behind it shows that there is more to come.
            if self._silent > SILENT_SECONDS:
                raise Trimmed(f"nothing comes up to {self._wanted.ends.sequence}, and the source says that this is all")
        return pause

    def _ask_about(self, mute: float) -> None:
        """A link on which nothing comes may be idle, another reader's, or down: the lease and the source tell."""
        if mute - self._looked > SILENT_SECONDS_OWNED:
            self._looked, before = mute, self._lease
            try:
                self._lease = next(iter(self._place.store.get([before.key])), before)
            except StoreError as fault:
                log.warning("lease %s cannot be read: %s", before.key, fault)
            # A change of owner alone is no sign of life: it may have been claimed from a dead worker and read by nobody
            # yet. An owner that has written it since has displaced our link by its own: nothing will come any more.
            same = before.owner is not None and before.owner == self._lease.owner
            if same and before.version != self._lease.version:
                raise Trimmed("another worker holds its lease and reads it")
        if mute <= SILENT_SECONDS:
            return
        try:
            # Asked by another way than the link: it tells a shard without records from a service that is down.
            self._place.source.latest(self._lease)
        except SourceUnavailable as fault:
            self.trouble = str(fault)
            self._mute = self._looked = 0.0  # the silence says nothing while the source cannot be reached
        else:
            raise Trimmed(f"nothing comes up to {self._wanted.ends.sequence}, although the source answers")

    def _note(self) -> None:
        """Have the next run know that this range is not in the sink, whatever Spark says of the batch."""
        for _ in range(ATTEMPTS):
            for lease in self._place.store.get([self._lease.key]):
                if self._place.taken_since(lease, self._wanted):
                    continue  # No run believes it, and its owner is not disturbed by another's write.
                if not isinstance(self._place.store.write(AnnotateLease(lease, UNREAD, text_of(self._wanted))), Done):
                    # Refused: the row has changed since it was read, and is read once more.
                    break
            else:
                return
        raise OutcomeUnknown(
            f"lease {self._lease.key}: that a range could not be repeated was refused {ATTEMPTS} times"
        )
