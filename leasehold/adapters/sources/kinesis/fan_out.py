"""Reads one shard by enhanced fan-out: the service sends what is written, at 2 MiB/s for this consumer alone.

A stream's registered consumer is found by name, or registered, and shared by all readers of the stream. Kinesis lets a
stream have 20 of them (50 in its costliest mode); where there is no room, readers poll instead. Each subscribed shard
has a thread, beside the pool that hands records over: boto3 can read an event stream only by waiting for it, for up to
five minutes at a time, and forty waiting shards would occupy the whole pool. The thread keeps a few events until the
shard's reader takes them.

Rule 1: a subscription lasts five minutes at most; the next one begins AT the continuation number of the last event
taken, and records already handed over are dropped, so that neither a gap nor a repetition can come of it.
Rule 2: no shard is subscribed to again within five seconds of the last time, which the service would refuse.
Rule 3: a shard has ended when the service names its children and has no more records; the end of a connection
does not mean the end of the shard.
Rule 4: a subscription whose next event did not come in time is followed by one that is given longer.
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

if TYPE_CHECKING:  # the stubs are no dependency of a user
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
    """Receives until the service ends the subscription, or something breaks, or it is closed.

    subscribe  asks the service; called in the thread, since it waits for the answer
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
        """Whether nothing more will arrive; what has arrived may still wait."""
        return not self._thread.is_alive()

    def take(self) -> "SubscribeToShardEventTypeDef | None":
        """The first event that waits, or None."""
        if not self._inbox:
            return None
        event = self._inbox.popleft()
        self._room.release()
        return event

    def close(self) -> None:
        """Give the subscription up, without waiting for its thread."""
        self._closed.set()
        self._room.release()
        # The thread waits for the next event, and closing the stream here would wait for it: only the end of its
        # connection wakes it. The client shows that to nobody, and only newer ones (urllib3 2.3) can be told to end it.
        shutdown = getattr(getattr(self._stream, "_raw_stream", None), "shutdown", None)
        with suppress(OSError, RuntimeError, ValueError):  # it has ended meanwhile
            if shutdown is not None:
                shutdown()

    def _run(self) -> None:
        with closing(self._subscribe()) as stream:
            self._stream, self.began = stream, self._clock()
            if self._closed.is_set():  # while the service was asked
                return
            for event in stream:
                # Nothing more is read while this waits: a slow handler fills the connection, and the service waits.
                self._room.acquire()
                if self._closed.is_set():
                    return
                self._inbox.append(event["SubscribeToShardEvent"])

    def _failed(self, fault: BaseException) -> None:
        # Whatever ends a subscription is for its reader to explain.
        self.fault = fault if isinstance(fault, Exception) else SourceUnavailable(said(fault))


LOOK_SECONDS = 1.0
"""Between two looks, however many readers wait: 20 a second are allowed on a stream."""

REFUSALS = 3
"""A limit met so often is taken for one that lasts; it may also be that 5 a second may be registered."""

_NAME = re.compile(r"arn:.+|[a-zA-Z0-9_.-]{1,128}")


class NotActiveYet(SourceUnavailable):
    """The consumer is being registered, which takes the service some seconds."""


