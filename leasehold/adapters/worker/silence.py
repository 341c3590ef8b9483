"""Notices that a stream does not respond to this worker, and chooses the leases to leave to other workers (D1 to D7).

If a worker can reach the lease table but not the stream, it still renews its leases. To other workers, these leases
look alive, although no worker reads their shards. The rules are in `specs/lifecycle.md`.

`StreamSilence` reads no clock and sends no requests. `Worker` calls it after each full read of the table, and releases
the leases that it returns.
"""

import logging
import math
from collections import Counter
from collections.abc import Collection, Iterable

from attrs import define, frozen

from leasehold.adapters.worker.holding import Holding
from leasehold.adapters.worker.progress import SILENT_SECONDS, progress_of
from leasehold.balancer.actions import Action, Claim, RequestHandoff, Steal
from leasehold.balancer.config import Config
from leasehold.balancer.model import Lease
from leasehold.stores.printable import join_limited, make_safe_logger

log = make_safe_logger(logging.getLogger("leasehold.silence"))

RESPONSE_MARGIN = 1 / 3
"""By how much another owner's last response must be later than this worker's, in multiples of `lease_seconds`.

With a smaller margin, a later response would not prove that the stream still responds to other workers. Reads are not
simultaneous and clocks differ, so even in an outage of the stream, some owners got their last response later than
others.
"""
TRIAL_AFTER = 3
"""How long a stream must be silent before one lease is released as a trial, in multiples of `lease_seconds` (D4).

A stream that is merely slow responds within that time.
"""
FIRST_REST = 2
"""The time for which this worker first leaves a lease or a stream to others, in multiples of `lease_seconds` (D5)."""
REST_SECONDS_MAX = 300.0
STOP_LISTING_SECONDS = 1.0
"""The time without a response from a stream after which a worker stops listing the stream's shards, in seconds.

A request for the shards of a silent stream would get no response either, and would block the turn.
"""


@frozen
class SilentLease:
    """A lease that this worker leaves to others for at least `seconds`, or until one of them takes it.

    If `to` is set, the lease is released to that worker.
    """

    holding: Holding
    seconds: float
    to: str | None = None


@define
class _Rest:
    """A period for which leases are left to other workers. Each rest is up to twice as long as the one before.

    Attributes:
        seconds: The length of the next rest.
        until: The end of the latest rest.
    """

    seconds: float
    until: float = -math.inf

    def begin(self, now: float) -> float:
        """Begin a rest, and return its length in seconds."""
        seconds, self.seconds = self.seconds, min(2 * self.seconds, REST_SECONDS_MAX)
        self.until = now + seconds
        return seconds


@define
class _StreamState:
    """The state of one stream, as far as this worker knows it.

    Attributes:
        rest: The period for which the stream's leases are left to other workers.
        trial_due: The time from which the next lease may be released as a trial.
        checkpoints: The checkpoints of other owners at the first read of the table during the current silence.
        read_by: Another owner that has read the stream during the current silence, or "".
        silent_at: The last time at which the stream was found to be silent.
    """

    rest: _Rest
    trial_due: float = -math.inf
    checkpoints: dict[str, tuple[str, tuple[int, int, int]]] | None = None
    read_by: str = ""
    silent_at: float = -math.inf


