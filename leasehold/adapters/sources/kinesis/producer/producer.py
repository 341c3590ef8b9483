"""A producer for Kinesis that keeps records in order and aggregates them. It runs `ProducerCore` in threads.

with Producer(create_producer_clients("eu-west-1", None, 4), "orders") as producer:
    future = producer.put(b"...", "customer-7")
print(future.result().shard)

One thread, the pump, starts the requests that are due (`_start_due_requests`). Other threads make these requests
(`KinesisPutClient`) and pass the responses to the core. The core's results then wake the waiting callers.

Rule 1: Every record that `put` accepted gets a result, unless the producer stops. If it stops, `Outcomes` contains the
reason, so no caller waits for a thread that has ended. If an error concerns only some records, only these records fail.
An error that concerns the whole stream, or an error in the pump, stops the producer.

Rule 2: The threads are daemons, and all of them start together with the producer. They cannot be started later, because
`_drain_producers_at_exit` uses them when the interpreter is exiting and starts no more threads. The threads keep the
producer alive only while it has records.

Rule 3: A fork copies the producer without its threads, and its lock may be held at that moment. In a child process,
every method therefore raises an error before it acquires the lock.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from math import inf
from queue import SimpleQueue
from threading import Condition, Lock, Thread
from typing import TYPE_CHECKING, Any, NoReturn, Self, cast
from weakref import WeakSet, ref

import boto3
from attrs import define, evolve, frozen
from botocore.config import Config as ClientConfig
from botocore.exceptions import (
    ClientError,
    ConnectTimeoutError,
    EndpointConnectionError,
    ParamValidationError,
    ProxyConnectionError,
)
from botocore.parsers import ResponseParserError

from leasehold.adapters.processes import call_at_exit, current_process
from leasehold.adapters.sources.call_timeouts import CallTimeouts
from leasehold.adapters.sources.kinesis.aggregation.encode import max_framing_bytes
from leasehold.adapters.sources.kinesis.clients import KinesisClients, WireFormat
from leasehold.adapters.sources.kinesis.faults import (
    SERVER_ERROR_STATUS,
    error_code,
    stream_summary_from_response,
    translate_errors,
    translate_parse_errors,
)
from leasehold.adapters.sources.kinesis.hash_keys import digest_partition_key
from leasehold.adapters.sources.kinesis.producer.core import (
    Entry,
    ProducerCore,
    RecordsDelivered,
    RecordsLate,
    RecordsUnsendable,
    Result,
    Settings,
    ShardMap,
    Unit,
    UnitFailed,
    UnitOutcome,
    UnitRejected,
    UnitRetryable,
    UnitUnknown,
    UnitWritten,
    build_shard_map,
)
from leasehold.adapters.sources.kinesis.records import MARK_BYTES, Mark, convert_shards, prepend_mark
from leasehold.adapters.sources.kinesis.stream_arn import name_stream_by_arn
from leasehold.adapters.threads import spawn
from leasehold.balancer.model import HASH_KEYS
from leasehold.errors import ProducerError, RecordFailed, RecordLate, SourceError, SourceUnavailable
from leasehold.stores.deadlines import add_response_deadlines
from leasehold.stores.fields import parse_decimal
from leasehold.stores.printable import error_summary, limited_error_text, make_safe_logger

try:
    from leasehold.adapters.sources.kinesis.cbor.hooks import ProducerCborHooks, PutRows, replace_put_methods
except ImportError:  # without these hooks, boto3 serializes the requests
    PutRows, ProducerCborHooks = list, None  # type: ignore[assignment,misc]  # the slow way

if TYPE_CHECKING:  # the stubs are not installed for users
    from types_boto3_kinesis import KinesisClient

log = make_safe_logger(logging.getLogger("leasehold.kinesis"))

PUT_TIMEOUTS_SECONDS = 10.0, 20.0, 30.0
"""How long to wait for the next bytes of a response, in seconds. A request that times out is sent again, although it
may have been carried out."""
QUICK_RESPONSES = 20
"""After this many consecutive quick responses, the shortest timeout is used again. The number is high because each
request contains records for many shards."""

EXIT_DRAIN_SECONDS = 10.0
"""How long a process waits at its exit until the producers that were not closed have sent their records."""

_RECORD_ERROR_CODES = frozenset({"InvalidArgumentException", "SerializationException", "ValidationException"})
"""Error codes with which the service rejects individual records. Other codes concern the caller or the whole stream."""

_NOT_SENT_ERRORS = (ConnectTimeoutError, EndpointConnectionError, ProxyConnectionError)


def create_producer_clients(
    region: str | None,
    endpoint: str | None,
    connections: int,
    wire: WireFormat = "cbor",
    *,
    session: boto3.Session | None = None,
    arn: str | None = None,
) -> KinesisClients:
    """Return the clients of a producer. Their timeouts adapt to a slow service.

    Args:
        region: The region; None to use the environment's.
        endpoint: The URL of the endpoint; None to use the region's.
        connections: The number of connections, one for each concurrent request.
        wire: The format in which records are sent.
        session: The session with the credentials; None to use the environment's credentials.
        arn: The ARN of the stream, if requests name it by ARN.
    """
    return KinesisClients(
        lambda seconds: create_producer_client(
            region, endpoint, connections, wire, read_seconds=seconds, session=session, arn=arn
        ),
        PUT_TIMEOUTS_SECONDS,
    )


def create_producer_client(
    region: str | None,
    endpoint: str | None,
    connections: int,
    wire: WireFormat = "cbor",
    *,
    read_seconds: float = PUT_TIMEOUTS_SECONDS[0],
    session: boto3.Session | None = None,
    arn: str | None = None,
) -> "KinesisClient":
    """Return a client that does not retry requests, because a retry could write a record twice without our knowledge.

    Args:
        region: The region; None to use the environment's.
        endpoint: The URL of the endpoint; None to use the region's.
        connections: The number of connections, one for each concurrent request.
        wire: The format in which records are sent, if the service supports it.
        read_seconds: The read timeout: how many seconds to wait for the next bytes of a response.
        session: The session with the credentials; None to use the environment's credentials.
        arn: The ARN of the stream, if requests name it by ARN.
    """
    client: KinesisClient = (session or boto3).client(
        "kinesis",
        region_name=region,
        endpoint_url=endpoint,
        config=ClientConfig(
            connect_timeout=5,
            read_timeout=read_seconds,
            max_pool_connections=connections + 1,
            retries={"total_max_attempts": 1},
        ),
    )
    add_response_deadlines(client)
    if arn is not None:
        name_stream_by_arn(client, arn)
    if ProducerCborHooks is None:
        log.warning("records are sent slowly: orjson, pybase64 or cbor2 is missing; install leasehold[aws]")
    else:
        hooks = ProducerCborHooks(client, cbor=wire != "json")
        if wire == "cbor":
            replace_put_methods(client, hooks, arn)
    return client


class KinesisPutClient:
    """Makes the requests of a producer."""

    def __init__(self, client: "KinesisClient | KinesisClients", stream: str) -> None:
        """Use `client`, which must not retry requests by itself, to write to `stream`."""
        clients = KinesisClients.of(client)
        self._stream = stream
        self._put_timeouts, self._other_timeouts = (
            CallTimeouts(clients, quick_responses=QUICK_RESPONSES),
            CallTimeouts(clients, retry_first_call=True),
        )

    def add_stream_limits(self, settings: Settings) -> Settings:
        """Return the settings with the stream's record limit. Raises SourceError if order cannot be kept."""
        with translate_errors(self._stream), translate_parse_errors(self._stream):
            response = self._other_timeouts.call("describe_stream_summary", StreamName=self._stream)
            summary = stream_summary_from_response(response, self._stream)
            strategy = summary.get("RecordDistributionStrategy")
            record_bytes = 1024 * int(summary.get("MaxRecordSizeInKiB") or 1024)
        if strategy == "AUTO":
            raise SourceError(
                f"stream {self._stream!r} distributes its records itself (RecordDistributionStrategy AUTO): keys do "
                "not choose a shard, and consumers drop aggregated records; set the strategy to PARTITION_KEY"
            )
        return evolve(settings, record_bytes=record_bytes)

    def list_shards(self) -> ShardMap | None:
        """Return the map of the stream's shards, or None if there is a gap between the open shards.

        Raises:
            SourceUnavailable: If the service does not respond or throttles the request. A later attempt may succeed.
            SourceError: If the service rejects the request, for example because of wrong credentials.
        """
        with translate_errors(self._stream), translate_parse_errors(self._stream):
            page = self._other_timeouts.call("list_shards", StreamName=self._stream)
            rows = page["Shards"]
            while next_token := page.get("NextToken"):
                page = self._other_timeouts.call("list_shards", NextToken=next_token)
                rows += page["Shards"]
            return build_shard_map(convert_shards(rows))

    def put_units(self, units: Sequence[Unit]) -> list[UnitOutcome]:
        """Send units in one request. If the request is rejected because of one record, send each half separately.

        Unexpected exceptions of the client propagate.

        Raises:
            SourceError: If the service rejects the request for a reason that sending it again does not change.
        """
        rows = PutRows(
            {"Data": unit.data, "PartitionKey": unit.partition_key, "ExplicitHashKey": str(unit.hash_key)}
            for unit in units
        )
        try:
            with translate_errors(self._stream):
                response = self._put_timeouts.call("put_records", StreamName=self._stream, Records=rows)
        except SourceError as fault:
            cause = fault.__cause__
            error_name = error_code(cause) if isinstance(cause, ClientError) else type(cause).__name__
            if error_name in _RECORD_ERROR_CODES or isinstance(cause, ParamValidationError):
                if len(units) == 1:
                    return [UnitRejected(fault)]
                half_count = len(units) // 2
                return self.put_units(units[:half_count]) + self.put_units(units[half_count:])
            if not isinstance(fault, SourceUnavailable):
                raise
            # If the request was rejected or not sent, nothing was written. In any other case, the records may have been
            # written.
            is_nothing_written = isinstance(cause, _NOT_SENT_ERRORS)
            if isinstance(cause, ClientError):
                is_nothing_written = (
                    int(cause.response.get("ResponseMetadata", {}).get("HTTPStatusCode", SERVER_ERROR_STATUS))
                    < SERVER_ERROR_STATUS
                )
            return [UnitRetryable(error_name) if is_nothing_written else UnitUnknown(error_name)] * len(units)
        except ResponseParserError as error:
            return [UnitUnknown(type(error).__name__)] * len(units)
        results = response.get("Records") if isinstance(response, dict) else None
        if not isinstance(results, list) or len(results) != len(units):
            return [UnitUnknown("ResultCountMismatch")] * len(units)
        return [self._parse_outcome(row) for row in results]

    def _parse_outcome(self, row: Any) -> UnitOutcome:  # noqa: ANN401  whatever the service wrote
        match row:
            case {"ErrorCode": str(code)} if code in _RECORD_ERROR_CODES:
                message = row.get("ErrorMessage")
                return UnitRejected(
                    SourceError(f"Kinesis rejected a record for stream {self._stream!r}: {code} {message or ''}")
                )
            case {"ErrorCode": str(code)} if code:
                return UnitRetryable(code)
            case {"ShardId": str(shard), "SequenceNumber": str(sequence_number)}:
                return UnitWritten(shard, sequence_number)
        return UnitUnknown("UnreadableResult")


