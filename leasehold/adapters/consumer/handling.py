"""The handler of a user: how it is checked, the records that it is given, and the patience with it.

`consumer/attempts.py` does what follows a fault.

A handler or dead letter may be async, or return anything else to be awaited: the batch is done when that has ended,
on the one event loop of the worker. A handler at work for longer than `slow_seconds` is logged and counted, and
again whenever that time has doubled. Beyond `handler_seconds` its lease is released as after the last attempt.

Rule 1: a batch is done when its handler has returned None, or something to await that ended with None. Rule 2: any
other answer fails the batch, so no record is behind a checkpoint that its handler has not finished with. Rule 3: what
a user hands in is judged once when it is given, and each of its answers.

A batch may be handed over by its keys, side by side (`by_key`): the records of one key in order, those of others
meanwhile. Rule 4: the batch is done when all of its keys are. Rule 5: after a fault no further key begins, and the
batch has failed once all that are at work have ended: none of them is still at work when the batch comes again.
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
from leasehold.stores.printable import said


class Unhandled(Exception):
    """A call that ended without saying that its batch is done."""


class Ending(Unhandled):
    """A call that raised SystemExit or KeyboardInterrupt: the worker ends."""


class Withdrawn(Unhandled):
    """A call whose consumer takes no more: nothing failed, and its records are for the next owner of the lease."""


class NotAwaited(Unhandled):
    """A call whose answer could not be awaited here, for want of a thread or a descriptor: no fault of its records."""


def takes(*names: str) -> Callable[[Any, Any, Any], None]:
    """A check, for a field, that its callable can be called with so many arguments and is no generator.

    Raises ValueError, naming the field.
    """

    def check(_values: object, field: "Attribute[object]", given: object) -> None:
        if not callable(given):
            raise ValueError(f"{field.name}: {given!r} cannot be called")  # noqa: TRY004  bad usage
        whole: Any = given
        while isinstance(whole, partial):
            whole = whole.func
        for each in (whole, type(whole).__call__):
            if inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each):
                raise ValueError(
                    f"{field.name}: a generator does nothing when it is called; write a plain or async function"
                )
        try:
            # A decorator may bring arguments of its own, so what it decorates is not looked at.
            signature = inspect.signature(given, follow_wrapped=False)
        except (TypeError, ValueError):
            return  # some built-in functions have no signature
        try:
            signature.bind(*range(len(names)))
        except TypeError as misfit:
            what = f"{field.name}: it is called with ({', '.join(names)}), and that does not fit: {misfit}"
            raise ValueError(what) from None

    return check


def fault_of(answer: object) -> Unhandled | None:
    """The fault of an answer that cannot be awaited; None if it says that the batch is done."""
    if answer is None:
        return None
    if inspect.isgenerator(answer) or inspect.isasyncgen(answer):
        return Unhandled("it returned a generator, which has done nothing yet: use a plain or an async function")
    if inspect.iscoroutine(answer):
        answer.close()  # else Python would warn that nobody awaited it
    return Unhandled(
        f"it returned a value ({type(answer).__name__}): None says that the batch is done, nothing else does"
    )


def fault_from(error: BaseException) -> Exception:
    """An exception that the policy for failed batches can go by, whatever was raised."""
    if isinstance(error, Exception):
        return error
    kind = Ending if isinstance(error, SystemExit | KeyboardInterrupt) else Unhandled
    fault = kind(f"it raised {said(error)}")
    fault.__cause__ = error
    return fault


CHECKPOINT_SECONDS = 1.0
"""A write for each batch, five times a second, would cost a lease table five times as much as KCL's habits do."""


class HeldLease(Protocol):
    """The lease of a batch, as handlers see it."""

    @property
    def key(self) -> str:
        """The lease's key."""

    @property
    def lease(self) -> Lease:
        """The lease as last written or read."""

    @property
    def worker(self) -> str:
        """The worker that reads it."""

    @property
    def stream(self) -> str:
        """The stream's name, which not every lease carries."""

    @property
    def fence(self) -> int | None:
        """The lease's fencing number."""

    @property
    def lost(self) -> Event:
        """Set once it is lost."""

    def checkpoint(self, position: Position) -> bool:
        """Move its checkpoint forward; False if it is lost."""


