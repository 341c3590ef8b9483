"""A source that lists the partitions of an event hub, and opens a reader for each.

Event loop. A source runs the client's asynchronous interface on one event loop in its own thread (`BackgroundLoop`).
Only one thread is needed for all partitions of a worker, and events are delivered every 50 ms. The client's blocking
interface would need at least two threads per partition, and would hold events back until the prefetch count is reached.
The client's own load balancing and checkpoint stores are not used.

On the event loop, a `PartitionReceiver` puts the events of its AMQP link (its connection to the partition) into a small
inbox. In the worker's threads, a `PartitionReader` takes them from the inbox, drops events that were already processed,
and reopens the link after faults.

Owner levels. Opening a link closes all other links to the partition with a lower or equal owner level. One of them may
belong to a worker that has taken the lease in the meantime, because workers of the Azure SDKs, for example, never have
a higher level than ours. So the first batch of a link reports how long the link took to open, and if another reader
closes our link, this is reported at once. The caller then checks whether it still owns the lease.

Silent links. If no events arrive over a link, the partition may be idle or the link may be dead, because a link is not
closed when the service or the network hangs. The client's `idle_timeout` cannot tell the difference, because it ignores
the service's empty frames. So after `PROBE_SECONDS` without events, the reader requests the last sequence number of the
partition over a separate connection. If the link has already delivered that event, it works. If there is no response
within `PROBE_TIMEOUT_SECONDS`, the reader reports a fault. If the link does not deliver that event within
`DELIVERY_SECONDS`, the reader reopens the link.

Default group. The default consumer group is `$Default`. A shell expands this name as a variable unless the URL is in
single quotes, as in `'eventhubs://namespace/hub?group=$Default'`. The option `group` can also be omitted.
"""

import asyncio
import logging
import math
import os
import random
import time
from asyncio import new_event_loop
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import suppress
from datetime import datetime
from functools import partial
from itertools import chain, dropwhile
from typing import Any, TypeVar

from attrs import evolve, frozen
from azure.core.exceptions import AzureError
from azure.eventhub import EventData
from azure.eventhub.aio import EventHubConsumerClient
from azure.eventhub.exceptions import EventHubError

from leasehold.adapters.sources.call_timeouts import Backoff, datetime_at_position
from leasehold.adapters.sources.deduplication import SeenRows, strip_seen_rows
from leasehold.adapters.sources.event_hubs.access import (
    CONNECTION_STRING,
    Access,
    LinkTakenOver,
    access_by_connection_string,
    access_by_identity,
    find_http_proxy,
    translate_error,
)
from leasehold.adapters.sources.event_hubs.records import convert_event, read_tag
from leasehold.adapters.sources.protocol import SETTLE_SECONDS, Batch, Record, SettledShard, import_and_call_rows_of
from leasehold.adapters.threads import read_boot_clock, spawn
from leasehold.balancer.model import TRIM_HORIZON, Lease, Position, Shard, at_timestamp
from leasehold.errors import SourceError, SourceUnavailable
from leasehold.stores.fields import parse_decimal
from leasehold.stores.objects.event_hubs_layout import BEGINNING_OFFSET, NO_OFFSET, qualified_namespace
from leasehold.stores.printable import error_summary, make_safe_logger

with suppress(ModuleNotFoundError):  # uvloop does not exist for Windows
    # The client needs one loop iteration per event, and an iteration of uvloop is cheaper.
    from uvloop import new_event_loop

_COLUMNS = "leasehold.adapters.sources.event_hubs.arrow_rows"
"""The module that creates Arrow columns. It is imported only when columns are requested, because it needs pyarrow,
which is an optional dependency."""
log = make_safe_logger(logging.getLogger("leasehold.event_hubs"))

RESPONSE_SECONDS = 30.0
CLOSE_SECONDS = 10.0
_CLIENT_ERRORS = (EventHubError, AzureError, ValueError, ImportError, OSError)

T = TypeVar("T")


