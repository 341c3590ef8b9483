"""Tests that the documentation's web application reports an ended worker, and drains the worker when it ends itself."""

import asyncio
import json
import logging
from typing import Any
from uuid import uuid4

import pytest
import web_app

import leasehold
from leasehold.errors import StoreError
from leasehold.stores.urls import open_store
from leasehold_lab.simulator.world.world import ListSource, ShardRecords, create_even_shards, create_records

pytestmark = pytest.mark.slow

WAIT = 30.0


async def health() -> tuple[int, Any]:
    """Request the health route as a server does, and return the status and the JSON."""
    messages: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request"}

    async def send(message: Any) -> None:  # noqa: ANN401  as in ASGI
        messages.append(message)

    scope = {"type": "http", "method": "GET", "path": "/health", "headers": [], "query_string": b""}
    await web_app.app(scope, receive, send)
    return messages[0]["status"], json.loads(messages[1]["body"])


def test_health_route_follows_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """The route returns 200 as long as the worker runs. When the application ends, the worker releases its leases."""
    url = f"memory://{uuid4().hex}"
    monkeypatch.setattr(
        web_app, "SOURCE", ListSource(create_even_shards(("s-0",)), {"s-0": ShardRecords(create_records(2))})
    )
    monkeypatch.setattr(web_app, "LEASES", url)

    async def main() -> None:
        handler_called = asyncio.Event()

        async def handle(_batch: leasehold.Delivery) -> None:
            handler_called.set()

        monkeypatch.setattr(web_app, "handle", handle)
        async with web_app.lifespan(web_app.app):
            await handler_called.wait()
            assert await health() == (200, {"worker": "running"})
        assert await health() == (503, {"worker": "ended"})

    asyncio.run(asyncio.wait_for(main(), WAIT))
    (lease,) = open_store(url).list().leases
    assert lease.owner is None


def test_failed_worker_is_logged_and_the_route_returns_503(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(web_app, "SOURCE", ListSource([], {}))
    monkeypatch.setattr(web_app, "LEASES", "sqlite:///no/such/folder/leases.db")

    async def main() -> None:
        async with web_app.lifespan(web_app.app):
            await asyncio.wait({web_app.app.state.worker})
            assert await health() == (503, {"worker": "ended"})
            errors = [entry.getMessage() for entry in caplog.records if entry.levelno == logging.ERROR]
            assert any("has ended: StoreError" in entry for entry in errors)

    with pytest.raises(StoreError):
        asyncio.run(asyncio.wait_for(main(), WAIT))
