"""The calls of a client that move records, past boto3 where its service speaks CBOR (`stores/aws_calls`).

The client is changed: whoever calls it need not know.
"""

from typing import TYPE_CHECKING, Any

from leasehold.adapters.sources.kinesis.wire.hooks import (
    CBOR,
    PutRows,
    PutWire,
    Unreadable,
    Wire,
    packed,
    plain_answer_of,
    told_of,
)
from leasehold.stores.aws_calls.calls import DirectCalls

if TYPE_CHECKING:  # the stubs are no dependency of a user
    from types_boto3_kinesis import KinesisClient


def read_directly(client: "KinesisClient", wire: Wire) -> None:
    """Have this client ask for records directly."""
    calls, by_boto = DirectCalls(client, ["GetRecords"]), client.get_records

    def get_records(**question: Any) -> Any:  # noqa: ANN401  as boto3
        if not wire.speaks_cbor("GetRecords") or question.keys() != {"ShardIterator", "Limit"}:
            return by_boto(**question)
        return calls.call(
            "GetRecords", packed(question), CBOR, read=plain_answer_of, by_boto=lambda: by_boto(**question), again=True
        )

    _change(client, calls, get_records=get_records)


def put_directly(client: "KinesisClient", wire: PutWire) -> None:
    """Have this client send a producer's records directly; other lists of records are left to boto3."""
    calls, by_boto = DirectCalls(client, ["PutRecords"]), client.put_records

    def put_records(**question: Any) -> Any:  # noqa: ANN401  as boto3
        rows = question.get("Records")
        if not (
            isinstance(rows, PutRows)
            and rows
            and question.keys() == {"StreamName", "Records"}
            and wire.speaks_cbor("PutRecords")
            and all(type(row["Data"]) is bytes for row in rows)
        ):
            return by_boto(**question)
        return calls.call(
            "PutRecords", packed(question), CBOR, read=_results, by_boto=lambda: by_boto(**question), again=False
        )

    _change(client, calls, put_records=put_records)


def _results(body: bytes | bytearray) -> dict[str, Any] | None:
    """What became of each record; None: boto3 is to read it."""
    try:
        told = told_of(body, cbor=True)
    except Unreadable:
        return None
    rows = told.get("Records")
    # Each is a dictionary of texts; a null among them is boto3's to leave out.
    if not isinstance(rows, list) or not all(
        type(row) is dict and {str}.issuperset(map(type, row.values())) for row in rows
    ):
        return None
    return told


def _change(client: Any, calls: DirectCalls, **methods: Any) -> None:  # noqa: ANN401  boto3 makes its classes as it runs
    by_boto = client.close

    def close() -> None:
        calls.close()
        by_boto()

    for name, method in {**methods, "close": close}.items():
        setattr(client, name, method)
