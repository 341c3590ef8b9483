"""How long one plan takes: against one plain loop over the leases, and against azure-eventhub's own balancer.

    python benchmarks/plan_speed.py [--json] [--leases 10000] [--workers 500] [--repeats 31]

balanced: every worker holds its share. acting: half of the workers are new and hold nothing; one of them
plans. all expired: nobody renewed anything. The shards are not listed. The loop reads owner and idle of
every lease and counts owners; all figures are medians of the same run, taken in turns.
Exits with 1 where a limit is not kept: balanced 4 times the loop, acting 8 times, and all expired a
hundredth of azure-eventhub's own planning (the event-hubs rules, for both plan alike).
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from statistics import median
from types import SimpleNamespace
from typing import Any

from azure.eventhub import LoadBalancingStrategy
from azure.eventhub._eventprocessor.ownership_manager import OwnershipManager

from balancer.config import Config, EventHubs, Kcl, KclRust, Minimal, Rules
from balancer.model import Lease, Me, Version
from balancer.plan import plan

RULES: dict[str, Rules] = {
    "kcl": Kcl(),
    "kcl-rust": KclRust(),
    "event-hubs dotnet": EventHubs("dotnet"),
    "event-hubs python": EventHubs("python"),
    "minimal": Minimal(),
}
LIMITS = {"balanced": 4.0, "acting": 8.0}
PEER_LIMIT = 100.0


def main() -> None:
    """Measure, print, and judge."""
    options = _options()
    report = {
        "leases": options.leases,
        "workers": options.workers,
        "loop_ms": {},
        "ratio_to_loop": {},
        "azure_eventhub_ms": {},
        "azure_eventhub_to_plan": {},
    }
    for state in ("balanced", "acting", "all expired"):
        _measure(state, options, report)
    print(json.dumps(report) if options.json else _table(report))
    sys.exit(1 if _broken(report) else 0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--leases", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=31)
    return parser.parse_args()


def _measure(state: str, options: argparse.Namespace, report: dict[str, Any]) -> None:
    leases = _leases(state, options)
    me = Me("w-0" if state == "balanced" else "newcomer", turn=1)
    timed: dict[str, Callable[[], object]] = {"loop": lambda: _loop(leases)}
    for name, rules in RULES.items():
        config = Config(rules=rules, lease_seconds=10.0)
        timed[name] = lambda config=config: plan(leases, None, me, config)  # type: ignore[misc]
    # azure-eventhub takes seconds where all are expired, and would have the run last for minutes.
    times = _medians(timed, _Peer(leases, me.worker), options.repeats if state != "all expired" else 5)
    report["loop_ms"][state] = 1e3 * times["loop"]
    report["ratio_to_loop"][state] = {name: times[name] / times["loop"] for name in RULES}
    report["azure_eventhub_ms"][state] = 1e3 * times["azure-eventhub"]
    report["azure_eventhub_to_plan"][state] = {name: times["azure-eventhub"] / times[name] for name in RULES}


def _leases(state: str, options: argparse.Namespace) -> tuple[Lease, ...]:
    holders = options.workers // 2 if state == "acting" else options.workers
    idle = 3600.0 if state == "all expired" else 1.0
    return tuple(
        Lease(f"shardId-{place:012d}", owner=f"w-{place % holders}", version=Version("7"), idle=idle)
        for place in range(options.leases)
    )


def _loop(leases: tuple[Lease, ...]) -> dict[str | None, int]:
    counts: dict[str | None, int] = {}
    for lease in leases:
        if lease.idle <= 10.0:
            counts[lease.owner] = counts.get(lease.owner, 0) + 1
    return counts


def _medians(timed: dict[str, Callable[[], object]], peer: "_Peer", repeats: int) -> dict[str, float]:
    """In turns, so that a busy moment of the machine falls on all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    peers = []
    # As timeit does: else one side pays for collecting what the other left behind.
    gc.disable()
    for _ in range(repeats):
        for name, work in timed.items():
            began = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - began)
        peers.append(peer.seconds())
        gc.collect()
    gc.enable()
    return {name: median(each) for name, each in seconds.items()} | {"azure-eventhub": median(peers)}


class _Peer:
    """azure-eventhub's planning method on the same listing, which is made anew each time, for it writes into it."""

    def __init__(self, leases: tuple[Lease, ...], worker: str) -> None:
        client: Any = SimpleNamespace(_address=SimpleNamespace(hostname="hub.example"), eventhub_name="hub")
        balanced = LoadBalancingStrategy.BALANCED
        self._manager = OwnershipManager(client, "$Default", worker, None, 60.0, balanced, None)
        self._leases, self._ids = leases, [lease.key for lease in leases]

    def seconds(self) -> float:
        now = time.time()
        records = [
            {"partition_id": lease.key, "owner_id": lease.owner, "last_modified_time": now - lease.idle, "etag": "7"}
            for lease in self._leases
        ]
        began = time.perf_counter()
        self._manager._balance_ownership(records, self._ids)  # noqa: SLF001  what the SDK calls once a cycle
        return time.perf_counter() - began


def _broken(report: dict[str, Any]) -> bool:
    slow = any(ratio > most for state, most in LIMITS.items() for ratio in report["ratio_to_loop"][state].values())
    peers = report["azure_eventhub_to_plan"]["all expired"]
    return slow or any(peers[name] < PEER_LIMIT for name in RULES if name.startswith("event-hubs"))


def _table(report: dict[str, Any]) -> str:
    lines = [f"{report['leases']} leases, {report['workers']} workers"]
    for state, ratios in report["ratio_to_loop"].items():
        loop, peer = report["loop_ms"][state], report["azure_eventhub_ms"][state]
        slower = report["azure_eventhub_to_plan"][state]
        limit = f", at most {LIMITS[state]:g} times the loop" if state in LIMITS else ""
        lines += ["", f"{state}{limit}", f"  {'plain loop':20}{loop:9.2f} ms"]
        lines += [
            f"  {name:20}{ratio * loop:9.2f} ms {ratio:9.1f} x loop; azure-eventhub takes {slower[name]:.1f} x that"
            for name, ratio in ratios.items()
        ]
        lines += [f"  {'azure-eventhub':20}{peer:9.2f} ms {peer / loop:9.1f} x loop"]
    return "\n".join(lines)


main()
