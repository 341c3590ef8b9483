"""Readers on executors, as the user's program has them: jobs of one task each, for as long as a query asks for them.

The process that Spark starts for a source has no session, and cannot start tasks. The program that called `register`
has one. It listens where only its own user can connect: at a socket in a folder of its machine that nobody else may
enter. A query's process tells it there how many readers it wants, and what each is to do; what it said is handed to
executors as it came, and not looked into here. The readers live until the connection ends.

Readers on executors: how the planner asks for them, and what their tasks do.

How the shards of a query are read: in the process that plans its batches, or by readers.
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
from leasehold.adapters.spark.readers.pool import KeptReaders
from leasehold.adapters.threads import spawn
from leasehold.stores.printable import escaped, said, text_of

if TYPE_CHECKING:
    from pyspark import SparkContext
import os
from os import cpu_count

from attrs import evolve, frozen
from pyspark import cloudpickle

from leasehold.adapters.reading.runner import READABLE
from leasehold.adapters.sources.protocol import Source
from leasehold.adapters.spark.feed import AheadBuffer, Columns, RowBuffer, SourceSpec
from leasehold.adapters.spark.fetching import Transport
from leasehold.adapters.spark.options import MIB, Address, LeaseOptions
from leasehold.adapters.spark.processes import speak, unpacking
from leasehold.adapters.spark.readers.pool import (
    FarBuffer,
    FarReader,
    FarSource,
    FarTransport,
    ReaderChildren,
    ReaderPool,
)
from leasehold.adapters.spark.readers.reader import ReaderSpec, ShardReader
from leasehold.adapters.spark.replay import Place
from leasehold.balancer.model import Lease, Position

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
            self.executors, self.slots = ROOM.unpack(received(self._connection, ROOM.size))
        except OSError as fault:
            self._connection.close()
            raise ValueError(
                f"option lease.readers: the program that called register(spark) starts readers on executors, and does "
                f"not answer ({fault}); call it again, where the query is started"
            ) from fault

    def begin(self, number: int, spec: ReaderSpec, told: Callable[[str], None]) -> None:
        """Have so many started, and be told why one has ended. Raises OSError."""
        packed: bytes = cloudpickle.dumps(unpacking(ReaderTask, {"spec": spec}))  # type: ignore[no-untyped-call]
        self._connection.sendall(WISH.pack(number, len(packed)) + packed)
        self._connection.settimeout(None)
        spawn("leasehold-jobs", lambda: self._listen(told), lambda fault: told(f"readers are not heard: {said(fault)}"))

    def _listen(self, told: Callable[[str], None]) -> None:
        with suppress(OSError), self._connection.makefile("rb") as lines:
            for line in lines:
                told(line.decode(errors="replace").strip())
        if not self._closed:
            told("the program that called register(spark) is gone, and the readers with it")

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
            return f"{fault}: an executor on {here} cannot reach the driver at {host}, port {port}"
        except READABLE as fault:
            return f"{fault}, on {here}"[:TEXT_MOST]
        return f"the end of its connection to the driver, on {here}"


MEND = "add executors, or lower lease.readers"
LOOPBACK = "127.0.0.1"
PIECES = 64
"""A batch at its limit has at least so many pieces, so that shards have even parts of it."""
PIECE_ROWS, PIECE_BYTES = 10_000, MIB


@frozen
class ReadingWay:
    """A way to read.

    source     opens shards for the worker
    buffer     where what was read of a shard waits to be planned
    transport  has planned rows reach tasks
    begin      called once, before the first shard is opened, with what is to be told of news of a shard
    stop       has nobody wait for a reader any more
    close      lets all of it go
    """

    source: Source
    buffer: Callable[[Columns], AheadBuffer]
    transport: Transport | FarTransport
    begin: Callable[[Callable[[str], None]], None]
    stop: Callable[[], None]
    close: Callable[[], None]


def way_of(stock: SourceSpec, options: LeaseOptions, place: Place) -> ReadingWay:
    """The way that the options ask for."""
    here = Transport(options.fetch, options.buffer_bytes // 2, options.spool_folder)
    if options.readers == 0 or options.fetch is None:
        return ReadingWay(place.source, RowBuffer, here, lambda _woken: None, lambda: None, here.close)
    readers = QueryReaders(stock, options, options.fetch)
    far = FarTransport(readers.pool, here, place, options.config.lease_seconds)

    def close() -> None:
        far.close()
        readers.close()

    return ReadingWay(FarSource(place.source, readers.open), FarBuffer, far, readers.begin, readers.pool.stop, close)


class QueryReaders:
    """The readers of one query: on the planner's machine, or on executors where the session's program starts them."""

    def __init__(self, stock: SourceSpec, options: LeaseOptions, address: Address) -> None:
        self._stock, self._options, self._address = stock, options, address
        self._woken: Callable[[str], None] = lambda _key: None
        self._here = Address(LOOPBACK, LOOPBACK)
        self.pool = ReaderPool(address if options.reader_jobs else self._here, self._news)
        self._readers: ReaderChildren | ExecutorReaders | None = None

    def begin(self, woken: Callable[[str], None]) -> None:
        """Start them; they connect by themselves. Raises ValueError if they cannot be asked for."""
        self._woken = woken
        if self._options.reader_jobs:
            self._begin_on_executors()
            return
        number = self._number((cpu_count() or 1) - 1)
        self._readers = children = ReaderChildren(number, self._spec(number, self._here, self._address))
        children.begin()

    def _begin_on_executors(self) -> None:
        self._readers = readers = ExecutorReaders(self._options.reader_jobs)
        number = self._number(min(readers.executors, readers.slots - 1))
        if number >= readers.slots:
            log.warning("%d readers leave none of %d task slots for batches: %s", number, readers.slots, MEND)
        self.pool.absent = f"no reader has come; where no slot is free, {MEND}"
        spec = self._spec(number, self._address, Address("", "", self._address.port))
        readers.begin(number, spec, self._told)
        log.info("%d readers start on %d executors", number, readers.executors)

    def _number(self, room: int) -> int:
        asked = self._options.readers
        return max(1, min(room, READERS_MOST)) if asked is None else asked

    def _told(self, text: str) -> None:
        self.pool.absent = f"no reader is connected: {text}"
        log.warning("%s", text)

    def open(self, lease: Lease, start: Position) -> FarReader:
        """Have one of them read a shard. Raises SourceUnavailable if none is connected."""
        return self.pool.open(lease, start)

    def _news(self, key: str) -> None:
        self._woken(key)

    def close(self) -> None:
        """End them all."""
        self.pool.stop()
        if self._readers is not None:
            self._readers.close()
        self.pool.close()

    def _spec(self, number: int, planner: Address, rows: Address) -> ReaderSpec:
        stock, options = self._stock, self._options
        return ReaderSpec(
            planner=(planner.host, self.pool.port),
            token=self.pool.token,
            address=rows,
            stock=stock,
            rows=options.buffer_rows // number,
            bytes=options.buffer_bytes // number,
            piece_rows=max(1, min(PIECE_ROWS, options.trigger_rows // PIECES, stock.shard_rows // PIECES)),
            piece_bytes=max(1, min(PIECE_BYTES, options.trigger_bytes // PIECES)),
            folder=options.spool_folder,
        )
