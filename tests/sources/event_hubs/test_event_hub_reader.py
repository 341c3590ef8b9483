"""Our reader on the real client loses no record when resumed, displaced, disconnected or throttled."""

import gc
import logging
import os
import threading

import pytest
from hub_steps import Here, collected, fault, texts
from waiters import until

from leasehold.balancer.model import LATEST, TRIM_HORIZON, Lease, Position, Shard, at_timestamp

pytestmark = pytest.mark.services

LOOKUPS = min(32, (os.cpu_count() or 1) + 4)
"""The number of threads that an event loop may start for name lookups, however many partitions there are."""


def test_record_has_what_a_handler_and_a_checkpoint_need(here: Here) -> None:
    """Other SDKs need the token to resume from a checkpoint."""
    here.send(["a", "b"])
    records = collected(here.reader(), 2)
    event = records[1].event
    assert texts(records) == ["a", "b"]
    assert records[1].position == Position("1")
    assert (records[1].token, records[1].sequence_number) == (event.offset, str(event.sequence_number))
    assert (records[1].arrived, records[1].partition_key) == (event.enqueued_time.timestamp(), None)


def test_reader_resumes_right_after_the_checkpoint(here: Here) -> None:
    here.send(["a", "b", "c", "d"])
    checkpointed = collected(here.reader(), 4)[1]
    tokens = {"$Default": checkpointed.token, "second": "", "third": "no offset"}
    readers = [
        here.source(group=group).open(Lease("0"), Position(checkpointed.sequence_number, token=token))
        for group, token in tokens.items()
    ]
    assert [texts(collected(reader, 2)) for reader in readers] == [["c", "d"]] * 3


def test_event_before_the_checkpoint_is_dropped_despite_its_offset(here: Here) -> None:
    """Other SDKs have stored offsets that do not match their sequence numbers."""
    here.send(["a", "b", "c", "d"])
    assert texts(collected(here.reader(Position("1", 0, "-1")), 2)) == ["c", "d"]


def test_batch_reports_how_far_it_was_read(here: Here) -> None:
    """The worker checkpoints `read_to`, so it must never be after the last record read."""
    here.send(["a", "b", "c"])
    reader = here.reader()
    batch = until(lambda: (batch := reader.read()).records and batch)
    assert batch.read_to == batch.records[-1].position
    assert batch.read_to.token == batch.records[-1].token
    assert 0 <= batch.behind_seconds < 60
    assert (batch.ended, batch.children) == (False, ())
    rows = batch.in_columns(batch.records).to_pylist()
    assert [(row["body"], row["partition"]) for row in rows] == [(each.data, "0") for each in batch.records]
    assert [row["offset"] for row in rows] == [each.token for each in batch.records]
    waits = [reader.read().wait_seconds for _ in range(6)]
    assert waits == [0.05, 0.1, 0.2, 0.4, 0.5, 0.5]


def test_reading_from_a_time_includes_that_time(here: Here) -> None:
    here.send(["a"])
    first = collected(here.reader(), 1)[0]
    milliseconds = round((first.arrived or 0) * 1000)
    assert texts(collected(here.reader(at_timestamp(milliseconds)), 1)) == ["a"]


def test_latest_is_a_number_or_the_start_of_an_empty_partition(here: Here) -> None:
    """Events that arrive between resolving LATEST and the first read are not skipped."""
    here.send(["old", "older"])
    source = here.source()
    full, empty = source.latest(Lease("0", checkpoint=LATEST)), source.latest(Lease("1", checkpoint=LATEST))
    here.send(["new"])
    here.send(["first"], partition="1")
    assert (full, empty) == (Position("1"), at_timestamp(0))
    assert texts(collected(here.reader(full), 1)) == ["new"]
    assert texts(collected(here.reader(empty, "1"), 1)) == ["first"]


