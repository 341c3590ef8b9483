"""Three workers of the Python SDK stay at 4, 2 and 2 partitions forever, unless one of our workers is in the group.

The balancing and the checkpoint store are those of the installed SDK, with real blobs. The test only decides when they
run, and moves the clock of our worker.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
from attrs import define
from azure.eventhub import LoadBalancingStrategy
from azure.eventhub._eventprocessor.ownership_manager import OwnershipManager
from azure.eventhub.extensions.checkpointstoreblob import BlobCheckpointStore
from hub_stage import a_container

from leasehold.adapters.threads import ThreadScheduler
from leasehold.adapters.worker.scheduler import Unread
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.config import Config
from leasehold.balancer.model import Shard
from leasehold.balancer.rule_set import RuleSet
from leasehold.balancer.rules.event_hubs import EventHubs
from leasehold.balancer.rules.minimal import Minimal
from leasehold.stores.objects.event_hubs_layout import stream_name
from leasehold.stores.urls import open_store
from leasehold_lab.simulator.world.world import ListSource
from leasehold_lab.standins.services import AZURITE_ACCOUNT

pytestmark = pytest.mark.services

EXPIRY, CYCLE = 180.0, 30.0
NAMESPACE, HUB, GROUP = "ns.servicebus.windows.net", "stuck", "$Default"
PARTITIONS = [str(number) for number in range(8)]
# These cycles last more than twice as long as the waits of M9 and M11.
CYCLES = 12


@define
class Blobs:
    """A container that is accessed through the SDK's store and, by its URL, through ours."""

    theirs: BlobCheckpointStore
    url: str

    def official(self, worker_name: str, strategy: LoadBalancingStrategy) -> OwnershipManager:
        """Return the balancer of one official worker."""
        address = SimpleNamespace(hostname=NAMESPACE)
        client: Any = SimpleNamespace(_address=address, eventhub_name=HUB, get_partition_ids=lambda: PARTITIONS)
        return OwnershipManager(client, GROUP, worker_name, self.theirs, EXPIRY, strategy, None)

    def set_owners(self, owners: str) -> None:
        """Set the owners of the partitions, one letter each."""
        hub_fields = {"fully_qualified_namespace": NAMESPACE, "eventhub_name": HUB, "consumer_group": GROUP}
        rows = zip(PARTITIONS, owners, strict=True)
        self.theirs.claim_ownership(
            [{**hub_fields, "partition_id": partition, "owner_id": owner} for partition, owner in rows]
        )

    def counts(self) -> list[int]:
        """Return the numbers of partitions that the owners have, in descending order."""
        owners = Counter(row["owner_id"] for row in self.theirs.list_ownership(NAMESPACE, HUB, GROUP))
        return sorted(owners.values(), reverse=True)


@pytest.fixture
def group(blobs: str) -> Iterator[Blobs]:
    """Yield a container in which three owners have 4, 2 and 2 partitions."""
    with a_container() as name, BlobCheckpointStore.from_connection_string(blobs, name) as theirs:
        container_blobs = Blobs(theirs, f"azblob://{AZURITE_ACCOUNT}/{name}?eventhub={NAMESPACE}/{HUB}")
        container_blobs.set_owners("aaaabbcc")
        yield container_blobs


@pytest.mark.parametrize("strategy", list(LoadBalancingStrategy))
def test_official_workers_alone_stay_uneven(group: Blobs, strategy: LoadBalancingStrategy) -> None:
    """If this test fails because a release of the SDK balances better, `docs/event-hubs.md` must be updated."""
    managers = [group.official(me, strategy) for me in "abc"]
    for _ in range(CYCLES):
        for manager in managers:
            manager.claim_ownership()
    assert group.counts() == [4, 2, 2]


@pytest.mark.parametrize(
    ("ours", "rules", "ends"),
    [
        ("a", Minimal(release=True), [3, 3, 2]),  # M11: official workers take only released leases
        ("a", Minimal(), [4, 2, 2]),
        ("b", Minimal(), [3, 3, 2]),  # M9
        ("b", EventHubs("dotnet"), [3, 3, 2]),  # E4
        ("b", EventHubs("python"), [4, 2, 2]),  # E3
    ],
)
def test_our_worker_balances_the_group(group: Blobs, ours: str, rules: RuleSet, ends: list[int]) -> None:
    now = 1000.0
    config = Config(rules=rules, lease_seconds=EXPIRY, cycle_seconds=CYCLE, renew_seconds=CYCLE / 2)
    with closing(open_store(group.url)) as store:
        stream = stream_name(NAMESPACE, HUB, GROUP)
        source = ListSource([Shard(partition, stream) for partition in PARTITIONS], stream=stream)
        scheduler = ThreadScheduler(lambda: now, process_id="p-1")
        worker = Worker(store=store, source=source, me=ours, config=config, consumer=Unread(), scheduler=scheduler)
        managers = [group.official(me, LoadBalancingStrategy.GREEDY) for me in "abc" if me != ours]
        for _ in range(CYCLES):
            now += CYCLE
            worker.renew(now)
            worker.turn(now)
            for manager in managers:
                manager.claim_ownership()
    assert group.counts() == ends
