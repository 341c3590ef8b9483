"""What a record handler is given, and what happens when it raises.

The policy: a batch whose handler raises is handed over again after a growing wait, without the records
the handler has already checkpointed. After the last attempt the shard stops here and says so: its
lease is released, so that another worker, whose connections or disk may be in order, can try; this one
does not take it again for `bench_seconds`. Nothing is skipped, unless a `dead_letter` was given: it is
handed the batch and the error, and only if it returns does the shard go on behind that batch.
"""

from collections.abc import Callable
from typing import Literal

from attrs import field, frozen
from attrs.validators import ge

from adapters.holding import Holding
from adapters.source import Batch, Record
from balancer.model import Position


@frozen
class Delivery:
    """Records handed over, in order; one batch of a shard at a time.

    records         what to process; the whole of it is checkpointed once the handler returns
    read_to         the position behind all of them
    behind_seconds  how far behind the tip of the shard, or None if unknown
    """

    records: tuple[Record, ...]
    read_to: Position
    behind_seconds: float | None
    _holding: Holding

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
    def epoch(self) -> int:
        """A fencing number: it grows with each owner of this lease (0 where the store has none)."""
        return self._holding.epoch

    @property
    def lost(self) -> bool:
        """Whether the lease was lost meanwhile: another worker will process these records too."""
        return self._holding.lost.is_set()

    def checkpoint(self, record: Record | None = None) -> bool:
        """Say that everything up to this record (all, if left out) is done; False if the lease is lost.

        Raises ValueError for a record behind this batch, and OutcomeUnknown if the store does not answer.
        """
        position = self.read_to if record is None else record.position
        if position.order > self.read_to.order:
            raise ValueError(
                f"checkpoint: {position.sequence} is behind this batch, which ends at {self.read_to.sequence}"
            )
        return self._holding.checkpoint(position)


Handler = Callable[[Delivery], None]
DeadLetter = Callable[[Delivery, Exception], None]

Happening = Literal["initialize", "lease-lost", "shard-ended", "stopped"]
Observer = Callable[[Happening, Holding], None]
"""Told when reading of a shard begins, and why it stops."""

Measure = Callable[[Holding, Batch], None]
"""Told of each reading, before its records are handed over."""


@frozen
class Handling:
    """Who handles records, and how patiently.

    handler             called with each batch; when it returns, the batch is done
    attempts            how often a batch is handed over before its shard stops
    least_wait_seconds  about the first wait between two attempts
    most_wait_seconds   no wait is longer
    bench_seconds       how long a stopped shard's lease is left to other workers
    dead_letter         takes over a batch that no attempt could handle; None: nothing is ever skipped
    checkpoint_seconds  least time between two checkpoints of a shard; 0: after every batch
    late_checkpoints    after a theft, still say how far this worker came (less is done twice)
    observer            told when reading of a shard begins and stops
    measure             told what each reading brought
    """

    handler: Handler
    attempts: int = field(default=5, validator=ge(1))
    least_wait_seconds: float = field(default=0.2, validator=ge(0))
    most_wait_seconds: float = field(default=10.0, validator=ge(0))
    bench_seconds: float = field(default=60.0, validator=ge(0))
    dead_letter: DeadLetter | None = None
    checkpoint_seconds: float = field(default=0.0, validator=ge(0))
    late_checkpoints: bool = False
    observer: Observer = lambda _happening, _holding: None
    measure: Measure = lambda _holding, _batch: None
