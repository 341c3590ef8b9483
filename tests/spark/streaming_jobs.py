"""Jobs, each of which consists of streaming queries that share a stream and a lease table."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq  # type: ignore[import-untyped]  # pyarrow ships no types
from attrs import define, field
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter as Writer
from waiters import WAIT

from leasehold.adapters.spark.pipeline import start_query
from leasehold.stores.protocol import Store
from leasehold.stores.urls import open_store


def _sequence(row: dict[str, Any]) -> int:
    return int(row["sequenceNumber"])


@define
class Job:
    """Queries over one stream, with one lease table."""

    spark: SparkSession
    folder: Path
    format: str
    options: dict[str, str]
    queries: list[StreamingQuery] = field(factory=list)

    @property
    def url(self) -> str:
        return f"sqlite:///{self.folder}/leases.db"

    @property
    def store(self) -> Store:
        return open_store(self.url)

    def rows(self) -> DataFrame:
        options = {"lease.store": self.url, "lease.durationMs": "4000", **self.options}
        return self.spark.readStream.format(self.format).options(**options).load()

    def parquet(self, name: str, *, now: bool = False) -> StreamingQuery:
        """Start a query that writes files.

        With `now`, it reads the existing records, and this method waits for it to end.
        """
        folder = str(self.folder / name)
        query = self._begun(name, lambda writer: writer.format("parquet").option("path", folder), now=now)
        if now:
            assert query.awaitTermination(WAIT)
        return query

    def each(self, name: str, sink: Callable[[DataFrame, int], None]) -> StreamingQuery:
        """Start a query that passes its batches to a function."""
        return self._begun(name, lambda writer: writer.foreachBatch(sink))

    def _begun(self, name: str, configure: Callable[[Writer], Writer], *, now: bool = False) -> StreamingQuery:
        def start() -> StreamingQuery:
            writer = configure(self.rows().writeStream).option(
                "checkpointLocation", str(self.folder / f"{name}-progress")
            )
            query = (writer.trigger(availableNow=True) if now else writer.trigger(processingTime="0 seconds")).start()
            self.queries.append(query)
            return query

        return start_query(start)

    def rows_in(self, *names: str) -> list[dict[str, Any]]:
        """Return every row in the finished batches of these queries.

        A file counts only when the sink's own log lists it.
        """
        logs = [log for name in names for log in (self.folder / name / "_spark_metadata").glob("[0-9]*")]
        lines = {line for log in logs for line in log.read_text().splitlines()[1:]}
        paths = {json.loads(line)["path"].removeprefix("file://") for line in lines}
        columns = ["shardId", "sequenceNumber", "data"]
        return [row for path in sorted(paths) for row in pq.read_table(path, columns=columns).to_pylist()]

    def written(self, *names: str) -> list[str]:
        """Return the data of every row in the files of these queries, in order and including duplicates."""
        return sorted(row["data"].decode() for row in self.rows_in(*names))

    def checkpoints(self) -> dict[str, str]:
        """Return the checkpoints of the leases."""
        return {lease.key: lease.checkpoint.sequence for lease in self.store.list().leases}

    def tips(self, name: str) -> dict[str, str]:
        """Return the last sequence number of each shard that the sink has received."""
        return {row["shardId"]: row["sequenceNumber"] for row in sorted(self.rows_in(name), key=_sequence)}

    def owners(self) -> list[str]:
        """Return the owners of the unfinished leases, sorted. A name occurs once per lease."""
        return sorted(lease.owner or "" for lease in self.store.list().leases if not lease.ended)


@contextmanager
def new_job(spark: SparkSession, folder: Path, kind: str, options: dict[str, str]) -> Iterator[Job]:
    """Yield a job whose queries are stopped at the end of the block."""
    job = Job(spark, folder, kind, options)
    try:
        yield job
    finally:
        for query in job.queries:
            query.stop()
