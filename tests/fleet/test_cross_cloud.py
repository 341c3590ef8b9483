"""Any source works with any store, for example Kinesis with Azure, even if a worker process is killed."""

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from fed_fleet import FedFleet, run_fed_fleet
from hub_stage import SETTINGS, SETTLE_SECONDS, Feed, HubStream, a_container, a_group, flights

from leasehold.stores.urls import open_store
from leasehold_lab.standins.hubs.event_hubs import LocalHubs
from leasehold_lab.standins.services import AZURITE_ACCOUNT

if TYPE_CHECKING:
    from types_boto3_kinesis import KinesisClient

pytestmark = [pytest.mark.services, pytest.mark.xdist_group("fleets")]

ROWS = 1800


@pytest.mark.more
def test_event_hubs_with_leases_in_dynamodb_lose_no_record(hubs: LocalHubs, dynalite_url: str, tmp_path: Path) -> None:
    """The lease of a partition, which has an offset but no parents, fits into a row that was designed for shards."""
    store = f"dynamodb://hub-leases?region=eu-west-1&endpoint={dynalite_url}"
    with a_group(Feed(HubStream(hubs, "crossing", 4), flights(ROWS), 40), tmp_path, store) as group:
        group.stage.join("ours-1")
        group.stage.join("ours-2")
        assert group.settle() == [2, 2]
        group.stage.kill("ours-1")
        assert group.settle() == [4]
        verdict = group.finish()
        assert (verdict.faults, verdict.produced, verdict.lost) == ((), ROWS, 0)
        assert [change for change in verdict.owner_changes if change.duplicates > change.since] == []


def test_kinesis_with_leases_in_blobs_loses_no_record(
    kinesis_url: str, kinesis_client: "KinesisClient", blobs: str, tmp_path: Path
) -> None:
    """Parents, sub-sequence numbers and shard ends can be stored in blobs, and survive a crash."""
    assert blobs
    with a_container() as container:
        store = f"azblob://{AZURITE_ACCOUNT}/{container}?prefix=fleet/one"
        with (
            closing(open_store(store)) as table,
            run_fed_fleet(kinesis_url, kinesis_client, table, store, SETTINGS, tmp_path, rows=ROWS, a_tick=60) as fleet,
        ):
            _crash_and_split(fleet)
            fleet.judged()


def _crash_and_split(fleet: FedFleet) -> None:
    stage = fleet.stage
    stage.join("ours-1")
    stage.join("ours-2")
    assert stage.until(stage.is_balanced, SETTLE_SECONDS)
    stage.kill("ours-1")
    stage.split()
    assert stage.until(stage.is_balanced, SETTLE_SECONDS)
    assert stage.until(lambda: fleet.puts.all_seen(stage), SETTLE_SECONDS)
    stage.end()
