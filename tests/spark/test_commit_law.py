"""The law of Spark's commit: whatever happens, no checkpoint passes a record that Spark has not finished.

Spark is simulated by a log of offsets, a log of commits, and a sink that computes every batch and then skips the batch
if
it already has one with this number. Hypothesis draws faults, throttling, steals and kills. After each step, the
checkpoints are compared with the sink's contents. In the end, the sink must have every record.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import pytest
from fake_stream import KillableStore, Stream, rows_of
from hypothesis import note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from stepped_loop import install_stepped_clock, new_reader
from waiters import Clock

from leasehold.adapters.spark.compat import ReadMaxRows
from leasehold.adapters.spark.leased_source import LeasedReader
from leasehold.adapters.worker.discovery import SAFETY_SECONDS
from leasehold.balancer.contradictions import INCARNATION, SETTLED_VALUE
from leasehold.balancer.model import Lease
from leasehold.errors import OutcomeUnknown, SourceError, StoreError
from leasehold.stores.embedded.memory import MemoryStore
from leasehold.stores.protocol import Done
from leasehold.stores.writes import AnnotateLease, CheckpointLease, ClaimLease, ReleaseLease, StealLease

pytestmark = pytest.mark.slow

Row = tuple[str, int, str]
"""Shard, number and the stream's creation time. A recreated stream has the same shards and numbers again."""
FAULTS = (StoreError, SourceError, TimeoutError)
LOOKS, BATCHES_MOST = 30, 60

shards = st.sampled_from("ab")


class UnreliableStore(KillableStore):
    """A store as one process sees it. The next `lost` responses are lost."""

    lost = 0

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  whatever the store has
        attribute = super().__getattr__(name)
        if self.lost and name in {"write", "get"}:
            return self._make_losing_call(attribute)
        return attribute

    def _make_losing_call(self, call: Any) -> Any:  # noqa: ANN401  as above
        def call_and_lose_response(*arguments: Any, **kwargs: Any) -> None:  # noqa: ANN401  as above
            self.lost -= 1
            call(*arguments, **kwargs)
            raise OutcomeUnknown("the answer was lost")

        return call_and_lose_response


class Killed(Exception):
    """Raised at the moment at which the process is killed."""


