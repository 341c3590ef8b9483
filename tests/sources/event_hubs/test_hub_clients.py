"""The local hub works with the real `azure-eventhub` client, which all other tests here rely on."""

import pytest
from azure.eventhub import EventData, EventHubConsumerClient, EventHubProducerClient
from azure.eventhub.exceptions import AuthenticationError
from hub_steps import Here, collected
from waiters import until

from leasehold.adapters.toolchain import ServiceError
from leasehold.balancer.model import TRIM_HORIZON, Lease

pytestmark = pytest.mark.services


def test_properties_describe_hub_and_partitions(here: Here) -> None:
    here.send(["a", "bc"])
    with EventHubConsumerClient.from_connection_string(here.hubs.connection_string(here.hub), "$Default") as client:
        assert client.get_eventhub_properties()["partition_ids"] == ["0", "1"]
        full, empty = client.get_partition_properties("0"), client.get_partition_properties("1")
    stored = collected(here.reader(), 2)
    last = stored[1].event
    assert full["last_enqueued_sequence_number"] == last.sequence_number == 1
    assert full["last_enqueued_offset"] == last.offset
    assert full["last_enqueued_time_utc"] == last.enqueued_time
    assert (full["is_empty"], empty["is_empty"]) == (False, True)
    assert (empty["last_enqueued_sequence_number"], empty["last_enqueued_offset"]) == (-1, "-1")


def test_producers_reach_partitions_by_number_by_key_and_in_turn(here: Here) -> None:
    with EventHubProducerClient.from_connection_string(here.hubs.connection_string(here.hub)) as producer:
        producer.send_batch([EventData(str(number)) for number in range(5)], partition_id="1")
        producer.send_batch([EventData("k1"), EventData("k2")], partition_key="key")
        producer.send_batch([EventData("k3")], partition_key="key")
        before = [partition["events"] for partition in here.hubs.look(here.hub)]
        for _ in range(4):
            producer.send_event(EventData("turn"))
    after = [partition["events"] for partition in here.hubs.look(here.hub)]
    assert before in ([3, 5], [0, 8])
    assert [new - old for old, new in zip(before, after, strict=True)] == [2, 2]


def test_client_starts_at_the_requested_position(here: Here) -> None:
    here.send(["a", "b", "c", "d"])
    third = collected(here.source(group="second").open(Lease("0"), TRIM_HORIZON), 4)[2].event
    assert third.offset != str(third.sequence_number)
    events = here.received(2, third.sequence_number, inclusive=True)
    assert (events[0].body_as_str(), events[0].offset) == ("c", third.offset)


def test_added_partitions_are_listed_and_filled_during_reads(here: Here) -> None:
    reader = here.reader()
    until(here.readers)
    here.hubs.add_partitions(here.hub, 5)
    with EventHubConsumerClient.from_connection_string(here.hubs.connection_string(here.hub), "$Default") as client:
        assert client.get_partition_ids() == [str(number) for number in range(7)]
    here.send(["new"], partition="6")
    here.send(["old"], partition="0")
    assert until(lambda: reader.read().records)[0].data == b"old"
    assert [partition["events"] for partition in here.hubs.look(here.hub)] == [1, 0, 0, 0, 0, 0, 1]


def test_wrong_key_is_rejected(here: Here) -> None:
    wrong = here.hubs.connection_string(here.hub).replace(here.hubs.key, "another")
    with (
        EventHubConsumerClient.from_connection_string(wrong, "$Default", retry_total=0) as client,
        pytest.raises(AuthenticationError, match="InvalidSignature"),
    ):
        client.get_partition_ids()


def test_impossible_orders_are_errors(here: Here) -> None:
    """A test that detaches a reader that does not exist fails instead of passing by mistake."""
    with pytest.raises(ServiceError, match="partition 9"):
        here.hubs.detach(here.hub, "9")
    with pytest.raises(ServiceError, match="KeyError"):
        here.hubs.add_partitions("another", 1)
