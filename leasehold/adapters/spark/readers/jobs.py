"""Readers on executors, as the user's program has them: jobs of one task each, for as long as a query asks for them.

The process that Spark starts for a source has no session, and cannot start tasks. The program that called `register`
has one. It listens where only its own user can connect: at a socket in a folder of its machine that nobody else may
enter. A query's process tells it there how many readers it wants, and what each is to do; what it said is handed to
executors as it came, and not looked into here. The readers live until the connection ends.
"""

import atexit
import logging
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache
from os import geteuid, getpid
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingUnixStreamServer
from struct import Struct
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from leasehold.adapters.spark.fetching import REQUEST_SECONDS, received
from leasehold.adapters.spark.options import READERS_MOST
from leasehold.adapters.spark.readers.keeping import KeptReaders
from leasehold.adapters.threads import spawn
from leasehold.stores.printable import escaped, said, text_of

if TYPE_CHECKING:
    from pyspark import SparkContext

log = escaped(logging.getLogger("leasehold.spark"))

ROOM = Struct(">QQ")
"""What the program says first: how many executors there are now, and how many tasks run at once on all of them."""
WISH = Struct(">QQ")
"""What the query's process answers: how many readers, and how many bytes follow that say what each is to do."""
TASK_BYTES = 1 << 24
TEXT_MOST = 500
"""How much of a fault is told; Spark's go on with all their traces."""
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
        _refuse_others(self.request)
        context = self.server.jobs.context
        self.request.settimeout(REQUEST_SECONDS)
        self.request.sendall(ROOM.pack(_executors(context), context.defaultParallelism))
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


def _refuse_others(connection: socket.socket) -> None:
    """Raises PermissionError if another user is at the other end; where the system does not tell, the folder guards."""
    if hasattr(socket, "SO_PEERCRED"):
        _, user, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        if user != geteuid():
            raise PermissionError(f"user {user} asked for them")


def _executors(context: "SparkContext") -> int:
    """How many there are now, the driver's own entry left out."""
    java: Any = context._jsc  # noqa: SLF001  Spark tells it to Java alone
    return max(0, len(java.sc().statusTracker().getExecutorInfos()) - 1)


class ReaderJobs(KeptReaders):
    """So many readers as tasks, each of a job of its own.

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
    """The task: it returns why it has ended, since Spark would start a task that fails four times without a pause."""

    def live(_places: Iterable[int]) -> Iterator[str]:
        # Spark pickles what is made within a function whole: this package may be missing where it runs.
        import pickle  # noqa: PLC0415  nothing of this module is there yet

        try:
            task = pickle.loads(packed)()  # noqa: S301  by Spark's own processes, as all they get
        except ImportError as missing:
            return iter((str(missing),))
        return iter((task.run(),))

    return live
