"""What the S3 store asks of its service, on moto; and bad circumstances."""

from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from botocore.client import BaseClient
from botocore.exceptions import ClientError
from object_stores import bucket, try_conditions

from leasehold.balancer.model import Lease, Position
from leasehold.stores.contract.actors import done, placed
from leasehold.stores.objects.generic_layout import ObjectLayout
from leasehold.stores.objects.s3 import S3Objects
from leasehold.stores.objects.store import EtagStore
from leasehold.stores.protocol import OutcomeUnknown, StoreError
from leasehold.stores.urls import open_store
from leasehold.stores.writes import CreateLease

pytestmark = pytest.mark.services

_FORBIDDEN: Any = {"HTTPStatusCode": 403}


@pytest.fixture
def objects(moto_url: str) -> Iterator[S3Objects]:
    made = bucket(moto_url)
    yield made
    made.close()


def test_the_matrix_of_conditions(objects: S3Objects) -> None:
    """A condition the service ignores makes two owners of one lease."""
    try_conditions(objects)
    assert objects.list("") == ()


def test_a_listing_fetches_only_what_changed(objects: S3Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at ten thousand leases would cost as many requests, whether anything happened or not."""
    for number in range(3):
        objects.put_new(f"a/{number}", {"counter": "1"})
    first = objects.list("a/")
    fetched: list[str] = []
    call = BaseClient._make_api_call  # type: ignore[attr-defined]  # noqa: SLF001  every request passes here

    def counted(client: BaseClient, operation: str, arguments: dict[str, Any]) -> object:
        if operation == "GetObject":
            fetched.append(arguments["Key"])
        return call(client, operation, arguments)

    monkeypatch.setattr(BaseClient, "_make_api_call", counted)
    assert objects.list("a/") == first
    objects.put_over("a/1", {"counter": "2"}, first[1].etag)
    assert [one.fields["counter"] for one in objects.list("a/")] == ["1", "2", "1"]
    assert fetched == ["a/1"]


def test_a_strangers_object_is_malformed_and_left_alone(objects: S3Objects, moto_url: str) -> None:
    """A file dropped into the wrong folder would stop every worker, or be written over."""
    store = EtagStore(objects, ObjectLayout())
    row = done(store.write(CreateLease(Lease("s-0", checkpoint=Position("41")))))
    stranger = boto3.client("s3", endpoint_url=moto_url)
    stranger.put_object(Bucket=objects.bucket, Key="checkpoint/s-1", Body=b"\xff\xfe")
    stranger.put_object(Bucket=objects.bucket, Key="checkpoint/s-2", Body=b"[1]")
    stranger.close()
    listing = store.list()
    assert listing.leases == (row,)
    assert [(bad.key, bad.field) for bad in listing.malformed] == [("s-1", "sequence"), ("s-2", "sequence")]


def test_a_url_makes_its_bucket_or_says_that_it_may_not(moto_url: str) -> None:
    """A typo in a name would be answered by an empty table, against the user's word."""
    url = f"s3://made-by-url/fleet/one?region=eu-west-1&endpoint={moto_url}"
    with pytest.raises(StoreError, match="bucket 'made-by-url': the service refused: NoSuchBucket"):
        open_store(url, create=False)
    row = done(open_store(url).write(CreateLease(Lease("s-0"))))
    assert open_store(url, create=False).list().leases == (row,)
    with pytest.raises(ValueError, match="store URL: s3:// wants bucket/prefix"):
        open_store("s3://?region=eu-west-1")


def test_a_clock_that_the_service_refuses_is_named(objects: S3Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    """The service's own word for it says neither whose time it means nor what to do."""

    def refused(_client: object, operation: str, _arguments: object) -> object:
        raise ClientError({"Error": {"Code": "RequestTimeTooSkewed"}, "ResponseMetadata": _FORBIDDEN}, operation)

    monkeypatch.setattr(BaseClient, "_make_api_call", refused)
    with pytest.raises(StoreError, match=r"RequestTimeTooSkewed \(HTTP 403\); set this machine's clock"):
        objects.get("a")


def test_a_service_that_is_down_is_an_unknown_outcome() -> None:
    """A claim counted as won with the storage down is a shard read by two."""
    down = EtagStore(S3Objects("leases", endpoint="http://127.0.0.1:1"), ObjectLayout())
    with pytest.raises(OutcomeUnknown, match="bucket 'leases': the service cannot be reached"):
        placed(down, Lease("s-0", owner="ann"))
    with pytest.raises(OutcomeUnknown):
        down.list()


def test_a_name_that_no_bucket_can_have_is_a_fault(moto_url: str) -> None:
    """A worker would wait for a service that is up."""
    with pytest.raises(StoreError, match="bucket 'no bucket'") as caught:
        open_store(f"s3://no%20bucket?endpoint={moto_url}")
    assert not isinstance(caught.value, OutcomeUnknown)


def test_missing_credentials_are_a_fault_that_says_so(monkeypatch: pytest.MonkeyPatch, moto_url: str) -> None:
    """A worker would wait for a service that is up."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)  # which remembers them
    with pytest.raises(StoreError, match="credentials") as caught:
        open_store(f"s3://leases?endpoint={moto_url}")
    assert not isinstance(caught.value, OutcomeUnknown)
