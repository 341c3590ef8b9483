"""Notices that a stream does not respond to this worker, and chooses the leases to leave to other workers (D1 to D6).

A worker whose connection to the lease table works renews its leases, whatever becomes of its connection to the stream.
To others these leases look alive, although no worker reads them. The rules are in `specs/lifecycle.md`.

This module reads no clock and sends no request. `Worker` has it judge after each full read of the table, and carries
out what it returns.
"""

import logging
import math
from collections.abc import Collection, Iterable

from attrs import define, frozen

from leasehold.adapters.worker.holding import Holding
from leasehold.adapters.worker.progress import SILENT_SECONDS, progress_of
from leasehold.balancer.actions import Action, Claim, RequestHandoff, Steal
from leasehold.balancer.config import Config
from leasehold.balancer.model import Lease
from leasehold.stores.printable import escaped, few

log = escaped(logging.getLogger("leasehold.silence"))

MARGIN = 1 / 3
"""How much later than our last response another owner must have read, in lease times. Reads are not simultaneous, and
clocks differ: in an outage of the stream, some owner always had the last response."""
TRIAL = 3
"""The silence before a trial, in lease times (D4). A stream that is merely slow responds within that time."""
REST = 2
"""The first rest, in lease times (D5)."""
REST_SECONDS_MOST = 300.0
UNLISTED_SECONDS = 1.0
"""After waiting this long for a response, a worker does not list the shards: that request would not be answered either,
and the turn must not wait for it."""


@frozen
class SilentLease:
    """A lease to leave to other workers, and for how many seconds at least, if no other worker takes it."""

    holding: Holding
    seconds: float


@define
class _StreamState:
    """What is known of one stream.

    Attributes:
        rest_seconds: How long the next rest takes.
        rests_until: Until when its leases are left to other workers.
        trial_due: When the next lease may be released as a trial.
        checkpoints: The checkpoints of other owners when this worker first saw the table after it got no response.
        read_by: Another owner that has read the stream since.
    """

    rest_seconds: float
    rests_until: float = -math.inf
    trial_due: float = -math.inf
    checkpoints: dict[str, tuple[str, tuple[int, int, int]]] | None = None
    read_by: str = ""


