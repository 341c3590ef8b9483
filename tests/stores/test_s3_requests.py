"""Tests which requests S3 receives, from which client and with which conditions, and how responses are handled."""

from collections.abc import Iterator
from datetime import timedelta
from threading import Barrier
from typing import Any

import pytest
from botocore.exceptions import (
    ClientError,
    EndpointConnectionError,
    FlexibleChecksumError,
    NoCredentialsError,
    SSOTokenLoadError,
)
from object_stores import try_conditions
from s3_memory import BEGAN, S3Bucket, S3Memory, refusal

from leasehold.errors import OutcomeUnknown, StoreError
from leasehold.stores.objects import s3
from leasehold.stores.objects.s3 import TIMEOUTS, S3Objects
from leasehold.stores.protocol import Timeouts
from leasehold.stores.requests import SkewWarning, StoredObject
from leasehold.stores.urls import open_store

READS, WRITES = TIMEOUTS.attempts, 1


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> S3Bucket:
    """Return the in-memory bucket that every client accesses."""
    bucket_state = S3Bucket()

    def create_client(region: str | None, _endpoint: str | None, timeouts: Timeouts, _session: object) -> S3Memory:
        return S3Memory(bucket_state, timeouts.attempts, region or "eu-west-1")

    monkeypatch.setattr(s3, "_create_client", create_client)
    return bucket_state


@pytest.fixture
def objects(bucket: S3Bucket) -> S3Objects:
    """Return the objects of that bucket. The local clock agrees with the service's."""
    assert bucket.name == "leases"
    return S3Objects("leases", skew=SkewWarning(BEGAN.timestamp))


def test_conditional_writes_follow_the_matrix(objects: S3Objects, bucket: S3Bucket) -> None:
    try_conditions(objects)
    assert bucket.objects == {}


def test_each_write_is_sent_once_with_its_condition(objects: S3Objects, bucket: S3Bucket) -> None:
    """A write is sent only once, because a first attempt that was applied would make the second one fail."""
    arguments = {"Key": "a", "Body": b'{"a": "1", "b": "2"}', "ContentType": "application/json"}
    etag = objects.put_if_absent("a", {"b": "2", "a": "1"})
    assert etag == "e-1"
    objects.put_if_match("a", {"b": "2", "a": "1"}, etag)
    objects.delete("a", "e-2")
    assert bucket.requests == [
        (WRITES, "put_object", {**arguments, "IfNoneMatch": "*"}),
        (WRITES, "put_object", {**arguments, "IfMatch": '"e-1"'}),
        (WRITES, "delete_object", {"Key": "a", "IfMatch": '"e-2"'}),
    ]


@pytest.mark.parametrize("code", ["PreconditionFailed", "ConditionalRequestConflict", "NoSuchKey", "412", "409"])
def test_a_failed_condition_is_no_fault(objects: S3Objects, bucket: S3Bucket, code: str) -> None:
    bucket.faults = {"put_object": [refusal(code, 409)], "delete_object": [refusal(code, 409)]}
    assert objects.put_if_absent("a", {}) is None
    objects.put_if_absent("b", {})
    assert not objects.delete("b", "e-1")


OPERATIONS = pytest.mark.parametrize("operation", ["put_object", "delete_object", "get_object", "paginate"])


def call_on_object(objects: S3Objects, operation: str) -> None:
    """Call this operation for an existing object."""
    match operation:
        case "put_object":
            objects.put_if_match("a", {}, "e-1")
        case "delete_object":
            objects.delete("a", "e-1")
        case "get_object":
            objects.get("a")
        case _:
            objects.list("")


@OPERATIONS
@pytest.mark.parametrize("status", [408, 429, 500, 503, 600, 399, 0])
def test_an_unusable_response_is_an_unknown_outcome(
    objects: S3Objects, bucket: S3Bucket, operation: str, status: int
) -> None:
    bucket.faults = {operation: [refusal("InternalError", status)]}
    with pytest.raises(OutcomeUnknown, match=rf"^bucket 'leases': no usable response \(HTTP {status}\)$"):
        call_on_object(objects, operation)


