"""A worker that scans the table once a cycle and no more often, whatever the plan asks: the pace of its peers."""

from adapters.worker import Worker


class Paced(Worker):
    """Leases it asked for are still looked at alone, which scans nothing."""

    def _look_and_act(self, now: float) -> float:
        seconds = super()._look_and_act(now)
        return max(seconds, self._whole_due - now) if self._look.keys is None else seconds
