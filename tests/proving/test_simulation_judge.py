"""The judge finds and names each breach that is planted into the history of a run without breaches."""

import functools
import re
from collections.abc import Callable, Iterable

import pytest
from attrs import evolve

from leasehold.adapters.sources.call_timeouts import POLL_TIMEOUTS
from leasehold.balancer.config import Config
from leasehold.balancer.model import SHARD_END, Lease, Position, Version
from leasehold_lab.judge.breach import Breach, BreachKind, JudgeLimits
from leasehold_lab.judge.events import ReadingEvent, RunHistory, WriteAnswer, WriteEvent, WriteVerb
from leasehold_lab.judge.explanations import LAWS, judge_history
from leasehold_lab.judge.run import JudgedRun
from leasehold_lab.simulator.run import run
from leasehold_lab.simulator.scenario import Nap, Network, create_cold_fleet, name_group_workers

CONFIG = Config()
A, B = name_group_workers(0, 2)
SETTLED = 80.0
LIMITS = JudgeLimits(lease_seconds={A: 10.0, B: 10.0}, settled=SETTLED, moves=(SETTLED, 0))


@functools.cache
def good_history() -> RunHistory:
    """Run two workers that start together, share four leases, and read."""
    fleet = create_cold_fleet(4, (A, B), CONFIG, seed=1, start="together", cycles=5)
    scenario = evolve(fleet.scenario, reading=True, full=True, calm=60.0, scan_per_cycle=True)
    return run(scenario)


def history_with(*writes: WriteEvent, events: tuple[ReadingEvent, ...] = ()) -> RunHistory:
    """Return the good history with these writes and events added."""
    history = good_history()
    return evolve(
        history,
        writes=sorted([*history.writes, *writes], key=lambda write: write.t),
        events=sorted([*history.events, *events], key=lambda event: event.t),
    )


def find_last_write(key: str, t: float, verbs: tuple[WriteVerb, ...] = ("renew", "checkpoint", "claim")) -> WriteEvent:
    """Return the last write of this lease before the time `t`."""
    return [write for write in good_history().writes if write.key == key and write.t < t and write.verb in verbs][-1]


def other_worker(write: WriteEvent) -> str:
    """Return the worker that did not make this write."""
    return B if write.worker == A else A


def write_of_second_process(
    row_before: Lease | None, row_after: Lease | None, t: float, worker: str, verb: WriteVerb
) -> WriteEvent:
    """Return a write that a second process made."""
    return WriteEvent(
        t,
        t - 0.01,
        worker,
        f"{worker}#9",
        verb,
        row_after.key if row_after else "s-0",
        row_before,
        row_after,
        done=True,
    )


def taking_write(verb: WriteVerb, t: float, epoch: int = 1) -> WriteEvent:
    """Return the write by which the other worker takes lease s-0 at the time `t`."""
    last_write = find_last_write("s-0", t)
    row = last_write.after
    assert row is not None
    taken_row = evolve(
        row, owner=other_worker(last_write), epoch=row.epoch + epoch, version=Version(str(row.epoch + epoch))
    )
    return write_of_second_process(row, taken_row, t, other_worker(last_write), verb)


def two_holders() -> RunHistory:
    """Claim a lease that was renewed a moment ago."""
    return history_with(taking_write("claim", 50.0))


def counter() -> RunHistory:
    """Change the owner without incrementing the counter."""
    return history_with(taking_write("steal", 50.0, epoch=0))


def checkpoint_went_back() -> RunHistory:
    """Write a checkpoint before the previous one."""
    row = find_last_write("s-0", 50.0).after
    assert row is not None
    return history_with(
        write_of_second_process(row, evolve(row, checkpoint=Position("100")), 50.0, row.owner or "", "checkpoint")
    )


def held_by_nobody() -> RunHistory:
    """Release a lease that is never taken again."""
    row = good_history().writes[-1].after
    assert row is not None
    return history_with(
        write_of_second_process(row, evolve(row, owner=None, epoch=row.epoch + 1), 90.0, row.owner or "", "release")
    )


def action_at_balance() -> RunHistory:
    """Add a rejected steal among balanced workers."""
    return history_with(evolve(taking_write("steal", 90.0), done=False))


def needless_move() -> RunHistory:
    """Add a successful steal among balanced workers."""
    return history_with(taking_write("steal", 90.0))


