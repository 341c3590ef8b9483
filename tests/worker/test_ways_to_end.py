"""However a program leaves `run`, `arun`, `worker` or `read`, its leases are released and no thread or process remains.

The tests leave these functions by return, exception, cancellation, `close()`, garbage collection, a closed loop, fork
    and exit.
"""

import asyncio
import gc
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from running import WAIT
from virtual_fleet import FaultyStore, four_shards

import leasehold
from leasehold.adapters.api import WorkerThread
from leasehold.adapters.consumer.handling import DeadLetter, Handler
from leasehold.adapters.consumer.runner import Runner
from leasehold.adapters.options import Options
from leasehold.errors import StoreError
from leasehold.stores.urls import open_store
from leasehold_lab.simulator.world.world import ListSource, ShardRecords, create_records

pytestmark = pytest.mark.slow

BEGINNING = Options(initial_position="TRIM_HORIZON", checkpoint_seconds=0, lease_seconds=3)
NUMBERS = [created_record.sequence_number for created_record in create_records(8)]


def stream(count: int = 8) -> ListSource:
    """Return a stream with one shard, which is read in batches of one record."""
    return ListSource(four_shards()[:1], {"s-0": ShardRecords(create_records(count), size=1)})


EARLIER: set[threading.Thread] = set()
"""The threads that existed before the test."""


def worker_threads() -> list[threading.Thread]:
    """Return the threads of the workers that this test has started."""
    return [
        thread for thread in threading.enumerate() if thread.name.startswith("leasehold-") and thread not in EARLIER
    ]


def wait_for_final_checkpoint(store: FaultyStore) -> str:
    """Wait until no worker thread is left. Check that the lease has no owner, and return its checkpoint."""
    for thread in worker_threads():
        thread.join(WAIT)
    assert worker_threads() == []
    (lease,) = store.list().leases
    assert lease.owner is None
    return lease.checkpoint.sequence


@pytest.fixture(autouse=True)
def _leaves_handlers() -> Iterator[None]:
    """Check that workers restore the program's signal handlers."""
    EARLIER.clear()
    EARLIER.update(threading.enumerate())
    handlers_before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)] == handlers_before


class RecordingHandler:
    """A handler that records its batches, and sets an event at the first one."""

    def __init__(self) -> None:
        self.first = threading.Event()
        self.numbers: list[str] = []

    def __call__(self, batch: leasehold.Delivery) -> None:
        """Record the sequence number of the batch's record."""
        self.numbers.append(batch.records[0].sequence_number)
        self.first.set()

    async def awaited(self, batch: leasehold.Delivery) -> None:
        """Record the sequence number in the same way, as an async handler."""
        self(batch)


# Coroutines, generators and blocks that end


def _close(coroutine: Any) -> None:  # noqa: ANN401  a coroutine, or a generator
    coroutine.close()


def _collect(coroutine: Any) -> None:  # noqa: ANN401  a coroutine or a generator; the caller has dropped its reference
    del coroutine
    gc.collect()


