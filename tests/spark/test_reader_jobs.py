"""Readers on executors, without a cluster: how they are asked for, kept alive and ended, and who may ask."""

import atexit
import logging
import os
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from queue import Queue
from threading import Event, Thread
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import pytest
from attrs import Factory, define, evolve, field
from fake_stream import Stream
from pyspark import cloudpickle

from leasehold.adapters.sources.call_patience import Backoff
from leasehold.adapters.spark.event_hubs.options import event_hubs_options
from leasehold.adapters.spark.fetching import Transport
from leasehold.adapters.spark.kinesis.options import kinesis_options
from leasehold.adapters.spark.kinesis.rows import columns
from leasehold.adapters.spark.options import READERS_MOST, Address, LeaseOptions
from leasehold.adapters.spark.readers import jobs
from leasehold.adapters.spark.readers import jobs as executors
from leasehold.adapters.spark.readers import jobs as keeping
from leasehold.adapters.spark.readers import pool as pool_module
from leasehold.adapters.spark.readers.jobs import (
    CAPACITY,
    TEXT_MOST,
    WISH,
    ExecutorReaders,
    JobListener,
    KeptReaders,
    ReaderChildren,
    ReaderJobs,
    ReaderTask,
)
from leasehold.adapters.spark.readers.messages import Hello, line_of
from leasehold.adapters.spark.readers.reader import ReaderSpec
from leasehold.adapters.spark.registration import register
from leasehold.adapters.spark.replay import Place
from leasehold.adapters.spark.rows import SourceSpec
from leasehold.adapters.threads import spawn
from leasehold.balancer.model import TRIM_HORIZON, Lease
from leasehold.errors import SourceError, SourceUnavailable
from leasehold.stores.embedded.memory import MemoryStore

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

HOST = "127.0.0.1"
PATIENCE = 60.0
STREAM = {"kinesis.streamName": "s", "lease.store": "sqlite:///s.db", "lease.fetchHost": HOST}


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pause before a reader is started again."""
    monkeypatch.setattr(keeping, "AGAIN_SECONDS", (0.0, 0.0))


@define
class Job:
    """A job that runs until it is ended; what it is to return, or to raise."""

    context: "Session"
    place: int
    group: str
    described: str
    task: Callable[[Sequence[int]], Iterator[str]] | None = None
    outcome: "str | Exception" = "cancelled"
    over: Event = Factory(Event)

    def mapPartitions(self, task: Callable[[Sequence[int]], Iterator[str]]) -> "Job":  # noqa: N802  Spark's name
        self.task = task
        return self

    def collect(self) -> list[str]:
        """Run: here, or until somebody says what it came to."""
        assert self.task is not None
        self.context.jobs.put(self)
        if self.context.runs:
            try:
                return list(self.task([self.place]))
            except Exception as fault:
                raise RuntimeError("Task 0 in stage 0.0 failed 4 times") from fault
        assert self.over.wait(PATIENCE)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return [self.outcome]

    def end(self, outcome: "str | Exception") -> None:
        """It has come to this."""
        self.outcome = outcome
        self.over.set()


@define
class Session:
    """As much of Spark's context as starts jobs.

    runs       whether tasks run in this process
    executors  how many are there
    """

    runs: bool = False
    executors: int = 2
    defaultParallelism: int = 4  # noqa: N815  Spark's name
    jobs: "Queue[Job]" = Factory(Queue)
    cancelled: "Queue[str]" = Factory(Queue)
    started: list[Job] = field(factory=list)
    _group: tuple[str, str] = ("", "")

    @property
    def _jsc(self) -> object:
        tracker = SimpleNamespace(getExecutorInfos=lambda: [None] * (self.executors + 1))
        return SimpleNamespace(sc=lambda: SimpleNamespace(statusTracker=lambda: tracker))

    def setJobGroup(self, group: str, description: str, *, interruptOnCancel: bool) -> None:  # noqa: N802, N803  Spark's names
        assert interruptOnCancel
        self._group = group, description

    def parallelize(self, places: list[int], slices: int) -> Job:
        """As Spark's: one task, of one place."""
        ((place,), (group, described)) = places, self._group
        assert slices == 1
        job = Job(self, place, group, described)
        self.started.append(job)
        return job

    def cancelJobGroup(self, group: str) -> None:  # noqa: N802  Spark's name
        self.cancelled.put(group)
        for job in self.started:
            if job.group == group:
                job.end(RuntimeError("cancelled"))


