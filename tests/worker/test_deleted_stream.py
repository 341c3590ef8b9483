"""A stream that is deleted while a fleet reads it: its checkpoints outlive it."""

import pytest
from attrs import define
from virtual_fleet import Clock, FaultyStore, four_shards, member

from adapters.handling import Handling
from adapters.reading import Reading
from adapters.simulator.stream import ListSource, Shelf, records
from adapters.source import SourceError
from balancer.config import Config
from balancer.model import Position, Shard

HOUR = 3600.0


@define
class Deletable(ListSource):
    """A stream that answers nothing but its name once it is gone."""

    deleted: bool = False

    def shards(self) -> tuple[Shard, ...]:
        """The listing, while there is one."""
        if self.deleted:
            raise SourceError("stream 'orders': it does not exist")
        return super().shards()

    def gone(self, shard: str) -> bool:
        """What no longer exists cannot say so of its shards."""
        self.shards()
        return super().gone(shard)


def test_its_leases_and_checkpoints_stay(caplog: pytest.LogCaptureFixture) -> None:
    """Without it a stream deleted by mistake, or made anew, would be begun from scratch, and nobody be told."""
    clock, store, source = Clock(), FaultyStore(), Deletable(four_shards())
    source.shelves["s-0"] = Shelf(records(3))
    happened: list[str] = []
    ours = member(store, source, clock, config=Config(lease_seconds=10.0))
    ours.run(60)
    handling = Handling(lambda _batch: None, observer=lambda what, _holding: happened.append(what))
    reading = Reading(ours.worker, ours.worker.holdings[0], handling)
    for _ in range(3):
        reading.step(clock.now)
    source.deleted = True
    ours.run(HOUR)
    assert {lease.key: lease.checkpoint.sequence for lease in store.list().leases} == {
        "s-0": "102",
        "s-1": "LATEST",
        "s-2": "LATEST",
        "s-3": "LATEST",
    }
    assert (store.row("s-0").checkpoint, happened) == (Position("102"), ["initialize"])
    assert "the shards could not be listed, trying again next turn: stream 'orders': it does not exist" in caplog.text