@OPERATIONS
@pytest.mark.parametrize("status", [400, 403, 499])
def test_a_permanent_rejection_is_a_fault(objects: S3Objects, bucket: S3Bucket, operation: str, status: int) -> None:
    bucket.faults = {operation: [refusal("AccessDenied", status)]}
    with pytest.raises(
        StoreError, match=rf"^bucket 'leases': the service refused: AccessDenied \(HTTP {status}\)$"
    ) as exc_info:
        call_on_object(objects, operation)
    assert not isinstance(exc_info.value, OutcomeUnknown)


@OPERATIONS
def test_an_unreachable_service_is_an_unknown_outcome(objects: S3Objects, bucket: S3Bucket, operation: str) -> None:
    bucket.faults = {operation: [EndpointConnectionError(endpoint_url="http://x")]}
    with pytest.raises(OutcomeUnknown, match=r"^bucket 'leases': the service cannot be reached$"):
        call_on_object(objects, operation)
    bucket.faults = {operation: [EndpointConnectionError(endpoint_url="https://s3.eu-nowhere-9.amazonaws.com/")]}
    with pytest.raises(OutcomeUnknown, match=r"be reached \(is the region right\?\)$"):
        call_on_object(objects, operation)
    bucket.faults = {operation: [NoCredentialsError()]}
    with pytest.raises(StoreError, match=r"^bucket 'leases': no credentials of AWS: .* a role$") as exc_info:
        call_on_object(objects, operation)
    assert not isinstance(exc_info.value, OutcomeUnknown)
    bucket.faults = {operation: [SSOTokenLoadError(error_msg="none")]}
    with pytest.raises(OutcomeUnknown, match=r"^bucket 'leases': no credentials of AWS: .*; run aws sso login$"):
        call_on_object(objects, operation)


@pytest.mark.parametrize("error", [{}, {"Error": {}}])
def test_a_rejection_without_an_error_code_is_a_fault(
    objects: S3Objects, bucket: S3Bucket, error: dict[str, Any]
) -> None:
    """Some services send only a status without an error code."""
    bucket.faults = {"get_object": [ClientError({**error, "ResponseMetadata": {"HTTPStatusCode": 418}}, "Any")]}  # type: ignore[typeddict-item]
    with pytest.raises(StoreError, match=r"^bucket 'leases': the service refused:  \(HTTP 418\)$"):
        objects.get("a")


def test_objects_are_fetched_eight_at_a_time(objects: S3Objects, bucket: S3Bucket) -> None:
    for number in range(8):
        objects.put_if_absent(f"a/{number}", {})
    bucket.together = Barrier(8)
    assert len(objects.list("a/")) == 8


def test_a_listing_reads_all_pages_and_fetches_changed_objects(objects: S3Objects, bucket: S3Bucket) -> None:
    etags = [objects.put_if_absent(f"a/{number}", {"n": str(number)}) for number in range(5)]
    objects.put_if_absent("b/0", {"n": "other"})
    bucket.requests.clear()
    bucket.now = 11.0
    first_listing = objects.list("a/")
    assert first_listing == tuple(StoredObject(f"a/{n}", str(etags[n]), {"n": str(n)}, age=10.0) for n in range(5))
    assert [call[:2] for call in bucket.requests] == [(READS, "paginate")] * 3 + [(READS, "get_object")] * 5
    assert objects.list("b/")[0].fields == {"n": "other"}
    etag = objects.put_if_match("a/1", {"n": "new"}, str(etags[1]))
    objects.delete("a/4", str(etags[4]))
    bucket.requests.clear()
    bucket.now = 21.0
    second_listing = objects.list("a/")
    assert [(stored_object.etag, stored_object.fields["n"], stored_object.age) for stored_object in second_listing] == [
        (etags[0], "0", 20.0),
        (etag, "new", 9.0),
        (etags[2], "2", 20.0),
        (etags[3], "3", 20.0),
    ]
    assert [arguments["Key"] for _, operation, arguments in bucket.requests if operation == "get_object"] == ["a/1"]
    objects.list("b/")
    assert bucket.requests[-1][1] == "paginate"


