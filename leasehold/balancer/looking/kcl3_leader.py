"""Some workers live by what they report of themselves, beside the leases: those of a KCL 3.x leader (M14).

They take nothing: their leader gives them what is free. Until there is something to give, no lease shows them.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping

from attrs import field, frozen

from leasehold.balancer.model import Lease

REPORT_SECONDS = 35.0
"""A worker reports every 30 s as a rule; one that has not for so long has missed a report, or ended."""
SILENT_SECONDS = 60.0
"""A leader gives nothing to a worker that has not reported for so long: twice the usual interval of reports."""


@frozen
class Reports:
    """The reports of workers, as one reading of the table shows them.

    leader  the worker that holds the leader's lock, or None
    stamps  by worker: a text that changes with each of its reports
    """

    leader: str | None = None
    stamps: tuple[tuple[str, str], ...] = ()


NO_REPORTS = Reports()


@frozen
class ReportTrack:
    """The trace holds all that is known of one worker; times are the ends of the first readings that showed it so.

    stamp     of its latest report
    stood_at  when it was first seen
    moved_at  when that came; minus infinity: it may be the last of somebody dead
    count     its leases
    since     when it was known to live with so few
    """

    stamp: str
    stood_at: float
    moved_at: float
    count: int
    since: float


@frozen
class WorkerReports:
    """The fold over whole readings.

    leader  of the last one
    traces  by worker
    empty   before the first
    """

    leader: str | None = None
    traces: Mapping[str, ReportTrack] = field(factory=dict)
    empty: bool = True

    def after(self, reports: Reports, leases: Iterable[Lease], ended: float) -> "WorkerReports":
        """A reading of the whole table is folded in."""
        counts = Counter(lease.owner for lease in leases if not lease.ended) if reports.stamps else Counter()
        traces = {worker: self._trace(worker, stamp, counts[worker], ended) for worker, stamp in reports.stamps}
        return WorkerReports(reports.leader, traces, empty=False)

    def led(self, began: float) -> tuple[tuple[str, float], ...]:
        """The living workers of a living leader, each with the seconds for which it was given nothing more.

        Infinite where somebody gone may be taken for alive, by us or by the leader, who would give that one what it
        finds too much with the others. So it is while the report of a worker that ended is young, and then until each
        worker without leases has reported once more: nothing else shows that it lives. So it is, too, when another one
        without leases has come.
        """
        alive = {worker: trace for worker, trace in self.traces.items() if began - trace.moved_at <= REPORT_SECONDS}
        if self.leader not in alive:
            return ()
        forgotten = [trace.stood_at + SILENT_SECONDS for worker, trace in self.traces.items() if worker not in alive]
        calm = max(forgotten, default=-math.inf)
        idle = [trace for trace in alive.values() if not trace.count]
        last = max([calm, *(trace.since for trace in idle)])
        certain = began >= calm and all(trace.moved_at >= last for trace in idle)
        return tuple(
            (worker, max(0.0, began - max(calm, trace.since)) if certain else math.inf)
            for worker, trace in sorted(alive.items())
        )

    def _trace(self, worker: str, stamp: str, count: int, ended: float) -> ReportTrack:
        """The trace of a worker after another reading."""
        before = self.traces.get(worker)
        if before is None:
            # A report in the very first reading may be years old; one that is new since was written since.
            return ReportTrack(stamp, ended, -math.inf if self.empty else ended, count, ended)
        stood_at = before.stood_at if stamp == before.stamp else ended
        if before.count and not count:
            # A worker may have lost its leases by dying just after a report: only the next report proves it alive.
            return ReportTrack(stamp, stood_at, -math.inf, count, ended)
        moved_at = before.moved_at if stamp == before.stamp else ended
        grown = count > before.count or before.moved_at == -math.inf
        return ReportTrack(stamp, stood_at, moved_at, count, ended if grown else before.since)
