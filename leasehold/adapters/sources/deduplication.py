"""Finds duplicates among records written by leasehold's Spark sinks, using the tag that a sink adds to each record.

Spark writes each batch of a query in several tasks. A task numbers its rows and sends them in order. A row is sent
again if a request had no response, if Spark repeats the task, or if the query is restarted. So the stream may contain a
row more than once. The tag of a record identifies its row:

    query    Spark's id of the query, stored in its checkpointLocation; for a batch job, an id or name of its own
    run      a number for one run of the query, from start to stop; later runs may have lower numbers
    batch    the number of the batch; for a batch job, 0 or the number that was given with its name
    part     the task's partition of the batch, and the section of that partition
    edition  a digest of all rows of the section, so that attempts with the same edition write the same rows
    row      the number of the row within the part
    span     the hash range of the intended shard, which may be split or merged before the record arrives

A writer guarantees the following, even if records are lost, rejected or late, or the stream is resharded:

W1. Before a row is sent, all rows of the same attempt that have lower numbers and a hash key in the row's span are
    known to be written. There is no such guarantee for other hash keys. After a merge, for example, rows on their way
    to one parent may arrive before lower-numbered rows that wait for the other parent.
W2. A batch starts only after every part of the previous batch is known to be completely written.

Each run of a query continues where the previous run ended, unless the user has restored an older Spark checkpoint.
Several runs of a query may write at the same time: the tasks of a stopped run continue for a while, and a user can copy
a checkpointLocation.

For each run, a reader keeps the current batch and the highest row number of each part and edition (`SeenRows`).

R1. A row is a duplicate if the reader has already read a row of the same part and edition whose number is equal or
    higher, whose span includes the hash key, and whose run is now at the same batch. By W1, the attempt that wrote that
    row had already written all lower-numbered rows with this hash key. Attempts of one edition have the same rows.
R2. A row is a duplicate if its batch is lower than the current batch of its run (by W2). When a run starts its next
    batch or is forgotten, the rows of its old batch are copied to the other runs that are at that batch.
R3. Any other row is new. If a part appears with another edition, its rows cannot be compared with the rows read before.
    They are kept, perhaps twice, so that no row is lost because a different row had the same number.
    If a run is new to the reader and its batch is lower than that of other runs, there are two possible reasons. Either
    the user has restored an older checkpoint and wants the rows again, or these are late duplicates of rows that were
    read before. We cannot tell which, so the rows are kept, a warning is logged, and the state of later batches is
    dropped.
R4. A child shard starts with the state of its parents. Each of its hash keys has the state of the parent that contained
    it.

The size of the state is limited. It contains one batch for each of the last `MAX_RUNS` runs of each of the last
`MAX_QUERIES` queries. If a run is more than `MAX_BATCHES_BEHIND` batches behind another run, its state is dropped. The
state depends only on the records that were read. So a reader that resumes from a checkpoint or offset has the same
state, and reading a batch again has the same result.

The state is stored in `Position.token`, so it is part of every checkpoint, hand-off and offset. It contains the
position of the record that changed it last, because a checkpoint written by other software leaves an old token in the
lease's row. If the checkpoint is later than this position, the state is still valid but detects fewer duplicates. If
the checkpoint was reset to an earlier position, the state is ignored.
"""

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import NamedTuple, Self

from attrs import define, field

from leasehold.balancer.model import HASH_KEYS, TRIM_HORIZON, HashRange, Lease, Position
from leasehold.stores.printable import make_safe_logger

log = make_safe_logger(logging.getLogger("leasehold.sources"))

MAX_QUERIES, MAX_RUNS, MAX_PARTS, MAX_EDITIONS = 16, 4, 4096, 4
"""The maximum number of queries per shard, runs per query, parts per batch and editions per part in the state."""
MAX_BATCHES_BEHIND = 16
"""If a run is more than this many batches behind another run of the same query, its state is dropped."""


class Tag(NamedTuple):
    """Identifies a row."""

    query: str
    run: int
    batch: int
    part: str
    edition: str
    row: int
    span: HashRange = HASH_KEYS

    @property
    def context(self) -> bytes:
        """The tag without row and span, in the form that is written into a record."""
        return f"{self.query}.{self.run}.{self.batch}.{self.part}.{self.edition}".encode()


_NAME_PATTERN = r"[A-Za-z0-9_-]{1,40}"
_TAG_TEXT_PATTERN = (
    rf"({_NAME_PATTERN})\.(\d{{1,12}})\.(\d{{1,19}})\.({_NAME_PATTERN})\.({_NAME_PATTERN})\.(\d{{1,15}})"
)
_TAG_PATTERN = re.compile(rf"{_TAG_TEXT_PATTERN}(?:\.([0-9a-f]{{1,32}})-([0-9a-f]{{1,32}}))?".encode())
_ROW_PATTERN = re.compile(rb"\d{1,15}")