@pytest.mark.parametrize("end", [_close, _collect])
def test_closed_or_collected_arun_drains(end: Callable[[Any], None]) -> None:
    store, recorder = FaultyStore(), RecordingHandler()
    loop = asyncio.new_event_loop()

    async def main() -> None:
        coroutines.append(leasehold.arun(stream(), recorder, leases=store, **BEGINNING))
        coroutines[0].send(None)  # as a task would do, until the coroutine waits
        await asyncio.to_thread(recorder.first.wait, WAIT)

    coroutines: list[Any] = []
    loop.run_until_complete(main())
    end(coroutines.pop())
    assert wait_for_final_checkpoint(store) == recorder.numbers[-1]
    loop.close()


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_arun_drains_once_its_loop_is_closed(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """When its event loop is closed, `arun` neither dead-letters nor skips a record."""
    store, recorder, dead_lettered = FaultyStore(), RecordingHandler(), list[str]()
    may_finish, second_batch_started = threading.Event(), threading.Event()

    def handle_sync(batch: leasehold.Delivery) -> None:
        if recorder.first.is_set():
            second_batch_started.set()
            may_finish.wait(WAIT)
        recorder(batch)

    async def handle_async(batch: leasehold.Delivery) -> None:
        if recorder.first.is_set():
            second_batch_started.set()
            await asyncio.Event().wait()
        recorder(batch)

    dead_letter: DeadLetter = lambda batch, _error: dead_lettered.append(batch.records[0].sequence_number)  # noqa: E731  typed
    loop = asyncio.new_event_loop()

    async def main() -> None:
        handler = handle_sync if kind == "plain" else handle_async
        options = BEGINNING | Options(dead_letter=dead_letter)
        held_tasks.append(loop.create_task(leasehold.arun(stream(), handler, leases=store, **options)))
        await asyncio.to_thread(second_batch_started.wait, WAIT)

    held_tasks: list[asyncio.Task[object]] = []  # keeps the task from being collected, which would end it
    loop.run_until_complete(main())
    loop.close()
    may_finish.set()
    assert wait_for_final_checkpoint(store) == recorder.numbers[-1]
    assert dead_lettered == []
    assert "the event loop that it belongs to is closed" in caplog.text
    _close(held_tasks[0].get_coro())
    caplog.clear()


def test_call_in_a_closed_loop_dead_letters_no_record() -> None:
    """If the event loop of an async handler is closed, the next owner of the lease gets the handler's records again."""
    store, recorder, dead_lettered = FaultyStore(), RecordingHandler(), list[str]()
    loop_closed, second_batch_started = threading.Event(), threading.Event()

    def handle(batch: leasehold.Delivery) -> Any:  # noqa: ANN401  an awaitable or None
        if recorder.first.is_set():
            second_batch_started.set()
            loop_closed.wait(WAIT)
            return recorder.awaited(batch)
        return recorder(batch)

    loop = asyncio.new_event_loop()
    dead_letter: DeadLetter = lambda batch, _error: dead_lettered.append(batch.records[0].sequence_number)  # noqa: E731  typed

    async def main() -> None:
        options = BEGINNING | Options(attempts=1, dead_letter=dead_letter)
        held_tasks.append(loop.create_task(leasehold.arun(stream(), handle, leases=store, **options)))
        await asyncio.to_thread(second_batch_started.wait, WAIT)

    held_tasks: list[asyncio.Task[object]] = []
    loop.run_until_complete(main())
    loop.close()
    loop_closed.set()
    assert (wait_for_final_checkpoint(store), dead_lettered) == (NUMBERS[0], [])
    _close(held_tasks[0].get_coro())


def test_arun_drains_however_often_it_is_cancelled() -> None:
    """The running batch is finished and the lease is released before the task ends."""
    store = FaultyStore()

    async def main() -> None:
        batch_started, may_finish = asyncio.Event(), asyncio.Event()

        async def handle(_batch: leasehold.Delivery) -> None:
            batch_started.set()
            await may_finish.wait()

        task = asyncio.create_task(leasehold.arun(stream(), handle, leases=store, **BEGINNING))
        await batch_started.wait()
        for _ in range(3):
            task.cancel()
            await asyncio.wait({task}, timeout=0)
        may_finish.set()
        with suppress(asyncio.CancelledError):
            await task
        (lease,) = store.list().leases
        assert (lease.owner, lease.checkpoint.sequence) == (None, NUMBERS[0])

    asyncio.run(asyncio.wait_for(main(), WAIT))


def test_worker_that_begins_while_it_is_stopped_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    stop_called, runner_begun = threading.Event(), threading.Event()
    on_runner_begun = WorkerThread._on_runner_begun  # noqa: SLF001  between two steps of `stop`

    def begin_during_stop(worker: WorkerThread, runner: Runner) -> None:
        stop_called.wait(WAIT)
        on_runner_begun(worker, runner)
        runner_begun.set()

    class EventAfterBeginning(threading.Event):
        """An event that is set only after the worker has begun."""

        def set(self) -> None:
            stop_called.set()
            runner_begun.wait(WAIT)
            super().set()

    monkeypatch.setattr(WorkerThread, "_on_runner_begun", begin_during_stop)
    monkeypatch.setattr("leasehold.adapters.api.Event", EventAfterBeginning)
    with leasehold.worker(stream(), print, leases=FaultyStore(), **BEGINNING) as worker:
        worker.stop()
        assert worker.wait(WAIT)


@pytest.mark.parametrize("end", [_close, _collect, None], ids=["close", "collect", "raise"])
def test_worker_block_that_ends_early_has_drained(end: Callable[[Any], None] | None) -> None:
    store, recorder, blocks = FaultyStore(), RecordingHandler(), list[Any]()

    def block() -> Any:  # noqa: ANN401  a generator
        with leasehold.worker(stream(), recorder, leases=store, **BEGINNING) as worker:
            blocks.append(worker)
            assert recorder.first.wait(WAIT)
            yield
            raise LookupError

    generator = block()
    next(generator)
    if end is None:
        with pytest.raises(LookupError):
            next(generator)
    else:
        suspended, generator = generator, None
        only_reference = [suspended]
        del suspended
        end(only_reference.pop())
    assert blocks[0].wait(0)
    assert wait_for_final_checkpoint(store) == recorder.numbers[-1]


@pytest.mark.parametrize("way", ["break", "raise", "close", "collect", "stop", "thread"])
def test_read_that_ends_releases(way: str) -> None:
    """An iteration that ends acknowledges the batches that its consumer has finished, and releases the lease."""
    store, processed_records = FaultyStore(), list[str]()

    def iterate() -> None:
        batches = leasehold.read(stream(), leases=store, **BEGINNING)
        for batch in batches:
            processed_records.append(batch.records[0].sequence_number)
            if len(processed_records) == 2:
                if way == "raise":
                    raise LookupError
                if way == "close":
                    batches.close()
                elif way == "stop":
                    batches.stop()
                else:
                    break

    if way == "thread":
        thread = threading.Thread(target=iterate)
        thread.start()
        thread.join(WAIT)
    else:
        with suppress(LookupError):
            iterate()
    gc.collect()
    assert wait_for_final_checkpoint(store) == (processed_records[-1] if way == "stop" else processed_records[0])


@pytest.mark.parametrize("way", ["cancel", "close", "loop"])
def test_async_read_that_ends_releases(way: str) -> None:
    """If a task ends while it processes a batch, the batch is not acknowledged, and the lease is released."""
    store, processed_records, left_open = FaultyStore(), list[str](), list[Any]()
    loop = asyncio.new_event_loop()

    async def iterate(recorder: asyncio.Event) -> None:
        async with leasehold.read(stream(), leases=store, **BEGINNING) as batches:
            left_open.append(batches)
            async for batch in batches:
                processed_records.append(batch.records[0].sequence_number)
                recorder.set()
                await asyncio.Event().wait()

    async def main() -> None:
        recorder = asyncio.Event()
        task = loop.create_task(iterate(recorder))
        await recorder.wait()
        if way == "loop":
            left_open.append(task)
            return
        if way == "cancel":
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            return
        await left_open[0].aclose()
        task.cancel()

    loop.run_until_complete(main())
    loop.run_until_complete(asyncio.sleep(0))
    if way == "loop":
        loop.close()
        left_open[-1].get_coro().close()
    loop.close()
    left_open.clear()
    gc.collect()
    assert wait_for_final_checkpoint(store) == "TRIM_HORIZON"


@pytest.mark.parametrize("door", ["run", "arun", "worker"])
@pytest.mark.parametrize("fault", [SystemExit, KeyboardInterrupt])
def test_handler_that_ends_the_program_drains(door: str, fault: type[BaseException]) -> None:
    """If a handler raises SystemExit or KeyboardInterrupt, the worker ends and its caller gets the exception."""
    store = FaultyStore()

    def handle(batch: leasehold.Delivery) -> None:
        if batch.records[0].sequence_number == NUMBERS[1]:
            raise fault

    with pytest.raises(fault):
        _run_by(door, handle, store)
    assert wait_for_final_checkpoint(store) == NUMBERS[0]


def _run_by(door: str, handle: Handler, store: FaultyStore) -> None:
    if door == "run":
        leasehold.run(stream(), handle, leases=store, **BEGINNING)
    elif door == "arun":
        asyncio.run(leasehold.arun(stream(), handle, leases=store, **BEGINNING))
    else:
        with leasehold.worker(stream(), handle, leases=store, **BEGINNING) as worker:
            worker.wait(WAIT)


# Several consumers


def test_read_from_several_tasks_is_rejected() -> None:
    """While one task waits for a batch or processes one, other tasks that ask for a batch get a RuntimeError."""
    store, processed_records, rejections = FaultyStore(), list[str](), list[str]()

    async def main() -> None:
        async def iterate() -> None:
            try:
                async for batch in batches:
                    processed_records.append(batch.records[0].sequence_number)
                    await asyncio.sleep(0)
                    if len(processed_records) == 3:
                        batches.stop()
            except RuntimeError as error:
                rejections.append(str(error))

        async with leasehold.read(stream(), leases=store, **BEGINNING) as batches:
            await asyncio.wait_for(asyncio.gather(*(iterate() for _ in range(3))), WAIT)

    asyncio.run(main())
    assert processed_records == NUMBERS[:3]
    assert ["another thread or task" in message for message in rejections] == [True, True]
    assert wait_for_final_checkpoint(store) == NUMBERS[2]


def test_step_of_another_thread_acknowledges_nothing() -> None:
    """Only the thread that has a batch can acknowledge it. Once that thread has ended, another thread may continue."""
    store, faults, processed_records = FaultyStore(), list[BaseException](), list[str]()

    def step() -> None:
        try:
            processed_records.append(next(batches).records[0].sequence_number)
        except RuntimeError as error:
            faults.append(error)

    def step_in_new_thread() -> None:
        thread = threading.Thread(target=step)
        thread.start()
        thread.join(WAIT)

    with leasehold.read(stream(), leases=store, **BEGINNING) as batches:
        step_in_new_thread()
        step()  # The first thread has ended.
        step_in_new_thread()
        (lease,) = store.list().leases
        assert (len(faults), processed_records, lease.checkpoint.sequence <= NUMBERS[0]) == (1, NUMBERS[:2], True)
    assert wait_for_final_checkpoint(store) == NUMBERS[0]


def test_steps_with_time_limits_are_one_consumer() -> None:
    """Each step of an iteration may run in a task of its own, as `asyncio.wait_for` does before Python 3.12."""

    async def main() -> list[str]:
        async with leasehold.read(stream(), leases=FaultyStore(), **BEGINNING) as batches:
            return [(await asyncio.wait_for(anext(batches), WAIT)).records[0].sequence_number for _ in range(3)]

    assert asyncio.run(main()) == NUMBERS[:3]


# Errors of workers whose tasks are not awaited


class BrokenStore(FaultyStore):
    """A store whose listings always fail."""

    def list(self, **_args: object) -> Any:  # noqa: ANN401  never
        raise StoreError("no such table")


def test_error_that_ends_a_worker_is_logged_at_once(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        task = asyncio.create_task(leasehold.arun(stream(), print, leases=BrokenStore(), wait=False, worker="w-1"))
        await asyncio.wait({task})
        logged = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
        assert "worker w-1 has ended: StoreError: no such table" in logged
        with pytest.raises(StoreError):
            task.result()

    asyncio.run(asyncio.wait_for(main(), WAIT))


# Forks and exits are tested in separate processes.

PRELUDE = """
import asyncio, json, multiprocessing, os, signal, sys, threading
import leasehold
from leasehold_lab.simulator.world.world import ListSource, ShardRecords, create_even_shards, create_records
from leasehold.errors import WorkerError
source = ListSource(create_even_shards(("s-0",)), {"s-0": ShardRecords(create_records(8), size=1)})
options = dict(leases=sys.argv[1], initial_position="TRIM_HORIZON", checkpoint_seconds=0)
parent, told = os.getpid(), []
def status(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
def tell():
    left = [each for each in threading.enumerate() if each.name.startswith("leasehold-")]
    for each in left:
        each.join(10)
    handlers = [signal.getsignal(each) == signal.SIG_DFL for each in (signal.SIGTERM, signal.SIGHUP)]
    print(json.dumps([told, sum(each.is_alive() for each in left), handlers]), flush=True)
def finish(forking):
    forking()
    if os.getpid() == parent and len(told) == 4:
        os.kill(parent, signal.SIGTERM)
"""

HANDLE = """
def handle(batch):
    finish(forking)
"""
ASYNC_HANDLE = """
async def handle(batch):
    finish(forking)
"""
DOORS = {
    "run": HANDLE + "leasehold.run(source, handle, **options)\ntell()\n",
    "run-async": ASYNC_HANDLE + "leasehold.run(source, handle, **options)\ntell()\n",
    "arun": HANDLE + "asyncio.run(leasehold.arun(source, handle, **options))\ntell()\n",
    "arun-async": ASYNC_HANDLE + "asyncio.run(leasehold.arun(source, handle, **options))\ntell()\n",
    "worker": HANDLE
    + """
with leasehold.worker(source, handle, **options) as worker:
    signal.signal(signal.SIGTERM, lambda *_: worker.stop())
    worker.wait()
signal.signal(signal.SIGTERM, signal.SIG_DFL)
tell()
""",
}
CHILDREN = {
    "exit": ("sys.exit(3)", "", 3),
    "exit-text": ("sys.exit('over')", "", 1),
    "return": ("return", "", 0),
    "raise": ("raise LookupError", "", 1),
    "terminate": ("signal.pause()", "os.kill(pid, signal.SIGTERM)", -15),
}
QUICK_CASES = {("run", "exit"), ("run", "terminate"), ("arun", "terminate"), ("arun-async", "exit")}
"""The quick cases. The others take seconds each, and run only with `make test-more`."""


def run_program(program: str, folder: Path) -> tuple[int, list[Any], str | None, str]:
    """Run the program. Return its exit status, its parsed output, and the owner and the checkpoint of the lease."""
    url = f"sqlite:///{folder}/leases.db"
    command = [sys.executable, "-c", PRELUDE + program, url]
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, start_new_session=True, **streams) as process:
        try:
            output, _error_output = process.communicate(timeout=WAIT)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and its children
    with closing(open_store(url)) as store:
        (lease,) = store.list().leases
    return process.returncode, json.loads(output or "null"), lease.owner, lease.checkpoint.sequence


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("door", "child"),
    [
        pytest.param(door, child, marks=[] if (door, child) in QUICK_CASES else [pytest.mark.more])
        for door in DOORS
        for child in CHILDREN
        if door != "worker" or child != "terminate"  # that program sets a signal handler
    ],
)
def test_children_forked_by_a_handler_end(door: str, child: str, tmp_path: Path) -> None:
    """A child that a handler forks ends when it leaves the handler or gets a signal. The parent's worker continues."""
    child_code, parent_code, child_status = CHILDREN[child]
    forking = f"""
def forking():
    pid = os.fork()
    if pid == 0:
        {child_code}
    else:
        {parent_code or "pass"}
        told.append(status(pid))
"""
    exit_status, output, owner, checkpoint = run_program(forking + DOORS[door], tmp_path)
    assert (exit_status, output[0][:4], output[1:]) == (0, [child_status] * 4, [0, [True, True]])
    assert (owner, checkpoint >= NUMBERS[3]) == (None, True)


