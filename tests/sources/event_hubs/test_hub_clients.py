"""The local hub works with the real `azure-eventhub` client. The other tests in this folder rely on that."""

import pytest
from azure.eventhub import EventData, EventHubConsumerClient, EventHubProducerClient
from azure.eventhub.exceptions import AuthenticationError
from hub_steps import HubSteps, collect
from waiters import until

from leasehold.adapters.toolchain import ServiceError
from leasehold.balancer.model import TRIM_HORIZON, Lease

pytestmark = pytest.mark.services


def test_properties_describe_hub_and_partitions(event_hub: HubSteps) -> None:
    event_hub.send(["a", "bc"])
    with EventHubConsumerClient.from_connection_string(
        event_hub.hubs.connection_string(event_hub.hub), "$Default"
    ) as client:
        assert client.get_eventhub_properties()["partition_ids"] == ["0", "1"]
        properties_of_full_partition, properties_of_empty_partition = (
            client.get_partition_properties("0"),
            client.get_partition_properties("1"),
        )
    stored_records = collect(event_hub.reader(), 2)
    last_event = stored_records[1].event
    assert properties_of_full_partition["last_enqueued_sequence_number"] == last_event.sequence_number == 1
    assert properties_of_full_partition["last_enqueued_offset"] == last_event.offset
    assert properties_of_full_partition["last_enqueued_time_utc"] == last_event.enqueued_time
    assert (properties_of_full_partition["is_empty"], properties_of_empty_partition["is_empty"]) == (False, True)
    assert (
        properties_of_empty_partition["last_enqueued_sequence_number"],
        properties_of_empty_partition["last_enqueued_offset"],
    ) == (-1, "-1")


def test_producers_reach_partitions_by_number_by_key_and_in_turn(event_hub: HubSteps) -> None:
    with EventHubProducerClient.from_connection_string(event_hub.hubs.connection_string(event_hub.hub)) as producer:
        producer.send_batch([EventData(str(number)) for number in range(5)], partition_id="1")
        producer.send_batch([EventData("k1"), EventData("k2")], partition_key="key")
        producer.send_batch([EventData("k3")], partition_key="key")
        counts_before = [partition["events"] for partition in event_hub.hubs.list_partitions(event_hub.hub)]
        for _ in range(4):
            producer.send_event(EventData("turn"))
    counts_after = [partition["events"] for partition in event_hub.hubs.list_partitions(event_hub.hub)]
    assert counts_before in ([3, 5], [0, 8])
    assert [new - old for old, new in zip(counts_before, counts_after, strict=True)] == [2, 2]


def test_client_starts_at_the_requested_position(event_hub: HubSteps) -> None:
    event_hub.send(["a", "b", "c", "d"])
    third_event = collect(event_hub.source(group="second").open(Lease("0"), TRIM_HORIZON), 4)[2].event
    assert third_event.offset != str(third_event.sequence_number)
    events = event_hub.received(2, third_event.sequence_number, inclusive=True)
    assert (events[0].body_as_str(), events[0].offset) == ("c", third_event.offset)


def test_added_partitions_are_listed_and_filled_during_reads(event_hub: HubSteps) -> None:
    reader = event_hub.reader()
    until(event_hub.readers)
    event_hub.hubs.add_partitions(event_hub.hub, 5)
    with EventHubConsumerClient.from_connection_string(
        event_hub.hubs.connection_string(event_hub.hub), "$Default"
    ) as client:
        assert client.get_partition_ids() == [str(number) for number in range(7)]
    event_hub.send(["new"], partition="6")
    event_hub.send(["old"], partition="0")
    assert until(lambda: reader.read().records)[0].data == b"old"
    assert [partition["events"] for partition in event_hub.hubs.list_partitions(event_hub.hub)] == [1, 0, 0, 0, 0, 0, 1]


def test_wrong_key_is_rejected(event_hub: HubSteps) -> None:
    wrong_connection_string = event_hub.hubs.connection_string(event_hub.hub).replace(event_hub.hubs.key, "another")
    with (
        EventHubConsumerClient.from_connection_string(wrong_connection_string, "$Default", retry_total=0) as client,
        pytest.raises(AuthenticationError, match="InvalidSignature"),
    ):
        client.get_partition_ids()


def test_impossible_orders_are_errors(event_hub: HubSteps) -> None:
    """Orders that make no sense are rejected, so that a test with a wrong order fails instead of passing by mistake."""
    with pytest.raises(ServiceError, match="partition 9"):
        event_hub.hubs.detach_readers(event_hub.hub, "9")
    with pytest.raises(ServiceError, match="KeyError"):
        event_hub.hubs.add_partitions("another", 1)
