"""The check of a handler call, which finds that the call is running, slow or finished, or must be abandoned."""

import math
from collections.abc import Callable

import pytest
from attrs import define, field
from reader_harness import ReaderHarness
from virtual_fleet import ManualExecutor
from waiters import Clock

from leasehold.adapters.consumer.dispatcher import (
    CallEnded,
    CallState,
    Dispatcher,
    GivenUp,
    HandlerCall,
    LeaseLost,
    NotBegun,
    Running,
)
from leasehold.adapters.consumer.handling import Handling
from leasehold.adapters.worker.holding import Holding


@define
class WatchedHandler:
    """A held lease, the checks of its handler, and everything that the checks reported."""

    policy: dict[str, float] = field(factory=dict)
    executor: ManualExecutor = field(factory=ManualExecutor)
    harness: ReaderHarness = field(factory=ReaderHarness)
    slow: list[tuple[str, float]] = field(factory=list)
    woken_keys: list[str] = field(factory=list)
    reasons: list[str] = field(factory=list)
    calls: list[str] = field(factory=list)
    dispatcher: Dispatcher = field(init=False)
    handling: Handling = field(init=False)
    handler_call: HandlerCall = field(init=False)

    def __attrs_post_init__(self) -> None:
        def record_slow_call(holding: Holding, seconds: float) -> None:
            assert self.executor.replaced, "others wait for its thread, and an observer may take its time"
            self.slow.append((holding.key, seconds))

        self.dispatcher = Dispatcher(
            self.executor, wake=self.woken_keys.append, end_worker=lambda reason: self.reasons.append(repr(reason))
        )
        self.handling = Handling(lambda _batch: None, slow=record_slow_call, **self.policy)  # type: ignore[arg-type]

    @property
    def clock(self) -> Clock:
        return self.harness.clock

    def begin(self, call: Callable[[], object] = lambda: None) -> CallState:
        """Dispatch a batch, and return the result of the first check."""

        def handle() -> object:
            self.calls.append("handled")
            return call()

        self.handler_call = HandlerCall(self.harness.holding, self.handling, self.clock, handle)
        return self.dispatcher.begin(self.handler_call) or self.check_after(self.clock.now - 1000.0)

    def work(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Run the work that waits for a thread, and then `meanwhile`."""
        self.executor.waiting.pop(0)()
        meanwhile()

    def at_work(self) -> None:
        """Dispatch a batch whose handler does not return."""
        self.begin()
        self.executor.waiting.clear()
        self.handler_call.began_at = self.clock.now  # A thread of the executor sets this before the call.

    def check_after(self, seconds: float) -> CallState:
        """Check the handler call as of `seconds` after the batch was dispatched."""
        return self.dispatcher.check(self.handler_call, 1000.0 + seconds)


def test_batch_is_checked_when_its_handler_could_be_slow() -> None:
    watched_handler = WatchedHandler({"slow_seconds": 7.0, "handler_seconds": 30.0})
    assert watched_handler.begin() == Running(1007.0)
    assert watched_handler.check_after(1.0) == Running(1008.0)
    assert len(watched_handler.executor.waiting) == 1
    watched_with_short_limit = WatchedHandler({"slow_seconds": 7.0, "handler_seconds": 3.0})
    assert watched_with_short_limit.begin() == Running(1003.0)


def test_failed_call_is_reported_once_with_its_error() -> None:
    """The end of a call is reported only once."""
    watched_handler = WatchedHandler()
    watched_handler.begin()
    watched_handler.work()
    assert watched_handler.woken_keys == ["s-0"]
    assert watched_handler.check_after(1.0) == CallEnded(None)

    fault = OSError("disk full")

    def raise_fault() -> None:
        raise fault

    watched_handler.begin(raise_fault)
    watched_handler.work()
    assert watched_handler.check_after(3.0) == CallEnded(fault)


def test_batch_whose_lease_is_lost_or_expired_is_not_dispatched() -> None:
    """While a batch waits for a thread, its lease may pass to another worker."""
    watched_with_lost_lease = WatchedHandler()
    watched_with_lost_lease.begin()
    watched_with_lost_lease.harness.holding.drop("stolen")
    watched_with_lost_lease.work()
    assert (watched_with_lost_lease.check_after(1.0), watched_with_lost_lease.calls) == (LeaseLost(), [])
    watched_with_expired_lease = WatchedHandler()
    watched_with_expired_lease.begin()
    watched_with_expired_lease.clock.now += 10.1
    watched_with_expired_lease.work()
    assert (watched_with_expired_lease.check_after(10.1), watched_with_expired_lease.calls) == (NotBegun(), [])


def test_slow_handler_is_logged_each_time_its_duration_doubles() -> None:
    watched_handler = WatchedHandler({"slow_seconds": 5.0})
    watched_handler.at_work()
    assert watched_handler.check_after(4.9) == Running(1005.0)
    assert (watched_handler.slow, watched_handler.executor.replaced) == ([], [])
    assert watched_handler.check_after(5.0) == Running(1010.0)
    assert (watched_handler.slow, watched_handler.executor.replaced) == (
        [("s-0", 5.0)],
        [watched_handler.handler_call.work],
    )
    assert watched_handler.check_after(9.9) == Running(1010.0)
    assert watched_handler.check_after(11.0) == Running(1022.0)
    assert watched_handler.slow == [("s-0", 5.0), ("s-0", 11.0)]


def test_short_slow_limit_is_checked_on_time() -> None:
    watched_handler = WatchedHandler({"slow_seconds": 0.5})
    watched_handler.at_work()
    assert watched_handler.check_after(0.5) == Running(1001.0)
    assert watched_handler.slow == [("s-0", 0.5)]


def test_handler_over_its_limit_is_abandoned_with_its_duration() -> None:
    """The reason contains the duration and the limit, so that whoever reads the log knows which option to set."""
    watched_handler = WatchedHandler({"slow_seconds": 5.0, "handler_seconds": 8.0})
    watched_handler.at_work()
    assert watched_handler.check_after(7.9) == Running(1008.0)
    assert watched_handler.check_after(8.0) == GivenUp("its handler has been at work for 8.0 s, and 8 s is the limit")
    assert watched_handler.handler_call.given_up


def test_abandoned_async_call_is_cancelled() -> None:
    """The cancellation ends the call, because the next owner will process the same batch."""
    cancelled: list[bool] = []
    watched_handler = WatchedHandler({"slow_seconds": 5.0, "handler_seconds": 8.0})
    watched_handler.at_work()
    watched_handler.handler_call.cancel = lambda: cancelled.append(watched_handler.handler_call.given_up)
    watched_handler.check_after(8.0)
    assert cancelled == [True], "its end is that of one that was given up"


def test_handler_of_a_lost_lease_is_awaited_until_it_is_slow() -> None:
    """The handler's result may still be useful, but the next reader of the same lease waits only for a limited time."""
    watched_handler = WatchedHandler({"slow_seconds": 5.0})
    watched_handler.at_work()
    watched_handler.harness.holding.drop("stolen")
    assert watched_handler.check_after(4.9) == Running(1005.0)
    assert watched_handler.check_after(5.0) == LeaseLost()


def test_batch_is_withdrawn_when_all_threads_hang() -> None:
    watched_handler = WatchedHandler()
    watched_handler.begin()
    watched_handler.executor.stuck = True
    assert watched_handler.check_after(1.0) == GivenUp(
        "no thread is free for its records: all threads hang in handlers"
    )
    watched_handler.executor.stuck = False
    assert isinstance(watched_handler.begin(), Running), "another worker gave it back"


def test_started_batch_is_not_withdrawn() -> None:
    """If a started batch were withdrawn, another worker could process it at the same time."""
    watched_handler = WatchedHandler({"slow_seconds": 5.0})
    watched_handler.begin()
    watched_handler.executor.waiting.clear()
    watched_handler.executor.stuck = True
    assert watched_handler.check_after(1.0) == Running(1006.0)


@pytest.mark.parametrize("why", ["refused", "at work"])
def test_call_that_cannot_start_gives_a_reason(why: str) -> None:
    watched_handler = WatchedHandler({"slow_seconds": 5.0, "handler_seconds": 8.0})
    if why == "refused":
        watched_handler.executor.refuses = True
        assert watched_handler.begin() == GivenUp("no thread could be started: can't start new thread")
        assert watched_handler.reasons == ["""RuntimeError("can't start new thread")"""]
        watched_handler.executor.refuses = False
        assert watched_handler.begin() == Running(1005.0)
        return
    watched_handler.at_work()
    watched_handler.check_after(8.0)
    assert watched_handler.begin() == GivenUp("a handler that was given up is still running")


def test_handler_without_a_limit_may_run_forever() -> None:
    watched_handler = WatchedHandler({"slow_seconds": 5.0})
    watched_handler.at_work()
    assert watched_handler.check_after(1e6) == Running(1000.0 + 2e6)
    assert math.isinf(Handling(lambda _batch: None).handler_seconds)


def test_failing_observer_of_slow_handlers_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class RaisingList(list[tuple[str, float]]):
        """A list whose `append` raises, so that the observer fails."""

        def append(self, _event: tuple[str, float]) -> None:
            raise OSError("no metrics")

    watched_handler = WatchedHandler({"slow_seconds": 5.0}, slow=RaisingList())
    watched_handler.at_work()
    watched_handler.check_after(5.0)
    assert "the slow failed; this is said once, and reading goes on" in caplog.text
