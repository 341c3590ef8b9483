"""Kills processes of a Spark pipeline from Kinesis to Kinesis, and checks what readers of its output receive.

    python lab/spark/spark_pipeline_kills.py --help

An application reads a stream and writes to another one with leasehold's sink. `leasehold.adapters.spark.run` keeps it
running. The connection to the output stream throttles requests, breaks after a request was carried out, and delays
responses. Both streams are resharded. Meanwhile, random processes of the application are killed:

task         a Python process that writes rows, during a write
committer    the process that commits a batch for the sink, when the whole batch is in the stream but not committed
source       the process that plans and reads. The query ends, and `run` starts it again in the same application.
executor     an executor of a cluster, with its tasks
application  the driver and all processes that it started. The application is then started again.

With `--pyspark`, the applications use the given versions of PySpark in turn, and every second kill hits the whole
application, so that different versions continue from the same checkpointLocation. The last application uses the
installed version.

Nothing but a kill may end the application. Once all rows have been written, a plain worker and a Spark query must
receive each row once, and the rows of each key in order. The Java KCL, if it is available, must receive each row at
least once.
"""

import json
import os
import re
import signal
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

from attrs import asdict, define, field, frozen
from flights import print_to_stderr
from pyspark.sql import functions as f
from pyspark.sql.streaming.query import StreamingQuery
from spark_application import list_descendants
from spark_killer import record_leftovers, run_cluster
from spark_kills import KilledApplication
from standins import executors
from standins.spark import ON_CLUSTER, SOON, pyspark_path, spark_session

sys.path += [str(Path(__file__).parents[2] / "tests" / each) for each in ("fleet", "sources/kinesis")]
import kcl_jar
from faulty_line import Line, Refused, Reset, line

from leasehold.adapters.spark.pipeline import start_query
from leasehold.adapters.spark.supervision import supervise
from leasehold.balancer.model import HASH_KEYS
from leasehold_lab.demo.child import Child, replace_aws_environment
from leasehold_lab.demo.stage import Stream, create_kinesis_client, put_records, run_services

ROUND = 150
"""The number of rows that are sent between two kills."""
KEYS = 16
"""The number of keys. It is so small that each key has rows in every batch, so their order can be judged."""
TRIGGER_ROWS = 50
LEASE_SECONDS = 6.0
WAIT_SECONDS = 420.0
THROTTLED = Refused("ProvisionedThroughputExceededException")
FAULTS = (THROTTLED, THROTTLED, Reset(late=True), Reset(), Refused("InternalFailure", 500))
LOCAL_TARGETS_OF_PIPELINE = ("task", "task", "task", "committer", "source", "application")
CLUSTER_TARGETS = (*LOCAL_TARGETS_OF_PIPELINE, "executor", "executor")
"""The kinds of processes to choose from, if the application has executors."""
PROCESSES = {
    "committer": "pyspark.sql.worker.python_streaming_sink_runner",
    "source": "pyspark.sql.streaming.python_streaming_source_runner",
    "executor": "CoarseGrainedExecutorBackend",
}
"""Words in the command lines of these kinds of processes."""
AGAIN = re.compile(r"starting it again in .*?: (.*)")
EXECUTORS = "local-cluster[1,2,600]"
"""The Spark master of an application that starts one executor, with two cores, by itself."""
MARK = "LEASEHOLD_PIPELINE_KILLS"
Row = tuple[str, bytes]
"""The row's key, and its number among all rows that are sent."""


