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
