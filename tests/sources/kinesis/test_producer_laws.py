"""Every record that a producer accepts gets a result, whatever the client raises and however the producer ends."""

import array
import gc
import json
import logging
import os
import pickle
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any, cast

import pytest
from botocore.exceptions import ParamValidationError
from botocore.parsers import ResponseParserError
from kept_records import RecordingClient, producing, rejection
from one_shard import SHARD, AcceptingShard, OneShard
from waiters import Clock, until

from leasehold.adapters.options import ProduceOptions
from leasehold.adapters.producing import open_producer
from leasehold.adapters.sources.kinesis.aggregation.encode import Aggregate, max_framing_bytes
from leasehold.adapters.sources.kinesis.producer import producer as module
from leasehold.adapters.sources.kinesis.producer.core import Settings
from leasehold.adapters.sources.kinesis.producer.producer import Producer, RecordFuture
from leasehold.adapters.sources.kinesis.records import MARK_BYTES, Mark, split_mark
from leasehold.balancer.model import HASH_KEYS
from leasehold.errors import ProducerError

SECONDS = 30.0


def outcomes(futures: list[RecordFuture]) -> list[str]:
    """Wait for the result of each record. Return the class name of each error, or "" for each success."""
    errors = []
    for future in futures:
        try:
            future.result(SECONDS)
        except ProducerError as error:
            errors.append(type(error).__name__)
        else:
            errors.append("")
    return errors


# Types

NOT_BYTES: list[Any] = ["text", None, 7, 1.5, ["x"], array.array("i", [1]), object()]
SURROGATE = "\ud800"


@pytest.mark.parametrize(
    "bad",
    [
        *[(wrong_value, "k", None) for wrong_value in NOT_BYTES],
        *[(b"x", wrong_value, None) for wrong_value in (b"k", None, 7, SURROGATE, ["k"])],
        *[(b"x", "k", wrong_value) for wrong_value in (7, b"7", 1.5, SURROGATE, ["7"])],
    ],
)
def test_value_of_the_wrong_type_is_rejected_at_the_call(bad: tuple[Any, Any, Any]) -> None:
    """A record that could not be sent is not accepted, so that it cannot affect other records."""
    client = RecordingClient()
    producer = producing(client, linger_seconds=60.0)
    first_future = producer.put(b"first", "k")
    with pytest.raises((TypeError, ValueError), match=r"^(data|partition_key|explicit_hash_key): "):
        producer.put(*bad)
    futures = [first_future, producer.put(b"last", "k")]
    assert producer.close(SECONDS)
    assert (outcomes(futures), client.data) == (["", ""], [b"first", b"last"])


@pytest.mark.parametrize("kind", [bytearray, memoryview, type("Own", (bytes,), {})])
def test_data_of_any_bytes_like_type_is_copied_when_put(kind: Callable[[Any], Any]) -> None:
    client, buffer = RecordingClient(), bytearray(b"before")
    with producing(client, linger_seconds=60.0) as producer:
        producer.put(kind(buffer), "k")
        buffer[:] = b"after!"
    assert client.data == [b"before"]


@pytest.mark.parametrize(
    ("source", "options"),
    [
        *[(wrong_source, {}) for wrong_source in (None, 7, b"kinesis://s", ["kinesis://s"], f"kinesis://{SURROGATE}")],
        *[
            ("kinesis://s?region=eu-west-1", {name: value})
            for name in ("linger_ms", "share", "time_to_live", "on_late", "epoch")
            for value in ("\ud800", b"1", [1], object(), float("nan"), True)
        ],
        ("kinesis://s?region=eu-west-1", {"linger_ms": 10**400}),
    ],
)
def test_option_of_the_wrong_type_is_rejected_before_anything_opens(source: Any, options: Any) -> None:  # noqa: ANN401  anything
    threads = threading.active_count()
    with pytest.raises((ValueError, TypeError)) as rejection:
        open_producer(source, options)
    assert str(rejection.value).startswith(("SOURCE", *options))
    assert threading.active_count() == threads


def test_each_option_reaches_its_producer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leasehold.adapters.producing.Producer", lambda _clients, _stream, settings: settings)
    options = ProduceOptions(linger_ms=50, share=0.5, time_to_live=9, on_late="fail", epoch=7)
    settings: object = open_producer("kinesis://s?region=eu-west-1", options)
    assert settings == Settings(linger_seconds=0.05, share=0.5, time_to_live_seconds=9, on_late="fail", epoch=7)


