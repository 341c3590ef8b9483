"""The front door, which `leasehold` itself opens: `run`, `arun`, `worker`, `read` and `produce`.

A source is a URL, or an object with the protocol of sources; leases likewise. The options are those of
`leasehold consume` by the same names (`Options`), checked by the code that the command uses; wrong ones raise a
ValueError, with the sentence that the command prints. `consuming` opens and runs the worker for all of them.

`read` hands batches to the iterating consumer. Its worker has no threads for handlers: a batch waits in `BatchQueue`
until the consumer asks for the next one, and only then is it looked whether the lease is still held. The call that
hands it over ends when the consumer asks once more, which acknowledges it; a consumer that goes away ends it with
`Withdrawn`, which acknowledges nothing. So all laws of the worker's readings hold, and none is written here again.
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
from leasehold.adapters.consumer.runner import Runner, endings
from leasehold.adapters.consumer.slices import SliceVerdict
from leasehold.adapters.consuming import Consumption, Options, consumption
from leasehold.adapters.processes import Origin
from leasehold.adapters.signals import forget_loop_handler, note_loop_handler
from leasehold.adapters.sources.protocol import Source
from leasehold.adapters.threads import SIGNAL_SECONDS, spawn
from leasehold.errors import SourceError, StoreError, WorkerError
from leasehold.stores.printable import escaped, said
from leasehold.stores.protocol import Store

if TYPE_CHECKING:  # extras bring these
    from boto3 import Session

    from leasehold.adapters.producing import ProduceOptions
    from leasehold.adapters.sources.kinesis.producer.producer import Producer


log = escaped(logging.getLogger("leasehold.runner"))


def run(
    source: str | Source, handler: Handler | Handling | str, *, leases: str | Store, **options: Unpack[Options]
) -> SliceVerdict | None:
    """Run a worker here until a signal ends it: SIGTERM and Ctrl-C finish the running batches and release the leases.

    In a thread other than the main one nothing listens to signals; `worker` and `arun` can be stopped from outside.

    Args:
        source: What to read, as `kinesis://orders`; or a `Source`.
        handler: Called with each batch: a plain or async function, its `module:function`, or a `Handling`.
        leases: Where the leases are kept, as `dynamodb://orders-app`; or a `Store`.
        options: The options of `leasehold consume` by the same names, with `_` for `-`.

    Returns:
        How much of the time range was read, if `until` is given; otherwise None.

    Raises:
        ValueError: An option is wrong; the message names it.
        WorkerError: The worker must not go on.
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
    described = consumption(source, leases, handler, options)
    with described.joined() as joined:
        return described.run(joined)


