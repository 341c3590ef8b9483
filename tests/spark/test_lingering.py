"""A batch grows while shards are behind, but does not wait at their tips."""

from collections import Counter
from collections.abc import Callable

import pytest
from fake_stream import KillableStore, Query, Stream
from stepped_loop import Stepped, new_reader, stepped

from leasehold.stores.embedded.memory import MemoryStore

Planned = Callable[..., tuple[int, float]]


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Planned:
    """Plan a first batch, and return how many rows it has and how many seconds that took."""
    clock = stepped(monkeypatch)

    def plan(stream: Stream, **options: str) -> tuple[int, float]:
        store, began = MemoryStore(), clock.now
        reader = new_reader(stream, KillableStore(store), rereadable=True, flush="true", **options)  # type: ignore[arg-type]
        rows = Query(reader, store, KillableStore(store), reader.initialOffset()).batch()
        reader.stop()
        return len(rows), Stepped.clock.now - began

    return plan


BEHIND, AT_TIP = [str(number) for number in range(4000)], [str(number) for number in range(25)]


def test_batch_grows_while_a_shard_is_behind(planned: Planned) -> None:
    """Each batch has a fixed cost in Spark, so batches are large when there are many rows."""
    small, soon = planned(Stream({"a": list(BEHIND)}), **{"lease.lingerMs": "0"})
    large, late = planned(Stream({"a": list(BEHIND)}))
    assert (small, large > 100) == (10, True)
    assert 0.9 < late - soon < 1.2


@pytest.mark.parametrize("name", ["maxRowsPerTrigger", "lease.bufferRows"])
def test_batch_is_planned_once_it_is_full(planned: Planned, name: str) -> None:
    _, soon = planned(Stream({"a": list(BEHIND)}), **{"lease.lingerMs": "0"})
    rows, full = planned(Stream({"a": list(BEHIND)}), **{name: "30"})
    assert (rows, full - soon < 0.5) == (30, True)


def test_batch_does_not_linger_at_the_tip(planned: Planned) -> None:
    _, soon = planned(Stream({"a": list(AT_TIP)}), **{"lease.lingerMs": "0"})
    _, tip = planned(Stream({"a": list(AT_TIP)}))
    assert tip - soon < 0.2


def test_batch_does_not_wait_for_an_unreadable_shard(planned: Planned) -> None:
    stream = Stream({"a": list(BEHIND)})

    class LateAfterOne(Counter[str]):
        """A stream that responds to the first read, and to none after it."""

        def __getitem__(self, _shard: str) -> int:
            return int(stream.readings > 1)

    _, soon = planned(Stream({"a": list(BEHIND)}), **{"lease.lingerMs": "0"})
    stream.late = LateAfterOne()
    rows, failing = planned(stream)
    assert (rows, failing - soon < 0.5) == (10, True)
