"""Injects each possible fault into each call of a worker, one at a time, and lets the judge check each history.

Each scenario is a small fleet under virtual time. A scenario is run once without faults, to number its calls. Then it
is
run again for each call of the worker under test and for each fault that such a call can have (`faults_of`). SQLite
itself is tested in a similar way. `python tests/proving/every_call.py` runs all combinations on all cores.
"""

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import chain, pairwise
from typing import Annotated

import typer
from attrs import evolve, frozen
from rich.console import Console
from rich.progress import track

from leasehold.balancer.config import Config
from leasehold.balancer.model import LATEST, TRIM_HORIZON
from leasehold_lab.judge.breach import JudgeLimits
from leasehold_lab.judge.events import RunHistory
from leasehold_lab.judge.explanations import judge_history
from leasehold_lab.judge.rights import measure_unowned_seconds
from leasehold_lab.processes import processes
from leasehold_lab.simulator.call_faults import DEATHS, DENIED, READ_CALLS, CallableFault, CallEvent, CallFault
from leasehold_lab.simulator.question import suppress_logs
from leasehold_lab.simulator.run import run
from leasehold_lab.simulator.scenario import Member, Network, Reshape, RowDeletion, Scenario
from leasehold_lab.simulator.world.world import FIRST_MS, FIRST_NUMBER, SimulatedHistory

app = typer.Typer(add_completion=False)

HERO, PEER = "a-0", "a-1"
CALM, SECONDS, AT_REST = 40.0, 60.0, 5.0

UNREAD_SECONDS = 21.0
"""The longest time, in seconds, that a shard may be unread: a lease and eight seconds after a death, or a hang of 15 s.
"""

PASSING_SECONDS = 5.0
"""The additional time, in seconds, that a shard may be unread if a service rejected a single call."""

SERVICES = ("store.", "source.", "reader.")

LONG = ("late", "hang", "freeze", "untrue")
"""Faults after which a worker may stop reading a lease that it still holds, because it cannot know that it holds it."""

FOREIGN = tuple(f"{effect}raise {name}" for effect in ("", "do + ") for name in ("value", "key", "memory", "recursion"))
"""Unexpected exceptions that a library used by a store or a source may raise once."""

PASSING = (
    *FOREIGN,
    "raise refused",
    "raise unavailable",
    "do + raise unavailable",
    "raise rejected",
    "do + raise rejected",
)
"""Temporary faults of a single request, after which the next request succeeds."""

ANY = ("value", "key", "os", "memory", "runtime", "timeout", "recursion", "unicode", "stop")
"""Exceptions that any library or function may raise."""

HEEDED = (
    "unanswered",
    "refused",
    "unavailable",
    "unreadable",
    "exit",
    "interrupt",
    "cancelled",
    "generator",
    "unheard",
)
"""Exceptions that mean something to a worker if a user's function raises them, and those that are no `Exception`."""

LATE = ("late + do", "do + late")
_OF_STORE = ("pause + raise unanswered", "raise refused", "hang + raise unanswered", "untrue", "freeze + do", *LATE)
OF_STORE_READS = (*_OF_STORE, "stale")
OF_STORE_WRITES = (
    *_OF_STORE,
    "do + pause + raise unanswered",
    "do + hang + raise unanswered",
    "send + pause + raise unanswered",
    "do + pause + do",
)
OF_SOURCE = (
    "raise unavailable",
    "do + raise unavailable",
    "hang + raise unavailable",
    "raise unreadable",
    "raise rejected",
    "do + raise rejected",
    "freeze + do",
    *LATE,
)
OF_READERS = (*OF_SOURCE, "untrue", "raise trimmed")
OF_CALLABLES = (*(f"raise {what}" for what in HEEDED), "do + raise exit", "hang + do", "answer", "generate")

CONFIG, LATE_STARTER = Config(initial_position=TRIM_HORIZON), Config(initial_position=LATEST)

