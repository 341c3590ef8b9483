"""Stalled renewals do not delay those of other leases, and a lease that is not confirmed for too long is dropped."""

import time
from collections.abc import Callable, Iterable
from threading import Event
from typing import Any

import pytest
from attrs import define, evolve, field
from running import running
from virtual_fleet import DrivenWorker, FaultyStore, four_shards, member
from waiters import WAIT, Clock

from leasehold.adapters.consumer.runner import Runner
from leasehold.adapters.worker.annotations import Identity
from leasehold.adapters.worker.holding import Holding
from leasehold.adapters.worker.renewing import Renewing
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.actions import Look, Renew
from leasehold.balancer.config import Config
from leasehold.balancer.model import Lease, Me, Position, Version
from leasehold.stores.protocol import Done, Outcome
from leasehold.stores.writes import ClaimLease, CreateLease, RenewLease, Write
from leasehold_lab.simulator.world.world import ListSource


@define
class StallingMap:
    """A `map` that starts renewals. Those of one lease never end."""

    key: str
    begun: list[str] = field(factory=list)

    def __call__(self, function: Callable[[Any], object], items: Iterable[Any]) -> Iterable[object]:
        for item in items:
            self.begun.append(item[0].key)
            if item[0].key != self.key:
                function(item)
        return ()


def worker_with_stalled_renewal() -> tuple[FaultyStore, DrivenWorker, StallingMap]:
    """Return the store, a worker with four leases, and the map that stalls the renewals of one of them."""
    store, stalling = FaultyStore(), StallingMap("s-0")
    driven_worker = member(store, ListSource(four_shards()), Clock())
    driven_worker.run(1)
    assert driven_worker.held == ["s-0", "s-1", "s-2", "s-3"]
    driven_worker.each_renewal = stalling
    return store, driven_worker, stalling


def test_stalled_renewal_delays_no_other() -> None:
    store, driven_worker, _ = worker_with_stalled_renewal()
    epoch_before = store.row("s-1").epoch
    _, *other_holdings = driven_worker.worker.holdings
    driven_worker.run(30)
    assert not any(holding.lost.is_set() for holding in other_holdings)
    assert store.row("s-1").epoch >= epoch_before + 8


def test_stalled_renewal_is_not_started_twice() -> None:
    _, driven_worker, stalling = worker_with_stalled_renewal()
    driven_worker.run(9)
    assert stalling.begun.count("s-0") == 1


def test_waiting_renewal_is_checked_again_a_second_later() -> None:
    _, driven_worker, _ = worker_with_stalled_renewal()
    driven_worker.run(6)
    driven_worker.each_renewal = lambda function, items: ()  # noqa: ARG005  renewals get no responses now
    waits, drop_time = [], driven_worker.worker.holdings[0].confirmed_at + 10.0 * 4 / 3
    for _ in range(4):
        driven_worker.clock.now = max(driven_worker.clock.now, driven_worker.renew_due)
        due_time = driven_worker.worker.renew(driven_worker.clock.now, driven_worker.each_renewal)
        waits.append(round(due_time - driven_worker.clock.now, 6))
        driven_worker.renew_due = due_time
    assert driven_worker.clock.now < drop_time
    # Each lease waits on its own, and two of the three leases are checked at the same time.
    assert round(waits[1] + waits[2], 3) == 1.0


def test_unconfirmed_lease_is_dropped_although_its_renewal_stalls() -> None:
    _, driven_worker, _ = worker_with_stalled_renewal()
    (holding, *_) = driven_worker.worker.holdings
    drop_time = holding.confirmed_at + 10.0 * 4 / 3
    driven_worker.run(drop_time - driven_worker.clock.now)
    assert not holding.lost.is_set()
    driven_worker.run(0.2)
    assert holding.lost.is_set()


class HangingStore(FaultyStore):
    """A store in which all renewals of one lease hang."""

    def __init__(self) -> None:
        super().__init__()
        self.hanging, self.answer = Event(), Event()

    def write(self, write: Write) -> Outcome:
        """Write at once. A renewal of s-0 waits until the test sets `answer`."""
        if isinstance(write, RenewLease) and write.lease.key == "s-0":
            self.hanging.set()
            assert self.answer.wait(2 * WAIT)
        return super().write(write)


