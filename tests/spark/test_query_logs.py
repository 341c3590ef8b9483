"""A query reports many shards in one short line, and does not report a shard that is read to its tip as behind."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_stream import Place, Stream
from stolen_leases import steal_lease

from leasehold.adapters.worker import progress
from leasehold.balancer.model import Position


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """Yield a stream of eight shards with one record each."""
    streams = Place(Stream({f"shard-{number}": ["x"] for number in range(8)}), tmp_path / "leases.db")
    yield streams
    streams.close()


def test_many_lost_shards_are_logged_in_a_short_line(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    query = place.query()
    query.until(lambda query: len(query.rows) == 8)
    for shard in place.stream.records:
        steal_lease(query.store, shard)
    loop = query.reader._run._loop  # type: ignore[union-attr]  # noqa: SLF001  what it holds
    query.until(lambda _: not loop._prefetchers)  # noqa: SLF001  likewise
    with caplog.at_level(logging.WARNING):
        loop.commit({shard: Position("1") for shard in place.stream.records})
    listed_shards = ", ".join(f"shard-{number}" for number in range(5))
    assert (
        f"leases were lost to other workers, which write their checkpoints from now on: {listed_shards} and 3 more"
        in caplog.messages
    )


def test_possible_duplicates_are_counted_in_the_progress(place: Place) -> None:
    place.stream.undecided = True
    query = place.query()
    query.until(lambda query: len(query.rows) == len(place.stream.records))
    report: Any = query.reader.reportLatestOffset()
    assert report["undecidedRows"] == len(query.rows)


def test_query_that_has_read_everything_is_not_behind(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SILENT_SECONDS", 0.0)  # from now on, every silence counts
    query = place.query()
    query.reader.prepareForTriggerAvailableNow()
    while query.reader.latestOffset(query.offset, query.reader.getDefaultReadLimit()) != query.offset:
        query.batch()
    report: Any = query.reader.reportLatestOffset()
    assert report == {"shards": 8, "behindMs": 0, "behindMsByShard": {}, "undecidedRows": 0}
