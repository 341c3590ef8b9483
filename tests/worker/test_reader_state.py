"""What the reader of a lease does next, decided without I/O. The tests cover each row of the tables in its module."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from leasehold.adapters.consumer.cursor import (
    AwaitEvent,
    CloseLostShard,
    DeliverRows,
    EndShard,
    OpenReader,
    ReadBatch,
    ReleaseAt,
    StoreCheckpoint,
)
from leasehold.adapters.consumer.reader_state import (
    FAULT_WAITS,
    PARENT_WAITS,
    REJECTED_WAITS,
    BeginReading,
    ConsumerKind,
    ReaderState,
    RequestFinalCheckpoint,
)
from leasehold.adapters.sources.protocol import REJECTION_RETRIES, Batch, TransientRejection
from leasehold.balancer.model import SHARD_END, TRIM_HORIZON, Position
from leasehold.errors import SourceError

TEN, TWENTY, THIRTY = Position("10"), Position("20"), Position("30")
HELD: dict[str, Any] = {"lost": False, "releasing": False, "expired": False}


def state_of(kind: ConsumerKind = "returns") -> ReaderState:
    """Return a state whose first reader is open at position 10. Each of its random waits has the maximum length."""
    state = ReaderState(TEN, lambda _low, high: high, kind)
    state.reading_begun()
    state.cursor.reader_opened()
    return state


def read_to(state: ReaderState, position: Position, now: float = 0.0, *, gap: float = 0.0) -> Batch:
    """Pass a batch that ends at this position to the state, and return the batch."""
    batch = Batch((), position, 0.0, 1.0, disconnected_seconds=gap)
    state.cursor.batch_read(position)
    state.batch_read(batch, now, renew_seconds=3.0)
    return batch


def test_reading_begins_after_the_parents_with_growing_waits() -> None:
    """The first order begins the reading. The waits for parents then grow up to their maximum."""
    state = ReaderState(TRIM_HORIZON, lambda low, _high: low)
    assert state.next_order(0.0, TEN, **HELD) == BeginReading()
    assert [state.parents_pending() for _ in range(5)] == [1.0, 2.0, 4.0, PARENT_WAITS[1], PARENT_WAITS[1]]
    state.reading_begun()
    assert state.next_order(0.0, TEN, **HELD) == OpenReader(TRIM_HORIZON)


def test_resting_state_may_still_release_and_checkpoint() -> None:
    state = state_of()
    read_to(state, TWENTY)
    assert state.pause_until(5.0) == 5.0
    assert state.next_order(4.9, TEN, **HELD) == AwaitEvent()
    assert state.next_order(4.9, TEN, **{**HELD, "releasing": True}) == ReleaseAt(TEN)
    assert state.next_order(4.9, TEN, **{**HELD, "lost": True}) == CloseLostShard()
    assert state.next_order(5.0, TEN, **HELD) == DeliverRows()
    state.cursor.rows_delivered(TWENTY)
    state.cursor.consumer_acknowledged(TWENTY)
    state.pause_until(9.0)
    assert state.next_order(5.0, TEN, **HELD) == StoreCheckpoint(TWENTY)


def test_batch_is_followed_by_its_own_wait() -> None:
    state = state_of()
    read_to(state, TWENTY, now=7.0)
    assert state.wait_for_next_read() == 8.0


def test_waits_after_faults_grow_until_a_step_succeeds() -> None:
    state = state_of()
    waits = [state.step_failed(0.0) for _ in range(10)]
    assert waits == sorted(waits)
    assert (waits[0] < waits[-1], waits[-1]) == (True, FAULT_WAITS[1])
    assert state.next_order(9.9, TEN, **HELD) == AwaitEvent()
    state.step_done()
    assert state.step_failed(0.0) == waits[0]


def test_rejection_is_retried_until_a_response_ends_the_series() -> None:
    """Only a response shows that the rejections have ended. A step that sends no request does not reset the retries."""
    state, rejection = state_of(), TransientRejection("the token is new")

    def count_retries() -> int:
        return sum(state.request_rejected(rejection, 0.0) is not None for _ in range(REJECTION_RETRIES + 2))

    assert count_retries() == REJECTION_RETRIES
    state.step_done()
    state.source_responded(Batch((), None, None, 1.0, fault="no response"))
    assert count_retries() == 0
    state.source_responded(Batch((), None, 0.0, 1.0))
    retry_time = state.request_rejected(rejection, 0.0)
    assert retry_time is not None
    assert REJECTED_WAITS[0] <= retry_time <= REJECTED_WAITS[1]
    assert state_of().request_rejected(SourceError("no such stream"), 0.0) is None


def test_lease_is_confirmed_after_a_gap_in_the_connection() -> None:
    """During a gap that is longer than a renewal interval, another reader may have taken over the connection."""
    state = state_of()
    unconfirmed_states = list[bool]()
    for gap in (3.0, 3.1, 0.0):
        read_to(state, TWENTY, gap=gap)
        unconfirmed_states.append(state.must_confirm_lease)
    state.lease_confirmed()
    assert [*unconfirmed_states, state.must_confirm_lease] == [False, True, True, False]


def test_plain_handler_gets_unfinished_records_again() -> None:
    state = state_of()
    read_to(state, TWENTY)
    state.cursor.rows_delivered(TWENTY)
    assert state.next_order(0.0, TEN, **HELD) == DeliverRows()


def test_piece_within_an_aggregated_record_leaves_the_rest_unfinished() -> None:
    """A piece may end between two user records of the batch's last aggregated record."""
    state = state_of()
    batch = read_to(state, Position("20", 9))
    state.cursor.rows_delivered(Position("20", 9))
    assert not state.piece_done(batch, Position("20", 3))
    assert state.cursor.acknowledged == Position("20", 3)


