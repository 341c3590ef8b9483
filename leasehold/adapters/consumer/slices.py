"""Reads a slice of a stream, which is the records between two times, and runs workers until all of it is read.

1. The leases of a slice are kept in a separate table, and each row contains the bounds of its slice. A table with
   leases of another group or slice is rejected.
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
from leasehold.adapters.consumer.handling import Delivery, Handler, Handling, ShardEvent
from leasehold.adapters.consumer.runner import DRAIN_SECONDS, MEMORY_BYTES, READERS, Runner, stopping_on_signals
from leasehold.adapters.sources.protocol import Batch, ForwardingSource, Reader, SettledShard, SliceableSource, Source
from leasehold.adapters.threads import spawn
from leasehold.adapters.worker.holding import Holding
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.actions import Create
from leasehold.balancer.model import TRIM_HORIZON, Lease, Me, Position, at_timestamp
from leasehold.balancer.plan import plan
from leasehold.errors import SourceError, StoreError
from leasehold.stores.printable import make_safe_logger
from leasehold.stores.protocol import Outcome, PassingStore, Store
from leasehold.stores.writes import CreateLease, Write

NOTE = "slice"
"""The name of the annotation with the bounds of the slice, or with another value that identifies the group."""

ARRIVAL_MARGIN_SECONDS = 5.0
"""The margin for arrival times, which are not strictly in order within a shard. Reading begins this much before
`since`. Reading ends at a record that arrived this much later than `until`, because no record of the slice comes after
it."""


@frozen
class Slice:
    """All records that arrived from `since` up to, but not including, `until_ms`.

    Attributes:
        since: The beginning, which is TRIM_HORIZON or a time. Any other position, or a time that is not before
            `until_ms`, raises ValueError.
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
        return (
            at_timestamp(max(0, self.since_ms - round(ARRIVAL_MARGIN_SECONDS * 1000)))
            if self.since_ms
            else TRIM_HORIZON
        )

    def cut_batch(self, batch: Batch) -> Batch:
        """Return the part of the batch that belongs to the slice (rule 3)."""
        begin_seconds, end_seconds = self.since_ms / 1000, self.until_ms / 1000
        # Most batches lie completely within the slice. Return them unchanged, with their columns.
        if all(
            arrival_time is None or begin_seconds <= arrival_time < end_seconds for arrival_time in batch.arrival_times
        ):
            return batch
        return batch.select_arrived_between(begin_seconds, end_seconds)

    @property
    def note(self) -> str:
        """The bounds as they are written into lease rows."""
        return f"{self.since_ms}..{self.until_ms}"

    def store(self, store: Store) -> "SliceStore":
        """Return a store that annotates new leases with this slice. The table must not contain any other leases."""
        return exclusive_table(store, "slice", self.note)

    def source(self, source: Source) -> "SliceSource":
        """Return a source of only this slice. Raises ValueError if the source can't detect that a time is reached."""
        if not isinstance(source, SliceableSource):
            raise ValueError("slice: this source cannot detect that a shard was read up to a time")  # noqa: TRY004  bad usage
        return SliceSource(source, source, self)


def exclusive_table(store: Store, kind: str, note: str) -> "SliceStore":
    """Return a store that adds this annotation to new leases. The table must not contain any other leases.

    Args:
        store: The lease table.
        kind: What error messages call a group with such a table, for example "slice".
        note: The value of the annotation.

    Raises:
        ValueError: The table contains other leases, or its rows have no room for the annotation.
        StoreError: The table cannot be read.
    """
    # Reject stores whose rows cannot contain the annotation. Without it, a worker of another slice would not notice
    # that the table belongs to this slice.
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
        """Apply the write, or reject it. A new lease is annotated with its slice."""
        if isinstance(write, CreateLease):
            # Annotate the lease when it is created. Otherwise, the next worker could mistake the row for another
            # group's.
            annotations = {**dict(write.lease.annotations), NOTE: self._note}
            write = evolve(write, lease=evolve(write.lease, annotations=tuple(sorted(annotations.items()))))
        return super().write(write)


