"""The renewals of held leases, each lease by itself: a request that stalls delays no other lease.

Rule 1: at most one renewal of a lease is under way, and the next is begun a second after a failure. Rule 2: a lease
that no write confirmed for `lease_seconds` is dropped, because others may own it by then; while a renewal
is under way it is dropped a third later, since nearly all of those end well.
"""

import logging
import math
from collections.abc import Callable, Collection, Iterable
from typing import Protocol, TypeVar

from leasehold.adapters.worker.holding import Holding
from leasehold.adapters.worker.lookout import due_renewals
from leasehold.balancer.actions import Look, Renew
from leasehold.balancer.config import Config
from leasehold.balancer.model import Me
from leasehold.stores.printable import escaped
from leasehold.stores.protocol import StoreError
from leasehold.stores.writes import merged

log = escaped(logging.getLogger("leasehold.renewing"))

RETRY_SECONDS = 1.0

T = TypeVar("T")


class BackgroundMap(Protocol):
    """Begins to apply a function to each item, and may return before that is done; `map` is one."""

    def __call__(self, function: Callable[[T], object], items: Iterable[T], /) -> Iterable[object]:
        """Iterate the result to run the calls, since `map` is lazy; ignore the values."""


class Renewing:
    """The renewals of one worker.

    part  called with each lease that is to be handed over once the running batch is done
    """

    def __init__(self, config: Config, part: Callable[[Holding], None]) -> None:
        self._config, self._part = config, part
        self._begun: set[Holding] = set()

    def begin(self, held: Collection[Holding], now: float, me: Me, look: Look, each: BackgroundMap) -> None:
        """Renew the leases that are due, hand over those asked for, and drop those that others may have taken."""
        resting = tuple(one for one in held if not self._waits(one, now))
        wanted: dict[str, tuple[Holding, Renew | None]] = {one.key: (one, None) for one in resting if one.parting}
        due = due_renewals(resting, now, me, self._config, look)
        wanted |= {holding.key: (holding, action) for holding, action in due}
        for one in held:
            if one.key not in wanted and now > self._drop_at(one):
                self._drop(one)
        self._begun.update(holding for holding, _ in wanted.values())
        list(each(lambda each_of: self._tend(*each_of, look), wanted.values()))

    def due(self, held: Iterable[Holding], now: float) -> float:
        """The time of the next call."""
        return min((self._due(holding, now) for holding in held), default=math.inf)

    def renew(self, holding: Holding, action: Renew, look: Look) -> None:
        """Renew this one now."""
        try:
            holding.renew(merged(action.notes, look.notes))
        except StoreError as fault:
            log.warning("lease %s could not be renewed: %s", holding.key, fault)

    def _waits(self, holding: Holding, now: float) -> bool:
        failed = holding.renewed > max(now - RETRY_SECONDS, holding.confirmed)
        return failed or holding in self._begun

    def _due(self, holding: Holding, now: float) -> float:
        if self._waits(holding, now):
            return min(now + RETRY_SECONDS, self._drop_at(holding))
        return holding.confirmed + self._config.renew_seconds

    def _drop_at(self, holding: Holding) -> float:
        return holding.confirmed + self._config.lease_seconds * (4 / 3 if holding in self._begun else 1)

    def _tend(self, holding: Holding, action: Renew | None, look: Look) -> None:
        try:
            if action is not None:
                self.renew(holding, action, look)
            if holding.expired:
                self._drop(holding)
            elif holding.parting and not holding.lost.is_set():
                self._part(holding)
        finally:
            self._begun.discard(holding)

    def _drop(self, holding: Holding) -> None:
        # Another worker may own the lease by now, so no more of its records may be handled here.
        holding.drop(f"dropped, not confirmed for {self._config.lease_seconds:g} s: others may have it")
