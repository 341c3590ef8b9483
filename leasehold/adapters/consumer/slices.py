"""Reads a slice of a stream, which is the records between two times, and runs workers until all of it is read.

1. The leases of a slice are kept in a table of their own, and each row names its slice. A table with leases of another
   group or slice is rejected.
2. A lease is finished, with SHARD_END, once all records of its shard that arrived before `until` are done.
3. A record that arrived before `since`, or at `until` or later, is not dispatched.
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
from leasehold.adapters.sources.protocol import Batch, PassingSource, Reader, SettledShard, SliceableSource, Source
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
"""The annotation on each row that contains the bounds of the slice, or another value that identifies the group."""

LATE_SECONDS = 5.0
"""The margin for arrival times, which are not strictly in order within a shard. Reading begins this much before
`since`. Reading ends at a record that arrived this much later than `until`, because no record of the slice follows such
a record."""


@frozen
class Slice:
    """All records that arrived from `since` up to, but not including, `until_ms`.

    Attributes:
        since: TRIM_HORIZON or a time. Any other position, or a time that is not before `until_ms`, raises ValueError.
        until_ms: The end, in milliseconds since 1970.
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
        """When the slice begins, in milliseconds since 1970, or 0 if it begins with the oldest record."""
        return self.since.sub if self.since.sequence == "AT_TIMESTAMP" else 0

    @property
    def begin(self) -> Position:
        """The position at which to start reading each shard.

        The position is a little before `since`, because arrival times are not strictly in order.
        """
        return at_timestamp(max(0, self.since_ms - round(LATE_SECONDS * 1000))) if self.since_ms else TRIM_HORIZON

    def cut_batch(self, batch: Batch) -> Batch:
        """Return the part of the batch that belongs to the slice (rule 3)."""
        since, until = self.since_ms / 1000, self.until_ms / 1000
        # Most batches lie completely within the slice. Return them unchanged, with their columns.
        if all(arrived is None or since <= arrived < until for arrived in batch.arrival_times):
            return batch
        return batch.select_arrived_between(since, until)

    @property
    def note(self) -> str:
        """The bounds, as rows contain them."""
        return f"{self.since_ms}..{self.until_ms}"

    def store(self, store: Store) -> "SliceStore":
        """Return a store that annotates new leases with this slice. The table must not contain any other leases."""
        return exclusive_table(store, "slice", self.note)

    def source(self, source: Source) -> "SliceSource":
        """Return the source cut to the slice. Raises ValueError if the source can't detect that a time is reached."""
        if not isinstance(source, SliceableSource):
            raise ValueError("slice: this source cannot detect that a shard was read up to a time")  # noqa: TRY004  bad usage
        return SliceSource(source, source, self)


def exclusive_table(store: Store, kind: str, note: str) -> "SliceStore":
    """Return a store that adds this annotation to new leases. The table must not contain any other leases.

    Args:
        store: The lease table.
        kind: What to call such a group in error messages, for example "slice".
        note: The value of the annotation.

    Raises:
        ValueError: The table contains other leases, or its rows have no room for the annotation.
        StoreError: The table cannot be read.
    """
    # If the rows of a store cannot hold the annotation, reject the store. Without the annotation, a worker of another
    # slice would not notice that the table belongs to this slice.
    if not store.capabilities.counts_owners:
        raise ValueError(f"{kind}: the Azure SDKs' layout has no room for it; leave out eventhub= in the store's URL")
    listing = store.list()
    if listing.malformed:
        raise StoreError(f"{kind}: row {listing.malformed[0].key} of its table cannot be read")
    for lease in listing.leases:
        # Reject the leases of another slice. Otherwise, this slice would mistake finished leases of the other slice for
        # its own, and read nothing.
        if lease.annotation(NOTE) != note:
            other_group = f"of another {kind}" if lease.annotation(NOTE) else "of another group"
            raise ValueError(f"{kind}: its table holds leases {other_group} ({lease.key}); give it a table of its own")
    return SliceStore(store, note)