async def arun(
    source: str | Source, handler: Handler | Handling | str, *, leases: str | Store, **options: Unpack[Options]
) -> SliceVerdict | None:
    """Run a worker beside the tasks of this event loop, until its task is cancelled; then it drains.

    What an `async def` handler does happens in this loop, with the connections that belong to it; a plain handler is
    called in a thread. A SIGTERM that the program does not handle by itself drains, too, and this returns. The worker
    also drains if the coroutine is closed or the loop ends. An error that ends the worker is logged at once, since a
    task keeps its exception to itself until it is awaited.

    Args:
        source: What to read, as `kinesis://orders`; or a `Source`.
        handler: Called with each batch: a plain or async function, its `module:function`, or a `Handling`.
        leases: Where the leases are kept, as `dynamodb://orders-app`; or a `Store`.
        options: The same as those of `run`.

    Returns:
        How much of the time range was read, if `until` is given; otherwise None.

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
    described = consumption(source, leases, handler, options)
    letter, calls = described.handling.dead_letter, _LoopCalls(loop)
    handling = evolve(
        described.handling,
        handler=calls.calling(described.handling.handler),
        dead_letter=None if letter is None else calls.calling(letter),
    )
    over = asyncio.Event()
    background = WorkerThread(evolve(described, handling=handling), over=lambda: _tell(loop, over.set))
    try:
        _stop_with_loop(loop, background)
        with _draining_on_signals(loop, background.stop):
            try:
                await over.wait()
            except asyncio.CancelledError:
                if background.origin.left:
                    raise
                background.stop()
                while not over.is_set():
                    with suppress(asyncio.CancelledError):  # leases are released first; that has its own limit
                        await over.wait()
                raise
    finally:
        # By GeneratorExit, too: the coroutine was closed or dropped, and nothing can be awaited any more.
        background.drain_by_exit()
    return background.result()


@contextmanager
def worker(
    source: str | Source, handler: Handler | Handling | str, *, leases: str | Store, **options: Unpack[Options]
) -> Generator["WorkerThread"]:
    """Run a worker in the background for the length of a `with` block, whose end drains it: for tests and notebooks.

    The block is given the worker: `wait(seconds)` until it has ended by itself, `stop()` to end it sooner.

    Args:
        source: What to read, as `kinesis://orders`; or a `Source`.
        handler: Called with each batch: a plain or async function, its `module:function`, or a `Handling`.
        leases: Where the leases are kept, as `dynamodb://orders-app`; or a `Store`.
        options: The same as those of `run`.

    Yields:
        The worker.

    Raises:
        LeaseholdError: At the end of the block, the error that ended the worker.
        WorkerError: This is a forked child.

    Examples:
        >>> import leasehold, threading
        >>> came = threading.Event()
        >>> def handle(batch: leasehold.Delivery) -> None:
        ...     print(batch.shard, [record.data for record in batch.records])
        ...     came.set()
        >>> with leasehold.worker(orders, handle, leases="memory://notebook", initial_position="TRIM_HORIZON"):
        ...     came.wait()
        shard-0 [b'a book', b'a lamp']
        True
    """
    background = WorkerThread(consumption(source, leases, handler, options))
    try:
        yield background
    except BaseException:
        with suppress(WorkerError):  # this is a forked child, which has nothing to wait for
            background.stop()
            background.wait()
        raise  # what ended the worker is not to hide it
    background.stop()
    background.result()


def read(source: str | Source, *, leases: str | Store, **options: Unpack[Options]) -> "Batches":
    """Iterate over the batches of a worker's shards, by `for` or `async for`.

    The next step acknowledges the batch before. `break`, or an exception, acknowledges nothing: the leases are
    released, and that batch comes again to the next reader. Shards are handed over in turn, one batch at a time.

    One thread or task iterates. A step from another one raises RuntimeError while the first still has a batch or waits
    for one, because it would acknowledge a batch that is being handled. A step in a forked child raises WorkerError.

    Args:
        source: What to read, as `kinesis://orders`; or a `Source`.
        leases: Where the leases are kept, as `dynamodb://orders-app`; or a `Store`.
        options: The same as those of `run`.

    Returns:
        An iterator of `Delivery`, which is also a context manager.

    Raises:
        ValueError: An option is wrong; the message names it.

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


def produce(source: str, *, session: "Session | None" = None, **options: "Unpack[ProduceOptions]") -> "Producer":
    """Open a producer, which keeps the records of a partition key in order; the end of its `with` block drains it.

    Args:
        source: Where to write, as `kinesis://orders`; `profile=`, `role_arn=` and `external_id=` name credentials.
        session: A boto3 session with the credentials; None: those of the URL, or the environment.
        options: The options of `leasehold produce` that are not about lines, with `_` for `-`.

    Returns:
        A producer, whose `put(data, partition_key)` returns a future.

    Raises:
        ValueError: An option is wrong; the message names it.
        SourceError: The stream cannot be used; SourceUnavailable if it does not answer.

    Examples:
        >>> import leasehold
        >>> with leasehold.produce("kinesis://bookshop", linger_ms=50) as producer:
        ...     written = producer.put(b"a book", "customer-7")
        >>> written.result().shard
        'shardId-000000000000'
    """
    try:
        from leasehold.adapters.producing import open_producer  # noqa: PLC0415  an extra
    except ModuleNotFoundError as missing:
        raise SourceError(f"this stream needs {missing.name}; install leasehold[aws]") from missing
    return open_producer(source, options, session=session)


# A worker in the background


