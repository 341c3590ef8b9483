"""Leases as tables for the eye: one row for each lease, worker, or group of workers."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby

from attrs import Factory, frozen
from rich.console import Group
from rich.text import Text

from leasehold.adapters.cli.common.columns import Cells, Column, drawn, hint
from leasehold.adapters.reading.status import NUMBERS, LeaseLag, Status, fleet_lag, group_status
from leasehold.adapters.steering.explaining import shares
from leasehold.balancer.model import Lease, Position
from leasehold.balancer.rules.shares import path_of
from leasehold.balancer.shards.contradictions import noted
from leasehold.stores.fields import kilobytes
from leasehold.stores.printable import printable
from leasehold.stores.protocol import Malformed

SAID = 8
"""Sentences below a table, of the leases that are not OK."""

LONG = 15
"""Kinesis's sequence numbers have 56 digits, of which the last tell them apart."""


@frozen
class TableView:
    """The result of a look at the table; `trouble` is why the latest look showed nothing new.

    lags      by key, of the unfinished leases
    moves     the latest changes of owner that were seen, the last one first
    statuses  by key
    watched   for how many seconds the table has been watched
    """

    leases: tuple[Lease, ...]
    malformed: tuple[Malformed, ...] = ()
    trouble: str = ""
    lags: Mapping[str, LeaseLag] = Factory(dict)
    moves: tuple[str, ...] = ()
    statuses: Mapping[str, Status] = Factory(dict)
    watched: float = 0.0

    @property
    def status(self) -> Status:
        """Of the whole group."""
        return group_status(self.statuses, self.trouble)

    def word(self, lease: Lease) -> str:
        """The status of a lease in a word; "" where it was not judged, or has ended well."""
        found = self.statuses.get(lease.key)
        return "" if found is None or (lease.ended and found.ok) else found.word

    def lag(self, lease: Lease) -> LeaseLag:
        """How far behind this lease is."""
        return self.lags.get(lease.key, UNKNOWN)


UNKNOWN = LeaseLag()


def cells(reading: TableView, by: str | None, *, full: bool = False) -> Cells:
    """A row for each lease, worker or group, sorted; checkpoints are cut short unless `full`."""
    leases = sorted(reading.leases, key=lambda lease: lease.key)
    match by:
        case "worker":
            return _shares("worker", _worker, leases, reading)
        case "group":
            return _shares("group", _group, leases, reading)
        case _:
            return _each(leases, reading, full=full)


def below(reading: TableView) -> tuple[str, tuple[str, ...]]:
    """The sums over all leases, and the faults that were found."""
    bad = tuple(f"{row.key} cannot be read: {row.field}: {row.why}" for row in reading.malformed)
    bad += noted(reading.leases)
    trouble = (f"{reading.trouble}; trying again",) if reading.trouble else ()
    return f"{_total(reading.leases)}{_behind(reading)}{_judged(reading)}", (*_not_ok(reading), *bad, *trouble)


def page(reading: TableView, by: str | None, width: int) -> Group:
    """A table for a screen so wide, what it amounts to, and what is wrong."""
    table, left_out = drawn(cells(reading, by), width)
    total, wrong = below(reading)
    hints = [hint(left_out)] if left_out else []
    moved = (Text(printable(line), style="bold" if not place else "") for place, line in enumerate(reading.moves))
    return Group(table, *hints, Text(total), *(Text(printable(line), style="red") for line in wrong), *moved)


def moves_between(before: TableView, leases: Iterable[Lease], at: str) -> tuple[str, ...]:
    """The changes of owner since the reading before, as lines; `at` is the time, as people write it."""
    owners = {lease.key: lease.owner for lease in before.leases}
    return tuple(
        f"{at} {lease.key}: {owners[lease.key] or 'nobody'} -> {lease.owner or 'nobody'}"
        for lease in leases
        if not lease.ended and lease.key in owners and owners[lease.key] != lease.owner
    )


def _total(leases: Sequence[Lease]) -> str:
    ended = sum(lease.ended for lease in leases)
    free = sum(lease.owner is None and not lease.ended for lease in leases)
    owners = {lease.owner for lease in leases if lease.owner is not None and not lease.ended}
    return f"{len(leases)} leases, {ended} finished, {free} without an owner; {len(owners)} workers"


def _behind(reading: TableView) -> str:
    lag = fleet_lag(reading.lags)
    return "" if lag.most is None else f"; lag {lag.most:.1f} s at most"


def _judged(reading: TableView) -> str:
    return f"; {reading.status.word}" if reading.statuses or reading.trouble else ""


