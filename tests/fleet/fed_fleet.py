"""Worker processes with any store, which read a local stream that gets numbered records at each tick."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from hashlib import sha1
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from attrs import define, field

from leasehold.stores.protocol import Store
from leasehold_lab.demo.stage import Stage, Stream, put_records
from leasehold_lab.judge.events import SentRecord

if TYPE_CHECKING:
    from types_boto3_kinesis import KinesisClient

KEYS = 17


@define
class Puts:
    """Puts numbered records into a stream, `a_tick` records at each tick, until there are `rows` records.

    The records of each key are in order.
    """

    client: "KinesisClient"
    stream: str
    rows: int
    a_tick: int
    numbers: "count[int]" = field(factory=count)
    sent: list[SentRecord] = field(factory=list)

    def __call__(self, _stage: Stage) -> None:
        """Put the next few records, unless all are sent."""
        rows = [(f"k-{number % KEYS}", b"%d" % number) for number in islice(self.numbers, self.a_tick)]
        rows = [(key, data) for key, data in rows if int(data) < self.rows]
        if rows:
            put_records(self.client, self.stream, rows)
        self.sent += [SentRecord(key, int(data), sha1(data, usedforsecurity=False).hexdigest()) for key, data in rows]

    def all_seen(self, stage: Stage) -> bool:
        """Return whether all records were sent and dispatched."""
        return self.rows == len(self.sent) == len(stage.distinct_records)


@define
class FedFleet:
    """The workers on a stage, and the source of the records that they should read."""

    stage: Stage
    puts: Puts

    def judged(self) -> None:
        """Assert that no record was lost, and that only records after a checkpoint were read again."""
        verdict = self.stage.verdict(self.puts.sent)
        assert (verdict.faults, verdict.produced, verdict.lost) == ((), self.puts.rows, 0)
        assert [change for change in verdict.owner_changes if change.duplicates > change.since] == []


@contextmanager
def run_fed_fleet(  # noqa: PLR0917  one for each difference between fleets
    kinesis_url: str,
    client: "KinesisClient",
    table: Store,
    store: str,
    settings: tuple[str, ...],
    folder: Path,
    *,
    rows: int,
    a_tick: int,
) -> Iterator[FedFleet]:
    """Create a stream with four shards and a fleet without workers. Stop all workers at the end.

    table     the lease table, from which the test reads
    store     the URL of the lease table, for the workers
    settings  the other options of the workers
    """
    name = f"{folder.name[:50]}-{uuid4().hex[:8]}"  # pytest cuts long names, so two tests may have the same one.
    with closing(Stream(kinesis_url, name, 4)) as stream:
        puts = Puts(client, name, rows, a_tick)
        stage = Stage(folder, stream, table, store, settings, watched=puts)
        try:
            yield FedFleet(stage, puts)
        finally:
            stage.kill_all_workers()
