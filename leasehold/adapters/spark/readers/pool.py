"""All readers of a query: they connect here, and shards are shared out among them.

Rule 1: nobody becomes a reader without the query's token, which is compared in constant time.
Rule 2: a shard goes to the reader that has the fewest. When a reader comes, others give it their surplus; when one
goes, or is not heard of, its shards go to the others at once.
"""

import logging
import socket
import sys
from collections.abc import Callable
from hmac import compare_digest
from itertools import count
from secrets import token_bytes
from socketserver import BaseRequestHandler, ThreadingTCPServer
from threading import Condition

from leasehold.adapters.sources.protocol import SourceUnavailable
from leasehold.adapters.spark.fetching import REQUEST_SECONDS, TOKEN_BYTES, listening, received
from leasehold.adapters.spark.options import Address
from leasehold.adapters.spark.readers.connection import ReaderConnection
from leasehold.adapters.spark.readers.far_rows import FarReader
from leasehold.adapters.spark.readers.messages import Close, Open
from leasehold.adapters.threads import spawn
from leasehold.balancer.model import Lease, Position
from leasehold.stores.printable import escaped, said

log = escaped(logging.getLogger("leasehold.spark"))

FIRST_SECONDS, NEXT_SECONDS = 60.0, 1.0
"""How long is waited for a reader at first, and once there were some."""


class ReaderPool:
    """The readers that are connected, from its making until it is closed. Raises OSError without a port.

    address  where to listen
    woken    told of each shard of which there is news
    absent   why there is no reader, as far as is known
    """

    def __init__(self, address: Address, woken: Callable[[str], None]) -> None:
        self._woken = woken
        self.absent = "no process that reads is connected"
        self._connected: list[ReaderConnection] = []
        self._changed = Condition()
        self._numbers = count(1)
        self._patience = FIRST_SECONDS
        self._unread: set[str] = set()
        self._closed = False
        self.token = token_bytes(TOKEN_BYTES)
        self._server = listening(address, lambda family, place: _Listening(family, place, self))
        spawn("leasehold-readers", lambda: self._server.serve_forever(0.1), self._failed)

    def _failed(self, fault: BaseException) -> None:
        """Whoever asks for a reader hears of it, and no more connect."""
        self.absent = f"no reader can connect any more: {said(fault)}"
        self._server.server_close()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.server_address[1])

    def open(self, lease: Lease, start: Position) -> FarReader:
        """Have the shard read by the reader that has the fewest. Raises SourceUnavailable if there is none."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._connected, self._patience)
            if not self._connected:
                self._unread.add(lease.key)
                raise SourceUnavailable(self.absent)
            self._patience = NEXT_SECONDS
            reader = min(self._connected, key=lambda each: len(each.openings))
            opening = FarReader(next(self._numbers), lease, start, self._close_opening)
            reader.openings[opening.number] = opening
        reader.send(Open(opening.number, lease, start))
        return opening

    def reader_of(self, opening: FarReader) -> ReaderConnection | None:
        """The reader that has the rows of this opening; None if it is gone, or has closed it."""
        with self._changed:
            return next((each for each in self._connected if opening.number in each.openings), None)

    @property
    def connected(self) -> tuple[ReaderConnection, ...]:
        """The readers that are there now."""
        with self._changed:
            return tuple(self._connected)

    def stop(self) -> None:
        """Take no more readers in, and have nobody wait for one."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """Have all readers end, and listen no more."""
        self.stop()
        self._server.shutdown()
        self._server.server_close()
        for reader in self.connected:
            reader.end()

    def serve(self, connection: socket.socket, peer: object) -> None:
        """Take a reader in until it goes. Raises OSError and ValueError."""
        connection.settimeout(REQUEST_SECONDS)
        if not compare_digest(received(connection, TOKEN_BYTES), self.token):
            log.warning("%s wanted to read for this query without its token", peer)
            return
        reader = ReaderConnection(connection, self._woken)
        try:
            self._add(reader, peer)
            reader.serve()
        finally:
            self._remove(reader, peer)

    def _add(self, reader: ReaderConnection, peer: object) -> None:
        with self._changed:
            if self._closed:
                raise ConnectionError("the query has ended")
            self._connected.append(reader)
            moved, unread, self._unread = self._surplus(), self._unread, set()
            self._changed.notify_all()
        log.info("reader %s has come: %d now", peer, len(self.connected))
        for opening in moved:
            opening.close()
        for key in {*unread, *(opening.lease.key for opening in moved)}:
            self._woken(key)

    def _surplus(self) -> list[FarReader]:
        each = -(-sum(len(reader.openings) for reader in self._connected) // len(self._connected))
        return [opening for reader in self._connected for opening in list(reader.openings.values())[each:]]

    def _remove(self, reader: ReaderConnection, peer: object) -> None:
        with self._changed:
            self._connected = [each for each in self._connected if each is not reader]
            closed = self._closed
        shards = len(reader.openings)
        reader.lost()
        if not closed:
            log.warning("reader %s is gone: its %d shards are read by others", peer, shards)

    def _close_opening(self, opening: FarReader) -> None:
        with self._changed:
            reader = next((each for each in self._connected if each.openings.pop(opening.number, None)), None)
        if reader is not None:
            reader.send(Close(opening.number))


class _Listening(ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 128
    allow_reuse_address = True

    def __init__(self, family: int, place: tuple[str, int], pool: ReaderPool) -> None:
        self.address_family = family
        self.pool = pool
        super().__init__(place, _Admission)

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002  the base's names
        fault = sys.exc_info()[1]
        level = logging.DEBUG if isinstance(fault, ConnectionError) else logging.WARNING
        log.log(level, "reader %s: %s", client_address, fault)


class _Admission(BaseRequestHandler):
    server: _Listening
    request: socket.socket

    def handle(self) -> None:
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.server.pool.serve(self.request, self.client_address)
