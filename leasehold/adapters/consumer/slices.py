"""A slice of a stream: its bounds, its leases, and its readers.

Rule 1: the leases of a slice have a table of their own, and each row says which slice it is of: another group's leases,
or another slice's, are refused. Rule 2: a lease is finished, by SHARD_END, once all of its shard that had arrived
before `until` is done. Rule 3: a record that arrived before `since`, or at `until` or later, is not handed over.

Runs a worker of a slice until the whole slice is read, by whatever workers it has.
"""

import inspect
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import Any, cast

from attrs import evolve, frozen

from leasehold.adapters.consumer.executors import HandlerExecutor
from leasehold.adapters.consumer.exporting import Meter
from leasehold.adapters.consumer.handling import Delivery, Handler, Handling, Happening
from leasehold.adapters.consumer.runner import DRAIN_SECONDS, MEMORY_BYTES, READERS, Runner, stopping_on_signals
from leasehold.adapters.sources.protocol import Batch, PassingSource, Reader, Settled, Sliceable, Source
from leasehold.adapters.threads import spawn
from leasehold.adapters.worker.holding import Holding
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.actions import Create
from leasehold.balancer.model import TRIM_HORIZON, Lease, Me, Position, at_timestamp
from leasehold.balancer.plan import plan
from leasehold.errors import SourceError, StoreError
from leasehold.stores.printable import escaped
from leasehold.stores.protocol import Outcome, PassingStore, Store
from leasehold.stores.writes import CreateLease, Write

NOTE = "slice"
"""Our attribute on each row: the bounds of the slice, or what else says whose leases they are."""

LATE_SECONDS = 5.0
"""Arrival times in a shard need not rise strictly: one so much later than `until` shows that no earlier one follows,
and reading begins so much before `since`."""


@frozen
class Slice:
    """All that arrived from `since` up to `until_ms`, milliseconds since 1970; that time itself is outside.

    since  TRIM_HORIZON, or a time. Raises ValueError for anything else, and where it is not before `until_ms`.
    """

    since: Position
    until_ms: int

    def __attrs_post_init__(self) -> None:
        if self.since.sequence not in {"TRIM_HORIZON", "AT_TIMESTAMP"}:
            raise ValueError(f"slice: it begins (--from) at TRIM_HORIZON or at a time, not at {self.since.sequence}")
        if self.since_ms >= self.until_ms:
            raise ValueError("slice: it begins (--from) no earlier than it ends (--until)")

    @property
    def since_ms(self) -> int:
        """When it begins; 0 where it begins with the oldest record."""
        return self.since.sub if self.since.sequence == "AT_TIMESTAMP" else 0

    @property
    def begin(self) -> Position:
        """The start of reading in each shard: a record that arrived in time may lie before one that did not."""
        return at_timestamp(max(0, self.since_ms - round(LATE_SECONDS * 1000))) if self.since_ms else TRIM_HORIZON

    def within(self, batch: Batch) -> Batch:
        """The part of a reading that belongs to the slice (rule 3)."""
        since, until = self.since_ms / 1000, self.until_ms / 1000
        # Nearly every batch lies within: it goes on as it came, with its columns.
        if all(time is None or since <= time < until for time in batch.arrivals):
            return batch
        return batch.between(since, until)

    @property
    def note(self) -> str:
        """The bounds, as rows say them."""
        return f"{self.since_ms}..{self.until_ms}"

    def store(self, store: Store) -> "SliceStore":
        """The table of the slice's own leases, or an empty one.

        Raises ValueError for a table of other leases, and where rows have no room for a slice; StoreError.
        """
        return own_table(store, "slice", self.note)

    def source(self, source: Source) -> "SliceSource":
        """The source, cut to the slice. Raises ValueError for one that cannot tell when it is read up to a time."""
        if not isinstance(source, Sliceable):
            raise ValueError("slice: this source does not tell when a shard is read up to a time")  # noqa: TRY004  bad usage
        return SliceSource(source, source, self)