def test_stolen_link_is_reported_and_not_stolen_back(here: Here) -> None:
    here.send(["a", "b"])
    loser = here.reader()
    assert texts(collected(loser, 2)) == ["a", "b"]
    new_owner = here.reader(epoch=3)
    assert texts(collected(new_owner, 2)) == ["a", "b"]
    batch = fault(loser)
    assert (batch.records, batch.read_to, batch.wait_seconds) == ((), None, 10.0)
    assert [reader["epoch"] for reader in here.readers()] == [3]


def test_last_reader_of_equal_epoch_wins_and_resumes(here: Here) -> None:
    """The official processors all use epoch 0, so the newer owner must get the link."""
    here.send(["a"])
    first = here.reader()
    collected(first, 1)
    second = here.reader()
    collected(second, 1)
    fault(first)
    here.send(["b"])
    assert texts(collected(second, 1)) == ["b"]
    # After its wait, the first reader continues right after the last record it returned.
    assert texts(collected(first, 1)) == ["b"]
    assert fault(second).wait_seconds == 10.0


# The client leaves the socket of a broken connection to the garbage collector, which logs a warning.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_broken_link_is_reopened_without_loss_or_repetition(here: Here, caplog: pytest.LogCaptureFixture) -> None:
    """The service routinely detaches links, for upgrades, throttling or idleness."""
    caplog.set_level(logging.CRITICAL, "azure.eventhub")  # a captured traceback would keep that socket alive
    here.hubs.add_partitions(here.hub, 1)
    partitions = ("0", "1", "2")
    for partition in partitions:
        here.send(["a", "b"], partition)
    readers = [here.reader(partition=partition) for partition in partitions]
    before = [texts(collected(reader, 2)) for reader in readers]
    ended = (
        here.hubs.detach(here.hub, "0", "amqp:link:detach-forced"),
        here.hubs.detach(here.hub, "1", "com.microsoft:server-busy"),
        here.hubs.drop(here.hub, "2"),
    )
    waits = [fault(reader).wait_seconds for reader in readers]
    for partition in partitions:
        here.send(["c"], partition)
    after = [texts(collected(reader, 1)) for reader in readers]
    assert (before, ended, after) == ([["a", "b"]] * 3, (1, 1, 1), [["c"]] * 3)
    assert all(1.0 <= wait <= 3.0 for wait in waits)
    here.plain.close()
    gc.collect()


def test_slow_handler_bounds_the_buffered_records(here: Here) -> None:
    numbers = [str(number) for number in range(400)]
    here.send(numbers, "0")
    here.send(numbers, "1")
    source = here.source(prefetch="20")
    slow, quick = (source.open(Lease(partition), TRIM_HORIZON) for partition in ("0", "1"))
    until(here.readers)
    # When the other partition is read completely, this one would be, too.
    assert texts(collected(quick, 400)) == numbers
    assert here.readers()[0]["sent"] <= 4 * 20
    assert texts(collected(slow, 400)) == numbers


def test_partition_added_at_run_time_is_read_from_its_start(here: Here) -> None:
    source = here.source()
    assert source.shards() == (Shard("0", source.stream), Shard("1", source.stream))
    here.hubs.add_partitions(here.hub, 9)
    here.send(["first"], partition="10")
    assert source.shards() == tuple(Shard(str(number), source.stream) for number in range(11))
    assert (source.gone("10"), source.gone("11")) == (False, True)
    assert texts(collected(source.open(Lease("10"), TRIM_HORIZON), 1)) == ["first"]


def test_many_partitions_share_one_thread_and_close_every_link(here: Here) -> None:
    here.hubs.add_partitions(here.hub, 14)
    before = set(threading.enumerate())
    source = here.source()
    readers = [source.open(Lease(str(number)), TRIM_HORIZON) for number in range(16)]
    until(lambda: all(partition["readers"] for partition in here.hubs.look(here.hub)))
    started = set(threading.enumerate()) - before
    assert len(started) <= 1 + LOOKUPS
    readers[0].close()
    until(lambda: not here.readers())
    source.close()
    assert until(lambda: not any(partition["readers"] for partition in here.hubs.look(here.hub)))
    until(lambda: not started & set(threading.enumerate()))