def uneven() -> RunHistory:
    """Add a successful steal, and nothing after it."""
    return history_with(taking_write("steal", good_history().end))


def history_with_lost_record() -> RunHistory:
    """Leave out a record."""
    history = good_history()
    return evolve(history, events=[event for event in history.events if (event.key, event.digest) != ("s-0", "105")])


def never_read() -> RunHistory:
    """Leave out all events after 55 s, so that the last records are never handled."""
    history = good_history()
    return evolve(history, events=[event for event in history.events if event.t < 55.0])


def out_of_order() -> RunHistory:
    """Make s-1 a child of s-0, so that the child was read before its parent was read to the end."""
    return evolve(good_history(), parents={**good_history().parents, "s-1": ("s-0",)})


def history_with_swapped_records() -> RunHistory:
    """Swap two records of one key."""
    number_by_number = {105: 106, 106: 105}
    events = [
        evolve(event, place=(number, 0), digest=str(number))
        if (event.event, event.shard) == ("record", "s-0") and (number := number_by_number.get(event.place[0]))
        else event
        for event in good_history().events
    ]
    return evolve(good_history(), events=events)


def handed_over_again() -> RunHistory:
    """Handle a record at or before the checkpoint from which its reader started."""
    steal = taking_write("steal", 50.0)
    return history_with(steal, events=(*begin_events(steal), record(steal, 100)))


def handed_over_unheld() -> RunHistory:
    """Handle a record in a process that never held its shard."""
    steal = taking_write("steal", 50.0)
    return history_with(events=(*begin_events(steal), record(steal, 101)))


def token() -> RunHistory:
    """Give two processes the same token."""
    steal = taking_write("steal", 50.0)
    token = next(event.token for event in good_history().events if (event.event, event.shard) == ("record", "s-0"))
    return history_with(steal, events=(*begin_events(steal), evolve(record(steal, 101), token=token)))


def begin_events(taking: WriteEvent) -> tuple[ReadingEvent, ...]:
    """Return the event by which the new owner begins to read, a moment after it wrote."""
    return (ReadingEvent(taking.t + 0.05, taking.process, "initialize", taking.key),)


def record(taking: WriteEvent, number: int) -> ReadingEvent:
    """Return the event by which the new owner handles this record."""
    return ReadingEvent(taking.t + 0.1, taking.process, "record", taking.key, (number, 0), taking.key, str(number))


def unfinished() -> RunHistory:
    """Write a checkpoint past records that no handler has finished."""
    row = find_last_write("s-0", 50.0).after
    assert row is not None
    end = max(event.place[0] for event in good_history().events if (event.event, event.shard) == ("record", "s-0"))
    return history_with(
        write_of_second_process(row, evolve(row, checkpoint=Position(str(end))), 50.0, row.owner or "", "checkpoint")
    )


def history_with_unsent_record() -> RunHistory:
    """Handle a record that the stream never accepted."""
    return evolve(
        good_history(),
        sent=[
            sent_record
            for sent_record in good_history().sent
            if (sent_record.key, sent_record.digest) != ("s-0", "105")
        ],
    )


def history_with_repeated_record() -> RunHistory:
    """Handle a record again in a process whose own handler had finished it."""
    first_event = next(event for event in good_history().events if (event.event, event.place[0]) == ("record", 105))
    return history_with(events=(evolve(first_event, t=first_event.t + 5.0),))


def held_unread() -> RunHistory:
    """Keep renewing a shard without reading it."""
    events = [event for event in good_history().events if event.shard != "s-0" or event.t < 10.0]
    return evolve(good_history(), events=events)


def unforeseen() -> RunHistory:
    """Record an exception that no code handles."""
    return evolve(good_history(), faults=["a-000#0: KeyError"])


def checkpoint_of_another() -> RunHistory:
    """Confirm a checkpoint after another worker has taken the lease. Only the processes record the writes."""
    row = find_last_write("s-0", 50.0)
    new_owner, owner = f"{other_worker(row)}#9", row.process
    write_answers = [
        WriteAnswer(1.0, 0.9, owner, "claim", "s-0", "done", row.worker, "1", 1),
        WriteAnswer(4.0, 3.9, new_owner, "steal", "s-0", "done", other_worker(row), "2", 2),
        WriteAnswer(5.0, 4.9, owner, "checkpoint", "s-0", "done", row.worker, "3", 3),
    ]
    return evolve(good_history(), writes=[], answers=write_answers)


