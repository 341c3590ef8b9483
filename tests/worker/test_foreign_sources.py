"""L-foreign: each call of a source may raise an exception of another library, once or always."""

from collections.abc import Callable

import pytest
from virtual_fleet import FaultyStore, four_shards, member, together
from waiters import Clock

from leasehold.balancer.config import Config
from leasehold.balancer.model import LATEST, Lease, Position, Shard
from leasehold.balancer.rules.minimal import Minimal
from leasehold.stores.writes import CreateLease
from leasehold_lab.simulator.world.world import ListSource

ERRORS: tuple[Callable[[], Exception], ...] = (
    lambda: KeyError("x"),
    MemoryError,
    RecursionError,
    lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "odd"),
    StopIteration,
)
ALL = ["s-0", "s-1", "s-2", "s-3"]
LEASE_SECONDS = 10.0
CONFIG = Config(rules=Minimal(), lease_seconds=LEASE_SECONDS)

each_error = pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error()).__name__)


class SourceWithForeignErrors(ListSource):
    """A source that counts its listings, and whose methods raise an exception while their names are in `broken`."""

    def __init__(self, error: Callable[[], Exception], shards: list[Shard] | None = None) -> None:
        super().__init__(four_shards() if shards is None else shards)
        self.error, self.broken, self.listings = error, set[str](), 0

    def _raise_if_broken(self, *calls: str) -> None:
        if self.broken & set(calls):
            raise self.error()

    def shards(self) -> tuple[Shard, ...]:
        """Return the listing, unless the call is broken."""
        self.listings += 1
        self._raise_if_broken("shards")
        return super().shards()

    def gone(self, shard: str) -> bool:
        """Return whether the shard is gone, unless the call is broken."""
        self._raise_if_broken("gone")
        return super().gone(shard)

    def latest(self, lease: Lease) -> Position:
        """Return the position of LATEST, unless the call is broken for all shards or for this one."""
        self._raise_if_broken("latest", f"latest {lease.key}")
        return super().latest(lease)


@each_error
@pytest.mark.parametrize("broken", ["shards", "gone", "latest"])
def test_failing_source_does_not_prevent_taking_over_expired_leases(
    error: Callable[[], Exception], broken: str
) -> None:
    clock, store, source = Clock(), FaultyStore(), SourceWithForeignErrors(error)
    dead_worker, surviving_worker = (
        member(store, source, clock, "a-1", "p-1", CONFIG),
        member(store, source, clock, "b-1", "p-2", CONFIG),
    )
    together([dead_worker, surviving_worker], 60.0)
    assert len(dead_worker.held) == len(surviving_worker.held) == 2
    source.broken.add(broken)
    source.listed.append(Shard("s-4", open=True)) if broken == "latest" else None
    store.write(CreateLease(Lease("finished", checkpoint=Position("SHARD_END")))) if broken == "gone" else None
    surviving_worker.worker.hurry()
    surviving_worker.turn_due = clock.now
    surviving_worker.run(3 * LEASE_SECONDS)
    assert surviving_worker.held == ALL


@each_error
def test_listing_that_raised_is_retried_within_seconds(error: Callable[[], Exception]) -> None:
    clock, source = Clock(), SourceWithForeignErrors(error)
    driven_worker = member(FaultyStore(), source, clock, config=CONFIG)
    driven_worker.run(60.0)
    source.broken.add("shards")
    driven_worker.worker.hurry()
    driven_worker.turn_due = clock.now
    driven_worker.run(0.5)
    source.broken.clear()
    listings_before = source.listings
    driven_worker.run(5.0)
    assert source.listings > listings_before


@each_error
def test_shard_whose_latest_is_unknown_delays_only_its_own_lease(error: Callable[[], Exception]) -> None:
    clock, store, source = Clock(), FaultyStore(), SourceWithForeignErrors(error)
    source.broken.add("latest s-2")
    driven_worker = member(store, source, clock, config=Config(lease_seconds=LEASE_SECONDS, initial_position=LATEST))
    driven_worker.run(60.0)
    assert driven_worker.held == ["s-0", "s-1", "s-3"]
    source.broken.clear()
    driven_worker.run(60.0)
    assert driven_worker.held == ALL
