"""Readers on executors, without a cluster: how they are started, kept alive and ended, and who may start them."""

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
    """Start ended readers again without a pause."""
    monkeypatch.setattr(keeping, "AGAIN_SECONDS", (0.0, 0.0))


@define
class Job:
    """A job that runs until it is ended, and then returns or raises a given outcome."""

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
        """Run the tasks here, or wait until the test ends the job."""
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
        """End the job with this outcome."""
        self.outcome = outcome
        self.over.set()


@define
class Session:
    """The part of Spark's context that starts jobs.

    runs       whether tasks run in this process
    executors  how many executors there are
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
        """Return the data; a job of ours has one task."""
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
    """Return the listener of a program with this session."""
    listener = JobListener()
    listener.context = cast("SparkContext", session)
    try:
        yield listener
    finally:
        listener.close()


def a_spec(stream: Stream | None = None, port: int = 1, token: bytes = b"") -> ReaderSpec:
    """Return what a reader needs to open the stream."""
    source_spec = SourceSpec(lambda: stream or Stream({}), columns("fake"), 0.01, 2**53, rereadable=True)
    return ReaderSpec((HOST, port), token, Address("", ""), source_spec, 1000, 1 << 20, 3, 1 << 20, "/not/here")


def started(session: Session, number: int) -> list[Job]:
    """Return the next jobs that are started."""
    return [session.jobs.get(timeout=PATIENCE) for _ in range(number)]


# In the user's program


def test_as_many_readers_as_were_asked_for_are_kept_until_the_query_is_gone() -> None:
    """A reader that ends is replaced until the query is gone, and then no reader holds a slot."""
    session, messages = Session(), Queue[str]()
    with listening(session) as listener:
        readers = ExecutorReaders(listener.place)
        readers.begin(2, a_spec(), messages.put)
        first, second = started(session, 2)
        assert ({first.place, second.place}, first.group == second.group) == ({0, 1}, True)
        assert first.described == f"leasehold: reader {first.place} reads ahead for a query, for as long as it runs"
        for outcome in ("no route to host", OSError("Task 0 failed\n\tat org.apache.spark")):
            first.end(outcome)
            (again,) = started(session, 1)
            why = " ".join(str(outcome).split())
            news = messages.get(timeout=PATIENCE)
            assert (again.place, news) == (
                first.place,
                f"reader {first.place} ended with {why}, starting another in 0.0 s",
            )
            first = again
        assert session.cancelled.empty()
        readers.close()
        assert session.cancelled.get(timeout=PATIENCE) == second.group
        assert session.jobs.empty()


def test_the_tasks_are_readers_that_come_to_the_planner() -> None:
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
    """Starting a reader runs code on the executors, so no other user of the machine may reach the socket."""
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
    """A faulty process cannot fill the cluster with jobs, or the program's memory."""
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
    """A query that connects and asks for nothing costs the program neither a thread nor a descriptor."""
    monkeypatch.setattr(jobs, "REQUEST_SECONDS", 0.05)
    with listening(Session()) as listener, socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(PATIENCE)
        connection.connect(listener.place)
        assert len(connection.makefile("rb").read()) == CAPACITY.size