class Spark(RuleBasedStateMachine):
    """One query over two shards that is killed and restarted."""

    rereadable = True
    made = 0
    anew: ClassVar[Mapping[str, str]] = {}

    @initialize(flush=st.sampled_from(["true", "false"]), packed_from=st.sampled_from([2, 64]))
    def begin(self, flush: str, packed_from: int) -> None:
        """Begin with nothing read. Offsets are packed if they have at least `packed_from` ranges."""
        self.patch = pytest.MonkeyPatch()
        self.clock: Clock = install_stepped_clock(self.patch)
        self.patch.setattr("leasehold.adapters.spark.offsets.PACKED_RANGES_MIN", packed_from)
        self.flush = flush
        self.stream = Stream({"a": [], "b": []}, numbers=not self.rereadable, made=self.made)
        self.store = MemoryStore()
        self.life = UnreliableStore(self.store)
        self.reader: LeasedReader | None = None
        self.offsets: dict[int, dict[str, Any]] = {}
        self.commits: set[int] = set()
        self.sink: dict[int, list[Row]] = {}
        self.reject_renamed: set[Row] = set()
        self.repetitions_allowed = False

    # What happens to the query

    @rule(dies=st.sampled_from([None, None, "planned", "logged", "said", "run", "sunk"]), limit=st.integers(1, 30))
    def batch(self, dies: str | None, limit: int) -> None:
        """Repeat a batch that was planned but not committed, or plan a new one, as Spark does.

        The process may die on the way, at the moment `dies`.
        """
        try:
            self._batch(dies, limit)
        except (Killed, *FAULTS) as fault:
            note(f"the query ends: {fault!r}")
            self.kill()

    @rule()
    def kill(self) -> None:
        """Kill the query, so that none of its later writes reaches the table."""
        self.life.dead, self.reader = True, None

    @rule(seconds=st.sampled_from([0.5, 3.0]))
    def passes(self, seconds: float) -> None:
        """Let time pass, possibly longer than the query's leases last."""
        self.clock.now += seconds

    # What happens to others

    @rule(shard=shards, count=st.integers(1, 12))
    def put(self, shard: str, count: int) -> None:
        """Put records into the shard, or into its children if it was split."""
        for key in self.stream.children.get(shard, (shard,)):
            self.stream.put(key, *[str(self.stream.made)] * count)

    @precondition(lambda self: not self.stream.children)
    @rule()
    def split(self) -> None:
        self.stream.split("a", "c", "d")

    @rule(shard=shards, count=st.integers(1, 6))
    def throttle(self, shard: str, count: int) -> None:
        """Throttle some reads of a shard."""
        self.stream.throttled[shard] = count

    @rule(shard=shards, count=st.integers(1, 3))
    def make_unreachable(self, shard: str, count: int) -> None:
        self.stream.unreachable[shard] = count

    @rule(shard=shards)
    def toggle_silence(self, shard: str) -> None:
        """Stop responding for this shard, or respond again. The query cannot wait as long as the silence may last."""
        self.stream.silent ^= {shard}

    @rule(shard=shards)
    def refuse(self, shard: str) -> None:
        """Respond that this shard has no more records, or respond normally again."""
        self.stream.refuses ^= {shard}
        self.repetitions_allowed = True

    @rule(count=st.integers(1, 3))
    def lose_responses(self, count: int) -> None:
        """Lose some responses of the lease table."""
        self.life.lost = count

    @rule(shard=shards, count=st.integers(0, 8), stays=st.booleans())
    def steal(self, shard: str, count: int, *, stays: bool) -> None:
        """Let another worker take a lease and continue from its checkpoint. It then holds the lease or releases it."""
        for lease in self.store.get([shard]):
            if not self._is_of_current_stream(lease):
                continue  # our workers don't read leases of a former stream
            outcome = (
                self.store.write(StealLease(lease, "thief"))
                if lease.owner
                else self.store.write(ClaimLease(lease, "thief"))
            )
            if lease.ended or not isinstance(outcome, Done):
                return
            self.repetitions_allowed = True
            annotated = self.store.write(
                AnnotateLease(outcome.lease, INCARNATION, self.stream.incarnation() or SETTLED_VALUE)
            )
            assert isinstance(annotated, Done)
            checkpoint_number = int(lease.checkpoint.sequence) if lease.checkpoint.numbered else 0
            handled_numbers = list(range(checkpoint_number + 1, len(self.stream.records[shard]) + 1))[:count]
            if handled_numbers:
                checkpointed = self.store.write(
                    CheckpointLease(annotated.lease, type(lease.checkpoint)(str(handled_numbers[-1])))
                )
                assert isinstance(checkpointed, Done)
                self.reject_renamed |= {(shard, number, str(self.stream.made)) for number in handled_numbers}
            if not stays:
                self.store.write(ReleaseLease(self.store.get([shard])[0], "thief"))

    # The law

    @invariant()
    def no_checkpoint_passes_an_unfinished_record(self) -> None:
        """Each record before a checkpoint is in a committed batch of the sink, or was processed by another worker."""
        if not hasattr(self, "store"):
            return
        finished_rows = {row for number in self.commits for row in self.sink[number]} | self.reject_renamed
        for lease in self.store.list().leases:
            checkpointed_rows = self._behind(lease)
            assert checkpointed_rows <= finished_rows, (
                f"{lease.key} says {lease.checkpoint}, and nobody has {sorted(checkpointed_rows - finished_rows)}"
            )

    @invariant()
    def no_record_is_repeated_to_a_sink_that_skips_known_batches(self) -> None:
        """Records may be repeated only if another worker had the lease meanwhile, or if a range was given up."""
        if not hasattr(self, "sink") or not self.rereadable or self.repetitions_allowed:
            return
        rows = [row for batch_rows in self.sink.values() for row in batch_rows]
        assert len(rows) == len(set(rows)), f"twice: {sorted(row for row in rows if rows.count(row) > 1)}"

    def teardown(self) -> None:
        """Clear all faults, and check that every record arrives."""
        if not hasattr(self, "store"):
            return
        self.stream.silent.clear()
        self.stream.refuses.clear()
        self.stream.throttled.clear()
        self.stream.unreachable.clear()
        for _ in range(BATCHES_MOST):
            if not self._missing():
                break
            self.batch(None, 100)
        self.no_checkpoint_passes_an_unfinished_record()
        self.patch.undo()
        assert not self._missing(), f"nobody has {sorted(self._missing())}, the leases being {self.store.list()}"

    # Spark

    def _batch(self, dies: str | None, limit: int) -> None:
        if self.reader is None:
            self.life = UnreliableStore(self.store)
            query_options: dict[str, Any] = {"rereadable": self.rereadable, "flush_on_idle": self.flush, **self.anew}
            self.reader = new_reader(self.stream, self.life, **query_options)
        number = max(self.offsets, default=0)
        if number and number not in self.commits:
            self._run(self.reader, number, dies)
            return
        start = self.offsets[number] if number else self.reader.initialOffset()
        end = self._planned(self.reader, start, limit)
        if end is None:
            return
        self._alive(dies, "planned")
        self.offsets[number + 1] = json.loads(json.dumps(end))
        self._alive(dies, "logged")
        if number:
            self.reader.commit(start)
        self._alive(dies, "said")
        self._run(self.reader, number + 1, dies)

    def _planned(self, reader: LeasedReader, start: dict[str, Any], limit: int) -> dict[str, Any] | None:
        for _ in range(LOOKS):
            end = reader.latestOffset(start, ReadMaxRows(limit))
            if end != start:
                return end
        return None

    def _run(self, reader: LeasedReader, number: int, dies: str | None) -> None:
        start_offset = self.offsets[number - 1] if number > 1 else reader.initialOffset()
        parts = reader.partitions(start_offset, self.offsets[number])
        rows = sorted(row for part in parts for row in _rows(reader, part))
        self._alive(dies, "run")
        self.sink.setdefault(number, rows)
        self._alive(dies, "sunk")
        self.commits.add(number)

    def _alive(self, dies: str | None, moment: str) -> None:
        if dies == moment:
            raise Killed(moment)

    # What there is

    def _is_of_current_stream(self, lease: Lease) -> bool:
        """Return whether the lease's checkpoint counts records of the current stream."""
        return lease.annotation(INCARNATION) in {None, SETTLED_VALUE, self.stream.incarnation()}

    def _behind(self, lease: Lease) -> set[Row]:
        if not self._is_of_current_stream(lease):
            return set()
        last_number = len(self.stream.records[lease.key]) if lease.checkpoint.ended else 0
        last_number = int(lease.checkpoint.sequence) if lease.checkpoint.numbered else last_number
        return {(lease.key, number, str(self.stream.made)) for number in range(1, last_number + 1)}

    def _missing(self) -> set[Row]:
        records = self.stream.records.items()
        existing_rows = {(key, number, text) for key, texts in records for number, text in enumerate(texts, 1)}
        return existing_rows - self.reject_renamed - {row for number in self.commits for row in self.sink[number]}


