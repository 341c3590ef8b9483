"""An ordered producer for Kinesis: records in, aggregates out, by ordinary threads around `Core`.

with Producer(clients_of("eu-west-1", None, 4), "orders") as producer:
    written = producer.put(b"...", "customer-7")
print(written.result().shard)

One thread asks the core what is due (`_turn`); a pool makes the requests (`KinesisPutClient`), and gives their answers
back to the core, whose results end the waiting of those that wrote.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import inf
from threading import Condition, Lock
from typing import TYPE_CHECKING, Self, cast

import boto3
from attrs import define, evolve, frozen
from botocore.config import Config as ClientConfig
from botocore.exceptions import ClientError, ConnectTimeoutError, EndpointConnectionError, ProxyConnectionError

from leasehold.adapters.sources.call_patience import CallPatience
from leasehold.adapters.sources.kinesis.aggregation.encode import framing_of
from leasehold.adapters.sources.kinesis.clients import KinesisClients, WireForm
from leasehold.adapters.sources.kinesis.faults import SERVER_ERROR, code_of, said_plainly, summary_of, understood
from leasehold.adapters.sources.kinesis.hash_keys import digest_of
from leasehold.adapters.sources.kinesis.producer.core import (
    Core,
    Delivered,
    Entry,
    Placed,
    Refused,
    Result,
    Settings,
    ShardMap,
    Unit,
    UnitOutcome,
    Unknown,
    mapped,
)
from leasehold.adapters.sources.kinesis.records import MARK_BYTES, Mark, listed, marked
from leasehold.adapters.sources.protocol import SourceError, SourceUnavailable
from leasehold.adapters.threads import spawn
from leasehold.balancer.model import HASH_KEYS
from leasehold.stores.fields import decimal
from leasehold.stores.printable import escaped, text_of

try:
    from leasehold.adapters.sources.kinesis.wire.hooks import PutRows, PutWire, put_directly
except ImportError:  # then boto3 writes requests by itself
    PutRows, PutWire = list, None  # type: ignore[assignment,misc]  # the slow way

if TYPE_CHECKING:  # the stubs are no dependency of a user
    from types_boto3_kinesis import KinesisClient

log = escaped(logging.getLogger("leasehold.kinesis"))

PUT_SECONDS = 10.0, 20.0, 30.0
"""For the next bytes of an answer; a request given up may have been carried out, and is sent again."""
QUICK = 20
"""So many answers in time, one after another, restore the shortest time-out: one request is for many shards."""

_NOT_SENT = (ConnectTimeoutError, EndpointConnectionError, ProxyConnectionError)


def clients_of(
    region: str | None,
    endpoint: str | None,
    connections: int,
    wire: WireForm = "cbor",
    *,
    session: boto3.Session | None = None,
) -> KinesisClients:
    """The clients of a producer, which waits longer for a service that is slow.

    session  has the credentials; None: the environment's
    """
    return KinesisClients(
        lambda seconds: client_of(region, endpoint, connections, wire, read_seconds=seconds, session=session),
        PUT_SECONDS,
    )


def client_of(
    region: str | None,
    endpoint: str | None,
    connections: int,
    wire: WireForm = "cbor",
    *,
    read_seconds: float = PUT_SECONDS[0],
    session: boto3.Session | None = None,
) -> "KinesisClient":
    """A client that sends each request once: its own repetitions would write twice, and unseen.

    The records of a producer go in this form, if the service speaks it.
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
    if PutWire is None:
        log.warning("records are sent slowly: orjson, pybase64 or cbor2 is missing; install leasehold[aws]")
    else:
        spoken = PutWire(client, cbor=wire != "json")
        if wire == "cbor":
            put_directly(client, spoken)
    return client