def run_application(folder: Path, source: dict[str, str], sink: dict[str, str], master: str) -> int:
    """Run the pipeline until it is killed or, if the file `last` exists, until it has written all rows.

    Print a line when a query starts, and when a batch has ended.
    """
    trace_settings = {
        "spark.sql.pyspark.jvmStacktrace.enabled": "true"
    }  # so that the log explains a fault that ends the query
    cluster_settings = ON_CLUSTER | {f"spark.executorEnv.{MARK}": str(folder), "spark.executor.extraJavaOptions": SOON}
    if master == EXECUTORS:
        cluster_settings |= {"spark.cores.max": "2"}
    last_status: object = None
    # Allow four attempts per task, as on a cluster. A `local` master allows only one by default.
    with spark_session(
        2, SOON, master=master or "local[2,4]", settings=trace_settings | (cluster_settings if master else {})
    ) as spark:

        def start_query() -> StreamingQuery:
            rows = spark.readStream.format("kinesis-leased").options(**source).load()
            writer = rows.select("data", "partitionKey").writeStream.format("kinesis-leased").options(**sink)
            writer = writer.option("checkpointLocation", str(folder / "progress")).queryName("pipeline")
            return (writer.trigger(availableNow=True) if (folder / "last").exists() else writer).start()

        def is_ending() -> bool:
            nonlocal last_status
            for query in spark.streams.active:
                last_progress = query.lastProgress
                status = {"run": query.runId, "batch": last_progress and last_progress["batchId"]}
                if status != last_status:
                    last_status = status
                    sys.stdout.write(json.dumps(status) + "\n")
                    sys.stdout.flush()
            return False

        supervise(start_query, should_stop=is_ending)
    return 0


@frozen
class Received:
    """The rows that a reader received, compared with those that were sent.

    Attributes:
        rows: The number of rows that the reader received.
        lost: The number of rows that were sent and that the reader did not receive.
        doubled: The number of repeated rows.
        order: The number of keys whose rows were out of order.
    """

    rows: int
    lost: int
    doubled: int
    order: int


def compare_rows(sent_rows: Sequence[Row], received_rows: Sequence[Row]) -> Received:
    """Compare the rows that a reader received, in this order, with the rows that were sent."""
    delivery_counts = Counter(data for _, data in received_rows)
    numbers_by_key = defaultdict[str, list[int]](list)
    for key, data in received_rows:
        numbers_by_key[key].append(int(data))
    return Received(
        len(received_rows),
        sum(not delivery_counts[data] for _, data in sent_rows),
        sum(count - 1 for count in delivery_counts.values()),
        sum(key_numbers != sorted(key_numbers) for key_numbers in numbers_by_key.values()),
    )


