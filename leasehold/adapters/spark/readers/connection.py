"""The planner's side of one reader's connection: what it is told to do, and what it has reported."""

import logging
import socket
from collections.abc import Callable
from threading import Condition, Lock

from leasehold.adapters.spark.readers.far_rows import FarReader
from leasehold.adapters.spark.readers.messages import (
    Alive,
    BatchKept,
    FromPlanner,
    FromReader,
    Hello,
    ShardFailure,
    ShardReport,
    from_reader,
    line_of,
    lines,
)
from leasehold.stores.printable import escaped

log = escaped(logging.getLogger("leasehold.spark"))

SILENT_SECONDS = 10.0
"""A reader of which nothing is heard for so long is taken for gone; it says something every second."""


class ReaderConnection:
    """A reader as the planner knows it, from its Hello until its connection ends.

    openings  the shards that it reads, by number of the opening
    """

    def __init__(self, connection: socket.socket, woken: Callable[[str], None]) -> None:
        self._connection, self._woken = connection, woken
        connection.settimeout(SILENT_SECONDS)
        self._stream = connection.makefile("rb")
        self._lines = lines(self._stream)
        self.openings: dict[int, FarReader] = {}
        self.over = False
        self._kept = -1
        self._heard, self._writing = Condition(), Lock()
        self.rows = self._hello()

    def _hello(self) -> Hello:
        """Where its rows are fetched. Raises ValueError if it says anything else first."""
        hello = from_reader(next(self._lines, b""))
        if not isinstance(hello, Hello):
            raise ValueError(f"a reader began with {type(hello).__name__}")  # noqa: TRY004  it is no argument
        return hello

    def serve(self) -> None:
        """Take what it says until the connection ends. Raises OSError, and ValueError for what no reader says."""
        for line in self._lines:
            self._take(from_reader(line))

    def _take(self, message: FromReader) -> None:
        match message:
            case ShardReport(opening=number) | ShardFailure(opening=number):
                # One that was closed in the meantime is nobody's any more: what comes late counts for nothing.
                if (opening := self.openings.get(number)) is not None:
                    self._tell(opening, message)
            case BatchKept(number):
                with self._heard:
                    self._kept = number
                    self._heard.notify_all()
            case Alive():
                pass
            case Hello():
                raise ValueError("a reader said Hello twice")

    def _tell(self, opening: FarReader, message: ShardReport | ShardFailure) -> None:
        if isinstance(message, ShardReport):
            opening.report(message)
        else:
            opening.fail(message.text)
        self._woken(opening.lease.key)

    def send(self, message: FromPlanner) -> None:
        """Tell it; where that cannot be done it is gone, and `serve` ends."""
        try:
            with self._writing:
                self._connection.sendall(line_of(message))
        except OSError as fault:
            log.warning("a reader does not hear: %s", fault)
            self.end()

    def wait_kept(self, number: int, seconds: float) -> None:
        """Until it has said that it keeps its rows of this batch, is gone, or so long."""
        with self._heard:
            self._heard.wait_for(lambda: self._kept >= number or self.over, seconds)

    def end(self) -> None:
        """Have the connection end, and with it the reader."""
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            log.debug("the connection was closed before")

    def lost(self) -> None:
        """Note that it is gone: what it has read ahead is read elsewhere."""
        with self._heard:
            self.over = True
            self._heard.notify_all()
        openings, self.openings = list(self.openings.values()), {}
        for opening in openings:
            opening.gone = True
            self._woken(opening.lease.key)
        self._stream.close()
