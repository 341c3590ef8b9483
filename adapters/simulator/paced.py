"""A worker that scans the table once a cycle and no more often, whatever the plan asks: the pace of its peers."""

import math

from attrs import evolve

from adapters.worker import Worker
from balancer.watch import Watch


class Paced(Worker):
    """Leases it asked for are still looked at alone, which scans nothing; no bulletins are written."""

    _whole_due = -math.inf

    def _look_and_act(self, now: float, asked: tuple[str, ...] | None) -> None:
        if not self._turns:
            self.watch = Watch()
        super()._look_and_act(now, asked)
        if asked is None:
            self._whole_due = now + self.config.cycle_seconds
        if self._look.keys is None:
            self._look = evolve(self._look, seconds=max(self._look.seconds, self._whole_due - now))
