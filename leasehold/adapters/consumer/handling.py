"""Defines how a user's handler is checked and called, and its time limits and retries.

A handler or a `dead_letter` function may be async or return any other awaitable, which is awaited on the worker's one
event loop. A handler that runs longer than `slow_seconds` is logged and counted, and again each time its running time
has doubled. After `handler_seconds`, the lease is released, as it is after the last failed attempt.
`consumer/attempts.py` decides what to do after a fault.

1. A batch is done when its handler has returned None, or an awaitable that ended with None.
2. Any other result fails the batch, so a checkpoint never covers a record that the handler has not finished with.
3. The signature of a user's callable is checked once, when it is passed in. The result is checked after each call.

`by_key` splits a batch by partition key and runs the keys concurrently. The records of one key stay in order.

4. The batch is done when all of its keys are done.
5. If the handler of one key fails, no further keys are started. The batch fails once the handlers of all running keys
   have ended, so none of them is still running when the batch is dispatched again.
"""

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from threading import Event
from typing import Any, Literal, Protocol, cast

from attrs import Attribute, evolve, field, fields, frozen
from attrs.validators import ge, gt, lt, optional

from leasehold.adapters.consumer.exporting import Meter
from leasehold.adapters.sources.protocol import Batch, InColumns, Record
from leasehold.adapters.worker.holding import Holding
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.model import Lease, Position
from leasehold.stores.printable import error_summary


class Unhandled(Exception):
    """Raised or recorded if a call ended without finishing its batch."""


class Ending(Unhandled):
    """A handler raised SystemExit or KeyboardInterrupt, so the worker ends."""


class Withdrawn(Unhandled):
    """The batch was not handled, because its consumer takes no more batches. The next owner handles the records."""


class TooOld(Unhandled):
    """A record arrived more than `max_age_seconds` ago, so the handler is not called for it."""


class NotAwaited(Unhandled):
    """The handler's awaitable could not be awaited, because no event loop could start. The records are not at fault."""


def accepts(*names: str) -> Callable[[Any, Any, Any], None]:
    """Return an attrs validator for callables that accept these arguments and are not generator functions.

    The validator raises a ValueError that names the field.
    """

    def validate(_values: object, field: "Attribute[object]", value: object) -> None:
        if not callable(value):
            raise ValueError(f"{field.name}: {value!r} cannot be called")  # noqa: TRY004  bad usage
        function: Any = value
        while isinstance(function, partial):
            function = function.func
        for candidate in (function, type(function).__call__):
            if inspect.isgeneratorfunction(candidate) or inspect.isasyncgenfunction(candidate):
                raise ValueError(
                    f"{field.name}: a generator does nothing when it is called; write a plain or async function"
                )
        try:
            # A decorator may change the arguments, so check the signature of the function that the decorator returned,
            # not that of the function it wraps.
            signature = inspect.signature(value, follow_wrapped=False)
        except (TypeError, ValueError):
            return  # some built-in functions have no signature
        try:
            signature.bind(*range(len(names)))
        except TypeError as error:
            message = f"{field.name}: it is called with ({', '.join(names)}), and that does not fit: {error}"
            raise ValueError(message) from None

    return validate


def fault_in_result(result: object) -> Unhandled | None:
    """Return the error with which a handler's final result fails its batch.

    If the result is None, the batch is done, so return None.
    """
    if result is None:
        return None
    if inspect.isgenerator(result) or inspect.isasyncgen(result):
        return Unhandled("it returned a generator, which has done nothing yet: use a plain or an async function")
    if inspect.iscoroutine(result):
        result.close()  # otherwise Python warns that it was never awaited
    return Unhandled(f"it returned a value ({type(result).__name__}): only None means that the batch is done")


def as_exception(error: BaseException) -> Exception:
    """Return the error itself if it is an Exception. Otherwise, return an Exception that wraps it."""
    if isinstance(error, Exception):
        return error
    wrapper_type = Ending if isinstance(error, SystemExit | KeyboardInterrupt) else Unhandled
    fault = wrapper_type(f"it raised {error_summary(error)}")
    fault.__cause__ = error
    return fault


