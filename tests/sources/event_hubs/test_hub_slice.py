"""A slice of an event hub is read with the real client.

Each partition ends at the end of the slice. An empty partition ends immediately.
"""

import pytest
from hub_steps import HubSteps, collect, texts
from waiters import until

from leasehold.adapters.consumer.slices import Slice
from leasehold.balancer.model import TRIM_HORIZON, Lease, Position, at_timestamp

pytestmark = pytest.mark.services


def read(event_hub: HubSteps, time_slice: Slice, partition: str, start: Position) -> list[str]:
    """Read a partition until the slice ends, and return the bodies of its events."""
    reader = time_slice.source(event_hub.plain).open(Lease(partition), start)
    bodies: list[str] = []

    def read_to_end() -> bool:
        batch = reader.read()
        bodies.extend(texts(batch.records))
        return batch.ended

    until(read_to_end)
    reader.close()
    return bodies


def test_partition_ends_at_the_end_of_the_slice(event_hub: HubSteps) -> None:
    event_hub.send(["a", "b", "c"])
    times = [int((record.arrived or 0) * 1000) for record in collect(event_hub.reader(), 3)]
    whole_slice = Slice(TRIM_HORIZON, times[-1] + 1)
    assert read(event_hub, whole_slice, "0", TRIM_HORIZON) == ["a", "b", "c"]
    assert read(event_hub, whole_slice, "0", Position("1")) == ["c"]
    assert read(event_hub, whole_slice, "0", Position("2")) == [], "started again behind its last event"
    assert read(event_hub, whole_slice, "1", TRIM_HORIZON) == [], "an empty partition"
    later_slice = Slice(at_timestamp(times[-1] + 1), times[-1] + 2)
    assert read(event_hub, later_slice, "0", later_slice.since) == [], "nothing arrived since"
    assert read(event_hub, Slice(at_timestamp(times[0] - 1), times[0]), "0", at_timestamp(times[0] - 1)) == []