@contextmanager
def listening(session: Session) -> Iterator[JobListener]:
    """The listener of a program with this session."""
    listener = JobListener()
    listener.context = cast("SparkContext", session)
    try:
        yield listener
    finally:
        listener.close()


def a_spec(stream: Stream | None = None, port: int = 1, token: bytes = b"") -> ReaderSpec:
    """What a reader is given."""
    source_spec = SourceSpec(lambda: stream or Stream({}), columns("fake"), 0.01, 2**53, rereadable=True)
    return ReaderSpec((HOST, port), token, Address("", ""), source_spec, 1000, 1 << 20, 3, 1 << 20, "/not/here")


def started(session: Session, number: int) -> list[Job]:
    """The next jobs that are started."""
    return [session.jobs.get(timeout=PATIENCE) for _ in range(number)]


# In the user's program


def test_as_many_readers_as_were_asked_for_are_kept_until_the_query_is_gone() -> None:
    """Without it a dead executor's reader would be missing for good, or readers hold slots for nobody."""
    session, told = Session(), Queue[str]()
    with listening(session) as listener:
        readers = ExecutorReaders(listener.place)
        readers.begin(2, a_spec(), told.put)
        first, second = started(session, 2)
        assert ({first.place, second.place}, first.group == second.group) == ({0, 1}, True)
        assert first.described == f"leasehold: reader {first.place} reads ahead for a query, for as long as it runs"
        for outcome in ("no route to host", OSError("Task 0 failed\n\tat org.apache.spark")):
            first.end(outcome)
            (again,) = started(session, 1)
            why = " ".join(str(outcome).split())
            said = told.get(timeout=PATIENCE)
            assert (again.place, said) == (
                first.place,
                f"reader {first.place} ended with {why}, starting another in 0.0 s",
            )
            first = again
        assert session.cancelled.empty()
        readers.close()
        assert session.cancelled.get(timeout=PATIENCE) == second.group
        assert session.jobs.empty()


def test_the_tasks_are_readers_that_come_to_the_planner() -> None:
    """Without it the jobs would hold slots, and nobody read."""
    session, stream = Session(runs=True), Stream({"a": ["x"] * 5})
    news = Event()
    pool = pool_module.ReaderPool(Address(HOST, HOST), lambda _key: news.set())
    with listening(session) as listener:
        readers = ExecutorReaders(listener.place)
        readers.begin(1, a_spec(stream, pool.port, pool.token), lambda _text: None)
        opening = pool.open(Lease("a"), TRIM_HORIZON)
        while not (batch := opening.read()).count:
            assert news.wait(PATIENCE)
            news.clear()
        (reader,) = pool.connected
        assert (batch.count, reader.rows.host) == (5, HOST)
        pool.stop()
        readers.close()
        pool.close()
        assert session.cancelled.get(timeout=PATIENCE)


def test_nobody_else_may_enter_where_readers_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it another user of the driver's machine could have code run on the executors."""
    session = Session()
    with listening(session) as listener:
        folder = Path(listener.place).parent
        assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IRWXU
        monkeypatch.setattr(jobs, "geteuid", lambda: os.geteuid() + 1)
        with pytest.raises(ValueError, match="does not answer"):
            ExecutorReaders(listener.place)
    assert (session.started, folder.exists()) == ([], False)


