"""Tests the conversion between the KCL's items and our leases, byte for byte and without a service."""

from collections.abc import Callable
from typing import Any

import orjson
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from odd_values import ODD_TEXTS

from leasehold.balancer.model import LATEST, SHARD_END, Lease, Position, Version, at_timestamp
from leasehold.balancer.watch import Reports
from leasehold.stores.aws_calls.pages import parse_page
from leasehold.stores.dynamodb import rows as rows_of
from leasehold.stores.dynamodb.rows import Item, RowDecoder, parse_reports, to_item, to_lease
from leasehold.stores.dynamodb.writes import build_write_request
from leasehold.stores.protocol import Malformed
from leasehold.stores.writes import CreateLease

STREAM = "123456789012:orders:1700000000"

BARE = {
    "leaseKey": {"S": "s-1"},
    "leaseCounter": {"N": "0"},
    "ownerSwitchesSinceCheckpoint": {"N": "0"},
    "checkpoint": {"S": "TRIM_HORIZON"},
    "checkpointSubSequenceNumber": {"N": "0"},
}
WHOLE = {
    "leaseKey": {"S": "s-1"},
    "leaseOwner": {"S": "ann"},
    "handoffOwner": {"S": "ann"},
    "leaseCounter": {"N": "7"},
    "ownerSwitchesSinceCheckpoint": {"N": "0"},
    "checkpoint": {"S": "49590338271490256608559692538361571095921575989136588898"},
    "checkpointSubSequenceNumber": {"N": "3"},
    "checkpointToken": {"S": "8800"},
    "parentShardId": {"SS": ["s-0"]},
    "startingHashKey": {"S": "0"},
    "endingHashKey": {"S": "340282366920938463463374607431768211455"},
    "throughputKBps": {"N": "12.500000"},
    "lh_a": {"S": "1"},
    "lh_b": {"S": "two words"},
}
WHOLE_LEASE = Lease(
    "s-1",
    owner="ann",
    version=Version("7"),
    epoch=7,
    checkpoint=Position("49590338271490256608559692538361571095921575989136588898", 3, "8800"),
    parents=("s-0",),
    hash_range=(0, 2**128 - 1),
    weight=12_800,
    yields=True,
    annotations=(("a", "1"), ("b", "two words")),
)
MULTI = {
    **BARE,
    "leaseKey": {"S": f"{STREAM}:s-1"},
    "streamName": {"S": STREAM},
    "shardId": {"S": "s-1"},
    "parentShardId": {"SS": ["s-0", "s-00"]},
}
MULTI_LEASE = Lease(
    f"{STREAM}:s-1",
    stream=STREAM,
    shard="s-1",
    version=Version("0"),
    parents=(f"{STREAM}:s-0", f"{STREAM}:s-00"),
)
PLAIN = {**BARE, "streamName": {"S": "orders"}, "shardId": {"S": "s-1"}, "parentShardId": {"SS": ["orders:s-0"]}}
PLACED = {**BARE, "leaseKey": {"S": "hub/0"}, "streamName": {"S": "ns/hub"}, "shardId": {"S": "0"}}
TIMED = {**BARE, "checkpoint": {"S": "AT_TIMESTAMP"}, "checkpointSubSequenceNumber": {"N": "1700000000000"}}

BOTH_WAYS = (
    (BARE, Lease("s-1", version=Version("0"))),
    (WHOLE, WHOLE_LEASE),
    (MULTI, MULTI_LEASE),
    (PLAIN, Lease("s-1", stream="orders", version=Version("0"), parents=("orders:s-0",))),
    (PLACED, Lease("hub/0", stream="ns/hub", shard="0", version=Version("0"))),
    (TIMED, Lease("s-1", version=Version("0"), checkpoint=at_timestamp(1_700_000_000_000))),
)


