"""A supervised query is restarted after temporary errors, with growing waits, but not after other errors."""

import logging
import signal
from collections.abc import Callable
from typing import Any, cast

import pytest
from attrs import define, field
from pyspark.sql.streaming.query import StreamingQuery
from waiters import Clock

from leasehold.adapters.spark.supervision import StallDetector, supervise


@define
class Query:
    """A query that ends as the test specifies, after some number of checks.

    ends    the error that ends the query, or None
    looks   how often the query is checked before it ends
    does    the batch that the query has done when it is first checked
    status  the status as Spark reports it. A trigger that is active, and never reports anything else, has stalled.
    """

    ends: BaseException | None = None
    looks: int = 0
    does: int | None = None
    batch: int | None = None
    active: bool = False
    clock: Clock = field(factory=Clock)
    stopped: bool = False

    @property
    def isActive(self) -> bool:  # noqa: N802  Spark's name
        return not self.stopped

    @property
    def status(self) -> dict[str, Any]:
        return {"message": "Getting offsets", "isTriggerActive": self.active}

    @property
    def lastProgress(self) -> dict[str, Any] | None:  # noqa: N802  Spark's name
        """The progress of the batch that the query has done, or None if it has done none."""
        return None if self.batch is None else {"batchId": self.batch, "timestamp": str(self.batch)}

    def awaitTermination(self, seconds: float) -> bool:  # noqa: N802  Spark's name
        self.clock.now += seconds
        if self.looks:
            self.looks, self.batch = self.looks - 1, self.does
            return False
        self.stopped = True
        if self.ends is not None:
            raise self.ends
        return True

    def stop(self) -> None:
        self.stopped = True


def make_starter(*queries: Query) -> Callable[[], StreamingQuery]:
    """Return a function that starts these queries, one at each call. It must not be called more often."""
    remaining = iter(queries)
    return lambda: cast("StreamingQuery", next(remaining))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Python worker failed to connect back.", "did not start within ten seconds"),
        (
            "leasehold.adapters.worker.discovery.StreamRecreated: stream 1:orders:1",
            "its stream was deleted and made anew",
        ),
        ("perform latestOffset: java.io.EOFException", "the process of its source ended"),
        (
            "EOFException occurred while reading the port number from pyspark.daemon's stdout and terminated with code",
            "was killed as it started",
        ),
        (
            f"Job aborted{' at a line of a traceback' * 200}: the process that had them is gone",
            "the process of its source ended",
        ),
        ("availableNow: nothing was read for 300 s of shard-1", "a shard could not be read for minutes"),
    ],
    ids=[
        "started late",
        "made anew",
        "planner killed",
        "killed as it started",
        "planner gone, behind tracebacks",
        "not read",
    ],
)
def test_temporary_fault_is_logged_and_the_query_restarted(
    caplog: pytest.LogCaptureFixture, text: str, message: str
) -> None:
    waits = list[float]()
    with caplog.at_level(logging.WARNING):
        supervise(make_starter(Query(RuntimeError(text)), Query(RuntimeError(text)), Query()), sleep=waits.append)
    assert len(waits) == 2
    assert all(message in record.message for record in caplog.records)


class CapturedJavaError(RuntimeError):
    """A Java error as PySpark passes it on, with the details only in its stack."""

    def __init__(self, text: str, *stack: str) -> None:
        super().__init__(f"[STREAM_FAILED] terminated with exception: {text}")
        self._stackTrace = "\n".join(("org.apache.spark.SparkException: ", "\tat a.b.C", *stack))


@pytest.mark.parametrize(
    ("text", "stack"),
    [
        ("", ("Caused by: java.io.EOFException", "\tat java.io.DataInputStream.readInt")),
        (
            "Stream closed",
            (
                "Caused by: java.io.IOException: Stream closed",
                "\tat java.base/java.io.BufferedInputStream.getBufIfOpen(BufferedInputStream.java:168)",
                "\tat org.apache.spark.sql.execution.python.streaming.PythonStreamingSourceRunner.run(P.scala:1)",
            ),
        ),
        (
            "Pipe closed",
            (
                "java.nio.channels.ClosedChannelException",
                "\tat org.apache.spark.api.python.BasePythonRunner.read(P.scala:1)",
            ),
        ),
    ],
    ids=["no text", "closed while it was read", "another text"],
)
def test_killed_python_process_is_recognized_by_javas_stack(text: str, stack: tuple[str, ...]) -> None:
    """Java may be reading from the Python process, or writing to it, when the Python process is killed."""
    waits = list[float]()
    supervise(make_starter(Query(CapturedJavaError(text, *stack)), Query()), sleep=waits.append)
    assert len(waits) == 1