@pytest.mark.slow
def test_runner_keeps_renewing_during_a_hung_request() -> None:
    store = HangingStore()
    config = Config(lease_seconds=10.0, renew_seconds=0.1, initial_position=Position("TRIM_HORIZON"))
    worker = Worker(store=store, source=ListSource(four_shards()), me="a-1", config=config)
    runner = Runner(worker, lambda _delivery: None)
    with running(runner):
        assert store.hanging.wait(WAIT)
        expected_epochs = {lease.key: lease.epoch + 5 for lease in store.list().leases if lease.key != "s-0"}
        deadline = time.monotonic() + WAIT
        while any(store.row(key).epoch < epoch for key, epoch in expected_epochs.items()):
            assert time.monotonic() < deadline, f"{store.list().leases}, not yet {expected_epochs}"
            time.sleep(0.02)
        store.answer.set()


def test_lease_is_checked_when_due_and_at_every_beat() -> None:
    clock, store = Clock(), FaultyStore()
    leases = [Lease(f"s-{number}", owner="a", version=Version("1")) for number in range(3)]
    identity = Identity("a", "p", lambda: "")
    first_holding, second_holding, third_holding = all_holdings = tuple(
        Holding(store, lease, identity=identity, clock=lambda: clock.now, write_began=0.0, lease_seconds=10.0)
        for lease in leases
    )
    released_holdings: list[Holding] = []
    renewing = Renewing(Config(lease_seconds=10.0), released_holdings.append)

    def renewed_at(now: float, holdings: tuple[Holding, ...] = all_holdings) -> list[Holding]:
        clock.now = now
        return renewing.begin(holdings, now, Me("a"), Look(0.0), map, pause=1.5)

    assert renewed_at(0.1) == [first_holding, second_holding, third_holding]
    assert renewed_at(1.4) == []
    assert renewing.due(1.4) == pytest.approx(1.6)
    second_holding.ask_release()
    assert renewed_at(1.6) == [first_holding, second_holding, third_holding]
    assert released_holdings == [second_holding]
    assert renewed_at(1.7, (first_holding, third_holding)) == []
    fourth_holding = Holding(
        store,
        evolve(leases[0], key="s-4"),
        identity=identity,
        clock=lambda: clock.now,
        write_began=1.7,
        lease_seconds=10.0,
    )
    remaining_holdings = (first_holding, third_holding, fourth_holding)
    assert renewed_at(1.8, remaining_holdings) == [fourth_holding]
    assert {lease.key for lease in renewed_at(3.4, remaining_holdings)} == {"s-0", "s-2", "s-4"}


def create_lease_of_a(store: FaultyStore, key: str) -> Lease:
    """Create a lease, claim it for worker a, and return its row."""
    creation = store.write(CreateLease(Lease(key)))
    assert isinstance(creation, Done)
    outcome = store.write(ClaimLease(creation.lease, "a"))
    assert isinstance(outcome, Done)
    return outcome.lease


def held_since(clock: Clock, *claim_times: float) -> tuple[Holding, ...]:
    """Return one worker's holdings s-0, s-1 and so on, which were claimed at these times."""
    store, identity = FaultyStore(), Identity("a", "p", lambda: "")
    return tuple(
        Holding(
            store,
            create_lease_of_a(store, f"s-{number}"),
            identity=identity,
            clock=lambda: clock.now,
            write_began=held_since_time,
            lease_seconds=10.0,
        )
        for number, held_since_time in enumerate(claim_times)
    )


def test_leases_renewed_by_one_write_come_due_together() -> None:
    """The leases of a session are renewed by the same write, so they share its cost."""
    clock = Clock()
    holdings = held_since(clock, 0.0, 2.0, 4.0)
    for holding in holdings:
        holding.groups_writes = True
    renewing, renewed_keys = Renewing(Config(lease_seconds=10.0), lambda _holding: None), list[list[str]]()

    def record_and_map(function: Callable[[Any], object], items: Iterable[Any]) -> Iterable[object]:
        renewed_keys.append([holding.key for holding, _ in items])
        return map(function, items)

    def keys_renewed_at(now: float) -> list[str]:
        clock.now = now
        renewing.begin(holdings, now, Me("a"), Look(0.0), record_and_map)
        return renewed_keys.pop()

    keys_renewed_at(4.1)
    assert keys_renewed_at(5.4) == ["s-0", "s-1", "s-2"], "the first is due, and brings the others with it"
    assert renewing.due(5.4) == pytest.approx(10.7)
    assert keys_renewed_at(10.6) == []
    assert keys_renewed_at(10.8) == ["s-0", "s-1", "s-2"]