SIGNALED_CHILD = """
def forking():
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(3))
        os.kill(os.getpid(), signal.SIGTERM)
    told.append(status(pid))
"""


def test_signal_to_a_forked_child_does_not_stop_its_parent(tmp_path: Path) -> None:
    exit_status, output, owner, checkpoint = run_program(SIGNALED_CHILD + DOORS["arun"], tmp_path)
    assert (exit_status, output[0][:4], output[1:]) == (0, [3] * 4, [0, [True, True]])
    assert (owner, checkpoint >= NUMBERS[3]) == (None, True)


POOL = """
def forking():
    with multiprocessing.get_context("fork").Pool(2) as pool:
        told.append(sum(pool.map(abs, [-1, 2])))
"""


@pytest.mark.parametrize("door", [pytest.param("run", marks=pytest.mark.more), "arun"])
def test_pools_in_handlers_end(door: str, tmp_path: Path) -> None:
    """A handler can use `with Pool()` for every batch, because the processes of the pool end at SIGTERM."""
    exit_status, output, owner, _ = run_program(POOL + DOORS[door], tmp_path)
    assert (exit_status, output[0][:4], output[1:], owner) == (0, [3] * 4, [0, [True, True]], None)


LEFT_IN_CHILD = {
    "worker": """
came = threading.Event()
def attempt(call):
    try:
        call()
    except WorkerError as error:
        return "belongs to process" in str(error)
def child():
    pid = os.fork()
    if pid == 0:
        sys.exit(7 if all(map(attempt, (worker.wait, worker.stop, worker.result, lambda: worker.wait(0)))) else 8)
    return status(pid)
with leasehold.worker(source, lambda batch: came.set(), **options) as worker:
    came.wait()
    told.append(child())
tell()
""",
    "worker-block": """
came = threading.Event()
pid = None
try:
    with leasehold.worker(source, lambda batch: came.set(), **options) as worker:
        came.wait()
        pid = os.fork()
except WorkerError:
    os._exit(7)
told.append(status(pid))
tell()
""",
    "read": """
batches = leasehold.read(source, **options)
next(batches)
pid = os.fork()
if pid == 0:
    try:
        next(batches)
    except WorkerError:
        sys.exit(7)
told.append(status(pid))
batches.close()
tell()
""",
    "read-block": """
with leasehold.read(source, **options) as batches:
    for batch in batches:
        pid = os.fork()
        if pid == 0:
            sys.exit(7)
        told.append(status(pid))
        break
tell()
""",
    "checkpoint": """
came = threading.Event()
def handle(batch):
    pid = os.fork()
    if pid == 0:
        try:
            batch.checkpoint()
        except WorkerError:
            os._exit(7)
        os._exit(8)
    told.append(status(pid))
    came.set()
with leasehold.worker(source, handle, **options):
    came.wait()
told[:] = told[:1]
tell()
""",
    "read-unbegun": """
batches = leasehold.read(source, **options)
pid = os.fork()
if pid == 0:
    try:
        next(batches)
    except WorkerError:
        sys.exit(7)
next(batches)
told.append(status(pid))
batches.close()
tell()
""",
    "arun-beside": """
async def main():
    came = asyncio.Event()
    async def handle(batch):
        came.set()
    task = asyncio.create_task(leasehold.arun(source, handle, **options))
    await came.wait()
    pid = os.fork()
    if pid == 0:
        task.get_coro().close()
        os._exit(7)
    told.append(await asyncio.to_thread(status, pid))
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        pass
asyncio.run(main())
tell()
""",
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "door",
    [
        door_name
        if door_name in {"worker-block", "read", "checkpoint"}
        else pytest.param(door_name, marks=pytest.mark.more)
        for door_name in LEFT_IN_CHILD
    ],
)
def test_forked_child_raises_at_once(door: str, tmp_path: Path) -> None:
    """In a forked child, the parent's worker or iteration raises WorkerError and never delays the end of the child."""
    exit_status, output, owner, _ = run_program(LEFT_IN_CHILD[door], tmp_path)
    assert (exit_status, output, owner) == (0, [[7], 0, [True, True]], None)


