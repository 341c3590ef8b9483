"""`leasehold.run`, `arun`, `worker` and `read` with in-memory shards: what they process, acknowledge and release."""

import asyncio
import doctest
import functools
import gc
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from typing import Any, NoReturn, Union
from uuid import uuid4

import pytest
from attrs import define
from running import WAIT
from typer.main import get_command
from virtual_fleet import FaultyStore, four_shards

import leasehold
import leasehold.adapters
from leasehold import Lease, Position
from leasehold.adapters.api import Batches, BatchQueue, _LoopCaller
from leasehold.adapters.cli.consume import app
from leasehold.adapters.cli.produce import app as produce_app
from leasehold.adapters.consumer.handling import Handling
from leasehold.adapters.consuming import check_consumption_options
from leasehold.adapters.options import Options, ProduceOptions, Seconds, check_options, options_by_name
from leasehold.adapters.sources.protocol import Record, SettledShard
from leasehold.balancer.model import at_timestamp
from leasehold.errors import OutcomeUnknown, SourceError
from leasehold.stores.urls import open_store
from leasehold_lab.demo.stage import Stream
from leasehold_lab.simulator.world.world import ListSource, ShardRecords, create_even_shards, create_records
from leasehold_lab.standins.node import Service

pytestmark = pytest.mark.slow

ORDERS = "kinesis://orders?region=eu-west-1"
BEGINNING = Options(initial_position="TRIM_HORIZON", checkpoint_seconds=0)


def stream(shards: int = 4, count: int = 6, size: int = 2) -> ListSource:
    """Return a stream of `shards` shards with `count` records each, which are read in batches of `size`."""
    open_shards = four_shards()[:shards]
    return ListSource(open_shards, {shard.id: ShardRecords(create_records(count), size=size) for shard in open_shards})


class CompleteStream(ListSource):
    """A stream in which no more records can arrive."""

    def settled(self, _lease: Lease, _until: float) -> SettledShard:
        """Return that no more records can arrive. The first empty read then ends the shard."""
        return SettledShard()


@define
class ClosableStream(ListSource):
    """A stream that records whether it was closed."""

    closed: bool = False

    def close(self) -> None:
        self.closed = True


class MissingStream(ListSource):
    """A stream that does not exist."""

    def shards(self) -> NoReturn:
        raise SourceError("no such stream")


def shard_and_numbers(batch: leasehold.Delivery) -> tuple[str, list[int]]:
    """Return the shard of a batch, and the sequence numbers of its records."""
    return batch.shard, [int(record.sequence_number) for record in batch.records]


def rows(store: FaultyStore) -> dict[str, tuple[str | None, str]]:
    """Return the owner and checkpoint of each lease."""
    return {lease.key: (lease.owner, lease.checkpoint.sequence) for lease in store.list().leases}


def test_import_loads_no_more_than_the_planner() -> None:
    code = "import sys; import {0}; print(len(sys.modules), *(m for m in sys.modules if m.startswith('leasehold.a')))"
    outputs = [
        subprocess.run([sys.executable, "-c", code.format(name)], capture_output=True, text=True, check=True).stdout
        for name in ("leasehold.balancer", "leasehold")
    ]
    assert outputs[0] == outputs[1]
    assert len(outputs[0].split()) == 1


def test_completion_lists_all_public_names() -> None:
    expected_names = {"Delivery", "arun", "plan", "produce", "read", "run", "worker", "__version__"}
    assert expected_names - set(dir(leasehold)) == set()
    assert all(hasattr(leasehold, name) for name in dir(leasehold))
    assert set(dir(leasehold.adapters)) == {*leasehold.adapters.__all__, "__doc__"}
    with pytest.raises(AttributeError, match="module 'leasehold' has no attribute 'wroker'"):
        _ = leasehold.wroker


@pytest.mark.parametrize(
    ("command", "options", "own"),
    [
        (app, Options, {"source", "store", "handler", "events", "processes", "log", "verbose"}),
        (produce_app, ProduceOptions, {"source", "file", "key", "delimiter", "json_"}),
    ],
)
def test_options_match_those_of_the_command(command: Any, options: type, own: set[str]) -> None:  # noqa: ANN401  typer's
    parameter_names = {str(parameter.name) for parameter in get_command(command).params} - {"help"}
    options_table = options_by_name(options)
    assert parameter_names - own == {name for name, option in options_table.items() if option.in_command}
    assert {name for name, option in options_table.items() if not option.in_command} <= {"metrics", "slow_seconds"}


