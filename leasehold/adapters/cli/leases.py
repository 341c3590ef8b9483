"""`leasehold leases`: shows the leases of a group with their owners and their lag."""

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from itertools import chain
from typing import Annotated, Any, Literal, Unpack

import typer
from attrs import asdict, evolve
from rich.console import Console
from rich.live import Live

from leasehold.adapters.cli.common.asking import AsJson, StoreUrl
from leasehold.adapters.cli.common.columns import format_as_plain_text, should_draw
from leasehold.adapters.cli.common.ending import EndSignal, exit_on_failure, raise_on_signal
from leasehold.adapters.cli.common.table_options import add_table_options
from leasehold.adapters.cli.common.times import make_seconds_parser
from leasehold.adapters.cli.lease_tables import describe_totals_and_problems, draw_page, tabulate_leases
from leasehold.adapters.cli.live import has_keys, run_live_view
from leasehold.adapters.consumer.status import MEANINGS, NUMBERS
from leasehold.adapters.json_form import format_lease_json
from leasehold.adapters.ops.swapping import open_for_reading
from leasehold.adapters.ops.watching import LOOK_SECONDS, SeenMove, TableWatch, WatchedTable, owner_changes
from leasehold.adapters.options import Options
from leasehold.adapters.sources.protocol import Source
from leasehold.adapters.sources.urls import open_source, source_address
from leasehold.adapters.worker.progress import LAG_STEP_SECONDS, LAG_STEPS, tolerated_unread_seconds
from leasehold.errors import OutcomeUnknown, SourceError, StoreError
from leasehold.stores.printable import printable
from leasehold.stores.protocol import Store

LEASE_SECONDS = 10.0
"""The lease duration to assume if the rows of a table don't contain one. The Java KCL and our workers use this value by
default."""

MOVES_SHOWN = 8
"""The maximum number of changes of owner that `--watch` shows below the table."""

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")

EPILOG = """
STORE is a URL: `dynamodb://table?region=…`, `sqlite:///path`, `azblob://account/container`, `s3://bucket/prefix`,
`gcs://bucket/prefix`, `postgres://host/database`.
A path after `sqlite:///` is absolute (`sqlite:///srv/orders.db` is `/srv/orders.db`), after `sqlite://` relative.
The command writes and creates nothing.

`status` is one word for each lease. The group has the status of its worst lease, with a sentence below the table:

STATUSES

`--check` ends with that number as exit status; 1 means that a store failed, and 2 bad usage. Rows of the Java KCL and
of the Azure SDKs contain nothing about the progress of reading. For these, `--watch` watches the table, `--check` waits
until the status is known, for at most two minutes, and `--source URL` shows whether records are waiting.

`lag` is how far a lease is behind the tip of its shard, as its owner last wrote to the row (a running batch counts as
unread). If no worker reads the shard, the time since then is added. `end` is whether the tip was reached. `age` is how
long the last processed record had been in the stream when the owner wrote it. `switches` is how often the lease passed
between workers, as far as our workers saw. Rows of the Java KCL and blobs of the Azure SDKs have none of these columns.
For them, `--source URL` queries the stream, once for each such lease (Kinesis: one read of the five per second that a
shard allows; Event Hubs: the lag as a number of events). `target` is how many leases a worker or a group should hold.

If a row was last annotated longer ago than its owner renews it, the owner may be dead. The table is then read again
every second, until the row has changed or a renewal is overdue (8 s with leases of 10 s).

`idle` is how long a lease has been unchanged. A single read shows it only if the store keeps each row's age; with
`--watch` it is also counted from the first read on, until Ctrl-C.

On a terminal, columns that do not fit are left out, and a line names them. In a pipe or a file, and with `--wide`, each
lease is one line with as many fields as the header, nothing is cut, an empty field is `-`, and the total goes to
standard error:

    leasehold leases sqlite:///srv/orders.db | awk '$2 == "nobody" {print $1}'

`--watch` shows the latest changes of owner below the table, as they happen. If standard input is a terminal too, keys
control the view: `s` sorts by the next column, `/` shows only rows that contain a text, enter shows the details of a
lease, `b` shows a row for each worker or group, `?` shows all keys, and `q` leaves.

While `leasehold swap` moves the leases to another store, name that store with `--to`: the column `table` then shows
which of the two has each lease.

`--by worker` and `--by group` count unfinished leases. A worker's group is the text before the last "-" of its id.

`--json` prints one object (with `--watch` one line for each read), whose leases `leasehold plan` can read; `at` is the
time, in seconds since 1970.
"""


