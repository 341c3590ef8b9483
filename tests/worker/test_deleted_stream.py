"""If a stream is deleted while workers read it, its checkpoints are kept."""

import pytest
from attrs import define
from virtual_fleet import FaultySource, FaultyStore, four_shards, member
from waiters import Clock

from leasehold.adapters.consumer.handler_consumer import handler_reader
from leasehold.adapters.consumer.handling import Handling
from leasehold.adapters.worker.discovery import Discovery
from leasehold.balancer.config import Config
from leasehold.balancer.model import TRIM_HORIZON, Me, Position, Shard
from leasehold.errors import SourceError, SourceUnavailable
from leasehold.stores.protocol import Listing
from leasehold_lab.simulator.world.world import ListSource, ShardRecords, create_records

HOUR = 3600.0


@define
class Deletable(ListSource):
    """A stream that can be deleted. Its listings then fail."""

    deleted: bool = False

    def shards(self) -> tuple[Shard, ...]:
        """Return the listing while the stream exists."""
        if self.deleted:
            raise SourceError("stream 'orders': it does not exist")
        return super().shards()

    def gone(self, shard: str) -> bool:
        """Return whether the shard is gone. If the stream was deleted, raise SourceError, as `shards` does."""
        self.shards()
        return super().gone(shard)


def test_leases_and_checkpoints_of_a_deleted_stream_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    """If the stream was deleted by mistake or recreated, its checkpoints remain and the loss is logged."""
    clock, store, source = Clock(), FaultyStore(), Deletable(four_shards())
    source.shard_logs["s-0"] = ShardRecords(create_records(3))
    happenings: list[str] = []
    driven_worker = member(store, source, clock, config=Config(lease_seconds=10.0, initial_position=TRIM_HORIZON))
    driven_worker.run(60)
    handling = Handling(lambda _batch: None, observer=lambda happening, _holding: happenings.append(happening))
    reader = handler_reader(driven_worker.worker, driven_worker.worker.holdings[0], handling)
    for _ in range(3):
        reader.step(clock.now)
    source.deleted = True
    driven_worker.run(HOUR)
    assert {lease.key: lease.checkpoint.sequence for lease in store.list().leases} == {
        "s-0": "102",
        "s-1": "TRIM_HORIZON",
        "s-2": "TRIM_HORIZON",
        "s-3": "TRIM_HORIZON",
    }
    assert (store.row("s-0").checkpoint, happenings) == (Position("102"), ["initialize"])
    message = "the shards could not be listed, trying again until they can: stream 'orders': it does not exist"
    assert caplog.text.count(message) == 1


def test_failing_listing_is_logged_again_when_its_reason_changes(caplog: pytest.LogCaptureFixture) -> None:
    reasons = ["throttled", "throttled", "forbidden", "", "throttled"]
    discovery = Discovery(FaultySource(faults=[SourceUnavailable(reason) if reason else None for reason in reasons]))
    for turn in range(len(reasons)):
        discovery.request_listing()
        discovery.shards(float(turn), Listing(()), Me("w-1"))
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == [
        "throttled",
        "forbidden",
        "the shards are listed again",
        "throttled",
    ]
