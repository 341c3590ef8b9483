"""A worker that is paused during any kind of event that can happen to its leases breaks no law.

Records that were checkpointed during the pause are not handled again, and all other records that still exist are
handled.
"""

from collections.abc import Iterator

import pytest
from attrs import evolve
from every_call import CONFIG, HERO, PEER, PLAIN

from leasehold.balancer.model import SHARD_END
from leasehold_lab.simulator.question import suppress_logs
from leasehold_lab.simulator.run import run
from leasehold_lab.simulator.scenario import Member, Nap, Reshape, RowDeletion, Scenario
from leasehold_lab.simulator.world.world import SimulatedHistory

CALM, SECONDS = 190.0, 260.0
SLEEP_SECONDS = 130.0
RESET_AT = 110.0

SPLIT, AGAIN = Reshape(14.0, "split"), Reshape(50.0, "split")
EVENTS: dict[str, tuple[Reshape, ...]] = {
    "expired": (),
    "finished before": (Reshape(9.0, "split"),),
    "split": (SPLIT,),
    "merged": (Reshape(14.0, "merge"),),
    "split twice": (SPLIT, AGAIN),
    "split and merged": (SPLIT, Reshape(50.0, "merge")),
    "split and gone from the stream": (SPLIT, Reshape(100.0, "expire")),
    "split twice and gone from the stream": (SPLIT, AGAIN, Reshape(100.0, "expire")),
    "split and reset": (SPLIT, Reshape(RESET_AT, "reset")),
    "split twice and reset": (SPLIT, AGAIN, Reshape(RESET_AT, "reset")),
    "reset": (Reshape(RESET_AT, "reset"),),
}

SLEEPY = evolve(PLAIN, seconds=SECONDS, calm=CALM, handling_seconds=0.05)
LAYOUTS: dict[str, Scenario] = {
    "rows": SLEEPY,
    "dated objects": evolve(SLEEPY, dated=True),
    "sessions": evolve(SLEEPY, sessions=True),
    "no hash ranges": evolve(SLEEPY, ranged=False),
    "swapped": evolve(SLEEPY, swaps=(30.0,)),
    "swapped to sessions": evolve(SLEEPY, swaps=(30.0,), sessions=True),
    "emptied": evolve(SLEEPY, emptyings=(RowDeletion(30.0),)),
}
MOMENTS = [10.0 + 0.75 * step for step in range(8)]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Silence the log, because faults are expected."""
    with suppress_logs():
        yield


def simulate_pause(scenario: Scenario, events: tuple[Reshape, ...], pause_time: float) -> SimulatedHistory:
    """Return the history of a fleet in which the worker under test (the hero) is paused at the time `pause_time`."""
    members = (Member(HERO, CONFIG, naps=(Nap(pause_time, SLEEP_SECONDS),)), Member(PEER, CONFIG))
    return run(evolve(scenario, members=members, reshapes=events))


def describe_repeated_records(history: SimulatedHistory, reset_at: float) -> list[str]:
    """Describe the records that were handled although a checkpoint at or after them had been stored before.

    A reset makes the checkpoints of open shards void.
    """
    steps = [
        (write.t, write.key, write.after.checkpoint.order)
        for write in history.writes
        if write.done and write.verb == "checkpoint" and write.after is not None
        if not write.sent < reset_at <= write.t
    ]
    steps += [
        (write_answer.t, write_answer.shard, write_answer.checkpoint)
        for write_answer in history.answers
        if write_answer.done and write_answer.verb == "checkpoint"
        if not write_answer.sent < reset_at <= write_answer.t
    ]
    descriptions, furthest_checkpoints, was_reset = list[str](), dict[str, tuple[int, int, int]](), False
    steps.sort(reverse=True)
    for event in history.select_events("record"):
        while steps and steps[-1][0] < event.t:
            step_time, shard, order = steps.pop()
            if step_time >= reset_at and not was_reset:
                furthest_checkpoints, was_reset = _ended(furthest_checkpoints), True
            furthest_checkpoints[shard] = max(order, furthest_checkpoints.get(shard, order))
        if event.t >= reset_at and not was_reset:
            furthest_checkpoints, was_reset = _ended(furthest_checkpoints), True
        if (1, *event.place) <= furthest_checkpoints.get(event.shard, (0, 0, 0)):
            descriptions.append(f"{event.shard} {event.digest} at {event.t:.1f} s by {event.process}")
    return descriptions


def _ended(furthest: dict[str, tuple[int, int, int]]) -> dict[str, tuple[int, int, int]]:
    return {shard: order for shard, order in furthest.items() if order == SHARD_END.order}


def describe_unhandled_records(history: SimulatedHistory) -> list[str]:
    """Describe the records that no worker handled."""
    finished_records = {(event.shard, event.digest) for event in history.select_events("finished")}
    return [
        f"{record.key} {record.digest}"
        for record in history.sent
        if (record.key, record.digest) not in finished_records
    ]


def breaches(layout: str, event: str, pause_time: float) -> dict[str, list[str]]:
    """Return the breaches in one scenario, by a description of the scenario and the kind of breach."""
    reset_times = [reshape.at for reshape in EVENTS[event] if reshape.what == "reset"]
    history = simulate_pause(LAYOUTS[layout], EVENTS[event], pause_time)
    cases_by_kind = {
        "handled again": describe_repeated_records(history, min(reset_times, default=SECONDS)),
        "never handled": describe_unhandled_records(history),
        "unforeseen": history.faults,
    }
    return {
        f"{layout}, {event}, asleep at {pause_time}: {kind}": cases for kind, cases in cases_by_kind.items() if cases
    }


@pytest.mark.parametrize("event", EVENTS)
def test_worker_after_a_pause_repeats_no_records(event: str) -> None:
    """After a pause, a worker trusts the table, repeats no checkpointed record, and leaves others their shards."""
    assert breaches("rows", event, 12.0) == {}


@pytest.mark.more
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pause_at_any_moment_breaks_no_law(layout: str) -> None:
    """A pause at any moment of any event breaks no law, in each layout."""
    assert [
        cases_by_breach
        for event in EVENTS
        for pause_time in MOMENTS
        if (cases_by_breach := breaches(layout, event, pause_time))
    ] == []
