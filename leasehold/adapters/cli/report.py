"""`leasehold report`: shows how leases are distributed, and how that changes, as a page or as JSON."""

import json
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from leasehold.adapters.cli.common.asking import AsJson
from leasehold.adapters.cli.common.ending import ending
from leasehold.adapters.cli.common.times import seconds
from leasehold.adapters.json_form import BadJsonField
from leasehold.adapters.report.page import page
from leasehold.adapters.report.report import looked, report, report_json, saved
from leasehold.adapters.report.watching import WatchedTable
from leasehold.balancer.rules.minimal import Minimal
from leasehold.balancer.rules.shares import Groups
from leasehold.errors import StoreError
from leasehold.stores.urls import name_of, open_store

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")

MORE = """
FROM is the URL of a store (see `leasehold leases --help`), or files of snapshots that `leasehold leases --json`
(with `--watch`, for a while) has printed; `-` is the standard input.

One snapshot shows how leases are shared out, how far they are, and how far behind, as their owners wrote it into the
rows. Several also show churn (changes of owner) and lag over time: `--snapshots 30 --every 10`, or files that hold more
than one. Where no row tells of lag, they show for how long checkpoints have stood still, which is not the same.

`--groups` is `prefix` (the text before the last "-" of a worker's id), `none`, or a separator; given more than
once, separators from the outermost group inwards: `--groups / --groups :` for `zone/cluster:worker`.

The page is one file that needs no network. Finished leases are told apart, and count for no worker.
"""


@app.command(help="Show how leases are shared out, and how that changes, as a page.", epilog=MORE)
def command(  # noqa: PLR0917  one for each option
    sources: Annotated[list[str], typer.Argument(metavar="FROM...", help="A store's URL, or saved snapshots.")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Where to write the page.")] = None,
    groups: Annotated[list[str] | None, typer.Option(help="How names tell groups. [prefix]")] = None,
    snapshots: Annotated[int, typer.Option(help="How many looks at the store.", min=1)] = 1,
    every: Annotated[float, typer.Option(help="Time between two looks.", parser=seconds(0.1))] = 10.0,
    as_json: AsJson = False,
) -> None:
    """Look, count, draw."""
    with ending("report", StoreError, OSError):
        if output is None and not as_json:
            raise ValueError("--output: say where the page goes, or ask for --json")
        if output is not None and not output.parent.is_dir():
            raise ValueError(f"--output: there is no folder {output.parent}; make it first")
        if output is not None and output.is_dir():
            raise ValueError(f"--output: {output} is a folder; name a file in it")
        match groups or ["prefix"]:
            case ["none"]:
                grouping: Groups = None
            case ["prefix"]:
                grouping = "prefix"
            case separators:
                grouping = Minimal(groups=tuple(separators)).groups
        place = name_of(sources[0]) if "://" in sources[0] else ", ".join(Path(source).name for source in sources)
        result = report(place, _snapshots(sources, snapshots, every), grouping)
        if output is not None:
            output.write_text(page(result, grouping), encoding="utf-8")
        if as_json:
            print(json.dumps(report_json(result)))


def _snapshots(sources: Sequence[str], times: int, every: float) -> Sequence[WatchedTable]:
    if any("://" in source for source in sources):
        if len(sources) > 1:
            raise ValueError("FROM: one store, or files of one store's snapshots")
        with closing(open_store(sources[0], create=False, write=False)) as opened:
            return tuple(looked(opened, times, every))
    snapshots: list[WatchedTable] = []
    for source in sources:
        if source == "-":
            snapshots += saved("standard input", sys.stdin.buffer)
        else:
            with Path(source).open("rb") as lines:
                snapshots += saved(source, lines)
    if not snapshots:
        raise BadJsonField(f"{', '.join(sources)}: there is no snapshot in it")
    return snapshots