@pytest.mark.parametrize("table", [Options, ProduceOptions])
def test_each_option_has_help_limits_and_a_valid_default(table: type) -> None:
    """A help text is a sentence, a duration has limits, and a default passes the check of its option."""
    for name, option in options_by_name(table).items():
        assert re.fullmatch("[A-Z][a-z].*[.]", option.help), name
        assert (option.limits is not None) == (Seconds == Union[option.types]), name  # noqa: UP007  made of a tuple
        if option.default is not None:
            assert option.unset == ""
            assert option.parse_and_check(option.default, name) == option.default


@pytest.mark.parametrize(
    ("table", "name"),
    [
        (table, name)
        for table in (Options, ProduceOptions)
        for name, option in options_by_name(table).items()
        if option.types == (int,)
    ],
)
def test_whole_number_is_accepted_exactly_within_its_limits(table: type, name: str) -> None:
    option = options_by_name(table)[name]
    most = 2**70 if option.most is None else option.most
    for number in (option.least, most):
        given_options, all_options = check_options(table, {name: number})
        assert (given_options, all_options[name]) == ({name: number}, number)
    for number in (option.least - 1, *([] if option.most is None else [most + 1])):
        with pytest.raises(ValueError, match=f"^{name}: {number} is "):
            check_options(table, {name: number})


def test_option_without_a_value_has_its_default() -> None:
    given_options, all_options = check_options(ProduceOptions, {"linger_ms": None, "share": 0.5})
    assert given_options == {"share": 0.5}
    assert (all_options["linger_ms"], all_options["share"]) == (100, 0.5)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"attemps": 3}, "attemps: there is no such option; did you mean 'attempts'?"),
        ({"attempts": 0}, "attempts: 0 is not a whole number above 0"),
        ({"attempts": "3"}, "attempts: '3' is not a whole number above 0"),
        ({"drain_seconds": "soon"}, "drain_seconds: 'soon' is not a duration such as 90, 1.5s, 5m, 2h, 1d12h or PT2H"),
        ({"drain_seconds": -1}, "drain_seconds: -1 is less than 0 s"),
        ({"wait": "no"}, "wait: 'no' is neither True nor False"),
        ({"worker": 7}, "worker: 7 is not a string"),
        ({"initial_position": "yesterday"}, "initial_position: 'yesterday' is neither TRIM_HORIZON, LATEST,"),
        ({"initial_position": "AT_TIMESTAMP"}, "initial_position: in place of AT_TIMESTAMP write the time itself"),
        ({"until": "never"}, "until: 'never' is not a time such as"),
        ({"set": ["max_leases"]}, "set: 'max_leases' is not of the form name=value"),
        ({"set": {"max_lease": 3}}, "max_lease: unknown field"),
        ({"rules": "koala"}, 'rules: "koala" is not one of kcl, kcl-rust'),
        ({"if_recreated": "NOW"}, "if_recreated: 'NOW' is neither TRIM_HORIZON nor LATEST"),
        ({"dead_letter": ORDERS}, "dead_letter: it is the stream that is read"),
        ({"initial_position": at_timestamp(1_700_000_000)}, "initial_position: 1700000000 ms since 1970 is 1970-01-20"),
        (
            {"initial_position": at_timestamp(1_700_000_000_000_000)},
            "initial_position: 1700000000000000 ms since 1970 is after the year 9999; is it in microseconds?",
        ),
        ({"lease_seconds": 0.5}, "lease_seconds: 0.5 s is less than 1 s"),
        ({"concurrency": 2}, "concurrency: only an `async def` handler"),
        ({"leases": "redis://x"}, "store URL: unknown scheme 'redis'"),
        ({"source": "kafka://x"}, "source URL: unknown scheme 'kafka'"),
        ({"handler": "json"}, "'json' is not of the form module:function"),
    ],
)
def test_bad_usage_is_rejected_before_anything_is_opened(options: dict[str, Any], says: str) -> None:
    arguments: dict[str, Any] = {"source": ORDERS, "leases": "memory://bad", "handler": lambda _batch: None} | options
    source, handler = arguments.pop("source"), arguments.pop("handler")
    calls: list[Callable[[], object]] = [lambda: leasehold.run(source, handler, **arguments)]
    if "concurrency" not in options and "handler" not in options:
        calls.append(lambda: leasehold.read(source, **arguments))
    for call in calls:
        with pytest.raises((ValueError, TypeError)) as exc_info:
            call()
        assert says in str(exc_info.value)


