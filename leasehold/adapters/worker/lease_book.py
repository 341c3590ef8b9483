"""Keeps all leases that one worker holds, has requested or given away, or leaves to other workers for now.

| what | where |
|---|---|
| held now, held before, or in doubt after a write without a response | `holdings` |
| requested from other workers, or given away and not yet claimed | `handoffs` |
| left to other workers for a while, because this worker cannot read them | `leave_alone`, `release_silent_leases` |
| released although their readers are still blocked in a call of the source (D6) | `leave_stuck` |

When a lease is taken, its request is forgotten. When a lease is given away, it is tracked until its next owner has
claimed it. `Worker` decides when to read the table, and carries out the plans.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from attrs import frozen

from leasehold.adapters.worker.annotations import Identity
from leasehold.adapters.worker.handoffs import Handoffs, ParallelMap
from leasehold.adapters.worker.holding import Holding
from leasehold.adapters.worker.holdings import Cooldown, Holdings
from leasehold.adapters.worker.silence import StreamSilence
from leasehold.balancer.actions import Action
from leasehold.balancer.config import Config
from leasehold.balancer.contradictions import INCARNATION
from leasehold.balancer.model import Lease
from leasehold.errors import StoreError
from leasehold.stores.printable import make_safe_logger
from leasehold.stores.protocol import Store

log = make_safe_logger(logging.getLogger("leasehold.worker"))


@frozen
class LeaseEvents:
    """The callbacks by which a `LeaseBook` notifies its worker.

    Attributes:
        lease_taken: Called with each lease that this worker has taken.
        lease_given: Called with the current time after a lease was given to its next owner.
        lease_taken_back: Called after a lease was taken back because its next owner did not claim it.
        lease_gone: Called with each lease that was lost, given away or released.
        row_recreated: Called with a description if a row was deleted while this worker owned its lease.
        release: Called with each lease that must be released once its running batch is done.
    """

    lease_taken: Callable[[Holding], None]
    lease_given: Callable[[float], None]
    lease_taken_back: Callable[[], None]
    lease_gone: Callable[[Holding], None]
    row_recreated: Callable[[str], None]
    release: Callable[[Holding], None]


class LeaseBook:
    """Keeps the leases of one worker.

    Args:
        store: The lease table.
        identity: The worker's id and the id of its running process.
        config: The worker's configuration.
        events: The worker's callbacks.
        clock: A monotonic clock, in seconds.
        lock: Creates a lock. Each lease has one, which serializes its writes.

    Attributes:
        holdings: The leases that are held, were held, or are in doubt after a write without a response.
        handoffs: The open requests, and the leases that were given away.
    """

    def __init__(
        self,
        store: Store,
        identity: Identity,
        config: Config,
        events: LeaseEvents,
        *,
        clock: Callable[[], float],
        lock: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._config, self._events, self._clock = config, events, clock
        self.holdings = Holdings(
            store,
            identity,
            clock=clock,
            lease_seconds=config.lease_seconds,
            # Other workers may read our last write only one cycle after it was made, and may notice that the lease has
            # expired one cycle later than we do. Hence the two cycles.
            rest_seconds=config.rules.expires_above(config.lease_seconds) + 2 * config.cycle_seconds,
            lease_taken=self._lease_taken,
            lease_given=self._lease_given,
            lease_gone=events.lease_gone,
            row_recreated=events.row_recreated,
            lock=lock,
        )
        self.handoffs = Handoffs(
            store,
            identity.worker,
            clock=clock,
            lease_seconds=config.lease_seconds,
            hold_lease=self._lease_taken_back,
            mark_unconfirmed=self.holdings.mark_unconfirmed,
        )
        self._cooldown = Cooldown()
        self._stream_silence = StreamSilence(identity.worker, config)
        self._stuck_holdings: dict[str, Holding] = {}

    # Leases that are held, requested or given away

    def _lease_taken(self, holding: Holding) -> None:
        self.handoffs.forget_request(holding.key)
        self._events.lease_taken(holding)

    def _lease_given(self, lease: Lease, now: float) -> None:
        self.handoffs.note_given(lease, now)
        self._events.lease_given(now)

    def _lease_taken_back(self, lease: Lease, write_began: float) -> None:
        self.holdings.hold(lease, write_began)
        self._events.lease_taken_back()

    # Leases that are left to other workers

    def leave_alone(self, key: str, seconds: float) -> None:
        """Do not take this lease for the next `seconds`, because another worker may be able to read its shard."""
        holding, now = self.holdings.get(key), self._clock()
        lease = self.holdings.released.get(key) if holding is None else holding.lease
        if holding is not None:
            holding.progress.put_aside(seconds, now)
        self._cooldown.put(key, self._clock() + seconds, None if lease is None else lease.annotation(INCARNATION))

    def without_excluded(self, actions: tuple[Action, ...], now: float) -> tuple[Action, ...]:
        """Return the actions, except those that take a lease which this worker leaves to other workers for now."""
        return self._stream_silence.without(self._cooldown.without(actions, now), now)

    def silence_due(self, now: float) -> float:
        """Return when a full read is needed because a stream is silent, or infinity if no stream is silent (D1)."""
        return self._stream_silence.due(self.holdings.all, now)

    def is_stream_silent(self, now: float) -> bool:
        """Return whether a stream has been silent for so long that a listing of its shards would probably fail, too."""
        return self._stream_silence.is_silent(self.holdings.all, now)

    def release_silent_leases(self, leases: Sequence[Lease], now: float, parallel_map: ParallelMap) -> None:
        """Release leases whose shards do not respond to this worker but may respond to others (D2 to D7).

        Args:
            leases: All leases, as just read.
            now: The time by the worker's clock.
            parallel_map: Applies a function to each item.
        """
        config = self._config
        for key, holding in list(self._stuck_holdings.items()):
            if holding.progress.call_began_at is None:
                del self._stuck_holdings[key]
            else:  # the lease's reader is still blocked in that call (D6)
                self._cooldown.put(key, now + config.cycle_seconds + config.lease_seconds)
        for silent_lease in self._stream_silence.find_leases_to_leave(leases, self.holdings.all, now):
            silent_lease.holding.progress.put_aside(silent_lease.seconds, now)
            # Give other workers the first chance to take the lease. This worker may take the lease again once D5 and
            # `_stuck_holdings` allow it.
            self._cooldown.put(silent_lease.holding.key, now + config.lease_seconds)
            silent_lease.holding.ask_release(silent_lease.to)
            self._events.release(silent_lease.holding)
            silent_lease.holding.progress.abandon_call()  # a reader that waits for a call cannot release the lease
        self.leave_stuck(now, config.lease_seconds, parallel_map)

    def leave_stuck(self, now: float, seconds: float, each: ParallelMap) -> None:
        """Release the leases that are being given up and whose readers have waited this long for a call of the source.

        The reader of such a lease cannot release the lease itself. When its call returns, the reader delivers nothing.
        """

        def release(holding: Holding) -> None:
            self._stuck_holdings[holding.key] = holding
            try:
                holding.release()
            except StoreError as fault:
                log.warning("lease %s is not released yet: %s", holding.key, fault)

        def is_stuck(holding: Holding) -> bool:
            called_at = holding.progress.call_began_at
            return holding.progress.call_abandoned or (
                called_at is not None and now - called_at >= seconds and holding.progress.abandon_call()
            )

        list(each(release, [holding for holding in self.holdings.all if holding.releasing and is_stuck(holding)]))
