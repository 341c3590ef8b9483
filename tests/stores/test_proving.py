"""Tests that a store opened for writing rejects a service that ignores conditions, and leaves nothing behind."""

from concurrent.futures import ThreadPoolExecutor
from itertools import count
from uuid import uuid4

import boto3
import pytest
from attrs import define
from object_memory import ObjectMemory
from object_stores import container
from standins.careless_line import careless_line
from types_boto3_dynamodb import DynamoDBClient

from leasehold.balancer.model import Lease
from leasehold.errors import OutcomeUnknown, StoreError
from leasehold.stores.objects.event_hubs_layout import EventHubLayout
from leasehold.stores.objects.generic_layout import ObjectLayout
from leasehold.stores.objects.store import EtagStore, Layout
from leasehold.stores.protocol import Listing
from leasehold.stores.requests import ObjectFields, StoredObject
from leasehold.stores.urls import open_store
from leasehold.stores.writes import CreateLease
from leasehold_lab.contract.actors import expect_applied

FLEET = ObjectLayout("fleet/one")
HUB = EventHubLayout("ns.servicebus.windows.net", "Orders", "$Default")

_names = count()


@define
class CarelessMemory(ObjectMemory):
    """A bucket that ignores the condition of one kind of write."""

    ignores: str = ""

    def put_if_absent(self, name: str, fields: ObjectFields) -> str | None:
        if self.ignores != "new":
            return ObjectMemory.put_if_absent(self, name, fields)
        self._ask("new", name)
        return self._put("new", name, fields)

    def put_if_match(self, name: str, fields: ObjectFields, etag: str) -> str | None:
        if self.ignores == "etag":
            self.stored[name] = StoredObject(name, etag, fields)
            return etag
        return (
            self._put("over", name, fields)
            if self.ignores == "over"
            else ObjectMemory.put_if_match(self, name, fields, etag)
        )

    def delete(self, name: str, etag: str) -> bool:
        if self.ignores == "delete":
            self.stored.pop(name, None)
        return ObjectMemory.delete(self, name, etag)


@pytest.mark.parametrize("layout", [FLEET, HUB])
@pytest.mark.parametrize(
    ("ignores", "says"),
    [
        ("new", "the service ignores If-None-Match: \\* on a write, so two workers could own one lease"),
        ("over", "the service ignores If-Match on a write"),
        ("delete", "the service ignores If-Match on a deletion"),
        ("etag", "the service gives new content an old ETag"),
    ],
)
def test_a_bucket_that_ignores_a_condition_is_rejected(layout: Layout, ignores: str, says: str) -> None:
    memory = CarelessMemory(ignores=ignores)
    with pytest.raises(StoreError, match=says):
        EtagStore(memory, layout).prove()
    assert memory.stored == {}


@pytest.mark.parametrize("layout", [FLEET, HUB])
def test_the_probe_leaves_a_bucket_unchanged(layout: Layout) -> None:
    memory = ObjectMemory()
    store = EtagStore(memory, layout)
    row = expect_applied(store.write(CreateLease(Lease("0"))))
    objects_before, listings_during_probe = dict(memory.stored), list[Listing]()

    def list_during_probe(line: str) -> None:
        if line.startswith("delete probe/"):
            listings_during_probe.append(store.list())

    memory.log.clear()
    memory.before = list_during_probe
    store.prove()
    assert memory.stored == objects_before
    verbs = [line.split()[0] for line in memory.log if "probe/" in line]
    assert verbs == ["new", "new", "over", "over", "delete", "delete"]
    assert listings_during_probe == [Listing((row,))] * 2


def test_a_probe_with_a_lost_reply_leaves_nothing_and_rejects_nothing() -> None:
    memory = ObjectMemory(mute=frozenset({"over"}))
    with pytest.raises(OutcomeUnknown):
        EtagStore(memory, FLEET).prove()
    assert memory.stored == {}


@define
class RefusingMemory(ObjectMemory):
    """A bucket that refuses one kind of write, or whose objects cannot be read."""

    refuses: str = ""

    def get(self, name: str) -> StoredObject | None:
        if self.refuses == "read":
            raise OutcomeUnknown("the read failed")
        return ObjectMemory.get(self, name)

    def put_if_absent(self, name: str, fields: ObjectFields) -> str | None:
        return None if self.refuses == "new" else ObjectMemory.put_if_absent(self, name, fields)

    def put_if_match(self, name: str, fields: ObjectFields, etag: str) -> str | None:
        if self.refuses == "read":
            raise StoreError("the write failed")
        return None if self.refuses == "over" else ObjectMemory.put_if_match(self, name, fields, etag)

    def delete(self, name: str, etag: str) -> bool:
        return self.refuses != "delete" and ObjectMemory.delete(self, name, etag)


