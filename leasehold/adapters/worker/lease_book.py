"""Tracks in one place all leases that concern a worker.

| what | where |
|---|---|
| held now, held before, in doubt after a write without a response | `holdings` |
| requested from others, given and not yet claimed | `handoffs` |
| left to others for a while, because they cannot be read here | `leave_alone`, `leave_silent` |
| released although a call of the source still occupies the shard here (D6) | `leave_stuck` |

When a lease is taken, the request for it is forgotten. When a lease is given away, it is watched until its next owner
has claimed it. `Worker` decides when to read the table, and carries out the plans.
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
from leasehold.stores.printable import escaped
from leasehold.stores.protocol import Store

log = escaped(logging.getLogger("leasehold.worker"))


@frozen
class LeaseEvents:
    """The callbacks by which a `LeaseBook` notifies its worker.

    Attributes:
        lease_taken: Called for each lease that this worker has taken.
        lease_given: Called with the current time after a lease was given to its next owner.
        lease_taken_back: Called after a lease was taken back because its next owner did not claim it.
        lease_gone: Called for each lease that is lost, given or released.
        row_recreated: Called with a description of what happened to a row that was deleted while this worker owned its
            lease.
        release: Called with each lease that is to be released once its running batch is done.
    """

    lease_taken: Callable[[Holding], None]
    lease_given: Callable[[float], None]
    lease_taken_back: Callable[[], None]
    lease_gone: Callable[[Holding], None]
    row_recreated: Callable[[str], None]
    release: Callable[[Holding], None]


class LeaseBook:
    """The leases of one worker.

    Args:
        store: The lease table.
        identity: The worker and its running process.
        config: The worker's configuration.
        events: The worker's callbacks.
        clock: A monotonic clock, in seconds.
        lock: Makes the lock that serializes the writes of one lease.

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
            # Other workers may read our last write one cycle late, and may notice the expiry of the lease another cycle
            # late.
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
            hold=self._lease_taken_back,
            doubt=self.holdings.mark_unconfirmed,
        )
        self._cooldown = Cooldown()
        self._silence = StreamSilence(identity.worker, config)
        self._stuck: dict[str, Holding] = {}

    # Held, requested and given

    def _lease_taken(self, holding: Holding) -> None:
        self.handoffs.forget_request(holding.key)
        self._events.lease_taken(holding)

    def _lease_given(self, lease: Lease, now: float) -> None:
        self.handoffs.note_given(lease, now)
        self._events.lease_given(now)

    def _lease_taken_back(self, lease: Lease, begun: float) -> None:
        self.holdings.hold(lease, begun)
        self._events.lease_taken_back()

    # Left to others

    def leave_alone(self, key: str, seconds: float) -> None:
        """Do not take this lease for this many seconds, because another worker may be able to read its shard."""
        holding, now = self.holdings.get(key), self._clock()
        lease = self.holdings.released.get(key) if holding is None else holding.lease
        if holding is not None:
            holding.progress.put_aside(seconds, now)
        self._cooldown.put(key, self._clock() + seconds, None if lease is None else lease.annotation(INCARNATION))

    def without_excluded(self, actions: tuple[Action, ...], now: float) -> tuple[Action, ...]:
        """Return the actions without those that take a lease which this worker leaves to others for now."""
        return self._silence.without(self._cooldown.without(actions, now), now)

    def silence_due(self, now: float) -> float:
        """Return when a full read is needed because a stream is silent, or infinity if none is silent (D1)."""
        return self._silence.due(self.holdings.all, now)

    def stream_silent(self, now: float) -> bool:
        """Return whether a stream has not responded for so long that its shards cannot be listed either."""
        return self._silence.waits(self.holdings.all, now)

    def leave_silent(self, leases: Sequence[Lease], now: float, each: ParallelMap) -> None:
        """Release leases whose shards do not respond to this worker but may respond to others (D2 to D7).

        Args:
            leases: All leases, as just read.
            now: The time by the worker's clock.
            each: Applies a function to each item.
        """
        config = self._config
        for key, holding in list(self._stuck.items()):
            if holding.progress.called is None:
                del self._stuck[key]
            else:  # its reader still waits for that call (D6)
                self._cooldown.put(key, now + config.cycle_seconds + config.lease_seconds)
        for leaving in self._silence.judge(leases, self.holdings.all, now):
            leaving.holding.progress.put_aside(leaving.seconds, now)
            # Give other workers the first chance to take the lease. This worker may take it again when D5 and `_stuck`
            # allow it.
            self._cooldown.put(leaving.holding.key, now + config.lease_seconds)
            leaving.holding.ask_release(leaving.to)
            self._events.release(leaving.holding)
            leaving.holding.progress.leave()  # if the reader waits for a call, release the lease without it
        self.leave_stuck(now, config.lease_seconds, each)

    def leave_stuck(self, now: float, seconds: float, each: ParallelMap) -> None:
        """Release the leases that are being given up and whose readers have waited this long for a call of the source.

        The reader of such a lease cannot release it, and delivers nothing when its call returns.
        """

        def release(holding: Holding) -> None:
            self._stuck[holding.key] = holding
            try:
                holding.release()
            except StoreError as fault:
                log.warning("lease %s is not released yet: %s", holding.key, fault)

        def is_stuck(holding: Holding) -> bool:
            called_at = holding.progress.called
            return holding.progress.left or (
                called_at is not None and now - called_at >= seconds and holding.progress.leave()
            )

        list(each(release, [holding for holding in self.holdings.all if holding.releasing and is_stuck(holding)]))
