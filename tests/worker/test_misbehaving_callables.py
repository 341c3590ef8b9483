"""Whatever a user's callable raises, the batch fails or the worker ends cleanly, and no lease is held unread."""

import os
import subprocess
import sys
from asyncio import CancelledError
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from children import child
from handler_threads import ProcessedRecords, joined
from odd_values import SHOWN_BY, unsayable
from reader_harness import ReaderHarness, data
from running import run_to_its_end, running
from virtual_fleet import FaultyStore, stream_with_five_records
from waiters import WAIT

from leasehold.adapters.consumer.dead_letters.sinks import dead_letters
from leasehold.adapters.consumer.events import EventLines
from leasehold.adapters.consumer.handling import Delivery, Handling, ShardEvent, Unhandled
from leasehold.adapters.consumer.runner import Runner
from leasehold.adapters.consuming import load_function
from leasehold.adapters.sources.protocol import Batch
from leasehold.adapters.worker.holding import Holding
from leasehold.balancer.model import TRIM_HORIZON, Position
from leasehold.stores.printable import error_summary
from leasehold_lab.simulator.world.world import ShardRecords, create_records


class Odd(BaseException):
    """An exception that is not a subclass of `Exception`."""


def raising(error: BaseException) -> Callable[..., None]:
    """Return a callable that accepts any arguments and raises this exception."""

    def raises(*_args: object) -> None:
        raise error

    return raises


