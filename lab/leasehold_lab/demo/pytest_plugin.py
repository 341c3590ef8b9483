"""A pytest plugin: streams, lease tables and blob containers of a test's own, at stand-ins on this machine.

pytest loads it wherever leasehold-lab is installed. A stand-in starts when a fixture first asks for it, and ends with
the run; everything that is not pytest's is imported only then.
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

# A clause of the contract that fails shows its values, as in a file of tests.
pytest.register_assert_rewrite("leasehold_lab.contract")

SHARDS = 2


@pytest.fixture(scope="session")
def leasehold_kinesis() -> Iterator["Service"]:
    """A stand-in for Kinesis: shards end, split and merge; no fan-out."""
    from leasehold_lab.standins.services import kinesis_local  # noqa: PLC0415  an extra

    with kinesis_local() as service:
        yield service


@pytest.fixture(scope="session")
def leasehold_dynamodb() -> Iterator["Service"]:
    """A stand-in for DynamoDB, trustworthy about conditional writes."""
    from leasehold_lab.standins.services import dynalite  # noqa: PLC0415  an extra

    with dynalite() as service:
        yield service


@pytest.fixture(scope="session")
def leasehold_azurite() -> Iterator["Service"]:
    """A stand-in for Azure's blob storage."""
    from leasehold_lab.standins.services import azurite  # noqa: PLC0415  an extra

    with azurite() as service:
        yield service


@pytest.fixture
def leasehold_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials that stand-ins take, and nobody's own: for this test and the processes that it starts."""
    from leasehold_lab.demo.child import ENVIRONMENT, FOREIGN  # noqa: PLC0415  an extra

    for name in FOREIGN:
        monkeypatch.delenv(name, raising=False)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def leasehold_kinesis_stream(
    leasehold_kinesis: "Service",
    leasehold_credentials: None,  # noqa: ARG001  they must be there
) -> Iterator["Stream"]:
    """A new stream of two shards: `url` for a worker; `put`, `split`, `merge` and `shards` for the test."""
    from leasehold_lab.demo.stage import Stream  # noqa: PLC0415  an extra

    with closing(Stream(leasehold_kinesis.url, f"stream-{uuid4().hex}", SHARDS)) as stream:
        yield stream


@pytest.fixture
def leasehold_dynamodb_table(
    leasehold_dynamodb: "Service",
    leasehold_credentials: None,  # noqa: ARG001  they must be there
) -> str:
    """The URL of a lease table that nobody has used; a worker makes it."""
    return f"dynamodb://table-{uuid4().hex}?endpoint={leasehold_dynamodb.url}"


@pytest.fixture
def leasehold_blob_container(leasehold_azurite: "Service", monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a container that nobody has used, for leases; a worker makes it. Its key is in the environment."""
    from leasehold_lab.standins.services import AZURITE_ACCOUNT, azurite_connection_string  # noqa: PLC0415  an extra

    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", azurite_connection_string(leasehold_azurite))
    return f"azblob://{AZURITE_ACCOUNT}/container-{uuid4().hex}"


@pytest.fixture
def leasehold_sqlite(tmp_path: Path) -> str:
    """The URL of a file for leases in this test's folder; a worker makes it."""
    return f"sqlite:///{tmp_path}/leases.db"
