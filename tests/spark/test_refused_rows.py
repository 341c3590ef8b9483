"""All rows of a section are checked before any of them is sent, so a task that fails writes no row of the section."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa  # type: ignore[import-untyped]  # pyarrow ships no types
import pytest
from attrs import Factory, define

from leasehold.adapters.sources.deduplication import Tag
from leasehold.adapters.sources.kinesis.producer import producer
from leasehold.adapters.spark.event_hubs import sink as hub_sink
from leasehold.adapters.spark.event_hubs.sink import HubRowWriter
from leasehold.adapters.spark.kinesis import sink as kinesis_sink
from leasehold.adapters.spark.kinesis.sink import KinesisRowWriter, KinesisSinkTarget
from leasehold.adapters.spark.sink import RowWriter, SinkColumns

TAG = Tag("query", 1, 2, "0-0", "edition", 0)
MIB = 1 << 20
GOOD = 3


def table(columns: SinkColumns, *rows: tuple[Any, ...]) -> pa.Table:
    """Return these rows in the form that a section has."""
    column_types = columns.types.items()
    return pa.table(
        {
            name: pa.array([row[column] for row in rows], column_type)
            for column, (name, column_type) in enumerate(column_types)
        }
    ).combine_chunks()


@define
class Written:
    """A row writer, and the rows that its service has received. The service only records the rows."""

    writer: RowWriter
    sent: list[object] = Factory(list)


class OneShard:
    """A client of a stream with one shard."""

    def describe_stream_summary(self, **request: str) -> object:
        """Return the summary of an open stream."""
        summary = {"StreamName": request["StreamName"], "StreamStatus": "ACTIVE"}
        return {"StreamDescriptionSummary": summary}

    def list_shards(self, **_: str) -> object:
        """Return the shard."""
        hash_range = {"StartingHashKey": "0", "EndingHashKey": str(2**128 - 1)}
        return {"Shards": [{"ShardId": "s", "HashKeyRange": hash_range, "SequenceNumberRange": {}}]}


@pytest.fixture
def kinesis(monkeypatch: pytest.MonkeyPatch) -> Iterator[Written]:
    """Yield a writer whose producer checks its rows and sends nothing."""
    sent_rows = list[object]()

    class Noting(producer.Producer):
        def put(self, data: bytes, *keys: Any, context: bytes = b"", row: int = 0) -> Any:  # noqa: ANN401, ARG002
            self.check(data, *keys, context=context)
            sent_rows.append(data)
            return SimpleNamespace(result=lambda: None)

    monkeypatch.setattr(producer, "Producer", Noting)
    monkeypatch.setattr(producer, "create_producer_clients", lambda *_, **__: OneShard())
    writer = KinesisRowWriter(KinesisSinkTarget("stream", "eu-west-1", "", "cbor", 1.0, 0.1))
    yield Written(writer, sent_rows)
    writer._producer.close(0)  # noqa: SLF001


BAD_OF_KINESIS = {
    "too large": ((b"x" * MIB, "k", None), "column data: 1048"),
    "too large with its key": ((b"x" * (MIB - 300), "k" * 256, None), "column data: 1048"),
    "empty key": ((b"x", "", None), "column partition_key: 0 characters"),
    "long key": ((b"x", "k" * 257, None), "column partition_key: 257 characters"),
    "hash key too high": ((b"x", "k", str(2**128)), "column explicit_hash_key: '340"),
    "hash key that is no number": ((b"x", "k", "-1"), "column explicit_hash_key: '-1'"),
}


@pytest.mark.parametrize("at", ["first", "last"])
@pytest.mark.parametrize(("bad", "message"), BAD_OF_KINESIS.values(), ids=BAD_OF_KINESIS)
def test_row_rejected_by_kinesis_keeps_its_section_unsent(
    kinesis: Written, bad: tuple[Any, ...], message: str, at: str
) -> None:
    valid_rows = [(b"%d" % number, f"key {number}", str(number) if number % 2 else None) for number in range(GOOD)]
    rows = [*valid_rows, bad] if at == "last" else [bad, *valid_rows]
    with pytest.raises(ValueError, match=f"^{message}"):
        kinesis.writer.write(table(kinesis_sink.COLUMNS, *rows), TAG)
    assert kinesis.sent == []
    kinesis.writer.write(table(kinesis_sink.COLUMNS, *valid_rows), TAG)
    assert kinesis.sent == [b"0", b"1", b"2"]


@pytest.fixture
def hub() -> Written:
    """Return a writer that uses the client's own batches. Its service records the rows that are sent."""
    azure = pytest.importorskip("azure.eventhub")
    sent_rows = list[object]()

    class Client:
        def create_batch(self, **target: str) -> object:
            return azure.EventDataBatch(max_size_in_bytes=5000, **target)

        def send_batch(self, batch: Any) -> None:  # noqa: ANN401  an extra has the type
            sent_rows.extend(event.body_as_str() for event in batch._internal_events)  # noqa: SLF001

    return Written(HubRowWriter(cast("Any", Client()), "hub"), sent_rows)


BAD_OF_HUBS = {
    "too large": ((b"x" * 4990, None, "k", None), "column body: 4990 bytes"),
    "too large with its properties": ((b"x" * 4000, None, "k", [("p", "é" * 450)]), "column body: 4000 bytes"),
    "partition and key": ((b"x", "0", "k", None), "columns partitionId and partitionKey: a row has both"),
}


@pytest.mark.parametrize("at", ["first", "last"])
@pytest.mark.parametrize(("bad", "message"), BAD_OF_HUBS.values(), ids=BAD_OF_HUBS)
def test_row_rejected_by_a_hub_keeps_its_section_unsent(
    hub: Written, bad: tuple[Any, ...], message: str, at: str
) -> None:
    valid_rows = [(b"%d" % number * 1500, None, "key", [("name", "value")]) for number in range(GOOD)]
    rows = [*valid_rows, bad] if at == "last" else [bad, *valid_rows]
    with pytest.raises(ValueError, match=f"^{message}"):
        hub.writer.write(table(hub_sink.COLUMNS, *rows), TAG)
    assert hub.sent == []
    hub.writer.write(table(hub_sink.COLUMNS, *valid_rows), TAG)
    assert hub.sent == ["0" * 1500, "1" * 1500, "2" * 1500]