def own_table(store: Store, kind: str, note: str) -> "SliceStore":
    """The table of these leases alone, or an empty one; each row has the note.

    kind  the word for such a group in what is said
    Raises ValueError for a table of other leases, and where rows have no room for a note; StoreError.
    """
    # Its rows have no room for the note by which a worker of another slice would see that the table is not its own.
    if not store.capabilities.counts_owners:
        raise ValueError(f"{kind}: the Azure SDKs' layout has no room for it; leave out eventhub= in the store's URL")
    listing = store.list()
    if listing.malformed:
        raise StoreError(f"{kind}: row {listing.malformed[0].key} of its table cannot be read")
    for lease in listing.leases:
        # Else a second slice would take the first one's finished leases for its own, and read nothing.
        if lease.note(NOTE) != note:
            whose = f"of another {kind}" if lease.note(NOTE) else "of another group"
            raise ValueError(f"{kind}: its table holds leases {whose} ({lease.key}); give it a table of its own")
    return SliceStore(store, note)


class SliceStore(PassingStore):
    """A store whose new leases say whose they are."""

    def __init__(self, store: Store, note: str) -> None:
        super().__init__(store)
        self._note = note

    def write(self, write: Write) -> Outcome:
        """Apply the write or refuse it."""
        if isinstance(write, CreateLease):
            # Written by the creation itself: a row without the note would look like another group's to the next worker.
            notes = {**dict(write.lease.notes), NOTE: self._note}
            write = evolve(write, lease=evolve(write.lease, notes=tuple(sorted(notes.items()))))
        return super().write(write)


class SliceSource(PassingSource):
    """A source whose shards end where the slice ends."""

    def __init__(self, source: Source, bounded: Sliceable, cut: Slice) -> None:
        super().__init__(source)
        self._bounded, self._cut = bounded, cut

    def open(self, lease: Lease, start: Position) -> "SliceReader":
        """A reader from just after `start`, or from where the slice begins: no child's oldest records come before."""
        begin = start if start.numbered else self._cut.begin
        return SliceReader(super().open(lease, begin), self._bounded, lease, self._cut, begin)


class SliceReader:
    """Reads one shard up to the end of the slice, which is then the end of the shard."""

    def __init__(self, reader: Reader, source: Sliceable, lease: Lease, cut: Slice, start: Position) -> None:
        self._reader, self._source, self._lease, self._cut = reader, source, lease, cut
        self._reached, self._until = start, cut.until_ms / 1000
        self._settled: Settled | None = None

    def read(self) -> Batch:
        """Read once. Raises SourceUnavailable or SourceError, before anything is read."""
        # Asked before: what is read afterwards then shows all that will ever have arrived in time.
        self._settled = self._settled or self._source.settled(self._lease, self._until)
        batch = self._reader.read()
        self._reached = batch.end or self._reached
        # One record of a later time proves little, since times are not quite in order; one of so much later proves all.
        over = any(time is not None and time >= self._until + LATE_SECONDS for time in batch.arrivals)
        ended = batch.ended or over
        if not ended and self._settled is not None:
            last, arrived = self._settled.last, self._settled.arrived
            if last is None:
                # Only a reading that was begun after that moment, and brings nothing at the tip, shows it.
                ended = batch.end is None and batch.behind_seconds == 0
            else:
                # Nothing of the slice is in this shard: it is over before the first record is read.
                before = arrived is not None and arrived * 1000 < self._cut.begin.sub  # all of it lies before the slice
                ended = before or self._reached.order >= last.order
        return evolve(self._cut.within(batch), ended=ended)

    def close(self) -> None:
        """Close the reader."""
        self._reader.close()


log = escaped(logging.getLogger("leasehold.slices"))

LOOK_SECONDS = 2.0
"""Between two looks whether the slice is read; each is a listing of its table."""


@frozen
class SliceVerdict:
    """The outcome of a slice, and of this worker's part in it.

    finished  whether all of it is read, by whomever; False where this worker was told to end before
    records   that this worker's handler finished with
    letters   records that this worker's dead letter took
    shards    that this worker read to their end
    """

    finished: bool
    records: int
    letters: int
    shards: int


