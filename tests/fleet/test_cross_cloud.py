"""Any source on any store, by worker processes of which one is killed: Kinesis on Azure, Event Hubs on DynamoDB."""

from contextlib import closing
from hashlib import sha1
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from attrs import define, field
from hub_stage import SETTINGS, SETTLE_SECONDS, Feed, HubStream, a_container, a_group, flights

from leasehold.adapters.demo.stage import Stage, Stream, put
from leasehold.adapters.history.events import Sent
from leasehold.adapters.local.hubs.event_hubs import LocalHubs
from leasehold.adapters.local.services import AZURITE_ACCOUNT
from leasehold.stores.urls import open_store

if TYPE_CHECKING:
    from types_boto3_kinesis import KinesisClient

pytestmark = [pytest.mark.services, pytest.mark.xdist_group("fleets")]

KEYS = 17
ROWS = 1800


def test_event_hubs_by_leases_in_dynamodb(hubs: LocalHubs, dynalite_url: str, tmp_path: Path) -> None:
    """Without it a partition, which has no parents and an offset, might not fit into a row made for shards."""
    store = f"dynamodb://hub-leases?region=eu-west-1&endpoint={dynalite_url}"
    with a_group(Feed(HubStream(hubs, "crossing", 4), flights(ROWS), 40), tmp_path, store) as group:
        group.stage.join("ours-1")
        group.stage.join("ours-2")
        assert group.settle() == [2, 2]
        group.stage.kill("ours-1")
        assert group.settle() == [4]
        verdict = group.finish()
        assert (verdict.faults, verdict.produced, verdict.lost) == ((), ROWS, 0)
        assert [change for change in verdict.owner_changes if change.duplicates > change.since] == []


@define
class Puts:
    """Numbered records for a stream, some at each tick, those of one key in order."""

    client: "KinesisClient"
    stream: str
    numbers: "count[int]" = field(factory=count)
    sent: list[Sent] = field(factory=list)

    def __call__(self, _stage: Stage) -> None:
        """The next sixty, until all are sent."""
        rows = [(f"k-{number % KEYS}", b"%d" % number) for number in islice(self.numbers, 60) if number < ROWS]
        if rows:
            put(self.client, self.stream, rows)
        self.sent += [Sent(key, int(data), sha1(data, usedforsecurity=False).hexdigest()) for key, data in rows]

    def all_seen(self, stage: Stage) -> bool:
        """Whether everything was sent and handed over."""
        return ROWS == len(self.sent) == len(stage.distinct)


def test_kinesis_by_leases_in_blobs(
    kinesis_url: str, kinesis_client: "KinesisClient", blobs: str, tmp_path: Path
) -> None:
    """Without it parents, sub-sequences and shard ends might not fit into blobs, or a crash lose what was between."""
    assert blobs
    with a_container() as container, closing(Stream(kinesis_url, "crossing", 4)) as stream:
        store = f"azblob://{AZURITE_ACCOUNT}/{container}?prefix=fleet/one"
        with closing(open_store(store)) as table:
            puts = Puts(kinesis_client, "crossing")
            stage = Stage(tmp_path, stream, table, store, SETTINGS, watched=puts)
            try:
                _crash_and_split(stage, puts)
            finally:
                stage.abandon()
            verdict = stage.verdict(puts.sent)
    assert (verdict.faults, verdict.produced, verdict.lost) == ((), ROWS, 0)
    assert [change for change in verdict.owner_changes if change.duplicates > change.since] == []


def _crash_and_split(stage: Stage, puts: Puts) -> None:
    stage.join("ours-1")
    stage.join("ours-2")
    assert stage.until(stage.balanced, SETTLE_SECONDS)
    stage.kill("ours-1")
    stage.split()
    assert stage.until(stage.balanced, SETTLE_SECONDS)
    assert stage.until(lambda: puts.all_seen(stage), SETTLE_SECONDS)
    stage.end()
