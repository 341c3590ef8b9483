"""The times in which each process read each shard, and the records that it handed over meanwhile."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping

from attrs import Factory, define

from leasehold_lab.judge.events import ReadingEvent, RecordPlace, RunHistory, worker_of

ENDINGS = frozenset({"lease-lost", "shard-ended", "stopped"})


@define
class Tenure:
    """The reading of a shard by one process, from `initialize` to its end.

    end      infinity while it goes on
    how      the event that ended it, "cut" where the process died or began anew without one, "" while it goes on
    records  in the order in which they were handed over
    finished the places of the records that a handler has finished with, where that was told
    again    the records that were handed over although a handler had finished with them
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
        """The worker whose process it is."""
        return worker_of(self.process)


@define
class TenureHistory:
    """Tenures folded from events; those of one process must come in its own order.

    tenures  in the order they began
    outside  records that a process handed over while it did not read their shard
    """

    tenures: list[Tenure] = Factory(list)
    outside: list[ReadingEvent] = Factory(list)
    _open: dict[tuple[str, str], Tenure] = Factory(dict)

    def add(self, event: ReadingEvent) -> None:
        """Take in one event."""
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
        """A process died then: what it had begun to read it reads no more."""
        for tenure in [each for each in self._open.values() if each.process == process and each.begin <= t]:
            self._close(tenure, t, "cut")

    def owner(self, shard: str) -> str | None:
        """The worker that reads this shard now, as far as events tell."""
        return next((tenure.worker for tenure in self._open.values() if tenure.shard == shard), None)

    def _close(self, tenure: Tenure | None, t: float, how: str) -> None:
        if tenure is not None:
            tenure.end, tenure.how = t, how
            del self._open[tenure.process, tenure.shard]


def reading_of(history: RunHistory) -> TenureHistory:
    """The tenures of a whole history; a process that crashed reads no more from then on."""
    reading = TenureHistory()
    for event in history.events:
        reading.add(event)
    for incident in history.incidents:
        if incident.what == "crash":
            reading.died(incident.subject, incident.t)
    return reading


def by_shard(tenures: Iterable[Tenure]) -> Mapping[str, list[Tenure]]:
    """Each shard's tenures, in the order they began."""
    found: dict[str, list[Tenure]] = defaultdict(list)
    for tenure in sorted(tenures, key=lambda tenure: tenure.begin):
        found[tenure.shard].append(tenure)
    return found