def run_slice(
    worker: Worker,
    handling: Handling | Handler,
    *,
    meter: Meter | None = None,
    drain_seconds: float = DRAIN_SECONDS,
    memory_bytes: int = MEMORY_BYTES,
    readers: int = READERS,
    look_seconds: float = LOOK_SECONDS,
    executor: HandlerExecutor | None = None,
    begun: Callable[[Runner], None] = lambda _runner: None,
) -> SliceVerdict:
    """Run a worker of a slice until all of the slice is read, or a signal ends the worker.

    worker        its store and its source are those that `Slice` made, its initial position is where the slice begins
    look_seconds  between two looks whether the slice is read
    executor          as of `Runner`
    begun         given the runner before it runs
    Raises what `run` raises.
    """
    count = SliceCount(handling if isinstance(handling, Handling) else Handling(handling))
    limits: dict[str, Any] = {"drain_seconds": drain_seconds, "memory_bytes": memory_bytes, "readers": readers}
    runner = Runner(worker, count.handling, meter=meter, executor=executor, **limits)
    begun(runner)
    finished = run_until(runner, lambda: is_read(worker), drain_seconds=drain_seconds, look_seconds=look_seconds)
    return SliceVerdict(finished, count.records, count.letters, count.shards)


def run_until(
    runner: Runner,
    over: Callable[[], bool],
    *,
    drain_seconds: float = DRAIN_SECONDS,
    look_seconds: float = LOOK_SECONDS,
) -> bool:
    """Run until `over` says so, which is asked in a thread of its own; False where a signal ended it before.

    Raises what `Runner.run` raises.
    """
    ended, finished = threading.Event(), threading.Event()

    def watch() -> None:
        while not ended.wait(look_seconds):
            if over():
                # Before the run ends: whoever waits for that asks then whether the slice is read.
                finished.set()
                runner.stop()
                return

    def failed(fault: BaseException) -> None:
        faults.append(fault)
        runner.stop()  # nobody else would notice that the slice is read

    faults: list[BaseException] = []
    watcher = spawn("leasehold-slice", watch, failed)
    try:
        with stopping_on_signals(runner):
            runner.run()
    finally:
        ended.set()
    # Bounded: its last look may hang in a store that does not answer.
    watcher.join(drain_seconds)
    if faults:
        raise faults[0]
    return finished.is_set()


def is_read(worker: Worker, finished: Callable[[Lease], bool] = lambda lease: lease.ended) -> bool:
    """Whether every lease is finished, and no shard of the stream wants another one; False if that is unknown."""
    try:
        listing = worker.store.list()
        # An unreadable row may be of an unfinished lease, and an empty table is one that nobody has filled yet.
        if listing.malformed or not listing.leases or not all(map(finished, listing.leases)):
            return False
        shards = worker.source.shards()
        wanted = plan(listing.leases, shards, Me(worker.me, 0), worker.config)
    except (StoreError, SourceError) as fault:
        log.warning("whether the slice is read is not known yet: %s", fault)
        return False
    # Finished leases are not all: children of their shards may still be without one.
    return not any(isinstance(action, Create) for action in wanted)


class SliceCount:
    """Counts what the callables of a handling have finished with; `handling` is the same, counted."""

    def __init__(self, given: Handling) -> None:
        self.records = self.letters = self.shards = 0
        lock, letter = threading.Lock(), given.dead_letter

        def count(answer: Awaitable[None] | None, records: int, letters: int) -> Awaitable[None] | None:
            """Once the answer says that they are done: an answer other than None fails the batch."""
            if inspect.isawaitable(answer):

                async def awaited() -> None:
                    ended = cast("object", await answer)
                    return cast("None", count(None, records, letters) if ended is None else ended)

                return awaited()
            # A coroutine counts once it has ended, and any other answer is a fault of the handler's.
            if answer is None:
                with lock:  # handlers of several shards are at work side by side
                    self.records += records
                    self.letters += letters
            return answer

        def handle(delivery: Delivery) -> Awaitable[None] | None:
            return count(given.handler(delivery), len(delivery.records), 0)

        def dead_letter(delivery: Delivery, error: Exception) -> Awaitable[None] | None:
            return None if letter is None else count(letter(delivery, error), 0, len(delivery.records))

        def observe(happening: Happening, holding: Holding) -> None:
            if happening == "shard-ended":
                with lock:
                    self.shards += 1
            given.observer(happening, holding)

        self.handling = evolve(
            given, handler=handle, observer=observe, dead_letter=None if letter is None else dead_letter
        )
