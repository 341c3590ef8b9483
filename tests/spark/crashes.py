"""Spark queries that crash between two steps, and the rows that they deliver."""

from collections.abc import Callable
from typing import Any

from attrs import Factory, define
from fake_stream import Place, Query, Stream

from leasehold.adapters.spark.compat import ReadMaxRows

Row = tuple[str, int, str]


@define
class Sink:
    """A sink that skips a batch whose number it knows, as file sinks do, whether or not it has read the batch."""

    batches: dict[int, list[Row]] = Factory(dict)

    def take(self, number: int, rows: list[Row]) -> None:
        self.batches.setdefault(number, rows)

    @property
    def rows(self) -> list[Row]:
        return sorted(row for rows in self.batches.values() for row in rows)


def all_rows(stream: Stream) -> list[Row]:
    """Return every record as a row."""
    return sorted((key, number, text) for key, texts in stream.records.items() for number, text in enumerate(texts, 1))


def drain(query: Query, sink: Sink, stream: Stream, also: tuple[Row, ...] = ()) -> None:
    """Run batches into the sink until the sink and `also` together have all records."""
    while not set(sink.rows) | set(also) >= set(all_rows(stream)):
        row_count = len(query.rows)
        query.batch()
        sink.take(query.offset["n"], query.rows[row_count:])


@define
class Crash:
    """A query that completed some batches, planned another one, and was then killed.

    before, planned  the offsets that Spark has logged: of the last completed batch, and of the planned one
    rows             the rows of the planned batch
    """

    before: dict[str, Any]
    planned: dict[str, Any]
    rows: list[Row]
    sink: Sink


def has_both_shards(offset: dict[str, Any]) -> bool:
    """Return whether the planned batch has rows of both shards."""
    return offset["r"].keys() == {"a", "b"} and all(begin != end for begin, end, _ in offset["r"].values())


def crash_query(
    environment: Place,
    *,
    reaches_sink: bool,
    split: bool = False,
    is_crash_batch: Callable[[dict[str, Any]], bool] = has_both_shards,
    limit: int = 6,
    start: str = "TRIM_HORIZON",
    rereadable: bool = True,
) -> Crash:
    """Run a query until `is_crash_batch` is true of the planned batch.

    Then kill the query. If `reaches_sink`, the sink has received the rows of this batch by then.
    """
    query, sink = environment.query(start=start, rereadable=rereadable), Sink()
    while len(query.rows) < 2:  # until both shards are held and read
        row_count = len(query.rows)
        query.batch()
        sink.take(query.offset["n"], query.rows[row_count:])
    environment.stream.put("a", *(f"a{number}" for number in range(1, 35)))
    environment.stream.put("b", *(f"b{number}" for number in range(1, 15)))
    if split:
        environment.stream.split("a", "c", "d")
        environment.stream.put("c", "first of c")
    while not is_crash_batch(planned_offset := query.plan(ReadMaxRows(limit)) or {"r": {}}):
        query.reader.commit(query.offset)
        sink.take(planned_offset["n"], query.run(planned_offset))
        query.offset = planned_offset
        if not split:  # so that both shards always have rows, however slowly one of them is read
            environment.stream.put("a", f"a after {planned_offset['n']}")
            environment.stream.put("b", f"b after {planned_offset['n']}")
    query.reader.commit(query.offset)
    rows = query.run(planned_offset)
    if reaches_sink:
        sink.take(planned_offset["n"], rows)
    query.kill()
    return Crash(query.offset, planned_offset, rows, sink)


def restarted_query(environment: Place, crash: Crash, **options: Any) -> Query:  # noqa: ANN401  as `Place.query` takes them
    """Restart the query as Spark does after a batch that was planned but not committed. This batch is run first."""
    query = environment.query(crash.before, **options)
    rows = query.run(crash.planned)
    crash.sink.take(crash.planned["n"], rows)
    query.offset = crash.planned
    return query
