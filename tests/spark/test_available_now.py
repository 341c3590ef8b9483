"""An available-now query reads and commits all existing records, and ends.

This is tested by a table of cases and by runs.
"""

from collections.abc import Callable
from typing import Any

import pytest
from attrs import define, evolve
from fake_stream import KillableStore, Query, Stream
from stepped_loop import install_stepped_clock, new_reader
from waiters import Clock

from leasehold.adapters.spark.available_now import (
    RETENTION_SILENCE_SECONDS,
    TARGET_MARGIN_SECONDS,
    AvailableNowProgress,
    ShardStatus,
    ShardTip,
    should_flush,
)
from leasehold.balancer.model import Lease, Position, Shard, Version
from leasehold.stores.embedded.memory import MemoryStore
from leasehold.stores.protocol import Done
from leasehold.stores.writes import DeleteLease, RequestLease

ME = "me"
END = Position("SHARD_END")
IDLE, BUSY, WAITING = (
    ShardStatus(is_opened=True, is_idle=True),
    ShardStatus(is_opened=True, is_idle=False),
    ShardStatus(is_opened=False, is_idle=False),
)
Rows = dict[str, Lease]


def rows(*leases: Lease) -> Rows:
    return {lease.key: lease for lease in leases}


def lease(key: str, owner: str | None = None, *parents: str, ended: bool = False) -> Lease:
    return Lease(key, owner=owner, parents=parents, checkpoint=END if ended else Position("TRIM_HORIZON"))


MERGED = ("c", None, "a", "b")
CASES: dict[str, tuple[dict[str, ShardStatus], Rows, dict[str, str]]] = {
    "no lease yet, or the lease table was deleted": ({}, {}, {"(all)": "there are no leases yet"}),
    "one shard is still read": ({"a": BUSY}, rows(lease("a", ME)), {"a": "its end is not reached"}),
    "one shard is read up": ({"a": IDLE}, rows(lease("a", ME)), {}),
    "a lease of ours that is not opened": ({"a": WAITING}, rows(lease("a", ME)), {"a": "it cannot be opened"}),
    "a free lease": ({}, rows(lease("a")), {"a": "nobody owns it"}),
    "a free lease that was read here before": ({"a": IDLE}, rows(lease("a")), {"a": "nobody owns it"}),
    "a finished lease": ({}, rows(lease("a", ended=True)), {}),
    "split, the parent's end is not committed": (
        {"a": IDLE},
        rows(lease("a", ME), lease("c", None, "a"), lease("d", ME, "a")),
        {},
    ),
    "split, the parent is done": (
        {},
        rows(lease("a", ended=True), lease("c", None, "a"), lease("d", ME, "a")),
        {"c": "nobody owns it", "d": "it cannot be opened"},
    ),
    "split, the parent's lease was deleted": ({}, rows(lease("c", None, "a")), {"c": "nobody owns it"}),
    "merge, both parents' ends are not committed": (
        {"a": IDLE, "b": IDLE},
        rows(lease("a", ME), lease("b", ME), lease(*MERGED)),
        {},
    ),
    "merge, one parent's end came in an earlier batch": (
        {"b": IDLE},
        rows(lease("a", ended=True), lease("b", ME), lease(*MERGED)),
        {},
    ),
    "merge, one parent is free": (
        {"b": IDLE},
        rows(lease("a"), lease("b", ME), lease(*MERGED)),
        {"a": "nobody owns it"},
    ),
    "merge, one parent is of an owner that may be dead": (
        {"b": IDLE},
        rows(lease("a", "other"), lease("b", ME), lease(*MERGED)),
        {"a": "other owns it and does not renew it"},
    ),
    "merge, both parents are done": (
        {},
        rows(lease("a", ended=True), lease("b", ended=True), lease(*MERGED)),
        {"c": "nobody owns it"},
    ),
    "merge, the child is held before its parents are done": (
        {"b": IDLE, "c": WAITING},
        rows(lease("a", ended=True), lease("b", ME), lease("c", ME, "a", "b")),
        {},
    ),
}


@pytest.mark.parametrize(("feeds", "leases", "awaited"), CASES.values(), ids=CASES)
def test_shard_is_awaited_only_if_it_can_advance_without_a_commit(
    feeds: dict[str, ShardStatus], leases: Rows, awaited: dict[str, str]
) -> None:
    """A shard that waits for a commit of this query is not awaited (A2 to A4)."""
    assert AvailableNowProgress(ME).find_awaited_shards(feeds, leases) == awaited


