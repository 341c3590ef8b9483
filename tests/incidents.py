"""Simulates incidents that should raise alarms, minute by minute, and the lease table during each of them."""

from collections.abc import Callable

from leasehold.adapters.worker.progress import PROGRESS_ANNOTATION, Progress
from leasehold.balancer.model import Lease
from leasehold.errors import OutcomeUnknown
from leasehold.stores.embedded.memory import MemoryStore
from leasehold.stores.protocol import Listing

MINUTES = 40
BEGAN = 1_700_000_000.0

Incident = Callable[[int, int], tuple[float, float, int, float]]
"""Takes the minute and the lease's number. Returns seconds behind, seconds since the last read, switches and KB/s."""


def healthy(_minute: int, _number: int) -> tuple[float, float, int, float]:
    return 0.0, 0.0, 1, 10.0


def overloaded(minute: int, number: int) -> tuple[float, float, int, float]:
    """There are too few workers. Every lease is behind, and falls further behind every minute."""
    return 10.0 * minute + number, 0.0, 1, 10.0


def hot(minute: int, number: int) -> tuple[float, float, int, float]:
    """One partition key takes most of the stream."""
    return (120.0 + minute, 0.0, 1, 900.0) if number == 3 else (0.0, 0.0, 1, 10.0)


def hung(minute: int, number: int) -> tuple[float, float, int, float]:
    """The reader of one lease hangs, while its owner still renews the lease."""
    return (0.0, 60.0 * minute, 1, 10.0) if number == 2 else (0.0, 0.0, 1, 10.0)


def slipping(minute: int, number: int) -> tuple[float, float, int, float]:
    """One lease falls further behind every minute."""
    return (30.0 * minute, 0.0, 1, 10.0) if number == 1 else (0.0, 0.0, 1, 10.0)


def forgotten(_minute: int, number: int) -> tuple[float, float, int, float]:
    """One lease is so far behind that the stream will soon drop its records."""
    return (70_000.0, 0.0, 1, 10.0) if number == 4 else (0.0, 0.0, 1, 10.0)


def flapping(minute: int, number: int) -> tuple[float, float, int, float]:
    """Because a record fails, its lease moves from worker to worker."""
    return (0.0, 0.0, minute, 10.0) if number == 5 else (0.0, 0.0, 1, 10.0)


def down(minute: int, number: int) -> tuple[float, float, int, float]:
    """The table cannot be read from the tenth minute on."""
    if minute >= 10:
        raise OutcomeUnknown("the line is down")
    return healthy(minute, number)


class ScriptedTable(MemoryStore):
    """The lease table at the minute `minute` of an incident."""

    def __init__(self, incident: Incident) -> None:
        super().__init__()
        self.incident, self.minute = incident, 0

    def list(self) -> Listing:
        return Listing(tuple(self._row(number) for number in range(6)))

    def _row(self, number: int) -> Lease:
        behind, silence, moves, kbps = self.incident(self.minute, number)
        now = BEGAN + 60 * self.minute
        earlier_behind = self.incident(max(0, self.minute - 1), number)[0]
        progress = Progress(
            now,
            f"w-{number % 2}",
            "vm",
            moves,
            behind,
            not behind,
            now,
            now - silence,
            now - silence,
            grows=behind > earlier_behind > 0,
        )
        notes = ((PROGRESS_ANNOTATION, progress.note),)
        return Lease(f"s-{number}", owner=progress.owner, weight=round(kbps * 1024), annotations=notes)
