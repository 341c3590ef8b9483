"""A stream's registered consumer, which enhanced fan-out sends to: found by name, or registered, and shared by readers.

Kinesis lets a stream have 20 of them (50 in its costliest mode). Where there is no room, readers poll instead.
"""

import logging
import re
import time
from collections.abc import Callable
from threading import Lock
from typing import TYPE_CHECKING, cast

from botocore.exceptions import ClientError

from leasehold.adapters.sources.call_patience import CallPatience
from leasehold.adapters.sources.kinesis.clients import KinesisClients
from leasehold.adapters.sources.kinesis.faults import code_of, said_plainly
from leasehold.adapters.sources.protocol import SourceUnavailable
from leasehold.stores.printable import escaped

if TYPE_CHECKING:  # the stubs are no dependency of a user
    from types_boto3_kinesis import KinesisClient
    from types_boto3_kinesis.type_defs import ConsumerDescriptionTypeDef, ConsumerTypeDef

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
