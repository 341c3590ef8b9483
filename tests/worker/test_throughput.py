"""The measured throughput of a lease, and how it is stored in the table."""

from random import Random

import pytest
from virtual_fleet import FaultyStore, member, together
from waiters import Clock

from leasehold.adapters.consumer.handler_consumer import handler_reader
from leasehold.adapters.consumer.handling import Handling
from leasehold.adapters.sources.protocol import Record
from leasehold.adapters.worker.holding import MEASURE_SECONDS
from leasehold.adapters.worker.progress import Throughput
from leasehold.balancer.config import Config
from leasehold.balancer.model import TRIM_HORIZON, WEIGHT_MAX, Lease
from leasehold.stores.writes import CreateLease
from leasehold_lab.simulator.world.world import ListSource, ShardRecords, create_even_shards, create_shard


def test_throughput_is_the_average_and_unit_of_the_kcl() -> None:
    """A KCL 3.x leader and our planner must compare leases by the same measure."""
    throughput = Throughput(10.0)
    throughput.add(10 * 1024, 100.0)
    assert throughput.average(109.9) is None
    assert throughput.average(110.0) == 1024
    throughput.add(30 * 1024, 115.0)
    assert throughput.average(120.0) == 2048
    assert throughput.average(140.0) == 512


def test_new_owner_continues_the_measured_average() -> None:
    """Because the average continues, a new owner that catches up does not make the shard look hot."""
    throughput = Throughput(10.0, 4096)
    assert throughput.average(1000.0) == 4096
    throughput.add(0, 1000.0)
    assert throughput.average(1010.0) == 2048


@pytest.mark.parametrize("checkpoint_seconds", [0.0, 60.0])
def test_throughput_is_stored_with_renewals_and_checkpoints(checkpoint_seconds: float) -> None:
    clock, store, source = Clock(), FaultyStore(), ListSource([create_shard("s-0", 0, 9)])
    source.shard_logs["s-0"] = ShardRecords([Record(bytes(1024), str(number)) for number in range(1000)], size=1)
    driven_worker = member(store, source, clock, config=Config(lease_seconds=10.0, initial_position=TRIM_HORIZON))
    driven_worker.run(1)
    reader = handler_reader(
        driven_worker.worker,
        driven_worker.worker.holdings[0],
        Handling(lambda _batch: None, checkpoint_seconds=checkpoint_seconds),
    )
    next_step, end_time = clock.now, clock.now + 2 * MEASURE_SECONDS
    while clock.now < end_time:
        driven_worker.run(max(0.0, next_step - clock.now))
        next_step = reader.step(clock.now)
    assert store.row("s-0").weight == pytest.approx(5120, rel=0.1)  # five reads of 1 KiB per second


def test_unread_lease_keeps_its_throughput() -> None:
    clock, store = Clock(), FaultyStore()
    store.write(CreateLease(Lease("s-0", hash_range=(0, 9), weight=7680)))
    driven_worker = member(store, ListSource([create_shard("s-0", 0, 9)]), clock)
    driven_worker.run(60)
    assert (driven_worker.held, store.row("s-0").weight) == (["s-0"], 7680)


def test_owner_of_a_hot_shard_holds_few_others() -> None:
    """Workers share the load equally even if they then hold different numbers of leases."""
    clock, store = Clock(), FaultyStore()
    hash_range_size = 2**125
    source = ListSource([create_shard(f"s-{n}", n * hash_range_size, (n + 1) * hash_range_size - 1) for n in range(8)])
    fleet = [
        member(store, source, clock, worker_id, worker_id, Config(lease_seconds=10.0)) for worker_id in ("a-1", "b-1")
    ]
    rates = {f"s-{n}": 750.0 if n == 0 else 100.0 for n in range(8)}
    for _ in range(300):
        for driven_worker in fleet:
            for holding in driven_worker.worker.holdings:
                holding.throughput.add(int(rates[holding.key] * 1024), clock.now)
        together(fleet, 1.0)
        for driven_worker in fleet:
            for holding in driven_worker.worker.holdings:
                if holding.releasing:
                    holding.release()
    loads = [sum(rates[key] for key in driven_worker.held) for driven_worker in fleet]
    assert {row.key: (row.weight or 0) / 1024 for row in store.list().leases} == pytest.approx(rates, rel=0.3)
    assert sorted(loads) == [700.0, 750.0]


def test_bursts_move_no_lease() -> None:
    clock, store, rng = Clock(), FaultyStore(), Random(7)  # noqa: S311  the seed makes the test reproducible
    source = ListSource(create_even_shards(tuple(f"s-{n}" for n in range(8))))
    fleet = [
        member(store, source, clock, worker_id, worker_id, Config(lease_seconds=3.0)) for worker_id in ("a-1", "b-1")
    ]
    together(fleet, 10.0)
    leases_before = [driven_worker.held for driven_worker in fleet]
    for _ in range(300):
        for driven_worker in fleet:
            for holding in driven_worker.worker.holdings:
                holding.throughput.add(int(rng.choice((0.0, 0.0, 1.0, 3.0)) * 102_400), clock.now)
                if holding.releasing:
                    holding.release()
        together(fleet, 1.0)
    assert all(row.weight for row in store.list().leases)
    assert [driven_worker.held for driven_worker in fleet] == leases_before


def test_interval_restarts_after_a_delay_of_our_own() -> None:
    """The bytes of an interval with a delay do not show the throughput of the shard."""
    throughput = Throughput(10.0)
    throughput.add(99 * 1024, 100.0)
    throughput.rest(105.0)
    throughput.add(10 * 1024, 106.0)
    assert [throughput.average(now) for now in (114.9, 115.0)] == [None, 1024]


def test_throughput_is_never_more_than_a_row_may_hold() -> None:
    throughput = Throughput(10.0)
    throughput.add(WEIGHT_MAX * 100, 100.0)
    assert throughput.average(110.0) == WEIGHT_MAX
