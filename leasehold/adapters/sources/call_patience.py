"""Timeouts of calls to a service, and the waits between retries.

Nothing here needs a service's library, and nothing sleeps: a shard that must wait gives its thread back. The retry
loops of the libraries wait inside the call, where a few failing shards would occupy every thread of the pool.

Rule 1: The timeout applies to the next bytes of a response. Related calls (those of one shard, or of one stream) share
a sequence of timeouts: each call that times out moves to the next longer one, and a quick response goes back to the
first.

Rule 2: A shard's call with a longer timeout than the first waits in a thread of its own, and a later read picks up the
response. So a slow service delays neither the worker's other shards nor its drain.
"""

import logging
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import UTC, datetime
from threading import Lock, Semaphore
from typing import Any

from leasehold.adapters.threads import spawn
from leasehold.balancer.model import Position
from leasehold.errors import SourceError, SourceUnavailable
from leasehold.stores.printable import escaped, said

log = escaped(logging.getLogger("leasehold.kinesis"))

POLL_SECONDS = 5.0, 10.0, 20.0, 30.0
"""Timeouts for the next bytes of a response. If a connection goes silent, its shard is not read for the first of them.
A response too large to arrive in time is requested in smaller parts."""
SUBSCRIPTION_SECONDS = 15.0, 30.0
"""The same for subscriptions, which send a heartbeat about every five seconds."""
WAITING = 30
"""How many calls of one source may wait in threads of their own at once; further calls wait for one of these."""
LOOK_SECONDS = 0.25
"""The interval at which a waiting call is checked."""