class EventHubsSpark(Spark):
    """Tests the law for shards that only one reader may read, so the last batch before a kill may be repeated."""

    rereadable = False


class RecreatedSpark(Spark):
    """Tests the law over a stream that is deleted and recreated. The leases of the query then begin again."""

    made = 1000
    anew: ClassVar = {"lease.ifRecreated": "TRIM_HORIZON"}

    @rule(more=st.sampled_from([(), ("e",)]))
    def recreate(self, more: tuple[str, ...]) -> None:
        """Recreate the stream. Its records are gone, and it has the same shards and perhaps one more."""
        self.stream.recreate("a", "b", *more)
        self.repetitions_allowed = True

    @rule()
    def let_listing_become_due(self) -> None:
        """Let enough time pass for the shards to be listed again."""
        self.clock.now += SAFETY_SECONDS

    def teardown(self) -> None:
        """Check that every record of the current stream arrives once the shards were listed again."""
        if hasattr(self, "store"):
            self.let_listing_become_due()
        super().teardown()


def _rows(reader: LeasedReader, part: Any) -> Iterator[Row]:  # noqa: ANN401  Spark's own
    for batch in reader.read(part):
        yield from rows_of(batch)


for machine in (Spark, EventHubsSpark, RecreatedSpark):
    machine.TestCase.settings = settings(max_examples=30, stateful_step_count=25)
TestSpark, TestEventHubsSpark, TestRecreatedSpark = Spark.TestCase, EventHubsSpark.TestCase, RecreatedSpark.TestCase