class StreamSilence:
    """Determines whether the streams respond to one worker.

    Args:
        me: The worker's id.
        config: The worker's configuration.
    """

    def __init__(self, me: str, config: Config) -> None:
        self._me, self._lease_seconds = me, config.lease_seconds
        self._stream_states: dict[str, _StreamState] = {}
        self._rests_by_shard: dict[str, _Rest] = {}
        self._next_check = -math.inf

    @property
    def _stuck_seconds(self) -> float:
        return max(2 * self._lease_seconds, SILENT_SECONDS)

    def due(self, holdings: Collection[Holding], now: float) -> float:
        """Return when to call `find_leases_to_leave` next, or infinity if no response is awaited.

        An earlier call of `find_leases_to_leave` does no harm.
        """
        if now < self._next_check:
            return math.inf
        silent_since_by_stream = self._find_silent_streams(holdings, now)
        due_times = [silent_since + self._lease_seconds for silent_since in silent_since_by_stream.values()]
        due_times += [self._shard_release_due(holding, now) for holding in holdings]
        due_times += [
            called_at + self._stuck_seconds
            for holding in holdings
            if (called_at := holding.progress.call_began_at) is not None
        ]
        due = min(due_times, default=math.inf)
        # A silence that begins now leads to a release after `lease_seconds` at the earliest, so there is no need to
        # check more often.
        self._next_check = now + min(max(due - now, min(1.0, self._lease_seconds / 8)), self._lease_seconds / 2)
        return due

    def is_silent(self, holdings: Collection[Holding], now: float) -> bool:
        """Return whether a stream has not responded for `STOP_LISTING_SECONDS`."""
        return any(now - silent_since >= STOP_LISTING_SECONDS for silent_since in _silent_since(holdings).values())

    def without(self, actions: tuple[Action, ...], now: float) -> tuple[Action, ...]:
        """Return the actions, except those that would take a lease which this worker leaves to others for now (D5)."""
        resting_streams = {name for name, stream in self._stream_states.items() if now < stream.rest.until}
        resting_keys = {key for key, rest_period in self._rests_by_shard.items() if now < rest_period.until}
        return tuple(action for action in actions if not self._left_to_others(action, resting_streams, resting_keys))

    def _left_to_others(self, action: Action, streams: Collection[str], shards: Collection[str]) -> bool:
        is_resting = action.lease.stream in streams or action.lease.key in shards
        if not isinstance(action, Claim | Steal | RequestHandoff) or not is_resting:
            return False
        # If no other worker has taken the lease within this time, probably none will, so this worker tries to read the
        # shard again.
        idle_limit = self._lease_seconds * (1 if action.lease.owner is None else 2)
        return not (isinstance(action, Claim) and action.lease.idle >= idle_limit)

    def find_leases_to_leave(
        self, leases: Collection[Lease], holdings: Collection[Holding], now: float
    ) -> list[SilentLease]:
        """Return the leases to leave to other workers.

        Args:
            leases: All leases, as just read.
            holdings: The leases that are held now.
            now: The time by the worker's clock.
        """
        leases_to_leave = list[SilentLease]()
        silent_since_by_stream = self._find_silent_streams(holdings, now)
        for name in {holding.lease.stream for holding in holdings}:
            stream_holdings = [holding for holding in holdings if holding.lease.stream == name]
            stream = self._get_stream_state(name)
            silent_since = silent_since_by_stream.get(name)
            if silent_since is None:
                if any(holding.progress.last_response_at > stream.rest.until for holding in stream_holdings):
                    # The stream has responded since the last rest, so make the next rest short again.
                    stream.rest.seconds, stream.trial_due = FIRST_REST * self._lease_seconds, -math.inf
                stream.checkpoints, stream.read_by = None, ""
                continue
            if stream.silent_at == now:
                self._note_moved_checkpoints(stream, name, leases)
            if now - silent_since >= self._lease_seconds:
                leases_to_leave += self._leave_stream(stream, name, leases, stream_holdings, silent_since, now)
        chosen_holdings = {silent_lease.holding for silent_lease in leases_to_leave}
        for holding in holdings:
            if holding not in chosen_holdings and self._shard_release_due(holding, now) <= now:  # D7
                leases_to_leave.append(self._leave_shard(holding, leases, now))
                chosen_holdings.add(holding)
        for holding in holdings:
            called_at = holding.progress.call_began_at
            # D6
            if holding not in chosen_holdings and called_at is not None and now - called_at >= self._stuck_seconds:
                leases_to_leave.append(SilentLease(holding, self._stuck_seconds))
                log.error(
                    "shard %s: a call of its source has not returned for %.0f s; released, not taken again before it "
                    "has returned",
                    holding.key,
                    now - called_at,
                )
        return leases_to_leave

    def _note_moved_checkpoints(self, stream: _StreamState, name: str, leases: Iterable[Lease]) -> None:
        """Note whether another owner's checkpoint has moved since the first call during this silence."""
        current_checkpoints = {
            lease.key: (lease.owner, lease.checkpoint.order)
            for lease in leases
            if lease.stream == name and lease.owner is not None and lease.owner != self._me
        }
        if stream.checkpoints is None:
            stream.checkpoints = current_checkpoints
            return
        for key, (owner, order) in current_checkpoints.items():
            owner_before, order_before = stream.checkpoints.get(key, (None, order))
            if owner_before == owner and order_before < order:
                stream.read_by = owner

    def _leave_stream(  # noqa: PLR0917  one call
        self,
        stream: _StreamState,
        name: str,
        leases: Collection[Lease],
        stream_holdings: list[Holding],
        silent_since: float,
        now: float,
    ) -> list[SilentLease]:
        if now < stream.rest.until:
            return []
        silence_description = f"the stream has not responded to this worker for {now - silent_since:.0f} s"
        annotating_owners = [*self._annotating_owners(name, leases, stream_holdings, silent_since, now)]
        read_by = stream.read_by or next((owner for owner, has_read in annotating_owners if has_read), "")
        if read_by:  # D2
            leases_to_leave, reason = stream_holdings, f"{silence_description}, and {read_by} has read it since"
        elif annotating_owners or now < max(silent_since + TRIAL_AFTER * self._lease_seconds, stream.trial_due):  # D3
            return []
        else:  # D4
            leases_to_leave = [min(stream_holdings, key=lambda holding: holding.key)]
            reason = f"{silence_description}; another worker may try it"
        rest_seconds = stream.rest.begin(now)
        stream.trial_due = now + 2 * rest_seconds
        log.warning(
            "%s; releasing %s, leaving its leases to others for %.0f s: check this worker's connection to the stream",
            reason,
            join_limited([holding.key for holding in leases_to_leave]),
            rest_seconds,
        )
        # Do not leave the leases to other workers for the whole rest. If no other worker has taken a lease after
        # `lease_seconds`, this worker tries to read its shard again (D5).
        return [SilentLease(holding, self._lease_seconds) for holding in leases_to_leave]

    def _get_stream_state(self, name: str) -> _StreamState:
        return self._stream_states.setdefault(name, _StreamState(_Rest(FIRST_REST * self._lease_seconds)))

    def _find_silent_streams(self, holdings: Iterable[Holding], now: float) -> dict[str, float]:
        """Return when the silence of each silent stream began.

        Also record which streams have been silent for a long time.
        """
        silent_since_by_stream = _silent_since(holdings)
        for name, silent_since in silent_since_by_stream.items():
            if now - silent_since >= self._lease_seconds * RESPONSE_MARGIN:
                self._get_stream_state(name).silent_at = now
        return silent_since_by_stream

    def _shard_release_due(self, holding: Holding, now: float) -> float:
        """Return the time at which to release a lease whose shard does not respond although other shards do (D7).

        If the shard responds, return infinity.
        """
        progress = holding.progress
        if progress.silent_since is None:
            if progress.last_response_at > -math.inf:
                self._rests_by_shard.pop(holding.key, None)
            return math.inf
        # After an outage of the stream, give every shard the full time to respond again.
        silent_since = max(progress.silent_since, self._get_stream_state(holding.lease.stream).silent_at)
        if progress.failed_at < silent_since:  # `failed_at` is the time at which the failed read began
            return math.inf
        if progress.has_responded_within(now, self._lease_seconds):
            return silent_since + max(self._lease_seconds, 2 * progress.response_seconds)
        rest_period = self._rests_by_shard.get(holding.key)
        # If no worker gets a response from the shard, this worker keeps the lease longer each time that it has taken
        # it.
        return silent_since + max(TRIAL_AFTER * self._lease_seconds, rest_period.seconds if rest_period else 0.0)

    def _leave_shard(self, holding: Holding, leases: Iterable[Lease], now: float) -> SilentLease:
        """Return the lease of a silent shard, to be released to the living owner that has the fewest leases."""
        rest_seconds = self._rests_by_shard.setdefault(holding.key, _Rest(FIRST_REST * self._lease_seconds)).begin(now)
        lease_counts = Counter(
            lease.owner
            for lease in leases
            if lease.owner not in {None, self._me} and lease.yields and lease.idle <= self._lease_seconds
        )
        new_owner = min(lease_counts, key=lambda owner: (lease_counts[owner], owner), default=None)
        log.warning(
            "shard %s has not responded to this worker for %.0f s, although its stream has; releasing it%s, not taken "
            "again for %.0f s",
            holding.key,
            now - (holding.progress.silent_since or now),
            f" to {new_owner}" if new_owner else "",
            rest_seconds,
        )
        return SilentLease(holding, self._lease_seconds, new_owner)

    def _annotating_owners(
        self, name: str, leases: Iterable[Lease], stream_holdings: list[Holding], silent_since: float, now: float
    ) -> Iterable[tuple[str, bool]]:
        """Yield the other living owners that annotate leases, and whether each read the stream after `silent_since`."""
        last_response = stream_holdings[0].progress.since_1970(silent_since, now)
        if last_response is None:
            return
        for lease in leases:
            if lease.stream != name or lease.owner in {None, self._me} or lease.idle > self._lease_seconds:
                continue
            progress = progress_of(lease)
            if progress is not None and progress.owner == lease.owner:
                yield progress.owner, (progress.read or 0.0) > last_response + RESPONSE_MARGIN * self._lease_seconds


def _silent_since(holdings: Iterable[Holding]) -> dict[str, float]:
    """Return, for each stream that does not respond, the time since which it has been silent (D1)."""
    last_responses, waiting_since = dict[str, float](), dict[str, float]()
    for holding in holdings:
        name, progress = holding.lease.stream, holding.progress
        last_responses[name] = max(last_responses.get(name, -math.inf), progress.last_response_at)
        if progress.silent_since is not None:
            waiting_since[name] = min(waiting_since.get(name, math.inf), progress.silent_since)
    return {name: max(start, last_responses[name]) for name, start in waiting_since.items()}
