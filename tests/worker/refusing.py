"""Simulates a system that refuses some requests for threads or file descriptors, starting with the n-th request.

File descriptors are refused in an audit hook. Python calls the hook before it opens a file, a socket or a SQLite
database, so every library is affected.
"""

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from typing import NoReturn
from unittest.mock import patch

from attrs import define

THREAD, DESCRIPTOR = "thread", "descriptor"
DESCRIPTORS = {"open", "socket.__new__", "sqlite3.connect"}


@define
class Refusal:
    """Refuses `count` consecutive requests of kind `kind`, starting with request number `first`.

    `requests` counts the requests made, and `refused` those that were refused.
    """

    kind: str
    first: int
    count: int
    requests: int = 0
    refused: int = 0

    def count_request(self, event: str) -> None:
        """Count a request, and if it is to be refused, raise the error that the system would raise."""
        request_kind = DESCRIPTOR if event in DESCRIPTORS else event
        if request_kind != self.kind:
            return
        request_number = self.requests
        self.requests += 1
        if self.first <= request_number < self.first + self.count:
            self.refused += 1
            _refuse(request_kind)


_now: Refusal | None = None


def _refuse(kind: str) -> NoReturn:
    if kind == THREAD:
        raise RuntimeError("can't start new thread")
    raise OSError(errno.EMFILE, "Too many open files")


def _on_audit_event(event: str, _about: tuple[object, ...]) -> None:
    if _now is not None:
        _now.count_request(event)


sys.addaudithook(_on_audit_event)  # An audit hook cannot be removed. Between tests, this one does nothing.


@contextmanager
def refusing(refusal: Refusal) -> Iterator[None]:
    """Count the requests while the context is open, and refuse those that `refusal` selects."""
    global _now  # noqa: PLW0603  the audit hook reads this variable
    original_start = Thread.start

    def begin(thread: Thread) -> None:
        refusal.count_request(THREAD)  # Before Python 3.12, there is no audit event for this.
        original_start(thread)

    _now = refusal
    try:
        with patch.object(Thread, "start", begin):
            yield
    finally:
        _now = None