CHECKPOINT_SECONDS = 1.0
"""The default time between two checkpoints. A checkpoint after every batch would write to the table about five times
per second, which is five times as often as the KCL does."""


class HeldLease(Protocol):
    """The lease of a batch, as a handler sees it."""

    @property
    def key(self) -> str:
        """The lease's key."""

    @property
    def lease(self) -> Lease:
        """The lease as last written or read."""

    @property
    def worker(self) -> str:
        """The worker that holds the lease."""

    @property
    def stream(self) -> str:
        """The stream's name, even if the lease does not contain it."""

    @property
    def fencing_number(self) -> int | None:
        """The lease's fencing number."""

    @property
    def lost(self) -> Event:
        """An event that is set once the lease is lost."""

    def checkpoint(self, position: Position) -> bool:
        """Move the checkpoint forward, and return False if the lease is lost."""


@frozen
class Delivery:
    """A batch of records of one shard, in order. The shard's next batch is dispatched when this one is done.

    Attributes:
        records: The records to process. All of them are checkpointed once the handler returns.
        read_to: The position up to which the batch extends, at or after its last record.
        behind_seconds: How far the batch is behind the tip of the shard; None if unknown.
        attempts: How many times this worker has dispatched a batch that begins with the same record, including this
            time.
        in_parts: How many of the `attempts` were made with only a part of a batch, to find the record that fails.

    Examples:
        >>> from leasehold import Delivery
        >>> def handle(batch: Delivery) -> None:
        ...     for record in batch.records:
        ...         print(batch.shard, record.partition_key, record.data)
    """

    records: Sequence[Record]
    read_to: Position
    behind_seconds: float | None
    _holding: HeldLease
    _in_columns: InColumns | None = None
    attempts: int = 1
    _whole: bool = True
    in_parts: int = 0

    def part(self, records: Sequence[Record]) -> "Delivery":
        """Return a batch of only these records, for handlers that split a batch.

        The returned batch cannot be checkpointed.
        """
        return evolve(self, records=records, read_to=records[-1].position, whole=False)

    def to_arrow(self) -> Any:  # noqa: ANN401  the type belongs to an optional package
        """Return the records as a `pyarrow.RecordBatch`, with the columns of the Spark sources.

        Raises:
            ModuleNotFoundError: pyarrow is not installed.
            ValueError: The source does not define columns.
        """
        if self._in_columns is None:
            raise ValueError("batch.to_arrow(): this source has no columns; take batch.records")
        return self._in_columns(self.records)

    @property
    def lease(self) -> str:
        """The key of the lease."""
        return self._holding.key

    @property
    def shard(self) -> str:
        """The source's own id of the shard."""
        return self._holding.lease.shard

    @property
    def stream(self) -> str:
        """The stream's name.

        For an event hub, the name includes the namespace and the consumer group. If a worker reads several Kinesis
        streams, the name is `account:name:creationEpoch`.
        """
        return self._holding.stream

    @property
    def worker(self) -> str:
        """The id of the worker that dispatches this batch."""
        return self._holding.worker

    @property
    def epoch(self) -> int | None:
        """The fencing number, which grows with each owner of this lease and never falls.

        The commands `reset` and `copy-leases` do not lower the fencing number either. It is None in the Azure SDKs'
        blob layout, which has no such counter.
        """
        return self._holding.fencing_number

    @property
    def lost(self) -> bool:
        """Whether the lease was lost. If so, another worker will process these records, too."""
        return self._holding.lost.is_set()

    def checkpoint(self, record: Record | None = None) -> bool:
        """Checkpoint all records up to and including this one as done.

        Args:
            record: A record of this batch; by default the last record, so that the whole batch is done.

        Returns:
            False if the lease is lost.

        Raises:
            ValueError: The record comes after this batch, or this batch is only a part of a larger one (`by_key`).
            OutcomeUnknown: The store does not respond.
            WorkerError: Called in a forked child.
        """
        if not self._whole:
            # A checkpoint covers all earlier records, and those of the other keys may not be done yet.
            raise ValueError("checkpoint: other keys of this batch are at work; it is checkpointed once all are done")
        position = self.read_to if record is None else getattr(record, "position", None)
        if not isinstance(position, Position):
            raise TypeError(f"checkpoint: {type(record).__name__} is no record; give one of this batch")
        # Records after the batch were not delivered. If a checkpoint covered them, they would be skipped after a crash.
        if position.order > self.read_to.order:
            raise ValueError(
                f"checkpoint: {position.sequence} is behind this batch, which ends at {self.read_to.sequence}"
            )
        return self._holding.checkpoint(position)


