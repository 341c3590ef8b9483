"""Tests how object stores interpret a service's ETags and clock, and compute the ages of objects."""

import pytest
from attrs import evolve

from leasehold.balancer.model import Lease, Version
from leasehold.stores.requests import (
    Parts,
    SkewWarning,
    StoredObject,
    decode_owner_fields,
    encode_owner_fields,
    is_outcome_unknown,
    object_age_seconds,
    unquote_etag,
)


def test_an_age_allows_for_times_in_whole_seconds() -> None:
    """A lease that was written at the end of a second does not expire a second too early."""
    assert [
        object_age_seconds(1000.0, 990.0),
        object_age_seconds(1000.0, 1000.0),
        object_age_seconds(1000.0, 1003.0),
    ] == [9.0, 0.0, 0.0]


def test_a_quoted_and_an_unquoted_etag_are_equal() -> None:
    assert [unquote_etag(etag) for etag in ('"0x8D"', "0x8D", '"X-1X"')] == ["0x8D", "0x8D", "X-1X"]


@pytest.mark.parametrize("now", [1_000_060.0, 999_940.0])
def test_a_small_clock_difference_is_not_logged(caplog: pytest.LogCaptureFixture, now: float) -> None:
    SkewWarning(lambda: now).observe(1_000_000.0)
    assert caplog.records == []


@pytest.mark.parametrize(("now", "says"), [(1_000_061.0, "61 s ahead of"), (999_939.0, "61 s behind")])
def test_a_large_clock_difference_is_logged_once(caplog: pytest.LogCaptureFixture, now: float, says: str) -> None:
    skew = SkewWarning(lambda: now)
    for _ in range(3):
        skew.observe(1_000_000.0)
    (record,) = caplog.records
    assert record.getMessage().startswith(f"the local clock is {says} the storage service's")


def test_a_status_that_a_retry_may_change_is_an_unknown_outcome() -> None:
    """A redirect, a timeout, throttling and every server error may pass. Any other rejection is final."""
    statuses = (301, 307, 399, 400, 403, 404, 407, 408, 409, 412, 428, 429, 430, 499, 500, 503)
    assert [status for status in statuses if is_outcome_unknown(status)] == [301, 307, 399, 408, 429, 500, 503]


def test_a_warning_about_the_clock_is_not_repeated_after_a_good_reading(caplog: pytest.LogCaptureFixture) -> None:
    skew = SkewWarning(lambda: 1000.0)
    for service_now in (2000.0, 1000.0, 2000.0):
        skew.observe(service_now)
    assert len(caplog.records) == 1


OWNED = Lease("s-0", owner="ann", yields=True, version=Version("v-1"), epoch=7)
REQUESTED = evolve(OWNED, next_owner="bob")


@pytest.mark.parametrize(
    ("old_lease", "new_lease", "old_version"),
    [
        (OWNED, REQUESTED, "v-1"),
        (REQUESTED, OWNED, "v-1"),
        (OWNED, evolve(OWNED, epoch=8), ""),
        (REQUESTED, evolve(REQUESTED, epoch=8), ""),
        (REQUESTED, evolve(OWNED, owner="bob", epoch=8), ""),
    ],
    ids=["request", "withdrawal", "renewal", "renewal with a request", "claim"],
)
def test_only_a_request_or_its_withdrawal_keeps_the_version(
    old_lease: Lease, new_lease: Lease, old_version: str
) -> None:
    """A request must not look like a sign of life of the owner, and each write of an owner must look like one."""
    fields = encode_owner_fields(old_lease, new_lease, lambda _field, text: text)
    assert fields["handoffversion"] == old_version
    parts = Parts(StoredObject("ownership", "v-2", fields, 2.5))
    decoded_lease = decode_owner_fields(Lease("s-0"), parts, lambda fields, name: fields[name])
    assert (decoded_lease.owner, decoded_lease.next_owner) == (new_lease.owner, new_lease.next_owner)
    assert (decoded_lease.version, decoded_lease.idle) == (old_version or "v-2", 2.5)


def test_a_request_copied_by_an_owner_of_another_program_is_ignored() -> None:
    fields = {"ownerid": "cat", "handoffowner": "ann", "handoffto": "bob", "handoffversion": "v-1"}
    lease = decode_owner_fields(
        Lease("s-0"), Parts(StoredObject("o", "v-2", fields)), lambda fields, name: fields[name]
    )
    assert (lease.owner, lease.next_owner, lease.yields, lease.version) == ("cat", None, False, "v-2")
