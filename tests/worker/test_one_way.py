"""L-one-way: a worker that loses either its requests or its responses leaves no shard unread for long.

No shard is unread for longer than two lease times while another worker is healthy.
"""

from itertools import product
from typing import Any, Literal, get_args

import pytest
from object_memory import ObjectMemory
from virtual_fleet import FaultyStore, four_shards, member, together
from waiters import Clock

from leasehold.balancer.config import Config
from leasehold.balancer.rules.event_hubs import EventHubs
from leasehold.balancer.rules.kcl import Kcl, KclRust
from leasehold.balancer.rules.minimal import Minimal
from leasehold.errors import OutcomeUnknown
from leasehold.stores.embedded.memory import MemoryStore
from leasehold.stores.objects.generic_layout import ObjectLayout
from leasehold.stores.objects.store import EtagStore
from leasehold.stores.protocol import Store
from leasehold.stores.sessions.store import SessionStore
from leasehold_lab.simulator.world.world import ListSource

LEASE_SECONDS = 10.0
Lost = Literal["every response", "responses to writes", "every request"]


class OneWay:
    """A connection that loses one direction from some time on.

    `since` is the time from which it does.
    """

    def __init__(self, far: Any, lost: Lost, clock: Clock, reads: frozenset[str]) -> None:  # noqa: ANN401  a store, or objects
        self._far, self._lost, self._clock, self._reads = far, lost, clock, reads
        self.since = float("inf")

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  any attribute of the far side
        there = getattr(self._far, name)
        if not callable(there) or name in {"close", "prove"}:
            return there

        def call(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401  the far side's signature
            sick = self._clock.now >= self.since
            if sick and self._lost == "every request":
                raise OutcomeUnknown("the request is lost")
            answer = there(*arguments, **named)
            if sick and (self._lost == "every response" or name not in self._reads):
                raise OutcomeUnknown("the response is lost")
            return answer

        return call


def _sick(layout: str, lost: Lost, clock: Clock) -> tuple[Store, Store, OneWay]:
    """Return a healthy worker's store, a sick worker's store on the same table, and what loses its responses."""
    if layout == "rows":
        table = FaultyStore()
        line = OneWay(table, lost, clock, frozenset({"list", "get"}))
        return table, line, line
    if layout == "objects":
        objects = ObjectMemory()
        line = OneWay(objects, lost, clock, frozenset({"list", "get"}))
        return EtagStore(objects, ObjectLayout("fleet")), EtagStore(line, ObjectLayout("fleet")), line
    cells = MemoryStore().cells()
    line = OneWay(cells, lost, clock, frozenset({"list", "read"}))
    healthy, sick = (SessionStore(connection, gather_seconds=0.0) for connection in (cells, line))
    return healthy, sick, line


CONFIGS = {
    "kcl": Config(Kcl(), lease_seconds=LEASE_SECONDS),
    "kcl-rust": Config(KclRust(), lease_seconds=LEASE_SECONDS),
    "minimal": Config(Minimal(), lease_seconds=LEASE_SECONDS),
    # In the proportions of the SDKs: the table is read four times per lease time.
    "event-hubs": Config(EventHubs(), lease_seconds=LEASE_SECONDS, cycle_seconds=LEASE_SECONDS / 4),
}


CASES = list(product([True, False], ["rows", "sessions", "objects"], get_args(Lost), CONFIGS))


@pytest.mark.sampled(11)
@pytest.mark.parametrize(("from_the_start", "layout", "lost", "rules"), CASES)
def test_one_way_connection_leaves_no_shard_unread_for_two_lease_times(
    layout: str, lost: Lost, rules: str, from_the_start: bool
) -> None:
    """The sick worker's claims and renewals arrive, so its leases look alive to others."""
    clock = Clock()
    config = CONFIGS[rules]
    healthy_store, sick_store, line = _sick(layout, lost, clock)
    source = ListSource(four_shards())
    well = member(healthy_store, source, clock, "well", "p-1", config)  # type: ignore[arg-type]  # any store does
    together([well], 60.0)
    sick = member(sick_store, source, clock, "sick", "p-2", config)  # type: ignore[arg-type]  # likewise
    if not from_the_start:
        together([well, sick], 120.0)
        assert sick.held
    line.since = clock.now
    read_at = dict.fromkeys(("s-0", "s-1", "s-2", "s-3"), clock.now)
    longest = 0.0
    for _ in range(1200):
        together([well, sick], 0.5)
        for key in read_at:
            if key in well.held or any(holding.key == key and not holding.expired for holding in sick.worker.holdings):
                read_at[key] = clock.now
        longest = max(longest, clock.now - min(read_at.values()))
    # If reads still succeed, the sick worker steals again, and the lease it took stands still from its
    # second try on, at its next look.
    looks = 2 * config.cycle_seconds if lost == "responses to writes" else 0.0
    assert longest <= 2 * LEASE_SECONDS + looks
