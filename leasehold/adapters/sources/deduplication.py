"""Tells a record that the reader of a shard has had from one that is new, by the tag that our Spark sinks put on it.

A sink writes a batch of a query in tasks. Each task puts its rows in order, and numbers them; what it writes is sent
again after an answer that did not come, by another attempt of the task, and by the next run of the query. So a record
may stand in the stream several times, and its tag says which it is:

    query    Spark's own id of the query, with its checkpointLocation; or a job's own, or its name and batch
    run      one run of the query, from its start to its end; runs have no order
    batch    its number; of a job 0, or the batch that was given with its name
    part     the task's partition of the batch, and the section of it
    edition  a digest of all rows of that section: two attempts with the same edition write the same rows
    row      the number of the row within the part
    span     the hash keys of the shard that the writer meant: it may have been split or merged before the record came

What a writer promises, whatever is lost, refused, late or resharded meanwhile:

W1. When a row is written, all rows of the same attempt with lower numbers and a hash key of the row's span are known to
    be written. Of other hash keys nothing is said: after a merge, what was under way to one parent may come before
    lower rows that wait for the other.
W2. A batch begins once every part of the batch before is known to be written whole.

A run starts where a former one ended, unless its user has restored an older checkpoint. Runs of one query may also live
at the same time: tasks of a former run go on for a while, and a checkpointLocation may be copied.

What a reader keeps of each run (`Had`): the batch that it is at, and of each part and edition the highest row.

R1. A row is a repetition if its part and edition have been read as far for its hash key, from any run that is at its
    batch: by rows whose span has that key (by W1: whichever attempt wrote the highest of them had written all before it
    of that key, and attempts of one edition have the same rows).
R2. A row of an earlier batch than its own run is at is one (by W2). As a run begins its next batch, its rows of the
    last one are noted for the other runs that are still at that.
R3. Anything else is new. Of a part with another edition nothing is known: its rows come, perhaps twice, and none is
    lost because other rows went before it under its number.
    A run that is new to the reader and at an earlier batch than others may be one whose user has restored an older
    checkpoint, and wants its rows again. Or its first rows came late, and were had. This cannot be told: its rows come,
    a warning says so, and what was had of the later batches is forgotten.
R4. Children of a shard begin with what was had of their parents, each hash key with what its own parent had.

It is bounded: by the parts of one batch for each of the last `RUNS` of the `QUERIES` that wrote last, which reader,
checkpoint and offset forget in the same order. A run that is more than `BATCHES` batches behind another is forgotten,
too. It is a function of what was read alone, so that a batch that is read again comes the same.

Where reading stands is told by positions, and `Position.token` carries this along, into every checkpoint, hand-over and
offset. It names the record that it was last changed by: other workers' checkpoints leave it in the row. Behind a later
checkpoint it still holds, and knows of fewer repetitions; before an earlier one, as after a reset, nothing of it does.
"""

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import NamedTuple, Self

from attrs import define, field

from leasehold.balancer.model import HASH_KEYS, TRIM_HORIZON, HashRange, Lease, Position
from leasehold.stores.printable import escaped

log = escaped(logging.getLogger("leasehold.sources"))

QUERIES, RUNS, PARTS, EDITIONS = 16, 4, 4096, 4
"""Most queries of a shard, runs of a query, parts of a batch, and editions of a part of which is known what was had."""
BATCHES = 16
"""How far a run of a query may be behind another one before it is forgotten."""


class Tag(NamedTuple):
    """The name of one record."""

    query: str
    run: int
    batch: int
    part: str
    edition: str
    row: int
    span: HashRange = HASH_KEYS

    @property
    def context(self) -> bytes:
        """All but row and span, as a record carries it."""
        return f"{self.query}.{self.run}.{self.batch}.{self.part}.{self.edition}".encode()


