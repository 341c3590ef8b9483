"""Chooses the timeouts of calls to a service, and the waits between retries.

Nothing in this module sleeps. A shard that has to wait returns its thread to the pool. The retry loops of client
libraries sleep inside the call, so a few failing shards would occupy every thread. This module does not depend on any
client library.

Rule 1: A timeout limits how long a call waits for the next bytes of its response. Related calls (those for one shard,
or for one stream) share an ascending list of timeouts. After a call has timed out, the next calls use the next longer
timeout. After a quick response, they use the shortest one again.

Rule 2: If a shard's timeout is longer than the shortest one, the call runs in a separate thread, and a later read of
the shard picks up the response. So a slow service delays neither the worker's other shards nor its drain.
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
from leasehold.stores.printable import error_summary, make_safe_logger

log = make_safe_logger(logging.getLogger("leasehold.kinesis"))

POLL_TIMEOUTS = 5.0, 10.0, 20.0, 30.0
"""How long to wait for the next bytes of a response, in seconds, shortest first. If a connection stops responding, its
shard is not read until the first timeout has passed. If a response does not arrive within the last timeout, the next
request asks for fewer records."""
SUBSCRIPTION_TIMEOUTS = 15.0, 30.0
"""How long to wait for the next event of a subscription, in seconds, shortest first. The service sends an event about
every 5 s even if there are no records."""
MAX_PENDING_CALLS = 30
"""The maximum number of calls that one source runs in separate threads at the same time. Callers must retry further
calls later."""
PENDING_CHECK_SECONDS = 0.25
"""How often to check whether a pending call has finished."""


class TimedClients:
    """The clients of one service, one per timeout.

    In libraries such as boto3, a client uses the same timeout for all calls, so each timeout needs a client of its own.

    Args:
        make_client: Creates a client with the given read timeout in seconds.
        timeouts: The timeouts in seconds, shortest first.
        subscription_timeouts: The timeouts for the events of a subscription, in seconds, shortest first.
        clock: Returns the time in seconds.
        start: Runs a function in the background, by default in a new thread.
    """

    timeout_error: type[Exception] = TimeoutError
    """The exception that a call raises when it times out."""
    service = "Kinesis"
    """The name of the service in messages."""

    def __init__(
        self,
        make_client: Callable[[float], Any],
        timeouts: Sequence[float] = POLL_TIMEOUTS,
        subscription_timeouts: Sequence[float] = SUBSCRIPTION_TIMEOUTS,
        *,
        clock: Callable[[], float] = time.monotonic,
        start: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        self._make_client, self._lock = make_client, Lock()
        self._clients_by_timeout: dict[float, Any] = {}
        self.timeouts, self.subscription_timeouts, self.clock = timeouts, subscription_timeouts, clock
        # Use a daemon thread, so that the program can exit without waiting for the response.
        self.start = start or (lambda work: spawn("leasehold-kinesis", work, _log_lost_response))
        self.pending_calls = Semaphore(MAX_PENDING_CALLS)

    def client_with_timeout(self, timeout: float) -> Any:  # noqa: ANN401  the type depends on the service
        """Return the client with this timeout, creating it when it is first needed."""
        with self._lock:
            if timeout not in self._clients_by_timeout:
                self._clients_by_timeout[timeout] = self._make_client(timeout)
            return self._clients_by_timeout[timeout]

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            clients, self._clients_by_timeout = self._clients_by_timeout, {}
        for client in clients.values():
            client.close()


class ResponsePending(Exception):
    """The response to a call has not arrived yet. Make the same call again after `PENDING_CHECK_SECONDS`."""


class CallTimeouts:
    """The timeouts of related calls, such as all calls for one shard (rule 1).

    When a call times out, the timeouts of all operations become longer. A quick response shortens only the timeout of
    its own operation, because listing shards may be quick while reading records is slow. When an operation is called
    for the first time, its timeout is the longest one of the other operations.

    Args:
        clients: The clients of the service, one per timeout.
        timeouts: The timeouts in seconds; by default those of the clients.
        first_step: The index in `timeouts` of the first call's timeout.
        quick_responses: After this many consecutive responses within the shortest timeout, that timeout is used again.
        retry_first_call: Whether a call that times out is repeated at once with the next longer timeout, as long as no
            call has had a response. Otherwise, a command that makes only one call would report that a slow service is
            down.
    """

    def __init__(
        self,
        clients: TimedClients,
        timeouts: Sequence[float] | None = None,
        *,
        first_step: int = 0,
        quick_responses: float = 1,
        retry_first_call: bool = False,
    ) -> None:
        self._clients, self._timeouts, self._quick_responses = clients, timeouts or clients.timeouts, quick_responses
        self._initial_step, self._retries_first_call = first_step, retry_first_call
        self._steps: dict[str, int] = {}
        self._quick_response_counts: Counter[str] = Counter()
        self._pending_call: Future[Any] | None = None
        self.was_lengthened = False
        """Whether the timeout was lengthened after the most recent call that timed out."""

    @property
    def longest_step(self) -> int:
        """The index in `timeouts` of the longest timeout of all operations."""
        return max([self._initial_step, *self._steps.values()]) if self._steps else self._initial_step

    def timeout_for(self, operation: str) -> float:
        """Return the timeout of the next call of this operation."""
        return self._timeouts[self._steps.setdefault(operation, self.longest_step)]

    def timeouts_for_subscriptions(self) -> "CallTimeouts":
        """Return the timeouts for the events of a subscription.

        Quick responses don't shorten the timeouts of subscriptions, because a subscription that starts quickly may
        still send events slowly.
        """
        return CallTimeouts(self._clients, self._clients.subscription_timeouts, quick_responses=math.inf)

    def call(self, operation: str, **parameters: Any) -> Any:  # noqa: ANN401  the type depends on the operation
        """Make the call and wait for its response.

        Raises:
            SourceUnavailable: The call timed out. Other exceptions of the call propagate.
        """
        while True:
            timeout, started_at = self.timeout_for(operation), self._clients.clock()
            try:
                response = getattr(self._clients.client_with_timeout(timeout), operation)(**parameters)
            except self._clients.timeout_error as error:
                message = f"{self._clients.service} did not respond within {timeout:g} s"
                message += f"; the timeout of the next call is {self.lengthen_timeout(operation, timeout):g} s"
                if not (self._retries_first_call and self.was_lengthened):
                    raise SourceUnavailable(message) from error
                log.warning("%s", message)
            else:
                break
        self._retries_first_call = False
        is_quick = self._clients.clock() - started_at < self._timeouts[0]
        self._quick_response_counts[operation] = self._quick_response_counts[operation] + 1 if is_quick else 0
        if self._quick_response_counts[operation] >= self._quick_responses:
            self._steps[operation] = self._initial_step = 0
        return response

    def lengthen_timeout(self, operation: str, timeout: float) -> float:
        """Lengthen the timeout, if possible, after a call exceeded `timeout`. Return the timeout of the next call."""
        self._quick_response_counts[operation] = 0
        own_step = self._steps[operation]
        self.was_lengthened = own_step < len(self._timeouts) - 1
        # If several concurrent calls time out, only the first one lengthens the timeout.
        if timeout == self._timeouts[own_step] and self.was_lengthened:
            self._steps = {name: max(index, own_step + 1) for name, index in self._steps.items()}
        return self.timeout_for(operation)

    def try_call(self, operation: str, **parameters: Any) -> Any:  # noqa: ANN401  the type depends on the operation
        """Make the call as `call` does, but in the background if its timeout is not the shortest one (rule 2).

        Raises:
            ResponsePending: If the response has not arrived yet. The caller must make the same call again.
            SourceUnavailable: The call timed out. Other exceptions of the call propagate.
        """
        if self._pending_call is None:
            if self.timeout_for(operation) == self._timeouts[0]:
                return self.call(operation, **parameters)
            if not self._clients.pending_calls.acquire(blocking=False):
                raise ResponsePending
            future: Future[Any] = Future()

            def make_call_for_future() -> None:
                try:
                    future.set_result(self.call(operation, **parameters))
                except BaseException as error:  # noqa: BLE001  raised by the `try_call` that picks up the response
                    future.set_exception(error)
                finally:
                    self._clients.pending_calls.release()

            try:
                self._clients.start(make_call_for_future)
            except BaseException:
                self._clients.pending_calls.release()  # the thread did not start, so no call is pending
                raise
            self._pending_call = future
        if not self._pending_call.done():
            raise ResponsePending
        finished_call, self._pending_call = self._pending_call, None
        return finished_call.result()


def _log_lost_response(fault: BaseException) -> None:
    log.error("the thread of a call failed, and its response is lost: %s", error_summary(fault))


def datetime_at_position(position: Position) -> datetime:
    """Return the time of a position AT_TIMESTAMP.

    Raises:
        SourceError: If the time is outside datetime's range. A row may contain any number.
    """
    try:
        return datetime.fromtimestamp(position.sub / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        raise SourceError(
            f"its checkpoint is AT_TIMESTAMP {position.sub} ms, which is not a time; set it with `leasehold reset`"
        ) from None


class Backoff:
    """Computes waits that grow with each fault. They are randomized, so that workers do not retry at the same time.

    Args:
        min_wait: The shortest wait in seconds.
        max_wait: The longest wait in seconds.
        uniform: Returns a random number between its two arguments.
    """

    def __init__(
        self, min_wait: float, max_wait: float, uniform: Callable[[float, float], float] = random.uniform
    ) -> None:
        self._min_wait, self._max_wait, self._uniform = min_wait, max_wait, uniform
        self._last_wait = min_wait
        self.faults = 0

    def next(self) -> float:
        """Count one more fault and return how many seconds to wait."""
        self.faults += 1
        self._last_wait = min(self._max_wait, self._uniform(self._min_wait, 3 * self._last_wait))
        return self._last_wait

    def reset(self) -> None:
        """Start again from the shortest wait, after a success."""
        self._last_wait, self.faults = self._min_wait, 0
