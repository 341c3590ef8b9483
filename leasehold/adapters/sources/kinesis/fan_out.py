"""Reads one shard by enhanced fan-out: the service pushes records, at 2 MiB/s for this consumer alone.

All readers of a stream share one registered consumer, which is found by name or registered. A stream can have 20
consumers (50 in the most expensive mode of Kinesis). If there is no room for ours, readers poll instead.

Each subscribed shard has a thread of its own, separate from the pool that dispatches records. boto3 can read an event
stream only by blocking on it, for up to five minutes at a time, and forty waiting shards would occupy the whole pool.
The thread buffers a few events until the shard's reader takes them.

Rule 1: A subscription lasts five minutes at most. The next one starts AT the continuation number of the last event
taken, and records already returned are dropped, so there are neither gaps nor duplicates.

Rule 2: A shard is not subscribed to again within five seconds of the last subscription, because the service would
reject it.

Rule 3: A shard has ended when the service names its children and sends no more records. The end of a connection does
not mean the end of the shard.

Rule 4: If the next event of a subscription does not arrive in time, the next subscription gets a longer timeout.
"""

import logging
import math
import re
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from threading import Event, Lock, Semaphore
from typing import TYPE_CHECKING, cast

from botocore.eventstream import ParserError
from botocore.exceptions import ClientError
from botocore.parsers import ResponseParserError
from urllib3.exceptions import HTTPError, ReadTimeoutError

from leasehold.adapters.sources.call_patience import CallPatience
from leasehold.adapters.sources.kinesis.aggregation.decode import Misplaced
from leasehold.adapters.sources.kinesis.clients import KinesisClients
from leasehold.adapters.sources.kinesis.faults import PollPace, code_of, said_plainly
from leasehold.adapters.sources.kinesis.poller import Poller
from leasehold.adapters.threads import spawn
from leasehold.balancer.model import HashRange, Position
from leasehold.errors import SourceUnavailable
from leasehold.stores.printable import escaped, said

if TYPE_CHECKING:  # the stubs are not installed for users
    from botocore.eventstream import EventStream
    from types_boto3_kinesis import KinesisClient
    from types_boto3_kinesis.type_defs import (
        GetRecordsOutputTypeDef,
        SubscribeToShardEventStreamTypeDef,
        SubscribeToShardEventTypeDef,
    )

    Stream = EventStream[SubscribeToShardEventStreamTypeDef]

log = escaped(logging.getLogger("leasehold.kinesis"))

EVENTS_WAITING = 2


class SubscriptionReceiver:
    """Receives events until the service ends the subscription, something breaks, or it is closed.

    Args:
        subscribe: Makes the request. It is called in the thread, because it waits for the response.
        clock: Returns monotonic seconds.
    """

    def __init__(self, subscribe: Callable[[], "Stream"], clock: Callable[[], float] = time.monotonic) -> None:
        self._subscribe, self._clock = subscribe, clock
        self._inbox: deque[SubscribeToShardEventTypeDef] = deque()
        self._room = Semaphore(EVENTS_WAITING)
        self._stream: Stream | None = None
        self._closed = Event()
        self.began: float | None = None
        self.fault: Exception | None = None
        self._thread = spawn("leasehold-fan-out", self._run, self._failed)

    @property
    def over(self) -> bool:
        """Whether no more events will arrive. Events that arrived before may still be in the inbox."""
        return not self._thread.is_alive()

    def take(self) -> "SubscribeToShardEventTypeDef | None":
        """Return the first event in the inbox, or None."""
        if not self._inbox:
            return None
        event = self._inbox.popleft()
        self._room.release()
        return event

    def close(self) -> None:
        """Give up the subscription without waiting for its thread."""
        self._closed.set()
        self._room.release()
        # The thread waits for the next event, and closing the stream here would wait for it, too. Only the end of the
        # connection wakes the thread. The connection is private to the client, and `shutdown` needs urllib3 2.3.
        shutdown = getattr(getattr(self._stream, "_raw_stream", None), "shutdown", None)
        with suppress(OSError, RuntimeError, ValueError):  # the connection has ended meanwhile
            if shutdown is not None:
                shutdown()

    def _run(self) -> None:
        with closing(self._subscribe()) as stream:
            self._stream, self.began = stream, self._clock()
            if self._closed.is_set():  # closed during the request
                return
            for event in stream:
                # While this waits nothing is read, so a slow handler fills the connection and the service waits.
                self._room.acquire()
                if self._closed.is_set():
                    return
                self._inbox.append(event["SubscribeToShardEvent"])

    def _failed(self, fault: BaseException) -> None:
        # The reader handles whatever ends a subscription.
        self.fault = fault if isinstance(fault, Exception) else SourceUnavailable(said(fault))


