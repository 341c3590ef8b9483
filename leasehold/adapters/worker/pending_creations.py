"""Delays the creation of leases while another living worker may know a later position at which they start (L13).

A lease without a row may be new, or its row may have been deleted. If the row was deleted, the lease's owner, or
another worker that has read the row, will create it again. Therefore, each creation is delayed by a time that depends
on its rule. If the lease starts at LATEST, the position of LATEST is determined when the lease is first found to be
missing. Otherwise, records that arrive during the delay would be skipped.
"""

import logging
from collections.abc import Callable, Collection

from attrs import evolve

from leasehold.adapters.sources.protocol import translate_foreign_errors
from leasehold.adapters.worker.annotations import latest_annotations
from leasehold.adapters.worker.handoffs import ParallelMap
from leasehold.adapters.worker.renewing import RETRY_SECONDS
from leasehold.balancer.actions import Action, Create
from leasehold.balancer.config import Config
from leasehold.balancer.model import LATEST, TRIM_HORIZON, Lease, Position
from leasehold.errors import SourceError
from leasehold.stores.printable import make_safe_logger

log = make_safe_logger(logging.getLogger("leasehold.worker"))


class PendingCreations:
    """Keeps the leases that a worker must create, and when each of them was first found to be missing.

    Args:
        config: The configuration of the worker.
        latest: Returns the position of the tip of a shard. May raise SourceError.
    """

    def __init__(self, config: Config, latest: Callable[[Lease], Position]) -> None:
        self._config, self._tip_of = config, latest
        self._missing_since: dict[str, float] = {}
        self._latest_positions: dict[str, Position] = {}

    @property
    def keys(self) -> Collection[str]:
        """The keys of the leases that are missing."""
        return self._missing_since.keys()

    def restart_waits(self) -> None:
        """Restart all waits, because no owner could recreate its row while the table did not respond."""
        self._missing_since.clear()

    def creations_to_delay(
        self,
        actions: Collection[Action],
        known_leases: Collection[Lease],
        dropped_keys: Collection[str],
        now: float,
        parallel_map: ParallelMap,
    ) -> dict[Action, float]:
        """Return the creations that must wait, each with the number of seconds to wait.

        Args:
            actions: The planned actions.
            known_leases: The leases in the table, and those whose rows are gone.
            dropped_keys: The keys of leases that this worker has dropped. They have no owner that could recreate their
                rows.
            now: The time by the worker's clock.
            parallel_map: Applies a function to each item.
        """
        streams = {lease.stream for lease in known_leases}
        wait_seconds = {
            action: seconds
            for action in actions
            if isinstance(action, Create)
            and (seconds := self._creation_wait(action, streams, dropped_keys)) is not None
        }
        self._missing_since = {
            creation.lease.key: self._missing_since.get(creation.lease.key, now) for creation in wait_seconds
        }
        # Determine the position of LATEST before the wait, so that records which arrive meanwhile are not skipped.
        leases_at_latest = [creation.lease for creation in wait_seconds if self._needs_latest(creation)]
        latest_positions = zip(leases_at_latest, parallel_map(self._latest_of, leases_at_latest), strict=True)
        known_positions = {
            key: position for key, position in self._latest_positions.items() if key in self._missing_since
        }
        self._latest_positions = known_positions | {
            lease.key: position for lease, position in latest_positions if position is not None
        }
        if leases_at_latest and not streams:
            seconds = max(wait_seconds.values())
            log.info(
                "the stream has no leases yet; they are created in %.1f s, and no record is skipped meanwhile",
                seconds,
            )
        remaining_waits = dict[Action, float]()
        for creation, seconds in wait_seconds.items():
            seconds_left = self._missing_since[creation.lease.key] + seconds - now
            remaining_waits[creation] = (
                max(seconds_left, RETRY_SECONDS) if self._needs_latest(creation) else seconds_left
            )
        return {creation: seconds for creation, seconds in remaining_waits.items() if seconds > 0}

    def with_latest_position(self, action: Action) -> Action:
        """Add the position of LATEST to a creation, as determined when the lease was first found to be missing."""
        latest_position = self._latest_positions.get(action.lease.key)
        if not isinstance(action, Create) or action.lease.checkpoint != LATEST or latest_position is None:
            return action
        return evolve(action, lease=evolve(action.lease, annotations=latest_annotations(latest_position)))

    def _creation_wait(self, creation: Create, streams: Collection[str], dropped_keys: Collection[str]) -> float | None:
        """Return for how many seconds a lease must be missing before it is created, or None if it need not wait."""
        config, lease = self._config, creation.lease
        match creation.rule:
            # The owner of a deleted row recreates the row at its next renewal. A lease that this worker has dropped has
            # no owner, so no other worker would recreate the row.
            case "L13":
                return 0.0 if lease.key in dropped_keys else config.renew_seconds
            # If this worker has never seen the lease, wait until every living worker has read the table, because one of
            # them may know the lease.
            case "L6":
                return config.renew_seconds + config.cycle_seconds
            case "L4" | "L5" as rule:
                # If there is no lease of this stream, either the group is new or its table was emptied. The wait
                # distinguishes the two cases, because if the table was emptied, the next owner that renews a lease
                # recreates its row.
                stream_has_leases = lease.stream in streams
                # A lease that starts at TRIM_HORIZON need not wait, because no record can be skipped, and if another
                # worker recreates an owner's row, the owner takes over the new row (`Holding`). A lease that starts at
                # LATEST must wait, because another worker may still be creating the leases of a new group.
                if lease.checkpoint == TRIM_HORIZON and not (
                    stream_has_leases and (rule == "L5" or config.initial_position == LATEST)
                ):
                    return None
                return config.renew_seconds + (config.cycle_seconds if stream_has_leases else RETRY_SECONDS)
            case _:
                return None

    def _needs_latest(self, creation: Action) -> bool:
        return creation.lease.checkpoint == LATEST and creation.lease.key not in self._latest_positions

    def _latest_of(self, lease: Lease) -> Position | None:
        """Return the position of LATEST for this lease, or None if the source cannot return it now.

        An error is only logged, so that a shard that does not respond delays only its own lease.
        """
        try:
            with translate_foreign_errors():
                return self._tip_of(lease)
        except SourceError as fault:
            log.warning("lease %s is not created yet, because the position of LATEST is unknown: %s", lease.key, fault)
            return None
