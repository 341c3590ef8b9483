"""A reader with the real client loses no record if it is resumed, displaced, disconnected or throttled."""

import gc
import logging
import os
import threading

import pytest
from hub_steps import HubSteps, collect, fault, texts
from waiters import until

from leasehold.adapters.sources.event_hubs.poller import EventHubsSource
from leasehold.balancer.model import LATEST, TRIM_HORIZON, Lease, Position, Shard, at_timestamp

pytestmark = pytest.mark.services

LOOKUPS = min(32, (os.cpu_count() or 1) + 4)
"""The maximum number of threads that an event loop starts for name lookups, whatever the number of partitions."""


def test_record_has_what_a_handler_and_a_checkpoint_need(event_hub: HubSteps) -> None:
    """The token must be the event's offset, because other SDKs resume from a checkpoint by the offset."""
    event_hub.send(["a", "b"])
    records = collect(event_hub.reader(), 2)
    event = records[1].event
    assert texts(records) == ["a", "b"]
    assert records[1].position == Position("1")
    assert (records[1].token, records[1].sequence_number) == (event.offset, str(event.sequence_number))
    assert (records[1].arrived, records[1].partition_key) == (event.enqueued_time.timestamp(), None)


def test_reader_resumes_right_after_the_checkpoint(event_hub: HubSteps) -> None:
    event_hub.send(["a", "b", "c", "d"])
    checkpointed = collect(event_hub.reader(), 4)[1]
    tokens = {"$Default": checkpointed.token, "second": "", "third": "no offset"}
    readers = [
        event_hub.source(group=group).open(Lease("0"), Position(checkpointed.sequence_number, token=token))
        for group, token in tokens.items()
    ]
    assert [texts(collect(reader, 2)) for reader in readers] == [["c", "d"]] * 3


def test_event_before_the_checkpoint_is_dropped_despite_its_offset(event_hub: HubSteps) -> None:
    """The sequence number counts, because other SDKs have stored offsets that do not match their sequence numbers."""
    event_hub.send(["a", "b", "c", "d"])
    assert texts(collect(event_hub.reader(Position("1", 0, "-1")), 2)) == ["c", "d"]


def test_batch_reports_how_far_it_was_read(event_hub: HubSteps) -> None:
    """The worker checkpoints `read_to`, which must therefore never be after the last record that was read."""
    event_hub.send(["a", "b", "c"])
    reader = event_hub.reader()
    batch = until(lambda: (batch := reader.read()).records and batch)
    assert batch.read_to == batch.records[-1].position
    assert batch.read_to.token == batch.records[-1].token
    assert 0 <= batch.behind_seconds < 60
    assert (batch.ended, batch.children) == (False, ())
    rows = batch.in_columns(batch.records).to_pylist()
    assert [(row["body"], row["partition"]) for row in rows] == [(record.data, "0") for record in batch.records]
    assert [row["offset"] for row in rows] == [record.token for record in batch.records]
    waits = [reader.read().wait_seconds for _ in range(6)]
    assert waits == [0.05, 0.1, 0.2, 0.4, 0.5, 0.5]


def test_reading_from_a_time_includes_that_time(event_hub: HubSteps) -> None:
    event_hub.send(["a"])
    first = collect(event_hub.reader(), 1)[0]
    milliseconds = round((first.arrived or 0) * 1000)
    assert texts(collect(event_hub.reader(at_timestamp(milliseconds)), 1)) == ["a"]


def test_latest_is_a_number_or_the_start_of_an_empty_partition(event_hub: HubSteps) -> None:
    """The events that arrive between the resolution of LATEST and the first read are not skipped."""
    event_hub.send(["old", "older"])
    source = event_hub.source()
    latest_of_full_partition, latest_of_empty_partition = (
        source.latest(Lease("0", checkpoint=LATEST)),
        source.latest(Lease("1", checkpoint=LATEST)),
    )
    event_hub.send(["new"])
    event_hub.send(["first"], partition="1")
    assert (latest_of_full_partition, latest_of_empty_partition) == (Position("1"), at_timestamp(0))
    assert texts(collect(event_hub.reader(latest_of_full_partition), 1)) == ["new"]
    assert texts(collect(event_hub.reader(latest_of_empty_partition, "1"), 1)) == ["first"]


def test_stolen_link_is_reported_and_not_stolen_back(event_hub: HubSteps) -> None:
    event_hub.send(["a", "b"])
    former_reader = event_hub.reader()
    assert texts(collect(former_reader, 2)) == ["a", "b"]
    new_owner = event_hub.reader(epoch=3)
    assert texts(collect(new_owner, 2)) == ["a", "b"]
    batch = fault(former_reader)
    assert (batch.records, batch.read_to, batch.wait_seconds) == ((), None, 10.0)
    assert [reader["epoch"] for reader in event_hub.readers()] == [3]