def _handle_loop_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log errors of the loop as asyncio does, except those about unclosed aiohttp objects.

    The Azure client does not close these objects when a connection over WebSockets fails, so each retry would log an
    error.
    """
    if context.keys().isdisjoint({"client_session", "connector"}):
        loop.default_exception_handler(context)


class BackgroundLoop:
    """Runs coroutines on an event loop in its own thread. The thread ends at `close` or with the process."""

    def __init__(self) -> None:
        self._loop = new_event_loop()
        self._loop.set_exception_handler(_handle_loop_exception)
        self._fault: BaseException | None = None
        self._thread = spawn("leasehold-event-hubs", self._run, self._on_error)

    def start_coroutine(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        """Start `coroutine` on the loop. Canceling the returned future cancels the coroutine.

        Raises:
            SourceError: If the thread has ended because of an error.
        """
        if self._fault is not None:
            coroutine.close()
            raise SourceError(f"the thread of the Event Hubs client has ended: {error_summary(self._fault)}")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run_and_wait(self, coroutine: Coroutine[Any, Any, T], timeout: float = RESPONSE_SECONDS) -> T:
        """Run `coroutine` and wait for its result.

        Raises:
            SourceUnavailable: If there is no result in time. Exceptions of the coroutine propagate.
        """
        future = self.start_coroutine(coroutine)
        try:
            return future.result(timeout)
        except TimeoutError:
            future.cancel()
            raise SourceUnavailable(f"Event Hubs did not respond within {timeout:g} s") from None

    def schedule_call(self, call: Callable[[], object]) -> None:
        """Schedule this call on the loop, unless the loop is closed."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call)

    def close(self) -> None:
        """Cancel all tasks, wait for them up to a time limit, and end the thread."""
        if self._loop.is_closed():
            return
        self.schedule_call(self._loop.stop)
        self._thread.join(CLOSE_SECONDS)

    def _on_error(self, fault: BaseException) -> None:
        # Store the error. Each later call raises it, so the shards are released and the run ends.
        self._fault = fault

    def _run(self) -> None:
        self._loop.run_forever()
        # Cancel the client's tasks twice. The first cancellation makes the client close its links. The second one ends
        # tasks in which closing a link hangs.
        for _ in range(2):
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            if tasks:
                self._loop.run_until_complete(asyncio.wait(tasks, timeout=CLOSE_SECONDS / 4))
        self._loop.close()


@frozen
class EventPosition:
    """A starting position for the client: an offset (str), a sequence number (int) or a time."""

    value: str | int | datetime
    inclusive: bool = False


def starting_event_position(position: Position) -> EventPosition:
    """Return the starting position for a reader that has processed everything up to `position`.

    If the position contains an offset, it is used instead of the sequence number. The offset is the service's own
    token, and its format changes with geo-replication.

    Raises:
        ValueError: For SHARD_END, and for LATEST, which must be resolved first.
        SourceError: For a time outside datetime's range.
    """
    match position.sequence:
        case "TRIM_HORIZON":
            return EventPosition(BEGINNING_OFFSET)
        case "AT_TIMESTAMP":
            return EventPosition(datetime_at_position(position), inclusive=True)
        case "LATEST" | "SHARD_END":
            raise ValueError(f"a partition cannot be read from {position.sequence}")
        case number:
            offset = strip_seen_rows(position.token)
            return EventPosition(int(number) if offset in NO_OFFSET else offset)