def test_producer_bad_usage_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leasehold.adapters.producing.create_producer_clients", lambda *_: pytest.fail("it was opened"))
    cases: list[tuple[dict[str, Any], str]] = [
        ({"linger": 3}, "linger: there is no such option; did you mean 'linger_ms'?"),
        ({"on_late": "drop"}, "on_late: 'drop' is neither block nor fail"),
        ({"share": 0}, "share: 0 is not a number above 0"),
        ({"epoch": -1}, "epoch: -1 is not a whole number from 0"),
        ({"epoch": 2**64}, "epoch: 18446744073709551616 is more than 18446744073709551615"),
        ({"time_to_live": "long"}, "time_to_live: 'long' is not a duration"),
    ]
    for options, message in cases:
        with pytest.raises((ValueError, TypeError)) as exc_info:
            leasehold.produce("kinesis://orders", **options)
        assert message in str(exc_info.value)


def test_next_step_acknowledges_the_previous_batch() -> None:
    """A batch is acknowledged when its consumer asks for the next one. Otherwise it is delivered again."""
    store, processed_records = FaultyStore(), list[int]()
    with leasehold.read(stream(shards=1), leases=store, **BEGINNING) as batches:
        for batch in batches:
            checkpoint_before = rows(store)["s-0"][1]
            assert checkpoint_before == ("TRIM_HORIZON" if not processed_records else str(processed_records[-1]))
            processed_records += shard_and_numbers(batch)[1]
            if len(processed_records) == 6:
                break
    assert rows(store) == {"s-0": (None, str(processed_records[3]))}


def test_shards_are_dispatched_in_turn() -> None:
    store, processed_records = FaultyStore(), list[tuple[str, list[int]]]()
    batches = leasehold.read(stream(), leases=store, **BEGINNING)
    for batch in batches:
        processed_records.append(shard_and_numbers(batch))
        if len(processed_records) == 12:
            batches.stop()
    by_shard = {
        shard: [
            number for dispatched_shard, numbers in processed_records for number in numbers if dispatched_shard == shard
        ]
        for shard, _ in processed_records
    }
    assert by_shard == {
        f"s-{number}": [int(record.sequence_number) for record in create_records(6)] for number in range(4)
    }
    assert {owner for owner, _ in rows(store).values()} == {None}
    last_sequence_number = create_records(6)[-1].sequence_number
    assert {checkpoint for _, checkpoint in rows(store).values()} == {last_sequence_number}


def test_break_releases_the_lease_without_acknowledging_the_batch() -> None:
    store = FaultyStore()
    for _batch in leasehold.read(stream(shards=1), leases=store, **BEGINNING):
        break
    assert rows(store) == {"s-0": (None, "TRIM_HORIZON")}
    (repeated_batch,) = [
        shard_and_numbers(batch)
        for batch, _ in zip(leasehold.read(stream(1), leases=store, **BEGINNING), "1", strict=False)
    ]
    assert repeated_batch[1] == [int(record.sequence_number) for record in create_records(2)]


def test_exception_releases_the_lease_without_acknowledging_the_batch() -> None:
    store = FaultyStore()

    def fail() -> None:
        for number, _batch in enumerate(leasehold.read(stream(shards=1), leases=store, **BEGINNING)):
            if number == 1:
                raise LookupError("no such customer")

    with pytest.raises(LookupError):
        fail()
    gc.collect()
    assert rows(store) == {"s-0": (None, create_records(2)[-1].sequence_number)}