def test_shards_of_a_living_owner_and_their_children_are_not_awaited() -> None:
    """If a lease is renewed once, its owner is alive and reads the shard (A3)."""
    run_progress, child = AvailableNowProgress(ME), lease("c", None, "a")
    lease_of_other = lease("a", "other")
    assert run_progress.find_awaited_shards({}, rows(lease_of_other, child)) == {
        "a": "other owns it and does not renew it"
    }
    assert run_progress.find_awaited_shards({}, rows(evolve(lease_of_other, version=Version("2")), child)) == {}
    assert run_progress.find_awaited_shards(
        {}, rows(evolve(lease_of_other, owner=None, version=Version("3")), child)
    ) == {"a": "nobody owns it"}


@pytest.mark.parametrize(
    ("leases", "ended", "awaited"),
    [
        (rows(lease("b", ended=True)), "ab", {"c": "it has no lease yet"}),  # the row of "a" was deleted
        (rows(lease("b", ended=True)), "b", {}),  # another worker reads "a"
        (rows(lease("b", ended=True), lease("d", "other", "c", ended=True)), "ab", {}),  # "c" was read and deleted
        (rows(lease("b", ended=True)), "abc", {}),
    ],
)
def test_child_of_finished_shards_is_awaited(leases: Rows, ended: str, awaited: dict[str, str]) -> None:
    """A child that is listed and has no lease yet must still be read (A5)."""
    listed_shards = (Shard("a"), Shard("b"), Shard("c", parents=("a", "b")))
    assert AvailableNowProgress(ME).find_awaited_shards({}, leases, listed_shards, set(ended)) == awaited


@pytest.mark.parametrize(
    ("awaited", "ended", "handing_off", "on_idle", "due"),
    [
        (True, True, False, False, True),  # a child waits for the end, and other shards are still read
        (True, False, True, False, True),  # a next owner waits, and other shards are still read
        (True, False, False, True, False),  # the commit happens with the next rows
        (False, False, False, True, True),
        (False, False, False, False, False),
        (False, True, False, False, True),
    ],
)
def test_flush_waits_for_no_shard_while_one_awaits_a_commit(
    *, awaited: bool, ended: bool, handing_off: bool, on_idle: bool, due: bool
) -> None:
    """The end of a shard, or a requested lease, is committed as soon as there are no rows to take (A6)."""
    status = {
        "is_awaiting_shards": awaited,
        "has_ended_shard": ended,
        "is_handing_off": handing_off,
        "flushes_when_idle": on_idle,
    }
    assert should_flush(has_uncommitted_rows=True, **status) is due
    assert not should_flush(has_uncommitted_rows=False, **status)


@pytest.mark.parametrize(("closed", "reached"), [(False, True), (True, False)])
def test_closed_shard_is_read_to_its_end_not_its_latest_record(*, closed: bool, reached: bool) -> None:
    """The end of a shard may be found one read after its last record (A1)."""
    tip = ShardTip("a")
    tip.set_target(Position("AT_TIMESTAMP", 5), 1.0)
    tip.update_read_position(Position("9"), 2.0, 0.0, is_closed=closed)
    assert tip.reached is reached
    tip.update_read_position(Position("9"), 12.0, 0.0, is_closed=closed)
    assert tip.reached


def test_shard_is_past_retention_only_after_a_minute_without_records() -> None:
    """The minute begins with the last record, however long ago the target was requested."""
    tip = ShardTip("a", last_record_at=1000.0)
    tip.set_target(Position("9"), 0.0)
    for now, reached in ((1000.0 + RETENTION_SILENCE_SECONDS, False), (1001.0 + RETENTION_SILENCE_SECONDS, True)):
        assert not tip.update_read_position(Position("5"), now, 0.0, is_closed=False)
        assert tip.reached is reached


def test_busy_shard_is_read_past_the_target_by_the_margin() -> None:
    """The lag that a source reports is rounded, so a shard is read a few seconds past the target."""
    tip = ShardTip("a")
    tip.set_target(Position("AT_TIMESTAMP", 5), 100.0)
    for now, reached in ((107.0 + TARGET_MARGIN_SECONDS, False), (108.0 + TARGET_MARGIN_SECONDS, True)):
        tip.update_read_position(Position("9"), now, 7.0, is_closed=False)
        assert tip.reached is reached


def test_target_record_is_reported_once() -> None:
    """A sub-sequence of the target's record before the target does not reach it."""
    tip = ShardTip("a")
    tip.set_target(Position("9", 2), 0.0)
    results = [tip.update_read_position(Position("9", sub), 1.0, 5.0, is_closed=False) for sub in (1, 2, 2, 3)]
    assert results == [False, True, False, False]


def test_renewal_of_one_lease_does_not_count_for_another() -> None:
    """A3 applies to each shard."""
    progress, leases = AvailableNowProgress(ME), rows(lease("a", "other"), lease("b", "dead"))
    progress.find_awaited_shards({}, leases)
    leases["a"] = evolve(leases["a"], version=Version("7"))
    awaited_shards = progress.find_awaited_shards({}, leases)
    assert awaited_shards == {"b": "dead owns it and does not renew it"}


