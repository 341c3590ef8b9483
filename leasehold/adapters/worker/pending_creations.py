"""Delays the creation of leases while another living worker may know better where they start (L13).

A lease without a row may be new. Its row may also have been deleted. In that case the owner, or another worker that has
read the row, will create the row again. Therefore each creation is delayed by a time that depends on its rule. If the
lease starts at LATEST, the position of LATEST is determined when the lease is first found to be missing. Otherwise,
records that arrive during the delay would be skipped.
"""

import logging
from collections.abc import Callable, Collection

from attrs import evolve

from leasehold.adapters.sources.protocol import turn_foreign_errors_into_unavailable
from leasehold.adapters.worker.annotations import latest_annotations
from leasehold.adapters.worker.handoffs import ParallelMap
from leasehold.adapters.worker.renewing import RETRY_SECONDS
from leasehold.balancer.actions import Action, Create
from leasehold.balancer.config import Config
from leasehold.balancer.model import LATEST, TRIM_HORIZON, Lease, Position
from leasehold.errors import SourceError
from leasehold.stores.printable import escaped

log = escaped(logging.getLogger("leasehold.worker"))


class PendingCreations:
    """The leases that a worker must create, each with the time since which it has been missing.

    Args:
        config: The configuration of the worker.
        latest: Returns the position of the tip of a shard. May raise SourceError.
    """

    def __init__(self, config: Config, latest: Callable[[Lease], Position]) -> None:
        self._config, self._tip_of = config, latest
        self._missing_since: dict[str, float] = {}
        self._latest: dict[str, Position] = {}

    @property
    def keys(self) -> Collection[str]:
        """The keys of the leases that are missing."""
        return self._missing_since.keys()

    def table_silent(self) -> None:
        """Restart all waits. While the table does not respond, no owner can recreate its row."""
        self._missing_since.clear()

    def held_back(
        self,
        actions: Collection[Action],
        known_leases: Collection[Lease],
        dropped: Collection[str],
        now: float,
        each: ParallelMap,
    ) -> dict[Action, float]:
        """Return the creations that must wait, and for how many seconds each.

        Args:
            actions: The planned actions.
            known_leases: The leases in the table, and those whose rows are gone.
            dropped: The keys of leases that this worker has dropped, which have no owner to recreate their rows.
            now: The time by the worker's clock.
            each: Applies a function to each item.
        """
        streams = {lease.stream for lease in known_leases}
        waits = {
            action: seconds
            for action in actions
            if isinstance(action, Create) and (seconds := self._wait(action, streams, dropped)) is not None
        }
        self._missing_since = {
            creation.lease.key: self._missing_since.get(creation.lease.key, now) for creation in waits
        }
        # Determine the position of LATEST before the wait, so that records which arrive meanwhile are not skipped.
        unpinned = [creation.lease for creation in waits if self._unpinned(creation)]
        pins = zip(unpinned, each(self._latest_of, unpinned), strict=True)
        known_pins = {key: pin for key, pin in self._latest.items() if key in self._missing_since}
        self._latest = known_pins | {lease.key: pin for lease, pin in pins if pin is not None}
        if unpinned and not streams:
            seconds = max(waits.values())
            log.info(
                "the stream has no leases yet; they are created in %.1f s, and no record is skipped meanwhile",
                seconds,
            )
        remaining_waits = dict[Action, float]()
        for creation, seconds in waits.items():
            seconds_left = self._missing_since[creation.lease.key] + seconds - now
            remaining_waits[creation] = max(seconds_left, RETRY_SECONDS) if self._unpinned(creation) else seconds_left
        return {creation: seconds for creation, seconds in remaining_waits.items() if seconds > 0}

    def pinned(self, action: Action) -> Action:
        """Add to a creation the position that LATEST had when the lease was first found to be missing."""
        pin = self._latest.get(action.lease.key)
        if not isinstance(action, Create) or action.lease.checkpoint != LATEST or pin is None:
            return action
        return evolve(action, lease=evolve(action.lease, annotations=latest_annotations(pin)))

    def _wait(self, creation: Create, streams: Collection[str], dropped: Collection[str]) -> float | None:
        """Return for how long a lease must be missing before it is created, or None if it need not wait."""
        config, lease = self._config, creation.lease
        match creation.rule:
            # The owner of a deleted row recreates it at its next renewal. A lease that this worker has dropped has no
            # owner to recreate its row.
            case "L13":
                return 0.0 if lease.key in dropped else config.renew_seconds
            # A lease that this worker has never seen waits until every living worker has read the table, because one of
            # them may know it.
            case "L6":
                return config.renew_seconds + config.cycle_seconds
            case "L4" | "L5" as rule:
                # If there is no lease of this stream, either the group is new or its table was emptied. To distinguish
                # the two cases, wait: if the table was emptied, the first owner that renews recreates its row.
                stream_has_leases = lease.stream in streams
                # At TRIM_HORIZON no wait is needed, because no record can be skipped and an owner takes over a row that
                # was created again (`Holding`). At LATEST a wait is needed, because another worker may still be
                # creating the leases of a new group.
                if lease.checkpoint == TRIM_HORIZON and not (
                    stream_has_leases and (rule == "L5" or config.initial_position == LATEST)
                ):
                    return None
                return config.renew_seconds + (config.cycle_seconds if stream_has_leases else RETRY_SECONDS)
            case _:
                return None

    def _unpinned(self, creation: Action) -> bool:
        return creation.lease.checkpoint == LATEST and creation.lease.key not in self._latest

    def _latest_of(self, lease: Lease) -> Position | None:
        """Return the position of LATEST for this lease, or None if the source cannot return it now.

        A shard that does not respond delays only its own lease.
        """
        try:
            with turn_foreign_errors_into_unavailable():
                return self._tip_of(lease)
        except SourceError as fault:
            log.warning("lease %s is not created yet, because the position of LATEST is unknown: %s", lease.key, fault)
            return None
