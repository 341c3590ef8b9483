"""Renewals that stall: no other lease waits for them, and an unconfirmed lease is soon dropped."""

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
from leasehold.balancer.actions import Look
from leasehold.balancer.config import Config
from leasehold.balancer.model import Lease, Me, Position, Version
from leasehold.stores.protocol import Done, Outcome
from leasehold.stores.writes import ClaimLease, CreateLease, RenewLease, Write
from leasehold_lab.simulator.world.world import ListSource


@define
class Stalling:
    """Starts what it is given; renewals of one lease never return."""

    key: str
    begun: list[str] = field(factory=list)

    def __call__(self, function: Callable[[Any], object], items: Iterable[Any]) -> Iterable[object]:
        for item in items:
            self.begun.append(item[0].key)
            if item[0].key != self.key:
                function(item)
        return ()


def stalled() -> tuple[FaultyStore, DrivenWorker, Stalling]:
    """A worker of four leases, one of which gets no more responses."""
    store, stalling = FaultyStore(), Stalling("s-0")
    alone = member(store, ListSource(four_shards()), Clock())
    alone.run(1)
    assert alone.held == ["s-0", "s-1", "s-2", "s-3"]
    alone.each_renewal = stalling
    return store, alone, stalling


def test_stalled_renewal_delays_no_other() -> None:
    store, alone, _ = stalled()
    before = store.row("s-1").epoch
    _, *others = alone.worker.holdings
    alone.run(30)
    assert not any(holding.lost.is_set() for holding in others)
    assert store.row("s-1").epoch >= before + 8


def test_stalled_renewal_is_not_started_twice() -> None:
    _, alone, stalling = stalled()
    alone.run(9)
    assert stalling.begun.count("s-0") == 1


def test_waiting_renewal_is_checked_again_a_second_later() -> None:
    _, alone, _ = stalled()
    alone.run(6)
    alone.each_renewal = lambda function, items: ()  # noqa: ARG005  no renewal gets a response any more
    waits, drop_at = [], alone.worker.holdings[0].confirmed + 10.0 * 4 / 3
    for _ in range(4):
        alone.clock.now = max(alone.clock.now, alone.renew_due)
        due = alone.worker.renew(alone.clock.now, alone.each_renewal)
        waits.append(round(due - alone.clock.now, 6))
        alone.renew_due = due
    assert alone.clock.now < drop_at
    # Each lease waits by itself, and two of three are checked together.
    assert round(waits[1] + waits[2], 3) == 1.0


def test_unconfirmed_lease_is_dropped_although_its_renewal_stalls() -> None:
    _, alone, _ = stalled()
    (holding, *_) = alone.worker.holdings
    due = holding.confirmed + 10.0 * 4 / 3
    alone.run(due - alone.clock.now)
    assert not holding.lost.is_set()
    alone.run(0.2)
    assert holding.lost.is_set()


class HangingStore(FaultyStore):
    """A store in which the renewals of one lease hang."""

    def __init__(self) -> None:
        super().__init__()
        self.hanging, self.answer = Event(), Event()

    def write(self, write: Write) -> Outcome:
        """Write at once, or much later."""
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
        others = {lease.key: lease.epoch + 5 for lease in store.list().leases if lease.key != "s-0"}
        deadline = time.monotonic() + WAIT
        while any(store.row(key).epoch < epoch for key, epoch in others.items()):
            assert time.monotonic() < deadline, f"{store.list().leases}, not yet {others}"
            time.sleep(0.02)
        store.answer.set()


def test_lease_is_checked_when_due_and_at_every_beat() -> None:
    clock, store = Clock(), FaultyStore()
    leases = [Lease(f"s-{place}", owner="a", version=Version("1")) for place in range(3)]
    identity = Identity("a", "p", lambda: "")
    first, second, third = held = tuple(
        Holding(store, lease, identity=identity, clock=lambda: clock.now, begun=0.0, lease_seconds=10.0)
        for lease in leases
    )
    released: list[Holding] = []
    renewing = Renewing(Config(lease_seconds=10.0), released.append)

    def looked_at(now: float, holdings: tuple[Holding, ...] = held) -> list[Holding]:
        clock.now = now
        return renewing.begin(holdings, now, Me("a"), Look(0.0), map, pause=1.5)

    assert looked_at(0.1) == [first, second, third]
    assert looked_at(1.4) == []
    assert renewing.due(1.4) == pytest.approx(1.6)
    second.ask_release()
    assert looked_at(1.6) == [first, second, third]
    assert released == [second]
    assert looked_at(1.7, (first, third)) == []
    fourth = Holding(
        store, evolve(leases[0], key="s-4"), identity=identity, clock=lambda: clock.now, begun=1.7, lease_seconds=10.0
    )
    with_fourth = (first, third, fourth)
    assert looked_at(1.8, with_fourth) == [fourth]
    assert {lease.key for lease in looked_at(3.4, with_fourth)} == {"s-0", "s-2", "s-4"}


def claimed(store: FaultyStore, key: str) -> Lease:
    """Return the row of a new lease owned by a."""
    created = store.write(CreateLease(Lease(key)))
    assert isinstance(created, Done)
    outcome = store.write(ClaimLease(created.lease, "a"))
    assert isinstance(outcome, Done)
    return outcome.lease


def held_since(clock: Clock, *begun: float) -> tuple[Holding, ...]:
    """Return leases s-0, s-1 and so on of one worker, each held since its time."""
    store, identity = FaultyStore(), Identity("a", "p", lambda: "")
    return tuple(
        Holding(
            store,
            claimed(store, f"s-{place}"),
            identity=identity,
            clock=lambda: clock.now,
            begun=since,
            lease_seconds=10.0,
        )
        for place, since in enumerate(begun)
    )


def test_leases_renewed_by_one_write_come_due_together() -> None:
    """The leases of a session share one write, which a group pays for once."""
    clock = Clock()
    held = held_since(clock, 0.0, 2.0, 4.0)
    for holding in held:
        holding.grouped = True
    renewing, tended = Renewing(Config(lease_seconds=10.0), lambda _holding: None), list[list[str]]()

    def each(function: Callable[[Any], object], items: Iterable[Any]) -> Iterable[object]:
        tended.append([holding.key for holding, _ in items])
        return map(function, items)

    def looked(now: float) -> list[str]:
        clock.now = now
        renewing.begin(held, now, Me("a"), Look(0.0), each)
        return tended.pop()

    looked(4.1)
    assert looked(5.4) == ["s-0", "s-1", "s-2"], "the first is due, and brings the others with it"
    assert renewing.due(5.4) == pytest.approx(10.7)
    assert looked(10.6) == []
    assert looked(10.8) == ["s-0", "s-1", "s-2"]


def test_leases_of_one_time_are_renewed_in_key_order() -> None:
    """A simulation writes in the same order every time, so that its failures can be reproduced."""
    clock = Clock(6.0)
    held = held_since(clock, *[0.0] * 9)
    for holding in held[::2]:
        holding.ask_release()
    renewed, released = list[str](), list[str]()

    def each(function: Callable[[Any], object], items: Iterable[Any]) -> Iterable[object]:
        items = list(items)
        renewed.extend(holding.key for holding, _ in items)
        return map(function, items)

    renewing = Renewing(Config(lease_seconds=10.0), lambda holding: released.append(holding.key))
    renewing.begin(held, 6.0, Me("a"), Look(0.0), each)
    keys = [holding.key for holding in held]
    assert (renewed, released) == ([*keys[::2], *keys[1::2]], keys[::2])