EXITS = {
    "worker": """
came = threading.Event()
with leasehold.worker(source, lambda batch: came.set(), **options):
    came.wait()
    sys.exit(5)
""",
    "read": """
batches = leasehold.read(source, **options)
next(batches)
sys.exit(5)
""",
    "arun": """
async def main():
    came = asyncio.Event()
    async def handle(batch):
        came.set()
    task = asyncio.create_task(leasehold.arun(source, handle, **options))
    await came.wait()
    sys.exit(5)
asyncio.run(main())
""",
    "arun-loop-closed": """
loop = asyncio.new_event_loop()
came = threading.Event()
async def main():
    global task
    task = loop.create_task(leasehold.arun(source, lambda batch: came.set(), **options))
    await asyncio.to_thread(came.wait)
loop.run_until_complete(main())
loop.close()
task.get_coro().close()
sys.exit(5)
""",
    "run": """
def handle(batch):
    sys.exit(5)
leasehold.run(source, handle, **options)
""",
}


@pytest.mark.parametrize(
    "door",
    [
        door_name if door_name == "arun-loop-closed" else pytest.param(door_name, marks=pytest.mark.more)
        for door_name in EXITS
    ],
)
def test_program_that_exits_releases(door: str, tmp_path: Path) -> None:
    """When a program exits, its worker has released its leases, and the exit status is that of the program."""
    exit_status, _, owner, _ = run_program(EXITS[door], tmp_path)
    assert (exit_status, owner) == (5, None)
