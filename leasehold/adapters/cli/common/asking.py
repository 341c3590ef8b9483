"""Options that several commands share, and functions that turn them into a configuration and a table."""

from typing import Annotated

import typer
from rich.console import Console

from leasehold.adapters.cli.common.times import seconds
from leasehold.adapters.inputs import configuration, settings
from leasehold.adapters.json_form import RULES
from leasehold.adapters.report.watching import WatchedTable, watched
from leasehold.balancer.config import Config
from leasehold.stores.protocol import Store

WATCH_SHARE = 1.2
"""How long a table is watched, in multiples of `lease_seconds`. An owner that renews nothing in that time is dead."""

StoreUrl = Annotated[str, typer.Argument(help="Where the leases are, as a URL.", show_default=False)]
SwapGoal = Annotated[
    str | None, typer.Option("--to", help="Where `leasehold swap` moves the leases: both tables are shown.")
]
RuleSetName = Annotated[str, typer.Option(help=f"The fleet's: {', '.join(RULES)}.")]
FleetLeaseSeconds = Annotated[float | None, typer.Option(help="The fleet's. [10; hubs: 120]", parser=seconds())]
Setting = Annotated[list[str] | None, typer.Option("--set", help="Another setting of the fleet, as name=value.")]
For = Annotated[
    float | None,
    typer.Option("--for", help="How long to watch first; 0: one look. [1.2 x lease_seconds]", parser=seconds()),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Write nothing; show what would be.")]
StillSeconds = Annotated[float, typer.Option(help="An owner silent for this long is gone.", parser=seconds())]
EvenIfOwned = Annotated[bool, typer.Option("--even-if-owned", help="Also under a living owner.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def fleet_config(rules: str, lease_seconds: float | None, more: list[str] | None) -> Config:
    """Return the fleet's configuration. Raises ValueError, which names a setting that is not valid."""
    return configuration(settings({"rules": rules, "lease_seconds": lease_seconds}, more or []))


def table_of(store: Store, config: Config, span: float | None) -> WatchedTable:
    """Watch a table for `span` seconds and return it. On a terminal, a message shows why this takes so long."""
    span = WATCH_SHARE * config.lease_seconds if span is None else span
    console = Console(stderr=True)
    if not span or not console.is_terminal:
        return watched(store, span, config.lease_seconds)
    with console.status(f"watching for {span:g} s who renews (--for 0: one look only)"):
        return watched(store, span, config.lease_seconds)
