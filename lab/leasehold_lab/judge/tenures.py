"""Computes tenures from events. A tenure is a period in which one process reads a shard and dispatches its records."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping

from attrs import Factory, define

from leasehold_lab.judge.events import ReadingEvent, RecordPlace, RunHistory, parse_worker_id

ENDINGS = frozenset({"lease-lost", "shard-ended", "stopped"})


@define
class Tenure:
    """A period in which one process reads a shard, from the event "initialize" to the event that ends the reading.

    Attributes:
        end: The end of the tenure, or infinity while it continues.
        how: The event that ended the tenure, or "" while it continues. It is "cut" if there was no such event before
            the process died or initialized the shard again.
        records: The records in the order of their dispatch.
        finished: The places of the records that a handler has finished, if this was recorded.
        again: The records that were dispatched although a handler had finished with them before.
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
        """The id of the process's worker."""
        return parse_worker_id(self.process)


@define
class TenureHistory:
    """The tenures of a run. The events of each process must be added in the order in which they occurred.

    Attributes:
        tenures: All tenures, in the order in which their first events were added.
        outside: The records that a process dispatched while it was not reading their shard.
    """

    tenures: list[Tenure] = Factory(list)
    outside: list[ReadingEvent] = Factory(list)
    _open: dict[tuple[str, str], Tenure] = Factory(dict)

    def add_event(self, event: ReadingEvent) -> None:
        """Add an event to the tenure that it belongs to, and start or end the tenure if the event does so."""
        key = (event.process, event.shard)
        tenure = self._open.get(key)
        if event.event == "initialize":
            self._close_tenure(tenure, event.t, "cut")
            self._open[key] = Tenure(event.process, event.shard, event.t)
            self.tenures.append(self._open[key])
        elif event.event == "record":
            (self.outside if tenure is None else tenure.records).append(event)
            if tenure is not None and event.place in tenure.finished:
                tenure.again.append(event)
        elif event.event in {"finished", "dead-lettered"} and tenure is not None:
            tenure.finished.add(event.place)
        elif event.event in ENDINGS:
            self._close_tenure(tenure, event.t, event.event)

    def end_tenures_of_dead_process(self, process: str, end_time: float) -> None:
        """End all tenures of a process that died at time `end_time`."""
        for tenure in [
            tenure for tenure in self._open.values() if tenure.process == process and tenure.begin <= end_time
        ]:
            self._close_tenure(tenure, end_time, "cut")

    def find_reader(self, shard: str) -> str | None:
        """Return the worker that is reading this shard according to the events so far, or None if there is none."""
        return next((tenure.worker for tenure in self._open.values() if tenure.shard == shard), None)

    def _close_tenure(self, tenure: Tenure | None, end_time: float, end_kind: str) -> None:
        if tenure is not None:
            tenure.end, tenure.how = end_time, end_kind
            del self._open[tenure.process, tenure.shard]


def compute_tenures(history: RunHistory) -> TenureHistory:
    """Return the tenures in a history. If a process crashes, its tenures end at that time."""
    tenure_history = TenureHistory()
    for event in history.events:
        tenure_history.add_event(event)
    for incident in history.incidents:
        if incident.what == "crash":
            tenure_history.end_tenures_of_dead_process(incident.subject, incident.t)
    return tenure_history


def group_by_shard(tenures: Iterable[Tenure]) -> Mapping[str, list[Tenure]]:
    """Group the tenures by shard, in order of their starts."""
    tenures_by_shard: dict[str, list[Tenure]] = defaultdict(list)
    for tenure in sorted(tenures, key=lambda tenure: tenure.begin):
        tenures_by_shard[tenure.shard].append(tenure)
    return tenures_by_shard
