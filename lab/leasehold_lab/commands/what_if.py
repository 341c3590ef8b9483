"""`leasehold what-if`: simulates which leases of a table would move if workers joined or left."""

import json
from collections import Counter
from contextlib import closing
from typing import Annotated, Unpack

import typer

from leasehold.adapters.cli.common.asking import (
    AsJson,
    StoreUrl,
    WatchSeconds,
    make_fleet_config,
    watch_table,
)
from leasehold.adapters.cli.common.columns import Column, TextTable, print_table
from leasehold.adapters.cli.common.ending import exit_on_failure
from leasehold.adapters.cli.common.table_options import add_table_options
from leasehold.adapters.ops.swapping import open_for_reading
from leasehold.adapters.ops.watching import without_dead_owners
from leasehold.adapters.options import Options
from leasehold.errors import StoreError
from leasehold.stores.printable import printable
from leasehold_lab.what_if import FleetChange, choose_joining_names, forecast_change

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")

MORE = """
The table is watched for a while to find the living workers. Then real workers are simulated under virtual time, with
the real plan and a copy of the table in memory. Nothing is written to the store. Needs `leasehold[simulate]`.

    leasehold what-if sqlite:///srv/orders.db --add 2                    # two more workers
    leasehold what-if sqlite:///srv/orders.db --remove w-3 --crash       # one dies without warning
    leasehold what-if sqlite:///srv/orders.db --rules kcl                # the same fleet under other rules
    leasehold what-if sqlite:///srv/orders.db --to postgres://db/orders --add 2   # while a swap is under way

The result contains the seconds from the change to the last change of owner, the number of leases that moved away from
a living worker, the least possible number of such moves, and the longest time for which a lease had no living owner.
Moves that would happen without the change are counted separately. The same seed has the same result for the same table.

Exit status: 0, 1 if the store failed, 2 on bad usage.
"""


@app.command(help="Simulate which leases move if workers join or leave.", epilog=MORE)
@add_table_options("to", "rules", "lease_seconds", "set")
def command(  # noqa: PLR0917  one for each option
    store: StoreUrl,
    add: Annotated[list[str] | None, typer.Option(help="Add this many workers, or one of this name.")] = None,
    remove: Annotated[list[str] | None, typer.Option(help="Remove this worker; may be repeated.")] = None,
    crash: Annotated[bool, typer.Option("--crash", help="Let the removed workers crash instead of draining.")] = False,
    span: WatchSeconds = None,
    cycles: Annotated[float, typer.Option(help="Simulate this many cycles after the change.", min=1)] = 20.0,
    seed: Annotated[int, typer.Option(help="Use this seed for all random numbers.", min=0)] = 0,
    wide: Annotated[bool, typer.Option("--wide", help="Print plain text, on a screen, too.")] = False,
    as_json: AsJson = False,
    **options: Unpack[Options],
) -> None:
    """Watch the table, simulate the change, and print what would move."""
    with exit_on_failure("what-if", StoreError):
        config = make_fleet_config(options)
        with closing(open_for_reading(store, options["to"])) as table_store:
            has_dated_rows = not table_store.capabilities.free_annotations
            table = watch_table(table_store, config, span)
        present_workers = [
            row.owner for row in without_dead_owners(table.unfinished_leases, config) if row.owner is not None
        ]
        added_workers = choose_joining_names(add or (), present_workers)
        change = FleetChange(added_workers, tuple(remove or ()), "crash" if crash else "leave", cycles, seed)
        result = forecast_change(table, config, change, dated=has_dated_rows)
    if as_json:
        print(json.dumps(result.as_json() | ({"swap": list(table.swapping)} if table.swapping else {})))
        return
    if table.swapping:
        print(*map(printable, table.swapping), "", sep="\n")
    figures = result.figures
    moves = f"{figures.moves} moves of least possible {figures.moves_minimum}, {figures.claims} claims"
    print(f"{moves}, over after {figures.seconds:.1f} s; {len(result.before)} would come without the change.")
    unowned_seconds = figures.unowned_lease_cycles_max * config.cycle_seconds
    print(
        f"Spread {figures.spread} leases, fullest load {figures.load:g} of the mean; "
        f"longest unowned {unowned_seconds:.1f} s.\n"
    )
    leases_given, leases_gained = (
        Counter(move.before for move in result.moves),
        Counter(move.after for move in result.moves),
    )
    rows = tuple(
        (name, str(lease_count), str(leases_gained[name]), str(leases_given[name]), f"{result.loads[name]:.1f}")
        for name, lease_count in result.held.items()
    )
    number_columns = tuple(Column(name, right=True) for name in ("leases", "gained", "given", "KB/s"))
    print_table(TextTable((Column("worker"), *number_columns), rows), wide=wide)
    print()
    move_rows = tuple((f"{move.t:.1f}", move.key, move.before or "", move.after or "") for move in result.moves)
    print_table(
        TextTable((Column("at s", right=True), Column("lease"), Column("from"), Column("to")), move_rows), wide=wide
    )
