"""Provides the functions that `leasehold` exports: `run`, `arun`, `worker`, `read` and `produce`.

The source is a URL or an object that implements the `Source` protocol, and the leases are a URL or a `Store`. The
options are those of `leasehold consume`, with the same names (`Options`), and the same code checks them. A wrong option
raises ValueError with the message that the command prints. `consuming` opens and runs the worker for `run`, `arun`,
`worker` and `read`.

`read` returns an iterator over batches. Its worker has no threads for handlers. Each batch waits in a `BatchQueue`
until the iterating program asks for it. Only then do we check that the lease is still held, and call the handler, which
passes the batch to the program. When the program asks for another batch, the handler's call ends, and its batch is
acknowledged. If the program stops iterating, the call ends with `Withdrawn`, and the batch is not acknowledged. All
guarantees of `LeaseReader` therefore hold for iterations, too.
"""

import asyncio
import atexit
import inspect
import logging
import signal
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Generator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from threading import Condition, Event, Lock, Thread, current_thread
from typing import TYPE_CHECKING, Any, Self, Unpack

from attrs import evolve, frozen

from leasehold.adapters.consumer.executors import HandlerExecutor, Work
from leasehold.adapters.consumer.handling import Delivery, Handler, Handling, Withdrawn
from leasehold.adapters.consumer.runner import Runner, termination_signals
from leasehold.adapters.consumer.slices import SliceVerdict
from leasehold.adapters.consuming import Consumption, check_consumption_options
from leasehold.adapters.options import Options, ProduceOptions
from leasehold.adapters.processes import Origin
from leasehold.adapters.signals import forget_loop_handler, note_loop_handler
from leasehold.adapters.sources.protocol import Source
from leasehold.adapters.threads import SIGNAL_SECONDS, spawn
from leasehold.errors import SourceError, StoreError, WorkerError
from leasehold.stores.printable import error_summary, make_safe_logger
from leasehold.stores.protocol import Store

if TYPE_CHECKING:  # these packages are optional
    from boto3 import Session

    from leasehold.adapters.sources.kinesis.producer.producer import Producer


log = make_safe_logger(logging.getLogger("leasehold.runner"))


def run(
    source: str | Source, handler: Handler | Handling | str, *, leases: str | Store, **options: Unpack[Options]
) -> SliceVerdict | None:
    """Run a worker until SIGTERM or Ctrl-C, then finish the running batches and release its leases.

    Signals are handled only if `run` is called in the main thread. To stop a worker without a signal, use `worker` or
    `arun`.

    Args:
        source: The stream to read, as a URL such as `kinesis://orders`, or a `Source`.
        handler: A plain or async function to call with each batch, its `module:function`, or a `Handling`.
        leases: Where to keep the leases, as a URL such as `dynamodb://orders-app`, or a `Store`.
        options: The options of `leasehold consume`, with the same names and `_` for `-`.

    Returns:
        How much of the time range was read, if `until` is given; otherwise None.

    Raises:
        ValueError: An option is wrong. The message names the option.
        WorkerError: The worker cannot continue.
        StoreError: The lease table cannot be used.
        SourceError: The stream cannot be used.

    Examples:
        >>> import leasehold
        >>> def handle(batch: leasehold.Delivery) -> None:
        ...     for record in batch.records:
        ...         print(batch.shard, record.partition_key, record.data)
        >>> leasehold.run("kinesis://orders", handle, leases="dynamodb://orders-app")  # doctest: +SKIP
        >>> slice = {"initial_position": "TRIM_HORIZON", "until": "now"}
        >>> leasehold.run(orders, handle, leases="memory://a-slice", **slice).finished
        shard-0 customer-7 b'a book'
        shard-0 customer-7 b'a lamp'
        True
    """
    consumption = check_consumption_options(source, leases, handler, options)
    with consumption.open_worker() as opened_worker:
        return consumption.run(opened_worker)