class PartitionReceiver:
    """Receives events until it fails or is closed.

    Args:
        background: The event loop.
        access: How to connect to the hub.
        partition: The id of the partition.
        start: Where to start.
        epoch: The owner level, or None for a reader without a level. Opening this receiver closes all others of the
            partition with a lower or equal level. Opening another one with an equal or higher level closes this one.
        prefetch: The number of events that the service may send ahead. About five times this number may be in memory.
    """

    def __init__(
        self,
        background: BackgroundLoop,
        access: Access,
        partition: str,
        start: EventPosition,
        *,
        epoch: int | None,
        prefetch: int,
    ) -> None:
        self._background, self._access, self._partition, self._start = background, access, partition, start
        self._epoch, self._prefetch = epoch, prefetch
        self._inbox: deque[list[Record]] = deque()
        # Each of the two counters is written by a single thread, so they need no lock.
        self._received_count = self._taken_count = 0
        self._space_available: asyncio.Event | None = None
        self._receiving_task: asyncio.Task[None] | None = None
        self._fault: BaseException | None = None
        self._closed = self._is_waiting = False
        self._receiver_future: Future[None] = background.start_coroutine(self._run())

    def take_events(self) -> list[Record]:
        """Return the events that have arrived, in order."""
        if not self._inbox:
            return []
        # The client delivers about fifty events at a time. Take everything in the inbox, so that the loop is woken only
        # once.
        records = list(chain.from_iterable(self._inbox.popleft() for _ in range(len(self._inbox))))
        self._taken_count += len(records)
        self._wake_if_waiting()
        return records

    @property
    def fault(self) -> BaseException | None:
        """The error that ended the receiver, or None while it is running. The inbox may still contain events."""
        if self._fault is None and self._receiver_future.done():
            return ConnectionError("the receiver ended without a reason")
        return self._fault

    def close(self) -> None:
        """Start to close the link, without waiting until it is closed."""
        self._closed = True
        self._receiver_future.cancel()
        self._wake_if_waiting()

    async def _run(self) -> None:
        self._space_available = asyncio.Event()
        try:
            async with self._access.create_client() as client:
                receive_coroutine = client.receive_batch(
                    self._on_events,
                    partition_id=self._partition,
                    owner_level=self._epoch,
                    prefetch=self._prefetch,
                    max_batch_size=self._prefetch,
                    starting_position=self._start.value,
                    starting_position_inclusive=self._start.inclusive,
                    on_error=self._on_error,
                )
                self._receiving_task = asyncio.create_task(receive_coroutine)
                await self._receiving_task
        except Exception as error:  # noqa: BLE001  the reader handles any error that ends a receiver
            self._fault = self._fault or error

    async def _on_events(self, _context: object, events: list[EventData]) -> None:
        # Create the records here, while the events are still in the CPU cache.
        self._inbox.append([convert_event(event) for event in events])
        self._received_count += len(events)
        # While this coroutine waits, the client receives no more events than its link credit allows. This limits the
        # memory that is used if a handler is slow, without delaying other partitions.
        while self._space_available is not None and self._is_full:
            self._space_available.clear()
            self._is_waiting = True
            if self._is_full:  # check again, because `take_events` may have emptied the inbox just before
                await self._space_available.wait()
            self._is_waiting = False

    @property
    def _is_full(self) -> bool:
        # Do not wait for space in the inbox after `close`. The inbox is no longer emptied, so the task of a broken link
        # would never end.
        return 2 * (self._received_count - self._taken_count) >= self._prefetch and not self._closed

    def _wake_if_waiting(self) -> None:
        # Wake the loop only if it waits, because waking it costs as much as receiving a small batch.
        if self._space_available is not None and self._is_waiting:
            self._background.schedule_call(self._space_available.set)

    async def _on_error(self, _context: object, error: Exception) -> None:
        self._fault = error
        # Cancel the client. Otherwise, it would wait half a minute and then reopen the link at the original starting
        # position.
        if self._receiving_task is not None:
            self._receiving_task.cancel()


IDLE_SECONDS, IDLE_SECONDS_MAX = 0.05, 0.5
FAULT_SECONDS, FAULT_SECONDS_MAX = 1.0, 30.0

SILENT_SECONDS = 8.0
"""If the partition has an event that the link has not delivered, and nothing arrives for this long, a fault is
reported."""

PROBE_SECONDS = 5.0, 20.0
"""If no event arrives over a link for this long, the reader requests the number of the partition's last event. The
first value applies after an event has arrived, and the second after a response has shown that the partition is idle."""

