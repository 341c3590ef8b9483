"""`leasehold swap`: moves the leases of a running fleet to another store or layout, and back."""

import json
import sys
from contextlib import ExitStack
from typing import Annotated

import typer
from attrs import asdict

from leasehold.adapters.cli.common.asking import AsJson
from leasehold.adapters.cli.common.ending import exit_on_failure
from leasehold.adapters.cli.common.times import make_seconds_parser
from leasehold.adapters.inputs import format_time
from leasehold.adapters.ops.swapping import (
    SwapProgress,
    end_swap,
    move_until_arrived,
    open_joined,
    read_swap_progress,
    set_direction,
    swap_ended_at,
    wait_until_known,
)
from leasehold.errors import StoreError
from leasehold.stores.swap import TO, SwapStore, check_tables_differ, get_or_create_control_row, swap_is_over
from leasehold.stores.urls import display_name, open_store

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")

EPILOG = """
FROM and TO are store URLs. No worker stops, no record is lost or skipped, and no shard is read twice at a time: each
owner moves its own leases and continues to read.

1. Restart each worker of the fleet, one after the other, with `leasehold consume … --store FROM --to TO`. Nothing moves
yet.

2. `leasehold swap FROM TO`. It waits until every owner of a lease has announced that it knows TO (`--wait`), starts the
swap, and shows its progress. It may be interrupted and run again: the workers continue by themselves; only leases
without an owner, such as finished ones, wait for the command.

3. When it prints that the swap is over, restart each worker with `--store TO` alone. Delete FROM after the last one:
until then, a worker that is restarted with both stores reads in FROM that the swap is over.

`--status` shows the progress and changes nothing. `--back` moves the leases back; it works until the last lease has
moved and the swap is over. After that, swap in the other direction.

A swap is refused while workers of the KCL or of an SDK own leases in FROM, because they cannot follow; for a layout
that does not count owners (the blobs of the Azure SDKs); and if TO already has leases. Both stores must be reachable
during the swap: an owner that cannot write to both loses its leases as if its store did not respond.

Exit status: 0 when every lease has arrived, or with `--status`; 1 if it was refused or a store failed; 2 on bad usage.
"""


@app.command(help="Move the lease table of a running fleet to another store or layout.", epilog=EPILOG)
def command(  # noqa: PLR0917  one for each option
    from_: Annotated[
        str,
        typer.Argument(metavar="FROM", help="Move the leases from this store of the fleet, a URL.", show_default=False),
    ],
    to: Annotated[str, typer.Argument(metavar="TO", help="Move the leases to this store, a URL.", show_default=False)],
    status: Annotated[bool, typer.Option("--status", help="Show the progress, and change nothing.")] = False,
    back: Annotated[bool, typer.Option("--back", help="Move the leases back to FROM.")] = False,
    wait: Annotated[
        float,
        typer.Option(help="Wait this long for workers to announce that they know TO.", parser=make_seconds_parser()),
    ] = 60.0,
    create: Annotated[bool, typer.Option(help="Create TO's table or container if there is none.")] = True,
    as_json: AsJson = False,
) -> None:
    """Start or reverse a swap, and follow it until every lease has arrived."""
    with exit_on_failure("swap", StoreError), ExitStack() as stack:
        check_tables_differ(from_, to, "TO")
        if status and back:
            raise ValueError("choose one of --status and --back")
        table_names = (display_name(from_), display_name(to))
        source = open_store(from_, create=False)
        stack.callback(source.close)
        target = open_store(to, create=create and not (status or back))
        stack.callback(target.close)
        tables = (source, target)
        if swap_is_over(tables, table_names):
            if back:
                raise StoreError("the swap is over; to go back, swap from TO to a new, empty table")
            ended_seconds = swap_ended_at(tables)
            if as_json:
                document = {"way": "over", "from": table_names[0], "to": table_names[1], "ended_at": ended_seconds}
                print(json.dumps({name: value for name, value in document.items() if value is not None}))
            else:
                ended_text = "" if ended_seconds is None else f" (ended {format_time(ended_seconds * 1000)})"
                print(f"from {table_names[0]} to {table_names[1]}{ended_text}: {_FINAL_MESSAGES[False]}")
            return
        if status or back:
            store = open_joined(tables, table_names)
        else:
            store = SwapStore(tables, table_names[TO])
            get_or_create_control_row(tables, table_names)
        if status:
            _print_progress(read_swap_progress(tables, store, table_names[TO]), as_json=as_json)
            return
        if not back:
            wait_until_known(tables, store, table_names[TO], wait)
        set_direction(tables, "from" if back else "to")
        last_progress = None
        for swap_progress in move_until_arrived(tables, store, table_names[TO]):
            if swap_progress != last_progress:
                _print_progress(swap_progress, as_json=as_json)
            last_progress = swap_progress
        if back:
            set_direction(tables, "")
        else:
            end_swap(tables, store, table_names[TO])
        if not as_json:
            print(_FINAL_MESSAGES[back])


_FINAL_MESSAGES = {
    False: "the swap is over: start the workers again with --store TO alone",
    True: "every lease is back in FROM: start the workers again without --to, then delete TO's table",
}


def _print_progress(swap_progress: SwapProgress, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({**asdict(swap_progress), "unaware": [name for name, _ in swap_progress.unaware]}), flush=True)
        return
    print(swap_progress.says, flush=True)
    if swap_progress.unaware:
        print(f"owners that do not know TO: {', '.join(name for name, _ in swap_progress.unaware)}", file=sys.stderr)
