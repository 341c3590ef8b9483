"""An event hub as a source of records: its partitions, and a reader for each that never waits.

A source has one event loop in a thread of its own (`Background`), on which all calls to the client's asynchronous
interface run: it is public, needs one thread for all partitions of a worker, and hands events over every 50 ms. The
blocking interface needs two threads for each partition and another one of the SDK's, and holds a few events back until
as many have come as were to be prefetched. The client's own balancing and checkpoint stores are not used. On the loop
a `PartitionReceiver` keeps what its link brings in a small inbox; a `PartitionReader` takes it from there, drops what
was done, and opens the link again after faults.

A link drives out all of a lower owner level, whoever holds the lease by then: official workers have none above ours.
So the first events of a link tell for how long it was opening, and the end of one that another took over is said at
once; who calls finds out by the lease whether the partition is still ours.

A link on which nothing comes may be quiet, or dead without a word: a service or a network that hangs ends no link, and
the client's own time-out (`idle_timeout`) does not count the service's empty frames, so it would end quiet links. So a
quiet link is a reading only for `HEARD_SECONDS` after the service was last heard, and after `ASK_SECONDS` of silence
the service is asked, over a connection of its own, for the last number of the partition. If we have it, all is well; if
the link does not bring it for `LATE_SECONDS`, it is opened again.

In a URL the default consumer group is written `$Default`. A shell puts a variable of that name in its place unless the
URL stands in single quotes: `'eventhubs://namespace/hub?group=$Default'`. It may as well be left out.
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

from leasehold.adapters.sources.call_patience import Backoff, datetime_of
from leasehold.adapters.sources.deduplication import Had, own_token
from leasehold.adapters.sources.event_hubs.access import (
    CONNECTION_STRING,
    Access,
    Contended,
    by_connection_string,
    by_identity,
    explained,
    http_proxy_of,
)
from leasehold.adapters.sources.event_hubs.records import record, tag_of
from leasehold.adapters.sources.protocol import SETTLE_SECONDS, Batch, Record, Settled, rows_in_columns
from leasehold.adapters.threads import seconds, spawn
from leasehold.balancer.model import TRIM_HORIZON, Lease, Position, Shard, at_timestamp
from leasehold.errors import SourceError, SourceUnavailable
from leasehold.stores.fields import decimal
from leasehold.stores.objects.event_hubs_layout import BEGINNING, NO_OFFSET, full_namespace
from leasehold.stores.printable import escaped, said

with suppress(ModuleNotFoundError):  # there is none for Windows
    # The client takes a turn of the loop for each event, and here a turn costs less.
    from uvloop import new_event_loop

_COLUMNS = "leasehold.adapters.sources.event_hubs.arrow_rows"
"""Imported late: it needs pyarrow, which is an extra."""
log = escaped(logging.getLogger("leasehold.event_hubs"))

ANSWER_SECONDS = 30.0
CLOSE_SECONDS = 10.0
_FAULTS = (EventHubError, AzureError, ValueError, ImportError, OSError)

T = TypeVar("T")


class Background:
    """Runs coroutines away from its callers. Close it, or the thread ends with the process."""

    def __init__(self) -> None:
        self._loop = new_event_loop()
        self._fault: BaseException | None = None
        self._thread = spawn("leasehold-event-hubs", self._run, self._failed)

    def start(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Begin; cancelling the future cancels the work. Raises SourceError if the thread has ended by a fault."""
        if self._fault is not None:
            work.close()
            raise SourceError(f"the thread of the Event Hubs client has ended: {said(self._fault)}")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def ask(self, work: Coroutine[Any, Any, T], seconds: float = ANSWER_SECONDS) -> T:
        """Wait for an answer. Raises SourceUnavailable if none comes in time, else what the work raises."""
        asked = self.start(work)
        try:
            return asked.result(seconds)
        except TimeoutError:
            asked.cancel()
            raise SourceUnavailable(f"Event Hubs did not answer within {seconds:g} s") from None

    def soon(self, call: Callable[[], object]) -> None:
        """Have the loop make this call; nothing if it is closed."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call)

    def close(self) -> None:
        """Cancel what runs, wait a bounded time for it to let go, and end the thread."""
        if self._loop.is_closed():
            return
        self.soon(self._loop.stop)
        self._thread.join(CLOSE_SECONDS)

    def _failed(self, fault: BaseException) -> None:
        self._fault = fault  # raised at each call: shards are released with it, and the run ends

    def _run(self) -> None:
        self._loop.run_forever()
        # Cancelled, the client's tasks close their links; cancelled again, those whose link does not close give it up.
        for _ in range(2):
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            if tasks:
                self._loop.run_until_complete(asyncio.wait(tasks, timeout=CLOSE_SECONDS / 4))
        self._loop.close()


@frozen
class EventPosition:
    """A starting position in the client's terms: an offset (str), a sequence number (int) or a time."""

    at: str | int | datetime
    inclusive: bool = False


