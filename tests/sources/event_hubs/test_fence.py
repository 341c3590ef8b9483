"""A rising owner level keeps former owners out. A position that the hub does not know is an error."""

import logging
from uuid import uuid4

import pytest
from azure.eventhub import EventHubConsumerClient
from hub_steps import HubSteps, collect, fault, texts
from waiters import until

from leasehold.adapters.ops.checkpoints import copy_lease, plan_copies
from leasehold.adapters.sources.event_hubs.poller import PartitionReader
from leasehold.balancer.model import TRIM_HORIZON, Lease, Position
from leasehold.errors import SourceError
from leasehold.stores.embedded.memory import MemoryStore
from leasehold.stores.objects.blob import CONNECTION_STRING_VARIABLE
from leasehold.stores.urls import open_store
from leasehold.stores.writes import ClaimLease, CreateLease, StealLease
from leasehold_lab.contract.actors import expect_applied

pytestmark = pytest.mark.services


def open_reader(event_hub: HubSteps, lease: Lease) -> PartitionReader:
    """Open a reader for this lease, at its checkpoint."""
    return event_hub.plain.open(lease, lease.checkpoint)


def levels(event_hub: HubSteps) -> list[int | None]:
    """Return the owner levels of the readers of partition 0."""
    return [reader["epoch"] for reader in event_hub.readers()]


def assert_shut_out(event_hub: HubSteps, reader: PartitionReader, level: int) -> None:
    """Assert that the reader fails at each attempt, gets no events, and does not displace the reader at `level`."""
    event_hub.send(["more"])
    for _ in range(2):
        batch = fault(reader)
        assert (batch.records, batch.wait_seconds) == ((), 10.0)
    assert levels(event_hub) == [level]


def test_former_owner_is_shut_out_by_the_next_owners_level(event_hub: HubSteps) -> None:
    event_hub.send(["a"])
    store = MemoryStore()
    first_lease = expect_applied(
        store.write(
            ClaimLease(expect_applied(store.write(CreateLease(Lease("0", stream=event_hub.plain.stream)))), "ann")
        )
    )
    former_reader = open_reader(event_hub, first_lease)
    assert texts(collect(former_reader, 1)) == ["a"]
    second_lease = expect_applied(store.write(StealLease(first_lease, "bob")))
    new_reader = open_reader(event_hub, second_lease)
    assert texts(collect(new_reader, 1)) == ["a"]
    assert_shut_out(event_hub, former_reader, second_lease.epoch)
    assert texts(collect(new_reader, 1)) == ["more"]


def test_fence_holds_after_a_copy_into_another_layout(
    event_hub: HubSteps, azurite_connection: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copied lease keeps its epoch, so the owner levels of the new fleet are higher than those of the old one."""
    monkeypatch.setenv(CONNECTION_STRING_VARIABLE, azurite_connection)
    event_hub.send(["a"])
    source, target = MemoryStore(), open_store(f"azblob://devstoreaccount1/fence-{uuid4().hex}?prefix=fleet")
    source_lease = expect_applied(
        source.write(
            ClaimLease(
                expect_applied(source.write(CreateLease(Lease("0", stream=event_hub.plain.stream, epoch=501)))), "ann"
            )
        )
    )
    former_reader = open_reader(event_hub, source_lease)
    collect(former_reader, 1)
    (copied_lease,) = plan_copies((source_lease,), (), ())
    assert copy_lease(target, copied_lease) == copied_lease
    target_lease = expect_applied(target.write(ClaimLease(target.get(["0"])[0], "bob")))
    assert (source_lease.epoch, target_lease.epoch) == (502, 503)
    new_reader = open_reader(event_hub, target_lease)
    collect(new_reader, 1)
    assert_shut_out(event_hub, former_reader, 503)
    target.close()


def test_restarted_level_waits_until_the_old_fleet_is_gone(event_hub: HubSteps) -> None:
    """Blobs of the Azure SDKs store no epoch, so new owners start at level 0, and read once the old fleet is gone."""
    event_hub.send(["a"])
    former_reader = event_hub.reader(epoch=502)
    collect(former_reader, 1)
    new_reader = event_hub.reader()
    assert_shut_out(event_hub, new_reader, 502)
    former_reader.close()
    until(lambda: not event_hub.readers())
    assert texts(collect(new_reader, 2)) == ["a", "more"]


def test_reader_without_a_level_is_rejected_while_an_owner_reads(event_hub: HubSteps) -> None:
    """The local hub rejects a reader without a level while an owner reads, as the service does."""
    owner_reader = event_hub.reader(epoch=3)
    event_hub.send(["a"])
    collect(owner_reader, 1)
    errors: list[Exception] = []
    client = EventHubConsumerClient.from_connection_string(
        event_hub.hubs.connection_string(event_hub.hub), "$Default", retry_total=0
    )

    def record_error(_context: object, error: Exception) -> None:
        errors.append(error)
        client.close()

    with client:
        client.receive(lambda _context, _event: None, partition_id="0", on_error=record_error, starting_position="-1")
    assert "non-epoch receiver is not allowed" in str(errors[0])
    assert levels(event_hub) == [3]


@pytest.fixture(params=[Position("7"), Position("7", 0, "4520")], ids=["number", "offset"])
def position_after_end(request: pytest.FixtureRequest) -> Position:
    """Return a position after the end of a partition with two events."""
    position: Position = request.param
    return position


def test_checkpoint_after_the_partition_end_is_an_error_with_advice(
    event_hub: HubSteps, position_after_end: Position
) -> None:
    event_hub.send(["a", "b"])
    reader = event_hub.reader(position_after_end)
    with pytest.raises(SourceError, match=r"starting position was rejected.*leasehold reset"):
        until(lambda: reader.read().records)


def test_events_past_retention_are_reported_as_lost(event_hub: HubSteps, caplog: pytest.LogCaptureFixture) -> None:
    """The service continues with the oldest event that it still has, so the reader logs how many events were lost."""
    caplog.set_level(logging.ERROR, "leasehold.event_hubs")
    event_hub.send(["a", "b", "c", "d"])
    first_record = collect(event_hub.reader(), 4)[0]
    assert event_hub.hubs.trim_events(event_hub.hub, "0", 3) == 3
    assert texts(collect(event_hub.reader(TRIM_HORIZON), 1)) == ["d"]
    assert caplog.messages == []
    assert texts(collect(event_hub.reader(first_record.position), 1)) == ["d"]
    assert caplog.messages == [
        f"event hub {event_hub.hub!r}, partition 0: 2 events after number 0 have expired and are lost"
    ]
    with EventHubConsumerClient.from_connection_string(
        event_hub.hubs.connection_string(event_hub.hub), "$Default"
    ) as client:
        properties = client.get_partition_properties("0")
    assert (
        properties["beginning_sequence_number"],
        properties["last_enqueued_sequence_number"],
        properties["is_empty"],
    ) == (3, 3, False)