async def arun(
    source: str | Source, handler: Handler | Handling | str, *, leases: str | Store, **options: Unpack[Options]
) -> SliceVerdict | None:
    """Run a worker in this event loop, alongside other tasks, and drain the worker if the calling task is cancelled.

    An `async def` handler runs in this loop, so it can use connections that belong to the loop. A plain handler is
    called in a thread. If the program does not handle SIGTERM itself, the signal drains the worker, and this function
    returns. The worker also drains if the coroutine is closed or the loop ends. An error that ends the worker is logged
    immediately, because the exception of a task stays invisible until the task is awaited.

    Args:
        source: The stream to read, as a URL such as `kinesis://orders`, or a `Source`.
        handler: A plain or async function to call with each batch, its `module:function`, or a `Handling`.
        leases: Where to keep the leases, as a URL such as `dynamodb://orders-app`, or a `Store`.
        options: The same as for `run`.

    Returns:
        How much of the time range was read, if `until` is given; otherwise None.

    Raises:
        ValueError: An option is wrong. The message names the option.
        LeaseholdError: The error that ended the worker.

    Examples:
        >>> import asyncio, leasehold
        >>> async def handle(batch: leasehold.Delivery) -> None:
        ...     print(batch.shard, len(batch.records))
        >>> async def main() -> None:
        ...     slice = {"initial_position": "TRIM_HORIZON", "until": "now"}
        ...     await leasehold.arun(orders, handle, leases="memory://arun", **slice)
        >>> asyncio.run(main())
        shard-0 2
    """
    loop = asyncio.get_running_loop()
    consumption = check_consumption_options(source, leases, handler, options)
    dead_letter, loop_caller = consumption.handling.dead_letter, _LoopCaller(loop)
    handling = evolve(
        consumption.handling,
        handler=loop_caller.wrap_function(consumption.handling.handler),
        dead_letter=None if dead_letter is None else loop_caller.wrap_function(dead_letter),
    )
    worker_ended = asyncio.Event()
    worker_thread = WorkerThread(
        evolve(consumption, handling=handling), on_end=lambda: _call_soon(loop, worker_ended.set)
    )
    try:
        _stop_with_loop(loop, worker_thread)
        with _drain_on_signals(loop, worker_thread.stop):
            try:
                await worker_ended.wait()
            except asyncio.CancelledError:
                if worker_thread.origin.is_other_process:
                    raise
                worker_thread.stop()
                while not worker_ended.is_set():
                    with suppress(asyncio.CancelledError):  # first release the leases, which has a time limit
                        await worker_ended.wait()
                raise
    finally:
        # After GeneratorExit (the coroutine was closed or dropped) nothing can be awaited, so drain in the background.
        worker_thread.stop_and_drain_at_exit()
    return worker_thread.result()


@contextmanager
def worker(
    source: str | Source, handler: Handler | Handling | str, *, leases: str | Store, **options: Unpack[Options]
) -> Generator["WorkerThread"]:
    """Run a worker in the background during a `with` block, and drain it at the end, for example in tests or notebooks.

    Inside the block, call `wait(seconds)` to wait until the worker has ended by itself, or `stop()` to end it sooner.

    Args:
        source: The stream to read, as a URL such as `kinesis://orders`, or a `Source`.
        handler: A plain or async function to call with each batch, its `module:function`, or a `Handling`.
        leases: Where to keep the leases, as a URL such as `dynamodb://orders-app`, or a `Store`.
        options: The same as for `run`.

    Yields:
        The worker.

    Raises:
        ValueError: An option is wrong. The message names the option.
        LeaseholdError: The error that ended the worker, raised at the end of the block.
        WorkerError: The block ended in a forked child.

    Examples:
        >>> import leasehold, threading
        >>> batch_handled = threading.Event()
        >>> def handle(batch: leasehold.Delivery) -> None:
        ...     print(batch.shard, [record.data for record in batch.records])
        ...     batch_handled.set()
        >>> with leasehold.worker(orders, handle, leases="memory://notebook", initial_position="TRIM_HORIZON"):
        ...     batch_handled.wait()
        shard-0 [b'a book', b'a lamp']
        True
    """
    worker_thread = WorkerThread(check_consumption_options(source, leases, handler, options))
    try:
        yield worker_thread
    except BaseException:
        with suppress(WorkerError):  # raised in a forked child, which has nothing to wait for
            worker_thread.stop()
            worker_thread.wait()
        raise  # the worker's own error must not hide this one
    worker_thread.stop()
    worker_thread.result()


