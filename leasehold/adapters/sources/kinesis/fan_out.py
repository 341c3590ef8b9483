"""Reads one shard by enhanced fan-out: the service sends what is written, at 2 MiB/s for this consumer alone.

Rule 1: a subscription lasts five minutes at most; the next one begins AT the continuation number of the last event
taken, and records already handed over are dropped, so that neither a gap nor a repetition can come of it.
Rule 2: no shard is subscribed to again within five seconds of the last time, which the service would refuse.
Rule 3: a shard has ended when the service names its children and has no more records; the end of a connection
does not mean the end of the shard.
Rule 4: a subscription whose next event did not come in time is followed by one that is given longer.

A subscription to a shard: its thread reads the service's events, and keeps a few until they are taken.

Each subscribed shard has a thread, beside the pool that hands records over: boto3 can read an event stream only
by waiting for it, for up to five minutes at a time, and forty waiting shards would occupy the whole pool.

A stream's registered consumer, which enhanced fan-out sends to: found by name, or registered, and shared by readers.

Kinesis lets a stream have 20 of them (50 in its costliest mode). Where there is no room, readers poll instead.
"""

import time
from collections import deque
from collections.abc import Callable
from contextlib import closing, suppress
from threading import Event, Semaphore
from typing import TYPE_CHECKING

from leasehold.adapters.sources.protocol import SourceUnavailable
from leasehold.adapters.threads import spawn
from leasehold.stores.printable import said

if TYPE_CHECKING:  # the stubs are no dependency of a user
    from botocore.eventstream import EventStream
    from types_boto3_kinesis.type_defs import SubscribeToShardEventStreamTypeDef, SubscribeToShardEventTypeDef

    Stream = EventStream[SubscribeToShardEventStreamTypeDef]
import logging
import re
from threading import Lock
from typing import TYPE_CHECKING, cast

from botocore.exceptions import ClientError

from leasehold.adapters.sources.call_patience import CallPatience
from leasehold.adapters.sources.kinesis.clients import KinesisClients
from leasehold.adapters.sources.kinesis.faults import code_of, said_plainly
from leasehold.stores.printable import escaped

if TYPE_CHECKING:  # the stubs are no dependency of a user
    from types_boto3_kinesis import KinesisClient
    from types_boto3_kinesis.type_defs import ConsumerDescriptionTypeDef, ConsumerTypeDef
import math
import sys
from typing import TYPE_CHECKING

from botocore.eventstream import ParserError
from botocore.parsers import ResponseParserError
from urllib3.exceptions import HTTPError, ReadTimeoutError

from leasehold.adapters.sources.kinesis.aggregation.decode import Misplaced
from leasehold.adapters.sources.kinesis.faults import PollPace
from leasehold.adapters.sources.kinesis.poller import Poller
from leasehold.balancer.model import HashRange, Position

if TYPE_CHECKING:  # the stubs are no dependency of a user
    from types_boto3_kinesis import KinesisClient
    from types_boto3_kinesis.type_defs import GetRecordsOutputTypeDef, SubscribeToShardEventTypeDef


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
        if self._stream is not None:
            _unblock(self._stream)

    def _run(self) -> None:
        with closing(self._subscribe()) as stream:
            self._stream, self.began = stream, self._clock()
            self._receive(stream)

    def _failed(self, fault: BaseException) -> None:
        """Whatever ends a subscription is for its reader to explain."""
        self.fault = fault if isinstance(fault, Exception) else SourceUnavailable(said(fault))

    def _receive(self, stream: "Stream") -> None:
        if self._closed.is_set():  # while the service was asked
            return
        for event in stream:
            # Nothing more is read while this waits: a slow handler fills the connection, and then the service waits.
            self._room.acquire()
            if self._closed.is_set():
                return
            self._inbox.append(event["SubscribeToShardEvent"])


def _unblock(stream: "Stream") -> None:
    """End the reading that waits in another thread, which closing would wait for; without this it ends by itself."""
    # The client shows its connection to nobody, and only newer ones (urllib3 2.3) can be told.
    shutdown = getattr(getattr(stream, "_raw_stream", None), "shutdown", None)
    with suppress(OSError, RuntimeError, ValueError):  # it has ended meanwhile
        if shutdown is not None:
            shutdown()


