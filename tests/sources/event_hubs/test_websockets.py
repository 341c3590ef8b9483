"""AMQP over websockets, for networks that let nothing but port 443 out: through a gateway, to a local hub."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from aiohttp import WSMsgType, web
from azure.eventhub._pyamqp.aio import _connection_async
from hub_steps import Here, collected, texts

from leasehold.adapters.local.node import HOST, free_port
from leasehold.adapters.sources.event_hubs.poller import Background
from leasehold.balancer.model import TRIM_HORIZON, Lease, Shard

PATH = "/$servicebus/websocket"


@contextmanager
def gateway(to: int) -> Iterator[tuple[int, list[str]]]:
    """What takes websockets and hands on the AMQP in them: its port, and the protocols it was asked for."""
    asked: list[str] = []

    async def carry(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(protocols=["AMQPWSB10"])
        await socket.prepare(request)
        asked.append(socket.ws_protocol or "")
        coming, going = await asyncio.open_connection(HOST, to)
        back = asyncio.create_task(_back(coming, socket))
        async for message in socket:
            if message.type is WSMsgType.BINARY:
                going.write(message.data)
        back.cancel()
        going.close()
        return socket

    port, loop = free_port(), Background()
    application = web.Application()
    application.router.add_get(PATH, carry)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    loop.ask(runner.setup())
    loop.ask(web.TCPSite(runner, HOST, port).start())
    yield port, asked
    loop.ask(runner.cleanup())
    loop.close()


async def _back(coming: asyncio.StreamReader, socket: web.WebSocketResponse) -> None:
    with suppress(ConnectionError):  # the client hung up first
        while data := await coming.read(65536):
            await socket.send_bytes(data)
        await socket.close()


@pytest.mark.services
@pytest.mark.filterwarnings("ignore:ssl=None is deprecated")  # the client's way of asking for no TLS, as here
def test_a_partition_is_read_over_websockets(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a firewall that closes 5671 the option would be a promise that nothing keeps."""
    here.send(["a", "b", "c"])
    with gateway(here.hubs.service.port) as (port, asked):
        # The client knows one port for websockets, and asking for it here would want a privileged one.
        monkeypatch.setattr(_connection_async, "WEBSOCKET_PORT", port)
        source = here.source(transport="websockets")
        assert source.shards() == (Shard("0", source.stream), Shard("1", source.stream))
        reader = source.open(Lease("0"), TRIM_HORIZON)
        assert texts(collected(reader, 3)) == ["a", "b", "c"]
        reader.close()
        source.close()
    assert set(asked) == {"AMQPWSB10"}
