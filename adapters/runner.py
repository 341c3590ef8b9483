"""Threads and a monotonic clock that keep a worker's appointments: renewing, turning, and reading.

A signal to end (SIGTERM, SIGINT) drains: the running batch is finished, checkpointed, and its lease
released; a second one ends the process at once, and its leases wait for expiry.
"""

import logging
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from threading import Event, Thread
from typing import TYPE_CHECKING, TypeVar

from attrs import evolve

from adapters.appointments import Appointments, Step
from adapters.handling import Handler, Handling
from adapters.holding import Holding
from adapters.holdings import WorkerError
from adapters.reading import Reading
from adapters.renewing import RETRY_SECONDS
from adapters.source import Batch, SourceError
from adapters.worker import Worker
from balancer.cadence import start_seconds
from stores.protocol import StoreError

if TYPE_CHECKING:  # an extra
    from opentelemetry.metrics import Meter

log = logging.getLogger("leasehold.runner")

# With the few others at most 64 threads; twenty writers claim a thousand leases in a second and a half.
READERS = 30
WRITERS = 20
RENEWERS = 10
ENDING = (signal.SIGTERM, signal.SIGINT)

T = TypeVar("T")


class Runner:
    """Runs one worker until it is stopped.

    worker    is given this runner as its consumer
    handling  who handles records; a plain function is handled with the default policy
    readers   how many shards may be read or handled side by side
    writers   how many leases may be claimed side by side, and at most ten renewed
    meter     where metrics go, if OpenTelemetry is installed; to the program's own provider, if left out
    """

    def __init__(
        self,
        worker: Worker,
        handling: Handling | Handler,
        *,
        readers: int = READERS,
        writers: int = WRITERS,
        meter: "Meter | None" = None,
    ) -> None:
        self._worker = worker
        self._handling = _metered(worker, handling if isinstance(handling, Handling) else Handling(handling), meter)
        self._readings = Appointments(readers, worker.clock)
        sizes = {"renew": min(writers, RENEWERS), "act": writers}
        self._pools = [ThreadPoolExecutor(size, thread_name_prefix=f"leasehold-{name}") for name, size in sizes.items()]
        renewers, actors = self._pools
        worker.each_renewal, worker.each_action = partial(_begin, renewers), actors.map
        worker.consumer = self
        self._turn_sooner, self._renew_sooner = Event(), Event()
        worker.hurried = self._turn_sooner.set
        self._taking, self._renewing = Event(), Event()
        self._taking.set()
        self._renewing.set()
        # A queue, because its `put` may be called from a signal's handler; an Event's `set` may hang there.
        self._ends: SimpleQueue[Exception | None] = SimpleQueue()

    def run(self) -> None:
        """Work until `stop` is called; returns once everything is released.

        Raises WorkerError, StoreError or SourceError if the worker cannot go on, after having released.
        """
        pause = start_seconds(self._worker.me, self._worker.config)  # C15
        turning = self._thread("turn", self._worker.turn, self._turn_sooner, self._taking, pause)
        renewing = self._thread("renew", self._worker.renew, self._renew_sooner, self._renewing)
        end = self._ends.get()
        self._drain(turning)
        self._renewing.clear()
        self._renew_sooner.set()
        renewing.join()
        self._readings.close()
        for pool in self._pools:
            pool.shutdown()
        if end is not None:
            raise end

    def stop(self) -> None:
        """Finish the running batches, checkpoint, release, and let `run` return."""
        self._ends.put(None)

    def begin(self, holding: Holding) -> None:
        """Read what has become ours; during the drain, only to release it."""
        if not self._taking.is_set():
            holding.ask_release()
        self._readings.add(holding.key, self.reading(holding))

    def reading(self, holding: Holding) -> Step:
        """What is done with a lease that has become ours, step by step; another kind of consumer overrides it."""
        return Reading(self._worker, holding, self._handling).step

    def part(self, holding: Holding) -> None:
        """Have its reading finish the running batch, then give it up."""
        self._readings.hurry(holding.key)

    def _drain(self, turning: Thread) -> None:
        self._taking.clear()
        self._turn_sooner.set()
        self._part_with_all()
        turning.join()
        self._worker.close()
        # The last turn may have won leases in between; they were asked to be released as they began.
        self._part_with_all()
        self._readings.drain()

    def _part_with_all(self) -> None:
        for holding in self._worker.holdings:
            holding.ask_release()
            self._readings.hurry(holding.key)

    def _thread(
        self, name: str, work: Callable[[float], float], sooner: Event, going: Event, pause: float = 0.0
    ) -> Thread:
        thread = Thread(target=self._keep, args=(work, sooner, going, pause), name=f"leasehold-{name}", daemon=True)
        thread.start()
        return thread

    def _keep(self, work: Callable[[float], float], sooner: Event, going: Event, pause: float) -> None:
        clock = self._worker.clock
        sooner.wait(pause)
        while going.is_set():
            sooner.clear()
            due = self._call(work, clock())
            if going.is_set():
                sooner.wait(min(max(0.0, due - clock()), threading.TIMEOUT_MAX))

    def _call(self, work: Callable[[float], float], now: float) -> float:
        try:
            return work(now)
        except (WorkerError, StoreError, SourceError) as fault:
            self._ends.put(fault)
            return now + RETRY_SECONDS
        except Exception:
            log.exception("unexpected fault, trying again in %g s", RETRY_SECONDS)
            return now + RETRY_SECONDS


def _begin(pool: ThreadPoolExecutor, function: Callable[[T], object], items: Iterable[T]) -> Iterable[object]:
    """A request may stall for as long as the client library waits; no other lease's renewal waits with it."""
    begun = [pool.submit(function, item) for item in items]
    for each in begun:
        each.add_done_callback(_tell)
    return begun


def _tell(over: Future[object]) -> None:
    if fault := over.exception():
        log.error("unexpected fault", exc_info=fault)


def _metered(worker: Worker, handling: Handling, meter: "Meter | None") -> Handling:
    try:
        from adapters.metrics import Metrics  # noqa: PLC0415  OpenTelemetry is an extra
    except ModuleNotFoundError:
        return handling
    metrics = Metrics(worker, meter)

    def measure(holding: Holding, batch: Batch) -> None:
        metrics.read(holding, batch)
        handling.measure(holding, batch)

    return evolve(handling, measure=measure)


def run(
    worker: Worker,
    handling: Handling | Handler,
    *,
    readers: int = READERS,
    writers: int = WRITERS,
    meter: "Meter | None" = None,
) -> None:
    """Run a worker in this process until a signal ends it.

    In a thread other than the main one no signal is listened to: use a `Runner` and its `stop`.
    """
    runner = Runner(worker, handling, readers=readers, writers=writers, meter=meter)
    with _stopping_on_signals(runner):
        runner.run()


@contextmanager
def _stopping_on_signals(runner: Runner) -> Iterator[None]:
    def stop(_number: int, _frame: object) -> None:
        for each in ENDING:
            signal.signal(each, signal.SIG_DFL)  # the next one ends the process at once
        runner.stop()

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {each: signal.signal(each, stop) for each in ENDING}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
