"""A proxy between all workers and a service whose requests it does not parse. A fault affects one worker's bytes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self
from urllib.parse import urlsplit

from attrs import frozen
from wire import Wire

from leasehold_lab.standins.node import HOST

WIRE_FAULTS = ("late", "silent", "reset", "parted")
LOST_RESPONSES = "lost replies"
"""Requests arrive, but their connection is closed in place of a response. New connections get no response either."""
LATE_SECONDS = 0.8


@frozen
class SharedWire:
    """Has the same methods as `Lines`, for a service whose requests are not parsed."""

    wire: Wire
    met: int = 0
    """Always 0, because requests are not counted."""

    @classmethod
    @contextmanager
    def laid(cls, service_url: str, name_of: Callable[[int], str]) -> Iterator[Self]:
        """Run the proxy until the block ends.

        `name_of` returns the name of the worker whose connection has a given local port.
        """
        wire = Wire(urlsplit(service_url).port or 0, name_of)
        try:
            yield cls(wire)
        finally:
            wire.cut()

    def url(self, worker: str) -> str:  # noqa: ARG002  the wire tells workers apart by their connections
        """Return the address at which all workers reach the service."""
        return f"{HOST}:{self.wire.port}"

    def redirect(self, url: str) -> None:
        """Connect the wire to the service's new address."""
        self.wire.to = urlsplit(url).port or 0

    def begin(self, fault_name: str, worker: str) -> None:
        """Begin a fault for this worker: one of WIRE_FAULTS or ONE_WAY, or LOST_RESPONSES."""
        match fault_name:
            case "late":
                self.wire.delay(worker, LATE_SECONDS)
            case "silent":
                self.wire.hold(worker)
            case "requests only":
                self.wire.hold(worker, requests=False)
            case "responses only":
                self.wire.hold(worker, responses=False)
            case "reset":
                self.wire.reset(worker)
            case "parted":
                self.wire.part(worker)
            case _:
                self.wire.lose_replies(worker)

    def end(self, fault_name: str, worker: str) -> None:  # noqa: ARG002  a worker has one fault at a time
        self.wire.let_through(worker)
