"""Builds the tables of leases that commands show, with one row per lease, worker, or group of workers."""

import math
import time
from collections import Counter
from collections.abc import Callable
from itertools import groupby

from rich.console import Group
from rich.text import Text

from leasehold.adapters.cli.common.columns import Column, TextTable, draw_table, format_hidden_columns_hint
from leasehold.adapters.consumer.status import NUMBERS, FleetLag, Status, fleet_lag
from leasehold.adapters.ops.watching import SeenMove, WatchedTable, leases_by_owner, shares
from leasehold.balancer.contradictions import reported_contradictions
from leasehold.balancer.model import Lease, Position
from leasehold.balancer.rules.shares import path_of
from leasehold.stores.fields import convert_to_kilobytes
from leasehold.stores.printable import join_limited, printable
from leasehold.stores.swap import lease_place

SENTENCES_MAX = 8
"""The maximum number of sentences below a table about leases that are not OK."""

NAMED_MAX = 3
"""The maximum number of leases that a sentence below a table names."""

AT_LEAST = "≥"
"""The prefix of a lag that is a lower bound."""

SHOWN_DIGITS = 15
"""The number of final digits of a sequence number that are shown. The 56 digits of Kinesis differ only at the end."""


def tabulate_leases(table: WatchedTable, row_subject: str | None, *, full: bool = False) -> TextTable:
    """Return a table with one row per lease, worker or group, sorted. Checkpoints are shortened unless `full`."""
    match row_subject:
        case "worker":
            return _make_group_rows("worker", lambda lease: lease.owner or "nobody", table)
        case "group":

            def find_owner_group(lease: Lease) -> str:
                return "nobody" if lease.owner is None else path_of(lease.owner, "prefix")[0] or "(none)"

            return _make_group_rows("group", find_owner_group, table)
        case _:
            return _make_lease_rows(table, full=full)


def find_status_word(table: WatchedTable, lease: Lease) -> str:
    """Return the status of a lease as a word, or "" if it is unknown, or if the lease is finished and OK."""
    status = table.statuses.get(lease.key)
    return "" if status is None or (lease.ended and status.ok) else status.word


def format_move(move: SeenMove) -> str:
    """Format a change of owner, with the local time of day."""
    clock_time = time.strftime("%H:%M:%S", time.localtime(move.at))
    return f"{clock_time} {move.key}: {move.before or 'nobody'} -> {move.after or 'nobody'}"


def describe_totals_and_problems(table: WatchedTable) -> tuple[str, tuple[str, ...]]:
    """Return a sentence with the totals over all leases, and sentences about problems."""
    unfinished_leases, lag = table.unfinished_leases, fleet_lag(table.lags)
    total_text = f"{len(table.leases)} leases, {len(table.leases) - len(unfinished_leases)} finished"
    total_text += f", {table.unowned} without an owner; {len(table.workers)} workers" + _format_lag(lag)
    total_text += f"; {table.status.word}" if table.statuses or not table.leases else ""
    # Group the leases that are not OK by status, with the worst status first.
    keys_by_status: dict[Status, list[str]] = {}
    for key, status in sorted(table.statuses.items()):
        if not status.ok:
            keys_by_status.setdefault(status, []).append(key)
    problems = []
    for status, keys in sorted(keys_by_status.items(), key=lambda item: (-item[0].number, item[1])):
        problems.append(f"{status.word} {join_limited(keys, NAMED_MAX)}: {status.says}")
    if len(problems) > SENTENCES_MAX:
        problems[SENTENCES_MAX:] = [f"and {len(problems) - SENTENCES_MAX} more; --json shows all"]
    problems += [f"{row.key} cannot be read: {row.field}: {row.why}" for row in table.malformed]
    problems += reported_contradictions(table.leases)
    if not (table.leases or table.trouble or table.swapping):
        problems += [f"{table.status.word}: {table.status.says}"]
    if table.swap is None:
        problems += table.swapping
    else:
        total_text += f"; swap of {table.swap.says}"
    problems += [f"{table.trouble}; trying again"] if table.trouble else []
    return total_text, tuple(problems)


def _format_lag(lag: FleetLag) -> str:
    """Return a phrase about the largest lag that can be appended to a sentence, or "" if no lag is known."""
    if lag.most is None:
        return ""
    return f"; lag {AT_LEAST} {lag.most:.1f} s" if lag.at_least else f"; lag {lag.most:.1f} s at most"


def draw_page(table: WatchedTable, row_subject: str | None, width: int) -> Group:
    """Return a table for a screen of this width, with the totals, the problems, and the latest moves below."""
    drawn_table, hidden_columns = draw_table(tabulate_leases(table, row_subject), width)
    total_text, problems = describe_totals_and_problems(table)
    hints = [format_hidden_columns_hint(hidden_columns)] if hidden_columns else []
    moves = (
        Text(printable(format_move(move)), style="" if index else "bold") for index, move in enumerate(table.moves)
    )
    return Group(
        drawn_table, *hints, Text(total_text), *(Text(printable(line), style="red") for line in problems), *moves
    )