def _not_ok(reading: TableView) -> tuple[str, ...]:
    """The group's status, and the sentence of each lease that is not OK, those of one sentence together."""
    alike: dict[Status, list[str]] = {}
    for key, status in sorted(reading.statuses.items()):
        if not status.ok:
            alike.setdefault(status, []).append(key)
    worst_first = sorted(alike.items(), key=lambda each: (-each[0].number, each[1]))
    lines = tuple(f"{status.word} {_several(keys)}: {status.says}" for status, keys in worst_first)
    more = (f"and {len(lines) - SAID} more sentences: --json has all",) if len(lines) > SAID else ()
    return (*lines[:SAID], *more)


def _several(keys: Sequence[str]) -> str:
    return ", ".join(keys[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")  # noqa: PLR2004  a line's room


EACH = (
    Column("lease"),
    Column("owner"),
    Column("status", spare=1),
    Column("lag s", right=True, spare=1),
    Column("end", spare=7),
    Column("checkpoint", spare=2),
    Column("age s", right=True, spare=6),
    Column("idle s", right=True, spare=3),
    Column("KB/s", right=True, spare=4),
    Column("switches", right=True, spare=8),
    Column("host", spare=9),
    Column("moving to", spare=5),
)


def _each(leases: Sequence[Lease], reading: TableView, *, full: bool) -> Cells:
    rows = tuple(_row(lease, reading.lag(lease), reading.word(lease), full=full) for lease in leases)
    bad = [(number, 1) for number, lease in enumerate(leases) if lease.owner is None]
    bad += [(number, 2) for number, lease in enumerate(leases) if reading.word(lease) not in {"", "OK"}]
    columns = (*EACH, *((EVENTS,) if any(lag.events is not None for lag in reading.lags.values()) else ()))
    shown = tuple(row[: len(columns)] for row in rows)
    return Cells(columns, shown, styles=tuple((place, "bold red") for place in bad))


EVENTS = Column("events", right=True, spare=1)
"""How many events behind, where the stream counts them."""


def _row(lease: Lease, lag: LeaseLag, word: str, *, full: bool) -> tuple[str, ...]:
    return (
        lease.key,
        _owner(lease),
        word,
        _number(lag.seconds),
        "yes" if lag.end else "no" if lag.seconds is not None else "",
        shown_checkpoint(lease.checkpoint, full=full),
        _number(lag.age),
        _idle(lease.idle),
        "" if lease.weight is None else f"{kilobytes(lease.weight):.1f}",
        "" if lag.moves is None else str(lag.moves),
        lag.host,
        lease.heir or "",
        "" if lag.events is None else str(lag.events),
    )


def _number(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.1f}"


def _owner(lease: Lease) -> str:
    if lease.owner is not None:
        return lease.owner
    return "" if lease.ended else "nobody"


def _idle(seconds: float) -> str:
    """Nothing where it has only now been seen to move, or was never owned."""
    return f"{seconds:.1f}" if 0 < seconds < math.inf else ""


def shown_checkpoint(at: Position, *, full: bool) -> str:
    """A checkpoint in one word, its number cut short unless `full`."""
    number = at.sequence if full or len(at.sequence) <= LONG else f"…{at.sequence[-LONG:]}"
    return f"{number}/{at.sub}" if at.sub else number


SHARES = (
    Column("leases", right=True),
    Column("target", right=True, spare=2),
    Column("share", right=True, spare=4),
    Column("workers", right=True, spare=5),
    Column("lag s", right=True),
    Column("status", spare=3),
    Column("KB/s", right=True, spare=1),
    Column("longest idle s", right=True, spare=6),
)


def _shares(name: str, place: Callable[[Lease], str], leases: Sequence[Lease], reading: TableView) -> Cells:
    """How the unended leases are shared out among what `place` puts them into."""
    working = sorted((lease for lease in leases if not lease.ended), key=place)
    targets: Counter[str] = Counter()
    for worker, target in shares(working).items():
        targets[place(Lease("", owner=worker))] += target
    rows = []
    for where, group in groupby(working, key=place):
        held = tuple(group)
        lag = fleet_lag({lease.key: reading.lag(lease) for lease in held})
        rows.append(
            (
                where,
                str(len(held)),
                str(targets[where]) if where in targets else "",
                f"{len(held) / len(working):.1%}",
                str(len({lease.owner for lease in held} - {None})),
                _number(lag.most),
                max(map(reading.word, held), key=lambda word: NUMBERS.get(word, -1)),
                _throughput(held),
                _idle(max(lease.idle for lease in held)),
            )
        )
    return Cells((Column(name), *SHARES), tuple(rows))


def _throughput(leases: Iterable[Lease]) -> str:
    known = [lease.weight for lease in leases if lease.weight is not None]
    return f"{kilobytes(sum(known)):.1f}" if known else ""


def _worker(lease: Lease) -> str:
    return lease.owner or "nobody"


def _group(lease: Lease) -> str:
    return "nobody" if lease.owner is None else path_of(lease.owner, "prefix")[0] or "(none)"