_MAX_KEY_CHARACTERS = 256
_LATE_CHECK_SECONDS = 1.0  # the longest delay between the expiry of a record and its failure
_FIRST_LISTING_ATTEMPTS, _FIRST_LISTING_PAUSE_SECONDS = 60, 0.5


@frozen
class Written:
    """The position of a written record."""

    shard: str
    sequence_number: str
    sub_sequence_number: int


class Outcomes:
    """Wakes the callers that wait for records of one producer, and stores the reason if the producer stops."""

    def __init__(self, lock: Lock) -> None:
        self.lock, self.changed, self.process = lock, Condition(lock), current_process()
        self._fault: ProducerError | None = None

    @property
    def fault(self) -> ProducerError | None:
        """The error that stopped the producer, or None while it is running."""
        return self._fault if self.process is current_process() else _make_wrong_process_error()

    def fail_all_waits(self, fault: ProducerError) -> None:
        """Make all current and later waits fail. The first reason is kept."""
        self._fault = self._fault or fault
        self.changed.notify_all()


def _make_wrong_process_error() -> "ProducerError":
    return ProducerError(
        "this producer belongs to another process: a fork copies none of its threads, so it sends nothing here; "
        "open a producer in each process, after the fork"
    )


@define(eq=False)
class RecordFuture(Entry):
    """The future of one record.

    The future is also the record's queue entry, so that the garbage collector has to track one object instead of two.
    """

    _outcomes: Outcomes
    _result: UnitWritten | ProducerError | None = None
    _index: int = 0

    @property
    def done(self) -> bool:
        """Whether `result` returns or raises without waiting."""
        return self._result is not None or self._outcomes.fault is not None

    def result(self, timeout: float | None = None) -> Written:
        """Wait until the record is written, and return its position.

        Args:
            timeout: The maximum number of seconds to wait.

        Raises:
            RecordLate: If the record's time to live ended before the record was known to be written.
            RecordFailed: If the record cannot be sent.
            ProducerError: If the producer has stopped.
            TimeoutError: If the record was not written within `timeout`.
        """
        if not self.done:
            with self._outcomes.lock:
                self._outcomes.changed.wait_for(lambda: self.done, timeout)
        match self._result:
            case None:
                if fault := self._outcomes.fault:
                    raise ProducerError(*fault.args) from fault.__cause__
                raise TimeoutError(f"the record was not written within {timeout} s; it is still in progress")
            case UnitWritten(shard, sequence_number):
                return Written(shard, sequence_number, self._index)
            case error:
                raise error

    def set_result(self, result: UnitWritten | ProducerError, index: int = 0) -> None:
        """Set the result and free the data. Only the producer calls this method, and then wakes the waiting threads."""
        self._result, self._index, self.data = result, index, b""


