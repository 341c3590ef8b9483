"""Tests leases in Google Cloud Storage: the contract on fake-gcs-server, and the requests on an in-memory service.

fake-gcs-server checks ifGenerationMatch on inserts under a lock, and deletes by generation. It ignores
ifGenerationMatch on deletions, so the store sends the generation in both ways. The fake does not show Google's response
to more than one write per second to an object (429), its permissions, or its soft deletion.
"""

from collections.abc import Iterator
from contextlib import closing
from itertools import count
from threading import Thread, current_thread, main_thread

import pytest
import requests
from gcs_memory import BEGAN, Body, GcsMemory, MemoryAdapter
from google.auth.credentials import AnonymousCredentials
from google.auth.exceptions import DefaultCredentialsError, RefreshError, TransportError
from google.auth.transport.requests import AuthorizedSession
from object_stores import AgelessGcs, try_conditions
from process_race import assert_one_winner_per_lease

from leasehold.adapters.ops.doctor.attempts import try_rights
from leasehold.adapters.ops.doctor.objects import GCS_RIGHTS, gcs_trial
from leasehold.balancer.model import Lease
from leasehold.errors import OutcomeUnknown, StoreError
from leasehold.stores.objects import gcs
from leasehold.stores.objects.gcs import GcsObjects
from leasehold.stores.objects.generic_layout import ObjectLayout
from leasehold.stores.objects.http_adapter import DeadlineAdapter
from leasehold.stores.objects.store import EtagStore
from leasehold.stores.protocol import Timeouts
from leasehold.stores.requests import SkewWarning, StoredObject
from leasehold.stores.urls import open_store
from leasehold.stores.writes import CreateLease, DeleteLease
from leasehold_lab.contract import StoreContract
from leasehold_lab.contract.actors import expect_applied

AT, GOOGLE = "http://memory.invalid", "https://storage.googleapis.com"

_numbers = count()


@pytest.mark.more
@pytest.mark.services
@pytest.mark.timeout(1800)  # the service may have to be built first
class TestFakeGcs(StoreContract):
    """Runs every clause, including the races."""

    @pytest.fixture(scope="class")
    @classmethod
    def objects(cls, gcs_url: str) -> Iterator[AgelessGcs]:
        with closing(AgelessGcs("contract", endpoint=gcs_url)) as objects:
            objects.ensure_bucket(create=True)
            yield objects

    @pytest.fixture
    def store(self, objects: AgelessGcs) -> EtagStore:
        """Open a store under its own prefix."""
        return EtagStore(objects, ObjectLayout(f"fleet/{next(_numbers)}"))


@pytest.mark.more
@pytest.mark.services
@pytest.mark.timeout(1800)
def test_one_winner_between_processes_on_fake_gcs(gcs_url: str) -> None:
    assert_one_winner_per_lease(f"gcs://race/fleet?endpoint={gcs_url}")


@pytest.mark.more
@pytest.mark.services
@pytest.mark.timeout(1800)
def test_conditional_writes_follow_the_matrix_on_fake_gcs(gcs_url: str) -> None:
    with closing(AgelessGcs("matrix", endpoint=gcs_url)) as objects:
        objects.ensure_bucket(create=True)
        try_conditions(objects)
        assert objects.list("") == ()


def open_session(bucket: GcsMemory, address: str = AT) -> AuthorizedSession:
    """Return a session that sends its requests to this bucket."""
    session = AuthorizedSession(AnonymousCredentials())  # type: ignore[no-untyped-call]
    session.mount(address, MemoryAdapter(bucket))
    return session


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> GcsMemory:
    """Return the in-memory bucket that every session accesses."""
    fake = GcsMemory()

    monkeypatch.setattr(gcs, "AuthorizedSession", lambda _credentials: open_session(fake))
    return fake


@pytest.fixture
def objects(bucket: GcsMemory) -> GcsObjects:
    """Return the objects of that bucket. The local clock agrees with the service's."""
    assert bucket.name == "leases"
    return GcsObjects("leases", endpoint=AT, skew=SkewWarning(BEGAN.timestamp))


def test_conditional_writes_follow_the_matrix(objects: GcsObjects, bucket: GcsMemory) -> None:
    try_conditions(objects)
    assert bucket.objects == {}
    assert objects.put_if_match("a", {}, "no generation") is None