_NAME = r"[A-Za-z0-9_-]{1,40}"
_TEXT = rf"({_NAME})\.(\d{{1,12}})\.(\d{{1,19}})\.({_NAME})\.({_NAME})\.(\d{{1,15}})"
_TAG = re.compile(rf"{_TEXT}(?:\.([0-9a-f]{{1,32}})-([0-9a-f]{{1,32}}))?".encode())
_ROW = re.compile(rb"\d{1,15}")


def tags_of(values: Iterable[bytes]) -> list[Tag | None]:
    """The tags of an aggregate's records, in order: a bare row has context and span of the record before it.

    What is no tag of a sink is none: such a record is new each time.
    """
    found, last = list[Tag | None](), None
    for value in values:
        if (whole := _TAG.fullmatch(value)) is not None:
            query, run, batch, part, edition, row, low, high = (each.decode() for each in whole.groups(b""))
            span = (int(low, 16), int(high, 16)) if low else HASH_KEYS
            last = Tag(query, int(run), int(batch), part, edition, int(row), span)
        elif last is None or _ROW.fullmatch(value) is None:
            last = None
        else:
            last = last._replace(row=int(value))
        found.append(last)
    return found


@define
class _RunSeen:
    """The batch that a run of a query is at, and the highest row of each part and edition."""

    batch: int
    parts: dict[str, dict[str, int]] = field(factory=dict)

    def has(self, tag: Tag) -> bool:
        return tag.batch == self.batch and tag.row <= self.parts.get(tag.part, {}).get(tag.edition, -1)

    def note(self, part: str, edition: str, row: int) -> None:
        editions = self.parts.setdefault(part, {})
        editions[edition] = max(row, editions.pop(edition, -1))
        for known, most in ((editions, EDITIONS), (self.parts, PARTS)):
            if len(known) > most:
                del known[next(iter(known))]

    def begin(self, batch: int, others: Iterable["_RunSeen"]) -> None:
        for other in others:
            if other.batch == self.batch:
                for part, editions in self.parts.items():
                    for edition, row in editions.items():
                        other.note(part, edition, row)
        self.batch, self.parts = batch, {}

    def copy(self) -> "_RunSeen":
        return _RunSeen(self.batch, {part: dict(editions) for part, editions in self.parts.items()})


_RunsSeen = dict[int, _RunSeen]
"""Runs of a query by number; the one that wrote last is last."""
_Queries = dict[str, _RunsSeen]
"""Queries by name; the one that wrote last is last."""


def _have(runs: _RunsSeen, tag: Tag) -> bool:
    own = runs.get(tag.run)
    if own is not None and (tag.batch < own.batch or own.has(tag)):  # R2, R1
        return True
    return (own is None or len(runs) > 1) and any(run.has(tag) for run in runs.values())  # R1


def _note(runs: _RunsSeen, tag: Tag, *, spans: bool) -> None:
    """Note a row; `spans` if its hash keys are these."""
    own = runs.get(tag.run)
    if own is None:
        for number in [number for number, run in runs.items() if run.batch > tag.batch]:
            del runs[number]  # R3
        own = _RunSeen(tag.batch)
    elif tag.batch > own.batch:
        own.begin(tag.batch, [run for run in runs.values() if run is not own])
    if spans and own.batch == tag.batch:
        own.note(tag.part, tag.edition, tag.row)
    if len(runs) > 1 or tag.run not in runs:
        runs.pop(tag.run, None)
        for number in [number for number, run in runs.items() if run.batch + BATCHES < own.batch]:
            del runs[number]
        runs[tag.run] = own
        if len(runs) > RUNS:
            del runs[next(iter(runs))]