def test_explicit_checkpoint_in_a_loop_is_kept() -> None:
    """After an explicit checkpoint within a long batch, only the remaining records are delivered again."""
    store = FaultyStore()
    for batch in leasehold.read(stream(1, size=6), leases=store, **BEGINNING):
        assert batch.checkpoint(batch.records[2])
        break
    assert rows(store) == {"s-0": (None, create_records(3)[-1].sequence_number)}


def test_new_loop_begins_with_the_unacknowledged_batch() -> None:
    with leasehold.read(stream(1), leases=FaultyStore(), **BEGINNING) as batches:
        first_batch, repeated_batch = _first(batches), _first(batches)
        assert shard_and_numbers(first_batch) == shard_and_numbers(repeated_batch)
        assert shard_and_numbers(next(batches))[1] == [int(record.sequence_number) for record in create_records(4)[2:]]


def test_new_loop_leaves_out_a_batch_whose_lease_was_lost() -> None:
    """Another worker handles its records."""
    with leasehold.read(stream(2), leases=FaultyStore(), **BEGINNING) as batches:
        first_batch = _first(batches)
        thread = batches._iteration.worker_thread  # noqa: SLF001  the public API does not show the worker
        assert thread is not None
        assert thread._runner is not None  # noqa: SLF001  likewise
        (holding,) = [candidate for candidate in thread._runner.worker.holdings if candidate.key == first_batch.lease]  # noqa: SLF001  likewise
        holding.drop("taken")
        assert (first_batch.lost, _first(batches).lost) == (True, False)


def _first(batches: Iterable[leasehold.Delivery]) -> leasehold.Delivery:
    for batch in batches:
        return batch
    raise AssertionError("there is none")


def test_waiting_batch_of_a_lost_lease_is_not_dispatched() -> None:
    store = FaultyStore()
    with leasehold.read(stream(2), leases=store, **BEGINNING) as batches:
        first_batch = next(batches)
        other_shard = ({"s-0", "s-1"} - {first_batch.shard}).pop()
        iteration = batches._iteration  # noqa: SLF001  there is no public access to the waiting batch
        with iteration.batch_queue.changed:
            assert iteration.batch_queue.changed.wait_for(lambda: iteration.batch_queue._queue, WAIT)  # noqa: SLF001  likewise
        assert iteration.worker_thread is not None
        runner = iteration.worker_thread._runner  # noqa: SLF001  likewise
        assert runner is not None
        (holding,) = [candidate for candidate in runner.worker.holdings if candidate.key == other_shard]
        holding.drop("taken")
        assert next(batches).shard == first_batch.shard


def test_closing_before_the_first_step_opens_nothing() -> None:
    batches = leasehold.read(ORDERS, leases="dynamodb://orders-app")
    batches.close()
    assert list(batches) == []


@pytest.mark.parametrize("end", [Batches.stop, Batches.close])
def test_iteration_that_ends_twice_before_its_first_step_opens_nothing(end: Callable[[Any], None]) -> None:
    batches = leasehold.read(ORDERS, leases="dynamodb://orders-app")
    for _ in range(2):
        end(batches)
        assert list(batches) == []


def test_error_of_an_iteration_is_raised_once() -> None:
    """The step that raises the error ends the iteration."""
    with leasehold.read(MissingStream(), leases=FaultyStore(), wait=False) as batches:
        with pytest.raises(SourceError, match="no such stream"):
            next(batches)
        assert list(batches) == []
        batches.close()


def _leave_worker_by_error() -> None:
    with leasehold.worker(MissingStream(), print, leases=FaultyStore(), wait=False) as worker:
        worker.wait(WAIT)
        raise LookupError


def _leave_read_by_error() -> None:
    with leasehold.read(MissingStream(), leases=FaultyStore(), wait=False) as batches:
        batches._iteration.start_worker().wait(WAIT)  # noqa: SLF001  a step would raise the error
        raise LookupError


@pytest.mark.parametrize("leave", [_leave_worker_by_error, _leave_read_by_error])
def test_error_of_a_worker_does_not_hide_the_error_of_its_block(leave: Callable[[], None]) -> None:
    with pytest.raises(LookupError):
        leave()


def test_source_of_the_caller_stays_open() -> None:
    """Its owner may use it for another worker."""
    source = ClosableStream(four_shards()[:1], {"s-0": ShardRecords(create_records(2))})
    with closing(leasehold.read(source, leases=FaultyStore(), **BEGINNING)) as batches:
        next(batches)
    assert not source.closed


