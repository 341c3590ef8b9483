"""When the worker of a slice ends, and what its verdict contains. The tests need no stream and no worker threads."""

import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
from attrs import define, evolve, field
from virtual_fleet import FaultyStore
from waiters import WAIT, Clock

from leasehold.adapters.consumer.handling import Handling
from leasehold.adapters.consumer.slices import SliceVerdict, is_read, run_slice, run_until
from leasehold.adapters.threads import ThreadScheduler
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.config import Config
from leasehold.balancer.model import SHARD_END, TRIM_HORIZON, Lease
from leasehold.stores.protocol import Listing, Malformed
from leasehold_lab.contract.actors import create_lease_with_owner
from leasehold_lab.simulator.world.world import ListSource, create_shard

RUNNING = "leasehold.adapters.consumer.slices"
SOON = 0.001


@define
class Run:
    """A replacement for `Runner`. Its run ends when `behavior` returns."""

    behavior: Callable[["Run"], None] = lambda _run: None
    arguments: dict[str, Any] = field(factory=dict)
    stopped: threading.Event = field(factory=threading.Event)
    stops: int = 0

    def run(self) -> None:
        self.behavior(self)

    def stop(self) -> None:
        self.stops += 1
        self.stopped.set()

    def __call__(self, worker: Worker, handling: Handling, **more: object) -> "Run":
        self.arguments = {"worker": worker, "handling": handling, **more}
        return self


def until_stopped(run: Run) -> None:
    """Wait until the run is stopped, as `behavior` of a run that does not end by itself."""
    run.stopped.wait(WAIT)


def until_looked(check_started: threading.Event) -> Run:
    """Return a run that ends by itself once the first check has begun."""

    def wait(_run: Run) -> None:
        check_started.wait(WAIT)

    return Run(wait)


def check_succeeded_before_end(run: Run, is_over: Callable[[], bool], **seconds: float) -> bool:
    """Run `run_until`, and return whether the check succeeded before the run ended."""
    runner: Any = run
    return run_until(runner, is_over, **{"look_seconds": SOON, **seconds})


def test_run_is_stopped_once_by_the_first_check_that_finds_it_over() -> None:
    check_results, check_threads, run = [False, False, True], set[tuple[str, bool]](), Run(until_stopped)

    def record_check() -> bool:
        check_threads.add((threading.current_thread().name, threading.current_thread().daemon))
        return check_results.pop(0)

    assert check_succeeded_before_end(run, record_check) is True
    assert (check_results, run.stops, check_threads) == ([], 1, {("leasehold-slice", True)})


def test_run_that_ends_before_the_check_is_not_over() -> None:
    assert check_succeeded_before_end(Run(), lambda: True, look_seconds=WAIT) is False


def test_hung_check_does_not_keep_the_worker() -> None:
    check_started, check_may_end, check_ended = threading.Event(), threading.Event(), threading.Event()

    def hang() -> bool:
        check_started.set()
        check_may_end.wait(WAIT)
        check_ended.set()
        return False

    assert check_succeeded_before_end(until_looked(check_started), hang, drain_seconds=SOON) is False
    assert not check_ended.is_set()
    check_may_end.set()
    assert check_ended.wait(WAIT)


def test_failing_check_ends_the_run_with_its_reason() -> None:
    run = Run(until_stopped)

    def raise_value_error() -> bool:
        raise ValueError("a row of another form")

    with pytest.raises(ValueError, match="a row of another form"):
        check_succeeded_before_end(run, raise_value_error)
    assert run.stops == 1


def test_check_under_way_may_still_find_the_slice_read() -> None:
    """If a run ends by itself during a check, the result of that check still counts."""
    check_started = threading.Event()

    def report_over() -> bool:
        check_started.set()
        return True

    assert check_succeeded_before_end(until_looked(check_started), report_over) is True


def batch_of(count: int) -> Any:  # noqa: ANN401  only its records are counted
    """Return a batch of this many records."""

    @define
    class FakeBatch:
        records: tuple[int, ...] = tuple(range(count))

    return FakeBatch()


def sliced(monkeypatch: pytest.MonkeyPatch, handling: Any, use_callables: Callable[[Handling], None]) -> SliceVerdict:  # noqa: ANN401
    """Return the verdict of a run of a slice, during which `use_callables` calls the callables of the handling."""

    def call_and_wait(run: Run) -> None:
        use_callables(run.arguments["handling"])
        until_stopped(run)

    monkeypatch.setattr(f"{RUNNING}.Runner", Run(call_and_wait))
    monkeypatch.setattr(f"{RUNNING}.is_read", lambda _worker: True)
    return run_slice(fleet().worker, handling, check_seconds=SOON)


def test_verdict_counts_only_handled_records(monkeypatch: pytest.MonkeyPatch) -> None:
    deliveries, return_values = list[object](), [None, False, None]

    def handle(delivery: object) -> Any:  # noqa: ANN401  user handlers return anything
        deliveries.append(delivery)
        return return_values.pop(0)

    batches = [batch_of(2), batch_of(10), batch_of(3)]
    reported_values = list[object]()

    def use_callables(handling: Handling) -> None:
        assert handling.dead_letter is None
        reported_values.extend(handling.handler(batch) for batch in batches)

    assert sliced(monkeypatch, handle, use_callables) == SliceVerdict(True, 5, 0, 0)
    assert (deliveries, reported_values) == (batches, [None, False, None])