def test_fault_of_a_disk_is_raised() -> None:
    disk_full = CapturedJavaError(
        "No space left on device",
        "Caused by: java.io.IOException: No space left on device",
        "\tat java.base/java.io.FileOutputStream.write(FileOutputStream.java:1)",
        "\tat org.apache.spark.sql.execution.streaming.checkpointing.HDFSMetadataLog.add(H.scala:1)",
        "Caused by: java.lang.Error: another",
        "\tat org.apache.spark.sql.execution.datasources.v2.python.PythonMicroBatchStream.commit(P.scala:1)",
    )
    with pytest.raises(CapturedJavaError):
        supervise(make_starter(Query(disk_full)), sleep=lambda _seconds: pytest.fail("it was started again"))


def test_lasting_fault_is_raised() -> None:
    with pytest.raises(ValueError, match="no such column"):
        supervise(
            make_starter(Query(ValueError("no such column"))),
            sleep=lambda _seconds: pytest.fail("it was started again"),
        )


def test_interrupt_stops_the_query_and_hides_the_errors_of_a_java_that_has_ended() -> None:
    class Gone(Query):
        def stop(self) -> None:
            super().stop()
            raise RuntimeError("An error occurred while calling o13.sc")

    query = Gone(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt) as interrupted:
        supervise(make_starter(query), sleep=lambda _seconds: pytest.fail("it was started again"))
    assert (query.stopped, interrupted.value.__suppress_context__) == (True, True)


def test_interrupt_is_raised_although_the_ended_java_cannot_report_the_state_of_the_query() -> None:
    class Gone(Query):
        @property
        def isActive(self) -> bool:  # noqa: N802  Spark's name
            raise RuntimeError("An error occurred while calling o13.isActive")

    with pytest.raises(KeyboardInterrupt):
        supervise(make_starter(Gone(KeyboardInterrupt())))


@pytest.mark.parametrize("during", ["wait", "look", "pause"])
def test_interrupt_is_raised_in_spite_of_the_handler_that_pyspark_has_set(during: str) -> None:
    """PySpark's handler calls Java. This fails while its thread waits for Java, or after Java has ended."""

    class Interrupted(Query):
        def awaitTermination(self, seconds: float) -> bool:  # noqa: N802  Spark's name
            if during == "wait":
                signal.raise_signal(signal.SIGINT)
            return super().awaitTermination(seconds)

        @property
        def status(self) -> dict[str, Any]:
            if during == "look":
                signal.raise_signal(signal.SIGINT)
            return super().status

    def handler(_number: int, _frame: object) -> None:
        raise RuntimeError("reentrant call")

    handler.__module__ = "pyspark.core.context"
    former_handler = signal.signal(signal.SIGINT, handler)
    query = Interrupted(RuntimeError("ExecutorLostFailure"), looks=1)
    try:
        with pytest.raises(KeyboardInterrupt):
            supervise(make_starter(query), sleep=lambda _seconds: signal.raise_signal(signal.SIGINT))
        assert (query.stopped, signal.getsignal(signal.SIGINT)) == (True, handler)
    finally:
        signal.signal(signal.SIGINT, former_handler)


def test_stalled_trigger_is_stopped_and_restarted(caplog: pytest.LogCaptureFixture) -> None:
    stalled_query = Query(looks=10_000, active=True)
    with caplog.at_level(logging.WARNING):
        supervise(
            make_starter(stalled_query, Query()),
            stall_seconds=60,
            sleep=lambda _seconds: None,
            clock=stalled_query.clock,
        )
    assert stalled_query.stopped
    assert "it made no progress for 60 s" in caplog.text


