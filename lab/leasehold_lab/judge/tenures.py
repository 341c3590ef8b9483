"""Folds events into tenures: the periods in which a process read a shard, with the records that it dispatched."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping

from attrs import Factory, define

from leasehold_lab.judge.events import ReadingEvent, RecordPlace, RunHistory, worker_of

ENDINGS = frozenset({"lease-lost", "shard-ended", "stopped"})


@define
class Tenure:
    """The reading of a shard by one process, from `initialize` to its end.

    Attributes:
        end: Infinity while the tenure continues.
        how: The event that ended it, "cut" if the process died or initialized again first, or "" while it continues.
        records: In the order of dispatch.
        finished: The places of the records that a handler has finished with, if that was recorded.
        again: Records dispatched although a handler had finished with them.
    """

    process: str
    shard: str
    begin: float
    end: float = math.inf
    how: str = ""
    records: list[ReadingEvent] = Factory(list)
    finished: set[RecordPlace] = Factory(set)
    again: list[ReadingEvent] = Factory(list)

    @property
    def worker(self) -> str:
        """The worker that the process belongs to."""
        return worker_of(self.process)


@define
class TenureHistory:
    """Tenures folded from events. The events of one process must come in their own order.

    Attributes:
        tenures: In the order they began.
        outside: Records that a process dispatched while it did not read their shard.
    """

    tenures: list[Tenure] = Factory(list)
    outside: list[ReadingEvent] = Factory(list)
    _open: dict[tuple[str, str], Tenure] = Factory(dict)

    def add(self, event: ReadingEvent) -> None:
        """Add one event."""
        place = (event.process, event.shard)
        tenure = self._open.get(place)
        if event.event == "initialize":
            self._close(tenure, event.t, "cut")
            self._open[place] = Tenure(event.process, event.shard, event.t)
            self.tenures.append(self._open[place])
        elif event.event == "record":
            (self.outside if tenure is None else tenure.records).append(event)
            if tenure is not None and event.place in tenure.finished:
                tenure.again.append(event)
        elif event.event in {"finished", "dead-lettered"} and tenure is not None:
            tenure.finished.add(event.place)
        elif event.event in ENDINGS:
            self._close(tenure, event.t, event.event)

    def died(self, process: str, t: float) -> None:
        """End all tenures of a process that died at `t`."""
        for tenure in [tenure for tenure in self._open.values() if tenure.process == process and tenure.begin <= t]:
            self._close(tenure, t, "cut")

    def owner(self, shard: str) -> str | None:
        """Return the worker that reads this shard now, according to the events."""
        return next((tenure.worker for tenure in self._open.values() if tenure.shard == shard), None)

    def _close(self, tenure: Tenure | None, t: float, how: str) -> None:
        if tenure is not None:
            tenure.end, tenure.how = t, how
            del self._open[tenure.process, tenure.shard]


def reading_of(history: RunHistory) -> TenureHistory:
    """Return the tenures of a whole history. A process that crashes stops reading at that moment."""
    reading = TenureHistory()
    for event in history.events:
        reading.add(event)
    for incident in history.incidents:
        if incident.what == "crash":
            reading.died(incident.subject, incident.t)
    return reading


def by_shard(tenures: Iterable[Tenure]) -> Mapping[str, list[Tenure]]:
    """Group tenures by shard, in the order they began."""
    tenures_by_shard: dict[str, list[Tenure]] = defaultdict(list)
    for tenure in sorted(tenures, key=lambda tenure: tenure.begin):
        tenures_by_shard[tenure.shard].append(tenure)
    return tenures_by_shard
