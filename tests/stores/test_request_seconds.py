"""Tests how long a request of a store may take, so that a stalled request never causes the loss of a lease."""

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from azure.core.pipeline.transport import RequestsTransport
from botocore.config import Config

from leasehold.stores.dynamodb import store as dynamodb_calls
from leasehold.stores.embedded.sqlite import SqliteStore
from leasehold.stores.objects import blob, s3
from leasehold.stores.protocol import PAUSE_SECONDS, Timeouts
from leasehold.stores.urls import open_store

THIRD = 10.0 / 3
"""A third of the default `lease_seconds`."""


@pytest.mark.parametrize("seconds", [0.5, THIRD, 20 / 3, 40.0, 200.0])
@pytest.mark.parametrize("usual", [dynamodb_calls.TIMEOUTS, s3.TIMEOUTS, blob.TIMEOUTS, Timeouts(5, 10, 1)])
def test_a_request_with_all_retries_stays_within_its_time_limit(usual: Timeouts, seconds: float) -> None:
    limited = usual.within(seconds)
    total_seconds = (limited.connect_seconds + limited.read_seconds) * limited.attempts + PAUSE_SECONDS * (
        limited.attempts - 1
    )
    assert total_seconds <= seconds + 1e-9
    assert (limited.connect_seconds <= usual.connect_seconds, limited.attempts <= usual.attempts) == (True, True)


def test_timeouts_are_unchanged_without_a_limit() -> None:
    default_timeouts = Timeouts(2, 5, 3)
    assert (default_timeouts.within(None), default_timeouts.within(60.0)) == (default_timeouts, default_timeouts)


@pytest.mark.parametrize(
    ("seconds", "attempts", "seconds_per_attempt"),
    [(2.0, 1, 2.0), (8.9, 1, 8.9), (9.0, 2, 2.5), (15.4, 2, 5.7), (15.5, 3, 2.5), (53.0, 3, 15.0), (60.0, 3, 15.0)],
)
def test_a_request_gets_as_many_attempts_as_fit(seconds: float, attempts: int, seconds_per_attempt: float) -> None:
    """Each attempt has at least 2.5 seconds, and a pause of up to four seconds comes before the next one."""
    limited = Timeouts(5, 10, 3).within(seconds)
    assert limited.attempts == attempts
    assert limited.connect_seconds + limited.read_seconds == pytest.approx(seconds_per_attempt)
    assert limited.read_seconds == pytest.approx(2 * limited.connect_seconds)


class ClientSettings(Exception):
    """Raised instead of creating a client, with the client's settings as argument."""


def tells(*_args: object, config: Config, **_kwargs: object) -> None:
    """Raise the settings with which a client would be created."""
    raise ClientSettings(config)


@pytest.mark.parametrize("url", ["dynamodb://leases?region=eu-west-1", "s3://leases/p?region=eu-west-1"])
def test_the_clients_of_aws_stores_get_the_time_limit(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("boto3.session.Session.client", tells)
    with pytest.raises(ClientSettings) as configs:
        open_store(url, request_seconds=THIRD)
    (config,) = configs.value.args
    assert config.connect_timeout + config.read_timeout == pytest.approx(THIRD)
    assert config.retries["total_max_attempts"] == 1


@pytest.mark.parametrize("options", ["prefix=p", "eventhub=ns/orders"])
def test_the_client_of_azure_stores_gets_the_time_limit(options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clients: list[Any] = []

    def record_settings(*_args: object, transport: RequestsTransport, retry_total: int, **_kwargs: object) -> None:
        timeouts = transport.connection_config
        clients.append((timeouts.timeout + timeouts.read_timeout, retry_total))
        raise ClientSettings

    monkeypatch.setenv(blob.CONNECTION_STRING_VARIABLE, "AccountName=a;AccountKey=a2V5;EndpointSuffix=core.windows.net")
    monkeypatch.setattr("leasehold.stores.objects.blob.ContainerClient.from_connection_string", record_settings)
    with pytest.raises(ClientSettings):
        open_store(f"azblob://a/leases?{options}", request_seconds=THIRD)
    assert clients == [(pytest.approx(THIRD), 0)]


def test_sqlite_waits_for_locks_within_the_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    connect: Callable[..., sqlite3.Connection] = sqlite3.connect

    def record_settings(
        path: str, *, timeout: float, isolation_level: None, check_same_thread: bool
    ) -> sqlite3.Connection:
        waits.append(timeout)
        return connect(path, isolation_level=isolation_level, check_same_thread=check_same_thread)

    monkeypatch.setattr("sqlite3.connect", record_settings)
    open_store(f"sqlite:///{tmp_path}/l.db", request_seconds=THIRD).close()
    SqliteStore(f"{tmp_path}/l.db").close()
    assert waits == [THIRD, 10.0]