class StreamConsumer:
    """A registered consumer of a stream.

    client  speaks to the service
    stream  its name
    name    the consumer's, registered if there is none; or its ARN, which must exist
    patience  how long it waits for an answer; as long as the client does, if left out
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
        """The ARN of the consumer to subscribe for, or None if readers have to poll.

        Raises NotActiveYet, SourceUnavailable or SourceError.
        """
        if not self._settled():
            with self._lock:  # those who waited for it find the matter settled
                if not self._settled() and self._clock() >= self._next_look:
                    self._next_look = self._clock() + LOOK_SECONDS
                    with said_plainly(self._stream):
                        self._look()
            if not self._settled():
                raise NotActiveYet(f"consumer {self.name!r} of stream {self._stream!r} is not ACTIVE yet")
        return self._arn

    def forget(self, arn: str) -> None:
        """The service knows this one no longer; a consumer given by name is looked for, and registered, anew."""
        with self._lock:
            if arn == self._arn != self.name:
                self._arn = None

    def _settled(self) -> bool:
        return self._arn is not None or self._refusals >= REFUSALS

    def _look(self) -> None:
        summary = self._patience.call("describe_stream_summary", StreamName=self._stream)
        consumer = {"StreamARN": summary["StreamDescriptionSummary"]["StreamARN"], "ConsumerName": self.name}
        try:
            told = self._patience.call("describe_stream_consumer", **consumer)["ConsumerDescription"]
        except ClientError as unknown:
            if code_of(unknown) != "ResourceNotFoundException":
                raise
            try:
                told = self._patience.call("register_stream_consumer", **consumer)["Consumer"]
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
        if told["ConsumerStatus"] == "ACTIVE":
            self._arn = told["ConsumerARN"]


APART_SECONDS = 5.0
CONTENDED_SECONDS = 10.0
"""Before a subscription that another has taken over is taken back: longer than it takes to learn of a lost lease."""

READER_LOOK_SECONDS, LOOK_SECONDS_MOST = 0.01, 0.1
"""Between two looks at the arrived events; they cost no request."""

_SUBSCRIBE = "subscribe_to_shard"
_TAKEN = (
    "another subscription of consumer {!r} to shard {} began less than five seconds ago or took over; "
    "two fleets want two consumers"
)


class FanOut(Poller):
    """A reader of one shard; where the stream has no room for the consumer, a polling one."""

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
        """Give the subscription up."""
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
            place = self._place()
            if self._continuation is not None:  # rule 1
                place = {"Type": "AT_SEQUENCE_NUMBER", "SequenceNumber": self._continuation}
            subscribe = partial(
                self._subscribing.call, _SUBSCRIBE, ConsumerARN=self._arn, ShardId=self._shard, StartingPosition=place
            )
            self._feed = SubscriptionReceiver(lambda: subscribe()["EventStream"], self._clock)
        over = self._feed.over  # asked before: all that arrived by then is in the inbox
        event = self._feed.take()
        if event is not None:
            self._before, self._continuation = self._continuation, event.get("ContinuationSequenceNumber") or None
            records, children = event.get("Records"), event.get("ChildShards") or []
            ended = self._continuation is None or (bool(children) and not records)  # rule 3
            told = {"Records": records, "MillisBehindLatest": event.get("MillisBehindLatest"), "ChildShards": children}
            # In the form of an answer of GetRecords.
            return cast("GetRecordsOutputTypeDef", told | {"NextShardIterator": None if ended else self._continuation})
        if over:
            self._end(self._feed)
        return None

    def _ask_again(self) -> None:
        """Subscribe anew, from before the event that could not be read: this subscription goes on behind it."""
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
        """Leave a subscription that is over. Raises SourceUnavailable or SourceError, unless its time was up."""
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
                # One that had begun was taken over; one that was refused at once may try again as soon as rule 2 lets.
                if feed.began is not None:
                    self._not_before = self._clock() + CONTENDED_SECONDS
                raise SourceUnavailable(_TAKEN.format(self._consumer.name, self._shard)) from fault
            case fault:
                with said_plainly(self._stream):
                    if not isinstance(fault, ClientError):
                        raise fault
                    if code_of(fault) == "ResourceNotFoundException":
                        self._consumer.forget(self._arn or "")  # the shard is gone, or the consumer was deregistered
                    self._rewind_from(fault)  # it raises what says of no start that it was trimmed

    def _wait(self, *, idle: bool, behind: bool = False) -> float:
        if self._arn is None:
            return super()._wait(idle=idle, behind=behind)
        wait, self._look = (self._look, min(2 * self._look, LOOK_SECONDS_MOST)) if idle else (0.0, READER_LOOK_SECONDS)
        return wait
