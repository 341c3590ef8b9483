"""The records of a Spark sink are dispatched once, in any sequence of attempts, crashes, reshards and restarts."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import count
from operator import mul
from typing import Any, cast

import pytest
from attrs import define, evolve, field
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from leasehold.adapters.sources.deduplication import (
    MAX_BATCHES_BEHIND,
    MAX_EDITIONS,
    MAX_PARTS,
    MAX_QUERIES,
    MAX_RUNS,
    SeenRows,
    Tag,
    Trail,
    merge_parent_tokens,
    parse_tags,
    strip_seen_rows,
)
from leasehold.balancer.model import SHARD_END, TRIM_HORIZON, Lease, Position

KEYS = 8
WIDTH = 2**128 // KEYS
PARTS_PER_BATCH, ROWS = 2, 6


@define(eq=False)
class Shard:
    """A shard of the stream, and the state of its reader: what it has dispatched so far, and up to the checkpoint.

    first, last  the range of the shard's keys
    """

    name: str
    first: int
    last: int
    parents: list["Shard"] = field(factory=list)
    records: list[tuple[Tag, int]] = field(factory=list)
    closed: bool = False
    read: int = 0
    handed: list[tuple[Tag, int]] = field(factory=list)
    seen: SeenRows | None = None
    checkpoint: Position = TRIM_HORIZON
    stored: tuple[int, int] = (0, 0)

    def takes(self, key: int) -> bool:
        """Return whether the key belongs to the shard."""
        return self.first <= key <= self.last

    @property
    def done(self) -> bool:
        """Whether the shard was read to its end."""
        return self.closed and self.checkpoint.ended

    @property
    def span(self) -> tuple[int, int]:
        return self.first * WIDTH, (self.last + 1) * WIDTH - 1

    def lease(self) -> Lease:
        """Return the lease of the shard as the table stores it."""
        return Lease(self.name, checkpoint=self.checkpoint, hash_range=self.span)


@define(eq=False)
class Attempt:
    """A Spark task that writes the rows of a part, in order, and sends each row again until it is acknowledged."""

    tags: list[Tag]
    keys: list[int]
    acknowledged_rows: set[int] = field(factory=set)

    def unit(self, shard: Shard, limit: int) -> list[int]:
        """Return the next rows, at most `limit`, for a shard that this attempt believes to be open."""
        return [
            row for row in range(len(self.tags)) if row not in self.acknowledged_rows and shard.takes(self.keys[row])
        ][:limit]

    @property
    def complete(self) -> bool:
        """Whether all rows are written and acknowledged."""
        return len(self.acknowledged_rows) == len(self.tags)


def is_restored_run(runs: dict[int, Any], tag: Tag) -> bool:
    """Return whether a run that is new to the reader is at an earlier batch than other runs (R3)."""
    return tag.run not in runs and any(run.batch > tag.batch for run in runs.values())


class SinksAndReaders(RuleBasedStateMachine):
    """A query that writes to a stream, and the readers of the stream."""

    @initialize()
    def begins(self) -> None:
        """Start with two shards and the first batch."""
        self.shards, self.names = [Shard("s0", 0, 3), Shard("s1", 4, KEYS - 1)], count(2)
        self.run, self.batch, self.editions = 1, 0, count()
        self.attempts: list[Attempt] = []  # of all batches, because some attempts outlive their batch
        self.written: dict[tuple[int, str], set[str]] = {}  # the editions of each part of each batch
        self.whole: dict[tuple[int, str], Attempt] = {}
        self.late: list[list[tuple[Tag, int]]] = []
        self.duplicates_allowed = False
        self._begin_batch()

    def _begin_batch(self) -> None:
        for part in range(PARTS_PER_BATCH):
            edition = str(next(self.editions))
            keys = [(self.batch * 3 + part * 5 + row * 3) % KEYS for row in range(ROWS)]
            self._attempt(str(part), edition, keys)

    def _attempt(self, part: str, edition: str, keys: list[int]) -> None:
        tags = [Tag("q", self.run, self.batch, part, edition, row) for row in range(ROWS)]
        self.attempts.append(Attempt(tags, keys))
        self.written.setdefault((self.batch, part), set()).add(edition)

    def _open(self, draw: st.DataObject) -> Shard:
        return draw.draw(st.sampled_from([shard for shard in self.shards if not shard.closed]))

    @rule(draw=st.data(), most=st.integers(1, 4), outcome=st.sampled_from(["acked", "unknown", "late"]))
    def sends(self, draw: st.DataObject, most: int, outcome: str) -> None:
        """Write a unit. It is acknowledged, its response is lost, or it arrives only after the next units.

        The writer may not know that the target shard was split or merged.
        """
        attempt, target_shard = draw.draw(st.sampled_from(self.attempts)), draw.draw(st.sampled_from(self.shards))
        unit = attempt.unit(target_shard, most)
        records = [(attempt.tags[row]._replace(span=target_shard.span), attempt.keys[row]) for row in unit]
        if outcome == "late" or not records:
            self.late.append(records)
            return
        (shard,) = (
            open_shard for open_shard in self.shards if not open_shard.closed and open_shard.takes(records[0][1])
        )
        shard.records += [(tag, key) for tag, key in records if shard.takes(key)]
        if outcome == "acked" and all(shard.takes(key) for _, key in records):
            attempt.acknowledged_rows.update(unit)

    @precondition(lambda self: any(self.late))
    @rule(draw=st.data())
    def write_late_unit(self, draw: st.DataObject) -> None:
        """Write a unit whose writer has stopped waiting.

        Each shard stores only its own records of a misplaced aggregate.
        """
        records = self.late.pop(draw.draw(st.integers(0, len(self.late) - 1)))
        for shard in self.shards:
            if records and not shard.closed and shard.takes(records[0][1]):
                shard.records += [(tag, key) for tag, key in records if shard.takes(key)]

    @rule(draw=st.data())
    def another_attempt(self, draw: st.DataObject) -> None:
        """Run a task again with the same rows, after the first attempt or concurrently with it, as Spark may do."""
        former_attempt = draw.draw(st.sampled_from(self.attempts))
        if former_attempt.tags[0].batch == self.batch:
            self._attempt(former_attempt.tags[0].part, former_attempt.tags[0].edition, former_attempt.keys)

    @rule()
    def another_run(self) -> None:
        """Kill the query, and restart it with the same rows. Tasks of the former run may continue for a while."""
        self.run += 1
        attempts_by_part = {
            attempt.tags[0].part: attempt for attempt in self.attempts if attempt.tags[0].batch == self.batch
        }
        for part, attempt in attempts_by_part.items():
            self._attempt(part, attempt.tags[0].edition, attempt.keys)

    @rule(draw=st.data())
    def other_rows(self, draw: st.DataObject) -> None:
        """Run a task again with its rows in another order, which creates another edition."""
        former_attempt = draw.draw(st.sampled_from(self.attempts))
        if (
            former_attempt.tags[0].batch == self.batch
            and len(self.written[self.batch, former_attempt.tags[0].part]) < MAX_EDITIONS
        ):
            self._attempt(former_attempt.tags[0].part, str(next(self.editions)), former_attempt.keys[::-1])

    @precondition(lambda self: self.batch < 6)
    @rule()
    def next_batch(self) -> None:
        """Start the next batch if all parts of this one are written completely."""
        complete = {
            attempt.tags[0].part: attempt for attempt in self.attempts if attempt.complete and self._now(attempt)
        }
        if len(complete) == PARTS_PER_BATCH:
            self.whole |= {(self.batch, part): attempt for part, attempt in complete.items()}
            self.batch += 1
            self._begin_batch()

    def _now(self, attempt: Attempt) -> bool:
        return attempt.tags[0].batch == self.batch

    @rule(draw=st.data())
    def splits(self, draw: st.DataObject) -> None:
        shard = self._open(draw)
        if shard.first < shard.last and len(self.shards) < 12:
            middle = (shard.first + shard.last) // 2
            shard.closed = True
            for first, last in ((shard.first, middle), (middle + 1, shard.last)):
                self.shards.append(Shard(f"s{next(self.names)}", first, last, [shard]))

    @rule(draw=st.data())
    def merges(self, draw: st.DataObject) -> None:
        left_shard = self._open(draw)
        right_shard = next(
            (shard for shard in self.shards if not shard.closed and shard.first == left_shard.last + 1), None
        )
        if right_shard is not None and len(self.shards) < 12:
            left_shard.closed = right_shard.closed = True
            self.shards.append(
                Shard(f"s{next(self.names)}", left_shard.first, right_shard.last, [left_shard, right_shard])
            )

    @rule(draw=st.data(), most=st.integers(1, 8))
    def reads(self, draw: st.DataObject, most: int) -> None:
        """Read more records of a shard, if its parents were read to their ends."""
        self._read(draw.draw(st.sampled_from(self.shards)), most)

    def _read(self, shard: Shard, record_limit: int) -> None:
        if shard.done or not all(parent.done for parent in shard.parents):
            return
        if shard.seen is None:
            start = shard.checkpoint
            if start == TRIM_HORIZON:
                start = evolve(
                    start, token=start.token or merge_parent_tokens([parent.lease() for parent in shard.parents])
                )
            shard.seen = SeenRows.of(start)
        for tag, key in shard.records[shard.read : shard.read + record_limit]:
            position = Position(str(shard.read + 1 + 1000 * int(shard.name[1:])))
            shard.read += 1
            self.duplicates_allowed |= any(
                is_restored_run(queries.get(tag.query, {}), tag) for _, queries in shard.seen.pieces
            )
            if not shard.seen.check_duplicate(tag, partial(mul, key, WIDTH), position):
                shard.handed.append((tag, key))

    @rule(draw=st.data())
    def checkpoints(self, draw: st.DataObject) -> None:
        """Write a checkpoint after the records that were dispatched."""
        self._checkpoint(draw.draw(st.sampled_from(self.shards)))

    def _checkpoint(self, shard: Shard) -> None:
        if shard.seen is None:
            return
        is_finished = shard.closed and shard.read == len(shard.records)
        sequence = str(shard.read + 1000 * int(shard.name[1:])) if shard.read else "TRIM_HORIZON"
        shard.checkpoint = Position(SHARD_END.sequence if is_finished else sequence, token=shard.seen.token)
        shard.stored = shard.read, len(shard.handed)

    @rule(draw=st.data())
    def reader_restarts(self, draw: st.DataObject) -> None:
        """Resume at the checkpoint on another worker, and forget the records that were dispatched after it."""
        shard = draw.draw(st.sampled_from(self.shards))
        if not shard.done:
            shard.read, dispatched_count = shard.stored
            del shard.handed[dispatched_count:]
            shard.seen = None

    def teardown(self) -> None:
        """Write the last batch completely, read everything, and check that no row is lost, repeated or out of order."""
        for number in range(PARTS_PER_BATCH):
            attempt = next(
                candidate
                for candidate in reversed(self.attempts)
                if self._now(candidate) and candidate.tags[0].part == str(number)
            )
            for shard in self.shards:
                if not shard.closed:
                    unit = attempt.unit(shard, ROWS)
                    shard.records += [(attempt.tags[row]._replace(span=shard.span), attempt.keys[row]) for row in unit]
                    attempt.acknowledged_rows.update(unit)
            self.whole[self.batch, str(number)] = attempt
        for shard in self.shards:  # Parents come before their children.
            self._read(shard, len(shard.records))
            self._checkpoint(shard)
        dispatched_rows = [candidate for shard in self.shards for candidate in shard.handed]
        dispatch_counts = Counter((tag.batch, tag.part, tag.edition, tag.row) for tag, _ in dispatched_rows)
        for (batch, part), attempt in self.whole.items():
            for tag in attempt.tags:
                assert dispatch_counts[batch, part, tag.edition, tag.row] >= 1, f"{tag} is lost"
        assert self.duplicates_allowed or max(dispatch_counts.values(), default=1) == 1, (
            f"had twice: {dispatch_counts.most_common(3)}"
        )
        for key in range(KEYS if not self.duplicates_allowed else 0):
            order = [(tag.context, tag.batch, tag.row) for tag, shard_key in dispatched_rows if shard_key == key]
            for part_context in {context.split(b".", 2)[2] for context, _, _ in order}:
                rows = [row for context, _, row in order if context.endswith(part_context)]
                assert rows == sorted(rows), f"key {key} out of order: {order}"


TestSinksAndReaders = SinksAndReaders.TestCase


def test_short_tag_has_the_context_of_the_previous_record() -> None:
    """Within an aggregate, a record may have a short tag with only a row number."""
    first_tag = Tag("q", 1, 2, "0-0", "e", 7)
    tag_bytes = [b"8", first_tag.context + b".7", b"8", b"", b"9", b"x.1.2.0.e.5.a-ff"]
    assert parse_tags(tag_bytes) == [
        None,
        first_tag,
        first_tag._replace(row=8),
        None,
        None,
        Tag("x", 1, 2, "0", "e", 5, (10, 255)),
    ]


def test_token_counts_only_from_its_own_position() -> None:
    """If the lease was reset, or moved by the Java KCL, the token is ignored, so that no record is skipped."""
    seen_rows, tag = SeenRows(), Tag("q", 1, 0, "0", "e", 3)
    assert seen_rows.token == ""
    seen_rows.record_row(tag, Position("50", 2))
    assert SeenRows.of(Position("50", 2, seen_rows.token)) == seen_rows
    assert SeenRows.of(Position("70", token=seen_rows.token)).check_duplicate(tag, lambda: 0, Position("71"))
    assert not SeenRows.of(Position("50", 1, seen_rows.token))
    assert not SeenRows.of(Position("TRIM_HORIZON", token=seen_rows.token))
    for damaged_token in (
        "had1",
        "had1 x.y q,1,2",
        "had1 5.0 q",
        "had1 5.0 5@q,1,0",
        "had2 5.0 q,1,0",
        "5 had1 1.0 q,1,0,a=b",
    ):
        assert not SeenRows.of(Position("99", token=damaged_token))


@pytest.mark.parametrize("run", [200, 50], ids=["later by number", "earlier by number"])
def test_rows_of_a_restored_query_are_kept_with_a_warning(run: int, caplog: pytest.LogCaptureFixture) -> None:
    """If a query was restored from an older checkpoint, its rows are kept whatever the number of its run."""
    seen_rows = SeenRows()
    seen_rows.record_row(Tag("q", 100, 9, "0", "e", 3), Position("1"))
    assert seen_rows.check_duplicate(
        Tag("q", 100, 8, "0", "other", 0), lambda: 0, Position("2")
    )  # This row comes from a task that outlived its batch.
    assert not caplog.records
    assert not seen_rows.check_duplicate(Tag("q", run, 8, "0", "other", 0), lambda: 0, Position("3"))
    assert not seen_rows.check_duplicate(Tag("q", run, 9, "0", "e", 3), lambda: 0, Position("4"))
    warning = f"query q: run {run} writes batch 8 although another run was at 9: all its rows are kept, perhaps twice"
    assert [record.getMessage() for record in caplog.records] == [warning]


def test_possible_duplicates_are_counted_once() -> None:
    """The count shows how many duplicates the restored query may have caused."""
    seen_rows = SeenRows()
    seen_rows.record_row(Tag("q", 100, 9, "0", "e", 3), Position("1"))
    tags = [Tag("q", 200, batch, "0", "other", 0) for batch in (8, 8, 9, 10)]
    results_on_copies = [seen_rows.copy().check_duplicate(tag, lambda: 0, Position("2")) for tag in tags]
    duplicates = [
        seen_rows.check_duplicate(tag, lambda: 0, Position(str(number))) for number, tag in enumerate(tags, 3)
    ]
    assert (results_on_copies, duplicates) == ([False] * 4, [False, True, False, False])
    assert (
        seen_rows.copy().take_possible_duplicates(),
        seen_rows.take_possible_duplicates(),
        seen_rows.take_possible_duplicates(),
    ) == (2, 2, 0)


LIVE = st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.booleans()), max_size=40)
"""The steps: which of three runs writes next, whether it begins a batch first, and whether other runs have that row.
"""


@given(LIVE)
@example([(0, False, False), (1, False, False), (1, True, False), (0, False, False)])
def test_rows_of_concurrent_runs_are_all_kept(steps: list[tuple[int, bool, bool]]) -> None:
    """A row is dropped only if the same row of the same batch was read before."""
    history, batches, rows, seen_rows = SeenRows(), [3, 3, 4], [0, 0, 0], set[tuple[int, str, int]]()
    for number, (run, starts_batch, is_shared) in enumerate(steps, 1):
        if starts_batch:
            batches[run], rows[run] = batches[run] + 1, 0
        edition = "shared" if is_shared else f"of {run}"
        tag = Tag("q", run, batches[run], "0", edition, rows[run])
        rows[run] += 1
        if history.check_duplicate(tag, lambda: 0, Position(str(number))):
            assert any((tag.batch, edition, row) in seen_rows for row in range(tag.row, len(steps)))
        seen_rows.add((tag.batch, edition, tag.row))
        if number % 3 == 0:
            history = SeenRows.of(Position(str(number), token=history.token))


def test_rows_of_a_former_run_are_dropped_once_rewritten() -> None:
    """The rows of a task that outlives its run are dropped, even after the next run has begun another batch."""
    seen_rows, former_tag, later_tag = SeenRows(), Tag("q", 7, 4, "0", "e", 0), Tag("q", 3, 4, "0", "e", 0)
    assert not seen_rows.check_duplicate(former_tag, lambda: 0, Position("1"))
    assert seen_rows.check_duplicate(later_tag, lambda: 0, Position("2"))
    assert not seen_rows.check_duplicate(later_tag._replace(row=1), lambda: 0, Position("3"))
    assert not seen_rows.check_duplicate(later_tag._replace(batch=5), lambda: 0, Position("4"))
    seen_rows = SeenRows.of(Position("4", token=seen_rows.token))
    assert seen_rows.check_duplicate(former_tag._replace(row=1), lambda: 0, Position("5"))
    assert not seen_rows.check_duplicate(former_tag._replace(row=2), lambda: 0, Position("6"))


def test_run_keeps_its_highest_row_when_another_run_begins_a_batch() -> None:
    seen_rows = SeenRows()
    for run, batch, row in ((7, 4, 2), (3, 4, 5), (7, 5, 0)):
        seen_rows.record_row(Tag("q", run, batch, "0", "e", row), Position("1"))
    assert seen_rows.check_duplicate(Tag("q", 3, 4, "0", "e", 4), lambda: 0, Position("2"))


class ScriptedDraw:
    """A replacement for the `data` strategy of Hypothesis. It returns these values in turn."""

    def __init__(self, *values: object) -> None:
        self._values = iter(values)

    def draw(self, _strategy: object) -> Any:  # noqa: ANN401  any of the values
        return next(self._values)


@pytest.mark.parametrize("first", ["0", "1"])
def test_batch_killed_more_often_than_runs_are_remembered_repeats_nothing(first: str) -> None:
    """The rows of a forgotten run are remembered with the later runs that repeat its batch."""
    machine = SinksAndReaders()
    machine.begins()
    machine.merges(cast("st.DataObject", ScriptedDraw(machine.shards[0])))
    other_part = "1" if first == "0" else "0"
    # Each run writes some rows, and is killed before it gets the response.
    for part, row_count in ((first, 1), *((other_part, row_count) for row_count in range(1, MAX_RUNS + 1))):
        machine.another_run()
        attempt = next(candidate for candidate in reversed(machine.attempts) if candidate.tags[0].part == part)
        machine.sends(cast("st.DataObject", ScriptedDraw(attempt, machine.shards[-1])), row_count, "unknown")
    machine.teardown()
    assert not machine.duplicates_allowed
    assert sum(len(shard.handed) for shard in machine.shards) == PARTS_PER_BATCH * ROWS


def test_rows_of_forgotten_runs_pass_to_their_successors() -> None:
    """If a batch was killed many times, the token still covers the rows of all its runs."""
    seen_rows, runs = SeenRows(), 3 * MAX_RUNS
    tags = [Tag("q", run, 0, str(run), "e", 3) for run in range(runs)]
    assert not any(
        seen_rows.check_duplicate(tag, lambda: 0, Position(str(number))) for number, tag in enumerate(tags, 1)
    )
    seen_rows = SeenRows.of(Position(str(runs), token=seen_rows.token))
    assert len(seen_rows.pieces[0][1]["q"]) == MAX_RUNS
    assert all(
        seen_rows.check_duplicate(tag._replace(run=runs, row=row), lambda: 0, Position("99"))
        for tag in tags
        for row in (0, 3)
    )
    assert not seen_rows.check_duplicate(tags[0]._replace(run=runs, row=4), lambda: 0, Position("100"))


def test_memory_for_deduplication_is_bounded() -> None:
    """The numbers of queries, runs, batches and parts are limited, so that checkpoints stay small with many writers."""
    seen_rows = SeenRows()
    for number in range(MAX_QUERIES + 1):
        seen_rows.record_row(Tag(f"q{number}", 1, 0, "0", "e", 0), Position(str(number)))
    assert not seen_rows.check_duplicate(Tag("q0", 1, 0, "0", "e", 0), lambda: 0, Position("99"))
    assert seen_rows.check_duplicate(Tag(f"q{MAX_QUERIES}", 1, 0, "0", "e", 0), lambda: 0, Position("100"))
    for number in range(MAX_RUNS):
        seen_rows.record_row(Tag("r", number, 0, "0", f"e{number}", 0), Position("100"))
    assert seen_rows.check_duplicate(Tag("r", 9, 0, "0", "e0", 0), lambda: 0, Position("101"))
    seen_rows.record_row(Tag("r", MAX_RUNS, MAX_BATCHES_BEHIND + 1, "0", "e", 0), Position("102"))
    assert not seen_rows.check_duplicate(Tag("r", 9, 0, "0", "e0", 0), lambda: 0, Position("103"))
    for number in range(MAX_PARTS + 1):
        seen_rows.record_row(Tag("q", 1, 0, str(number), "e", 0), Position("200"))
    assert not seen_rows.check_duplicate(Tag("q", 1, 0, "0", "e", 0), lambda: 0, Position("201"))


LIMITED_TAGS: dict[str, tuple[int, Callable[[int, int], Tag]]] = {
    "queries": (MAX_QUERIES, lambda number, row: Tag(f"q{number}", 1, 0, "0", "e", row)),
    "runs": (MAX_RUNS, lambda number, row: Tag("q", number, number, "0", "e", row)),
    "editions": (MAX_EDITIONS, lambda number, row: Tag("q", 1, 0, "0", f"e{number}", row)),
}


@pytest.mark.parametrize(("limit", "tag"), LIMITED_TAGS.values(), ids=LIMITED_TAGS)
def test_state_keeps_the_writers_of_the_latest_rows(limit: int, tag: Callable[[int, int], Tag]) -> None:
    """As many writers as the limit allows are remembered. One more replaces the one that was silent the longest."""
    seen_rows = SeenRows()
    for number in range(limit):
        seen_rows.record_row(tag(number, 0), Position(str(number)))
    seen_rows.record_row(tag(0, 1), Position(str(limit)))

    def remembered() -> list[int]:
        tags = {number: tag(number, 0) for number in range(limit + 1)}
        return [number for number in tags if seen_rows.copy().check_duplicate(tags[number], lambda: 0, Position("99"))]

    assert remembered() == list(range(limit))
    seen_rows.record_row(tag(limit, 0), Position(str(limit + 1)))
    assert remembered() == [0, *range(2, limit + 1)]


def test_state_keeps_exactly_the_permitted_number_of_parts() -> None:
    seen_rows, first_tag = SeenRows(), Tag("q", 1, 0, "0", "e", 0)
    for number in range(MAX_PARTS):
        seen_rows.record_row(first_tag._replace(part=str(number)), Position(str(number)))
    assert seen_rows.copy().check_duplicate(first_tag, lambda: 0, Position("9999"))


def test_run_is_forgotten_only_once_it_is_too_many_batches_behind() -> None:
    seen_rows, tag = SeenRows(), Tag("q", 1, 0, "0", "e", 0)
    seen_rows.record_row(tag, Position("1"))
    for batch, remembered in ((MAX_BATCHES_BEHIND, True), (MAX_BATCHES_BEHIND + 1, False)):
        seen_rows.record_row(tag._replace(run=2, batch=batch), Position(str(batch)))
        assert seen_rows.copy().check_duplicate(tag, lambda: 0, Position("99")) is remembered


@pytest.mark.parametrize(("hash_key", "duplicate"), [(99, False), (100, True), (199, True), (200, False)])
def test_row_is_a_duplicate_only_within_the_span_of_its_writer(hash_key: int, duplicate: bool) -> None:
    seen_rows, tag = SeenRows(), Tag("q", 1, 0, "0", "e", 3, (100, 199))
    seen_rows.record_row(tag, Position("1"))
    assert seen_rows.check_duplicate(tag, lambda: hash_key, Position("2")) is duplicate


def test_token_contains_the_row_that_was_read_last() -> None:
    seen_rows, tags = SeenRows(), [Tag("q", 1, 0, "0", "e", row) for row in range(3)]
    for number, tag in enumerate(tags):
        seen_rows.record_row(tag, Position(str(number)))
        resumed_rows = SeenRows.of(Position(str(number), token=seen_rows.token))
        assert resumed_rows.check_duplicate(tag, lambda: 0, Position("99"))


@pytest.mark.parametrize("known_batch", [True, False])
def test_parents_of_a_merge_are_deduplicated_separately(known_batch: bool) -> None:
    """After a merge, a row is dropped only if it was read from the parent whose range contains the key of the row."""
    parents = list[Lease]()
    for name, row, hash_range in (("a", 9, (0, 99)), ("b", 2, (100, 2**128 - 1))):
        seen_rows = SeenRows()
        seen_rows.record_row(Tag("q", 1, 0, "0", "e", row), Position("5"))
        checkpoint = Position("SHARD_END", token=seen_rows.token)
        parents.append(Lease(name, checkpoint=checkpoint, hash_range=hash_range if known_batch else None))
    child = SeenRows.of(Position("TRIM_HORIZON", token=merge_parent_tokens(parents)))
    tag = Tag("q", 1, 0, "0", "e", 5)
    assert not child.copy().check_duplicate(tag, lambda: 2**127, Position("1"))
    assert child.check_duplicate(tag, lambda: 7, Position("1")) is known_batch


def test_selected_rows_keep_the_dropped_rows_before_them() -> None:
    """Each row is recorded once, with the first selected row that follows it."""
    rows = [((Tag("q", 1, 0, "0", "e", row), Position("5", row)),) for row in range(5)]
    trail = Trail(SeenRows(), rows).select_rows([True, False, None, True, True])
    assert trail.new_rows == [rows[0], rows[1] + rows[2] + rows[3], rows[4]]
    assert trail.starting_at_row(1).token_for_row(1) == trail.token_for_row(2)


def test_delayed_rows_of_one_parent_do_not_affect_the_other() -> None:
    """A delayed row for one parent of a merge is kept even if a later row for the other parent was read before."""
    child = SeenRows()
    assert not child.check_duplicate(Tag("q", 1, 0, "0", "e", 2, (0, 99)), lambda: 7, Position("1"))
    assert not child.check_duplicate(Tag("q", 1, 0, "0", "e", 1, (100, 200)), lambda: 150, Position("2"))
    assert child.check_duplicate(Tag("q", 1, 0, "0", "e", 1, (0, 200)), lambda: 50, Position("3"))
    child = SeenRows.of(Position("9", token=child.token))
    assert child.check_duplicate(Tag("q", 1, 0, "0", "e", 2, (0, 99)), lambda: 7, Position("9"))
    assert not child.check_duplicate(Tag("q", 1, 1, "0", "f", 0, (0, 200)), lambda: 7, Position("10"))
    assert len(child.pieces) == 2  # The previous batch is forgotten for all parents.


@given(st.text(max_size=20).filter(lambda own: "had1 " not in own), st.booleans())
@example("\r", False)
@example("4294967296 ", True)
def test_token_survives_storage_unchanged(own: str, carried: bool) -> None:
    """A checkpoint or a dead letter must not change an offset, even if it ends in white space."""
    seen_rows = SeenRows()
    seen_rows.check_duplicate(Tag("q", 1, 1, "p", "e", 1), lambda: 0, Position("50", 2))
    token = f"{own} {seen_rows.token}" if carried else own
    assert strip_seen_rows(token) == own
    assert bool(SeenRows.of(Position("50", 2, token))) == carried