class SliceStore(PassingStore):
    """A store that annotates new leases with their slice."""

    def __init__(self, store: Store, note: str) -> None:
        super().__init__(store)
        self._note = note

    def write(self, write: Write) -> Outcome:
        """Apply the write or reject it."""
        if isinstance(write, CreateLease):
            # Annotate the lease when it is created. Otherwise, the next worker could mistake the row for another
            # group's.
            annotations = {**dict(write.lease.annotations), NOTE: self._note}
            write = evolve(write, lease=evolve(write.lease, annotations=tuple(sorted(annotations.items()))))
        return super().write(write)


class SliceSource(PassingSource):
    """A source whose shards end at the end of the slice."""

    def __init__(self, source: Source, bounded: SliceableSource, cut: Slice) -> None:
        super().__init__(source)
        self._bounded, self._cut = bounded, cut

    def open(self, lease: Lease, start: Position) -> "SliceReader":
        """Open a reader just after `start`, or at the beginning of the slice if `start` is no sequence number.

        A child shard, whose lease starts at TRIM_HORIZON, is also read from the beginning of the slice.
        """
        begin = start if start.numbered else self._cut.begin
        return SliceReader(super().open(lease, begin), self._bounded, lease, self._cut, begin)


class SliceReader:
    """Reads one shard up to the end of the slice, and treats the end of the slice as the end of the shard."""

    def __init__(self, reader: Reader, source: SliceableSource, lease: Lease, cut: Slice, start: Position) -> None:
        self._reader, self._source, self._lease, self._cut = reader, source, lease, cut
        self._reached, self._until = start, cut.until_ms / 1000
        self._settled: SettledShard | None = None

    def read(self) -> Batch:
        """Read once. Raises SourceUnavailable or SourceError, before anything is read."""
        # Ask the source before the read which record is the last of the slice, so that the read includes all records
        # that arrived in time.
        self._settled = self._settled or self._source.settled(self._lease, self._until)
        batch = self._reader.read()
        self._reached = batch.end or self._reached
        # Arrival times are not strictly in order, so only a record that is later by the margin shows that the slice is
        # over.
        past_end = any(time is not None and time >= self._until + LATE_SECONDS for time in batch.arrival_times)
        is_over = batch.ended or past_end
        if not is_over and self._settled is not None:
            last_position, arrived = self._settled.last, self._settled.arrived
            if last_position is None:
                # Only a read that began after `until`, and returned no records at the tip, shows that the slice is
                # over.
                is_over = batch.end is None and batch.behind_seconds == 0
            else:
                # If the last record of this shard arrived before the slice begins, nothing has to be read.
                ends_before_slice = arrived is not None and arrived * 1000 < self._cut.begin.sub
                is_over = ends_before_slice or self._reached.order >= last_position.order
        return evolve(self._cut.cut_batch(batch), ended=is_over)

    def close(self) -> None:
        """Close the reader."""
        self._reader.close()


log = escaped(logging.getLogger("leasehold.slices"))

LOOK_SECONDS = 2.0
"""How many seconds to wait between two checks whether the whole slice was read. Each check reads the whole lease
table."""