def test_an_object_deleted_during_a_listing_is_missing(objects: S3Objects, bucket: S3Bucket) -> None:
    objects.put_if_absent("a/0", {})
    objects.put_if_absent("a/1", {})
    bucket.faults = {"get_object": [refusal("NoSuchKey", 404)]}
    assert len(objects.list("a/")) == 1


def test_without_the_services_clock_every_lease_is_new(objects: S3Objects, bucket: S3Bucket) -> None:
    """If ages were computed with this machine's clock, a live owner might look dead."""
    objects.put_if_absent("a", {})
    bucket.now, bucket.dated = 3600.0, False
    assert [stored_object.age for stored_object in (*objects.list(""), *objects.list(""))] == [0.0, 0.0]


def test_a_clock_far_off_is_logged(bucket: S3Bucket, caplog: pytest.LogCaptureFixture) -> None:
    objects_with_fast_clock = S3Objects("leases", skew=SkewWarning((BEGAN + timedelta(seconds=600)).timestamp))
    objects_with_fast_clock.list("")
    assert [record.getMessage()[:35] for record in caplog.records] == ["the local clock is 600 s ahead of t"]
    assert bucket.requests


def test_a_body_torn_by_a_write_is_read_again(objects: S3Objects, bucket: S3Bucket) -> None:
    objects.put_if_absent("a", {"n": "1"})
    checksum_error = FlexibleChecksumError(error_msg="torn")
    bucket.faults = {"get_object": [checksum_error] * 7}
    assert objects.get("a") == StoredObject("a", "e-1", {"n": "1"})
    bucket.faults = {"get_object": [checksum_error] * 7}
    assert objects.body("a") == b'{"n": "1"}'
    bucket.faults = {"get_object": [checksum_error] * 8}
    with pytest.raises(OutcomeUnknown):
        objects.get("a")


@pytest.mark.parametrize("body", [b"\xff\xfe", b"[1]", b'{"a": 1}', b"[" * 100_000, b"'"])
def test_a_foreign_object_is_ignored(objects: S3Objects, body: bytes) -> None:
    objects.put_body("a", body)
    stored_object = objects.get("a")
    assert stored_object is not None
    assert stored_object.fields == {}


def remove(bucket: S3Bucket) -> None:
    """Delete the bucket."""
    bucket.name = None


def test_a_bucket_is_created_only_if_allowed(bucket: S3Bucket) -> None:
    remove(bucket)
    objects = S3Objects("new", region="eu-west-2")
    assert objects.missing()
    with pytest.raises(StoreError, match="NoSuchBucket"):
        objects.ensure_bucket(create=False)
    objects.ensure_bucket(create=True)
    assert (bucket.name, objects.missing()) == ("new", False)
    region_arguments = {"CreateBucketConfiguration": {"LocationConstraint": "eu-west-2"}}
    assert [call for call in bucket.requests if call[1] == "create_bucket"] == [
        (WRITES, "create_bucket", region_arguments)
    ]
    assert bucket.requests[1] == (READS, "list_objects_v2", {"MaxKeys": 1})
    bucket.requests.clear()
    objects.ensure_bucket(create=True)
    assert [call[1] for call in bucket.requests] == ["list_objects_v2"]


def test_a_bucket_in_us_east_1_is_created_without_a_region(bucket: S3Bucket) -> None:
    """The service rejects a request that names this region."""
    remove(bucket)
    S3Objects("new", region="us-east-1").ensure_bucket(create=True)
    assert bucket.requests[-1] == (WRITES, "create_bucket", {})


def test_a_bucket_created_by_another_worker_is_used(bucket: S3Bucket) -> None:
    """All workers that start together succeed. A bucket of another account is not used."""
    remove(bucket)
    objects = S3Objects("new")
    bucket.faults = {"create_bucket": [refusal("BucketAlreadyOwnedByYou", 409), refusal("BucketAlreadyExists", 409)]}
    objects.ensure_bucket(create=True)
    with pytest.raises(StoreError, match="BucketAlreadyExists"):
        objects.ensure_bucket(create=True)