# Exceptions of the client

FOREIGN = [KeyError("x"), MemoryError(), RecursionError(), UnicodeError("x"), AttributeError("x"), OSError("x")]
FOREIGN += cast("Any", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])


@pytest.mark.parametrize("error", FOREIGN, ids=repr)
def test_client_exception_fails_only_the_records_of_its_request(error: BaseException) -> None:
    def fail(data: list[bytes]) -> None:
        if b"bad" in data:
            raise error

    client = RecordingClient(fail)
    with producing(client) as producer:
        assert outcomes([producer.put(b"bad", "k")]) == ["RecordFailed"]
        assert outcomes([producer.put(b"good", "k")]) == [""]
        assert producer.metrics["UserRecordsPending"] == 0
    assert client.data == [b"good"]


@pytest.mark.parametrize("error", FOREIGN, ids=repr)
def test_failed_listing_is_retried(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a split, the producer needs a new listing, so it retries until it gets one."""
    client = cast("Any", AcceptingShard())
    response_row = {"ShardId": "s-1", "SequenceNumber": "7"}
    monkeypatch.setattr(client, "put_records", lambda **request: {"Records": [response_row] * len(request["Records"])})
    producer = producing(client)
    listings = iter([error, None])

    def list_shards(**_: object) -> dict[str, Any]:
        if fault := next(listings):
            raise fault
        return {"Shards": [SHARD | {"ShardId": "s-1"}]}

    monkeypatch.setattr(client, "list_shards", list_shards)
    with producer:
        assert outcomes([producer.put(b"a", "k"), producer.put(b"b", "k")]) == ["", ""]


def test_failing_log_harms_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """A producer logs a fault only after it has recovered from the fault."""

    def fail(data: list[bytes]) -> None:
        if b"bad" in data:
            raise KeyError("x")

    def refuse(*_: object, **__: object) -> None:
        raise OSError("the log is full")

    monkeypatch.setattr(module.log, "error", refuse)
    with producing(RecordingClient(fail)) as producer:
        assert outcomes([producer.put(b"bad", "k")]) == ["RecordFailed"]
        assert outcomes([producer.put(b"good", "k")]) == [""]


@pytest.mark.parametrize("method", ["add", "encode"])
def test_record_that_cannot_be_encoded_fails_alone(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original_method, added_data = getattr(Aggregate, method), list[bytes]()
    original_add = Aggregate.add

    def add(self: Aggregate, data: bytes, *arguments: Any) -> bool:  # noqa: ANN401  as in the replaced method
        added_data[:] = [*(added_data if self.count else ()), data]
        if method == "add" and data == b"bad":
            raise MemoryError
        return original_add(self, data, *arguments)

    def encode(self: Aggregate) -> bytes:
        if b"bad" in added_data:
            raise MemoryError
        return cast("bytes", original_method(self))

    monkeypatch.setattr(Aggregate, "add", add)
    if method == "encode":
        monkeypatch.setattr(Aggregate, "encode", encode)
    client = RecordingClient()
    with producing(client, linger_seconds=60.0) as producer:
        futures = [producer.put(data, "k") for data in (b"a", b"b", b"bad", b"c", b"d")]
    assert outcomes(futures) == ["", "", "RecordFailed", "", ""]
    assert client.data == [b"a", b"b", b"c", b"d"]


@pytest.mark.parametrize(
    "error",
    [rejection("ValidationException"), rejection("InvalidArgumentException"), ParamValidationError(report="no")],
    ids=lambda error: type(error).__name__,
)
def test_record_rejected_by_the_service_fails_alone(error: Exception) -> None:
    """The other records of the same aggregate and request are written, and records with the same key stay in order."""

    def fail(data: list[bytes]) -> None:
        if b"bad" in data:
            raise error

    client = RecordingClient(fail, halves=True)
    with producing(client, linger_seconds=60.0) as producer:
        futures = [producer.put(data, "k", "10") for data in (b"a", b"bad", b"b")]
        futures += [producer.put(data, "k", "0") for data in (b"c", b"d")]
        producer.flush(SECONDS)
        assert outcomes(futures) == ["", "RecordFailed", "", "", ""]
    assert producer.metrics["UserRecordsFailed"] == 1
    assert [payload for payload in client.data if payload in {b"a", b"b"}] == [b"a", b"b"]
    assert [payload for payload in client.data if payload in {b"c", b"d"}] == [b"c", b"d"]


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [],
        {"Records": None},
        {"Records": []},
        {"Records": [None]},
        {"Records": [{}]},
        {"Records": [{"ShardId": ["s-0"], "SequenceNumber": "7"}]},
        {"Records": [{"ShardId": "s-0", "SequenceNumber": None}]},
        {"Records": [{"ErrorCode": 7}]},
        ResponseParserError("a page of a proxy"),
    ],
)
def test_unreadable_response_leaves_the_outcome_unknown(answer: object) -> None:
    """If a response cannot be read, its records are sent again, as if there had been no response."""
    client, responses = cast("Any", AcceptingShard()), iter([answer])

    def put_records(**request: object) -> object:
        for response in responses:
            if isinstance(response, Exception):
                raise response
            return response
        return AcceptingShard.put_records(client, **request)

    client.put_records = put_records
    with producing(client) as producer:
        assert outcomes([producer.put(b"a", "k")]) == [""]
    assert producer.metrics["UserRecordsOutcomeUnknown"] == 1


# How a producer ends


@contextmanager
def silence() -> Iterator[tuple[RecordingClient, Event]]:
    """Yield a client that gets no responses until the block ends, and an event that is set once a request is sent."""
    request_sent, may_respond = Event(), Event()

    def hang(_data: list[bytes]) -> None:
        request_sent.set()
        may_respond.wait(SECONDS)

    try:
        yield RecordingClient(hang), request_sent
    finally:
        may_respond.set()


def test_close_that_times_out_returns_false_and_logs_unsent_records(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with silence() as (client, request_sent):
        producer = producing(client)
        futures = [producer.put(b"%d" % number, "k") for number in range(7)]
        assert request_sent.wait(SECONDS)
        assert not producer.close(0.0)
        assert outcomes(futures) == ["ProducerError"] * 7
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR] == [
        "stream 'orders': the producer was closed after 0 s with 7 records not sent"
    ]


def test_unreferenced_producer_sends_its_records_and_ends_its_threads() -> None:
    threads_before = set(threading.enumerate())
    with silence() as (client, request_sent):
        producer = producing(client, linger_seconds=0.0)
        futures = [producer.put(b"%d" % number, "k") for number in range(7)]
        threads = set(threading.enumerate()) - threads_before
        assert request_sent.wait(SECONDS)
        del producer
        gc.collect()
        assert all(thread.is_alive() for thread in threads)
    assert outcomes(futures) == [""] * 7
    for thread in threads:
        thread.join(SECONDS)
    assert not any(thread.is_alive() for thread in threads)


def test_producer_with_waiting_records_is_not_collected() -> None:
    client = RecordingClient()
    futures = [producing(client, linger_seconds=0.05).put(b"%d" % number, "k") for number in range(20)]
    gc.collect()
    assert outcomes(futures) == [""] * 20


def test_pump_that_ends_settles_the_records_lost_by_its_core(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = producing(AcceptingShard(), linger_seconds=60.0)
    future = producer.put(b"a", "k")

    def fail() -> float:
        producer._core._shard_queues.clear()  # noqa: SLF001  as a fault inside the core might
        raise KeyError("lost")

    monkeypatch.setattr(producer, "_start_due_requests", fail)
    assert producer.flush(SECONDS)
    assert outcomes([future]) == ["ProducerError"]
    with pytest.raises(ProducerError, match="lost"):
        producer.put(b"b", "k")
    with pytest.raises(ProducerError, match="lost"):
        producer.close()
    assert sum("the producer has stopped" in record.getMessage() for record in caplog.records) == 1


def test_flush_continues_when_another_one_ends() -> None:
    """Each flush suspends lingering until it ends, even if another flush ends earlier."""
    request_sent, may_respond = Event(), Event()

    def hang(_data: list[bytes]) -> None:
        request_sent.set()
        may_respond.wait(SECONDS)

    client, flush_results = RecordingClient(hang), list[bool]()
    producer = producing(client, linger_seconds=3600.0)
    producer.put(b"a", "k")
    flushing_thread = Thread(target=lambda: flush_results.append(producer.flush(SECONDS)))
    flushing_thread.start()
    assert request_sent.wait(SECONDS)
    assert not producer.flush(0.0)
    producer.put(b"b", "k")
    may_respond.set()
    flushing_thread.join(SECONDS)
    assert (flush_results, client.data) == ([True], [b"a", b"b"])
    producer.close(0.0)


def test_full_producer_sends_at_once() -> None:
    """If the producer is full, lingering records are sent to make room for records that wait to be accepted."""
    client = RecordingClient()
    settings = Settings(linger_seconds=3600.0)
    with Producer(cast("Any", client), "orders", settings, pending_records=3) as producer:
        for number in range(10):
            producer.put(b"%d" % number, "k")
    assert client.data == [b"%d" % number for number in range(10)]


def test_block_exit_does_not_hide_the_original_exception() -> None:
    """If the block raises an exception, the fault of the producer is only logged."""
    client = cast("Any", OneShard())
    client.put_records = AcceptingShard().put_records
    producer = producing(client)

    def raise_in_block() -> None:
        with producer:
            producer._stop(KeyError("x"))  # noqa: SLF001
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        raise_in_block()


def test_producer_cannot_be_pickled() -> None:
    """The error message recommends opening one producer in each process."""
    with producing(AcceptingShard()) as producer, pytest.raises(TypeError, match="open one in each"):
        pickle.dumps(producer)


def error_in_fork(call: Callable[[], object]) -> str:
    """Call the function in a fork of this process. Return the class name of the error that it raises, or ""."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            try:
                call()
            except BaseException as error:  # noqa: BLE001  the parent reports it
                os.write(write_end, type(error).__name__.encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        result = pipe.read()
    os.waitpid(child, 0)
    return result


DOORS: dict[str, Callable[[Producer, RecordFuture], object]] = {
    "put": lambda producer, _: producer.put(b"b", "k"),
    "flush": lambda producer, _: producer.flush(),
    "close": lambda producer, _: producer.close(),
    "metrics": lambda producer, _: producer.metrics,
    "with": lambda producer, _: producer.__exit__(None, None, None),
    "result": lambda _, writing: writing.result(),
}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("locked", [False, True])
def test_producer_in_a_forked_process_raises_at_once(door: str, locked: bool) -> None:
    """A forked process has none of the parent's threads, and a lock that such a thread held stays locked forever."""
    client = RecordingClient()
    with producing(client, linger_seconds=3600.0) as producer:
        future = producer.put(b"a", "k")
        if locked:
            producer._lock.acquire()  # noqa: SLF001  as a thread of the producer might
        try:
            error_name = error_in_fork(lambda: DOORS[door](producer, future))
        finally:
            if locked:
                producer._lock.release()  # noqa: SLF001
    assert (error_name, outcomes([future]), client.data) == ("ProducerError", [""], [b"a"])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_old_results_and_new_producers_work_in_a_fork() -> None:
    """In a fork, only calls that need the parent's threads are rejected."""
    with producing(AcceptingShard()) as producer:
        future = producer.put(b"a", "k")
        future.result(SECONDS)

        def use_old_and_new() -> None:
            future.result()
            with producing(AcceptingShard()) as new_producer:
                new_producer.put(b"b", "k").result(SECONDS)

        assert error_in_fork(use_old_and_new) == ""


def test_process_exit_drains_and_logs_unsent_records(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All producers share one timeout. Each producer that could not send all its records logs one line."""
    monkeypatch.setattr(module, "EXIT_DRAIN_SECONDS", 0.0)
    with silence() as (client, request_sent):
        stuck_producer = producing(client)
        futures = [stuck_producer.put(b"%d" % number, "k") for number in range(100)]
        assert request_sent.wait(SECONDS)
        module._drain_producers_at_exit()  # noqa: SLF001
        assert outcomes(futures) == ["ProducerError"] * 100
    with pytest.raises(ProducerError, match="closed"):
        stuck_producer.put(b"b", "k")
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR] == [
        "stream 'orders': the program ended without close(), and 100 records were not sent"
    ]
    caplog.clear()
    monkeypatch.setattr(module, "EXIT_DRAIN_SECONDS", SECONDS)
    accepting_client = RecordingClient()
    producer = producing(accepting_client, linger_seconds=3600.0)
    for _ in range(100):
        producer.put(b"a", "k")
    module._drain_producers_at_exit()  # noqa: SLF001
    assert (len(accepting_client.data), caplog.records) == (100, [])


PROGRAM = """
import json, multiprocessing, os, sys, threading
sys.path[:0] = PATHS
from kept_records import RecordingClient, producing

def report(data):
    for each in data:
        os.write(1, each + b" ")

def put(places=range(100), producer=None):
    global kept
    kept = producer or producing(RecordingClient(report), linger_seconds=3600.0)
    for place in places:
        kept.put(b"%d" % place, "k")

if __name__ == "__main__":
"""
ENDS = {
    "return": "put()",
    "sys.exit": "put(); sys.exit(0)",
    "raise": "put(); raise KeyError",
    "KeyboardInterrupt": "put(); raise KeyboardInterrupt",
    "forgotten": "put(); del kept",
    "a thread": "t = threading.Thread(target=put); t.start()",
    "a daemon's end": "t = threading.Thread(target=put, daemon=True); t.start(); t.join()",
    "a thread that outlives main": """put(range(50))
threading.Thread(target=put, args=(range(50, 100), kept)).start()""",
    "fork": "c = multiprocessing.get_context('fork').Process(target=put); c.start(); c.join()",
    "spawn": "c = multiprocessing.get_context('spawn').Process(target=put); c.start(); c.join()",
    "fork and exit": """put()
if os.fork() == 0: sys.exit(0)
os.wait()""",
}


@pytest.mark.more
@pytest.mark.parametrize("end", ENDS)
def test_program_that_ends_without_close_loses_nothing(end: str, tmp_path: Path) -> None:
    """However the interpreter ends, each record is written exactly once."""
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[2]), *sys.path]
    program = tmp_path / "program.py"
    program.write_text(
        PROGRAM.replace("PATHS", json.dumps(paths)) + textwrap.indent(ENDS[end], "    "), encoding="utf-8"
    )
    completed = subprocess.run([sys.executable, program], capture_output=True, timeout=120, check=False)
    sent_numbers = sorted(map(int, completed.stdout.split()))
    assert (sent_numbers, b"not sent" in completed.stderr) == ([*range(100)], False), completed.stderr.decode()


# Limits and waits


@pytest.mark.parametrize(("epoch", "mark_bytes"), [(None, 0), (0, MARK_BYTES), (7, MARK_BYTES)])
def test_mark_of_a_record_counts_as_bytes(epoch: int | None, mark_bytes: int) -> None:
    limit = (1 << 20) - len("k") - mark_bytes
    with producing(AcceptingShard(), epoch=epoch) as producer:
        producer.check(bytes(limit), "k")
        with pytest.raises(ValueError, match="data: 1048577 bytes with its key; the stream accepts 1048576"):
            producer.check(bytes(limit + 1), "k")
        producer.check(b"", "k" * 256)


def test_tag_of_a_record_counts_as_bytes() -> None:
    context = b"q.1.2.0-0.e"
    limit = (1 << 20) - len("k") - max_framing_bytes(context)
    with producing(AcceptingShard()) as producer:
        for accept in (producer.check, producer.put):
            accept(bytes(limit), "k", context=context)
            with pytest.raises(ValueError, match="data: 1048577 bytes with its key"):
                accept(bytes(limit + 1), "k", context=context)


@pytest.mark.parametrize("epoch", [0, 7])
def test_every_epoch_marks_records(epoch: int) -> None:
    client = RecordingClient()
    with producing(client, epoch=epoch) as producer:
        for _ in range(2):
            producer.put(b"x", "k").result(SECONDS)
    assert [split_mark(data) for data in client.data] == [(Mark(epoch, counter), b"x") for counter in range(2)]


def test_wait_for_a_result_ends_with_its_timeout() -> None:
    with silence() as (client, request_sent):
        producer = producing(client)
        future = producer.put(b"a", "k")
        assert request_sent.wait(SECONDS)
        with pytest.raises(TimeoutError, match=r"not written within 0\.0 s"):
            future.result(0.0)
        producer.close(0.0)


def test_close_does_not_wait_for_a_hanging_request() -> None:
    request_sent, may_respond, responded = Event(), Event(), Event()

    def hang(_data: list[bytes]) -> None:
        request_sent.set()
        may_respond.wait(5.0)
        responded.set()

    producer = producing(RecordingClient(hang))
    producer.put(b"a", "k")
    assert request_sent.wait(SECONDS)
    for _ in range(2):
        producer.close(0.0)
    assert not responded.is_set()
    may_respond.set()


def wait_until_waiting(condition: Any, count: int) -> None:  # noqa: ANN401  a Condition
    """Wait until this many threads wait for the condition."""
    until(lambda: len(condition._waiters) == count, "they wait")  # noqa: SLF001  not visible elsewhere


def test_every_blocked_put_ends_with_the_producer() -> None:
    errors = list[str]()
    with silence() as (client, request_sent):
        producer = Producer(cast("Any", client), "orders", Settings(linger_seconds=0.0), pending_records=1)

        def put() -> None:
            try:
                producer.put(b"b", "k")
            except ProducerError as error:
                errors.append(str(error))

        producer.put(b"a", "k")
        assert request_sent.wait(SECONDS)
        threads = [Thread(target=put, daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        wait_until_waiting(producer._space_available, 2)  # noqa: SLF001
        producer.close(0.0)
        for thread in threads:
            thread.join(5.0)
    assert errors == ["the producer is closed"] * 2
    assert producer.metrics["UserRecordsReceived"] == 1


def test_every_waiting_caller_is_woken_by_one_request() -> None:
    request_sent, may_respond = Event(), Event()

    def hang(_data: list[bytes]) -> None:
        request_sent.set()
        may_respond.wait(SECONDS)

    producer = producing(RecordingClient(hang))
    future = producer.put(b"a", "k")
    assert request_sent.wait(SECONDS)
    threads = [Thread(target=future.result, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_until_waiting(producer._outcomes.changed, 3)  # noqa: SLF001
    may_respond.set()
    for thread in threads:
        thread.join(5.0)
    assert not any(thread.is_alive() for thread in threads)
    producer.close()


def test_pending_bytes_are_limited_and_freed() -> None:
    request_sent, may_respond = Event(), Event()

    def hang(_data: list[bytes]) -> None:
        request_sent.set()
        may_respond.wait(SECONDS)

    client: Any = RecordingClient(hang)
    with Producer(client, "orders", Settings(linger_seconds=0.0), pending_bytes=100) as producer:
        futures, is_full = list[RecordFuture](), list[bool]()
        for _ in range(2):
            futures.append(producer.put(bytes(50), "k"))
            is_full.append(producer._is_full)  # noqa: SLF001
        may_respond.set()
        assert outcomes(futures) == ["", ""]
        assert [*is_full, producer._is_full] == [False, True, False]  # noqa: SLF001
        assert producer._pending_bytes == 0  # noqa: SLF001


def test_requests_and_listings_are_limited() -> None:
    """Due requests wait in the pump without keeping it busy, and only one listing is in progress at any time."""
    client, calls, waits = cast("Any", RecordingClient(halves=True)), list[Any](), list[float]()
    producer = Producer(client, "orders", Settings(linger_seconds=0.0), requests=1)
    with producer._lock:  # noqa: SLF001  the pump waits
        producer._call_queue = cast("Any", SimpleNamespace(put=calls.append))  # noqa: SLF001
        producer._core.update_map(None, producer._clock() - 60.0)  # noqa: SLF001  so that a listing is due
        for hash_key in (0, 10):
            arguments = hash_key, b"x", "k", hash_key, str(hash_key), 0.0, 0.0
            producer._core.enqueue_record(RecordFuture(*arguments, producer._outcomes))  # noqa: SLF001
            waits.append(producer._start_due_requests())  # noqa: SLF001
        assert (len(calls), min(waits) > 0.0) == (2, True)
    assert producer._stop_and_give_up_records() == 2  # noqa: SLF001


def test_error_after_close_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    producer = producing(AcceptingShard())
    assert producer.close()
    producer._stop(KeyError("x"))  # noqa: SLF001  as a late response might
    assert producer.close()
    assert caplog.messages == []


def test_each_caller_gets_its_own_error() -> None:
    """Threads that raise the same error would mix their tracebacks."""
    producer, cause, errors = producing(AcceptingShard()), KeyError("x"), list[ProducerError]()
    producer._stop(cause)  # noqa: SLF001
    for call in (producer.close, producer.close, lambda: producer.put(b"a", "k")):
        with pytest.raises(ProducerError, match="x") as exc_info:
            call()
        errors.append(exc_info.value)
    assert len({id(error) for error in errors}) == 3
    assert [error.__cause__ for error in errors] == [cause] * 3


def test_block_exit_raises_the_fault_of_the_producer() -> None:
    with pytest.raises(ProducerError, match="x"), producing(AcceptingShard()) as producer:
        producer._stop(KeyError("x"))  # noqa: SLF001


def test_interrupted_flush_no_longer_suspends_lingering(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> bool:
        raise KeyboardInterrupt

    with producing(AcceptingShard(), linger_seconds=60.0) as producer:
        with monkeypatch.context() as patch_context:
            patch_context.setattr(producer._outcomes.changed, "wait_for", interrupt)  # noqa: SLF001
            with pytest.raises(KeyboardInterrupt):
                producer.flush()
        assert not producer._core.flushing  # noqa: SLF001


def test_process_exit_drains_its_own_producers_together_within_one_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forked process leaves the producers of its parent alone."""
    clock, flushes = Clock(), list[tuple[float | None, int]]()
    producers = [producing(AcceptingShard(), linger_seconds=60.0) for _ in range(3)]
    producers[2]._process = cast("Any", object())  # noqa: SLF001  as in a fork

    def flush(_producer: Producer, timeout: float | None = None) -> bool:
        flushes.append((timeout, sum(producer._core.flushing for producer in producers)))  # noqa: SLF001
        clock.now += 6.0
        return False

    with monkeypatch.context() as patch_context:
        patch_context.setattr(module, "_unclosed_producers", set(producers))
        patch_context.setattr(module, "time", clock)
        patch_context.setattr(Producer, "flush", flush)
        module._drain_producers_at_exit()  # noqa: SLF001
    assert flushes == [(10.0, 2), (4.0, 2)]
    assert [producer._closed for producer in producers] == [True, True, False]  # noqa: SLF001
    producers[2]._stop_and_give_up_records()  # noqa: SLF001


def test_every_response_allows_another_request() -> None:
    with Producer(cast("Any", AcceptingShard()), "orders", Settings(linger_seconds=0.0), requests=1) as producer:
        for _ in range(3):
            producer.put(b"x", "k").result(5.0)


def test_producer_stops_after_a_lasting_rejection() -> None:
    """The records of a request without the permission to write would otherwise be sent again forever."""

    def reject(_data: list[bytes]) -> None:
        raise rejection("AccessDeniedException")

    producer = producing(RecordingClient(reject))
    with pytest.raises(ProducerError, match="lack kinesis:PutRecords"):
        producer.put(b"x", "k").result(5.0)
    with pytest.raises(ProducerError, match="lack kinesis:PutRecords"):
        producer.close()


def test_records_do_not_linger_until_the_last_flush_ends() -> None:
    with producing(AcceptingShard(), linger_seconds=60.0) as producer, producer._lock:  # noqa: SLF001
        with producer._flush_while_waiting():  # noqa: SLF001
            with producer._flush_while_waiting():  # noqa: SLF001
                pass
            assert producer._core.flushing  # noqa: SLF001
        is_flushing = producer._core.flushing  # noqa: SLF001
    assert not is_flushing


def test_producer_reads_every_page_of_the_listing() -> None:
    tokens, third = ["b", "c", None], (HASH_KEYS[1] + 1) // 3
    ranges = [(0, third - 1), (third, 2 * third - 1), (2 * third, HASH_KEYS[1])]
    requests = list[dict[str, Any]]()

    def list_shards(**request: Any) -> dict[str, Any]:  # noqa: ANN401  as boto3
        index = len(requests)
        requests.append(request)
        hash_range = {"StartingHashKey": str(ranges[index][0]), "EndingHashKey": str(ranges[index][1])}
        shard = {"ShardId": f"s-{index}", "HashKeyRange": hash_range, "SequenceNumberRange": {}}
        return {"Shards": [shard], "NextToken": tokens[index]}

    client: Any = SimpleNamespace(list_shards=list_shards)
    shard_map = module.KinesisPutClient(client, "orders").list_shards()
    assert shard_map is not None
    assert shard_map.ids == ("s-0", "s-1", "s-2")
    assert requests == [{"StreamName": "orders"}, {"NextToken": "b"}, {"NextToken": "c"}]
