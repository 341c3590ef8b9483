"""A TCP proxy for a local service of any protocol. It can be made faulty, and then restored."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from socket import SHUT_RDWR, SHUT_WR, create_connection, create_server, socket
from threading import Condition, Thread

from leasehold_lab.standins.node import HOST

SLOW_SECONDS, DRIP_SECONDS, CONNECT_SECONDS, BYTES = 7.0, 1.0, 10.0, 65_536


class FaultyWire:
    """Forwards bytes, unless `how` names a fault.

    The fault is one of silent, cut (connections are closed), mute, slow or dripping. The last three affect only the
    responses.

    Args:
        port: The port of the service.
        slow_seconds: How long a slow wire keeps each part of a response.

    Attributes:
        port: Where the wire listens.
        how: The fault, or "".
    """

    def __init__(self, port: int, slow_seconds: float) -> None:
        self._to, self._slow_seconds, self.how = port, slow_seconds, ""
        self._changed, self._open = Condition(), set[socket]()
        self._listening = create_server((HOST, 0))
        self.port: int = self._listening.getsockname()[1]

    def set(self, fault: str) -> None:
        """Simulate the fault `fault` from now on. If `fault` is "", pass on the bytes that are waiting."""
        with self._changed:
            self.how = fault
            self._changed.notify_all()
        if fault == "cut":
            self._cut()

    def serve(self) -> None:
        """Accept connections until `close` is called."""
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                if self.how == "cut":
                    client.close()
                    continue
                with suppress(OSError):
                    server = create_connection((HOST, self._to), CONNECT_SECONDS)
                    server.settimeout(None)
                    self._open |= {client, server}
                    _begin(partial(self._pass_on, client, server, is_response=False))
                    _begin(partial(self._pass_on, server, client, is_response=True))

    def close(self) -> None:
        """End all connections."""
        _close(self._listening)
        self._cut()
        self.set("")

    def _cut(self) -> None:
        connections, self._open = self._open, set()
        for connection in connections:
            _close(connection)

    def _pass_on(self, sender: socket, receiver: socket, *, is_response: bool) -> None:
        with suppress(OSError):
            while data := sender.recv(BYTES):
                with self._changed:
                    if is_response and self.how == "slow":
                        self._changed.wait_for(lambda: self.how != "slow", self._slow_seconds)
                    self._changed.wait_for(lambda: self.how != "silent" and not (is_response and self.how == "mute"))
                while is_response and data and self.how == "dripping":
                    receiver.sendall(data[:1])
                    data = data[1:]
                    time.sleep(DRIP_SECONDS)
                receiver.sendall(data)
            receiver.shutdown(SHUT_WR)


def _close(connection: socket) -> None:
    with suppress(OSError):
        connection.shutdown(SHUT_RDWR)
    connection.close()


def _begin(work: Callable[[], None]) -> None:
    Thread(target=work, daemon=True).start()


@contextmanager
def faulty_wire(port: int, slow_seconds: float = SLOW_SECONDS) -> Iterator[FaultyWire]:
    """Run a proxy for this local port until the block ends."""
    wire = FaultyWire(port, slow_seconds)
    _begin(wire.serve)
    try:
        yield wire
    finally:
        wire.close()