class SliceSource(ForwardingSource):
    """A source whose shards end at the end of the slice."""

    def __init__(self, source: Source, sliceable_source: SliceableSource, slice_: Slice) -> None:
        super().__init__(source)
        self._sliceable_source, self._slice = sliceable_source, slice_

    def open(self, lease: Lease, start: Position) -> "SliceReader":
        """Open a reader just after `start`, or at the beginning of the slice if `start` is not a sequence number.

        A child shard, whose lease starts at TRIM_HORIZON, is also read from the beginning of the slice.
        """
        begin = start if start.numbered else self._slice.begin
        return SliceReader(super().open(lease, begin), self._sliceable_source, lease, self._slice, begin)


class SliceReader:
    """Reads one shard up to the end of the slice, and treats the end of the slice as the end of the shard."""

    def __init__(self, reader: Reader, source: SliceableSource, lease: Lease, slice_: Slice, start: Position) -> None:
        self._reader, self._source, self._lease, self._slice = reader, source, lease, slice_
        self._reached_position, self._until_seconds = start, slice_.until_ms / 1000
        self._settled_shard: SettledShard | None = None

    def read(self) -> Batch:
        """Read once. If this raises SourceUnavailable or SourceError, nothing was read."""
        # Ask the source for the last record of the slice before the read, so that the read includes all records that
        # arrived in time.
        self._settled_shard = self._settled_shard or self._source.settled(self._lease, self._until_seconds)
        batch = self._reader.read()
        self._reached_position = batch.end or self._reached_position
        # Arrival times are not strictly in order. Only a record that arrived later than `until` by at least the margin
        # shows that no more records of the slice follow.
        is_past_end = any(
            arrival_time is not None and arrival_time >= self._until_seconds + ARRIVAL_MARGIN_SECONDS
            for arrival_time in batch.arrival_times
        )
        is_over = batch.ended or is_past_end
        if not is_over and self._settled_shard is not None:
            last_position, last_arrival_time = self._settled_shard.last, self._settled_shard.arrived
            if last_position is None:
                # The slice is over if a read that began after `until` returned no records and was at the tip.
                is_over = batch.end is None and batch.behind_seconds == 0
            else:
                # If the last record of this shard arrived before the slice begins, nothing has to be read.
                ends_before_slice = last_arrival_time is not None and last_arrival_time * 1000 < self._slice.begin.sub
                is_over = ends_before_slice or self._reached_position.order >= last_position.order
        return evolve(self._slice.cut_batch(batch), ended=is_over)

    def close(self) -> None:
        """Close the reader."""
        self._reader.close()


log = make_safe_logger(logging.getLogger("leasehold.slices"))

LOOK_SECONDS = 2.0
"""How many seconds to wait between two checks whether the whole slice was read. Each check reads the whole lease
table."""