def test_worker_error_is_raised_by_the_next_step() -> None:
    source = MissingStream()
    with pytest.raises(SourceError, match="no such stream"):
        next(leasehold.read(source, leases=FaultyStore(), wait=False))


def test_async_loop_lets_other_tasks_run() -> None:
    store, processed_records, ticks = FaultyStore(), list[tuple[str, list[int]]](), list[int]()

    async def tick() -> None:
        while True:
            ticks.append(1)
            await asyncio.sleep(0)

    async def main() -> None:
        tick_task = asyncio.create_task(tick())
        async with leasehold.read(stream(), leases=store, **BEGINNING) as batches:
            async for batch in batches:
                processed_records.append(shard_and_numbers(batch))
                if len(processed_records) == 12:
                    break
        tick_task.cancel()

    asyncio.run(asyncio.wait_for(main(), WAIT))
    assert (len(processed_records), bool(ticks)) == (12, True)
    final_owners = {owner for owner, _ in rows(store).values()}
    assert final_owners == {None}
    assert min(checkpoint for _, checkpoint in rows(store).values()) == create_records(4)[-1].sequence_number


def test_arun_awaits_handlers_in_the_callers_loop_and_drains_on_cancel() -> None:
    store = FaultyStore()

    async def main() -> None:
        callers_loop, last_shard_handled = asyncio.get_running_loop(), asyncio.Event()
        handler_loops = set()

        async def handle(batch: leasehold.Delivery) -> None:
            handler_loops.add(asyncio.get_running_loop())
            if batch.shard == "s-3":
                last_shard_handled.set()

        task = asyncio.create_task(leasehold.arun(stream(), handle, leases=store, **BEGINNING))
        await last_shard_handled.wait()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert (task.cancelled(), handler_loops) == (True, {callers_loop})

    asyncio.run(asyncio.wait_for(main(), WAIT))
    assert {owner for owner, _ in rows(store).values()} == {None}


def test_arun_awaits_dead_letters_in_the_callers_loop() -> None:
    """A dead letter handler may use connections that belong to the loop, too."""

    async def main() -> None:
        dead_letter_loop = asyncio.get_running_loop().create_future()

        def fail(_batch: leasehold.Delivery) -> NoReturn:
            raise LookupError

        async def record_loop(_batch: leasehold.Delivery, _error: Exception) -> None:
            dead_letter_loop.set_result(asyncio.get_running_loop())

        options = BEGINNING | Options(attempts=1, dead_letter=record_loop)
        task = asyncio.create_task(leasehold.arun(stream(1, 1), fail, leases=FaultyStore(), **options))
        assert await dead_letter_loop is asyncio.get_running_loop()
        task.cancel()
        await asyncio.wait({task})

    asyncio.run(asyncio.wait_for(main(), WAIT))


def test_call_that_is_given_up_is_cancelled_in_the_callers_loop() -> None:
    """Otherwise, the handler would continue with records that belong to another worker."""

    async def main() -> None:
        handler_started, handler_cancelled = asyncio.Event(), asyncio.Event()

        async def handle() -> None:
            handler_started.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                handler_cancelled.set()
                raise

        call = _LoopCaller(asyncio.get_running_loop()).wrap_function(handle)()
        task = asyncio.create_task(call)
        await handler_started.wait()
        task.cancel()
        await asyncio.wait({task})
        await handler_cancelled.wait()

    asyncio.run(asyncio.wait_for(main(), WAIT))


def test_arun_leaves_the_programs_own_signal_handler() -> None:
    """A signal that the program ignores stays ignored."""
    handlers = list[object]()

    async def main() -> None:
        handler_called = asyncio.Event()

        async def handle(_batch: leasehold.Delivery) -> None:
            handlers.append(signal.getsignal(signal.SIGTERM))
            handler_called.set()

        task = asyncio.create_task(leasehold.arun(stream(1), handle, leases=FaultyStore(), **BEGINNING))
        await handler_called.wait()
        task.cancel()
        await asyncio.wait({task})
        handlers.append(signal.getsignal(signal.SIGTERM))

    handler_before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        asyncio.run(asyncio.wait_for(main(), WAIT))
    finally:
        signal.signal(signal.SIGTERM, handler_before)
    assert set(handlers) == {signal.SIG_IGN}


