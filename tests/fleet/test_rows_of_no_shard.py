"""A real worker with a table that contains a row for a shard that the stream does not have."""

import pytest
from mixed import SETTINGS, WAIT_SECONDS

from leasehold.balancer.model import Lease, Position
from leasehold.stores.writes import CreateLease
from leasehold_lab.demo.stage import open_stage

pytestmark = [pytest.mark.more, pytest.mark.services, pytest.mark.xdist_group("fleets")]

GHOST = "shardId-000000000077"


def test_the_row_of_a_missing_shard_is_deleted_after_one_attempt(kinesis_url: str, dynamodb_local_url: str) -> None:
    """If the row stayed, it would be claimed and given up every minute, with an ERROR in the log each time (L10)."""
    with open_stage(kinesis_url, dynamodb_local_url, shards=2, settings=SETTINGS) as stage:
        stage.join("ours-1")
        assert stage.until(stage.is_balanced, WAIT_SECONDS), stage.leases
        stage.store.write(CreateLease(Lease(GHOST, checkpoint=Position("49"), hash_range=(0, 1))))
        stage.tick()
        assert stage.until(lambda: GHOST not in {lease.key for lease in stage.leases}, 2 * WAIT_SECONDS), stage.leases
        log_lines = "".join(log.read_text() for log in sorted(stage.folder.glob("ours-*.log")))
        assert log_lines.count(f"ERROR leasehold.reading: shard {GHOST} stops here") <= 1, log_lines
        assert stage.is_balanced()
        stage.end()
