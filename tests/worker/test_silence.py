"""A worker that gets no responses from its stream leaves leases to other workers: what it writes to their rows."""

from held_leases import HeldLease

from leasehold.adapters.worker.silence import StreamSilence
from leasehold.balancer.config import Config
from leasehold.balancer.rules.minimal import Minimal


def test_unreachable_lease_shows_when_it_may_be_retried() -> None:
    """The row contains the time of the earliest retry, and not the end of a longer cooldown (D5)."""
    held_lease = HeldLease()
    silence = StreamSilence("ann", Config(Minimal(), lease_seconds=10.0))
    held_lease.holding.progress.call_began(1000.0)
    held_lease.holding.progress.call_returned()
    times = [1000.0 + seconds for seconds in (10, 31, 200)]
    leases_left_at_times = [silence.find_leases_to_leave([held_lease.row], [held_lease.holding], now) for now in times]
    assert [[lease.seconds for lease in leases_left] for leases_left in leases_left_at_times] == [[], [10.0], [10.0]]
