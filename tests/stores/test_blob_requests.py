"""Which requests Azure Blob receives, how often and under which condition, and how each response is handled."""

from collections.abc import Callable
from datetime import timedelta

import pytest
from azure.core.exceptions import HttpResponseError, ServiceRequestError
from blob_memory import BEGAN, BlobFault, BlobMemory
from object_stores import try_conditions

from leasehold.errors import OutcomeUnknown, StoreError
from leasehold.stores.objects.blob import BlobObjects, _ensure_container, translate_errors
from leasehold.stores.requests import SkewWarning, Stored


@pytest.fixture
def memory() -> BlobMemory:
    return BlobMemory()


@pytest.fixture
def objects(memory: BlobMemory) -> BlobObjects:
    """Return a container whose service uses this machine's clock."""
    return BlobObjects(memory.client(), SkewWarning(BEGAN.timestamp))


def test_the_matrix_of_conditions(objects: BlobObjects, memory: BlobMemory) -> None:
    """If the service ignored a condition, a lease could have two owners."""
    try_conditions(objects)
    assert memory.blobs == {}


def test_each_write_says_what_it_wants_of_the_blob(objects: BlobObjects, memory: BlobMemory) -> None:
    """Set Metadata does not support If-None-Match everywhere, and Put Blob leaves soft-deleted copies."""
    etag = str(objects.put_new("a", {"ownerid": "ann"}))
    objects.put_over("a", {"ownerid": "bob"}, etag)
    objects.delete("a", "0x2")
    assert memory.asked == ["new a", "over a", "delete a"]
    told = ("if-none-match", "if-match", "x-ms-blob-type", "x-ms-meta-ownerid", "content-length")
    assert [tuple(heads.get(name) for name in told) for heads in memory.heads] == [
        ("*", None, "BlockBlob", "ann", "0"),
        (None, "0x1", None, "bob", "0"),
        (None, "0x2", None, None, "0"),
    ]


WRITES: dict[str, Callable[[BlobObjects], object]] = {
    "new": lambda objects: objects.put_new("a", {}),
    "over": lambda objects: objects.put_over("a", {}, "0x1"),
    "delete": lambda objects: objects.delete("a", "0x1"),
}
READS: dict[str, Callable[[BlobObjects], object]] = {
    "get": lambda objects: objects.get("a"),
    "list": lambda objects: objects.list(""),
}
ASKED = pytest.mark.parametrize("ask", [*WRITES.values(), *READS.values()], ids=[*WRITES, *READS])


@pytest.mark.parametrize("does", WRITES)
@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_a_write_without_an_answer_is_sent_once(
    objects: BlobObjects, memory: BlobMemory, does: str, status: int
) -> None:
    """A write is sent once, because a second attempt would be rejected because of the first."""
    memory.faults = [BlobFault(status, "ServerBusy")] * 9
    with pytest.raises(OutcomeUnknown, match=rf"^container 'leases': no usable response \(HTTP {status}\)$"):
        WRITES[does](objects)
    assert len(memory.asked) == 1


@pytest.mark.parametrize("does", READS)
def test_a_reading_without_an_answer_is_tried_again(objects: BlobObjects, memory: BlobMemory, does: str) -> None:
    """A busy moment of the service does not cost a look at the leases."""
    memory.faults = [BlobFault(503, "ServerBusy")] * 2
    READS[does](objects)
    assert len(memory.asked) == 3


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
def test_a_permanent_refusal_of_the_service_is_said(
    objects: BlobObjects, memory: BlobMemory, ask: Callable[[BlobObjects], object], fault: BlobFault, says: str
) -> None:
    """A worker without rights does not wait for them forever."""
    memory.faults = [fault] * 9
    with pytest.raises(StoreError, match=f"^container 'leases': {says}") as refused:
        ask(objects)
    assert not isinstance(refused.value, OutcomeUnknown)


def test_a_refusal_without_a_code_is_a_refusal(memory: BlobMemory) -> None:
    """A proxy in between sends none of the service's codes, and must not end a worker with a traceback."""
    refused = HttpResponseError("no")
    refused.status_code = 418
    with (
        pytest.raises(StoreError, match=r"^container 'leases': the service refused: None \(HTTP 418\)$"),
        translate_errors(memory.client()),
    ):
        raise refused


