"""A batch grows while shards are behind, but is planned without delay when they are at their tips."""

from collections import Counter
from collections.abc import Callable

import pytest
from fake_stream import KillableStore, Query, Stream
from stepped_loop import Stepped, install_stepped_clock, new_reader

from leasehold.stores.embedded.memory import MemoryStore

Planned = Callable[..., tuple[int, float]]


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Planned:
    """Return a function that plans a first batch, and returns its number of rows and the planning time in seconds."""
    clock = install_stepped_clock(monkeypatch)

    def plan_first_batch(stream: Stream, **options: str) -> tuple[int, float]:
        store, started_at = MemoryStore(), clock.now
        reader = new_reader(stream, KillableStore(store), rereadable=True, flush_on_idle="true", **options)  # type: ignore[arg-type]
        rows = Query(reader, store, KillableStore(store), reader.initialOffset()).batch()
        reader.stop()
        return len(rows), Stepped.clock.now - started_at

    return plan_first_batch


BEHIND, AT_TIP = [str(number) for number in range(4000)], [str(number) for number in range(25)]


def test_batch_grows_while_a_shard_is_behind(planned: Planned) -> None:
    """Each batch has a fixed cost in Spark, so batches should be large when many rows are waiting."""
    rows_without_linger, seconds_without_linger = planned(Stream({"a": list(BEHIND)}), **{"lease.lingerMs": "0"})
    rows_with_linger, seconds_with_linger = planned(Stream({"a": list(BEHIND)}))
    assert (rows_without_linger, rows_with_linger > 100) == (10, True)
    assert 0.9 < seconds_with_linger - seconds_without_linger < 1.2


@pytest.mark.parametrize("name", ["maxRowsPerTrigger", "lease.bufferRows"])
def test_batch_is_planned_once_it_is_full(planned: Planned, name: str) -> None:
    _, seconds_without_linger = planned(Stream({"a": list(BEHIND)}), **{"lease.lingerMs": "0"})
    rows, seconds_until_full = planned(Stream({"a": list(BEHIND)}), **{name: "30"})
    assert (rows, seconds_until_full - seconds_without_linger < 0.5) == (30, True)


def test_batch_does_not_linger_at_the_tip(planned: Planned) -> None:
    _, seconds_without_linger = planned(Stream({"a": list(AT_TIP)}), **{"lease.lingerMs": "0"})
    _, seconds_at_tip = planned(Stream({"a": list(AT_TIP)}))
    assert seconds_at_tip - seconds_without_linger < 0.2


def test_batch_does_not_wait_for_an_unreadable_shard(planned: Planned) -> None:
    stream = Stream({"a": list(BEHIND)})

    class LateAfterOne(Counter[str]):
        """Makes the stream respond to the first read, and to no later one."""

        def __getitem__(self, _shard: str) -> int:
            return int(stream.readings > 1)

    _, seconds_without_linger = planned(Stream({"a": list(BEHIND)}), **{"lease.lingerMs": "0"})
    stream.late = LateAfterOne()
    rows, seconds_with_faults = planned(stream)
    assert (rows, seconds_with_faults - seconds_without_linger < 0.5) == (10, True)
