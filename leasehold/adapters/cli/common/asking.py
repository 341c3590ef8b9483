"""Options that several commands share, and functions that return a configuration or a table for them."""

from typing import Annotated

import typer
from rich.console import Console

from leasehold.adapters.cli.common.times import make_seconds_parser
from leasehold.adapters.inputs import combine_settings, config_for_source
from leasehold.adapters.ops.watching import WatchedTable, watch_for
from leasehold.adapters.options import Options
from leasehold.balancer.config import Config
from leasehold.stores.protocol import Store

WATCH_MULTIPLE = 1.2
"""How long to watch a table, in multiples of `lease_seconds`. An owner that renews no lease in that time is considered
dead."""

StoreUrl = Annotated[str, typer.Argument(help="Read the leases here, a URL.", show_default=False)]
WatchSeconds = Annotated[
    float | None,
    typer.Option(
        "--for", help="Watch this long first; 0 to read once. [1.2 x lease_seconds]", parser=make_seconds_parser()
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Write nothing; show what would change.")]
StillSeconds = Annotated[
    float, typer.Option(help="Count an owner as dead after this time without a renewal.", parser=make_seconds_parser())
]
EvenIfOwned = Annotated[bool, typer.Option("--even-if-owned", help="Write even if the owner is alive.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def make_fleet_config(options: Options, source: str = "") -> Config:
    """Return the configuration that `rules`, `lease_seconds` and `set` define. Raises ValueError if one is wrong."""
    base_settings = {"rules": options["rules"], "lease_seconds": options["lease_seconds"]}
    return config_for_source(source, combine_settings(base_settings, options["set"] or ()))


def watch_table(store: Store, config: Config, watch_seconds: float | None) -> WatchedTable:
    """Watch a table for `watch_seconds` and return its state. On a terminal, print the reason for the wait."""
    watch_seconds = WATCH_MULTIPLE * config.lease_seconds if watch_seconds is None else watch_seconds
    console = Console(stderr=True)
    if not watch_seconds or not console.is_terminal:
        return watch_for(store, watch_seconds, config.lease_seconds)
    with console.status(f"watching for {watch_seconds:g} s who renews (--for 0: one look only)"):
        return watch_for(store, watch_seconds, config.lease_seconds)
