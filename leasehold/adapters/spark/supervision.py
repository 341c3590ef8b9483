"""Keeps a query running. If the query ends for a temporary reason, the reason is logged and the query is started again.

Spark ends a query if a Python process that runs its source or sink ends. Such a process may have run out of memory, or
may not have started within the ten seconds for which Spark waits. A query may also hang in a call that never returns.
The progress of the query is stored in its checkpointLocation, so the query repeats at most one batch when it is started
again.
"""

import logging
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import current_thread, main_thread

from pyspark.sql.streaming.query import StreamingQuery

from leasehold.adapters.signals import replace_handler, restore_handler
from leasehold.adapters.sources.call_timeouts import Backoff
from leasehold.stores.printable import limited_error_text, make_safe_logger

log = make_safe_logger(logging.getLogger("leasehold.spark"))

RESTART_WAIT_SECONDS = 5.0, 300.0
DEFAULT_STALL_SECONDS = 600.0
STATUS_POLL_SECONDS = 1
SEARCHED_LENGTH_MAX = 100_000
"""The number of characters of an error message to search.

The message after a failed task begins with the tracebacks of all attempts, and the actual error is at its end.
"""

JAVA_IO_ERROR = (
    r"java\.(?:io|net|nio\.channels)\.\w+Exception.*(?:\n\s+at .*)*\n\s+at org\.apache\.spark\.\S*\bpython\."
)
"""Matches any exception in the Java code that communicates with a Python process, whatever the exception's message."""
SOURCE_PROCESS_ENDED = (
    "the process of its source ended, perhaps for lack of memory (see the system's log for the OOM killer)"
)
CAUSE_BY_PATTERN = {
    "failed to connect back": "a Python process of Spark did not start within ten seconds: the machine is too busy",
    "Python worker exited unexpectedly": "a Python process of a task or sink was killed, perhaps for lack of memory",
    "reading the port number from": "a Python process of Spark was killed as it started, perhaps for lack of memory",
    "the process that had them is gone": SOURCE_PROCESS_ENDED,
    "EOFException": SOURCE_PROCESS_ENDED,
    "EOFError": SOURCE_PROCESS_ENDED,
    "Broken pipe": SOURCE_PROCESS_ENDED,
    "Connection reset": SOURCE_PROCESS_ENDED,
    "Socket closed": SOURCE_PROCESS_ENDED,
    JAVA_IO_ERROR: SOURCE_PROCESS_ENDED,
    "ExecutorLostFailure": "executors were lost",
    "SourceUnavailable": "the stream could not be reached",
    "OutcomeUnknown": "the lease table could not be reached",
    "StreamRecreated": "its stream was deleted and made anew",
    "nothing was read for": "a shard could not be read for minutes; the query's error names it, with the reason",
}
"""Patterns that match error messages and Java stack traces, each with the cause of the error.

A query that ends with any other error is not started again.
"""


def find_restart_reason(fault: BaseException) -> str | None:
    """Return why a query may be started again after this error, or None if it would end the same way again."""
    # After an error in Python or the loss of an executor, Spark provides only a message. After an error in Java, the
    # message may be empty, for example if a killed Python process causes an EOFException. So search the stack trace,
    # too.
    message = (
        limited_error_text(fault, SEARCHED_LENGTH_MAX) + str(getattr(fault, "_stackTrace", ""))[:SEARCHED_LENGTH_MAX]
    )
    return next((cause for pattern, cause in CAUSE_BY_PATTERN.items() if re.search(pattern, message)), None)


class StallDetector:
    """Detects that a query is stuck.

    Args:
        seconds: How long one trigger may run without any progress.
        clock: Returns monotonic seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._last_state: object = None
        self._unchanged_since = clock()

    def is_stuck(self, query: StreamingQuery) -> bool:
        """Return whether the current trigger has made no progress for `seconds`. Return False between triggers."""
        status, progress = query.status, query.lastProgress
        progress_state = (
            (status["message"], progress and (progress["batchId"], progress["timestamp"]))
            if status["isTriggerActive"]
            else None
        )
        # Between two triggers, a query may be idle for hours, so do not count that time.
        if progress_state is None or progress_state != self._last_state:
            self._last_state, self._unchanged_since = progress_state, self._clock()
        return self._clock() - self._unchanged_since > self._seconds


def supervise(
    factory: Callable[[], StreamingQuery],
    *,
    stall_seconds: float = DEFAULT_STALL_SECONDS,
    should_stop: Callable[[], bool] = lambda: False,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Run the query that `factory` starts until the query ends by itself. Stop the query if `should_stop` returns true.

    The query is started again after temporary failures: Python processes that did not start in time or were killed,
    lost executors, a stream or table that could not be reached, and `stall_seconds` without progress in one trigger.
    Each time, the reason is logged. Each wait before a restart is longer than the last, up to five minutes. Once a
    batch is finished, the next wait is the shortest again.

    Args:
        factory: Loads and starts the query.
        stall_seconds: The time for which one trigger may run without any progress.
        should_stop: Returns whether to stop the query.
        sleep: Waits for a number of seconds.
        clock: Returns monotonic seconds.

    Raises:
        Exception: The query failed, and the reason may not be temporary.
        KeyboardInterrupt: Ctrl-C was pressed. The query is stopped first.
    """
    backoff = Backoff(*RESTART_WAIT_SECONDS)
    while not should_stop():
        query: StreamingQuery | None = None
        restart_reason: str | None = None
        try:
            query = factory()
            with _interruptible():
                stall_detector, first_batch = StallDetector(stall_seconds, clock), _find_last_batch(query)
                while not query.awaitTermination(STATUS_POLL_SECONDS):
                    if should_stop():
                        return
                    # A finished batch shows that the cause of earlier failures is gone, so reset the wait before the
                    # next restart.
                    if _find_last_batch(query) != first_batch:
                        backoff.reset()
                    # Restart the query if a task hangs, because Spark would wait forever for the task's Python process.
                    if stall_detector.is_stuck(query):
                        restart_reason = f"it made no progress for {stall_seconds:g} s"
                        break
                else:
                    return
        except KeyboardInterrupt as interrupt:
            # A terminal sends Ctrl-C to Java, too, so the Java process ends. Suppress the errors that this causes.
            with suppress(Exception):
                if query is not None:
                    query.stop()
            query = None
            raise interrupt from None
        except Exception as fault:  # raised by Spark or by Java code
            # Do not restart after an error in the query itself, because the error would happen again, and the restarts
            # would hide it.
            if (restart_reason := find_restart_reason(fault)) is None:
                raise
        finally:
            if query is not None and query.isActive:
                query.stop()
        wait_seconds = backoff.next()
        log.warning(
            "the query ended, starting it again in %.0f s (%d in a row): %s",
            wait_seconds,
            backoff.faults,
            restart_reason,
        )
        with _interruptible():
            sleep(wait_seconds)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Make Ctrl-C raise KeyboardInterrupt within the context, even if PySpark has set its own handler.

    PySpark's handler calls Java. If Ctrl-C is pressed while this thread waits for Java, or if Ctrl-C has also ended
    Java, that call fails and hides the interrupt. Handlers that the user's program has set are kept.
    """
    handler = signal.getsignal(signal.SIGINT)
    is_pyspark_handler = str(getattr(handler, "__module__", "")).startswith("pyspark.")
    if not is_pyspark_handler or current_thread() is not main_thread():
        yield
        return
    replace_handler(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        restore_handler(signal.SIGINT, handler)


def _find_last_batch(query: StreamingQuery) -> int | None:
    progress = query.lastProgress
    return progress["batchId"] if progress else None