def test_each_write_is_sent_once_with_its_generation(objects: GcsObjects, bucket: GcsMemory) -> None:
    """A write is sent only once, because a first attempt that was applied would make the second one fail."""
    etag = objects.put_if_absent("a", {"b": "2"})
    assert etag == "1"
    objects.put_if_match("a", {"b": "3"}, etag)
    objects.delete("a", "2")
    expected = ("ifGenerationMatch", "generation")
    assert [(verb, [query.get(name) for name in expected]) for verb, query in bucket.requests] == [
        ("POST", ["0", None]),
        ("POST", ["1", None]),
        ("DELETE", ["2", "2"]),
    ]


def test_a_listing_returns_all_fields_without_reading_objects(objects: GcsObjects, bucket: GcsMemory) -> None:
    for number in range(5):
        objects.put_if_absent(f"a/{number}", {"n": str(number)})
    objects.put_if_absent("b/0", {"n": "other"})
    bucket.requests.clear()
    bucket.now = 11.0
    assert objects.list("a/") == tuple(StoredObject(f"a/{n}", str(n + 1), {"n": str(n)}, age=10.0) for n in range(5))
    assert [(verb, query["prefix"]) for verb, query in bucket.requests] == [("GET", "a/")] * 2


def test_without_the_services_clock_every_lease_is_new(objects: GcsObjects, bucket: GcsMemory) -> None:
    """If ages were computed with this machine's clock, a live owner might look dead."""
    objects.put_if_absent("a", {})
    bucket.now, bucket.dated = 3600.0, False
    assert [stored_object.age for stored_object in objects.list("")] == [0.0]


FAULTS = (408, 500, 503, requests.ConnectionError("x"), TransportError("x"), ValueError("x"))  # type: ignore[no-untyped-call]
VERBS = pytest.mark.parametrize("verb", ["POST", "DELETE", "GET", "LIST"])


def call_on_object(objects: GcsObjects, verb: str) -> None:
    """Send a request of this kind for an existing object."""
    match verb:
        case "POST":
            objects.put_if_match("a", {}, "1")
        case "DELETE":
            objects.delete("a", "1")
        case "GET":
            objects.get("a")
        case _:
            objects.list("")


@VERBS
@pytest.mark.parametrize("fault", FAULTS, ids=repr)
def test_an_unusable_response_is_an_unknown_outcome(
    objects: GcsObjects, bucket: GcsMemory, verb: str, fault: int | Exception
) -> None:
    method = "GET" if verb == "LIST" else verb
    tries = 1 if verb in {"POST", "DELETE"} else gcs.TIMEOUTS.attempts
    bucket.faults = {method: [fault] * tries}
    with pytest.raises(OutcomeUnknown, match=r"^bucket 'leases': "):
        call_on_object(objects, verb)
    assert (bucket.faults, len(bucket.requests)) == ({method: []}, tries)


@pytest.mark.parametrize("verb", ["POST", "DELETE"])
def test_a_rate_limited_write_is_retried(objects: GcsObjects, bucket: GcsMemory, verb: str) -> None:
    """The service accepts only one write per second to an object. A rejected write was certainly not applied."""
    etag = objects.put_if_absent("a", {})
    assert etag is not None
    bucket.faults = {verb: [429, 429]}
    assert (objects.put_if_match("a", {}, etag) if verb == "POST" else objects.delete("a", etag)) in {"2", True}
    bucket.faults = {"POST": [429] * 3}
    with pytest.raises(OutcomeUnknown, match=r"no usable response \(HTTP 429\)"):
        objects.put_if_absent("b", {})


@VERBS
@pytest.mark.parametrize(("status", "says"), [(403, "Storage Object User"), (400, "a fault")])
def test_a_permanent_rejection_is_a_fault(
    objects: GcsObjects, bucket: GcsMemory, verb: str, status: int, says: str
) -> None:
    bucket.faults = {"GET" if verb == "LIST" else verb: [status]}
    with pytest.raises(
        StoreError, match=rf"^bucket 'leases': the service refused \(HTTP {status}\): .*{says}"
    ) as exc_info:
        call_on_object(objects, verb)
    assert not isinstance(exc_info.value, OutcomeUnknown)


