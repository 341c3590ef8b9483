"""Measures the processor time of a plan, relative to a plain loop over the leases and to azure-eventhub's balancer.

    python benchmarks/plan_speed.py [--json] [--leases 10000] [--workers 500] [--repeats 31]

Without --leases, there are two fleets, with 10,000 leases on 500 workers and with 100,000 leases on 2,000 workers. The
shards are not listed. A fleet has several states:

- balanced: every worker has its share of the leases.
- acting: half of the workers are new and have no leases. One of these plans.
- filling: half of the workers have only one lease. One of these plans.
- all expired: no lease was renewed.

The loop reads the owner and the idle time of every lease, and counts leases by owner. All figures are medians of the
same run, in which the contenders take turns. The exit status is 1 if one of these limits is not met:

- A plan takes at most 4 times as long as the loop if balanced, and 8 times if acting or filling.
- `minimal` takes at most 1.5 times as long as `kcl` if balanced, and 3 times if acting or filling.
- If all leases are expired, the `event-hubs` rules take at most a hundredth of azure-eventhub's time. Both make the
  same decisions. This is not measured in the larger fleet, in which azure-eventhub would take minutes.
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

from leasehold.balancer.config import Config
from leasehold.balancer.model import Lease, Me, Version
from leasehold.balancer.plan import plan
from leasehold.balancer.rule_set import RuleSet
from leasehold.balancer.rules.event_hubs import EventHubs
from leasehold.balancer.rules.kcl import Kcl, KclRust
from leasehold.balancer.rules.minimal import Minimal

RULES: dict[str, RuleSet] = {
    "kcl": Kcl(),
    "kcl-rust": KclRust(),
    "event-hubs dotnet": EventHubs("dotnet"),
    "event-hubs python": EventHubs("python"),
    "minimal": Minimal(),
}
LIMITS = {"balanced": 4.0, "acting": 8.0, "filling": 8.0}
KCL_LIMITS = {"balanced": 1.5, "acting": 3.0, "filling": 3.0}
PEER_LIMIT = 100.0
SIZES = ((10_000, 500), (100_000, 2000))


def main() -> None:
    """Measure, and print the results. The exit status is 1 if a limit is not met."""
    options = _options()
    sizes = SIZES if options.leases is None else ((options.leases, options.workers),)
    reports = [_report(leases, workers, options.repeats) for leases, workers in sizes]
    print(json.dumps(reports) if options.json else "\n\n".join(map(_table, reports)))
    sys.exit(1 if any(map(_misses_limits, reports)) else 0)


def _report(leases: int, workers: int, repeats: int) -> dict[str, Any]:
    report: dict[str, Any] = {
        "leases": leases,
        "workers": workers,
        "loop_ms": {},
        "ratio_to_loop": {},
        "azure_eventhub_ms": {},
        "azure_eventhub_to_plan": {},
    }
    for state in (*LIMITS, *(["all expired"] if leases <= SIZES[0][0] else [])):
        _measure(state, repeats, report)
    return report


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--leases", type=int)
    parser.add_argument("--workers", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=31)
    return parser.parse_args()


def _measure(state: str, repeats: int, report: dict[str, Any]) -> None:
    leases = _leases(state, report["leases"], report["workers"])
    me = Me("newcomer" if state == "acting" else f"w-{report['workers'] - 1}", turn=1)
    timed: dict[str, Callable[[], object]] = {"loop": lambda: _loop(leases)}
    for name, rules in RULES.items():
        config = Config(rules=rules, lease_seconds=10.0)
        timed[name] = lambda config=config: plan(leases, None, me, config)  # type: ignore[misc]
    # If all leases are expired, azure-eventhub takes seconds, so more repetitions would take minutes.
    times = _medians(timed, _Peer(leases, me.worker), repeats if state != "all expired" else 5)
    report["loop_ms"][state] = 1e3 * times["loop"]
    report["ratio_to_loop"][state] = {name: times[name] / times["loop"] for name in RULES}
    report["azure_eventhub_ms"][state] = 1e3 * times["azure-eventhub"]
    report["azure_eventhub_to_plan"][state] = {name: times["azure-eventhub"] / times[name] for name in RULES}


def _leases(state: str, leases: int, workers: int) -> tuple[Lease, ...]:
    idle = 3600.0 if state == "all expired" else 1.0
    owners = [f"w-{index % workers}" for index in range(leases)]
    if state in {"acting", "filling"}:
        already_owned = workers if state == "filling" else 0  # new workers have one lease each, or none
        owners[already_owned:] = [f"w-{index % (workers // 2)}" for index in range(already_owned, leases)]
    return tuple(
        Lease(f"shardId-{index:012d}", owner=owner, version=Version("7"), idle=idle)
        for index, owner in enumerate(owners)
    )


def _loop(leases: tuple[Lease, ...]) -> dict[str | None, int]:
    counts: dict[str | None, int] = {}
    for lease in leases:
        if lease.idle <= 10.0:
            counts[lease.owner] = counts.get(lease.owner, 0) + 1
    return counts


def _medians(contenders: dict[str, Callable[[], object]], peer: "_Peer", repeats: int) -> dict[str, float]:
    """Return median times. The contenders take turns, so that other load on the machine affects all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    peer_samples = []
    # As in timeit. Otherwise one side might pay for collecting the garbage of another.
    gc.disable()
    for _ in range(repeats):
        for name, work in contenders.items():
            began = time.process_time()
            work()
            seconds[name].append(time.process_time() - began)
        peer_samples.append(peer.seconds())
        gc.collect()
    gc.enable()
    return {name: median(samples) for name, samples in seconds.items()} | {"azure-eventhub": median(peer_samples)}


class _Peer:
    """azure-eventhub's planning method with the same leases. It changes its arguments, so each call gets new ones."""

    def __init__(self, leases: tuple[Lease, ...], worker: str) -> None:
        client: Any = SimpleNamespace(_address=SimpleNamespace(hostname="hub.example"), eventhub_name="hub")
        balanced = LoadBalancingStrategy.BALANCED
        self._manager = OwnershipManager(client, "$Default", worker, None, 60.0, balanced, None)
        self._leases, self._make_session_id = leases, [lease.key for lease in leases]

    def seconds(self) -> float:
        now = time.time()
        records = [
            {"partition_id": lease.key, "owner_id": lease.owner, "last_modified_time": now - lease.idle, "etag": "7"}
            for lease in self._leases
        ]
        began = time.process_time()
        self._manager._balance_ownership(records, self._make_session_id)  # noqa: SLF001  the method that the SDK calls once per cycle
        return time.process_time() - began


def _misses_limits(report: dict[str, Any]) -> bool:
    ratios = report["ratio_to_loop"]
    slow = any(ratio > limit for state, limit in LIMITS.items() for ratio in ratios[state].values())
    slower = any(ratios[state]["minimal"] > limit * ratios[state]["kcl"] for state, limit in KCL_LIMITS.items())
    peers = report["azure_eventhub_to_plan"].get("all expired", {})
    peer_too_fast = any(ratio < PEER_LIMIT for name, ratio in peers.items() if name.startswith("event-hubs"))
    return slow or slower or peer_too_fast


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
        lines += [f"  minimal takes {ratios['minimal'] / ratios['kcl']:.2f} times as long as kcl"]
        lines += [f"  {'azure-eventhub':20}{peer:9.2f} ms {peer / loop:9.1f} x loop"]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