@pytest.mark.parametrize(("item", "lease"), BOTH_WAYS)
def test_an_item_and_its_lease_convert_both_ways(item: dict[str, Any], lease: Lease) -> None:
    """If one attribute has another name or type, a Java worker stops taking leases."""
    assert to_item(lease) == item
    decoded = to_lease(item)
    assert decoded == lease
    assert isinstance(decoded, Lease)
    assert decoded.checkpoint.token == lease.checkpoint.token  # positions are equal even if their tokens differ


def test_a_created_item_is_a_complete_lease() -> None:
    """Java 2.x stops taking leases if it meets a row without counters."""
    assert build_write_request(CreateLease(Lease("s-1", checkpoint=LATEST))) == {
        "ConditionExpression": "attribute_not_exists(leaseKey)",
        "Item": {**BARE, "checkpoint": {"S": "LATEST"}},
    }


JAVA: dict[str, Any] = {
    **BARE,
    "leaseOwner": {"S": "java-1"},
    "leaseCounter": {"N": "20"},
    "ownerSwitchesSinceCheckpoint": {"N": "2"},
    "checkpoint": {"S": "SHARD_END"},
    "pendingCheckpoint": {"S": "42"},
    "pendingCheckpointSubSequenceNumber": {"N": "0"},
    "pendingCheckpointState": {"B": b"state"},
    "childShardIds": {"SS": ["s-2", "s-3"]},
    "throughputKBps": {"N": "0.25"},
    "entityType": {"S": "LEASE"},
    "somebodys": {"M": {"x": {"BOOL": True}}},
}
JAVA_LEASE = Lease("s-1", owner="java-1", version=Version("20"), epoch=20, checkpoint=SHARD_END, weight=256)


@pytest.mark.parametrize(
    ("attributes", "lease"),
    [
        ({}, JAVA_LEASE),
        ({"leaseOwner": {"NULL": True}}, evolve(JAVA_LEASE, owner=None)),
        # In a KCL 3.x hand-off, the worker in `checkpointOwner` is still reading (rule 3 of the writes).
        ({"checkpointOwner": {"S": "java-0"}}, evolve(JAVA_LEASE, owner="java-0", next_owner="java-1", leaving=True)),
        # Java took the lease from one of our workers, so the request to that worker is void.
        ({"handoffOwner": {"S": "ann"}, "handoffTo": {"S": "bob"}}, JAVA_LEASE),
        (
            {"handoffOwner": {"S": "java-1"}, "handoffTo": {"S": "bob"}},
            evolve(JAVA_LEASE, yields=True, next_owner="bob"),
        ),
    ],
)
def test_items_written_by_other_clients_are_understood(attributes: dict[str, Any], lease: Lease) -> None:
    assert to_lease({**JAVA, **attributes}) == lease


@pytest.mark.parametrize("entity", ["STREAM", "LEADER", "CLIENT_VERSION_MIGRATION", "WORKER_METRIC_STATS", "NEW"])
def test_an_item_that_is_no_lease_is_skipped(entity: str) -> None:
    """Java 3.5 stores rows of its own in the same table. They must not be read as leases."""
    assert to_lease({"leaseKey": {"S": "x"}, "entityType": {"S": entity}}) is None


def test_reports_are_the_leader_and_each_worker_with_a_load() -> None:
    metrics, leader = {"entityType": {"S": "WORKER_METRIC_STATS"}}, {"entityType": {"S": "LEADER"}}
    rows: list[dict[str, Any]] = [
        {**JAVA, "leaseKey": {"S": "Leader"}, "ownerName": {"S": "nobody"}},
        BARE,
        {"leaseKey": {"S": "java-2"}, "lut": {"N": "1795268982"}, "sts": {"M": {}}, **metrics},
        {"leaseKey": {"S": "java-1"}, "lut": {"N": "1795268970"}, **metrics},
        {"leaseKey": {"S": "java-3"}, "lut": {"S": "late"}, **metrics},
        {"leaseKey": {"S": "java-4"}, **metrics},
        {"leaseKey": {"S": "Migration3.0"}, "lut": {"N": "1"}, "entityType": {"S": "CLIENT_VERSION_MIGRATION"}},
    ]
    reported = (("java-1", "1795268970"), ("java-2", "1795268982"))
    assert parse_reports(rows) == Reports(None, reported)
    rows.append({"leaseKey": {"S": "Leader"}, "ownerName": {"S": "java-1"}, **leader})
    assert parse_reports(rows) == Reports("java-1", reported)


