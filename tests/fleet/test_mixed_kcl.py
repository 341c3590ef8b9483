"""Our workers and real Java KCL workers share leases, survive reshards and each other's death, and lose no record."""

import json
import subprocess
import sys
import time
from contextlib import closing

import java_kcl
import pytest
from mixed import SETTINGS, WAIT_SECONDS, Mixed, mixed
from types_boto3_dynamodb import DynamoDBClient

from leasehold.adapters.sources.kinesis.aggregation.encode import Aggregate
from leasehold.balancer.model import SHARD_END, TRIM_HORIZON, Lease, Position
from leasehold.stores.writes import CreateLease
from leasehold_lab.demo.stage import create_kinesis_client, open_stage, put_records

pytestmark = [pytest.mark.more, pytest.mark.services, pytest.mark.xdist_group("java")]

FOREIGN_ROWS = {"LEADER", "CLIENT_VERSION_MIGRATION", "WORKER_METRIC_STATS"}
"""The entity types of the rows that Java 3.5 stores in the table in addition to its leases."""


def built(version: str) -> None:
    """Build the Java KCL, or skip the test if Java cannot be run."""
    if missing_tools := java_kcl.missing():
        pytest.skip(f"the Java KCL is not run: no {missing_tools}")
    java_kcl.built(version)


def kinds(fleet: Mixed, client: DynamoDBClient) -> set[str]:
    """Return the entity types of the rows in the table."""
    rows = client.scan(TableName=fleet.table)["Items"]
    return {row["entityType"]["S"] for row in rows if "entityType" in row}


def shown_lag(store: str, *more_arguments: str) -> list[float | None]:
    """Return the lag in seconds that `leasehold leases` shows for each lease."""
    command = (sys.executable, "-m", "leasehold.adapters.cli.main", "leases", store, "--json", *more_arguments)
    lags = json.loads(subprocess.check_output(command, text=True))["lags"]
    return [lag.get("seconds") for lag in lags.values()]


def reshard_and_lose_java(fleet: Mixed) -> None:
    """Split a shard, merge two shards, kill the Java worker, and check the verdict (shared by several tests)."""
    stage = fleet.stage
    stage.split()
    fleet.balanced()
    stage.merge()
    fleet.balanced()
    stage.kill("java-1")
    fleet.owned_by("ours-2")
    verdict = fleet.finish()
    assert (verdict.faults, verdict.lost) == ((), 0), verdict
    readers = {tenure.worker for tenure in stage.reading.tenures if tenure.how == "shard-ended"}
    assert readers <= {"java-1", "ours-2"}
    # Only records after the checkpoint at a change of owner may be duplicates. The judge reports all others as faults.
    assert verdict.duplicates <= sum(change.since for change in verdict.owner_changes)


@pytest.mark.parametrize(("version", "mode"), [("2.7.2", "own"), ("3.5.1", "2x")])
def test_a_mixed_fleet_under_java_2_rules_shares_and_survives_reshards(
    version: str, mode: str, kinesis_url: str, dynamodb_local_url: str
) -> None:
    built(version)
    with mixed(kinesis_url, dynamodb_local_url, version, mode) as fleet:
        fleet.stage.join("ours-1")
        fleet.balanced()
        fleet.join_java("java-1")
        fleet.balanced()
        fleet.stage.kill("ours-1")
        fleet.owned_by("java-1")
        fleet.stage.join("ours-2")
        fleet.balanced()
        reshard_and_lose_java(fleet)


def test_a_mixed_fleet_with_java_3_shares_and_survives_reshards(
    kinesis_url: str, dynamodb_local_url: str, dynamodb_local_client: DynamoDBClient
) -> None:
    """The other rows of Java 3 are not mistaken for leases, and its leader still assigns leases."""
    built("3.5.1")
    with mixed(kinesis_url, dynamodb_local_url, "3.5.1", "own") as fleet:
        fleet.stage.join("ours-1")
        fleet.balanced()
        fleet.join_java("java-1")
        # The leader moves no leases of a live owner that reports no metrics, so our worker must release Java's share
        # (M14).
        fleet.balanced()
        fleet.stage.kill("ours-1")
        fleet.owned_by("java-1")
        fleet.stage.join("ours-2")
        fleet.balanced()
        assert fleet.stage.store.list().malformed == ()
        reshard_and_lose_java(fleet)
        assert kinds(fleet, dynamodb_local_client) >= FOREIGN_ROWS