Handler = Callable[[Delivery], Awaitable[None] | None]
DeadLetter = Callable[[Delivery, Exception], Awaitable[None] | None]


@frozen
class FinalCheckpoint:
    """Passed to a self-checkpointing handler for its last checkpoint, before a release or at the end of the shard.

    Attributes:
        ended: Whether the shard has no more records.
    """

    ended: bool
    _holding: HeldLease
    _end: Callable[[], bool]

    @property
    def lease(self) -> str:
        """The key of the lease."""
        return self._holding.key

    def checkpoint(self, position: Position) -> bool:
        """Checkpoint everything up to this position, and return False if the lease is lost.

        Raises:
            OutcomeUnknown: The store does not respond.
        """
        if not isinstance(position, Position):
            raise TypeError(f"checkpoint: {type(position).__name__} is no Position")
        return self._holding.checkpoint(position)

    def end(self) -> bool:
        """Finish the shard: create the leases of its children, then write SHARD_END.

        Returns:
            False if the lease is lost.

        Raises:
            ValueError: The shard has not ended.
            StoreError: A write failed; try again.
            SourceUnavailable: The stream does not respond; try again.
        """
        # If the lease were finished before the shard ended, no worker would read the rest of the shard.
        if not self.ended:
            raise ValueError("end: the shard has more records, or may have")
        return self._end()


ShardEvent = Literal["initialize", "lease-lost", "shard-ended", "stopped"]
Observer = Callable[[ShardEvent, Holding], None]
"""Called when the reading of a shard begins, and with the reason when it stops."""


@frozen
class Assignment:
    """Describes the shard for which a `ShardConsumer` is created.

    Attributes:
        lease: The key of the lease.
        shard: The source's own id of the shard.
        stream: The stream's name.
        epoch: The fencing number, as in `Delivery`.
        wake: A function to call, from any thread, after an acknowledgement or when there is room again. The worker then
            polls the consumer immediately, instead of within a quarter of a second.

    Examples:
        >>> from leasehold.adapters import Assignment
        >>> Assignment("orders:s-0", "s-0", "orders", 7, wake=lambda: None).shard
        's-0'
    """

    lease: str
    shard: str
    stream: str
    epoch: int | None
    wake: Callable[[], None] = field(eq=False, repr=False)