class WorkerThread:
    """A worker in a thread of its own, which opens, runs and closes it.

    over  called, in that thread, once it has ended
    """

    def __init__(
        self,
        described: Consumption,
        *,
        executor: HandlerExecutor | None = None,
        over: Callable[[], None] = lambda: None,
    ) -> None:
        self._described, self._executor, self._over = described, executor, over
        self._stopping, self._ended = Event(), Event()
        self.origin = Origin()
        self._runner: Runner | None = None
        self._verdict: SliceVerdict | None = None
        self._fault: BaseException | None = None
        spawn("leasehold-worker", self._work, self._failed)

    @property
    def id(self) -> str:
        """The worker's id."""
        return self._described.me

    def stop(self) -> None:
        """Have it finish the running batches, checkpoint and release; this does not wait."""
        self.origin.check()
        self._stopping.set()
        if self._runner is not None:
            self._runner.stop()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it has ended; False if that takes longer than so many seconds."""
        self.origin.check()
        if seconds is not None:
            return self._ended.wait(seconds)
        while not self._ended.wait(SIGNAL_SECONDS):
            pass
        return True

    def result(self) -> SliceVerdict | None:
        """Wait until it has ended; how much of a slice was read. Raises what ended it."""
        self.wait()
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault
        return self._verdict

    def drain_by_exit(self) -> None:
        """Stop it; if it still drains when the program ends, the program waits. In a forked child do nothing."""
        if not self.origin.left and not self._ended.is_set():
            self.stop()
            atexit.register(self._exit)

    def _exit(self) -> None:
        if not self.origin.left:
            self.wait()

    def _work(self) -> None:
        with self._described.joined(self._stopping) as joined:
            self._verdict = self._described.run(joined, executor=self._executor, begun=self._begun)
        self._end()

    def _begun(self, runner: Runner) -> None:
        self._runner = runner
        if self._stopping.is_set():  # asked for before there was anything to stop
            runner.stop()

    def _failed(self, fault: BaseException) -> None:
        unopened = self._runner is None and self._stopping.is_set() and isinstance(fault, StoreError | SourceError)
        self._fault = None if unopened else fault
        if isinstance(self._fault, Exception):
            log.error("worker %s has ended: %s", self.id, said(fault))
        self._end()

    def _end(self) -> None:
        self._ended.set()
        atexit.unregister(self._exit)
        self._over()


def _tell(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    with suppress(RuntimeError):  # the loop is closed, and nobody waits
        loop.call_soon_threadsafe(call)


def _stop_with_loop(loop: asyncio.AbstractEventLoop, background: WorkerThread) -> None:
    """Stop the worker once the loop is closed: no handler could await anything, and nobody could cancel the worker."""

    def watch() -> None:
        while not background.wait(SIGNAL_SECONDS):
            if loop.is_closed():
                log.error("worker %s ends: the event loop that it belongs to is closed", background.id)
                background.drain_by_exit()
                return

    spawn("leasehold-loop-watch", watch, lambda _fault: background.stop())


class _LoopCalls:
    """Calls functions of the user, and awaits in this loop what they return to be awaited.

    Once the loop is closed a call is withdrawn, because the worker lacks its loop and the records are not to blame.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._origin = loop, Origin()

    def calling(self, given: Callable[..., Awaitable[None] | None]) -> Any:  # noqa: ANN401  as given
        """Return the function to call in place of `given`."""

        def call(*arguments: Any) -> Any:  # noqa: ANN401  likewise
            with self._withdrawing():
                if self._loop.is_closed():
                    raise RuntimeError
                answer = given(*arguments)
            return self._awaited(answer) if inspect.isawaitable(answer) else answer

        return call

    @contextmanager
    def _withdrawing(self) -> Generator[None]:
        try:
            yield
        except Exception as fault:
            if self._loop.is_closed():
                raise Withdrawn("the event loop of its worker is closed") from fault
            raise

    async def _awaited(self, answer: Awaitable[object]) -> object:
        work = self._there(answer)
        with self._withdrawing():
            try:
                future = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
            except RuntimeError:
                for each in (work, answer):
                    if inspect.iscoroutine(each):
                        each.close()  # else Python would warn that nobody awaited it
                raise
            try:
                while not (await asyncio.wait({future}, timeout=SIGNAL_SECONDS))[0]:
                    if self._loop.is_closed():
                        raise RuntimeError  # a closed loop never finishes what it has begun
            except asyncio.CancelledError:
                future.cancel()
                raise
            return future.result()

    async def _there(self, answer: Awaitable[object]) -> object:
        raised: BaseException | None = None
        try:
            return await answer
        except BaseException as error:
            raised = error
            raise
        finally:
            self._origin.end_copy(raised)


