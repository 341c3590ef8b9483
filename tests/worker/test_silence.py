"""What a worker that gets no response from its stream writes on the leases that it leaves to others."""

from held_leases import HeldLease

from leasehold.adapters.worker.silence import StreamSilence
from leasehold.balancer.config import Config
from leasehold.balancer.rules.minimal import Minimal


def test_unreachable_lease_shows_when_it_may_be_retried() -> None:
    """The row shows the earliest retry, not the end of a longer cooldown (D5)."""
    held = HeldLease()
    silence = StreamSilence("ann", Config(Minimal(), lease_seconds=10.0))
    held.holding.progress.asking(1000.0)
    held.holding.progress.called_back()
    times = [1000.0 + seconds for seconds in (10, 31, 200)]
    judged = [silence.judge([held.row], [held.holding], now) for now in times]
    assert [[lease.seconds for lease in left] for left in judged] == [[], [10.0], [10.0]]