LEASE_COLUMNS = (
    Column("lease"),
    Column("owner"),
    Column("status", hide_order=1),
    Column("lag s", right=True, hide_order=1),
    Column("end", hide_order=2),
    Column("checkpoint", hide_order=7),
    Column("age s", right=True, hide_order=6),
    Column("idle s", right=True, hide_order=3),
    Column("KB/s", right=True, hide_order=4),
    Column("switches", right=True, hide_order=8),
    Column("host", hide_order=9),
    Column("moving to", hide_order=5),
)


def _make_lease_rows(table: WatchedTable, *, full: bool) -> TextTable:
    rows, highlighted_cells = [], []
    has_event_lag = any(lag.events is not None for lag in table.lags.values())
    for row_index, lease in enumerate(sorted(table.leases, key=lambda lease: lease.key)):
        lag, status = table.lag(lease), find_status_word(table, lease)
        row: tuple[str, ...] = (
            lease.key,
            lease.owner or ("" if lease.ended else "nobody"),
            status,
            _format_bound(lag.seconds, at_least=lag.at_least),
            "yes" if lag.end else "no" if lag.seconds is not None else "",
            format_checkpoint(lease.checkpoint, full=full),
            _format_number(lag.age),
            _format_idle(lease.idle),
            _format_number(None if lease.weight is None else convert_to_kilobytes(lease.weight)),
            "" if lag.moves is None else str(lag.moves),
            lag.host,
            lease.next_owner or "",
        )
        row += (lease_place(lease),) if table.swap else ()
        rows.append((*row, "" if lag.events is None else str(lag.events)) if has_event_lag else row)
        highlighted_cells += [(row_index, 1)] if lease.owner is None else []
        highlighted_cells += [(row_index, 2)] if status not in {"", "OK"} else []
    styles = tuple((position, "bold red") for position in highlighted_cells)
    columns = LEASE_COLUMNS + ((TABLE_COLUMN,) if table.swap else ()) + ((EVENTS_COLUMN,) if has_event_lag else ())
    return TextTable(columns, tuple(rows), styles=styles)


TABLE_COLUMN = Column("table", hide_order=1)
"""The column that shows which of the two tables of a swap has the lease."""

EVENTS_COLUMN = Column("events", right=True, hide_order=1)
"""The column that shows the lag in events, if the stream counts them."""


def _format_number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _format_bound(value: float | None, *, at_least: bool) -> str:
    return f"{AT_LEAST if at_least and value is not None else ''}{_format_number(value)}"


def _format_idle(seconds: float) -> str:
    """Format how long ago a lease last changed, or return "" if it has just changed or never had an owner."""
    return f"{seconds:.1f}" if 0 < seconds < math.inf else ""


def format_checkpoint(checkpoint: Position, *, full: bool) -> str:
    """Format a checkpoint as one word. Unless `full` is set, a long number is shortened."""
    shown_number = (
        checkpoint.sequence
        if full or len(checkpoint.sequence) <= SHOWN_DIGITS
        else f"…{checkpoint.sequence[-SHOWN_DIGITS:]}"
    )
    return f"{shown_number}/{checkpoint.sub}" if checkpoint.sub else shown_number


SHARE_COLUMNS = (
    Column("leases", right=True),
    Column("target", right=True, hide_order=2),
    Column("share", right=True, hide_order=4),
    Column("workers", right=True, hide_order=5),
    Column("lag s", right=True),
    Column("status", hide_order=3),
    Column("KB/s", right=True, hide_order=1),
    Column("longest idle s", right=True, hide_order=6),
)


def _make_group_rows(name: str, find_group: Callable[[Lease], str], table: WatchedTable) -> TextTable:
    """Return one row for each group of unfinished leases, grouped by `find_group`."""
    unfinished_leases = sorted(table.unfinished_leases, key=lambda lease: (find_group(lease), lease.key))
    targets: Counter[str] = Counter()
    for worker, target in shares(unfinished_leases).items():
        targets[find_group(Lease("", owner=worker))] += target
    rows = []
    for group_name, group in groupby(unfinished_leases, key=find_group):
        group_leases = tuple(group)
        weights = [lease.weight for lease in group_leases if lease.weight is not None]
        lag = fleet_lag({lease.key: table.lag(lease) for lease in group_leases})
        rows.append(
            (
                group_name,
                str(len(group_leases)),
                str(targets[group_name]) if group_name in targets else "",
                f"{len(group_leases) / len(unfinished_leases):.1%}",
                str(len(leases_by_owner(group_leases).keys() - {None})),
                _format_bound(lag.most, at_least=lag.at_least),
                max((find_status_word(table, lease) for lease in group_leases), key=lambda word: NUMBERS.get(word, -1)),
                _format_number(convert_to_kilobytes(sum(weights)) if weights else None),
                _format_idle(max(lease.idle for lease in group_leases)),
            )
        )
    return TextTable((Column(name), *SHARE_COLUMNS), tuple(rows))