def starting(position: Position) -> EventPosition:
    """The start of a reader that has done everything up to `position`.

    The offset is preferred: it is the service's own token, and geo-replication changes what it looks
    like. LATEST has no place here: it is pinned first. Raises ValueError for it and for SHARD_END, SourceError for a
    time that no calendar has.
    """
    match position.sequence:
        case "TRIM_HORIZON":
            return EventPosition(BEGINNING)
        case "AT_TIMESTAMP":
            return EventPosition(datetime_of(position), inclusive=True)
        case "LATEST" | "SHARD_END":
            raise ValueError(f"a partition cannot be read from {position.sequence}")
        case number:
            offset = own_token(position.token)
            return EventPosition(int(number) if offset in NO_OFFSET else offset)


class PartitionReceiver:
    """Receives until it fails or is closed.

    prefetch  events that the service may send ahead; about five times as many can be in memory
    epoch     the owner level; a reader with this or a higher one ends ours, and ours a lower one; None: no such right
    """

    def __init__(
        self,
        background: Background,
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
        # Each is written by one thread alone, so that neither needs a lock.
        self._came = self._taken = 0
        self._room: asyncio.Event | None = None
        self._receiving: asyncio.Task[None] | None = None
        self._fault: BaseException | None = None
        self._closed = self._stuck = False
        self._work: Future[None] = background.start(self._run())

    def take(self) -> list[Record]:
        """The events that have come, in order; empty if none has."""
        if not self._inbox:
            return []
        # The client hands over up to about fifty events at a time: one by one, each would cost a turn of the loop.
        records = list(chain.from_iterable(self._inbox.popleft() for _ in range(len(self._inbox))))
        self._taken += len(records)
        self._make_room()
        return records

    @property
    def fault(self) -> BaseException | None:
        """The reason why no more events will come, once the inbox is empty."""
        if self._fault is None and self._work.done():
            return ConnectionError("the receiver ended without a reason")
        return self._fault

    def close(self) -> None:
        """Give the link up; the loop does the waiting."""
        self._closed = True
        self._work.cancel()
        self._make_room()

    async def _run(self) -> None:
        self._room = asyncio.Event()
        try:
            async with self._access.client() as client:
                receiving = client.receive_batch(
                    self._arrived,
                    partition_id=self._partition,
                    owner_level=self._epoch,
                    prefetch=self._prefetch,
                    max_batch_size=self._prefetch,
                    starting_position=self._start.at,
                    starting_position_inclusive=self._start.inclusive,
                    on_error=self._failed,
                )
                self._receiving = asyncio.create_task(receiving)
                await self._receiving
        except Exception as error:  # noqa: BLE001  whatever ends a receiver is for its reader to explain
            self._fault = self._fault or error

    async def _arrived(self, _context: object, events: list[EventData]) -> None:
        # Made at once: the event is in the processor's cache, and this thread is busy in any case.
        self._inbox.append([record(event) for event in events])
        self._came += len(events)
        # The client receives no more than it was given credit for while this waits, so a slow
        # handler bounds what is in memory, and nothing but its own partition waits with it.
        while self._room is not None and self._full:
            self._room.clear()
            self._stuck = True
            if self._full:  # it may have been emptied just before the flag was raised
                await self._room.wait()
            self._stuck = False

    @property
    def _full(self) -> bool:
        # Once closed nobody empties it, and a link that broke meanwhile would leave its task waiting for ever.
        return 2 * (self._came - self._taken) >= self._prefetch and not self._closed

    def _make_room(self) -> None:
        # Waking the loop for nothing would cost as much as the events of a small batch.
        if self._room is not None and self._stuck:
            self._background.soon(self._room.set)

    async def _failed(self, _context: object, error: Exception) -> None:
        self._fault = error
        # By default the client would wait half a minute and then open the link again by itself,
        # from where it first started.
        if self._receiving is not None:
            self._receiving.cancel()


IDLE_SECONDS, IDLE_SECONDS_MOST = 0.05, 0.5
FAULT_SECONDS, FAULT_SECONDS_MOST = 1.0, 30.0

HEARD_SECONDS = 8.0
"""A quiet link is a reading for so long after the service was heard: short, so that a status soon follows a fault."""

ASK_SECONDS = 20.0
"""A service that has said nothing of a partition for so long is asked: one request for each, at rest."""

LATE_SECONDS = 2 * ANSWER_SECONDS
"""A link that has not brought for so long what the service says is there is opened again: to open one takes about twice
as long as such an answer, which may take `ANSWER_SECONDS`."""

CONTENDED_SECONDS = 10.0
"""Before a link is taken back: longer than a worker needs to learn that its lease is gone."""


class PartitionReader:
    """Reads one partition from just after `start`.

    A reading takes what has already arrived. Faults that may pass come back as an empty batch with a
    longer wait, after which the partition is opened again just after the last record handed out.
    """

    def __init__(
        self,
        background: Background,
        access: Access,
        partition: str,
        start: Position,
        *,
        epoch: int | None,
        prefetch: int,
        clock: Callable[[], float] = seconds,
    ) -> None:
        self._background, self._access, self._partition = background, access, partition
        self._epoch, self._prefetch, self._clock = epoch, prefetch, clock
        self._opening: float | None = None
        self._position, self._had = start, Had.of(start)
        self._last = int(start.sequence) if start.numbered else -1
        self._idle = IDLE_SECONDS
        self._backoff = Backoff(FAULT_SECONDS, FAULT_SECONDS_MOST, random.uniform)
        self._behind: float | None = None
        self._refused = ""
        self._heard = self._asked_at = clock()
        self._told = self._heard  # that the link is being opened is no answer
        self._asked: Future[int] | None = None
        self._owed: tuple[int, float] | None = None
        self._feed: PartitionReceiver | None = self._opened()

    def read(self) -> Batch:
        """The events that have arrived since, at once. Raises SourceError if trying again cannot help."""
        self._feed = feed = self._feed or self._opened()
        records = feed.take()
        if records:
            return self._batch(records)
        fault = feed.fault
        return self._waiting() if fault is None else self._again(fault)

    def close(self) -> None:
        """Give the link up."""
        if self._asked is not None:
            self._asked.cancel()
            self._asked = None
        if self._feed is not None:
            self._feed.close()

    def _opened(self) -> PartitionReceiver:
        self._opening = self._clock()
        start = starting(self._position)
        return PartitionReceiver(
            self._background, self._access, self._partition, start, epoch=self._epoch, prefetch=self._prefetch
        )

    def _batch(self, came: list[Record]) -> Batch:
        # What was done can only come first: a partition's numbers rise.
        records = tuple(dropwhile(lambda record: int(record.sequence_number) <= self._last, came))
        if records:
            # The service numbers each partition's events without a gap, and begins at the oldest it has kept.
            gone = int(records[0].sequence_number) - self._last - 1
            if self._last >= 0 and gone > 0:
                log.error("%s: %d events behind number %d are gone, past retention", self._where, gone, self._last)
            last = records[-1]
            # Without what was had before of Spark's sinks, each with what its position carries along.
            new = list[Record]()
            for each in records:
                tag = tag_of(each.event)
                if tag is None or not self._had.again(tag, lambda: 0, each.position):
                    new.append(each._replace(token=f"{each.token} {self._had.token}") if self._had else each)
            records = tuple(new)
            token = f"{last.token} {self._had.token}" if self._had else last.token
            self._last, self._position = int(last.sequence_number), evolve(last.position, token=token)
        self._idle = IDLE_SECONDS
        # The age of what was read last, by this machine's clock.
        arrived = came[-1].arrived
        self._behind = None if arrived is None else max(0.0, time.time() - arrived)
        self._hear(self._clock())
        self._backoff.reset()
        in_columns = partial(rows_in_columns, _COLUMNS, self._partition)
        opening, self._opening = self._opening, None
        unlinked = 0.0 if opening is None else self._clock() - opening
        return Batch(
            records,
            self._position,
            self._behind,
            wait_seconds=0.0,
            in_columns=in_columns,
            unlinked_seconds=unlinked,
            undecided=self._had.undecided(),
        )

    @property
    def _where(self) -> str:
        return f"event hub {self._access.hub!r}, partition {self._partition}"

    def _waiting(self) -> Batch:
        now = self._clock()
        if self._asked is None and now - max(self._heard, self._asked_at) > ASK_SECONDS:
            self._asked, self._asked_at = self._background.start(self._last_enqueued()), now
        if self._asked is not None and (self._asked.done() or now - self._asked_at > ANSWER_SECONDS):
            # Without an answer the link stays: a slow service may be just about to open it.
            asked, self._asked = self._asked, None
            if asked.cancel():
                error: BaseException | None = TimeoutError(f"no answer within {ANSWER_SECONDS:g} s")
            else:
                error = asked.exception()
            if error is not None:
                self._refused = str(explained(error, self._access, self._partition))
                log.warning("%s", self._refused)
            elif asked.result() > self._last:
                self._owed = self._owed or (asked.result(), now)
            else:
                self._hear(now)
                if self._position.sequence != "AT_TIMESTAMP":
                    self._behind = 0.0  # the link owes nothing
        if self._owed is not None and now - self._owed[1] > LATE_SECONDS:
            return self._again(ConnectionError(f"its link brings nothing, and event {self._owed[0]} is there"))
        wait, self._idle = self._idle, min(2 * self._idle, IDLE_SECONDS_MOST)
        silence, fault = now - self._heard, ""
        if silence > HEARD_SECONDS:
            fault = f"{self._refused or self._where}: nothing was heard of it for {silence:.0f} s"
        told, self._told = self._told, self._heard
        behind = None if self._behind is None or fault else 0.0
        return Batch((), None, behind, wait, fault=fault, answered=self._heard > told)

    def _hear(self, now: float) -> None:
        self._heard, self._refused, self._owed = now, "", None

    async def _last_enqueued(self) -> int:
        """The number of the last event that the link owes us; -1 if it owes none as far as numbers tell."""
        async with self._access.client() as client:
            told = await client.get_partition_properties(self._partition)
        # Of a reader that begins at a time nobody knows which events come, until one has.
        unknown = self._position.sequence == "AT_TIMESTAMP" or told["is_empty"]
        return -1 if unknown else int(told["last_enqueued_sequence_number"])

    def _again(self, fault: BaseException) -> Batch:
        why = explained(fault, self._access, self._partition)
        self.close()
        self._feed = self._owed = None
        if not isinstance(why, SourceUnavailable):
            raise why from fault
        wait = CONTENDED_SECONDS if isinstance(why, Contended) else self._backoff.next()
        log.warning("%s; trying again in %.1f s", why, wait)
        unlinked = math.inf if isinstance(why, Contended) else 0.0
        return Batch((), None, None, wait, fault=str(why), unlinked_seconds=unlinked)


DEFAULT_GROUP = "$Default"
PREFETCH = 1000
PREFETCH_MOST = 10_000
TRANSPORTS = ("amqp", "websockets")

_STRANGE = (
    "lease {!r}: the hub and group it names is {}, not {}: "
    "give each group of each hub a table, a container or a prefix of its own"
)


class EventHubsSource:
    """An event hub as a consumer group reads it.

    access     how the hub is reached
    exclusive  whether a partition's reader drives out all others, as the owner of its lease does
    """

    def __init__(self, access: Access, prefetch: int = PREFETCH, *, exclusive: bool = True) -> None:
        self.access, self._prefetch, self._exclusive = access, prefetch, exclusive
        self._background = Background()
        self._made: datetime | None = None

    @property
    def stream(self) -> str:
        """Namespace, hub and group, in lower case."""
        return self.access.stream

    def reads(self, lease: Lease) -> bool:
        """True. Raises SourceError for a lease of another hub or group, whose partitions have the same ids."""
        if lease.stream != self.stream:
            raise SourceError(_STRANGE.format(lease.key, lease.stream or "none", self.stream))
        return True

    def shards(self) -> tuple[Shard, ...]:
        """Every partition, those added at run time included, by number. Raises SourceUnavailable or SourceError."""
        found = self._ask(lambda client: client.get_eventhub_properties())
        self._made = found["created_at"]
        ids = sorted(found["partition_ids"], key=lambda each: (len(each), each))
        return tuple(Shard(each, stream=self.stream) for each in ids)

    def incarnation(self) -> str:
        """Namespace, hub and group, and when the hub was made, as the last listing told."""
        return "" if self._made is None else f"{self.stream}:{int(self._made.timestamp())}"

    def gone(self, shard: str) -> bool:
        """Ask the hub whether it lacks this partition: another hub of its name has fewer."""
        return all(each.id != shard for each in self.shards())

    def latest(self, lease: Lease) -> Position:
        """The last event enqueued now; of a partition that never had one, the beginning of time.

        Raises SourceUnavailable or SourceError.
        """
        told = self._properties(lease.shard)
        last = int(told["last_enqueued_sequence_number"])
        # An empty partition must not be pinned to the time of day: clocks differ, and the first events could fall into
        # the difference.
        return at_timestamp(0) if last < 0 else Position(str(last), token=str(told["last_enqueued_offset"]))

    def settled(self, lease: Lease, until: float) -> Settled | None:
        """The last event that is kept, and when it was enqueued, once that time is well past.

        It is past by this machine's clock: the service tells none.
        """
        if time.time() < until + SETTLE_SECONDS:
            return None
        told = self._properties(lease.shard)
        if told["is_empty"]:
            return Settled(TRIM_HORIZON)
        number, enqueued = told["last_enqueued_sequence_number"], told["last_enqueued_time_utc"]
        return Settled(Position(str(number)), enqueued.timestamp())

    def _properties(self, partition: str) -> Any:  # noqa: ANN401  the client's own
        return self._ask(lambda client: client.get_partition_properties(partition), partition)

    def _ask(self, question: Callable[[EventHubConsumerClient], Awaitable[Mapping[str, Any]]], *about: str) -> Any:  # noqa: ANN401  each question has an answer of its own
        async def asked() -> Mapping[str, Any]:
            async with self.access.client() as client:
                return await question(client)

        try:
            return self._background.ask(asked())
        except _FAULTS as error:
            raise explained(error, self.access, *about) from error

    def open(self, lease: Lease, start: Position) -> PartitionReader:
        """A reader that starts just after `start`; the lease's epoch is its owner level."""
        epoch = lease.epoch if self._exclusive else None
        return PartitionReader(self._background, self.access, lease.shard, start, epoch=epoch, prefetch=self._prefetch)

    def close(self) -> None:
        """Close all connections."""
        self._background.close()


def open_url(place: str, options: Mapping[str, str]) -> EventHubsSource:
    """The source at `namespace/hub`.

    The options are group (default $Default), transport (amqp, or websockets where only port 443 is open), proxy (with
    websockets, in place of HTTPS_PROXY) and prefetch (events). The key comes from the connection string in the
    environment; without one, the identity of this machine or user is asked for. Raises ValueError, SourceError.
    """
    namespace, slash, hub = place.partition("/")
    if not (namespace and slash and hub) or "/" in hub:
        raise ValueError("eventhubs URL: write eventhubs://namespace/hub")
    group = options.get("group", DEFAULT_GROUP)
    if not group:
        raise ValueError("eventhubs URL: 'group' is empty; in a shell, $Default wants single quotes around the URL")
    transport = options.get("transport", "amqp")
    if transport not in TRANSPORTS:
        raise ValueError(f"eventhubs URL: transport is one of {', '.join(TRANSPORTS)}, not {transport!r}")
    prefetch = decimal(text := options.get("prefetch", str(PREFETCH)), PREFETCH_MOST)
    if not prefetch:
        raise ValueError(f"eventhubs URL: prefetch is a number from 1 to {PREFETCH_MOST}, not {text!r}")
    place_of = full_namespace(namespace), hub, group
    proxy = options.get("proxy", "")
    if proxy and "@" in proxy:
        raise ValueError("eventhubs URL: proxy: credentials do not belong in it; set HTTPS_PROXY in the environment")
    if proxy and transport != "websockets":
        raise ValueError("eventhubs URL: proxy goes with transport=websockets: AMQP itself passes no HTTP proxy")
    if transport == "websockets":
        http_proxy_of(place_of[0], proxy)  # reports a bad address now, and not at the first connection
    ways: dict[str, Any] = {"websockets": transport == "websockets", "proxy": proxy}
    if secret := os.environ.get(CONNECTION_STRING):
        return EventHubsSource(by_connection_string(secret, *place_of, **ways), prefetch)
    try:
        return EventHubsSource(by_identity(*place_of, **ways), prefetch)
    except ModuleNotFoundError as missing:
        what = f"{CONNECTION_STRING} is not set, and signing in without it needs azure-identity"
        raise SourceError(what) from missing