def read(source: str | Source, *, leases: str | Store, **options: Unpack[Options]) -> "Batches":
    """Iterate over the batches of a worker's shards with `for` or `async for`.

    Each step acknowledges the previous batch. If the loop is left by `break` or an exception, the current batch is not
    acknowledged. The leases are then released, and the next reader gets that batch again. Only one batch is returned at
    a time, whichever shard it comes from.

    Only one thread or task may iterate. While the first one has a batch or waits for one, a step in another thread or
    task raises RuntimeError, because that step would acknowledge a batch that is still being handled. A step in a
    forked child raises WorkerError.

    Args:
        source: The stream to read, as a URL such as `kinesis://orders`, or a `Source`.
        leases: Where to keep the leases, as a URL such as `dynamodb://orders-app`, or a `Store`.
        options: The same as for `run`.

    Returns:
        An iterator of `Delivery`, which is also a context manager.

    Raises:
        ValueError: An option is wrong. The message names the option.

    Examples:
        >>> import leasehold
        >>> for batch in leasehold.read(orders, leases="memory://loop", initial_position="TRIM_HORIZON"):
        ...     print(batch.shard, [record.data for record in batch.records])
        ...     break
        shard-0 [b'a book', b'a lamp']
        >>> with leasehold.read(orders, leases="memory://all", initial_position="TRIM_HORIZON", until="now") as batches:
        ...     for batch in batches:
        ...         print(batch.shard, len(batch.records))
        shard-0 2
    """
    return Batches(source, leases, options)


def produce(source: str, *, session: "Session | None" = None, **options: Unpack[ProduceOptions]) -> "Producer":
    """Open a producer, which keeps the records of each partition key in order.

    Use the producer in a `with` block, which drains it at the end.

    Args:
        source: The stream to write to, as a URL such as `kinesis://orders`. The URL's options `profile`, `role_arn` and
            `external_id` select credentials.
        session: A boto3 session with the credentials; by default those of the URL or of the environment.
        options: The options of `leasehold produce` that do not concern input lines, with `_` for `-`.

    Returns:
        A producer, whose `put(data, partition_key)` returns a future.

    Raises:
        ValueError: An option is wrong. The message names the option.
        SourceError: The stream cannot be used, or a package is missing.
        SourceUnavailable: The stream does not respond.

    Examples:
        >>> import leasehold
        >>> with leasehold.produce("kinesis://bookshop", linger_ms=50) as producer:
        ...     written = producer.put(b"a book", "customer-7")
        >>> written.result().shard
        'shardId-000000000000'
    """
    try:
        from leasehold.adapters.producing import open_producer  # noqa: PLC0415  an optional dependency
    except ModuleNotFoundError as missing:
        raise SourceError(f"this stream needs {missing.name}; install leasehold[aws]") from missing
    return open_producer(source, options, session=session)


# A worker in the background