@frozen
class Delivery:
    """A batch: records of one shard, in order. The next batch of the shard comes when this one is done.

    Attributes:
        records: What to process; all of it is checkpointed once the handler returns.
        read_to: The position after the last of them.
        behind_seconds: How far the batch is behind the tip of the shard; None if unknown.
        attempts: How often these records have been tried by this worker, this time included.
        in_parts: How many of these attempts were in a part of the batch, in search of the record that fails.

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
        """A part of these records as a batch, for a handler that shares a batch out; it cannot be checkpointed."""
        return evolve(self, records=records, read_to=records[-1].position, whole=False)

    def to_arrow(self) -> Any:  # noqa: ANN401  an extra has the type
        """The records as a `pyarrow.RecordBatch`, its columns as Spark's sources have them.

        Raises ModuleNotFoundError without pyarrow, and ValueError where the source has no columns.
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

        With namespace and group for an event hub; of several Kinesis streams `account:name:creationEpoch`.
        """
        return self._holding.stream

    @property
    def worker(self) -> str:
        """The id of the worker that hands this over."""
        return self._holding.worker

    @property
    def epoch(self) -> int | None:
        """A fencing number: it grows with each owner of this lease, and never falls, not by `reset` or `copy-leases`.

        None in the blobs of the Azure SDKs, where official workers count nothing.
        """
        return self._holding.fence

    @property
    def lost(self) -> bool:
        """Whether the lease was lost meanwhile: another worker will process these records too."""
        return self._holding.lost.is_set()

    def checkpoint(self, record: Record | None = None) -> bool:
        """Checkpoint everything up to this record as done.

        Args:
            record: A record of this batch; all of it, if left out.

        Returns:
            False if the lease is lost.

        Raises:
            ValueError: The record comes after this batch, or other keys of the batch are at work.
            OutcomeUnknown: The store does not answer.
            WorkerError: In a forked child.
        """
        if not self._whole:
            # A checkpoint says that all before it is done, and of the other keys nobody knows that yet.
            raise ValueError("checkpoint: other keys of this batch are at work; it is checkpointed once all are done")
        position = self.read_to if record is None else getattr(record, "position", None)
        if not isinstance(position, Position):
            raise TypeError(f"checkpoint: {type(record).__name__} is no record; give one of this batch")
        # What lies behind the batch was not handed over, and would be skipped after a crash.
        if position.order > self.read_to.order:
            raise ValueError(
                f"checkpoint: {position.sequence} is behind this batch, which ends at {self.read_to.sequence}"
            )
        return self._holding.checkpoint(position)


Handler = Callable[[Delivery], Awaitable[None] | None]
DeadLetter = Callable[[Delivery, Exception], Awaitable[None] | None]


@frozen
class FinalCheckpoint:
    """The last word of a handler that checkpoints by itself: its lease is to go, or its shard has no more records.

    ended  whether it is the end of the shard
    """

    ended: bool
    _holding: HeldLease
    _end: Callable[[], bool]

    @property
    def lease(self) -> str:
        """The key of the lease."""
        return self._holding.key

    def checkpoint(self, position: Position) -> bool:
        """Checkpoint everything up to here; False if the lease is lost. Raises OutcomeUnknown."""
        if not isinstance(position, Position):
            raise TypeError(f"checkpoint: {type(position).__name__} is no Position")
        return self._holding.checkpoint(position)

    def end(self) -> bool:
        """Finish the shard: the leases of its children, then its own. False if the lease is lost.

        Raises ValueError where the shard has not ended; StoreError or SourceUnavailable, and then it is to be tried
        again.
        """
        # Its records to come would be skipped: a finished lease is read by nobody.
        if not self.ended:
            raise ValueError("end: the shard has more records, or may have")
        return self._end()


Happening = Literal["initialize", "lease-lost", "shard-ended", "stopped"]
Observer = Callable[[Happening, Holding], None]
"""Called when the reading of a shard begins, and with the reason when it stops."""

Measure = Callable[[Holding, Batch], None]
"""Called with each batch that was read, before its records are handed over."""

Slowness = Callable[[Holding, float], None]
"""Called with the seconds that a slow handler has been at work, whenever these are logged."""


@frozen
class Handling:
    """The callables that handle records, and the patience with them.

    The onlookers (observer, measure, slow) are called in between and must not wait; their faults are logged once.

    handler             called with each batch; when it returns None, or what it returned was awaited, the batch is done
    attempts            how often a batch is handed over before its shard stops
    max_records         most records in a batch, de-aggregated; None: as many as one read brings
    least_wait_seconds  about the first wait between two attempts
    most_wait_seconds   no wait is longer
    bench_seconds       how long a stopped shard's lease is left to other workers
    dead_letter         takes over each record that no attempt could handle; None: nothing is ever skipped
    checkpoint_seconds  least time between two checkpoints of a shard; 0: after every batch. A hand-over, a stop, the
                        end of a shard and `Delivery.checkpoint` write at once, whatever it is
    late_checkpoints    after a theft, still checkpoint what this worker has handled (less is handled twice)
    observer            called when reading of a shard begins and stops
    measure             called with each batch that was read
    slow_seconds        a handler at work for longer is logged and counted, and another thread takes its place
    handler_seconds     a handler at work for longer is given up, and its lease released; infinity: never
    most_calls          most calls of the handler at a time, slow ones included; None: as many as there are threads
    slow                called whenever a handler is logged as slow
    final_checkpoint    the handler checkpoints by itself, and this is called before its lease goes and at the end of
                        its shard: what it returns from is not done by that. After a fault reading begins again at the
                        checkpoint. It goes without a dead letter

    Examples:
        >>> from leasehold.adapters import Handling
        >>> Handling(print, attempts=2).attempts
        2
    """

    handler: Handler = field(validator=takes("batch"))
    attempts: int = field(default=5, validator=ge(1))
    max_records: int | None = field(default=None, validator=optional(ge(1)))
    least_wait_seconds: float = field(default=0.2, validator=ge(0))
    most_wait_seconds: float = field(default=10.0, validator=ge(0))
    bench_seconds: float = field(default=60.0, validator=ge(0))
    dead_letter: DeadLetter | None = field(default=None, validator=optional(takes("batch", "error")))
    checkpoint_seconds: float = field(default=CHECKPOINT_SECONDS, validator=ge(0))
    late_checkpoints: bool = False
    observer: Observer = field(default=lambda _happening, _holding: None, validator=takes("happening", "holding"))
    measure: Measure = field(default=lambda _holding, _batch: None, validator=takes("holding", "batch"))
    slow_seconds: float = field(default=60.0, validator=[gt(0), lt(math.inf)])
    handler_seconds: float = field(default=math.inf, validator=gt(0))
    most_calls: int | None = field(default=None, validator=optional(ge(1)))
    slow: Slowness = field(default=lambda _holding, _seconds: None, validator=takes("holding", "seconds"))
    final_checkpoint: Callable[[FinalCheckpoint], Awaitable[None] | None] | None = field(
        default=None, validator=optional(takes("final_checkpoint"))
    )

    def __attrs_post_init__(self) -> None:
        if self.final_checkpoint is not None and self.dead_letter is not None:
            # A letter takes the place of a record that is done, and here only the handler says what is done.
            raise ValueError("dead_letter: a handler that checkpoints by itself goes without one")
        if self.final_checkpoint is not None and self.max_records is not None:
            # The next part would follow the former one although the handler has not checkpointed it.
            raise ValueError("max_records: a handler that checkpoints by itself takes whole batches")


def traced(worker: Worker, handling: Handling) -> Handling:
    """The handling with a span over each call of the handler and of the dead letter, where spans are told."""
    letter = handling.dead_letter
    return evolve(
        handling,
        handler=worker.spans.handler(handling.handler),
        dead_letter=None if letter is None else worker.spans.handler(letter),
    )


def metered(worker: Worker, handling: Handling, meter: Meter | None) -> Handling:
    """The handling with metrics, where OpenTelemetry is installed."""
    try:
        from leasehold.adapters.consumer.metrics import WorkerMetrics  # noqa: PLC0415  OpenTelemetry is an extra
    # OpenTelemetry is an extra: without it nothing is measured, and everything else works.
    except ModuleNotFoundError:
        return handling
    metrics = WorkerMetrics(worker, cast("Any", meter))

    def measure(holding: Holding, batch: Batch) -> None:
        try:
            metrics.read(holding, batch)
        finally:  # a fault of the one is no reason to leave the other out
            handling.measure(holding, batch)

    def slow(holding: Holding, seconds: float) -> None:
        try:
            metrics.slow(holding)
        finally:
            handling.slow(holding, seconds)

    # Where nobody looks on, as nearly always, each batch is spared a call.
    unwatched = handling.measure is fields(Handling).measure.default
    return evolve(handling, measure=metrics.read if unwatched else measure, slow=slow)


def by_key(handler: Callable[[Delivery], Awaitable[object]], most: int) -> Handler:
    """A handler that calls this one with the records of one partition key, for up to `most` keys of a batch at once.

    Records without a key stay together, in order. Raises ValueError if `most` is below 1, and for a handler that is no
    `async def`.

    Examples:
        >>> from leasehold.adapters import by_key
        >>> async def handle(record) -> None:
        ...     print(record.partition_key)
        >>> callable(by_key(handle, 4))
        True
    """
    if most < 1:
        raise ValueError(f"concurrency: {most} keys at once are none")
    whole: Any = handler
    while isinstance(whole, partial):
        whole = whole.func
    if not any(map(inspect.iscoroutinefunction, (whole, getattr(whole, "__call__", None)))):  # noqa: B004
        raise ValueError("concurrency: only an `async def` handler can be at work on several keys at once")

    async def handle(delivery: Delivery) -> None:
        # Each group in order, the groups by their first records.
        keyed = dict[str | None, list[Record]]()
        for record in delivery.records:
            keyed.setdefault(record.partition_key, []).append(record)
        groups, faults = iter(keyed.values()), list[BaseException]()

        async def work() -> None:
            """Hand over one key after the other, until there are no more or one has failed."""
            for records in groups:
                if faults:
                    return
                try:
                    fault = fault_of(await handler(delivery.part(records)))
                except asyncio.CancelledError as error:
                    if (task := asyncio.current_task()) is not None and task.cancelling():
                        raise  # the whole batch is given up
                    fault = Unhandled(f"it raised {said(error)}")
                except BaseException as error:  # noqa: BLE001  the other keys end first, whatever it is
                    faults.append(error)
                    return
                if fault is not None:
                    faults.append(fault)

        await asyncio.gather(*(work() for _ in range(min(most, len(delivery.records)))))
        if faults:
            raise faults[0]

    return handle
