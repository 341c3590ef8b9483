"""Starts the readers of a query, and keeps them alive: as child processes, or as tasks on Spark's executors.

One that ends is started again after a pause that grows (`KeptReaders`).

Under a `local` master readers are children of the process that plans batches. On a cluster they are tasks, and that
process has no session to start tasks with. The program that called `register` has one:

1. It listens where only its own user can connect: at a socket in a folder of its machine that nobody else may enter
   (`JobListener`).
2. A query's process connects (`ExecutorReaders`), is told how many executors there are, and answers how many readers
   it wants, and what each is to do.
3. The program starts a job of one task for each (`ReaderJobs`). What the query's process said is handed to executors as
   it came, and not looked into.
4. A task reads until its planner is gone (`ReaderTask`); all of them end with the connection.
"""

import atexit
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache, partial
from os import geteuid, getpid
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingUnixStreamServer
from struct import Struct
from threading import Event, Thread
from time import monotonic
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from attrs import evolve
from pyspark import cloudpickle

from leasehold.adapters.consumer.runner import READABLE
from leasehold.adapters.sources.call_patience import Backoff
from leasehold.adapters.spark.fetching import REQUEST_SECONDS, received
from leasehold.adapters.spark.options import READERS_MOST
from leasehold.adapters.spark.processes import speak, unpacking
from leasehold.adapters.spark.readers.reader import ReaderSpec, ShardReader
from leasehold.adapters.threads import spawn
from leasehold.stores.printable import escaped, printable, said, text_of

if TYPE_CHECKING:
    from pyspark import SparkContext

log = escaped(logging.getLogger("leasehold.spark"))

AGAIN_SECONDS = 0.2, 30.0
END_SECONDS = 5.0


class KeptReaders:
    """Keeps a number of readers alive, from `begin` until they are closed."""

    def __init__(self, number: int) -> None:
        self._over = Event()
        self._number = number
        self._threads: list[Thread] = []

    def begin(self) -> None:
        """Start them all."""
        for place in range(self._number):
            self._threads.append(spawn("leasehold-reader", partial(self._keep, place), partial(self._failed, place)))

    def close(self) -> None:
        """End them, and start no more: what a reader has is not needed any more, or read again."""
        self._over.set()  # first, or one that ends now would be started again
        self._end()
        for thread in self._threads:
            thread.join(END_SECONDS)

    @abstractmethod
    def _live(self, place: int) -> str:
        """Start one, and wait for its end; what it ended with."""

    @abstractmethod
    def _end(self) -> None:
        """Have all end that live."""

    def _tell(self, text: str) -> None:
        log.warning("%s", text)

    def _failed(self, place: int, fault: BaseException) -> None:
        self._tell(f"reader {place} is not started again: {said(fault)}")

    def _keep(self, place: int) -> None:
        pause = Backoff(*AGAIN_SECONDS)
        while not self._over.is_set():
            began = monotonic()
            try:
                status = self._live(place)
            except Exception as fault:  # noqa: BLE001  what the system refuses now it may grant after the pause
                status = said(fault)
            if monotonic() - began > AGAIN_SECONDS[1]:
                pause.reset()  # it read well: a query of months loses some
            if not self._over.is_set():
                wait = pause.next()
                self._tell(f"reader {place} ended with {status}, starting another in {wait:.1f} s")
                self._over.wait(wait)


COMMAND = (sys.executable, "-m", "leasehold.adapters.spark.readers.process")


class ReaderChildren(KeptReaders):
    """Keeps readers as child processes of the one that plans."""

    def __init__(self, number: int, spec: ReaderSpec) -> None:
        super().__init__(number)
        # Classes of the user's own program are pickled by value.
        self._spec: bytes = cloudpickle.dumps(spec)  # type: ignore[no-untyped-call]  # Spark's own
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def _end(self) -> None:
        for process in list(self._processes.values()):  # one may be starting
            process.kill()

    def _live(self, place: int) -> str:
        # What it prints goes where this process prints; modules are found where this process finds them.
        path = os.pathsep.join(filter(None, sys.path))
        environment = os.environ | {"PYTHONPATH": path}
        with subprocess.Popen(COMMAND, stdin=subprocess.PIPE, env=environment) as process:  # noqa: S603  our own
            self._processes[place] = process
            if self._over.is_set():  # perhaps it was not seen
                process.kill()
            try:
                process.communicate(self._spec)
            except BrokenPipeError:
                log.debug("reader %d ended before it was told what to read", place)
            return f"status {process.wait()}"


