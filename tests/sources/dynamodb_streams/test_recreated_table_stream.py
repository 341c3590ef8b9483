"""The stream of a table is disabled and enabled again while workers read it."""

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
from leasehold.balancer.contradictions import reported_contradictions
from leasehold.balancer.model import TRIM_HORIZON
from leasehold.stores.embedded.memory import MemoryStore
from leasehold_lab.standins.tables import TableStreams, run_table_server

CONFIG = Config(lease_seconds=3.0, initial_position=TRIM_HORIZON)


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "demo")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "demo")


def test_reenabled_stream_is_separate_and_the_old_one_is_read_by_arn() -> None:
    """The leases of the old stream stay, so that its records can still be read by its ARN (L14)."""
    clock_offset = [0.0]
    table, store = TableStreams(open_shard_count=2, clock=lambda: time.time() + clock_offset[0]), MemoryStore()
    with run_table_server(table) as endpoint:
        current_url = f"dynamodb-streams://orders?region=eu-west-1&endpoint={endpoint}"

        def read(name: str, url: str, is_done: Callable[[set[str], Worker], bool], **options: Any) -> set[str]:  # noqa: ANN401  the worker's signature
            received_ids = set[str]()

            def handle(delivery: Delivery) -> None:
                received_ids.update(record.change.keys["id"] for record in delivery.records)

            worker = Worker(store=store, source=open_source(url), me=name, config=CONFIG, **options)
            with running(Runner(worker, handle)):
                until(lambda: is_done(received_ids, worker), f"{name}: {received_ids}")
            return received_ids

        def put(prefix: str) -> set[str]:
            keys = {f"{prefix}-{n}" for n in range(20)}
            for key in keys:
                table.put(key, {})
            return keys

        old_keys = put("old")
        assert read("a", current_url, lambda received, _: old_keys <= received) == old_keys
        unread_keys = put("left")
        table.disable_stream()
        former_url = current_url.replace("orders", table.arn)
        clock_offset[0] = 2.0  # A table cannot get two streams in the same second.
        table.enable_stream()
        new_keys = put("new")
        assert read("b", current_url, lambda _, worker: worker.discovery.leases_unusable) == set()
        (message,) = reported_contradictions(store.list().leases)
        assert ":orders was made anew at " in message
        assert unread_keys <= read("c", former_url, lambda received, _: unread_keys <= received)
        assert new_keys == read("d", current_url, lambda received, _: new_keys <= received, if_recreated="TRIM_HORIZON")


def test_new_group_reads_a_disabled_stream() -> None:
    """The records of a disabled stream can still be read for a day, although all of its shards are closed (L4)."""
    table, received_ids = TableStreams(open_shard_count=2), set[str]()
    for n in range(20):
        table.put(f"i-{n}", {})
    table.end_open_shards()
    table.disable_stream()
    with run_table_server(table) as endpoint:
        source = open_source(f"dynamodb-streams://orders?region=eu-west-1&endpoint={endpoint}")
        store = MemoryStore()
        worker = Worker(store=store, source=source, me="a", config=CONFIG)

        def handle(delivery: Delivery) -> None:
            received_ids.update(record.change.keys["id"] for record in delivery.records)

        with running(Runner(worker, handle)):
            until(lambda: len(received_ids) == 20, f"{received_ids}")
            until(lambda: all(lease.ended for lease in store.list().leases), "everything is read to its end")
        assert reported_contradictions(store.list().leases) == ()