def test_run_and_read_work_inside_a_running_loop() -> None:
    """The thread that runs a notebook's cells has a running event loop."""
    store, processed_records = FaultyStore(), list[tuple[str, list[int]]]()

    async def handle(batch: leasehold.Delivery) -> None:
        processed_records.append(shard_and_numbers(batch))

    async def run_notebook_cell() -> None:
        verdict = leasehold.run(
            finite_stream(), handle, leases="memory://" + uuid4().hex, **(BEGINNING | Options(until="now"))
        )
        assert verdict is not None
        assert verdict.finished
        for batch in leasehold.read(stream(1), leases=store, **BEGINNING):
            processed_records.append(shard_and_numbers(batch))
            break

    asyncio.run(run_notebook_cell())
    assert len(processed_records) == 2


def finite_stream() -> CompleteStream:
    """Return a stream with two records to which no more can be added."""
    return CompleteStream(four_shards()[:1], {"s-0": ShardRecords(create_records(2))})


def test_background_worker_ends_with_its_block() -> None:
    store, handler_called = FaultyStore(), threading.Event()
    with leasehold.worker(stream(), lambda _batch: handler_called.set(), leases=store, **BEGINNING) as worker:
        assert handler_called.wait(WAIT)
        assert not worker.wait(0)
    assert worker.wait(0)
    assert {owner for owner, _ in rows(store).values()} == {None}


def test_background_worker_error_is_raised_by_its_block() -> None:
    source = MissingStream()
    with (
        pytest.raises(SourceError, match="no such stream"),
        leasehold.worker(source, print, leases=FaultyStore(), wait=False) as worker,
    ):
        assert worker.wait(WAIT)


def test_background_worker_error_is_raised_once() -> None:
    with leasehold.worker(MissingStream(), print, leases=FaultyStore(), wait=False) as worker:
        with pytest.raises(SourceError, match="no such stream"):
            worker.result()
        assert worker.result() is None


def test_worker_that_is_stopped_before_its_store_responds_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    store_called = threading.Event()

    def open_silent_store(*_args: object, **_options: object) -> NoReturn:
        store_called.set()
        raise OutcomeUnknown("no response")

    monkeypatch.setattr("leasehold.adapters.consuming.open_store", open_silent_store)
    with leasehold.worker(stream(1), print, leases=f"memory://{uuid4()}", **BEGINNING):
        assert store_called.wait(WAIT)