@pytest.mark.parametrize(
    "wish",
    [WISH.pack(0, 1) + b"x", WISH.pack(READERS_MOST + 1, 1) + b"x", WISH.pack(1, 1 << 40), b"GET / HTTP/1.1\r\n\r\n"],
    ids=["none", "too many", "too long", "another protocol"],
)
def test_a_job_that_no_query_asks_for_is_not_started(wish: bytes) -> None:
    """Without it a process at fault could fill the cluster with jobs, or the program's memory."""
    session = Session()
    with listening(session) as listener, socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(PATIENCE)
        connection.connect(listener.place)
        room = CAPACITY.unpack(connection.recv(CAPACITY.size))
        connection.sendall(wish)
        try:
            left = connection.recv(1)
        except ConnectionResetError:
            left = b""
        assert (room, left, session.started) == ((2, 4), b"", [])


def test_a_query_that_asks_for_nothing_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it each query that hangs as it begins would keep a thread and a descriptor of the program."""
    monkeypatch.setattr(jobs, "REQUEST_SECONDS", 0.05)
    with listening(Session()) as listener, socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(PATIENCE)
        connection.connect(listener.place)
        assert len(connection.makefile("rb").read()) == CAPACITY.size


def test_a_program_that_says_nothing_is_waited_for_a_while(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without it a query would hang as it begins, without a word, where the program hangs."""
    monkeypatch.setattr(executors, "CONNECT_SECONDS", 0.05)
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(tmp_path / "s"))
        mute.listen()
        with pytest.raises(ValueError, match="does not answer"):
            ExecutorReaders(str(tmp_path / "s"))


def test_a_program_that_forks_listens_on() -> None:
    """Without it the end of any child of the program would take the socket away from its queries."""
    told = subprocess.run([sys.executable, "-c", FORKS], check=True, capture_output=True, text=True).stdout
    assert told == "True\n"


def test_a_program_that_ends_leaves_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it each program that starts readers would leave a folder behind, in which nobody listens."""
    leaving = list[Callable[[], None]]()
    monkeypatch.setattr(atexit, "register", leaving.append)
    made = jobs.listener.__wrapped__()
    (leave,) = leaving
    leave()
    assert not Path(made.place).parent.exists()


FORKS = """
import os, sys
from leasehold.adapters.spark.readers.jobs import listener
place = listener().place
child = os.fork()
if child:
    os.waitpid(child, 0)
    print(os.path.exists(place))
"""


def test_a_reader_that_does_not_end_is_waited_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the end of a query would hang with one of its readers."""
    monkeypatch.setattr(keeping, "END_SECONDS", 0.05)
    over = Event()

    class Stuck(KeptReaders):
        def _live(self, place: int) -> str:
            over.wait()
            return f"{place}"

        def _end(self) -> None:
            """It does not."""

    readers = Stuck(2)
    readers.begin()
    readers.close()
    over.set()


def test_that_a_reader_has_ended_is_told_before_the_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it a query would learn why it has no reader half a minute late."""
    monkeypatch.setattr(keeping, "AGAIN_SECONDS", (10 * PATIENCE, 10 * PATIENCE))
    told = Queue[str]()

    class Ending(KeptReaders):
        def _live(self, place: int) -> str:
            return f"status {place}"

        def _end(self) -> None:
            """It has ended."""

        def _tell(self, text: str) -> None:
            told.put(text)

    readers = Ending(1)
    readers.begin()
    assert told.get(timeout=PATIENCE).startswith("reader 0 ended with status 0")
    readers.close()


def test_a_query_that_is_killed_ends_its_readers_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    """Without it its readers would hold their slots, or each end of a query be told as a fault."""
    session = Session()
    with listening(session) as listener, caplog.at_level(logging.WARNING, "leasehold.spark"):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(PATIENCE)
            connection.connect(listener.place)
            connection.sendall(WISH.pack(1, 1) + b"x")
            (job,) = started(session, 1)
        # Closed with what was said unread, it is reset.
        assert session.cancelled.get(timeout=PATIENCE) == job.group
    assert caplog.messages == []


def test_a_query_whose_program_is_gone_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it a query would wait for readers that nobody starts; each that is tried again kept a descriptor."""
    with listening(Session()) as listener:
        place = listener.place
    made = list[socket.socket]()

    class Noted(socket.socket):
        def __init__(self, family: int) -> None:
            super().__init__(family)
            made.append(self)

    monkeypatch.setattr(socket, "socket", Noted)
    with pytest.raises(ValueError, match=r"^option lease\.readers: the program that called register\(spark\)"):
        ExecutorReaders(place)
    assert [each.fileno() for each in made] == [-1]


