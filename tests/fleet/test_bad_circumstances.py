"""A worker with real blobs while the storage is down, a clock is wrong, blobs are unreadable, or keys are wrong."""

import logging
import re
import time
from collections.abc import Callable, Iterator

import pytest
from attrs import define, field
from azure.storage.blob import ContainerClient
from hub_stage import a_container
from typer.testing import CliRunner
from wire import Wire

from leasehold.adapters.cli.consume import app
from leasehold.adapters.threads import ThreadScheduler
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.config import Config
from leasehold.balancer.model import Lease, Shard
from leasehold.stores.objects.blob import CONNECTION_STRING_VARIABLE, BlobObjects
from leasehold.stores.objects.event_hubs_layout import EventHubLayout
from leasehold.stores.objects.store import EtagStore
from leasehold.stores.requests import SkewWarning
from leasehold.stores.writes import CreateLease, RenewLease
from leasehold_lab.contract.actors import expect_applied
from leasehold_lab.simulator.world.world import ListSource
from leasehold_lab.standins.hubs.event_hubs import LocalHubs
from leasehold_lab.standins.node import Service
from leasehold_lab.standins.services import AZURITE_ACCOUNT

pytestmark = [pytest.mark.more, pytest.mark.services]

LAYOUT = EventHubLayout("ns.servicebus.windows.net", "orders", "$Default")
PREFIX = "ns.servicebus.windows.net/orders/$default"
CONFIG = Config(lease_seconds=12.0, cycle_seconds=4.0, renew_seconds=1.0)
SHARED = {"0": "sdk", "1": "sdk", "2": "ann", "3": "ann"}


@define
class Member:
    """A worker whose clock the test advances, cycle by cycle."""

    store: EtagStore
    now: float = 1000.0
    worker: Worker = field(init=False)

    def __attrs_post_init__(self) -> None:
        source = ListSource([Shard(str(number), PREFIX) for number in range(4)], stream=PREFIX)
        self.worker = Worker(
            store=self.store, source=source, me="ann", config=CONFIG, scheduler=ThreadScheduler(lambda: self.now)
        )

    def cycle(self) -> list[str]:
        """Run one cycle, and return the keys of the held partitions."""
        self.now += CONFIG.cycle_seconds
        self.worker.renew(self.now)
        self.worker.hurry()
        self.worker.turn(self.now)
        return [holding.key for holding in self.worker.holdings]

    def until(self, condition: Callable[[], bool], after_cycle: Callable[[], None] = lambda: None) -> None:
        """Run cycles until the condition is met. Fail after twenty cycles."""
        cycles = 0
        while not condition():
            cycles += 1
            assert cycles < 20, "not within twenty cycles"
            self.cycle()
            after_cycle()


def owners(store: EtagStore) -> dict[str, str | None]:
    return {lease.key: lease.owner for lease in store.list().leases}


@pytest.fixture
def container(blobs: str) -> Iterator[ContainerClient]:
    with a_container() as name, ContainerClient.from_connection_string(blobs, name) as client:
        yield client


@pytest.fixture
def peer(container: ContainerClient) -> EtagStore:
    """Return the store of an official worker that owns two of four partitions, and can always reach the blobs."""
    store = EtagStore(BlobObjects(container), LAYOUT)
    for key in SHARED:
        expect_applied(store.write(CreateLease(Lease(key))))
    for key in "01":
        container.upload_blob(f"{PREFIX}/ownership/{key}", b"", metadata={"ownerid": "sdk"})
    return store


def renew(peer: EtagStore) -> None:
    for lease in peer.get("01"):
        expect_applied(peer.write(RenewLease(lease)))