def test_leases_of_one_time_are_renewed_in_key_order() -> None:
    """The fixed order lets a simulation repeat its writes exactly, so that its failures can be reproduced."""
    clock = Clock(6.0)
    holdings = held_since(clock, *[0.0] * 9)
    for holding in holdings[::2]:
        holding.ask_release()
    renewed_keys, released_keys = list[str](), list[str]()

    def record_and_map(function: Callable[[Any], object], items: Iterable[Any]) -> Iterable[object]:
        items = list(items)
        renewed_keys.extend(holding.key for holding, _ in items)
        return map(function, items)

    renewing = Renewing(Config(lease_seconds=10.0), lambda holding: released_keys.append(holding.key))
    renewing.begin(holdings, 6.0, Me("a"), Look(0.0), record_and_map)
    keys = [holding.key for holding in holdings]
    assert (renewed_keys, released_keys) == ([*keys[::2], *keys[1::2]], keys[::2])


def renew_all(renewing: Renewing, holdings: tuple[Holding, ...], now: float) -> list[Holding]:
    return renewing.begin(holdings, now, Me("a"), Look(0.0), map)


def test_renewals_that_could_not_start_are_tried_again() -> None:
    clock = Clock(6.0)
    holdings, renewing = held_since(clock, 0.0, 0.0), Renewing(Config(lease_seconds=10.0), lambda _holding: None)

    def refuse(_function: Callable[[Any], object], _items: Iterable[Any]) -> Iterable[object]:
        raise RuntimeError("can't start new thread")

    with pytest.raises(RuntimeError):
        renewing.begin(holdings, 6.0, Me("a"), Look(0.0), refuse)
    assert renewing.due(6.0) <= 7.0
    assert renew_all(renewing, holdings, 7.0) == [*holdings]


def test_failed_renewal_is_repeated_a_second_later_and_not_sooner() -> None:
    """A store that fails must not get more requests than one that works."""
    clock, store = Clock(6.0), FaultyStore()
    (holding,) = holdings = held_since(clock, 0.0)
    holding._store, store.down = store, True  # noqa: SLF001  the store that holds the lease fails now
    renewing, attempts = Renewing(Config(lease_seconds=10.0), lambda _holding: None, clock), list[int]()
    for now in (6.0, 6.5, 6.9, 7.0):
        clock.now = now
        renew_all(renewing, holdings, now)
        attempts.append(len(store.write_requests))
    assert attempts == [1, 1, 1, 2]


def test_lease_that_expired_during_its_renewal_is_dropped_at_once() -> None:
    clock, store = Clock(6.0), FaultyStore()
    (holding,) = holdings = held_since(clock, 0.0)
    create_lease_of_a(store, "s-0")
    holding._store, store.lose_replies = store, 1  # noqa: SLF001  the store that holds the lease is slow now

    def sleep() -> None:
        clock.now = 20.0

    store.passes = sleep
    renew_all(Renewing(Config(lease_seconds=10.0), lambda _holding: None, clock), holdings, 6.0)
    assert holding.why == "dropped, not confirmed for 10 s: others may have it"


def test_parallel_renewals_follow_lasting_delays_and_not_a_single_one() -> None:
    """All leases can be renewed in time, with twice the need to spare. One slow request starts no further threads."""
    clock, config = Clock(6.0), Config(lease_seconds=10.0)
    holdings, renewing = held_since(clock, *[0.0] * 9), Renewing(config, lambda _holding: None, clock)
    renew_all(renewing, holdings, 6.0)
    store: Any = holdings[0]._store  # noqa: SLF001  all use it

    delay = 50.0

    def wait() -> None:
        clock.now += delay

    store.passes = wait
    action = Renew(holdings[0].lease, "M1")
    renewing.renew(holdings[0], action, Look(0.0))
    assert renewing.parallel_renewals == 1
    delay = 0.5
    for _ in range(60):
        renewing.renew(holdings[0], action, Look(0.0))
    assert renewing.parallel_renewals == pytest.approx(2 * len(holdings) / config.renew_seconds, abs=1.0)
    assert renewing.parallel_renewals > len(holdings) / config.renew_seconds + 1