PLAIN = Scenario(
    seed=1,
    owners=(HERO, PEER),
    members=(Member(HERO, CONFIG), Member(PEER, CONFIG)),
    seconds=SECONDS,
    calm=CALM,
    network=Network(latency=(0.01, 0.04), stall=0.0, unanswered=0.0, reading=(0.01, 0.1)),
    reading=True,
    read_seconds=2.0,
    full=True,
    handling_seconds=0.2,
    bench_seconds=10.0,
)
"""The members of a balanced fleet: two workers with one shard each."""

JOINS = 7.3


@frozen
class CallStory:
    """A scenario and a period. The calls of the worker under test (the hero) in this period get faults."""

    name: str
    since: float
    until: float
    scenario: Scenario = PLAIN


def _members(config: Config = CONFIG, *, hero: float = 0.0, peer: float = 0.0) -> tuple[Member, ...]:
    """Return the two workers, which start at these times."""
    return Member(HERO, config, starts=hero), Member(PEER, config, starts=peer)


STORIES = (
    CallStory("claiming", 0.0, 3.0, evolve(PLAIN, owners=(None, None), members=_members(peer=5.0))),
    CallStory("a new group", 0.0, 3.0, evolve(PLAIN, emptyings=(RowDeletion(0.0),), members=_members(peer=5.0))),
    CallStory("taking over", 8.0, 14.0, evolve(PLAIN, owners=("dead", "dead"), members=_members(peer=5.0))),
    CallStory("reading", 9.0, 13.0),
    CallStory("giving", JOINS, JOINS + 5.0, evolve(PLAIN, owners=(HERO, HERO), members=_members(peer=JOINS))),
    CallStory("being given", JOINS, JOINS + 5.0, evolve(PLAIN, owners=(PEER, PEER), members=_members(hero=JOINS))),
    CallStory(
        "draining",
        10.0,
        14.0,
        evolve(PLAIN, members=(Member(HERO, CONFIG, ends=11.2, ending="leave"), Member(PEER, CONFIG))),
    ),
    CallStory("the end of a shard", 9.5, 14.0, evolve(PLAIN, reshapes=(Reshape(10.0, "split"),))),
    CallStory(
        "starting at the latest",
        0.0,
        4.0,
        evolve(PLAIN, owners=(None, None), start=LATEST, members=_members(LATE_STARTER, peer=5.0)),
    ),
    CallStory(
        "starting children at the latest",
        0.0,
        4.0,
        evolve(PLAIN, owners=(None, None), start=LATEST, acknowledges="late", members=_members(LATE_STARTER, peer=5.0)),
    ),
    CallStory(
        "children that leave",
        10.0,
        14.0,
        evolve(
            PLAIN, acknowledges="late", members=(Member(HERO, CONFIG, ends=11.2, ending="leave"), Member(PEER, CONFIG))
        ),
    ),
    CallStory(
        "children at the end of a shard",
        8.0,
        10.75,
        evolve(PLAIN, acknowledges="late", reshapes=(Reshape(10.0, "split"),)),
    ),
    CallStory(
        "burying", 8.5, 13.0, evolve(PLAIN, callable_faults=(CallableFault(HERO, "handler", "poison", 8.5, 4.5),))
    ),
)


def calls_of(test_case: CallStory, history: SimulatedHistory) -> Iterator[tuple[int, CallEvent]]:
    """Yield the calls of the worker under test in the story's period, each with its number."""
    for number, call in enumerate(history.calls):
        if call.process.startswith(f"{HERO}#") and test_case.since <= call.t <= test_case.until:
            yield number, call


def call_faults(test_case: CallStory, *, exhaustive: bool = False) -> Iterator[CallFault]:
    """Yield all faults of the first call of each name. If `exhaustive` is True, yield all faults of all calls."""
    seen_calls: set[str] = set()
    for number, call in calls_of(test_case, undisturbed(test_case)):
        if exhaustive or call.what not in seen_calls:
            seen_calls.add(call.what)
            yield from (CallFault(number, fault) for fault in faults_of(call.what, exhaustive=exhaustive))


