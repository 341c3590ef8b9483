"""Reads one shard by enhanced fan-out: the service sends what is written, at 2 MiB/s for this consumer alone.

Rule 1: a subscription lasts five minutes at most; the next one begins AT the continuation number of the last event
taken, and records already handed over are dropped, so that neither a gap nor a repetition can come of it.
Rule 2: no shard is subscribed to again within five seconds of the last time, which the service would refuse.
Rule 3: a shard has ended when the service names its children and has no more records; the end of a connection
does not mean the end of the shard.
Rule 4: a subscription whose next event did not come in time is followed by one that is given longer.
"""

import logging
import math
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from botocore.eventstream import ParserError
from botocore.exceptions import ClientError
from botocore.parsers import ResponseParserError
from urllib3.exceptions import HTTPError, ReadTimeoutError

from leasehold.adapters.sources.call_patience import CallPatience
from leasehold.adapters.sources.kinesis.aggregation.decode import Misplaced
from leasehold.adapters.sources.kinesis.fan_out.consumer import NotActiveYet, StreamConsumer
from leasehold.adapters.sources.kinesis.fan_out.subscription import SubscriptionReceiver
from leasehold.adapters.sources.kinesis.faults import code_of, said_plainly
from leasehold.adapters.sources.kinesis.pace import PollPace
from leasehold.adapters.sources.kinesis.poller import Poller
from leasehold.adapters.sources.protocol import SourceUnavailable
from leasehold.balancer.model import HashRange, Position
from leasehold.stores.printable import escaped

if TYPE_CHECKING:  # the stubs are no dependency of a user
    from types_boto3_kinesis import KinesisClient
    from types_boto3_kinesis.type_defs import GetRecordsOutputTypeDef, SubscribeToShardEventTypeDef

log = escaped(logging.getLogger("leasehold.kinesis"))

APART_SECONDS = 5.0
CONTENDED_SECONDS = 10.0
"""Before a subscription that another has taken over is taken back: longer than it takes to learn of a lost lease."""

LOOK_SECONDS, LOOK_SECONDS_MOST = 0.01, 0.1
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
        self._look = LOOK_SECONDS

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
        wait, self._look = (self._look, min(2 * self._look, LOOK_SECONDS_MOST)) if idle else (0.0, LOOK_SECONDS)
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