@frozen
class SliceVerdict:
    """The outcome of reading a slice, and how much of the slice this worker has read.

    Attributes:
        finished: Whether the whole slice was read, by this worker or others. False if this worker was stopped earlier.
        records: How many records this worker's handler has handled.
        letters: How many records this worker has dead-lettered.
        shards: How many shards this worker has read to their end.
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
    """Run a worker of a slice until all of the slice is read, or until a signal ends the worker.

    Args:
        worker: A worker with the store and source that `Slice` returned; its initial position is the slice's beginning.
        handling: The handler and its policy; a plain function gets the default policy.
        meter: As for `Runner`, as are `drain_seconds`, `memory_bytes`, `readers` and `executor`.
        drain_seconds: The time limit for draining.
        memory_bytes: The memory for records that are not handled yet.
        readers: How many shards may be read at the same time.
        look_seconds: The time between two checks whether the slice is read.
        executor: Where handlers are called.
        begun: Called with the runner before it runs.

    Raises what `run` raises.
    """
    counter = SliceCounter(handling if isinstance(handling, Handling) else Handling(handling))
    limits: dict[str, Any] = {"drain_seconds": drain_seconds, "memory_bytes": memory_bytes, "readers": readers}
    runner = Runner(worker, counter.handling, meter=meter, executor=executor, **limits)
    begun(runner)
    finished = run_until(runner, lambda: is_read(worker), drain_seconds=drain_seconds, look_seconds=look_seconds)
    return SliceVerdict(finished, counter.records, counter.letters, counter.shards)


def run_until(
    runner: Runner,
    is_over: Callable[[], bool],
    *,
    drain_seconds: float = DRAIN_SECONDS,
    look_seconds: float = LOOK_SECONDS,
) -> bool:
    """Run until `is_over`, which is called in a thread of its own, returns True.

    Returns False if a signal ended the run before `is_over` returned True. Raises what `Runner.run` raises.
    """
    stop_watching, is_finished = threading.Event(), threading.Event()

    def watch() -> None:
        while not stop_watching.wait(look_seconds):
            if is_over():
                # Set `is_finished` before the run ends, because it is checked afterwards.
                is_finished.set()
                runner.stop()
                return

    def failed(fault: BaseException) -> None:
        faults.append(fault)
        runner.stop()  # only this thread would have stopped the run when the slice is read

    faults: list[BaseException] = []
    watcher = spawn("leasehold-slice", watch, failed)
    try:
        with stopping_on_signals(runner):
            runner.run()
    finally:
        stop_watching.set()
    # Wait for the thread with a time limit, because its last check may hang if the store does not respond.
    watcher.join(drain_seconds)
    if faults:
        raise faults[0]
    return is_finished.is_set()


def is_read(worker: Worker, finished: Callable[[Lease], bool] = lambda lease: lease.ended) -> bool:
    """Return whether all leases are finished and no shard still needs a lease. If that is unknown, return False."""
    try:
        listing = worker.store.list()
        # A malformed row may be an unfinished lease. If the table is empty, the leases have not been created yet.
        if listing.malformed or not listing.leases or not all(map(finished, listing.leases)):
            return False
        shards = worker.source.shards()
        actions = plan(listing.leases, shards, Me(worker.me, 0), worker.config)
    except (StoreError, SourceError) as fault:
        log.warning("whether the slice is read is not known yet: %s", fault)
        return False
    # It is not enough that all leases are finished, because child shards may not have leases yet.
    return not any(isinstance(action, Create) for action in actions)


class SliceCounter:
    """Counts the records that are handled or dead-lettered. Its `handling` wraps the user's `Handling`."""

    def __init__(self, given: Handling) -> None:
        self.records = self.letters = self.shards = 0
        lock, user_dead_letter = threading.Lock(), given.dead_letter

        def count(result: Awaitable[None] | None, records: int, letters: int) -> Awaitable[None] | None:
            """Count the records once they are done. A result other than None fails the batch."""
            if inspect.isawaitable(result):

                async def awaited() -> None:
                    handler_result = cast("object", await result)
                    return cast("None", count(None, records, letters) if handler_result is None else handler_result)

                return awaited()
            # If the handler is a coroutine function, its records are counted above, when the coroutine has finished. A
            # result other than None means that the handler has failed, so nothing is counted.
            if result is None:
                with lock:  # handlers of several shards run at the same time
                    self.records += records
                    self.letters += letters
            return result

        def handle(delivery: Delivery) -> Awaitable[None] | None:
            return count(given.handler(delivery), len(delivery.records), 0)

        def dead_letter(delivery: Delivery, error: Exception) -> Awaitable[None] | None:
            return (
                None if user_dead_letter is None else count(user_dead_letter(delivery, error), 0, len(delivery.records))
            )

        def observe(happening: Happening, holding: Holding) -> None:
            if happening == "shard-ended":
                with lock:
                    self.shards += 1
            given.observer(happening, holding)

        self.handling = evolve(
            given, handler=handle, observer=observe, dead_letter=None if user_dead_letter is None else dead_letter
        )
