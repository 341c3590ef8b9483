"""Runs a worker of a slice until the whole slice is read, by whatever workers it has."""

import inspect
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, cast

from attrs import evolve, frozen

from leasehold.adapters.reading.handlers.handling import Delivery, Handler, Handling, Happening
from leasehold.adapters.reading.run import stopping_on_signals
from leasehold.adapters.reading.runner import DRAIN_SECONDS, MEMORY_BYTES, Runner
from leasehold.adapters.sources.protocol import SourceError
from leasehold.adapters.threads import spawn
from leasehold.adapters.worker.holding import Holding
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.actions import Create
from leasehold.balancer.model import Lease, Me
from leasehold.balancer.plan import plan
from leasehold.stores.printable import escaped
from leasehold.stores.protocol import StoreError

if TYPE_CHECKING:  # an extra
    from opentelemetry.metrics import Meter

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
    meter: "Meter | None" = None,
    drain_seconds: float = DRAIN_SECONDS,
    memory_bytes: int = MEMORY_BYTES,
    look_seconds: float = LOOK_SECONDS,
) -> SliceVerdict:
    """Run a worker of a slice until all of the slice is read, or a signal ends the worker.

    worker        its store and its source are those that `Slice` made, its initial position is where the slice begins
    look_seconds  between two looks whether the slice is read
    Raises what `run` raises.
    """
    count = _Count(handling if isinstance(handling, Handling) else Handling(handling))
    runner = Runner(worker, count.handling, meter=meter, drain_seconds=drain_seconds, memory_bytes=memory_bytes)
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
    watcher.join(drain_seconds)
    if faults:
        raise faults[0]
    return finished.is_set()


def is_read(worker: Worker, finished: Callable[[Lease], bool] = lambda lease: lease.ended) -> bool:
    """Whether every lease is finished, and no shard of the stream wants another one; False if that is unknown."""
    try:
        listing = worker.store.list()
        if listing.malformed or not listing.leases or not all(map(finished, listing.leases)):
            return False
        shards = worker.source.shards()
        wanted = plan(listing.leases, shards, Me(worker.me, 0), worker.config)
    except (StoreError, SourceError) as fault:
        log.warning("whether the slice is read is not known yet: %s", fault)
        return False
    return not any(isinstance(action, Create) for action in wanted)


class _Count:
    """Counts what the callables of a handling have finished with."""

    def __init__(self, handling: Handling) -> None:
        self.records = self.letters = self.shards = 0
        self._lock = threading.Lock()
        self._given, letter = handling, handling.dead_letter
        self.handling = evolve(
            handling, handler=self._handle, observer=self._observe, dead_letter=self._bury if letter else None
        )

    def _handle(self, delivery: Delivery) -> Awaitable[None] | None:
        return self._after(self._given.handler(delivery), len(delivery.records), 0)

    def _bury(self, delivery: Delivery, error: Exception) -> Awaitable[None] | None:
        letter = self._given.dead_letter
        return None if letter is None else self._after(letter(delivery, error), 0, len(delivery.records))

    def _after(self, answer: Awaitable[None] | None, records: int, letters: int) -> Awaitable[None] | None:
        if inspect.isawaitable(answer):
            return self._awaited(answer, records, letters)
        if answer is None:
            self._add(records, letters)
        return answer

    async def _awaited(self, answer: Awaitable[None], records: int, letters: int) -> None:
        ended = cast("object", await answer)
        if ended is None:
            self._add(records, letters)
        return cast("None", ended)

    def _add(self, records: int, letters: int) -> None:
        with self._lock:
            self.records += records
            self.letters += letters

    def _observe(self, happening: Happening, holding: Holding) -> None:
        if happening == "shard-ended":
            with self._lock:
                self.shards += 1
        self._given.observer(happening, holding)
