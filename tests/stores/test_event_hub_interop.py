"""Tests that the BlobCheckpointStore of azure-eventhub and our store respect each other's blobs in one container."""

from collections.abc import Iterator
from typing import Any

import pytest
from azure.eventhub.extensions.checkpointstoreblob import BlobCheckpointStore
from azure.storage.blob import ContainerClient
from object_stores import container

from leasehold.balancer.model import TRIM_HORIZON, Lease, Position
from leasehold.stores.objects.blob import BlobObjects
from leasehold.stores.objects.event_hubs_layout import EventHubLayout
from leasehold.stores.objects.store import EtagStore
from leasehold.stores.writes import (
    CheckpointLate,
    CheckpointLease,
    ClaimLease,
    CreateLease,
    ReleaseLease,
    RenewLease,
    RequestLease,
    StealLease,
)
from leasehold_lab.contract.actors import create_lease_with_owner, expect_applied, expect_rejected

pytestmark = pytest.mark.services

NAMESPACE, HUB, GROUP = WHERE = ("ns.servicebus.windows.net", "Orders", "$Default")
PLACE = {"fully_qualified_namespace": NAMESPACE, "eventhub_name": HUB, "consumer_group": GROUP}
AT_9, AT_20 = Position("9", 0, "4520"), Position("20", 0, "9040")


@pytest.fixture
def blobs(azurite_connection: str) -> Iterator[ContainerClient]:
    with container(azurite_connection) as client:
        yield client


@pytest.fixture
def ours(blobs: ContainerClient) -> EtagStore:
    return EtagStore(BlobObjects(blobs), EventHubLayout(*WHERE))


@pytest.fixture
def theirs(azurite_connection: str, blobs: ContainerClient) -> Iterator[BlobCheckpointStore]:
    """Open the official store in the same container."""
    with BlobCheckpointStore.from_connection_string(azurite_connection, blobs.container_name) as store:
        yield store


def owners(store: BlobCheckpointStore) -> dict[str, dict[str, Any]]:
    """Return the owners that the official store lists, by partition."""
    return {row["partition_id"]: row for row in store.list_ownership(*WHERE)}


def checkpoints(store: BlobCheckpointStore) -> dict[str, tuple[str, int]]:
    """Return the offset and sequence number that the official store lists, by partition."""
    return {row["partition_id"]: (row["offset"], row["sequence_number"]) for row in store.list_checkpoints(*WHERE)}


def claim_partition(
    store: BlobCheckpointStore, partition: str, owner: str, etag: str | None = None
) -> list[dict[str, Any]]:
    """Try to claim a partition with the official store, and return the ownerships that it got."""
    record = {**PLACE, "partition_id": partition, "owner_id": owner, **({"etag": etag} if etag else {})}
    return list(store.claim_ownership([record]))


def test_the_sdk_reads_rows_that_we_write(ours: EtagStore, theirs: BlobCheckpointStore) -> None:
    lease = create_lease_with_owner(ours, Lease("0", owner="ann"))
    expect_applied(ours.write(CreateLease(Lease("1"))))
    assert checkpoints(theirs) == {"0": ("-1", -1), "1": ("-1", -1)}
    lease = expect_applied(ours.write(CheckpointLease(lease, AT_9)))
    assert checkpoints(theirs)["0"] == ("4520", 9)
    (row,) = owners(theirs).values()
    assert (row["owner_id"], row["etag"].strip('"')) == ("ann", lease.version)
    expect_applied(ours.write(ReleaseLease(lease, "ann")))
    # The owner is None. The SDK's balancer treats this like an empty name, which means that the partition is free.
    assert not owners(theirs)["0"]["owner_id"]


