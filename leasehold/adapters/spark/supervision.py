"""Keeps a query running: what ended for a reason that passes is started again, and the reason is said.

Spark ends a query with any process of its source or sink: one that was killed for its memory, or did not start within
the ten seconds that Spark waits. A query may also stand still, in a call that never returns. Its checkpointLocation
knows how far it is, so that the next start repeats at most a batch.
"""

import logging
import re
import time
from collections.abc import Callable

from pyspark.sql.streaming.query import StreamingQuery

from leasehold.adapters.sources.call_patience import Backoff
from leasehold.stores.printable import escaped, text_of

log = escaped(logging.getLogger("leasehold.spark"))

WAIT_SECONDS = 5.0, 300.0
SILENT_SECONDS = 600.0
LOOK_SECONDS = 1
TEXT_MOST = 100_000
"""Most of a fault's text that is searched: of a failed task it has all tracebacks, and the fault itself behind them."""

PLANNER = "the process of its source ended, killed perhaps for its memory (see the system's log for the OOM killer)"
CAUSES = {
    "failed to connect back": "a Python process of Spark's did not start within ten seconds: the machine is too busy",
    "Python worker exited unexpectedly": "a Python process of a task or of the sink was killed, perhaps for its memory",
    "reading the port number from": "a Python process of Spark's was killed as it started, perhaps for its memory",
    "the process that had them is gone": PLANNER,
    "EOFException": PLANNER,
    "EOFError": PLANNER,
    "Broken pipe": PLANNER,
    "Connection reset": PLANNER,
    "Socket closed": PLANNER,
    # Whatever its words are, where Java speaks with a process of Python.
    r"java\.(?:io|net|nio\.channels)\.\w+Exception.*(?:\n\s+at .*)*\n\s+at org\.apache\.spark\.\S*\bpython\.": PLANNER,
    "ExecutorLostFailure": "executors were lost",
    "SourceUnavailable": "the stream could not be reached",
    "OutcomeUnknown": "the lease table could not be reached",
    "MadeAnew": "its stream was deleted and made anew",
    "nothing was read for": "nothing of a shard could be read for minutes; the fault of the query says which, and why",
}
"""Patterns of a fault's text, each with its cause; a query that ends with any other fault is not started again."""


def passing(fault: BaseException) -> str | None:
    """Why a query may be started again after this; None where that would end as this did."""
    # By text, since Spark tells of a fault in Python, or of a lost executor, by nothing else. A fault of Java may have
    # none, as an EOFException where a Python process was killed: its name is in the stack that Spark keeps beside it.
    told = text_of(fault, TEXT_MOST) + str(getattr(fault, "_stackTrace", ""))[:TEXT_MOST]
    return next((cause for sign, cause in CAUSES.items() if re.search(sign, told)), None)


class Silence:
    """Watches that a query moves.

    seconds  how long one trigger may last in which nothing is done
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._seen: object = None
        self._since = clock()

    def lasts(self, query: StreamingQuery) -> bool:
        """Whether it has stood still for so long; between two triggers it does not."""
        status, told = query.status, query.lastProgress
        seen = (status["message"], told and (told["batchId"], told["timestamp"])) if status["isTriggerActive"] else None
        # Between two triggers a query may rightly rest for hours.
        if seen is None or seen != self._seen:
            self._seen, self._since = seen, self._clock()
        return self._clock() - self._since > self._seconds


def run(
    factory: Callable[[], StreamingQuery],
    *,
    silent_seconds: float = SILENT_SECONDS,
    ending: Callable[[], bool] = lambda: False,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Run the query that `factory` loads and starts until it ends by itself, or `ending`; then it is stopped.

    It is started again after what passes: Python processes that did not start in time or were killed, executors that
    were lost, a stream or table that could not be reached, and `silent_seconds` in which one trigger did nothing. Each
    time it waits longer, up to five minutes, and says which it was; a batch that is done begins that anew. Whatever
    else ends the query is raised.
    """
    waits = Backoff(*WAIT_SECONDS)
    while not ending():
        query: StreamingQuery | None = None
        cause: str | None = None
        try:
            query = factory()
            silence, first = Silence(silent_seconds, clock), _batch(query)
            while not query.awaitTermination(LOOK_SECONDS):
                if ending():
                    return
                # A batch that is done shows that the cause has passed; waits begin anew for the next one.
                if _batch(query) != first:
                    waits.reset()
                # Nothing else tells: Spark waits for ever for a task whose Python process hangs.
                if silence.lasts(query):
                    cause = f"nothing moved in it for {silent_seconds:g} s"
                    break
            else:
                return
        except Exception as fault:  # Spark's own, or Java's
            # A fault in the query itself would come again, and each start would hide it for longer.
            if (cause := passing(fault)) is None:
                raise
        finally:
            if query is not None and query.isActive:
                query.stop()
        wait = waits.next()
        log.warning("the query ended, starting it again in %.0f s (%d in a row): %s", wait, waits.faults, cause)
        sleep(wait)


def _batch(query: StreamingQuery) -> int | None:
    told = query.lastProgress
    return told["batchId"] if told else None