@ASKED
def test_a_service_that_cannot_be_reached_is_an_unknown_outcome(
    objects: BlobObjects, memory: BlobMemory, ask: Callable[[BlobObjects], object]
) -> None:
    """The request may have been carried out although no response came, and an address may contain a signature."""
    memory.faults = [ServiceRequestError("https://account.invalid/leases?sig=secret")] * 9
    says = r"^container 'leases': the service cannot be reached \(ServiceRequestError\)$"
    with pytest.raises(OutcomeUnknown, match=says) as unknown:
        ask(objects)
    assert unknown.value.__cause__ is None


@pytest.mark.parametrize("code", ["BlobAlreadyExists", "BlobNotFound", "ConditionNotMet", "TargetConditionNotMet"])
def test_a_refused_write_is_no_fault(objects: BlobObjects, memory: BlobMemory, code: str) -> None:
    """A worker that loses a race must not conclude that the service is down."""
    objects.put_new("a", {})
    for does, refused in (("new", None), ("over", None), ("delete", False)):
        memory.faults = [BlobFault(412, code)]
        assert WRITES[does](objects) is refused


def test_a_listing_goes_over_all_pages_and_tells_ages_by_the_services_clock(
    objects: BlobObjects, memory: BlobMemory
) -> None:
    """Leases on later pages are not missed, and a live owner does not look dead by this machine's clock."""
    etags = [objects.put_new(f"a/{number}", {"n": str(number)}) for number in range(5)]
    objects.put_new("b/0", {})
    memory.asked.clear()
    memory.now = 11.0
    listed = objects.list("a/")
    assert listed == tuple(Stored(f"a/{n}", str(etags[n]), {"n": str(n)}, age=10.0) for n in range(5))
    assert objects.get("a/1") == listed[1]
    assert memory.asked == ["list"] * 3 + ["get a/1"]


def test_names_are_in_lower_case_and_what_is_empty_is_empty(objects: BlobObjects, memory: BlobMemory) -> None:
    """A writer in another language may use another case, and a released partition has no owner with an empty name."""
    memory.blobs["a"] = ('"0x1"', {"OwnerId": "", "Offset": "7"}, 0.0)
    (listed,) = objects.list("")
    assert listed.fields == {"ownerid": "", "offset": "7"}
    assert objects.get("a") == listed


def test_without_the_services_clock_everything_is_new(objects: BlobObjects, memory: BlobMemory) -> None:
    """By this machine's clock, a live owner might look dead."""
    objects.put_new("a", {})
    memory.now, memory.dated = 3600.0, False
    assert [one.age for one in (*objects.list(""), objects.get("a")) if one] == [0.0, 0.0]


def test_a_clock_far_off_is_said(memory: BlobMemory, caplog: pytest.LogCaptureFixture) -> None:
    """Other programs on this machine may rely on the clock too."""
    BlobObjects(memory.client(), SkewWarning((BEGAN + timedelta(seconds=600)).timestamp)).list("")
    messages = [record.getMessage()[:35] for record in caplog.records if record.name == "leasehold.objects"]
    assert messages == ["the local clock is 600 s ahead of t"]


def test_a_container_is_made_where_it_may_be(memory: BlobMemory) -> None:
    """A mistyped name does not create an empty table against the user's wish."""
    memory.there = False
    with pytest.raises(StoreError, match=r"^container 'leases': it does not exist"):
        _ensure_container(memory.client(), create=False)
    for _ in range(2):
        _ensure_container(memory.client(), create=True)
    assert memory.asked == ["list", "list", "create", "list"]


def test_a_container_that_somebody_else_made_meanwhile_will_do(memory: BlobMemory) -> None:
    """Workers that start together all succeed."""
    memory.faults = [BlobFault(404, "ContainerNotFound")]
    _ensure_container(memory.client(), create=True)
    assert memory.asked == ["list", "create"]


def test_closing_closes_the_connections(objects: BlobObjects, memory: BlobMemory) -> None:
    objects.list("")
    objects.close()
    assert memory.asked[-1] == "closed"