LOOK_SECONDS = 1.0
"""The interval between two requests, however many readers wait: 20 a second are allowed on a stream."""

REFUSALS = 3
"""After this many rejections, the limit counts as permanent. One alone may be the limit of 5 registrations a second."""

_NAME = re.compile(r"arn:.+|[a-zA-Z0-9_.-]{1,128}")


class NotActiveYet(SourceUnavailable):
    """The consumer is being registered, which takes some seconds."""


class StreamConsumer:
    """A registered consumer of a stream.

    Args:
        client: The client of the service.
        stream: The name of the stream.
        name: The name of the consumer, which is registered if it does not exist, or the ARN of an existing one.
        clock: Returns monotonic seconds.
        patience: The timeouts; by default that of the client.
    """

    def __init__(
        self,
        client: "KinesisClient",
        stream: str,
        name: str,
        clock: Callable[[], float] = time.monotonic,
        *,
        patience: CallPatience | None = None,
    ) -> None:
        if not _NAME.fullmatch(name):
            raise ValueError(
                "source URL: option 'consumer' wants letters, digits, '_', '.' and '-', or a consumer's ARN"
            )
        self.name = name
        self._stream, self._clock = stream, clock
        self._patience = patience or CallPatience(KinesisClients.of(client))
        self._arn = name if name.startswith("arn:") else None
        self._refusals = 0
        self._next_look = 0.0
        self._lock = Lock()

    def arn(self) -> str | None:
        """Return the ARN of the consumer to subscribe for, or None if readers have to poll.

        Raises:
            NotActiveYet: If the consumer is still being registered.
            SourceUnavailable: If trying again later may help.
            SourceError: If trying again cannot help.
        """
        if not self._settled():
            with self._lock:  # callers that waited for the lock find the ARN settled
                if not self._settled() and self._clock() >= self._next_look:
                    self._next_look = self._clock() + LOOK_SECONDS
                    with said_plainly(self._stream):
                        self._look()
            if not self._settled():
                raise NotActiveYet(f"consumer {self.name!r} of stream {self._stream!r} is not ACTIVE yet")
        return self._arn

    def forget(self, arn: str) -> None:
        """Forget an ARN that the service no longer knows. A consumer given by name is found or registered again."""
        with self._lock:
            if arn == self._arn != self.name:
                self._arn = None

    def _settled(self) -> bool:
        return self._arn is not None or self._refusals >= REFUSALS

    def _look(self) -> None:
        summary = self._patience.call("describe_stream_summary", StreamName=self._stream)
        consumer = {"StreamARN": summary["StreamDescriptionSummary"]["StreamARN"], "ConsumerName": self.name}
        try:
            description = self._patience.call("describe_stream_consumer", **consumer)["ConsumerDescription"]
        except ClientError as unknown:
            if code_of(unknown) != "ResourceNotFoundException":
                raise
            try:
                description = self._patience.call("register_stream_consumer", **consumer)["Consumer"]
            except ClientError as refused:
                if code_of(refused) == "ResourceInUseException":  # another worker has just registered it
                    return
                if code_of(refused) != "LimitExceededException":
                    raise
                self._refusals += 1
                if self._refusals == REFUSALS:
                    text = "stream %s takes no consumer %r, so its shards are polled: %s"
                    log.warning(text, self._stream, self.name, refused)
                return
        if description["ConsumerStatus"] == "ACTIVE":
            self._arn = description["ConsumerARN"]


APART_SECONDS = 5.0
CONTENDED_SECONDS = 10.0
"""How long to wait before taking back a subscription that another reader took over. It takes less to learn that the
lease is lost."""

READER_LOOK_SECONDS, LOOK_SECONDS_MOST = 0.01, 0.1
"""The shortest and the longest interval between two looks at the inbox, which cost no request."""

_SUBSCRIBE = "subscribe_to_shard"
_TAKEN = (
    "another subscription of consumer {!r} to shard {} began less than five seconds ago or took over; "
    "two fleets want two consumers"
)


