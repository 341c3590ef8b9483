"""Groups with workers of other libraries: slow workers are named, steals are noticed soon, and durations fit."""

import logging

import pytest
from attrs import evolve
from virtual_fleet import KCL, DrivenWorker, FaultyStore, four_shards, member
from waiters import Clock

from leasehold.adapters.inputs import config_for_source, with_event_hub_times
from leasehold.balancer.config import Config
from leasehold.balancer.rule_set import RuleSet
from leasehold.balancer.rules.event_hubs import EventHubs
from leasehold.balancer.rules.kcl import KclRust
from leasehold.balancer.rules.minimal import Minimal
from leasehold.stores.writes import RenewLease, StealLease
from leasehold_lab.simulator.world.world import ListSource

SOURCE = "eventhubs://contoso/flights"


@pytest.mark.parametrize(
    ("rules", "seconds"),
    [
        (Minimal(), (120.0, 30.0, 20.0)),
        (KclRust(), (120.0, 30.0, 20.0)),
        (EventHubs(), (120.0, 30.0, 20.0)),
        (EventHubs("python"), (180.0, 30.0, 20.0)),
    ],
)
def test_event_hubs_durations_suit_official_workers(rules: RuleSet, seconds: tuple[float, float, float]) -> None:
    """Workers of the official SDKs renew their leases every 30 s.

    With leases of 10 s, we would treat them as dead. If we renewed every 40 s, they would steal our leases.
    """
    config = with_event_hub_times(Config(rules=rules), {"rules"})
    assert (config.lease_seconds, config.cycle_seconds, config.renew_seconds) == seconds


def test_explicit_lease_seconds_are_kept() -> None:
    config = Config(lease_seconds=6.0, cycle_seconds=45.0)
    assert with_event_hub_times(config, {"lease_seconds", "cycle_seconds"}) == config
    assert with_event_hub_times(evolve(config, cycle_seconds=45.0), {"lease_seconds"}).cycle_seconds == 12.05


def test_command_tells_an_event_hub_from_a_stream() -> None:
    settings = {"rules": "event-hubs", "dialect": "python", "cycle_seconds": 10}
    assert config_for_source(SOURCE, settings) == Config(
        rules=EventHubs("python"), lease_seconds=180.0, cycle_seconds=10.0, renew_seconds=20.0
    )
    assert config_for_source("kinesis://orders", {}) == Config()


def worker_with_frequent_looks(clock: Clock, store: FaultyStore) -> DrivenWorker:
    """Return a worker that holds all four leases, has just renewed them, and reads the table often."""
    driven_worker = member(store, ListSource(four_shards()), clock, config=evolve(KCL, cycle_seconds=2.0))
    driven_worker.run(3)
    return driven_worker


def test_steal_shown_by_a_reading_is_trusted_before_the_next_renewal() -> None:
    """Official workers steal without a request. Until our next renewal, up to 20 s, two workers would read a shard."""
    clock, store = Clock(), FaultyStore()
    driven_worker = worker_with_frequent_looks(clock, store)
    holding = driven_worker.worker.holdings[0]
    store.write(StealLease(store.row("s-0"), "sdk-1"))
    driven_worker.worker.hurry()
    driven_worker.worker.turn(clock.now)
    assert (holding.lost.is_set(), holding.why) == (True, "now owned by sdk-1")


def test_slow_peer_is_named_once_with_the_setting(caplog: pytest.LogCaptureFixture) -> None:
    """Workers that disagree about when a lease expires steal from each other forever. The warning names the setting."""
    clock, store = Clock(), FaultyStore()
    driven_worker = worker_with_frequent_looks(clock, store)
    store.write(StealLease(store.row("s-0"), "sdk-1"))
    with caplog.at_level(logging.WARNING, "leasehold.worker"):
        for _ in range(4):
            driven_worker.run(0.8 * KCL.lease_seconds)
            store.write(RenewLease(store.row("s-0")))
    messages = [record.getMessage() for record in caplog.records if "sdk-1" in record.getMessage()]
    assert len(messages) == 1
    assert messages[0].startswith("worker sdk-1 let ")
    assert "--lease-seconds here" in messages[0]
