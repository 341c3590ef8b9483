"""Whatever a user's functions raise or return, no unfinished record is checkpointed, and every held shard is read."""

import logging
from collections import Counter
from collections.abc import Iterator

import pytest
from attrs import evolve

from leasehold.balancer.config import Config
from leasehold.balancer.model import TRIM_HORIZON, Lease, Position
from leasehold_lab.judge.breach import JudgeLimits
from leasehold_lab.judge.events import ReadingEvent, RunHistory, WriteEvent
from leasehold_lab.judge.explanations import judge_history
from leasehold_lab.simulator.call_faults import HARMLESS, POISON, CallableFault, CallableKind, Deviation, is_poisonous
from leasehold_lab.simulator.run import run
from leasehold_lab.simulator.scenario import Member, Scenario

pytestmark = pytest.mark.slow

WORKERS = ("a-0", "a-1")
CONFIG = Config(initial_position=TRIM_HORIZON)
SECONDS, SETTLED = 180.0, 150.0
LIMITS = JudgeLimits(dict.fromkeys(WORKERS, CONFIG.lease_seconds), SETTLED, callable_faults=True)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Silence the log, because faults are expected."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def run_with_fault(callable_kind: CallableKind, deviation: Deviation, seconds: float = 25.0) -> RunHistory:
    """Run two workers with four shards. One worker has a faulty function for a while. Return the history."""
    members = tuple(Member(worker, CONFIG) for worker in WORKERS)
    owners = (WORKERS[0],) * 2 + (WORKERS[1],) * 2
    faults = (CallableFault(WORKERS[0], callable_kind, deviation, 20.0, seconds),)
    return run(Scenario(1, owners, members, SECONDS, calm=100.0, reading=True, full=True, callable_faults=faults))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("whose", ["handler", "observer", "measure"])
@pytest.mark.parametrize("what", HARMLESS)
def test_both_laws_hold_whatever_a_callable_does(whose: CallableKind, what: Deviation) -> None:
    """No record is lost, and no shard is held without being read."""
    assert judge_history(run_with_fault(whose, what), LIMITS) == ()


def run_with_poison(*more: CallableFault) -> RunHistory:
    """Run a fleet whose handlers fail on poisonous records for a while, with additional faults.

    At first the handlers hang, so that later batches are long, with poisonous records between other ones.
    """
    members = tuple(Member(worker, CONFIG) for worker in WORKERS)
    owners = (WORKERS[0],) * 2 + (WORKERS[1],) * 2
    hanging_handlers = tuple(CallableFault(worker, "handler", "hang", 20.0, 20.0) for worker in WORKERS)
    poisonous_handlers = tuple(CallableFault(worker, "handler", "poison", 40.0, 60.0) for worker in WORKERS)
    faults = (*more, *hanging_handlers, *poisonous_handlers)
    return run(Scenario(1, owners, members, SECONDS, calm=100.0, reading=True, full=True, callable_faults=faults))


def test_only_poisonous_records_become_dead_letters() -> None:
    """Records next to a poisonous one are handled as usual, and no poisonous record is skipped."""
    history = run_with_poison()
    assert judge_history(history, LIMITS) == ()
    dead_letters = {(event.shard, event.place) for event in history.select_events("dead-lettered")}
    finished_records = {(event.shard, event.place) for event in history.select_events("finished")}
    dispatched_records = {(event.shard, event.place) for event in history.select_events("record")}
    assert dead_letters
    assert all(is_poisonous(str(number)) for _, (number, _) in dead_letters)
    assert dead_letters | finished_records == dispatched_records
    records_per_batch = Counter((event.t, event.shard) for event in history.select_events("record"))
    assert max(records_per_batch.values()) > 3 * POISON, "long batches were searched"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("what", HARMLESS)
def test_both_laws_hold_whatever_a_dead_letter_sink_does(what: Deviation) -> None:
    """No checkpoint passes a record that reached neither its handler nor the dead letters."""
    history = run_with_poison(CallableFault(WORKERS[0], "dead letter", what, 40.0, 30.0))
    assert judge_history(history, LIMITS) == ()
    assert {event.process.partition("#")[0] for event in history.select_events("dead-lettered")} == set(WORKERS)


def test_hanging_handler_is_reported_as_unread() -> None:
    """The judge reports a shard that is not read while its lease is renewed."""
    breaches = judge_history(run_with_fault("handler", "hang", 100.0), LIMITS)
    assert {breach.what for breach in breaches} == {"held unread"}


def test_checkpoint_after_unfinished_record_is_reported() -> None:
    """The judge reports a checkpoint after a record that no handler has finished."""
    lease_before = Lease("s-0", owner="a-0", checkpoint=Position("100"))
    lease_after = evolve(lease_before, checkpoint=Position("102"))
    history = RunHistory()
    for number in (100, 101, 102):
        history.events.append(ReadingEvent(1.0, "a-0#0", "record", "s-0", (number, 0)))
    for number in (100, 101):
        history.events.append(ReadingEvent(1.0, "a-0#0", "finished", "s-0", (number, 0)))
    history.writes.append(
        WriteEvent(2.0, 2.0, "a-0", "a-0#0", "checkpoint", "s-0", lease_before, lease_after, done=True)
    )
    assert [str(breach) for breach in judge_history(history, JudgeLimits()) if breach.what == "unfinished"] == [
        "unfinished at 2.000 s: a-0#0 checkpointed 102 of s-0, and no handler has finished 102",
    ]