# In the program that called `register`

CAPACITY = Struct(">QQ")
"""The program sends first how many executors there are now, and how many tasks run at once on all of them."""
WISH = Struct(">QQ")
"""The query's process answers with how many readers it wants, and how many bytes follow that describe the task."""
TASK_BYTES = 1 << 24
TEXT_MOST = 500
"""Most of a fault's text that is logged; Spark appends all its traces."""
_PEER = Struct("3i")


class JobListener:
    """Listens for queries that want readers, from its making until it is closed. Raises OSError without a place.

    place    where it listens
    context  whose executors they are: that of the last session that was registered
    """

    context: "SparkContext"

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="leasehold-")  # its owner alone may enter
        self.place = str(Path(self._folder) / "readers")
        try:
            self._server = _ReaderWishes(self)
        except OSError:
            shutil.rmtree(self._folder)
            raise
        spawn("leasehold-jobs", lambda: self._server.serve_forever(0.5), self._failed)

    def _failed(self, fault: BaseException) -> None:
        """Refuse queries that want readers: they would wait for an answer."""
        log.error("no readers are started on executors any more: %s", said(fault), exc_info=fault)
        self._server.server_close()

    def close(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._server.server_close()
        shutil.rmtree(self._folder, ignore_errors=True)


@cache
def listener() -> JobListener:
    """The one of this process, made when it is first wanted. Raises OSError."""
    made, process = JobListener(), getpid()

    def leave() -> None:
        if getpid() == process:  # a program may have forked since
            made.close()

    atexit.register(leave)
    return made


class _ReaderWishes(ThreadingUnixStreamServer):
    daemon_threads = True

    def __init__(self, jobs: JobListener) -> None:
        self.jobs = jobs
        super().__init__(jobs.place, _ReaderWish)

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002  the base's names
        log.warning("no readers are started on executors: %s", sys.exc_info()[1])


class _ReaderWish(BaseRequestHandler):
    server: _ReaderWishes
    request: socket.socket

    def handle(self) -> None:
        # Where the system does not tell who is at the other end, the folder alone guards.
        if hasattr(socket, "SO_PEERCRED"):
            _, user, _ = _PEER.unpack(self.request.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
            if user != geteuid():
                raise PermissionError(f"user {user} asked for them")
        context = self.server.jobs.context
        java: Any = context._jsc  # noqa: SLF001  Spark tells it to Java alone
        executors = max(0, len(java.sc().statusTracker().getExecutorInfos()) - 1)  # one entry is the driver's own
        self.request.settimeout(REQUEST_SECONDS)
        self.request.sendall(CAPACITY.pack(executors, context.defaultParallelism))
        number, size = WISH.unpack(received(self.request, WISH.size))
        if not 0 < number <= READERS_MOST or size > TASK_BYTES:
            raise ValueError(f"{number} readers of {size} bytes were asked for")
        packed = received(self.request, size)
        self.request.settimeout(None)
        readers = ReaderJobs(context, number, packed, self._told)
        try:
            readers.begin()
            with suppress(OSError):  # a query that is killed takes leave in no other way
                self.request.recv(1)  # nothing more is said
        finally:
            readers.close()

    def _told(self, text: str) -> None:
        with suppress(OSError):  # the query has ended
            self.request.sendall(f"{text}\n".encode())


class ReaderJobs(KeptReaders):
    """Keeps readers as tasks on executors, each of a job of its own.

    packed  a function, pickled, that returns what the task is to `run`
    told    called when one has ended, and why
    """

    def __init__(self, context: "SparkContext", number: int, packed: bytes, told: Callable[[str], None]) -> None:
        super().__init__(number)
        self._context, self._task, self._told = context, _task_of(packed), told
        self._group = f"leasehold-readers-{uuid4().hex}"

    def _live(self, place: int) -> str:
        context, what = self._context, f"leasehold: reader {place} reads ahead for a query, for as long as it runs"
        try:
            context.setJobGroup(self._group, what, interruptOnCancel=True)
            (why,) = context.parallelize([place], 1).mapPartitions(self._task).collect()
        except Exception as fault:  # noqa: BLE001  a fault of the task, of Java, or of a session that is stopped
            why = " ".join(text_of(fault).split())
        return str(why)[:TEXT_MOST]

    def _end(self) -> None:
        # A job that is about to begin is not seen by that; its reader finds no planner, and ends by itself.
        with suppress(Exception):  # of a session that is stopped
            self._context.cancelJobGroup(self._group)

    def _tell(self, text: str) -> None:
        self._told(text)


def _task_of(packed: bytes) -> Callable[[Iterable[int]], Iterator[str]]:
    """The task; it returns why it has ended."""

    def live(_places: Iterable[int]) -> Iterator[str]:
        # Spark pickles what is made within a function whole: this package may be missing where it runs.
        import pickle  # noqa: PLC0415  nothing of this module is there yet

        try:
            task = pickle.loads(packed)()  # noqa: S301  by Spark's own processes, as all they get
        except ImportError as missing:
            # Told and not raised: Spark would start a failed task four times without a pause.
            return iter((str(missing),))
        return iter((task.run(),))

    return live


# In the process that plans a query's batches, and in the tasks that it asked for

CONNECT_SECONDS = 30.0


class ExecutorReaders:
    """Readers that the program which called `register` keeps on executors; they end with the connection to it.

    executors, slots  how many there are now
    """

    def __init__(self, place: str) -> None:
        """Connect. Raises ValueError if that program is gone."""
        self._closed = False
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.settimeout(CONNECT_SECONDS)
        try:
            self._connection.connect(place)
            self.executors, self.slots = CAPACITY.unpack(received(self._connection, CAPACITY.size))
        except OSError as fault:
            self._connection.close()
            raise ValueError(
                f"option lease.readers: the program that called register(spark) starts readers on executors, and does "
                f"not answer ({printable(text_of(fault))}); call it again, where the query is started"
            ) from fault

    def begin(self, number: int, spec: ReaderSpec, told: Callable[[str], None]) -> None:
        """Have so many started, and be told why one has ended. Raises OSError."""
        packed: bytes = cloudpickle.dumps(unpacking(ReaderTask, {"spec": spec}))  # type: ignore[no-untyped-call]
        self._connection.sendall(WISH.pack(number, len(packed)) + packed)
        # Nothing is told until a reader ends, which may be days from now.
        self._connection.settimeout(None)

        def listen() -> None:
            with suppress(OSError), self._connection.makefile("rb") as lines:
                for line in lines:
                    told(line.decode(errors="replace").strip())
            if not self._closed:
                told("the program that called register(spark) is gone, and the readers with it")

        spawn("leasehold-jobs", listen, lambda fault: told(f"readers are not heard: {said(fault)}"))

    def close(self) -> None:
        """Have them end."""
        self._closed = True
        with suppress(OSError):  # the program may be gone
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


class ReaderTask:
    """A reader as a task of Spark's."""

    spec: ReaderSpec

    def run(self) -> str:
        """Read until the planner is gone; why it has ended."""
        speak()
        spec, here = self.spec, socket.gethostname()
        # A folder of the driver's machine need not be on this one.
        spec = evolve(spec, folder=spec.folder if os.path.isdir(spec.folder) else "")  # noqa: PTH112  "" is none
        try:
            ShardReader(spec).run()
        except OSError as fault:
            host, port = spec.planner
            return f"{printable(text_of(fault))}: an executor on {here} cannot reach the driver at {host}, port {port}"
        except READABLE as fault:
            return f"{printable(text_of(fault))}, on {here}"[:TEXT_MOST]
        return f"the end of its connection to the driver, on {here}"
