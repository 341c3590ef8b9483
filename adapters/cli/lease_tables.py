"""Leases as tables for the eye: one row for each lease, worker, or group of workers."""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Literal

from attrs import frozen
from rich.console import Group
from rich.table import Table
from rich.text import Text

from balancer.groups import path_of
from balancer.model import Lease, Position
from stores.protocol import Malformed

LONG = 15
"""Kinesis's sequence numbers have 56 digits, of which the last tell them apart."""


@frozen
class Reading:
    """What one look at the table showed; `trouble` is why the latest look showed nothing new."""

    leases: tuple[Lease, ...]
    malformed: tuple[Malformed, ...] = ()
    trouble: str = ""


def page(reading: Reading, by: str | None) -> Group:
    """A table, what it amounts to, and what is wrong."""
    leases = sorted(reading.leases, key=lambda lease: lease.key)
    table = _TABLES[by](leases)
    bad = [f"{row.key} cannot be read: {row.field}: {row.why}" for row in reading.malformed]
    wrong = [*bad, *([f"{reading.trouble}; trying again"] if reading.trouble else [])]
    return Group(table, Text(_total(leases)), *(Text(line, style="red") for line in wrong))


def _total(leases: Sequence[Lease]) -> str:
    ended = sum(lease.ended for lease in leases)
    free = sum(lease.owner is None and not lease.ended for lease in leases)
    owners = {lease.owner for lease in leases if lease.owner is not None and not lease.ended}
    return f"{len(leases)} leases, {ended} finished, {free} without an owner; {len(owners)} workers"


def _each(leases: Sequence[Lease]) -> Table:
    table = _table("lease", "owner", "idle s", "checkpoint", "KB/s", "moving to")
    for lease in leases:
        table.add_row(
            Text(lease.key),
            _owner(lease),
            _idle(lease.idle),
            Text(_checkpoint(lease.checkpoint)),
            "" if lease.weight is None else f"{lease.weight:.1f}",
            Text(lease.heir or ""),
        )
    return table


def _owner(lease: Lease) -> Text:
    if lease.owner is not None:
        return Text(lease.owner)
    return Text("") if lease.ended else Text("nobody", style="bold red")


def _idle(seconds: float) -> str:
    """Nothing where it has only now been seen to move, or was never owned."""
    return f"{seconds:.1f}" if 0 < seconds < math.inf else ""


def _checkpoint(at: Position) -> str:
    number = at.sequence if len(at.sequence) <= LONG else f"…{at.sequence[-LONG:]}"
    return f"{number}/{at.sub}" if at.sub else number


def _shares(name: str, place: Callable[[Lease], str], leases: Sequence[Lease]) -> Table:
    """How the unended leases are shared out among what `place` puts them into."""
    table = _table(name, "leases", "share", "workers", "KB/s", "longest idle s")
    working = sorted((lease for lease in leases if not lease.ended), key=place)
    for where, group in groupby(working, key=place):
        held = tuple(group)
        table.add_row(
            Text(where),
            str(len(held)),
            f"{len(held) / len(working):.1%}",
            str(len({lease.owner for lease in held} - {None})),
            _throughput(held),
            _idle(max(lease.idle for lease in held)),
        )
    return table


def _throughput(leases: Iterable[Lease]) -> str:
    known = [lease.weight for lease in leases if lease.weight is not None]
    return f"{sum(known):.1f}" if known else ""


def _worker(lease: Lease) -> str:
    return lease.owner or "nobody"


def _group(lease: Lease) -> str:
    return "nobody" if lease.owner is None else path_of(lease.owner, "prefix")[0] or "(no group)"


def _table(*columns: str) -> Table:
    table = Table()
    for column in columns:
        justify: Literal["left", "right"] = "right" if column in _NUMBERS else "left"
        table.add_column(column, overflow="fold", justify=justify, no_wrap=column in {"lease", "checkpoint"})
    return table


_NUMBERS = frozenset({"idle s", "KB/s", "leases", "share", "workers", "longest idle s"})

_TABLES: dict[str | None, Callable[[Sequence[Lease]], Table]] = {
    None: _each,
    "worker": lambda leases: _shares("worker", _worker, leases),
    "group": lambda leases: _shares("group", _group, leases),
}
