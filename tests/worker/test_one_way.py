"""L-one-way: a worker that loses either its requests or its responses leaves no shard unread for long.

While another worker is healthy, no shard is unread for longer than two lease durations.
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
    """A connection that loses messages in one direction, starting at the time `since`.

    By default, no messages are lost.
    """

    def __init__(self, target: Any, lost_messages: Lost, clock: Clock, reads: frozenset[str]) -> None:  # noqa: ANN401  a store, or objects
        self._wrapped_target, self._lost, self._clock, self._reads = target, lost_messages, clock, reads
        self.since = float("inf")

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  any attribute of the target
        attribute = getattr(self._wrapped_target, name)
        if not callable(attribute) or name in {"close", "prove"}:
            return attribute

        def call(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401  the signature of the target's method
            is_faulty = self._clock.now >= self.since
            if is_faulty and self._lost == "every request":
                raise OutcomeUnknown("the request is lost")
            response = attribute(*arguments, **named)
            if is_faulty and (self._lost == "every response" or name not in self._reads):
                raise OutcomeUnknown("the response is lost")
            return response

        return call


def make_healthy_and_sick_stores(layout: str, lost_messages: Lost, clock: Clock) -> tuple[Store, Store, OneWay]:
    """Return the store of a healthy worker, the store of a sick worker on the same table, and the faulty connection."""
    if layout == "rows":
        table = FaultyStore()
        faulty_connection = OneWay(table, lost_messages, clock, frozenset({"list", "get"}))
        return table, faulty_connection, faulty_connection
    if layout == "objects":
        objects = ObjectMemory()
        faulty_connection = OneWay(objects, lost_messages, clock, frozenset({"list", "get"}))
        return (
            EtagStore(objects, ObjectLayout("fleet")),
            EtagStore(faulty_connection, ObjectLayout("fleet")),
            faulty_connection,
        )
    cells = MemoryStore().cells()
    faulty_connection = OneWay(cells, lost_messages, clock, frozenset({"list", "read"}))
    healthy_store, sick_store = (
        SessionStore(connection, gather_seconds=0.0) for connection in (cells, faulty_connection)
    )
    return healthy_store, sick_store, faulty_connection


CONFIGS = {
    "kcl": Config(Kcl(), lease_seconds=LEASE_SECONDS),
    "kcl-rust": Config(KclRust(), lease_seconds=LEASE_SECONDS),
    "minimal": Config(Minimal(), lease_seconds=LEASE_SECONDS),
    # Workers of the SDKs also read the table four times per lease duration.
    "event-hubs": Config(EventHubs(), lease_seconds=LEASE_SECONDS, cycle_seconds=LEASE_SECONDS / 4),
}


CASES = list(product([True, False], ["rows", "sessions", "objects"], get_args(Lost), CONFIGS))


@pytest.mark.sampled(11)
@pytest.mark.parametrize(("from_the_start", "layout", "lost", "rules"), CASES)
def test_one_way_connection_leaves_no_shard_unread_for_two_lease_times(
    layout: str, lost: Lost, rules: str, from_the_start: bool
) -> None:
    """Claims and renewals of the sick worker may arrive, so that its leases look alive to other workers."""
    clock = Clock()
    config = CONFIGS[rules]
    healthy_store, sick_store, line = make_healthy_and_sick_stores(layout, lost, clock)
    source = ListSource(four_shards())
    healthy_worker = member(healthy_store, source, clock, "well", "p-1", config)  # type: ignore[arg-type]  # any store does
    together([healthy_worker], 60.0)
    sick_worker = member(sick_store, source, clock, "sick", "p-2", config)  # type: ignore[arg-type]  # likewise
    if not from_the_start:
        together([healthy_worker, sick_worker], 120.0)
        assert sick_worker.held
    line.since = clock.now
    last_read_times = dict.fromkeys(("s-0", "s-1", "s-2", "s-3"), clock.now)
    longest_unread = 0.0
    for _ in range(1200):
        together([healthy_worker, sick_worker], 0.5)
        for key in last_read_times:
            if key in healthy_worker.held or any(
                holding.key == key and not holding.expired for holding in sick_worker.worker.holdings
            ):
                last_read_times[key] = clock.now
        longest_unread = max(longest_unread, clock.now - min(last_read_times.values()))
    # If only the responses to writes are lost, the sick worker steals the lease once more at its next look. It stops
    # renewing the lease only after this second attempt.
    extra_seconds = 2 * config.cycle_seconds if lost == "responses to writes" else 0.0
    assert longest_unread <= 2 * LEASE_SECONDS + extra_seconds