def parse_tags(values: Iterable[bytes]) -> list[Tag | None]:
    """Return the tags of an aggregate's records, in order.

    If a value is only a row number, the context and span of the previous record's tag apply. A value that is not the
    tag of a Spark sink becomes None. A record without a tag is never treated as a duplicate.
    """
    tags, previous_tag = list[Tag | None](), None
    for value in values:
        if (match := _TAG_PATTERN.fullmatch(value)) is not None:
            query, run, batch, part, edition, row, span_first, span_last = (
                group.decode() for group in match.groups(b"")
            )
            span = (int(span_first, 16), int(span_last, 16)) if span_first else HASH_KEYS
            previous_tag = Tag(query, int(run), int(batch), part, edition, int(row), span)
        elif previous_tag is None or _ROW_PATTERN.fullmatch(value) is None:
            previous_tag = None
        else:
            previous_tag = previous_tag._replace(row=int(value))
        tags.append(previous_tag)
    return tags


@define
class _WritingRun:
    """The current batch of a run, and the highest row number of each part and edition in it."""

    batch: int
    parts: dict[str, dict[str, int]] = field(factory=dict)

    def contains_row(self, tag: Tag) -> bool:
        return tag.batch == self.batch and tag.row <= self.parts.get(tag.part, {}).get(tag.edition, -1)

    def add_row(self, part: str, edition: str, row: int) -> None:
        editions = self.parts.setdefault(part, {})
        editions[edition] = max(row, editions.pop(edition, -1))
        for entries, limit in ((editions, MAX_EDITIONS), (self.parts, MAX_PARTS)):
            if len(entries) > limit:
                del entries[next(iter(entries))]

    def merge_rows_into(self, other_runs: Iterable["_WritingRun"]) -> None:
        """Copy the rows of this run to the other runs at the same batch. Call this before dropping the rows."""
        for other_run in other_runs:
            if other_run.batch == self.batch:
                for part, editions in self.parts.items():
                    for edition, row in editions.items():
                        other_run.add_row(part, edition, row)

    def copy(self) -> "_WritingRun":
        return _WritingRun(self.batch, {part: dict(editions) for part, editions in self.parts.items()})


_WritingRuns = dict[int, _WritingRun]
"""The runs of a query by number. The run that wrote most recently comes last."""
_Queries = dict[str, _WritingRuns]
"""The queries by name. The query that wrote most recently comes last."""


def _is_duplicate(runs: _WritingRuns, tag: Tag) -> bool:
    run_of_tag = runs.get(tag.run)
    if run_of_tag is not None and (tag.batch < run_of_tag.batch or run_of_tag.contains_row(tag)):  # R2, R1
        return True
    return (run_of_tag is None or len(runs) > 1) and any(run.contains_row(tag) for run in runs.values())  # R1


def _record_row(runs: _WritingRuns, tag: Tag, *, is_in_span: bool) -> None:
    """Record a row for one piece of the hash key space. `is_in_span` is true if the row's span includes that piece."""
    run_of_tag = runs.get(tag.run)
    if run_of_tag is None:
        for number in [number for number, run in runs.items() if run.batch > tag.batch]:
            del runs[number]  # R3
        run_of_tag = _WritingRun(tag.batch)
    elif tag.batch > run_of_tag.batch:
        run_of_tag.merge_rows_into(run for run in runs.values() if run is not run_of_tag)
        run_of_tag.batch, run_of_tag.parts = tag.batch, {}
    if is_in_span and run_of_tag.batch == tag.batch:
        run_of_tag.add_row(tag.part, tag.edition, tag.row)
    if len(runs) > 1 or tag.run not in runs:
        runs.pop(tag.run, None)
        for number in [number for number, run in runs.items() if run.batch + MAX_BATCHES_BEHIND < run_of_tag.batch]:
            del runs[number]
        runs[tag.run] = run_of_tag
        if len(runs) > MAX_RUNS:
            runs.pop(next(iter(runs))).merge_rows_into(runs.values())


