"""Faults of disks, threads and clocks affect chaos workers as intended, and the workers' writes are recorded."""

import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
from attrs import evolve
from disk import Disk
from libc import STEP_SECONDS, FaultyLibc, has_compiler
from processes import ResourceLimit, ThreadLimit, can_limit_threads
from services import open_table
from written import RecordingStore, parse_answer

from leasehold.balancer.model import TRIM_HORIZON, Lease, Position, Version
from leasehold.errors import OutcomeUnknown
from leasehold.stores.embedded.memory import MemoryStore
from leasehold.stores.protocol import Done, Outcome, Store
from leasehold.stores.urls import open_store
from leasehold.stores.writes import CheckpointLease, ClaimLease, CreateLease, Write
from leasehold_lab.demo.child import ENVIRONMENT
from leasehold_lab.judge.events import WriteAnswer

pytestmark = pytest.mark.slow


def test_a_full_disk_recovers(tmp_path: Path) -> None:
    with Disk(tmp_path / "disk").mount_folder() as disk:
        if not disk.small:
            pytest.skip("A FULL DISK IS NOT TRIED: this user may mount none")
        disk.fill_up()
        with pytest.raises(OSError, match="No space left"):
            (disk.folder / "more").write_bytes(b"\0" * 2**20)
        disk.free_space()
        (disk.folder / "more").write_bytes(b"\0" * 2**20)


def test_a_file_is_locked_until_it_is_released(tmp_path: Path) -> None:
    with (
        Disk(tmp_path / "disk").mount_folder() as disk,
        closing(sqlite3.connect(disk.file, timeout=0.1)) as other_connection,
    ):
        disk.hold_transaction()
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            other_connection.execute("CREATE TABLE t (x)")
        disk.end_transaction()
        other_connection.execute("CREATE TABLE t (x)")


THREADS = """
import threading
for _ in iter(input, ""):
    try:
        threading.Thread(target=lambda: None).start()
        print("had", flush=True)
    except RuntimeError:
        print("refused", flush=True)
"""
DESCRIPTORS = """
import os
for _ in iter(input, ""):
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
        print("had", flush=True)
    except OSError as refused:
        print(os.strerror(refused.errno), flush=True)
"""
MEMORY = """
def had():
    try:
        bytes(8 << 20)
        return "had"
    except MemoryError as error:
        return type(error).__name__
for _ in iter(input, ""):
    print(had(), flush=True)
"""


@pytest.mark.parametrize(
    ("program", "denied", "refusal"),
    [
        pytest.param(THREADS, ThreadLimit, "refused", id="threads"),
        pytest.param(DESCRIPTORS, ResourceLimit.descriptors, "Too many open files", id="descriptors"),
        pytest.param(MEMORY, ResourceLimit.memory, "MemoryError", id="memory"),
    ],
)
def test_a_process_is_denied_a_resource_and_granted_it_again(
    program: str, denied: Callable[..., ResourceLimit | ThreadLimit], refusal: str
) -> None:
    if denied is ThreadLimit and not can_limit_threads():
        pytest.skip("REFUSED THREADS ARE NOT TRIED: this user may make no control group of pids")
    pids: list[int] = []
    with start_answering_process(program, {}, pids) as ask:
        responses = [ask()]
        limit = denied(*pids)
        responses.append(ask())
        limit.end()
        responses.append(ask())
    assert responses == ["had", refusal, "had"]


def test_a_stepped_clock_leaves_monotonic_time_alone(tmp_path: Path) -> None:
    """A stepped clock changes the time of day, but not monotonic time, as on a real machine."""
    program = "import time\nfor _ in iter(input, ''): print(time.time(), time.monotonic(), flush=True)"
    libc = compile_libc(tmp_path)
    with start_answering_process(program, libc.environment("a"), []) as ask:
        times = [[float(word) for word in ask().split()]]
        for clock_offset in (STEP_SECONDS, -STEP_SECONDS, 0):
            libc.set_clock_ahead("a", clock_offset)
            times.append([float(word) for word in ask().split()])
    wall_times, monotonic_times = zip(*times, strict=True)
    assert [round((wall_time - wall_times[0]) / STEP_SECONDS) for wall_time in wall_times] == [0, 1, -1, 0]
    assert max(monotonic_times) - min(monotonic_times) < STEP_SECONDS / 2


