"""Computes what to expect of a fleet: the longest that a shard is unread after a crash, and what its store costs.

Computed, for a fleet at rest in its membership. `benchmarks/checkpoint_writes.py` measures the same in virtual time.
"""

import math
from collections.abc import Mapping

from attrs import frozen

from leasehold.adapters.steering.doctor.findings import Finding
from leasehold.balancer.config import Config
from leasehold.balancer.looking.ranks import scaled
from leasehold.balancer.looking.schedule import LOOK_SECONDS

BILLED = frozenset({"dynamodb", "s3", "azblob"})
"""Schemes of stores whose requests are billed."""

MONTH = 730 * 3600
MILLION = 1_000_000
ROW_BYTES, UNIT_BYTES = 360, 4096
"""Of a lease in DynamoDB, and of what one read unit reads; a listing is eventually consistent, at half of it."""
ROW_SECONDS = 1.5
"""Between two readings of the lookout's row by each of the others, as measured, for `lease_seconds` 10."""


@frozen
class Price:
    """US$ for a million writes and for a million reads; listings of objects are priced as writes."""

    write: float
    read: float
    source: str


LIST_PRICES: Mapping[str, Price] = {
    "dynamodb": Price(0.625, 0.125, "DynamoDB on demand, us-east-1, since November 2024"),
    "s3": Price(5.0, 0.4, "S3 Standard, us-east-1, 2025"),
}
"""List prices by scheme. Those of Azure differ by redundancy and tier: --write-price and --read-price say them."""


@frozen
class Load:
    """The requests of a fleet to its store in a second; for objects, listings count as writes."""

    writes: float
    reads: float

    def month(self, price: Price) -> float:
        """US$ of 730 hours."""
        return MONTH * (self.writes * price.write + self.reads * price.read) / MILLION


@frozen
class Fleet:
    """A fleet on a store.

    scheme   of the store's URL
    shared   whether a lookout can read the table for all (`promises.free_notes`)
    parts    listings that one look takes, for objects
    """

    scheme: str
    leases: int
    workers: int
    checkpoint_seconds: float
    shared: bool = True
    parts: int = 1


def gap_seconds(config: Config) -> float:
    """The longest that a shard is unread after its worker crashed: until the lease has expired, and one look more."""
    return config.rules.expires_above(config.lease_seconds) + config.cycle_seconds


def gap_of(config: Config) -> Finding:
    """The same as a finding."""
    said = f"a shard is unread for at most {gap_seconds(config):.1f} s after its worker crashed"
    parts = (
        f"{config.rules.expires_above(config.lease_seconds):g} s until the lease expires, {config.cycle_seconds:g} s"
    )
    sooner = ", mostly sooner by the lookout" if config.rules.keeps_lookout else ""
    return Finding("gap", "ok", f"{said}: {parts} until the next look{sooner}; longer while the store does not answer")


def loads(fleet: Fleet, config: Config) -> tuple[Load, Load]:
    """While nothing comes, and while records come to every shard all the time."""
    idle = fleet.leases / config.renew_seconds
    pause = fleet.checkpoint_seconds or 0.2
    busy = max(idle, fleet.leases * (2 if _objects(fleet) else 1) / pause)
    return _load(fleet, config, idle), _load(fleet, config, busy)


def _load(fleet: Fleet, config: Config, writes: float) -> Load:
    alone = config.rules.keeps_lookout and fleet.shared
    looks = 1 / scaled(LOOK_SECONDS, config) if alone else fleet.workers / config.cycle_seconds
    rows = (fleet.workers - 1) / scaled(ROW_SECONDS, config) if alone else 0.0
    if not _objects(fleet):
        scan = max(0.5, fleet.leases * ROW_BYTES / UNIT_BYTES / 2)
        return Load(writes, looks * scan + rows / 2)
    page = 1000 if fleet.scheme == "s3" else 5000
    # A listing of S3 names what has changed, and each of these objects is read.
    fetched = min(writes, 2 * fleet.leases * looks) if fleet.scheme == "s3" else 0.0
    return Load(writes + looks * fleet.parts * math.ceil(fleet.leases / page), rows + fetched)


def _objects(fleet: Fleet) -> bool:
    return fleet.scheme in {"s3", "azblob"}


def cost_of(fleet: Fleet, config: Config, price: Price | None) -> Finding:
    """The requests to the store and their costs, as a finding."""
    where = f"{fleet.leases} open shards, {fleet.workers} {'worker' if fleet.workers == 1 else 'workers'}"
    unit = " units" if fleet.scheme == "dynamodb" else ""
    said = [
        f"{when} {load.writes:.2g} writes and {load.reads:.2g} read{unit or 's'} a second"
        + (f", US$ {load.month(price):,.2f} a month" if price else "")
        for when, load in zip(("at rest", "under steady records"), loads(fleet, config), strict=True)
    ]
    tail = f" ({price.source})" if price else ""
    return Finding("cost", "ok", f"{where}: {'; '.join(said)}{tail}")