class FanOut(Poller):
    """A reader of one shard, which polls if the stream has no room for the consumer."""

    def __init__(
        self,
        client: "KinesisClient",
        stream: str,
        shard: str,
        start: Position,
        hash_range: HashRange | None,
        *,
        consumer: StreamConsumer,
        misplaced: Misplaced = "keep",
        whole: bool = False,
        rewind: bool = False,
        pace: PollPace | None = None,
        patience: CallPatience | None = None,
        most: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(
            client,
            stream,
            shard,
            start,
            hash_range,
            misplaced=misplaced,
            whole=whole,
            rewind=rewind,
            pace=pace,
            patience=patience,
            most=most,
        )
        self._subscribing = self._patience.of_subscriptions()
        self._consumer, self._clock = consumer, clock
        self._arn: str | None = None
        self._feed: SubscriptionReceiver | None = None
        self._continuation: str | None = None
        self._before: str | None = None
        self._not_before = -math.inf
        self._look = READER_LOOK_SECONDS

    def close(self) -> None:
        """Give up the subscription."""
        super().close()
        if self._feed is not None:
            self._feed.close()

    def _ask(self) -> "GetRecordsOutputTypeDef | None":
        try:
            self._arn = self._consumer.arn()
        except NotActiveYet as wait:
            log.info("shard %s waits: %s", self._shard, wait)
            return None
        if self._arn is None:
            return super()._ask()
        if self._feed is None:
            if self._clock() < self._not_before:  # rule 2
                return None
            start = self._place()
            if self._continuation is not None:  # rule 1
                start = {"Type": "AT_SEQUENCE_NUMBER", "SequenceNumber": self._continuation}
            subscribe = partial(
                self._subscribing.call, _SUBSCRIBE, ConsumerARN=self._arn, ShardId=self._shard, StartingPosition=start
            )
            self._feed = SubscriptionReceiver(lambda: subscribe()["EventStream"], self._clock)
        over = self._feed.over  # must be read before `take`: if it is over, every event is already in the inbox
        event = self._feed.take()
        if event is not None:
            self._before, self._continuation = self._continuation, event.get("ContinuationSequenceNumber") or None
            records, children = event.get("Records"), event.get("ChildShards") or []
            ended = self._continuation is None or (bool(children) and not records)  # rule 3
            body = {"Records": records, "MillisBehindLatest": event.get("MillisBehindLatest"), "ChildShards": children}
            # In the form of a response of GetRecords.
            return cast("GetRecordsOutputTypeDef", body | {"NextShardIterator": None if ended else self._continuation})
        if over:
            self._end(self._feed)
        return None

    def _ask_again(self) -> None:
        """Drop the subscription, so that the next one starts before the event that could not be read.

        The current subscription would continue after that event.
        """
        if self._feed is not None:
            self._feed.close()
            self._leave(self._feed)
            self._continuation = self._before

    def _leave(self, feed: SubscriptionReceiver) -> None:
        self._feed = self._iterator = None
        if feed.began is not None:
            self._not_before = feed.began + APART_SECONDS  # rule 2
        if self._read is not None:
            self._done = Position(self._read, sys.maxsize).order  # rule 1

    def _end(self, feed: SubscriptionReceiver) -> None:
        """Leave a subscription that is over. Raise SourceUnavailable or SourceError unless it expired or timed out."""
        self._leave(feed)
        match feed.fault:
            case None:
                log.debug("shard %s: its subscription ended", self._shard)
                self._subscribing = self._patience.of_subscriptions()
            case ReadTimeoutError():
                waited = self._subscribing.seconds(_SUBSCRIBE)
                longer = self._subscribing.exceeded(_SUBSCRIBE, waited)  # rule 4
                log.info("shard %s: nothing came for %g s; the next is given %g s", self._shard, waited, longer)
            case HTTPError() | ParserError() | ResponseParserError() as fault:
                raise SourceUnavailable(f"shard {self._shard}: its subscription broke off: {fault}") from fault
            case ClientError() as fault if code_of(fault) == "ResourceInUseException":
                # If it had begun, another reader took over. If it was rejected at once, try again when rule 2 allows.
                if feed.began is not None:
                    self._not_before = self._clock() + CONTENDED_SECONDS
                raise SourceUnavailable(_TAKEN.format(self._consumer.name, self._shard)) from fault
            case fault:
                with said_plainly(self._stream):
                    if not isinstance(fault, ClientError):
                        raise fault
                    if code_of(fault) == "ResourceNotFoundException":
                        self._consumer.forget(self._arn or "")  # the shard is gone, or the consumer was deregistered
                    self._rewind_from(fault)  # raises any error that does not mean a trimmed start

    def _wait(self, *, idle: bool, behind: bool = False) -> float:
        if self._arn is None:
            return super()._wait(idle=idle, behind=behind)
        wait, self._look = (self._look, min(2 * self._look, LOOK_SECONDS_MOST)) if idle else (0.0, READER_LOOK_SECONDS)
        return wait