def test_query_that_idles_between_triggers_is_left_alone() -> None:
    idle_query = Query(looks=1000)
    supervise(
        make_starter(idle_query),
        stall_seconds=60,
        sleep=lambda _seconds: pytest.fail("it was started again"),
        clock=idle_query.clock,
    )
    assert idle_query.looks == 0


def test_waits_before_restarts_grow_until_a_batch_is_done() -> None:
    executor_lost = RuntimeError("ExecutorLostFailure")
    waits = list[float]()
    queries = [Query(executor_lost) for _ in range(60)]  # waits are random, and eight of them may all be short
    supervise(make_starter(*queries, Query(executor_lost, looks=3, does=7), Query()), sleep=waits.append)
    assert len(waits) == 61
    assert waits[-1] <= 15.0
    assert max(waits[:-1]) > 15.0


def test_query_is_neither_started_nor_restarted_once_it_should_stop() -> None:
    supervise(make_starter(), should_stop=lambda: True)
    waits = list[float]()
    failed_query = Query(RuntimeError("ExecutorLostFailure"))
    supervise(make_starter(failed_query), should_stop=lambda: bool(waits), sleep=waits.append)
    assert len(waits) == 1


def test_running_query_is_stopped_once_it_should_stop() -> None:
    query = Query(looks=10)
    supervise(
        make_starter(query),
        should_stop=lambda: query.looks < 9,
        sleep=lambda _seconds: pytest.fail("it was started again"),
    )
    assert (query.stopped, query.looks) == (True, 8)


def test_query_is_stopped_if_it_fails_while_it_is_active() -> None:
    """A factory may start a second query with the same checkpointLocation only after the first has stopped."""

    class Unreadable(Query):
        @property
        def status(self) -> dict[str, Any]:
            raise RuntimeError("ExecutorLostFailure")

    query = Unreadable(looks=1)
    supervise(make_starter(query, Query()), sleep=lambda _seconds: None)
    assert query.stopped


def test_query_that_cannot_be_loaded_is_started_again() -> None:
    faults = [RuntimeError("ExecutorLostFailure")]

    def start() -> StreamingQuery:
        if faults:
            raise faults.pop()
        return cast("StreamingQuery", Query())

    waits = list[float]()
    supervise(start, sleep=waits.append)
    assert len(waits) == 1


def test_earlier_batch_of_a_query_does_not_shorten_the_waits() -> None:
    """Only a batch that was finished after the restart shows that the cause is gone."""
    waits = list[float]()
    queries = [Query(RuntimeError("ExecutorLostFailure"), looks=2, batch=7, does=7) for _ in range(60)]
    supervise(make_starter(*queries, Query()), sleep=waits.append)
    assert max(waits) > 60.0


def test_time_without_progress_is_counted_per_trigger_and_state() -> None:
    clock = Clock()
    query = Query(active=True, batch=1)
    detector = StallDetector(60, clock)

    def is_stuck_after(seconds: float) -> bool:
        clock.now += seconds
        return detector.is_stuck(cast("StreamingQuery", query))

    assert not is_stuck_after(1000)  # the first look
    assert not is_stuck_after(60)
    query.batch = 2
    assert not is_stuck_after(1)
    assert not is_stuck_after(60)
    query.active = False
    assert not is_stuck_after(1000)
    query.active = True
    assert not is_stuck_after(1000)
    assert not is_stuck_after(60)
    assert is_stuck_after(1)


def test_handler_of_the_program_is_kept() -> None:
    """A program that handles Ctrl-C itself does not get a KeyboardInterrupt."""
    numbers = list[int]()

    def handler(number: int, _frame: object) -> None:
        numbers.append(number)

    class Interrupted(Query):
        def awaitTermination(self, seconds: float) -> bool:  # noqa: N802  Spark's name
            signal.raise_signal(signal.SIGINT)
            return super().awaitTermination(seconds)

    former_handler = signal.signal(signal.SIGINT, handler)
    try:
        supervise(make_starter(Interrupted()))
    except KeyboardInterrupt:
        pytest.fail("the handler was replaced")
    else:
        assert (numbers, signal.getsignal(signal.SIGINT)) == ([signal.SIGINT], handler)
    finally:
        signal.signal(signal.SIGINT, former_handler)
