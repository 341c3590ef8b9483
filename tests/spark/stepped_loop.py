"""A query's lease loop and reader without threads or randomness, on a clock that advances only while Spark waits."""

import math
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any, cast
from uuid import UUID

import pytest
from attrs import Factory, define
from fake_stream import KillableStore, Stream
from waiters import Clock

from leasehold.adapters.consumer.schedule import Step
from leasehold.adapters.spark.kinesis.options import KINESIS_SOURCE
from leasehold.adapters.spark.kinesis.rows import make_columns
from leasehold.adapters.spark.lease_loop import LeaseLoop
from leasehold.adapters.spark.leased_source import LeasedReader
from leasehold.adapters.spark.options import ALL_SOURCES, OptionReader, parse_lease_options
from leasehold.adapters.spark.rows import SourceSpec
from leasehold.adapters.threads import ThreadScheduler
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.model import Position
from leasehold.stores.protocol import Store

TICK = 0.05


@define
class Steps:
    """Runs the steps of shards when a test asks for it.

    A step that replaces another one waits until the other step has ended.
    """

    steps: dict[str, list[Step]] = Factory(dict)
    dues: dict[str, float] = Factory(dict)

    def add(self, key: str, step: Step, _instead: object = None) -> None:
        """Add a step. It is due immediately, or after the steps that are already under this key."""
        self.steps.setdefault(key, []).append(step)
        self.wake(key)

    def wake(self, key: str) -> None:
        self.dues[key] = -math.inf

    def run(self, now: float) -> None:
        """Run every due step once."""
        for key in [key for key, due in sorted(self.dues.items()) if due <= now and self.steps[key]]:
            self.dues[key] = self.steps[key][0](now)
            if self.dues[key] == math.inf:
                del self.steps[key][0]
                self.dues[key] = -math.inf if self.steps[key] else math.inf


class Stepped(LeaseLoop):
    """The real loop without its threads. It advances only while Spark waits for rows."""

    clock = Clock()

    def start(self, *, only_now: bool) -> None:
        self._shared_tables.only_now = only_now
        runner = self._runner
        lease_readers = runner._lease_readers  # noqa: SLF001  its tasks would wait for the machine's own clock
        lease_readers.schedule.close(runner.worker.clock())
        self._steps = Steps()
        self._worker.wake_runner = self._request_turn
        self._is_turn_requested = False
        lease_readers.schedule = self._steps  # type: ignore[assignment]  # as much of it as is called
        self._turn_due = self._renew_due = -math.inf

    def wait_until(self, is_done: Callable[[], bool], seconds: float) -> None:
        """Run everything that is due until `is_done` returns true or `seconds` have passed."""
        deadline = self.clock.now + seconds
        while self.clock.now < deadline and not is_done():
            self.tick()

    def tick(self) -> None:
        self.clock.now += TICK
        now, worker = self.clock.now, self._worker
        if now >= self._renew_due:
            self._renew_due = worker.renew(now)
        if self._is_turn_requested or now >= self._turn_due:
            self._is_turn_requested = False
            self._turn_due = worker.turn(now)
        self._steps.run(now)

    def _request_turn(self) -> None:
        self._is_turn_requested = True


def install_stepped_clock(patch: pytest.MonkeyPatch) -> Clock:
    """Make the readers of the test run in steps, and shorten the waits of replays."""
    clock, uuid_numbers = Clock(), count(1)

    def create_worker(**options: Any) -> Worker:  # noqa: ANN401  as those of a worker
        return Worker(scheduler=ThreadScheduler(clock, uniform=lambda low, _high: low), **options)

    Stepped.clock = clock
    for name, value in {
        "query_run.LeaseLoop": Stepped,
        "query_run.Worker": create_worker,
        "query_run.time": clock,
        "leased_source.end_on_signal": lambda _stop: None,
        "query_run.set_up_logging": lambda: None,
        "options.uuid4": lambda: UUID(int=next(uuid_numbers) << 96),
        "replay.READ_PAUSE_SECONDS": 0.001,
        "replay.MAX_BACKOFF_SECONDS": 0.001,
        "replay.TIP_SILENCE_SECONDS": 0.05,
        "replay.OWNER_CHECK_SECONDS": 0.02,
        "replay.POLL_SECONDS": 0.01,
        "lease_loop.STALL_SECONDS": 0.1,
        "lease_loop.STALL_LEASE_TIMES": 0.0,
    }.items():
        patch.setattr(f"leasehold.adapters.spark.{name}", value)
    return clock


def new_reader(
    stream: Stream,
    killable_store: KillableStore,
    *,
    rereadable: bool,
    flush_on_idle: str,
    start_positions: Mapping[str, Position] = {},
    **more_options: str,
) -> LeasedReader:
    """Return a new run over this stream. Its store is one process's view of the table."""

    def open_lease_store(_url: str, **_how: bool) -> Store:
        return cast("Store", killable_store)

    source_spec = SourceSpec(
        lambda: stream,
        make_columns("fake"),
        0.01,
        2**53,
        rereadable,
        stream="fake://stream",
        start_positions=start_positions,
    )
    raw_options = {"lease.durationMs": "2000", "lease.flushOnIdle": flush_on_idle, "lease.cores": "1", **more_options}
    option_reader = OptionReader(raw_options, ALL_SOURCES, KINESIS_SOURCE)
    lease_options = parse_lease_options(
        option_reader, "sqlite:///unused", {"initial_position": "TRIM_HORIZON"}, "maxRowsPerTrigger"
    )
    return LeasedReader(source_spec, lease_options, open_lease_store)
