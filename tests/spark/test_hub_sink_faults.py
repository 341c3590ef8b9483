"""If a client of Event Hubs raises an exception, the client is closed, and the next attempt opens another one."""

from typing import Any, cast

import pyarrow as pa  # type: ignore[import-untyped]  # pyarrow ships no types
import pytest

from leasehold.adapters.sources.deduplication import Tag
from leasehold.adapters.spark.event_hubs import sink
from leasehold.adapters.spark.event_hubs.sink import HubRowWriter, HubSinkTarget
from leasehold.errors import SourceError

pytest.importorskip("azure.eventhub")

PLACE = HubSinkTarget("namespace", "hub", "", has_secret=False)
ROWS = pa.table(
    {
        "body": [b"a"],
        "partitionId": ["0"],
        "partitionKey": [None],
        "properties": pa.nulls(1, sink.COLUMNS.types["properties"]),
    }
)


class FailingClient:
    """A client that fails to create any batch."""

    def __init__(self, fault: BaseException) -> None:
        self.fault, self.closed = fault, False

    def create_batch(self, **_: object) -> object:
        """Raise the error."""
        raise self.fault

    def close(self) -> None:
        """Record the call, and fail as a broken connection does."""
        self.closed = True
        raise OSError("it is gone")


@pytest.mark.parametrize(
    "fault", [KeyError("x"), MemoryError(), RecursionError(), OSError("x"), KeyboardInterrupt()], ids=repr
)
def test_client_that_raises_is_closed_and_discarded(fault: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    client = FailingClient(fault)
    writer = HubRowWriter(cast("Any", client), "hub")
    monkeypatch.setitem(sink._writers, PLACE, writer)  # noqa: SLF001
    with pytest.raises(KeyboardInterrupt if isinstance(fault, KeyboardInterrupt) else SourceError):
        writer.write(ROWS, Tag("query", 1, 2, "part", "edition", 0))
    assert (client.closed, PLACE in sink._writers) == (True, False)  # noqa: SLF001


class FullBatch(list[bytes]):
    """A batch that takes three events, none of which may be larger than `max_size_in_bytes`."""

    max_size_in_bytes = 4096

    def add(self, event: Any) -> None:  # noqa: ANN401  the type is in an extra
        body = b"".join(event.body)
        if len(self) == 3 or len(body) > self.max_size_in_bytes - 1000:
            raise ValueError("the batch is full")
        self.append(body)


class RecordingClient:
    """A client that records the batches that are sent, each with its partition and key."""

    def __init__(self) -> None:
        self.sent: list[tuple[object, list[bytes]]] = []
        self.routes: dict[int, object] = {}
        self.batches: list[FullBatch] = []

    def create_batch(self, **route: str) -> FullBatch:
        self.batches.append(FullBatch())
        self.routes[id(self.batches[-1])] = route
        return self.batches[-1]

    def send_batch(self, batch: FullBatch) -> None:
        self.sent.append((self.routes[id(batch)], [*batch]))


def make_rows(*rows: tuple[bytes, str | None, str | None]) -> pa.Table:
    bodies, partitions, keys = zip(*rows, strict=True)
    return sink.COLUMNS.select_columns(
        pa.RecordBatch.from_pydict(
            {
                "body": list(bodies),
                "partitionId": pa.array(partitions, pa.string()),
                "partitionKey": pa.array(keys, pa.string()),
            }
        )
    )


def test_rows_are_sent_in_order_and_divided_by_route_and_size() -> None:
    client = RecordingClient()
    rows = make_rows(
        *[(b"%d" % number, "0", None) for number in range(7)],
        (b"7", None, "k"),
        (b"8", None, "l"),
        (b"9", None, None),
    )
    HubRowWriter(cast("Any", client), "hub").write(rows, Tag("query", 1, 2, "part", "edition", 0))
    assert client.sent == [
        ({"partition_id": "0"}, [b"0", b"1", b"2"]),
        ({"partition_id": "0"}, [b"3", b"4", b"5"]),
        ({"partition_id": "0"}, [b"6"]),
        ({"partition_key": "k"}, [b"7"]),
        ({"partition_key": "l"}, [b"8"]),
        ({"partition_key": "-"}, [b"9"]),
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [((b"x" * 3500, "0", None), "column body: 3500 bytes"), ((b"x", "0", "k"), "a row has both")],
)
def test_no_row_is_sent_if_a_later_one_is_rejected(row: tuple[bytes, str, str | None], message: str) -> None:
    """Sent rows cannot be removed, and the corrected rows would have other tags."""
    client = RecordingClient()
    rows = make_rows(*[(b"%d" % number, "0", None) for number in range(7)], row)
    with pytest.raises(ValueError, match=message):
        HubRowWriter(cast("Any", client), "hub").write(rows, Tag("query", 1, 2, "part", "edition", 0))
    assert client.sent == []


def test_large_row_that_the_hub_accepts_is_sent() -> None:
    client = RecordingClient()
    HubRowWriter(cast("Any", client), "hub").write(
        make_rows((b"x" * 3000, "0", None)), Tag("query", 1, 2, "part", "edition", 0)
    )
    assert [len(bodies) for _, bodies in client.sent] == [1]


def test_property_of_a_user_does_not_replace_the_tag() -> None:
    """Rows that were read from a hub and are written again have the tags of another query."""
    tag = Tag("query", 1, 2, "part", "edition", 0)
    events = [sink._make_event(b"x", [("leasehold", "old"), ("a", None)], tag, row) for row in (0, 5)]  # noqa: SLF001
    assert [event.properties for event in events] == [
        {"leasehold": (tag.context + b".%d" % row).decode(), "a": None} for row in (0, 5)
    ]