def test_awaited_batch_counts_once_it_returned_none(monkeypatch: pytest.MonkeyPatch) -> None:
    return_values = [None, False, None]

    async def handle(_delivery: object) -> Any:  # noqa: ANN401  user handlers return anything
        if not return_values:
            raise ZeroDivisionError
        return return_values.pop(0)

    replies = list[object]()

    def use_callables(handling: Handling) -> None:
        for count in (2, 10, 3):
            waiting: Any = handling.handler(batch_of(count))
            with pytest.raises(StopIteration) as end:
                waiting.send(None)
            replies.append(end.value.value)
        failing: Any = handling.handler(batch_of(20))
        with pytest.raises(ZeroDivisionError):
            failing.send(None)

    assert sliced(monkeypatch, handle, use_callables) == SliceVerdict(True, 5, 0, 0)
    assert replies == [None, False, None]


def test_verdict_counts_dead_letters_and_shards_and_the_observer_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    reported, dead_lettered, error = list[tuple[str, object]](), list[tuple[object, Exception]](), ValueError()
    handling = Handling(
        lambda _batch: None,
        dead_letter=lambda batch, fault: dead_lettered.append((batch, fault)),
        observer=lambda happening, holding: reported.append((happening, holding)),
    )
    batches, holding = [batch_of(1), batch_of(1)], object()

    def use_callables(counting_handling: Handling) -> None:
        assert counting_handling.dead_letter is not None
        for batch in batches:
            assert counting_handling.dead_letter(batch, error) is None
        observe: Any = counting_handling.observer
        for happening in ("initialize", "shard-ended", "shard-ended", "shard-ended", "stopped"):
            observe(happening, holding)

    assert sliced(monkeypatch, handling, use_callables) == SliceVerdict(True, 0, 2, 3)
    assert dead_lettered == [(batch, error) for batch in batches]
    assert {subject for _, subject in reported} == {holding}
    assert [event for event, _ in reported] == ["initialize", *["shard-ended"] * 3, "stopped"]


def test_slice_runs_with_the_limits_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    run, worker, meter, checked_workers, limits_used = (
        Run(until_stopped),
        fleet().worker,
        object(),
        list[Worker](),
        list[float](),
    )

    def is_over(subject: Worker) -> bool:
        checked_workers.append(subject)
        return True

    def until(runner: Any, is_over: Callable[[], bool], *, drain_seconds: float, look_seconds: float) -> bool:  # noqa: ANN401
        assert runner is run
        limits_used.extend((drain_seconds, look_seconds))
        return is_over()

    monkeypatch.setattr(f"{RUNNING}.Runner", run)
    monkeypatch.setattr(f"{RUNNING}.is_read", is_over)
    monkeypatch.setattr(f"{RUNNING}.run_until", until)
    handling, user_options = (
        Handling(lambda _batch: None, attempts=7),
        {"meter": meter, "drain_seconds": 3.0, "memory_bytes": 9, "readers": 2},
    )
    options: dict[str, Any] = {**user_options, "check_seconds": 0.5}
    assert run_slice(worker, handling, **options).finished
    assert (checked_workers, limits_used) == ([worker], [3.0, 0.5])
    handling_used = run.arguments.pop("handling")
    assert run.arguments == {"worker": worker, "executor": None, **user_options}
    assert evolve(handling, handler=handling_used.handler, observer=handling_used.observer) == handling_used


@define
class Table:
    """A lease table, and a stream with a worker that reads it."""

    store: FaultyStore = field(factory=FaultyStore)
    source: ListSource = field(factory=ListSource)

    @property
    def worker(self) -> Worker:
        config = Config(initial_position=TRIM_HORIZON)
        return Worker(store=self.store, source=self.source, me="a", config=config, scheduler=ThreadScheduler(Clock()))

    def end(self, *names: str) -> None:
        """Create finished leases for these shards."""
        for name in names:
            create_lease_with_owner(self.store, Lease(name, shard=name, hash_range=(0, 9), checkpoint=SHARD_END))


def fleet() -> Table:
    """Return a table without leases, and a stream with a closed shard p and its open child q."""
    table = Table()
    table.source.listed = [create_shard("p", 0, 9, open=False), create_shard("q", 0, 9, "p")]
    return table


def test_slice_is_read_once_each_shard_has_a_finished_lease() -> None:
    table = fleet()
    assert not is_read(table.worker), "a table without leases is one that nobody has begun"
    table.end("p")
    assert not is_read(table.worker), "the child has none yet"
    table.end("q")
    assert is_read(table.worker) is True
    assert is_read(table.worker, lambda lease: lease.key == "q") is False
    table.source.listed.append(create_shard("r", 10, 19))
    create_lease_with_owner(table.store, Lease("r", hash_range=(10, 19)))
    assert not is_read(table.worker), "one is not finished"
    assert is_read(table.worker, lambda _lease: True)


def test_shard_without_a_known_end_is_unread() -> None:
    table = fleet()
    table.end("p", "q")
    table.source.down = True
    assert is_read(table.worker) is False
    table.source.down, table.store.down = False, True
    assert is_read(table.worker) is False


def test_unreadable_row_counts_as_unfinished() -> None:
    class Damaged(FaultyStore):
        def list(self) -> Listing:
            return evolve(super().list(), malformed=(Malformed("s-9", "x", "it is odd"),))

    table = evolve(fleet(), store=Damaged())
    table.end("p", "q")
    assert is_read(table.worker) is False


def test_signal_stops_the_run_before_the_slice_is_over() -> None:
    run = Run(lambda _run: signal.raise_signal(signal.SIGTERM))
    assert check_succeeded_before_end(run, lambda: True, look_seconds=WAIT) is False
    assert run.stops == 1


def test_own_lease_of_a_missing_shard_leaves_its_children_to_be_read() -> None:
    table = fleet()
    table.source.listed = [create_shard("q", 0, 9, "p")]
    create_lease_with_owner(table.store, Lease("p", shard="p", hash_range=(0, 9), owner="a"))
    assert is_read(table.worker, lambda _lease: True) is False
