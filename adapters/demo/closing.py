"""The last word of a run, for people."""

from adapters.demo.names import short
from adapters.history.judge import Verdict


def told(verdict: Verdict) -> list[tuple[str, str]]:
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


def summary(verdict: Verdict) -> str:
    """One sentence."""
    if verdict.ok:
        return "Nothing was lost."
    return "This must not be: " + "; ".join(verdict.faults) + "."


def _disordered(verdict: Verdict) -> bool:
    return any(fault.startswith("order") for fault in verdict.faults)
