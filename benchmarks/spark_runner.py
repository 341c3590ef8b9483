"""Measures the processor time per row in the process that reads for a Spark query, which limits its rate of rows.

    python benchmarks/spark_runner.py

A local server in another process responds to GetRecords immediately, with the maximum amount of data. The reader is
called as Spark would call it, for eight shards, and without the pauses between requests that the service requires. With
enhanced fan-out, the server sends events of the same size without pauses.

The result is the processor time per row. The possible number of rows per second depends only on this time and not on
other load on the machine. A loop over GetRecords with the same client is measured for comparison. The codec is compiled
as in a wheel. The exit status is 1 if a row of 1 KB costs more than 5 µs, which means less than 200 MB/s per core.

Finally, a stream with 1,000 empty shards is read at the usual pace. The results are the time to open all shards, the
fraction of a core that is used after that, and the part of this fraction that the polling threads use.
"""

import json
import logging
import math
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count, pairwise
from pathlib import Path
from typing import Any, TypeVar

import cbor2
from attrs import evolve, frozen
from compiled import as_installed
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming.datasource import ReadMaxRows
from wire_server import CBOR, encodings_of, frame

from leasehold.adapters.sources.kinesis.aggregation.encode import Aggregate
from leasehold.adapters.sources.kinesis.arrow_rows import SCHEMA
from leasehold.adapters.sources.kinesis.clients import create_reading_client
from leasehold.adapters.spark.fetching import read_task_rows
from leasehold.adapters.spark.kinesis.data_source import KinesisLeased
from leasehold.adapters.spark.leased_source import LeasedReader
from leasehold_lab.demo.child import ENVIRONMENT

T = TypeVar("T")

SHARDS, SECONDS, BATCH_ROWS = 8, 5.0, 40_000
QUIET_SHARDS, QUIET_SECONDS = 1_000, 20.0
PLACE = b"@@@@@@@@@@"
BAR_MICROS = 5.0
POLLING: Mapping[str, str] = {}
FAN_OUT = {
    "kinesis.consumerType": "SubscribeToShard",
    "kinesis.consumerName": "arn:aws:kinesis:eu-west-1:000000000000:stream/s/consumer/c:1",
}


