"""Timeouts of calls to a service, and the waits between retries.

Nothing here needs a service's library, and nothing sleeps, so a shard that must wait gives its thread back. The retry
loops of the libraries would wait inside the call, and a few failing shards would occupy every thread of the pool.

Rule 1: A timeout limits the wait for the next bytes of a response. Related calls (those of one shard, or of one stream)
share a sequence of timeouts. A call that times out moves them to the next longer timeout, and a quick response moves
them back to the first.

Rule 2: If a shard's timeout is longer than the first one, its call waits in a separate thread, and a later read picks
up the response. So a slow service delays neither the worker's other shards nor its drain.
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

POLL_TIMEOUTS = 5.0, 10.0, 20.0, 30.0
"""Timeouts for the next bytes of a response, in seconds. If a connection goes silent, its shard is not read for as
long as the first of them. A response that is too large to arrive in time is requested in smaller parts."""
SUBSCRIPTION_TIMEOUTS = 15.0, 30.0
"""The same for subscriptions, which send a heartbeat about every five seconds."""
MAX_PENDING_CALLS = 30
"""How many calls of one source may wait in separate threads at the same time. Further calls must wait for a slot."""
PENDING_CHECK_SECONDS = 0.25
"""The interval at which a waiting call is checked."""


class TimedClients:
    """The clients of one service, one per timeout, because a library like boto3 has no timeouts per call.

    Args:
        make: Creates a client that gives up a connection on which nothing arrives for the given number of seconds.
        timeouts: The timeouts in seconds, shortest first.
        subscription_timeouts: The timeouts for the events of a subscription.
        clock: Returns seconds.
        start: Runs a call in the background; by default in a new thread.
    """

    timeout_error: type[Exception] = TimeoutError
    """The exception that a call raises when it times out."""
    service = "Kinesis"
    """The name of the service in messages."""

    def __init__(
        self,
        make: Callable[[float], Any],
        timeouts: Sequence[float] = POLL_TIMEOUTS,
        subscription_timeouts: Sequence[float] = SUBSCRIPTION_TIMEOUTS,
        *,
        clock: Callable[[], float] = time.monotonic,
        start: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        self._make, self._lock = make, Lock()
        self._by_timeout: dict[float, Any] = {}
        self.timeouts, self.subscription_timeouts, self.clock = timeouts, subscription_timeouts, clock
        # The thread is a daemon, so that a program can exit without waiting for a response that it no longer needs.
        self.start = start or (lambda work: spawn("leasehold-kinesis", work, _log_lost))
        self.pending_calls = Semaphore(MAX_PENDING_CALLS)

    def with_timeout(self, timeout: float) -> Any:  # noqa: ANN401  each service has its own
        """Return the client with this timeout, creating it when it is first needed."""
        with self._lock:
            if timeout not in self._by_timeout:
                self._by_timeout[timeout] = self._make(timeout)
            return self._by_timeout[timeout]

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            clients, self._by_timeout = self._by_timeout, {}
        for client in clients.values():
            client.close()


class ResponsePending(Exception):
    """The response to a call has not arrived yet; make the same call again after `PENDING_CHECK_SECONDS`."""


class CallTimeouts:
    """The timeouts of related calls: those of one shard, or of one stream (rule 1).

    A call that times out lengthens the timeout of all operations. A quick response shortens only that of its own
    operation, because listings may be quick while records are slow. An operation that is called for the first time
    starts with the longest timeout of the others.

    Args:
        clients: The clients of the service, one per timeout.
        timeouts: The timeouts in seconds; by default those of the clients.
        step: The index in `timeouts` of the first call's timeout.
        quick_responses: How many consecutive responses within the shortest timeout restore that timeout.
        retry_first_call: Whether a call that times out is repeated with each longer timeout, until the first response.
            Otherwise a command that makes only one call would mistake a slow service for a dead one.
    """

    def __init__(
        self,
        clients: TimedClients,
        timeouts: Sequence[float] | None = None,
        *,
        step: int = 0,
        quick_responses: float = 1,
        retry_first_call: bool = False,
    ) -> None:
        self._clients, self._timeouts, self._quick_responses = clients, timeouts or clients.timeouts, quick_responses
        self._initial_step, self._retries_first_call = step, retry_first_call
        self._steps: dict[str, int] = {}
        self._quick_in_a_row: Counter[str] = Counter()
        self._pending: Future[Any] | None = None
        self.lengthened = False
        """Whether the last call that timed out lengthened the timeout of the next one."""

    @property
    def step(self) -> int:
        """The index in `timeouts` of the longest timeout that any operation has now."""
        return max([self._initial_step, *self._steps.values()]) if self._steps else self._initial_step

    def timeout(self, operation: str) -> float:
        """Return the timeout of the next call of this operation."""
        return self._timeouts[self._steps.setdefault(operation, self.step)]

    def for_subscriptions(self) -> "CallTimeouts":
        """Return the timeouts for the events of a subscription.

        Quick responses don't shorten them, because a subscription that was granted quickly may send events slowly.
        """
        return CallTimeouts(self._clients, self._clients.subscription_timeouts, quick_responses=math.inf)

    def call(self, operation: str, **parameters: Any) -> Any:  # noqa: ANN401  each operation has its own
        """Make the call and wait for its response.

        Raises:
            SourceUnavailable: If the call timed out. Anything else that it raises propagates.
        """
        while True:
            timeout, started = self.timeout(operation), self._clients.clock()
            try:
                response = getattr(self._clients.with_timeout(timeout), operation)(**parameters)
            except self._clients.timeout_error as error:
                message = f"{self._clients.service} did not answer within {timeout:g} s"
                message += f"; the timeout of the next call is {self.timed_out(operation, timeout):g} s"
                if not (self._retries_first_call and self.lengthened):
                    raise SourceUnavailable(message) from error
                log.warning("%s", message)
            else:
                break
        self._retries_first_call = False
        quick = self._clients.clock() - started < self._timeouts[0]
        self._quick_in_a_row[operation] = self._quick_in_a_row[operation] + 1 if quick else 0
        if self._quick_in_a_row[operation] >= self._quick_responses:
            self._steps[operation] = self._initial_step = 0
        return response

    def timed_out(self, operation: str, timeout: float) -> float:
        """Lengthen the timeout after a call exceeded `timeout`, if possible, and return that of the next call."""
        self._quick_in_a_row[operation] = 0
        step = self._steps[operation]
        self.lengthened = step < len(self._timeouts) - 1
        if timeout == self._timeouts[step] and self.lengthened:  # of concurrent calls, only the first timeout counts
            self._steps = {name: max(index, step + 1) for name, index in self._steps.items()}
        return self.timeout(operation)

    def try_call(self, operation: str, **parameters: Any) -> Any:  # noqa: ANN401  likewise
        """Make the call as `call` does, or in the background if it may exceed the shortest timeout (rule 2).

        Raises:
            ResponsePending: If the response has not arrived yet. The caller must make the same call again.
            SourceUnavailable: If the call timed out. Anything else that it raises propagates.
        """
        if self._pending is None:
            if self.timeout(operation) == self._timeouts[0]:
                return self.call(operation, **parameters)
            if not self._clients.pending_calls.acquire(blocking=False):
                raise ResponsePending
            pending: Future[Any] = Future()

            def make_call() -> None:
                try:
                    pending.set_result(self.call(operation, **parameters))
                except BaseException as error:  # noqa: BLE001  raised by the `try_call` that picks up the response
                    pending.set_exception(error)
                finally:
                    self._clients.pending_calls.release()

            try:
                self._clients.start(make_call)
            except BaseException:
                self._clients.pending_calls.release()  # the thread did not start, so nothing waits
                raise
            self._pending = pending
        if not self._pending.done():
            raise ResponsePending
        finished, self._pending = self._pending, None
        return finished.result()


def _log_lost(fault: BaseException) -> None:
    log.error("the thread of a call failed, and its response is lost: %s", said(fault))


def datetime_of(position: Position) -> datetime:
    """Return the time of a position AT_TIMESTAMP.

    Raises:
        SourceError: If the time is outside datetime's range (rows may contain any number).
    """
    try:
        return datetime.fromtimestamp(position.sub / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        raise SourceError(
            f"its checkpoint is AT_TIMESTAMP {position.sub} ms, which is not a time; set it with `leasehold reset`"
        ) from None


class Backoff:
    """Waits that grow with each fault, with jitter so that workers do not retry in step.

    Args:
        shortest: The shortest wait in seconds.
        longest: The longest wait in seconds.
        uniform: Draws a number between two others.
    """

    def __init__(
        self, shortest: float, longest: float, uniform: Callable[[float, float], float] = random.uniform
    ) -> None:
        self._shortest, self._longest, self._uniform = shortest, longest, uniform
        self._last = shortest
        self.faults = 0

    def next(self) -> float:
        """Count one more fault and return how many seconds to wait."""
        self.faults += 1
        self._last = min(self._longest, self._uniform(self._shortest, 3 * self._last))
        return self._last

    def reset(self) -> None:
        """Start again from the shortest wait, after a success."""
        self._last, self.faults = self._shortest, 0
