"""A table's stream is disabled and enabled again while workers on one lease table read it."""

import time
from collections.abc import Callable
from typing import Any

import pytest
from running import running
from waiters import until

from leasehold.adapters.consumer.handling import Delivery
from leasehold.adapters.consumer.runner import Runner
from leasehold.adapters.sources.urls import open_source
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.config import Config
from leasehold.balancer.contradictions import reported
from leasehold.balancer.model import TRIM_HORIZON
from leasehold.stores.embedded.memory import MemoryStore
from leasehold_lab.standins.tables import TableStreams, run_table_server

CONFIG = Config(lease_seconds=3.0, initial_position=TRIM_HORIZON)


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "demo")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "demo")


def test_reenabled_stream_is_separate_and_the_old_one_is_read_by_arn() -> None:
    """Leases of the former stream stay until its records are read (L14)."""
    later = [0.0]
    table, store = TableStreams(open_shard_count=2, clock=lambda: time.time() + later[0]), MemoryStore()
    with run_table_server(table) as endpoint:
        present = f"dynamodb-streams://orders?region=eu-west-1&endpoint={endpoint}"

        def read(name: str, url: str, enough: Callable[[set[str], Worker], bool], **more: Any) -> set[str]:  # noqa: ANN401  the worker's signature
            received = set[str]()

            def handle(delivery: Delivery) -> None:
                received.update(record.change.keys["id"] for record in delivery.records)

            worker = Worker(store=store, source=open_source(url), me=name, config=CONFIG, **more)
            with running(Runner(worker, handle)):
                until(lambda: enough(received, worker), f"{name}: {received}")
            return received

        def put(prefix: str) -> set[str]:
            keys = {f"{prefix}-{n}" for n in range(20)}
            for key in keys:
                table.put(key, {})
            return keys

        old = put("old")
        assert read("a", present, lambda received, _: old <= received) == old
        remaining = put("left")
        table.disable_stream()
        former = present.replace("orders", table.arn)
        later[0] = 2.0  # a table cannot get two streams in one second
        table.enable_stream()
        new = put("new")
        assert read("b", present, lambda _, worker: worker.discovery.leases_unusable) == set()
        (message,) = reported(store.list().leases)
        assert ":orders was made anew at " in message
        assert remaining <= read("c", former, lambda received, _: remaining <= received)
        assert new == read("d", present, lambda received, _: new <= received, if_recreated="TRIM_HORIZON")


def test_new_group_reads_a_disabled_stream() -> None:
    """Its records can be read for a day, although none of its shards is open (L4)."""
    table, received = TableStreams(open_shard_count=2), set[str]()
    for n in range(20):
        table.put(f"i-{n}", {})
    table.end_open_shards()
    table.disable_stream()
    with run_table_server(table) as endpoint:
        source = open_source(f"dynamodb-streams://orders?region=eu-west-1&endpoint={endpoint}")
        store = MemoryStore()
        worker = Worker(store=store, source=source, me="a", config=CONFIG)

        def handle(delivery: Delivery) -> None:
            received.update(record.change.keys["id"] for record in delivery.records)

        with running(Runner(worker, handle)):
            until(lambda: len(received) == 20, f"{received}")
            until(lambda: all(lease.ended for lease in store.list().leases), "everything is read to its end")
        assert reported(store.list().leases) == ()