class Producer:
    """Writes records to one stream, in order for each partition key, without losing any.

    A producer belongs to the process that created it. In a forked process, every call raises ProducerError, except for
    results that were already set. A producer that is no longer referenced sends its remaining records, and then its
    threads end.

    Args:
        client: The client of the service, which must not retry requests by itself. Use `create_producer_clients`, whose
            timeouts adapt to a slow service, or `create_producer_client`.
        stream: The name of the stream.
        settings: The settings. The stream's own limit replaces the limit for the size of records.
        pending_records: The maximum number of records that are accepted but not yet written. If it is reached, `put`
            waits.
        pending_bytes: The maximum number of bytes that are accepted but not yet written. If it is reached, `put` waits.
        requests: The maximum number of concurrent requests. Concurrent requests are for different shards.
        clock: Returns the time of a monotonic clock, in seconds.
    """

    def __init__(
        self,
        client: "KinesisClient | KinesisClients",
        stream: str,
        settings: Settings = Settings(),  # noqa: B008  a frozen value
        *,
        pending_records: int = 100_000,
        pending_bytes: int = 64 << 20,
        requests: int = 4,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """List the stream's shards and start.

        Raises:
            SourceUnavailable: If the service does not respond or throttles the request. A later attempt may succeed.
            SourceError: If the service rejects the request, for example because of wrong credentials.
        """
        self._stream, self._put_client, self._clock = stream, KinesisPutClient(client, stream), clock
        stream_settings = self._put_client.add_stream_limits(settings)
        for _ in range(_FIRST_LISTING_ATTEMPTS):
            if (shards := self._put_client.list_shards()) is not None:
                break
            time.sleep(_FIRST_LISTING_PAUSE_SECONDS)
        else:
            raise SourceUnavailable(
                f"stream {stream!r}: there is a gap between its open shards; try again once it is ACTIVE"
            )
        self._core = ProducerCore(shards, stream_settings)
        self._settings = stream_settings
        self._max_pending, self._max_pending_bytes, self._max_requests = pending_records, pending_bytes, requests
        self._lock = Lock()
        self._work_available, self._space_available = Condition(self._lock), Condition(self._lock)
        self._outcomes = Outcomes(self._lock)
        self._process = self._outcomes.process
        self._next_serial_number = self._pending_count = self._pending_bytes = self._request_count = (
            self._flushing_callers
        ) = 0
        self._is_listing = self._closed = False
        self._listing_error = ""
        self._fault: ProducerError | None = None
        self._call_queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._keep_alive_reference = _KeepAlive()
        producer_reference, sender_count = ref(self), requests + 1  # one of them lists shards
        pump_until_closed = partial(
            _pump_requests,
            producer_reference,
            self._keep_alive_reference,
            self._work_available,
            self._call_queue,
            sender_count,
        )
        self._threads: list[Thread] = []
        try:
            for _ in range(sender_count):
                self._threads.append(
                    spawn(
                        "leasehold-put",
                        partial(_run_queued_calls, self._call_queue),
                        partial(_stop, producer_reference),
                    )
                )
            self._threads.append(spawn("leasehold-produce", pump_until_closed, partial(_stop, producer_reference)))
        except BaseException:
            for _ in self._threads:
                self._call_queue.put(None)
            raise
        _register_drain_at_exit_once(self)

    def check(
        self, data: bytes, partition_key: str, explicit_hash_key: str | None = None, *, context: bytes = b""
    ) -> int:
        """Return the hash key of a record. Raises the TypeError or ValueError that `put` would raise."""
        return self._check_record(data, partition_key, explicit_hash_key, max_framing_bytes(context) if context else 0)

    def put(
        self,
        data: bytes,
        partition_key: str,
        explicit_hash_key: str | None = None,
        *,
        context: bytes = b"",
        row: int = 0,
    ) -> RecordFuture:
        """Accept a record, waiting if too many are pending.

        Args:
            data: The payload. A `bytearray` or a `memoryview` is copied.
            partition_key: The partition key.
            explicit_hash_key: A decimal number that determines the shard instead of the partition key, or None.
            context: For a record of a Spark sink, its tag without row and span.
            row: For a record of a Spark sink, the row number of its tag.

        Raises:
            TypeError: If the data is not bytes, or a key is not a str.
            ValueError: If the stream would reject the record.
            ProducerError: If the producer has stopped.
        """
        if self._process is not current_process():
            raise _make_wrong_process_error()
        if type(data) is not bytes:
            data = _convert_to_bytes(data)
        hash_key = self._check_record(
            data, partition_key, explicit_hash_key, max_framing_bytes(context) if context else 0
        )
        with self._lock:
            if self._is_full:
                self._wait_until_not_full()
            if self._closed:
                raise self._make_closed_error()
            if self._settings.epoch is not None:
                data = prepend_mark(data, Mark(self._settings.epoch, self._next_serial_number))
            now, serial_number = self._clock(), self._next_serial_number
            expires_at = now + self._settings.time_to_live_seconds
            arguments = serial_number, data, partition_key, hash_key, explicit_hash_key, now, expires_at
            # Avoid keyword arguments, which would make this call take 50 % longer. Few records need them.
            make_future = partial(RecordFuture, context=context, row=row) if context else RecordFuture
            future = make_future(*arguments, self._outcomes)
            self._next_serial_number = serial_number + 1
            may_be_due_earlier = self._core.enqueue_record(future)
            self._pending_count += 1
            self._pending_bytes += len(data)
            if may_be_due_earlier:
                self._keep_alive_reference.producer = self
                self._work_available.notify()
        return future

    def flush(self, timeout: float | None = None) -> bool:
        """Send all records now. Return whether all of them had a result within `timeout` seconds.

        Raises:
            ProducerError: If this is not the process that created the producer.
        """
        if self._process is not current_process():
            raise _make_wrong_process_error()
        with self._lock, self._flush_while_waiting():
            return self._outcomes.changed.wait_for(lambda: self._closed or self._core.is_empty, timeout)

    def close(self, timeout: float | None = None) -> bool:
        """Flush, then stop. Return whether all records had a result within `timeout` seconds.

        Records without a result fail, and their number is logged as an error.

        Raises:
            ProducerError: If an error has stopped the producer, or if this is not the process that created it.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        self.flush(timeout)
        unsent_count = self._stop_and_give_up_records()
        for thread in self._threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        if unsent_count:
            log.error(
                "stream %r: the producer was closed after %g s with %d records not sent",
                self._stream,
                timeout,
                unsent_count,
            )
        if self._fault:
            raise self._make_closed_error()
        return not unsent_count

    @property
    def metrics(self) -> dict[str, float | dict[str, int]]:
        """The counters, by the KPL's names."""
        if self._process is not current_process():
            raise _make_wrong_process_error()
        with self._lock:
            return self._core.metrics.counters_by_kpl_name()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exception_type: type[BaseException] | None, *_raised: object) -> None:
        try:
            self.close()
        except ProducerError:
            if exception_type is None:
                raise  # otherwise drop the error, which is already logged, and let the exception of the block propagate

    def __reduce__(self) -> NoReturn:
        raise TypeError("a producer cannot be sent to another process; open one in each")

    @property
    def _is_full(self) -> bool:
        return self._pending_count >= self._max_pending or self._pending_bytes >= self._max_pending_bytes

    def _wait_until_not_full(self) -> None:
        with self._flush_while_waiting():  # waiting for more records is pointless while none can be added
            while self._is_full and not self._closed:
                self._space_available.wait()

    @contextmanager
    def _flush_while_waiting(self) -> Iterator[None]:
        self._flushing_callers += 1
        self._core.flushing = True
        self._work_available.notify()
        try:
            yield
        finally:
            self._flushing_callers -= 1
            self._core.flushing = self._flushing_callers > 0

    def _check_record(self, data: bytes, partition_key: str, explicit_hash_key: str | None, framing_bytes: int) -> int:
        """Return the hash key of a record. Raises the errors of `put` for a record larger by `framing_bytes` bytes."""
        if not isinstance(partition_key, str):
            raise TypeError(f"partition_key: {type(partition_key).__name__} is not str")
        if not 0 < len(partition_key) <= _MAX_KEY_CHARACTERS:
            raise ValueError(
                f"partition_key: {len(partition_key)} characters; Kinesis accepts 1 to {_MAX_KEY_CHARACTERS}"
            )
        try:
            encoded_key = partition_key.encode()
        except UnicodeEncodeError:
            raise ValueError(f"partition_key: {partition_key!r} is not UTF-8") from None
        record_bytes = (
            len(data) + len(encoded_key) + framing_bytes + (MARK_BYTES if self._settings.epoch is not None else 0)
        )
        if record_bytes > self._settings.record_bytes:
            raise ValueError(
                f"data: {record_bytes} bytes with its key; the stream accepts {self._settings.record_bytes}"
            )
        if explicit_hash_key is None:
            return int.from_bytes(digest_partition_key(encoded_key))
        if not isinstance(explicit_hash_key, str):
            raise TypeError(
                f"explicit_hash_key: {type(explicit_hash_key).__name__} is not str; pass the number as a decimal string"
            )
        hash_key = parse_decimal(explicit_hash_key, HASH_KEYS[1])
        if hash_key is None:
            raise ValueError(f"explicit_hash_key: {explicit_hash_key!r} is not a decimal number from 0 to 2**128 - 1")
        return hash_key

    def _start_due_requests(self) -> float:
        """Start the requests that are due. Return the seconds until another one is due."""
        now = self._clock()
        self._set_results(self._core.give_up_late_records(now))
        while self._request_count < self._max_requests and (units := self._core.start_request(now)):
            self._request_count += 1
            self._call_queue.put(partial(self._send_units, units))
        self._set_results(self._core.take_unsendable_records())
        if not self._is_listing and self._core.list_shards_at() <= now:
            self._is_listing = True
            self._call_queue.put(self._list_shards)
        # When a request or a listing ends, it wakes this thread.
        next_send_at = self._core.next_due_at() if self._request_count < self._max_requests else inf
        next_listing_at = inf if self._is_listing else self._core.list_shards_at()
        return max(0.0, min(next_send_at - now, next_listing_at - now, _LATE_CHECK_SECONDS))

    def _send_units(self, units: tuple[Unit, ...]) -> None:
        started_at = self._clock()
        outcomes: Sequence[UnitOutcome]
        fault: BaseException | None = None
        try:
            outcomes = self._put_client.put_units(units)
        except SourceError as error:
            self._stop(error)
            return
        except BaseException as error:  # noqa: BLE001  waiting callers must receive every error
            # Drop the traceback to avoid a reference cycle: its frames refer to the records' data, and the records
            # refer to the error.
            fault = error.with_traceback(None)
            outcomes = [UnitFailed(fault)] * len(units)
        with self._lock:
            now = self._clock()
            self._request_count -= 1
            self._core.metrics.request_seconds += now - started_at
            for unit, outcome in zip(units, outcomes, strict=True):
                self._set_results(self._core.process_outcome(unit, outcome, now))
            self._work_available.notify()
        if fault is not None:
            with suppress(Exception):  # the program's log handlers may raise
                log.error(
                    "stream %r: the records of a request failed, because the client raised %s",
                    self._stream,
                    error_summary(fault),
                )

    def _list_shards(self) -> None:
        shards, listing_error = None, ""
        try:
            shards = self._put_client.list_shards()
        except SourceUnavailable:
            pass
        except SourceError as error:
            self._stop(error)
            return
        except BaseException as error:  # noqa: BLE001  after any error, the next listing may succeed
            listing_error = error_summary(error)
        previous_error, self._listing_error = self._listing_error, listing_error
        with self._lock:
            self._is_listing = False
            self._set_results(self._core.update_map(shards, self._clock()))
            self._work_available.notify()
        if listing_error and listing_error != previous_error:
            with suppress(Exception):  # the program's log handlers may raise
                log.error("stream %r: its shards cannot be listed; trying again: %s", self._stream, listing_error)

    def _stop(self, error: BaseException) -> None:
        with self._lock:
            if self._closed:
                return
            self._fault = ProducerError(limited_error_text(error) or type(error).__name__)
            self._fault.__cause__ = error
        unsent_count = self._stop_and_give_up_records()
        log.error(
            "stream %r: the producer has stopped with %d records not sent: %s", self._stream, unsent_count, self._fault
        )

    def _stop_and_give_up_records(self) -> int:
        """Give up all records, and return their number."""
        with self._lock:
            self._closed = True
            late_results = self._core.give_up_all_records()
            self._set_results(late_results)
            self._outcomes.fail_all_waits(self._make_closed_error())
            self._space_available.notify_all()
            self._work_available.notify()
        _unclosed_producers.discard(self)
        return sum(len(late_result.entries) for late_result in late_results)

    def _make_closed_error(self) -> "ProducerError":
        """Return a new error for each caller. Threads that raise the same error would mix their tracebacks."""
        if self._fault is None:
            return ProducerError("the producer is closed")
        fault = ProducerError(*self._fault.args)
        fault.__cause__ = self._fault.__cause__
        return fault

    def _set_results(self, results: Iterable[Result]) -> None:
        has_results = False
        for result in results:
            has_results = True
            self._pending_count -= len(result.entries)
            self._pending_bytes -= sum(len(entry.data) for entry in result.entries)
            futures = cast("tuple[RecordFuture, ...]", result.entries)
            if isinstance(result, RecordsDelivered):
                position = UnitWritten(result.shard, result.sequence_number)
                for index, future in enumerate(futures):
                    future.set_result(position, index)
            else:
                for future in futures:
                    future.set_result(self._make_record_error(result))
        if has_results:
            self._space_available.notify_all()
            self._outcomes.changed.notify_all()

    def _make_record_error(self, result: RecordsLate | RecordsUnsendable) -> "ProducerError":
        """Return a new error for each record, for the same reason as in `_make_closed_error`."""
        outcome_text = "it may be in the stream nevertheless" if result.unknown else "it was not written"
        if isinstance(result, RecordsUnsendable):
            error = RecordFailed(f"the record cannot be sent, {outcome_text}: {error_summary(result.error)}")
            error.__cause__ = result.error
            return error
        if not self._closed:
            return RecordLate(f"the record's time to live has expired; {outcome_text}")
        if self._fault is None:
            return ProducerError(f"the producer was closed before the record was written; {outcome_text}")
        return self._make_closed_error()