class ShardConsumer(Protocol):
    """Takes the records of one shard, and acknowledges them when it has finished with them.

    Implement this protocol to put records into a queue, a pipeline or a buffer, and to acknowledge them later, when
    they are done. The worker calls the methods one at a time, in its own threads, so they must not wait or take long.
    Only acknowledged records are checkpointed. Records that are not acknowledged when a worker ends are delivered
    again.

    Examples:
        >>> from queue import Full, Queue
        >>> import leasehold
        >>> from leasehold.adapters import Handling
        >>> jobs = Queue(maxsize=10)
        >>> class QueueConsumer:
        ...     def __init__(self, assignment):
        ...         self.wake, self.done, self.taken, self.gone = assignment.wake, None, None, False
        ...
        ...     def offer(self, batch):
        ...         try:
        ...             jobs.put_nowait((self, batch))
        ...         except Full:
        ...             return False
        ...         self.taken = batch.read_to
        ...         return True
        ...
        ...     def acknowledged(self):
        ...         return self.done
        ...
        ...     def withdraw(self):
        ...         return self.done == self.taken
        ...
        ...     def close(self, happening):
        ...         self.gone = True
        >>> def work(total):
        ...     while total > 0:
        ...         consumer, batch = jobs.get()
        ...         if not consumer.gone:
        ...             total -= len(batch.records)
        ...             consumer.done = batch.read_to
        ...             consumer.wake()
        >>> with leasehold.worker(
        ...     orders, Handling.of_consumer(QueueConsumer), leases="memory://queue", initial_position="TRIM_HORIZON"
        ... ) as worker:
        ...     work(2)
    """

    def offer(self, batch: Delivery) -> bool:
        """Take this batch. Return False if there is no room for it now, so that it is offered again later.

        If `offer` raises, the batch is offered again after a wait, up to `attempts` times in total. After that, the
        lease is released to other workers.
        """

    def acknowledged(self) -> Position | None:
        """Return the position up to which all records are done, or None if none are.

        The position is that of a record, or the `read_to` of a batch. If `acknowledged` raises, the lease is released
        to other workers.
        """

    def withdraw(self) -> bool:
        """Finish or drop the batches that were taken, because the lease is to be released. Return True when done.

        `withdraw` is called again until it returns True. The lease is then released with the acknowledged position. If
        the release is cancelled, the records that were not acknowledged are offered again.
        """

    def close(self, happening: ShardEvent) -> None:
        """Stop processing the shard. `happening` is the reason. Later acknowledgements have no effect."""


OpenConsumer = Callable[[Assignment], ShardConsumer]
"""Creates the consumer of a shard when reading begins."""

MeasureCallback = Callable[[Holding, Batch], None]
"""Called with each batch that was read, before its records are dispatched."""

SlowCallback = Callable[[Holding, float], None]
"""Called each time a slow handler is logged, with the seconds for which it has been running."""

DeadLetterCallback = Callable[[Holding, Exception], None]
"""Called after a record was dead-lettered, with the error with which it failed."""