class WorkerThread:
    """A worker that is opened, run and closed in its own thread.

    Args:
        settings: The worker's configuration.
        executor: Calls the handlers; by default in threads.
        on_end: Called in the worker's thread once the worker has ended.
    """

    def __init__(
        self,
        settings: Consumption,
        *,
        executor: HandlerExecutor | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._settings, self._executor, self._on_end = settings, executor, on_end
        self._stopping, self._ended = Event(), Event()
        self.origin = Origin()
        self._runner: Runner | None = None
        self._verdict: SliceVerdict | None = None
        self._raised_error: BaseException | None = None
        spawn("leasehold-worker", self._run_worker, self._on_failure)

    @property
    def id(self) -> str:
        """The worker's id."""
        return self._settings.me

    def stop(self) -> None:
        """Make the worker finish its running batches, checkpoint and release its leases. Returns immediately."""
        self.origin.check_same_process()
        self._stopping.set()
        if self._runner is not None:
            self._runner.stop()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the worker has ended. Return False if that takes longer than `seconds`."""
        self.origin.check_same_process()
        if seconds is not None:
            return self._ended.wait(seconds)
        while not self._ended.wait(SIGNAL_SECONDS):
            pass
        return True

    def result(self) -> SliceVerdict | None:
        """Wait until the worker has ended. Return how much of its slice was read, or raise the error that ended it."""
        self.wait()
        fault, self._raised_error = self._raised_error, None
        if fault is not None:
            raise fault
        return self._verdict

    def stop_and_drain_at_exit(self) -> None:
        """Stop the worker, and make the program wait at its exit until the worker has drained.

        In a forked child this does nothing.
        """
        if not self.origin.is_other_process and not self._ended.is_set():
            self.stop()
            atexit.register(self._wait_at_exit)

    def _wait_at_exit(self) -> None:
        if not self.origin.is_other_process:
            self.wait()

    def _run_worker(self) -> None:
        with self._settings.open_worker(self._stopping) as opened_worker:
            self._verdict = self._settings.run(
                opened_worker, executor=self._executor, on_runner_started=self._on_runner_begun
            )
        self._finish_thread()

    def _on_runner_begun(self, runner: Runner) -> None:
        self._runner = runner
        if self._stopping.is_set():  # `stop` was called before there was a runner
            runner.stop()

    def _on_failure(self, fault: BaseException) -> None:
        was_stopped_before_opening = (
            self._runner is None and self._stopping.is_set() and isinstance(fault, StoreError | SourceError)
        )
        self._raised_error = None if was_stopped_before_opening else fault
        if isinstance(self._raised_error, Exception):
            log.error("worker %s has ended: %s", self.id, error_summary(fault))
        self._finish_thread()

    def _finish_thread(self) -> None:
        self._ended.set()
        atexit.unregister(self._wait_at_exit)
        self._on_end()


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    with suppress(RuntimeError):  # the loop is closed, so nothing waits for the call
        loop.call_soon_threadsafe(call)


def _stop_with_loop(loop: asyncio.AbstractEventLoop, worker_thread: WorkerThread) -> None:
    """Stop the worker once the event loop is closed, because its handlers can no longer run."""

    def stop_once_loop_closed() -> None:
        while not worker_thread.wait(SIGNAL_SECONDS):
            if loop.is_closed():
                log.error("worker %s ends: the event loop that it belongs to is closed", worker_thread.id)
                worker_thread.stop_and_drain_at_exit()
                return

    spawn("leasehold-loop-watch", stop_once_loop_closed, lambda _fault: worker_thread.stop())


class _LoopCaller:
    """Calls the user's functions. If they return awaitables, these are awaited in the given event loop.

    If the event loop is closed, a handler call ends with `Withdrawn` and does not count as a failure of its records.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._origin = loop, Origin()

    def wrap_function(self, function: Callable[..., Awaitable[None] | None]) -> Any:  # noqa: ANN401  any function
        """Return a function that calls `function`, and awaits its result in the loop."""

        def call_in_loop(*arguments: Any) -> Any:  # noqa: ANN401  any arguments and result
            with self._withdraw_if_closed():
                if self._loop.is_closed():
                    raise RuntimeError
                result = function(*arguments)
            return self._await_in_loop(result) if inspect.isawaitable(result) else result

        return call_in_loop

    @contextmanager
    def _withdraw_if_closed(self) -> Generator[None]:
        try:
            yield
        except Exception as fault:
            if self._loop.is_closed():
                raise Withdrawn("the event loop of its worker is closed") from fault
            raise

    async def _await_in_loop(self, result: Awaitable[object]) -> object:
        coroutine = self._await_and_end_forked_copy(result)
        with self._withdraw_if_closed():
            try:
                future = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))
            except RuntimeError:
                for unawaited in (coroutine, result):
                    if inspect.iscoroutine(unawaited):
                        unawaited.close()  # otherwise Python warns that it was never awaited
                raise
            try:
                while not (await asyncio.wait({future}, timeout=SIGNAL_SECONDS))[0]:
                    if self._loop.is_closed():
                        raise RuntimeError  # a closed loop never finishes its tasks
            except asyncio.CancelledError:
                future.cancel()
                raise
            return future.result()

    async def _await_and_end_forked_copy(self, result: Awaitable[object]) -> object:
        raised_error: BaseException | None = None
        try:
            return await result
        except BaseException as error:
            raised_error = error
            raise
        finally:
            self._origin.end_forked_copy(raised_error)


