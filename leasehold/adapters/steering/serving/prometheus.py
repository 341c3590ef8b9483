"""The metrics of the watched tables, in the text format of Prometheus."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

HELP = {
    "leasehold_up": "Whether the table was read lately.",
    "leasehold_status": "The group's status: 0 OK, 3 not known, 4 behind, 5 stalled, 6 hung, 7 unread, 8 orphan.",
    "leasehold_lease_status": "A lease's status, by the same numbers.",
    "leasehold_leases": "Unfinished leases.",
    "leasehold_unowned_leases": "Unfinished leases without an owner.",
    "leasehold_workers": "Workers that hold a lease.",
    "leasehold_malformed_rows": "Rows that cannot be read as leases.",
    "leasehold_contradictions": "What workers found that stream and table contradict each other in.",
    "leasehold_lag_max_seconds": "How far the lease that is furthest behind is behind.",
    "leasehold_lag_sum_seconds": "How far all leases together are behind.",
    "leasehold_owner_changes_total": "Changes of owner seen since the server started.",
    "leasehold_worker_leases": "Unfinished leases of a worker.",
    "leasehold_worker_target": "Leases that a worker should hold.",
    "leasehold_lease_lag_seconds": "How far a lease is behind.",
    "leasehold_lease_idle_seconds": "For how long a lease has not been renewed.",
    "leasehold_lease_kilobytes_per_second": "The throughput of a lease.",
    "leasehold_lease_switches_total": "How often a lease passed between workers, as far as ours saw.",
}

Sample = tuple[str, dict[str, str], float]


def exposition(states: Sequence[tuple[dict[str, Any], bool]]) -> str:
    """The metrics of these tables: the state of each, and whether it is fresh; of a stale one nothing but that."""
    samples = [sample for state, fresh in states for sample in _samples(state, fresh=fresh)]
    lines = []
    for name, meaning in HELP.items():
        of_name = [sample for sample in samples if sample[0] == name]
        if of_name:
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]
            lines += [f"{name}{{{_labels(labels)}}} {value:g}" for _, labels, value in of_name]
    return "\n".join(lines) + "\n"


def _samples(state: dict[str, Any], *, fresh: bool) -> Iterator[Sample]:
    of = {"store": state["store"]}
    yield "leasehold_up", of, float(fresh)
    yield "leasehold_status", of, float(state["number"])
    if not fresh:
        return
    total = state["total"]
    whole = {
        "leasehold_leases": total["leases"],
        "leasehold_unowned_leases": total["unowned"],
        "leasehold_workers": total["workers"],
        "leasehold_malformed_rows": len(state["malformed"]),
        "leasehold_contradictions": len(state["contradictions"]),
        "leasehold_lag_max_seconds": total["lag_max"],
        "leasehold_lag_sum_seconds": total["lag_sum"],
        "leasehold_owner_changes_total": total["moves"],
    }
    yield from _known(whole, of)
    for worker in state["workers"]:
        told = {"leasehold_worker_leases": worker["leases"], "leasehold_worker_target": worker["target"]}
        yield from _known(told, of | {"worker": worker["worker"]})
    yield from _of_leases((lease for lease in state["leases"] if not lease["ended"]), of)


def _of_leases(leases: Iterable[dict[str, Any]], of: dict[str, str]) -> Iterator[Sample]:
    for lease in leases:
        lag = lease["lag"]
        told = {
            "leasehold_lease_lag_seconds": lag.get("seconds"),
            "leasehold_lease_status": lease["number"],
            "leasehold_lease_idle_seconds": lease["idle"],
            "leasehold_lease_kilobytes_per_second": lease["kbps"],
            "leasehold_lease_switches_total": lag.get("moves"),
        }
        yield from _known(told, of | {"lease": lease["key"]})


def _known(told: dict[str, float | None], labels: dict[str, str]) -> Iterator[Sample]:
    for name, value in told.items():
        if value is not None:
            yield name, labels, float(value)


def _labels(labels: dict[str, str]) -> str:
    return ",".join(f'{name}="{_quoted(value)}"' for name, value in labels.items())


def _quoted(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
