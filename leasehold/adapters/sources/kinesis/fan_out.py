"""Reads one shard by enhanced fan-out, in which the service pushes records, and each consumer has its own 2 MiB/s.

All readers of a stream share one registered consumer. It is looked up by name, and registered if it does not exist. A
stream can have 20 consumers (50 in the most expensive mode of Kinesis). If our consumer cannot be registered because of
this limit, the readers poll instead.

Each subscribed shard has its own thread, outside the pool that dispatches records. boto3 can read an event stream only
by blocking for up to five minutes, so forty waiting shards would occupy all threads of the pool. The shard's thread
buffers a few events until the reader takes them.

Rule 1: A subscription lasts five minutes at most. The next one starts AT the continuation number of the last event
taken, and records already returned are dropped, so there are neither gaps nor duplicates.

Rule 2: Two subscriptions to a shard start at least five seconds apart. Otherwise, the service would reject the second
one.

Rule 3: A shard has ended when an event contains its child shards and no records, or no continuation number. The end of
a connection does not mean that the shard has ended.

Rule 4: If the next event of a subscription does not arrive in time, the next subscription has a longer timeout.
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

from leasehold.adapters.sources.call_timeouts import CallTimeouts
from leasehold.adapters.sources.kinesis.aggregation.decode import Misplaced
from leasehold.adapters.sources.kinesis.clients import KinesisClients
from leasehold.adapters.sources.kinesis.faults import PollPace, error_code, translate_errors
from leasehold.adapters.sources.kinesis.poller import Poller
from leasehold.adapters.threads import spawn
from leasehold.balancer.model import HashRange, Position
from leasehold.errors import SourceUnavailable
from leasehold.stores.printable import error_summary, make_safe_logger

if TYPE_CHECKING:  # the stubs are not installed for users
    from botocore.eventstream import EventStream
    from types_boto3_kinesis import KinesisClient
    from types_boto3_kinesis.type_defs import (
        GetRecordsOutputTypeDef,
        SubscribeToShardEventStreamTypeDef,
        SubscribeToShardEventTypeDef,
    )

    Stream = EventStream[SubscribeToShardEventStreamTypeDef]

log = make_safe_logger(logging.getLogger("leasehold.kinesis"))

MAX_BUFFERED_EVENTS = 2


class SubscriptionReceiver:
    """Receives events until the service ends the subscription, an error occurs, or `close` is called.

    Args:
        subscribe: Makes the request and returns the event stream. It is called in the receiver's thread, because it
            blocks.
        clock: Returns the time of a monotonic clock, in seconds.
    """

    def __init__(self, subscribe: Callable[[], "Stream"], clock: Callable[[], float] = time.monotonic) -> None:
        self._subscribe, self._clock = subscribe, clock
        self._inbox: deque[SubscribeToShardEventTypeDef] = deque()
        self._free_slots = Semaphore(MAX_BUFFERED_EVENTS)
        self._stream: Stream | None = None
        self._closed = Event()
        self.subscribed_at: float | None = None
        self.fault: Exception | None = None
        self._thread = spawn("leasehold-fan-out", self._receive_events, self._on_error)

    @property
    def has_ended(self) -> bool:
        """Whether no more events will arrive. The inbox may still contain events."""
        return not self._thread.is_alive()

    def take_event(self) -> "SubscribeToShardEventTypeDef | None":
        """Return the first event in the inbox, or None."""
        if not self._inbox:
            return None
        event = self._inbox.popleft()
        self._free_slots.release()
        return event

    def close(self) -> None:
        """Give up the subscription without waiting for its thread."""
        self._closed.set()
        self._free_slots.release()
        # The thread is blocked until the next event, and closing the stream here would block, too. Only a shutdown of
        # the connection wakes the thread. boto3 has the connection in a private attribute, and `shutdown` needs urllib3
        # 2.3.
        shut_down_connection = getattr(getattr(self._stream, "_raw_stream", None), "shutdown", None)
        with suppress(OSError, RuntimeError, ValueError):  # the connection has already ended
            if shut_down_connection is not None:
                shut_down_connection()

    def _receive_events(self) -> None:
        with closing(self._subscribe()) as stream:
            self._stream, self.subscribed_at = stream, self._clock()
            if self._closed.is_set():  # closed during the request
                return
            for event in stream:
                # While this thread waits for a free slot, it does not read from the connection, so the service stops
                # sending.
                self._free_slots.acquire()
                if self._closed.is_set():
                    return
                self._inbox.append(event["SubscribeToShardEvent"])

    def _on_error(self, fault: BaseException) -> None:
        # The reader handles any error that ends a subscription.
        self.fault = fault if isinstance(fault, Exception) else SourceUnavailable(error_summary(fault))


DESCRIBE_SECONDS = 1.0
"""The shortest interval between two requests about the consumer, for all readers together. A stream allows 20 such
requests per second."""

MAX_REJECTIONS = 3
"""After this many rejected registrations, we assume that the stream has no room for another consumer. A single
rejection may be due to the limit of five registrations per second."""

_NAME_PATTERN = re.compile(r"arn:.+|[a-zA-Z0-9_.-]{1,128}")


class NotActiveYet(SourceUnavailable):
    """The consumer is being registered, which takes some seconds."""


class StreamConsumer:
    """A registered consumer of a stream.

    Args:
        client: The client of the service.
        stream: The name of the stream.
        name: The name of the consumer, which is registered if it does not exist, or the ARN of an existing consumer.
        clock: Returns the time of a monotonic clock, in seconds.
        timeouts: The timeouts; by default those of the client.
    """

    def __init__(
        self,
        client: "KinesisClient",
        stream: str,
        name: str,
        clock: Callable[[], float] = time.monotonic,
        *,
        timeouts: CallTimeouts | None = None,
    ) -> None:
        if not _NAME_PATTERN.fullmatch(name):
            raise ValueError(
                "source URL: option 'consumer' must be letters, digits, '_', '.' and '-', or a consumer's ARN"
            )
        self.name = name
        self._stream, self._clock = stream, clock
        self._timeouts = timeouts or CallTimeouts(KinesisClients.of(client))
        self._arn = name if name.startswith("arn:") else None
        self._rejections = 0
        self._next_check = 0.0
        self._lock = Lock()

    def find_arn(self) -> str | None:
        """Return the ARN of the consumer. If the stream has no room for the consumer, return None: readers then poll.

        Raises:
            NotActiveYet: If the consumer is still being registered.
            SourceUnavailable: If the service does not respond or throttles the request. A later attempt may succeed.
            SourceError: If the service rejects the request, for example because of wrong credentials.
        """
        if not self._is_resolved():
            with self._lock:  # another thread may have found the ARN while this one waited for the lock
                if not self._is_resolved() and self._clock() >= self._next_check:
                    self._next_check = self._clock() + DESCRIBE_SECONDS
                    with translate_errors(self._stream):
                        self._find_or_register_consumer()
            if not self._is_resolved():
                raise NotActiveYet(f"consumer {self.name!r} of stream {self._stream!r} is not ACTIVE yet")
        return self._arn

    def forget_arn(self, arn: str) -> None:
        """Forget an ARN that the service no longer knows. A consumer given by name is found or registered again."""
        with self._lock:
            if arn == self._arn != self.name:
                self._arn = None

    def _is_resolved(self) -> bool:
        return self._arn is not None or self._rejections >= MAX_REJECTIONS

    def _find_or_register_consumer(self) -> None:
        summary = self._timeouts.call("describe_stream_summary", StreamName=self._stream)
        consumer_parameters = {"StreamARN": summary["StreamDescriptionSummary"]["StreamARN"], "ConsumerName": self.name}
        try:
            description = self._timeouts.call("describe_stream_consumer", **consumer_parameters)["ConsumerDescription"]
        except ClientError as describe_error:
            if error_code(describe_error) != "ResourceNotFoundException":
                raise
            try:
                description = self._timeouts.call("register_stream_consumer", **consumer_parameters)["Consumer"]
            except ClientError as register_error:
                if error_code(register_error) == "ResourceInUseException":  # another worker has just registered it
                    return
                if error_code(register_error) != "LimitExceededException":
                    raise
                self._rejections += 1
                if self._rejections == MAX_REJECTIONS:
                    message = "stream %s has no room for consumer %r, so its shards are polled: %s"
                    log.warning(message, self._stream, self.name, register_error)
                return
        if description["ConsumerStatus"] == "ACTIVE":
            self._arn = description["ConsumerARN"]


RESUBSCRIBE_SECONDS = 5.0
TAKEN_OVER_PAUSE_SECONDS = 10.0
"""How long to wait before subscribing again after another reader took over the subscription. If the lease was lost, the
worker notices this earlier."""

INBOX_CHECK_SECONDS, INBOX_CHECK_SECONDS_MAX = 0.01, 0.1
"""The shortest and the longest interval between two checks of the inbox. A check makes no request."""

_SUBSCRIBE_OPERATION = "subscribe_to_shard"
_TAKEN_OVER_MESSAGE = (
    "another subscription of consumer {!r} to shard {} began less than five seconds ago or took over; "
    "separate fleets need separate consumers"
)


class FanOut(Poller):
    """A reader of one shard by enhanced fan-out, or by polling if the stream has no room for the consumer."""

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
        whole_aggregates: bool = False,
        rewind: bool = False,
        pace: PollPace | None = None,
        timeouts: CallTimeouts | None = None,
        max_records: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(
            client,
            stream,
            shard,
            start,
            hash_range,
            misplaced=misplaced,
            whole_aggregates=whole_aggregates,
            rewind=rewind,
            pace=pace,
            timeouts=timeouts,
            max_records=max_records,
        )
        self._subscription_timeouts = self._timeouts.timeouts_for_subscriptions()
        self._consumer, self._clock = consumer, clock
        self._arn: str | None = None
        self._subscription: SubscriptionReceiver | None = None
        self._continuation: str | None = None
        self._previous_continuation: str | None = None
        self._subscribe_after = -math.inf
        self._inbox_pause = INBOX_CHECK_SECONDS

    def close(self) -> None:
        super().close()
        if self._subscription is not None:
            self._subscription.close()

    def _request(self) -> "GetRecordsOutputTypeDef | None":
        try:
            self._arn = self._consumer.find_arn()
        except NotActiveYet as not_active:
            log.info("shard %s: not subscribed yet: %s", self._shard, not_active)
            return None
        if self._arn is None:
            self._close_subscription()  # there is one if the consumer was deregistered, and there is no room for it now
            return super()._request()
        if self._subscription is None:
            if self._clock() < self._subscribe_after:  # rule 2
                return None
            starting_position = self._starting_position()
            if self._continuation is not None:  # rule 1
                starting_position = {"Type": "AT_SEQUENCE_NUMBER", "SequenceNumber": self._continuation}
            subscribe = partial(
                self._subscription_timeouts.call,
                _SUBSCRIBE_OPERATION,
                ConsumerARN=self._arn,
                ShardId=self._shard,
                StartingPosition=starting_position,
            )
            self._subscription = SubscriptionReceiver(lambda: subscribe()["EventStream"], self._clock)
        # Read `has_ended` before calling `take_event`. If it is true, `take_event` then returns all remaining events.
        subscription_ended = self._subscription.has_ended
        event = self._subscription.take_event()
        if event is not None:
            self._previous_continuation = self._continuation
            self._continuation = event.get("ContinuationSequenceNumber") or None
            records, children = event.get("Records"), event.get("ChildShards") or []
            has_shard_ended = self._continuation is None or (bool(children) and not records)  # rule 3
            response_body = {
                "Records": records,
                "MillisBehindLatest": event.get("MillisBehindLatest"),
                "ChildShards": children,
            }
            # Return the event in the form of a GetRecords response, which is what the poller expects.
            return cast(
                "GetRecordsOutputTypeDef",
                response_body | {"NextShardIterator": None if has_shard_ended else self._continuation},
            )
        if subscription_ended:
            self._end_subscription(self._subscription)
        return None

    def _reset_request(self) -> None:
        """Drop the subscription. The next one starts before the event that could not be parsed."""
        if self._subscription is not None:
            self._close_subscription()
            self._continuation = self._previous_continuation

    def _close_subscription(self) -> None:
        if self._subscription is not None:
            self._subscription.close()
            self._drop_subscription(self._subscription)

    def _drop_subscription(self, subscription: SubscriptionReceiver) -> None:
        self._subscription = self._iterator = None
        if subscription.subscribed_at is not None:
            self._subscribe_after = subscription.subscribed_at + RESUBSCRIBE_SECONDS  # rule 2
        if self._last_read is not None:
            self._skip_through = Position(self._last_read, sys.maxsize).order  # rule 1

    def _end_subscription(self, subscription: SubscriptionReceiver) -> None:
        """Discard a subscription that has ended.

        Raise SourceUnavailable or SourceError if a fault ended the subscription, but not if it expired or timed out.
        """
        self._drop_subscription(subscription)
        match subscription.fault:
            case None:
                log.debug("shard %s: its subscription ended", self._shard)
                self._subscription_timeouts = self._timeouts.timeouts_for_subscriptions()
            case ReadTimeoutError():
                timeout = self._subscription_timeouts.timeout_for(_SUBSCRIBE_OPERATION)
                next_timeout = self._subscription_timeouts.lengthen_timeout(_SUBSCRIBE_OPERATION, timeout)  # rule 4
                log.info(
                    "shard %s: no event for %g s; the timeout of the next subscription is %g s",
                    self._shard,
                    timeout,
                    next_timeout,
                )
            case HTTPError() | ParserError() | ResponseParserError() as fault:
                raise SourceUnavailable(f"shard {self._shard}: its subscription failed: {fault}") from fault
            case ClientError() as fault if error_code(fault) == "ResourceInUseException":
                # If the subscription had started, another reader took over. If it was rejected, try again as soon as
                # rule 2 allows.
                if subscription.subscribed_at is not None:
                    self._subscribe_after = self._clock() + TAKEN_OVER_PAUSE_SECONDS
                raise SourceUnavailable(_TAKEN_OVER_MESSAGE.format(self._consumer.name, self._shard)) from fault
            case fault:
                with translate_errors(self._stream):
                    if not isinstance(fault, ClientError):
                        raise fault
                    if error_code(fault) == "ResourceNotFoundException":
                        # The shard is gone, or the consumer was deregistered.
                        self._consumer.forget_arn(self._arn or "")
                    self._rewind_from(fault)  # raises any error that does not mean a trimmed start

    def _pause(self, *, idle: bool, behind: bool = False) -> float:
        if self._arn is None:
            return super()._pause(idle=idle, behind=behind)
        wait_seconds, self._inbox_pause = (
            (self._inbox_pause, min(2 * self._inbox_pause, INBOX_CHECK_SECONDS_MAX))
            if idle
            else (0.0, INBOX_CHECK_SECONDS)
        )
        return wait_seconds