def test_handler_that_checkpoints_has_finished_up_to_its_checkpoint() -> None:
    state = state_of("checkpoints")
    batch = read_to(state, THIRTY)
    state.cursor.rows_delivered(THIRTY)
    assert state.piece_done(batch, None)
    assert state.cursor.acknowledged == TEN
    assert state.next_order(0.0, TWENTY, **HELD) == StoreCheckpoint(TWENTY)
    assert (state.cursor.acknowledged, state.cursor.delivered) == (TWENTY, THIRTY)
    assert state.next_order(0.0, TWENTY, **{**HELD, "releasing": True}) == RequestFinalCheckpoint(ended=False)
    state.skip_final_checkpoint = True
    assert state.next_order(0.0, TWENTY, **{**HELD, "releasing": True}) == ReleaseAt(TWENTY)
    assert state.next_order(0.0, TWENTY, **{**HELD, "releasing": True, "lost": True}) == CloseLostShard()


def test_handler_that_checkpoints_is_asked_at_the_shard_end() -> None:
    state = state_of("checkpoints")
    read_to(state, SHARD_END)
    state.cursor.rows_delivered(SHARD_END)
    assert state.next_order(0.0, TEN, **HELD) == RequestFinalCheckpoint(ended=True)
    state.pause_until(state.end_not_checkpointed())
    assert state.next_order(0.0, TEN, **HELD) == AwaitEvent()


def test_failures_are_forgotten_once_everything_that_failed_was_delivered() -> None:
    """Delivering the batches before the failed one again does not reset its number of attempts."""
    state = state_of("checkpoints")
    read_to(state, THIRTY)
    state.consumer_failed(TWENTY)
    assert not state.failures_redelivered
    state.cursor.rows_delivered(TWENTY)
    assert state.failures_redelivered


def test_next_checkpoint_is_due_after_a_pause_or_with_all_leases() -> None:
    """Checkpoints that are written together are due together.

    A checkpoint that a release will write moves no position.
    """
    state = state_of()
    read_to(state, TWENTY)
    state.cursor.rows_delivered(TWENTY)
    state.cursor.consumer_acknowledged(TWENTY)
    assert state.due_checkpoint(0.0) == TWENTY
    state.checkpoint_stored(None, 7.0, 5.0, aligned=False)
    assert (state.cursor.committed, state.checkpoint_due, state.due_checkpoint(11.9)) == (TEN, 12.0, None)
    state.checkpoint_stored(TWENTY, 12.0, 5.0, aligned=True)
    assert (state.cursor.committed, state.checkpoint_due) == (TWENTY, 15.0)
    state.checkpoint_stored(TWENTY, 12.0, 0.0, aligned=True)
    assert state.checkpoint_due == 12.0


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(("read", "deliver", "pass", "fail", "drop", "reject", "rest", "gap", "checkpoint", "store")),
        st.integers(1, 9),
    ),
    max_size=40,
)
LEASE_FACTS = st.fixed_dictionaries(
    {name: st.booleans() for name in ("lost", "releasing", "expired", "can_deliver", "can_read")}
)


