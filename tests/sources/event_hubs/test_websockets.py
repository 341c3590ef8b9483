"""AMQP over websockets to a local hub, as in networks that allow only port 443. A gateway translates the protocol."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from aiohttp import WSMsgType, web
from azure.eventhub._pyamqp.aio import _connection_async
from hub_steps import HubSteps, collect, texts

from leasehold.adapters.sources.event_hubs.access import find_http_proxy
from leasehold.adapters.sources.event_hubs.poller import BackgroundLoop, open_url
from leasehold.balancer.model import TRIM_HORIZON, Lease, Shard
from leasehold_lab.standins.node import HOST, find_free_port

PATH = "/$servicebus/websocket"


@contextmanager
def gateway(hub_port: int) -> Iterator[tuple[int, list[str]]]:
    """Run a gateway from websockets to AMQP. Yield its port, and a list of the protocols that clients requested."""
    protocols: list[str] = []

    async def relay(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(protocols=["AMQPWSB10"])
        await socket.prepare(request)
        protocols.append(socket.ws_protocol or "")
        from_hub, to_hub = await asyncio.open_connection(HOST, hub_port)
        back_task = asyncio.create_task(_relay_from_hub(from_hub, socket))
        async for message in socket:
            if message.type is WSMsgType.BINARY:
                to_hub.write(message.data)
        back_task.cancel()
        to_hub.close()
        return socket

    port, loop = find_free_port(), BackgroundLoop()
    application = web.Application()
    application.router.add_get(PATH, relay)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    loop.run_and_wait(runner.setup())
    loop.run_and_wait(web.TCPSite(runner, HOST, port).start())
    yield port, protocols
    loop.run_and_wait(runner.cleanup())
    loop.close()


async def _relay_from_hub(from_hub: asyncio.StreamReader, socket: web.WebSocketResponse) -> None:
    with suppress(ConnectionError):  # The client may disconnect first.
        while data := await from_hub.read(65536):
            await socket.send_bytes(data)
        await socket.close()


@pytest.mark.services
@pytest.mark.filterwarnings("ignore:ssl=None is deprecated")  # the client disables TLS for this host
def test_partition_is_read_over_websockets(event_hub: HubSteps, monkeypatch: pytest.MonkeyPatch) -> None:
    event_hub.send(["a", "b", "c"])
    with gateway(event_hub.hubs.service.port) as (port, protocols):
        # The client always uses port 443 for websockets, which a test without root privileges cannot open.
        monkeypatch.setattr(_connection_async, "WEBSOCKET_PORT", port)
        source = event_hub.source(transport="websockets")
        assert source.shards() == (Shard("0", source.stream), Shard("1", source.stream))
        reader = source.open(Lease("0"), TRIM_HORIZON)
        assert texts(collect(reader, 3)) == ["a", "b", "c"]
        reader.close()
        source.close()
    assert set(protocols) == {"AMQPWSB10"}


@pytest.mark.services
@pytest.mark.filterwarnings("ignore:ssl=None is deprecated")
@pytest.mark.parametrize("setting", ["url", "environment", "NO_PROXY"])
def test_partition_is_read_through_an_http_proxy(
    event_hub: HubSteps, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    """The proxy is taken from the URL or the environment, and NO_PROXY is respected."""
    event_hub.send(["a", "b"])
    with gateway(event_hub.hubs.service.port) as (port, protocols):
        without_proxy = setting == "NO_PROXY"
        monkeypatch.setattr(_connection_async, "WEBSOCKET_PORT", port if without_proxy else 9)
        proxy, options = f"http://{HOST}:{port}", {"transport": "websockets"}
        if setting == "url":
            options["proxy"] = proxy
        else:
            monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9" if without_proxy else proxy)
            monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost" if without_proxy else "")
        source = event_hub.source(**options)
        reader = source.open(Lease("0"), TRIM_HORIZON)
        assert texts(collect(reader, 2)) == ["a", "b"]
        reader.close()
        source.close()
    assert set(protocols) == {"AMQPWSB10"}


@pytest.mark.parametrize(
    ("proxy", "settings"),
    [
        ("http://proxy:3128", {"proxy_hostname": "http://proxy", "proxy_port": 3128}),
        ("proxy:3128", {"proxy_hostname": "http://proxy", "proxy_port": 3128}),
        ("https://proxy", {"proxy_hostname": "https://proxy", "proxy_port": 443}),
        (
            "http://me:p%40ss@proxy:80",
            {"proxy_hostname": "http://proxy", "proxy_port": 80, "username": "me", "password": "p@ss"},
        ),
    ],
)
def test_environment_proxy_is_read_with_its_credentials(
    monkeypatch: pytest.MonkeyPatch, proxy: str, settings: dict[str, object]
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", proxy)
    monkeypatch.setenv("NO_PROXY", "other.servicebus.windows.net")
    assert find_http_proxy("ns.servicebus.windows.net", "") == settings
    assert find_http_proxy("other.servicebus.windows.net", "") is None


@pytest.mark.parametrize(
    ("no_proxy", "direct"),
    [
        ("*", True),
        (" other , .servicebus.windows.net", True),
        ("servicebus.windows.net", True),
        ("NS.ServiceBus.Windows.net", True),
        ("ns.servicebus.windows.net:443", True),
        (".windows.net:443", True),
        ("ns.servicebus.windows.net:80", False),
        ("bus.windows.net", False),
        ("10.0.0.0/8", False),
    ],
)
def test_no_proxy_is_read_in_its_usual_forms(monkeypatch: pytest.MonkeyPatch, no_proxy: str, *, direct: bool) -> None:
    """NO_PROXY may name a host or a domain, each with or without a port, or be `*`."""
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    monkeypatch.setenv("NO_PROXY", no_proxy)
    monkeypatch.delenv("no_proxy", raising=False)
    assert (find_http_proxy("ns.servicebus.windows.net", "") is None) == direct


@pytest.mark.parametrize("proxy", ["http://proxy:port", "socks5://proxy:1", "http://:80"])
def test_unreadable_proxy_is_rejected_without_being_repeated(monkeypatch: pytest.MonkeyPatch, proxy: str) -> None:
    with pytest.raises(ValueError, match=r"^eventhubs URL: proxy: write http://host:port$"):
        find_http_proxy("ns", proxy)
    monkeypatch.setenv("HTTPS_PROXY", proxy)
    monkeypatch.setenv("NO_PROXY", "")
    with pytest.raises(ValueError, match=r"^HTTPS_PROXY: write http://host:port$"):
        find_http_proxy("ns", "")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"proxy": "http://p:1"}, "'proxy' needs transport=websockets"),
        ({"proxy": "http://u:secret@p:1", "transport": "websockets"}, "'proxy' must not contain credentials"),
    ],
)
def test_proxy_in_the_url_requires_websockets_and_no_password(options: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=says) as exc_info:
        open_url("ns/hub", options)
    assert "secret" not in str(exc_info.value)
