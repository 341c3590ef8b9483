"""Who read which shard from when to when, and what they handed over meanwhile."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping

from attrs import Factory, define

from adapters.history.told import Deed, Event

ENDINGS = frozenset({"lease-lost", "shard-ended", "stopped"})


@define
class Tenure:
    """One worker's reading of one shard, from `initialize` to its end.

    end      infinity while it goes on
    how      the event that ended it, "cut" where the worker died or began anew without one, "" while it goes on
    records  in the order in which they were handed over
    """

    worker: str
    shard: str
    begin: float
    end: float = math.inf
    how: str = ""
    records: list[Event] = Factory(list)


@define
class Reading:
    """Tenures folded from events; those of one worker must come in its own order.

    tenures  in the order they began
    outside  records that a worker handed over while it did not read their shard
    """

    tenures: list[Tenure] = Factory(list)
    outside: list[Event] = Factory(list)
    _open: dict[tuple[str, str], Tenure] = Factory(dict)

    def add(self, event: Event) -> None:
        """Take in one event."""
        place = (event.worker, event.shard)
        tenure = self._open.get(place)
        if event.event == "initialize":
            self._close(tenure, event.t, "cut")
            self._open[place] = Tenure(event.worker, event.shard, event.t)
            self.tenures.append(self._open[place])
        elif event.event == "record":
            (self.outside if tenure is None else tenure.records).append(event)
        elif event.event in ENDINGS:
            self._close(tenure, event.t, event.event)

    def died(self, worker: str, t: float) -> None:
        """A worker was killed then: it reads no more."""
        for tenure in [tenure for tenure in self._open.values() if tenure.worker == worker]:
            self._close(tenure, t, "cut")

    def owner(self, shard: str) -> str | None:
        """Who reads this shard now, as far as told."""
        return next((tenure.worker for tenure in self._open.values() if tenure.shard == shard), None)

    def _close(self, tenure: Tenure | None, t: float, how: str) -> None:
        if tenure is not None:
            tenure.end, tenure.how = t, how
            del self._open[tenure.worker, tenure.shard]


def reading_of(events: Iterable[Event], deeds: Iterable[Deed] = ()) -> Reading:
    """The tenures of a whole history; whoever was killed reads no more from then on."""
    reading = Reading()
    for event in events:
        reading.add(event)
    for deed in deeds:
        if deed.what == "kill":
            reading.died(deed.subject, deed.t)
    return reading


def by_shard(tenures: Iterable[Tenure]) -> Mapping[str, list[Tenure]]:
    """Each shard's tenures, in the order they began."""
    found: dict[str, list[Tenure]] = defaultdict(list)
    for tenure in sorted(tenures, key=lambda tenure: tenure.begin):
        found[tenure.shard].append(tenure)
    return found