@pytest.mark.parametrize(
    ("refuses", "says"),
    [
        ("new", r"the service refuses a new object under If-None-Match: \*"),
        ("over", "the service refuses a write whose If-Match holds"),
        ("delete", "the service refuses a deletion whose If-Match holds"),
        ("read", "^the write failed"),
    ],
)
def test_a_bucket_that_refuses_a_write_is_rejected_with_its_reason(refuses: str, says: str) -> None:
    with pytest.raises(StoreError, match=says):
        EtagStore(RefusingMemory(refuses=refuses), FLEET).prove()


@pytest.mark.services
@pytest.mark.parametrize(
    ("forgets", "says"),
    [
        ("PUT If-None-Match", "ignores If-None-Match"),
        ("PUT If-Match", "ignores If-Match on a write"),
        ("DELETE If-Match", "ignores If-Match on a deletion"),
    ],
)
def test_an_s3_service_that_ignores_a_condition_is_read_only(moto_url: str, forgets: str, says: str) -> None:
    """A service that ignores conditions cannot be opened for writing, but tools that only read can open it."""
    bucket = f"careless-{next(_names)}"
    with careless_line(moto_url, forgets) as line:
        url = f"s3://{bucket}/fleet?region=eu-west-1&endpoint={line.url}"
        with pytest.raises(StoreError, match=says):
            open_store(url)
        line.requests.clear()
        store = open_store(url, create=False, write=False)
        assert store.list().leases == ()
        store.close()
        assert {request.split()[0] for request in line.requests} == {"GET"}
    client = boto3.client("s3", endpoint_url=moto_url)
    assert client.list_objects_v2(Bucket=bucket)["KeyCount"] == 0
    client.close()


@pytest.mark.services
def test_many_workers_open_one_bucket_concurrently(moto_url: str) -> None:
    """A whole fleet can start at once, because the probe of one worker does not look like a fault to another."""
    url = f"s3://crowded-{next(_names)}/fleet?region=eu-west-1&endpoint={moto_url}"
    open_store(url).close()
    with ThreadPoolExecutor(8) as pool:
        for store in pool.map(open_store, [url] * 16):
            assert store.list().leases == ()
            store.close()


@pytest.mark.services
@pytest.mark.parametrize("forgets", ["PutItem", "UpdateItem", "DeleteItem"])
def test_a_dynamodb_that_ignores_conditions_is_read_only(
    dynalite_url: str, dynalite_client: DynamoDBClient, forgets: str
) -> None:
    table = f"careless-{next(_names)}"
    with careless_line(dynalite_url, forgets) as line:
        with pytest.raises(StoreError, match=f"{table}: the service ignores the conditions of writes"):
            open_store(f"dynamodb://{table}?endpoint={line.url}")
        line.requests.clear()
        store = open_store(f"dynamodb://{table}?endpoint={line.url}", create=False, write=False)
        assert store.list().leases == ()
        store.close()
        assert set(line.requests) <= {"DescribeTable", "Scan"}
    assert dynalite_client.scan(TableName=table)["Items"] == []


@pytest.mark.services
def test_a_table_never_shows_the_probes_row(dynalite_url: str) -> None:
    """A Java worker with KCL 2.x stops taking leases when it reads a row that is not a lease."""
    with careless_line(dynalite_url) as line:
        open_store(f"dynamodb://careful-{next(_names)}?endpoint={line.url}").close()
        assert [request for request in line.requests if "Item" in request] == ["DeleteItem", "UpdateItem", "PutItem"]


@pytest.mark.services
@pytest.mark.parametrize("options", ["prefix=fleet/one", "eventhub=ns/orders&group=$Default"])
def test_the_probe_leaves_a_container_unchanged(connection: str, options: str) -> None:
    """An official worker's listing fails if it contains a blob that the worker cannot read."""
    name = f"probe-{uuid4().hex}"
    open_store(f"azblob://devstoreaccount1/{name}?{options}").close()
    with container(connection) as client, client.from_connection_string(connection, name) as probed:
        assert list(probed.list_blobs()) == []
