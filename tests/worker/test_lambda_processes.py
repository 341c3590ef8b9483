"""Lambda functions that are called concurrently for the keys of a batch, each call in a process of its own."""

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import NoReturn
from uuid import uuid4

import pytest
from attrs import define, field
from hypothesis import given
from hypothesis import strategies as st
from reader_harness import ReaderHarness, data
from waiters import WAIT, until

import leasehold
from leasehold.adapters.consumer.handling import Delivery
from leasehold.adapters.consuming import check_consumption_options
from leasehold.adapters.lambda_handlers import ReportedFailure, parse_function_settings
from leasehold.adapters.lambda_processes import (
    FunctionCall,
    FunctionLoaded,
    FunctionProcess,
    FunctionReply,
    FunctionSetup,
    ParallelFunction,
)
from leasehold.adapters.options import Options
from leasehold.adapters.sources.protocol import Record
from leasehold.balancer.model import Lease, Position
from leasehold_lab.simulator.world.world import ListSource, ShardRecords, create_even_shards

REPORTING = parse_function_settings("lambda:app.handler?report_batch_item_failures=true")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Silence the log, because some functions fail on purpose."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


KEYS_OF_DIFFERENT_PROCESSES = (1, 2)
"""Two keys that are assigned to different processes if there are two processes."""


def keyed(keys: Sequence[int]) -> list[Record]:
    """Return one record for each of these keys. The data of each record is its number."""
    return [Record(b"%d" % index, str(100 + index), partition_key=f"k-{key}") for index, key in enumerate(keys)]


@define(eq=False)
class FailingFunction(ParallelFunction):
    """A parallel function without processes. Each record fails as often as `faults` defines."""

    faults: dict[bytes, int] = field(factory=dict)
    calls: list[list[list[bytes]]] = field(factory=list)
    succeeded: list[bytes] = field(factory=list)

    def _collect_replies(
        self, _delivery: Delivery, records_by_process: Mapping[FunctionProcess, Sequence[Record]]
    ) -> dict[FunctionProcess, FunctionReply]:
        self.calls.append(sorted([record.data for record in records] for records in records_by_process.values()))
        replies = dict[FunctionProcess, FunctionReply]()
        for process, records in records_by_process.items():
            failing_indexes = [index for index, record in enumerate(records) if self.faults.get(record.data, 0) > 0]
            for index in failing_indexes[:1]:
                self.faults[records[index].data] -= 1
            self.succeeded += [record.data for record in records[: failing_indexes[0] if failing_indexes else None]]
            replies[process] = (
                FunctionReply(failing_indexes[0], "its function failed") if failing_indexes else FunctionReply()
            )
        return replies


def create_failing_function(concurrency: int, faults: Mapping[int, int]) -> FailingFunction:
    """Return a function that fails at some records. `faults` maps the number of a record to its number of failures."""
    return FailingFunction(
        lambda _event, _context: None,
        REPORTING,
        30.0,
        concurrency=concurrency,
        faults={b"%d" % record_number: failure_count for record_number, failure_count in faults.items()},
    )


def test_only_failed_records_are_repeated() -> None:
    """The checkpoint stops before the first failed record. Later records that another process has handled stay done."""
    function = create_failing_function(2, {2: 1})
    keys = KEYS_OF_DIFFERENT_PROCESSES * 3
    harness = ReaderHarness(ShardRecords(keyed(keys)), on_batch=function)
    reader = harness.reading()
    harness.steps(reader, 2)
    assert function.calls == [[data(6)[0::2], data(6)[1::2]]]
    assert harness.store.row("s-0").checkpoint == Position("101")
    harness.steps(reader, 3)
    assert function.calls[1:] == [[[b"2", b"4"]]]
    assert harness.store.row("s-0").checkpoint == Position("105")
    assert sorted(function.succeeded) == data(6)


@define
class Held:
    """A held lease with this fencing number."""

    fencing_number: int
    key: str = "s-0"
    stream: str = "orders"
    lease: Lease = field(factory=lambda: Lease("s-0"))
    worker: str = "a-1"
    lost: Event = field(factory=Event)
    checkpoints: list[Position] = field(factory=list)

    def checkpoint(self, position: Position) -> bool:
        self.checkpoints.append(position)
        return True


def test_returning_lease_is_handled_from_its_checkpoint() -> None:
    """All records after the checkpoint are handled again, because the lease may have been reset meanwhile."""
    function = create_failing_function(2, {0: 100})
    records = keyed(KEYS_OF_DIFFERENT_PROCESSES)
    for epoch in (1, 2):
        with pytest.raises(ReportedFailure):
            function(Delivery(records, records[-1].position, None, Held(epoch)))
    assert function.calls == [[[b"0"], [b"1"]]] * 2


