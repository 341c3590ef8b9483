"""Starts the readers of a query, and keeps them alive, as child processes or as tasks on Spark's executors.

A reader that ends is started again after a pause that grows (`KeptReaders`).

Under a `local` master readers are child processes of the planning process. On a cluster they are tasks, but the
planning process has no session to start tasks with. The program that called `register` has one:

1. The program listens on a socket in a folder that only its own user can enter (`JobListener`).
2. A query's process connects (`ExecutorReaders`), learns how many executors there are, and replies with the number of
   readers and a description of the task.
3. The program starts a job of one task for each reader (`ReaderJobs`). It passes the description on to executors
   without looking into it.
4. A task reads until its planner is gone (`ReaderTask`). All of them end with the connection.
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
    """Keeps a number of readers alive, from `begin` until `close`."""

    def __init__(self, number: int) -> None:
        self._over = Event()
        self._number = number
        self._threads: list[Thread] = []

    def begin(self) -> None:
        """Start all readers."""
        for number in range(self._number):
            self._threads.append(spawn("leasehold-reader", partial(self._keep, number), partial(self._failed, number)))

    def close(self) -> None:
        """End all readers and start no more. Their rows are either not needed any more or read again."""
        self._over.set()  # first, otherwise a reader that ends now would be started again
        self._end()
        for thread in self._threads:
            thread.join(END_SECONDS)

    @abstractmethod
    def _live(self, place: int) -> str:
        """Start a reader, wait for its end, and return why it ended."""

    @abstractmethod
    def _end(self) -> None:
        """End all living readers."""

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
                pause.reset()  # it ran well, and a query that runs for months loses some readers
            if not self._over.is_set():
                wait = pause.next()
                self._tell(f"reader {place} ended with {status}, starting another in {wait:.1f} s")
                self._over.wait(wait)


COMMAND = (sys.executable, "-m", "leasehold.adapters.spark.readers.process")


class ReaderChildren(KeptReaders):
    """Keeps readers as child processes of the planning process."""

    def __init__(self, number: int, spec: ReaderSpec) -> None:
        super().__init__(number)
        # cloudpickle pickles classes of the user's own program by value.
        self._spec: bytes = cloudpickle.dumps(spec)  # type: ignore[no-untyped-call]  # Spark's own
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def _end(self) -> None:
        for process in list(self._processes.values()):  # a copy, because one may be starting
            process.kill()

    def _live(self, place: int) -> str:
        # The child prints to this process's output, and finds the same modules.
        path = os.pathsep.join(filter(None, sys.path))
        environment = os.environ | {"PYTHONPATH": path}
        with subprocess.Popen(COMMAND, stdin=subprocess.PIPE, env=environment) as process:  # noqa: S603  our own
            self._processes[place] = process
            if self._over.is_set():  # `_end` may have missed this process
                process.kill()
            try:
                process.communicate(self._spec)
            except BrokenPipeError:
                log.debug("reader %d ended before it was told what to read", place)
            return f"status {process.wait()}"


# In the program that called `register`

CAPACITY = Struct(">QQ")
"""The program first sends the number of executors, and how many tasks can run at once on all of them."""
WISH = Struct(">QQ")
"""The query's process replies with the number of readers, and the size of the task's description that follows."""
TASK_BYTES = 1 << 24
TEXT_MOST = 500
"""The most characters of an error to log, because Spark appends all its stack traces."""
_PEER = Struct("3i")


class JobListener:
    """Listens for queries that want readers, until it is closed. Raises OSError if it cannot listen.

    Attributes:
        place: The path of the socket.
        context: The context whose executors run readers, of the last session that was registered.
    """

    context: "SparkContext"

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="leasehold-")  # only its owner may enter
        self.place = str(Path(self._folder) / "readers")
        try:
            self._server = _ReaderWishes(self)
        except OSError:
            shutil.rmtree(self._folder)
            raise
        spawn("leasehold-jobs", lambda: self._server.serve_forever(0.5), self._failed)

    def _failed(self, fault: BaseException) -> None:
        """Close the socket, so that queries that want readers fail instead of waiting for a response."""
        log.error("no readers are started on executors any more: %s", said(fault), exc_info=fault)
        self._server.server_close()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        shutil.rmtree(self._folder, ignore_errors=True)


@cache
def listener() -> JobListener:
    """Return the listener of this process, which the first call creates. Raises OSError."""
    job_listener, process = JobListener(), getpid()

    def leave() -> None:
        if getpid() == process:  # the program may have forked since
            job_listener.close()

    atexit.register(leave)
    return job_listener


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
        # If the system does not identify the peer, only the folder's permissions protect the socket.
        if hasattr(socket, "SO_PEERCRED"):
            _, user, _ = _PEER.unpack(self.request.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
            if user != geteuid():
                raise PermissionError(f"user {user} asked for them")
        context = self.server.jobs.context
        java: Any = context._jsc  # noqa: SLF001  only Java has this
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
            with suppress(OSError):  # this is how the connection of a killed query ends
                self.request.recv(1)  # returns when the query ends, because it sends nothing more
        finally:
            readers.close()

    def _told(self, text: str) -> None:
        with suppress(OSError):  # the query may have ended
            self.request.sendall(f"{text}\n".encode())


class ReaderJobs(KeptReaders):
    """Keeps readers as tasks on executors, each in a job of its own.

    Args:
        context: The context whose executors run them.
        number: How many readers to keep.
        packed: A pickled function that returns the object whose `run` method is the task.
        told: Called with the reason when one has ended.
    """

    def __init__(self, context: "SparkContext", number: int, packed: bytes, told: Callable[[str], None]) -> None:
        super().__init__(number)
        self._context, self._task, self._told = context, _task_of(packed), told
        self._group = f"leasehold-readers-{uuid4().hex}"

    def _live(self, place: int) -> str:
        context, description = (
            self._context,
            f"leasehold: reader {place} reads ahead for a query, for as long as it runs",
        )
        try:
            context.setJobGroup(self._group, description, interruptOnCancel=True)
            (reason,) = context.parallelize([place], 1).mapPartitions(self._task).collect()
        except Exception as fault:  # noqa: BLE001  a fault of the task, of Java, or of a session that is stopped
            reason = " ".join(text_of(fault).split())
        return str(reason)[:TEXT_MOST]

    def _end(self) -> None:
        # This misses a job that is about to begin. Its reader then finds no planner, and ends by itself.
        with suppress(Exception):  # the session may be stopped
            self._context.cancelJobGroup(self._group)

    def _tell(self, text: str) -> None:
        self._told(text)


def _task_of(packed: bytes) -> Callable[[Iterable[int]], Iterator[str]]:
    """Return the function of the task. It yields why the reader has ended."""

    def live(_places: Iterable[int]) -> Iterator[str]:
        # Spark pickles a nested function by value, so this works even if the package is missing on the executor.
        import pickle  # noqa: PLC0415  the function cannot use imports of this module

        try:
            task = pickle.loads(packed)()  # noqa: S301  Spark's own processes unpickle everything they get
        except ImportError as missing:
            # Return the error instead of raising it: Spark would start a failed task four times without a pause.
            return iter((str(missing),))
        return iter((task.run(),))

    return live


# In the process that plans a query's batches, and in the tasks that it requested

CONNECT_SECONDS = 30.0


class ExecutorReaders:
    """Readers on executors, kept by the program that called `register`. They end with the connection to it.

    Attributes:
        executors: How many executors there are.
        slots: How many tasks can run at once on all of them.
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
        """Start `number` readers, and call `told` with the reason when one has ended. Raises OSError."""
        packed: bytes = cloudpickle.dumps(unpacking(ReaderTask, {"spec": spec}))  # type: ignore[no-untyped-call]
        self._connection.sendall(WISH.pack(number, len(packed)) + packed)
        # Wait without limit: nothing arrives until a reader ends, which may be days from now.
        self._connection.settimeout(None)

        def listen() -> None:
            with suppress(OSError), self._connection.makefile("rb") as lines:
                for line in lines:
                    told(line.decode(errors="replace").strip())
            if not self._closed:
                told("the program that called register(spark) is gone, and the readers with it")

        spawn("leasehold-jobs", listen, lambda fault: told(f"readers are not heard: {said(fault)}"))

    def close(self) -> None:
        """End the readers."""
        self._closed = True
        with suppress(OSError):  # the program may be gone
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


class ReaderTask:
    """A reader as one of Spark's tasks."""

    spec: ReaderSpec

    def run(self) -> str:
        """Read until the planner is gone, and return why the reader has ended."""
        speak()
        spec, here = self.spec, socket.gethostname()
        # The folder from the driver's machine may not exist on this one.
        spec = evolve(spec, folder=spec.folder if os.path.isdir(spec.folder) else "")  # noqa: PTH112  "" is none
        try:
            ShardReader(spec).run()
        except OSError as fault:
            host, port = spec.planner
            return f"{printable(text_of(fault))}: an executor on {here} cannot reach the driver at {host}, port {port}"
        except READABLE as fault:
            return f"{printable(text_of(fault))}, on {here}"[:TEXT_MOST]
        return f"the end of its connection to the driver, on {here}"
