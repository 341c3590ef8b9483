"""The Event Processor Host's blobs are read as leases, whichever of its languages wrote them, and only read."""

import json
from collections.abc import Callable, Iterator

import pytest
from azure.storage.blob import ContainerClient
from object_stores import container

from balancer.model import TRIM_HORIZON, Lease, Position
from stores.blob import CONNECTION_STRING
from stores.contract.actors import facts
from stores.protocol import Malformed, StoreError
from stores.urls import open_store

pytestmark = pytest.mark.services

FOLDER = "ns.servicebus.windows.net/Orders/$Default"
DOTNET = {"PartitionId": "0", "Owner": "host-1", "Token": "t", "Epoch": 3, "Offset": "4520", "SequenceNumber": 9}
PYTHON = {"partition_id": "1", "owner": None, "token": None, "epoch": 0, "offset": "4530", "sequence_number": 10}
FRESH = {"PartitionId": "2", "Owner": "", "Token": "", "Epoch": 0, "Offset": None, "SequenceNumber": 0}


@pytest.fixture
def blobs(azurite_connection: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[ContainerClient]:
    """A container with what three Hosts left, and blobs of others beside it."""
    monkeypatch.setenv(CONNECTION_STRING, azurite_connection)
    with container(azurite_connection) as client:
        for number, body in enumerate((DOTNET, PYTHON, FRESH)):
            client.upload_blob(f"{FOLDER}/{number}", b"\xef\xbb\xbf" + json.dumps(body).encode())
        client.upload_blob(f"{FOLDER}/3", b"not a lease")
        client.upload_blob(f"{FOLDER.lower()}/ownership/0", b"", metadata={"ownerid": "sdk"})
        client.upload_blob(f"{FOLDER}/readme.txt", b"")
        yield client


def test_every_hosts_lease_is_read(blobs: ContainerClient) -> None:
    """Partitions would start over because a name was spelled in another language's way."""
    store = open_store(f"azblob-eph://devstoreaccount1/{blobs.container_name}?eventhub=ns/Orders")
    listing = store.list()
    zero, one, two = listing.leases
    assert [facts(zero), facts(one), facts(two)] == [
        Lease("0", FOLDER.lower(), owner="host-1", checkpoint=Position("9")),
        Lease("1", FOLDER.lower(), checkpoint=Position("10")),
        Lease("2", FOLDER.lower(), checkpoint=TRIM_HORIZON),
    ]
    assert [zero.checkpoint.token, one.checkpoint.token] == ["4520", "4530"]
    assert listing.malformed == (Malformed("3", "Offset", "the blob is no lease of an Event Processor Host"),)


def test_nothing_is_ever_written(blobs: ContainerClient) -> None:
    """A Host still running would meet a lease it cannot read."""
    store = open_store(f"azblob-eph://devstoreaccount1/{blobs.container_name}?prefix={FOLDER}")
    (zero, *_) = store.list().leases
    before = [(blob.name, blob.etag) for blob in blobs.list_blobs()]
    writes: tuple[Callable[[], object], ...] = (
        lambda: store.create(Lease("9")),
        lambda: store.claim(zero, "me"),
        lambda: store.renew(zero),
        lambda: store.delete(zero, "me"),
    )
    for write in writes:
        with pytest.raises(StoreError, match="only read"):
            write()
    assert [(blob.name, blob.etag) for blob in blobs.list_blobs()] == before


def test_a_url_without_a_folder_is_refused(blobs: ContainerClient) -> None:
    """Every blob of the container would be fetched and called malformed."""
    with pytest.raises(ValueError, match="azblob-eph:// wants"):
        open_store(f"azblob-eph://devstoreaccount1/{blobs.container_name}")
