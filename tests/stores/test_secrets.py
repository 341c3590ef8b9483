"""Tests that no credential appears in an error, a log line or the `repr` of a store."""

import logging
import traceback
from collections.abc import Callable
from functools import partial

import boto3
import pytest

from leasehold.balancer.model import Lease
from leasehold.errors import StoreError
from leasehold.stores.dynamodb.store import DynamoStore
from leasehold.stores.objects.blob import CONNECTION_STRING_VARIABLE
from leasehold.stores.objects.s3 import S3Objects
from leasehold.stores.urls import open_store
from leasehold.stores.writes import CreateLease

CANARY = "hunter2canary"
KEY = "aHVudGVyMmNhbmFyeQ=="
"""The canary in the form of an Azure account key."""


def shown_output(failing_call: Callable[[], object], caplog: pytest.LogCaptureFixture) -> str:
    """Return everything that the caller and the readers of the log see when `failing_call` fails."""
    caplog.set_level(logging.INFO)
    with pytest.raises((ValueError, StoreError)) as exc_info:
        failing_call()
    return "".join([repr(exc_info.value), *traceback.format_exception(exc_info.value), caplog.text])


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
def test_an_endpoint_with_credentials_is_rejected_and_not_shown(
    url: str, endpoint: str, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    output = shown_output(lambda: open_store(url + endpoint), caplog)
    assert says in output
    assert CANARY not in output


@pytest.mark.parametrize(
    "ask",
    [
        lambda: DynamoStore("leases", endpoint=f"http://ann:{CANARY}@127.0.0.1:1"),
        lambda: S3Objects("leases", endpoint=f"http://ann:{CANARY}@127.0.0.1:1"),
    ],
)
def test_a_store_built_by_an_application_shows_no_secret(
    ask: Callable[[], object], caplog: pytest.LogCaptureFixture
) -> None:
    assert CANARY not in shown_output(ask, caplog)


@pytest.mark.parametrize("url", ["dynamodb://leases", "s3://leases"])
def test_an_endpoint_from_the_environment_is_not_shown(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://ann:{CANARY}@127.0.0.1:1")
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)  # the default session of boto3 may be from another test
    output = shown_output(lambda: open_store(url), caplog)
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
def test_a_connection_string_is_not_shown(
    connection: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(CONNECTION_STRING_VARIABLE, connection)
    # With such a short timeout, the client makes only one attempt.
    open_container = partial(open_store, "azblob://account/container", request_seconds=0.5)
    output = shown_output(lambda: open_container().write(CreateLease(Lease("s-0"))), caplog)
    assert CANARY not in output
    assert KEY not in output


def test_a_password_from_the_environment_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PGPASSWORD", CANARY)
    assert CANARY not in shown_output(lambda: open_store("postgres://127.0.0.1:1/app?user=ann"), caplog)
    assert CANARY not in shown_output(lambda: open_store(f"postgres://ann:{CANARY}@127.0.0.1:1/app"), caplog)


def test_an_identity_is_not_sent_over_plain_http(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CONNECTION_STRING_VARIABLE, raising=False)
    with pytest.raises(ValueError, match="option 'endpoint' must be https:// for an identity"):
        open_store("azblob://account/container?endpoint=http://127.0.0.1:1")
