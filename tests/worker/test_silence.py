"""A worker that gets no responses from its stream leaves leases to other workers: what it writes to their rows."""

from held_leases import HeldLease

from leasehold.adapters.sources.protocol import Batch
from leasehold.adapters.worker.silence import StreamSilence
from leasehold.balancer.config import Config
from leasehold.balancer.model import Lease, Position
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


def test_each_outage_needs_its_own_proof_that_others_read_the_stream() -> None:
    """A worker that has read the stream during one outage may be as cut off as this worker in the next one."""
    held_lease = HeldLease()
    progress, silence = held_lease.holding.progress, StreamSilence("ann", Config(Minimal(), lease_seconds=10.0))

    def keys_left(seconds: float, checkpoint: str) -> list[str]:
        other_lease = Lease("s-1", owner="bob", checkpoint=Position(checkpoint))
        leases = [held_lease.row, other_lease]
        return [
            lease.holding.key for lease in silence.find_leases_to_leave(leases, [held_lease.holding], 1000.0 + seconds)
        ]

    progress.call_began(1000.0)
    assert [keys_left(5, "7"), keys_left(12, "8")] == [[], ["s-0"]]
    progress.read(Batch((), None, 0.0, 1.0), 1100.0)
    assert keys_left(101, "9") == []
    progress.call_began(1200.0)
    progress.call_returned()
    assert [keys_left(seconds, "9") for seconds in (205, 212, 229)] == [[], [], []]
