"""What azurite, and by its documentation Azure Blob, answers to each condition; and bad circumstances."""

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier

import pytest
from azure.storage.blob import ContainerClient
from object_stores import container
from process_race import assert_one_winner_each

from leasehold.balancer.model import LATEST, TRIM_HORIZON, Lease, Position
from leasehold.stores.contract.actors import done, placed
from leasehold.stores.objects.blob import CONNECTION_STRING, BlobObjects
from leasehold.stores.objects.event_hubs_layout import EventHubLayout
from leasehold.stores.objects.generic_layout import ObjectLayout
from leasehold.stores.objects.store import EtagStore, Layout
from leasehold.stores.protocol import Done, Malformed, OutcomeUnknown, Store, StoreError
from leasehold.stores.requests import SkewWarning
from leasehold.stores.urls import open_store
from leasehold.stores.writes import ClaimLease, CreateLease, DeleteLease, RenewLease, StealLease

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
    """The same, as the stores see it."""
    return BlobObjects(blobs)


@pytest.fixture
def connection(azurite_connection: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The connection string, where a URL looks for it."""
    monkeypatch.setenv(CONNECTION_STRING, azurite_connection)
    return azurite_connection


def test_the_matrix_of_conditions(objects: BlobObjects) -> None:
    """A condition the service ignores makes two owners of one lease."""
    first = objects.put_new("a/b", {"ownerid": "ann"})
    assert first is not None
    assert objects.put_new("a/b", {"ownerid": "bob"}) is None
    second = objects.put_over("a/b", {"ownerid": "ann"}, first)
    assert second not in (None, first)  # the same content is a new version all the same
    assert objects.put_over("a/b", {"ownerid": "bob"}, first) is None
    assert objects.put_over("absent", {"ownerid": "bob"}, first) is None
    assert objects.get("absent") is None
    assert [objects.delete("a/b", first), objects.delete("a/b", str(second))] == [False, True]
    assert objects.delete("a/b", first)
    assert objects.list("") == ()


def test_etags_are_bare_wherever_they_come_from(objects: BlobObjects) -> None:
    """Listed bare and answered quoted, a lease would seem to change hands between list and get."""
    written = objects.put_new("a", {"ownerid": ""})
    (listed,) = objects.list("a")
    got = objects.get("a")
    assert got is not None
    assert written == listed.etag == got.etag
    assert '"' not in str(written)
    assert listed.fields == got.fields == {"ownerid": ""}


def test_a_listing_has_all_pages(objects: BlobObjects, blobs: ContainerClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every partition past the first page would be created again at its start."""
    monkeypatch.setattr(blobs, "list_blobs", partial(blobs.list_blobs, results_per_page=2))
    for number in range(5):
        objects.put_new(f"a/{number}", {})
    assert [one.name for one in objects.list("a/")] == [f"a/{number}" for number in range(5)]


def test_blobs_of_strangers_and_peers_in_the_prefix(objects: BlobObjects) -> None:
    """One odd blob makes the SDKs' listings fail; ours would stop with them."""
    objects.put_new(f"{PREFIX}/ownership/0", {})
    objects.put_new(f"{PREFIX}/ownership/1", {"ownerid": "", "clientidentifier": "them"})
    objects.put_new(f"{PREFIX}/checkpoint/1", {"offset": "no offset", "sequencenumber": "17"})
    objects.put_new(f"{PREFIX}/ownership/2", {"OwnerId": "ann"})
    objects.put_new(f"{PREFIX}/checkpoint/3", {"offset": "0", "sequencenumber": "x"})
    for foreign in ("ownership/readme.txt", "ownership/0/old", "0", "ownership-old/7"):
        objects.put_new(f"{PREFIX}/{foreign}", {"ownerid": "stranger"})
    store = EtagStore(objects, HUB)
    listing = store.list()
    rows = [(lease.key, lease.owner, lease.checkpoint) for lease in listing.leases]
    assert rows == [("0", None, TRIM_HORIZON), ("1", None, Position("17")), ("2", "ann", TRIM_HORIZON)]
    assert listing.malformed == (Malformed("3", "sequencenumber", "'x' is no decimal sequence number"),)
    done(store.write(ClaimLease(listing.leases[1], "bob")))
    kept = objects.get(f"{PREFIX}/ownership/1")
    assert kept is not None
    assert kept.fields == {"clientidentifier": "them", "ownerid": "bob", "handoffowner": "bob"}


@pytest.mark.parametrize(("skew", "says"), [(600, "ahead of"), (-600, "behind")])
def test_a_clock_far_off_is_said_once_and_changes_nothing(
    blobs: ContainerClient, caplog: pytest.LogCaptureFixture, skew: int, says: str
) -> None:
    """By a clock ten minutes ahead every living owner is dead, and the group falls apart."""
    store = EtagStore(BlobObjects(blobs, SkewWarning(lambda: time.time() + skew)), HUB)
    lease = placed(store, Lease("0", owner="ann"))
    assert store.list().leases[0].idle < 60
    assert store.get(["0"])[0].idle < 60
    assert done(store.write(RenewLease(lease))).owner == "ann"
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "leasehold.objects"]
    assert re.match(rf"the local clock is (59|60)\d s {says} the storage service's", warning)


