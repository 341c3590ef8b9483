"""A web application with a worker in its event loop, and a health route that shows whether the worker still runs.

Start it with `uvicorn web_app:app`. It needs `pip install 'leasehold[aws,serve]'`.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import leasehold

SOURCE = os.environ.get("ORDERS", "kinesis://orders")
LEASES = os.environ.get("ORDERS_LEASES", "dynamodb://orders-app")


async def handle(batch: leasehold.Delivery) -> None:
    """Handle a batch in the event loop of the application."""
    print(batch.shard, len(batch.records), "records")


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    """Run the worker for as long as the application runs, and drain it at the end."""
    worker = leasehold.arun(SOURCE, handle, leases=LEASES, initial_position="TRIM_HORIZON")
    app.state.worker = asyncio.create_task(worker)
    yield
    app.state.worker.cancel()
    with suppress(asyncio.CancelledError):
        await app.state.worker  # raises the error that ended the worker, if one did


async def health(request: Request) -> JSONResponse:
    """Answer 503 once the worker has ended, so that the orchestrator restarts this process."""
    worker = request.app.state.worker
    return JSONResponse({"worker": "ended" if worker.done() else "running"}, 503 if worker.done() else 200)


app = Starlette(routes=[Route("/health", health)], lifespan=lifespan)