def test_a_query_waits_for_its_program_as_it_asks_and_for_news_of_readers_without_an_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without it a program that takes nothing would hang its query, or readers that live for days be told as gone."""
    waited = list[tuple[str, float | None]]()

    class Waiting(socket.socket):
        def sendall(self, data: Any, /, *_flags: object) -> None:  # noqa: ANN401  as typeshed has it
            if len(data) > CAPACITY.size:
                waited.append(("asks", self.gettimeout()))
            super().sendall(data)

    def begun(name: str, *rest: Callable[..., object]) -> Thread:
        if name == "leasehold-jobs":
            waited.append(("listens", readers._connection.gettimeout()))  # noqa: SLF001
        return spawn(name, *rest)

    with listening(Session()) as listener:
        monkeypatch.setattr(socket, "socket", Waiting)
        readers = ExecutorReaders(listener.place)
        monkeypatch.setattr(jobs, "spawn", begun)
        readers.begin(1, a_spec(), lambda _text: None)
        readers.close()
    assert waited == [("asks", jobs.CONNECT_SECONDS), ("listens", None)]


@pytest.mark.parametrize("first", ["program", "query"])
def test_a_query_is_told_that_its_program_has_gone(first: str, tmp_path: Path) -> None:
    """Without it a query without readers would go on to say that the cluster has no slot."""
    told, ended = Queue[str](), Event()

    def program(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection, connection.makefile("rb") as said:
            connection.sendall(CAPACITY.pack(1, 2))
            number, size = WISH.unpack(said.read(WISH.size))
            assert (number, len(said.read(size))) == (1, size)
            if first == "query":
                assert said.read() == b""
        ended.set()

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
        listening.listen()
        thread = Thread(target=program, args=(listening,))
        thread.start()
        readers = ExecutorReaders(str(tmp_path / "s"))
        readers.begin(1, a_spec(), told.put)
        if first == "program":
            assert (
                told.get(timeout=PATIENCE) == "the program that called register(spark) is gone, and the readers with it"
            )
        readers.close()
        assert ended.wait(PATIENCE)
        thread.join()
    for listens in threading.enumerate():
        if listens.name == "leasehold-jobs":
            listens.join(PATIENCE)
    assert (told.empty(), readers._connection.fileno()) == (True, -1)  # noqa: SLF001


def test_a_session_that_is_stopped_starts_nothing_more() -> None:
    """Without it the end of a program would hang, or show faults of its own making."""

    class Stopped(Session):
        def cancelJobGroup(self, group: str) -> None:  # noqa: N802  Spark's name
            super().cancelJobGroup(group)
            raise ConnectionRefusedError

    session, told = Stopped(), list[str]()
    readers = ReaderJobs(cast("SparkContext", session), 1, b"", told.append)
    readers.begin()
    started(session, 1)
    readers.close()
    assert (session.jobs.empty(), told) == (True, [])


def a_session(master: str) -> "tuple[SparkSession, list[type]]":
    """As much of one as can be registered with, and what was."""
    kinds = list[type]()
    spark = SimpleNamespace(
        sparkContext=SimpleNamespace(master=master, defaultParallelism=4),
        conf={"spark.master": master, "spark.driver.host": HOST},
        dataSource=SimpleNamespace(register=kinds.append),
    )
    return cast("SparkSession", spark), kinds


@pytest.mark.parametrize(
    ("master", "asked"), [("local[2]", False), ("spark://m:7077", True)], ids=["this machine", "a cluster"]
)
def test_a_program_listens_where_its_session_is_on_a_cluster(
    master: str, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it readers would stay on the driver's machine, or be tasks that take its only slots."""
    spark, kinds = a_session(master)
    with listening(Session()) as listener:
        monkeypatch.setattr(jobs, "listener", lambda: listener)
        register(spark)
        known = [getattr(kind, "known", {}).get("lease.readerJobs") for kind in kinds]
        assert known == ([listener.place] * 3 if asked else [None] * 3) + [None]
        assert (listener.context is spark.sparkContext) == asked