def _convert_to_bytes(data: object) -> bytes:
    if isinstance(data, bytes | bytearray | memoryview):
        return bytes(data)
    raise TypeError(f"data: {type(data).__name__} is not bytes" + ("; encode it" if isinstance(data, str) else ""))


# Functions that run in a producer's threads. The threads keep the producer alive only while it has records.


class _KeepAlive:
    """The reference that keeps a producer alive while it has records."""

    producer: "Producer | None" = None


def _pump_requests(
    producer_reference: "ref[Producer]",
    keep_alive: _KeepAlive,
    work_available: Condition,
    calls: "SimpleQueue[Any]",
    sender_count: int,
) -> None:
    """Run the pump of a producer until it is closed or no longer referenced."""
    try:
        with work_available:
            while (producer := producer_reference()) is not None and not producer._closed:  # noqa: SLF001
                wait_seconds = producer._start_due_requests()  # noqa: SLF001
                keep_alive.producer = None if producer._core.is_empty else producer  # noqa: SLF001
                producer = None
                work_available.wait(wait_seconds)
    finally:
        keep_alive.producer = None
        for _ in range(sender_count):
            calls.put(None)


def _run_queued_calls(calls: "SimpleQueue[Any]") -> None:
    """Make the calls in the queue one after the other, until the queue returns None."""
    while (call := calls.get()) is not None:
        call()
        del call