def test_leases_that_the_sdk_writes_are_read(ours: EtagStore, theirs: BlobCheckpointStore) -> None:
    (record,) = claim_partition(theirs, "0", "sdk-1")
    theirs.update_checkpoint({**PLACE, "partition_id": "0", "offset": "4520", "sequence_number": 9})
    (record,) = claim_partition(theirs, "0", "sdk-1", record["etag"])
    claim_partition(theirs, "1", "sdk-1")
    lease_0, lease_1 = ours.list().leases
    assert (lease_0.owner, lease_0.version, lease_0.checkpoint, lease_0.checkpoint.token) == (
        "sdk-1",
        record["etag"].strip('"'),
        AT_9,
        "4520",
    )
    assert (lease_1.owner, lease_1.checkpoint, lease_1.yields) == ("sdk-1", TRIM_HORIZON, False)
    claim_partition(theirs, "0", "", record["etag"])
    assert ours.get(["0"])[0].owner is None


def test_the_sdk_loses_leases_that_we_take(ours: EtagStore, theirs: BlobCheckpointStore) -> None:
    (record,) = claim_partition(theirs, "0", "sdk-1")
    stolen = expect_applied(ours.write(StealLease(ours.list().leases[0], "ann")))
    assert claim_partition(theirs, "0", "sdk-1", record["etag"]) == []
    assert expect_applied(ours.write(RenewLease(stolen))).owner == "ann"


def test_leases_that_the_sdk_takes_are_lost(ours: EtagStore, theirs: BlobCheckpointStore) -> None:
    """The SDK's claim drops our metadata, so the request in it no longer applies."""
    lease = expect_applied(ours.write(RequestLease(create_lease_with_owner(ours, Lease("0", owner="ann")), "bob")))
    assert len(claim_partition(theirs, "0", "sdk-1", owners(theirs)["0"]["etag"])) == 1
    current = expect_rejected(ours.write(RenewLease(lease)))
    assert current is not None
    assert (current.owner, current.next_owner, current.yields) == ("sdk-1", None, False)
    assert expect_rejected(ours.write(CheckpointLease(lease, AT_9))) == current
    assert checkpoints(theirs) == {"0": ("-1", -1)}


def test_the_sdk_can_move_a_start_that_we_stored(ours: EtagStore, theirs: BlobCheckpointStore) -> None:
    """A start that we stored neither conflicts with the SDK's checkpoint nor overwrites it later."""
    lease = expect_applied(ours.write(CreateLease(Lease("0"))))
    claim_partition(theirs, "0", "sdk-1")
    theirs.update_checkpoint({**PLACE, "partition_id": "0", "offset": "4520", "sequence_number": 9})
    assert expect_rejected(ours.write(CreateLease(Lease("0")))) is not None
    assert expect_rejected(ours.write(ClaimLease(lease, "ann"))) is not None
    assert ours.get(["0"])[0].checkpoint == AT_9


def test_an_official_reader_overwrites_a_late_checkpoint(ours: EtagStore, theirs: BlobCheckpointStore) -> None:
    """Next to official workers, a blob's checkpoint may go back, so the layout does not offer late checkpoints.

    The official reader begins at the position that was stored when it claimed the partition, and writes its checkpoints
    without any condition. A checkpoint that we write in between is overwritten by its next one, which repeats and skips
    nothing. We never move its checkpoints back.
    """
    lease = expect_applied(ours.write(CheckpointLease(create_lease_with_owner(ours, Lease("0", owner="ann")), AT_9)))
    claim_partition(theirs, "0", "sdk-1", owners(theirs)["0"]["etag"])
    assert checkpoints(theirs)["0"] == ("4520", 9)  # the position at which their reader begins
    expect_applied(ours.write(CheckpointLate(lease, AT_20)))
    assert checkpoints(theirs)["0"] == ("9040", 20)
    theirs.update_checkpoint({**PLACE, "partition_id": "0", "offset": "5424", "sequence_number": 11})
    assert checkpoints(theirs)["0"] == ("5424", 11)
    theirs.update_checkpoint({**PLACE, "partition_id": "0", "offset": "9944", "sequence_number": 22})
    expect_rejected(ours.write(CheckpointLate(lease, AT_20)))
    assert checkpoints(theirs)["0"] == ("9944", 22)