class KinesisPutClient:
    """The requests that a producer makes of its stream."""

    def __init__(self, client: "KinesisClient | KinesisClients", stream: str) -> None:
        """Send requests to `stream` by `client`, which must not repeat them by itself."""
        clients = KinesisClients.of(client)
        self._stream = stream
        self._putting, self._asking = CallPatience(clients, quick=QUICK), CallPatience(clients, insists=True)

    def fitting(self, settings: Settings) -> Settings:
        """The settings, with the stream's own record limit. Raises SourceError where order cannot be kept."""
        with said_plainly(self._stream), understood(self._stream):
            told = self._asking.call("describe_stream_summary", StreamName=self._stream)
            summary = summary_of(told, self._stream)
            record_bytes = 1024 * int(summary.get("MaxRecordSizeInKiB") or 1024)
        if summary.get("RecordDistributionStrategy") == "AUTO":
            raise SourceError(
                f"stream {self._stream!r} spreads its records itself (RecordDistributionStrategy AUTO): keys do not "
                "choose a shard, and consumers drop aggregated records; set the strategy to PARTITION_KEY"
            )
        return evolve(settings, record_bytes=record_bytes)

    def shards(self) -> ShardMap | None:
        """The map of a complete listing, or None. Raises SourceUnavailable or SourceError."""
        with said_plainly(self._stream), understood(self._stream):
            page = self._asking.call("list_shards", StreamName=self._stream)
            rows = page["Shards"]
            while token := page.get("NextToken"):
                page = self._asking.call("list_shards", NextToken=token)
                rows += page["Shards"]
            return mapped(listed(rows))

    def put(self, units: Sequence[Unit]) -> list[UnitOutcome]:
        """Send units together, once. Raises SourceError if sending again cannot help."""
        rows = PutRows(
            {"Data": unit.data, "PartitionKey": unit.partition_key, "ExplicitHashKey": str(unit.hash_key)}
            for unit in units
        )
        try:
            with said_plainly(self._stream), understood(self._stream):
                answer = self._putting.call("put_records", StreamName=self._stream, Records=rows)
        except SourceUnavailable as fault:
            # Throttled or never sent: refused. Anything else may have been written.
            cause = fault.__cause__
            refused, code = isinstance(cause, _NOT_SENT), type(cause).__name__
            if isinstance(cause, ClientError):
                status = int(cause.response.get("ResponseMetadata", {}).get("HTTPStatusCode", SERVER_ERROR))
                refused, code = status < SERVER_ERROR, code_of(cause)
            return [Refused(code) if refused else Unknown(code)] * len(units)
        results = answer.get("Records", ())  # an answer that cannot be read has none
        if len(results) != len(units):
            return [Unknown("ResultCountMismatch")] * len(units)
        return [
            Refused(code) if (code := row.get("ErrorCode")) else Placed(row["ShardId"], row["SequenceNumber"])
            for row in results
        ]


_KEY_CHARACTERS = 256
_LATE_SECONDS = 1.0  # how long after its time a record may be given up
_FIRST_MAP_TRIES, _FIRST_MAP_SECONDS = 60, 0.5


@frozen
class Written:
    """The place of a written record."""

    shard: str
    sequence_number: str
    sub_sequence_number: int


class ProducerError(Exception):
    """A record was not written, as far as is known."""


class RecordLate(ProducerError):
    """The record's time to live was over; it may be in the stream all the same if the text says so."""


@define(eq=False)
class Writing(Entry):
    """The future of one record, and its entry in a queue: with two objects the garbage collector had twice the work.

    news  wakes those who wait
    """

    _news: Condition
    _answer: Placed | ProducerError | None = None
    _place: int = 0

    @property
    def done(self) -> bool:
        """Whether it is known what became of the record."""
        return self._answer is not None

    def result(self, timeout: float | None = None) -> Written:
        """Wait for it. Raises RecordLate, ProducerError or, after `timeout` seconds, TimeoutError."""
        with self._news:
            self._news.wait_for(lambda: self._answer is not None, timeout)
        match self._answer:
            case None:
                raise TimeoutError(f"the record was not written within {timeout} s; it is still under way")
            case Placed(shard, sequence_number):
                return Written(shard, sequence_number, self._place)
            case error:
                raise error

    def settle(self, answer: Placed | ProducerError, place: int = 0) -> None:
        """Set the result, and let the data go; only the producer calls this, and then wakes the waiting threads."""
        self._answer, self._place, self.data = answer, place, b""


