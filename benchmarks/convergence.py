"""Measures how fast, and with how many moves, each rule set balances a fleet in the same scenarios.

`python benchmarks/convergence.py --write` runs all rows, most of them with 20 seeds, and writes benchmarks/results.
This takes hours. With `--keep FILE`, an interrupted run can be continued.
"""

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from attrs import evolve, field, frozen

sys.path.insert(0, str(Path(__file__).resolve().parent))
from convergence_rows import Figures, Row, rows
from official_event_hubs import STRATEGIES, sdk_planner

from leasehold_lab.simulator.question import SimulationQuestion, build_config, simulate_on_this_machine

RESULTS = Path(__file__).resolve().parent / "results"

HEADS = (
    "scenario",
    "rules",
    "seeds",
    "cycles",
    "moves",
    "least",
    "refused",
    "taken back",
    "claims",
    "unowned, cycles",
    "verdict",
)
SHOWN = ("cycles", "moves", "moves_minimum", "failed_writes", "taken_back", "claims", "unowned_lease_cycles_max")


@frozen
class Line:
    """The figures of one row with one rule set, for each seed."""

    row: Row
    rules: str
    figures: tuple[Figures, ...]

    def cells(self, against: "Line | None") -> tuple[str, ...]:
        """Return the cells of the table: medians, and worst values if they differ.

        If `against` is given, the verdict is good only if this line is at least as good as that one.
        """
        return (self.row.name, self.rules, str(len(self.figures)), *map(self._cell, SHOWN), self._verdict(against))

    def median(self, figure: str) -> float:
        """Return the median of a figure over all seeds."""
        return median(figures[figure] for figures in self.figures)

    def _cell(self, figure: str) -> str:
        median_value, worst = f"{self.median(figure):.5g}", f"{max(figures[figure] for figures in self.figures):.5g}"
        return median_value if median_value == worst else f"{median_value} ({worst})"

    def _verdict(self, against: "Line | None") -> str:
        if self.rules != self.row.question.rules:
            return ""
        medians = {name: self.median(name) for name in self.figures[0]}
        missed = [bar.text for bar in self.row.bars if not bar.reached(medians)]
        if against is not None:
            missed += [
                f"{figure} of all-{against.rules}" for figure in ("moves", "cycles") if self._worse(against, figure)
            ]
        return f"misses {'; '.join(missed)}" if missed else "pass"

    def _worse(self, against: "Line", figure: str) -> bool:
        # Compare only the seeds that both lines have.
        seeds = min(len(self.figures), len(against.figures))
        median_here, median_there = (
            median(figures[figure] for figures in figures_by_seed[:seeds])
            for figures_by_seed in (self.figures, against.figures)
        )
        return median_here > median_there


def figures_of(question: SimulationQuestion, outcome: dict[str, object]) -> Figures:
    """Return the numeric figures of an outcome, with some derived ones that are relative to the number of leases."""
    figures = {name: float(value) for name, value in outcome.items() if isinstance(value, int | float)}
    groups = outcome["groups"]
    assert isinstance(groups, dict)
    total = sum(groups.values())
    shares = [question.leases * size / sum(question.workers) for size in question.workers]
    # These shares are wrong if leases were split or workers ended, but no row with such an event uses them.
    largest_deviation = max(abs(held - share) for held, share in zip(groups.values(), shares, strict=False))
    return {
        **figures,
        "off_share": largest_deviation,
        "moved_again_percent": 100 * figures["moved_again"] / question.leases,
        "refused_percent": 100 * figures["failed_writes"] / question.leases,
        "changes_per_lease": (figures["moves"] + figures["claims"]) / max(total, 1),
        "unowned_seconds": figures["unowned_lease_cycles_max"] * build_config(question).cycle_seconds,
    }


@frozen
class Kept:
    """The results of earlier runs, in a file with one line of JSON for each. If `path` is None, none are kept."""

    path: Path | None
    figures: dict[tuple[str, str, int], Figures] = field(init=False)

    @figures.default
    def _read(self) -> dict[tuple[str, str, int], Figures]:
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path and self.path.exists() else []
        return {(name, rules, seed): figures for name, rules, seed, figures in map(json.loads, lines)}

    def add(self, name: str, rules: str, seed: int, figures: Figures) -> None:
        """Add a result, and append it to the file, so that an interrupted run can be continued."""
        self.figures[name, rules, seed] = figures
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps((name, rules, seed, figures)) + "\n")


def measure(row: Row, rules: str, seeds: int, jobs: int, results: Kept) -> Line:
    """Run the missing seeds of a row with one rule set, and return the line of the table."""
    official = rules in STRATEGIES
    question = evolve(row.question, rules="python" if official else rules)
    if rules != row.question.rules:
        question = evolve(question, cycles=row.peer_cycles)
    missing = [seed for seed in range(seeds) if (row.name, rules, seed) not in results.figures]
    with sdk_planner(rules) if official else nullcontext():
        for seed, outcome in simulate_on_this_machine(question, missing, jobs) if missing else ():
            results.add(row.name, rules, seed, figures_of(question, outcome))
    return Line(row, rules, tuple(results.figures[row.name, rules, seed] for seed in range(seeds)))


