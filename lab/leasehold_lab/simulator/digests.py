"""Records a digest of the history of each of many simulated fleets, and finds the first event that a change altered.

A refactoring must leave every digest as it is. `python -m leasehold_lab.simulator.digests 2000` prints one line per
seed, `--write FILE` stores them, and `--check FILE` names the seeds whose histories differ from the stored ones.
`--against CHECKOUT` runs another checkout of the repository as well, and prints the first event that differs.

1. A run is determined by its scenario alone, so equal code gives equal digests on any machine.
2. Digests contain values and no names of fields or classes, so renaming a field changes none of them.
3. The fleets of consecutive seeds have different layouts: a table, sessions, and swaps between two tables. Their faults
   and the ways in which their handlers checkpoint are those of `chaos.trial`.
"""

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from itertools import zip_longest
from pathlib import Path
from typing import Annotated

import typer
from attrs import evolve, fields, has
from rich.console import Console
from rich.progress import track

from leasehold_lab.judge.events import Incident, ReadingEvent, WriteAnswer, WriteEvent
from leasehold_lab.processes import processes
from leasehold_lab.simulator.chaos import trial
from leasehold_lab.simulator.question import unlogged
from leasehold_lab.simulator.run import run
from leasehold_lab.simulator.scenario import Scenario
from leasehold_lab.simulator.world.world import SimulatedHistory

app = typer.Typer(add_completion=False)

SEEDS = 200
"""How many seeds are stored, in `digests.txt` beside the test."""
CHECKPOINT_SECONDS = (0.0, 1.0, 5.0)
HANDLING_SECONDS = (0.0, 0.0, 0.3, 3.0)
SWAP_SECONDS = (30.0, 70.0)
"""When the leases of a fleet with two tables are moved: to the second table, and back."""
CHUNK = 10