def test_a_read_only_disk_becomes_writable_again(tmp_path: Path) -> None:
    """SQLite returns the same errors as on a disk that the system has made read-only."""
    program = """
import sqlite3
place = input()
def wrote(connection):
    try:
        connection.execute("INSERT INTO t VALUES (1)")
        return "done"
    except sqlite3.OperationalError as error:
        return error.sqlite_errorname
first = sqlite3.connect(place, isolation_level=None)
first.execute("PRAGMA journal_mode = WAL")
first.execute("CREATE TABLE t (x)")
print("begun", flush=True)
for _ in iter(input, ""):
    print(wrote(first), wrote(sqlite3.connect(place, isolation_level=None)), flush=True)
"""
    (tmp_path / "disk").mkdir()
    libc = compile_libc(tmp_path)
    with start_answering_process(program, libc.environment("a"), []) as ask:
        assert ask(str(tmp_path / "disk" / "leases.db")) == "begun"
        responses = []
        for writes_refused in (False, True, False):
            libc.refuse_writes(enabled=writes_refused)
            responses.append(ask())
    assert responses == ["done done", "SQLITE_IOERR_WRITE SQLITE_READONLY", "done done"]


def compile_libc(folder: Path) -> FaultyLibc:
    """Return a libc that can be told to give wrong results to processes of worker a."""
    if not has_compiler():
        pytest.skip("NO CLOCK IS STEPPED, AND NO DISK READ-ONLY: there is no C compiler (cc)")
    return FaultyLibc.compile(folder, ("a",), folder / "disk")


@contextmanager
def start_answering_process(
    program: str, environment: Mapping[str, str], pids: list[int]
) -> Iterator[Callable[..., str]]:
    """Run a process that answers each line with a line until it gets an empty one. Its id is added to `pids`."""
    command = (sys.executable, "-c", program)
    with subprocess.Popen(
        command,
        text=True,
        start_new_session=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **environment},
    ) as process:
        process_input, process_output = process.stdin, process.stdout
        assert process_input is not None
        assert process_output is not None

        pids.append(process.pid)

        def ask(line: str = "one") -> str:
            process_input.write(f"{line}\n")
            process_input.flush()
            return process_output.readline().strip()

        yield ask
        process.communicate("\n")


@pytest.mark.sampled(4)
@pytest.mark.services
@pytest.mark.timeout(1800)  # the S3 service may have to be built
@pytest.mark.parametrize("store", ["dynamodb", "azblob", "postgres", "s3"])
def test_a_restarted_service_keeps_its_leases(store: str, tmp_path: Path) -> None:
    with open_table(store, tmp_path, "") as table:
        assert table.control is not None

        @contextmanager
        def connect_store() -> Iterator[Store]:
            assert table.control is not None
            url = table.control.service.url.removeprefix("http://") if table.wired else table.control.service.url
            environment = table.environment(url)
            with (
                patch.dict(os.environ, {**ENVIRONMENT, **environment}),
                closing(open_store(table.url.format(endpoint=url))) as opened_store,
            ):
                yield opened_store

        with connect_store() as store_before:
            creation = store_before.write(CreateLease(Lease("s-0")))
            assert isinstance(creation, Done)
        table.control.restart()
        with connect_store() as store_after:
            assert [lease.key for lease in store_after.list().leases] == ["s-0"]
            assert isinstance(store_after.write(ClaimLease(creation.lease, "a")), Done)


def test_each_write_is_recorded_with_its_outcome(tmp_path: Path) -> None:
    """The judge can find faults in writes only if they are recorded with their outcomes."""

    class Store(MemoryStore):
        def write(self, write: Write) -> Outcome:
            outcome = super().write(write)
            if isinstance(write, CheckpointLease):
                raise OutcomeUnknown("the answer was lost")
            return outcome

    ticks = iter(range(100))
    store = RecordingStore(Store(), tmp_path / "writes", lambda: float(next(ticks)))
    lease = Lease("s-0")
    for write in (CreateLease(lease), CreateLease(lease), ClaimLease(evolve(lease, version=Version("0")), "a")):
        store.write(write)
    with pytest.raises(OutcomeUnknown):
        store.write(CheckpointLease(store.list().leases[0], Position("7")))
    store.close()
    recorded_writes = [parse_answer(line, "a#1") for line in (tmp_path / "writes").read_bytes().splitlines()]
    assert recorded_writes == [
        WriteAnswer(1.0, 0.0, "a#1", "create", "s-0", "done", None, "0", 0, TRIM_HORIZON.order),
        WriteAnswer(3.0, 2.0, "a#1", "create", "s-0", "lost", None, "0", 0, TRIM_HORIZON.order),
        WriteAnswer(5.0, 4.0, "a#1", "claim", "s-0", "done", "a", "1", 1, TRIM_HORIZON.order),
        WriteAnswer(7.0, 6.0, "a#1", "checkpoint", "s-0", "unknown", seen="a"),
    ]
