"""Our workers and Java workers with the same stream and table, a producer, and a record of everything that they do."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby, pairwise

from attrs import define, field
from java_kcl import java_worker

from leasehold_lab.demo.child import Child
from leasehold_lab.demo.producer import parse_sent_record
from leasehold_lab.demo.stage import Stage, Tail, open_stage
from leasehold_lab.judge.events import SentRecord
from leasehold_lab.judge.explanations import RunVerdict

log = logging.getLogger("leasehold.mixed")

SHARDS, RATE = 4, 100
LEASE_SECONDS = 3
SETTINGS = ("--lease-seconds", str(LEASE_SECONDS), "--initial-position", "TRIM_HORIZON", "--verbose")
WAIT_SECONDS = 60.0


@define
class Mixed:
    """A running fleet of our workers and Java workers.

    version        of the Java KCL
    mode           "own", or "2x" for a 3.x worker that shares with 2.x ones
    lease_seconds  of all workers
    """

    stage: Stage
    kinesis: str
    dynamodb: str
    version: str
    mode: str
    producer: Child
    produced: Tail[SentRecord]
    lease_seconds: int = LEASE_SECONDS
    sent: list[SentRecord] = field(factory=list)

    @property
    def table(self) -> str:
        return self.stage.store_url.removeprefix("dynamodb://").partition("?")[0]

    def java_log(self) -> str:
        """Return the complete logs of the Java workers."""
        return "".join(log.read_text() for log in sorted(self.stage.folder.glob("java-*.log")))

    def watched(self, _stage: Stage) -> None:
        """Remember the records that the producer has put since the last call."""
        self.sent += self.produced.read_new_items()

    def read_by(self, worker: str) -> bool:
        """Return whether a worker owns leases, and has started to read all of them."""
        own_shards = [lease.shard for lease in self.stage.leases if lease.owner == worker and not lease.ended]
        return bool(own_shards) and all(self.stage.reading.find_reader(shard) == worker for shard in own_shards)

    def gifts(self) -> list[tuple[str, str, bool]]:
        """Return (shard, Java worker, whether it started to read) for each shard that passed from us to Java."""
        gifts = []
        rows = sorted(self.stage.history.rows, key=lambda row: (row.shard, row.t))
        for shard, shard_rows in groupby(rows, key=lambda row: row.shard):
            owner_since = [
                (owner or "", next(owner_rows).t)
                for owner, owner_rows in groupby(shard_rows, key=lambda row: row.owner)
            ]
            for (former_owner, _), (new_owner, since) in pairwise(owner_since):
                if former_owner.startswith("ours") and new_owner.startswith("java"):
                    was_read = any(
                        (reader.worker, reader.shard) == (new_owner, shard) and reader.begin >= since - 1
                        for reader in self.stage.reading.tenures
                    )
                    gifts.append((shard, new_owner, was_read))
        return gifts

    def join_java(self, name: str) -> None:
        java_process = java_worker(
            self.stage,
            name,
            self.version,
            kinesis=self.kinesis,
            dynamodb=self.dynamodb,
            mode=self.mode,
            failover_ms=1000 * self.lease_seconds,
        )
        self.stage.watch_process(java_process)

    def balanced(self) -> None:
        """Wait until every open shard is read, and the lease counts of the live workers differ by one at most."""
        self._wait("balanced", self.stage.is_balanced)

    def owned_by(self, worker: str) -> None:
        """Wait until this worker reads all shards, even if other workers are running."""

        def reads_all_shards() -> bool:
            open_shards = {lease.shard for lease in self.stage.leases if not lease.ended}
            own_shards = {shard for shard in open_shards if self.stage.reading.find_reader(shard) == worker}
            return own_shards == open_shards and len(open_shards) == self.stage.open_shards

        self._wait(f"all read by {worker}", reads_all_shards)

    def finish(self) -> RunVerdict:
        """Stop the producer, wait until all records are dispatched, drain all workers, and return the verdict."""
        self.producer.ask_to_end()
        assert self.producer.wait() == 0, self.producer.last_output
        self.stage.tick()
        self.stage.until(lambda: len(self.stage.distinct_records) >= len(self.sent), WAIT_SECONDS)
        self.stage.end()
        verdict = self.stage.verdict(self.sent)
        figures = (self.version, self.mode, verdict.produced, verdict.lost, verdict.duplicates)
        log.info("KCL %s (%s): %d records, %d lost, %d handed over again", *figures)
        return verdict

    def _wait(self, expected_state: str, condition: Callable[[], bool]) -> None:
        last_incident = self.stage.history.incidents[-1]
        is_reached = self.stage.until(condition, WAIT_SECONDS)
        seconds, lease_counts = time.time() - last_incident.t, dict(self.stage.count_leases_of_workers())
        log.info(
            "KCL %s (%s): %s %s: %s after %.1f s: %s",
            self.version,
            self.mode,
            last_incident.what,
            last_incident.subject,
            expected_state,
            seconds,
            lease_counts,
        )
        assert is_reached, (
            f"not {expected_state} {seconds:.0f} s after {last_incident.what} {last_incident.subject}: {lease_counts}"
        )


@contextmanager
def mixed(kinesis: str, dynamodb: str, version: str, mode: str, lease_seconds: int = LEASE_SECONDS) -> Iterator[Mixed]:
    """Create a table, a stream with four shards, a producer that writes to the stream, and a fleet without workers."""
    settings = ("--lease-seconds", str(lease_seconds), *SETTINGS[2:])
    with open_stage(kinesis, dynamodb, shards=SHARDS, settings=settings) as stage:
        command = ("-m", "leasehold_lab.demo.producer", kinesis, stage.stream.name, str(RATE))
        producer = Child("producer", command, stage.folder)
        fleet = Mixed(
            stage, kinesis, dynamodb, version, mode, producer, Tail(producer.out, parse_sent_record), lease_seconds
        )
        stage.watched = fleet.watched
        try:
            yield fleet
        finally:
            producer.kill()