@pytest.mark.parametrize(
    ("attributes", "field", "why"),
    [
        ({"checkpoint": None}, "checkpoint", "is missing"),
        ({"checkpointSubSequenceNumber": None}, "checkpointSubSequenceNumber", "is missing"),
        ({"leaseCounter": None}, "leaseCounter", "is missing"),
        ({"leaseCounter": {"S": "7"}}, "leaseCounter", "is of type S, and should be of type N"),
        ({"leaseCounter": {"N": "1.5"}}, "leaseCounter", "'1.5' is not a whole number"),
        ({"leaseOwner": {"N": "1"}}, "leaseOwner", "is of type N, and should be of type S"),
        (
            {"checkpoint": {"S": "EARLIEST"}},
            "checkpoint",
            "'EARLIEST' is neither a sentinel nor a decimal sequence number",
        ),
        ({"checkpoint": {"S": ""}}, "checkpoint", "'' is neither a sentinel nor a decimal sequence number"),
        ({"parentShardId": {"S": "s-0"}}, "parentShardId", "is of type S, and should be of type SS"),
        ({"startingHashKey": {"S": "1"}}, "endingHashKey", "None is not a decimal hash key"),
        (
            {"startingHashKey": {"S": "x"}, "endingHashKey": {"S": "9"}},
            "startingHashKey",
            "'x' is not a decimal hash key",
        ),
        (
            {"startingHashKey": {"S": "9"}, "endingHashKey": {"S": "1"}},
            "startingHashKey",
            "9 is after the last hash key, 1",
        ),
        ({"throughputKBps": {"S": "fast"}}, "throughputKBps", "is of type S, and should be of type N"),
        ({"lh_a": {"N": "1"}}, "lh_a", "is of type N, and should be of type S"),
        ({"leaseOwner": {"S": 7}}, "leaseOwner", "7 is not a string"),
        ({"leaseOwner": {}}, "leaseOwner", "is of type none, and should be of type S"),
        ({"leaseOwner": "ann"}, "leaseOwner", "is of type none, and should be of type S"),
        ({"leaseCounter": {"N": 7}}, "leaseCounter", "7 is not a string"),
        ({"parentShardId": {"SS": ["s-0", ""]}}, "parentShardId", "is empty"),
        ({"throughputKBps": {"N": "-1"}}, "throughputKBps", "'-1' is not a throughput in KB/s, from 0 to 976562500000"),
    ],
)
def test_an_incomplete_item_is_reported(attributes: dict[str, Any], field: str, why: str) -> None:
    """An incomplete item must not lead to a second lease for its shard, which would then be read from the beginning."""
    item = {name: value for name, value in {**BARE, **attributes}.items() if value is not None}
    assert to_lease(item) == Malformed("s-1", field, why)


def test_an_item_without_a_key_is_reported_by_its_other_attributes() -> None:
    assert to_lease({**BARE, "leaseKey": {"S": ""}}) == Malformed("{'S': ''}", "leaseKey", "is empty")
    assert to_lease({**BARE, "leaseKey": {"N": "7"}}) == Malformed(
        "{'N': '7'}", "leaseKey", "is of type N, and should be of type S"
    )