def test_a_bucket_is_created_only_if_allowed(bucket: GcsMemory) -> None:
    """A mistyped name does not create a table.

    A bucket that we create has no soft deletion, because it would be billed.
    """
    bucket.name = None
    with pytest.raises(StoreError, match="there is no such bucket"):
        open_store(f"gcs://new/fleet?endpoint={AT}", create=False)
    row = expect_applied(open_store(f"gcs://new/fleet?endpoint={AT}&location=eu").write(CreateLease(Lease("s-0"))))
    assert bucket.made is not None
    assert (bucket.made["name"], bucket.made["softDeletePolicy"]) == (
        "new",
        {"retentionDurationSeconds": 0, "effectiveTime": None},
    )
    assert [lease.key for lease in open_store(f"gcs://new/fleet?endpoint={AT}", create=False).list().leases] == [
        row.key
    ]
    with pytest.raises(ValueError, match="store URL: gcs:// wants bucket/prefix"):
        open_store("gcs://")


def test_missing_credentials_are_a_fault_unlike_an_outage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker must not wait forever for missing credentials, or exit because of a short outage."""
    monkeypatch.delenv(gcs.EMULATOR_VARIABLE, raising=False)
    faults: list[Exception] = [DefaultCredentialsError("none were found"), RefreshError("busy", retryable=True)]  # type: ignore[no-untyped-call]

    def raise_next_fault(scopes: list[str]) -> None:
        assert scopes == [gcs.OAUTH_SCOPE]
        raise faults.pop(0)

    monkeypatch.setattr("google.auth.default", raise_next_fault)
    with pytest.raises(StoreError, match="bucket 'leases': none were found") as exc_info:
        open_store("gcs://leases")
    assert not isinstance(exc_info.value, OutcomeUnknown)
    with pytest.raises(OutcomeUnknown, match="identity service"):
        open_store("gcs://leases")


def test_doctor_tries_each_right_and_leaves_nothing(bucket: GcsMemory) -> None:
    results = list(try_rights(gcs_trial("leases/fleet", {"endpoint": AT}), read_only=False))
    assert [(result.what, result.state) for result in results] == [(right, "ok") for right in GCS_RIGHTS]
    assert bucket.objects == {}
    bucket.faults = {"POST": [403]}
    results = list(try_rights(gcs_trial("leases/fleet", {"endpoint": AT}), read_only=False))
    assert [(result.what, result.todo) for result in results if result.state == "wrong"] == [
        (GCS_RIGHTS[2], f"allow {GCS_RIGHTS[2]}")
    ]
    bucket.name = None
    (bucket_result,) = try_rights(gcs_trial("leases/fleet", {"endpoint": AT}), read_only=False)
    assert (bucket_result.state, "there is no bucket leases" in bucket_result.says) == ("unknown", True)


def test_every_request_has_the_timeouts_of_the_url(bucket: GcsMemory) -> None:
    bucket.name = None
    store = open_store(f"gcs://new/fleet?endpoint={AT}", request_seconds=2.5)
    expect_applied(store.write(DeleteLease(expect_applied(store.write(CreateLease(Lease("s-0")))))))
    assert store.list().leases == ()
    assert {verb for verb, _ in bucket.requests} == {"GET", "POST", "DELETE"}
    timeouts = gcs.TIMEOUTS.within(2.5)
    assert bucket.timeouts == {(timeouts.connect_seconds, timeouts.read_seconds)}
    store.close()
    assert bucket.closed


@pytest.mark.parametrize("attempts", [1, 2])
def test_a_read_is_repeated_only_as_often_as_its_timeouts_allow(bucket: GcsMemory, attempts: int) -> None:
    bucket.faults = {"GET": [503] * 3}
    with pytest.raises(OutcomeUnknown):
        GcsObjects("leases", endpoint=AT, timeouts=Timeouts(1, 1, attempts)).get("a")
    assert len(bucket.requests) == attempts


def test_the_service_is_read_under_a_deadline(bucket: GcsMemory) -> None:
    session = GcsObjects(str(bucket.name), endpoint=AT)._session  # noqa: SLF001  it is exposed nowhere else
    for address in ("https://leases.invalid", "http://leases.invalid"):
        assert isinstance(session.get_adapter(address), DeadlineAdapter)


def test_a_new_bucket_is_created_as_the_url_says(bucket: GcsMemory) -> None:
    bucket.name = None
    open_store(f"gcs://new/fleet?endpoint={AT}&location=eu&project=p-1")
    assert bucket.made is not None
    assert bucket.made["location"] == "eu"
    assert bucket.made["iamConfiguration"]["uniformBucketLevelAccess"]["enabled"] is True
    assert [query["project"] for verb, query in bucket.requests if verb == "POST" and "project" in query] == ["p-1"]


@pytest.mark.parametrize(("project", "expected"), [(None, "default-project"), ("p-1", "p-1")])
def test_a_bucket_belongs_to_the_project_of_the_credentials_by_default(
    bucket: GcsMemory, project: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(gcs.EMULATOR_VARIABLE, raising=False)
    credentials = AnonymousCredentials()  # type: ignore[no-untyped-call]
    monkeypatch.setattr("google.auth.default", lambda scopes: (credentials, "default-project" if scopes else None))
    monkeypatch.setattr(gcs, "AuthorizedSession", lambda _credentials: open_session(bucket, GOOGLE))
    bucket.name = None
    GcsObjects("new", project=project).ensure_bucket(create=True)
    assert [query["project"] for verb, query in bucket.requests if verb == "POST"] == [expected]


def test_the_variable_of_an_emulator_replaces_the_service(bucket: GcsMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gcs.EMULATOR_VARIABLE, AT)
    assert GcsObjects("leases").put_if_absent("a", {}) == "1"
    assert set(bucket.objects) == {"a"}


def test_a_bucket_that_another_worker_created_is_used(objects: GcsObjects, bucket: GcsMemory) -> None:
    """All workers that start together succeed. A bucket of another account is not used."""
    bucket.faults = {"GET": [404], "POST": [409]}
    objects.ensure_bucket(create=True)
    bucket.faults = {"GET": [404, 403], "POST": [409]}
    with pytest.raises(StoreError, match=r"HTTP 403"):
        objects.ensure_bucket(create=True)
    bucket.faults = {"GET": [404], "POST": [400]}
    with pytest.raises(StoreError, match=r"HTTP 400"):
        objects.ensure_bucket(create=True)


def test_a_bucket_is_created_only_if_it_is_missing(objects: GcsObjects, bucket: GcsMemory) -> None:
    bucket.faults = {"GET": [403]}
    with pytest.raises(StoreError, match=r"HTTP 403"):
        objects.ensure_bucket(create=True)
    assert [verb for verb, _ in bucket.requests] == ["GET"]


@pytest.mark.parametrize("status", [404, 412])
def test_a_rejected_deletion_is_no_fault(objects: GcsObjects, bucket: GcsMemory, status: int) -> None:
    objects.put_if_absent("a", {})
    bucket.faults = {"DELETE": [status]}
    assert not objects.delete("a", "1")


def test_the_age_of_an_object_is_that_of_its_own_response(bucket: GcsMemory) -> None:
    """Other threads may get later responses in the meantime."""

    class Overtaken(SkewWarning):
        """Reads an object in another thread, an hour later, while a response is processed."""

        def observe(self, service_now: float) -> None:
            super().observe(service_now)
            if current_thread() is main_thread():
                bucket.now = 3600.0
                thread = Thread(target=bucket_objects.get, args=("a",))
                thread.start()
                thread.join()
                bucket.now = 0.0

    bucket_objects = GcsObjects("leases", endpoint=AT, skew=Overtaken(BEGAN.timestamp))
    bucket_objects.put_if_absent("a", {})
    stored_object = bucket_objects.get("a")
    assert stored_object is not None
    assert stored_object.age == 0.0


class SlowPages(GcsMemory):
    """A bucket that returns a page of a listing each minute."""

    def answer(self, method: str, path: str, query: dict[str, str], body: bytes) -> tuple[int, Body]:
        self.now += 60.0 if "prefix" in query else 0.0
        return super().answer(method, path, query, body)


def test_the_age_of_a_listed_object_is_that_of_its_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease that is renewed during a long listing does not look as old as the listing is long."""
    slow_bucket = SlowPages()
    monkeypatch.setattr(gcs, "AuthorizedSession", lambda _credentials: open_session(slow_bucket))
    objects = GcsObjects("leases", endpoint=AT, skew=SkewWarning(BEGAN.timestamp))
    for number in range(7):
        objects.put_if_absent(f"a/{number}", {})
    assert [stored_object.age for stored_object in objects.list("a/")] == [59.0] * 3 + [119.0] * 3 + [179.0]


