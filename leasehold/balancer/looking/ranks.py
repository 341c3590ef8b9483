"""The ranks of the workers: who is the lookout, who stands in for it and when, and which row tells (C3, C4, C8).

Nobody is elected. Each worker ranks the workers of its own last listing; workers that list differently for a moment
may take two of them for the lookout, or none, which costs readings or delay, and never a lease (`schedule.py`).

Example: of the workers a, b and c the ranks are c, a, b, and c dies. Its row moved last at 0 s. Once a has seen the
row unmoved for 2.5 s, it lists the table from then on; b does so a second later. After 10.5 s a frees c's leases, that
row among them. Both see that the row has another owner, list the table once more, and rank a first.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache

from attrs import frozen

from leasehold.balancer.actions import Renew
from leasehold.balancer.census import signers
from leasehold.balancer.chance import digest_under
from leasehold.balancer.config import Config
from leasehold.balancer.counting import expires_above
from leasehold.balancer.model import BulletinState, Lease, Me
from leasehold.balancer.rules.shares import donation_order

HEARTBEAT_SECONDS = 1.5
"""The bulletin's row is renewed so often, so that its silence is noticed within seconds (C4)."""

SILENT_SECONDS, LOOKS_SILENT_SECONDS = 2.5, 7.5
"""The lookout has stopped if its row stood still for so long, a heartbeat being a second late; or *looks*, of which
two are missing then (C8)."""

STAND_IN_SECONDS = 1.0
"""Each rank stands in so much later than the one before it: one is enough while it lives (C8)."""

rank_digest = lru_cache(maxsize=10_000)(digest_under("lookout"))  # each look ranks everybody


@frozen
class LookoutRanks:
    """Our living workers stand here by rank, with the row that carries the bulletin, if any does (C3, C4)."""

    ranks: tuple[str, ...]
    row: Lease | None

    def on_duty(self, me: Me, hearing: BulletinState, config: Config) -> bool:
        """Whether this worker keeps the lookout: by rank, or because the bulletin of the lookout has stopped (C8)."""
        if self.row is None or self.ranks[0] == me.worker:
            return True
        rank = self.ranks.index(me.worker) if me.worker in self.ranks else len(self.ranks)
        silent = max(
            self.row.idle - scaled(SILENT_SECONDS, config),
            hearing.looks_still - scaled(LOOKS_SILENT_SECONDS, config),
        )
        return silent > (rank - 1) * scaled(STAND_IN_SECONDS, config)


def lookout_ranks(leases: Sequence[Lease], config: Config) -> LookoutRanks:
    """The first in rank is the lookout; the others stand in for it in this order (C3, C8)."""
    limit = expires_above(config)
    ours = signers(lease for lease in leases if lease.idle <= limit)
    ranks = tuple(sorted(ours, key=lambda worker: (rank_digest(worker), worker)))
    return LookoutRanks(ranks, bulletin_row(leases, ranks[0]) if ranks else None)


def bulletin_row(leases: Iterable[Lease], lookout: str) -> Lease | None:
    """The lookout's last row in shed order carries the bulletin, for every newcomer takes from the first (C4)."""
    held = [lease for lease in leases if lease.owner == lookout and not lease.ended]
    return max(held, key=donation_order, default=None)


def heartbeat(mine: Iterable[Lease], me: Me, config: Config) -> tuple[Renew, ...]:
    """C4: the worker that keeps the lookout renews the bulletin's row more often than any other."""
    row = bulletin_row(mine, me.worker)
    return (Renew(row, "C4"),) if row is not None and row.idle >= heartbeat_seconds(config) else ()


def heartbeat_seconds(config: Config) -> float:
    """The bulletin's row is renewed this often."""
    return scaled(HEARTBEAT_SECONDS, config)


def scaled(seconds: float, config: Config) -> float:
    """Seconds that are given for a `lease_seconds` of 10, as they are for this one."""
    return seconds * config.lease_seconds / 10