ONE_VALUE = st.sampled_from(ODD_TEXTS).flatmap(
    lambda text: st.sampled_from(
        [{"S": text}, {"N": text}, {"SS": [text]}, {"NULL": True}, {"S": "7"}, {"N": "7"}, text]
    )
)
NEW_VALUES = st.dictionaries(
    st.sampled_from([*WHOLE, "lh_c", "entityType", "another"]),
    st.none() | ONE_VALUE | st.sampled_from([{"S": b"\x00"}, {"N": "8"}, {"N": "08"}, {"S": "ben"}]),
    max_size=3,
)


def as_texts(items: list[dict[str, Any]]) -> Any:  # noqa: ANN401  the items themselves where JSON cannot say them
    """Return the items as the rows of a page, each as JSON text, or unchanged if JSON cannot represent them."""
    try:
        page = parse_page(orjson.dumps({"Count": 3, "Items": items, "ScannedCount": 3}), orjson.loads)
    except TypeError:
        return items
    return items if page is None else page["Items"]


@given(st.lists(st.lists(NEW_VALUES, min_size=3, max_size=3), min_size=1, max_size=5))
def test_rereading_rows_equals_a_first_read(listings: list[list[dict[str, Any]]]) -> None:
    """A row is decoded again even if only the owner, the checkpoint or a broken annotation changed."""
    rows, texts = RowDecoder(), RowDecoder()
    items: list[dict[str, Any]] = [{**WHOLE, "leaseKey": {"S": f"s-{number}"}} for number in range(3)]
    for changes in listings:
        items = [
            {name: value for name, value in {**item, **new}.items() if value is not None}
            for item, new in zip(items, changes, strict=True)
        ]
        items = [item if isinstance(item.get("leaseKey"), dict) else {**item, "leaseKey": {"S": "x"}} for item in items]
        expected_rows = [to_lease(item) for item in items]
        for listing in (rows.read([items]), texts.read([as_texts(items)])):
            assert listing.leases == [row for row in expected_rows if isinstance(row, Lease)]
            assert listing.malformed == [row for row in expected_rows if isinstance(row, Malformed)]
            assert [item for item in items if to_lease(item) is None] == listing.others


def test_a_row_with_a_new_counter_and_annotations_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded_items: list[Any] = []

    def decode(item: Item) -> Lease | Malformed | None:
        decoded_items.append(item)
        return to_lease(item)

    monkeypatch.setattr(rows_of, "to_lease", decode)
    rows, item = RowDecoder(), dict[str, Any](WHOLE)
    (first_lease,) = rows.read([[item]]).leases
    (reread_lease,) = rows.read([[dict(item)]]).leases
    (renewed_lease,) = rows.read([[{**item, "leaseCounter": {"N": "8"}, "lh_a": {"S": "2"}}]]).leases
    assert reread_lease is first_lease
    assert renewed_lease == evolve(
        first_lease, epoch=8, version=Version("8"), annotations=(("a", "2"), ("b", "two words"))
    )
    assert decoded_items == [item]


def test_a_row_with_only_a_new_counter_is_not_parsed_again() -> None:
    rows, item = RowDecoder(), dict[str, Any](WHOLE)
    parsed_texts: list[bytes] = []

    def parse(text: bytes) -> Any:  # noqa: ANN401  as orjson
        parsed_texts.append(text)
        return orjson.loads(text)

    def read(counter: str) -> list[Lease]:
        body = orjson.dumps({"Items": [{**item, "leaseCounter": {"N": counter}}], "Count": 1})
        page = parse_page(body, parse)
        assert page is not None
        parsed_texts.clear()
        return rows.read([page["Items"]]).leases

    (first_lease,) = read("7")
    assert parsed_texts
    (reread_lease,), parsed_on_reread = read("7"), list(parsed_texts)
    (renewed_lease,), parsed_after_renewal = read("10"), list(parsed_texts)
    assert (reread_lease is first_lease, parsed_on_reread, parsed_after_renewal) == (True, [], [])
    assert renewed_lease == evolve(first_lease, epoch=10, version=Version("10"))


