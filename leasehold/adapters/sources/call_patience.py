"""Time as sources keep it: how long a call is given, how long a fault is waited for, and the clock that measures both.

Nothing here needs a service's library, and nothing sleeps: a shard that must wait gives its thread back. The libraries'
retry loops wait inside the call, where a few poisoned shards would hold every thread of the pool.

Rule 1: a call is given the first limit for the next bytes of its answer; after one that did not come in time the next
is given the second, and so on, for the calls that belong together: a shard's, or a stream's. A quick answer brings the
first one back. Rule 2: a shard's call that is given longer than the first limit waits in a thread of its own: a reading
comes back for the answer later, so that a slow service keeps neither the worker's other shards nor its drain waiting.
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
"""For the next bytes of an answer. A connection that went silent leaves a held shard unread for the first of them; an
answer too large to come in time is asked for in smaller parts."""
SUBSCRIPTION_SECONDS = 15.0, 30.0
"""A subscription sends a sign of life about every five seconds."""
WAITING = 30
"""So many calls of one source wait in threads of their own; others wait until one of these has its answer."""
LOOK_SECONDS = 0.25
"""Between two looks at a call that waits."""


class TimedClients:
    """The clients of one service, one for each time-out: boto3, say, knows that of a client, and none of a call.

    make           makes the client that gives a connection up where nothing comes for so many seconds
    limits         these seconds, the least first
    subscriptions  likewise for the events of a subscription
    start          begins the work of a call that waits aside; in a thread, if left out
    """

    late: type[Exception] = TimeoutError
    """Raised by a call whose answer did not come in time."""
    service = "Kinesis"
    """Its name in sentences."""

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
        # A thread is a daemon: a program that ends does not wait for an answer that nobody wants any more.
        self.start = start or (lambda work: spawn("leasehold-kinesis", work, _lost))
        self.waiting = Semaphore(WAITING)

    def within(self, seconds: float) -> Any:  # noqa: ANN401  each service has its own
        """The client of this time-out, made when it is first needed."""
        with self._lock:
            if seconds not in self._made:
                self._made[seconds] = self._make(seconds)
            return self._made[seconds]

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            made, self._made = self._made, {}
        for client in made.values():
            client.close()


class StillAsked(Exception):
    """The answer to a call is not there yet; the same call is to be made again after `LOOK_SECONDS`."""


class CallPatience:
    """The time that calls which belong together are given, those of one shard or of one stream (rule 1).

    A late answer makes it longer for all of them, a quick one brings it back for its own operation: a listing may be
    quick where records are slow. An operation that was not asked yet begins with the longest of the others.

    clients  speak to the service, each with another time-out
    limits   the time-outs in seconds; the clients' own, if left out
    step     which of them the first call begins with
    quick    so many answers within the least time-out, one after another, bring it back
    insists  until its first answer, a call that was late is repeated at once with each longer time-out: a command that
             asks once would take a slow service for none
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
        """Whether the last call that was late is given longer the next time."""

    @property
    def step(self) -> int:
        """The longest time-out that an operation has now, as a place in `limits`."""
        return max([self._first, *self._steps.values()]) if self._steps else self._first

    def seconds(self, operation: str) -> float:
        """The time-out of the next call of this operation."""
        return self._limits[self._steps.setdefault(operation, self.step)]

    def of_subscriptions(self) -> "CallPatience":
        """The time for a subscription's next bytes: that it was granted quickly says nothing of its events."""
        return CallPatience(self._clients, self._clients.subscriptions, quick=math.inf)

    def call(self, operation: str, **question: Any) -> Any:  # noqa: ANN401  each operation has its own
        """The answer, waited for. Raises SourceUnavailable if none came in time, else what the call raises."""
        while True:
            limit, began = self.seconds(operation), self._clients.clock()
            try:
                answer = getattr(self._clients.within(limit), operation)(**question)
            except self._clients.late as late:
                said = f"{self._clients.service} did not answer within {limit:g} s"
                said += f"; the next call is given {self.exceeded(operation, limit):g} s"
                if not (self._insists and self.grew):
                    raise SourceUnavailable(said) from late
                log.warning("%s", said)
            else:
                break
        self._insists = False
        quick = self._clients.clock() - began < self._limits[0]
        self._in_a_row[operation] = self._in_a_row[operation] + 1 if quick else 0
        if self._in_a_row[operation] >= self._quick:
            self._steps[operation] = self._first = 0
        return answer

    def exceeded(self, operation: str, limit: float) -> float:
        """Give the next call longer than this, if that can be, and say how long."""
        self._in_a_row[operation] = 0
        step = self._steps[operation]
        self.grew = step < len(self._limits) - 1
        if limit == self._limits[step] and self.grew:  # of calls side by side only the first that was late counts
            self._steps = {name: max(each, step + 1) for name, each in self._steps.items()}
        return self.seconds(operation)

    def ask(self, operation: str, **question: Any) -> Any:  # noqa: ANN401  likewise
        """Answer as `call` does; but where that may take longer than the least time-out, wait aside (rule 2).

        Raises StillAsked while the answer is not there: the caller is to ask the same again.
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
                except BaseException as error:  # noqa: BLE001  raised where the answer is looked for
                    aside.set_exception(error)
                finally:
                    self._clients.waiting.release()

            try:
                self._clients.start(work)
            except BaseException:
                self._clients.waiting.release()  # there was no thread, and nothing waits
                raise
            self._aside = aside
        if not self._aside.done():
            raise StillAsked
        answered, self._aside = self._aside, None
        return answered.result()


def _lost(fault: BaseException) -> None:
    log.error("an answer was lost on its way: %s", said(fault))


def datetime_of(position: Position) -> datetime:
    """The time of a position AT_TIMESTAMP. Raises SourceError for one that no calendar has: rows may say any."""
    try:
        return datetime.fromtimestamp(position.sub / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        raise SourceError(
            f"its checkpoint is AT_TIMESTAMP {position.sub} ms, which is no time; set it with `leasehold reset`"
        ) from None


class Backoff:
    """Waits that grow and do not keep step with anybody else's.

    least, most  seconds
    uniform      draws a number between two others
    """

    def __init__(self, least: float, most: float, uniform: Callable[[float, float], float] = random.uniform) -> None:
        self._least, self._most, self._uniform = least, most, uniform
        self._last = least
        self.faults = 0

    def next(self) -> float:
        """Seconds to wait after one more fault."""
        self.faults += 1
        self._last = min(self._most, self._uniform(self._least, 3 * self._last))
        return self._last

    def reset(self) -> None:
        """Start from the shortest wait again, after a success."""
        self._last, self.faults = self._least, 0
