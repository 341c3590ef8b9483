"""Spark queries that crash between two steps, and what they deliver."""

from collections.abc import Callable
from typing import Any

from attrs import Factory, define
from fake_stream import Place, Query, Stream

from leasehold.adapters.spark.compat import ReadMaxRows

Row = tuple[str, int, str]


@define
class Sink:
    """A sink that, like files, skips a batch whose number it knows, after reading it or not."""

    batches: dict[int, list[Row]] = Factory(dict)

    def take(self, number: int, rows: list[Row]) -> None:
        self.batches.setdefault(number, rows)

    @property
    def rows(self) -> list[Row]:
        return sorted(row for rows in self.batches.values() for row in rows)


def all_rows(stream: Stream) -> list[Row]:
    """Return every record as a row."""
    return sorted((key, place, text) for key, texts in stream.records.items() for place, text in enumerate(texts, 1))


def drain(query: Query, sink: Sink, stream: Stream, also: tuple[Row, ...] = ()) -> None:
    """Run batches into the sink until it and `also` have everything."""
    while not set(sink.rows) | set(also) >= set(all_rows(stream)):
        before = len(query.rows)
        query.batch()
        sink.take(query.offset["n"], query.rows[before:])


@define
class Crash:
    """A query that did some batches, planned another, and then was killed.

    before, planned  the offsets that Spark remembers
    rows             the rows of the planned batch
    """

    before: dict[str, Any]
    planned: dict[str, Any]
    rows: list[Row]
    sink: Sink


def has_both_shards(planned: dict[str, Any]) -> bool:
    """Return whether a batch has rows of both shards."""
    return planned["r"].keys() == {"a", "b"} and all(begin != end for begin, end, _ in planned["r"].values())


def crash_query(
    place: Place,
    *,
    sunk: bool,
    split: bool = False,
    at: Callable[[dict[str, Any]], bool] = has_both_shards,
    limit: int = 6,
    start: str = "TRIM_HORIZON",
    rereadable: bool = True,
) -> Crash:
    """Run a query up to a batch for which `at` is true, and kill it after or before the sink has the rows."""
    query, sink = place.query(start=start, rereadable=rereadable), Sink()
    while len(query.rows) < 2:  # both shards are held and read
        before = len(query.rows)
        query.batch()
        sink.take(query.offset["n"], query.rows[before:])
    place.stream.put("a", *(f"a{number}" for number in range(1, 35)))
    place.stream.put("b", *(f"b{number}" for number in range(1, 15)))
    if split:
        place.stream.split("a", "c", "d")
        place.stream.put("c", "first of c")
    while not at(planned := query.plan(ReadMaxRows(limit)) or {"r": {}}):
        query.reader.commit(query.offset)
        sink.take(planned["n"], query.run(planned))
        query.offset = planned
        if not split:  # both shards always have rows, however slowly one is read
            place.stream.put("a", f"a after {planned['n']}")
            place.stream.put("b", f"b after {planned['n']}")
    query.reader.commit(query.offset)
    rows = query.run(planned)
    if sunk:
        sink.take(planned["n"], rows)
    query.kill()
    return Crash(query.offset, planned, rows, sink)


def restarted_query(place: Place, crash: Crash, **how: Any) -> Query:  # noqa: ANN401  as `Place.query` takes them
    """Start the query again, as Spark does after a batch that was planned and not committed: that batch comes first."""
    query = place.query(crash.before, **how)
    rows = query.run(crash.planned)
    crash.sink.take(crash.planned["n"], rows)
    query.offset = crash.planned
    return query