@pytest.mark.parametrize("layout", [HUB, ObjectLayout("p")], ids=["event-hubs", "ours"])
def test_of_thirty_two_claimants_one_wins(blobs: ContainerClient, layout: Layout) -> None:
    """Two workers would read one partition: each with its own memory of the lease, all at once."""
    workers = [f"w-{number}" for number in range(32)]
    stores = {me: EtagStore(BlobObjects(blobs), layout) for me in workers}
    lease = done(stores["w-0"].write(CreateLease(Lease("7"))))
    gate = Barrier(len(workers))

    def claim(me: str) -> bool:
        gate.wait(60)
        return isinstance(stores[me].write(ClaimLease(lease, me)), Done)

    with ThreadPoolExecutor(len(workers)) as pool:
        winners = [me for me, won in zip(workers, pool.map(claim, workers), strict=True) if won]
    assert winners == [stores["w-0"].get(["7"])[0].owner]


def test_twenty_writers_keep_their_connections(
    connection: str, blobs: ContainerClient, caplog: pytest.LogCaptureFixture
) -> None:
    """The SDK keeps ten, says of each other that it discards it, and pays for a handshake at the next request."""
    assert connection
    store, gate = open_store(f"azblob://{ACCOUNT}/{blobs.container_name}?prefix=many"), Barrier(20)

    def create(number: int) -> None:
        gate.wait(60)
        for part in range(5):
            done(store.write(CreateLease(Lease(f"{number}-{part}"))))

    with ThreadPoolExecutor(20) as pool:
        list(pool.map(create, range(20)))
    assert [record.getMessage() for record in caplog.records if record.name == "urllib3.connectionpool"] == []


def test_one_winner_between_processes(connection: str, blobs: ContainerClient) -> None:
    """What holds between threads of one client need not hold between clients."""
    assert connection
    assert_one_winner_each(f"azblob://{ACCOUNT}/{blobs.container_name}?prefix=race")


