"""Which lease creations wait, how long they wait, and where a lease at LATEST begins after its wait."""

import pytest
from attrs import evolve

from leasehold.adapters.worker.annotations import latest_annotations
from leasehold.adapters.worker.pending_creations import PendingCreations
from leasehold.adapters.worker.renewing import RETRY_SECONDS
from leasehold.balancer.actions import Create
from leasehold.balancer.config import Config
from leasehold.balancer.model import LATEST, TRIM_HORIZON, Lease, Position
from leasehold.errors import SourceUnavailable

CONFIG = Config()
LATER = Lease("s-0", checkpoint=LATEST)
NEW_GROUP = Create(LATER, rule="L5")


class Tip:
    """The tip of a shard. If `position` is None, the source raises `fault`."""

    def __init__(self) -> None:
        self.position: Position | None = Position("7")
        self.fault: Exception = SourceUnavailable("the shard does not respond")

    def of(self, _lease: Lease) -> Position:
        """Return the position of the tip, or raise `fault`."""
        if self.position is None:
            raise self.fault
        return self.position


def test_creation_of_a_deleted_row_waits_unless_dropped_here() -> None:
    """If this worker was the owner and dropped the lease, no other worker can recreate the row, so there is no wait."""
    creations = PendingCreations(CONFIG, Tip().of)
    creation = Create(evolve(LATER, checkpoint=Position("5")), rule="L13")
    assert creations.creations_to_delay([creation], (), (), 0.0, map) == {creation: CONFIG.renew_seconds}
    assert creations.creations_to_delay([creation], (), ("s-0",), 0.0, map) == {}
    assert creations.creations_to_delay([creation], (), (), CONFIG.renew_seconds, map) == {}


def test_wait_starts_when_the_lease_is_missing_and_restarts_after_an_outage() -> None:
    """The wait restarts because no owner could recreate its row while the table did not respond."""
    creations = PendingCreations(CONFIG, Tip().of)
    creation = Create(evolve(LATER, checkpoint=TRIM_HORIZON), rule="L6")
    whole_wait = CONFIG.renew_seconds + CONFIG.cycle_seconds
    assert creations.creations_to_delay([creation], (), (), 0.0, map) == {creation: whole_wait}
    assert creations.creations_to_delay([creation], (), (), 1.0, map) == {creation: whole_wait - 1.0}
    assert list(creations.keys) == ["s-0"]
    creations.restart_waits()
    assert creations.creations_to_delay([creation], (), (), 2.0, map) == {creation: whole_wait}


def test_new_group_waits_at_latest_and_not_at_trim_horizon() -> None:
    """A lease at TRIM_HORIZON needs no wait, because it cannot skip any records."""
    creations = PendingCreations(CONFIG, Tip().of)
    creation_at_trim_horizon = Create(evolve(LATER, checkpoint=TRIM_HORIZON), rule="L5")
    assert creations.creations_to_delay([creation_at_trim_horizon, NEW_GROUP], (), (), 0.0, map) == {
        NEW_GROUP: CONFIG.renew_seconds + RETRY_SECONDS
    }
    assert creations.with_latest_position(creation_at_trim_horizon) == creation_at_trim_horizon


def test_latest_is_resolved_once_before_the_wait() -> None:
    """The position is determined before the wait, so that records that arrive during the wait are read."""
    tip = Tip()
    creations = PendingCreations(CONFIG, tip.of)
    creations.creations_to_delay([NEW_GROUP], (), (), 0.0, map)
    tip.position = Position("9")
    creations.creations_to_delay([NEW_GROUP], (), (), 60.0, map)
    pinned = creations.with_latest_position(NEW_GROUP)
    assert pinned != NEW_GROUP
    assert "7" in repr(pinned.lease.annotations)


@pytest.mark.parametrize("fault", [SourceUnavailable("no response"), LookupError("an error of a user's source")])
def test_shard_whose_tip_is_unknown_delays_only_its_own_lease(fault: Exception) -> None:
    """The tip is requested again, and the creation waits until the tip is known."""
    tip = Tip()
    tip.position, tip.fault = None, fault
    creations = PendingCreations(CONFIG, tip.of)
    creations.creations_to_delay([NEW_GROUP], (), (), 0.0, map)
    assert creations.creations_to_delay([NEW_GROUP], (), (), 60.0, map) == {NEW_GROUP: RETRY_SECONDS}
    assert creations.with_latest_position(NEW_GROUP) == NEW_GROUP
    tip.position = Position("9")
    assert creations.creations_to_delay([NEW_GROUP], (), (), 61.0, map) == {}


def test_lease_that_is_missing_again_starts_at_the_present_tip() -> None:
    """The earlier position is out of date, and may even belong to a stream that was recreated since."""
    tip = Tip()
    creations = PendingCreations(CONFIG, tip.of)
    creations.creations_to_delay([NEW_GROUP], (), (), 0.0, map)
    creations.creations_to_delay([], [LATER], (), 60.0, map)
    tip.position = Position("9")
    creations.creations_to_delay([NEW_GROUP], (), (), 3600.0, map)
    pinned = creations.with_latest_position(NEW_GROUP)
    assert pinned.lease.annotations == latest_annotations(Position("9"))


@pytest.mark.parametrize(
    ("rule", "initial", "known_stream", "wait"),
    [
        ("L4", TRIM_HORIZON, "orders", None),
        ("L4", LATEST, "orders", CONFIG.renew_seconds + CONFIG.cycle_seconds),
        ("L5", TRIM_HORIZON, "orders", CONFIG.renew_seconds + CONFIG.cycle_seconds),
        ("L5", LATEST, "returns", None),
        ("L4", LATEST, None, None),
    ],
)
def test_creation_at_trim_horizon_waits_only_for_owners_of_its_stream(
    rule: str, initial: Position, known_stream: str | None, wait: float | None
) -> None:
    """If the stream has leases, every living worker must have read the table first."""
    creations = PendingCreations(evolve(CONFIG, initial_position=initial), Tip().of)
    creation = Create(Lease("s-0", stream="orders", checkpoint=TRIM_HORIZON), rule=rule)
    known = () if known_stream is None else (Lease("s-9", stream=known_stream),)
    waits = creations.creations_to_delay([creation], known, (), 0.0, map)
    assert waits == ({} if wait is None else {creation: wait})


@pytest.mark.parametrize("known", [(), (Lease("s-9"),)])
def test_creation_at_latest_waits_for_a_cycle_only_if_there_are_leases(known: tuple[Lease, ...]) -> None:
    creations = PendingCreations(CONFIG, Tip().of)
    wait = CONFIG.renew_seconds + (CONFIG.cycle_seconds if known else RETRY_SECONDS)
    assert creations.creations_to_delay([NEW_GROUP], known, (), 0.0, map) == {NEW_GROUP: wait}