@define
class Had:
    """The rows that the reader of a shard has had of each query, for each part of the hash keys of which that differs.

    pieces  the last hash key of each part, rising, and what was had of its records
    at      the record by which it was last changed

    Beside that it counts the rows that R3 keeps although they may have been had: those of a run up to the batch that
    another run was at.
    """

    pieces: list[tuple[int, _Queries]] = field(factory=lambda: [(HASH_KEYS[1], {})])
    at: Position | None = None
    _text: str | None = field(default=None, eq=False)
    _until: dict[tuple[str, int], int] = field(factory=dict, eq=False)
    _undecided: int = field(default=0, eq=False)

    def __bool__(self) -> bool:
        return any(queries for _, queries in self.pieces)

    def again(self, tag: Tag, hash_key: Callable[[], int], position: Position) -> bool:
        """Whether the record of this tag is a repetition; if not it is noted that this position had it."""
        queries = self.pieces[0][1]
        if len(self.pieces) > 1:
            place = hash_key()
            queries = next(found for last, found in self.pieces if place <= last)
        runs = queries.get(tag.query)
        if runs and _have(runs, tag):
            return True
        if runs and tag.run not in runs and (latest := max(run.batch for run in runs.values())) > tag.batch:
            text = (
                "query %s: run %d writes batch %d although another run was at %d: all its rows are kept, perhaps twice"
            )
            log.warning(text, tag.query, tag.run, tag.batch, latest)
            self._until = {**self._until, (tag.query, tag.run): latest}
        if self._until and tag.batch <= self._until.get((tag.query, tag.run), -1):
            self._undecided += 1
        self.note(tag, position)
        return False

    def undecided(self) -> int:
        """Return how many rows were kept, since the last call, that may have been had."""
        count, self._undecided = self._undecided, 0
        return count

    def note(self, tag: Tag, position: Position) -> None:
        """A new record came: it speaks for the hash keys of its span (W1), and as to batches for all (W2)."""
        self.at, self._text = position, None
        first, last = tag.span
        for bound in (first - 1, last):
            self._cut(bound)
        for bound, queries in self.pieces:
            runs = queries.pop(tag.query, None) or {}
            # Cut at both ends, a piece lies in the span whole, or not at all.
            _note(runs, tag, spans=first <= bound <= last)
            queries[tag.query] = runs
            if len(queries) > QUERIES:
                del queries[next(iter(queries))]
        if len(self.pieces) > 1:
            kept = self.pieces[-1:]
            for piece in reversed(self.pieces[:-1]):
                if piece[1] != kept[0][1]:
                    kept.insert(0, piece)
            self.pieces = kept

    def _cut(self, bound: int) -> None:
        """Have a piece end with this hash key."""
        for place, (last, queries) in enumerate(self.pieces):
            if bound < 0 or bound == last:
                return
            if bound < last:
                self.pieces.insert(place, (bound, _copied(queries)))
                return

    def copy(self) -> Self:
        """Another one, which changes by itself."""
        pieces = [(last, _copied(queries)) for last, queries in self.pieces]
        return type(self)(pieces, self.at, self._text, self._until, self._undecided)

    @property
    def token(self) -> str:
        """The token of a position here; "" where no record had a tag."""
        if self._text is None:
            self._text = ""
            if self.at is not None and self:
                pieces = [
                    ("" if last == HASH_KEYS[1] else f"{last:x}@") + _text_of(queries) for last, queries in self.pieces
                ]
                self._text = f"{_FORM} {self.at.sequence}.{self.at.sub} {' '.join(pieces)}"
        return self._text

    @classmethod
    def of(cls, start: Position) -> Self:
        """The rows that were had of a shard up to here; nothing where the token says none, or is of a later place."""
        _, form, rest = start.token.partition(f"{_FORM} ")
        if not form:
            return cls()
        place, *pieces = rest.split(" ")
        sequence, _, sub = place.partition(".")
        read = list[tuple[int, _Queries]]()
        try:
            for piece in pieces:
                last, bound, told = piece.rpartition("@")
                read.append((int(last, 16) if bound else HASH_KEYS[1], _queries_of(told)))
            at = Position(sequence, int(sub))
        except ValueError:
            return cls()
        whole = [last for last, _ in read] == sorted({last for last, _ in read} | {HASH_KEYS[1]})
        return cls(read, at) if whole and at.order <= start.order else cls()