def test_a_program_without_a_place_to_listen_registers_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without it a long name of the temporary folder would keep every query on a cluster from running."""

    def refused() -> JobListener:
        raise OSError("AF_UNIX path too long")

    monkeypatch.setattr(jobs, "listener", refused)
    spark, kinds = a_session("yarn")
    with caplog.at_level(logging.WARNING, "leasehold.spark"):
        register(spark)
    assert [getattr(kind, "known", {}).get("lease.readerJobs") for kind in kinds] == [None] * 4
    assert "will be on this machine, and not on executors: AF_UNIX path too long" in caplog.text


@pytest.mark.parametrize(("lived", "fresh"), [(1.0, False), (60.0, True)], ids=["never", "for long"])
def test_a_reader_that_lived_is_replaced_without_a_long_pause(
    lived: float, fresh: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it the tenth executor that a query loses in a year would be without a reader for half a minute."""
    told, clock = Queue[str](), count(0.0, lived)
    monkeypatch.setattr(keeping, "AGAIN_SECONDS", (0.001, 30.0))
    monkeypatch.setattr(keeping, "monotonic", lambda: next(clock))
    monkeypatch.setattr(keeping, "Backoff", Doubling)
    waits = list[float]()

    class Dying(KeptReaders):
        def _live(self, place: int) -> str:
            return f"{place}"

        def _end(self) -> None:
            """It has ended."""

        def _tell(self, text: str) -> None:
            told.put(text)

    waited = list[float]()

    class Noted(Event):
        def wait(self, timeout: float | None = None) -> bool:
            waited.append(round(timeout or 0.0, 4))
            return super().wait(0.0)

    monkeypatch.setattr(Doubling, "waits", waits)
    monkeypatch.setattr(keeping, "Event", Noted)
    readers = Dying(1)
    readers.begin()
    for _ in range(5):
        told.get(timeout=PATIENCE)
    readers.close()
    assert waited[:4] == waits[:4]
    assert waits[:5] == ([0.001] * 5 if fresh else [0.001, 0.002, 0.004, 0.008, 0.016])


def test_a_reader_that_cannot_be_started_is_started_later() -> None:
    """Without it a moment without memory or descriptors would cost a query a reader for as long as it runs."""
    faults, told = [OSError("no descriptor"), MemoryError(), BlockingIOError("no fork")], Queue[str]()
    lives, over = Event(), Event()

    class Refused(KeptReaders):
        def _live(self, place: int) -> str:
            if faults:
                raise faults.pop(0)
            lives.set()
            assert over.wait(PATIENCE)
            return f"{place}"

        def _end(self) -> None:
            over.set()

        def _tell(self, text: str) -> None:
            told.put(text)

    readers = Refused(1)
    readers.begin()
    assert lives.wait(PATIENCE)
    readers.close()
    whys = ("OSError: no descriptor", "MemoryError", "BlockingIOError: no fork")
    assert [told.get_nowait() for _ in whys] == [
        f"reader 0 ended with {why}, starting another in 0.0 s" for why in whys
    ]


def test_children_that_are_just_starting_are_ended_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the end of a query would raise, and its source, its table and its other readers stay open."""
    readers, killed = ReaderChildren(2, a_spec()), list[str]()

    def a_process(name: str) -> SimpleNamespace:
        def kill() -> None:
            killed.append(name)
            readers._processes[len(killed)] = a_process("late")  # type: ignore[assignment]  # noqa: SLF001  as a thread does

        return SimpleNamespace(kill=kill)

    monkeypatch.setattr(readers, "_processes", {0: a_process("first")})
    readers.begin = lambda: None  # type: ignore[method-assign]
    readers._end()  # noqa: SLF001  as `close` does
    assert killed == ["first"]


def test_readers_that_could_not_all_begin_hold_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it readers would be started again and again for a query that was refused."""
    session = Session()

    def refused(readers: ReaderJobs) -> None:
        KeptReaders.begin(readers)
        started(session, 2)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(ReaderJobs, "begin", refused)
    with listening(session) as listener, socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(PATIENCE)
        connection.connect(listener.place)
        connection.sendall(WISH.pack(2, 1) + b"x")
        assert session.cancelled.get(timeout=PATIENCE)
    assert session.jobs.empty()