def test_readers_without_exclusive_access_share_a_partition(event_hub: HubSteps) -> None:
    """Spark reads ranges in this way, so queries of one consumer group do not disconnect each other."""
    event_hub.send(["a"])
    source = EventHubsSource(event_hub.plain.access, exclusive=False)
    event_hub.opened.append(source)
    readers = [source.open(Lease("0", epoch=epoch), TRIM_HORIZON) for epoch in (0, 3)]
    assert [texts(collect(reader, 1)) for reader in readers] == [["a"]] * 2
    assert [reader["epoch"] for reader in event_hub.readers()] == [None, None]
    event_hub.send(["b"])
    assert [texts(collect(reader, 1)) for reader in readers] == [["b"]] * 2


def test_last_reader_of_equal_epoch_wins_and_resumes(event_hub: HubSteps) -> None:
    """All official processors use epoch 0, so of two readers with this epoch, the newer one must get the link."""
    event_hub.send(["a"])
    first_reader = event_hub.reader()
    collect(first_reader, 1)
    second_reader = event_hub.reader()
    collect(second_reader, 1)
    fault(first_reader)
    event_hub.send(["b"])
    assert texts(collect(second_reader, 1)) == ["b"]
    # After its wait, the first reader continues directly after the last record that it returned.
    assert texts(collect(first_reader, 1)) == ["b"]
    assert fault(second_reader).wait_seconds == 10.0


# The client leaves the socket of a broken connection to the garbage collector, which emits a warning.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_broken_link_is_reopened_without_loss_or_repetition(
    event_hub: HubSteps, caplog: pytest.LogCaptureFixture
) -> None:
    """The service routinely detaches links, for example because of upgrades, throttling or idleness."""
    caplog.set_level(logging.CRITICAL, "azure.eventhub")  # A captured traceback would keep that socket alive.
    event_hub.hubs.add_partitions(event_hub.hub, 1)
    partitions = ("0", "1", "2")
    for partition in partitions:
        event_hub.send(["a", "b"], partition)
    readers = [event_hub.reader(partition=partition) for partition in partitions]
    texts_before = [texts(collect(reader, 2)) for reader in readers]
    ended_counts = (
        event_hub.hubs.detach_readers(event_hub.hub, "0", "amqp:link:detach-forced"),
        event_hub.hubs.detach_readers(event_hub.hub, "1", "com.microsoft:server-busy"),
        event_hub.hubs.drop(event_hub.hub, "2"),
    )
    waits = [fault(reader).wait_seconds for reader in readers]
    for partition in partitions:
        event_hub.send(["c"], partition)
    texts_after = [texts(collect(reader, 1)) for reader in readers]
    assert (texts_before, ended_counts, texts_after) == ([["a", "b"]] * 3, (1, 1, 1), [["c"]] * 3)
    assert all(1.0 <= wait <= 3.0 for wait in waits)
    event_hub.plain.close()
    gc.collect()


def test_slow_handler_bounds_the_buffered_records(event_hub: HubSteps) -> None:
    numbers = [str(number) for number in range(400)]
    event_hub.send(numbers, "0")
    event_hub.send(numbers, "1")
    source = event_hub.source(prefetch="20")
    slow_reader, quick_reader = (source.open(Lease(partition), TRIM_HORIZON) for partition in ("0", "1"))
    until(event_hub.readers)
    # By the time the quick reader has read its partition, an unbounded buffer would contain all of the other partition.
    assert texts(collect(quick_reader, 400)) == numbers
    assert event_hub.readers()[0]["sent"] <= 4 * 20
    assert texts(collect(slow_reader, 400)) == numbers


def test_partition_added_at_run_time_is_read_from_its_start(event_hub: HubSteps) -> None:
    source = event_hub.source()
    assert source.shards() == (Shard("0", source.stream), Shard("1", source.stream))
    event_hub.hubs.add_partitions(event_hub.hub, 9)
    event_hub.send(["first"], partition="10")
    assert source.shards() == tuple(Shard(str(number), source.stream) for number in range(11))
    assert (source.gone("10"), source.gone("11")) == (False, True)
    assert texts(collect(source.open(Lease("10"), TRIM_HORIZON), 1)) == ["first"]


def test_many_partitions_share_one_thread_and_close_every_link(event_hub: HubSteps) -> None:
    event_hub.hubs.add_partitions(event_hub.hub, 14)
    threads_before = set(threading.enumerate())
    source = event_hub.source()
    readers = [source.open(Lease(str(number)), TRIM_HORIZON) for number in range(16)]
    until(lambda: all(partition["readers"] for partition in event_hub.hubs.list_partitions(event_hub.hub)))
    started_threads = set(threading.enumerate()) - threads_before
    assert len(started_threads) <= 1 + LOOKUPS
    readers[0].close()
    until(lambda: not event_hub.readers())
    source.close()
    assert until(lambda: not any(partition["readers"] for partition in event_hub.hubs.list_partitions(event_hub.hub)))
    until(lambda: not started_threads & set(threading.enumerate()))
