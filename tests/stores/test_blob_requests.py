"""Tests which requests Azure Blob receives, with which conditions, and how each response is handled."""

from collections.abc import Callable, Mapping
from datetime import timedelta

import pytest
from azure.core.exceptions import HttpResponseError, ServiceRequestError
from blob_memory import BEGAN, BlobFault, BlobMemory
from object_stores import try_conditions
from requests import Response

from leasehold.errors import OutcomeUnknown, StoreError
from leasehold.stores.objects.blob import BlobObjects, _ensure_container, translate_errors
from leasehold.stores.requests import SkewWarning, StoredObject


@pytest.fixture
def memory() -> BlobMemory:
    return BlobMemory()


@pytest.fixture
def objects(memory: BlobMemory) -> BlobObjects:
    """Return the objects of the in-memory container. The local clock agrees with the service's."""
    return BlobObjects(memory.client(), SkewWarning(BEGAN.timestamp))


def test_conditional_writes_follow_the_matrix(objects: BlobObjects, memory: BlobMemory) -> None:
    try_conditions(objects)
    assert memory.blobs == {}


def test_each_write_is_sent_with_its_condition(objects: BlobObjects, memory: BlobMemory) -> None:
    """Blobs are created by Put Blob because Set Metadata does not support If-None-Match everywhere."""
    etag = str(objects.put_if_absent("a", {"ownerid": "ann"}))
    objects.put_if_match("a", {"ownerid": "bob"}, etag)
    objects.delete("a", "0x2")
    assert memory.requests == ["new a", "over a", "delete a"]
    header_names = ("if-none-match", "if-match", "x-ms-blob-type", "x-ms-meta-ownerid", "content-length")
    assert [tuple(headers.get(name) for name in header_names) for headers in memory.heads] == [
        ("*", None, "BlockBlob", "ann", "0"),
        (None, "0x1", None, "bob", "0"),
        (None, "0x2", None, None, "0"),
    ]


WRITES: dict[str, Callable[[BlobObjects], object]] = {
    "new": lambda objects: objects.put_if_absent("a", {}),
    "over": lambda objects: objects.put_if_match("a", {}, "0x1"),
    "delete": lambda objects: objects.delete("a", "0x1"),
}
READS: dict[str, Callable[[BlobObjects], object]] = {
    "get": lambda objects: objects.get("a"),
    "list": lambda objects: objects.list(""),
}
ASKED = pytest.mark.parametrize("ask", [*WRITES.values(), *READS.values()], ids=[*WRITES, *READS])


@pytest.mark.parametrize("does", WRITES)
@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_an_unanswered_write_is_sent_once(objects: BlobObjects, memory: BlobMemory, does: str, status: int) -> None:
    """A write is sent only once, because a first attempt that was applied would make the second one fail."""
    memory.faults = [BlobFault(status, "ServerBusy")] * 9
    with pytest.raises(OutcomeUnknown, match=rf"^container 'leases': no usable response \(HTTP {status}\)$"):
        WRITES[does](objects)
    assert len(memory.requests) == 1


@pytest.mark.parametrize("does", READS)
def test_an_unanswered_read_is_retried(objects: BlobObjects, memory: BlobMemory, does: str) -> None:
    memory.faults = [BlobFault(503, "ServerBusy")] * 2
    READS[does](objects)
    assert len(memory.requests) == 3


@ASKED
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (BlobFault(400, "InvalidInput"), r"the service refused: InvalidInput \(HTTP 400\)$"),
        (BlobFault(499, "Strange"), r"the service refused: Strange \(HTTP 499\)$"),
        (BlobFault(404, "ContainerNotFound"), "it does not exist; create it, or allow it to be created$"),
        (BlobFault(401, "NoAuthenticationInformation"), "the service refused the credentials; check the key in"),
        (BlobFault(403, "AuthorizationFailure"), "the service refused: AuthorizationFailure; check the key in"),
    ],
)
def test_a_permanent_rejection_is_a_fault(
    objects: BlobObjects, memory: BlobMemory, ask: Callable[[BlobObjects], object], fault: BlobFault, says: str
) -> None:
    memory.faults = [fault] * 9
    with pytest.raises(StoreError, match=f"^container 'leases': {says}") as exc_info:
        ask(objects)
    assert not isinstance(exc_info.value, OutcomeUnknown)


def test_a_rejection_without_an_error_code_is_a_fault(memory: BlobMemory) -> None:
    """The response of a proxy contains none of the service's error codes."""
    rejection = HttpResponseError("no")
    rejection.status_code = 418
    with (
        pytest.raises(StoreError, match=r"^container 'leases': the service refused: None \(HTTP 418\)$"),
        translate_errors(memory.client()),
    ):
        raise rejection


@ASKED
def test_an_unreachable_service_is_an_unknown_outcome(
    objects: BlobObjects, memory: BlobMemory, ask: Callable[[BlobObjects], object]
) -> None:
    """The request may have been executed although no response came.

    The error does not show the address, which may contain a signature.
    """
    memory.faults = [ServiceRequestError("https://account.invalid/leases?sig=secret")] * 9
    message = r"^container 'leases': the service cannot be reached \(ServiceRequestError\)$"
    with pytest.raises(OutcomeUnknown, match=message) as exc_info:
        ask(objects)
    assert exc_info.value.__cause__ is None