def faults_of(call_name: str, *, exhaustive: bool = False) -> tuple[str, ...]:
    """Return the faults that a call of this name can meet.

    Of the exceptions that any library may raise, one is raised before the effect of the call, and one after it. If
    `exhaustive`
    is True, each of these exceptions is raised both before and after the effect.
    """
    kind, _, verb = call_name.partition(".")
    if kind == "task":
        return ("raise runtime", "raise memory", "deny threads", "deny memory")
    possible_faults: tuple[str, ...]
    match kind:
        case "store":
            possible_faults = OF_STORE_READS if call_name in READ_CALLS else OF_STORE_WRITES
        case "source":
            possible_faults = (*OF_SOURCE, "untrue") if verb == "shards" else OF_SOURCE
        case "reader":
            possible_faults = OF_READERS if verb == "read" else OF_SOURCE
        case _:
            possible_faults = OF_CALLABLES
    all_exceptions = [f"{effect}raise {name}" for effect in ("", "do + ") for name in ANY]
    chosen_exceptions = all_exceptions if exhaustive else ("raise memory", "do + raise value")
    return (*possible_faults, *chosen_exceptions, "do + freeze", *_denials(call_name), *DEATHS)


def _denials(call_name: str) -> Iterator[str]:
    """Yield the steps that deny a resource that a call of this name needs."""
    return (f"deny {name}" for name, (prefixes, _) in DENIED.items() if call_name.startswith(prefixes))


def told(test_case: CallStory, *faults: CallFault) -> SimulatedHistory:
    """Run the scenario with these faults, and return its history. Records before the start of reading do not count."""
    history = run(evolve(test_case.scenario, call_faults=faults))
    first_numbers = {shard: _first_due(history, shard) for shard in history.parents}
    history.sent = [record for record in history.sent if record.number >= first_numbers[record.key]]
    return history


def breaches(test_case: CallStory, *faults: CallFault) -> tuple[str, ...]:
    """Run the scenario with these faults, and return all breaches.

    These are the breaches that the judge finds, and the shards that are read late or never.
    """
    history = told(test_case, *faults)
    limits = JudgeLimits(
        dict.fromkeys((HERO, PEER), CONFIG.lease_seconds),
        callable_faults=True,
        notice_seconds=0.0,
        acknowledged=test_case.scenario.acknowledges != "return",
    )
    is_brief = not any(step in call_fault.fault for call_fault in faults for step in LONG)
    undisturbed_history = undisturbed(test_case)
    calls_with_faults = [(undisturbed_history.calls[call_fault.number].what, call_fault.fault) for call_fault in faults]
    # A rejected read of the table may indicate an outage, which counts against no worker (C17).
    all_faults_pass = all(
        fault in PASSING and call_name.startswith(SERVICES) and call_name not in READ_CALLS
        for call_name, fault in calls_with_faults
    )
    unread_limit = max(unread(undisturbed_history, CALM, due=True).values()) + (
        PASSING_SECONDS if all_faults_pass else math.inf
    )
    unowned_seconds = measure_unowned_seconds(history, history.end, history.end - AT_REST)
    return (
        *map(str, judge_history(history, limits)),
        *(find_abandoned_leases(history) if is_brief else ()),
        *(
            f"held by nobody: {key} for {seconds:.1f} s at the end"
            for key, seconds in unowned_seconds.items()
            if seconds
        ),
        *_longer("unread", unread(history, history.end), UNREAD_SECONDS),
        *_longer("unread after a fault that passed", unread(history, CALM, due=True), unread_limit),
    )


def _longer(description: str, seconds: Mapping[str, float], limit: float) -> Iterator[str]:
    return (
        f"{description}: {key} for {longest_seconds:.1f} s"
        for key, longest_seconds in seconds.items()
        if longest_seconds > limit
    )


@cache
def undisturbed(test_case: CallStory) -> SimulatedHistory:
    """Return the history of the scenario without faults, which is computed once."""
    return told(test_case)


