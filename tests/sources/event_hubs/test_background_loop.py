"""The event loop and the receivers of Event Hubs end in bounded time, and leave no task or error behind."""

import asyncio
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Self, cast

import pytest

from leasehold.adapters.sources.event_hubs import poller
from leasehold.adapters.sources.event_hubs.poller import BackgroundLoop, EventPosition, PartitionReceiver
from leasehold.errors import SourceUnavailable


@pytest.fixture
def background(monkeypatch: pytest.MonkeyPatch) -> Iterator[BackgroundLoop]:
    """Return a loop that closes within a short time."""
    monkeypatch.setattr(poller, "CLOSE_SECONDS", 0.1)
    background = BackgroundLoop()
    yield background
    background.close()


class HeldTask:
    """A coroutine that waits until it has been canceled this many times, and then completes."""

    def __init__(self, cancellations: int) -> None:
        self.cancellations, self.started, self.ended = cancellations, threading.Event(), threading.Event()

    async def run(self) -> None:
        # A task that never ends would be reported while another test runs.
        asyncio.get_running_loop().set_exception_handler(lambda _loop, _context: None)
        self.started.set()
        while self.cancellations:
            try:
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                self.cancellations -= 1
        await asyncio.sleep(0)  # such as the client's own cleanup
        self.ended.set()


def test_request_without_a_response_is_canceled(background: BackgroundLoop) -> None:
    """Otherwise, each timeout would leave a connection open."""
    task = HeldTask(1)
    with pytest.raises(SourceUnavailable, match=r"did not respond within 0\.01 s"):
        background.run_and_wait(task.run(), 0.01)
    assert task.ended.wait(10)


@pytest.mark.parametrize("cancellations", [1, 2])
def test_close_waits_until_the_tasks_have_ended(background: BackgroundLoop, cancellations: int) -> None:
    task = HeldTask(cancellations)
    background.start_coroutine(task.run())
    assert task.started.wait(10)
    background.close()
    assert task.ended.is_set()
    background.close()


def test_close_does_not_wait_for_a_task_that_ignores_cancellation(background: BackgroundLoop) -> None:
    task = HeldTask(1000)
    background.start_coroutine(task.run())
    assert task.started.wait(10)
    background.close()
    assert background._loop.is_closed()  # noqa: SLF001
    assert not task.ended.is_set()


class FailingClient:
    """A client whose link fails, and whose connection cannot be closed afterward."""

    def __init__(self) -> None:
        self.link_ended = threading.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        raise ValueError("the connection is already closed")

    async def receive_batch(self, _on_events: object, *, on_error: Any, **_options: object) -> None:  # noqa: ANN401
        await asyncio.sleep(0)
        try:
            await on_error(None, OSError("the link was detached"))
            await asyncio.get_running_loop().create_future()
        finally:
            self.link_ended.set()


def test_failed_link_is_ended_and_its_first_error_is_reported(background: BackgroundLoop) -> None:
    """The client would reopen the link at the original start. An error of closing it does not explain the failure."""
    client = FailingClient()
    access = cast("Any", SimpleNamespace(create_client=lambda: client))
    receiver = PartitionReceiver(background, access, "0", EventPosition("-1"), epoch=0, prefetch=10)
    assert client.link_ended.wait(10)
    receiver._receiver_future.exception(10)  # noqa: SLF001
    assert str(receiver.fault) == "the link was detached"
