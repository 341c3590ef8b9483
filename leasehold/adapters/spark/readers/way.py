"""How the shards of a query are read: in the process that plans its batches, or by readers."""

from collections.abc import Callable

from attrs import frozen

from leasehold.adapters.sources.protocol import Source
from leasehold.adapters.spark.chunks import AheadBuffer, Columns, RowBuffer, SourceSpec
from leasehold.adapters.spark.options import MIB, Address, LeaseOptions
from leasehold.adapters.spark.readers.children import ReaderChildren
from leasehold.adapters.spark.readers.far_rows import FarBuffer, FarReader, FarSource
from leasehold.adapters.spark.readers.far_transport import FarTransport
from leasehold.adapters.spark.readers.pool import ReaderPool
from leasehold.adapters.spark.readers.shelf import ReaderSpec
from leasehold.adapters.spark.replay import Place
from leasehold.adapters.spark.transport import Transport
from leasehold.balancer.model import Lease, Position

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
    if not options.readers or options.fetch is None:
        return ReadingWay(place.source, RowBuffer, here, lambda _woken: None, lambda: None, here.close)
    readers = QueryReaders(stock, options, options.fetch)
    far = FarTransport(readers.pool, here, place, options.config.lease_seconds)

    def close() -> None:
        far.close()
        readers.close()

    return ReadingWay(FarSource(place.source, readers.open), FarBuffer, far, readers.begin, readers.pool.stop, close)


class QueryReaders:
    """The readers of one query, on the planner's machine."""

    def __init__(self, stock: SourceSpec, options: LeaseOptions, address: Address) -> None:
        self._stock, self._options, self._address = stock, options, address
        self._woken: Callable[[str], None] = lambda _key: None
        self.pool = ReaderPool(LOOPBACK, self._news)
        self._children: ReaderChildren | None = None

    def begin(self, woken: Callable[[str], None]) -> None:
        """Start them; they connect by themselves."""
        self._woken = woken
        self._children = ReaderChildren(self._options.readers, self._spec())

    def open(self, lease: Lease, start: Position) -> FarReader:
        """Have one of them read a shard. Raises SourceUnavailable if none is connected."""
        return self.pool.open(lease, start)

    def _news(self, key: str) -> None:
        self._woken(key)

    def close(self) -> None:
        """End them all."""
        self.pool.close()
        if self._children is not None:
            self._children.close()

    def _spec(self) -> ReaderSpec:
        stock, options, count = self._stock, self._options, self._options.readers
        return ReaderSpec(
            planner=(LOOPBACK, self.pool.port),
            token=self.pool.token,
            address=self._address,
            stock=stock,
            rows=options.buffer_rows // count,
            bytes=options.buffer_bytes // count,
            piece_rows=max(1, min(PIECE_ROWS, options.trigger_rows // PIECES, stock.shard_rows // PIECES)),
            piece_bytes=max(1, min(PIECE_BYTES, options.trigger_bytes // PIECES)),
            folder=options.spool_folder,
        )