def test_aggregated_records_are_repeated_one_by_one() -> None:
    """The records of an aggregate share a sequence number, but each of them succeeds or fails by itself."""
    function = create_failing_function(2, {1: 1})
    records = [
        record._replace(sequence_number="100", sub_sequence_number=sub) for sub, record in enumerate(keyed((1, 2) * 2))
    ]
    held = Held(1)
    with pytest.raises(ReportedFailure):
        function(Delivery(records, records[-1].position, None, held))
    function(Delivery(records[1:], records[-1].position, None, held))
    assert function.calls == [[[b"0", b"2"], [b"1", b"3"]], [[b"1", b"3"]]]
    assert held.checkpoints == [Position("100", 0)]


def test_records_without_a_partition_key_are_handled() -> None:
    """Some sources have no partition keys."""
    function, record = create_failing_function(2, {}), Record(b"0", "100")
    function(Delivery([record], record.position, None, Held(1)))
    assert function.succeeded == [b"0"]


def test_process_that_received_half_a_call_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would read the next call as the rest of this one."""
    function = ParallelFunction(lambda _event, _context: None, REPORTING, 30.0, concurrency=1)
    killed_processes = list[FunctionProcess]()

    def send_call(_process: FunctionProcess, _call: FunctionCall) -> NoReturn:
        raise BrokenPipeError

    def kill_process(process: FunctionProcess) -> None:
        killed_processes.append(process)

    monkeypatch.setattr(FunctionProcess, "send_call", send_call)
    monkeypatch.setattr(FunctionProcess, "kill_process", kill_process)
    (record,) = keyed([1])
    with pytest.raises(ReportedFailure):
        function(Delivery([record], record.position, None, Held(1)))
    assert len(killed_processes) == 1


CASES = st.tuples(
    st.lists(st.integers(0, 4), min_size=1, max_size=12),  # the keys of the records
    st.integers(2, 4),  # processes
    st.dictionaries(st.integers(0, 11), st.integers(1, 9)),  # the number of failures of each record
    st.none() | st.integers(1, 5),  # max_records
    st.booleans(),  # whether failed records are dead-lettered
)


@given(CASES)
def test_every_record_succeeds_once_in_order_of_its_key(
    case: tuple[list[int], int, dict[int, int], int | None, bool],
) -> None:
    keys, concurrency, faults, max_records, has_dead_letter = case
    function, dead_lettered = create_failing_function(concurrency, faults), list[bytes]()

    def record_dead_letter(delivery: Delivery, _error: Exception) -> None:
        (record,) = delivery.records
        dead_lettered.append(record.data)

    harness = ReaderHarness(ShardRecords(keyed(keys)), on_batch=function)
    handling_options = {"attempts": 3, "dead_letter": record_dead_letter} if has_dead_letter else {"attempts": 1000}
    reader = harness.reading(max_records=max_records, **handling_options)
    for _ in range(400):
        assert harness.holding.renew()
        harness.steps(reader, 1)
        checkpoint = harness.store.row("s-0").checkpoint
        checkpointed_count = int(checkpoint.sequence) - 99 if checkpoint.numbered else 0
        assert set(data(checkpointed_count)) <= {*function.succeeded, *dead_lettered}
        if checkpointed_count == len(keys):
            break
    assert sorted([*function.succeeded, *dead_lettered], key=int) == data(len(keys))
    for key in set(keys):
        succeeded = [int(record_data) for record_data in function.succeeded if keys[int(record_data)] == key]
        assert succeeded == sorted(succeeded)


APP = """
import json, os, re, signal, sys, time
from base64 import b64decode
from pathlib import Path
FOLDER = Path({folder!r})
COUNTS = dict()

def handler(event, context):
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # only the main thread may
    texts = [record["partitionKey"] for record in (each["kinesis"] for each in event["Records"])]
    with (FOLDER / "calls").open("a") as calls:
        calls.write(json.dumps([os.getpid(), texts, context.function_name]) + "\\n")
    print("called with", len(texts))
    for text in texts:
        COUNTS[text] = COUNTS.get(text, 0) + 1
        doing = FOLDER / text
        if doing.exists():
            what = doing.read_text()
            doing.unlink()
            exec(what)
    with (FOLDER / "handled").open("a") as handled:
        for record in event["Records"]:
            handled.write(record["eventID"] + " " + b64decode(record["kinesis"]["data"]).decode() + "\\n")
    return {{"batchItemFailures": []}}