PROBE_TIMEOUT_SECONDS = 2.0
"""If the request for the partition's last event has no response within this time, a fault is reported."""

DELIVERY_SECONDS = 2 * RESPONSE_SECONDS
"""If the partition has an event that the link does not deliver within this time, the link is reopened. Opening a link
takes about twice as long as the request for the last event, which may take `RESPONSE_SECONDS`."""

TAKEN_OVER_PAUSE_SECONDS = 10.0
"""How long to wait before reopening a link that another reader took over. If the lease was lost, the worker notices
this earlier."""


class PartitionReader:
    """Reads one partition from just after `start`.

    A read returns the events that have already arrived. After a fault that may be temporary, the read returns an empty
    batch with a longer wait, and the next read reopens the link just after the last record returned.
    """

    def __init__(
        self,
        background: BackgroundLoop,
        access: Access,
        partition: str,
        start: Position,
        *,
        epoch: int | None,
        prefetch: int,
        clock: Callable[[], float] = read_boot_clock,
    ) -> None:
        self._background, self._access, self._partition = background, access, partition
        self._epoch, self._prefetch, self._clock = epoch, prefetch, clock
        self._opened_at: float | None = None
        self._position, self._seen_rows = start, SeenRows.of(start)
        self._last_number = int(start.sequence) if start.numbered else -1
        self._next_pause = IDLE_SECONDS
        self._backoff = Backoff(FAULT_SECONDS, FAULT_SECONDS_MAX, random.uniform)
        self._behind_seconds: float | None = None
        self._probe_error = ""
        self._last_response = self._probed_at = clock()
        self._reported_response_at = self._last_response  # opening the link does not count as a response
        self._probe: Future[int] | None = None
        self._is_partition_idle = False
        self._undelivered_event: tuple[int, float] | None = None
        self._receiver: PartitionReceiver | None = self._open_receiver()

    def read(self) -> Batch:
        """Return the events that have arrived since the last read. Raises SourceError if a retry cannot help."""
        self._receiver = receiver = self._receiver or self._open_receiver()
        records = receiver.take_events()
        if records:
            return self._make_batch(records)
        fault = receiver.fault
        return self._make_empty_batch() if fault is None else self._close_and_retry_later(fault)

    def close(self) -> None:
        """Close the link."""
        if self._probe is not None:
            self._probe.cancel()
            self._probe = None
        if self._receiver is not None:
            self._receiver.close()

    def _open_receiver(self) -> PartitionReceiver:
        self._opened_at = self._clock()
        start = starting_event_position(self._position)
        return PartitionReceiver(
            self._background, self._access, self._partition, start, epoch=self._epoch, prefetch=self._prefetch
        )

    def _make_batch(self, arrived_records: list[Record]) -> Batch:
        # Check only the leading events. Sequence numbers increase, so no later event can have been processed before.
        records = tuple(dropwhile(lambda record: int(record.sequence_number) <= self._last_number, arrived_records))
        if records:
            # The sequence numbers of a partition have no gaps. If the next event has expired, the service continues
            # with the oldest one that it still has.
            missing_count = int(records[0].sequence_number) - self._last_number - 1
            if self._last_number >= 0 and missing_count > 0:
                log.error(
                    "%s: %d events after number %d have expired and are lost",
                    self._log_label,
                    missing_count,
                    self._last_number,
                )
            last_record = records[-1]
            # Drop duplicates written by Spark sinks, and add the deduplication state to the tokens of the other events.
            kept_records = list[Record]()
            for record in records:
                tag = read_tag(record.event)
                if tag is None or not self._seen_rows.check_duplicate(tag, lambda: 0, record.position):
                    kept_records.append(
                        record._replace(token=f"{record.token} {self._seen_rows.token}") if self._seen_rows else record
                    )
            records = tuple(kept_records)
            token = f"{last_record.token} {self._seen_rows.token}" if self._seen_rows else last_record.token
            self._last_number, self._position = (
                int(last_record.sequence_number),
                evolve(last_record.position, token=token),
            )
        self._next_pause = IDLE_SECONDS
        # Compute the lag as the age of the last event that was read, by this machine's clock.
        last_arrived = arrived_records[-1].arrived
        self._behind_seconds = None if last_arrived is None else max(0.0, time.time() - last_arrived)
        self._note_response(self._clock())
        self._is_partition_idle = False
        self._backoff.reset()
        in_columns = partial(import_and_call_rows_of, _COLUMNS, self._partition)
        opened_at, self._opened_at = self._opened_at, None
        seconds_without_link = 0.0 if opened_at is None else self._clock() - opened_at
        return Batch(
            records,
            self._position,
            self._behind_seconds,
            wait_seconds=0.0,
            in_columns=in_columns,
            disconnected_seconds=seconds_without_link,
            possible_duplicates=self._seen_rows.take_possible_duplicates(),
        )

    @property
    def _log_label(self) -> str:
        return f"event hub {self._access.hub!r}, partition {self._partition}"

    def _make_empty_batch(self) -> Batch:
        now = self._clock()
        if (
            self._probe is None
            and now - max(self._last_response, self._probed_at) > PROBE_SECONDS[self._is_partition_idle]
        ):
            self._probe, self._probed_at = self._background.start_coroutine(self._request_last_number()), now
        if self._probe is not None and (self._probe.done() or now - self._probed_at > RESPONSE_SECONDS):
            # Keep the link even if there is no response, because a slow service may be about to open it.
            probe, self._probe = self._probe, None
            if probe.cancel():
                error: BaseException | None = TimeoutError(
                    f"the request for its last event timed out after {RESPONSE_SECONDS:g} s"
                )
            else:
                error = probe.exception()
            if error is not None:
                self._probe_error = str(translate_error(error, self._access, self._partition))
                log.warning("%s", self._probe_error)
            elif probe.result() > self._last_number:
                self._undelivered_event = self._undelivered_event or (probe.result(), now)
            else:
                self._note_response(now)
                self._is_partition_idle = True
                if self._position.sequence != "AT_TIMESTAMP":
                    self._behind_seconds = 0.0  # the link has delivered everything
        if self._undelivered_event is not None and now - self._undelivered_event[1] > DELIVERY_SECONDS:
            return self._close_and_retry_later(
                ConnectionError(f"its link delivers nothing, although event {self._undelivered_event[0]} exists")
            )
        pause_seconds, self._next_pause = self._next_pause, min(2 * self._next_pause, IDLE_SECONDS_MAX)
        silent_seconds, fault = now - self._last_response, ""
        is_probe_late = self._probe is not None and now - self._probed_at > PROBE_TIMEOUT_SECONDS
        if (
            is_probe_late
            or self._probe_error
            or (self._undelivered_event is not None and silent_seconds > SILENT_SECONDS)
        ):
            fault = f"{self._probe_error or self._log_label}: no response for {silent_seconds:.0f} s"
        previous_response_at, self._reported_response_at = self._reported_response_at, self._last_response
        behind_seconds = None if self._behind_seconds is None or fault else 0.0
        return Batch(
            (), None, behind_seconds, pause_seconds, fault=fault, answered=self._last_response > previous_response_at
        )

    def _note_response(self, now: float) -> None:
        self._last_response, self._probe_error, self._undelivered_event = now, "", None

    async def _request_last_number(self) -> int:
        """Return the number of the last event that the link must deliver, or -1 if there is none or it is unknown."""
        async with self._access.create_client() as client:
            properties = await client.get_partition_properties(self._partition)
        # If the reader starts at a time, the number of the next event is unknown until the first event arrives.
        is_number_unknown = self._position.sequence == "AT_TIMESTAMP" or properties["is_empty"]
        return -1 if is_number_unknown else int(properties["last_enqueued_sequence_number"])

    def _close_and_retry_later(self, fault: BaseException) -> Batch:
        error = translate_error(fault, self._access, self._partition)
        self.close()
        self._receiver = self._undelivered_event = None
        if not isinstance(error, SourceUnavailable):
            raise error from fault
        is_taken_over = isinstance(error, LinkTakenOver)
        wait_seconds = TAKEN_OVER_PAUSE_SECONDS if is_taken_over else self._backoff.next()
        log.warning("%s; trying again in %.1f s", error, wait_seconds)
        seconds_without_link = math.inf if is_taken_over else 0.0
        return Batch(
            (),
            None,
            None,
            wait_seconds,
            fault=str(error),
            disconnected_seconds=seconds_without_link,
            answered=is_taken_over,
        )


