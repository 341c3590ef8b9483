"""The records that a handler is given, and what happens when it fails or does not return.

The policy: a batch whose handler raises, or answers anything but None, is handed over again after a growing wait,
without the records the handler has already checkpointed. After the last attempt the shard stops here and says so: its
lease is released, so that another worker, whose connections or disk may be in order, can try; this one
does not take it again for `bench_seconds`. Nothing is skipped, unless a `dead_letter` was given: then the batch is
handed over in halves, down to the records that fail by themselves (`bisection`). Each of these is handed to the dead
letter, as a batch of one record, with its error, and only if that ends with None does the shard go on behind it.

A handler or dead letter may be async, or return anything else to be awaited: the batch is done when that has ended,
on the one event loop of the worker. A handler at work for longer than `slow_seconds` is logged and counted, and
again whenever that time has doubled. Beyond `handler_seconds` its lease is released as after the last attempt.
"""

import math
from collections.abc import Awaitable, Callable, Sequence
from threading import Event
from typing import Any, Literal, Protocol

from attrs import evolve, field, frozen
from attrs.validators import ge, gt, lt, optional

from leasehold.adapters.reading.handlers.answers import takes
from leasehold.adapters.sources.protocol import Batch, InColumns, Record
from leasehold.adapters.worker.holding import Holding
from leasehold.balancer.model import Lease, Position

CHECKPOINT_SECONDS = 1.0
"""A write for each batch, five times a second, would cost a lease table five times as much as KCL's habits do."""


class HeldLease(Protocol):
    """The lease that a batch came by, as far as a handler is told of it."""

    @property
    def key(self) -> str:
        """Its key."""

    @property
    def lease(self) -> Lease:
        """The lease as last written or read."""

    @property
    def worker(self) -> str:
        """The worker that reads it."""

    @property
    def fence(self) -> int | None:
        """Its fencing number."""

    @property
    def lost(self) -> Event:
        """Set once it is lost."""

    def checkpoint(self, position: Position) -> bool:
        """Move its checkpoint forward; False if it is lost."""


@frozen
class Delivery:
    """Records handed over, in order; one batch of a shard at a time.

    records         what to process; the whole of it is checkpointed once the handler returns
    read_to         the position behind all of them
    behind_seconds  how far behind the tip of the shard, or None if unknown
    attempts        how often these records have been handed over here, this time included
    """

    records: Sequence[Record]
    read_to: Position
    behind_seconds: float | None
    _holding: HeldLease
    _in_columns: InColumns | None = None
    attempts: int = 1
    _whole: bool = True

    def part(self, records: Sequence[Record]) -> "Delivery":
        """Some of these records as a batch, for a handler that shares a batch out; it cannot be checkpointed."""
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
        """The stream's name, as leases carry it: of a hub with namespace and group, "" of a single Kinesis stream."""
        return self._holding.lease.stream

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
        """Checkpoint everything up to this record (all, if left out) as done; False if the lease is lost.

        Raises ValueError for a record behind this batch, or where this is a part of one, beside others; OutcomeUnknown
        if the store does not answer.
        """
        if not self._whole:
            raise ValueError("checkpoint: other keys of this batch are at work; it is checkpointed once all are done")
        position = self.read_to if record is None else record.position
        if position.order > self.read_to.order:
            raise ValueError(
                f"checkpoint: {position.sequence} is behind this batch, which ends at {self.read_to.sequence}"
            )
        return self._holding.checkpoint(position)


Handler = Callable[[Delivery], Awaitable[None] | None]
DeadLetter = Callable[[Delivery, Exception], Awaitable[None] | None]

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
    slow                called whenever a handler is logged as slow
    """

    handler: Handler = field(validator=takes("batch"))
    attempts: int = field(default=5, validator=ge(1))
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
    slow: Slowness = field(default=lambda _holding, _seconds: None, validator=takes("holding", "seconds"))