"""


@define
class App:
    """A folder with a Lambda function that logs its calls in a file."""

    folder: Path
    name: str

    def set_action(self, key: int, code: str) -> None:
        """Let the next call with this key execute the code `code` first."""
        (self.folder / f"k-{key}").write_text(code)

    def calls(self) -> list[tuple[int, list[str], str]]:
        path = self.folder / "calls"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [tuple(json.loads(line)) for line in lines]

    def handled(self) -> list[tuple[str, int]]:
        """Return the shard and the number of each handled record, in the order of the calls."""
        path = self.folder / "handled"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [(line.partition(":")[0], int(line.rpartition(" ")[2])) for line in lines]


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[App]:
    name = f"app_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(APP.format(folder=str(tmp_path)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield App(tmp_path, name)
    sys.modules.pop(name, None)


def test_parts_run_in_separate_processes_and_their_faults_fail_the_batch(app: App) -> None:
    """An exception, an exit or a crash of a process counts as a failed attempt."""
    options = Options(concurrency=2, handler_seconds=60)
    consumption = check_consumption_options(ListSource(), "memory://x", f"lambda:{app.name}.handler", options)
    function = consumption.function
    assert isinstance(function, ParallelFunction)
    assert (consumption.handling.max_records, consumption.handling.most_calls) == (100, 1)
    harness = ReaderHarness(ShardRecords(keyed(KEYS_OF_DIFFERENT_PROCESSES)), on_batch=function)
    reader = harness.reading(attempts=1000)
    app.set_action(1, "raise ValueError('fault')")
    try:
        for statement in ("sys.exit(3)", "os.kill(os.getpid(), signal.SIGKILL)"):
            harness.holding.renew()
            harness.steps(reader, 1 if app.calls() else 2)
            app.set_action(1, statement)
        harness.holding.renew()
        harness.steps(reader, 3)
        calls = app.calls()
        assert [partition_keys for _, partition_keys, _ in calls].count(["k-2"]) == 1
        assert [partition_keys for _, partition_keys, _ in calls].count(["k-1"]) >= 4
        assert os.getpid() not in {process for process, _, _ in calls}
        assert len({process for process, _, _ in calls}) == 3  # two processes, and one that replaces the killed one
        assert {name for _, _, name in calls} == {app.name}
    finally:
        function.close()


@pytest.mark.parametrize(
    ("hang", "attempts", "dead"),
    [
        pytest.param("time.sleep(1000)", 2, [], id="once"),
        pytest.param(
            "doing.write_text(what); os.kill(os.getpid(), signal.SIGSTOP)",
            1,
            [("s-0", 1), ("s-0", 3)],
            id="always",
            marks=pytest.mark.more,
        ),
    ],
)
def test_hung_call_costs_an_attempt_and_its_process(
    app: App, hang: str, attempts: int, dead: list[tuple[str, int]]
) -> None:
    """The batch is tried again in another process. A record whose calls always hang is dead-lettered."""
    dead_lettered = list[tuple[str, int]]()

    def record_dead_letters(delivery: Delivery, _error: Exception) -> None:
        dead_lettered.extend((delivery.shard, int(record.data)) for record in delivery.records)

    shards = create_even_shards(("s-0", "s-1"))
    keys = {"s-0": KEYS_OF_DIFFERENT_PROCESSES * 2, "s-1": (5, 6) * 2}
    source = ListSource(shards, {shard: ShardRecords(keyed(keys[shard]), size=2) for shard in keys})
    app.set_action(KEYS_OF_DIFFERENT_PROCESSES[1], hang)
    worker = leasehold.worker(
        source,
        f"lambda:{app.name}.handler",
        leases=f"memory://{uuid4()}",
        initial_position="TRIM_HORIZON",
        concurrency=2,
        handler_seconds=1.0,
        attempts=attempts,
        dead_letter=record_dead_letters,
    )
    all_records = {(shard, number) for shard in keys for number in range(4)}
    with worker:
        until(lambda: {*app.handled(), *dead_lettered} == all_records, "everything is handled or dead-lettered")
    assert dead_lettered == dead
    handled_records = app.handled()
    assert sorted(handled_records) == sorted(
        all_records - {*dead}
    )  # No record is repeated that another process has handled.
    for shard, number in all_records:
        records_of_key = [
            handled_record
            for handled_record in handled_records
            if handled_record[0] == shard and handled_record[1] % 2 == number % 2
        ]
        assert records_of_key == sorted(records_of_key)
    processes_of_hung_key = [
        process for process, partition_keys, _ in app.calls() if f"k-{KEYS_OF_DIFFERENT_PROCESSES[1]}" in partition_keys
    ]
    assert len({*processes_of_hung_key}) == len(processes_of_hung_key) - (
        not dead
    )  # Each hung call had a process of its own.
    until(lambda: not any(running(process) for process, _, _ in app.calls()), "the processes have ended")


@contextmanager
def calls_in_one_process(app: App, limit: float) -> Iterator[Callable[[bytes], None]]:
    """Return a function that calls the app with one record. Each call may take up to `limit` seconds."""
    options = Options(concurrency=1, handler_seconds=limit)
    function = check_consumption_options(ListSource(), "memory://x", f"lambda:{app.name}.handler", options).function
    assert isinstance(function, ParallelFunction)

    def call(number: bytes) -> None:
        record = Record(number, "100", partition_key="k-1")
        function(Delivery([record], record.position, None, Held(1)))

    try:
        yield call
    finally:
        function.close()


def test_slow_import_does_not_use_up_the_call_timeout(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time limit of a call starts only when its process has imported the function."""
    path = app.folder / f"{app.name}.py"
    path.write_text("import os, time\nif os.environ.get('SLOW'): time.sleep(1.5)\n" + path.read_text())
    with calls_in_one_process(app, 1.0) as call:
        monkeypatch.setenv("SLOW", "1")
        call(b"0")
    assert app.handled() == [("s-0", 0)]


