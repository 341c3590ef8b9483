"""A slice of an event hub on the real client: each partition ends at the slice's end, an empty one immediately."""

import pytest
from hub_steps import HubSteps, collect, texts
from waiters import until

from leasehold.adapters.consumer.slices import Slice
from leasehold.balancer.model import TRIM_HORIZON, Lease, Position, at_timestamp

pytestmark = pytest.mark.services


def read(event_hub: HubSteps, cut: Slice, partition: str, start: Position) -> list[str]:
    """Return the events of a partition's part of the slice, once its reader has ended."""
    reader = cut.source(event_hub.plain).open(Lease(partition), start)
    bodies: list[str] = []

    def ended() -> bool:
        batch = reader.read()
        bodies.extend(texts(batch.records))
        return batch.ended

    until(ended)
    reader.close()
    return bodies


def test_partition_ends_at_the_end_of_the_slice(event_hub: HubSteps) -> None:
    event_hub.send(["a", "b", "c"])
    times = [int((each.arrived or 0) * 1000) for each in collect(event_hub.reader(), 3)]
    whole = Slice(TRIM_HORIZON, times[-1] + 1)
    assert read(event_hub, whole, "0", TRIM_HORIZON) == ["a", "b", "c"]
    assert read(event_hub, whole, "0", Position("1")) == ["c"]
    assert read(event_hub, whole, "0", Position("2")) == [], "started again behind its last event"
    assert read(event_hub, whole, "1", TRIM_HORIZON) == [], "an empty partition"
    later = Slice(at_timestamp(times[-1] + 1), times[-1] + 2)
    assert read(event_hub, later, "0", later.since) == [], "nothing arrived since"
    assert read(event_hub, Slice(at_timestamp(times[0] - 1), times[0]), "0", at_timestamp(times[0] - 1)) == []
