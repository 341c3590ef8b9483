"""A wire to a service on this machine that can be cut and mended."""

import socket
from contextlib import suppress
from threading import Thread

from adapters.local.process import HOST, free_port

PIECE = 65536


class Wire:
    """Carries whatever comes to `port` on to another port of this machine."""

    def __init__(self, to: int) -> None:
        self._to, self.port = to, free_port()
        self._ends: list[socket.socket] = []
        self.mend()

    def mend(self) -> None:
        """Take connections."""
        self._server = socket.create_server((HOST, self.port))
        Thread(target=self._accept, args=(self._server,), daemon=True).start()

    def cut(self) -> None:
        """Take no more, and break those there are."""
        for end in (self._server, *self._ends):
            with suppress(OSError):  # the other side may have hung up already
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self._ends.clear()

    def _accept(self, server: socket.socket) -> None:
        with suppress(OSError):  # how `accept` learns that the server was closed
            while True:
                near, far = server.accept()[0], socket.create_connection((HOST, self._to))
                self._ends += [near, far]
                for start, end in ((near, far), (far, near)):
                    Thread(target=_carry, args=(start, end), daemon=True).start()


def _carry(start: socket.socket, end: socket.socket) -> None:
    with suppress(OSError):  # cut
        while data := start.recv(PIECE):
            end.sendall(data)
        end.shutdown(socket.SHUT_WR)