@define
class SeenRows:
    """The rows of each query that a shard's reader has read, kept separately for each piece of the hash key space.

    `SeenRows` also counts the rows that may be duplicates but cannot be dropped safely (R3). These are the rows of a
    new run whose batch is not higher than the highest batch of the other runs.

    Attributes:
        pieces: The last hash key of each piece, in ascending order, with the queries whose rows were read there.
        position: The position of the record that changed the state last.
    """

    pieces: list[tuple[int, _Queries]] = field(factory=lambda: [(HASH_KEYS[1], {})])
    position: Position | None = None
    _token: str | None = field(default=None, eq=False)
    _undecided_until: dict[tuple[str, int], int] = field(factory=dict, eq=False)
    _possible_duplicates: int = field(default=0, eq=False)

    def __bool__(self) -> bool:
        return any(queries for _, queries in self.pieces)

    def check_duplicate(self, tag: Tag, hash_key: Callable[[], int], position: Position) -> bool:
        """Return whether the record with this tag is a duplicate. If it is not, remember that its row was read.

        Args:
            tag: The tag of the record.
            hash_key: Returns the hash key of the record.
            position: The position of the record.
        """
        queries = self.pieces[0][1]
        if len(self.pieces) > 1:
            hash_key_number = hash_key()
            queries = next(piece_queries for last_key, piece_queries in self.pieces if hash_key_number <= last_key)
        runs = queries.get(tag.query)
        if runs and _is_duplicate(runs, tag):
            return True
        if runs and tag.run not in runs and (latest_batch := max(run.batch for run in runs.values())) > tag.batch:
            message = (
                "query %s: run %d writes batch %d although another run was at %d: all its rows are kept, perhaps twice"
            )
            log.warning(message, tag.query, tag.run, tag.batch, latest_batch)
            self._undecided_until = {**self._undecided_until, (tag.query, tag.run): latest_batch}
        if self._undecided_until and tag.batch <= self._undecided_until.get((tag.query, tag.run), -1):
            self._possible_duplicates += 1
        self.record_row(tag, position)
        return False

    def take_possible_duplicates(self) -> int:
        """Return how many possible duplicates were kept since the last call."""
        possible_duplicates, self._possible_duplicates = self._possible_duplicates, 0
        return possible_duplicates

    def record_row(self, tag: Tag, position: Position) -> None:
        """Record a new row's number for the hash keys in its span (W1), and its batch for all hash keys (W2)."""
        self.position, self._token = position, None
        span_first, span_last = tag.span
        for last_key in (span_first - 1, span_last):
            self._split_at(last_key)
        for last_key, queries in self.pieces:
            runs = queries.pop(tag.query, None) or {}
            # The pieces were split at both ends of the span, so each lies entirely inside or entirely outside it.
            _record_row(runs, tag, is_in_span=span_first <= last_key <= span_last)
            queries[tag.query] = runs
            if len(queries) > MAX_QUERIES:
                del queries[next(iter(queries))]
        if len(self.pieces) > 1:
            merged_pieces = self.pieces[-1:]
            for piece in reversed(self.pieces[:-1]):
                if piece[1] != merged_pieces[0][1]:
                    merged_pieces.insert(0, piece)
            self.pieces = merged_pieces

    def _split_at(self, last_key: int) -> None:
        """Split the piece that contains this hash key, so that one piece ends with it."""
        for index, (piece_end, queries) in enumerate(self.pieces):
            if last_key < 0 or last_key == piece_end:
                return
            if last_key < piece_end:
                self.pieces.insert(index, (last_key, _copy_queries(queries)))
                return

    def copy(self) -> Self:
        """Return an independent copy."""
        copied_pieces = [(last_key, _copy_queries(queries)) for last_key, queries in self.pieces]
        return type(self)(copied_pieces, self.position, self._token, self._undecided_until, self._possible_duplicates)

    @property
    def token(self) -> str:
        """The token that contains this state, or "" if no record had a tag."""
        if self._token is None:
            self._token = ""
            if self.position is not None and self:
                pieces = [
                    ("" if last_key == HASH_KEYS[1] else f"{last_key:x}@") + _queries_to_text(queries)
                    for last_key, queries in self.pieces
                ]
                self._token = f"{_STATE_PREFIX} {self.position.sequence}.{self.position.sub} {' '.join(pieces)}"
        return self._token

    @classmethod
    def of(cls, start: Position) -> Self:
        """Return the state with which a reader begins at `start`.

        The state is empty if the token contains no state, or if it contains the state of a later position.
        """
        _, separator, encoded_state = start.token.partition(f"{_STATE_PREFIX} ")
        if not separator:
            return cls()
        encoded_position, *pieces = encoded_state.split(" ")
        sequence, _, encoded_sub = encoded_position.partition(".")
        parsed_pieces = list[tuple[int, _Queries]]()
        try:
            for piece in pieces:
                last_key, has_bound, encoded_queries = piece.rpartition("@")
                parsed_pieces.append(
                    (int(last_key, 16) if has_bound else HASH_KEYS[1], _parse_queries(encoded_queries))
                )
            position = Position(sequence, int(encoded_sub))
        except ValueError:
            return cls()
        is_complete = [last_key for last_key, _ in parsed_pieces] == sorted(
            {last_key for last_key, _ in parsed_pieces} | {HASH_KEYS[1]}
        )
        return cls(parsed_pieces, position) if is_complete and position.order <= start.order else cls()


