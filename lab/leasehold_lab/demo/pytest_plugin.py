"""A pytest plugin with fixtures for streams, lease tables and blob containers in local stand-ins.

pytest loads this plugin if leasehold-lab is installed. A stand-in starts when a fixture first needs it, and stops at
the end of the test session. To keep the start of pytest fast, other modules are imported only in fixtures.
"""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

if TYPE_CHECKING:
    from leasehold_lab.demo.stage import Stream
    from leasehold_lab.standins.node import Service

# With rewritten assertions, pytest shows the values in failed assertions of the contract, as it does for test files.
pytest.register_assert_rewrite("leasehold_lab.contract")

SHARDS = 2


@pytest.fixture(scope="session")
def leasehold_kinesis() -> Iterator["Service"]:
    """A stand-in for Kinesis whose shards can split and merge. It has no fan-out."""
    from leasehold_lab.standins.services import run_kinesis_local  # noqa: PLC0415  needs an extra

    with run_kinesis_local() as service:
        yield service


@pytest.fixture(scope="session")
def leasehold_dynamodb() -> Iterator["Service"]:
    """A stand-in for DynamoDB with reliable conditional writes."""
    from leasehold_lab.standins.services import run_dynalite  # noqa: PLC0415  needs an extra

    with run_dynalite() as service:
        yield service


@pytest.fixture(scope="session")
def leasehold_azurite() -> Iterator["Service"]:
    """A stand-in for Azure Blob Storage."""
    from leasehold_lab.standins.services import run_azurite  # noqa: PLC0415  needs an extra

    with run_azurite() as service:
        yield service


@pytest.fixture
def leasehold_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the AWS credentials with dummy ones, in this test and the processes that it starts."""
    from leasehold_lab.demo.child import ENVIRONMENT, HIDDEN_VARIABLES  # noqa: PLC0415  needs an extra

    for name in HIDDEN_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def leasehold_kinesis_stream(
    leasehold_kinesis: "Service",
    leasehold_credentials: None,  # noqa: ARG001  sets the environment
) -> Iterator["Stream"]:
    """A new stream with two shards. Pass its `url` to a worker, and call `put`, `split` and `merge` in the test."""
    from leasehold_lab.demo.stage import Stream  # noqa: PLC0415  needs an extra

    with closing(Stream(leasehold_kinesis.url, f"stream-{uuid4().hex}", SHARDS)) as stream:
        yield stream


@pytest.fixture
def leasehold_dynamodb_table(
    leasehold_dynamodb: "Service",
    leasehold_credentials: None,  # noqa: ARG001  sets the environment
) -> str:
    """The URL of a lease table that does not exist yet. The first worker creates it."""
    return f"dynamodb://table-{uuid4().hex}?endpoint={leasehold_dynamodb.url}"


@pytest.fixture
def leasehold_blob_container(leasehold_azurite: "Service", monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a blob container for leases, which the first worker creates.

    The fixture sets the environment variable with the connection string.
    """
    from leasehold_lab.standins.services import AZURITE_ACCOUNT, azurite_connection_string  # noqa: PLC0415  needs an extra

    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", azurite_connection_string(leasehold_azurite))
    return f"azblob://{AZURITE_ACCOUNT}/container-{uuid4().hex}"


@pytest.fixture
def leasehold_sqlite(tmp_path: Path) -> str:
    """The URL of an SQLite file for leases in this test's temporary folder. The first worker creates the file."""
    return f"sqlite:///{tmp_path}/leases.db"