@given(st.sampled_from(("returns", "checkpoints", "commits")), EVENTS, LEASE_FACTS)
def test_no_order_skips_a_record(kind: ConsumerKind, events: list[tuple[str, int]], facts: dict[str, bool]) -> None:
    """Only acknowledged positions are stored, and reading continues directly after the rows in memory."""
    state, now, finished_position = state_of(kind), 0.0, TEN
    for event, number in events:
        now += 0.5
        cursor = state.cursor
        match event:
            case "read" if cursor.reader_open:
                read_to(state, Position(str(int(cursor.read.sequence) + number)), now)
            case "deliver":
                cursor.rows_delivered(cursor.read)
            case "pass" if cursor.has_unacknowledged:
                finished_position = max(finished_position, cursor.delivered, key=lambda position: position.order)
                state.piece_done(Batch((), cursor.read, 0.0, 1.0), cursor.delivered)
            case "checkpoint":
                state.checkpoint_moved(Position(str(int(cursor.acknowledged.sequence) + number)))
            case "fail":
                state.consumer_failed(cursor.read)
                cursor.consumer_gone()
                state.step_failed(now)
            case "drop":
                cursor.consumer_gone()
                cursor.rows_dropped()
            case "reject":
                state.request_rejected(TransientRejection("soon"), now)
            case "rest":
                state.pause_until(now + number)
            case "store" if (position := state.due_checkpoint(now)) is not None:
                assert position.order <= cursor.acknowledged.order
                state.checkpoint_stored(position, now, number, aligned=False)
            case _:
                pass
        position_orders = [
            position_mark.order
            for position_mark in (cursor.committed, cursor.acknowledged, cursor.delivered, cursor.read)
        ]
        assert position_orders == sorted(position_orders)
        match next_order := state.next_order(now, cursor.committed, **facts):
            case StoreCheckpoint(position) | ReleaseAt(position):
                assert position.order <= cursor.acknowledged.order
            case OpenReader(position):
                assert position == cursor.read
            case DeliverRows() | ReadBatch():
                assert [facts[name] for name in HELD] == [False, False, False]
                assert now >= state.paused_until
            case EndShard():
                raise AssertionError(next_order)
            case _:
                pass


def test_wait_after_a_rejection_is_short_again_after_a_response() -> None:
    """A rejection that follows long after others waits no longer than the first one."""
    state, rejection = state_of(), TransientRejection("the token is new")
    waits = list[float | None]()
    for _ in range(2):
        waits += [state.request_rejected(rejection, 0.0) for _ in range(2)]
        state.source_responded(Batch((), None, 0.0, 1.0))
    assert waits[0] != waits[1]
    assert waits[2:] == waits[:2]


def test_checkpoint_may_reach_the_end_of_the_delivered_records_and_not_pass_it() -> None:
    """Positions are compared with their sub-sequence numbers, because a record may be part of an aggregate."""
    state = state_of("checkpoints")
    read_to(state, Position("20", 9))
    state.cursor.rows_delivered(Position("20", 4))
    for sub, acknowledged in ((3, 3), (5, 3), (4, 4)):
        state.checkpoint_moved(Position("20", sub))
        assert state.cursor.acknowledged == Position("20", acknowledged)
    state.consumer_failed(Position("20", 5))
    state.consumer_failed(Position("20", 2))
    assert not state.failures_redelivered
    state.cursor.rows_delivered(Position("20", 5))
    assert state.failures_redelivered


def test_release_waits_for_the_records_of_an_aggregate_and_stores_them() -> None:
    state = state_of("commits")
    read_to(state, Position("20", 9))
    state.cursor.rows_delivered(Position("20", 9))
    state.cursor.consumer_acknowledged(Position("20", 4))
    assert state.cursor.has_unacknowledged
    assert state.due_checkpoint(0.0) == Position("20", 4)
    state.checkpoint_stored(Position("20", 4), 0.0, 0.0, aligned=False)
    assert state.due_checkpoint(0.0) is None
    state.cursor.consumer_acknowledged(Position("20", 5))
    assert state.due_checkpoint(0.0) == Position("20", 5)


def test_end_that_spark_has_committed_is_written_before_a_release() -> None:
    state = state_of("commits")
    read_to(state, SHARD_END)
    state.cursor.rows_delivered(SHARD_END)
    facts = {**HELD, "releasing": True}
    assert state.next_order(0.0, TEN, **facts, awaits_commit=True) == AwaitEvent()
    assert state.next_order(0.0, TEN, **facts, awaits_commit=False) == ReleaseAt(TEN)
    state.cursor.consumer_acknowledged(SHARD_END)
    for awaits_commit in (True, False):
        assert state.next_order(0.0, TEN, **facts, awaits_commit=awaits_commit) == EndShard(())


def test_shard_that_was_not_begun_is_released_without_a_final_checkpoint() -> None:
    """Its handler has seen no record of the shard."""
    state = ReaderState(TEN, lambda low, _high: low, "checkpoints")
    assert state.next_order(0.0, TEN, **{**HELD, "releasing": True}) == ReleaseAt(TEN)


def test_piece_that_ends_with_its_batch_finishes_the_batch() -> None:
    state = state_of()
    batch = read_to(state, Position("20", 9))
    state.cursor.rows_delivered(Position("20", 9))
    assert [state.piece_done(batch, Position("20", sub)) for sub in (8, 9)] == [False, True]
    assert state.cursor.acknowledged == Position("20", 9)
