"""Tests which container, credentials and timeouts are used for an Azure Blob URL."""

import base64
from collections.abc import Callable
from typing import Any

import pytest
from attrs import define, field
from azure.core.exceptions import ResourceExistsError, ResourceNotFoundError
from azure.storage.blob import ContainerClient
from urllib3 import PoolManager

from leasehold.balancer.model import LATEST, TRIM_HORIZON
from leasehold.errors import StoreError
from leasehold.stores.objects import blob
from leasehold.stores.objects.blob import CONNECTION_STRING_VARIABLE, create_client, parse_hub_options
from leasehold.stores.objects.event_hubs_layout import EventHubLayout
from leasehold.stores.objects.generic_layout import ObjectLayout
from leasehold.stores.objects.http_adapter import DeadlineAdapter
from leasehold.stores.objects.store import EtagStore
from leasehold.stores.protocol import Timeouts

KEY = base64.b64encode(b"secret").decode()
SECRET = f"DefaultEndpointsProtocol=https;AccountName=acc;AccountKey={KEY};EndpointSuffix=core.windows.net"
layout: Callable[[dict[str, str]], object] = blob._parse_layout  # noqa: SLF001  the layout that a URL's options select


@pytest.fixture(autouse=True)
def _identity_in_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CONNECTION_STRING_VARIABLE, raising=False)
    monkeypatch.setattr("azure.identity.DefaultAzureCredential", Identity)


@define
class Identity:
    """Stands for the identity of this machine. It only records the scopes that are requested."""

    requests: list[str] = field(factory=list)

    def get_token(self, *scopes: str, **_more: Any) -> None:  # noqa: ANN401  the SDK's own
        self.requests.extend(scopes)


def test_options_choose_the_layout() -> None:
    assert layout({}) == ObjectLayout("")
    assert layout({"prefix": "fleet/one"}) == ObjectLayout("fleet/one")
    hub = {"eventhub": "ns/hub"}
    assert layout(hub) == EventHubLayout("ns.servicebus.windows.net", "hub", "$Default", TRIM_HORIZON)
    assert layout({**hub, "group": "g", "start": "LATEST"}) == EventHubLayout(
        "ns.servicebus.windows.net", "hub", "g", LATEST
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"group": "g"}, "option 'group' requires eventhub=<namespace>/<hub>"),
        ({"start": "LATEST"}, "option 'start' requires eventhub=<namespace>/<hub>"),
        ({"eventhub": "ns/hub", "layout": "sessions"}, "option 'layout' cannot be combined with option 'eventhub'"),
        ({"eventhub": "ns/hub", "start": "NOW"}, "option 'start' must be one of TRIM_HORIZON, LATEST"),
        ({"eventhub": "ns"}, "option 'eventhub' must be <fully qualified namespace>/<hub>"),
        ({"eventhub": "/hub"}, "option 'eventhub' must be <fully qualified namespace>/<hub>"),
        ({"eventhub": "ns/"}, "option 'eventhub' must be <fully qualified namespace>/<hub>"),
        ({"eventhub": "ns/hub/more"}, "option 'eventhub' must be <fully qualified namespace>/<hub>"),
        ({"eventhub": "ns/hub", "prefix": "p"}, "option 'eventhub' must be <fully qualified namespace>/<hub>"),
    ],
)
def test_conflicting_options_are_reported(options: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=f"^store URL: {says}"):
        layout(options)


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("ns", "ns.servicebus.windows.net"),
        ("ns.servicebus.chinacloudapi.cn", "ns.servicebus.chinacloudapi.cn"),
        ("localhost:5672", "localhost:5672"),
    ],
)
def test_a_namespace_is_spelled_as_the_sdks_write_it(name: str, full: str) -> None:
    assert parse_hub_options({"eventhub": f"{name}/hub"}) == (full, "hub", "$Default")


@pytest.mark.parametrize("place", ["", "acc", "acc/", "/c", "acc/c/more"])
def test_a_url_needs_an_account_and_a_container(place: str) -> None:
    with pytest.raises(ValueError, match=r"^store URL: azblob:// wants account/container$"):
        create_client(place, None)


def settings(client: ContainerClient) -> dict[str, Any]:
    client_config: Any = client._config  # noqa: SLF001  the SDK exposes it nowhere else
    transport: Any = client._pipeline._transport  # noqa: SLF001
    requests_transport = getattr(transport, "_transport", transport)
    retry: Any = client_config.retry_policy
    return {
        "retries": retry.total_retries,
        "backoff": (retry.initial_backoff, retry.increment_base, retry.random_jitter_range),
        "connect": requests_transport.connection_config.timeout,
        "read": requests_transport.connection_config.read_timeout,
        "pools": [
            vars(requests_transport.session.get_adapter(scheme))["_pool_maxsize"]
            for scheme in ("https://x", "http://x")
        ],
    }


def test_without_a_key_the_identity_of_the_machine_is_used() -> None:
    client = create_client("acc/c", None)
    assert (client.url, client.container_name) == ("https://acc.blob.core.windows.net/c", "c")
    assert isinstance(client.credential, Identity)
    assert create_client("acc/c", "https://blobs.example").url == "https://blobs.example/c"
    with pytest.raises(
        ValueError, match=f"^store URL: option 'endpoint' must be https:// .* set {CONNECTION_STRING_VARIABLE}$"
    ):
        create_client("acc/c", "http://blobs.example")