def test_a_url_makes_its_container_or_says_that_it_may_not(connection: str) -> None:
    """A typo in a name would be answered by an empty table, against the user's word."""
    assert connection
    url = f"azblob://{ACCOUNT}/made-by-url?eventhub=NS.servicebus.windows.net/Orders&group=%24Default"
    with pytest.raises(StoreError, match="container 'made-by-url': it does not exist"):
        open_store(url, create=False)
    row = done(open_store(url).write(CreateLease(Lease("0"))))
    again = open_store("azblob://devstoreaccount1/made-by-url?eventhub=ns/orders", create=False)
    assert again.list().leases == (row,)
    blobs = ContainerClient.from_connection_string(connection, "made-by-url")
    assert [*blobs.list_blob_names()] == [f"{PREFIX}/checkpoint/0"]
    blobs.close()
    assert open_store(f"azblob://{ACCOUNT}/made-by-url?prefix=p", create=False).list().leases == ()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("azblob://other", "azblob:// wants account/container"),
        ("azblob://other/a/b", "azblob:// wants account/container"),
        ("azblob://other/a?eventhub=hub", "option 'eventhub' wants"),
        ("azblob://other/a?eventhub=ns/hub&prefix=p", "option 'eventhub' wants"),
        ("azblob://other/a?group=g", "option 'group' goes with"),
        ("azblob://other/a?prefix=p&start=LATEST", "option 'start' goes with"),
        ("azblob://other/a?eventhub=ns/hub&start=NOW", "option 'start' wants one of TRIM_HORIZON, LATEST"),
        ("azblob://other/a?endpoint=http://h", "option 'endpoint' goes with an identity"),
        ("azblob://other/leases", "AZURE_STORAGE_CONNECTION_STRING is for account 'devstoreaccount1', not 'other'"),
    ],
)
def test_a_bad_url_is_named_by_its_part(connection: str, url: str, says: str) -> None:
    """A worker would keep its leases where nobody looks for them."""
    assert connection
    with pytest.raises(ValueError, match=f"store URL: .*{says}"):
        open_store(url)


def test_a_partition_owned_and_never_checkpointed_starts_where_the_url_says(
    connection: str, blobs: ContainerClient
) -> None:
    """Taken from an official worker that reads what is new, it would be read from the beginning of its retention."""
    assert connection
    blobs.upload_blob(f"{PREFIX}/ownership/0", b"", metadata={"ownerid": "sdk"})
    url = f"azblob://{ACCOUNT}/{blobs.container_name}?eventhub=ns/orders"
    starts = [open_store(f"{url}{option}").list().leases[0].checkpoint for option in ("", "&start=LATEST")]
    assert starts == [TRIM_HORIZON, LATEST]


def test_a_wrong_key_is_said_without_showing_it(connection: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user would see a service that is down, or the secret in a log."""
    monkeypatch.setenv(CONNECTION_STRING, connection.replace("AccountKey=E", "AccountKey=F"))
    with pytest.raises(StoreError, match="the service refused") as caught:
        open_store(f"azblob://{ACCOUNT}/leases")
    assert "Fby8" not in str(caught.value)
    assert not isinstance(caught.value, OutcomeUnknown)
    monkeypatch.setenv(CONNECTION_STRING, "not one")
    with pytest.raises(StoreError, match=CONNECTION_STRING):
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


@pytest.mark.parametrize("ask", DOWN)
def test_a_service_that_is_down_is_an_unknown_outcome(
    azurite_connection: str, ask: Callable[[Store, Lease], object]
) -> None:
    """A claim counted as won with the storage down is a partition read by two."""
    nowhere = azurite_connection.replace("BlobEndpoint=http://127.0.0.1:", "BlobEndpoint=http://127.0.0.1:1/")
    down = ContainerClient.from_connection_string(nowhere, "leases", retry_total=0, connection_timeout=2)
    with pytest.raises(OutcomeUnknown, match="container 'leases': the service cannot be reached"):
        ask(EtagStore(BlobObjects(down), HUB), Lease("0"))


def test_a_container_that_vanished_is_a_fault_and_no_refusal(objects: BlobObjects, blobs: ContainerClient) -> None:
    """Read as "no such lease", it would have every partition created anew."""
    store = EtagStore(objects, HUB)
    lease = placed(store, Lease("0", owner="ann"))
    blobs.delete_container()
    for ask in DOWN:
        with pytest.raises(StoreError, match="it does not exist"):
            ask(store, lease)
