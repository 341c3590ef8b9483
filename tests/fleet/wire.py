"""A proxy to a local service. Its connections can be cut and restored, or delayed for some clients."""

import socket
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from threading import Condition, Thread

from leasehold_lab.standins.node import HOST, find_free_port

PIECE = 65536


class Wire:
    """Forwards connections from `port` to another local port. `name_of` maps the port of a client to its name."""

    def __init__(self, target_port: int, name_of: Callable[[int], str] = lambda _port: "") -> None:
        self.to, self.port, self._name_of = target_port, find_free_port(), name_of
        self._ends: defaultdict[str, list[socket.socket]] = defaultdict(list)
        self._apart: set[str] = set()
        self._held: set[tuple[str, bool]] = set()
        self._unanswered: set[str] = set()
        self._delays: dict[str, float] = {}
        self._changed = Condition()
        self.mend()

    def mend(self) -> None:
        self._server = socket.create_server((HOST, self.port))
        Thread(target=self._accept, args=(self._server,), daemon=True).start()

    def cut(self) -> None:
        """Refuse new connections, and break all existing ones."""
        _break(self._server)
        for name in list(self._ends):
            self.reset(name)

    def reset(self, name: str) -> None:
        """Break the connections of one client."""
        for connection in self._ends.pop(name, ()):
            _break(connection)

    def part(self, name: str) -> None:
        """Break the connections of one client, and refuse new ones until `let_through` is called."""
        self._apart.add(name)
        self.reset(name)

    def hold(self, name: str, *, requests: bool = True, responses: bool = True) -> None:
        """Hold back one client's requests, responses or both until `let_through` is called.

        The connections of the client stay open.
        """
        self._held |= {
            (name, is_response) for is_response, is_held in ((False, requests), (True, responses)) if is_held
        }

    def lose_replies(self, name: str) -> None:
        """Forward one client's requests, but break the connection at each response until `let_through` is called."""
        self._unanswered.add(name)

    def delay(self, name: str, seconds: float) -> None:
        """Delay each piece of data for one client until `let_through` is called."""
        self._delays[name] = seconds

    def let_through(self, name: str) -> None:
        """Forward all data of this client again, without faults."""
        self._apart.discard(name)
        self._unanswered.discard(name)
        self._delays.pop(name, None)
        with self._changed:
            self._held -= {(name, False), (name, True)}
            self._changed.notify_all()

    def _accept(self, server: socket.socket) -> None:
        with suppress(OSError):  # `accept` raises OSError when the server is closed.
            while True:
                client_socket, (_, port) = server.accept()
                Thread(target=self._begin, args=(client_socket, port), daemon=True).start()

    def _begin(self, client_socket: socket.socket, port: int) -> None:
        name = self._name_of(port)
        with suppress(OSError):  # The service may be down.
            service_socket = socket.create_connection((HOST, self.to))
            self._ends[name] += [client_socket, service_socket]
            if name not in self._apart:  # From now on, `part` finds both ends.
                for source, target in ((client_socket, service_socket), (service_socket, client_socket)):
                    Thread(
                        target=self._carry, args=(source, target, name, source is service_socket), daemon=True
                    ).start()
                return
        self.reset(name)
        _break(client_socket)

    def _carry(self, source: socket.socket, target: socket.socket, name: str, is_response: bool) -> None:
        with suppress(OSError):  # cut
            while data := source.recv(PIECE):
                if is_response and name in self._unanswered:
                    _break(source)
                    _break(target)
                    return
                with self._changed:
                    self._changed.wait_for(lambda: (name, is_response) not in self._held)
                time.sleep(self._delays.get(name, 0.0))
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


def _break(connection: socket.socket) -> None:
    with suppress(OSError):  # The other side may already have disconnected.
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