def test_the_timeouts_of_a_client_come_from_the_url() -> None:
    common = {"backoff": (0.2, 2, 1), "pools": [64, 64]}
    assert settings(create_client("acc/c", None)) == {**common, "retries": 2, "connect": 5, "read": 10}
    timeouts = blob.TIMEOUTS.within(2.5)
    expected = {"retries": timeouts.attempts - 1, "connect": timeouts.connect_seconds, "read": timeouts.read_seconds}
    assert settings(create_client("acc/c", None, 2.5)) == {**common, **expected}
    assert timeouts != Timeouts(5, 10, 3)


def test_the_account_of_a_key_must_match_the_url(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker writes only to the account in its URL, and no error message contains the key."""
    monkeypatch.setenv(CONNECTION_STRING_VARIABLE, SECRET)
    client = create_client("acc/c", None)
    assert (client.url, client.account_name) == ("https://acc.blob.core.windows.net/c", "acc")
    assert settings(client)["retries"] == 2
    message = f"^store URL: {CONNECTION_STRING_VARIABLE} is for account 'acc', not 'other'$"
    with pytest.raises(ValueError, match=message):
        create_client("other/c", None)
    with pytest.raises(
        ValueError, match=f"^store URL: option 'endpoint' requires an identity; {CONNECTION_STRING_VARIABLE}"
    ):
        create_client("acc/c", "https://blobs.example")
    connection_string = "BlobEndpoint=https://acc.blob.core.windows.net;SharedAccessSignature=sv=1&sig=a@b"
    monkeypatch.setenv(CONNECTION_STRING_VARIABLE, connection_string)
    assert create_client("acc/c", None).account_name == "acc"
    monkeypatch.setenv(CONNECTION_STRING_VARIABLE, "nonsense")
    with pytest.raises(StoreError, match=f"^{CONNECTION_STRING_VARIABLE}: it is not a storage connection string$"):
        create_client("acc/c", None)
    monkeypatch.setenv(
        CONNECTION_STRING_VARIABLE, SECRET.replace("EndpointSuffix", "BlobEndpoint=https://me:pw@h/acc;X")
    )
    with pytest.raises(StoreError, match="credentials") as exc_info:
        create_client("acc/c", None)
    assert "pw" not in str(exc_info.value)


@pytest.mark.parametrize(
    "secret",
    [
        SECRET,
        SECRET.replace("https", "http"),
        "BlobEndpoint=https://acc.blob.core.windows.net;SharedAccessSignature=sv=1",
    ],
    ids=["key", "http", "signature"],
)
def test_a_secret_may_end_with_a_newline(secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newline at the end of a secret is ignored, and one within the secret is reported."""
    monkeypatch.setenv(CONNECTION_STRING_VARIABLE, secret)
    expected = create_client("acc/c", None).url
    monkeypatch.setenv(CONNECTION_STRING_VARIABLE, f"{secret}\r\n")
    assert create_client("acc/c", None).url == expected
    monkeypatch.setenv(CONNECTION_STRING_VARIABLE, secret.replace(";", "\n;", 1))
    with pytest.raises(
        StoreError, match=f"^{CONNECTION_STRING_VARIABLE}: it contains a line break or another control character"
    ):
        create_client("acc/c", None)


@define
class Container:
    """A container that exists, does not exist, or is created by another worker between two calls."""

    answers: list[Exception | None]
    requests: list[str] = field(factory=list)
    container_name: str = "c"

    def _answer(self, operation: str) -> None:
        self.requests.append(operation)
        if fault := self.answers.pop(0):
            raise fault

    def list_blobs(self, **options: int) -> list[object]:
        self._answer(f"list {options}")
        return []

    def create_container(self) -> None:
        self._answer("create")

    def close(self) -> None:
        self.requests.append("close")


def test_a_url_opens_its_container(monkeypatch: pytest.MonkeyPatch) -> None:
    """The container in the URL is opened. If it does not exist, it is created only with the user's permission."""
    client_arguments: list[tuple[object, ...]] = []
    not_found = ResourceNotFoundError("no")
    container = Container([None, not_found, None, not_found, ResourceExistsError("x")])

    def record_client(*arguments: object) -> Container:
        client_arguments.append(arguments)
        return container

    monkeypatch.setattr(blob, "create_client", record_client)
    store = blob.open_url("acc/c", {"prefix": "p", "endpoint": "https://e"}, create=False, request_seconds=2.5)
    assert client_arguments == [("acc/c", "https://e", 2.5)]
    assert isinstance(store, EtagStore)
    assert store._layout == ObjectLayout("p")  # noqa: SLF001
    assert store.cells().page_leases == 20  # the metadata of a blob is limited to 8 KB
    for _ in range(2):
        blob.open_container("acc/c", None, create=True)
    page = "list {'results_per_page': 1}"
    assert container.requests == [page, page, "create", page, "create"]
    assert client_arguments[-1] == ("acc/c", None, None)
    container.answers = [not_found, None, not_found]
    store = blob.open_url("acc/c", {}, create=True, request_seconds=None)
    store.close()
    assert container.requests[-3:] == [page, "create", "close"]
    with pytest.raises(StoreError, match="container 'c'"):
        blob.open_url("acc/c", {}, create=False, request_seconds=None)


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_responses_have_deadlines_with_and_without_a_proxy(scheme: str) -> None:
    """A proxy that forwards one byte at a time does not block a worker."""
    adapter = DeadlineAdapter()
    ordinary_pools = PoolManager().pool_classes_by_scheme
    for manager in (adapter.poolmanager, adapter.proxy_manager_for("http://127.0.0.1:9")):
        pool_class = manager.pool_classes_by_scheme[scheme]
        assert issubclass(pool_class, ordinary_pools[scheme])
        assert pool_class is not ordinary_pools[scheme]
    adapter.close()