@pytest.mark.parametrize("error", [CancelledError(), GeneratorExit(), Odd("odd")], ids=repr)
def test_any_handler_exception_fails_the_batch(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    harness = ReaderHarness(on_batch=raising(error))
    harness.run_until_done(harness.reading(attempts=2))
    row = harness.store.row("s-0")
    assert (harness.dispatched, harness.happenings) == ([data(5)] * 2, ["initialize", "stopped"])
    assert (row.owner, row.checkpoint) == (None, TRIM_HORIZON)
    assert f"its handler failed on records 100 to 104, attempt 2 of 2: it raised {error_summary(error)}" in caplog.text


@pytest.mark.parametrize("base", [Exception, BaseException])
@pytest.mark.parametrize("by", SHOWN_BY)
def test_exception_that_cannot_be_shown_is_retried_and_dead_lettered(
    by: str, base: type[BaseException], tmp_path: Path
) -> None:
    dead_letter = dead_letters(f"file://{tmp_path}")
    harness = ReaderHarness(on_batch=raising(unsayable(by, base)))
    harness.steps(harness.reading(attempts=2, dead_letter=dead_letter), 40)
    assert harness.store.row("s-0").checkpoint == Position("104")
    assert len(list(tmp_path.glob("*.json"))) == 5


@pytest.mark.parametrize("by", SHOWN_BY)
@pytest.mark.parametrize("whose", ["observer", "measure", "dead_letter"])
def test_observer_may_raise_an_exception_that_cannot_be_shown(by: str, whose: str) -> None:
    """An exception of an observer or a measure has no effect. An exception of a dead letter stops the shard."""
    stops_the_shard = whose == "dead_letter"
    harness = ReaderHarness(on_batch=raising(ValueError("poison")) if stops_the_shard else lambda _delivery: None)
    callables: dict[str, Any] = {whose: raising(unsayable(by))}
    harness.steps(harness.reading(attempts=1, **callables), 20 if stops_the_shard else 4)
    row = harness.store.row("s-0")
    assert (row.owner, row.checkpoint) == ((None, TRIM_HORIZON) if stops_the_shard else ("a-1", Position("104")))


def test_dead_letter_always_gets_an_exception() -> None:
    errors: list[Exception] = []
    harness = ReaderHarness(ShardRecords(create_records(1)), on_batch=raising(CancelledError()))
    harness.steps(harness.reading(attempts=1, dead_letter=lambda _delivery, error: errors.append(error)), 3)
    assert [(type(error), type(error.__cause__)) for error in errors] == [(Unhandled, CancelledError)]
    assert harness.store.row("s-0").checkpoint == Position("100")


@pytest.mark.parametrize("error", [CancelledError(), Odd(), OSError("disk full")], ids=repr)
def test_any_dead_letter_exception_stops_the_shard(error: BaseException) -> None:
    harness = ReaderHarness(on_batch=raising(OSError()))
    harness.run_until_done(harness.reading(attempts=1, dead_letter=raising(error)))
    assert (harness.happenings, harness.store.row("s-0").checkpoint) == (["initialize", "stopped"], TRIM_HORIZON)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("where", ["handler", "dead_letter", "observer", "measure"])
def test_callable_that_asks_the_process_to_end_stops_the_worker_cleanly(
    where: str, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    store, dead_lettered = FaultyStore(), list[Delivery]()
    end_process = raising(error)
    handling = {
        "handler": Handling(
            end_process, attempts=1, dead_letter=lambda delivery, _error: dead_lettered.append(delivery)
        ),
        "dead_letter": Handling(raising(OSError()), attempts=1, dead_letter=end_process),
        "observer": Handling(lambda _delivery: None, observer=end_process),
        "measure": Handling(lambda _delivery: None, measure=end_process),
    }[where]
    with pytest.raises(type(error)) as exc_info:
        run_to_its_end(Runner(joined(store, stream_with_five_records()), handling))
    assert exc_info.value is error
    assert [lease.owner for lease in store.list().leases] == [None] * 4
    assert dead_lettered == [], "what ends the worker is no poison"
    messages = [
        record for record in caplog.records if record.getMessage() == f"the worker ends: {error_summary(error)}"
    ]
    assert len(messages) == 1


def test_observer_that_raises_disturbs_neither_reading_nor_leaving(caplog: pytest.LogCaptureFixture) -> None:
    store, processed_records, happenings = FaultyStore(), ProcessedRecords(20), list[ShardEvent]()

    def observe(happening: ShardEvent, _holding: Holding) -> None:
        happenings.append(happening)
        raise OSError("nobody listens")

    with running(Runner(joined(store, stream_with_five_records()), Handling(processed_records.add, observer=observe))):
        assert processed_records.all.wait(WAIT)
    assert (sorted(happenings), processed_records.by_shard) == (
        ["initialize"] * 4 + ["stopped"] * 4,
        {f"s-{n}": data(5) for n in range(4)},
    )
    assert [(lease.owner, lease.checkpoint) for lease in store.list().leases] == [(None, Position("104"))] * 4
    assert caplog.text.count("the observer failed; this is said once") == 1


def test_failing_measure_skips_no_record(caplog: pytest.LogCaptureFixture) -> None:
    def measure(_holding: Holding, _batch: Batch) -> None:
        raise MemoryError("no room to count")

    harness = ReaderHarness(ShardRecords(create_records(4), size=2))
    harness.steps(harness.reading(measure=measure), 4)
    assert (harness.dispatched, harness.store.row("s-0").checkpoint) == ([data(2), data(2, 2)], Position("103"))
    assert caplog.text.count("the measure failed; this is said once") == 1


def test_async_observer_is_ignored_with_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    async def observe(_happening: ShardEvent, _holding: Holding) -> None:
        """Do nothing, because the call is never awaited."""

    harness = ReaderHarness()
    harness.steps(harness.reading(observer=observe), 2)
    assert harness.dispatched == [data(5)]
    assert "the observer failed; this is said once, and reading goes on: it returned a value (coroutine)" in caplog.text


def test_closed_event_pipe_ends_the_worker_cleanly() -> None:
    """A command such as `leasehold consume --events | head` stops once the pipe is closed."""
    store = FaultyStore()
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w", encoding="utf-8") as out, pytest.raises(SystemExit) as exc_info:
        run_to_its_end(Runner(joined(store, stream_with_five_records()), EventLines("a-1", out).handling))
    assert exc_info.value.code == 141
    assert [(lease.owner, lease.checkpoint) for lease in store.list().leases] == [(None, TRIM_HORIZON)] * 4


CONSUME = """
import leasehold.adapters.consuming as consuming
import leasehold.adapters.cli.consume as consume
from leasehold_lab.simulator.world.world import ListSource, ShardRecords, create_even_shards, create_records
names = ("s-0", "s-1", "s-2", "s-3")
source = ListSource(create_even_shards(names), {name: ShardRecords(create_records(5000)) for name in names})
consuming.open_source = lambda _url, **_options: source
consume.app()
"""


def test_command_with_a_closed_output_pipe_ends_quietly() -> None:
    """Python flushes its standard output at exit, which must not print a traceback."""
    command = [sys.executable, "-c", CONSUME, "kinesis://a-stream", "--store", "memory://cut", "--events"]
    options = ["--initial-position", "TRIM_HORIZON"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with child([*command, *options], **pipes, cwd=Path(__file__).parents[2]) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert '"event": ' in process.stdout.readline()
        process.stdout.close()
        error_output = process.stderr.read()
        assert process.wait(WAIT) == 141
    assert "Traceback" not in error_output
    assert "the worker ends: SystemExit: 141" in error_output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def handle(batch:\n    pass\n", "'mine:handle': {file}, line 1: '(' was never closed"),
        (
            "import json\nimport no_such_library\n",
            "'mine:handle': {file}, line 2: ModuleNotFoundError: No module named 'no_such_library'",
        ),
        ("\n\nfrom json import no_such_name\n", "'mine:handle': {file}, line 3: ImportError: cannot import name"),
        ("import os\nos.environ['NO_SUCH']\n", "'mine:handle': {file}, line 2: KeyError: 'NO_SUCH'"),
    ],
)
def test_handler_file_that_cannot_be_imported_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    (tmp_path / "mine.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    with pytest.raises(ValueError, match="mine:handle") as exc_info:
        load_function("mine:handle")
    assert str(exc_info.value).startswith(message.format(file=tmp_path / "mine.py"))


def test_file_in_the_working_directory_does_not_shadow_a_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "graphlib.py").write_text("TopologicalSorter = None\n")
    (tmp_path / "beside.py").write_text("import graphlib\n\n\ndef handle(batch):\n    return graphlib.__file__\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    for name in ("graphlib", "beside"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert Path(load_function("beside:handle")(None)).parent != tmp_path
    assert sys.path[-1] == str(tmp_path)
