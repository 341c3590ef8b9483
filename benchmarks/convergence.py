"""How soon and at what cost each rule set balances a fleet: minimal beside its peers, same scenarios, same seeds.

`python benchmarks/convergence.py --write` runs every row under 20 seeds and writes benchmarks/results.
"""

import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from attrs import evolve, frozen

sys.path.insert(0, str(Path(__file__).resolve().parent))
from convergence_rows import Figures, Row, rows

from adapters.simulator.question import Question, config_of
from adapters.simulator.sweep import on_this_machine

RESULTS = Path(__file__).resolve().parent / "results"
SEEDS = 20
PEER_SEEDS = 3
"""Peers need up to a hundred cycles where minimal needs two; the table says of how many seeds each line is."""

HEADS = ("scenario", "rules", "seeds", "cycles", "moves", "least", "refused", "claims", "unowned, cycles", "verdict")


@frozen
class Line:
    """One row under one rule set: medians, worst values, and what was not reached."""

    row: Row
    rules: str
    seeds: int
    medians: Figures
    worst: Figures
    missed: tuple[str, ...]

    @property
    def cells(self) -> tuple[str, ...]:
        """As the table shows it: median, and the worst where it differs."""
        figures = ("cycles", "moves", "moves_minimum", "failed_writes", "claims", "unowned_lease_cycles_max")
        verdict = "" if self.rules != self.row.question.rules else f"misses {'; '.join(self.missed)}"
        if self.rules == self.row.question.rules and not self.missed:
            verdict = "pass"
        return (self.row.name, self.rules, str(self.seeds), *map(self._cell, figures), verdict)

    def _cell(self, figure: str) -> str:
        middle, worst = f"{self.medians[figure]:.5g}", f"{self.worst[figure]:.5g}"
        return middle if middle == worst else f"{middle} ({worst})"


def figures_of(question: Question, told: dict[str, object]) -> Figures:
    """An outcome in numbers, some of them by the lease."""
    figures = {name: float(value) for name, value in told.items() if isinstance(value, int | float)}
    groups = told["groups"]
    assert isinstance(groups, dict)
    total = sum(groups.values())
    shares = [question.leases * size / sum(question.workers) for size in question.workers]
    # Where leases were split or workers ended, the groups' shares are others, and no row asks for them.
    off = max(abs(held - share) for held, share in zip(groups.values(), shares, strict=False))
    return {
        **figures,
        "off_share": off,
        "moved_again_percent": 100 * figures["moved_again"] / question.leases,
        "refused_percent": 100 * figures["failed_writes"] / question.leases,
        "changes_per_lease": (figures["moves"] + figures["claims"]) / max(total, 1),
        "unowned_seconds": figures["unowned_lease_cycles_max"] * config_of(question).cycle_seconds,
    }


def measured(row: Row, rules: str, seeds: int, jobs: int) -> Line:
    """One line of the table."""
    question = evolve(row.question, rules=rules)
    told = [figures_of(question, outcome) for _, outcome in on_this_machine(question, range(seeds), jobs)]
    medians = {name: median(each[name] for each in told) for name in told[0]}
    worst = {name: max(each[name] for each in told) for name in told[0]}
    missed = tuple(bar.text for bar in row.bars if not bar.reached(medians))
    return Line(row, rules, seeds, medians, worst, missed)


def lines(wanted: Iterable[Row], seeds: int, peer_seeds: int, jobs: int) -> Iterator[Line]:
    """Ours first, then the peers."""
    for row in wanted:
        yield measured(row, row.question.rules, seeds, jobs)
        for peer in row.others if peer_seeds else ():
            yield measured(row, peer, min(seeds, peer_seeds), jobs)


def table(measured_lines: Iterable[Line]) -> str:
    """Markdown."""
    cells = [HEADS, ("---",) * len(HEADS), *(line.cells for line in measured_lines)]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def main(
    *,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of our own lines.")] = SEEDS,
    peer_seeds: Annotated[int, typer.Option(min=0, help="Seeds of the peers' lines; 0: none.")] = PEER_SEEDS,
    only: Annotated[str, typer.Option(help="Rows whose name matches this expression.")] = "",
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = os.cpu_count() or 1,
    write: Annotated[bool, typer.Option("--write", help="Write benchmarks/results/convergence.md.")] = False,
) -> None:
    """Measure, print, and say which bars are not reached."""
    wanted = [row for row in rows() if re.search(only, row.name)]
    done = []
    for line in lines(wanted, seeds, peer_seeds, jobs):
        done.append(line)
        print(" | ".join(line.cells), flush=True)
    if write:
        command = " ".join(["python benchmarks/convergence.py", *sys.argv[1:]])
        RESULTS.mkdir(exist_ok=True)
        page = f"{INTRODUCTION.format(command=command)}{table(done)}\n"
        (RESULTS / "convergence.md").write_text(page, encoding="utf-8")


INTRODUCTION = """# Convergence

Generated by `{command}`; do not edit. Real workers on a memory store under virtual time: requests take 5 to 50 ms,
0.2 % stall for 1 to 3 s, 0.2 % of the answers are lost. Everybody scans the table once in 20.05 s, except in the rows
named "seconds", where each rule set keeps its own default cadence. Medians over the seeds, the worst in brackets;
a verdict is that of the medians. *least*: the moves no rule can do without; *refused*: writes for which another
worker was faster; *unowned*: the longest time a lease had no living owner.

"""

if __name__ == "__main__":
    typer.run(main)