@frozen
class Handling:
    """Defines which functions handle records, and their time limits and retries.

    The callbacks `observer`, `measure`, `slow` and `dead_lettered` must not block. If one raises, the error is logged
    once.

    Attributes:
        handler: Called with each batch. The batch is done when it returns None or an awaitable that ends with None.
        attempts: How many times to try a batch before its lease is released. If the handler has checkpointed some of
            the batch's records, the attempts at the remaining ones are counted from the start.
        max_records: The maximum number of de-aggregated records in a batch; by default as many as one read returns.
        linger_seconds: How long the first record of a batch waits for more, unless the batch reaches `max_records`
            records or 6 MiB; 0 for no wait.
        least_wait_seconds: The shortest wait between two attempts.
        most_wait_seconds: The longest wait between two attempts.
        cooldown_seconds: After this worker has released a lease because of failures, it does not take the lease again
            for this many seconds.
        dead_letter: Called with each record that keeps failing, which is then skipped. If it is None, no record is ever
            skipped.
        max_age_seconds: A record that arrived longer ago than this, by this worker's clock, goes to the dead letter
            instead of the handler, with `TooOld`. This needs a `dead_letter`. There is no limit by default.
        checkpoint_seconds: The least time between two checkpoints of a shard; 0 to checkpoint after every batch. A
            hand-off, a stop, the end of a shard and `Delivery.checkpoint` write immediately.
        late_checkpoints: Whether to checkpoint what this worker has handled even after another worker has taken the
            lease, so that fewer records are handled twice.
        observer: Called when the reading of a shard begins and stops.
        measure: Called with each batch that was read.
        slow_seconds: A handler that runs longer than this is logged and counted, and another thread is started to
            replace the one that it occupies.
        handler_seconds: A handler that runs longer than this is given up, and its lease is released. There is no limit
            by default.
        most_calls: The maximum number of concurrent handler calls, including slow ones; by default the number of
            threads.
        slow: Called each time a handler is logged as slow.
        dead_lettered: Called each time a record was dead-lettered.
        final_checkpoint: Set this function if the handler checkpoints by itself. The function is called before a lease
            is released and at the end of a shard. A batch is then not done when the handler returns, and after a fault,
            reading starts again at the checkpoint. `final_checkpoint` cannot be combined with `dead_letter`,
            `max_records` or `linger_seconds`.
        consumer: Creates the consumer that takes the place of the handler; see `of_consumer`.

    Examples:
        >>> from leasehold.adapters import Handling
        >>> Handling(print, attempts=2).attempts
        2
    """

    handler: Handler = field(validator=accepts("batch"))
    attempts: int = field(default=5, validator=ge(1))
    max_records: int | None = field(default=None, validator=optional(ge(1)))
    linger_seconds: float = field(default=0.0, validator=[ge(0), lt(math.inf)])
    least_wait_seconds: float = field(default=0.2, validator=ge(0))
    most_wait_seconds: float = field(default=10.0, validator=ge(0))
    cooldown_seconds: float = field(default=60.0, validator=ge(0))
    dead_letter: DeadLetter | None = field(default=None, validator=optional(accepts("batch", "error")))
    max_age_seconds: float = field(default=math.inf, validator=gt(0))
    checkpoint_seconds: float = field(default=CHECKPOINT_SECONDS, validator=ge(0))
    late_checkpoints: bool = False
    observer: Observer = field(default=lambda _happening, _holding: None, validator=accepts("happening", "holding"))
    measure: MeasureCallback = field(default=lambda _holding, _batch: None, validator=accepts("holding", "batch"))
    slow_seconds: float = field(default=60.0, validator=[gt(0), lt(math.inf)])
    handler_seconds: float = field(default=math.inf, validator=gt(0))
    most_calls: int | None = field(default=None, validator=optional(ge(1)))
    slow: SlowCallback = field(default=lambda _holding, _seconds: None, validator=accepts("holding", "seconds"))
    dead_lettered: DeadLetterCallback = field(
        default=lambda _holding, _error: None, validator=accepts("holding", "error")
    )
    final_checkpoint: Callable[[FinalCheckpoint], Awaitable[None] | None] | None = field(
        default=None, validator=optional(accepts("final_checkpoint"))
    )
    consumer: OpenConsumer | None = field(default=None, validator=optional(accepts("assignment")))

    @classmethod
    def of_consumer(
        cls,
        consumer: OpenConsumer,
        *,
        attempts: int = 5,
        checkpoint_seconds: float = CHECKPOINT_SECONDS,
        observer: Observer = lambda _happening, _holding: None,
    ) -> "Handling":
        """Return a `Handling` that passes the records of each shard to a `ShardConsumer` instead of a handler.

        Args:
            consumer: Creates the consumer of a shard. It can be the consumer's class.
            attempts: How many times to offer a batch if `offer` raises.
            checkpoint_seconds: The least time between two checkpoints of a shard.
            observer: Called when the reading of a shard begins and stops.
        """
        return cls(
            _unused_handler,
            attempts=attempts,
            checkpoint_seconds=checkpoint_seconds,
            observer=observer,
            consumer=consumer,
        )

    def __attrs_post_init__(self) -> None:
        if self.final_checkpoint is not None and self.dead_letter is not None:
            # A dead-lettered record would count as done, but a handler that checkpoints by itself must decide which
            # records are done.
            raise ValueError("dead_letter: a handler that checkpoints by itself goes without one")
        if self.max_age_seconds < math.inf and self.dead_letter is None:
            raise ValueError("max_age_seconds: old records go to the dead letter, and there is none: set `dead_letter`")
        if self.final_checkpoint is not None and self.max_records is not None:
            # If batches were split, the next part would be dispatched before the handler has checkpointed the previous
            # one.
            raise ValueError("max_records: a handler that checkpoints by itself takes whole batches")
        if self.final_checkpoint is not None and self.linger_seconds:
            raise ValueError("linger_seconds: a handler that checkpoints by itself gathers records by itself, too")
        if self.consumer is not None:
            for name in _HANDLER_FIELDS:
                if getattr(self, name) != getattr(fields(Handling), name).default:
                    raise ValueError(f"{name}: it goes with a handler, and a consumer takes its place")


