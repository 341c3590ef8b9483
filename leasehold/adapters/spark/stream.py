"""A run of a query: plans batches of what was read ahead, and commits them to the leases.

Spark's reader (`leased_source`) calls it in the source-runner process, one call at a time. It joins the group as the
first batch is planned. The order of a batch's events, and why nothing is skipped, are told in the package's own text;
here `join`, `plan`, `partitions` and `commit` of `Run` stand in that order.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
from attrs import evolve, frozen

from leasehold.adapters.sources.call_patience import Backoff
from leasehold.adapters.sources.protocol import Identified, Source
from leasehold.adapters.spark.available_now import flush_due
from leasehold.adapters.spark.compat import TELLS_AVAILABLE_NOW, ReadLimit, ReadMaxBytes, ReadMaxRows
from leasehold.adapters.spark.feed import ReadAheadPace
from leasehold.adapters.spark.fetching import Rows, spread
from leasehold.adapters.spark.lease_loop import LeaseLoop, Waiting
from leasehold.adapters.spark.offsets import Held, Offset, Range, advance, owed, resumed
from leasehold.adapters.spark.options import EMBEDDED_BYTES, LeaseOptions
from leasehold.adapters.spark.processes import speak
from leasehold.adapters.spark.readers.pool import way_of
from leasehold.adapters.spark.replay import Place, believed, replayed
from leasehold.adapters.spark.rows import SourceSpec
from leasehold.adapters.worker.holding import Holding
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.contradictions import INCARNATION, made_later
from leasehold.balancer.model import Position
from leasehold.errors import OutcomeUnknown, SourceError, SourceUnavailable, StoreError
from leasehold.stores.printable import escaped
from leasehold.stores.protocol import Store
from leasehold.stores.swap import OneTableStore

log = escaped(logging.getLogger("leasehold.spark"))

Opened = Callable[..., Store]
"""Opens the lease table; `open_store`, unless a test stands in between."""

IDLE_SECONDS, LOOK_SECONDS = 0.1, 0.3
REPORTED = 50
"""How many shards a report names: those that are furthest behind."""
UNREACHED_SECONDS_MOST = 10.0
"""Between two tries to learn which stream it is that a run reads."""
READ_UP_SECONDS = 20.0
"""How long a run waits to have read what is there, where Spark does not ask for that."""
LINGER_BYTES = 32 << 20
"""With so much a batch costs little more than its rows."""
FLUSH_SECONDS = 1.0
"""Idle for so long, a query commits its last batch by an empty one; sooner if a lease is asked for."""


@frozen
class Plan:
    """A batch that was planned: the offsets on both sides, and the rows of each shard."""

    start: Offset
    end: Offset
    rows: Mapping[str, pa.RecordBatch]


class Run:
    """A run of a query, in the runner process: plans batches, repeats them, and commits them to the leases."""

    def __init__(self, source_spec: SourceSpec, options: LeaseOptions, opened: Opened, *, only_now: bool) -> None:
        speak()
        self._source_spec, self._options, self._only_now = source_spec, options, only_now
        most = options.trigger_bytes
        self._trigger_bytes = min(most, EMBEDDED_BYTES) if options.fetch is None else most
        self._source = source_spec.open()
        # A swap of lease tables is refused: it raises epochs, by which a range that Spark repeats is known.
        self._store = OneTableStore(lease_table(opened, options.store, self._source, create=options.create))
        self._once_more = self._source if source_spec.again is None else source_spec.again()
        self._place = Place(self._store, self._once_more, source_spec.columns, exclusive=not source_spec.rereadable)
        self._way = way_of(source_spec, options, self._source, self._place)
        self._transport = self._way.transport
        pace = ReadAheadPace(
            source_spec.columns,
            options.buffer_rows,
            options.buffer_bytes,
            source_spec.interval_seconds,
            self._way.buffer,
        )
        anew = options.if_recreated
        worker = Worker(
            store=self._store, source=self._way.source, me=options.worker_id, config=options.config, if_recreated=anew
        )
        log.info("query joins as worker %s", worker.me)
        self._discovery = worker.discovery
        self._loop = LeaseLoop(worker, pace, self._resume, sliced=source_spec.sliced, anew=anew is not None)
        self._waiting = Waiting(options.config.lease_seconds)
        self._joined = False
        self._incarnation: str | None = None  # asked for once: a run reads one incarnation of its stream
        self._former: str | None = None  # of offsets that name none
        self._begun_anew = False
        self._plans: dict[int, Plan] = {}
        self._parts: dict[int, Sequence[Rows]] = {}
        self._previous = Offset()
        self._had: frozenset[str] = frozenset()  # its shards whose rows the sink is known to have
        self._planned = time.monotonic()
        self._handed: dict[str, Position] = {}
        self._committed = -1

    def present(self, offset: Offset) -> Offset:
        """Return the offset as one of the stream that is there now; of a former one no range has a meaning any more.

        Raises SourceError where it is of a former stream and nobody said that its leases begin anew, or of another.
        """
        now, was = self._identity(), offset.incarnation
        if now and not was:
            # An offset of the old form is of the former incarnation that its leases note, or of the present stream.
            # Asked once: the notes change as the leases begin anew, and the offsets do not.
            if self._former is None and offset.keys:
                notes = [lease.note(INCARNATION) for lease in self._store.get(offset.keys)]
                self._former = next((note for note in notes if note and made_later(now, note)), "")
            was = self._former or now
        if now in {"", was}:
            # As it is where it can be: its ranges, perhaps thousands, would be put in order again for each batch.
            return offset if offset.incarnation == was else evolve(offset, incarnation=was)
        if not made_later(now, was):
            raise SourceError(f"offset: the checkpointLocation is of {was}, and the query reads {now}; give it its own")
        if (start := self._options.if_recreated) is None:
            raise SourceError(
                f"stream {was} was deleted and made anew, and is {now} now: nothing is read; option lease.ifRecreated "
                "TRIM_HORIZON or LATEST has all its leases begin there, or give the query a checkpointLocation and a "
                "lease table of its own"
            )
        if not self._begun_anew:
            self._begun_anew = True
            log.warning("stream %s was made anew, and is %s now: its leases begin at %s, as asked", was, now, start)
        return evolve(offset, ranges=(), incarnation=now)

    def _identity(self) -> str:
        """The incarnation that this run reads, "" where the source cannot tell it; all depends on it, so it waits."""
        waits = Backoff(LOOK_SECONDS, UNREACHED_SECONDS_MOST)
        while self._incarnation is None:
            source = self._source
            try:
                source.shards()  # some sources learn it by that
                self._incarnation = source.incarnation() if isinstance(source, Identified) else ""
            except SourceUnavailable as fault:
                if not waits.faults:
                    log.warning("the stream cannot be reached, trying again: %s", fault)
                # A query over what is there now must end; another one waits, as it does for records.
                self._waiting.go_on({"(the stream)": str(fault)}, 0 if self._only_now else time.monotonic_ns())
                time.sleep(waits.next())
            else:
                self._discovery.bind(self._incarnation)
        return self._incarnation

    def join(self, start: Offset, repeated: Collection[str] | None = None) -> None:
        """Become a worker of the group, if not yet; `start` is how far this query came.

        Spark has it in the sink, unless its batch is `repeated` in this run, with the rows of these shards.
        """
        if self._joined:
            return
        self._joined, self._previous = True, start
        if not start.ranges:
            log.info("no earlier batch is known: each shard goes on at its lease's checkpoint")
        # Spark takes the batch for done; of what an earlier run repeated, or only one may read, we know it is not.
        self._had = believed(start, self._place) & (start.keys if repeated is None else set(repeated))
        # A row that was made anew gets its checkpoint before another worker starts from it.
        done = {key: self._done(key, start, each) if repeated is None else each.begins for key, each in start.ranges}
        self._loop.commit(done)
        self._way.begin(self._loop.hurry)  # before the loop, which opens shards by it
        self._loop.start(only_now=self._only_now)

    def plan(self, start: Offset, limit: ReadLimit) -> Offset | None:
        """The end of the batch behind `start`, the same however often it is asked; None if there is none."""
        self._loop.check()
        # Spark asks again after a fault of its own; rows that were taken once are in no buffer any more.
        known = self._plans.get(start.number + 1)
        if known is not None and known.start == start:
            return known.end
        if (plan := self._next(start, limit)) is None:
            return None
        self._plans[plan.end.number] = plan
        return plan.end

    def partitions(self, end: Offset) -> Sequence[Rows]:
        """The tasks of the batch that ends here."""
        if end.number not in self._parts:
            plan = self._plans.get(end.number)
            # Under the same number another run may have planned something else: the offset decides, not the number.
            plan = plan if plan is not None and plan.end == end else None
            rows = self._again(end) if plan is None else plan.rows
            # Of a batch of an earlier run not the cores of today: a sink may know a row by its place in a task.
            tasks = end.tasks or self._options.tasks(len(rows))
            self._parts[end.number] = self._transport.partitions(end.number, spread(rows, tasks))
            if plan is not None:  # the tasks hold its rows now, and not before: to make them may fail
                self._plans[end.number] = evolve(plan, rows={})
        return self._parts[end.number]

    def commit(self, end: Offset) -> None:
        """Spark is done with the batch that ends here."""
        done = {key: each.ends for key, each in end.ranges if not each.empty and self._delivered(key, end)}
        self._loop.commit(done)
        self._committed = end.number
        # Spark may run a task again until it has committed its batch, and not after.
        for number in [number for number in (*self._plans, *self._parts) if number <= end.number]:
            self._transport.discard(number)
            self._plans.pop(number, None)
            self._parts.pop(number, None)

    def report(self) -> dict[str, Any]:
        """Return where reading stands, of all shards and of those furthest behind."""
        behind = {key: round(seconds * 1000) for key, seconds in self._loop.behind.items()}
        worst = sorted(((key, each) for key, each in behind.items() if each), key=lambda pair: (-pair[1], pair[0]))
        shown = dict(sorted(worst[:REPORTED]))
        most, undecided = max(behind.values(), default=0), self._loop.undecided
        return {"shards": len(behind), "behindMs": most, "behindMsByShard": shown, "undecidedRows": undecided}

    def close(self) -> None:
        """Release, and let connections and files go."""
        with ExitStack() as rest:  # all of it, in the opposite order, even if one of them fails
            # The loop ends first, while it can still write and release; nobody waits for a reader meanwhile.
            once_more = () if self._once_more is self._source else (self._once_more.close,)
            for close in (self._store.close, self._source.close, *once_more, self._way.close, self._loop.close):
                rest.callback(close)
            self._way.stop()

    def _next(self, start: Offset, limit: ReadLimit) -> Plan | None:
        rows, size = self._options.trigger_rows, self._trigger_bytes
        match limit:
            case ReadMaxRows(max_rows=most):
                rows = min(rows, most)
            case ReadMaxBytes(max_bytes=most):
                size = min(size, most)
        while True:
            self._loop.wait(LOOK_SECONDS if self._only_now else IDLE_SECONDS)
            enough = self._loop.linger(self._options.linger_seconds, rows, min(size, LINGER_BYTES))
            self._loop.check()
            if not (enough or self._handed) and self._reads_up():
                self._loop.wait_until(lambda: False, IDLE_SECONDS)
                continue
            held, taken = self._loop.take(rows, self._source_spec.shard_rows, size)
            if taken:
                ends = {key: chunk.ends for key, chunk in taken.items()}
                end = advance(start, held, ends, self._unwritten(start, held))
                # From here on a shard taken anew begins behind these rows: this run delivers them, or fails.
                self._handed.update(ends)
                self._planned = time.monotonic()
                rows_of = {key: chunk.rows for key, chunk in taken.items() if chunk.count}
                end = evolve(end, tasks=self._options.tasks(len(rows_of)) if rows_of else 0)
                return Plan(start, end, rows_of)
            left = self._loop.unfinished if self._only_now else {}
            if self._flush_due(start, left):
                # A flush: Spark commits a batch only when it plans the next, be it one without rows.
                return Plan(start, advance(start, held, {}, self._unwritten(start, held)), {})
            if left:
                self._waiting.go_on(left, self._loop.answers)
                continue
            if self._loop.over:
                if not self._reads_up():
                    return None
                continue
            self._waiting.go_on({"(others)": "they read on"}, time.monotonic_ns())  # alive: however long it takes

    def _reads_up(self) -> bool:
        """Return whether this run may be over what is there now, and has not read all of that.

        Some versions of Spark do not say so, and take the first batch of such a run for all that is there.
        """
        if TELLS_AVAILABLE_NOW or time.monotonic() - self._planned > READ_UP_SECONDS:
            return False
        return bool(self._loop.reading_up)

    def _flush_due(self, start: Offset, left: Mapping[str, str]) -> bool:
        is_owed, on_idle = owed(start, self._committed), self._options.flush
        # A shard's children wait for its end to be committed, and no later rows of it would make Spark do that.
        ended, handing_off = any(each.ends.ended for _, each in start.ranges), self._loop.handing_off
        if self._only_now:
            return flush_due(owed=is_owed, left=bool(left), ended=ended, handing_off=handing_off, on_idle=on_idle)
        idle = handing_off or time.monotonic() - self._planned > FLUSH_SECONDS
        return is_owed and idle and (on_idle or ended)

    def _unwritten(self, start: Offset, held: Mapping[str, Held]) -> list[tuple[str, Range]]:
        """The ends of the last batch that leases do not say yet, of the shards that this one has no part of."""
        left = [(key, each) for key, each in start.ranges if key not in held or held[key].begins.ended]
        done = [(key, self._handed.get(key) or self._done(key, start, each), each.epoch) for key, each in left]
        return [(key, Range(end, end, epoch)) for key, end, epoch in done if not self._loop.says(key, end)]

    def _done(self, key: str, offset: Offset, each: Range) -> Position:
        """How far a shard of this offset is complete in the sink."""
        return each.ends if self._delivered(key, offset) else each.begins

    def _again(self, end: Offset) -> Mapping[str, pa.RecordBatch]:
        """A batch of an earlier run, read anew."""
        if end.empty:
            return {}
        log.warning("batch %d was planned by an earlier run: reading its %d ranges again", end.number, len(end.ranges))
        waiting = Waiting(self._options.config.lease_seconds, doing=f"batch {end.number}, which is repeated")
        # Before joining: with leases of our own we would displace our own link, where a shard has one reader at a time.
        rows = replayed(end, self._place, waiting)
        self._loop.was_read(rows)  # these ranges were there to be read: the checkpointLocation is of this stream
        self.join(end, repeated=rows)
        return rows

    def _resume(self, holding: Holding, checkpoint: Position) -> Position:
        if (handed := self._handed.get(holding.key)) is not None:
            return max(handed, checkpoint, key=lambda position: position.order)
        delivered, known = self._delivered(holding.key, self._previous), self._previous.of(holding.key)
        start = self._source_spec.starts.get(holding.lease.shard)
        placed = checkpoint.numbered or checkpoint.ended
        if start is not None and known is None and not (placed or self._begun_anew):
            return start
        return resumed(checkpoint, known, delivered=delivered)

    def _delivered(self, key: str, end: Offset) -> bool:
        """Whether the sink has all of a shard up to this end."""
        # What an earlier run planned may have come to the sink in part, or not at all.
        return end != self._previous or key in self._had


def lease_table(opened: Callable[..., Store], url: str, source: Source, *, create: bool) -> Store:
    """Open the lease table; where there is none yet, it is made once the source has shown its shards.

    A source that passes for a moment does not count against it. Raises what opening raises, and SourceError if there
    is no such stream.
    """
    try:
        return opened(url, create=False)
    except OutcomeUnknown:
        raise
    except StoreError:
        if not create:
            raise
    with suppress(SourceUnavailable):
        source.shards()
    return opened(url, create=True)