DEFAULT_GROUP = "$Default"
PREFETCH = 1000
PREFETCH_MAX = 10_000
TRANSPORTS = ("amqp", "websockets")

_WRONG_STREAM_MESSAGE = (
    "lease {!r}: it belongs to hub and group {}, not {}: "
    "use a separate table, container or prefix for each group of each hub"
)


class EventHubsSource:
    """Reads an event hub for a consumer group.

    Args:
        access: How to connect to the hub.
        prefetch: The number of events that the service may send ahead per partition.
        exclusive: Whether opening a reader ends all other readers of the partition, as required for the lease's owner.
    """

    def __init__(self, access: Access, prefetch: int = PREFETCH, *, exclusive: bool = True) -> None:
        self.access, self._prefetch, self._exclusive = access, prefetch, exclusive
        self._background = BackgroundLoop()
        self._created: datetime | None = None

    @property
    def stream(self) -> str:
        """The namespace, hub and group, in lower case."""
        return self.access.stream

    def reads(self, lease: Lease) -> bool:
        """Return True, or raise SourceError if the lease belongs to another hub or group.

        The partition id would not show the mistake, because all hubs use the same ids.
        """
        if lease.stream != self.stream:
            raise SourceError(_WRONG_STREAM_MESSAGE.format(lease.key, lease.stream or "none", self.stream))
        return True

    def shards(self) -> tuple[Shard, ...]:
        """List all partitions in order of their numbers, including those added after the hub was created.

        Raises:
            SourceUnavailable: If the service does not respond or throttles the request. A later attempt may succeed.
            SourceError: If the service rejects the request, for example because of wrong credentials.
        """
        properties = self._call(lambda client: client.get_eventhub_properties())
        self._created = properties["created_at"]
        partition_ids = sorted(properties["partition_ids"], key=lambda partition_id: (len(partition_id), partition_id))
        return tuple(Shard(partition_id, stream=self.stream) for partition_id in partition_ids)

    def incarnation(self) -> str:
        """Return the namespace, hub and group, and the hub's creation time according to the last listing."""
        return "" if self._created is None else f"{self.stream}:{int(self._created.timestamp())}"

    def gone(self, shard: str) -> bool:
        """Return whether the hub has no such partition. A recreated hub may have fewer partitions than before."""
        return all(partition.id != shard for partition in self.shards())

    def latest(self, lease: Lease) -> Position:
        """Return the position of the last event enqueued, or AT_TIMESTAMP 0 if the partition never had an event.

        Raises:
            SourceUnavailable: If the service does not respond or throttles the request. A later attempt may succeed.
            SourceError: If the service rejects the request, for example because of wrong credentials.
        """
        properties = self._request_partition_properties(lease.shard)
        last_number = int(properties["last_enqueued_sequence_number"])
        # Do not use the current time for an empty partition. If this machine's clock is ahead, events would be skipped.
        return (
            at_timestamp(0)
            if last_number < 0
            else Position(str(last_number), token=str(properties["last_enqueued_offset"]))
        )

    def settled(self, lease: Lease, until: float) -> SettledShard | None:
        """Return the partition's last event once `until` is more than `SETTLE_SECONDS` ago.

        The time is compared with this machine's clock, because responses do not contain the service's time.
        """
        if time.time() < until + SETTLE_SECONDS:
            return None
        properties = self._request_partition_properties(lease.shard)
        if properties["is_empty"]:
            return SettledShard(TRIM_HORIZON)
        last_number, enqueued_at = properties["last_enqueued_sequence_number"], properties["last_enqueued_time_utc"]
        return SettledShard(Position(str(last_number)), enqueued_at.timestamp())

    def _request_partition_properties(self, partition: str) -> Any:  # noqa: ANN401  the client's own type
        return self._call(lambda client: client.get_partition_properties(partition), partition)

    def _call(
        self, request: Callable[[EventHubConsumerClient], Awaitable[Mapping[str, Any]]], *partition_ids: str
    ) -> Any:  # noqa: ANN401  each request has its own result
        async def call_client() -> Mapping[str, Any]:
            async with self.access.create_client() as client:
                return await request(client)

        try:
            return self._background.run_and_wait(call_client())
        except _CLIENT_ERRORS as error:
            raise translate_error(error, self.access, *partition_ids) from error

    def open(self, lease: Lease, start: Position) -> PartitionReader:
        """Return a reader that starts just after `start`, with the lease's epoch as its owner level."""
        epoch = lease.epoch if self._exclusive else None
        return PartitionReader(self._background, self.access, lease.shard, start, epoch=epoch, prefetch=self._prefetch)

    def close(self) -> None:
        """Close all connections."""
        self._background.close()


