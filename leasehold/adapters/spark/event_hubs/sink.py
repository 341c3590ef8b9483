"""Rows of a DataFrame as events of a hub, by the official client, each named in its application properties.

A section is ordered by partition and key, and sent in that order, one batch of the client's after the other, each once
the one before is acknowledged: so the first copies of its rows come in the order of their numbers, to whichever
partition the service takes a key (W1 in `sources/repeats.py`). Rows of many keys are as many batches: where that is too
slow, name the partition.
"""

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
from attrs import frozen

from leasehold.adapters.sources.deduplication import Tag
from leasehold.adapters.spark.event_hubs.options import hub_of, secret_of_executor
from leasehold.adapters.spark.options import Given
from leasehold.adapters.spark.sink import RowWriter, SinkColumns, values_of
from leasehold.errors import SourceError
from leasehold.stores.printable import escaped, said

if TYPE_CHECKING:  # an extra, which the process that plans a query need not have
    from azure.eventhub import EventData, EventHubProducerClient

log = escaped(logging.getLogger("leasehold.spark"))

COLUMNS = SinkColumns(
    {
        "body": pa.large_binary(),
        "partitionId": pa.large_string(),
        "partitionKey": pa.large_string(),
        "properties": pa.map_(pa.string(), pa.string()),
    },
    order=("partitionId", "partitionKey"),
    must=frozenset({"body"}),
)
RETRIES, RETRY_SECONDS = 8, 1.0
EVENT_BYTES, PROPERTY_BYTES, BYTES_OF_CHARACTER = 2048, 16, 4
"""At least as many as AMQP adds to an event and to a property, and as UTF-8 has for a character."""


@frozen
class HubSinkTarget:
    """A hub to write to; whoever opens it looks for the connection string by itself.

    file   where that stands, "" for the environment
    keyed  whether there is one on the driver; else the identity of whoever opens it is asked for
    """

    namespace: str
    hub: str
    file: str
    keyed: bool

    @property
    def columns(self) -> SinkColumns:
        """The columns that become events."""
        return COLUMNS

    def writer(self) -> RowWriter:
        """The writer of this process. Raises ValueError."""
        if self not in _writers:
            _writers[self] = HubRowWriter(self._client(), self.hub)
        return _writers[self]

    def forget(self) -> None:
        """Have the next task open another."""
        _writers.pop(self, None)

    def _client(self) -> "EventHubProducerClient":
        from azure.eventhub import EventHubProducerClient  # noqa: PLC0415  an extra

        # The client's own repetitions come at once, and before anything newer.
        options: dict[str, Any] = {"retry_total": RETRIES, "retry_backoff_factor": RETRY_SECONDS}
        if secret := secret_of_executor(self.file, keyed=self.keyed):
            return EventHubProducerClient.from_connection_string(secret, eventhub_name=self.hub, **options)
        from azure.identity import DefaultAzureCredential  # noqa: PLC0415  slow to load, and not needed beside a key

        return EventHubProducerClient(self.namespace, self.hub, credential=DefaultAzureCredential(), **options)


_writers = dict[HubSinkTarget, "HubRowWriter"]()
"""Those of this process, which runs one task at a time."""


class HubRowWriter:
    """Writes sections by one client."""

    def __init__(self, client: "EventHubProducerClient", hub: str) -> None:
        self._client, self._hub = client, hub

    def write(self, rows: pa.Table, tag: Tag) -> None:
        """Send these rows and wait for them. Raises SourceError, and ValueError for a row that no hub takes."""
        batch, route = None, None
        try:
            self._check(rows, tag)
            for number, (body, to, key, properties) in enumerate(values_of(rows), tag.row):
                event = _event(body, properties, tag, number)
                # A batch goes to one partition, or by one key: rows for another begin the next one.
                if batch is None or route != (to, key):
                    batch = self._next(batch, to, key)
                    route = to, key
                try:
                    batch.add(event)
                except ValueError:  # it is full
                    batch = self._next(batch, to, key)
                    batch.add(event)
            self._send(batch)
        except ValueError:
            raise
        except BaseException as fault:
            # A connection that has failed is not used again: the next attempt opens its own.
            for target in [target for target, writer in _writers.items() if writer is self]:
                target.forget()
            try:
                self._client.close()
            except Exception as left:  # noqa: BLE001  what ended the write is told
                log.debug("the client is left: %s", said(left))
            if isinstance(fault, KeyboardInterrupt | SystemExit):
                raise
            raise SourceError(f"event hub {self._hub!r}: not all rows were written: {said(fault)}") from fault

    def _check(self, rows: pa.Table, tag: Tag) -> None:
        """Raises ValueError, naming the column, if the hub would refuse any of these rows."""
        # What is sent cannot be taken back, and the section without the bad row has another edition.
        most = None
        for number, (body, to, key, properties) in enumerate(values_of(rows), tag.row):
            if to and key:
                raise ValueError(
                    "columns partitionId and partitionKey: a row has both; one of them chooses the partition"
                )
            size = (
                len(body)
                + BYTES_OF_CHARACTER * len(key or "")
                + sum(PROPERTY_BYTES + BYTES_OF_CHARACTER * len(name + (text or "")) for name, text in properties or ())
            )
            if most is None:
                most = self._batch(to, key).max_size_in_bytes
            if size + EVENT_BYTES <= most:
                continue
            # Only the client knows how large an event is as it is sent.
            try:
                self._batch(to, key).add(_event(body, properties, tag, number))
            except ValueError:
                raise ValueError(f"column body: {len(body)} bytes; the hub takes fewer in an event") from None

    def _next(self, batch: Any, to: str | None, key: str | None) -> Any:  # noqa: ANN401  an extra has the type
        self._send(batch)
        return self._batch(to, key)

    def _batch(self, to: str | None, key: str | None) -> Any:  # noqa: ANN401  likewise
        return self._client.create_batch(partition_id=to) if to else self._client.create_batch(partition_key=key or "-")

    def _send(self, batch: Any) -> None:  # noqa: ANN401  likewise
        if batch is not None and len(batch):
            self._client.send_batch(batch)


def _event(body: bytes, properties: Iterable[tuple[str, str | None]] | None, tag: Tag, number: int) -> "EventData":
    from azure.eventhub import EventData  # noqa: PLC0415  an extra

    from leasehold.adapters.sources.event_hubs.records import TAG  # noqa: PLC0415  likewise

    event = EventData(body)
    event.properties = {**dict(properties or ()), TAG: (tag.context + b".%d" % number).decode()}
    return event


def hub_sink(given: Given) -> HubSinkTarget:
    """Raises ValueError, naming the option and never repeating a secret."""
    namespace, hub, secret, file = hub_of(given)
    return HubSinkTarget(namespace, hub, file, keyed=bool(secret))