_FORM = "had1"


def own_token(token: str) -> str:
    """The part of a token that the source itself has put there: the offset of Event Hubs, "" of Kinesis."""
    own, form, _ = token.partition(f"{_FORM} ")
    # Only the blank between the two is ours: an offset is the service's text, whatever it ends with.
    return own.removesuffix(" ") if form else token


def _copied(queries: _Queries) -> _Queries:
    return {name: {number: run.copy() for number, run in runs.items()} for name, runs in queries.items()}


def _text_of(queries: _Queries) -> str:
    return ";".join(_text_of_run(name, number, run) for name, runs in queries.items() for number, run in runs.items())


def _text_of_run(name: str, number: int, run: _RunSeen) -> str:
    parts = (f"{part}={edition}={row}" for part, editions in run.parts.items() for edition, row in editions.items())
    return ",".join((name, str(number), str(run.batch), *parts))


def _queries_of(text: str) -> _Queries:
    queries = _Queries()
    for each in filter(None, text.split(";")):
        name, number, batch, *told = each.split(",")
        parts = dict[str, dict[str, int]]()
        for part, edition, row in (each.split("=") for each in told):
            parts.setdefault(part, {})[edition] = int(row)
        queries.setdefault(name, {})[int(number)] = _RunSeen(int(batch), parts)
    return queries


def inherited(parents: Sequence[Lease]) -> str:
    """The token with which the child of these shards begins (R4); "" where nothing is known of them.

    Of two parents whose hash keys are not known nothing is.
    """
    known = [(each.hash_range, Had.of(each.checkpoint)) for each in parents if each.ended]
    if not any(had for _, had in known):
        return ""
    # It holds from the beginning of the child on, wherever its parents ended.
    if len(known) == 1:
        return Had(known[0][1].pieces, TRIM_HORIZON).token
    ranges: list[tuple[HashRange, Had]] = sorted(((each, had) for each, had in known if each), key=lambda pair: pair[0])
    if len(ranges) < len(known):
        return ""
    pieces = list[tuple[int, _Queries]]()
    for (_, last), had in ranges:
        pieces += [(min(bound, last), queries) for bound, queries in had.pieces if not pieces or bound > pieces[-1][0]]
        # What had bounds beyond this parent's keys had none of them.
        while len(pieces) > 1 and pieces[-2][0] >= pieces[-1][0]:
            pieces.pop()
    pieces[-1] = (HASH_KEYS[1], pieces[-1][1])
    return Had(pieces, TRIM_HORIZON).token


Note = tuple[Tag, Position]
"""A record that was new, and its place."""


class Trail(NamedTuple):
    """The state of `Had` at each of some rows: before them, and what each added, with those left out just before it."""

    before: Had
    notes: Sequence[tuple[Note, ...]]

    def token(self, row: int) -> str:
        """The token of this row's position."""
        return self._until(row + 1).token

    def behind(self, row: int) -> "Trail":
        """The trail of the rows from this one on."""
        return Trail(self._until(row), self.notes[row:])

    def where(self, kept: Sequence[bool | None]) -> "Trail":
        """The trail of some of the rows."""
        found, left = list[tuple[Note, ...]](), tuple[Note, ...]()
        for keep, notes in zip(kept, self.notes, strict=True):
            left += notes
            if keep:
                found.append(left)
                left = ()
        return Trail(self.before, found)

    def _until(self, row: int) -> Had:
        had = self.before.copy()
        for tag, place in chain.from_iterable(self.notes[:row]):
            had.note(tag, place)
        return had


class Tokens(NamedTuple):
    """The token that the position of each of some rows carries along, as its source told."""

    told: Sequence[str]

    def token(self, row: int) -> str:
        """The token of this row's position."""
        return self.told[row]

    def behind(self, row: int) -> "Tokens":
        """The tokens of the rows from this one on."""
        return Tokens(self.told[row:])