def _stop(producer_reference: "ref[Producer]", error: BaseException) -> None:
    producer = producer_reference()
    if producer is not None:
        producer._stop(error)  # noqa: SLF001


# At the exit of the process

_unclosed_producers = WeakSet[Producer]()
_registered_in: object = None
"""The process in which the function that drains producers at exit was registered, or None."""


def _register_drain_at_exit_once(producer: Producer) -> None:
    global _registered_in  # noqa: PLW0603  once in each process
    _unclosed_producers.add(producer)
    if _registered_in is not current_process():
        _registered_in = current_process()
        call_at_exit(_drain_producers_at_exit)


def _drain_producers_at_exit() -> None:
    """Send the records of producers that were not closed.

    Log how many records were not sent within `EXIT_DRAIN_SECONDS`.
    """
    deadline = time.monotonic() + EXIT_DRAIN_SECONDS
    producers = [producer for producer in _unclosed_producers if producer._process is current_process()]  # noqa: SLF001
    for producer in producers:
        producer._core.flushing = True  # noqa: SLF001  each pump notices this within a second
    for producer in producers:
        try:
            producer.flush(max(0.0, deadline - time.monotonic()))
        finally:
            stream, unsent_count = producer._stream, producer._stop_and_give_up_records()  # noqa: SLF001
            if unsent_count:
                with suppress(Exception):  # the program's log handlers may raise
                    log.error(
                        "stream %r: the program ended without close(), and %d records were not sent",
                        stream,
                        unsent_count,
                    )
