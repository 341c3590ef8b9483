"""Tests how azurite (like Azure Blob, according to its documentation) responds to conditions and to problems."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
from azure.storage.blob import ContainerClient
from object_stores import container, try_conditions
from process_race import assert_one_winner_per_lease

from leasehold.balancer.model import LATEST, TRIM_HORIZON, Lease, Position
from leasehold.errors import OutcomeUnknown, StoreError
from leasehold.stores.objects.blob import CONNECTION_STRING_VARIABLE, BlobObjects
from leasehold.stores.objects.event_hubs_layout import EventHubLayout
from leasehold.stores.objects.store import EtagStore
from leasehold.stores.protocol import Malformed, Store
from leasehold.stores.urls import open_store
from leasehold.stores.writes import ClaimLease, CreateLease, DeleteLease, RenewLease, StealLease
from leasehold_lab.contract.actors import create_lease_with_owner, expect_applied

pytestmark = pytest.mark.services

HUB = EventHubLayout("ns.servicebus.windows.net", "Orders", "$Default")
PREFIX = "ns.servicebus.windows.net/orders/$default"
ACCOUNT = "devstoreaccount1"


@pytest.fixture
def blobs(azurite_connection: str) -> Iterator[ContainerClient]:
    with container(azurite_connection) as client:
        yield client


@pytest.fixture
def objects(blobs: ContainerClient) -> BlobObjects:
    """Return the same container through the interface that the stores use."""
    return BlobObjects(blobs)


def test_conditional_writes_follow_the_matrix(objects: BlobObjects) -> None:
    try_conditions(objects)
    first = objects.put_if_absent("a", {"n": "1"})
    assert objects.put_if_match("a", {"n": "1"}, str(first)) not in (None, first), "a new version all the same"
    objects.delete("a", objects.list("")[0].etag)
    assert objects.list("") == ()


def test_etags_are_unquoted_in_every_response(objects: BlobObjects) -> None:
    """ETags have no quotes in listings, but have quotes in other responses. They must compare as equal."""
    written_etag = objects.put_if_absent("a", {"ownerid": ""})
    (listed_object,) = objects.list("a")
    fetched_object = objects.get("a")
    assert fetched_object is not None
    assert written_etag == listed_object.etag == fetched_object.etag
    assert '"' not in str(written_etag)
    assert listed_object.fields == fetched_object.fields == {"ownerid": ""}


def test_a_listing_tolerates_foreign_blobs_in_the_prefix(objects: BlobObjects) -> None:
    """A malformed blob makes the listings of the SDKs fail, but not ours."""
    objects.put_if_absent(f"{PREFIX}/ownership/0", {})
    objects.put_if_absent(f"{PREFIX}/ownership/1", {"ownerid": "", "clientidentifier": "them"})
    objects.put_if_absent(f"{PREFIX}/checkpoint/1", {"offset": "no offset", "sequencenumber": "17"})
    objects.put_if_absent(f"{PREFIX}/ownership/2", {"OwnerId": "ann"})
    objects.put_if_absent(f"{PREFIX}/checkpoint/3", {"offset": "0", "sequencenumber": "x"})
    for foreign_name in ("ownership/readme.txt", "ownership/0/old", "0", "ownership-old/7"):
        objects.put_if_absent(f"{PREFIX}/{foreign_name}", {"ownerid": "stranger"})
    store = EtagStore(objects, HUB)
    listing = store.list()
    rows = [(lease.key, lease.owner, lease.checkpoint) for lease in listing.leases]
    assert rows == [("0", None, TRIM_HORIZON), ("1", None, Position("17")), ("2", "ann", TRIM_HORIZON)]
    assert listing.malformed == (Malformed("3", "sequencenumber", "'x' is not a decimal sequence number"),)
    expect_applied(store.write(ClaimLease(listing.leases[1], "bob")))
    ownership = objects.get(f"{PREFIX}/ownership/1")
    assert ownership is not None
    assert ownership.fields == {"clientidentifier": "them", "ownerid": "bob", "handoffowner": "bob"}


def test_twenty_writers_keep_their_connections(
    connection: str, blobs: ContainerClient, caplog: pytest.LogCaptureFixture
) -> None:
    """By default, the SDK keeps only ten connections. If it discards one, it logs this, and needs a new handshake."""
    assert connection
    store, gate = open_store(f"azblob://{ACCOUNT}/{blobs.container_name}?prefix=many"), Barrier(20)

    def create(number: int) -> None:
        gate.wait(60)
        for part in range(5):
            expect_applied(store.write(CreateLease(Lease(f"{number}-{part}"))))

    with ThreadPoolExecutor(20) as pool:
        list(pool.map(create, range(20)))
    assert [record.getMessage() for record in caplog.records if record.name == "urllib3.connectionpool"] == []


def test_one_winner_between_processes(connection: str, blobs: ContainerClient) -> None:
    assert connection
    assert_one_winner_per_lease(f"azblob://{ACCOUNT}/{blobs.container_name}?prefix=race")


def test_a_url_creates_its_container_only_if_allowed(connection: str) -> None:
    assert connection
    url = f"azblob://{ACCOUNT}/made-by-url?eventhub=NS.servicebus.windows.net/Orders&group=%24Default"
    with pytest.raises(StoreError, match="container 'made-by-url': it does not exist"):
        open_store(url, create=False)
    row = expect_applied(open_store(url).write(CreateLease(Lease("0"))))
    reopened = open_store("azblob://devstoreaccount1/made-by-url?eventhub=ns/orders", create=False)
    assert reopened.list().leases == (row,)
    blobs = ContainerClient.from_connection_string(connection, "made-by-url")
    assert [*blobs.list_blob_names()] == [f"{PREFIX}/checkpoint/0"]
    blobs.close()
    assert open_store(f"azblob://{ACCOUNT}/made-by-url?prefix=p", create=False).list().leases == ()


def test_an_uncheckpointed_partition_starts_where_the_url_says(connection: str, blobs: ContainerClient) -> None:
    """A partition taken from an official worker that reads new events is not read from the start of its retention."""
    assert connection
    blobs.upload_blob(f"{PREFIX}/ownership/0", b"", metadata={"ownerid": "sdk"})
    url = f"azblob://{ACCOUNT}/{blobs.container_name}?eventhub=ns/orders"
    start_positions = [open_store(f"{url}{option}").list().leases[0].checkpoint for option in ("", "&start=LATEST")]
    assert start_positions == [TRIM_HORIZON, LATEST]


def test_a_wrong_key_is_reported_without_showing_it(connection: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONNECTION_STRING_VARIABLE, connection.replace("AccountKey=E", "AccountKey=F"))
    with pytest.raises(StoreError, match="the service refused") as exc_info:
        open_store(f"azblob://{ACCOUNT}/leases")
    assert "Fby8" not in str(exc_info.value)
    assert not isinstance(exc_info.value, OutcomeUnknown)
    monkeypatch.setenv(CONNECTION_STRING_VARIABLE, "not one")
    with pytest.raises(StoreError, match=CONNECTION_STRING_VARIABLE):
        open_store(f"azblob://{ACCOUNT}/leases")


DOWN: tuple[Callable[[Store, Lease], object], ...] = (
    lambda store, _: store.list(),
    lambda store, lease: store.get([lease.key]),
    lambda store, lease: store.write(CreateLease(lease)),
    lambda store, lease: store.write(ClaimLease(lease, "ann")),
    lambda store, lease: store.write(StealLease(lease, "ann")),
    lambda store, lease: store.write(RenewLease(lease)),
    lambda store, lease: store.write(DeleteLease(lease)),
)


def test_a_missing_container_raises_a_fault(objects: BlobObjects, blobs: ContainerClient) -> None:
    store = EtagStore(objects, HUB)
    lease = create_lease_with_owner(store, Lease("0", owner="ann"))
    blobs.delete_container()
    for operation in DOWN:
        with pytest.raises(StoreError, match="it does not exist"):
            operation(store, lease)
