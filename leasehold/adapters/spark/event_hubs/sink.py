"""Sends rows of a DataFrame to an event hub with the official client. Each event has a tag in its properties.

A section is ordered by partition and key, and sent in that order. The client sends a batch only after the previous
batch was acknowledged. Therefore, the first copies of a section's rows arrive in the order of their row numbers,
whatever partition the service chooses for a key (W1 in `sources/deduplication.py`). A batch contains rows with only one
key, so rows with many keys take many batches. If this is too slow, users can set the partition of each row.
"""

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
from attrs import frozen

from leasehold.adapters.sources.deduplication import Tag
from leasehold.adapters.spark.event_hubs.options import find_executor_secret, parse_hub
from leasehold.adapters.spark.options import OptionReader
from leasehold.adapters.spark.sink import RowWriter, SinkColumns, read_row_values
from leasehold.errors import SourceError
from leasehold.stores.printable import error_summary, make_safe_logger

if TYPE_CHECKING:  # an optional dependency, which the process that plans a query does not need
    from azure.eventhub import EventData, EventHubProducerClient

log = make_safe_logger(logging.getLogger("leasehold.spark"))

COLUMNS = SinkColumns(
    {
        "body": pa.large_binary(),
        "partitionId": pa.large_string(),
        "partitionKey": pa.large_string(),
        "properties": pa.map_(pa.string(), pa.string()),
    },
    order=("partitionId", "partitionKey"),
    required=frozenset({"body"}),
)
RETRIES, RETRY_SECONDS = 8, 1.0
EVENT_OVERHEAD_BYTES, PROPERTY_OVERHEAD_BYTES, CHARACTER_BYTES_MAX = 2048, 16, 4
"""Upper bounds, in bytes, for the AMQP overhead of an event, for the AMQP overhead of a property, and for a character
in UTF-8."""


@frozen
class HubSinkTarget:
    """A hub to write to. Each process that opens the hub looks up the connection string itself.

    Attributes:
        namespace: The fully qualified namespace.
        hub: The hub's name.
        file: The file with the connection string; "" for the environment.
        has_secret: Whether the driver has a connection string. If it has none, each process uses its own identity.
    """

    namespace: str
    hub: str
    file: str
    has_secret: bool

    @property
    def columns(self) -> SinkColumns:
        """The columns that become events."""
        return COLUMNS

    def open_writer(self) -> RowWriter:
        """Return the writer of this process. Raises ValueError."""
        if self not in _writers:
            _writers[self] = HubRowWriter(self._client(), self.hub)
        return _writers[self]

    def forget_writer(self) -> None:
        """Drop the writer, so that the next task opens a new one."""
        _writers.pop(self, None)

    def _client(self) -> "EventHubProducerClient":
        from azure.eventhub import EventHubProducerClient  # noqa: PLC0415  an extra

        # Let the client retry by itself, so that a failed batch is sent again before any later batch.
        options: dict[str, Any] = {"retry_total": RETRIES, "retry_backoff_factor": RETRY_SECONDS}
        if secret := find_executor_secret(self.file, has_secret=self.has_secret):
            return EventHubProducerClient.from_connection_string(secret, eventhub_name=self.hub, **options)
        from azure.identity import DefaultAzureCredential  # noqa: PLC0415  slow to load, and not needed if there is a key

        return EventHubProducerClient(self.namespace, self.hub, credential=DefaultAzureCredential(), **options)


_writers = dict[HubSinkTarget, "HubRowWriter"]()
"""The writers that the tasks of this process share. A process runs one task at a time."""


