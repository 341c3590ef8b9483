"""Child processes as handlers: how they are notified of the end of a shard and of a stop."""

import logging
import sys
from pathlib import Path
from threading import Thread

import pytest
from waiters import until

from leasehold.adapters.consumer.runner import Runner
from leasehold.adapters.multilang.children import ChildProcesses
from leasehold.adapters.multilang.daemon import ChildHandler
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.config import Config
from leasehold.balancer.model import SHARD_END, TRIM_HORIZON, Position
from leasehold.stores.embedded.memory import MemoryStore
from leasehold_lab.simulator.world.world import ListSource, ShardRecords, create_records, create_shard

CHILD = Path(__file__).parents[1] / "multilang" / "child.py"


def test_child_process_is_notified_of_shard_end_and_stop(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "leasehold.child")
    parent, child = create_shard("s-0", 0, 9, open=False), create_shard("s-1", 0, 9, "s-0")
    source, store = ListSource(), MemoryStore()
    source.listed = [parent, child]
    source.shard_logs["s-0"] = ShardRecords(create_records(4), ended=True, children=(child,))
    source.shard_logs["s-1"] = ShardRecords(create_records(3))
    worker = Worker(
        store=store, source=source, me="a-1", config=Config(lease_seconds=10, initial_position=TRIM_HORIZON)
    )
    children = ChildProcesses([sys.executable, str(CHILD), "faithful", ""], max_records=3)
    with ChildHandler(children) as handler:
        runner = Runner(worker, handler.handling)
        thread = Thread(target=runner.run)
        thread.start()
        until(lambda: any(row.key == "s-1" and row.checkpoint == Position("102") for row in store.list().leases))
        runner.stop()
        thread.join()
    rows = {row.key: (row.checkpoint, row.owner) for row in store.list().leases}
    assert rows == {"s-0": (SHARD_END, None), "s-1": (Position("102"), None)}
    messages = [
        record.message.split(": ")[1]
        for record in caplog.records
        if record.name == "leasehold.child" and "INFO" not in record.message
    ]
    assert messages == [
        "started", "got initialize 0", "got processRecords 3", "got processRecords 1", "got shardEnded 0",
        "ended with status 0",
        "started", "got initialize 0", "got processRecords 3", "got shutdownRequested 0", "got leaseLost 0",
        "ended with status 0",
    ]  # fmt: skip
