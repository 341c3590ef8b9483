"""A TCP connection to a local service of any protocol that can fall silent, go mute or drip, and be well again."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from socket import SHUT_RDWR, SHUT_WR, create_connection, create_server, socket
from threading import Condition, Thread

from leasehold_lab.standins.node import HOST

DRIP_SECONDS, CONNECT_SECONDS, BYTES = 1.0, 10.0, 65_536


class FaultyWire:
    """Passes bytes on, unless `how` names a fault: silent, or mute and dripping, which delay what the service sends.

    Args:
        port: The port of the service.

    Attributes:
        port: Where the wire listens.
        how: The fault, or "".
    """

    def __init__(self, port: int) -> None:
        self._to, self.how = port, ""
        self._changed, self._open = Condition(), set[socket]()
        self._listening = create_server((HOST, 0))
        self.port: int = self._listening.getsockname()[1]

    def set(self, how: str) -> None:
        """Behave like this from now on; bytes that wait are passed on once it is ""."""
        with self._changed:
            self.how = how
            self._changed.notify_all()

    def serve(self) -> None:
        """Accept connections until `close` is called."""
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                with suppress(OSError):
                    server = create_connection((HOST, self._to), CONNECT_SECONDS)
                    server.settimeout(None)
                    self._open |= {client, server}
                    _begin(partial(self._pass_on, client, server, answers=False))
                    _begin(partial(self._pass_on, server, client, answers=True))

    def close(self) -> None:
        """End all connections."""
        for connection in (self._listening, *self._open):
            with suppress(OSError):
                connection.shutdown(SHUT_RDWR)
            connection.close()
        self.set("")

    def _pass_on(self, sender: socket, receiver: socket, *, answers: bool) -> None:
        with suppress(OSError):
            while data := sender.recv(BYTES):
                with self._changed:
                    self._changed.wait_for(lambda: self.how != "silent" and not (answers and self.how == "mute"))
                while answers and data and self.how == "dripping":
                    receiver.sendall(data[:1])
                    data = data[1:]
                    time.sleep(DRIP_SECONDS)
                receiver.sendall(data)
            receiver.shutdown(SHUT_WR)


def _begin(work: Callable[[], None]) -> None:
    Thread(target=work, daemon=True).start()


@contextmanager
def faulty_wire(port: int) -> Iterator[FaultyWire]:
    """Serve a wire to this local port until the block ends."""
    wire = FaultyWire(port)
    _begin(wire.serve)
    try:
        yield wire
    finally:
        wire.close()