def test_a_program_that_says_nothing_is_waited_for_a_while(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A query whose program hangs stops waiting and reports it."""
    monkeypatch.setattr(executors, "CONNECT_SECONDS", 0.05)
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(tmp_path / "s"))
        mute.listen()
        with pytest.raises(ValueError, match="does not answer"):
            ExecutorReaders(str(tmp_path / "s"))


def test_a_program_that_forks_listens_on() -> None:
    """The exit of a child process does not remove the socket that queries of the program use."""
    output = subprocess.run([sys.executable, "-c", FORKS], check=True, capture_output=True, text=True).stdout
    assert output == "True\n"


def test_a_program_that_ends_leaves_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that ends removes the socket's folder."""
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
    """The end of a query does not hang with one of its readers."""
    monkeypatch.setattr(keeping, "END_SECONDS", 0.05)
    over = Event()

    class Stuck(KeptReaders):
        def _live(self, place: int) -> str:
            over.wait()
            return f"{place}"

        def _end(self) -> None:
            """Do not end."""

    readers = Stuck(2)
    readers.begin()
    readers.close()
    over.set()


def test_that_a_reader_has_ended_is_told_before_the_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A query learns at once why a reader ended; the pause comes only before the next start."""
    monkeypatch.setattr(keeping, "AGAIN_SECONDS", (10 * PATIENCE, 10 * PATIENCE))
    messages = Queue[str]()

    class Ending(KeptReaders):
        def _live(self, place: int) -> str:
            return f"status {place}"

        def _end(self) -> None:
            """End the reader."""

        def _tell(self, text: str) -> None:
            messages.put(text)

    readers = Ending(1)
    readers.begin()
    assert messages.get(timeout=PATIENCE).startswith("reader 0 ended with status 0")
    readers.close()


def test_a_query_that_is_killed_ends_its_readers_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    """The readers free their slots, and nothing is logged as a fault."""
    session = Session()
    with listening(session) as listener, caplog.at_level(logging.WARNING, "leasehold.spark"):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(PATIENCE)
            connection.connect(listener.place)
            connection.sendall(WISH.pack(1, 1) + b"x")
            (job,) = started(session, 1)
        # If it is closed with unread data, it is reset.
        assert session.cancelled.get(timeout=PATIENCE) == job.group
    assert caplog.messages == []


def test_a_query_whose_program_is_gone_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A query whose program is gone reports it, and its attempts to start readers leak no descriptors."""
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
    """Requests to the program time out, but news of readers that live for days may take any time."""
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
    """The query then reports its program as gone, and not a cluster without free slots."""
    messages, ended = Queue[str](), Event()

    def program(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection, connection.makefile("rb") as requests:
            connection.sendall(CAPACITY.pack(1, 2))
            number, size = WISH.unpack(requests.read(WISH.size))
            assert (number, len(requests.read(size))) == (1, size)
            if first == "query":
                assert requests.read() == b""
        ended.set()

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
        listening.listen()
        thread = Thread(target=program, args=(listening,))
        thread.start()
        readers = ExecutorReaders(str(tmp_path / "s"))
        readers.begin(1, a_spec(), messages.put)
        if first == "program":
            assert (
                messages.get(timeout=PATIENCE)
                == "the program that called register(spark) is gone, and the readers with it"
            )
        readers.close()
        assert ended.wait(PATIENCE)
        thread.join()
    for listens in threading.enumerate():
        if listens.name == "leasehold-jobs":
            listens.join(PATIENCE)
    assert (messages.empty(), readers._connection.fileno()) == (True, -1)  # noqa: SLF001


def test_a_session_that_is_stopped_starts_nothing_more() -> None:
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
    """Return a session that records what is registered with it."""
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
    """Readers go to the executors of a cluster; on one machine they are not tasks that take its slots."""
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
    """A long name of the temporary folder does not keep a query on a cluster from running."""

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
    """Executors lost over months do not add up to a long pause."""
    messages, clock = Queue[str](), count(0.0, lived)
    monkeypatch.setattr(keeping, "AGAIN_SECONDS", (0.001, 30.0))
    monkeypatch.setattr(keeping, "monotonic", lambda: next(clock))
    monkeypatch.setattr(keeping, "Backoff", Doubling)
    waits = list[float]()

    class Dying(KeptReaders):
        def _live(self, place: int) -> str:
            return f"{place}"

        def _end(self) -> None:
            """End the reader."""

        def _tell(self, text: str) -> None:
            messages.put(text)

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
        messages.get(timeout=PATIENCE)
    readers.close()
    assert waited[:4] == waits[:4]
    assert waits[:5] == ([0.001] * 5 if fresh else [0.001, 0.002, 0.004, 0.008, 0.016])


def test_a_reader_that_cannot_be_started_is_started_later() -> None:
    """A moment without memory or descriptors does not cost the query a reader for the rest of its run."""
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
    """The end of a query closes its source, its table and all readers, even those that are still starting."""
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
    """Readers of a query that was refused are ended and not started again."""
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
    """A draw that always doubles the pause."""

    waits: ClassVar[list[float]] = []

    def __init__(self, least: float, most: float) -> None:
        super().__init__(least, most, lambda low, high: low if self.faults == 1 else high * 2 / 3)

    def next(self) -> float:
        self.waits.append(round(super().next(), 4))
        return self.waits[-1]


# On an executor


def test_a_task_that_does_not_reach_the_planner_says_where_it_is() -> None:
    """The error is reported once, in words, instead of by four attempts of the task and a Java trace."""
    with socket.create_server((HOST, 0)) as other:
        port = other.getsockname()[1]
    task = ReaderTask()
    task.spec = a_spec(port=port)
    here = socket.gethostname()
    assert task.run().endswith(f"an executor on {here} cannot reach the driver at {HOST}, port {port}")


def test_a_task_that_cannot_open_the_stream_says_why() -> None:
    """An executor that lacks rights is reported in words, not as a Java trace."""

    def refused() -> Stream:
        raise SourceError("access denied")

    task, spec = ReaderTask(), a_spec()
    task.spec = evolve(spec, source_spec=evolve(spec.source_spec, open=refused))
    assert task.run() == f"access denied, on {socket.gethostname()}"


def test_rows_that_wait_go_to_a_folder_that_the_executor_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader spills rows to a folder of its executor when memory has no room for them."""
    folders = list[str]()

    class Reader:
        def __init__(self, spec: ReaderSpec) -> None:
            folders.append(spec.folder)

        def run(self) -> None:
            """Do nothing."""

    monkeypatch.setattr(executors, "ShardReader", Reader)
    task = ReaderTask()
    for folder in ("", "/not/here", str(tmp_path)):
        task.spec = evolve(a_spec(), folder=folder)
        assert task.run() == f"the end of its connection to the driver, on {socket.gethostname()}"
    assert folders == ["", "", str(tmp_path)]


def test_a_package_that_an_executor_lacks_is_named() -> None:
    """The message names the missing package, so the user knows what to add to the executors' environment."""

    def lacking() -> None:
        raise ImportError("No module named 'attrs': set PYSPARK_PYTHON")

    session, messages = Session(runs=True), Queue[str]()
    readers = ReaderJobs(cast("SparkContext", session), 1, cloudpickle.dumps(lacking), messages.put)  # type: ignore[no-untyped-call]
    readers.begin()
    message = messages.get(timeout=PATIENCE)
    readers.close()
    assert message == "reader 0 ended with No module named 'attrs': set PYSPARK_PYTHON, starting another in 0.0 s"


def test_a_long_fault_is_told_shortly() -> None:
    """A long error is cut, so repeated Java traces do not fill the driver's log."""
    session, told = Session(), Queue[str]()
    readers = ReaderJobs(cast("SparkContext", session), 1, b"", told.put)
    readers.begin()
    started(session, 1)[0].end(OSError("x" * 10_000))
    assert len(told.get(timeout=PATIENCE)) < TEXT_MOST + 100
    readers.close()


# How many


def lease(options: dict[str, str]) -> LeaseOptions:
    """Return the lease options of a Kinesis query."""
    return kinesis_options({**STREAM, **options}).lease


def readers_of(options: LeaseOptions) -> pool_module.QueryReaders:
    """Return the readers of a query over an empty stream."""
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
    """`auto` leaves a slot for the query's batches, and gives the other executors a reader."""
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
    """A query whose readers take every slot cannot run batches, so it warns."""
    with listening(Session(defaultParallelism=2)) as listener, caplog.at_level(logging.WARNING, "leasehold.spark"):
        options = lease({"lease.readers": "2", "lease.readerJobs": listener.place})
        readers = readers_of(options)
        readers.begin(lambda _key: None)
        readers.close()
    warning = "2 readers leave none of 2 task slots for batches: add executors, or lower lease.readers"
    assert warning in caplog.messages


@pytest.mark.parametrize(("processors", "number"), [(8, 7), (1, 1), (None, 1), (64, READERS_MOST)])
def test_the_number_of_readers_on_the_machine_itself(
    processors: int | None, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` starts at least one reader process, and no more than there are processors."""
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
    with pytest.raises(ValueError, match=r"^option lease\.readers: .* is not a whole number from 0 to 15, or auto$"):
        lease({"lease.readers": text})


def test_a_query_takes_no_part_in_a_swap_of_lease_tables() -> None:
    """A repeated batch is recognized by its leases' epochs, so after a move its rows are left out."""
    with pytest.raises(ValueError, match=r"^option lease\.to: queries of Spark take no part in `leasehold swap`; stop"):
        lease({"lease.to": "sqlite:///there.db"})


def test_auto_is_refused_where_readers_are() -> None:
    """`auto` is refused on Event Hubs, where readers of the same shard disconnect one another."""
    hub = {"eventhubs.namespace": "n", "eventhubs.name": "h", "lease.store": "sqlite:///s.db"}
    with pytest.raises(ValueError, match=r"^option lease\.readers: not supported"):
        event_hubs_options({**hub, "lease.readers": "auto", "lease.fetchHost": HOST})
    with pytest.raises(ValueError, match=r"^option lease\.readers: tasks fetch from readers"):
        lease({"lease.readers": "auto", "lease.transport": "embedded"})
