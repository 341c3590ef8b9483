"""A subscription to a shard: its thread reads the service's events, and keeps a few until they are taken.

Each subscribed shard has a thread, beside the pool that hands records over: boto3 can read an event stream only
by waiting for it, for up to five minutes at a time, and forty waiting shards would occupy the whole pool.
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
