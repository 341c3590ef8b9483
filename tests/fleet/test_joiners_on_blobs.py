"""Workers join a group whose leases are blobs. Such rows contain nothing about the plans of their owners."""

from pathlib import Path

import pytest
from hub_stage import Feed, Group, HubStream, a_container, a_group, flights

from leasehold.balancer.rules.shares import least_moves
from leasehold_lab.standins.hubs.event_hubs import LocalHubs
from leasehold_lab.standins.services import AZURITE_ACCOUNT

pytestmark = [pytest.mark.more, pytest.mark.services, pytest.mark.xdist_group("fleets")]

PARTITIONS, ROWS = 24, 4000


def owners(group: Group) -> dict[str, str | None]:
    """Return the reader of each partition that has exactly one reader."""
    return {partition: readers[0] for partition, readers in group.readers().items() if len(readers) == 1}


def moves_since(group: Group, begin: float) -> int:
    """Return how often any partition has got a new reader since then."""
    return sum(tenure.begin > begin for tenure in group.stage.reading.tenures)


def test_workers_that_join_together_make_the_fewest_moves(hubs: LocalHubs, tmp_path: Path) -> None:
    """If the joiners balanced the group independently, they would undo each other's moves, and make 22 moves in all."""
    with a_container() as container:
        store = f"azblob://{AZURITE_ACCOUNT}/{container}?eventhub={hubs.namespace}/joined&group=$Default"
        feed = Feed(HubStream(hubs, "joined", PARTITIONS), flights(ROWS), 20)
        with a_group(feed, tmp_path, store, container) as group:
            stage = group.stage
            stage.join("ours-1")
            stage.join("ours-2")
            assert group.settle() == [12, 12]
            owners_before = owners(group)
            last_begin = max(tenure.begin for tenure in stage.reading.tenures)
            for number in range(3, 7):
                stage.join(f"ours-{number}")
            assert group.settle() == [4] * 6
            fewest_moves = least_moves(owners_before, stage.list_living_workers())
            # A process that starts only after the others have stopped waiting for joiners may cause an additional move.
            assert fewest_moves == 16 <= moves_since(group, last_begin) <= 18
            verdict = group.finish()
            assert (verdict.faults, verdict.lost) == ((), 0)