class TimedClients:
    """The clients of one service, one per timeout, because a library like boto3 has no timeouts per call.

    Args:
        make: Makes the client that gives up a connection on which nothing arrives for this many seconds.
        limits: The timeouts in seconds, shortest first.
        subscriptions: The timeouts for the events of a subscription.
        clock: Returns seconds.
        start: Starts a call that waits on its own; by default in a thread.
    """

    late: type[Exception] = TimeoutError
    """The exception that a call raises when its response is late."""
    service = "Kinesis"
    """The name of the service in messages."""

    def __init__(
        self,
        make: Callable[[float], Any],
        limits: Sequence[float] = POLL_SECONDS,
        subscriptions: Sequence[float] = SUBSCRIPTION_SECONDS,
        *,
        clock: Callable[[], float] = time.monotonic,
        start: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        self._make, self._lock = make, Lock()
        self._made: dict[float, Any] = {}
        self.limits, self.subscriptions, self.clock = limits, subscriptions, clock
        # The thread is a daemon, so a program that ends does not wait for a response that is no longer needed.
        self.start = start or (lambda work: spawn("leasehold-kinesis", work, _lost))
        self.waiting = Semaphore(WAITING)

    def within(self, seconds: float) -> Any:  # noqa: ANN401  each service has its own
        """Return the client with this timeout, creating it when it is first needed."""
        with self._lock:
            if seconds not in self._made:
                self._made[seconds] = self._make(seconds)
            return self._made[seconds]

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            clients, self._made = self._made, {}
        for client in clients.values():
            client.close()


class StillAsked(Exception):
    """The response to a call has not arrived yet; make the same call again after `LOOK_SECONDS`."""


class CallPatience:
    """The timeouts of related calls: those of one shard, or of one stream (rule 1).

    A late response lengthens the timeout of all operations. A quick one shortens only that of its own operation,
    because listings may be quick while records are slow. An operation that is called for the first time starts with
    the longest timeout of the others.

    Args:
        clients: The clients of the service, one per timeout.
        limits: The timeouts in seconds; by default those of the clients.
        step: The index in `limits` of the first call's timeout.
        quick: How many consecutive responses within the shortest timeout restore it.
        insists: Whether to repeat a late call at once with each longer timeout, until the first response. Otherwise a
            command that calls only once would take a slow service for a dead one.
    """

    def __init__(
        self,
        clients: TimedClients,
        limits: Sequence[float] | None = None,
        *,
        step: int = 0,
        quick: float = 1,
        insists: bool = False,
    ) -> None:
        self._clients, self._limits, self._quick = clients, limits or clients.limits, quick
        self._first, self._insists = step, insists
        self._steps: dict[str, int] = {}
        self._in_a_row: Counter[str] = Counter()
        self._aside: Future[Any] | None = None
        self.grew = False
        """Whether the last late call lengthened the timeout of the next one."""

    @property
    def step(self) -> int:
        """The index in `limits` of the longest timeout that any operation has now."""
        return max([self._first, *self._steps.values()]) if self._steps else self._first

    def seconds(self, operation: str) -> float:
        """Return the timeout of the next call of this operation."""
        return self._limits[self._steps.setdefault(operation, self.step)]

    def of_subscriptions(self) -> "CallPatience":
        """Return the timeouts for the events of a subscription.

        Quick responses don't shorten them, because a subscription that was granted quickly may send events slowly.
        """
        return CallPatience(self._clients, self._clients.subscriptions, quick=math.inf)

    def call(self, operation: str, **question: Any) -> Any:  # noqa: ANN401  each operation has its own
        """Make the call and wait for its response.

        Raises:
            SourceUnavailable: If the response did not arrive in time. Anything else that the call raises propagates.
        """
        while True:
            limit, began = self.seconds(operation), self._clients.clock()
            try:
                response = getattr(self._clients.within(limit), operation)(**question)
            except self._clients.late as late:
                message = f"{self._clients.service} did not answer within {limit:g} s"
                message += f"; the next call is given {self.exceeded(operation, limit):g} s"
                if not (self._insists and self.grew):
                    raise SourceUnavailable(message) from late
                log.warning("%s", message)
            else:
                break
        self._insists = False
        quick = self._clients.clock() - began < self._limits[0]
        self._in_a_row[operation] = self._in_a_row[operation] + 1 if quick else 0
        if self._in_a_row[operation] >= self._quick:
            self._steps[operation] = self._first = 0
        return response

    def exceeded(self, operation: str, limit: float) -> float:
        """Lengthen the timeout after a call that exceeded `limit`, if possible, and return the next call's timeout."""
        self._in_a_row[operation] = 0
        step = self._steps[operation]
        self.grew = step < len(self._limits) - 1
        if limit == self._limits[step] and self.grew:  # of concurrent calls only the first late one counts
            self._steps = {name: max(index, step + 1) for name, index in self._steps.items()}
        return self.seconds(operation)

    def ask(self, operation: str, **question: Any) -> Any:  # noqa: ANN401  likewise
        """Make the call as `call` does, or in its own thread if it may exceed the shortest timeout (rule 2).

        Raises:
            StillAsked: While the response has not arrived. The caller must make the same call again.
            SourceUnavailable: If the response did not arrive in time. Anything else that the call raises propagates.
        """
        if self._aside is None:
            if self.seconds(operation) == self._limits[0]:
                return self.call(operation, **question)
            if not self._clients.waiting.acquire(blocking=False):
                raise StillAsked
            aside: Future[Any] = Future()

            def work() -> None:
                try:
                    aside.set_result(self.call(operation, **question))
                except BaseException as error:  # noqa: BLE001  raised by the `ask` that picks up the response
                    aside.set_exception(error)
                finally:
                    self._clients.waiting.release()

            try:
                self._clients.start(work)
            except BaseException:
                self._clients.waiting.release()  # the thread did not start, so nothing waits
                raise
            self._aside = aside
        if not self._aside.done():
            raise StillAsked
        answered, self._aside = self._aside, None
        return answered.result()


def _lost(fault: BaseException) -> None:
    log.error("an answer was lost on its way: %s", said(fault))


def datetime_of(position: Position) -> datetime:
    """Return the time of a position AT_TIMESTAMP.

    Raises:
        SourceError: If the time is outside datetime's range, as it may be because rows may hold any number.
    """
    try:
        return datetime.fromtimestamp(position.sub / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        raise SourceError(
            f"its checkpoint is AT_TIMESTAMP {position.sub} ms, which is no time; set it with `leasehold reset`"
        ) from None


class Backoff:
    """Waits that grow with each fault, with jitter so that workers do not retry in step.

    Args:
        least: The shortest wait in seconds.
        most: The longest wait in seconds.
        uniform: Draws a number between two others.
    """

    def __init__(self, least: float, most: float, uniform: Callable[[float, float], float] = random.uniform) -> None:
        self._least, self._most, self._uniform = least, most, uniform
        self._last = least
        self.faults = 0

    def next(self) -> float:
        """Count one more fault and return how many seconds to wait."""
        self.faults += 1
        self._last = min(self._most, self._uniform(self._least, 3 * self._last))
        return self._last

    def reset(self) -> None:
        """Start again from the shortest wait, after a success."""
        self._last, self.faults = self._least, 0
