"""A connection to a local service that can be cut and restored, or held back and slowed for some clients."""

import socket
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from threading import Condition, Thread

from leasehold_lab.standins.node import HOST, find_free_port

PIECE = 65536


class Wire:
    """Forwards connections from `port` to another port of this machine. `name_of` maps a client's port to its name."""

    def __init__(self, to: int, name_of: Callable[[int], str] = lambda _port: "") -> None:
        self.to, self.port, self._name_of = to, find_free_port(), name_of
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
        for end in self._ends.pop(name, ()):
            _break(end)

    def part(self, name: str) -> None:
        """Break the connections of one client, and refuse new ones until it is let through again."""
        self._apart.add(name)
        self.reset(name)

    def hold(self, name: str, *, requests: bool = True, responses: bool = True) -> None:
        """Hold back one client's requests, responses or both, until it is let through; connections stay open."""
        self._held |= {(name, answers) for answers, held in ((False, requests), (True, responses)) if held}

    def lose_replies(self, name: str) -> None:
        """Forward one client's requests, but break the connection on a response, until it is let through again."""
        self._unanswered.add(name)

    def delay(self, name: str, seconds: float) -> None:
        """Delay each piece for one client, until it is let through again."""
        self._delays[name] = seconds

    def let_through(self, name: str) -> None:
        """Forward everything for this client again."""
        self._apart.discard(name)
        self._unanswered.discard(name)
        self._delays.pop(name, None)
        with self._changed:
            self._held -= {(name, False), (name, True)}
            self._changed.notify_all()

    def _accept(self, server: socket.socket) -> None:
        with suppress(OSError):  # `accept` raises this when the server is closed
            while True:
                near, (_, port) = server.accept()
                Thread(target=self._begin, args=(near, port), daemon=True).start()

    def _begin(self, near: socket.socket, port: int) -> None:
        name = self._name_of(port)
        with suppress(OSError):  # the service is down
            far = socket.create_connection((HOST, self.to))
            self._ends[name] += [near, far]
            if name not in self._apart:  # from now on `part` finds both ends
                for start, end in ((near, far), (far, near)):
                    Thread(target=self._carry, args=(start, end, name, start is far), daemon=True).start()
                return
        self.reset(name)
        _break(near)

    def _carry(self, start: socket.socket, end: socket.socket, name: str, answers: bool) -> None:
        with suppress(OSError):  # cut
            while data := start.recv(PIECE):
                if answers and name in self._unanswered:
                    _break(start)
                    _break(end)
                    return
                with self._changed:
                    self._changed.wait_for(lambda: (name, answers) not in self._held)
                time.sleep(self._delays.get(name, 0.0))
                end.sendall(data)
            end.shutdown(socket.SHUT_WR)


def _break(end: socket.socket) -> None:
    with suppress(OSError):  # the other side may have hung up already
        end.shutdown(socket.SHUT_RDWR)
    end.close()