@contextmanager
def _draining_on_signals(loop: asyncio.AbstractEventLoop, stop: Callable[[], None]) -> Generator[None]:
    """Stop on those signals to end that would end the process, as far as this loop can be told of signals."""
    heard = []
    for each in endings():
        if signal.getsignal(each) == signal.SIG_DFL:
            with suppress(NotImplementedError, RuntimeError, ValueError):  # Windows, or not the main thread
                loop.add_signal_handler(each, stop)
                note_loop_handler(each)
                heard.append(each)
    try:
        yield
    finally:
        for each in heard:
            loop.remove_signal_handler(each)
            forget_loop_handler(each)


# Batches for who iterates


class BatchQueue:
    """The executor of an iteration: no handler is called until the consumer takes the next batch."""

    stuck = False

    def __init__(self) -> None:
        self.changed = Condition()
        self._works: deque[Work] = deque()
        self.over = False
        self._told: Callable[[], None] = lambda: None

    def start(self, work: Work) -> None:
        """Keep it until the consumer asks."""
        with self.changed:
            self._works.append(work)
        self.tell()

    def withdraw(self, work: Work) -> bool:
        """Do not hand it over after all; False if the consumer has it."""
        with self.changed:
            if work not in self._works:
                return False
            self._works.remove(work)
            return True

    def replace(self, work: Work) -> None:
        """Do nothing: the consumer takes one batch at a time."""

    def close(self) -> None:
        """Do nothing: there are no threads."""

    def take(self) -> Work | None:
        """The work that waits longest, if there is any."""
        with self.changed:
            return self._works.popleft() if self._works else None

    def end(self) -> None:
        """Nothing comes any more."""
        self.over = True
        self.tell()

    def tell(self) -> None:
        """Wake who waits for a batch or the end."""
        with self.changed:
            self.changed.notify_all()
            told = self._told
        told()

    def wait(self) -> None:
        """Wait for a batch or the end; a signal's handler may be called meanwhile."""
        with self.changed:
            while not self.changed.wait_for(lambda: self._works or self.over, SIGNAL_SECONDS):
                pass

    async def awaited(self) -> None:
        """Wait likewise, without holding up the loop."""
        loop, news = asyncio.get_running_loop(), asyncio.Event()
        with self.changed:
            self._told = lambda: _tell(loop, news.set)
            there = bool(self._works) or self.over
        if not there:
            await news.wait()


class _Iteration:
    """The state of an iteration, which its threads know; they do not know the iterator, so that it can be dropped."""

    def __init__(self, described: Consumption) -> None:
        self.waiting = BatchQueue()
        self.origin = Origin()
        self.described = evolve(described, handling=evolve(described.handling, handler=self._hand))
        self.background: WorkerThread | None = None
        self.batch: Delivery | None = None
        self.answer: Future[None] = Future()

    def _hand(self, delivery: Delivery) -> Awaitable[None]:
        """Called in the consumer's own thread, as it asks for a batch."""
        self.batch, self.answer = delivery, (answer := Future[None]())

        async def answered() -> None:  # awaited on the worker's loop, while the consumer is at work
            await asyncio.wrap_future(answer)

        return answered()

    def begun(self) -> WorkerThread:
        if self.background is None:
            self.background = WorkerThread(self.described, executor=self.waiting, over=self.waiting.end)
        return self.background

    def settle(self, fault: Exception | None = None) -> None:
        """Acknowledge the batch that is out, or say that its consumer is gone; nothing if there is none."""
        if self.batch is None:
            return
        self.batch = None
        with suppress(InvalidStateError):  # it was given up meanwhile
            if fault is None:
                self.answer.set_result(None)
            else:
                self.answer.set_exception(fault)

    def next(self) -> Delivery | None:
        """The next batch whose lease is held, if one is there."""
        while (work := self.waiting.take()) is not None:
            work()
            if self.batch is not None:
                return self.batch
        return None

    def stop(self) -> None:
        if self.background is None:  # nothing was asked for yet
            self.waiting.end()
        else:
            self.background.stop()

    def leave(self) -> None:
        """End, and have what is out come again."""
        self.stop()
        self.settle(Withdrawn("its consumer takes no more batches"))

    def dropped(self) -> None:
        """Leave, and wait for the release of the leases; not in an event loop, which nothing may hold up."""
        if self.origin.left:
            return
        self.leave()
        if self.background is None:
            return
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            self.background.wait()
        else:
            self.background.drain_by_exit()


