"""`leasehold simulate`: simulates how a fleet shares its leases under a rule set."""

import json
import os
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from leasehold.adapters.cli.common.asking import AsJson
from leasehold.adapters.cli.common.ending import exit_on_failure
from leasehold.adapters.toolchain import ServiceError
from leasehold.stores.fields import parse_decimal
from leasehold_lab.simulator.question import (
    RULES,
    Answer,
    Kind,
    ScanPace,
    SimulationQuestion,
    simulate_on_spark,
    simulate_on_this_machine,
    summarize_figures,
)
from leasehold_lab.simulator.scenario import StartPattern

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")

MORE = f"""
Real workers, with the real plan and a store in memory, run through the event under virtual time. The same seed
always has the same result. Figures count from the event on.

    leasehold simulate --leases 500 --workers 100+100 --rules minimal --groups --seed 7
    leasehold simulate --leases 500 --workers 100+100 --rules kcl --seed 7
    leasehold simulate --leases 100 --workers 10 --event crash --sweep 200
    leasehold simulate --leases 10000 --workers 1000 --event crash --pace own --known --cycles 3
    leasehold simulate --leases 100 --workers 10 --event crash --sweep 20000 --master spark://host:7077

`--workers` is the number of workers in each group. If there are several groups, the last one joins the others
(`--event scale-out`).

`--rules`: {", ".join(RULES)}.

The figures in the result are:

- `cycles`, `seconds`: the time until the last change of owner
- `moves`: how many leases moved away from a living worker
- `moves_minimum`: the least possible number of moves
- `failed_writes`: writes that were rejected because another worker wrote first
- `spread`: the difference between the largest and the smallest number of leases of a worker
- `unowned_lease_cycles_max`: the longest time for which a lease had no living owner
- `quiet_after`: the cycles until only renewals were written

A sweep shows the median and the worst value of each. It runs on all cores of this machine, which is fastest for up
to a few thousand fleets. With `--master`, it runs on a Spark cluster that has leasehold installed, with the same
results.

With `--pace cycle`, every worker scans the table once per 20.05 s and renews every 3.3 s, regardless of its rules.
With `--pace own`, each rule set has its own default intervals. With `--dated`, listings contain the age of each row,
and no worker writes bulletins, as on Azure Blob and S3. Otherwise the table behaves like DynamoDB.
"""


_MAX_GROUP_WORKERS = 10**6  # in one group; no machine can simulate more