@pytest.mark.parametrize("code", ["BlobAlreadyExists", "BlobNotFound", "ConditionNotMet", "TargetConditionNotMet"])
def test_a_failed_condition_is_no_fault(objects: BlobObjects, memory: BlobMemory, code: str) -> None:
    objects.put_if_absent("a", {})
    for operation, expected in (("new", None), ("over", None), ("delete", False)):
        memory.faults = [BlobFault(412, code)]
        assert WRITES[operation](objects) is expected


def test_a_listing_reads_all_pages_and_uses_the_services_clock(objects: BlobObjects, memory: BlobMemory) -> None:
    etags = [objects.put_if_absent(f"a/{number}", {"n": str(number)}) for number in range(5)]
    objects.put_if_absent("b/0", {})
    memory.requests.clear()
    memory.now = 11.0
    listed_objects = objects.list("a/")
    assert listed_objects == tuple(StoredObject(f"a/{n}", str(etags[n]), {"n": str(n)}, age=10.0) for n in range(5))
    assert objects.get("a/1") == listed_objects[1]
    assert memory.requests == ["list"] * 3 + ["get a/1"]


def test_metadata_names_are_lowercased_and_empty_values_are_none(objects: BlobObjects, memory: BlobMemory) -> None:
    """A writer in another language may use upper case in metadata names.

    The owner of a released partition has an empty name, which means no owner.
    """
    memory.blobs["a"] = ('"0x1"', {"OwnerId": "", "Offset": "7"}, 0.0)
    (listed_object,) = objects.list("")
    assert listed_object.fields == {"ownerid": "", "offset": "7"}
    assert objects.get("a") == listed_object


def test_without_the_services_clock_every_lease_is_new(objects: BlobObjects, memory: BlobMemory) -> None:
    """If ages were computed with this machine's clock, a live owner might look dead."""
    objects.put_if_absent("a", {})
    memory.now, memory.dated = 3600.0, False
    assert [stored_object.age for stored_object in (*objects.list(""), objects.get("a")) if stored_object] == [0.0, 0.0]


def test_a_clock_far_off_is_logged(memory: BlobMemory, caplog: pytest.LogCaptureFixture) -> None:
    BlobObjects(memory.client(), SkewWarning((BEGAN + timedelta(seconds=600)).timestamp)).list("")
    messages = [record.getMessage()[:35] for record in caplog.records if record.name == "leasehold.objects"]
    assert messages == ["the local clock is 600 s ahead of t"]


def test_a_container_is_created_only_if_allowed(memory: BlobMemory) -> None:
    memory.there = False
    with pytest.raises(StoreError, match=r"^container 'leases': it does not exist"):
        _ensure_container(memory.client(), create=False)
    for _ in range(2):
        _ensure_container(memory.client(), create=True)
    assert memory.requests == ["list", "list", "create", "list"]


def test_a_container_created_by_another_worker_is_used(memory: BlobMemory) -> None:
    memory.faults = [BlobFault(404, "ContainerNotFound")]
    _ensure_container(memory.client(), create=True)
    assert memory.requests == ["list", "create"]


def test_closing_closes_the_connections(objects: BlobObjects, memory: BlobMemory) -> None:
    objects.list("")
    objects.close()
    assert memory.requests[-1] == "closed"


class SlowPages(BlobMemory):
    """A container that returns a page of a listing each minute."""

    def listed(self, query: dict[str, list[str]]) -> Response:
        self.now += 60.0
        return super().listed(query)


def test_the_age_of_a_listed_blob_is_that_of_its_page() -> None:
    """A lease that is renewed during a long listing does not look as old as the listing is long."""
    objects = BlobObjects(SlowPages().client(), SkewWarning(BEGAN.timestamp))
    for number in range(5):
        objects.put_if_absent(f"a/{number}", {})
    assert [stored_object.age for stored_object in objects.list("a/")] == [59.0] * 2 + [119.0] * 2 + [179.0]


class IgnoringPrefixes(BlobMemory):
    """A container that lists all of its blobs, as the response to another request would."""

    def listed(self, query: dict[str, list[str]]) -> Response:
        return super().listed({name: values for name, values in query.items() if name != "prefix"})


def test_a_listing_of_other_blobs_is_an_unknown_outcome() -> None:
    objects = BlobObjects(IgnoringPrefixes().client(), SkewWarning(BEGAN.timestamp))
    objects.put_if_absent("other/b", {})
    with pytest.raises(OutcomeUnknown, match="it lists blobs that were not requested"):
        objects.list("a/")


class Mistaken(BlobMemory):
    """A container whose responses belong to other requests."""

    def said(self, status: int, headers: Mapping[str, str] | None = None, body: bytes = b"") -> Response:
        return super().said(status, {**(headers or {}), "x-ms-client-request-id": "another"}, body)


@pytest.mark.parametrize("does", [*WRITES, *READS])
def test_a_response_to_another_request_is_an_unknown_outcome(does: str) -> None:
    container = Mistaken()
    container.blobs["a"] = ('"0x1"', {}, 0.0)
    if does == "new":
        del container.blobs["a"]
    with pytest.raises(OutcomeUnknown, match="it is the response to another request"):
        {**WRITES, **READS}[does](BlobObjects(container.client()))
    assert len(container.requests) == 1