def recall(rows_chosen: Iterable[Row], results: Kept) -> Iterator[Line]:
    """Yield the lines whose results are in the file, without running anything."""
    for row in rows_chosen:
        for rules in (row.question.rules, *row.others):
            seeds = sorted(
                seed for name, rules_of_seed, seed in results.figures if (name, rules_of_seed) == (row.name, rules)
            )
            if seeds:
                yield Line(row, rules, tuple(results.figures[row.name, rules, seed] for seed in seeds))


def lines(chosen_rows: Iterable[Row], seeds: int, peer_seeds: int, jobs: int, results: Kept) -> Iterator[Line]:
    """Yield the lines of each row, first the one with our rules, then those of the peers."""
    for row in chosen_rows:
        our_seeds, seeds_of_peers = row.seeds(seeds, peer_seeds)
        yield measure(row, row.question.rules, our_seeds, jobs, results)
        for peer in row.others if seeds_of_peers else ():
            yield measure(row, peer, seeds_of_peers, jobs, results)


def with_cells(all_lines: Iterable[Line]) -> Iterator[tuple[Line, tuple[str, ...]]]:
    """Yield each line with its cells. A row of a mixed fleet is compared with the line of its peer."""
    lines_so_far: dict[tuple[str, str], Line] = {}
    for line in all_lines:
        lines_so_far[line.row.name, line.rules] = line
        yield line, line.cells(lines_so_far.get(line.row.against))


def main(
    *,
    seeds: Annotated[
        int, typer.Option(min=0, help="Seeds of our own lines, fewer of huge fleets; 0: only --keep.")
    ] = 20,
    peer_seeds: Annotated[int, typer.Option(min=0, help="Seeds of the peers' lines; 0: none.")] = 5,
    only: Annotated[str, typer.Option(help="Rows whose name matches this expression.")] = "",
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = os.cpu_count() or 1,
    keep: Annotated[Path | None, typer.Option(help="Append each outcome here, and ask for none that is here.")] = None,
    write: Annotated[bool, typer.Option("--write", help="Write benchmarks/results/convergence.md.")] = False,
) -> None:
    """Measure, and print the table with the limits that are not met."""
    chosen_rows, results = [row for row in rows() if re.search(only, row.name)], Kept(keep)
    all_lines = lines(chosen_rows, seeds, peer_seeds, jobs, results) if seeds else recall(chosen_rows, results)
    cells = [HEADS, ("---",) * len(HEADS)]
    reasons: list[str] = []
    for line, line_cells in with_cells(all_lines):
        cells.append(line_cells)
        print(" | ".join(line_cells), flush=True)
        why = line.row.why or OPEN
        if line_cells[-1].startswith("misses") and why not in reasons:
            reasons.append(why)
    if write:
        table = "\n".join(f"| {' | '.join(line)} |" for line in cells)
        whys = "\n".join(f"- {reason}" for reason in reasons)
        RESULTS.mkdir(exist_ok=True)
        page = f"{INTRODUCTION}{table}\n\n## Where a bar is missed\n\n{whys}\n{PICTURES}"
        (RESULTS / "convergence.md").write_text(page, encoding="utf-8")


INTRODUCTION = """# Convergence

Generated by `python benchmarks/convergence.py --keep FILE --write`, which continues an interrupted run; do not edit.

Real workers run with a memory store under virtual time. Requests take 5 to 50 ms, 0.2 % of them stall for 1 to 3 s, and
0.2 % of the responses are lost. Every worker scans the table once per 20.05 s and renews every 3.3 s, as in KCL 2.x,
except in the rows named "seconds", in which each rule set has its own default intervals. Under `minimal`, a worker that
finds a late owner scans once more when the owner's leases may have expired (C16). *azure-eventhub* is the load balancer
of the installed SDK in place of our planner.

The figures are medians over the seeds, with the worst value in brackets. A verdict is about the medians.

- *seeds*: the number of seeds, counted from 0; at most 20, and at most 5 for ten thousand leases
- *least*: the least possible number of moves
- *refused*: writes that were rejected because another worker wrote first
- *taken back*: leases that the next owner did not accept within 2 s because its request stalled, and which were given
  again. They don't count as moves, because no other worker read them.
- *unowned*: the longest time for which a lease had no living owner

"""

PICTURES = """
## A hundred workers join a hundred others, five hundred leases

Drawn by `python benchmarks/convergence_pictures.py`, with one seed. The rules of KCL and Event Hubs move fewer leases
because they leave the clusters uneven.

![fewest and most leases of a worker](convergence_workers.svg)

What to see: each band reaches from the worker with the fewest leases to the one with the most, and narrows as the fleet
is balanced.

![leases of the first cluster](convergence_clusters.svg)

What to see: `minimal` reaches the dotted line, which is half of the leases. The others stop above it.

![moves](convergence_moves.svg)

What to see: `minimal` makes the least number of moves that balances the clusters (dotted). The others stop before that.
"""

OPEN = "Other missed limits have not been explained. A line with one to three seeds is not significant."

if __name__ == "__main__":
    typer.run(main)
