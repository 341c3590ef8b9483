"""A worker that scans the table once a cycle at most, whatever the plan asks, as workers of other libraries do."""

import math

from attrs import evolve

from leasehold.adapters.worker.handoffs import ParallelMap
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.looking.schedule import until_late_judged
from leasehold.balancer.looking.watch import Watch


class Paced(Worker):
    """Leases it asked for are still looked at alone, which scans nothing; no bulletins are written.

    Only to learn whether an owner has died may it scan once more (C16).
    """

    _whole_due = -math.inf

    def _look_and_act(self, now: float, asked: tuple[str, ...] | None, each: ParallelMap) -> None:
        if not self._turns:
            self.watch = Watch()
        super()._look_and_act(now, asked, each)
        if asked is None:
            seen = (sighting.lease for sighting in self.watch.sightings.values())
            self._whole_due = now + min(self.config.cycle_seconds, until_late_judged(seen, self._asking(), self.config))
        if self._look.keys is None:
            self._look = evolve(self._look, seconds=max(self._look.seconds, self._whole_due - now))