def test_a_bucket_is_created_only_if_it_is_missing(objects: S3Objects, bucket: S3Bucket) -> None:
    bucket.faults = {"list_objects_v2": [refusal("AccessDenied", 403)]}
    with pytest.raises(StoreError, match="AccessDenied"):
        objects.ensure_bucket(create=True)


@pytest.mark.parametrize(
    ("code", "missing"), [("404", True), ("NoSuchBucket", True), ("403", False), ("AccessDenied", False)]
)
def test_a_bucket_is_missing_only_if_the_response_says_so(
    objects: S3Objects, bucket: S3Bucket, code: str, missing: bool
) -> None:
    bucket.faults = {"head_bucket": [refusal(code, 404), refusal("Strange", 400)]}
    assert objects.missing() is missing
    with pytest.raises(StoreError, match="Strange"):
        objects.missing()


def test_an_object_of_any_content_is_created_once(objects: S3Objects, bucket: S3Bucket) -> None:
    """If a dead letter is written again, the write succeeds without overwriting the existing object."""
    objects.put_body("l/1", b"one")
    objects.put_body("l/1", b"two")
    objects.put_body("l/2", b"")
    objects.put_body("l/3", b"")
    objects.put_body("m/1", b"")
    assert objects.names("absent/") == ()
    assert objects.names("l/") == ("l/1", "l/2", "l/3")
    assert (objects.body("l/1"), objects.body("absent")) == (b"one", None)
    objects.remove("l/1")
    objects.remove("l/1")
    assert objects.body("l/1") is None
    assert {attempts for attempts, _, _ in bucket.requests} == {READS}
    assert bucket.requests[0][2] == {
        "Key": "l/1",
        "Body": b"one",
        "ContentType": "application/json",
        "IfNoneMatch": "*",
    }
    bucket.faults = {"get_object": [refusal("AccessDenied", 403)]}
    with pytest.raises(StoreError, match="AccessDenied"):
        objects.body("l/2")


@pytest.mark.parametrize("code", ["NotImplemented", "501"])
def test_objects_of_any_content_are_stored_without_conditions(objects: S3Objects, bucket: S3Bucket, code: str) -> None:
    """A service that rejects conditional writes can still store dead letters."""
    bucket.faults = {"put_object": [refusal(code, 501)]}
    objects.put_body("l/1", b"one")
    assert objects.body("l/1") == b"one"
    bucket.faults = {"put_object": [refusal("AccessDenied", 403)]}
    with pytest.raises(StoreError, match="AccessDenied"):
        objects.put_body("l/2", b"")


def test_a_url_sets_bucket_prefix_and_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    client_arguments: list[tuple[str | None, str | None, Timeouts]] = []
    bucket = S3Bucket()

    def create_client(region: str | None, endpoint: str | None, timeouts: Timeouts, _session: object) -> S3Memory:
        client_arguments.append((region, endpoint, timeouts))
        return S3Memory(bucket, timeouts.attempts)

    monkeypatch.setattr(s3, "_create_client", create_client)
    store = open_store("s3://leases/fleet/one?region=eu-west-2&endpoint=http://127.0.0.1:1")
    assert client_arguments == [
        ("eu-west-2", "http://127.0.0.1:1", TIMEOUTS),
        ("eu-west-2", "http://127.0.0.1:1", Timeouts(5, 10, attempts=1)),
    ]
    store.list()
    prefixes = [{"Prefix": f"fleet/one/{part}/"} for part in ("ownership", "checkpoint", "notes")]
    assert [arguments for _, _, arguments in bucket.requests[-3:]] == prefixes
    assert bucket.name == "leases"
    remove(bucket)
    with pytest.raises(StoreError, match="NoSuchBucket"):
        open_store("s3://leases", create=False)
    open_store("s3://leases")
    assert str(bucket.name) == "leases"
    for url in ("s3://", "s3:///prefix"):
        with pytest.raises(ValueError, match="store URL: s3:// wants bucket/prefix"):
            open_store(url)
    client_arguments.clear()
    open_store("s3://leases", request_seconds=2.5)
    assert [timeouts for _, _, timeouts in client_arguments] == [TIMEOUTS.within(2.5)] * 2


