"""A wire to a service on this machine that can be cut and mended, or held and slowed for some who use it."""

import socket
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from threading import Condition, Thread

from leasehold_lab.standins.node import HOST, free_port

PIECE = 65536


class Wire:
    """Carries whatever comes to `port` on to another port of this machine.

    name_of says who is at the other end of a connection, by the port that it comes from.
    """

    def __init__(self, to: int, name_of: Callable[[int], str] = lambda _port: "") -> None:
        self.to, self.port, self._name_of = to, free_port(), name_of
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
        """Take no more, and break those there are."""
        _break(self._server)
        for name in list(self._ends):
            self.reset(name)

    def reset(self, name: str) -> None:
        """Break the connections of one."""
        for end in self._ends.pop(name, ()):
            _break(end)

    def part(self, name: str) -> None:
        """Break the connections of one, and take no more of it, until it is let through again."""
        self._apart.add(name)
        self.reset(name)

    def hold(self, name: str, *, requests: bool = True, responses: bool = True) -> None:
        """Hold back one's requests, the responses to them, or both, and break nothing, until it is let through."""
        self._held |= {(name, answers) for answers, held in ((False, requests), (True, responses)) if held}

    def lose_replies(self, name: str) -> None:
        """Carry on what one sends, and break the connection when an answer comes, until it is let through again."""
        self._unanswered.add(name)

    def delay(self, name: str, seconds: float) -> None:
        """Carry each piece for one so much later, until it is let through again."""
        self._delays[name] = seconds

    def let_through(self, name: str) -> None:
        """Nothing is in the way of this one any more."""
        self._apart.discard(name)
        self._unanswered.discard(name)
        self._delays.pop(name, None)
        with self._changed:
            self._held -= {(name, False), (name, True)}
            self._changed.notify_all()

    def _accept(self, server: socket.socket) -> None:
        with suppress(OSError):  # how `accept` learns that the server was closed
            while True:
                near, (_, port) = server.accept()
                Thread(target=self._begin, args=(near, port), daemon=True).start()

    def _begin(self, near: socket.socket, port: int) -> None:
        name = self._name_of(port)
        with suppress(OSError):  # the service is down
            far = socket.create_connection((HOST, self.to))
            self._ends[name] += [near, far]
            if name not in self._apart:  # whoever is parted from now on finds both ends
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
