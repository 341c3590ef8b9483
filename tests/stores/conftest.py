"""Fixtures for the tests of all stores: an AWS session, the blob service's address, and a certificate."""

import subprocess
from pathlib import Path

import pytest
from boto3 import Session

from leasehold.stores.objects.blob import CONNECTION_STRING_VARIABLE


@pytest.fixture(scope="session")
def session() -> Session:
    """Return one session for all tests, because loading the description of a service takes long."""
    return Session()


@pytest.fixture
def connection(azurite_connection: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Put the connection string into the environment variable that is read when a URL is opened."""
    monkeypatch.setenv(CONNECTION_STRING_VARIABLE, azurite_connection)
    return azurite_connection


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file with a self-signed certificate for localhost and its key."""
    folder = tmp_path_factory.mktemp("tls")
    pem = folder / "both.pem"
    arguments = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    output_options = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "certificate.pem")]
    subprocess.run(["openssl", *arguments.split(), *output_options], check=True, capture_output=True)
    pem.write_text((folder / "key.pem").read_text() + (folder / "certificate.pem").read_text())
    return pem