@contextmanager
def _drain_on_signals(loop: asyncio.AbstractEventLoop, stop: Callable[[], None]) -> Generator[None]:
    """Call `stop` on the signals that would otherwise end the process, if this event loop can handle signals."""
    handled_signals = []
    for signal_number in termination_signals():
        if signal.getsignal(signal_number) == signal.SIG_DFL:
            with suppress(NotImplementedError, RuntimeError, ValueError):  # Windows, or not the main thread
                loop.add_signal_handler(signal_number, stop)
                note_loop_handler(signal_number)
                handled_signals.append(signal_number)
    try:
        yield
    finally:
        for signal_number in handled_signals:
            loop.remove_signal_handler(signal_number)
            forget_loop_handler(signal_number)


# Iterating over batches


class BatchQueue:
    """The executor of an iteration. It calls a handler only when the iterating program takes the next batch."""

    stuck = False

    def __init__(self) -> None:
        self.changed = Condition()
        self._queue: deque[Work] = deque()
        self.ended = False
        self._on_change: Callable[[], None] = lambda: None

    def start(self, work: Work) -> None:
        """Queue the work until the consumer asks for a batch."""
        with self.changed:
            self._queue.append(work)
        self.notify_consumer()

    def withdraw(self, work: Work) -> bool:
        """Remove the work, and return False if the consumer has taken it."""
        with self.changed:
            if work not in self._queue:
                return False
            self._queue.remove(work)
            return True

    def replace_slow_thread(self, work: Work) -> None:
        """Do nothing, because the consumer takes one batch at a time."""

    def close(self) -> None:
        """Do nothing, because there are no threads."""

    def take_oldest_work(self) -> Work | None:
        """Remove and return the work that has waited longest, or return None if there is none."""
        with self.changed:
            return self._queue.popleft() if self._queue else None

    def mark_ended(self) -> None:
        """End the queue, because no more work follows."""
        self.ended = True
        self.notify_consumer()

    def notify_consumer(self) -> None:
        """Wake the consumer if it is waiting for a batch or for the end of the worker."""
        with self.changed:
            self.changed.notify_all()
            on_change = self._on_change
        on_change()

    def wait_for_batch(self) -> None:
        """Wait for a batch or for the end of the worker. Signal handlers can run during the wait."""
        with self.changed:
            while not self.changed.wait_for(lambda: self._queue or self.ended, SIGNAL_SECONDS):
                pass

    async def wait_for_batch_async(self) -> None:
        """Wait for a batch or for the end of the worker, without blocking the event loop."""
        loop, changed = asyncio.get_running_loop(), asyncio.Event()
        with self.changed:
            self._on_change = lambda: _call_soon(loop, changed.set)
            is_ready = bool(self._queue) or self.ended
        if not is_ready:
            await changed.wait()


