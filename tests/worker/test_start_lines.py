"""What `consume` prints on a terminal: that the worker joined, which leases it takes and why, and that it ended."""

import io
import logging
import sys

import pytest
from virtual_fleet import FaultyStore

from leasehold.adapters.cli.common.start_lines import print_start_lines
from leasehold.adapters.threads import ThreadScheduler
from leasehold.adapters.worker.annotations import PROCESS
from leasehold.adapters.worker.scheduler import Unread
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.config import Config
from leasehold.balancer.model import TRIM_HORIZON, Lease
from leasehold.stores.writes import ClaimLease, CreateLease
from leasehold_lab.simulator.world.world import ListSource, create_even_shards


class Terminal(io.StringIO):
    """A standard error stream that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("terminal", [True, False])
def test_worker_on_a_terminal_prints_what_it_takes_and_why(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    """Nothing is printed if standard error is not a terminal. In both cases, the log level is restored."""
    stderr = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    clock_time = [0.0]
    store, source = FaultyStore(), ListSource(create_even_shards(("s-0", "s-1", "s-2", "s-3")))
    for number in range(4):
        store.write(CreateLease(Lease(f"s-{number}", shard=f"s-{number}", checkpoint=TRIM_HORIZON)))
    store.write(ClaimLease(store.get(["s-1"])[0], "former"))
    store.write(ClaimLease(store.get(["s-2"])[0], "ann", ((PROCESS, "p-1/bob"),)))
    store.write(ClaimLease(store.get(["s-3"])[0], "ann", ((PROCESS, "p-0/ann"),)))
    config = Config(lease_seconds=10.0)
    worker = Worker(
        store=store,
        source=source,
        me="ann",
        config=config,
        scheduler=ThreadScheduler(lambda: clock_time[0]),
        consumer=Unread(),
    )
    log = logging.getLogger("leasehold.worker")
    other_handler = logging.NullHandler()
    monkeypatch.setattr(logging.getLogger(), "handlers", [other_handler])
    log_state_before = log.level, tuple(log.handlers)
    with print_start_lines(worker, "kinesis://orders", "sqlite:///leases.db"):
        for _ in range(200):
            worker.renew(clock_time[0])
            clock_time[0] = max(clock_time[0] + 0.5, min(worker.turn(clock_time[0]), clock_time[0] + 5.0))
    assert (log.level, tuple(log.handlers)) == log_state_before
    assert other_handler.filters == []
    lines = stderr.getvalue().splitlines()
    if not terminal:
        assert lines == []
        return
    assert lines[0].startswith("ann joined: reads kinesis://orders with leases in sqlite:///leases.db; rules minimal, ")
    assert "leasehold leases 'sqlite:///leases.db'" in lines[1]
    lines_by_lease = {line.split()[1].rstrip(":"): line for line in lines[2:-1]}
    assert "no worker had it (M" in lines_by_lease["s-0"]
    assert "former stopped renewing it (M" in lines_by_lease["s-1"]
    assert "bob handed it off (H4)" in lines_by_lease["s-2"]
    assert "process p-0 of this worker held it (H4)" in lines_by_lease["s-3"]
    assert lines_by_lease["s-1"].endswith("4 shards are open")
    assert lines[-1] == "ann ended"