def test_a_response_without_a_generation_is_an_unknown_outcome(
    objects: GcsObjects, bucket: GcsMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GcsMemory, "_resource", lambda _bucket, name: {"name": name})
    with pytest.raises(OutcomeUnknown, match="cannot be parsed"):
        objects.put_if_absent("a", {})
    assert set(bucket.objects) == {"a"}


def test_a_page_of_sessions_fits_into_the_metadata_of_an_object(bucket: GcsMemory) -> None:
    """The metadata of an object is limited to 8 KiB."""
    store = gcs.open_url(f"{bucket.name}/fleet", {"endpoint": AT}, create=False, request_seconds=None)
    assert store.cells().page_leases == 20


def test_a_clock_far_off_is_logged(bucket: GcsMemory, caplog: pytest.LogCaptureFixture) -> None:
    fast_clock = SkewWarning(lambda: BEGAN.timestamp() + 600.0)
    assert GcsObjects(str(bucket.name), endpoint=AT, skew=fast_clock).list("") == ()
    messages = [record.getMessage()[:35] for record in caplog.records if record.name == "leasehold.objects"]
    assert messages == ["the local clock is 600 s ahead of t"]


@pytest.mark.parametrize("page", [{}, {"kind": "storage#object"}, {"items": []}], ids=str)
def test_a_response_that_is_no_listing_is_an_unknown_outcome(
    bucket: GcsMemory, page: Body, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy's page must not look like an empty bucket."""
    objects = GcsObjects(str(bucket.name), endpoint=AT, timeouts=Timeouts(1, 1, attempts=1))
    monkeypatch.setattr(GcsMemory, "answer", lambda *_request: (200, page))
    for read in (lambda: objects.list("a/"), lambda: objects.ensure_bucket(create=True)):
        with pytest.raises(OutcomeUnknown, match="it is not a listing"):
            read()


def test_a_listing_of_other_objects_is_an_unknown_outcome(bucket: GcsMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = GcsObjects(str(bucket.name), endpoint=AT, timeouts=Timeouts(1, 1, attempts=1))
    objects.put_if_absent("other/b", {})
    answer = GcsMemory.answer

    def ignore_prefix(
        memory: GcsMemory, method: str, path: str, query: dict[str, str], body: bytes
    ) -> tuple[int, Body]:
        return answer(memory, method, path, {name: text for name, text in query.items() if name != "prefix"}, body)

    monkeypatch.setattr(GcsMemory, "answer", ignore_prefix)
    with pytest.raises(OutcomeUnknown, match="it lists objects that were not requested"):
        objects.list("a/")
    assert bucket.objects


@pytest.mark.parametrize("fault", [429, 503])
def test_a_repeated_request_pauses_for_at_most_a_second(
    objects: GcsObjects, bucket: GcsMemory, fault: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without pauses, a write that exceeds the limit of one per second would be rejected each time."""
    pauses: list[float] = []
    monkeypatch.setattr("tenacity.nap.time.sleep", pauses.append)
    bucket.faults = {"POST": [429] * 2} if fault == 429 else {"GET": [503] * 2}
    if fault == 429:
        assert objects.put_if_absent("a", {}) == "1"
    else:
        assert objects.get("a") is None
    assert len(pauses) == 2
    assert all(0.0 < pause <= 1.0 for pause in pauses)


def test_a_bucket_without_a_project_is_not_created(bucket: GcsMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(gcs.EMULATOR_VARIABLE, raising=False)
    monkeypatch.setattr("google.auth.default", lambda scopes: (AnonymousCredentials(), scopes and None))  # type: ignore[no-untyped-call]
    monkeypatch.setattr(gcs, "AuthorizedSession", lambda _credentials: open_session(bucket, GOOGLE))
    bucket.name = None
    with pytest.raises(StoreError, match=r"bucket 'new': it does not exist, and creating it needs a project"):
        GcsObjects("new").ensure_bucket(create=True)
    assert [verb for verb, _ in bucket.requests] == ["GET"]