def test_our_worker_follows_the_assignments_of_a_java_3_leader(
    kinesis_url: str, dynamodb_local_url: str, dynamodb_local_client: DynamoDBClient
) -> None:
    """A lease that a leader moves away from our worker is handed off at once, and never read by two workers."""
    built("3.5.1")
    with mixed(kinesis_url, dynamodb_local_url, "3.5.1", "own") as fleet:
        stage = fleet.stage
        for shard in stage.stream.shards():
            stage.store.write(CreateLease(Lease(shard.id, hash_range=shard.hash_range, weight=10_240)))
        stage.join("ours-1")
        fleet.balanced()

        def put_report() -> bool:
            metrics = {"leaseKey": {"S": "ours-1"}, "entityType": {"S": "WORKER_METRIC_STATS"}}
            metrics_row = {**metrics, "lut": {"N": str(int(time.time()))}}
            return bool(dynamodb_local_client.put_item(TableName=fleet.table, Item=metrics_row))

        assert put_report()
        fleet.join_java("java-1")
        # As the leader, java-1 computes our load from the throughput in our rows, and moves some leases to itself.
        assert stage.until(lambda: put_report() and fleet.read_by("java-1"), WAIT_SECONDS)
        assert "Worker : ours-1 and total leases : 4 and totalThroughput : 40.0\n" in fleet.java_log()
        verdict = fleet.finish()
        assert (verdict.faults, verdict.lost, verdict.duplicates) == ((), 0, 0), verdict


def test_our_worker_releases_a_lease_that_java_2_would_not_take(kinesis_url: str, dynamodb_local_url: str) -> None:
    """Java counts finished leases as load and takes no more leases, so our worker must give it one (M11)."""
    built("2.7.2")
    settings = (*SETTINGS, "--set", "release=true")
    with open_stage(kinesis_url, dynamodb_local_url, shards=2, settings=settings) as stage:
        stage.split()
        stage.split()
        listed_shards = stage.stream.shards()
        # As no records are written, no child gets a checkpoint, so the finished leases of the parents must stay.
        for shard in listed_shards:
            checkpoint = SHARD_END if not shard.open else TRIM_HORIZON
            stage.store.write(
                CreateLease(Lease(shard.id, parents=shard.parents, checkpoint=checkpoint, hash_range=shard.hash_range))
            )
        stage.join("ours-1")
        assert stage.until(lambda: stage.count_leases_of_workers() == {"ours-1": 4}, WAIT_SECONDS)
        stage.watch_process(
            java_kcl.java_worker(stage, "java-1", "2.7.2", kinesis=kinesis_url, dynamodb=dynamodb_local_url)
        )
        assert stage.until(lambda: stage.count_leases_of_workers() == {"ours-1": 3, "java-1": 1}, WAIT_SECONDS)
        assert sum(lease.ended and lease.owner == "java-1" for lease in stage.leases) == 2
        assert stage.until(stage.is_balanced, 2 * WAIT_SECONDS), stage.count_leases_of_workers()
        assert stage.count_leases_of_workers() == {"ours-1": 2, "java-1": 2}


def test_a_handoff_within_an_aggregated_record_skips_nothing(kinesis_url: str, dynamodb_local_url: str) -> None:
    """If the owner changes within an aggregated record, no user record is repeated or skipped.

    The rows of Java workers contain no lag, so the lag of their leases must be determined from the stream.
    """
    built("2.7.2")
    with open_stage(kinesis_url, dynamodb_local_url, shards=1, settings=SETTINGS) as stage:
        aggregate = Aggregate(10_000)
        assert all(aggregate.add(b"%d" % sequence_number, "key") for sequence_number in range(10))
        with closing(create_kinesis_client(kinesis_url)) as client:
            put_records(client, stage.stream.name, [(aggregate.partition_key, aggregate.encode())] * 2)
            shard = stage.stream.shards()[0]
            iterator_response = client.get_shard_iterator(
                StreamName=stage.stream.name, ShardId=shard.id, ShardIteratorType="TRIM_HORIZON"
            )
            sequence_number = client.get_records(ShardIterator=iterator_response["ShardIterator"])["Records"][0][
                "SequenceNumber"
            ]
        stage.store.write(
            CreateLease(Lease(shard.id, checkpoint=Position(sequence_number, 2), hash_range=shard.hash_range))
        )
        # The worker handles four records, checkpoints the fourth, and hangs in the middle of the batch.
        hang_option = ("-Dhold.after=4",)
        stage.watch_process(
            java_kcl.java_worker(
                stage, "java-1", "2.7.2", kinesis=kinesis_url, dynamodb=dynamodb_local_url, properties=hang_option
            )
        )

        def has_checkpointed() -> bool:
            return [lease.checkpoint for lease in stage.leases] == [Position(sequence_number, 6)]

        assert stage.until(has_checkpointed, WAIT_SECONDS)
        assert shown_lag(stage.store_url) == [None]
        (lag,) = shown_lag(stage.store_url, "--source", stage.stream.url)
        assert lag is not None
        assert lag > 0
        stage.kill("java-1")
        stage.join("ours-1")
        assert stage.until(lambda: len(stage.history.events) >= 19, WAIT_SECONDS)
        dispatched_records = [
            (event.worker, event.place[1]) for event in stage.history.events if event.event == "record"
        ]
        by_java = [("java-1", sub) for sub in (3, 4, 5, 6)]
        assert dispatched_records == by_java + [("ours-1", sub) for sub in (7, 8, 9, *range(10))]
