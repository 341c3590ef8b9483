"""A rising owner level keeps former owners out, and a position that a hub does not know is an error."""

import logging
from uuid import uuid4

import pytest
from azure.eventhub import EventHubConsumerClient
from hub_steps import Here, collected, fault, texts
from waiters import until

from leasehold.adapters.ops.checkpoints import copy_lease, planned_copies
from leasehold.adapters.sources.event_hubs.poller import PartitionReader
from leasehold.balancer.model import TRIM_HORIZON, Lease, Position
from leasehold.errors import SourceError
from leasehold.stores.embedded.memory import MemoryStore
from leasehold.stores.objects.blob import CONNECTION_STRING
from leasehold.stores.urls import open_store
from leasehold.stores.writes import ClaimLease, CreateLease, StealLease
from leasehold_lab.contract.actors import done

pytestmark = pytest.mark.services


def opened(here: Here, lease: Lease) -> PartitionReader:
    """Return the lease owner's reader."""
    return here.plain.open(lease, lease.checkpoint)


def levels(here: Here) -> list[int | None]:
    """Return the owner levels that read partition 0."""
    return [reader["epoch"] for reader in here.readers()]


def kept_out(here: Here, reader: PartitionReader, level: int) -> None:
    """Check that the reader fails on each try, gets no events and does not disturb others."""
    here.send(["more"])
    for _ in range(2):
        batch = fault(reader)
        assert (batch.records, batch.wait_seconds) == ((), 10.0)
    assert levels(here) == [level]


def test_former_owner_is_shut_out_by_the_next_owners_level(here: Here) -> None:
    here.send(["a"])
    store = MemoryStore()
    first = done(store.write(ClaimLease(done(store.write(CreateLease(Lease("0", stream=here.plain.stream)))), "ann")))
    loser = opened(here, first)
    assert texts(collected(loser, 1)) == ["a"]
    second = done(store.write(StealLease(first, "bob")))
    winner = opened(here, second)
    assert texts(collected(winner, 1)) == ["a"]
    kept_out(here, loser, second.epoch)
    assert texts(collected(winner, 1)) == ["more"]


def test_fence_holds_after_a_copy_into_another_layout(
    here: Here, azurite_connection: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copied lease keeps its epoch, so the new fleet's owner level is above the old one's."""
    monkeypatch.setenv(CONNECTION_STRING, azurite_connection)
    here.send(["a"])
    source, target = MemoryStore(), open_store(f"azblob://devstoreaccount1/fence-{uuid4().hex}?prefix=fleet")
    old = done(
        source.write(
            ClaimLease(done(source.write(CreateLease(Lease("0", stream=here.plain.stream, epoch=501)))), "ann")
        )
    )
    loser = opened(here, old)
    collected(loser, 1)
    (move,) = planned_copies((old,), (), ())
    assert copy_lease(target, move) == move
    new = done(target.write(ClaimLease(target.get(["0"])[0], "bob")))
    assert (old.epoch, new.epoch) == (502, 503)
    winner = opened(here, new)
    collected(winner, 1)
    kept_out(here, loser, 503)
    target.close()


def test_restarted_level_waits_until_the_old_fleet_is_gone(here: Here) -> None:
    """The Azure SDKs' blobs cannot store an epoch, so a reader that is shut out reports it and reads later."""
    here.send(["a"])
    old = here.reader(epoch=502)
    collected(old, 1)
    new = here.reader()
    kept_out(here, new, 502)
    old.close()
    until(lambda: not here.readers())
    assert texts(collected(new, 2)) == ["a", "more"]


def test_reader_without_a_level_is_rejected_while_an_owner_reads(here: Here) -> None:
    """The stand-in rejects such readers, as the service does."""
    collected_by_owner = here.reader(epoch=3)
    here.send(["a"])
    collected(collected_by_owner, 1)
    errors: list[Exception] = []
    client = EventHubConsumerClient.from_connection_string(
        here.hubs.connection_string(here.hub), "$Default", retry_total=0
    )

    def failed(_context: object, error: Exception) -> None:
        errors.append(error)
        client.close()

    with client:
        client.receive(lambda _context, _event: None, partition_id="0", on_error=failed, starting_position="-1")
    assert "non-epoch receiver is not allowed" in str(errors[0])
    assert levels(here) == [3]


@pytest.fixture(params=[Position("7"), Position("7", 0, "4520")], ids=["number", "offset"])
def beyond(request: pytest.FixtureRequest) -> Position:
    """Return a position after the end of a partition with two events."""
    position: Position = request.param
    return position


def test_checkpoint_after_the_partition_end_is_an_error_with_advice(here: Here, beyond: Position) -> None:
    here.send(["a", "b"])
    reader = here.reader(beyond)
    with pytest.raises(SourceError, match=r"starting position was rejected.*leasehold reset"):
        until(lambda: reader.read().records)


def test_events_past_retention_are_reported_as_lost(here: Here, caplog: pytest.LogCaptureFixture) -> None:
    """The service starts at the oldest event it still has, so the reader logs what was lost."""
    caplog.set_level(logging.ERROR, "leasehold.event_hubs")
    here.send(["a", "b", "c", "d"])
    first = collected(here.reader(), 4)[0]
    assert here.hubs.trim(here.hub, "0", 3) == 3
    assert texts(collected(here.reader(TRIM_HORIZON), 1)) == ["d"]
    assert caplog.messages == []
    assert texts(collected(here.reader(first.position), 1)) == ["d"]
    assert caplog.messages == [
        f"event hub {here.hub!r}, partition 0: 2 events after number 0 have expired and are lost"
    ]
    with EventHubConsumerClient.from_connection_string(here.hubs.connection_string(here.hub), "$Default") as client:
        properties = client.get_partition_properties("0")
    assert (
        properties["beginning_sequence_number"],
        properties["last_enqueued_sequence_number"],
        properties["is_empty"],
    ) == (3, 3, False)
