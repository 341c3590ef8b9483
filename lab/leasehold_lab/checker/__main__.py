"""Checks every fleet on all cores and prints the findings: `python -m leasehold_lab.checker`."""

import json
import os
from collections import deque
from concurrent.futures import as_completed
from pathlib import Path
from typing import Annotated

import typer
from attrs import asdict
from rich.console import Console
from rich.progress import track

from leasehold_lab.checker.cases import build_all_cases, build_quick_cases
from leasehold_lab.checker.verdict import build_terminal_table, find_surprises, format_page, judge_case
from leasehold_lab.processes import processes

app = typer.Typer(add_completion=False)


@app.command()
def main(
    *,
    everything: Annotated[bool, typer.Option("--full", help="All fleets; some minutes on two cores.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Fleets checked at a time.")] = os.cpu_count() or 1,
    write: Annotated[Path | None, typer.Option(help="Write the table of results to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Explore every interleaving of small fleets over the real plan; exit 1 if a verdict is not the expected one."""
    cases = build_all_cases() if everything else build_quick_cases()
    with processes(jobs) as pool:
        futures = [pool.submit(judge_case, case) for case in cases]
        finished_futures = track(
            as_completed(futures), "checking fleets", total=len(cases), console=Console(stderr=True)
        )
        deque(finished_futures, maxlen=0)  # consumes the iterator, which advances the progress bar
        verdicts = [future.result() for future in futures]
    if write is not None:
        write.write_text(
            format_page(verdicts, "make prove" if everything else "python -m leasehold_lab.checker"),
            encoding="utf-8",
        )
    surprises = find_surprises(cases, verdicts)
    if as_json:
        typer.echo(
            json.dumps({"verdicts": [asdict(verdict) for verdict in verdicts], "surprises": surprises}, indent=1)
        )
    else:
        Console().print(build_terminal_table(verdicts), *surprises)
    raise typer.Exit(1 if surprises else 0)


if __name__ == "__main__":
    app()
