"""Tests how the daemon finds a record that crashes its children, and how it names errors of the store."""

import asyncio
import threading
from concurrent.futures import wait

import pytest
from botocore.exceptions import ClientError
from hypothesis import given
from hypothesis import strategies as st
from waiters import WAIT, Clock

from leasehold.adapters.consumer.handling import Delivery, Handling
from leasehold.adapters.multilang.children import ChildFault, ChildProcesses
from leasehold.adapters.multilang.daemon import SEARCH_ATTEMPTS, ChildHandler, RecordSearch, find_error_name
from leasehold.adapters.multilang.protocol import DEFAULT_MAX_RECORDS
from leasehold.adapters.sources.protocol import Batch, Record
from leasehold.adapters.worker.annotations import Identity
from leasehold.adapters.worker.holding import Holding
from leasehold.errors import StoreError
from leasehold.stores.embedded.memory import MemoryStore
from leasehold_lab.contract.actors import create_owned_lease

ATTEMPTS = 3


def _records(count: int) -> list[Record]:
    return [Record(b"", str(number), 0, "k") for number in range(1, count + 1)]


@given(
    count=st.integers(1, 40),
    bad=st.sets(st.integers(1, 40), max_size=4),
    cuts=st.lists(st.integers(1, 40), min_size=1),
    acknowledges=st.booleans(),
)
def test_each_record_that_crashes_its_child_is_dead_lettered_and_no_other(
    count: int, bad: set[int], cuts: list[int], acknowledges: bool
) -> None:
    """Batches have any size. Unless children acknowledge records, a new child receives them all again.

    Each child receives the records after the checkpoint in order, except for dead letters.
    """
    records, search = _records(count), RecordSearch(ATTEMPTS)
    dead_letters, checkpoint, crash_count = set[int](), 0, 0
    while checkpoint < count:
        start = position = checkpoint
        delivered_numbers, child_died = list[int](), False
        while position < count and not child_died:
            size = cuts[(position + crash_count) % len(cuts)]
            for message_records in search.split_into_messages(records[position : position + size], (0, checkpoint, 0)):
                numbers = [int(item.sequence_number) for item in message_records]
                if bad & set(numbers):
                    child_died, crash_count = True, crash_count + 1
                    if (record := search.record_failure(message_records)) is not None:
                        dead_letters.add(int(record.sequence_number))
                        search.record_dead_letter(record)
                    break
                delivered_numbers += numbers
                search.record_success(message_records)
                if acknowledges:
                    checkpoint = numbers[-1]
            position += size
        end = delivered_numbers[-1] if delivered_numbers else start
        assert delivered_numbers == [item for item in range(start + 1, end + 1) if item not in dead_letters]
        if not child_died:
            checkpoint = count
        assert crash_count <= (len(bad) + 1) * (ATTEMPTS + 12)
    assert dead_letters == {item for item in bad if item <= count}


def test_faults_are_counted_only_until_their_records_have_passed() -> None:
    """A record is blamed only for faults that have occurred since a child last processed it."""
    search, records = RecordSearch(ATTEMPTS), _records(2 * ATTEMPTS)
    for record in records:
        assert search.record_failure([record]) is None
        search.record_success([record])


def test_records_before_the_failed_one_reset_no_faults() -> None:
    """The bad record is found although a child processes the records before it again after each fault."""
    search, records = RecordSearch(ATTEMPTS), _records(2)
    for _ in range(ATTEMPTS - 1):
        assert search.record_failure(records[1:]) is None
        search.record_success(records[:1])
    assert search.record_failure(records[1:]) == records[1]


def test_finished_search_blames_no_later_record_for_earlier_faults() -> None:
    """Faults of a dead-lettered record, or of records that were cleared, do not count against later records."""
    records = _records(5)
    for record_is_found in (True, False):
        search = RecordSearch(2)
        part = records[:1] if record_is_found else records[:4]
        assert search.record_failure(part) is None
        crashing_record = search.record_failure(part)
        if record_is_found:
            assert crashing_record == records[0]
            search.record_dead_letter(records[0])
        else:
            assert crashing_record is None
            for message_part in search.split_into_messages(records[:4], (0, 0, 0)):
                search.record_success(message_part)
        assert search.record_failure(records[4:]) is None