def open_url(hub_path: str, options: Mapping[str, str]) -> EventHubsSource:
    """Open the source at `namespace/hub`.

    The client authenticates with the connection string in the environment. If there is none, it uses the identity of
    this machine or user.

    Args:
        hub_path: The namespace and the hub, with a slash in between.
        options: `group` (default `$Default`), `transport` (`amqp`, or `websockets` if only port 443 is open), `proxy`
            (with websockets, in place of HTTPS_PROXY), and `prefetch` (events).

    Raises:
        ValueError: If the path, an option, or the connection string is wrong.
        SourceError: If there is no connection string, and azure-identity is not installed.
    """
    namespace, separator, hub = hub_path.partition("/")
    if not (namespace and separator and hub) or "/" in hub:
        raise ValueError("eventhubs URL: write eventhubs://namespace/hub")
    group = options.get("group", DEFAULT_GROUP)
    if not group:
        raise ValueError(
            "eventhubs URL: option 'group' is empty; in a shell, put the URL in single quotes because of $Default"
        )
    transport = options.get("transport", "amqp")
    if transport not in TRANSPORTS:
        raise ValueError(f"eventhubs URL: option 'transport' must be one of {', '.join(TRANSPORTS)}, not {transport!r}")
    prefetch = parse_decimal(prefetch_text := options.get("prefetch", str(PREFETCH)), PREFETCH_MAX)
    if not prefetch:
        raise ValueError(
            f"eventhubs URL: option 'prefetch' must be a number from 1 to {PREFETCH_MAX}, not {prefetch_text!r}"
        )
    address = qualified_namespace(namespace), hub, group
    proxy = options.get("proxy", "")
    if proxy and "@" in proxy:
        raise ValueError(
            "eventhubs URL: option 'proxy' must not contain credentials; set HTTPS_PROXY in the environment instead"
        )
    if proxy and transport != "websockets":
        raise ValueError(
            "eventhubs URL: option 'proxy' needs transport=websockets, because plain AMQP cannot use an HTTP proxy"
        )
    if transport == "websockets":
        find_http_proxy(address[0], proxy)  # reports a bad address now instead of at the first connection
    connection_options: dict[str, Any] = {"websockets": transport == "websockets", "proxy": proxy}
    if secret := os.environ.get(CONNECTION_STRING):
        return EventHubsSource(access_by_connection_string(secret, *address, **connection_options), prefetch)
    try:
        return EventHubsSource(access_by_identity(*address, **connection_options), prefetch)
    except ModuleNotFoundError as error:
        message = f"{CONNECTION_STRING} is not set, and signing in without it needs azure-identity"
        raise SourceError(message) from error
