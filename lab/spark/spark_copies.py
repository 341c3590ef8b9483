"""Runs queries on copies of one checkpointLocation, or on an older copy, and checks what a reader receives.

    python lab/spark/spark_copies.py

A query reads files, one per batch, and writes their lines to a stream. There are three cases:

- options    The checkpointLocation is copied, and queries run on both at once. Each names its location in an option.
- session    As in "options", but the locations are in the settings of the session, where a sink cannot see them.
- restored   The query continues. Then its checkpointLocation is replaced by the earlier copy, and the query continues.

The query on the copy reads two files per batch, so its batches have the same numbers but other rows. No row may be
lost. Rows that are delivered more than once are counted, and so are the rows that the reader reports as possible
duplicates (`undecided`). The exit status is 1 if a row is lost, or if a row is delivered more than twice.
"""

import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, closing
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "tests"))

from standins.spark import SOON, spark_session

from leasehold.adapters.sources.urls import open_source
from leasehold.adapters.spark.pipeline import start_query
from leasehold.balancer.model import TRIM_HORIZON, Lease
from leasehold_lab.demo.child import ENVIRONMENT, Child, replace_aws_environment
from leasehold_lab.demo.stage import Stream, run_services

CASES = ("options", "session", "restored")
FIRST, MORE, LINES, SHARDS = 8, 16, 100, 2
WAIT_SECONDS = 900.0
SESSION_LOCATION = "spark.sql.streaming.checkpointLocation"


def run_query(case: str, stream: str, endpoint: str, folder: str, *name_and_files: str) -> None:
    """Write the lines of all files to the stream, and end.

    `name_and_files` consists of the query's name and the number of files per batch.
    """
    name, files = name_and_files
    settings = {SESSION_LOCATION: f"{folder}/{name}"} if case == "session" else {}
    with spark_session(1, SOON, settings=settings) as spark:
        lines = spark.readStream.option("maxFilesPerTrigger", files).text(f"{folder}/files")
        writer = lines.selectExpr("value AS data", "value AS partitionKey").writeStream.format("kinesis-leased")
        writer = writer.option("kinesis.streamName", stream).option("kinesis.endpointUrl", endpoint).queryName("q")
        writer = writer.option("kinesis.region", ENVIRONMENT["AWS_DEFAULT_REGION"]).trigger(availableNow=True)
        if case != "session":
            writer = writer.option("checkpointLocation", f"{folder}/{name}/q")
        start_query(writer.start).awaitTermination()


def wait_for_queries(*queries: Child) -> None:
    """Wait until these queries have ended without an error."""
    deadline = time.monotonic() + WAIT_SECONDS
    for child in queries:
        while child.is_running:
            assert time.monotonic() < deadline, child.last_output
            time.sleep(0.2)
        assert child.wait() == 0, child.last_output


def count_deliveries(url: str) -> tuple[Counter[str], int]:
    """Return how often each row is delivered, and how many rows the reader reports as possible duplicates."""
    deliveries, undecided_count = Counter[str](), 0
    with closing(open_source(url)) as source:
        for shard in source.shards():
            with closing(source.open(Lease(shard.id, hash_range=shard.hash_range), TRIM_HORIZON)) as reader:
                batch = reader.read()
                while batch.records or batch.behind_seconds != 0:
                    deliveries.update(record.data.decode() for record in batch.records)
                    undecided_count += batch.possible_duplicates
                    batch = reader.read()
    return deliveries, undecided_count


def run_case(case: str, kinesis: str) -> dict[str, int | str]:
    """Run one case, and return the counts of rows that a reader receives."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"leasehold-{case}-")))
        stream = stack.enter_context(closing(Stream(kinesis, f"copies-{case}", SHARDS)))
        (folder / "files").mkdir()

        def put_rows(first: int, count: int) -> None:
            for file_number in range(first, first + count):
                lines = "".join(f"row {file_number * LINES + line}\n" for line in range(LINES))
                (folder / "files" / f"{file_number:03}.txt").write_text(lines)

        def start_query(name: str, files: int) -> Child:
            arguments = (__file__, "--query", case, stream.name, kinesis, str(folder), name, str(files))
            child = Child(f"{name}-{files}", arguments, folder)
            stack.callback(child.kill)
            return child

        put_rows(0, FIRST)
        wait_for_queries(start_query("one", 1))
        shutil.copytree(folder / "one", folder / "two")
        put_rows(FIRST, MORE)
        if case == "restored":
            wait_for_queries(start_query("one", 1))
            shutil.rmtree(folder / "one")
            (folder / "two").rename(folder / "one")
            wait_for_queries(start_query("one", 2))
        else:
            wait_for_queries(start_query("one", 1), start_query("two", 2))
        deliveries, undecided_count = count_deliveries(stream.url)
    sent_rows = {f"row {number}" for number in range((FIRST + MORE) * LINES)}
    return {
        "case": case,
        "rows": len(sent_rows),
        "lost": len(sent_rows - deliveries.keys()),
        "twice": sum(count == 2 for count in deliveries.values()),
        "more often": sum(count > 2 for count in deliveries.values()),
        "undecided": undecided_count,
    }


def main() -> int:
    """Run the cases, print their results, and return 1 if one of them failed."""
    replace_aws_environment()
    any_failed = False
    with ExitStack() as stack:
        kinesis, _ = stack.enter_context(run_services())
        for case in sys.argv[1:] or CASES:
            result = run_case(case, kinesis)
            sys.stdout.write(json.dumps(result) + "\n")
            sys.stdout.flush()
            any_failed |= bool(result["lost"] or result["more often"])
    return int(any_failed)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--query"]:
        run_query(*sys.argv[2:])
    else:
        sys.exit(main())
