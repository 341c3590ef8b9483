"""The C scanner of CBOR responses either returns the same values as cbor2 or declines the response."""

from typing import Any, cast
from unittest.mock import patch

import cbor2
import pytest
import test_wire
from hypothesis import given
from hypothesis import strategies as st
from standins.in_c import scan

from leasehold.adapters.sources.kinesis.cbor import hooks as forms
from leasehold.adapters.sources.kinesis.poller import convert_to_columns

SCAN = scan()
pytestmark = pytest.mark.skipif(SCAN is None, reason="there is no compiler of C")

CHILD = {"ShardId": "shardId-1", "ParentShards": ["shardId-0"], "Odd": {"Nested": [1.5, None, -7, b"\xff" * 300]}}
ANSWER = {
    "ChildShards": [CHILD],
    "Records": [test_wire.ROW, {**test_wire.ROW, "Data": b"", "PartitionKey": "ü", "EncryptionType": "NONE"}],
    "MillisBehindLatest": 2**40,
    "NextShardIterator": "i" * 300,
}
ROWS = st.fixed_dictionaries(
    {
        "SequenceNumber": st.integers(0, 10**56).map(str),
        "Data": st.binary(max_size=40),
        "PartitionKey": st.text(max_size=30),
        "ApproximateArrivalTimestamp": st.integers(0, 2**50 - 1),
    },
    optional={"EncryptionType": st.sampled_from(["NONE", "KMS"])},
)


def as_columns(rows: Any) -> tuple[object, ...]:  # noqa: ANN401  either form
    """Return all columns of the rows, whichever parser they come from."""
    columns = convert_to_columns(rows)
    return columns.payloads, columns.numbers, columns.keys, columns.arrived, columns.has_aggregates


def by_cbor2(body: bytes) -> tuple[tuple[object, ...], object]:
    """Return the rows and the rest of a response, as parsed by cbor2. Raises ValueError or UnreadableBody."""
    with patch.object(forms, "SCAN", new=None):
        rows, other_fields = forms._split_rows(body, cbor=True)  # noqa: SLF001  the function that the scanner replaces
    return as_columns(rows), other_fields


def by_scanner(body: bytes) -> tuple[tuple[object, ...], object] | None:
    """Return the rows and the rest of a response, as parsed by the scanner, or None if it declines the response."""
    scan_result = SCAN.viewed(body)
    if scan_result is None:
        return None
    *columns, has_aggregates, records_begin, records_end = scan_result
    other_fields = cbor2.loads(body[:records_begin] + b"\xf7" + body[records_end:])
    assert other_fields.pop("Records") is cbor2.undefined
    return (*SCAN.columns(body, *columns), has_aggregates), other_fields


@given(st.lists(ROWS, max_size=4), st.booleans(), st.permutations([*ANSWER]))
def test_scanner_accepts_any_order_of_fields(rows: list[dict[str, object]], indefinite: bool, names: list[str]) -> None:
    """The scanner also accepts arrays and maps without a length."""
    response = {**{name: ANSWER[name] for name in names}, "Records": rows}
    body = cbor2.dumps(response, indefinite_containers=indefinite)
    assert by_scanner(body) == by_cbor2(body)


def test_time_may_have_its_cbor_tag() -> None:
    arrival_time = cbor2.CBORTag(1, 1_795_363_072_573)
    body = cbor2.dumps({**ANSWER, "Records": [{**test_wire.ROW, "ApproximateArrivalTimestamp": arrival_time}]})
    assert by_scanner(body) == by_cbor2(body)


@pytest.mark.parametrize(
    "row",
    [
        {**test_wire.ROW, "Data": "ZGF0YQ=="},
        {**test_wire.ROW, "PartitionKey": None},
        {**test_wire.ROW, "ApproximateArrivalTimestamp": 1_795_363_072.5},
        {**test_wire.ROW, "Unheard": 1},
        {**test_wire.ROW, "ApproximateArrivalTimestamp": 2**50},
        {name: value for name, value in test_wire.ROW.items() if name != "PartitionKey"},
        {name: value for name, value in test_wire.ROW.items() if name != "ApproximateArrivalTimestamp"},
        {"Data": b"data"},
        {"SequenceNumber": "5"},
        7,
    ],
)
def test_scanner_declines_any_other_form(row: object) -> None:
    assert SCAN.viewed(cbor2.dumps({**ANSWER, "Records": [test_wire.ROW, row]})) is None


BODY = cbor2.dumps({**ANSWER, "Records": [test_wire.ROW] * 3})


DAMAGE = st.tuples(st.integers(0, len(BODY)), st.integers(0, 9), st.binary(max_size=9))
OTHERS = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=9,
)


@given(st.lists(DAMAGE, max_size=3))
def test_damaged_response_is_declined_or_read_as_by_cbor2(damage: list[tuple[int, int, bytes]]) -> None:
    body = BODY
    for offset, removed_length, inserted_bytes in damage:
        body = body[:offset] + inserted_bytes + body[offset + removed_length :]
    try:
        scan_result = by_scanner(body)
    except (cbor2.CBORDecodeError, ValueError):
        with pytest.raises((forms.UnreadableBody, TypeError)):  # cbor2 must fail on the whole body, too.
            by_cbor2(body)
        return
    if scan_result is not None:
        assert scan_result == by_cbor2(body)


@given(st.lists(ROWS | OTHERS, max_size=4), st.dictionaries(st.text(max_size=3), OTHERS), st.booleans())
def test_any_response_is_declined_or_read_as_by_cbor2(
    rows: list[object], others: dict[str, object], indefinite: bool
) -> None:
    body = cbor2.dumps({**others, "Records": rows, "ChildShards": None}, indefinite_containers=indefinite)
    scan_result = by_scanner(body)
    if scan_result is not None:
        assert scan_result == by_cbor2(body)


def test_truncated_response_is_declined() -> None:
    end = BODY.index(b"\x72MillisBehindLatest")
    assert [SCAN.viewed(BODY[:size]) for size in range(end)] == [None] * end


@pytest.mark.slow
def test_scanned_records_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests in test_wire.py also pass with the scanner."""
    monkeypatch.setattr(forms, "SCAN", SCAN)
    test_wire.test_crafted_aggregates_give_the_same_records()
    test_wire.test_responses_give_the_batches_that_boto3_gives()
    test_wire.test_malformed_body_fails_as_with_boto3()


def test_last_of_two_lists_is_read_as_by_cbor2(monkeypatch: pytest.MonkeyPatch) -> None:
    one_record, no_records = cbor2.dumps({"Records": [test_wire.ROW]})[1:], cbor2.dumps({"Records": []})[1:]
    monkeypatch.setattr(forms, "SCAN", SCAN)
    assert forms.split_response(b"\xa2" + one_record + no_records, cbor=True) == ([], b"{}")


def test_row_has_the_fields_of_boto3() -> None:
    """Callers of the client get the fields of boto3. Once the rows are converted to columns, the response is freed."""
    with patch.object(forms, "SCAN", SCAN):
        rows, _ = forms.split_response(BODY, cbor=True)
    in_seconds = {**test_wire.ROW, "ApproximateArrivalTimestamp": test_wire.ARRIVED / 1000}
    assert [rows[index] for index in range(len(rows))] == [in_seconds] * 3
    assert (convert_to_columns(cast("Any", rows)).numbers, len(rows)) == (
        [test_wire.ROW["SequenceNumber"]] * 3,
        0,
    )  # and the response is freed