_STATE_PREFIX = "had1"


def strip_seen_rows(token: str) -> str:
    """Return the part of a token that belongs to the source itself: the offset for Event Hubs, "" for Kinesis."""
    source_token, separator, _ = token.partition(f"{_STATE_PREFIX} ")
    # Remove only the one space between the two parts, because the service's offset may itself end with spaces.
    return source_token.removesuffix(" ") if separator else token


def _copy_queries(queries: _Queries) -> _Queries:
    return {name: {number: run.copy() for number, run in runs.items()} for name, runs in queries.items()}


def _queries_to_text(queries: _Queries) -> str:
    return ";".join(_run_to_text(name, number, run) for name, runs in queries.items() for number, run in runs.items())


def _run_to_text(name: str, number: int, run: _WritingRun) -> str:
    formatted_parts = (
        f"{part}={edition}={row}" for part, editions in run.parts.items() for edition, row in editions.items()
    )
    return ",".join((name, str(number), str(run.batch), *formatted_parts))


def _parse_queries(text: str) -> _Queries:
    queries = _Queries()
    for run in filter(None, text.split(";")):
        name, number, batch, *rows = run.split(",")
        rows_by_part = dict[str, dict[str, int]]()
        for part, edition, row in (entry.split("=") for entry in rows):
            rows_by_part.setdefault(part, {})[edition] = int(row)
        queries.setdefault(name, {})[int(number)] = _WritingRun(int(batch), rows_by_part)
    return queries


def merge_parent_tokens(parents: Sequence[Lease]) -> str:
    """Return the token with which the child of these shards starts (R4), or "" if they have no state.

    With two parents, the token is also "" if the hash range of one of them is unknown.
    """
    parent_states = [(lease.hash_range, SeenRows.of(lease.checkpoint)) for lease in parents if lease.ended]
    if not any(state for _, state in parent_states):
        return ""
    # Use TRIM_HORIZON as the state's position, so that the state is valid for all records of the child shard.
    if len(parent_states) == 1:
        return SeenRows(parent_states[0][1].pieces, TRIM_HORIZON).token
    states_by_range: list[tuple[HashRange, SeenRows]] = sorted(
        ((hash_range, state) for hash_range, state in parent_states if hash_range), key=lambda pair: pair[0]
    )
    if len(states_by_range) < len(parent_states):
        return ""
    pieces = list[tuple[int, _Queries]]()
    for (_, parent_last_key), state in states_by_range:
        pieces += [
            (min(piece_end, parent_last_key), queries)
            for piece_end, queries in state.pieces
            if not pieces or piece_end > pieces[-1][0]
        ]
        # Drop the pieces that lie entirely beyond this parent's keys.
        while len(pieces) > 1 and pieces[-2][0] >= pieces[-1][0]:
            pieces.pop()
    pieces[-1] = (HASH_KEYS[1], pieces[-1][1])
    return SeenRows(pieces, TRIM_HORIZON).token


NewRow = tuple[Tag, Position]
"""A new record's tag and position."""


class Trail(NamedTuple):
    """The state of `SeenRows` after each row of a sequence.

    Attributes:
        before: The state before the first row.
        new_rows: For each row of the sequence, the rows that were added to the state. These are the row itself and the
            dropped rows just before it.
    """

    before: SeenRows
    new_rows: Sequence[tuple[NewRow, ...]]

    def token_for_row(self, row: int) -> str:
        """Return the token of this row's position."""
        return self._state_before(row + 1).token

    def starting_at_row(self, row: int) -> "Trail":
        """Return the trail of this row and all later ones."""
        return Trail(self._state_before(row), self.new_rows[row:])

    def select_rows(self, selected: Sequence[bool | None]) -> "Trail":
        """Return a trail with only the rows whose entry in `selected` is true."""
        selected_rows, pending_rows = list[tuple[NewRow, ...]](), tuple[NewRow, ...]()
        for is_selected, new_rows in zip(selected, self.new_rows, strict=True):
            pending_rows += new_rows
            if is_selected:
                selected_rows.append(pending_rows)
                pending_rows = ()
        return Trail(self.before, selected_rows)

    def _state_before(self, row: int) -> SeenRows:
        seen_rows = self.before.copy()
        for tag, position in chain.from_iterable(self.new_rows[:row]):
            seen_rows.record_row(tag, position)
        return seen_rows


class Tokens(NamedTuple):
    """The tokens of a sequence of rows, as returned by the source."""

    values: Sequence[str]

    def token_for_row(self, row: int) -> str:
        """Return the token of this row's position."""
        return self.values[row]

    def starting_at_row(self, row: int) -> "Tokens":
        """Return the tokens of this row and all later ones."""
        return Tokens(self.values[row:])