@define
class Pipeline:
    """The running pipeline.

    Attributes:
        until: The time after which nothing is killed any more, and the last application starts.
        kills: The kinds of processes that were killed, in order.
        again: How often a query was started again, by the reason.
        lives: The number of applications started so far.
        versions: Versions of PySpark, which the applications use in turn. "" is the installed version, which the last
            application uses.
        name: The name of the lease table, and the prefix of the streams' names.
        patience: A factor for all time limits, for a machine that does other work at the same time.
    """

    folder: Path
    kinesis: str
    dynamodb: str
    seed: int
    master: str
    until: float
    kills: list[str] = field(factory=list)
    again: Counter[str] = field(factory=Counter)
    lives: int = 0
    versions: Sequence[str] = ()
    name: str = "pipeline"
    patience: float = 1.0

    @property
    def wait_seconds(self) -> float:
        """The time limit of every wait."""
        return self.patience * WAIT_SECONDS

    def run(self, count: int, report: Callable[[str], None]) -> tuple[list[Row], Stream]:
        """Kill processes this often, let the last application end by itself, and return its input and output."""
        rng, sent_rows = Random(self.seed), list[Row]()  # noqa: S311  a seed is the point
        input_stream, output_stream = (
            Stream(self.kinesis, f"{self.name}-in", 3),
            Stream(self.kinesis, f"{self.name}-out", 2),
        )
        with line(self.kinesis) as faulty_line, closing(create_kinesis_client(self.kinesis)) as kinesis_client:
            while self._may_kill(count):
                application = self.start_application(faulty_line.url)
                try:
                    while application.is_running and self._may_kill(count):
                        new_rows = [
                            (f"{n % KEYS}", f"{n}".encode()) for n in range(len(sent_rows), len(sent_rows) + ROUND)
                        ]
                        put_records(kinesis_client, input_stream.name, new_rows)
                        sent_rows += new_rows
                        self._reshard(count, input_stream, output_stream)
                        faulty_line.fail("PutRecords", *rng.choices(FAULTS, k=rng.randrange(4)))
                        self._kill_random_process(application, faulty_line, rng)
                        report(f"{len(self.kills)} kills in {self.lives} lives: {dict(Counter(self.kills))}")
                    assert application.is_running or self.kills[-1:] == ["application"], application.last_output
                finally:
                    self.kill_application(application)
            (self.folder / "last").touch()
            self.versions = ()
            application = self.start_application(faulty_line.url)
            try:
                _wait_until(lambda: not application.is_running, application, 2 * self.wait_seconds)
                assert application.wait() == 0, application.last_output
            finally:
                self.kill_application(application)
            return sent_rows, output_stream

    def _may_kill(self, count: int) -> bool:
        return len(self.kills) < count and time.monotonic() < self.until

    def start_application(self, output_endpoint: str) -> KilledApplication:
        """Start an application, which writes to the service at this URL."""
        self.lives += 1
        region_options = {"kinesis.region": "eu-west-1"}
        source_options = region_options | {
            "kinesis.streamName": f"{self.name}-in",
            "kinesis.endpointUrl": self.kinesis,
            "kinesis.startingPosition": "TRIM_HORIZON",
            "lease.store": f"dynamodb://{self.name}?region=eu-west-1&endpoint={self.dynamodb}",
            "lease.durationMs": f"{LEASE_SECONDS * 1000:g}",
            "maxRowsPerTrigger": str(TRIGGER_ROWS),
        }
        sink_options = region_options | {
            "kinesis.streamName": f"{self.name}-out",
            "kinesis.endpointUrl": output_endpoint,
        }
        arguments = (
            __file__,
            "--application",
            str(self.folder),
            json.dumps(source_options),
            json.dumps(sink_options),
            self.master,
        )
        version = self.versions[(self.lives - 1) % len(self.versions)] if self.versions else ""
        paths = [*([str(pyspark_path(version))] if version else []), *filter(None, [os.environ.get("PYTHONPATH")])]
        with patch.dict(os.environ, {MARK: str(self.folder), "PYTHONPATH": os.pathsep.join(paths)}):
            return KilledApplication(f"life-{self.lives}", arguments, self.folder)

    def kill_application(self, application: KilledApplication) -> None:
        """Kill the application and all processes that it started."""
        application.kill()
        if self.master:
            record_leftovers(self.folder)
        application.wait_for_remaining()
        self.again.update(AGAIN.findall((self.folder / f"life-{self.lives}.log").read_text(errors="replace")))

    def _reshard(self, count: int, input_stream: Stream, output_stream: Stream) -> None:
        kills_done = len(self.kills)
        if kills_done in {count // 4, 3 * count // 5}:
            output_stream.split()
        if kills_done == count // 3:
            input_stream.split()
        if kills_done == count // 2:
            output_stream.merge()

    def _kill_random_process(self, application: KilledApplication, faulty_line: Line, rng: Random) -> None:
        """Kill a random process.

        A task is killed while it writes, a committer when it begins, and any other process after a batch has ended.
        """
        target = rng.choice(CLUSTER_TARGETS if self.master else LOCAL_TARGETS_OF_PIPELINE)
        if len(self.versions) > 1 and len(self.kills) % 2:
            target = "application"
        port = int(faulty_line.url.rpartition(":")[2])
        if target == "committer":  # kill an idle one first, so that the next one has a batch to commit
            _kill_all(self._list_processes_of_kind(application, target, port))
        requests_before, batches_before = faulty_line.requests["PutRecords"], _count_batches(application)
        conditions: dict[str, Callable[[], object]] = {
            "task": lambda: faulty_line.requests["PutRecords"] > requests_before,
            "committer": lambda: self._list_processes_of_kind(application, target, port),
        }
        condition = conditions.get(target, lambda: _count_batches(application) > batches_before)
        _wait_until(lambda: not application.is_running or condition(), application, self.wait_seconds)
        time.sleep(rng.random() * {"task": 0.3, "committer": 0.0}.get(target, 1.0))
        pids = self._list_processes_of_kind(application, target, port)
        if not pids:  # no such process has started yet
            return
        self.kills += [target] * bool(_kill_all(pids if target == "application" else [rng.choice(pids)]))
        if target == "application":
            _wait_until(lambda: not application.is_running, application, self.wait_seconds)

    def _list_processes_of_kind(self, application: KilledApplication, target: str, port: int) -> list[int]:
        processes = (
            executors.marked(f"{MARK}={self.folder}") if target == "executor" else list_descendants(application.pid)
        )
        if target == "application":
            return [*processes]
        if target == "task":
            return sorted(executors.connected_to(port))
        return [pid for pid, command_line in processes.items() if PROCESSES[target] in command_line]


def _kill_all(pids: Sequence[int]) -> int:
    """Kill these processes, and return how many of them were still running."""
    killed_count = 0
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            killed_count += 1
    return killed_count


def _count_batches(application: Child) -> int:
    """Return the number of batches that the application has reported as finished."""
    return sum(b"null" not in line for line in application.out.read_bytes().splitlines())


def _count_lines(application: Child) -> int:
    return len(application.out.read_bytes().splitlines())


def _wait_until(condition: Callable[[], object], application: KilledApplication, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, application.last_output
        time.sleep(0.1)


def read_with_worker(folder: Path, stream: Stream, count: int, seconds: float) -> list[Row]:
    """Return the rows that a plain worker receives, until no more arrive."""
    handler_file = folder / "given.py"
    handler_file.write_text(
        "import json, sys\n"
        "def handle(batch):\n"
        "    for record in batch.records:\n"
        "        sys.stdout.write(json.dumps([record.partition_key, record.data.decode()]) + '\\n')\n"
        "    sys.stdout.flush()\n"
    )
    store_url, initial_position = f"sqlite:///{folder}/plain.db", "TRIM_HORIZON"
    arguments = (
        "consume",
        stream.url,
        "--store",
        store_url,
        "--handler",
        "given:handle",
        "--initial-position",
        initial_position,
    )
    with patch.dict(os.environ, {"PYTHONPATH": str(folder)}):
        worker = Child("plain", ("-m", "leasehold.adapters.cli.main", *arguments), folder)
    try:
        lines = _wait_for_output(worker, count, seconds)
    finally:
        worker.kill()
    return [(key, data.encode()) for key, data in map(json.loads, lines)]


def read_with_kcl(kinesis: str, stream: Stream) -> set[bytes]:
    """Return the data of the user records that the code of the Java KCL extracts from the records of each shard."""
    records_with_ranges = list[tuple[bytes, int, int]]()
    with closing(create_kinesis_client(kinesis)) as kinesis_client:
        for shard in stream.shards():
            iterator_request: Any = {
                "StreamName": stream.name,
                "ShardId": shard.id,
                "ShardIteratorType": "TRIM_HORIZON",
            }
            response = kinesis_client.get_records(
                ShardIterator=kinesis_client.get_shard_iterator(**iterator_request)["ShardIterator"]
            )
            while response["Records"] or response["MillisBehindLatest"]:
                records_with_ranges += [(row["Data"], *(shard.hash_range or HASH_KEYS)) for row in response["Records"]]
                if not (next_iterator := response.get("NextShardIterator")):
                    break
                response = kinesis_client.get_records(ShardIterator=next_iterator)
    return {data for shard_records in kcl_jar.kcl_records(records_with_ranges) for _, _, data, _, _ in shard_records}


def _wait_for_output(worker: Child, count: int, seconds: float) -> list[bytes]:
    """Wait until the worker has printed this many lines and then no more for a while, and return its output."""
    deadline, last_line_count, last_change_time = time.monotonic() + seconds, -1, 0.0
    while time.monotonic() < deadline and worker.is_running:
        line_count = _count_lines(worker)
        if line_count != last_line_count:
            last_line_count, last_change_time = line_count, time.monotonic()
        elif line_count >= count and time.monotonic() - last_change_time > 15:
            break
        time.sleep(0.5)
    return worker.out.read_bytes().splitlines()


def read_with_spark(folder: Path, kinesis: str, stream: Stream) -> list[Row]:
    """Return the rows that a Spark query receives, in the order of the stream."""
    options = {
        "kinesis.streamName": stream.name,
        "kinesis.endpointUrl": kinesis,
        "kinesis.region": "eu-west-1",
        "kinesis.startingPosition": "TRIM_HORIZON",
        "lease.store": f"sqlite:///{folder}/spark.db",
        "maxRowsPerTrigger": "701",
    }
    with spark_session(2, SOON) as spark:

        def start() -> StreamingQuery:
            writer = spark.readStream.format("kinesis-leased").options(**options).load().writeStream
            writer = writer.format("parquet").option("path", str(folder / "end")).queryName("end")
            return writer.option("checkpointLocation", str(folder / "end-progress")).trigger(availableNow=True).start()

        start_query(start).awaitTermination()
        rows = spark.read.parquet(str(folder / "end"))
        number = f.lpad("sequenceNumber", 60, "0")
        collected = rows.orderBy(number, "subSequenceNumber").select("partitionKey", "data").collect()
        return [(row[0], bytes(row[1])) for row in collected]


@frozen
class Outcome:
    """The result of a run.

    Attributes:
        again: How often a query was started again, by the logged reason.
        received: What each reader received, by the name of the reader.
        kcl: The number of rows that the Java KCL did not find, or None if it did not run.
    """

    kills: dict[str, int]
    lives: int
    again: dict[str, int]
    sent: int
    received: dict[str, Received]
    kcl: int | None

    @property
    def faults(self) -> int:
        """The number of lost rows, repeated rows, and keys whose rows were out of order."""
        return sum(
            rows_received.lost + rows_received.doubled + rows_received.order for rows_received in self.received.values()
        ) + (self.kcl or 0)


def run_pipeline(
    pipeline: Pipeline, kills: int, *, java: bool = False, report: Callable[[str], None] = print_to_stderr
) -> Outcome:
    """Kill processes of the pipeline this often, let all readers read its output, and return the result."""
    sent_rows, output_stream = pipeline.run(kills, report)
    received_by_reader = {
        "plain": compare_rows(
            sent_rows, read_with_worker(pipeline.folder, output_stream, len(sent_rows), pipeline.wait_seconds)
        ),
        "spark": compare_rows(sent_rows, read_with_spark(pipeline.folder, pipeline.kinesis, output_stream)),
    }
    missing_rows = None
    if java:
        kcl_rows = read_with_kcl(pipeline.kinesis, output_stream)
        missing_rows = sum(data not in kcl_rows for _, data in sent_rows)
    return Outcome(
        dict(Counter(pipeline.kills)),
        pipeline.lives,
        dict(pipeline.again),
        len(sent_rows),
        received_by_reader,
        missing_rows,
    )


def main() -> int:
    """Run the program by hand, or as the application."""
    if sys.argv[1:2] == ["--application"]:
        folder_path, source, sink, master = sys.argv[2:]
        return run_application(Path(folder_path), json.loads(source), json.loads(sink), master)
    options = ArgumentParser(
        description="Kill a pipeline from Kinesis into Kinesis, and judge what readers were given."
    )
    options.add_argument("--kills", type=int, default=40, help="how often (%(default)s)")
    options.add_argument("--minutes", type=float, default=600.0, help="how long is killed at most (%(default)s)")
    options.add_argument("--seed", type=int, default=0, help="what is killed when (%(default)s)")
    options.add_argument(
        "--cluster", action="store_true", help="on a cluster of this machine, whose executors die, too"
    )
    options.add_argument("--java", action="store_true", help="have the Java KCL read what came, too")
    options.add_argument("--executors", action="store_true", help="each application has an executor, which dies, too")
    options.add_argument("--patience", type=float, default=1.0, help="multiplies all time limits (%(default)s)")
    pyspark_help = "a version of PySpark, as 4.0, or '' for the present one; several take turns, see above"
    options.add_argument("--pyspark", action="append", default=[], metavar="VERSION", help=pyspark_help)
    arguments = options.parse_args()
    if arguments.cluster and any(arguments.pyspark):
        options.error("--cluster: its processes have the present version; use --executors with --pyspark")
    replace_aws_environment()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="leasehold-pipeline-")))
        kinesis, dynamodb = stack.enter_context(run_services())
        master = stack.enter_context(run_cluster()) if arguments.cluster else EXECUTORS if arguments.executors else ""
        end_time = time.monotonic() + 60 * arguments.minutes
        pipeline = Pipeline(
            folder,
            kinesis,
            dynamodb,
            arguments.seed,
            master,
            end_time,
            versions=arguments.pyspark,
            patience=arguments.patience,
        )
        result = run_pipeline(pipeline, arguments.kills, java=arguments.java)
    sys.stdout.write(json.dumps(asdict(result), indent=2) + "\n")
    return 1 if result.faults else 0


if __name__ == "__main__":
    sys.exit(main())