EPILOG = EPILOG.replace(
    "STATUSES", "\n".join(f"- `{word}` ({NUMBERS[word]}): {meaning}" for word, meaning in MEANINGS.items())
)


RowSubject = Literal["group", "worker"]
"""The possible subjects of a row, other than a lease."""


def read_states_repeatedly(
    store: Store,
    interval_seconds: float,
    wait: Callable[[float], object] = time.sleep,
    source: Source | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[WatchedTable]:
    """Read the table repeatedly and yield its states. After an error, yield the last state with the error in `trouble`.

    Args:
        store: The table.
        interval_seconds: The time between two reads, in seconds.
        wait: Waits for a number of seconds.
        source: The stream. If given, it is queried for the lag of leases whose rows do not contain a lag.
        clock: Returns the time of a monotonic clock, in seconds.
    """
    watch, last_state = (
        TableWatch(store, LEASE_SECONDS, tolerated_unread_seconds(LEASE_SECONDS), source, clock=clock),
        WatchedTable(()),
    )
    while True:
        try:
            table = watch.look()
        except OutcomeUnknown as error:
            yield evolve(last_state, trouble=str(error))
        else:
            moves = tuple(
                SeenMove(table.at, lease_after.key, lease_before.owner, lease_after.owner)
                for lease_before, lease_after in owner_changes(last_state, table)
            )
            last_state = evolve(table, moves=(*moves, *last_state.moves)[:MOVES_SHOWN])
            yield last_state
        wait(interval_seconds)


@app.command(help="Show the leases with their owners, status and lag.", epilog=EPILOG)
@add_table_options("to")
def command(  # noqa: PLR0917  one for each option
    store: StoreUrl,
    watch: Annotated[bool, typer.Option("--watch", help="Read the table repeatedly, until Ctrl-C.")] = False,
    by: Annotated[RowSubject | None, typer.Option(help="Show one row for each worker or group.")] = None,
    every: Annotated[
        float, typer.Option(help="Wait this long between two reads.", parser=make_seconds_parser(0.1))
    ] = 2.0,
    wide: Annotated[bool, typer.Option("--wide", help="Print every column as plain text, even on a terminal.")] = False,
    source: Annotated[str | None, typer.Option(help="Query this stream for lag that rows do not contain.")] = None,
    as_json: AsJson = False,
    check: Annotated[bool, typer.Option("--check", help="Exit with the group's status as a number; 0 is OK.")] = False,
    **options: Unpack[Options],
) -> None:
    """Show the table once, or repeatedly with `--watch`."""
    with exit_on_failure("leases", StoreError, SourceError), ExitStack() as stack:
        lag_source = None if source is None else stack.enter_context(closing(open_lag_source(source)))
        table = stack.enter_context(closing(open_for_reading(store, options["to"])))
        with suppress(KeyboardInterrupt):  # Ctrl-C is the way to end a watch
            states = read_states_repeatedly(table, every if watch else LOOK_SECONDS, source=lag_source)
            if check or not watch:
                states = keep_confirmed_states(states)
            if check:
                status = _show_states(
                    keep_known_states(states, watch=watch), by, watch=False, as_json=as_json, wide=wide
                )
                raise typer.Exit(status)
            if watch and not as_json and should_draw(wide=wide) and can_use_keys():
                # Pass a wait that does nothing, because the view itself waits for keys between two reads.
                try:
                    with raise_on_signal():
                        run_live_view(
                            read_states_repeatedly(table, every, lambda _seconds: None, lag_source), by, every
                        )
                except EndSignal as end_signal:
                    if end_signal.status != 128 + signal.SIGINT:
                        raise typer.Exit(end_signal.status) from None
            else:
                _show_states(states, by, watch=watch, as_json=as_json, wide=wide)


def keep_confirmed_states(states: Iterator[WatchedTable]) -> Iterator[WatchedTable]:
    """Yield only the states in which every lease with the status OK has an owner that is known to be alive."""
    return (state for state in states if state.confirmed or state.trouble)


def keep_known_states(
    states: Iterator[WatchedTable], *, watch: bool, clock: Callable[[], float] = time.monotonic
) -> Iterator[WatchedTable]:
    """Yield only the states in which the status of every lease is known, but after two minutes yield every state.

    Without `watch`, yield every state from the beginning.
    """
    deadline = clock() + LAG_STEPS * LAG_STEP_SECONDS
    for state in states:
        are_all_known = all(status.word != "UNKNOWN" for status in state.statuses.values())
        if not watch or (are_all_known and not state.trouble) or clock() >= deadline:
            yield state


def can_use_keys() -> bool:
    """Return whether standard input is a terminal from which this Python can read single keys."""
    if not sys.stdin.isatty():
        return False
    if not has_keys():
        print(
            "leasehold leases: keys cannot be used, because this Python has no termios; Ctrl-C leaves", file=sys.stderr
        )
        return False
    return True


def open_lag_source(url: str) -> Source:
    """Open the source from which to read the lag. Raises ValueError if reading would end a worker's subscription."""
    if "consumer" in source_address(url)[2]:
        raise ValueError(
            "--source: leave out consumer; with it, this would end the subscription of the worker that reads"
        )
    return open_source(url)


def _show_states(
    states: Iterator[WatchedTable], row_subject: RowSubject | None, *, watch: bool, as_json: bool, wide: bool
) -> int:
    """Show the first state, or with `watch` all states. Return the status number of the first state."""
    first_state = next(states)
    if first_state.trouble and not watch:
        raise OutcomeUnknown(first_state.trouble)
    if as_json or not should_draw(wide=wide):
        for table in chain((first_state,), states if watch else ()):
            if as_json:
                print(json.dumps(_convert_to_json(table)), flush=True)
                continue
            # Print only the table to standard output, so that each line is a row. Other lines go to standard error.
            print(format_as_plain_text(tabulate_leases(table, row_subject, full=True)), flush=True)
            total_text, problems = describe_totals_and_problems(table)
            print(total_text, *map(printable, problems), sep="\n", file=sys.stderr, flush=True)
        return first_state.status.number
    console = Console()
    if watch:
        with Live(draw_page(first_state, row_subject, console.width), console=console, auto_refresh=False) as live:
            for table in states:
                live.update(draw_page(table, row_subject, console.width), refresh=True)
    else:
        console.print(draw_page(first_state, row_subject, console.width))
    return first_state.status.number


def _convert_to_json(table: WatchedTable) -> dict[str, Any]:
    """Return the state of a table as JSON values that `leasehold plan` can read. Empty fields are omitted."""
    lags_by_key = {key: lag.as_json() for key, lag in sorted(table.lags.items())}
    statuses_by_key = {key: status.as_json() for key, status in sorted(table.statuses.items())}
    swap_document = None if table.swap is None else asdict(table.swap)
    swap_notes = [] if table.swap is not None else list(table.swapping)
    optional_fields = {
        "lags": lags_by_key,
        "statuses": statuses_by_key,
        "trouble": table.trouble,
        "swap": swap_document,
        "swapping": swap_notes,
    }
    return {
        "at": round(time.time(), 3),
        **table.status.as_json(),
        "leases": [
            format_lease_json(lease)
            for lease in sorted((*table.leases, *table.leftover_rows), key=lambda lease: lease.key)
        ],
        "malformed": [asdict(row) for row in table.malformed],
        **{name: value for name, value in optional_fields.items() if value},
    }
