"""Replaces our planner by the load balancer of the installed azure-eventhub, to compare both in the simulator."""

import random
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from azure.eventhub import LoadBalancingStrategy
from azure.eventhub._eventprocessor.ownership_manager import OwnershipManager

from leasehold.balancer.actions import Action, Claim, Steal
from leasehold.balancer.config import Config
from leasehold.balancer.counting import expires_above
from leasehold.balancer.model import Lease, Me, Shard

STRATEGIES = {
    "azure-eventhub": LoadBalancingStrategy.BALANCED,
    "azure-eventhub-greedy": LoadBalancingStrategy.GREEDY,
}
"""The SDK's strategies, by their names in the table of results. The fleets are configured with the `python` dialect."""


@contextmanager
def sdk_planner(name: str) -> Iterator[None]:
    """Let all workers that start in this block plan with the SDK's own class."""

    def plan(leases: Iterable[Lease], _shards: Iterable[Shard] | None, me: Me, config: Config) -> tuple[Action, ...]:
        return _plan_with_sdk(tuple(leases), me, config, STRATEGIES[name])

    with patch("leasehold.adapters.worker.worker.plan", plan):
        yield


def _plan_with_sdk(
    leases: tuple[Lease, ...], me: Me, config: Config, strategy: LoadBalancingStrategy
) -> tuple[Claim | Steal, ...]:
    client: Any = SimpleNamespace(_address=SimpleNamespace(hostname="hub"), eventhub_name="hub")
    manager = OwnershipManager(client, "$Default", me.worker, None, config.lease_seconds, strategy, None)
    random.seed(f"{me.worker} {me.turn}")  # the SDK uses the global generator, and runs must be reproducible
    now, by_key = time.time(), {lease.key: lease for lease in leases}
    records: list[dict[str, Any]] = [
        {"partition_id": lease.key, "owner_id": lease.owner or "", "last_modified_time": now - min(lease.idle, now)}
        for lease in leases
    ]
    records_chosen = manager._balance_ownership(records, list(by_key))  # noqa: SLF001  the rule itself
    chosen_leases = [by_key[record["partition_id"]] for record in records_chosen]
    return tuple(_action(lease, config) for lease in chosen_leases if lease.owner != me.worker)


def _action(lease: Lease, config: Config) -> Claim | Steal:
    if lease.owner is None or lease.idle > expires_above(config):
        return Claim(lease, "SDK")
    return Steal(lease, lease.owner, "SDK")
