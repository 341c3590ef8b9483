"""The load balancer of the installed azure-eventhub in the place of our planner, for comparison in the simulator."""

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
"""By the name that the table of results gives it; it is run in fleets whose rules are the python dialect's."""


@contextmanager
def in_charge(name: str) -> Iterator[None]:
    """Every worker started within asks the SDK's own class what to take."""

    def plan(leases: Iterable[Lease], _shards: Iterable[Shard] | None, me: Me, config: Config) -> tuple[Action, ...]:
        return _taken(tuple(leases), me, config, STRATEGIES[name])

    with patch("leasehold.adapters.worker.worker.plan", plan):
        yield


def _taken(
    leases: tuple[Lease, ...], me: Me, config: Config, strategy: LoadBalancingStrategy
) -> tuple[Claim | Steal, ...]:
    client: Any = SimpleNamespace(_address=SimpleNamespace(hostname="hub"), eventhub_name="hub")
    manager = OwnershipManager(client, "$Default", me.worker, None, config.lease_seconds, strategy, None)
    random.seed(
        f"{me.worker} {me.turn}"
    )  # it draws from the module's own generator: the same run again must be the same
    now, by_key = time.time(), {lease.key: lease for lease in leases}
    records: list[dict[str, Any]] = [
        {"partition_id": lease.key, "owner_id": lease.owner or "", "last_modified_time": now - min(lease.idle, now)}
        for lease in leases
    ]
    chosen = manager._balance_ownership(records, list(by_key))  # noqa: SLF001  the rule itself
    taken = [by_key[record["partition_id"]] for record in chosen]
    return tuple(_action(lease, config) for lease in taken if lease.owner != me.worker)


def _action(lease: Lease, config: Config) -> Claim | Steal:
    if lease.owner is None or lease.idle > expires_above(config):
        return Claim(lease, "SDK")
    return Steal(lease, lease.owner, "SDK")