_HANDLER_FIELDS = (
    *("max_records", "linger_seconds", "dead_letter", "max_age_seconds", "late_checkpoints", "slow_seconds"),
    *("handler_seconds", "most_calls", "final_checkpoint"),
)
"""The fields of `Handling` that must keep their defaults if a `ShardConsumer` takes the records."""


def _unused_handler(_batch: Delivery) -> None:
    raise AssertionError("a consumer takes the place of the handler")


def with_spans(worker: Worker, handling: Handling) -> Handling:
    """Wrap the handler and the dead letter so that each call is a span, if the worker records spans."""
    dead_letter = handling.dead_letter
    return evolve(
        handling,
        handler=worker.spans.handler(handling.handler),
        dead_letter=None if dead_letter is None else worker.spans.handler(dead_letter),
    )


def with_metrics(worker: Worker, handling: Handling, meter: Meter | None) -> Handling:
    """Add metrics to the callbacks, if OpenTelemetry is installed."""
    try:
        from leasehold.adapters.consumer.metrics import WorkerMetrics  # noqa: PLC0415  OpenTelemetry is an optional dependency
    except ModuleNotFoundError:
        return handling
    metrics = WorkerMetrics(worker, cast("Any", meter))

    def measure_batch(holding: Holding, batch: Batch) -> None:
        try:
            metrics.read(holding, batch)
        finally:  # call the user's callback even if the metrics fail
            handling.measure(holding, batch)

    def report_slow_call(holding: Holding, seconds: float) -> None:
        try:
            metrics.slow(holding)
        finally:
            handling.slow(holding, seconds)

    def report_dead_letter(holding: Holding, error: Exception) -> None:
        try:
            metrics.dead_lettered(holding)
        finally:
            handling.dead_lettered(holding, error)

    # Usually the user has set no callback. Calling the metrics directly then saves a call per batch.
    has_default_measure = handling.measure is fields(Handling).measure.default
    return evolve(
        handling,
        measure=metrics.read if has_default_measure else measure_batch,
        slow=report_slow_call,
        dead_lettered=report_dead_letter,
    )


def by_key(handler: Callable[[Delivery], Awaitable[object]], most: int) -> Handler:
    """Return a handler that splits each batch by partition key and calls `handler` for several keys at once.

    The records of one key stay together, in order, and so do the records without a key.

    Args:
        handler: An `async def` function of one batch.
        most: The maximum number of keys of a batch to handle at once.

    Raises:
        ValueError: `most` is below 1, or the handler is not an `async def` function.

    Examples:
        >>> from leasehold.adapters import by_key
        >>> async def handle(record) -> None:
        ...     print(record.partition_key)
        >>> callable(by_key(handle, 4))
        True
    """
    if most < 1:
        raise ValueError(f"concurrency: {most} is less than 1")
    function: Any = handler
    while isinstance(function, partial):
        function = function.func
    if not any(map(inspect.iscoroutinefunction, (function, getattr(function, "__call__", None)))):  # noqa: B004
        raise ValueError("concurrency: only an `async def` handler can process several keys at once")

    async def handle(delivery: Delivery) -> None:
        # The dictionary keeps the keys in the order of their first records.
        records_by_key = dict[str | None, list[Record]]()
        for record in delivery.records:
            records_by_key.setdefault(record.partition_key, []).append(record)
        record_groups, faults = iter(records_by_key.values()), list[BaseException]()

        async def handle_keys() -> None:
            """Handle one key after another, until no keys are left or one has failed."""
            for records in record_groups:
                if faults:
                    return
                try:
                    fault = fault_in_result(await handler(delivery.part(records)))
                except asyncio.CancelledError as error:
                    if (task := asyncio.current_task()) is not None and task.cancelling():
                        raise  # the whole batch was given up
                    fault = Unhandled(f"it raised {error_summary(error)}")
                except BaseException as error:  # noqa: BLE001  raised again once the other keys have ended
                    faults.append(error)
                    return
                if fault is not None:
                    faults.append(fault)

        await asyncio.gather(*(handle_keys() for _ in range(min(most, len(delivery.records)))))
        if faults:
            raise faults[0]

    return handle