def test_search_ends_within_the_allowed_attempts() -> None:
    """A search ends before its shard is put on cooldown, so another worker does not have to start the search again."""
    search, crash_count, crashing_record = RecordSearch(ATTEMPTS), 0, None
    records = _records(DEFAULT_MAX_RECORDS)
    while crashing_record is None:
        for part in search.split_into_messages(records, (0, 0, 0)):
            if part[-1] is records[-1]:
                crash_count, crashing_record = crash_count + 1, search.record_failure(part)
                break
            search.record_success(part)
    assert crashing_record == records[-1]
    handling = ChildHandler(
        ChildProcesses(["x"]), attempts=ATTEMPTS, dead_letter=lambda _delivery, _error: None
    ).handling
    assert handling.attempts == ATTEMPTS + SEARCH_ATTEMPTS
    assert crash_count < handling.attempts
    assert ChildHandler(ChildProcesses(["x"]), attempts=ATTEMPTS).handling.attempts == ATTEMPTS


class FailingChildren(ChildProcesses):
    """Children that end whenever they get a batch."""

    async def start_child(self, *_arguments: object) -> None:
        """Do nothing."""

    async def process_batch(self, *_arguments: object) -> None:
        raise ChildFault("it exited with status -9")


@pytest.mark.parametrize("lost", [False, True])
def test_child_that_ends_with_its_lease_blames_no_record(lost: bool) -> None:
    """A child is killed if its lease is lost while it works, which says nothing about its records."""
    store, records, dead_letters = MemoryStore(), _records(1), list[Record]()
    row = create_owned_lease(store)
    holding = Holding(store, row, identity=Identity("ann", "p"), clock=Clock(), write_began=0.0, lease_seconds=10.0)
    children = FailingChildren(["x"])
    with ChildHandler(
        children, attempts=ATTEMPTS, dead_letter=lambda delivery, _error: dead_letters.extend(delivery.records)
    ) as handler:
        handling = handler.handling
        handling.observer("initialize", holding)
        if lost:
            holding.lost.set()
        for _ in range(ATTEMPTS):
            with pytest.raises(ChildFault):
                asyncio.run(_awaited(handling, Delivery(records, records[-1].position, None, holding)))
    assert dead_letters == ([] if lost else records)


async def _awaited(handling: Handling, delivery: Delivery) -> None:
    work = handling.handler(delivery)
    assert work is not None
    await work


def test_fault_at_an_empty_message_is_raised_at_the_next_batch() -> None:
    """The worker must deliver the batches after the checkpoint again, because the child that had them has ended."""
    store, records, faults = MemoryStore(), _records(1), [ChildFault("it exited with status -9")]

    class ChildrenThatFailOnce(FailingChildren):
        async def process_batch(self, *_arguments: object) -> None:
            if faults:
                raise faults.pop()

    row = create_owned_lease(store)
    holding = Holding(store, row, identity=Identity("ann", "p"), clock=Clock(), write_began=0.0, lease_seconds=10.0)
    with ChildHandler(ChildrenThatFailOnce(["x"]), attempts=ATTEMPTS, send_empty=True) as handler:
        handling = handler.handling
        handling.observer("initialize", holding)
        for _ in range(3):
            wait(handler._pending_messages.values(), WAIT)  # noqa: SLF001  not accessible otherwise
            handling.measure(holding, Batch((), None, 0.0, 0.01))
        assert not faults
        with pytest.raises(ChildFault):
            asyncio.run(_awaited(handling, Delivery(records, records[-1].position, None, holding)))


def test_fault_while_ending_children_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    children, earlier_threads = ChildProcesses(["x"]), set(threading.enumerate())

    async def fail_to_close() -> None:
        raise OSError("no descriptor left")

    monkeypatch.setattr(children, "close", fail_to_close)
    with pytest.raises(OSError, match="no descriptor left"), ChildHandler(children, attempts=ATTEMPTS):
        (thread,) = set(threading.enumerate()) - earlier_threads
    assert not thread.is_alive()


def test_store_errors_have_the_names_that_children_expect() -> None:
    """The name of an error tells children whether to retry or to give up."""

    def find_name_for_code(code: str) -> str:
        fault = StoreError("x")
        fault.__cause__ = ClientError({"Error": {"Code": code, "Message": ""}}, "UpdateItem")
        return find_error_name(fault)

    assert {
        code: find_name_for_code(code) for code in ("ThrottlingException", "ResourceNotFoundException", "Other")
    } == {
        "ThrottlingException": "ThrottlingException",
        "ResourceNotFoundException": "InvalidStateException",
        "Other": "KinesisClientLibDependencyException",
    }
    assert find_error_name(StoreError("x")) == "KinesisClientLibDependencyException"