class StreamSilence:
    """Judges whether the streams respond to one worker.

    Args:
        me: The worker's id.
        config: Its configuration.
    """

    def __init__(self, me: str, config: Config) -> None:
        self._me, self._lease_seconds = me, config.lease_seconds
        self._streams: dict[str, _StreamState] = {}
        self._next = -math.inf

    @property
    def _stuck_seconds(self) -> float:
        return max(2 * self._lease_seconds, SILENT_SECONDS)

    def due(self, holdings: Collection[Holding], now: float) -> float:
        """Return when to judge, or infinity while no lease waits for a response. Cheap if called often."""
        if now < self._next:
            return math.inf
        dues = [since + self._lease_seconds for since in _silent_since(holdings).values()]
        dues += [
            called + self._stuck_seconds for holding in holdings if (called := holding.progress.called) is not None
        ]
        due = min(dues, default=math.inf)
        # A silence that begins now is due in a lease time at the earliest, so no more frequent check is needed.
        self._next = now + min(max(due - now, min(1.0, self._lease_seconds / 8)), self._lease_seconds / 2)
        return due

    def waits(self, holdings: Collection[Holding], now: float) -> bool:
        """Return whether a stream has not responded for `UNLISTED_SECONDS`."""
        return any(now - since >= UNLISTED_SECONDS for since in _silent_since(holdings).values())

    def without(self, actions: tuple[Action, ...], now: float) -> tuple[Action, ...]:
        """Return the actions without those that take a lease of a stream while this worker rests from it (D5)."""
        resting = {name for name, stream in self._streams.items() if now < stream.rests_until}
        return tuple(action for action in actions if not self._left_to_others(action, resting))

    def _left_to_others(self, action: Action, resting: Collection[str]) -> bool:
        if not isinstance(action, Claim | Steal | RequestHandoff) or action.lease.stream not in resting:
            return False
        # What nobody has taken by now, nobody else will: it is better tried here than left alone.
        given_up = self._lease_seconds * (1 if action.lease.owner is None else 2)
        return not (isinstance(action, Claim) and action.lease.idle >= given_up)

    def judge(self, leases: Collection[Lease], holdings: Collection[Holding], now: float) -> list[SilentLease]:
        """Return the leases to leave to other workers.

        Args:
            leases: All leases, as just read.
            holdings: The leases held now.
            now: The time by the worker's clock.
        """
        leaving = list[SilentLease]()
        silences = _silent_since(holdings)
        for name in {holding.lease.stream for holding in holdings}:
            held = [holding for holding in holdings if holding.lease.stream == name]
            stream = self._streams.setdefault(name, _StreamState(REST * self._lease_seconds))
            since = silences.get(name)
            if since is None:
                if any(holding.progress.heard > stream.rests_until for holding in held):
                    # There was a response since the last rest, so the next one is short again.
                    stream.rest_seconds, stream.trial_due = REST * self._lease_seconds, -math.inf
                stream.checkpoints, stream.read_by = None, ""
                continue
            if now - since >= self._lease_seconds * MARGIN:
                self._compare(stream, name, leases)
            if now - since >= self._lease_seconds:
                leaving += self._of_stream(stream, name, leases, held, since, now)
        chosen = {lease.holding for lease in leaving}
        for holding in holdings:
            called = holding.progress.called
            # D6
            if holding not in chosen and called is not None and now - called >= self._stuck_seconds:
                leaving.append(SilentLease(holding, self._stuck_seconds))
                log.error(
                    "shard %s: a call of its source has not returned for %.0f s; released, not taken again before it "
                    "has returned",
                    holding.key,
                    now - called,
                )
        return leaving

    def _compare(self, stream: _StreamState, name: str, leases: Iterable[Lease]) -> None:
        """Note whether the checkpoint of another owner has moved since the first call of this silence."""
        current = {
            lease.key: (lease.owner, lease.checkpoint.order)
            for lease in leases
            if lease.stream == name and lease.owner is not None and lease.owner != self._me
        }
        if stream.checkpoints is None:
            stream.checkpoints = current
            return
        for key, (owner, order) in current.items():
            owner_before, order_before = stream.checkpoints.get(key, (None, order))
            if owner_before == owner and order_before < order:
                stream.read_by = owner

    def _of_stream(  # noqa: PLR0917  one call
        self, stream: _StreamState, name: str, leases: Collection[Lease], held: list[Holding], since: float, now: float
    ) -> list[SilentLease]:
        if now < stream.rests_until:
            return []
        silence = f"the stream has not responded to this worker for {now - since:.0f} s"
        annotated = [*self._annotated(name, leases, held, since, now)]
        read_by = stream.read_by or next((owner for owner, read in annotated if read), "")
        if read_by:  # D2
            left, why = held, f"{silence}, and {read_by} has read it since"
        elif annotated or now < max(since + TRIAL * self._lease_seconds, stream.trial_due):  # D3
            return []
        else:  # D4
            left = [min(held, key=lambda holding: holding.key)]
            why = f"{silence}; another worker may try it"
        rest, stream.rest_seconds = stream.rest_seconds, min(2 * stream.rest_seconds, REST_SECONDS_MOST)
        stream.rests_until, stream.trial_due = now + rest, now + 2 * rest
        log.warning(
            "%s; releasing %s, leaving its leases to others for %.0f s: check this worker's connection to the stream",
            why,
            few([holding.key for holding in left]),
            rest,
        )
        # Not for the whole rest: what nobody else has taken by then is tried again (D5).
        return [SilentLease(holding, self._lease_seconds) for holding in left]

    def _annotated(
        self, name: str, leases: Iterable[Lease], held: list[Holding], since: float, now: float
    ) -> Iterable[tuple[str, bool]]:
        """Yield each other living owner that annotates its leases, and whether it has read one of them since."""
        heard = held[0].progress.since_1970(since, now)
        if heard is None:
            return
        for lease in leases:
            if lease.stream != name or lease.owner in {None, self._me} or lease.idle > self._lease_seconds:
                continue
            progress = progress_of(lease)
            if progress is not None and progress.owner == lease.owner:
                yield progress.owner, (progress.read or 0.0) > heard + MARGIN * self._lease_seconds


def _silent_since(holdings: Iterable[Holding]) -> dict[str, float]:
    """Return since when each stream that does not respond has not, by stream (D1)."""
    heard, waits = dict[str, float](), dict[str, float]()
    for holding in holdings:
        name, progress = holding.lease.stream, holding.progress
        heard[name] = max(heard.get(name, -math.inf), progress.heard)
        if progress.silent_since is not None:
            waits[name] = min(waits.get(name, math.inf), progress.silent_since)
    return {name: max(since, heard[name]) for name, since in waits.items()}