class Producer:
    """Writes records to one stream, each partition key in order, and loses none.

    client           speaks with the service; it must not repeat requests by itself (see `clients_of`, which wait longer
                     for a slow one, and `client_of`)
    stream           the stream's name
    settings         how it sends; the record limit is the stream's own
    pending_records  records taken and not yet written; `put` waits when there are so many
    pending_bytes    likewise, of their data
    requests         most requests under way together, each for other shards
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
        """Look at the stream and start. Raises SourceUnavailable or SourceError."""
        self._put_client, self._clock = KinesisPutClient(client, stream), clock
        fitting = self._put_client.fitting(settings)
        for _ in range(_FIRST_MAP_TRIES):
            if (shards := self._put_client.shards()) is not None:
                break
            time.sleep(_FIRST_MAP_SECONDS)
        else:
            raise SourceUnavailable(f"the open shards of stream {stream!r} leave a hole; is it being created?")
        self._core = Core(shards, fitting)
        self._settings = fitting
        self._most, self._most_bytes, self._requests = pending_records, pending_bytes, requests
        self._lock = Lock()
        self._work, self._room, self._news = (Condition(self._lock) for _ in range(3))
        self._tickets = self._pending = self._pending_bytes = self._under_way = 0
        self._listing = self._closed = False
        self._fault: ProducerError | None = None
        self._pool = ThreadPoolExecutor(requests + 1, thread_name_prefix="leasehold-put")
        # Nobody else would send what waits, nor tell those who wait.
        self._pump = spawn("leasehold-produce", self._run, self._stop)

    def put(
        self,
        data: bytes,
        partition_key: str,
        explicit_hash_key: str | None = None,
        *,
        context: bytes = b"",
        row: int = 0,
    ) -> Writing:
        """Take a record, waiting for room if too many are under way; one of a Spark sink with its context and row.

        Raises ValueError for a record the stream would refuse, ProducerError once the producer has stopped.
        """
        hash_key = self._checked(data, partition_key, explicit_hash_key, framing_of(context) if context else 0)
        with self._lock:
            while self._pending >= self._most or self._pending_bytes >= self._most_bytes:
                if self._fault:
                    break
                self._room.wait()
            if self._fault or self._closed:
                raise self._fault or ProducerError("the producer is closed")
            if self._settings.epoch is not None:
                data = marked(data, Mark(self._settings.epoch, self._tickets))
            now, ticket = self._clock(), self._tickets
            expires = now + self._settings.time_to_live_seconds
            place = ticket, data, partition_key, hash_key, explicit_hash_key, now, expires
            # What is given by name costs half as much again as all the rest, and few records have it.
            tagged = partial(Writing, context=context, row=row) if context else Writing
            writing = tagged(*place, self._news)
            self._tickets = ticket + 1
            self._pending += 1
            self._pending_bytes += len(data)
            if self._core.put(writing):
                self._work.notify()
        return writing

    def flush(self, timeout: float | None = None) -> bool:
        """Send everything at once; return whether all of it is settled within `timeout` seconds."""
        with self._news:
            self._core.flushing = True
            self._work.notify()
            settled = self._news.wait_for(lambda: not self._pending, timeout)
            self._core.flushing = False
        return settled

    def close(self, timeout: float | None = None) -> None:
        """Drain, then stop; records not written within `timeout` seconds fail. Raises the fault of the producer."""
        self.flush(timeout)
        with self._work:
            self._closed = True
            self._settle(self._core.abandon())
            self._work.notify()
        self._pump.join()
        self._pool.shutdown()
        if self._fault:
            raise self._fault

    @property
    def metrics(self) -> dict[str, float | dict[str, int]]:
        """The counters, by the KPL's names."""
        with self._work:
            return self._core.metrics.named()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()

    def _checked(self, data: bytes, partition_key: str, explicit_hash_key: str | None, framing: int) -> int:
        """The hash key of a record. Raises ValueError if the stream would refuse it, `framing` bytes larger."""
        if not 0 < len(partition_key) <= _KEY_CHARACTERS:
            raise ValueError(f"partition_key: {len(partition_key)} characters; Kinesis takes 1 to {_KEY_CHARACTERS}")
        key = partition_key.encode()
        size = len(data) + len(key) + framing + (MARK_BYTES if self._settings.epoch is not None else 0)
        if size > self._settings.record_bytes:
            raise ValueError(f"data: {size} bytes with its key; the stream takes {self._settings.record_bytes}")
        if explicit_hash_key is None:
            return int.from_bytes(digest_of(key))
        place = decimal(explicit_hash_key, HASH_KEYS[1])
        if place is None:
            raise ValueError(f"explicit_hash_key: {explicit_hash_key!r} is no decimal number from 0 to 2**128 - 1")
        return place

    def _run(self) -> None:
        with self._work:
            while not self._closed:
                self._work.wait(self._turn())

    def _turn(self) -> float:
        """Start the requests that are due; return the seconds until something else will be."""
        now = self._clock()
        self._settle(self._core.late(now))
        while self._under_way < self._requests and (units := self._core.request(now)):
            self._under_way += 1
            self._pool.submit(self._send, units)
        if not self._listing and self._core.map_due() <= now:
            self._listing = True
            self._pool.submit(self._look)
        # What ends by itself, a request or a listing, wakes this thread when it does.
        sending = self._core.due() if self._under_way < self._requests else inf
        looking = inf if self._listing else self._core.map_due()
        return max(0.0, min(sending - now, looking - now, _LATE_SECONDS))

    def _send(self, units: tuple[Unit, ...]) -> None:
        began = self._clock()
        try:
            outcomes = self._put_client.put(units)
        except BaseException as error:  # noqa: BLE001  whatever it is, those who wait must hear of it
            self._stop(error)
            return
        with self._work:
            now = self._clock()
            self._under_way -= 1
            self._core.metrics.request_seconds += now - began
            for unit, outcome in zip(units, outcomes, strict=True):
                self._settle(self._core.answered(unit, outcome, now))
            self._work.notify()

    def _look(self) -> None:
        try:
            shards = self._put_client.shards()
        except SourceUnavailable:
            shards = None
        except BaseException as error:  # noqa: BLE001  likewise
            self._stop(error)
            return
        with self._work:
            self._listing = False
            self._settle(self._core.mapped(shards, self._clock()))
            self._work.notify()

    def _stop(self, error: BaseException) -> None:
        with self._work:
            self._fault = ProducerError(text_of(error) or type(error).__name__)
            self._fault.__cause__ = error
            self._closed = True
            self._settle(self._core.abandon())
            self._work.notify()

    def _settle(self, results: Iterable[Result]) -> None:
        settled = False
        for result in results:
            settled = True
            self._pending -= len(result.entries)
            self._pending_bytes -= sum(len(entry.data) for entry in result.entries)
            writings = cast("tuple[Writing, ...]", result.entries)
            if isinstance(result, Delivered):
                landed = Placed(result.shard, result.sequence_number)
                for place, writing in enumerate(writings):
                    writing.settle(landed, place)
            else:
                doubt = "it may be in the stream all the same" if result.unknown else "it was not written"
                for writing in writings:
                    # Each has an error of its own: two threads that raise one would mix their tracebacks.
                    late = RecordLate(f"the record's time to live is over; {doubt}")
                    closed = ProducerError(f"the producer was closed before the record was through; {doubt}")
                    writing.settle(self._fault or closed if self._closed else late)
        if settled:
            self._room.notify_all()
            self._news.notify_all()