def find_abandoned_leases(history: RunHistory) -> Iterator[str]:
    """Yield the leases that a process stopped reading although it still held them.

    A process still held a lease if the last write of the lease was its own, and the lease had not expired.
    """
    for event in history.select_events("lease-lost"):
        earlier_writes = [
            write for write in history.writes if write.key == event.shard and write.done and write.t <= event.t
        ]
        last_write = earlier_writes[-1]
        is_own_write = (
            last_write.process == event.process
            and last_write.after is not None
            and last_write.after.owner == event.worker
        )
        if is_own_write and event.t < last_write.sent + CONFIG.lease_seconds:
            yield f"lost lease: {event.process} left {event.shard} at {event.t:.1f} s, which it held"


def unread(history: RunHistory, until: float, *, due: bool = False) -> Mapping[str, float]:
    """Return the longest time in seconds in which each shard was neither read nor handled before its end.

    The time counts from the first read of the shard. If `due` is True, it counts from the time when the shard could
    first
    be read, which is the start of the scenario or the end of the shard's parents.
    """
    times: dict[str, list[float]] = {shard: [] for shard in history.parents}
    for event in history.events:
        times[event.shard].append(event.t)
    end_times = {write.key: write.t for write in history.writes if write.done and write.after and write.after.ended}
    longest_gaps: dict[str, float] = {}
    for shard, parents in history.parents.items():
        due_times = [max((end_times.get(parent, until) for parent in parents), default=0.0)] if due else []
        activity_times = sorted(
            (*due_times, *(t for t in times[shard] if t <= until), min(end_times.get(shard, until), until))
        )
        longest_gaps[shard] = max(
            (later_time - earlier_time for earlier_time, later_time in pairwise(activity_times)), default=0.0
        )
    return longest_gaps


def _first_due(history: RunHistory, shard: str) -> int:
    """Return the number of the first record to read, which depends on the fixed start if reading starts at LATEST."""
    rows = (write.after for write in history.writes if write.done and write.key == shard)
    start_annotations = (row.annotation("latest_ms") for row in rows if row is not None)
    return FIRST_NUMBER + next((int(latest_ms) - FIRST_MS for latest_ms in start_annotations if latest_ms), 0)


def tried(index_and_fault: tuple[int, CallFault]) -> tuple[str, ...]:
    """Run one scenario, given by its index, with one fault, and return full descriptions of the breaches."""
    test_case, call_fault = STORIES[index_and_fault[0]], index_and_fault[1]
    breaches_found = breaches(test_case, call_fault)
    if not breaches_found:
        return ()
    call = undisturbed(test_case).calls[call_fault.number]
    location = f"{test_case.name}, call {call_fault.number} ({call.what} at {call.t:.2f} s), {call_fault.fault}"
    return tuple(f"{location}: {breach}" for breach in breaches_found)


def list_call_faults(*, exhaustive: bool) -> Iterable[tuple[int, CallFault]]:
    """Yield all faults of all scenarios, each with the index of its scenario."""
    return chain.from_iterable(
        ((index, call_fault) for call_fault in call_faults(test_case, exhaustive=exhaustive))
        for index, test_case in enumerate(STORIES)
    )


@app.command()
def main(*, jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = os.cpu_count() or 1) -> None:
    """Run every call with every fault; exit 1 if the judge finds a breach."""
    with suppress_logs():
        indexed_faults = tuple(list_call_faults(exhaustive=True))
        with processes(jobs) as pool:
            breaches_by_fault = pool.map(tried, indexed_faults, chunksize=25)
            descriptions = [
                *chain.from_iterable(
                    track(breaches_by_fault, "telling", len(indexed_faults), console=Console(stderr=True))
                )
            ]
    typer.echo("\n".join((*descriptions, f"{len(indexed_faults)} faults of calls, {len(descriptions)} breaches")))
    raise typer.Exit(1 if descriptions else 0)


if __name__ == "__main__":
    app()
