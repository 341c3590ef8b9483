"""Detects changes of behavior by comparing digests of the histories of many simulated fleets, one for each seed.

A refactoring must not change any digest. `python -m leasehold_lab.simulator.digests 2000` prints one line per seed,
`--write FILE` stores the lines, and `--check FILE` lists the seeds whose histories differ from the stored ones.
`--against CHECKOUT` also runs the code of another checkout of the repository, and prints the first event that differs.

1. A run depends on its scenario alone, so the same code produces the same digests on any machine.
2. Digests contain values, but no names of fields or classes, so renaming a field does not change them.
3. Consecutive seeds use different layouts: one table with a row per lease, layout `sessions`, or swaps between two
   tables. The faults, and the times at which handlers checkpoint, are those of `chaos.trial`.
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
from leasehold_lab.simulator.question import suppress_logs
from leasehold_lab.simulator.run import run
from leasehold_lab.simulator.scenario import Scenario
from leasehold_lab.simulator.world.world import SimulatedHistory

app = typer.Typer(add_completion=False)

SEEDS = 2000
"""The number of seeds in `digests.txt`, which is in the folder of the test."""
CHECKPOINT_SECONDS = (0.0, 1.0, 5.0)
HANDLING_SECONDS = (0.0, 0.0, 0.3, 3.0)
SWAP_SECONDS = (30.0, 70.0)
"""The times at which a fleet with two tables moves its leases to the second table, and back."""
CHUNK = 10


def create_scenario(seed: int) -> Scenario:
    """Return the scenario of this seed: the one of `trial`, with a layout and a handling time that vary by seed."""
    scenario = evolve(
        trial(seed).scenario,
        checkpoints=CHECKPOINT_SECONDS[seed % 3],
        handling_seconds=HANDLING_SECONDS[seed // 3 % 4],
    )
    match seed % 4:
        case 2:
            # Only a single table with a row per lease supports dated rows and rows deleted by an operator.
            return evolve(scenario, sessions=True, emptyings=(), dated=False)
        case 3:
            return evolve(scenario, sessions=seed // 4 % 2 == 1, emptyings=(), dated=False, swaps=SWAP_SECONDS)
        case _:
            return scenario


def compute_digest(history: SimulatedHistory) -> str:
    """Return a digest of all writes, events, incidents and counts in the history, in order."""
    digest = blake2b(digest_size=16)
    for value in (*history.first, *history.writes, *history.answers, *history.events, *history.incidents):
        digest.update(repr(_to_plain_tuples(value)).encode())
    request_counts = sorted(history.requests.items()), [_to_plain_tuples(sent_record) for sent_record in history.sent]
    row_counts = history.scanned, history.fetched, history.fetched_stale, history.swaps, history.faults
    digest.update(repr((request_counts, row_counts)).encode())
    return digest.hexdigest()


def format_trace(history: SimulatedHistory) -> Iterator[str]:
    """Yield the values from which a digest is computed as text, with one line per event, in order of time."""
    events: list[Incident | WriteEvent | WriteAnswer | ReadingEvent] = [*history.incidents, *history.writes]
    events += [*history.answers, *history.events]
    for event in sorted(events, key=lambda event: event.t):
        yield f"{type(event).__name__}{_to_plain_tuples(event)}"
    yield f"requests {sorted(history.requests.items())}"
    yield f"rows listed {history.scanned}, read {history.fetched}, perhaps stale {history.fetched_stale}"
    yield from history.faults


def compute_digest_of_seed(seed: int) -> str:
    """Run the fleet of this seed, and return the digest of its history."""
    with suppress_logs():
        return compute_digest(run(create_scenario(seed)))


def compute_digests_of_seeds(seeds: Iterable[int], jobs: int = 1) -> Iterator[str]:
    """Yield the digests of these seeds, in order."""
    if jobs == 1:
        yield from map(compute_digest_of_seed, seeds)
        return
    with processes(jobs) as pool:
        yield from pool.map(compute_digest_of_seed, seeds, chunksize=CHUNK)


def read_digests(path: Path) -> dict[int, str]:
    """Return the digests that a file contains, by seed."""
    lines = (line.split() for line in path.read_text(encoding="ascii").splitlines())
    return {int(seed): digest for seed, digest in lines}


def find_first_difference(old_trace: Iterable[str], new_trace: Iterable[str]) -> str | None:
    """Describe the first event in which two traces differ, or return None if they are equal."""
    for number, (old, new) in enumerate(zip_longest(old_trace, new_trace), 1):
        if old != new:
            return f"event {number}\n  before: {old or 'the history ends'}\n  now:    {new or 'the history ends'}"
    return None


def run_trace_of_checkout(checkout: Path, seed: int) -> list[str]:
    """Run this seed with the code of another checkout, and return the trace.

    Raises ValueError if that code cannot run the fleet.
    """
    environment = {**os.environ, "PYTHONPATH": f"{checkout}{os.pathsep}{checkout / 'lab'}"}
    # Run this file by its path, because the other checkout may not have this module yet.
    command = [sys.executable, "-P", __file__, "--trace", str(seed)]
    completed_process = subprocess.run(  # noqa: S603  this module, with the other code
        command, env=environment, capture_output=True, text=True, check=False
    )
    if completed_process.returncode:
        raise ValueError(
            f"digests: the code in {checkout} cannot run seed {seed}: {completed_process.stderr.strip()[-500:]}"
        )
    return completed_process.stdout.splitlines()


@app.command()
def main(
    seeds: Annotated[int, typer.Argument(min=1, help="How many seeds.")] = SEEDS,
    *,
    first_seed: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = os.cpu_count() or 1,
    write: Annotated[Path | None, typer.Option(help="Store the digests in this file.")] = None,
    check: Annotated[Path | None, typer.Option(help="Compare with the digests in this file.")] = None,
    against: Annotated[Path | None, typer.Option(help="Compare with the code of this checkout.")] = None,
    only: Annotated[int | None, typer.Option("--trace", help="Print each event of this seed instead.")] = None,
) -> None:
    """Print the digest of the history of each seed; exit 1 if one differs from what it is compared with."""
    if only is not None:
        with suppress_logs():
            typer.echo("\n".join(format_trace(run(create_scenario(only)))))
        return
    chosen_seeds = range(first_seed, first_seed + seeds)
    stored_digests = {} if check is None else read_digests(check)
    differing_seeds, lines = list[int](), list[str]()
    console = Console(stderr=True)
    for seed, digest in zip(
        chosen_seeds, track(compute_digests_of_seeds(chosen_seeds, jobs), total=seeds, console=console), strict=True
    ):
        lines.append(f"{seed} {digest}\n")
        if seed in stored_digests and stored_digests[seed] != digest:
            differing_seeds.append(seed)
    if write is not None:
        write.write_text("".join(lines), encoding="ascii")
    elif check is None and against is None:
        typer.echo("".join(lines), nl=False)
    if against is not None:
        # Without stored digests, every seed must also be run by the other checkout, which doubles the time.
        for seed in differing_seeds if check is not None else chosen_seeds:
            difference = _find_difference(against, seed)
            if difference is not None:
                typer.echo(f"seed {seed} differs from {against} at {difference}")
                raise typer.Exit(1)
    if differing_seeds:
        typer.echo(
            f"{len(differing_seeds)} of {seeds} histories differ, first that of seed {differing_seeds[0]}: "
            f"{differing_seeds}"
        )
        raise typer.Exit(1)


def _find_difference(checkout: Path, seed: int) -> str | None:
    with suppress_logs():
        return find_first_difference(run_trace_of_checkout(checkout, seed), format_trace(run(create_scenario(seed))))


def _to_plain_tuples(value: object) -> object:
    """Return the value with each attrs instance replaced by a tuple of its field values."""
    if isinstance(value, tuple):
        return tuple(map(_to_plain_tuples, value))
    names = _list_field_names(type(value))
    return value if names is None else tuple(_to_plain_tuples(getattr(value, name)) for name in names)


_FIELD_NAMES: dict[type, tuple[str, ...] | None] = {}


def _list_field_names(kind: type) -> tuple[str, ...] | None:
    if kind not in _FIELD_NAMES:
        _FIELD_NAMES[kind] = tuple(field.name for field in fields(kind)) if has(kind) else None
    return _FIELD_NAMES[kind]


if __name__ == "__main__":
    app()
