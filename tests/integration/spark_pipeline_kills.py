"""A pipeline from Kinesis by Spark into Kinesis whose processes are killed, and what readers at its end were given.

    python tests/integration/spark_pipeline_kills.py --help

One application reads a stream and writes another by our sink. Its tasks, the process that plans its batches, and the
application itself are killed, drawn from a seed, while the line to the stream that it writes to throttles, breaks
after a request was carried out, and answers late; on the way both streams are split and merged. What dies is started
again, until all rows are through. Then a plain worker of ours and a query of ours must have each row once, and the rows
of each key in order; the Java KCL, where it can be had, each row at least once.
"""

import json
import os
import signal
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

from attrs import asdict, define, field, frozen
from flights import Row, flights, to_stderr
from pyspark.sql import functions as f
from pyspark.sql.streaming.query import StreamingQuery
from spark_application import descendants
from spark_killer import cluster, note_left
from spark_kills import Victim
from standins import executors
from standins.spark import LATE, ON_CLUSTER, SOON, spark_session

sys.path += [str(Path(__file__).parents[1] / each) for each in ("fleet", "sources/kinesis")]
import kcl_jar
from faulty_line import Line, Refused, Reset, line

from leasehold.adapters.demo.child import Child, isolate
from leasehold.adapters.demo.stage import Stream, client, put, services
from leasehold.adapters.spark.pipeline import begun
from leasehold.balancer.model import HASH_KEYS

ROUND = 150
"""Rows that are sent between two kills."""
TRIGGER_ROWS = 50
LEASE_SECONDS = 6.0
WAIT_SECONDS = 420.0
THROTTLED = Refused("ProvisionedThroughputExceededException")
FAULTS = (THROTTLED, THROTTLED, Reset(late=True), Reset(), Refused("InternalFailure", 500))
AMONG = ("task", "task", "task", "task", "task", "planner", "application")
ON_EXECUTORS = ("task", "task", "task", "executor", "executor", "planner", "application")
MARK = "LEASEHOLD_PIPELINE_KILLS"


def application(folder: Path, source: dict[str, str], sink: dict[str, str], master: str) -> int:
    """Read and write until killed, or told to end by a file; says each batch that is done."""
    settings = {"spark.task.maxFailures": "40", "spark.python.worker.reuse": "true"}
    on_cluster = ON_CLUSTER | {f"spark.executorEnv.{MARK}": str(folder), "spark.executor.extraJavaOptions": SOON}
    given = settings | (on_cluster if master else {})
    with spark_session(2, SOON, master=master or "local[2,40]", settings=given) as spark:

        def start() -> StreamingQuery:
            rows = spark.readStream.format("kinesis-leased").options(**source).load()
            writer = rows.select("data", "partitionKey").writeStream.format("kinesis-leased").options(**sink)
            writer = writer.option("checkpointLocation", str(folder / "progress")).queryName("pipeline")
            return (writer.trigger(availableNow=True) if (folder / "last").exists() else writer).start()

        query, said = begun(start), -1
        sys.stdout.write(json.dumps({"begun": os.getpid()}) + "\n")
        while query.isActive:
            if (told := query.lastProgress) and told["batchId"] != said:
                said = told["batchId"]
                sys.stdout.write(json.dumps({"batch": said, "rows": told["numInputRows"]}) + "\n")
                sys.stdout.flush()
            time.sleep(0.1)
        if (fault := query.exception()) is not None:
            raise fault
    return 0


@frozen
class Given:
    """What a reader at the end was given.

    doubled  rows that came again
    order    keys whose rows did not come in order
    """

    rows: int
    lost: int
    doubled: int
    order: int


def judged(sent: Sequence[Row], given: Sequence[tuple[str, bytes]]) -> Given:
    """Rows by key, in the order in which a reader had them."""
    times = Counter(data for _, data in given)
    numbers = defaultdict[str, list[int]](list)
    for key, data in given:
        numbers[key].append(int(json.loads(data)[0]))
    return Given(
        len(given),
        sum(not times[row.data] for row in sent),
        sum(count - 1 for count in times.values()),
        sum(found != sorted(found) for found in numbers.values()),
    )