@app.command(help="Simulate how fast a fleet is balanced, and at what cost.", epilog=MORE)
def command(  # noqa: PLR0917  typer calls it by name
    leases: Annotated[int, typer.Option(min=1, help="Simulate this many leases.")],
    workers: Annotated[str, typer.Option(help="Simulate this many workers in each group, as in 100+100.")],
    rules: Annotated[str, typer.Option(help="Take leases by these rules.")] = "minimal",
    seed: Annotated[int, typer.Option(min=0, help="Use this seed for all random numbers.")] = 0,
    event: Annotated[
        Kind | None, typer.Option(help="Choose the event. [cold, or scale-out for several groups]")
    ] = None,
    start: Annotated[StartPattern, typer.Option(help="Start new workers over a cycle, or within 0.1 s.")] = "spread",
    pace: Annotated[ScanPace, typer.Option(help="Scan once per cycle, or use the rules' own intervals.")] = "cycle",
    groups: Annotated[bool, typer.Option("--groups", help="Balance the groups, too (minimal).")] = False,
    hint: Annotated[bool, typer.Option("--hint", help="Configure the expected workers (minimal).")] = False,
    grace: Annotated[float, typer.Option(min=0, help="Set grace_seconds, for rolling restarts (minimal).")] = 0.0,
    steals: Annotated[
        int | None, typer.Option(min=1, help="Steal at most this many leases in one turn (kcl, minimal).")
    ] = None,
    going: Annotated[int, typer.Option(min=1, help="Let this many workers crash or leave.")] = 1,
    gap: Annotated[float, typer.Option(min=0, help="Wait this many seconds between two restarts (rolling).")] = 15.0,
    peer: Annotated[str | None, typer.Option(help="Use these rules for the other workers of a mixed fleet.")] = None,
    share: Annotated[float, typer.Option(min=0, max=1, help="Use --rules for this fraction of a mixed fleet.")] = 0.5,
    dated: Annotated[
        bool, typer.Option("--dated", help="Use a table that shows the age of rows, as blobs do.")
    ] = False,
    known: Annotated[
        bool, typer.Option("--known", help="Let present workers know the table (with --pace own).")
    ] = False,
    cycles: Annotated[float, typer.Option(min=1, help="Simulate this many cycles after the event.")] = 45.0,
    sweep: Annotated[int, typer.Option(min=1, help="Run this many seeds, starting with --seed.")] = 1,
    jobs: Annotated[int, typer.Option(min=1, help="Run a sweep in this many processes.")] = os.cpu_count() or 1,
    master: Annotated[str | None, typer.Option(help="Run the sweep on this Spark master.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run the simulation, and print its result."""
    with exit_on_failure("simulate"):
        sizes = _parse_sizes(workers)
        question = SimulationQuestion(
            leases=leases,
            workers=sizes,
            rules=rules,
            seed=seed,
            kind=event or ("scale-out" if len(sizes) > 1 else "cold"),
            start=start,
            pace=pace,
            hint=hint,
            grouped=groups,
            grace_seconds=grace,
            max_steals=steals,
            going=going,
            gap=gap,
            peer=peer,
            share=share,
            dated=dated,
            known=known,
            cycles=cycles,
        )
    seeds = range(seed, seed + sweep)
    if master is not None:
        seed_outcomes = _simulate_on_cluster(question, seeds, master)
    else:
        outcome_iterator = simulate_on_this_machine(question, seeds, min(jobs, sweep))
        console = Console(stderr=True)
        seed_outcomes = list(
            track(outcome_iterator, "simulating", sweep, console=console, disable=sweep == 1, transient=True)
        )
    if as_json:
        outcomes_by_seed = [{"seed": outcome_seed, **outcome} for outcome_seed, outcome in seed_outcomes]
        print(json.dumps(seed_outcomes[0][1] if sweep == 1 else {"seeds": outcomes_by_seed}))
    else:
        _print_figures(question, [outcome for _, outcome in seed_outcomes])


def _parse_sizes(workers: str) -> tuple[int, ...]:
    group_sizes = tuple(parse_decimal(size, _MAX_GROUP_WORKERS) or 0 for size in workers.split("+"))
    if not all(group_sizes):
        raise ValueError(f"workers: {workers!r} is not a number of workers, or several numbers joined by +")
    return group_sizes


def _simulate_on_cluster(question: SimulationQuestion, seeds: range, master: str) -> list[Answer]:
    from leasehold.adapters.spark.pipeline import build_session_at  # noqa: PLC0415  rarely needed

    with exit_on_failure("simulate", ServiceError):
        spark = build_session_at(master, "leasehold simulate")
    try:
        return simulate_on_spark(question, seeds, spark)
    finally:
        spark.stop()


def _print_figures(question: SimulationQuestion, outcomes: list[dict[str, object]]) -> None:
    has_several_seeds = len(outcomes) > 1
    title = (
        f"{question.kind}, {question.leases} leases, {'+'.join(map(str, question.workers))} workers, {question.rules}"
    )
    table = Table("figure", *(("median", "worst") if has_several_seeds else ("value",)), title=title)
    for row in summarize_figures(outcomes):
        table.add_row(
            row.figure, *(f"{value:g}" for value in ((row.median, row.worst) if has_several_seeds else (row.median,)))
        )
    if not has_several_seeds:
        table.add_row("groups", str(outcomes[0]["groups"]))
    Console().print(table)
