"""A user's program on a cluster: a query with readers on executors, which runs until the program reads a line.

    python cluster_query.py MASTER STREAM ENDPOINT FOLDER READERS

It prints the rows of each batch, and once the query has stopped, the number of jobs that the session still runs. Then
it stays until it reads another line.
"""

import json
import sys
import time
from threading import Event, Thread

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from leasehold.adapters.spark import register
from leasehold.adapters.spark.pipeline import SETTINGS, begun

PATIENCE = 400.0


def say(what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def land(rows: DataFrame, _number: int) -> None:
    say([[row.shardId, row.sequenceNumber, bytes(row.data).decode()] for row in rows.collect()])


def main(master: str, stream: str, endpoint: str, folder: str, readers: str) -> None:
    """Read until told to stop, and end when told again."""
    spark = SparkSession.builder.master(master).config(map=SETTINGS).getOrCreate()
    register(spark)
    options = {
        "kinesis.streamName": stream,
        "kinesis.endpointUrl": endpoint,
        "kinesis.region": "eu-west-1",
        "kinesis.startingPosition": "TRIM_HORIZON",
        "lease.store": f"sqlite:///{folder}/leases.db",
        "lease.readers": readers,
    }

    def start() -> StreamingQuery:
        writer = spark.readStream.format("kinesis-leased").options(**options).load().writeStream.foreachBatch(land)
        return writer.option("checkpointLocation", f"{folder}/progress").start()

    query = begun(start)
    asked = Event()

    def hear() -> None:
        sys.stdin.readline()
        asked.set()

    Thread(target=hear, daemon=True).start()
    while not asked.wait(0.2):
        assert query.isActive, query.exception()
    query.stop()
    deadline = time.monotonic() + PATIENCE
    while (left := spark.sparkContext.statusTracker().getActiveJobsIds()) and time.monotonic() < deadline:
        time.sleep(0.1)
    say(len(left))
    sys.stdin.readline()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