def scenario_of(seed: int) -> Scenario:
    """Return the fleet of this seed: that of `trial`, in one of the layouts and with one of the paces of handlers."""
    scenario = evolve(
        trial(seed).scenario,
        checkpoints=CHECKPOINT_SECONDS[seed % 3],
        handling_seconds=HANDLING_SECONDS[seed // 3 % 4],
    )
    match seed % 4:
        case 2:
            # Rows cannot be deleted by hand, nor dated, in tables other than the usual one.
            return evolve(scenario, sessions=True, emptyings=(), dated=False)
        case 3:
            return evolve(scenario, sessions=seed // 4 % 2 == 1, emptyings=(), dated=False, swaps=SWAP_SECONDS)
        case _:
            return scenario


def digest(history: SimulatedHistory) -> str:
    """Return the digest of every write, event, incident and count, in order."""
    state = blake2b(digest_size=16)
    for value in (*history.first, *history.writes, *history.answers, *history.events, *history.incidents):
        state.update(repr(_values(value)).encode())
    counts = sorted(history.requests.items()), [_values(sent) for sent in history.sent]
    rows = history.scanned, history.fetched, history.fetched_stale, history.swaps, history.faults
    state.update(repr((counts, rows)).encode())
    return state.hexdigest()


def trace(history: SimulatedHistory) -> Iterator[str]:
    """Yield what a digest is made of, one line per event, in order of time."""
    events: list[Incident | WriteEvent | WriteAnswer | ReadingEvent] = [*history.incidents, *history.writes]
    events += [*history.answers, *history.events]
    for event in sorted(events, key=lambda one: one.t):
        yield f"{type(event).__name__}{_values(event)}"
    yield f"requests {sorted(history.requests.items())}"
    yield f"rows listed {history.scanned}, read {history.fetched}, perhaps stale {history.fetched_stale}"
    yield from history.faults


def digest_of(seed: int) -> str:
    """Run the fleet of this seed, and return the digest of its history."""
    with unlogged():
        return digest(run(scenario_of(seed)))


def digests_of(seeds: Iterable[int], jobs: int = 1) -> Iterator[str]:
    """Yield the digests of these seeds, in order."""
    if jobs == 1:
        yield from map(digest_of, seeds)
        return
    with processes(jobs) as pool:
        yield from pool.map(digest_of, seeds, chunksize=CHUNK)


def read_digests(path: Path) -> dict[int, str]:
    """Return the digests of a file, by seed."""
    lines = (line.split() for line in path.read_text(encoding="ascii").splitlines())
    return {int(seed): value for seed, value in lines}


def first_difference(before: Iterable[str], after: Iterable[str]) -> str | None:
    """Return where two traces begin to differ, in words, or None if they are equal."""
    for number, (old, new) in enumerate(zip_longest(before, after), 1):
        if old != new:
            return f"event {number}\n  before: {old or 'the history ends'}\n  now:    {new or 'the history ends'}"
    return None


def trace_of_checkout(checkout: Path, seed: int) -> list[str]:
    """Return the trace of this seed as the code of another checkout makes it.

    Raises ValueError if that code cannot run the fleet.
    """
    environment = {**os.environ, "PYTHONPATH": f"{checkout}{os.pathsep}{checkout / 'lab'}"}
    # By this file's path, because the other checkout may be older than this module.
    command = [sys.executable, "-P", __file__, "--trace", str(seed)]
    ran = subprocess.run(  # noqa: S603  this module, with the other code
        command, env=environment, capture_output=True, text=True, check=False
    )
    if ran.returncode:
        raise ValueError(f"digests: the code in {checkout} cannot run seed {seed}: {ran.stderr.strip()[-500:]}")
    return ran.stdout.splitlines()


@app.command()
def main(
    seeds: Annotated[int, typer.Argument(min=1, help="How many seeds.")] = SEEDS,
    *,
    first: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = os.cpu_count() or 1,
    write: Annotated[Path | None, typer.Option(help="Store the digests in this file.")] = None,
    check: Annotated[Path | None, typer.Option(help="Compare with the digests in this file.")] = None,
    against: Annotated[Path | None, typer.Option(help="Compare with the code of this checkout.")] = None,
    only: Annotated[int | None, typer.Option("--trace", help="Print each event of this seed instead.")] = None,
) -> None:
    """Print the digest of the history of each seed; exit 1 if one differs from what it is compared with."""
    if only is not None:
        with unlogged():
            typer.echo("\n".join(trace(run(scenario_of(only)))))
        return
    chosen_seeds = range(first, first + seeds)
    stored_digests = {} if check is None else read_digests(check)
    differing, lines = list[int](), list[str]()
    console = Console(stderr=True)
    for seed, value in zip(
        chosen_seeds, track(digests_of(chosen_seeds, jobs), total=seeds, console=console), strict=True
    ):
        lines.append(f"{seed} {value}\n")
        if seed in stored_digests and stored_digests[seed] != value:
            differing.append(seed)
    if write is not None:
        write.write_text("".join(lines), encoding="ascii")
    elif check is None and against is None:
        typer.echo("".join(lines), nl=False)
    if against is not None:
        # Without stored digests every seed is compared, which takes as long again.
        for seed in differing if check is not None else chosen_seeds:
            difference = _difference(against, seed)
            if difference is not None:
                typer.echo(f"seed {seed} differs from {against} at {difference}")
                raise typer.Exit(1)
    if differing:
        typer.echo(f"{len(differing)} of {seeds} histories differ, first that of seed {differing[0]}: {differing}")
        raise typer.Exit(1)


def _difference(checkout: Path, seed: int) -> str | None:
    with unlogged():
        return first_difference(trace_of_checkout(checkout, seed), trace(run(scenario_of(seed))))


def _values(value: object) -> object:
    """Return the value without names of classes and fields."""
    if isinstance(value, tuple):
        return tuple(map(_values, value))
    names = _names(type(value))
    return value if names is None else tuple(_values(getattr(value, name)) for name in names)


_FIELD_NAMES: dict[type, tuple[str, ...] | None] = {}


def _names(kind: type) -> tuple[str, ...] | None:
    if kind not in _FIELD_NAMES:
        _FIELD_NAMES[kind] = tuple(field.name for field in fields(kind)) if has(kind) else None
    return _FIELD_NAMES[kind]


if __name__ == "__main__":
    app()
