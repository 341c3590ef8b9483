"""Async handlers: a batch is done only when the awaitable that its handler returned has completed with None."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from functools import partial, wraps
from threading import Event

import pytest
from handler_threads import ProcessedRecords, joined
from reader_harness import ReaderHarness, data
from running import WAIT, run_to_its_end, running
from virtual_fleet import FaultyStore, four_shards, stream_with_five_records

from leasehold.adapters.consumer.handling import Delivery, Handling
from leasehold.adapters.consumer.runner import Runner
from leasehold.balancer.model import TRIM_HORIZON, Position
from leasehold_lab.simulator.world.world import ListSource, ShardRecords, create_even_shards, create_records

pytestmark = pytest.mark.slow


Handle = Callable[[Delivery], Awaitable[None]]


class CustomAwaitable:
    """An awaitable that is not a coroutine."""

    def __init__(self, inner: Awaitable[None]) -> None:
        self.inner = inner

    def __await__(self) -> Generator[object, None, None]:
        return self.inner.__await__()


class CallableObject:
    """An object whose `__call__` method is an async handler."""

    def __init__(self, handle: Handle) -> None:
        self.handle = handle

    async def __call__(self, delivery: Delivery) -> None:
        await self.handle(delivery)


def decorated(handle: Handle) -> Handle:
    """A decorator that is not async itself."""

    @wraps(handle)
    def wrapper(*args: Delivery) -> Awaitable[None]:
        return handle(*args)

    return wrapper


async def handle_with_argument(_more: str, handle: Handle, delivery: Delivery) -> None:
    """A handler with an additional argument."""
    await handle(delivery)


KINDS: dict[str, Callable[[Handle], Handle]] = {
    "async def": lambda handle: handle,
    "partial": lambda handle: partial(handle_with_argument, "more", handle),
    "object": CallableObject,
    "decorator": decorated,
    "lambda": lambda handle: lambda delivery: handle(delivery),  # noqa: PLW0108  the test needs a lambda
    "awaitable": lambda handle: lambda delivery: CustomAwaitable(handle(delivery)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_awaitable_is_awaited(kind: str) -> None:
    store, processed_records = FaultyStore(), ProcessedRecords(20)

    async def handle(delivery: Delivery) -> None:
        await asyncio.sleep(0)
        processed_records.add(delivery)

    shard_logs = {f"s-{n}": ShardRecords(create_records(5), size=2) for n in range(4)}
    with running(Runner(joined(store, ListSource(four_shards(), shard_logs)), KINDS[kind](handle))):
        assert processed_records.all.wait(WAIT)
    assert processed_records.by_shard == {f"s-{n}": data(5) for n in range(4)}
    assert [(lease.owner, lease.checkpoint) for lease in store.list().leases] == [(None, Position("104"))] * 4


def test_checkpoint_waits_for_the_async_handler() -> None:
    """A batch is checkpointed only after its awaitable has completed."""
    store, handler_began, processed_records = FaultyStore(), Event(), ProcessedRecords(5)
    loops: list[asyncio.AbstractEventLoop] = []
    may_finish = asyncio.Event()

    async def handle(delivery: Delivery) -> None:
        loops.append(asyncio.get_running_loop())
        handler_began.set()
        await may_finish.wait()
        processed_records.add(delivery)

    with running(
        Runner(joined(store, ListSource(four_shards()[:1], {"s-0": ShardRecords(create_records(5))})), handle)
    ):
        assert handler_began.wait(WAIT)
        checkpoint_before = store.row("s-0").checkpoint
        loops[0].call_soon_threadsafe(may_finish.set)
        assert processed_records.all.wait(WAIT)
    assert (checkpoint_before, store.row("s-0").checkpoint) == (TRIM_HORIZON, Position("104"))


def test_awaiting_shards_hold_no_threads() -> None:
    store, shard_ids = FaultyStore(), tuple(f"s-{n:02}" for n in range(40))
    waiting_shards, processed_records, all_wait = set[str](), ProcessedRecords(40), asyncio.Event()

    async def handle(delivery: Delivery) -> None:
        waiting_shards.add(delivery.shard)
        if len(waiting_shards) == 40:
            all_wait.set()
        await all_wait.wait()
        processed_records.add(delivery)

    source = ListSource(create_even_shards(shard_ids), {name: ShardRecords(create_records(1)) for name in shard_ids})
    with running(Runner(joined(store, source), handle, readers=2)):
        assert processed_records.all.wait(WAIT)
    assert sorted(processed_records.by_shard) == list(shard_ids)


def test_async_dead_letter_is_awaited_before_the_shard_continues() -> None:
    store, dead_lettered, processed_records = FaultyStore(), list[str](), ProcessedRecords(2)

    def handle(delivery: Delivery) -> None:
        if delivery.records[0].data == b"0":
            raise ValueError("poison")
        processed_records.add(delivery)

    async def dead_letter(delivery: Delivery, error: Exception) -> None:
        await asyncio.sleep(0)
        dead_lettered.extend([f"{delivery.records[0].data!r} {error}", store.row("s-0").checkpoint.sequence])

    source = ListSource(four_shards()[:1], {"s-0": ShardRecords(create_records(4), size=2)})
    with running(Runner(joined(store, source), Handling(handle, attempts=1, dead_letter=dead_letter))):
        assert processed_records.all.wait(WAIT)
    assert dead_lettered == ["b'0' poison", "TRIM_HORIZON"]
    assert store.row("s-0").checkpoint == Position("103")


def generator() -> Iterator[int]:
    """A generator function. Calling it runs none of its code."""
    yield 1


async def async_generator() -> AsyncIterator[int]:
    """An async generator function. Calling it runs none of its code."""
    yield 1


ANSWERS: dict[str, tuple[Callable[[], object], str]] = {
    "value": (lambda: 3, "it returned a value (int): only None means that the batch is done"),
    "false": (lambda: False, "it returned a value (bool)"),
    "generator": (generator, "it returned a generator, which has done nothing yet: use a plain or an async function"),
    "async generator": (async_generator, "it returned a generator, which has done nothing yet"),
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_handler_that_returns_a_value_fails_the_batch(answer: str, caplog: pytest.LogCaptureFixture) -> None:
    """A batch is checkpointed only if its handler returned None."""
    get_return_value, message = ANSWERS[answer]
    harness = ReaderHarness()
    harness.run_until_done(harness.reading(attempts=1, handler=lambda _delivery: get_return_value()))
    assert (harness.happenings, harness.store.row("s-0").checkpoint) == (["initialize", "stopped"], TRIM_HORIZON)
    assert f"its handler failed on records 100 to 104, attempt 1 of 1: {message}" in caplog.text


@pytest.mark.parametrize("answer", ANSWERS)
def test_dead_letter_that_returns_a_value_fails(answer: str) -> None:
    """A batch counts as dead-lettered only if the `dead_letter` function returned None."""
    get_return_value, _ = ANSWERS[answer]

    def raise_os_error(_delivery: Delivery) -> None:
        raise OSError("for good")

    harness = ReaderHarness(on_batch=raise_os_error)
    harness.run_until_done(harness.reading(attempts=1, dead_letter=lambda _delivery, _error: get_return_value()))
    assert (harness.happenings, harness.store.row("s-0").checkpoint) == (["initialize", "stopped"], TRIM_HORIZON)


def test_awaited_handler_must_return_none() -> None:
    store, attempts_made, shard_stopped = FaultyStore(), list[int](), Event()

    async def inner(_delivery: Delivery) -> None:
        raise AssertionError("nobody awaits it")

    async def handle(delivery: Delivery) -> object:
        attempts_made.append(1)
        return inner(delivery)

    handling = Handling(
        handle,  # type: ignore[arg-type]
        attempts=2,
        least_wait_seconds=0,
        most_wait_seconds=0,
        observer=lambda happening, _holding: shard_stopped.set() if happening == "stopped" else None,
    )
    with running(
        Runner(joined(store, ListSource(four_shards()[:1], {"s-0": ShardRecords(create_records(5))})), handling)
    ):
        assert shard_stopped.wait(WAIT)
    assert (len(attempts_made), store.row("s-0").checkpoint) == (2, TRIM_HORIZON)


def plain(_batch: Delivery) -> None:
    """A valid handler that does nothing."""


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"handler": lambda _batch: (yield)}, "handler: a generator does nothing when it is called"),
        ({"handler": plain, "dead_letter": plain}, r"dead_letter: it is called with \(batch, error\)"),
        ({"handler": plain, "dead_letter": lambda _batch, _error: (yield)}, "dead_letter: a generator"),
        ({"handler": plain, "observer": plain}, r"observer: it is called with \(happening, holding\)"),
        ({"handler": plain, "slow_seconds": 0}, "slow_seconds"),
        ({"handler": plain, "handler_seconds": 0}, "handler_seconds"),
    ],
)
def test_handling_with_an_invalid_callable_or_duration_is_rejected(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Handling(**settings)  # type: ignore[arg-type]


def test_task_that_raises_system_exit_stops_the_worker_cleanly() -> None:
    """The event loop keeps running until the batches that it awaits are over."""
    store, tasks = FaultyStore(), list[asyncio.Task[None]]()

    async def raise_system_exit() -> None:
        raise SystemExit(3)

    async def handle(_delivery: Delivery) -> None:
        if not tasks:
            tasks.append(asyncio.get_running_loop().create_task(raise_system_exit()))
        await asyncio.sleep(0)

    source = stream_with_five_records()
    with pytest.raises(SystemExit) as exc_info:
        run_to_its_end(Runner(joined(store, source), handle))
    assert (exc_info.value.code, [lease.owner for lease in store.list().leases]) == (3, [None] * 4)
    assert isinstance(tasks[0].exception(), SystemExit)
