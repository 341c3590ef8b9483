"""`Delivery.stream` contains the name of the stream even if its leases do not."""

import pytest
from virtual_fleet import FaultyStore

from leasehold.adapters.consumer.handling import Delivery
from leasehold.adapters.sources.protocol import ForwardingSource
from leasehold.adapters.sources.urls import open_source
from leasehold.adapters.worker.holding import Holding
from leasehold.adapters.worker.scheduler import Unread
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.model import TRIM_HORIZON, Lease


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("kinesis://orders?region=eu-west-1", "orders"),
        ("kinesis://arn:aws:kinesis:eu-west-1:123456789012:stream/orders", "orders"),
        ("dynamodb-streams://orders?region=eu-west-1", "orders"),
        ("kinesis://orders,returns?region=eu-west-1", ""),
    ],
)
def test_batch_names_its_stream_even_if_leases_do_not(url: str, name: str) -> None:
    """The name comes from the source, even a wrapped one, unless the lease contains the name of a stream."""
    source = open_source(url)
    worker = Worker(store=FaultyStore(), source=ForwardingSource(source), me="a", consumer=Unread())
    source.close()
    identity = worker._identity  # noqa: SLF001  so that no lease has to be read
    for lease, stream in ((Lease("s-0"), name), (Lease("1:returns:2:s-0", stream="1:returns:2"), "1:returns:2")):
        holding = Holding(
            worker.store, lease, identity=identity, clock=lambda: 0.0, write_began=0.0, lease_seconds=10.0
        )
        assert Delivery((), TRIM_HORIZON, None, holding).stream == stream