@frozen
class SliceVerdict:
    """The outcome of reading a slice, and the part of it that this worker has read.

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
    check_seconds: float = LOOK_SECONDS,
    executor: HandlerExecutor | None = None,
    on_runner_created: Callable[[Runner], None] = lambda _runner: None,
) -> SliceVerdict:
    """Run a worker of a slice until all of the slice is read, or until a signal ends the worker.

    Args:
        worker: A worker with the store and source that `Slice` returned; its initial position is the slice's beginning.
        handling: The handler and its policy; a plain function gets the default policy.
        meter: The OpenTelemetry meter, as for `Runner`.
        drain_seconds: The time limit for draining, as for `Runner`.
        memory_bytes: The maximum memory for records that are not handled yet, as for `Runner`.
        readers: How many shards may be read at the same time.
        check_seconds: The number of seconds between two checks of whether the whole slice was read.
        executor: Calls the handlers, as for `Runner`.
        on_runner_created: Called with the runner before it runs.

    Raises what `Runner.run` raises.
    """
    counter = SliceCounter(handling if isinstance(handling, Handling) else Handling(handling))
    limits: dict[str, Any] = {"drain_seconds": drain_seconds, "memory_bytes": memory_bytes, "readers": readers}
    runner = Runner(worker, counter.handling, meter=meter, executor=executor, **limits)
    on_runner_created(runner)
    is_finished = run_until(runner, lambda: is_read(worker), drain_seconds=drain_seconds, look_seconds=check_seconds)
    return SliceVerdict(is_finished, counter.records, counter.letters, counter.shards)


def run_until(
    runner: Runner,
    should_end: Callable[[], bool],
    *,
    drain_seconds: float = DRAIN_SECONDS,
    look_seconds: float = LOOK_SECONDS,
) -> bool:
    """Run this runner until `should_end` returns True. A separate thread calls `should_end` again and again.

    Returns False if a signal ended the run before `should_end` returned True. Raises what `Runner.run` raises.
    """
    stop_watching, is_finished = threading.Event(), threading.Event()

    def watch() -> None:
        while not stop_watching.wait(look_seconds):
            if should_end():
                # Set `is_finished` before the run ends, because it is checked afterwards.
                is_finished.set()
                runner.stop()
                return

    def record_failure(fault: BaseException) -> None:
        faults.append(fault)
        runner.stop()  # without this watcher, nothing would stop the run when the slice is read

    faults: list[BaseException] = []
    watcher = spawn("leasehold-slice", watch, record_failure)
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


def is_read(worker: Worker, is_finished: Callable[[Lease], bool] = lambda lease: lease.ended) -> bool:
    """Return whether all leases are finished and no shard still needs a lease. If that is unknown, return False."""
    try:
        listing = worker.store.list()
        # A malformed row may be an unfinished lease. If the table is empty, the leases have not been created yet.
        if listing.malformed or not listing.leases or not all(map(is_finished, listing.leases)):
            return False
        shards = worker.source.shards()
        actions = plan(listing.leases, shards, Me(worker.me, 0), worker.config)
    except (StoreError, SourceError) as fault:
        log.warning("whether the slice is read is not known yet: %s", fault)
        return False
    # Even if all leases are finished, there may be child shards without leases.
    return not any(isinstance(action, Create) for action in actions)


class SliceCounter:
    """Counts the records that are handled or dead-lettered. Its attribute `handling` wraps the user's `Handling`."""

    def __init__(self, user_handling: Handling) -> None:
        self.records = self.letters = self.shards = 0
        lock, user_dead_letter = threading.Lock(), user_handling.dead_letter

        def count(result: Awaitable[None] | None, records: int, dead_letter_count: int) -> Awaitable[None] | None:
            """Count the records once they are done. A result other than None fails the batch."""
            if inspect.isawaitable(result):

                async def await_and_count() -> None:
                    handler_result = cast("object", await result)
                    return cast(
                        "None", count(None, records, dead_letter_count) if handler_result is None else handler_result
                    )

                return await_and_count()
            # If the handler is a coroutine function, its records are counted above, when the coroutine has finished. A
            # result other than None means that the handler has failed, so nothing is counted.
            if result is None:
                with lock:  # handlers of several shards run at the same time
                    self.records += records
                    self.letters += dead_letter_count
            return result

        def handle(delivery: Delivery) -> Awaitable[None] | None:
            return count(user_handling.handler(delivery), len(delivery.records), 0)

        def dead_letter(delivery: Delivery, error: Exception) -> Awaitable[None] | None:
            return (
                None if user_dead_letter is None else count(user_dead_letter(delivery, error), 0, len(delivery.records))
            )

        def observe(shard_event: ShardEvent, holding: Holding) -> None:
            if shard_event == "shard-ended":
                with lock:
                    self.shards += 1
            user_handling.observer(shard_event, holding)

        self.handling = evolve(
            user_handling,
            handler=handle,
            observer=observe,
            dead_letter=None if user_dead_letter is None else dead_letter,
        )