class Doubling(Backoff):
    """Without chance."""

    waits: ClassVar[list[float]] = []

    def __init__(self, least: float, most: float) -> None:
        super().__init__(least, most, lambda low, high: low if self.faults == 1 else high * 2 / 3)

    def next(self) -> float:
        self.waits.append(round(super().next(), 4))
        return self.waits[-1]


# On an executor


def test_a_task_that_does_not_reach_the_planner_says_where_it_is() -> None:
    """Without it Spark would start it four times without a pause, and tell of it by a trace of Java."""
    with socket.create_server((HOST, 0)) as other:
        port = other.getsockname()[1]
    task = ReaderTask()
    task.spec = a_spec(port=port)
    here = socket.gethostname()
    assert task.run().endswith(f"an executor on {here} cannot reach the driver at {HOST}, port {port}")


def test_a_task_that_cannot_open_the_stream_says_why() -> None:
    """Without it missing rights of the executors would be a trace of Java."""

    def refused() -> Stream:
        raise SourceError("access denied")

    task, spec = ReaderTask(), a_spec()
    task.spec = evolve(spec, source_spec=evolve(spec.source_spec, open=refused))
    assert task.run() == f"access denied, on {socket.gethostname()}"


def test_rows_that_wait_go_to_a_folder_that_the_executor_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it a reader would end with the first batch for which there is no room in memory."""
    folders = list[str]()

    class Reader:
        def __init__(self, spec: ReaderSpec) -> None:
            folders.append(spec.folder)

        def run(self) -> None:
            """Nothing."""

    monkeypatch.setattr(executors, "ShardReader", Reader)
    task = ReaderTask()
    for folder in ("", "/not/here", str(tmp_path)):
        task.spec = evolve(a_spec(), folder=folder)
        assert task.run() == f"the end of its connection to the driver, on {socket.gethostname()}"
    assert folders == ["", "", str(tmp_path)]


def test_a_package_that_an_executor_lacks_is_named() -> None:
    """Without it the query would wait for readers, and not say which environment to mend."""

    def lacking() -> None:
        raise ImportError("No module named 'attrs': set PYSPARK_PYTHON")

    session, told = Session(runs=True), Queue[str]()
    readers = ReaderJobs(cast("SparkContext", session), 1, cloudpickle.dumps(lacking), told.put)  # type: ignore[no-untyped-call]
    readers.begin()
    said = told.get(timeout=PATIENCE)
    readers.close()
    assert said == "reader 0 ended with No module named 'attrs': set PYSPARK_PYTHON, starting another in 0.0 s"


def test_a_long_fault_is_told_shortly() -> None:
    """Without it the driver's log would be filled with traces of Java, again and again."""
    session, told = Session(), Queue[str]()
    readers = ReaderJobs(cast("SparkContext", session), 1, b"", told.put)
    readers.begin()
    started(session, 1)[0].end(OSError("x" * 10_000))
    assert len(told.get(timeout=PATIENCE)) < TEXT_MOST + 100
    readers.close()


# How many


def lease(options: dict[str, str]) -> LeaseOptions:
    """Of a query of Kinesis."""
    return kinesis_options({**STREAM, **options}).lease


def readers_of(options: LeaseOptions) -> pool_module.QueryReaders:
    """The readers of a query that reads a stream of nothing."""
    stream, address = Stream({}), Address(HOST, HOST)
    place = Place(MemoryStore(), stream, columns("fake"), exclusive=False)
    return pool_module.QueryReaders(a_spec().source_spec, options, address, place, Transport(address))


