"""The leases that this worker leaves to others for a while, because it could not read them."""

from leasehold.balancer.actions import Action, Claim, RequestHandoff, Steal


class Bench:
    """Keys of leases, each with the time until which this worker does not take it."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}

    def put(self, key: str, until: float) -> None:
        """Do not take this lease before then."""
        self._until[key] = until

    def without(self, actions: tuple[Action, ...], now: float) -> tuple[Action, ...]:
        """The actions but those that would take such a lease.

        They must not count as planned: the lease is open to others, and the bulletin of a lookout calls them for it.
        """
        return tuple(action for action in actions if not self._spares(action, now))

    def _spares(self, action: Action, now: float) -> bool:
        takes = isinstance(action, Claim | Steal | RequestHandoff)
        return takes and self._until.get(action.lease.key, now) > now