class _IterationState:
    """The state of an iteration.

    Threads refer to this object instead of the iterator, so that the iterator can be garbage-collected.
    """

    def __init__(self, settings: Consumption) -> None:
        self.batch_queue = BatchQueue()
        self.origin = Origin()
        self.settings = evolve(settings, handling=evolve(settings.handling, handler=self._deliver))
        self.worker_thread: WorkerThread | None = None
        self.batch: Delivery | None = None
        self.acknowledgment: Future[None] = Future()

    def _deliver(self, delivery: Delivery) -> Awaitable[None]:
        """Pass the batch to the consumer. This handler runs in the consumer's thread."""
        self.batch, self.acknowledgment = delivery, (acknowledgment := Future[None]())

        async def await_acknowledgment() -> None:  # awaited on the worker's loop while the consumer works
            await asyncio.wrap_future(acknowledgment)

        return await_acknowledgment()

    def start_worker(self) -> WorkerThread:
        if self.worker_thread is None:
            self.worker_thread = WorkerThread(
                self.settings, executor=self.batch_queue, on_end=self.batch_queue.mark_ended
            )
        return self.worker_thread

    def settle_batch(self, fault: Exception | None = None) -> None:
        """Acknowledge or fail the batch that the consumer is handling. If there is none, do nothing."""
        if self.batch is None:
            return
        self.batch = None
        with suppress(InvalidStateError):  # the call was given up meanwhile
            if fault is None:
                self.acknowledgment.set_result(None)
            else:
                self.acknowledgment.set_exception(fault)

    def take_next_batch(self) -> Delivery | None:
        """Return the next batch whose lease is still held, or None if no batch is waiting."""
        while (work := self.batch_queue.take_oldest_work()) is not None:
            work()
            if self.batch is not None:
                return self.batch
        return None

    def stop_worker(self) -> None:
        if self.worker_thread is None:  # the worker was not started yet
            self.batch_queue.mark_ended()
        else:
            self.worker_thread.stop()

    def end_without_acknowledging(self) -> None:
        """End without acknowledging the consumer's batch, which will be read again."""
        self.stop_worker()
        self.settle_batch(Withdrawn("its consumer takes no more batches"))

    def end_and_wait(self) -> None:
        """End the iteration. Wait until the leases are released, except in an event loop, which must not be blocked."""
        if self.origin.is_other_process:
            return
        self.end_without_acknowledging()
        if self.worker_thread is None:
            return
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            self.worker_thread.wait()
        else:
            self.worker_thread.stop_and_drain_at_exit()


@frozen
class _IteratingConsumer:
    """The thread that iterates and, if the iteration runs in an asyncio task, this task."""

    thread: "weakref.ref[Thread] | None" = None
    task: "weakref.ref[asyncio.Task[Any]] | None" = None

    @classmethod
    def find_current(cls) -> "_IteratingConsumer":
        try:
            task = asyncio.current_task()
        except RuntimeError:  # no event loop runs here
            task = None
        return cls(weakref.ref(current_thread()), None if task is None else weakref.ref(task))

    @property
    def is_alive(self) -> bool:
        """Whether the thread or task may still be handling a batch."""
        thread = None if self.thread is None else self.thread()
        if thread is None or not thread.is_alive():
            return False
        if self.task is None:
            return True
        task = self.task()
        return task is not None and not task.done() and not task.get_loop().is_closed()


