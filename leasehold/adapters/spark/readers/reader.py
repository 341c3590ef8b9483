"""A reader: connects to the planner, reads the shards that it is told to, and sends tasks their rows.

Rule 1: it lives as long as its connection to the planner; when that ends, for whatever reason, so does the reader.
Rule 2: it says something every second, so that a planner can tell it from one that hangs.
"""

import logging
import socket
from contextlib import closing
from threading import Event, Lock
from typing import assert_never

from leasehold.adapters.json_form.fields import BadJsonField
from leasehold.adapters.reading.appointments import Appointments
from leasehold.adapters.sources.clock import seconds
from leasehold.adapters.spark.fetching import RowServer
from leasehold.adapters.spark.options import Address
from leasehold.adapters.spark.readers.messages import (
    Alive,
    BatchKept,
    Close,
    Discard,
    FromPlanner,
    FromReader,
    Hello,
    Keep,
    Open,
    from_planner,
    line_of,
    lines,
)
from leasehold.adapters.spark.readers.shelf import ReaderSpec, ShardShelf
from leasehold.adapters.threads import ThreadScheduler, spawn
from leasehold.stores.printable import escaped

log = escaped(logging.getLogger("leasehold.spark"))

CONNECT_SECONDS = 30.0
ALIVE_SECONDS = 1.0
END_SECONDS = 5.0
"""How long readings under way may take to end, once the planner is gone."""
THREADS = 16


class ShardReader:
    """A reader of some shards of a query, from `run` until the planner is gone."""

    def __init__(self, spec: ReaderSpec) -> None:
        self._spec = spec
        self._shelves: dict[int, ShardShelf] = {}
        self._over, self._writing = Event(), Lock()

    def run(self) -> None:
        """Serve the planner until it goes away. Raises OSError if it cannot be reached."""
        spec = self._spec
        with (
            closing(spec.stock.open()) as self._source,  # first: it may take a while, in which nothing would be said
            socket.create_connection(spec.planner, CONNECT_SECONDS) as self._connection,
        ):
            self._connection.settimeout(None)
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            address = spec.address
            if not address.host:
                here = self._connection.getsockname()[0]
                address = Address(here, here, address.port)
            with closing(RowServer(address, spec.bytes // 2, spec.folder)) as self._rows:
                self._connection.sendall(spec.token)
                self._say(Hello(address.host, self._rows.port, self._rows.token))
                try:
                    self._serve()
                finally:
                    self._over.set()

    def _serve(self) -> None:
        self._appointments = Appointments(THREADS, ThreadScheduler(seconds), self._fail)
        spawn("leasehold-alive", self._beat, self._fail)
        try:
            with self._connection.makefile("rb") as stream:
                for line in lines(stream):
                    self._obey(from_planner(line))
        except (OSError, BadJsonField) as fault:
            log.warning("the planner is gone: %s", fault)
        finally:
            for opening, shelf in self._shelves.items():
                shelf.close()
                self._appointments.hurry(str(opening))
            until = seconds() + END_SECONDS
            self._appointments.drain(until)  # the last step of each closes what it has open
            self._appointments.close(until)

    def _obey(self, message: FromPlanner) -> None:
        match message:
            case Open():
                shelf = ShardShelf(message, self._source, self._spec, self._say, lambda: len(self._shelves))
                self._shelves[message.opening] = shelf
                self._appointments.add(str(message.opening), shelf.step)
            case Close(opening):
                if (closed := self._shelves.pop(opening, None)) is not None:
                    closed.close()
                    self._appointments.hurry(str(opening))
            case Keep():
                self._keep(message)
                self._say(BatchKept(message.number))
            case Discard(number):
                self._rows.discard(number)
            case _:
                assert_never(message)

    def _keep(self, message: Keep) -> None:
        for place, openings in message.parts:
            found = [(opening, self._taken(opening, count)) for opening, count in openings]
            whole = [rows for _, rows in found if rows is not None]
            if len(whole) == len(found) and any(whole):  # else tasks ask the planner
                try:
                    self._rows.keep(message.number, place, [batch for rows in whole for batch in rows])
                except OSError as fault:  # the disk may be full: that is no reason to read no more
                    log.warning(
                        "batch %d: rows cannot be kept here, so tasks ask the planner: %s", message.number, fault
                    )
            for opening, _ in found:
                self._appointments.hurry(str(opening))  # there is room again

    def _taken(self, opening: int, count: int) -> "list[object] | None":
        shelf = self._shelves.get(opening)
        return None if shelf is None else shelf.take(count)

    def _say(self, message: FromReader) -> None:
        try:
            with self._writing:
                self._connection.sendall(line_of(message))
        except OSError as fault:
            if not self._over.is_set():
                log.warning("the planner does not hear: %s", fault)
            self._fail(fault)

    def _beat(self) -> None:
        while not self._over.wait(ALIVE_SECONDS):
            self._say(Alive())

    def _fail(self, _fault: BaseException) -> None:
        """End: what nobody hears of is read elsewhere."""
        self._over.set()
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            log.debug("the connection was closed before")
