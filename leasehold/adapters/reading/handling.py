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

Judges the callables that a user hands in: once when they are given, and each of their answers.

Rule 1: a batch is done when its handler has returned None, or something to await that ended with None. Rule 2: any
other answer fails the batch, so no record is behind a checkpoint that its handler has not finished with.

Finds the function that `module:function` on the command line names.

The onlookers of a reading: the worker's metrics and spans, then the user's own.

A fault in one is logged and ends there.
"""

import importlib
import inspect
import logging
import math
import sys
import sysconfig
import traceback
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from threading import Event
from types import ModuleType
from typing import Any, Literal, ParamSpec, Protocol, cast

from attrs import Attribute, evolve, field, frozen
from attrs.validators import ge, gt, lt, optional

from leasehold.adapters.reading.exporting import Meter
from leasehold.adapters.sources.protocol import Batch, InColumns, Record
from leasehold.adapters.worker.holding import Holding
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.model import Lease, Position
from leasehold.stores.printable import did_you_mean, escaped, said


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
        if _generates(given):
            raise ValueError(
                f"{field.name}: a generator does nothing when it is called; write a plain or async function"
            )
        if misfit := _misfit(given, len(names)):
            raise ValueError(f"{field.name}: it is called with ({', '.join(names)}), and that does not fit: {misfit}")

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


def _generates(given: Callable[..., object]) -> bool:
    while isinstance(given, partial):
        given = given.func
    return any(
        inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each) for each in (given, type(given).__call__)
    )


def _misfit(given: Callable[..., object], count: int) -> str:
    try:
        # A decorator may bring arguments of its own, so what it decorates is not looked at.
        signature = inspect.signature(given, follow_wrapped=False)
    except (TypeError, ValueError):
        return ""  # some built-in functions have no signature
    try:
        signature.bind(*range(count))
    except TypeError as misfit:
        return str(misfit)
    return ""


def complaint(error: Exception, where: str) -> str:
    """A sentence on what went wrong with these records."""
    if isinstance(error, Unhandled):
        return f"its handler failed on {where}: {error}"
    return f"its handler raised {type(error).__name__} on {where}"


def raised(error: Exception) -> BaseException | None:
    """The exception whose traceback is worth logging: a fault found in an answer has none."""
    return error.__cause__ if isinstance(error, Unhandled) else error


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
    in_parts        of these, how often in a part of their batch, while it is searched for the record that fails

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


@frozen
class Parting:
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
        return self._holding.checkpoint(position)

    def end(self) -> bool:
        """Finish the shard: the leases of its children, then its own. False if the lease is lost.

        Raises ValueError where the shard has not ended; StoreError or SourceUnavailable, and then it is to be tried
        again.
        """
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
    parting             the handler checkpoints by itself, and this is called before its lease goes and at the end of
                        its shard: what it returns from is not done by that. After a fault reading begins again at the
                        checkpoint. It goes without a dead letter

    Examples:
        >>> from leasehold.adapters import Handling
        >>> Handling(print, attempts=2).attempts
        2
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
    parting: Callable[[Parting], Awaitable[None] | None] | None = field(
        default=None, validator=optional(takes("parting"))
    )

    def __attrs_post_init__(self) -> None:
        if self.parting is not None and self.dead_letter is not None:
            raise ValueError("dead_letter: a handler that checkpoints by itself goes without one")


IMPORTING = (__file__, importlib.__file__, "<frozen importlib")
"""Frames of a traceback that only lead to the user's file."""

LIBRARIES = ("<frozen", *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))
"""Frames that the user's file led to."""


def load(text: str) -> Callable[..., Any]:
    """The function named. Raises ValueError, saying what is missing, or what is wrong in which line of which file."""
    module, _, name = text.partition(":")
    if not module or not name:
        raise ValueError(f"{text!r} is not of the form module:function")
    here = str(Path.cwd())
    if here not in sys.path:
        # A command, unlike `python -m`, does not look in the folder it is called in. Last, or a file beside the user
        # would stand for a library of its name.
        sys.path.append(here)
    found = getattr(_imported(text, module), name, None)
    if not callable(found):
        functions = [each for each, value in vars(sys.modules[module]).items() if callable(value)]
        hint = did_you_mean(name, functions)
        raise ValueError(f"{text!r}: module {module!r} has no function {name!r}{hint}")  # noqa: TRY004  bad usage
    function: Callable[..., Any] = found
    return function


def _imported(text: str, module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except SyntaxError as wrong:
        raise ValueError(f"{text!r}: {wrong.filename}, line {wrong.lineno}: {wrong.msg}") from wrong
    except Exception as wrong:
        if isinstance(wrong, ModuleNotFoundError) and not _place(wrong):
            hint = did_you_mean(str(wrong.name), [each.stem for each in Path.cwd().glob("*.py")])
            raise ValueError(f"{text!r}: there is no module {wrong.name!r} here{hint}") from wrong
        raise ValueError(f"{text!r}: {_place(wrong)}: {said(wrong)}") from wrong


def _place(wrong: Exception) -> str:
    """The file and line that raised it; nothing where no file had begun to run."""
    frames = [each for each in traceback.extract_tb(wrong.__traceback__) if not each.filename.startswith(IMPORTING)]
    own = [each for each in frames if not each.filename.startswith(LIBRARIES)] or frames
    return f"{own[-1].filename}, line {own[-1].lineno}" if own else ""


log = escaped(logging.getLogger("leasehold.runner"))

P = ParamSpec("P")


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
        from leasehold.adapters.reading.metrics import WorkerMetrics  # noqa: PLC0415  OpenTelemetry is an extra
    except ModuleNotFoundError:
        return handling
    metrics = WorkerMetrics(worker, cast("Any", meter))
    count_read, count_slow = _harmless(metrics.read), _harmless(metrics.slow)

    def measure(holding: Holding, batch: Batch) -> None:
        count_read(holding, batch)
        handling.measure(holding, batch)

    def slow(holding: Holding, seconds: float) -> None:
        count_slow(holding)
        handling.slow(holding, seconds)

    return evolve(handling, measure=measure, slow=slow)


def _harmless(told: Callable[P, object]) -> Callable[P, None]:
    said: list[bool] = []

    def tell(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            told(*args, **kwargs)
        except Exception as fault:
            # The fault comes again with each reading: one trace is enough for a log.
            log.log(logging.DEBUG if said else logging.ERROR, "metrics raised; going on without them", exc_info=fault)
            said.append(True)

    return tell