def test_listed_shard_without_parents_or_lease_is_not_awaited() -> None:
    """A shard that was added after the start contains only records for the next run."""
    listed_shards = [Shard("a"), Shard("b")]
    assert AvailableNowProgress(ME).find_awaited_shards({"a": IDLE}, rows(lease("a", ME)), listed_shards) == {}


def texts(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{number}" for number in range(count)]


@define
class AvailableNowRun:
    """One run of an available-now query, on a clock that advances only while Spark asks for a batch."""

    stream: Stream
    store: MemoryStore
    clock: Clock
    flush: str = "true"
    rows: int = 1000

    def run(self, between: Callable[[int], None] = lambda _: None) -> list[str]:
        """Run to the end and return the texts of all rows. `between` is called after each batch with its number."""
        reader = new_reader(
            self.stream,
            KillableStore(self.store),
            rereadable=True,
            flush_on_idle=self.flush,
            maxRowsPerTrigger=str(self.rows),
        )
        reader.prepareForTriggerAvailableNow()
        query = Query(reader, self.store, KillableStore(self.store), reader.initialOffset())
        limit = reader.getDefaultReadLimit()
        while (end := reader.latestOffset(query.offset, limit)) != query.offset:
            if query.offset["n"]:
                reader.commit(query.offset)
            query.run(end)
            query.offset = end
            between(end["n"])
        reader.stop()
        return [text for _, _, text in query.rows]


@pytest.fixture
def nightly(monkeypatch: pytest.MonkeyPatch) -> Callable[..., AvailableNowRun]:
    """Return a function that creates a query over these shards."""

    def create_query(records: dict[str, list[str]], **fields: Any) -> AvailableNowRun:  # noqa: ANN401  as fields have it
        return AvailableNowRun(Stream(records), MemoryStore(), install_stepped_clock(monkeypatch), **fields)

    return create_query


LAYOUTS = {
    "split": [("split", "a", "c", "d")],
    "merge": [("merge", "c", "a", "b")],
    "merge of the halves of a split": [("split", "a", "c", "d"), ("merge", "e", "c", "d")],
    "split of a merged shard": [("merge", "c", "a", "b"), ("split", "c", "d", "e")],
}


@pytest.mark.parametrize("flush", ["true", "false"])
@pytest.mark.parametrize("rows", [7, 20, 1000])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_run_reads_parents_and_children_to_their_ends(
    nightly: Callable[..., AvailableNowRun], layout: list[tuple[str, ...]], rows: int, flush: str
) -> None:
    """A run reads all shards, parents first, and finishes their leases, whatever was resharded before."""
    query = nightly({"a": texts("a", 25), "b": texts("b", 15)}, rows=rows, flush=flush)
    for method, *shards in layout:
        getattr(query.stream, method)(*shards)
    for shard, records in query.stream.records.items():
        records.extend(texts(shard, 5) if shard not in "ab" else [])
    texts_read = query.run()
    assert sorted(texts_read) == sorted(text for records in query.stream.records.values() for text in records)
    leases = {lease.key: lease for lease in query.store.list().leases}
    assert {key for key, lease in leases.items() if lease.ended} == set(query.stream.children) & set(leases)


def test_run_continues_after_its_lease_table_is_deleted(nightly: Callable[..., AvailableNowRun]) -> None:
    """The leases of ended parents are created again, and no record is read twice."""
    query = nightly({"a": texts("a", 25), "b": texts("b", 15)}, rows=20)
    query.stream.merge("c", "a", "b")
    query.stream.put("c", *texts("c", 5))
    deleted_keys = list[str]()

    def delete_leases(_: int) -> None:
        leases = query.store.list().leases
        if not deleted_keys and any(row.ended for row in leases):
            deleted_keys.extend(row.key for row in leases if isinstance(query.store.write(DeleteLease(row)), Done))

    assert sorted(query.run(delete_leases)) == sorted(
        text for texts_of_shard in query.stream.records.values() for text in texts_of_shard
    )
    assert deleted_keys


def test_requested_lease_is_handed_off_during_a_run(nightly: Callable[..., AvailableNowRun]) -> None:
    """A hand-off waits for a commit. The run makes this commit, and ends."""
    query = nightly({"a": texts("a", 45), "b": texts("b", 5)}, rows=5, flush="false")
    requests = list[str]()

    def request_lease(_: int) -> None:
        held_lease = query.store.get(["a"])[0]
        if not requests and held_lease.checkpoint.numbered:
            assert isinstance(query.store.write(RequestLease(held_lease, "other")), Done)
            requests.append(held_lease.key)

    # The other worker never renews the lease, so the query takes it back.
    assert sorted(query.run(request_lease)) == sorted(texts("a", 45) + texts("b", 5))
    assert requests