class Batches:
    """An iterator over the batches of a worker's shards, one at a time, as returned by `read`.

    The first step starts the worker. Each further step acknowledges the previous batch. After `close`, the end of a
    `with` block, `break` or an exception, the current batch is not acknowledged. The leases are then released, and the
    batch is read again. `stop` ends the iteration cleanly, so that the last step, which ends the loop, acknowledges the
    last batch. A new `for` over the same object starts with the batch that is not acknowledged yet.
    """

    def __init__(self, source: str | Source, leases: str | Store, options: Options) -> None:
        """Raises a ValueError that names the option if an option is wrong."""
        # The lambda is a placeholder that passes the checks of handlers. `_IterationState` replaces it.
        self._iteration = _IterationState(check_consumption_options(source, leases, lambda _batch: None, options))
        self._resumed = self._closed = False
        self._lock, self._consumer = Lock(), _IteratingConsumer()
        # After a `break`, an iterator without other references is finalized immediately.
        self._finalizer = weakref.finalize(self, self._iteration.end_and_wait)

    def __iter__(self) -> Self:
        self._resumed = True
        return self

    def __next__(self) -> Delivery:
        with self._check_sole_consumer():
            while (batch := self._advance()) is None:
                self._iteration.batch_queue.wait_for_batch()
            return batch

    def __aiter__(self) -> Self:
        self._resumed = True
        return self

    async def __anext__(self) -> Delivery:
        with self._check_sole_consumer():
            try:
                while (batch := self._advance()) is None:
                    await self._iteration.batch_queue.wait_for_batch_async()
            except StopIteration:
                raise StopAsyncIteration from None
            return batch

    @contextmanager
    def _check_sole_consumer(self) -> Generator[None]:
        """Raise RuntimeError if another thread or task may be handling a batch of this iteration."""
        self._iteration.origin.check_same_process()
        this_consumer = _IteratingConsumer.find_current()
        with self._lock:
            if not self._closed and self._consumer != this_consumer and self._consumer.is_alive:
                raise RuntimeError(
                    "these batches are iterated by another thread or task: its batch would be acknowledged here; "
                    "give each its own leasehold.read"
                )
            self._consumer = this_consumer
        try:
            yield
        except BaseException:
            self._consumer = _IteratingConsumer()  # the consumer has no batch now
            raise

    def _advance(self) -> Delivery | None:
        """Return the next batch, or None if none is ready. Raises StopIteration, or the error that ended the worker."""
        resumed, self._resumed = self._resumed, False
        iteration = self._iteration
        if self._closed:
            raise StopIteration
        if resumed and iteration.batch is not None and not iteration.batch.lost:
            return iteration.batch  # this batch was not acknowledged when `break` left the loop
        iteration.settle_batch()
        if not iteration.batch_queue.ended:
            iteration.start_worker()
            batch = iteration.take_next_batch()
            if batch is not None or not iteration.batch_queue.ended:
                return batch
        self._closed = True
        self._finalizer.detach()
        if iteration.worker_thread is not None:
            iteration.worker_thread.result()
        raise StopIteration

    def stop(self) -> None:
        """End the iteration at its next step. That step still acknowledges the previous batch.

        May be called from any thread and from signal handlers.
        """
        self._iteration.origin.check_same_process()
        self._iteration.stop_worker()

    def close(self) -> None:
        """Release the leases and wait until that is done. The current batch is not acknowledged."""
        self._closed = True
        self._finalizer.detach()
        self._iteration.origin.check_same_process()
        self._iteration.end_without_acknowledging()
        if self._iteration.worker_thread is not None:
            self._iteration.worker_thread.result()

    async def aclose(self) -> None:
        """Close without blocking the event loop."""
        await asyncio.to_thread(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_raised: object) -> None:
        self._close_after_block(kind)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_raised: object) -> None:
        if kind is GeneratorExit:  # nothing can be awaited now
            self._closed = True
            self._finalizer()
        else:
            await asyncio.to_thread(self._close_after_block, kind)

    def _close_after_block(self, kind: type[BaseException] | None) -> None:
        with suppress(*() if kind is None else (Exception,)):  # the worker's error must not hide the caller's
            self.close()