def test_leases_survive_three_cycles_without_storage(
    container: ContainerClient,
    peer: EtagStore,
    azurite_service: Service,
    blobs: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A worker that gives up leases too soon leaves shards unread. A worker that is too late reads a shard twice."""
    wire = Wire(azurite_service.port)
    connection_through_wire = blobs.replace(f":{azurite_service.port}/", f":{wire.port}/")
    with ContainerClient.from_connection_string(
        connection_through_wire, container.container_name, retry_total=0
    ) as client:
        ann = Member(EtagStore(BlobObjects(client), LAYOUT))
        ann.until(lambda: owners(peer) == SHARED, lambda: renew(peer))
        leases_before = peer.list().leases
        wire.cut()
        assert [ann.cycle() for _ in range(4)] == [["2", "3"]] * 3 + [[]]
        assert [lease.version for lease in peer.list().leases] == [lease.version for lease in leases_before]
        renew(peer)
        wire.mend()
        assert (ann.cycle(), owners(peer)) == (["2", "3"], SHARED)
        wire.cut()
    warnings = " ".join(record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)
    assert "the leases could not be looked at, trying again in " in warnings
    assert f"container '{container.container_name}': the service cannot be reached" in warnings
    assert "lease 2 could not be renewed: " in warnings
    assert "lease 2: dropped, not confirmed for 12 s: others may have it" in warnings


@pytest.mark.parametrize("skew", [600.0, -600.0])
def test_a_clock_ten_minutes_off_takes_no_lease_from_living_owners(
    container: ContainerClient, peer: EtagStore, skew: float, caplog: pytest.LogCaptureFixture
) -> None:
    """With a clock that is ahead, live peers must not look dead. With one that is behind, dead peers must look dead."""
    objects_with_skew = BlobObjects(container, SkewWarning(lambda: time.time() + skew))
    ann = Member(EtagStore(objects_with_skew, LAYOUT))
    for _ in range(6):
        ann.cycle()
        renew(peer)
    assert owners(peer) == SHARED
    ann.until(lambda: owners(peer) == dict.fromkeys("0123", "ann"))  # The peer no longer renews its leases.
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "leasehold.objects"]
    assert re.match(r"the local clock is (59|60)\d s (ahead of|behind) the storage service's", warning)


def test_foreign_blobs_do_not_stop_a_worker(
    container: ContainerClient, peer: EtagStore, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("ownership/readme.txt", "ownership/2", "ownership-old/3"):
        container.upload_blob(f"{PREFIX}/{name}", b"")  # These blobs have no metadata.
    broken_blob = container.get_blob_client(f"{PREFIX}/checkpoint/3")
    broken_blob.set_blob_metadata({"offset": "0", "sequencenumber": "x"})
    ann = Member(EtagStore(BlobObjects(container), LAYOUT))
    for _ in range(3):
        held_partitions = ann.cycle()
        renew(peer)
    assert held_partitions == ["2"]
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    consequence = (
        "until it is fixed, no lease is created for ancestors and descendants of its shard, and none is deleted"
    )
    assert warnings == [f"row 3: sequencenumber 'x' is not a decimal sequence number; {consequence}"]
    broken_blob.set_blob_metadata({"offset": "0", "sequencenumber": "7"})
    ann.until(lambda: owners(peer) == SHARED, lambda: renew(peer))


def run_until_exit(url: str, *more_arguments: str) -> tuple[int, str]:
    """Run the command, and return its exit status and its error output."""
    result = CliRunner().invoke(app, [url, "--events", *more_arguments])
    assert result.stdout == ""
    return result.exit_code, result.stderr


def test_an_unusable_hub_is_reported_by_the_command(
    hubs: LocalHubs, blobs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = f"eventhubs://{hubs.namespace}/nowhere"
    store = f"azblob://{AZURITE_ACCOUNT}/absent?eventhub={hubs.namespace}/nowhere"
    status, output = run_until_exit(source, "--store", store, "--no-create")
    assert (status, output) == (
        1,
        "leasehold consume: container 'absent': it does not exist; create it, or allow it to be created\n",
    )
    status, output = run_until_exit(source, "--store", store)
    assert (status, "there is no such hub or consumer group" in output) == (1, True)
    monkeypatch.setenv(CONNECTION_STRING_VARIABLE, blobs.replace("AccountKey=E", "AccountKey=F"))
    status, output = run_until_exit(source, "--store", store)
    assert (status, "container 'absent': the service refused" in output, "Fby8" in output) == (1, True, False)
    assert "check the key in AZURE_STORAGE_CONNECTION_STRING" in output
