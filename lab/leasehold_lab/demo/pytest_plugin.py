"""A pytest plugin with streams, lease tables and blob containers for single tests, on local stand-ins.

pytest loads it wherever leasehold-lab is installed. A stand-in starts when a fixture first needs it, and ends with the
test run. Modules other than pytest are imported only then.
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

# A failing clause of the contract shows its values, as in any test file.
pytest.register_assert_rewrite("leasehold_lab.contract")

SHARDS = 2


@pytest.fixture(scope="session")
def leasehold_kinesis() -> Iterator["Service"]:
    """A stand-in for Kinesis, with shards that end, split and merge, but without fan-out."""
    from leasehold_lab.standins.services import kinesis_local  # noqa: PLC0415  an extra

    with kinesis_local() as service:
        yield service


@pytest.fixture(scope="session")
def leasehold_dynamodb() -> Iterator["Service"]:
    """A stand-in for DynamoDB, which can be trusted with conditional writes."""
    from leasehold_lab.standins.services import dynalite  # noqa: PLC0415  an extra

    with dynalite() as service:
        yield service


@pytest.fixture(scope="session")
def leasehold_azurite() -> Iterator["Service"]:
    """A stand-in for Azure Blob Storage."""
    from leasehold_lab.standins.services import azurite  # noqa: PLC0415  an extra

    with azurite() as service:
        yield service


@pytest.fixture
def leasehold_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials that stand-ins accept instead of your own, for this test and the processes that it starts."""
    from leasehold_lab.demo.child import ENVIRONMENT, HIDDEN_VARIABLES  # noqa: PLC0415  an extra

    for name in HIDDEN_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def leasehold_kinesis_stream(
    leasehold_kinesis: "Service",
    leasehold_credentials: None,  # noqa: ARG001  sets the environment
) -> Iterator["Stream"]:
    """A new stream of two shards, with `url` for a worker, and `put`, `split`, `merge` and `shards` for the test."""
    from leasehold_lab.demo.stage import Stream  # noqa: PLC0415  an extra

    with closing(Stream(leasehold_kinesis.url, f"stream-{uuid4().hex}", SHARDS)) as stream:
        yield stream


@pytest.fixture
def leasehold_dynamodb_table(
    leasehold_dynamodb: "Service",
    leasehold_credentials: None,  # noqa: ARG001  sets the environment
) -> str:
    """The URL of an unused lease table, which a worker creates."""
    return f"dynamodb://table-{uuid4().hex}?endpoint={leasehold_dynamodb.url}"


@pytest.fixture
def leasehold_blob_container(leasehold_azurite: "Service", monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an unused container for leases, which a worker creates. Its key is in the environment."""
    from leasehold_lab.standins.services import AZURITE_ACCOUNT, azurite_connection_string  # noqa: PLC0415  an extra

    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", azurite_connection_string(leasehold_azurite))
    return f"azblob://{AZURITE_ACCOUNT}/container-{uuid4().hex}"


@pytest.fixture
def leasehold_sqlite(tmp_path: Path) -> str:
    """The URL of a file for leases in this test's folder, which a worker creates."""
    return f"sqlite:///{tmp_path}/leases.db"
