"""The records in the events of a subscription become rows of a Spark query."""

from contextlib import closing

from event_streams import Held, Service, event, serving
from waiters import until

from leasehold.adapters.sources.kinesis.clients import create_reading_client
from leasehold.adapters.sources.kinesis.fan_out import StreamConsumer
from leasehold.adapters.sources.protocol import Batch
from leasehold.adapters.spark.kinesis.poller import ArrowFanOut
from leasehold.adapters.spark.kinesis.rows import make_columns
from leasehold.adapters.spark.rows import make_chunk
from leasehold.balancer.model import HASH_KEYS, TRIM_HORIZON, Lease

ARN = "arn:aws:kinesis:eu-west-1:000000000000:stream/orders/consumer/app:1"


def test_events_become_rows() -> None:
    with serving() as server:
        server.service = Service([[event(3), Held()]], {})
        client = create_reading_client("eu-west-1", server.url)
        consumer = StreamConsumer(client, "orders", ARN)
        with closing(ArrowFanOut(client, "orders", "s-0", TRIM_HORIZON, HASH_KEYS, consumer=consumer)) as reader:
            batches = list[Batch]()

            def read_rows() -> bool:
                batches.append(reader.read())
                return bool(batches[-1].count)

            until(read_rows, "a row")
        client.close()
    chunk = make_chunk(make_columns("orders"), Lease("s-0"), batches[-1])
    assert chunk is not None
    assert chunk.rows.select(["data", "partitionKey", "sequenceNumber"]).to_pylist() == [
        {"data": b"data", "partitionKey": "k", "sequenceNumber": "3"}
    ]
