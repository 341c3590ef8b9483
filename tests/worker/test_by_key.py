"""The keys of a batch are processed concurrently, and the records of each key in order."""

import asyncio
from collections import defaultdict
from functools import partial
from typing import Any

import pytest
from attrs import define, field
from hypothesis import given
from hypothesis import strategies as st
from reader_harness import ReaderHarness

from leasehold.adapters.consumer.handling import Delivery, by_key
from leasehold.adapters.sources.protocol import Batch, Record
from leasehold.balancer.model import Position
from leasehold_lab.simulator.world.world import ShardRecords


def keyed(*keys: str | None) -> list[Record]:
    """Return one record for each of these keys, in order."""
    return [Record(b"%d" % number, str(100 + number), partition_key=key) for number, key in enumerate(keys)]


def delivery(records: list[Record]) -> Delivery:
    """Return the records as a batch."""
    return Delivery(records, records[-1].position, None, ReaderHarness().holding)


@define
class KeyRecordingHandler:
    """A handler that records which keys are being processed, and lets other tasks run before it ends."""

    order: dict[str | None, list[int]] = field(factory=lambda: defaultdict(list))
    at_work: set[str | None] = field(factory=set)
    max_running_keys: int = 0

    async def __call__(self, batch: Delivery) -> None:
        """Handle the records of one key."""
        (key,) = {record.partition_key for record in batch.records}
        assert key not in self.at_work
        self.at_work.add(key)
        self.max_running_keys = max(self.max_running_keys, len(self.at_work))
        for _ in range(3):
            await asyncio.sleep(0)
        self.order[key] += [int(record.sequence_number) for record in batch.records]
        self.at_work.remove(key)


@given(st.lists(st.sampled_from(("a", "b", "c", "d", None)), min_size=1, max_size=20), st.integers(1, 5))
def test_keys_are_processed_in_order_up_to_the_concurrency_limit(keys: list[str | None], concurrency: int) -> None:
    handler, records = KeyRecordingHandler(), keyed(*keys)
    asyncio.run(await_handler(by_key(handler, concurrency), delivery(records)))
    expected_order = {key: [100 + index for index, record_key in enumerate(keys) if record_key == key] for key in keys}
    assert handler.order == expected_order
    assert handler.max_running_keys == min(concurrency, len(set(keys)))


async def await_handler(handler: object, batch: Delivery) -> None:
    assert callable(handler)
    await handler(batch)


def test_failed_key_waits_for_running_keys_and_starts_no_other() -> None:
    """When the batch is delivered again, none of its records is still being processed."""
    handled_keys: list[str] = []

    async def handle(batch: Delivery) -> None:
        key = str(batch.records[0].partition_key)
        handled_keys.append(f"{key} begins")
        await asyncio.sleep(0)
        if key == "a":
            raise SystemExit(3)
        await asyncio.sleep(0)
        handled_keys.append(f"{key} ends")

    async def outcome() -> BaseException | None:
        try:
            await await_handler(by_key(handle, 2), delivery(keyed("a", "b", "c")))
        except BaseException as error:  # noqa: BLE001  the error is what is tested
            return error
        return None

    error = asyncio.run(outcome())
    assert isinstance(error, SystemExit)
    assert handled_keys == ["a begins", "b begins", "b ends"]


def test_key_whose_handler_cancels_itself_waits_for_running_keys() -> None:
    """Only a cancellation of the whole batch is passed on at once."""
    ended_keys: list[str] = []

    async def handle(batch: Delivery) -> None:
        await asyncio.sleep(0)
        if batch.records[0].partition_key == "a":
            raise asyncio.CancelledError
        await asyncio.sleep(0)
        ended_keys.append("b")

    async def outcome() -> list[str]:
        with pytest.raises(Exception, match="it raised CancelledError"):
            await await_handler(by_key(handle, 2), delivery(keyed("a", "b")))
        return ended_keys.copy()

    assert asyncio.run(outcome()) == ["b"]


@pytest.mark.parametrize("answer", ["value", "cancelled"])
def test_key_whose_handler_returns_a_value_fails_the_batch(answer: str) -> None:
    async def handle(batch: Delivery) -> object:
        if batch.records[0].partition_key == "a":
            return None
        if answer == "cancelled":
            raise asyncio.CancelledError
        return False

    with pytest.raises(Exception, match=r"it raised CancelledError|it returned a value"):
        asyncio.run(await_handler(by_key(handle, 2), delivery(keyed("a", "b"))))


def test_abandoned_batch_cancels_its_keys() -> None:
    cancelled_keys: list[str] = []

    async def handle(batch: Delivery) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled_keys.append(str(batch.records[0].partition_key))

    async def cancel_running_batch() -> None:
        task = asyncio.ensure_future(await_handler(by_key(handle, 2), delivery(keyed("a", "b", "c"))))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel_running_batch())
    assert sorted(cancelled_keys) == ["a", "b"]


def test_part_cannot_be_checkpointed() -> None:
    """Only the whole batch can be checkpointed, because earlier records may belong to keys that are still at work."""
    harness = ReaderHarness(ShardRecords(keyed("a", "b", "a")))
    error_messages: list[str] = []

    async def handle(batch: Delivery) -> None:
        for record in (None, batch.records[0]):
            with pytest.raises(ValueError, match="other keys of this batch are at work") as error:
                batch.checkpoint(record)
            error_messages.append(str(error.value))

    whole_batch = Delivery(harness.shard_log.records, Position("102"), None, harness.holding)
    asyncio.run(await_handler(by_key(handle, 2), whole_batch))
    assert len(error_messages) == 4
    assert not harness.store.row("s-0").checkpoint.numbered


def test_part_of_a_columnar_batch_has_columns() -> None:
    counts: list[int] = []

    async def handle(batch: Delivery) -> None:
        counts.append(batch.to_arrow())

    records = keyed("a", "b", "a")
    batch = Batch(records, None, None, 0.0, in_columns=len)
    asyncio.run(
        await_handler(
            by_key(handle, 1), Delivery(records, Position("102"), None, ReaderHarness().holding, batch.in_columns)
        )
    )
    assert counts == [2, 1]


async def takes_more(_more: str, _batch: Delivery) -> None:
    """An async handler with an additional argument."""


def plain(_batch: Delivery) -> Any:  # noqa: ANN401  as if the function had no annotations
    """A handler that is not async."""


def test_only_async_handlers_and_positive_concurrency_are_accepted() -> None:
    """A handler that is not async could only be called for one key at a time."""
    by_key(partial(takes_more, "more"), 1)
    with pytest.raises(ValueError, match="only an `async def` handler"):
        by_key(plain, 2)
    with pytest.raises(ValueError, match="concurrency: 0 is less than 1"):
        by_key(KeyRecordingHandler(), 0)