def test_time_to_load_the_function_is_granted_to_every_process(app: App) -> None:
    """A process that replaces another one has to load the function again. Nothing of a killed process is left."""
    descriptors = {*Path("/dev/fd").iterdir()}
    setup = FunctionSetup(parse_function_settings(f"lambda:{app.name}.handler"), 1.0, [str(app.folder)])
    process = FunctionProcess(setup)
    limit_seconds = process.limit_seconds
    try:
        connection = process.send_call(FunctionCall("s-0", "arn", keyed([1])))
        assert connection.poll(WAIT)
        assert isinstance(process.receive_reply(), FunctionLoaded)
        assert process.limit_seconds == setup.handler_seconds
    finally:
        exit_status = process.kill_process()
    assert exit_status in {-signal.SIGKILL, -signal.SIGIO}
    assert process.kill_process() is None
    assert {*Path("/dev/fd").iterdir()} <= descriptors
    assert process.limit_seconds == limit_seconds > setup.handler_seconds


def test_stopped_process_times_out_like_any_other(app: App) -> None:
    """A call times out even if its process reads nothing and the event is larger than the buffer of the pipe."""
    with calls_in_one_process(app, 1.0) as call:
        call(b"0")
        os.kill(app.calls()[0][0], signal.SIGSTOP)
        with pytest.raises(ReportedFailure):
            call(b"1" * 10**6)
        call(b"2")
    assert app.handled() == [("s-0", 0), ("s-0", 2)]


WORKER = """
import leasehold
from leasehold.adapters.sources.protocol import Record
from leasehold.balancer.model import Shard
from leasehold_lab.simulator.world.world import ListSource, ShardRecords

if __name__ == "__main__":
    records = [Record(b"x", str(100 + n), partition_key="k-%d" % (1 + n % 2)) for n in range(4)]
    source = ListSource([Shard("s-0", hash_range=(0, 9))], {{"s-0": ShardRecords(records)}})
    options = dict(initial_position="TRIM_HORIZON", concurrency=2, checkpoint_seconds=0)
    leasehold.run(source, "lambda:{name}.handler", leases="memory://x", **options)
"""


PRINT_WHAT_IS_INHERITED = """
time.sleep(0.5)
descriptors = [number for number in range(3, 100) if os.path.exists(f"/dev/fd/{number}")]
print("slept", list(sys.stdin), list(filter(os.get_inheritable, descriptors)))
"""


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_processes_end_with_their_worker(app: App, end: signal.Signals) -> None:
    """The processes end even if the worker is killed while their calls hang. A drain waits for running calls.

    The worker's standard input belongs to its supervisor, so the function cannot read it. Programs that the function
    starts inherit none of the worker's connections.
    """
    # This call holds the interpreter's lock, so no Python code could end the process.
    backtracking = "re.match('(a+)+$', 'a' * 50 + 'b')"
    action = backtracking if end == signal.SIGKILL else PRINT_WHAT_IS_INHERITED
    app.set_action(1, action)
    (app.folder / "worker.py").write_text(WORKER.format(name=app.name))
    worker = subprocess.Popen(
        [sys.executable, "worker.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONUNBUFFERED": ""},
    )
    try:
        until(lambda: len(app.calls()) == 2, "both processes are called")
        processes = {process for process, _, _ in app.calls()}
        for process in processes if end == signal.SIGTERM else ():
            os.kill(process, end)  # as a service manager does
        worker.send_signal(end)
        output, _ = worker.communicate(b"x", timeout=WAIT)  # The standard output ends once all processes have ended.
        assert worker.returncode == (0 if end == signal.SIGTERM else -end)
        if end == signal.SIGTERM:  # The running call has finished, and its output is not lost.
            assert sorted(output.decode().split("\n")) == ["", "called with 2", "called with 2", "slept [] []"]
        until(lambda: not any(map(running, processes)), "the processes have ended")
    finally:
        worker.kill()
        worker.wait()


def running(process: int) -> bool:
    """Return whether the process exists and has not ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
