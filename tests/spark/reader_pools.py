"""Pools of reader processes, and readers that connect to them."""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
from attrs import Factory, define
from fake_stream import Stream

from leasehold.adapters.spark.fetching import ReaderRows, read
from leasehold.adapters.spark.kinesis.rows import columns
from leasehold.adapters.spark.options import Address
from leasehold.adapters.spark.readers.messages import (
    Hello,
    line_of,
)
from leasehold.adapters.spark.readers.pool import FarReader, ReaderPool
from leasehold.adapters.spark.readers.reader import ReaderSpec
from leasehold.adapters.spark.rows import SourceSpec
from leasehold.balancer.model import TRIM_HORIZON, Lease

HOST = "127.0.0.1"


PATIENCE = 60.0


def a_spec(stream: Stream, pool: ReaderPool | None = None, rows: int = 1000) -> ReaderSpec:
    """Return what a reader of this stream needs."""
    source_spec = SourceSpec(lambda: stream, columns("fake"), 0.01, 2**53, rereadable=True)
    planner, token = (HOST, pool.port if pool else 1), pool.token if pool else b""
    return ReaderSpec(planner, token, Address(HOST, HOST), source_spec, rows, 1 << 20, 3, 1 << 20, "")


@define
class News:
    """The shards that changed, each with the result of `look` at that time."""

    event: Event = Factory(Event)
    keys: list[str] = Factory(list)
    look: Callable[[], object] = lambda: None
    seen: list[object] = Factory(list)

    def __call__(self, key: str) -> None:
        self.keys.append(key)
        self.seen.append(self.look())
        self.event.set()


@contextmanager
def a_pool() -> Iterator[tuple[ReaderPool, News]]:
    news = News()
    pool = ReaderPool(Address(HOST, HOST), news)
    try:
        yield pool, news
    finally:
        pool.close()


@contextmanager
def connected(pool: ReaderPool, said: bytes) -> Iterator[socket.socket]:
    """Connect a peer that sends this."""
    with socket.create_connection((HOST, pool.port), PATIENCE) as connection:
        connection.sendall(said)
        yield connection


def closed_by_pool(connection: socket.socket) -> bool:
    """Return whether the pool ends the connection in time without sending anything."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


HELLO = line_of(Hello(HOST, 1, bytes(32)))


def opened(pool: ReaderPool) -> FarReader:
    """Open a shard as soon as there is a reader."""
    return pool.open(Lease("a"), TRIM_HORIZON)


def numbers(batches: Iterator[pa.RecordBatch]) -> list[int]:
    return [int(number) for batch in batches for number in batch["sequenceNumber"].to_pylist()]


def read_for_ever(part: ReaderRows) -> None:
    """Read until refused: a reader learns a moment later that a batch is done."""
    while True:
        numbers(read(part))