log = escaped(logging.getLogger("leasehold.kinesis"))

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
        stream = summary["StreamDescriptionSummary"]["StreamARN"]
        told = self._described(stream) or self._registered(stream)
        if told is not None and told["ConsumerStatus"] == "ACTIVE":
            self._arn = told["ConsumerARN"]

    def _described(self, stream: str) -> "ConsumerDescriptionTypeDef | None":
        try:
            told = self._patience.call("describe_stream_consumer", StreamARN=stream, ConsumerName=self.name)
            return cast("ConsumerDescriptionTypeDef", told["ConsumerDescription"])
        except ClientError as error:
            if code_of(error) != "ResourceNotFoundException":
                raise
        return None

    def _registered(self, stream: str) -> "ConsumerTypeDef | None":
        try:
            told = self._patience.call("register_stream_consumer", StreamARN=stream, ConsumerName=self.name)
            return cast("ConsumerTypeDef", told["Consumer"])
        except ClientError as error:
            if code_of(error) == "LimitExceededException":
                self._refused(error)
            elif code_of(error) != "ResourceInUseException":  # another worker has just registered it
                raise
        return None

    def _refused(self, error: ClientError) -> None:
        self._refusals += 1
        if self._refusals == REFUSALS:
            log.warning("stream %s takes no consumer %r, so its shards are polled: %s", self._stream, self.name, error)


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
        rewind: bool = False,
        pace: PollPace | None = None,
        patience: CallPatience | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(
            client, stream, shard, start, hash_range, misplaced=misplaced, rewind=rewind, pace=pace, patience=patience
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
            self._feed = self._subscribed(self._arn)
        return self._taken(self._feed) if self._feed is not None else None

    def _wait(self, *, idle: bool, behind: bool = False) -> float:
        if self._arn is None:
            return super()._wait(idle=idle, behind=behind)
        wait, self._look = (self._look, min(2 * self._look, LOOK_SECONDS_MOST)) if idle else (0.0, READER_LOOK_SECONDS)
        return wait

    def _subscribed(self, arn: str) -> SubscriptionReceiver | None:
        if self._clock() < self._not_before:  # rule 2
            return None
        place = self._place()
        if self._continuation is not None:  # rule 1
            place = {"Type": "AT_SEQUENCE_NUMBER", "SequenceNumber": self._continuation}
        subscribing, shard = self._subscribing, self._shard
        return SubscriptionReceiver(
            lambda: subscribing.call(_SUBSCRIBE, ConsumerARN=arn, ShardId=shard, StartingPosition=place)["EventStream"],
            self._clock,
        )

    def _taken(self, feed: SubscriptionReceiver) -> "GetRecordsOutputTypeDef | None":
        over = feed.over  # asked before: all that arrived by then is in the inbox
        event = feed.take()
        if event is not None:
            return self._answer(event)
        if over:
            self._end(feed)
        return None

    def _answer(self, event: "SubscribeToShardEventTypeDef") -> "GetRecordsOutputTypeDef":
        """The event, in the form of an answer of GetRecords."""
        self._before, self._continuation = self._continuation, event.get("ContinuationSequenceNumber") or None
        records, children = event.get("Records"), event.get("ChildShards") or []
        ended = self._continuation is None or (bool(children) and not records)  # rule 3
        answer = {"Records": records, "MillisBehindLatest": event.get("MillisBehindLatest"), "ChildShards": children}
        return cast("GetRecordsOutputTypeDef", answer | {"NextShardIterator": None if ended else self._continuation})

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
        with said_plainly(self._stream):
            self._explain(feed)

    def _explain(self, feed: SubscriptionReceiver) -> None:
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
            case ClientError() as fault:
                self._refused(fault, began=feed.began is not None)
            case fault:
                raise fault

    def _refused(self, fault: ClientError, *, began: bool) -> None:
        match code_of(fault):
            case "ResourceInUseException":
                self._not_before = self._clock() + CONTENDED_SECONDS if began else self._not_before
                raise SourceUnavailable(_TAKEN.format(self._consumer.name, self._shard)) from fault
            case "ResourceNotFoundException":
                self._consumer.forget(self._arn or "")  # the shard is gone, or the consumer was deregistered
                raise fault
            case _:
                self._rewind_from(fault)
