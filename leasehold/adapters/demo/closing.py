"""The verdict on a run, for people."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from leasehold.adapters.demo.names import short
from leasehold.adapters.history.verdict import RunVerdict


def told(verdict: RunVerdict) -> list[tuple[str, str]]:
    """Names and values, in the order they are read."""
    allowed = f"at most {sum(change.since for change in verdict.owner_changes):,} were to be expected"
    return [
        ("records produced", f"{verdict.produced:,}"),
        ("delivered", f"{verdict.delivered:,}"),
        ("lost", f"{verdict.lost:,}"),
        ("delivered again", f"{verdict.duplicates:,} ({allowed})"),
        ("longest time unread", f"{verdict.unowned_seconds_max:.1f} s (shard {short(verdict.unowned_shard)})"),
        ("leases moved between the living", f"{verdict.moves} (least possible {verdict.moves_least})"),
        ("order within each key", "kept" if not _disordered(verdict) else "broken"),
    ]


def summary(verdict: RunVerdict) -> str:
    """The verdict in one sentence."""
    if verdict.ok:
        return "Nothing was lost."
    return "This must not be: " + "; ".join(map(str, verdict.faults)) + "."


def concluded(verdict: RunVerdict) -> RenderableType:
    """The verdict as a table, and its sentence."""
    table = Table.grid(padding=(0, 2))
    for name, value in told(verdict):
        table.add_row(name, value)
    return Group("", table, "", Text(summary(verdict), style="bold green" if verdict.ok else "bold red"))


def _disordered(verdict: RunVerdict) -> bool:
    return any(fault.what == "out of order" for fault in verdict.faults)
