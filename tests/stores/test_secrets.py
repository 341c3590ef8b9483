"""No credential appears in an error, a log line or the repr of a store."""

import logging
import traceback
from collections.abc import Callable
from functools import partial

import boto3
import pytest

from leasehold.balancer.model import Lease
from leasehold.errors import StoreError
from leasehold.stores.dynamodb.store import DynamoStore
from leasehold.stores.objects.blob import CONNECTION_STRING
from leasehold.stores.objects.s3 import S3Objects
from leasehold.stores.urls import open_store
from leasehold.stores.writes import CreateLease

CANARY = "hunter2canary"
KEY = "aHVudGVyMmNhbmFyeQ=="
"""The same as a key of an Azure account."""


def told(ask: Callable[[], object], caplog: pytest.LogCaptureFixture) -> str:
    """Return everything that the caller and the reader of the log see when this fails."""
    caplog.set_level(logging.INFO)
    with pytest.raises((ValueError, StoreError)) as caught:
        ask()
    return "".join([repr(caught.value), *traceback.format_exception(caught.value), caplog.text])


@pytest.mark.parametrize(
    "url",
    [
        "dynamodb://leases?region=eu-west-1&endpoint=",
        "s3://leases?region=eu-west-1&endpoint=",
        "azblob://account/container?endpoint=",
    ],
)
@pytest.mark.parametrize(
    ("endpoint", "says"),
    [
        (f"http://ann:{CANARY}@127.0.0.1:1", "credentials do not belong in it"),
        (f"http://ann:{CANARY}%40127.0.0.1:1", "credentials do not belong in it"),
        (f"ann:{CANARY}@127.0.0.1", "credentials do not belong in it"),
        (f"https://127.0.0.1:1?sig={CANARY}", "must be http://host:port"),
        (f"http://[{CANARY}", "must be http://host:port"),
        (f"http://127.0.0.1:{CANARY}", "must be http://host:port"),
    ],
)
def test_an_endpoint_with_credentials_is_refused_and_not_repeated(
    url: str, endpoint: str, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The credentials used to be printed at every retry."""
    output = told(lambda: open_store(url + endpoint), caplog)
    assert says in output
    assert CANARY not in output


@pytest.mark.parametrize(
    "ask",
    [
        lambda: DynamoStore("leases", endpoint=f"http://ann:{CANARY}@127.0.0.1:1"),
        lambda: S3Objects("leases", endpoint=f"http://ann:{CANARY}@127.0.0.1:1"),
    ],
)
def test_a_store_made_by_hand_is_no_more_talkative(ask: Callable[[], object], caplog: pytest.LogCaptureFixture) -> None:
    """The same for applications that embed a store."""
    assert CANARY not in told(ask, caplog)


@pytest.mark.parametrize("url", ["dynamodb://leases", "s3://leases"])
def test_an_endpoint_of_the_environment_is_no_more_talkative(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The AWS SDK reads endpoints from there too."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://ann:{CANARY}@127.0.0.1:1")
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)  # it may hold another session
    output = told(lambda: open_store(url), caplog)
    assert "contains credentials" in output
    assert CANARY not in output


@pytest.mark.parametrize(
    "connection",
    [
        f"AccountName=account;AccountKey={KEY};BlobEndpoint=http://127.0.0.1:1/account",
        f"AccountName=account;AccountKey={KEY};BlobEndpoint=http://ann:{CANARY}@127.0.0.1:1/account",
        f"AccountName=account;BlobEndpoint=http://127.0.0.1:1/account;SharedAccessSignature=sv=2024&sig={CANARY}",
        f"AccountName=other;AccountKey={KEY};BlobEndpoint=http://127.0.0.1:1/other",
        f"AccountKey={KEY};{CANARY}",
        CANARY,
    ],
)
def test_a_connection_string_is_not_repeated(
    connection: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With it, anyone who reads the log could read and write the whole account."""
    monkeypatch.setenv(CONNECTION_STRING, connection)
    # With this short a timeout, the client tries once.
    opened = partial(open_store, "azblob://account/container", request_seconds=0.5)
    output = told(lambda: opened().write(CreateLease(Lease("s-0"))), caplog)
    assert CANARY not in output
    assert KEY not in output


def test_a_password_of_the_environment_is_not_repeated(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With it, anyone who reads the log could read and write the whole database."""
    monkeypatch.setenv("PGPASSWORD", CANARY)
    assert CANARY not in told(lambda: open_store("postgres://127.0.0.1:1/app?user=ann"), caplog)
    assert CANARY not in told(lambda: open_store(f"postgres://ann:{CANARY}@127.0.0.1:1/app"), caplog)


def test_an_identity_is_not_sent_in_the_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK's own message names no option."""
    monkeypatch.delenv(CONNECTION_STRING, raising=False)
    with pytest.raises(ValueError, match="option 'endpoint' must be https:// for an identity"):
        open_store("azblob://account/container?endpoint=http://127.0.0.1:1")