@frozen
class Load:
    """The contents of a response: `rows` user records of `size` bytes, with `in_one` of them in each Kinesis record."""

    name: str
    rows: int
    size: int
    in_one: int = 1

    def bodies(self, **next_one: str) -> dict[str, bytes]:
        """Return the body of a response or an event, in CBOR and in JSON.

        It contains a placeholder for the part of sequence numbers that changes.

        Args:
            next_one: The field with the next position: an iterator in a response, or a sequence number in an event.
        """
        record = {"Data": self._record(), "PartitionKey": "k", "ApproximateArrivalTimestamp": 1_795_363_072_573}
        place = PLACE.decode()
        records = [record | {"SequenceNumber": f"1{place}{number:04}"} for number in range(self.rows // self.in_one)]
        return encodings_of({"Records": records, "MillisBehindLatest": 60_000 if records else 0, **next_one})

    def _record(self) -> bytes:
        if self.in_one == 1:
            return b"x" * self.size
        aggregate = Aggregate(1 << 20)
        for _ in range(self.in_one):
            assert aggregate.add(b"x" * self.size, "k")
        return aggregate.encode()


LOADS = (
    Load("1 KB rows", 2000, 1000),
    Load("1 KB rows, 40 in an aggregate", 2000, 1000, 40),
    Load("100 B rows, 400 in an aggregate", 20_000, 100, 400),
)


def serve(load: Load, ports: Any, shard_count: int = SHARDS) -> None:  # noqa: ANN401  a queue
    """Serve requests until the process is terminated."""
    bodies = load.bodies(NextShardIterator=f"shard {PLACE.decode()}")
    events = load.bodies(ContinuationSequenceNumber=f"1{PLACE.decode()}9999")
    begins = [2**128 * number // shard_count for number in range(shard_count + 1)]
    shards = [
        {
            "ShardId": f"shardId-{number:012}",
            "HashKeyRange": {"StartingHashKey": str(first), "EndingHashKey": str(beyond - 1)},
            "SequenceNumberRange": {"StartingSequenceNumber": "1"},
        }
        for number, (first, beyond) in enumerate(pairwise(begins))
    ]
    summary = {"StreamDescriptionSummary": {"RecordDistributionStrategy": "AUTO"}}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body, form = self.rfile.read(int(self.headers["Content-Length"])), self.headers["Content-Type"]
            request = cbor2.loads(body) if form == CBOR else json.loads(body)
            wanted = self.headers["X-Amz-Target"].rpartition(".")[2]
            if wanted == "SubscribeToShard":
                self._send("application/cbor" if form == CBOR else "application/json", events[form])
            else:
                self._say(form, self._answer(wanted, request, form))

        def _send(self, form: str, body: bytes) -> None:
            """Send events until the client closes the connection. If it does not read, this blocks."""
            self.send_response(200)
            self.send_header("Content-Type", "application/vnd.amazon.eventstream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            message = frame("initial-response", form, b"\xa0" if "cbor" in form else b"{}")
            with suppress(OSError):
                for number in count(1):
                    self.wfile.write(b"%x\r\n%b\r\n" % (len(message), message))
                    message = frame("SubscribeToShardEvent", form, body.replace(PLACE, b"%010d" % number))
            self.close_connection = True

        def _answer(self, wanted: str, request: Mapping[str, Any], form: str) -> bytes:
            if wanted == "GetRecords":
                number = int(request["ShardIterator"].rpartition(" ")[2])
                return bodies[form].replace(PLACE, b"%010d" % (number + 1))
            if wanted == "GetShardIterator":
                # A sequence number consists of a 1, ten digits for the response, and the record's number in it. The
                # iterator starts with that response.
                number = request.get("StartingSequenceNumber", "")
                begins = int(number[1:11]) - 1 if number else 0
                return json.dumps({"ShardIterator": f"shard {begins}"}).encode()
            return json.dumps({"Shards": shards} if wanted == "ListShards" else summary).encode()

        def _say(self, form: str, answer: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", form)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    ports.put(server.server_port)
    server.serve_forever()


@frozen
class Spent:
    """The processor time of this process, and the elapsed time, for a number of rows."""

    rows: int
    processor_seconds: float
    seconds: float

    @property
    def micros(self) -> float:
        """The processor time per row, in microseconds."""
        return self.processor_seconds / self.rows * 1e6


def measure(work: Callable[[], int]) -> Spent:
    """Call `work` repeatedly for some seconds, and return its cost."""
    rows, wall_start, processor_start = 0, time.monotonic(), time.process_time()
    while time.monotonic() - wall_start < SECONDS:
        rows += work()
    return Spent(rows, time.process_time() - processor_start, time.monotonic() - wall_start)


def measure_client(endpoint: str, load: Load) -> Spent:
    """Measure the AWS client alone, which receives records without further processing."""
    client = create_reading_client("eu-west-1", endpoint)
    iterator = ["shard 0"]

    def work() -> int:
        response = client.get_records(ShardIterator=iterator[0])
        iterator[0] = response["NextShardIterator"]
        return len(response["Records"]) * load.in_one

    work()
    return measure(work)


def reader_of(endpoint: str, store: str, **options: str) -> LeasedReader:
    """Return the reader that Spark would create with these options."""
    reader = KinesisLeased(
        {
            "kinesis.streamName": "s",
            "kinesis.region": "eu-west-1",
            "kinesis.endpointUrl": endpoint,
            "kinesis.startingPosition": "TRIM_HORIZON",
            "lease.store": store,
            "lease.fetchHost": "127.0.0.1",
            **options,
        }
    ).streamReader(from_arrow_schema(SCHEMA))
    assert isinstance(reader, LeasedReader)
    return reader


def measure_quiet_shards(endpoint: str, folder: Path) -> str:
    """Measure a query whose shards have no records, and describe the time to open them and the later processor time."""
    # Leases are longer than by default, because a busy machine may not renew 1,000 of them in one file in time.
    reader = reader_of(endpoint, f"sqlite:///{folder}/rest.db", **{"lease.durationMs": "60000"})
    start, started = reader.initialOffset(), time.monotonic()

    def poll_until(until: float = math.inf) -> None:
        while time.monotonic() < until:
            assert reader.latestOffset(start, ReadMaxRows(BATCH_ROWS)) == start
            report = reader.reportLatestOffset()
            if until == math.inf and report is not None and report["shards"] == QUIET_SHARDS:
                return

    def polling_seconds() -> float:
        threads = [thread.native_id for thread in threading.enumerate() if thread.name.startswith("leasehold-read")]
        return sum(int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0]) for thread in threads) / 1e9

    try:
        poll_until()
        opened = time.monotonic()
        poll_until(opened + QUIET_SECONDS)  # until the pauses between requests have reached their maximum
        measured_from, processor_before, polling_before = time.monotonic(), time.process_time(), polling_seconds()
        poll_until(measured_from + QUIET_SECONDS)
        elapsed = time.monotonic() - measured_from
        shares = [(time.process_time() - processor_before) / elapsed, (polling_seconds() - polling_before) / elapsed]
    finally:
        reader.stop()
    return f"all open in {opened - started:.0f} s, then {shares[0]:.2f} of a processor, {shares[1]:.2f} of it to ask"


def measure_reader(
    endpoint: str,
    folder: Path,
    transport: str,
    measure_work: Callable[[Callable[[], int]], T],
    *,
    more: Mapping[str, str] = POLLING,
) -> T:
    """Measure a reader by the calls that Spark makes: it plans a batch, creates tasks, and commits the batch.

    Another process fetches the rows of the tasks.
    """
    store = f"sqlite:///{folder}/{transport}-{len(more)}.db"
    reader = reader_of(endpoint, store, **{"lease.transport": transport, **more})
    reader._source_spec = evolve(reader._source_spec, interval_seconds=0.0)  # noqa: SLF001  as if shards had no limit
    start = reader.initialOffset()
    task_queue, done_queue = multiprocessing.SimpleQueue(), multiprocessing.SimpleQueue()  # type: ignore[var-annotated]
    executor = multiprocessing.Process(target=execute, args=(task_queue, done_queue), daemon=True)
    executor.start()

    def work() -> int:
        nonlocal start
        end = reader.latestOffset(start, ReadMaxRows(BATCH_ROWS))
        if end == start:
            return 0
        if start["n"]:
            reader.commit(start)
        assert reader._run is not None  # noqa: SLF001  only internal state has rows that no executor has read
        rows = reader._run._plans[end["n"]].rows.values()  # noqa: SLF001
        tasks = reader.partitions(start, end)
        if transport == "fetch":
            task_queue.put(tasks)
            done_queue.get()
        start = end
        return sum(batch.num_rows for batch in rows)

    try:
        while not work():
            pass
        return measure_work(work)
    finally:
        executor.terminate()
        reader.stop()


def execute(task_queue: Any, done_queue: Any) -> None:  # noqa: ANN401  queues
    """Fetch the rows of tasks, and drop them."""
    while True:
        for task in task_queue.get():
            for _ in read_task_rows(task):
                pass
        done_queue.put(None)


def main() -> int:
    """Measure in a separate process, with the packages compiled as in a wheel."""
    if sys.argv[1:] == ["--here"]:
        return measure_here()
    with as_installed() as path:
        env = os.environ | {"PYTHONPATH": str(path)}
        return subprocess.run([sys.executable, __file__, "--here"], env=env, check=False).returncode  # noqa: S603  itself


def measure_here() -> int:
    """Print a table, and return 1 if the limit is not met."""
    # A reader ends its process on SIGTERM. With fork, it would also notice the SIGTERM of a child process.
    multiprocessing.set_start_method("spawn")
    os.environ.update(ENVIRONMENT)
    meets_limit = True
    logging.getLogger("leasehold.spark").setLevel(logging.WARNING)
    print(f"{'':44}{'µs a row':>8}{'rows/s':>10}{'MB/s':>8}   a whole processor's; load {os.getloadavg()[0]:.1f}")
    for load in LOADS:
        with served(load) as endpoint, tempfile.TemporaryDirectory() as folder:
            print_line(load, "GetRecords alone", measure_client(endpoint, load))
            fetched = measure_reader(endpoint, Path(folder), "fetch", measure)
            print_line(load, "fetched", fetched)
            meets_limit = meets_limit and (load.size < 1000 or fetched.micros <= BAR_MICROS)
            print_line(
                load, "fetched, by fan-out", measure_reader(endpoint, Path(folder), "fetch", measure, more=FAN_OUT)
            )
            print_line(load, "within tasks", measure_reader(endpoint, Path(folder), "embedded", measure))
    print(f"bar: {BAR_MICROS:g} µs a row of 1 KB, to be fetched, so 200 MB/s: {'pass' if meets_limit else 'FAIL'}")
    with served(Load("nothing", 0, 0), QUIET_SHARDS) as endpoint, tempfile.TemporaryDirectory() as folder:
        print(f"{QUIET_SHARDS:,} shards at rest: {measure_quiet_shards(endpoint, Path(folder))}")
    return 0 if meets_limit else 1


@contextmanager
def served(load: Load, shard_count: int = SHARDS) -> Iterator[str]:
    """Serve a stream in a separate process until the block ends, and yield its URL."""
    ports: multiprocessing.Queue[int] = multiprocessing.Queue()
    server = multiprocessing.Process(target=serve, args=(load, ports, shard_count), daemon=True)
    server.start()
    try:
        yield f"http://127.0.0.1:{ports.get()}"
    finally:
        server.terminate()
        server.join()


def print_line(load: Load, reader: str, spent: Spent) -> None:
    """Print a line of the table. Elapsed time is left out, because it depends on other load on the machine."""
    seconds_per_row = spent.processor_seconds / spent.rows
    rates = f"{1 / seconds_per_row:12,.0f}{load.size / seconds_per_row / 1e6:8.1f}"
    print(f"{load.name + ', ' + reader:44}{seconds_per_row * 1e6:6.1f}{rates}")


if __name__ == "__main__":
    sys.exit(main())