@define
class Pipeline:
    """The pipeline under way.

    until  when the last life is to begin, at the latest
    kills  who was killed, in order
    """

    folder: Path
    kinesis: str
    dynamodb: str
    seed: int
    master: str
    until: float
    kills: list[str] = field(factory=list)
    lives: int = 0

    def run(self, count: int, told: Callable[[str], None]) -> tuple[list[Row], Stream]:
        """Kill so often, and let the last life end by itself; what was sent, and the stream it should be in."""
        chance, sent, rows = Random(self.seed), list[Row](), flights()  # noqa: S311  it is to be drawn again
        read, wrote = Stream(self.kinesis, "pipeline-in", 3), Stream(self.kinesis, "pipeline-out", 2)
        with line(self.kinesis) as faulty, closing(client(self.kinesis)) as to:
            while self._goes_on(count):
                app = self._begun(faulty)
                try:
                    while app.running and self._goes_on(count):
                        more = list(islice(rows, ROUND))
                        put(to, read.name, [(row.sent.key, row.data) for row in more])
                        sent += more
                        self._reshaped(count, read, wrote)
                        faulty.fail("PutRecords", *chance.choices(FAULTS, k=chance.randrange(4)))
                        self._kill(app, chance)
                        told(f"{len(self.kills)} kills in {self.lives} lives: {dict(Counter(self.kills))}")
                finally:
                    self._ended(app)
            (self.folder / "last").touch()
            while True:
                app = self._begun(faulty)
                _over(app, 2 * WAIT_SECONDS)
                status = app.wait()
                self._ended(app)
                if not status:
                    return sent, wrote
                assert LATE in app.said, app.said

    def _goes_on(self, count: int) -> bool:
        return len(self.kills) < count and time.monotonic() < self.until

    def _begun(self, faulty: Line) -> Victim:
        self.lives += 1
        region = {"kinesis.region": "eu-west-1"}
        source = region | {
            "kinesis.streamName": "pipeline-in",
            "kinesis.endpointUrl": self.kinesis,
            "kinesis.startingPosition": "TRIM_HORIZON",
            "lease.store": f"dynamodb://pipeline?region=eu-west-1&endpoint={self.dynamodb}",
            "lease.durationMs": f"{LEASE_SECONDS * 1000:g}",
            "maxRowsPerTrigger": str(TRIGGER_ROWS),
        }
        sink = region | {"kinesis.streamName": "pipeline-out", "kinesis.endpointUrl": faulty.url}
        words = (__file__, "--application", str(self.folder), json.dumps(source), json.dumps(sink), self.master)
        with patch.dict(os.environ, {MARK: str(self.folder)}):
            return Victim(f"life-{self.lives}", words, self.folder)

    def _ended(self, app: Victim) -> None:
        app.kill()
        if self.master:
            note_left(self.folder)
        app.leave()

    def _reshaped(self, count: int, read: Stream, wrote: Stream) -> None:
        done = len(self.kills)
        if done in {count // 4, 3 * count // 5}:
            wrote.split()
        if done == count // 3:
            read.split()
        if done == count // 2:
            wrote.merge()

    def _kill(self, app: Victim, chance: Random) -> None:
        """Once it has done a batch since: a task, the planner, an executor or all of it."""
        before, deadline = len(app.out.read_bytes().splitlines()), time.monotonic() + WAIT_SECONDS
        while app.running and len(app.out.read_bytes().splitlines()) <= before:
            assert time.monotonic() < deadline, app.said
            time.sleep(0.1)
        time.sleep(chance.random())
        who = chance.choice(ON_EXECUTORS if self.master else AMONG)
        if found := self._found(app, who, chance):
            for pid in found:
                os.kill(pid, signal.SIGKILL)
            self.kills.append(who)
            if who in {"planner", "application"}:
                _over(app, WAIT_SECONDS)

    def _found(self, app: Victim, who: str, chance: Random) -> list[int]:
        below = descendants(app.pid)
        if who == "application":
            return [*below]
        if who == "planner":
            return [pid for pid, words in below.items() if "python_streaming_source_runner" in words][:1]
        if self.master:
            below = executors.marked(f"{MARK}={self.folder}")
        if who == "executor":
            return [pid for pid, words in below.items() if "CoarseGrainedExecutorBackend" in words][:1]
        daemons = [pid for pid, words in below.items() if "pyspark.daemon" in words]
        return [chance.choice(daemons)] if daemons else []


def _over(app: Victim, seconds: float) -> None:
    """Wait until it has ended."""
    deadline = time.monotonic() + seconds
    while app.running:
        assert time.monotonic() < deadline, app.said
        time.sleep(0.2)


def plain(folder: Path, stream: Stream, count: int) -> list[tuple[str, bytes]]:
    """What a plain worker is given, until nothing more comes."""
    handler = folder / "given.py"
    handler.write_text(
        "import json, sys\n"
        "def handle(batch):\n"
        "    for record in batch.records:\n"
        "        sys.stdout.write(json.dumps([record.partition_key, record.data.decode()]) + '\\n')\n"
        "    sys.stdout.flush()\n"
    )
    store, start = f"sqlite:///{folder}/plain.db", "TRIM_HORIZON"
    words = ("consume", stream.url, "--store", store, "--handler", "given:handle", "--initial-position", start)
    with patch.dict(os.environ, {"PYTHONPATH": str(folder)}):
        worker = Child("plain", ("-m", "leasehold.adapters.cli.main", *words), folder)
    try:
        found = _lines(worker, count)
    finally:
        worker.kill()
    return [(key, data.encode()) for key, data in map(json.loads, found)]


def kcl(kinesis: str, stream: Stream) -> set[bytes]:
    """What the Java KCL's own code makes of the records of each shard."""
    asked = list[tuple[bytes, int, int]]()
    with closing(client(kinesis)) as to:
        for shard in stream.shards():
            place: Any = {"StreamName": stream.name, "ShardId": shard.id, "ShardIteratorType": "TRIM_HORIZON"}
            told = to.get_records(ShardIterator=to.get_shard_iterator(**place)["ShardIterator"])
            while told["Records"] or told["MillisBehindLatest"]:
                asked += [(row["Data"], *(shard.hash_range or HASH_KEYS)) for row in told["Records"]]
                if not (following := told.get("NextShardIterator")):
                    break
                told = to.get_records(ShardIterator=following)
    return {data for kept in kcl_jar.verdicts(asked) for _, _, data, _, _ in kept}


def _lines(worker: Child, count: int) -> list[bytes]:
    """What it has said once there are so many lines and no more have come for a while."""
    deadline, seen, since = time.monotonic() + WAIT_SECONDS, -1, 0.0
    while time.monotonic() < deadline and worker.running:
        now = len(worker.out.read_bytes().splitlines())
        if now != seen:
            seen, since = now, time.monotonic()
        elif now >= count and time.monotonic() - since > 15:
            break
        time.sleep(0.5)
    return worker.out.read_bytes().splitlines()


def by_spark(folder: Path, kinesis: str, stream: Stream) -> list[tuple[str, bytes]]:
    """What a query of ours is given, in the order of the stream."""
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

        begun(start).awaitTermination()
        rows = spark.read.parquet(str(folder / "end"))
        number = f.lpad("sequenceNumber", 60, "0")
        found = rows.orderBy(number, "subSequenceNumber").select("partitionKey", "data").collect()
        return [(row[0], bytes(row[1])) for row in found]


@frozen
class Outcome:
    """What became of a pipeline.

    given  what each reader at the end was given, by name
    kcl    rows that the Java KCL did not find; None if it was not asked
    """

    kills: dict[str, int]
    lives: int
    sent: int
    given: dict[str, Given]
    kcl: int | None

    @property
    def faults(self) -> int:
        """Rows that were lost, or came again or out of order where they must not."""
        return sum(each.lost + each.doubled + each.order for each in self.given.values()) + (self.kcl or 0)


def tried(pipeline: Pipeline, kills: int, *, java: bool = False, told: Callable[[str], None] = to_stderr) -> Outcome:
    """Kill it so often, and have all readers read what came of it."""
    sent, stream = pipeline.run(kills, told)
    given = {
        "plain": judged(sent, plain(pipeline.folder, stream, len(sent))),
        "spark": judged(sent, by_spark(pipeline.folder, pipeline.kinesis, stream)),
    }
    missed = None
    if java:
        seen = kcl(pipeline.kinesis, stream)
        missed = sum(row.data not in seen for row in sent)
    return Outcome(dict(Counter(pipeline.kills)), pipeline.lives, len(sent), given, missed)


def main() -> int:
    """Run it by hand, or be the application."""
    if sys.argv[1:2] == ["--application"]:
        place, source, sink, master = sys.argv[2:]
        return application(Path(place), json.loads(source), json.loads(sink), master)
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
    asked = options.parse_args()
    isolate()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="leasehold-pipeline-")))
        kinesis, dynamodb = stack.enter_context(services())
        master = stack.enter_context(cluster()) if asked.cluster else ""
        pipeline = Pipeline(folder, kinesis, dynamodb, asked.seed, master, time.monotonic() + 60 * asked.minutes)
        found = tried(pipeline, asked.kills, java=asked.java)
    sys.stdout.write(json.dumps(asdict(found), indent=2) + "\n")
    return 1 if found.faults else 0


if __name__ == "__main__":
    sys.exit(main())