def test_step_that_is_interrupted_lets_another_thread_iterate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread without a batch cannot lose one."""

    def interrupt(_queue: BatchQueue) -> NoReturn:
        raise KeyboardInterrupt

    results = list[object]()
    with leasehold.read(stream(1, 0), leases=FaultyStore(), **BEGINNING) as batches:
        with monkeypatch.context() as patched:
            patched.setattr(BatchQueue, "wait_for_batch", interrupt)
            with pytest.raises(KeyboardInterrupt):
                next(batches)
        batches.stop()
        thread = threading.Thread(target=lambda: results.append(list(batches)))
        thread.start()
        thread.join(WAIT)
    assert results == [[]]


def test_works_that_wait_for_the_consumer_are_taken_in_order() -> None:
    """Otherwise, a shard with many records would delay the others. A work that was withdrawn is not taken."""
    queue, taken = BatchQueue(), list[str]()
    works = [functools.partial(taken.append, name) for name in ("first", "second", "third", "fourth")]
    for work in works:
        queue.start(work)
    withdrawn = [queue.withdraw(works[2]), queue.withdraw(works[2])]
    while (next_work := queue.take_oldest_work()) is not None:
        next_work()
    assert (taken, withdrawn, queue.withdraw(works[0])) == (["first", "second", "fourth"], [True, False], False)


@pytest.mark.parametrize("way", ["start", "mark_ended"])
@pytest.mark.parametrize("moment", ["before", "meanwhile"])
def test_async_consumer_wakes_for_a_batch_and_for_the_end(way: str, moment: str) -> None:
    """A batch may also be queued by a thread after the event loop of an earlier consumer was closed."""
    queue = BatchQueue()

    def change() -> None:
        if way == "start":
            queue.start(lambda: None)
        else:
            queue.mark_ended()

    async def wait_for_batch() -> None:
        if moment == "before":
            change()
        waiting = asyncio.create_task(queue.wait_for_batch_async())
        await asyncio.wait({waiting}, timeout=0)
        if moment == "meanwhile":
            assert not waiting.done()
            change()
        await asyncio.wait_for(waiting, WAIT)

    asyncio.run(wait_for_batch())
    change()
    queue.wait_for_batch()


def test_batch_that_was_given_up_can_be_closed() -> None:
    """The lease of the batch may be lost while the consumer handles it."""
    with leasehold.read(stream(1), leases=FaultyStore(), **BEGINNING) as batches:
        next(batches)
        assert batches._iteration.acknowledgment.cancel()  # noqa: SLF001  as asyncio does when it cancels the call


def test_workers_of_one_process_have_different_ids() -> None:
    worker_ids = [check_consumption_options(stream(), FaultyStore(), print, Options()).me for _ in range(2)]
    assert worker_ids[0] != worker_ids[1]


def test_handling_keeps_what_no_option_replaces() -> None:
    consumption = check_consumption_options(
        stream(), FaultyStore(), Handling(print, attempts=2, slow_seconds=9.0), Options(attempts=3)
    )
    assert (consumption.handling.attempts, consumption.handling.slow_seconds) == (3, 9.0)


RUN = """
import sys, leasehold
from leasehold_lab.simulator.world.world import ListSource, ShardRecords, create_even_shards, create_records
source = ListSource(create_even_shards(("s-0",)), {"s-0": ShardRecords(create_records(2))})
def handle(batch):
    print("handled", flush=True)
leasehold.run(source, handle, leases=sys.argv[1], initial_position="TRIM_HORIZON")
print("drained", flush=True)
"""
ARUN = RUN.replace("leasehold.run(", "import asyncio; asyncio.run(leasehold.arun(").replace('_HORIZON")', '_HORIZON"))')


READ = """
import signal, sys, leasehold
from leasehold_lab.simulator.world.world import ListSource, ShardRecords, create_even_shards, create_records
source = ListSource(create_even_shards(("s-0",)), {"s-0": ShardRecords(create_records(2))})
batches = leasehold.read(source, leases=sys.argv[1], initial_position="TRIM_HORIZON")
signal.signal(signal.SIGTERM, lambda *_: batches.stop())
for batch in batches:
    print("handled", flush=True)
print("drained", flush=True)
"""


@pytest.mark.parametrize("program", [RUN, ARUN, READ], ids=["run", "arun", "read"])
def test_signal_drains(program: str, tmp_path: Any) -> None:  # noqa: ANN401  a path
    url = f"sqlite:///{tmp_path}/leases.db"
    with subprocess.Popen([sys.executable, "-c", program, url], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "handled\n"
        os.kill(process.pid, signal.SIGTERM)
        assert (process.stdout.read(), process.wait(WAIT)) == ("drained\n", 0)
    with closing(open_store(url)) as store:
        assert [(lease.owner, lease.checkpoint) for lease in store.list().leases] == [
            (None, Position(create_records(2)[-1].sequence_number))
        ]


@pytest.mark.parametrize("name", ["run", "arun", "worker", "read"])
def test_example_of_each_name_runs(name: str) -> None:
    books = [Record(data, str(7 + n), partition_key="customer-7") for n, data in enumerate((b"a book", b"a lamp"))]
    orders = CompleteStream(create_even_shards(("shard-0",)), {"shard-0": ShardRecords(books)})
    (test,) = doctest.DocTestFinder(recurse=False).find(getattr(leasehold, name), name, globs={"orders": orders})
    assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test).failed == 0


@pytest.mark.services
@pytest.mark.usefixtures("leasehold_credentials")
def test_produce_example_runs(leasehold_kinesis: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_KINESIS", leasehold_kinesis.url)
    with closing(Stream(leasehold_kinesis.url, "bookshop", 1)):
        (test,) = doctest.DocTestFinder(recurse=False).find(leasehold.produce, "produce", globs={})
        assert doctest.DocTestRunner().run(test).failed == 0