@frozen
class _Consumer:
    """The thread that iterates, and its task, if a task iterates."""

    thread: "weakref.ref[Thread] | None" = None
    task: "weakref.ref[asyncio.Task[Any]] | None" = None

    @classmethod
    def current(cls) -> "_Consumer":
        try:
            task = asyncio.current_task()
        except RuntimeError:  # no event loop runs here
            task = None
        return cls(weakref.ref(current_thread()), None if task is None else weakref.ref(task))

    @property
    def alive(self) -> bool:
        """Whether it may still handle a batch."""
        thread = None if self.thread is None else self.thread()
        if thread is None or not thread.is_alive():
            return False
        if self.task is None:
            return True
        task = self.task()
        return task is not None and not task.done() and not task.get_loop().is_closed()


class Batches:
    """Batches of a worker's shards, one at a time; `read` makes it, and the first step starts the worker.

    The next step acknowledges the batch before. `close`, the end of a `with` block, `break` and an exception do not:
    the leases are released, and the batch comes again. `stop` ends the iteration in good order: the step that finds
    the end acknowledges the batch that is out. A new `for` over the same object begins with the batch that is out.
    """

    def __init__(self, source: str | Source, leases: str | Store, options: Options) -> None:
        """Raises ValueError naming an option that is wrong."""
        # The handler, which is checked as one, is the consumer: `_Iteration` puts itself in its place.
        self._reading = _Iteration(consumption(source, leases, lambda _batch: None, options))
        self._again = self._closed = False
        self._entering, self._consumer = Lock(), _Consumer()
        # Where `for` was left by `break`, and nobody else has the iterator, it is gone at once.
        self._dropped = weakref.finalize(self, self._reading.dropped)

    def __iter__(self) -> Self:
        self._again = True
        return self

    def __next__(self) -> Delivery:
        with self._alone():
            while (batch := self._step()) is None:
                self._reading.waiting.wait()
            return batch

    def __aiter__(self) -> Self:
        self._again = True
        return self

    async def __anext__(self) -> Delivery:
        with self._alone():
            try:
                while (batch := self._step()) is None:
                    await self._reading.waiting.awaited()
            except StopIteration:
                raise StopAsyncIteration from None
            return batch

    @contextmanager
    def _alone(self) -> Generator[None]:
        """Let one thread or task step. Raises RuntimeError in another while the first may handle a batch."""
        self._reading.origin.check()
        me = _Consumer.current()
        with self._entering:
            if not self._closed and self._consumer != me and self._consumer.alive:
                raise RuntimeError(
                    "these batches are iterated by another thread or task: its batch would be acknowledged here; "
                    "give each its own leasehold.read"
                )
            self._consumer = me
        try:
            yield
        except BaseException:
            self._consumer = _Consumer()  # it has no batch
            raise

    def _step(self) -> Delivery | None:
        """The next batch, if there is one. Raises StopIteration at the end, and what ended the worker."""
        again, self._again = self._again, False
        reading = self._reading
        if self._closed:
            raise StopIteration
        if again and reading.batch is not None and not reading.batch.lost:
            return reading.batch  # left by a `break`, and not acknowledged
        reading.settle()
        if not reading.waiting.over:
            reading.begun()
            batch = reading.next()
            if batch is not None or not reading.waiting.over:
                return batch
        self._closed = True
        self._dropped.detach()
        if reading.background is not None:
            reading.background.result()
        raise StopIteration

    def stop(self) -> None:
        """End the iteration at its next step, which still acknowledges the batch before; from any thread or signal."""
        self._reading.origin.check()
        self._reading.stop()

    def close(self) -> None:
        """Release the leases, and wait for that; the batch that is out is not acknowledged."""
        self._closed = True
        self._dropped.detach()
        self._reading.origin.check()
        self._reading.leave()
        if self._reading.background is not None:
            self._reading.background.result()

    async def aclose(self) -> None:
        """Close, without holding up the loop."""
        await asyncio.to_thread(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_raised: object) -> None:
        self._leave(kind)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_raised: object) -> None:
        if kind is GeneratorExit:  # nothing can be awaited any more
            self._closed = True
            self._dropped()
        else:
            await asyncio.to_thread(self._leave, kind)

    def _leave(self, kind: type[BaseException] | None) -> None:
        with suppress(*() if kind is None else (Exception,)):  # what ended the worker is not to hide it
            self.close()
