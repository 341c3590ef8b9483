"""How the shards of a query are read: in the process that plans its batches, or by readers."""

import logging
from collections.abc import Callable
from os import cpu_count

from attrs import frozen

from leasehold.adapters.sources.protocol import Source
from leasehold.adapters.spark.chunks import AheadBuffer, Columns, RowBuffer, SourceSpec
from leasehold.adapters.spark.options import MIB, READERS_MOST, Address, LeaseOptions
from leasehold.adapters.spark.readers.children import ReaderChildren
from leasehold.adapters.spark.readers.executors import ExecutorReaders
from leasehold.adapters.spark.readers.far_rows import FarBuffer, FarReader, FarSource
from leasehold.adapters.spark.readers.far_transport import FarTransport
from leasehold.adapters.spark.readers.pool import ReaderPool
from leasehold.adapters.spark.readers.shelf import ReaderSpec
from leasehold.adapters.spark.replay import Place
from leasehold.adapters.spark.transport import Transport
from leasehold.balancer.model import Lease, Position
from leasehold.stores.printable import escaped

log = escaped(logging.getLogger("leasehold.spark"))

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
