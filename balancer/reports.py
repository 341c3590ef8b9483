"""Which workers live by what they report of themselves, beside the leases: those of a KCL 3.x leader (M14).

They take nothing: their leader gives them what is free. Until there is something to give, no lease shows them.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping

from attrs import field, frozen

from balancer.model import Lease

SILENT_SECONDS = 60.0
"""A leader gives nothing to who has not reported for so long: twice the usual interval of reports."""


@frozen
class Reports:
    """As one reading of the table shows them.

    leader  who holds the leader's lock, or None
    stamps  by worker: what changes with each of its reports
    """

    leader: str | None = None
    stamps: tuple[tuple[str, str], ...] = ()


NO_REPORTS = Reports()


@frozen
class Trace:
    """What is known of one worker; times are the ends of the first readings that showed it so.

    stamp     of its latest report
    moved_at  when that came; minus infinity: it may be the last of somebody dead
    count     its leases
    since     when it was known to live with so few
    """

    stamp: str
    moved_at: float
    count: int
    since: float


@frozen
class Roll:
    """The fold over whole readings.

    leader  of the last one
    traces  by worker
    empty   before the first
    """

    leader: str | None = None
    traces: Mapping[str, Trace] = field(factory=dict)
    empty: bool = True

    def after(self, reports: Reports, leases: Iterable[Lease], ended: float) -> "Roll":
        """Fold in a reading of the whole table."""
        counts = Counter(lease.owner for lease in leases if not lease.ended) if reports.stamps else Counter()
        traces = {worker: self._trace(worker, stamp, counts[worker], ended) for worker, stamp in reports.stamps}
        return Roll(reports.leader, traces, empty=False)

    def led(self, began: float) -> tuple[tuple[str, float], ...]:
        """The living workers of a living leader, each with the seconds for which it was given nothing more."""
        alive = {worker for worker, trace in self.traces.items() if began - trace.moved_at <= SILENT_SECONDS}
        if self.leader not in alive:
            return ()
        return tuple((worker, max(0.0, began - self.traces[worker].since)) for worker in sorted(alive))

    def _trace(self, worker: str, stamp: str, count: int, ended: float) -> Trace:
        before = self.traces.get(worker)
        if before is None:
            # What the very first reading shows may be years old; what is new since has been written since.
            return Trace(stamp, -math.inf if self.empty else ended, count, ended)
        if before.count and not count:
            # It may have lost them by dying, and its last report be a fresh one: only the next proves it alive.
            return Trace(stamp, -math.inf, count, ended)
        moved_at = before.moved_at if stamp == before.stamp else ended
        grown = count > before.count or (before.moved_at == -math.inf) != (moved_at == -math.inf)
        return Trace(stamp, moved_at, count, ended if grown else before.since)