def test_a_client_uses_the_given_timeout_and_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    s3_client = s3._create_client("eu-west-2", "http://127.0.0.1:1", Timeouts(1.5, 2.5, attempts=2))  # noqa: SLF001
    config: Any = s3_client.meta.config
    assert (s3_client.meta.region_name, s3_client.meta.endpoint_url) == ("eu-west-2", "http://127.0.0.1:1")
    assert (config.connect_timeout, config.read_timeout, config.max_pool_connections) == (1.5, 2.5, 16)
    assert config.retries == {"total_max_attempts": 2, "mode": "standard"}
    assert config.s3["addressing_style"] == "path"
    service_of_aws: Any = s3._create_client("eu-west-2", None, TIMEOUTS).meta.config  # noqa: SLF001
    assert service_of_aws.s3["addressing_style"] == "auto"
    with pytest.raises(StoreError, match="credentials"):
        s3._create_client("eu-west-2", "http://me:secret@127.0.0.1:1", TIMEOUTS)  # noqa: SLF001


def test_closing_closes_both_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    clients: list[S3Memory] = []

    def create_client(_region: str | None, _endpoint: str | None, timeouts: Timeouts, _session: object) -> S3Memory:
        clients.append(S3Memory(S3Bucket(), timeouts.attempts))
        return clients[-1]

    monkeypatch.setattr(s3, "_create_client", create_client)
    S3Objects("leases").close()
    assert [s3_client.closed for s3_client in clients] == [True, True]


def test_a_listing_of_other_objects_is_an_unknown_outcome(
    objects: S3Objects, bucket: S3Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy's cache may return another listing. Its objects are not leases of this prefix."""
    bucket.objects["other/b"] = ('"e-1"', b"{}", 0.0)
    paginate = S3Memory.paginate

    def ignore_prefix(client: S3Memory, **arguments: Any) -> Iterator[dict[str, Any]]:  # noqa: ANN401
        return ({**page, "Prefix": arguments["Prefix"]} for page in paginate(client, **{**arguments, "Prefix": ""}))

    monkeypatch.setattr(S3Memory, "paginate", ignore_prefix)
    for read in (objects.list, objects.names):
        with pytest.raises(OutcomeUnknown, match="it lists objects that were not requested"):
            read("a/")


def test_the_age_of_a_listed_object_is_that_of_its_page(
    objects: S3Objects, bucket: S3Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease that is renewed during a long listing does not look as old as the listing is long."""
    for number in range(5):
        objects.put_if_absent(f"a/{number}", {})
    objects.list("a/")
    paginate = S3Memory.paginate

    def wait_for_each_page(client: S3Memory, **arguments: Any) -> Iterator[dict[str, Any]]:  # noqa: ANN401
        pages = paginate(client, **arguments)
        bucket.now += 60.0
        for page in pages:
            yield page
            bucket.now += 60.0

    monkeypatch.setattr(S3Memory, "paginate", wait_for_each_page)
    assert [stored_object.age for stored_object in objects.list("a/")] == [59.0] * 2 + [119.0] * 2 + [179.0]


@pytest.mark.parametrize("change", [{"Name": None}, {"Name": ""}, {"Prefix": "other/"}, {"Prefix": None}], ids=str)
def test_a_page_that_is_not_the_requested_one_is_an_unknown_outcome(
    objects: S3Objects, bucket: S3Bucket, change: dict[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """boto3 parses a proxy's page as an empty listing, and an empty bucket would look like a new table."""
    assert bucket.objects == {}
    paginate = S3Memory.paginate
    monkeypatch.setattr(
        S3Memory, "paginate", lambda client, **arguments: ({**page, **change} for page in paginate(client, **arguments))
    )
    for read in (objects.list, objects.names):
        with pytest.raises(OutcomeUnknown, match="it is not the requested listing"):
            read("a/")