class HubRowWriter:
    """Writes sections with one client."""

    def __init__(self, client: "EventHubProducerClient", hub: str) -> None:
        self._client, self._hub = client, hub

    def write(self, rows: pa.Table, tag: Tag) -> None:
        """Send these rows and wait until they are acknowledged.

        Raises SourceError, or ValueError for a row that no hub accepts.
        """
        batch, batch_route = None, None
        try:
            self._check_sizes(rows, tag)
            for row_number, (body, partition, key, properties) in enumerate(read_row_values(rows), tag.row):
                event = _make_event(body, properties, tag, row_number)
                # All rows of a batch must have the same partition or key, so a row with another partition or key begins
                # the next batch.
                if batch is None or batch_route != (partition, key):
                    batch = self._start_next_batch(batch, partition, key)
                    batch_route = partition, key
                try:
                    batch.add(event)
                except ValueError:  # the batch is full
                    batch = self._start_next_batch(batch, partition, key)
                    batch.add(event)
            self._send_batch(batch)
        except ValueError:
            raise
        except BaseException as fault:
            # Do not use the connection again after a failure. The next attempt opens a new one.
            for target in [target for target, writer in _writers.items() if writer is self]:
                target.forget_writer()
            try:
                self._client.close()
            except Exception as close_error:  # noqa: BLE001  the error that ended the write is raised below
                log.debug("the client could not be closed: %s", error_summary(close_error))
            if isinstance(fault, KeyboardInterrupt | SystemExit):
                raise
            raise SourceError(f"event hub {self._hub!r}: not all rows were written: {error_summary(fault)}") from fault

    def _check_sizes(self, rows: pa.Table, tag: Tag) -> None:
        """Raise ValueError, naming the column, if the hub would reject any of these rows."""
        # Check all rows before any of them is sent, because rows that were sent cannot be removed. After the user has
        # fixed or removed the invalid row, the section has other tags, so readers would not recognize the repeated rows
        # as duplicates.
        max_bytes = None
        for row_number, (body, partition, key, properties) in enumerate(read_row_values(rows), tag.row):
            if partition and key:
                raise ValueError(
                    "columns partitionId and partitionKey: a row has both; one of them chooses the partition"
                )
            event_bytes = (
                len(body)
                + CHARACTER_BYTES_MAX * len(key or "")
                + sum(
                    PROPERTY_OVERHEAD_BYTES + CHARACTER_BYTES_MAX * len(name + (text or ""))
                    for name, text in properties or ()
                )
            )
            if max_bytes is None:
                max_bytes = self._create_batch(partition, key).max_size_in_bytes
            if event_bytes + EVENT_OVERHEAD_BYTES <= max_bytes:
                continue
            # The event may be too large. Only the client can determine its encoded size, so try to add it to an empty
            # batch.
            try:
                self._create_batch(partition, key).add(_make_event(body, properties, tag, row_number))
            except ValueError:
                raise ValueError(f"column body: {len(body)} bytes; the hub takes fewer in an event") from None

    def _start_next_batch(self, batch: Any, partition: str | None, key: str | None) -> Any:  # noqa: ANN401  the type is in an extra
        self._send_batch(batch)
        return self._create_batch(partition, key)

    def _create_batch(self, partition: str | None, key: str | None) -> Any:  # noqa: ANN401  likewise
        return (
            self._client.create_batch(partition_id=partition)
            if partition
            else self._client.create_batch(partition_key=key or "-")
        )

    def _send_batch(self, batch: Any) -> None:  # noqa: ANN401  likewise
        if batch is not None and len(batch):
            self._client.send_batch(batch)


def _make_event(
    body: bytes, properties: Iterable[tuple[str, str | None]] | None, tag: Tag, row_number: int
) -> "EventData":
    from azure.eventhub import EventData  # noqa: PLC0415  an extra

    from leasehold.adapters.sources.event_hubs.records import TAG  # noqa: PLC0415  likewise

    event = EventData(body)
    event.properties = {**dict(properties or ()), TAG: (tag.context + b".%d" % row_number).decode()}
    return event


def parse_hub_sink(opts: OptionReader) -> HubSinkTarget:
    """Parse the options of a sink. Raises ValueError, naming the option and never repeating a secret."""
    namespace, hub, secret, file = parse_hub(opts)
    return HubSinkTarget(namespace, hub, file, has_secret=bool(secret))