@pytest.mark.parametrize(
    ("there", "cores", "asked", "number"),
    [(3, 8, "auto", 3), (3, 3, "AUTO", 2), (0, 1, "auto", 1), (40, 80, "auto", READERS_MOST), (3, 8, "5", 5)],
    ids=["one on each executor", "a slot is left", "none yet", "the most", "as given"],
)
def test_the_number_of_readers_on_executors(
    there: int, cores: int, asked: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it `auto` would leave a query no slot for its batches, or most executors without a reader."""
    session = Session(executors=there, defaultParallelism=cores)
    monkeypatch.setattr(pool_module, "FIRST_SECONDS", 0.01)
    with listening(session) as listener:
        options = lease({"lease.readers": asked, "lease.readerJobs": listener.place})
        readers = readers_of(options)
        readers.begin(lambda _key: None)
        assert {job.place for job in started(session, number)} == set(range(number))
        with pytest.raises(SourceUnavailable) as absent:
            readers.source.open(Lease("a"), TRIM_HORIZON)
        readers.close()
    assert str(absent.value) == "no reader has come; where no slot is free, add executors, or lower lease.readers"
    assert session.jobs.empty()


def test_readers_that_leave_no_slot_for_batches_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """Without it a query would stand still, and nobody know why."""
    with listening(Session(defaultParallelism=2)) as listener, caplog.at_level(logging.WARNING, "leasehold.spark"):
        options = lease({"lease.readers": "2", "lease.readerJobs": listener.place})
        readers = readers_of(options)
        readers.begin(lambda _key: None)
        readers.close()
    said = "2 readers leave none of 2 task slots for batches: add executors, or lower lease.readers"
    assert said in caplog.messages


@pytest.mark.parametrize(("processors", "number"), [(8, 7), (1, 1), (None, 1), (64, READERS_MOST)])
def test_the_number_of_readers_on_the_machine_itself(
    processors: int | None, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it `auto` would start more processes than there are processors, or none."""
    numbers = list[int]()

    class Children(SimpleNamespace):
        def __init__(self, number: int, spec: ReaderSpec) -> None:
            super().__init__(begin=lambda: numbers.append(number), close=lambda: None)
            assert (spec.planner[0], spec.address) == (HOST, Address(HOST, HOST))

    monkeypatch.setattr(pool_module, "ReaderChildren", Children)
    monkeypatch.setattr(pool_module, "cpu_count", lambda: processors)
    readers = readers_of(lease({"lease.readers": "auto"}))
    keys = Queue[str]()
    readers.begin(keys.put)
    with socket.create_connection((HOST, readers.pool.port), PATIENCE) as peer:
        peer.sendall(readers.pool.token + line_of(Hello(HOST, 1, bytes(32))))
        readers.source.open(Lease("a"), TRIM_HORIZON)
    assert keys.get(timeout=PATIENCE) == "a"
    readers.close()
    assert numbers == [number]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, readers.pool.port), PATIENCE)


@pytest.mark.parametrize("text", ["many", "16", "-1", "1.5", "0x2"])
def test_another_number_of_readers_is_refused(text: str) -> None:
    """Without it a slip would start what nobody asked for."""
    with pytest.raises(ValueError, match=r"^option lease\.readers: .* is not a whole number from 0 to 15, or auto$"):
        lease({"lease.readers": text})


def test_a_query_takes_no_part_in_a_swap_of_lease_tables() -> None:
    """A batch that Spark repeats is told by its leases' epochs: after a move its rows would be left out."""
    with pytest.raises(ValueError, match=r"^option lease\.to: queries of Spark take no part in `leasehold swap`; stop"):
        lease({"lease.to": "sqlite:///there.db"})


def test_auto_is_refused_where_readers_are() -> None:
    """Without it a query of Event Hubs would begin, and its readers drive one another out."""
    hub = {"eventhubs.namespace": "n", "eventhubs.name": "h", "lease.store": "sqlite:///s.db"}
    with pytest.raises(ValueError, match=r"^option lease\.readers: not supported"):
        event_hubs_options({**hub, "lease.readers": "auto", "lease.fetchHost": HOST})
    with pytest.raises(ValueError, match=r"^option lease\.readers: tasks fetch from readers"):
        lease({"lease.readers": "auto", "lease.transport": "embedded"})