@pytest.mark.parametrize("value", ['}},{"', "}}]", '\\"leaseCounter":{"N":"', '{"Items":[{', "}},{}},{"])
def test_brackets_in_a_value_do_not_split_a_row(value: str) -> None:
    """Any program may write annotations, so their values must not shift the boundaries between rows in a listing."""
    items: list[dict[str, Any]] = [
        {**WHOLE, "leaseKey": {"S": f"s-{number}"}, "lh_a": {"S": value}} for number in range(3)
    ]
    rows = RowDecoder()
    for counter in ("7", "8", "8"):
        current_items = [{**item, "leaseCounter": {"N": counter}} for item in items]
        body = orjson.dumps({"Items": current_items, "LastEvaluatedKey": {"leaseKey": {"S": value}}, "Count": 3})
        page = parse_page(body, orjson.loads)
        assert page is None or page["Items"] == current_items
        listing = rows.read([orjson.loads(body)["Items"] if page is None else page["Items"]])
        assert listing.leases == [to_lease(item) for item in current_items]


def test_a_counter_inside_another_value_is_ignored() -> None:
    rows = RowDecoder()
    for deep, counter in (("1", "7"), ("2", "7"), ("2", "8")):
        item: dict[str, Any] = {**WHOLE, "deep": {"M": {"leaseCounter": {"N": deep}}}, "leaseCounter": {"N": counter}}
        assert rows.read([as_texts([item])]).leases == [to_lease(item)]


def test_rows_before_a_failed_split_are_listed_once() -> None:
    """A page with a value that looks like the boundary between rows is read again as a whole."""
    items: list[dict[str, Any]] = [
        {**WHOLE, "leaseKey": {"S": "s-0"}},
        {"leaseKey": {"S": "s-1"}},
        {"leaseKey": {"S": "Leader"}, "entityType": {"S": "LEADER"}},
        {**WHOLE, "leaseKey": {"S": "s-2"}, "lh_a": {"S": "}},{"}},
    ]
    first_item: dict[str, Any] = {**WHOLE, "leaseKey": {"S": "s-3"}}
    rows = RowDecoder()
    for _ in range(2):
        listing = rows.read([as_texts([first_item]), as_texts(items)])
        assert listing.leases == [to_lease(item) for item in (first_item, items[0], items[3])]
        assert (listing.malformed, listing.others) == ([to_lease(items[1])], [items[2]])


@pytest.mark.parametrize("as_page", [as_texts, list], ids=["unparsed", "parsed"])
def test_leases_that_no_longer_exist_are_not_kept_in_memory(as_page: Callable[[list[Any]], Any]) -> None:
    rows = RowDecoder()
    for first_number in range(0, 50, 5):
        numbers = range(first_number, first_number + 5)
        rows.read([as_page([{**WHOLE, "leaseKey": {"S": f"s-{number}"}} for number in numbers])])
    assert len(rows._leases) + len(rows._cached_json_rows) <= 3 * len(numbers)  # noqa: SLF001  what is kept


def test_an_empty_next_owner_is_no_next_owner() -> None:
    item: dict[str, Any] = {**WHOLE, "leaseOwner": {"S": "ann"}, "handoffOwner": {"S": "ann"}, "handoffTo": {"S": ""}}
    lease = to_lease({name: value for name, value in item.items() if name != "checkpointOwner"})
    assert isinstance(lease, Lease)
    assert (lease.owner, lease.next_owner, lease.yields) == ("ann", None, True)


def test_a_row_that_json_cannot_represent_is_parsed_each_time() -> None:
    """Another program may store bytes in a row."""
    rows = RowDecoder()
    for checkpoint in ("41", "42"):
        item: Any = {**WHOLE, "checkpoint": {"S": checkpoint}, "raw": {"B": b"\xff"}}
        assert rows.read([[item]]).leases == [to_lease(item)]