def finished_again() -> RunHistory:
    """Handle the records of a shard again after its end was checkpointed."""
    record = next(event for event in good_history().select_events("record") if event.shard == "s-0")
    second_process = f"{record.worker}#9"
    repeated_events = [
        ReadingEvent(90.0, second_process, "initialize", "s-0"),
        evolve(record, t=91.0, process=second_process),
    ]
    end = WriteAnswer(80.0, 79.9, record.process, "checkpoint", "s-0", "done", checkpoint=SHARD_END.order)
    return evolve(good_history(), writes=[], answers=[end], events=[*good_history().events, *repeated_events])


PLANTED: dict[Callable[[], RunHistory], BreachKind] = {
    two_holders: "two holders",
    counter: "counter",
    checkpoint_went_back: "checkpoint went back",
    held_by_nobody: "held by nobody",
    action_at_balance: "action at balance",
    needless_move: "needless move",
    uneven: "uneven",
    history_with_lost_record: "lost",
    out_of_order: "out of order",
    history_with_swapped_records: "out of order",
    handed_over_again: "dispatched again",
    handed_over_unheld: "dispatched unheld",
    token: "token",
    unfinished: "unfinished",
    history_with_unsent_record: "stranger",
    history_with_repeated_record: "repeated",
    held_unread: "held unread",
    unforeseen: "unforeseen",
    checkpoint_of_another: "checkpoint of another",
    finished_again: "dispatched again",
}


def test_good_run_has_no_breach() -> None:
    """A good run breaks no law, so the planted breaches are the only ones."""
    assert judge_history(good_history(), LIMITS) == ()


@pytest.mark.parametrize(("history", "what"), PLANTED.items(), ids=lambda each: getattr(each, "__name__", ""))
def test_planted_breach_is_named(history: Callable[[], RunHistory], what: BreachKind) -> None:
    """The judge names each planted breach, with the time and the lease or the worker."""
    breaches = [breach for breach in judge_history(history(), LIMITS) if breach.what == what]
    assert breaches
    for breach in breaches:  # The text contains the breach, its time, and its lease or worker.
        assert str(breach).startswith(f"{what} at {breach.t:.3f} s: ")
        assert re.search(r"\b(s-\d|a-00\d)", breach.why)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_each_law_is_broken_only_by_planted_faults(law: Callable[[JudgedRun], Iterable[Breach]]) -> None:
    """Every law is part of the verdict, and finds at least one of the planted breaches."""
    assert list(law(JudgedRun(good_history(), LIMITS))) == []
    assert any(list(law(JudgedRun(history(), LIMITS))) for history in PLANTED)


def test_records_unread_at_the_end_are_lost() -> None:
    """The judge reports records of a shard that had no reader at the end."""
    assert any(
        breach.what == "lost" and "never dispatched" in breach.why for breach in judge_history(never_read(), LIMITS)
    )


def test_breach_contains_workers_and_reason() -> None:
    """The description of a breach contains the workers and the reason."""
    (breach,) = [
        found_breach for found_breach in judge_history(two_holders(), LIMITS) if found_breach.what == "two holders"
    ]
    last_write = find_last_write("s-0", 50.0)
    holding_end = last_write.sent + 0.999 * 10
    holding_period = (
        f"{last_write.process} held until {holding_end:.3f} by its {last_write.verb} of {last_write.sent:.3f}"
    )
    assert breach == Breach("two holders", 50.0, f"{other_worker(last_write)}#9 claimed s-0, which {holding_period}")


@pytest.mark.parametrize(("limits", "unread"), [((5.0,), True), (POLL_TIMEOUTS, False)], ids=["fixed", "growing"])
def test_a_shard_that_a_slow_stream_leaves_unread_is_seen(limits: tuple[float, ...], unread: bool) -> None:
    """The judge reports a shard as unread if all its reads time out."""
    fleet = create_cold_fleet(4, (A, B), CONFIG, seed=1, start="together", cycles=5)
    slow_network = Network(slow=(Nap(30.0, 120.0),), patience=limits)
    scenario = evolve(fleet.scenario, reading=True, full=True, seconds=240.0, calm=160.0, network=slow_network)
    breaches = [breach.what for breach in judge_history(run(scenario), JudgeLimits(lease_seconds={A: 10.0, B: 10.0}))]
    assert set(breaches) == ({"held unread"} if unread else set())
